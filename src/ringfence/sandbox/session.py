"""One session: a box that is lived in step by step, with files that come and go and commands in the background."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar

from ringfence.box import FileFact, Limits, Stream
from ringfence.sandbox.background import CAPTURED_BYTES, Processes
from ringfence.sandbox.beneath import refusal
from ringfence.sandbox.contexts import Contexts, OnShown
from ringfence.sandbox.doors import Doors
from ringfence.sandbox.lenders import Borrower
from ringfence.sandbox.life import Keep, Life
from ringfence.sandbox.process import guarded
from ringfence.sandbox.threads import fed, in_thread
from ringfence.sandbox.watching import Changed, Watcher
from ringfence.sandbox.wholes import Whole
from ringfence.sandbox.workspace import Workspace
from ringfence.sessions import (
    CellReport,
    CellRequest,
    Command,
    Commanding,
    CommandRequest,
    Owner,
    ProcessInfo,
    SessionSpec,
    StepReport,
    Tell,
)

T = TypeVar("T")
_LAST_SIGNAL = 64


class Session:
    """Methods raise Refused, Unavailable and StoreError."""

    def __init__(self, id_: str, owner: Owner, spec: SessionSpec, keep: Keep) -> None:
        self.life = life = Life(id_, owner, spec, keep)
        self.processes = Processes(life.tasks)
        self.contexts = Contexts(life)
        self.doors = Doors(life, keep.peer)
        self.borrower: Borrower | None = None
        """Of one whose box may use secrets."""
        self._watchers: set[Watcher] = set()
        life.is_busy = lambda: self.processes.any_running
        life.before_pause = self.contexts.note_folder
        life.on_end.append(self._close_watchers)

    # ── Steps ──

    async def run(self, request: CellRequest, tell: Tell, shown: OnShown) -> StepReport:
        """A cell, when its turn has come. Cancelling interrupts it."""
        life, cell = self.life, self.contexts.cell(request)
        life.check_there()
        context = self.contexts.get(request.context)
        with life.in_use:
            await life.awake()
            async with context.turn:
                interpreter, fresh = await self.contexts.interpreter(context)
                number, before = self._begin_step(request.after_step), self._seen()
                whole = Whole(life.workspace, cell.limits.capture_bytes, tell, wanted=request.keep_whole)
                try:
                    report = await context.run(interpreter, cell, whole.tell, shown)
                finally:
                    kept = whole.over()
        return StepReport(life.id, number, self._told(report, before), context.name, fresh, life.state, kept)

    async def command(self, request: CommandRequest, tell: Tell) -> StepReport:
        """A command, to its end. Cancelling kills it."""
        life = self.life
        limits = request.limits or life.spec.stay.limits
        whole = Whole(life.workspace, limits.capture_bytes, tell, wanted=request.keep_whole)
        with life.in_use:
            await life.awake()
            before = self._seen()
            running, number = await self._start(request, limits, whole.tell)
            try:
                report = await running.over()
            except asyncio.CancelledError:
                running.signal(signal.SIGKILL)
                life.tasks.begin(running.over())
                raise
            finally:
                kept = whole.over()
        return StepReport(life.id, number, self._told(CellReport(report), before), state=life.state, whole=kept)

    async def start(self, request: CommandRequest) -> ProcessInfo:
        """A command that goes on when this returns; unless told otherwise, as long as the session may live."""
        life, listeners = self.life, set[Tell]()
        limits = life.spec.stay.limits
        limits = replace(
            limits,
            wall_seconds=max(limits.wall_seconds, life.lifetime_left),
            capture_bytes=min(limits.capture_bytes, CAPTURED_BYTES),
        )

        def tell(stream: Stream, data: bytes) -> None:
            for listener in list(listeners):
                listener(stream, data)

        with life.in_use:
            self.processes.check_room()
            running, _ = await self._start(request, limits, tell)
            return self.processes.add(request.argv, running, listeners, life.used)

    async def _start(self, request: CommandRequest, limits: Limits, tell: Tell) -> tuple[Commanding, int]:
        if not request.argv:
            raise refusal("bad_command", "the command has no words; give at least the name of a program")
        life = self.life
        command = Command(request.argv, request.limits or limits, request.env, request.cwd, request.stdin, request.pty)
        while True:
            await life.awake()
            async with life.gate.together():
                if life.state == "running":
                    number = self._begin_step(request.after_step)
                    return await life.box.command(command, tell), number

    def _begin_step(self, after: int | None) -> int:
        """Nothing may be awaited from here until the step has begun."""
        life = self.life
        if after is not None and after != life.step:
            text = f"session {life.id} is at step {life.step} by now, not {after}; look at it, and ask anew"
            raise refusal("session_changed", text)
        life.step += 1
        return life.step

    def _seen(self) -> guarded.Seen:
        return guarded.look(self.life.spec.stay.mounts, self.life.box.held)

    def _told(self, report: CellReport, before: guarded.Seen) -> CellReport:
        """With what came to be where the host's programs look, and who was turned away at its ports. Where we took the
        box away under a step, it was not the box that failed."""
        if found := guarded.planted(self.life.spec.stay.mounts, before):
            report = replace(report, report=replace(report.report, planted=found))
        if refused := self.doors.refused():
            late = {**(report.report.late or {}), "refused_connections": refused}
            report = replace(report, report=replace(report.report, late=late))
        if self.life.was_taken_away and report.report.ended in ("infra", "signalled"):
            return replace(report, report=replace(report.report, ended="cancelled"), alive=False)
        return report

    # ── Commands in the background ──

    async def signal(self, process: int, number: int) -> None:
        if not 0 < number <= _LAST_SIGNAL:
            raise refusal("bad_signal", f"{number} is no signal; 15 asks it to end, 9 ends it")
        found = self.processes.get(process)
        await self.life.awake()
        if not found.is_over:
            found.running.signal(number)

    async def send(self, process: int, data: bytes, *, eof: bool) -> None:
        found = self.processes.get(process)
        await self.life.awake()
        await found.send(data, eof=eof)

    async def resize(self, process: int, columns: int, rows: int) -> None:
        if not (0 < columns < 65_536 and 0 < rows < 65_536):
            raise refusal("bad_size", f"a terminal cannot have {columns} columns and {rows} rows")
        found = self.processes.get(process)
        await self.life.awake()
        if not found.is_over:
            found.running.resize(columns, rows)

    # ── Files ──

    async def change(self, work: Callable[[Workspace], T]) -> T:
        """Change files, in a thread. What was begun is done, if its caller waits for it or not."""
        return await self.life.tasks.carry_out(self._change(work))

    async def _change(self, work: Callable[[Workspace], T]) -> T:
        life = self.life
        with life.in_use:
            await life.awake()
            async with life.gate.together():
                return await in_thread(then_close(life.workspace(), work))

    async def unpack(self, path: str, stream: AsyncIterator[bytes]) -> tuple[FileFact, ...]:
        """Cancelling ends it, and leaves nothing half-written."""
        life, limits = self.life, self.life.spec.stay.limits
        with life.in_use:
            await life.awake()
            async with life.gate.together():
                workspace = life.workspace()
                try:
                    return await fed(
                        stream,
                        lambda pieces: workspace.unpack(
                            path, pieces, max_bytes=limits.disk_bytes, max_files=limits.inodes
                        ),
                    )
                finally:
                    os.close(workspace.descriptor)

    async def watch(self, path: str, *, recursive: bool) -> AsyncGenerator[Changed, None]:
        """Until the session ends, or nobody asks any more. A session that is only watched is idle."""
        workspace = self.life.workspace()
        try:
            watcher = workspace.watch(path, recursive=recursive)
        finally:
            os.close(workspace.descriptor)
        self._watchers.add(watcher)
        try:
            yield Changed("begun", path)
            async for change in watcher:
                yield change
        finally:
            self._watchers.discard(watcher)
            watcher.close()

    def _close_watchers(self) -> None:
        for watcher in list(self._watchers):
            watcher.close()


def then_close(workspace: Workspace, work: Callable[[Workspace], T]) -> Callable[[], T]:
    """Work for a thread, with a workspace whose descriptor is closed when it is done."""

    def act() -> T:
        try:
            return work(workspace)
        finally:
            os.close(workspace.descriptor)

    return act
