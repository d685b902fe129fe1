"""What runs in a box that stays: an interpreter that takes cell after cell, and commands."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from ringfence.box import BoxReport, Captured, Limit, Program
from ringfence.box import Ended as Ending
from ringfence.errors import Unavailable
from ringfence.sandbox.claims import Claims
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.denials import MAX_DENIALS
from ringfence.sandbox.process.late import MainThread
from ringfence.sandbox.process.member import Ended, Member
from ringfence.sandbox.process.outputs import Outputs
from ringfence.sandbox.process.run import INLINE, again, memory_file, new_pipe, python_words
from ringfence.sandbox.process.step import Place, Step
from ringfence.sandbox.process.watch import descendants
from ringfence.sandbox.waiting import shielded
from ringfence.sessions import Cell, CellReport, Command, Failure, Shown, Tell

GRACE_SECONDS = 1.0
"""For a cell that was interrupted; then its interpreter is killed."""
_WORTH_A_LOOK = 2.0
"""Milliseconds; a shorter cell fills no memory worth telling of."""
_KILL_SECONDS = 10.0
_LOOKS_AT_ONCE = 40
"""At a main thread that is about to rest; from then on it is looked at less and less often."""
_LOOK_SECONDS = 0.02

OnShown = Callable[[Shown | Failure], None]
How = tuple[Ending, int | None, int | None, Limit | None]
"""Why it ended, its status or the signal, and for which limit."""


class Home(Place, Protocol):
    """The box, as far as what runs in it needs to know."""

    box: Box
    isolation: dict[str, Any]
    env: Mapping[str, str]
    interpreter_path: str | None
    outputs: Outputs

    def out_of_memory(self) -> bool: ...

    def met(self) -> Limit | None: ...

    def network_of(self, step: Step) -> Mapping[str, Any] | None: ...

    def late_of(self, step: Step) -> Mapping[str, Any] | None: ...


class Interpreter:
    """One that keeps its state from cell to cell. One cell at a time."""

    def __init__(self, home: Home, member: Member) -> None:
        self._home = home
        self._member = member
        self._cells = self._unnumbered = 0
        """All that ran, and how many of these were not the user's cells."""
        self._turn = asyncio.Lock()
        self._running: Step | None = None
        self._highest = 0
        self._rested = False
        """Its main thread was seen to wait after the cell that ran last."""
        self._main: MainThread | None = None
        member.ended.add_done_callback(self._let_go)

    def _let_go(self, _: object) -> None:
        if self._main is not None:
            self._main.close()

    @property
    def alive(self) -> bool:
        return self._member.alive

    def begin(self) -> None:
        nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._member.order({"kind": "cells", "env": dict(self._home.env)}, [nothing, nothing, nothing])
        except OSError as exc:
            raise Unavailable("no_process", f"the interpreter was gone before its first cell: {exc}") from None
        finally:
            os.close(nothing)

    async def run(self, cell: Cell, tell: Tell, shown: OnShown) -> CellReport:
        async with self._turn:
            return await self._run(cell, tell, shown)

    async def _run(self, cell: Cell, tell: Tell, shown: OnShown, name: str | None = None) -> CellReport:
        await self._home.outputs.read_ahead()
        if not self.alive:
            raise Unavailable("no_interpreter", "the interpreter is gone; a fresh one has none of its variables")
        self._cells += 1
        self._rested = False
        claims, over = Claims(self._cells), asyncio.Event()
        step = Step(self._home, self._member, cell.limits, self._home.box.hub, tell)
        self._running, step.told = step, cell.told
        step.on_stop = lambda: self._stop(over)
        step.on_time = lambda: claims.done and self._doubt(step, over)

        def hear(data: bytes) -> None:
            if claims.done:
                return
            for claim in claims.feed(data):
                shown(claim)
            if claims.broken is not None:
                over.set()
            elif claims.done:
                self._look_for_rest(over)

        def gone(_: object) -> None:
            over.set()

        self._member.heard = hear
        self._member.ended.add_done_callback(gone)
        try:
            self._order(cell, step, name or f"<cell {self._cells - self._unnumbered}>")
            await self._until(over, step)
            if claims.broken is not None:
                step.end_as("policy")  # whoever kills it for that, or however it ends by itself: this is why
                await self.end()
        finally:
            self._running = None
            self._member.heard = lambda _: None
            self._member.ended.remove_done_callback(gone)  # else a session would keep one for every step
            step.finish(lingers=True)
            self._member.on_denial = self._look_between(self._member.denials.total)
        await self._home.outputs.read_ahead()
        return self._report(step, claims)

    # ── Its main thread ──

    def _look_for_rest(self, over: asyncio.Event, looks: int = 0) -> None:
        """It said that the cell is done. So it is once its main thread waits for the next one, and not before."""
        if over.is_set():
            return
        if self._is_at_rest():
            over.set()
            return
        loop = asyncio.get_running_loop()
        if looks < _LOOKS_AT_ONCE:
            os.sched_yield()
            loop.call_soon(self._look_for_rest, over, looks + 1)
        else:
            loop.call_later(
                min(0.001 * 2 ** (looks - _LOOKS_AT_ONCE), _LOOK_SECONDS), self._look_for_rest, over, looks + 1
            )

    def _is_at_rest(self) -> bool:
        if self._main is None:
            self._main = MainThread(self._member.pid)
        try:
            self._rested = self.alive and self._main.waits()
        except OSError:  # it is just ending, which we hear of
            self._rested = False
        return self._rested

    def _doubt(self, step: Step, over: asyncio.Event) -> bool:
        """Its time is up, and it said in time that it is done: a moment more, for one that just returns."""
        asyncio.get_running_loop().call_later(self._grace, self._end_forged, step, over)
        return True

    def _end_forged(self, step: Step, over: asyncio.Event) -> None:
        if not over.is_set() and step.end_as("policy", "wall"):
            self._member.kill()

    def _look_between(self, before: int) -> Callable[[], None]:
        """Between two cells nobody else looks how often what was left is refused something."""

        def look() -> None:
            if self._member.denials.total - before > MAX_DENIALS:
                self._member.kill()

        return look

    async def _until(self, over: asyncio.Event, step: Step) -> None:
        try:
            await over.wait()
        except asyncio.CancelledError:
            step.stop("cancelled", None)
            await asyncio.shield(over.wait())
            raise

    def _order(self, cell: Cell, step: Step, name: str) -> None:
        given: list[int] = []
        order: dict[str, Any] = {"kind": "cell", "id": self._cells, "name": name}
        order |= {"env": dict(cell.env), "figures": list(cell.figures)}
        try:
            for stream in ("stdout", "stderr"):
                ours, theirs = new_pipe()
                given.append(theirs)
                step.read_from(ours, stream)
            if len(cell.source) > INLINE:
                given.append(memory_file(cell.source))
            else:
                order["source"] = cell.source
            self._member.order(order, given)
        except OSError as exc:
            raise Unavailable("no_interpreter", f"the interpreter was gone before it got the cell: {exc}") from None
        finally:
            for descriptor in given:
                os.close(descriptor)

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the cell that runs. False where none does."""
        if self._running is None:
            return False
        self._member.signal(signal.SIGINT)
        return True

    def _stop(self, over: asyncio.Event) -> None:
        """Ask first, so that its variables stay; a cell that does not listen loses them."""
        self._member.signal(signal.SIGINT)
        asyncio.get_running_loop().call_later(self._grace, self._kill_unless, over)

    @property
    def _grace(self) -> float:
        """More of it on a machine that was seen to be slow."""
        return self._home.box.pace.allow(GRACE_SECONDS)

    def _kill_unless(self, over: asyncio.Event) -> None:
        if not over.is_set():
            self._member.kill()

    async def _kill(self) -> None:
        self._member.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._home.box.pace.allow(_KILL_SECONDS)):
                await asyncio.shield(self._member.ended)

    async def end(self) -> None:
        if self.alive:
            await self._kill()

    def _report(self, step: Step, claims: Claims) -> CellReport:
        if step.wall_ms > _WORTH_A_LOOK and self.alive:
            highest = high_water(self._member.pid)
            # What it once needed it needs no more; only where it needed more than ever, this cell did.
            step.peak, self._highest = max(step.peak, highest if highest > self._highest else 0), highest
        report = reported(self._how(step, claims), step, self._home)
        if claims.done and step.ended is not None and not self._rested:
            report = replace(report, forged=True)
        return CellReport(report, tuple(claims.results), claims.error, self.alive, claims.broken or "")

    def _how(self, step: Step, claims: Claims) -> How:
        if step.ended is not None:
            return step.ended, None, None if self.alive else signal_of(self._member.ended.result()), step.limit
        if claims.done and self._rested:
            return "exited", 0 if claims.error is None else 1, None, met(step, self._home)
        return how(self._member.ended.result(), step, self._home)


class Running:
    """A command that was started."""

    def __init__(self, home: Home, member: Member, command: Command, tell: Tell) -> None:
        self._home = home
        self._member = member
        self._command = command
        self._step = Step(home, member, command.limits, home.box.hub, tell)
        self._input = -1
        self._over: asyncio.Task[BoxReport] | None = None

    @property
    def number(self) -> int:
        return self._member.number

    @property
    def logs(self) -> tuple[Captured, Captured]:
        return self._step.captured("stdout"), self._step.captured("stderr")

    def begin(self) -> None:
        command, given = self._command, list[int]()
        env = {**self._home.env, **command.env}
        order: dict[str, Any] = {"kind": "command", "name": "-c", "argv": list(command.argv), "env": env}
        order |= {"cwd": command.cwd, **({"terminal": True} if command.pty is not None else {})}
        try:
            given = self._terminal(*command.pty) if command.pty is not None else self._pipes()
            if command.source is not None:
                order |= {"kind": "python", "name": command.name}
                given.append(memory_file(command.source))
                if self._home.interpreter_path is not None:
                    program = Program("python", command.source, command.argv, command.name)
                    order |= {"kind": "fresh", "argv": [self._home.interpreter_path, *python_words(program)]}
            self._member.order(order, given)
        except OSError as exc:
            self._step.finish()
            raise Unavailable("no_process", f"the command could not be started: {exc}") from None
        finally:
            for descriptor in given:
                os.close(descriptor)
        self._over = asyncio.get_running_loop().create_task(self._wait())

    def _pipes(self) -> list[int]:
        given: list[int] = []
        if self._command.stdin is None:
            theirs, self._input = new_pipe()
            os.set_blocking(self._input, False)
            given.append(theirs)
        elif isinstance(self._command.stdin, int):
            given.append(again(self._command.stdin))
        else:
            given.append(memory_file(self._command.stdin))
        for stream in ("stdout", "stderr"):
            ours, theirs = new_pipe()
            given.append(theirs)
            self._step.read_from(ours, stream)
        return given

    def _terminal(self, columns: int, rows: int) -> list[int]:
        ours, theirs = os.openpty()
        os.set_inheritable(ours, False)
        self._input = os.dup(ours)
        self.resize(columns, rows)
        if self._home.box.host_id is not None:
            os.fchown(theirs, self._home.box.host_id, self._home.box.host_id)
        self._step.read_from(ours, "stdout")
        return [theirs, os.dup(theirs), os.dup(theirs)]

    def resize(self, columns: int, rows: int) -> None:
        if self._command.pty is not None and self._input >= 0:
            fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def send(self, data: bytes) -> int:
        """How much of it was taken: no more than it has not read yet fits. Raises Unavailable where nobody reads."""
        if self._input < 0:
            raise Unavailable("no_input", "the command takes no input")
        try:
            return os.write(self._input, data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise Unavailable("no_input", f"the command takes no more input: {exc.strerror}") from None

    def close_input(self) -> None:
        if self._input >= 0 and self._command.pty is None:
            os.close(self._input)
            self._input = -1
        elif self._input >= 0:
            self.send(b"\x04")

    def signal(self, number: int) -> None:
        self._member.signal(number, group=True)

    async def over(self) -> BoxReport:
        assert self._over is not None
        return await shielded(self._over)

    async def _wait(self) -> BoxReport:
        ended = await asyncio.shield(self._member.ended)
        if self._command.pty is not None and ended is not None and os.WTERMSIG(ended.status) == signal.SIGKILL:
            self._end_jobs()
        self._step.finish()
        if ended is not None:
            self._step.peak = max(self._step.peak, ended.peak_memory_bytes)
        if self._input >= 0:
            os.close(self._input)
            self._input = -1
        step = self._step
        await self._home.outputs.read_ahead()
        if step.ended is not None:
            return reported((step.ended, None, int(signal.SIGKILL), step.limit), step, self._home)
        if not self._member.begun:
            raise Unavailable("no_process", "the process of the command ended before the command had begun")
        return reported(how(ended, step, self._home), step, self._home)

    def _end_jobs(self) -> None:
        """Whoever kills a shell on a terminal means its jobs, too, of which each has a process group of its own."""
        box = self._home.box
        for pid in descendants(box.first, *box.workers):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self._member.pid:
                    os.kill(pid, signal.SIGKILL)


def signal_of(ended: Ended | None) -> int | None:
    """Of a process that is gone: the signal that it died of, if it died of one. One that nobody reaped was killed."""
    if ended is None:
        return int(signal.SIGKILL)
    return os.WTERMSIG(ended.status) if os.WIFSIGNALED(ended.status) else None


def high_water(pid: int) -> int:
    """The most memory that a process ever had, in bytes."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return int(file.read().partition("\nVmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def reported(ending: How, step: Step, home: Home) -> BoxReport:
    ended, status, number, limit = ending
    files, skipped = home.outputs.changed()
    return BoxReport(
        ended=ended,
        exit_status=status,
        signal=number,
        limit=limit,
        wall_ms=step.wall_ms,
        usage=step.usage(),
        isolation=home.isolation,
        denials=step.denials(),
        stdout=step.captured("stdout"),
        stderr=step.captured("stderr"),
        files=files,
        skipped=skipped,
        network=home.network_of(step),
        late=home.late_of(step),
    )


def met(step: Step, home: Home) -> Limit | None:
    """A limit that a step met and survived."""
    return "memory" if home.out_of_memory() else home.met() or step.full


def how(ended: Ended | None, step: Step, home: Home) -> How:
    """A process ended by itself, or by the kernel: how, with which status or signal, for which limit."""
    if ended is None:
        return "infra", None, None, None
    if not os.WIFSIGNALED(ended.status):
        return "exited", os.WEXITSTATUS(ended.status), None, met(step, home)
    number, most = os.WTERMSIG(ended.status), step.limits.cpu_seconds
    if number == signal.SIGKILL and home.out_of_memory():
        return "oom", None, number, "memory"
    if number == signal.SIGXFSZ:
        return "disk", None, number, "file_size"
    if number in (signal.SIGXCPU, signal.SIGKILL) and most is not None and ended.cpu_ms >= most * 750:
        return "timeout", None, number, "cpu"
    return "signalled", None, number, home.met() or step.full
