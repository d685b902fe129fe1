"""Servers as a configuration wants them: in boxes.

The gateway starts its servers by this, `ringfence wrap` one server without a gateway, and `ringfence init` looks at a
server before there is a configuration. So the gateway's side (`upstream`) is loaded only by the functions that need it,
and what makes boxes only where there can be boxes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from ringfence.compose.backends import make_staying_backend, makers
from ringfence.compose.runs import UNATTENDED, provision
from ringfence.config import paths
from ringfence.config.folders import kept_apart, touches_credentials
from ringfence.config.settings import Config, SandboxSettings
from ringfence.core.box import BoxReport, Limits, Mount, within
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.core.model import Definition, Json, Principal, ServerSpec
from ringfence.core.ports import Access, Router, UpstreamRequest
from ringfence.core.record import dataclass
from ringfence.core.sessions import SessionBackend
from ringfence.sandbox.servers.startup_diagnosis import MissingGrant, diagnose
from ringfence.sandbox.tools.executor import Executor

if TYPE_CHECKING:
    from ringfence.sandbox.servers.boxed_server import BoxedServer
    from ringfence.sandbox.servers.launcher import BoxLauncher, LaunchSettings
    from ringfence.upstream.pool import ConnectionPool, ServerAccess

_LOOKING = Principal("init")
_LONGEST_CALL = 60.0
_EVERYWHERE = ("0.0.0.0/0", "::/0")


def access(settings: Config, executor: Executor | str, router: Callable[[], Router]) -> ServerAccess:
    """How servers are started and reached: in boxes of our own tools' backend, unless `executor` is why there are none.

    The executor's sessions see what the servers need that live in them.
    """
    from ringfence.upstream.host_process import HostLauncher  # noqa: PLC0415 - for a gateway alone
    from ringfence.upstream.pool import ServerAccess  # noqa: PLC0415 - for a gateway alone

    boxes: BoxLauncher | Unavailable
    if isinstance(executor, str):
        boxes = Unavailable("no_backend", executor)
    else:
        try:
            own = kept_apart(settings)
            data = volumes_folder(settings.gateway.state)
            more = {"keeper": executor.keeper, "apart": own, "volumes": data, "configuration": settings.path}
            boxes = _launcher(executor, settings.servers, router, **more)
        except Unavailable as exc:
            boxes = Unavailable(exc.reason_code, exc.message)
        else:
            executor.provision = replace(executor.provision, mounts=_session_mounts(boxes, settings))
    return ServerAccess(
        boxes, HostLauncher(paths.process_environment(), router), partial(_credentials, router), address_of
    )


async def address_of(url: str) -> Sequence[str]:
    """The operator who wrote the URL has named its address; services that hand out credentials stay refused."""
    from ringfence.egress.dial import check_url  # noqa: PLC0415 - for remote servers alone

    return await check_url(url, _EVERYWHERE)


async def _credentials(router: Callable[[], Router], spec: ServerSpec, who: Principal) -> Mapping[str, str]:
    """What every request to a remote server carries, as it is now. Raises Unavailable."""
    access = Access(secrets=spec.secrets, tenant=who.tenant, server=spec.name, url=spec.url)
    try:
        return await router().headers(access)
    except Refused as exc:
        raise Unavailable(exc.reason_code, f"server {spec.name}: {exc.message}") from None


def _session_mounts(boxes: BoxLauncher, settings: Config) -> tuple[Mount, ...]:
    """What sessions must see for the servers that live in them; one that is missing is reported when it is started."""
    seen: dict[str, Mount] = {}
    for spec in settings.servers.values():
        if spec.placement == "session":
            with suppress(Unavailable):
                seen |= {mount.at: mount for mount in boxes.needed(spec)}
    own = os.path.realpath(sys.base_prefix)  # which every box sees
    roots = (own, *(at for at, mount in seen.items() if mount.host == at))
    return tuple(
        mount for at, mount in sorted(seen.items()) if at != own and not any(at != r and within(at, r) for r in roots)
    )


def volumes_folder(state: Path) -> Path:
    """Where servers' volumes lie."""
    return state / "servers"


def boxes_of(executor: Executor, places: tuple[str, ...], state: Path) -> BoxLauncher:
    """The launcher of a server that no configuration names. Raises Unavailable."""
    return _launcher(executor, {}, executor.router, places=places, volumes=volumes_folder(state))


