"""What every link to a server offers, and the errors of its requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

from ringfence.core import canonical
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.upstream.pacing import MAX_TOLD

MODERN = "2026-07-28"
"""The stateless revision: it has no handshake, and an envelope in every request."""

HANDSHAKE = "2025-11-25"
"""The newest revision that begins with `initialize`."""

HANDSHAKES = ("2024-11-05", "2025-03-26", "2025-06-18", HANDSHAKE)

MAX_MESSAGE_BYTES = 8_000_000
"""The longest message that is read from a server. A longer one fails the call that it answers, and nothing else."""

MAX_MESSAGE_VALUES = 200_000
"""The most values in such a message: the time to read it depends on these, not on its bytes."""

REMOTE: Json = {"backend": "remote", "level": "none", "protections": {}}
"""The `isolation` fact of a server that runs elsewhere."""

_UNUSABLE = -32001
"""The error code that a client gets for an answer that cannot be used."""


def read_message(data: bytes) -> Any:
    """Parse the JSON that a server sent. Raises NotCanonical, also for a message so large that it would hold up all
    other calls."""
    if canonical.has_more_values(data, MAX_MESSAGE_VALUES):
        raise canonical.TooMuch(f"more than {MAX_MESSAGE_VALUES} values")
    return canonical.loads(data)


class RpcError(RingfenceError):
    """The server answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class AnswerUnusable(RpcError):
    """An answer that cannot be used, since it is too long or not strict JSON. It is known by its type: a server may
    send any error code."""

    def __init__(self, message: str) -> None:
        super().__init__(_UNUSABLE, message)


@dataclass(slots=True, eq=False)
class InFlight:
    """One request of ours in flight, and who gets the server's questions and notifications meanwhile."""

    ask: Callable[[str, Json], Awaitable[Json]]
    """The server asks something (elicitation, sampling, roots) in the course of this request."""
    tell: Callable[[str, Json], Awaitable[None]]
    """The server tells something (progress, a log line) in the course of this request."""
    client: object = None
    """Whose request it is. Messages to two requests of one client may be confused without harm."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers that the protocol adds."""
    own_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of this request; they may have credentials."""
    untaken: int = 0
    """How many notifications the client has not taken yet."""

    async def notify(self, method: str, params: Json) -> None:
        """Pass on a notification. It is dropped if the client has many to take yet: they must not pile up."""
        if self.untaken >= MAX_TOLD:
            return
        self.untaken += 1
        try:
            await self.tell(method, params)
        finally:
            self.untaken -= 1


class ServerLink(Protocol):
    """The connection to one server process or endpoint. It knows JSON-RPC, and nothing of MCP."""

    unowned: Callable[[str, Json], Awaitable[Json]] | None
    """Answers the questions of the server that belong to no request of ours."""

    @property
    def isolation(self) -> Json | None:
        """The `isolation` fact of the server that runs; None until that is known."""
        ...

    def network_meter(self) -> Callable[[], Json | None]:
        """A function that returns the network requests of the server since this call; None where they are not known."""
        ...

    def network_since_start(self) -> Json | None:
        """The network requests of the server since before its program began."""
        ...

    @property
    def ending(self) -> str:
        """Why the server ended, and what it seems to have lacked, where that is known; for callers."""
        ...

    @property
    def hint(self) -> str:
        """What it seems to have lacked, for the operator alone."""
        ...

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines of its standard error, once it has ended."""
        ...

    async def request(self, method: str, params: Json, exchange: InFlight) -> Json:
        """Send and wait. Raises RpcError, AnswerUnusable, Unavailable (nothing was sent) or OutcomeUnknown (no answer
        came back). The link decides which by what it observed, never by an error code that the server sent."""
        ...

    async def notify(self, method: str, params: Json | None, headers: Mapping[str, str] | None = None) -> None:
        """Send without waiting for an answer. Never raises."""
        ...

    async def run(self, ready: Callable[[], object], tell: Callable[[str, Json], Awaitable[None]]) -> None:
        """Run the link until it ends or is cancelled. `tell` gets the notifications that belong to no request."""
        ...
