"""MCP servers in boxes: each in its own, or several in one that they share by name.

A box sees the system's programs, what the server's command needs (`resolve`), its declared mounts, and a workspace of
its own; that of a server out of an image sees the image instead of the system. It has a network and secrets only where
the server's entry names them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence.core.aio import shielded
from ringfence.core.box import Limits, Mount, within
from ringfence.core.errors import Refused, StoreError, Unavailable
from ringfence.core.model import Json, Principal, ServerSpec
from ringfence.core.ports import Access, Launched, Route, Router
from ringfence.core.record import dataclass
from ringfence.core.sessions import Command, CommandRequest, Owner, SessionBackend, StayingBox, StaySpec
from ringfence.sandbox.files import guarded
from ringfence.sandbox.files.blobstore import owner_folder, private_folder
from ringfence.sandbox.servers.boxed_server import BoxedServer, SessionServer
from ringfence.sandbox.servers.provenance import Hidden
from ringfence.sandbox.servers.resolve import ResolvedCommand, resolve, resolve_in_image
from ringfence.sandbox.servers.volumes import claim

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService

_ALL_ITS_LIFE = 10**8
_NO_LIMIT = 2**46
OF_ITS_OWN = "own"

_Leave = Callable[[], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What every server is started with."""

    limits: Limits
    environment: Mapping[str, str]
    """Our environment variables, used only to look for programs; none of them enters a box."""
    private: Callable[[str], str | None]
    """Returns which credentials a folder of the host holds, if any."""
    router: Callable[[], Router] | None = None
    servers: Mapping[str, ServerSpec] = field(default_factory=dict)
    """All servers, to know which share a box."""
    keeper: Callable[[], SessionService] | None = None
    """Finds the keeper of sessions, for servers that run in a session."""
    places: tuple[str, ...] = ()
    """What servers may reach besides their networks, as HOST[:PORT]."""
    apart: tuple[str, ...] = ()
    """Folders and files of ours that no box sees: what lies around them is shown without them."""
    volumes: Path | None = None
    """Where servers' volumes lie, in our own state, which no mount can name."""
    configuration: Path | None = None
    """Whose volumes the servers get; None: a person named the volume on the command line."""


@dataclass(slots=True)
class _Shared:
    """A box that several servers share."""

    opening: asyncio.Task[tuple[StayingBox, _Leave]]
    users: int = 0