def _launcher(
    executor: Executor, servers: Mapping[str, ServerSpec], router: Callable[[], Router] | None, **more: Any
) -> BoxLauncher:
    """The launcher of these servers; `more` overrides its settings. Raises Unavailable."""
    if not isinstance(executor.backend, SessionBackend):
        raise Unavailable("no_backend", makers().no_stay(executor.backend.name))
    from ringfence.sandbox.servers.launcher import BoxLauncher  # noqa: PLC0415 - loads only where there are boxes

    settings = launch_settings(executor.provision.limits, servers, router)
    return BoxLauncher(executor.backend, replace(settings, **more))


def launch_settings(
    limits: Limits, servers: Mapping[str, ServerSpec], router: Callable[[], Router] | None
) -> LaunchSettings:
    from ringfence.sandbox.servers.launcher import LaunchSettings  # noqa: PLC0415 - loads only where there are boxes

    return LaunchSettings(limits, paths.process_environment(), touches_credentials, router, servers)


# ── A look at one server ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ServerInspection:
    """What a server showed when it was started in a box, once."""

    definitions: tuple[Definition, ...] = ()
    problem: str | None = None
    """Why it could not be looked at."""
    wanted: tuple[MissingGrant, ...] = ()
    """What it seems to have lacked."""
    said: str = ""
    """The last of what it wrote to stderr."""
    failed: tuple[str, ...] = ()
    """What it said of calls that it was to try and that failed."""


class _Watched:
    """Implements `ports.Launcher`, and remembers what was started."""

    def __init__(self, boxes: BoxLauncher) -> None:
        self._boxes = boxes
        self.started: BoxedServer | None = None

    def isolation(self, spec: ServerSpec) -> Json:
        return self._boxes.isolation(spec)

    async def launch(self, spec: ServerSpec, principal: Principal) -> BoxedServer:
        self.started = await self._boxes.start(spec, principal)
        return self.started


async def inspect_server(
    spec: ServerSpec,
    settings: SandboxSettings,
    router: Callable[[], Router] | None = None,
    calls: Sequence[tuple[str, Json]] = (),
    state: Path | None = None,
    configuration: Path | None = None,
) -> ServerInspection:
    """Start it in a box of its own, ask for its tools and prompts, try these calls, and end it. Nothing is recorded."""
    from ringfence.compose.packages import verify  # noqa: PLC0415 - it loads all of packages
    from ringfence.upstream.pool import ConnectionPool, ServerAccess  # noqa: PLC0415 - it loads the clients of servers

    try:
        await anyio.to_thread.run_sync(verify, spec, configuration)
        backend = make_staying_backend(settings, state)
    except Unavailable as exc:
        return ServerInspection(problem=exc.message)

    from ringfence.sandbox.servers.launcher import BoxLauncher  # noqa: PLC0415 - loads only where there are boxes

    given = launch_settings(provision(settings).limits, {}, router)
    data = None if state is None else volumes_folder(state)
    given = replace(given, volumes=data, configuration=configuration)
    watched = _Watched(BoxLauncher(backend, given))
    pool = ConnectionPool({spec.name: spec}, ServerAccess(watched), _no_consent, _nothing)
    found: list[Definition] = []
    failed: list[str] = []
    problem: str | None = None
    try:
        async with pool.running():
            try:
                found = await pool.definitions(spec.name, _LOOKING)
                for name, arguments in calls:
                    failed += await _tried(pool, spec.name, name, arguments)
            except Unavailable as exc:
                problem = exc.message
    finally:
        await backend.close()
    started = watched.started
    if started is None:
        return ServerInspection(tuple(found), problem, failed=tuple(failed))
    if problem is not None and started.hint:
        problem = f"{problem}; {started.hint}"  # whoever looks is the operator
    wanted = dict.fromkeys((*started.lacked(), *diagnose(BoxReport("exited"), "\n".join(failed))))
    return ServerInspection(tuple(found), problem, tuple(wanted), started.last_stderr, tuple(failed))


async def _tried(pool: ConnectionPool, server: str, name: str, arguments: Json) -> list[str]:
    """What it says of a call that failed."""
    params: Json = {"name": name, "arguments": arguments}
    request = UpstreamRequest(server, _LOOKING, "tools/call", params, UNATTENDED, _LONGEST_CALL)
    try:
        result = await pool.request(request)
    except (Refused, OutcomeUnknown) as exc:
        return [f"{name}: {exc.message}"]
    if result.get("isError") is not True:
        return []
    return [f"{name}: {block.get('text', '')}" for block in result.get("content", []) if isinstance(block, dict)]


async def _no_consent(request: UpstreamRequest, method: str, params: Json) -> bool:
    return False


async def _nothing(server: str, principal: Principal, method: str, params: Json) -> None:
    return None
