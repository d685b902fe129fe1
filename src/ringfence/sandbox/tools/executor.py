"""Carries out a grant of one of our own tools: makes a box, runs its program and reports what was seen of it; or has
the keeper of sessions do something with a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ringfence.core import canonical
from ringfence.core.box import BACKENDS, LEVELS, NO_OUTSIDE, ImageRoot, NetworkRule, Outside
from ringfence.core.brokering import SessionSecrets
from ringfence.core.errors import Refused, RingfenceError, Unavailable, WorkProgress, beginning, unknown_session
from ringfence.core.model import Answer, Call, Contract, Grant, Json, Status
from ringfence.core.ports import (
    Access,
    Backend,
    ChoosingBackend,
    Images,
    InstalledPackages,
    PackageInstaller,
    Route,
    Router,
    SecretBroker,
)
from ringfence.core.sessions import Owner, SessionInfo
from ringfence.sandbox.tools import files, request, resources, session_broker, sessions
from ringfence.sandbox.tools.definition import Changes
from ringfence.sandbox.tools.request import FromSnapshot, Provision
from ringfence.sandbox.tools.run import in_fresh_box
from ringfence.sandbox.tools.screening import OutputScreen
from ringfence.sandbox.tools.task import Task, owner_of
from ringfence.sandbox.tools.toolkit import KIT, makes_box, needs_session

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService
    from ringfence.sandbox.sessions.snapshots import Snapshot
    from ringfence.sandbox.tools.definition import Handler, Tool

_MAX_KNOWN = 10_000


class Executor:
    """Our own tools, over one backend, and over the keeper of its sessions."""

    def __init__(
        self, backend: Backend, provision: Provision, keeper: Callable[[], SessionService] | None = None
    ) -> None:
        """`keeper` finds the keeper of sessions, when it is needed; None where there are no sessions."""
        self.backend = backend
        self.provision = provision
        self.screens: Callable[[], OutputScreen] = OutputScreen
        """Makes a screen for each call, through which its output passes."""
        self.router: Callable[[], Router] | None = None
        """Makes routes out of boxes, when one is wanted; None: there are none."""
        self.broker: Callable[[], SecretBroker] | None = None
        """Has the secrets that sessions use; None: there are none."""
        self.installer: Callable[[], PackageInstaller] | None = None
        """Installs packages for boxes, when some are wanted; None: nothing can be installed."""
        self.images: Callable[[], Images] | None = None
        """Finds images that are to be roots of boxes; None: there are none."""
        self.others: Callable[[], ChoosingBackend] | None = None
        """Makes boxes where a contract asks for a stronger one, or a caller for another backend; None: nothing does."""
        self.networks: Mapping[str, str] | None = None
        """The network that the contract of each capability names now; None: contracts do not change here."""
        self.handed_over: frozenset[str] = frozenset()
        """Sessions of programs that their user handed to the agents of this process."""
        self._keeper = keeper
        self._other: ChoosingBackend | None = None
        self._session_executor: SessionExecutor | None = None

    @property
    def keeper(self) -> Callable[[], SessionService] | None:
        return self._keeper

    def check(self, call: Call, contract: Contract) -> None:
        """Refuse what could not run as asked. Raises Refused, Unavailable."""
        if self._keeper is None and needs_session(call, contract):
            raise Unavailable(
                "no_session", f"{self.provision.no_sessions}; leave session out, and each call has its own box"
            )
        if contract.commands is not None and "session" in call.arguments:
            text = f"{contract.name} names the programs that may run, and the box of a session has all of them: leave"
            raise Refused(
                Status.VALIDATION_FAILURE, "commands_in_session", f"{text} session out, and it has its own box"
            )
        if makes_box(call, contract):
            self._check_box(call, contract)
            self._check_backend(call, contract)
        wide = call.attached is not None
        request.check(call, KIT[contract.tool].choices(wide=wide) if call.kind == "tool" else ())
        if request.template(call, contract) not in self.provision.templates:
            known = ", ".join(self.provision.templates)
            raise Refused(
                Status.VALIDATION_FAILURE, "unknown_template", f"there is no template of that name; there are: {known}"
            )

    def _check_box(self, call: Call, contract: Contract) -> None:
        if (image := request.image(call, self.provision)) is not None:
            self._images().check(image)
        access = request.access(call, contract, self.provision)
        if access is not None:
            self._router_for(access).check(access)
            if access.installs is not None:
                self._installer().index(access.installs)
        packages = request.packages(call, contract, self.provision)
        if packages:
            self._installer().check(packages)
            # An agent gets what the operator's patterns name.
            asked = () if call.attached is not None else tuple(call.arguments.get("packages") or ())
            self._installer().check(asked, self.provision.installable)

    # ── Which backend ──

    def _by_other(self, call: Call, contract: Contract) -> bool:
        """Whether its box is made by another backend than the configuration's."""
        asked = call.arguments.get("backend") or self.backend.name
        return asked != self.backend.name or _stronger(contract.isolation, self.provision.level)

    def _check_backend(self, call: Call, contract: Contract) -> None:
        if self._by_other(call, contract):
            try:
                self._others().check(contract.isolation, call.arguments.get("backend"))
            except Unavailable as exc:
                if not _stronger(contract.isolation, "process"):
                    raise
                text = f"{contract.name} demands isolation {contract.isolation}: {exc.message}"
                raise Unavailable(exc.reason_code, text) from None

    def _others(self) -> ChoosingBackend:
        if self._other is None:
            if self.others is None:
                text = f"there is no backend here but {self.backend.name}, which gives {self.provision.level}"
                raise Unavailable("no_isolation", text)
            self._other = self.others()
        return self._other

    def _backend(self, call: Call, contract: Contract) -> Backend:
        return self._others() if self._by_other(call, contract) else self.backend

    def isolation(self, call: Call, contract: Contract) -> Json:
        """The `isolation` fact of a box that is yet to be made."""
        asked = call.arguments.get("backend") or self.backend.name
        if asked != self.backend.name:
            demanded = contract.isolation if _stronger(contract.isolation, "process") else "process"
            return {"backend": asked, "level": BACKENDS.get(asked, demanded)}
        if _stronger(contract.isolation, self.provision.level):
            return {"backend": "auto", "level": contract.isolation}
        return {"backend": self.backend.name, "level": self.provision.level}

    def environment(self, call: Call, contract: Contract) -> Json:
        """What a box for this call has around its program, as far as two such boxes can be compared."""
        from ringfence.sandbox.tools.surroundings import surroundings  # noqa: PLC0415 - few calls are kept in full

        name = request.template(call, contract)
        ready = self.provision.templates.get(name, ())
        return surroundings(name, ready, request.packages(call, contract, self.provision), self.backend.name)

    async def run(self, grant: Grant) -> Answer:
        """Carry out a grant, once. Raises Unavailable where nothing was run."""
        screen = self.screens()
        try:
            if needs_session(grant.call, grant.contract):
                with WorkProgress():
                    sessions = self._sessions()
                answer = await sessions.run(grant, self.isolation(grant.call, grant.contract), screen)
            else:
                answer = await self._run_in_box(grant, screen)
        finally:
            screen.finish()
        if grant.call.kind == "tool" and grant.call.attached is None:
            _keep_promised(answer, KIT[grant.contract.tool])
        return replace(answer, redactions=screen.rules, secrets=screen.secrets) if screen.rules else answer

    async def _run_in_box(self, grant: Grant, screen: OutputScreen) -> Answer:
        with beginning("the box"):
            installed = await self._installed(grant)
            image = await self._image(grant)
            route = await self._route_of(grant)
            wanted = request.spec(grant.call, grant.contract, self.provision.limits, route, image)
            wanted = wanted if installed is None else replace(wanted, packages=(installed.folder,))
            if grant.contract.commands is not None:
                wanted = replace(wanted, programs=request.programs(grant))
        backend = self._backend(grant.call, grant.contract)
        return await in_fresh_box(backend, grant, wanted, installed, screen, self.isolation(grant.call, grant.contract))

    # ── What a box that is made has ──

    async def _route_of(self, grant: Grant) -> Route:
        access = request.access(grant.call, grant.contract, self.provision)
        return Route() if access is None else await self._router_for(access).route(access)

    async def _installed(self, grant: Grant, kept: FromSnapshot | None = None) -> InstalledPackages | None:
        """Raises Refused, Unavailable. What a snapshot names must be allowed now, as if it were asked for."""
        packages = request.packages(grant.call, grant.contract, self.provision, kept or FromSnapshot())
        if kept is not None and kept.packages and grant.call.attached is None:
            self._installer().check(kept.packages, self.provision.installable)
        return await self._installer().install(packages) if packages else None

    async def _image(self, grant: Grant) -> ImageRoot | None:
        name = request.image(grant.call, self.provision)
        return None if name is None else await self._images().find(name)

    def _images(self) -> Images:
        if self.images is None:
            raise Unavailable("no_image", "boxes have no images here")
        return self.images()

    def _installer(self) -> PackageInstaller:
        if self.installer is None:
            raise Unavailable("no_packages", "nothing can be installed here")
        return self.installer()

    def _router_for(self, access: Access) -> Router:
        if self.router is not None:
            return self.router()
        if access.secrets:
            raise Unavailable("no_secret", "there are no secrets here")
        raise Unavailable("no_network_control", "boxes have no network here")

    # ── Sessions ──

    def _sessions(self) -> SessionExecutor:
        """Made when the first session is needed: most boxes are for one run."""
        if self._session_executor is None:
            if self._keeper is None:
                raise Unavailable("no_session", self.provision.no_sessions)
            self._session_executor = SessionExecutor(
                self._keeper(),
                self.provision,
                self._route_of,
                self._installed,
                self._image,
                self._broker,
                self._check_network,
                lambda id_: id_ in self.handed_over,
            )
        return self._session_executor

    def _check_network(self, reach: _Reach) -> None:
        """A session keeps the network that it was opened with. Nothing runs in it any more once that is more than it
        would get now. Raises Refused."""
        if reach.rules and self.router is not None:
            given = None
            if reach.opened_by is not None and self.networks is not None:
                given = self.networks.get(reach.opened_by, "denied")
            self.router().check_open(reach.rules, given)

    def _broker(self) -> SecretBroker:
        """The broker of the configuration that is in force now."""
        if self.broker is None:
            raise Unavailable("no_secret", "a session needs a secret, and there are none here")
        return self.broker()

    async def state_of(self, call: Call) -> tuple[int, str, bool] | None:
        """What an approval is also bound to: the session's last step, and the digest of its files."""
        if self._keeper is None or not named_sessions(call):
            return None
        return await self._sessions().state_of(call)

    async def snapshot_of(self, call: Call, contract: Contract) -> str | None:
        """The digest of the snapshot that a call opens a session from. Raises Refused, Unavailable."""
        if "snapshot" not in call.arguments or contract.tool != sessions.open_session.name:
            return None
        found = await self._sessions().snapshot(call)
        return None if found is None else found.id

    async def outside(self, call: Call) -> Outside:
        """What the box of this call's session has. Raises Refused, Unavailable."""
        if self._keeper is None or not named_sessions(call):
            return NO_OUTSIDE
        return await self._sessions().outside(call)

    async def hold_tightened(self, before: Sequence[Executor]) -> None:
        """After a reload: let nothing more out of sessions that these executors knew and whose network was tightened.
        Others are held when a call names them."""
        used = [each._session_executor for each in before if each._session_executor is not None]
        known = {session: reach for each in used for session, reach in each.known.items() if reach.rules}
        if known:
            await self._sessions().hold_tightened(known)

    async def close(self) -> None:
        """End every box. Sessions stay: they belong to their keeper."""
        await self.backend.close()
        if self._other is not None and self._other is not self.backend:
            await self._other.close()
        if self._session_executor is not None:
            await self._session_executor.close()


