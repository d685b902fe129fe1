"""Servers as a configuration wants them: in boxes. A part of the composition root, for the gateway, and for whoever
wants to look at a server before there is one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import anyio

from ringfence import config
from ringfence.backends import make_backend
from ringfence.box import BoxReport, Mount
from ringfence.config.settings import Config, SandboxSettings
from ringfence.egress.dial import check_url
from ringfence.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.model import Definition, Json, Principal, ServerSpec
from ringfence.ports import Access, Outward, UpstreamRequest
from ringfence.runs import NOBODY, provision
from ringfence.sandbox.executor import Executor
from ringfence.sandbox.finding import within
from ringfence.sandbox.wants import Want, wants
from ringfence.sessions import Opening
from ringfence.storehouse import verify
from ringfence.upstream.bare import Bare
from ringfence.upstream.pool import Pool

if TYPE_CHECKING:
    from ringfence.sandbox.launched import BoxedServer
    from ringfence.sandbox.servers import Boxes

_LOOKING = Principal("init")
_LONGEST_CALL = 60.0
_EVERYWHERE = ("0.0.0.0/0", "::/0")


def provide(pool: Pool, settings: Config, executor: Executor | str, outward: Callable[[], Outward]) -> None:
    """What servers are started in from now on: boxes of the backend of our own tools, or why there are none."""
    pool.bare = Bare(config.process_environment(), outward)
    pool.credentials, pool.check = partial(_credentials, outward), _address
    if isinstance(executor, str):
        pool.boxes = Unavailable("no_backend", executor)
    elif not isinstance(executor.backend, Opening):
        pool.boxes = Unavailable("no_backend", f"boxes of backend {executor.backend.name} do not stay")
    else:
        launching: Any = import_module("ringfence.launching")  # which can be loaded only where there are boxes
        given = launching.surroundings(executor.provision.limits, settings.servers, outward)
        pool.boxes = boxes = launching.Boxes(executor.backend, replace(given, keeper=executor.keeper))
        executor.provision = replace(executor.provision, mounts=_of_lodgers(boxes, settings))


async def _address(url: str) -> Sequence[str]:
    """Whoever wrote the URL down has named where it leads, but for services that hand out credentials."""
    return await check_url(url, _EVERYWHERE)


async def _credentials(outward: Callable[[], Outward], spec: ServerSpec, who: Principal) -> Mapping[str, str]:
    """What every request to a remote server carries, as it is now. Raises Unavailable."""
    access = Access(secrets=spec.secrets, tenant=who.tenant, server=spec.name, url=spec.url)
    try:
        return await outward().headers(access)
    except Refused as exc:
        raise Unavailable(exc.reason_code, f"server {spec.name}: {exc.message}") from None


def _of_lodgers(boxes: Boxes, settings: Config) -> tuple[Mount, ...]:
    """What sessions must see for the servers that live in them; one that is not there is told of when it is started."""
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


# ── A look at one server ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Look:
    """What a server showed when it was started in a box, once."""

    definitions: tuple[Definition, ...] = ()
    problem: str | None = None
    """Why it could not be looked at."""
    wanted: tuple[Want, ...] = ()
    """What it seems to have lacked."""
    said: str = ""
    """The last of what it wrote to stderr."""
    failed: tuple[str, ...] = ()
    """What it said of calls that it was to try and that failed."""


class _Watched:
    """Implements `ports.Launcher`, and remembers what was started."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self.started: BoxedServer | None = None

    def isolation(self, spec: ServerSpec) -> Json:
        return self._boxes.isolation(spec)

    async def launch(self, spec: ServerSpec, principal: Principal) -> BoxedServer:
        self.started = await self._boxes.start(spec, principal)
        return self.started


async def look_at(
    spec: ServerSpec,
    settings: SandboxSettings,
    outward: Callable[[], Outward] | None = None,
    calls: Sequence[tuple[str, Json]] = (),
) -> Look:
    """Start it in a box of its own, ask for its tools and prompts, try these calls, and end it. Nothing is recorded."""
    try:
        await anyio.to_thread.run_sync(verify, spec)
        backend = make_backend(settings)
    except Unavailable as exc:
        return Look(problem=exc.message)
    launching: Any = import_module("ringfence.launching")
    watched = _Watched(launching.Boxes(backend, launching.surroundings(provision(settings).limits, {}, outward)))
    pool = Pool({spec.name: spec}, {}, _no_consent, _nothing)
    pool.boxes = watched
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
        return Look(tuple(found), problem, failed=tuple(failed))
    wanted = dict.fromkeys((*started.lacked(), *wants(BoxReport("exited"), "\n".join(failed))))
    return Look(tuple(found), problem, tuple(wanted), started.said, tuple(failed))


async def _tried(pool: Pool, server: str, name: str, arguments: Json) -> list[str]:
    """What it says of a call that failed."""
    params: Json = {"name": name, "arguments": arguments}
    request = UpstreamRequest(server, _LOOKING, "tools/call", params, NOBODY, _LONGEST_CALL)
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