class BoxLauncher:
    """Implements `ports.Launcher`."""

    def __init__(self, backend: SessionBackend, settings: LaunchSettings) -> None:
        self._backend = backend
        self.settings = settings
        self._shared: dict[tuple[str, str], _Shared] = {}

    def isolation(self, spec: ServerSpec) -> Json:
        return {"backend": "process", "level": "process"}

    async def launch(self, spec: ServerSpec, principal: Principal) -> Launched:
        """Raises Unavailable."""
        _, in_session, session = spec.placement.partition("session:")
        return await (self._in_session(spec, principal, session) if in_session else self.start(spec, principal))

    async def _in_session(self, spec: ServerSpec, principal: Principal, session: str) -> SessionServer:
        if self.settings.keeper is None:
            raise Unavailable("no_session", f"server {spec.name} runs in sessions, and there are none here")
        found = self._resolved_on_host(spec)
        server = SessionServer(self.settings.keeper(), Owner(principal.tenant, principal.agent), session)
        env = {"PATH": found.path, **spec.env}
        await server.start(CommandRequest(found.argv, None, env, stdin=None))
        return server

    def needed(self, spec: ServerSpec) -> tuple[Mount, ...]:
        """The mounts that a box must have for this server to run in it. Raises Unavailable."""
        found = self._resolved_on_host(spec)
        return (*(Mount(tree, tree) for tree in sorted(found.trees)), *found.mounts)

    def prepared(self, spec: ServerSpec) -> tuple[StaySpec, Command]:
        """The box of its own that it would get, and its command. Raises Unavailable."""
        found = self._resolved(spec)
        return self._stay([spec], [found]), self._command(spec, found)

    async def start(self, spec: ServerSpec, principal: Principal, stdin: int | None = None) -> BoxedServer:
        """Start a server. `stdin`: the reading end of a pipe for this server alone, which stays the caller's. Raises
        Unavailable."""
        spec = self._with_volumes(spec, principal)
        found = self._resolved(spec)
        if spec.placement == OF_ITS_OWN:
            box, leave = await self._own(spec, found, principal)
        else:
            box, leave = await self._joined(spec, principal)
        server = BoxedServer(spec.name, box, leave)
        try:
            await server.start(replace(self._command(spec, found), stdin=stdin))
        except BaseException:
            await server.stop()
            raise
        return server

    # ── The command and its box ──

    def _with_volumes(self, spec: ServerSpec, who: Principal) -> ServerSpec:
        """The server with its volumes mounted: folders that this agent's instances of it share, and no other agent's
        or configuration's. Raises Unavailable."""
        if not spec.volumes:
            return spec
        if self.settings.volumes is None:
            raise Unavailable("server_start", f"server {spec.name} has volumes, and there is no state to keep them in")
        folder = owner_folder(self.settings.volumes, (who.tenant, who.agent))
        try:
            private_folder(self.settings.volumes)
            private_folder(folder)
            for volume in spec.volumes:
                if self.settings.configuration is not None:
                    claim(self.settings.volumes, volume.name, self.settings.configuration)
                (folder / volume.name).mkdir(mode=0o700, exist_ok=True)
        except (StoreError, OSError) as exc:
            raise Unavailable("server_start", f"the volumes of server {spec.name} cannot be made: {exc}") from None
        real = os.path.realpath(folder)
        mounts = (Mount(f"{real}/{volume.name}", volume.at, "rw") for volume in spec.volumes)
        return replace(spec, mounts=(*mounts, *spec.mounts), volumes=())

    def _resolved(self, spec: ServerSpec) -> ResolvedCommand:
        given = self.settings
        root = _root(spec)
        try:
            if root is not None:
                return resolve_in_image(spec.command, spec.cwd, root, spec.mounts)
            hidden = Hidden(given.private, given.apart)
            return resolve(spec.command, given.environment, spec.cwd or "/", hidden, spec.mounts)
        except ValueError as exc:
            raise Unavailable("server_start", f"server {spec.name} cannot be started: {exc}") from None

    def _resolved_on_host(self, spec: ServerSpec) -> ResolvedCommand:
        if _root(spec) is not None:
            raise Unavailable("server_start", f"server {spec.name} is an image: it needs a box with a root of its own")
        return self._resolved(spec)

    def _command(self, spec: ServerSpec, found: ResolvedCommand) -> Command:
        limits = Limits(wall_seconds=_ALL_ITS_LIFE, output_bytes=_NO_LIMIT, capture_bytes=0)
        cwd = spec.cwd or "/workspace"
        seen = found.cwd == cwd or any(within(cwd, mount.at) for mount in spec.mounts)
        return Command(found.argv, limits, {"PATH": found.path, **spec.env}, cwd if seen else "/workspace")

    def _stay(self, specs: Sequence[ServerSpec], founds: Sequence[ResolvedCommand]) -> StaySpec:
        trees = {tree for found in founds for tree in found.trees}
        mounts: dict[str, Mount] = {}
        for mount in (*(each for found in founds for each in found.mounts), *(m for s in specs for m in s.mounts)):
            mounts[mount.at] = mount
        # As mounts, so that code which only its owner may read can be read. A mount of the operator's at the same
        # place, read-only or not, takes precedence.
        own = [mount.at for spec in specs for mount in spec.mounts]
        ours = os.path.realpath(sys.base_prefix)  # which every box sees
        mounts |= {tree: Mount(tree, tree) for tree in trees if tree not in own and not within(tree, ours)}
        declared = {
            at: m for at, m in mounts.items() if at in own or not any(at != o and within(at, o) for o in mounts)
        }
        limits = [self._limits(spec) for spec in specs]
        roots = {_root(spec) for spec in specs}
        if len(roots) > 1:
            names = ", ".join(spec.name for spec in specs)
            raise Unavailable("server_start", f"servers in one box have one root, and these are not one image: {names}")
        root = roots.pop()
        return StaySpec(
            limits=Limits(
                memory_bytes=max(each.memory_bytes for each in limits),
                disk_bytes=max(each.disk_bytes for each in limits),
                cpu_cores=max(each.cpu_cores for each in limits),
                processes=max(each.processes for each in limits),
            ),
            mounts=tuple(declared[at] for at in sorted(declared)),
            root=None if root is None else Path(root),
        )

    def _limits(self, spec: ServerSpec) -> Limits:
        usual = self.settings.limits
        given: dict[str, Any] = dict(spec.limits)
        return replace(usual, **given) if given else usual

    # ── Opening boxes ──

    async def _own(self, spec: ServerSpec, found: ResolvedCommand, who: Principal) -> tuple[StayingBox, _Leave]:
        return await self._open(spec, self._stay([spec], [found]), who)

    async def _joined(self, spec: ServerSpec, who: Principal) -> tuple[StayingBox, _Leave]:
        """The box of that name for this principal. Servers in it can see what the others do."""
        key = (spec.placement, who.key)
        shared = self._shared.get(key)
        if shared is None:
            opening = asyncio.get_running_loop().create_task(self._open_for_all(spec, who))
            shared = self._shared[key] = _Shared(opening)
        shared.users += 1

        async def leave() -> None:
            shared.users -= 1
            if shared.users == 0:
                if self._shared.get(key) is shared:
                    del self._shared[key]
                _, end = await shared.opening
                await end()

        try:
            box, _ = await shielded(shared.opening)
        except BaseException:
            shared.users -= 1
            if self._shared.get(key) is shared:
                del self._shared[key]
            raise
        return box, leave

    async def _open_for_all(self, spec: ServerSpec, who: Principal) -> tuple[StayingBox, _Leave]:
        named = [each for each in self.settings.servers.values() if each.placement == spec.placement] or [spec]
        group = [self._with_volumes(each, who) for each in named]
        box, end = await self._open(spec, self._stay(group, [self._resolved(each) for each in group]), who)
        key = (spec.placement, who.key)

        async def watch() -> None:
            await box.ended()
            self._shared.pop(key, None)

        self._watching = asyncio.get_running_loop().create_task(watch())
        return box, end

    async def _open(self, spec: ServerSpec, stay: StaySpec, who: Principal) -> tuple[StayingBox, _Leave]:
        """Open a box. Returns it and the function that ends it."""
        route = await self._route_of(spec, who)
        stay = replace(stay, env={**stay.env, **route.env}, tenant=who.tenant)
        try:
            box = await self._backend.open(stay, route.serve)
        except ValueError as exc:
            raise Unavailable("server_start", f"server {spec.name} cannot have such a box: {exc}") from None
        before = guarded.look(stay.mounts, box.mounted)

        async def end() -> None:
            try:
                await box.end()
            finally:
                _tell(spec, guarded.planted_since(stay.mounts, before))

        return box, end

    async def _route_of(self, spec: ServerSpec, who: Principal) -> Route:
        router = self.settings.router
        places = self.settings.places
        if spec.network == "denied" and not spec.secrets and not places:
            return Route()
        if router is None:
            raise Unavailable("no_network_control", f"server {spec.name} needs a way out, and there is none here")
        access = Access(network=spec.network, places=places, secrets=spec.secrets, tenant=who.tenant, server=spec.name)
        try:
            return await router().route(access)
        except Refused as exc:
            raise Unavailable(exc.reason_code, f"server {spec.name}: {exc.message}") from None


def _root(spec: ServerSpec) -> str | None:
    """The tree of the server's image, if it has one."""
    return spec.packages.folder if spec.packages is not None and spec.packages.kind == "image" else None


def _tell(spec: ServerSpec, planted: Sequence[str]) -> None:
    """Log it: a server acts between calls, too, so the facts of a call could not report it."""
    if planted:
        whose = spec.name if spec.placement == OF_ITS_OWN else f"{spec.name} and others in {spec.placement}"
        log.warning(
            "server %s: since its box began, there is new, or changed, what programs of this host go by or run: %s;"
            " look at it before you open the folder",
            whose,
            ", ".join(map(repr, planted)),
        )
