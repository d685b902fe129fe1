"""Who asks a server: under which names connections for a request may be held, and requests that no client waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping

from ringfence import canonical
from ringfence.model import Definition, Json, Principal, ServerSpec
from ringfence.ports import UpstreamRequest
from ringfence.upstream.held import MAX_PER_SERVER, Held
from ringfence.upstream.link import RpcError


def owners(request: UpstreamRequest, capabilities: Json) -> Iterator[str]:
    """Under which names a connection for this request may be held: one, or as many as are in use at once."""
    if not capabilities:
        yield ""
        return
    asked = canonical.digest(capabilities)
    if request.session is not None:
        yield f"{request.session} {asked}"
        return
    for number in range(MAX_PER_SERVER + 1):
        yield f"-{number} {asked}"


def needs_its_own(request: UpstreamRequest, held: Held, capabilities: Json) -> bool:
    """A process of the handshake era does not say for which call it asks, so calls without a session take turns."""
    silent = held.connection.spec.url is None and not held.connection.modern
    return silent and bool(capabilities) and request.session is None


class Silent:
    """The channel of a request that no client is waiting for."""

    @property
    def capabilities(self) -> Json:
        return {}

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        raise RpcError(-32601, "nobody is there to be asked")

    async def notify(self, method: str, params: Json) -> None:
        return None


def asking_for(server: str, principal: Principal, method: str = "", params: Json | None = None) -> UpstreamRequest:
    return UpstreamRequest(server, principal, method, params or {}, Silent(), 30.0)


async def unnoticed(server: str, definitions: list[Definition]) -> None:
    """Stands where somebody may want to know that lists changed."""


async def unrecorded(spec: ServerSpec, principal: Principal, start: Callable[[], Awaitable[None]]) -> None:
    """Stands where somebody may want to record that a server is started."""
    await start()
