"""All sessions of one keeper: `SessionService` in this process.

The manager creates sessions, knows their owners, and finds them for their owners; the session itself answers requests
to it. The manager also keeps what outlives sessions: outputs, snapshots, volumes, and the journal.

Reading needs no running box: neither files nor logs resume a session that is paused. Running something, and changing
files, does. The manager knows neither policy nor secrets: callers apply them anew at every step and every request, and
no snapshot contains them.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar

from ringfence.core import canonical
from ringfence.core.aio import in_thread, pieces_of, shielded
from ringfence.core.box import FileFact, Input, NetworkRule, Serve
from ringfence.core.box_files import BoxFiles, Changed, Entries, EntryInfo
from ringfence.core.brokering import SubstitutionDenial, SubstitutionReply, SubstitutionRequest
from ringfence.core.errors import Refused, RingfenceError, SetUpFailed, Unavailable, WorkProgress, unknown_session
from ringfence.core.model import Recheck, always
from ringfence.core.sessions import ForkProblem, Owner, SessionBackend, SessionInfo, SessionSpec, SessionView
from ringfence.sandbox.files.paths import parts_of, refusal
from ringfence.sandbox.sessions.artifacts import Artifacts
from ringfence.sandbox.sessions.capacity import Capacity, KeeperRules
from ringfence.sandbox.sessions.concurrency import DetachedTasks
from ringfence.sandbox.sessions.contexts import DEFAULT
from ringfence.sandbox.sessions.forwarding import Peer
from ringfence.sandbox.sessions.journal import SessionJournal
from ringfence.sandbox.sessions.remote_secrets import RemoteSecrets, SecretBrokers
from ringfence.sandbox.sessions.session import Session, SharedResources, check_seconds, stopped, then_close
from ringfence.sandbox.sessions.snapshots import FORK_PREFIX, Snapshot, SnapshotList, Snapshots
from ringfence.sandbox.sessions.volumes import Volume, VolumeList, Volumes

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
MakeRoute = Callable[[tuple[NetworkRule, ...], RemoteSecrets | None], Serve]
MAX_FORKS = 64
_MAX_METADATA = 64
_MAX_METADATA_CHARACTERS = 16_384
_CLEAN_UP_SECONDS = 60.0
_OUTPUT = ("workspace", "output")


class _Verb(Protocol[P, T_co]):
    def __call__(self, owner: Owner, id: str, *args: P.args, **kwargs: P.kwargs) -> T_co: ...


class _OfSession(Generic[P, T]):
    """A verb that the session answers: the manager finds it by owner and id, and calls the method with the rest."""

    def __init__(self, method: Callable[Concatenate[Session, P], Coroutine[Any, Any, T]]) -> None:
        self._method = method

    def __get__(self, manager: SessionManager, of: type[SessionManager]) -> _Verb[P, Coroutine[Any, Any, T]]:
        async def verb(owner: Owner, id: str, *args: P.args, **kwargs: P.kwargs) -> T:
            with WorkProgress():
                session = manager.get(owner, id)
            return await self._method(session, *args, **kwargs)

        return verb


class SessionManager:
    """The sessions of this process. Methods raise Refused, Unavailable and StoreError."""

    def __init__(
        self,
        backend: SessionBackend,
        folder: Path,
        rules: KeeperRules,
        serve: MakeRoute | None = None,
        peer: Peer | None = None,
    ) -> None:
        """`serve` makes a route out of network rules; None: no session has a network. `peer` returns the user that
        connects to a forwarded port; None: no port can be forwarded."""
        self._backend = backend
        self._serve = serve
        self._capacity = Capacity(rules)
        self._snapshots = Snapshots(folder / "snapshots")
        self._volumes = Volumes(folder / "volumes")
        self._brokers = SecretBrokers()
        self._journal = SessionJournal(folder)
        past = {id_: info.owner for id_, info in self._journal.past.items()}
        self._artifacts = Artifacts(folder / "artifacts", rules.retain_seconds, rules.retain_bytes, past)
        self._tasks = DetachedTasks()
        self._shared = SharedResources(
            self._journal,
            self._artifacts,
            self._snapshots,
            DetachedTasks(),
            rules.paused_seconds,
            peer,
            rules.reclaim_seconds,
        )
        self._sessions: dict[str, Session] = {}
        self._tidying: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(
        cls,
        backend: SessionBackend,
        folder: Path,
        rules: KeeperRules,
        serve: MakeRoute | None = None,
        peer: Peer | None = None,
    ) -> SessionManager:
        """Open a manager in this folder, which no other keeper holds. Sessions of a keeper that died are closed, and
        can still be asked for."""
        manager = cls(backend, folder, rules, serve, peer)
        await manager._clean_up()
        return manager

    async def _clean_up(self) -> None:
        """Clean up after a keeper that died."""
        died = {info.owner for info in self._journal.past.values() if info.why == "keeper_died"}
        for owner in died:
            try:
                await in_thread(partial(self._remove_forks, owner))
            except RingfenceError as problem:
                log.warning("a snapshot of a fork that was not finished could not be removed: %s", problem)
        self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    def _remove_forks(self, owner: Owner) -> None:
        for snapshot in self._snapshots.list(owner):
            if snapshot.name is not None and snapshot.name.startswith(FORK_PREFIX):
                self._snapshots.remove(snapshot.id, owner=owner)
        self._snapshots.sweep(owner)

    async def _tidy(self) -> None:
        while True:
            doomed = self._artifacts.doomed(self._journal.past, self._sessions)
            if doomed:
                await in_thread(partial(self._artifacts.remove, doomed))
            await asyncio.sleep(_CLEAN_UP_SECONDS)

    async def close(self) -> None:
        """End every session, and release the folder for another keeper. The caller closes the backend."""
        self._closing = True
        await self._tasks.join()
        sessions = builtins.list(self._sessions.values())
        ends = await asyncio.gather(*(session.end("killed") for session in sessions), return_exceptions=True)
        for session, end in zip(sessions, ends, strict=True):
            if isinstance(end, BaseException):
                log.error("the end of session %s: %s", session.id, end)
        await self._shared.tasks.join()
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait((self._tidying,))
        await self._journal.settle()
        self._journal.close()

    def granted(self, recheck: Recheck) -> SessionManager:
        """Itself: callers in this process pass `recheck` to the verbs that wait."""
        return self

    # ── Finding sessions ──

    @property
    def live(self) -> int:
        """How many sessions are not stopped."""
        return sum(session.state != "stopped" for session in self._sessions.values())

    def get(self, owner: Owner, id: str) -> Session:
        """The session of this id. One of another owner is answered like one that does not exist."""
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise stopped(self._past(owner, id))
        return session

    def _past(self, owner: Owner, id: str) -> SessionInfo:
        info = self._journal.past.get(id)
        if info is None or info.owner != owner:
            raise unknown_session(id)
        return info

    async def info(self, owner: Owner, id: str) -> SessionInfo:
        session = self._sessions.get(id)
        return session.info if session is not None and session.owner == owner else self._past(owner, id)

    async def list(self, owner: Owner) -> builtins.list[SessionInfo]:
        mine = (session for session in self._sessions.values() if session.owner == owner)
        return [session.info for session in mine if session.state != "stopped"]

    async def past(self, owner: Owner) -> builtins.list[SessionInfo]:
        mine = [info for info in self._journal.past.values() if info.owner == owner]
        return sorted(mine, key=lambda info: info.ended_at or "")

    async def of_tenant(self, owner: Owner) -> builtins.list[SessionInfo]:
        live = [each.info for each in self._sessions.values() if each.state != "stopped"]
        every = [*sorted(self._journal.past.values(), key=lambda info: info.ended_at or ""), *live]
        return [info for info in every if owner.tenant in ("", info.owner.tenant)]

    async def view(self, owner: Owner, id: str) -> SessionView:
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            return SessionView(self._past(owner, id))
        return session.view

    # ── Creation and end ──

    async def create(self, owner: Owner, spec: SessionSpec, recheck: Recheck = always) -> SessionInfo:
        with WorkProgress():
            if self._closing:
                raise Unavailable("closing", "the keeper of sessions is being stopped; try again in a moment")
            _check(spec)
        creating = self._tasks.start(self._create(owner, spec, recheck))
        try:
            session = await shielded(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(self._end_unclaimed)
            raise
        return session.info

    def _end_unclaimed(self, created: asyncio.Task[Session]) -> None:
        """End a session whose caller is gone: it knows no id to end it by."""
        if not created.cancelled() and created.exception() is None:
            self._tasks.start(created.result().end("closed"))

    async def _create(self, owner: Owner, spec: SessionSpec, recheck: Recheck = always) -> Session:
        snapshot = None
        id_ = canonical.new_id("box")
        with WorkProgress():
            if spec.snapshot is not None:
                reference = spec.snapshot
                snapshot = await in_thread(lambda: self._snapshots.get(reference, owner=owner))
                spec = replace(spec, snapshot=snapshot.id)
            await self._capacity.enter(id_, spec.stay.limits)
            try:
                await recheck()
            except BaseException:
                self._capacity.leave(id_)
                raise
        session = Session(id_, owner, spec, self._shared, lambda: self._remove(id_))
        self._sessions[id_] = session
        try:
            info = session.info
            self._journal.write("created", info if spec.retain != "none" else replace(info, metadata={}))
            # The disk and the box are waited for at the same time.
            written = self._tasks.start(self._journal.synced())
            with WorkProgress() as progress:
                await self._start_session(session, snapshot, progress)
            await written
        except BaseException as problem:
            # The output of code in a box is for the caller who ran it, and is not recorded.
            cause = problem.reason_code if isinstance(problem, SetUpFailed) else str(problem)
            await session.end("failed", cause)
            raise
        return session

    def _remove(self, id_: str) -> None:
        self._sessions.pop(id_, None)
        self._capacity.leave(id_)

    async def _start_session(self, session: Session, snapshot: Snapshot | None, progress: WorkProgress) -> None:
        """Make the box of a session, fill it, and mark the session as running."""
        owner = session.owner
        stay = replace(session.spec.stay, tenant=owner.tenant)
        inputs = stay.inputs
        if session.spec.volumes:
            wanted = session.spec.volumes
            folders = await in_thread(lambda: session.mounts.take(self._volumes, owner, wanted))
            stay = replace(stay, folders=folders)
        if snapshot is not None:
            # The inputs are put in after the snapshot is restored, which would overwrite them.
            has_input = snapshot.has_input or bool(inputs)
            stay = replace(stay, env={**snapshot.env, **stay.env}, inputs=(), has_input=has_input)
        # The bytes of inputs need not stay in memory as long as the session does.
        session.spec = replace(session.spec, stay=replace(stay, inputs=(), folders=()))
        if session.spec.secrets is not None:
            # Of this box alone: neither a snapshot nor a fork has the placeholders of its secrets.
            session.secrets = RemoteSecrets(session.id, owner, session.spec.secrets, self._brokers)
            stay = replace(stay, env={**session.secrets.env, **stay.env})
        try:
            box = await self._backend.open(stay, self._route(session.spec, session.secrets))
            session.attach(box)
            if snapshot is not None:
                into = box.files()
                await in_thread(lambda: self._restore(into, snapshot.id, owner, inputs))
            if session.mounts:
                await in_thread(session.mounts.load)
        except ValueError as problem:
            raise refusal("bad_spec", f"no session can be made like this: {problem}") from problem
        session.contexts.folder = snapshot.cwd if snapshot is not None else session.contexts.folder
        if stay.setup is not None:
            progress.begin()  # set-up code of a user may do anything
            await session.contexts.start(session.contexts.get(DEFAULT), box)
        session.mark_running()

    def _route(self, spec: SessionSpec, secrets: RemoteSecrets | None) -> Serve | None:
        """The route for the network rules of a session; None if it has no rules. Raises ValueError for invalid ones."""
        if not spec.network:
            return None
        if self._serve is None:
            raise Unavailable("no_network_control", "sessions have no network here")
        return self._serve(spec.network, secrets)

    def _restore(self, files: BoxFiles, snapshot: str, owner: Owner, inputs: tuple[Input, ...]) -> None:
        try:
            self._snapshots.restore(snapshot, files, owner=owner)
            if inputs:
                files.add_inputs(inputs)
        finally:
            files.close()

    async def end(self, owner: Owner, id: str) -> SessionInfo:
        """End a session. One that has ended already stays as it was."""
        if id not in self._sessions:
            return self._past(owner, id)
        session = self.get(owner, id)
        if session.state == "starting":
            session.check_live()
        return await session.end("closed")

    # ── Verbs of a session ──

    pause = _OfSession(Session.pause)
    hold_network = _OfSession(Session.hold_network)
    resume = _OfSession(Session.resume)
    extend = _OfSession(Session.extend)
    run = _OfSession(Session.run)
    interrupt = _OfSession(Session.interrupt)
    end_context = _OfSession(Session.end_context)
    command = _OfSession(Session.command)
    show = _OfSession(Session.show)
    use_broker = _OfSession(Session.use_broker)
    start = _OfSession(Session.start)
    processes = _OfSession(Session.processes)
    logs = _OfSession(Session.logs)
    follow = _OfSession(Session.follow)
    wait = _OfSession(Session.wait)
    signal = _OfSession(Session.signal)
    send = _OfSession(Session.send)
    resize = _OfSession(Session.resize)
    write = _OfSession(Session.write)
    remove = _OfSession(Session.remove)
    make_dir = _OfSession(Session.make_dir)
    rename = _OfSession(Session.rename)
    unpack = _OfSession(Session.unpack)
    snapshot = _OfSession(Session.snapshot)

    async def watch(self, owner: Owner, id: str, path: str, recursive: bool) -> AsyncGenerator[Changed, None]:
        async with aclosing(self.get(owner, id).watch(path, recursive)) as changes:
            async for change in changes:
                yield change

    # ── Files, also of sessions that have ended ──

    async def state_of(self, owner: Owner, id: str) -> tuple[int, str, bool]:
        """A step that begins meanwhile is not included: a caller that relies on this names the step, and is refused if
        it has changed."""
        session = self.get(owner, id)
        step = session.step
        mounted = [mount.at for mount in session.spec.stay.mounts]
        return (
            step,
            await self._inspect(owner, id, ".", lambda files: files.tree_hash(mounted)),
            session.runs_on,
        )

    async def read(self, owner: Owner, id: str, path: str, offset: int, length: int | None) -> bytes:
        return await self._inspect(owner, id, path, lambda files: files.read(path, offset, length))

    async def entries(self, owner: Owner, id: str, path: str, depth: int) -> Entries:
        return await self._inspect(owner, id, path, lambda files: files.list(path, depth))

    async def stat(self, owner: Owner, id: str, path: str) -> EntryInfo:
        return await self._inspect(owner, id, path, lambda files: files.stat(path))

    async def pack(self, owner: Owner, id: str, path: str) -> AsyncGenerator[bytes, None]:
        files = self._readable(owner, id, path)
        try:
            async with aclosing(pieces_of(files.pack(path))) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            files.close()

    async def copy(self, owner: Owner, id: str, path: str, to_id: str, to_path: str) -> FileFact:
        """Copy between sessions of one owner, without sending the bytes to a client."""
        with WorkProgress():
            target = self.get(owner, to_id)
            source = self._readable(owner, id, path)
        return await self._tasks.run(self._copy(source, path, target, to_path))

    async def _copy(self, source: BoxFiles, path: str, target: Session, to_path: str) -> FileFact:
        def copy(files: BoxFiles) -> FileFact:
            # The source is opened first: if it does not exist, no folders are made for the target.
            with closing(source.stream(path)) as pieces:
                with WorkProgress():
                    first = next(pieces, b"")
                return files.write(to_path, itertools.chain((first,), pieces))

        try:
            return await target.change(copy)
        finally:
            source.close()

    async def _inspect(self, owner: Owner, id: str, path: str, work: Callable[[BoxFiles], T]) -> T:
        """Read files of a session, or the output that was kept of one that has ended, in a thread. The session need not
        be running."""
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            return await in_thread(then_close(self._readable(owner, id, path), work))
        with session.in_use:
            return await session.file_work.do(lambda: then_close(self._readable(owner, id, path), work))

    def _readable(self, owner: Owner, id: str, path: str) -> BoxFiles:
        """The files of a session, or the output that was kept of one that has ended. The caller closes it."""
        session = self._sessions.get(id)
        if session is not None and session.owner == owner:
            return session.files()
        info = self._past(owner, id)
        if parts_of(path)[:2] != _OUTPUT or not self._artifacts.has(info):
            raise stopped(info, "its output was removed to make room" if self._artifacts.made_room(id) else "")
        return self._artifacts.of(id)

    # ── Secrets ──

    async def substitution_requests(self, owner: Owner, broker_id: str) -> AsyncGenerator[SubstitutionRequest, None]:
        async with aclosing(self._brokers.substitution_requests(broker_id)) as requests:
            async for request in requests:
                yield request

    async def answer_substitution(
        self, owner: Owner, broker_id: str, number: int, answer: SubstitutionReply | SubstitutionDenial
    ) -> None:
        self._brokers.answer_substitution(broker_id, number, answer)

    # ── Snapshots, forks, volumes ──

    async def snapshots(self, owner: Owner) -> SnapshotList:
        found = await in_thread(lambda: self._snapshots.list(owner))
        return [each for each in found if each.name is None or not each.name.startswith(FORK_PREFIX)]

    async def remove_snapshot(self, owner: Owner, reference: str) -> None:
        await in_thread(lambda: self._snapshots.remove(reference, owner=owner))

    async def fork(self, owner: Owner, id: str, count: int) -> builtins.list[SessionInfo | ForkProblem]:
        """Open so many sessions that start in the state of this one. Volumes that it can write to are read-only in
        them."""
        if not 0 < count <= MAX_FORKS:
            raise refusal("bad_count", f"a session can be forked into 1 to {MAX_FORKS} at a time, not {count}")
        with WorkProgress():
            session = self.get(owner, id)
        snapshot = await session.take_snapshot(f"{FORK_PREFIX}{token_hex(8)}")
        volumes = tuple(replace(mount, mode="ro") for mount in session.spec.volumes)
        spec = replace(session.spec, snapshot=snapshot.id, volumes=volumes)
        if spec.opened_by is not None:  # an agent must not prolong its time by forks of forks
            spec = replace(spec, lifetime_seconds=max(1.0, min(spec.lifetime_seconds, session.seconds_left)))
        forks = [self._tasks.start(self.create(owner, spec)) for _ in range(count)]
        try:
            await asyncio.wait(forks)
        except asyncio.CancelledError:
            for fork in forks:
                fork.add_done_callback(self._end_unclaimed_fork)
            raise
        finally:
            self._tasks.start(self._remove_fork_snapshot(snapshot, owner, forks))
        return [_result(fork) for fork in forks]

    async def _remove_fork_snapshot(
        self, snapshot: Snapshot, owner: Owner, forks: builtins.list[asyncio.Task[SessionInfo]]
    ) -> None:
        await asyncio.wait(forks)
        await in_thread(lambda: self._snapshots.remove(snapshot.id, owner=owner))

    def _end_unclaimed_fork(self, fork: asyncio.Task[SessionInfo]) -> None:
        if not fork.cancelled() and fork.exception() is None:
            info = fork.result()
            self._tasks.start(self.end(info.owner, info.id))

    async def create_volume(self, owner: Owner, name: str, max_bytes: int, mode: Literal["ro", "rw"]) -> Volume:
        return await in_thread(lambda: self._volumes.create(name, owner=owner, max_bytes=max_bytes, mode=mode))

    async def volumes(self, owner: Owner) -> VolumeList:
        return await in_thread(lambda: self._volumes.list(owner))

    async def remove_volume(self, owner: Owner, name: str) -> None:
        await in_thread(lambda: self._volumes.remove(name, owner=owner))


def _check(spec: SessionSpec) -> None:
    check_seconds("lifetime_seconds", spec.lifetime_seconds)
    if spec.idle_seconds is not None:
        check_seconds("idle_seconds", spec.idle_seconds)
    texts = [*spec.metadata, *spec.metadata.values()]
    if len(spec.metadata) > _MAX_METADATA or sum(map(len, texts)) > _MAX_METADATA_CHARACTERS:
        text = f"metadata may have {_MAX_METADATA} entries and {_MAX_METADATA_CHARACTERS} characters"
        raise refusal("bad_spec", f"{text}, not {len(spec.metadata)} and {sum(map(len, texts))}")


def _result(fork: asyncio.Task[SessionInfo]) -> SessionInfo | ForkProblem:
    """Each fork succeeds or fails by itself."""
    try:
        return fork.result()
    except (Refused, Unavailable) as problem:
        return ForkProblem(problem.reason_code, problem.message)
    except RingfenceError as problem:
        return ForkProblem("store", str(problem))