def _stronger(level: str, than: str) -> bool:
    return LEVELS.index(level) > LEVELS.index(than)


def _keep_promised(answer: Answer, tool: Tool) -> None:
    """An agent's structured content has what the tool's schema names, and no more."""
    if answer.result is not None and "structuredContent" in answer.result:
        told = answer.result["structuredContent"]
        answer.result["structuredContent"] = {key: value for key, value in told.items() if key in tool.gives}


# ── Sessions ──────────────────────────────────────────────────────────────────────────────────────


class _Reach(NamedTuple):
    """What a session has of the outside, for as long as it exists."""

    network: tuple[str, ...]
    rules: tuple[NetworkRule, ...]
    opened_by: str | None
    secrets: SessionSecrets | None
    outside: Outside
    owner: Owner
    level: str
    """What its box is, of LEVELS."""


class SessionExecutor:
    """Tools of sessions, over one keeper."""

    def __init__(
        self,
        keeper: SessionService,
        provision: Provision,
        route: Callable[[Grant], Awaitable[Route]],
        installed: Callable[[Grant, FromSnapshot], Awaitable[InstalledPackages | None]],
        image: Callable[[Grant], Awaitable[ImageRoot | None]],
        broker: Callable[[], SecretBroker],
        check_network: Callable[[_Reach], None],
        is_handed_over: Callable[[str], bool],
    ) -> None:
        """`route` makes the route out of a session that a grant opens, `installed` installs its packages, `image` finds
        its root, `broker` has the secrets that sessions use, and `check_network` refuses a session whose network was
        tightened. What a program opened is for agents only where it `is_handed_over`."""
        self._keeper = keeper
        self._provision = provision
        self._route_of = route
        self._installed = installed
        self._image = image
        self._session_broker = session_broker.SessionBroker(keeper, broker)
        self._check_network = check_network
        self._is_handed_over = is_handed_over
        self._known: dict[str, _Reach] = {}

    async def run(self, grant: Grant, isolation: Json, screen: OutputScreen) -> Answer:
        """Carry out a grant, once. Raises Refused, and Unavailable where nothing was done."""
        with WorkProgress():
            task, handler = await self._ready(grant, isolation, screen)
            await grant.recheck()  # packages may have been installed for it
        return await handler(task)

    async def _ready(self, grant: Grant, isolation: Json, screen: OutputScreen) -> tuple[Task, Handler]:
        """All that comes before the first thing that may change something, and what then carries it out."""
        keeper = self._keeper.granted(grant.recheck)
        task = Task(grant, keeper, self._provision, isolation, screen, is_handed_over=self._is_handed_over)
        for session in named_sessions(grant.call):
            try:
                await self._check_caller(grant.call, session)
            except Refused:
                if grant.call.kind != "resource":
                    raise
                raise files.unknown_resource(str(task.given["uri"])) from None
        if grant.call.kind == "resource":
            return task, _in_time(files.read_resource)
        if grant.call.kind == "listing":
            return task, _in_time(files.list_resources)
        tool = KIT[grant.contract.tool]
        if tool is sessions.open_session:
            kept = await self._from_snapshot(task)
            installed = await self._installed(grant, kept)
            task = replace(task, image=await self._image(grant), installed=installed, kept=kept, learn=self._learn)
            task = replace(task, route=await self._route_of(grant))
        else:
            await self._check_reach(task, tool)
        return task, tool.handler if tool.own_clock else _in_time(tool.handler)

    async def state_of(self, call: Call) -> tuple[int, str, bool]:
        """The state of the session that a call names, and with it that of the one that it copies to."""
        first, *others = named_sessions(call)
        await self._check_caller(call, first)
        step, files, runs_on = await self._keeper.state_of(owner_of(call.principal), first)
        for session in others:
            await self._check_caller(call, session)
            other = await self._keeper.state_of(owner_of(call.principal), session)
            files = canonical.digest([files, session, *other[:2]])
            runs_on = runs_on or other[2]
        return step, files, runs_on

    async def snapshot(self, call: Call, agreed: str | None = None) -> Snapshot | None:
        """The snapshot that a call names, or the one that a person `agreed` to. None: one that only the keeper knows.
        What a program kept of a session of its own is no agent's. Raises Refused."""
        reference = agreed or call.arguments["snapshot"]
        those = await self._keeper.snapshots(owner_of(call.principal))
        found = next((each for each in those if reference in (each.id, each.name)), None)
        if call.attached is None and (found is None or not found.for_agents):
            from ringfence.sandbox.sessions.snapshots import unknown_snapshot  # noqa: PLC0415 - most calls have none

            raise unknown_snapshot(call.arguments["snapshot"])
        return found

    async def _from_snapshot(self, task: Task) -> FromSnapshot:
        """What the snapshot brings along that a session is opened from; an unknown one is refused by the keeper."""
        if task.given.get("snapshot") is None:
            return FromSnapshot()
        found = await self.snapshot(task.call, task.grant.snapshot)
        if found is None:
            return FromSnapshot()
        return FromSnapshot(found.template, () if "packages" in task.given else found.packages, found.id)

    async def outside(self, call: Call) -> Outside:
        """What the boxes of the sessions that a call names have of the outside, together."""
        reached = [await self._reach(owner_of(call.principal), session) for session in named_sessions(call)]
        return Outside(
            sends=any(each.outside.sends for each in reached),
            writes=any(each.outside.writes for each in reached),
            sets_up=any(each.outside.sets_up for each in reached),
            opened_by=reached[0].opened_by,
        )

    async def _check_caller(self, call: Call, session: str) -> None:
        """What a program of the user's opened has what the user gave it, which no contract gives to an agent."""
        if call.attached is not None or self._is_handed_over(session):
            return
        if (await self._reach(owner_of(call.principal), session)).opened_by is None:
            raise unknown_session(session)

    async def _reach(self, owner: Owner, session: str) -> _Reach:
        if session not in self._known:
            self._learn(await self._keeper.info(owner, session))
        return self._known[session]

    def _learn(self, info: SessionInfo) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        writes = info.keeps or any(mount.get("mode") == "rw" for mount in info.isolation.get("mounts") or ())
        sets_up = (info.isolation.get("template") or {}).get("setup") == "user"
        outside = Outside(bool(info.network), writes, sets_up)
        level = str(info.isolation.get("level", "process"))
        self._known[info.id] = _Reach(
            info.network, info.rules, info.opened_by, info.secrets, outside, info.owner, level
        )

    async def _check_reach(self, task: Task, tool: Tool) -> None:
        """Before anything runs in a session, decide anew which network and secrets it may use. Raises Refused,
        Unavailable."""
        forks = tool is sessions.fork_session
        runs = tool.changes is Changes.CODE or tool is sessions.resume_session
        if not forks and (not runs or "session" not in task.given):
            return
        reach = await self._reach(task.owner, task.session)
        demanded = task.grant.contract.isolation
        if _stronger(demanded, reach.level):
            text = (
                f"{task.grant.contract.name} demands isolation {demanded}, and session {task.session} has {reach.level}"
            )
            raise Unavailable("no_isolation", f"{text}: open one by a capability that demands it, too")
        try:
            self._check_network(reach)
        except Refused:
            await self._keeper.hold_network(task.owner, task.session)
            raise
        if reach.secrets is not None:
            apply = self._session_broker.ready if forks else self._session_broker.offer
            await apply(task.owner, task.session, reach.network, reach.secrets)

    async def hold_tightened(self, known: Mapping[str, _Reach]) -> None:
        """Let nothing more out of those sessions whose network was tightened, whatever still runs in them."""
        for session, reach in known.items():
            try:
                self._check_network(reach)
            except Refused:
                with suppress(RingfenceError):  # it has ended
                    await self._keeper.hold_network(reach.owner, session)

    @property
    def known(self) -> Mapping[str, _Reach]:
        return dict(self._known)

    async def close(self) -> None:
        """Disconnect from the keeper; sessions stay."""
        await self._session_broker.close()
        await self._keeper.close()


def named_sessions(call: Call) -> tuple[str, ...]:
    """The sessions that a call is about."""
    if call.kind == "resource":
        found = resources.located(str(call.arguments.get("uri")))
        return () if found is None else (found[0],)
    given = (call.session_named, call.arguments.get("to_session") if call.kind == "tool" else None)
    return tuple(dict.fromkeys(each for each in given if isinstance(each, str)))


def _in_time(handler: Handler) -> Handler:
    """The same within the contract's time; a caller in this process has a clock of its own."""

    async def timed(task: Task) -> Answer:
        if task.wide:
            return await handler(task)
        contract = task.grant.contract
        try:
            async with asyncio.timeout(contract.timeout_seconds):
                return await handler(task)
        except TimeoutError:
            text = f"{contract.name} was given up after {contract.timeout_seconds:g} s; the session may still be at it"
            raise Refused(Status.TIMEOUT, "timeout", text) from None

    return timed
