"""One session: a box that stays, with steps that run in it one after another, files, and background processes.

A session is starting, running, paused, then stopped for good. A pause stops its timers. It ends once, for whatever
reason: volumes are saved, outputs kept, the box removed, the end recorded, in this order. Work that was begun here is
finished even when its caller is gone.

The public coroutines named as in `service` are the verbs: the manager finds the session for its owner and calls them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar, Unpack

from ringfence.core.aio import FewThreads, PausableTimer, fed, in_thread, shielded
from ringfence.core.box import BoxReport, FileFact, Limits, Stream
from ringfence.core.box_files import BoxFiles, Changed, FileChanges
from ringfence.core.errors import Refused, RingfenceError, Unavailable, WorkProgress
from ringfence.core.model import Recheck, always
from ringfence.core.record import dataclass
from ringfence.core.sessions import (
    BoxInterpreter,
    CellReport,
    CellRequest,
    Command,
    CommandRequest,
    OnShown,
    Owner,
    ProcessLogs,
    ProcessState,
    SessionInfo,
    SessionSpec,
    SessionView,
    StartedCommand,
    State,
    StayingBox,
    StepReport,
    Tell,
    Why,
    Writing,
    timestamp,
)
from ringfence.sandbox.files import guarded
from ringfence.sandbox.files.paths import refusal
from ringfence.sandbox.files.spool import Spool
from ringfence.sandbox.sessions.artifacts import Artifacts
from ringfence.sandbox.sessions.background import CAPTURED_BYTES, Processes
from ringfence.sandbox.sessions.concurrency import DetachedTasks, SharedLock, UseCounter
from ringfence.sandbox.sessions.contexts import Context, Contexts, cell_of
from ringfence.sandbox.sessions.forwarding import Peer, PortForwards
from ringfence.sandbox.sessions.journal import SessionJournal
from ringfence.sandbox.sessions.observed import Observed
from ringfence.sandbox.sessions.remote_secrets import RemoteSecrets
from ringfence.sandbox.sessions.snapshots import FORK_PREFIX, Snapshot, Snapshots
from ringfence.sandbox.sessions.volumes import VolumeMounts

log = logging.getLogger(__name__)

T = TypeVar("T")
_LAST_SIGNAL = 64
_MAX_LISTED = 10
_REASONS: dict[Why, str] = {
    "closed": "it was closed",
    "lifetime": "its lifetime was over",
    "keeper_died": "the keeper of sessions died, and its boxes with it",
    "box_died": "its box died",
    "killed": "the keeper of sessions was stopped",
    "failed": "it could not be started",
}


@dataclass(slots=True)
class SharedResources:
    """What all sessions of a manager share."""

    journal: SessionJournal
    artifacts: Artifacts
    snapshots: Snapshots
    tasks: DetachedTasks
    paused_seconds: float
    """How long a session may stay paused."""
    peer: Peer | None = None
    """Which user is at the other end of a connection to a forwarded port."""
    reclaim_seconds: float | None = None
    """How long a session is paused until its memory is given back; None: never."""


def stopped(info: SessionInfo, besides: str = "") -> Refused:
    reason = "; ".join(filter(None, (_REASONS[info.why] if info.why is not None else "it is being ended", besides)))
    return refusal("session_stopped", f"session {info.id} was stopped at {info.ended_at}: {reason}; create another")


class Session:
    """One session of an owner. Methods raise Refused, Unavailable and StoreError."""

    def __init__(
        self, id_: str, owner: Owner, spec: SessionSpec, shared: SharedResources, on_end: Callable[[], None]
    ) -> None:
        self.id = id_
        self.owner = owner
        self.spec = spec
        self.state: State = "starting"
        self.step = 0
        self.contexts = Contexts(id_)
        self.mounts = VolumeMounts()
        self.secrets: RemoteSecrets | None = None
        """Set where the box may use secrets."""
        self.in_use = UseCounter()
        self.file_work = FewThreads()
        """A box can make work on its files take long: it takes no thread from others."""
        """The session is not idle while this is entered."""
        self._shared = shared
        self._tasks = shared.tasks
        self._on_end = on_end
        self._background = Processes()
        self._ports = PortForwards(id_, spec.stay.listening, self.in_use, self._connect, shared.peer)
        self._watchers: set[FileChanges] = set()
        self._lock = SharedLock()
        """Shared while something is started or files are written; exclusive for a pause and for snapshots."""
        self._created_at = timestamp()
        self._ended_at: str | None = None
        self._why: Why | None = None
        self._lifetime = PausableTimer(spec.lifetime_seconds, lambda: self._end_soon("lifetime"))
        self._paused = PausableTimer(shared.paused_seconds, lambda: self._end_soon("lifetime"))
        self._idle: asyncio.TimerHandle | None = None
        self._reclaim: asyncio.TimerHandle | None = None
        self._given_back: int | None = None
        self._observed = Observed()
        self._next_look: asyncio.TimerHandle | None = None
        self._box: StayingBox | None = None
        self._files: BoxFiles | None = None
        self._frozen = False
        self._ending: asyncio.Task[SessionInfo] | None = None
        self._mounts_seen = guarded.NOTHING_SEEN
        """Its mounts as they were when a step was last reported, or before anything ran: what comes after that is
        reported, whatever made it."""
        self._planted: tuple[str, ...] = ()
        self._not_kept: tuple[str, ...] = ()
        """What appeared in its mounts after its last step, once it has ended."""

    # ── State ──

    @property
    def runs_on(self) -> bool:
        """Whether something in it could change its files now."""
        return self.state == "running" and self._box is not None and self._box.runs_on()

    @property
    def info(self) -> SessionInfo:
        box = self._box if self.state in ("running", "paused") else None
        if box is None:
            return self._brief
        return replace(self._brief, memory_bytes=_memory(box), given_back_bytes=self._given_back)

    @property
    def _brief(self) -> SessionInfo:
        """What is known without looking into the box."""
        spec = self.spec
        box = self._box
        expires = None
        if self.state in ("running", "paused"):
            left = (self._paused if self.state == "paused" else self._lifetime).left
            expires = timestamp(time.time() + left)
        return SessionInfo(
            id=self.id,
            owner=self.owner,
            state=self.state,
            template=spec.stay.template,
            created_at=self._created_at,
            limits=spec.stay.limits,
            step=self.step,
            contexts=self.contexts.names,
            metadata=spec.metadata,
            expires_at=expires,
            ended_at=self._ended_at,
            why=self._why,
            isolation=box.isolation if box is not None else {},
            snapshot=spec.snapshot,
            network=tuple(host for rule in spec.network for host in rule.hosts),
            rules=spec.network,
            opened_by=spec.opened_by,
            secrets=spec.secrets,
            keeps=any(mount.mode == "rw" for mount in spec.volumes),
            planted=self._planted,
            not_kept=self._not_kept,
        )

    @property
    def view(self) -> SessionView:
        return SessionView(self.info, tuple(self._observed.samples), self._observed.steps)

    @property
    def seconds_left(self) -> float:
        """Of its lifetime, not counting pauses."""
        return self._lifetime.left

    @property
    def box(self) -> StayingBox:
        self.check_live()
        assert self._box is not None
        return self._box

    def files(self) -> BoxFiles:
        """Its files once more, which the caller closes: the session may close its own at any time."""
        self.check_live()
        assert self._files is not None
        return self._files.again()

    def check_live(self) -> None:
        """Raise Refused unless it is running or paused."""
        if self.state == "stopped":
            raise stopped(self.info)
        if self.state == "starting":
            raise refusal("session_starting", f"session {self.id} is still starting; wait until it runs")

    # ── Start ──

    def attach(self, box: StayingBox) -> None:
        """Take its box. The caller fills it, before anything runs."""
        self._box = box
        self._mounts_seen = guarded.look(self.spec.stay.mounts, box.mounted)
        try:
            self._files = box.files(tuple(mount.at for mount in self.spec.stay.mounts if mount.mode == "rw"))
            self.mounts.hold(box)
        except (OSError, KeyError) as problem:
            raise Unavailable("no_box", "the box was gone before anything could be put into it") from problem

    def mark_running(self) -> None:
        """Its box is complete: start its timers."""
        box = self._box
        assert box is not None
        self.state = "running"
        self._lifetime.start()
        self._used()
        self._look()
        self._tasks.start(self._notice_end(box))

    async def _notice_end(self, box: StayingBox) -> None:
        cause = await box.ended()
        if self._ending is None:
            log.warning("the box of session %s is gone: %s", self.id, cause)
            await self.end("box_died", cause)

    async def extend(self, lifetime_seconds: float) -> SessionInfo:
        check_seconds("lifetime_seconds", lifetime_seconds)
        self.check_live()
        self._lifetime.set(lifetime_seconds)
        return self.info

    # ── What people see of it ──

    def _look(self) -> None:
        """Note what it uses, now and again later: nothing of one that is paused changes."""
        self._next_look = None
        box = self._box
        if self.state != "running" or box is None:
            return
        with suppress(OSError, KeyError):  # it is just going
            self._observed.sample(time.time(), box.cpu_ms(), box.memory())
        self._next_look = asyncio.get_running_loop().call_later(self._observed.seconds, self._look)

    def _show(self, step: int, what: str, report: BoxReport) -> None:
        if self.spec.retain != "none":
            self._observed.step(step, what, report)

    # ── In use, idle ──

    def _used(self) -> None:
        """Note that it was used just now, and start to watch for idleness."""
        self.in_use.last = time.monotonic()
        if self._idle is None and self.spec.idle_seconds is not None:
            self._check_idle_in(self.spec.idle_seconds)

    def _is_idle(self) -> bool:
        return not self.in_use.inside and not self._background.any_running

    def _check_idle_in(self, seconds: float) -> None:
        self._idle = asyncio.get_running_loop().call_later(seconds, self._check_idle)

    def _check_idle(self) -> None:
        """A timer checks, so that a step only has to note the time at which it ended."""
        self._idle = None
        idle = self.spec.idle_seconds
        if idle is None or self.state != "running":
            return
        left = self.in_use.last + idle - time.monotonic() if self._is_idle() else idle
        if left > 0:
            self._check_idle_in(left)
        else:
            self._tasks.start(self._pause_idle(idle))

    async def _pause_idle(self, idle: float) -> None:
        try:
            await self._pause(only_idle=True)
        except RingfenceError as problem:
            log.warning("session %s could not be paused: %s", self.id, problem)
        if self.state == "running" and self._idle is None:
            self._check_idle_in(idle)

    # ── Pause, resume ──

    async def pause(self) -> SessionInfo:
        """Stop everything in it, its timers included, and save volumes. If they cannot be saved, it goes on running."""
        await self._tasks.run(self._pause(only_idle=False))
        return self.info

    async def _pause(self, *, only_idle: bool) -> None:
        async with self._lock.exclusive():
            self.contexts.note_folder()
            if only_idle and (self.state != "running" or not self._is_idle()):
                return
            self.check_live()
            if self.state == "paused":
                return
            await self._freeze()
            try:
                await self._save()
            except RingfenceError as problem:
                if not only_idle:
                    await self._thaw()
                    raise
                log.warning("the volumes of session %s were not saved: %s", self.id, problem)
            if self.state == "running":
                self.state = "paused"
                self._lifetime.stop()
                self._paused.set(self._shared.paused_seconds)
                self._paused.start()
                self._give_back_later()
                self._shared.journal.note("paused", self.id, self.owner, self.step)

    def _give_back_later(self) -> None:
        """Nothing of a session that leaves nothing on the disk goes to swap space either."""
        seconds = self._shared.reclaim_seconds
        if seconds is not None and self.spec.retain != "none":
            loop = asyncio.get_running_loop()
            self._reclaim = loop.call_later(seconds, lambda: self._tasks.start(self._give_back()))

    async def _give_back(self) -> None:
        async with self._lock.exclusive():
            box = self._box
            if self.state == "paused" and box is not None:
                try:
                    self._given_back = await in_thread(box.give_back)
                except OSError as problem:
                    log.warning("session %s keeps its memory while it is paused: %s", self.id, problem)

    def _keep_memory(self) -> None:
        self._given_back = None
        if self._reclaim is not None:
            self._reclaim.cancel()
            self._reclaim = None

    async def resume(self) -> SessionInfo:
        await self._resume()
        return self.info

    async def hold_network(self) -> None:
        self.check_live()
        self.box.hold_network()

    async def _resume(self) -> None:
        async with self._lock.exclusive():
            self.check_live()
            if self.state == "paused":
                await self._thaw()
                self.state = "running"
                self._keep_memory()
                self._paused.stop()
                self._lifetime.start()
                self._used()
                if self._next_look is None:
                    self._look()
                self._shared.journal.note("resumed", self.id, self.owner, self.step)

    async def _ensure_running(self) -> None:
        """Resume a paused session, where that is allowed. It runs when this returns."""
        while self.state != "running":
            self.check_live()
            if not self.spec.auto_resume:
                text = f"session {self.id} is paused, and is not to be resumed by itself; resume it first"
                raise refusal("session_paused", text)
            await self._resume()

    async def _while_frozen(self, work: Callable[[BoxFiles], T]) -> T:
        """Work on its files, in a thread, while all its processes are stopped. Volumes are saved first."""
        async with self._lock.exclusive():
            self.contexts.note_folder()
            was_frozen = self._frozen
            files = self.files()
            try:
                await self._freeze()
                await self._save()
                return await in_thread(lambda: work(files))
            finally:
                files.close()
                if not was_frozen:
                    await self._thaw()

    async def _save(self) -> None:
        if self.mounts:
            await in_thread(self.mounts.save)

    async def _freeze(self) -> None:
        if not self._frozen:
            try:
                await self.box.pause()
            except OSError as problem:
                raise Unavailable("not_paused", f"session {self.id} cannot be paused: {problem}") from problem
            self._frozen = True

    async def _thaw(self) -> None:
        if self._frozen and self.state != "stopped":
            try:
                await self.box.resume()
            except OSError as problem:
                raise Unavailable("not_resumed", f"session {self.id} cannot be resumed: {problem}") from problem
            self._frozen = False

    # ── End ──

    def _end_soon(self, why: Why) -> None:
        self._tasks.start(self.end(why))

    async def end(self, why: Why, cause: str = "") -> SessionInfo:
        """End it; later calls wait for the same end. Raises StoreError where the end could not be recorded."""
        if self._ending is None:
            self._ending = self._tasks.start(self._end(why, cause))
        return await shielded(self._ending)

    async def _end(self, why: Why, cause: str) -> SessionInfo:
        self.state = "stopped"
        self._ended_at = timestamp()
        self._why = why
        self._lifetime.stop()
        self._paused.stop()
        self._keep_memory()
        for timer in (self._idle, self._next_look):
            if timer is not None:
                timer.cancel()
        self._idle = self._next_look = None
        trouble = [cause] if cause else []
        try:
            if self._box is not None:
                if why != "failed":
                    self._not_kept = tuple(await self._keep_files(self._box))
                    trouble += self._not_kept
                trouble += await self._remove(self._box)
                self._planted = await in_thread(lambda: self._planted_since(self._mounts_seen)[0])
        finally:
            await in_thread(self.mounts.close)
            self._ports.close()
            for watcher in list(self._watchers):
                watcher.close()
            self._on_end()
            more = {"trouble": trouble, "planted": list(self._planted)}
            self._shared.journal.write("ended", self._brief, {name: each for name, each in more.items() if each})
        await self._shared.journal.synced()
        return self.info

    async def _keep_files(self, box: StayingBox) -> list[str]:
        """Keep volumes and outputs. Returns what could not be kept."""
        with suppress(OSError, RingfenceError):
            await box.pause()  # so that what is kept is of one moment
        trouble: list[str] = []
        try:
            await self._save()
        except RingfenceError as problem:
            trouble.append(f"volumes were not saved: {problem}")
        try:
            trouble += await in_thread(self._keep_outputs)
        except RingfenceError as problem:
            trouble.append(f"outputs were not kept: {problem}")
        return trouble

    async def _remove(self, box: StayingBox) -> list[str]:
        try:
            await box.end()
        except (OSError, RingfenceError) as problem:
            return [f"the box was not removed: {problem}"]
        finally:
            if self._files is not None:
                self._files.close()
        return []

    def _keep_outputs(self) -> list[str]:
        artifacts = self._shared.artifacts
        if self.spec.retain != "output" or not artifacts.wanted or self._files is None:
            return []
        most = self.spec.stay.limits.disk_bytes
        left_out = artifacts.keep(self.id, self.owner, self._files, most)
        return [f"{path} was not kept: {why}" for path, why in list(left_out.items())[:_MAX_LISTED]]

    # ── Steps ──

    async def run(self, request: CellRequest, tell: Tell, shown: OnShown, recheck: Recheck = always) -> StepReport:
        """Run a cell when its turn has come. Cancelling interrupts it."""
        cell = cell_of(request, self.spec.stay.limits)
        with WorkProgress() as progress, self.in_use:
            self.check_live()
            await self._ensure_running()
            async with self.contexts.turn(request.context) as context:
                interpreter, fresh = await self._interpreter(context, progress, recheck)
                number = self._begin_step(request.after_step)
                progress.begin()
                before = self._mounts_seen
                whole = Spool(self.files, cell.limits.capture_bytes, tell, wanted=request.keep_whole)
                try:
                    report = await context.run(interpreter, cell, whole.tell, shown)
                finally:
                    kept = await whole.over()
        self._show(number, context.name, report.report)
        return StepReport(
            self.id, number, self._with_session_facts(report, before), context.name, fresh, self.state, kept
        )

    async def _interpreter(
        self, context: Context, progress: WorkProgress, recheck: Recheck
    ) -> tuple[BoxInterpreter, bool]:
        """The interpreter of a context, and whether it was started just now. The caller has the context's turn."""
        while True:
            await self._ensure_running()
            await recheck()
            if context.interpreter is not None and context.interpreter.alive:
                return context.interpreter, False
            async with self._lock.shared() as waited:
                if self.state == "running" and not waited:
                    if self.spec.stay.setup is not None:
                        progress.begin()  # its set-up code may do anything
                    return await self.contexts.start(context, self.box), True

    async def interrupt(self, context: str = "default") -> bool:
        self.check_live()
        return self.contexts.interrupt(context)

    async def end_context(self, context: str, remove: bool) -> bool:
        self.check_live()
        work = self.contexts.remove(context) if remove else self.contexts.restart(context)
        return await self._tasks.run(work)

    async def command(self, request: CommandRequest, tell: Tell, recheck: Recheck = always) -> StepReport:
        """Run a command to its end. Cancelling kills it."""
        limits = request.limits or self.spec.stay.limits
        whole = Spool(self.files, limits.capture_bytes, tell, wanted=request.keep_whole)
        with self.in_use:
            with WorkProgress():
                await self._ensure_running()
            before = self._mounts_seen
            running, number = await self._start_command(request, limits, whole.tell, recheck, reported=True)
            try:
                report = await running.over()
            except asyncio.CancelledError:
                running.signal(signal.SIGKILL)
                self._tasks.start(running.over())
                raise
            finally:
                kept = await whole.over()
        self._show(number, " ".join(request.argv), report)
        return StepReport(
            self.id, number, self._with_session_facts(CellReport(report), before), state=self.state, whole=kept
        )

    async def _start_command(
        self, request: CommandRequest, limits: Limits, tell: Tell, recheck: Recheck, *, reported: bool
    ) -> tuple[StartedCommand, int]:
        with WorkProgress():
            if not request.argv:
                raise refusal("bad_command", "the command has no words; give at least the name of a program")
        command = Command(request.argv, request.limits or limits, request.env, request.cwd, request.stdin, request.pty)
        command = replace(command, reported=reported)
        while True:
            with WorkProgress():
                await self._ensure_running()
                await recheck()  # not with the lock: nothing that waits for a client may hold up a pause
            async with self._lock.shared() as waited:
                if self.state == "running" and not waited:
                    with WorkProgress():
                        number = self._begin_step(request.after_step)
                    return await self.box.command(command, tell), number

    def _begin_step(self, after: int | None) -> int:
        """Nothing may be awaited from here until the step has begun."""
        if after is not None and after != self.step:
            text = f"session {self.id} is at step {self.step} by now, not {after}; look at it, and ask anew"
            raise refusal("session_changed", text)
        self.step += 1
        return self.step

    def _planted_since(self, before: guarded.Seen) -> tuple[tuple[str, ...], guarded.Seen]:
        """What was planted in its mounts since then, and how they are now."""
        if not self.spec.stay.mounts:
            return (), before
        now = guarded.look(self.spec.stay.mounts, before.held)
        return guarded.planted(before, now), now

    def _with_session_facts(self, report: CellReport, before: guarded.Seen) -> CellReport:
        """Add what the session itself saw: files planted where programs of the host look for them, and connections
        refused at its ports. A step during which we ended the box was cancelled; the box did not fail."""
        found, self._mounts_seen = self._planted_since(before)
        if found:
            report = replace(report, report=replace(report.report, planted=found))
        if refused := self._ports.refused():
            late = {**(report.report.late or {}), "refused_connections": refused}
            report = replace(report, report=replace(report.report, late=late))
        ended_by_us = self._why in ("closed", "lifetime", "killed")
        if ended_by_us and report.report.ended in ("infra", "signalled"):
            return replace(report, report=replace(report.report, ended="cancelled"), alive=False)
        return report

    # ── Ports and secrets ──

    async def show(self, port: int | str) -> int:
        self.check_live()
        return await self._ports.open(port)

    async def _connect(self, port: int) -> socket.socket:
        """A connection to a port in the box's network."""
        await self._ensure_running()
        return await self.box.connect(port)

    async def use_broker(self, broker_id: str) -> None:
        self.check_live()
        if self.secrets is not None:
            self.secrets.use_broker(broker_id)

    # ── Background processes ──

    async def start(self, request: CommandRequest, recheck: Recheck = always) -> ProcessState:
        """Start a command in the background. By default it may run as long as the session exists."""
        listeners = set[Tell]()
        limits = self.spec.stay.limits
        limits = replace(
            limits,
            wall_seconds=max(limits.wall_seconds, self._lifetime.left),
            capture_bytes=min(limits.capture_bytes, CAPTURED_BYTES),
        )

        def tell(stream: Stream, data: bytes) -> None:
            for listener in list(listeners):
                listener(stream, data)

        with self.in_use:
            with WorkProgress():
                self._background.check_room()
            before = self._mounts_seen
            running, _ = await self._start_command(request, limits, tell, recheck, reported=False)
            over = self._tasks.start(self._background_report(running, before))
            return self._background.add(request.argv, running, over, listeners, self._used)

    async def _background_report(self, running: StartedCommand, before: guarded.Seen) -> BoxReport:
        """Nobody may ask for it, so the next step reports what was planted as well."""
        report = await running.over()
        found, _ = self._planted_since(before)
        return replace(report, planted=found) if found else report

    async def processes(self) -> list[ProcessState]:
        return self._background.infos()

    async def logs(self, process: int, offset_stdout: int, offset_stderr: int) -> ProcessLogs:
        return self._background.get(process).logs(offset_stdout, offset_stderr)

    async def follow(self, process: int, offsets: tuple[int, int], tell: Tell) -> ProcessState:
        found = self._background.get(process)
        await self._ensure_running()
        return await found.follow(offsets, tell)

    async def wait(self, process: int, timeout: float | None) -> ProcessState:
        found = self._background.get(process)
        if not found.is_over:
            await self._ensure_running()
        return await found.wait(timeout)

    async def signal(self, process: int, number: int) -> None:
        with WorkProgress():
            if not 0 < number <= _LAST_SIGNAL:
                raise refusal("bad_signal", f"{number} is no signal; 15 asks it to end, 9 ends it")
            found = self._background.get(process)
            await self._ensure_running()
        if not found.is_over:
            found.running.signal(number)

    async def send(self, process: int, data: bytes, eof: bool = False) -> None:
        with WorkProgress():
            found = self._background.get(process)
            await self._ensure_running()
        await found.send(data, eof=eof)

    async def resize(self, process: int, columns: int, rows: int) -> None:
        if not (0 < columns < 65_536 and 0 < rows < 65_536):
            raise refusal("bad_size", f"a terminal cannot have {columns} columns and {rows} rows")
        found = self._background.get(process)
        await self._ensure_running()
        if not found.is_over and not found.running.resize(columns, rows):
            raise refusal("bad_size", f"command {process} has no terminal: start it with pty=(columns, rows)")

    # ── Files ──

    async def write(self, path: str, data: bytes, **how: Unpack[Writing]) -> FileFact:
        return await self.change(lambda files: files.write(path, data, **how))

    async def remove(self, path: str) -> None:
        await self.change(lambda files: files.remove(path))

    async def make_dir(self, path: str) -> bool:
        return await self.change(lambda files: files.make_dir(path))

    async def rename(self, old: str, new: str) -> None:
        await self.change(lambda files: files.rename(old, new))

    async def change(self, work: Callable[[BoxFiles], T]) -> T:
        """Change files, in a thread. Work that was begun is finished even when its caller is gone."""
        return await self._tasks.run(self._change(work))

    async def _change(self, work: Callable[[BoxFiles], T]) -> T:
        with self.in_use:
            with WorkProgress():
                await self._ensure_running()
            async with self._lock.shared():
                return await self.file_work.do(lambda: self._change_of(work))

    def _change_of(self, work: Callable[[BoxFiles], T]) -> Callable[[], T]:
        with WorkProgress():
            return then_close(self.files(), work)

    async def unpack(self, path: str, stream: AsyncIterator[bytes]) -> list[FileFact]:
        """Cancelling ends it, and leaves nothing half-written."""
        limits = self.spec.stay.limits
        with self.in_use:
            with WorkProgress():
                await self._ensure_running()
            async with self._lock.shared():
                with WorkProgress():
                    files = self.files()
                try:
                    facts = await fed(
                        stream,
                        lambda pieces: files.unpack(path, pieces, max_bytes=limits.disk_bytes, max_files=limits.inodes),
                    )
                finally:
                    files.close()
        return list(facts)

    async def watch(self, path: str, recursive: bool) -> AsyncGenerator[Changed, None]:
        """Yield changes until the session ends or the caller stops. A session that is only watched is idle."""
        files = self.files()
        try:
            watcher = await in_thread(lambda: files.watch(path, recursive=recursive))
        finally:
            files.close()
        self._watchers.add(watcher)
        try:
            yield Changed("begun", path)
            async for change in watcher:
                yield change
        finally:
            self._watchers.discard(watcher)
            watcher.close()

    # ── Snapshots ──

    async def snapshot(self, name: str | None = None, for_agents: bool = False) -> Snapshot:
        """`for_agents`: an agent takes it, of a session that was handed to it."""
        if name is not None and name.startswith(FORK_PREFIX):
            text = f"{name!r} cannot be the name of a snapshot; do not begin it with {FORK_PREFIX!r}"
            raise refusal("bad_name", text)
        return await self.take_snapshot(name, for_agents=for_agents)

    async def take_snapshot(self, name: str | None, *, for_agents: bool = False) -> Snapshot:
        if self.spec.retain == "none":
            text = f"session {self.id} is to leave nothing on the disk, so it has no snapshots and forks"
            raise refusal("retain_none", f"{text}; create one with retain 'output'")
        spec = self.spec

        def take(files: BoxFiles) -> Snapshot:
            return self._shared.snapshots.take(
                files,
                owner=self.owner,
                env=spec.stay.env,
                cwd=self.contexts.folder,
                name=name,
                template=spec.stay.template,
                packages=spec.packages,
                for_agents=for_agents or spec.opened_by is not None,
            )

        return await self._tasks.run(self._while_frozen(take))


def then_close(files: BoxFiles, work: Callable[[BoxFiles], T]) -> Callable[[], T]:
    """Work for a thread, with files whose descriptors are closed when it is done."""

    def act() -> T:
        try:
            return work(files)
        finally:
            files.close()

    return act


def check_seconds(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise refusal("bad_spec", f"{name} must be a positive number of seconds, not {seconds}")


def _memory(box: StayingBox) -> int | None:
    with suppress(OSError, KeyError):
        return box.memory()
    return None
