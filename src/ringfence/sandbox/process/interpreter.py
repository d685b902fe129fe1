"""An interpreter in a box that stays: it takes cell after cell, and keeps its state.

Most are forks of the zygote. Others are started by exec, with an address layout and hash seed of their own: nothing of
ours is in sight in a box, so what serves cells goes there as code, by a descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ringfence.core.box import BoxReport, Limits, Stream
from ringfence.core.errors import OutcomeUnknown, SetUpFailed, Unavailable
from ringfence.core.sessions import Cell, CellReport, Failure, Shown, Tell
from ringfence.sandbox.process.box import BoxMember, ProcessExit
from ringfence.sandbox.process.run import INLINE
from ringfence.sandbox.process.seccomp.notifications import MAX_DENIALS
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS
from ringfence.sandbox.process.step import Step, StepBox, how, met, reported
from ringfence.sandbox.process.streams import memory_file
from ringfence.sandbox.process.untrusted_reply import Claims
from ringfence.sandbox.process.watch import How

GRACE_SECONDS = 1.0
"""For a cell that was interrupted; then its interpreter is killed."""
_WORTH_A_LOOK = 2.0
"""Milliseconds; a shorter cell fills no memory worth telling of."""
_KILL_SECONDS = 10.0
_LOOKS_AT_ONCE = 40
"""At a main thread that is about to rest; from then on it is looked at less and less often."""
_LOOK_SECONDS = 0.02

OnShown = Callable[[Shown | Failure], None]
_WAITS = str(NUMBERS.get(os.uname().machine, {}).get("recvfrom")).encode()
_AS_IT_WAITS = (b"0x1", b"0x22")
"""One byte, and to look at the message without taking it (MSG_PEEK | MSG_TRUNC): so `repl` asks for the next order."""
_WAITS_IN = b"skb_wait"
_CODE = 3
_CHANNEL = 4
"""Where a new interpreter finds its code, and its way to the supervisor."""
_READY = b"ready"
_START_SECONDS = 30.0
_LAST_WORDS = 2000
_HOME = "ringfence.sandbox.process.guest"
_MODULES = ("display", "runner", "claims", "repl")
"""Each after those that it needs."""
_BOOT = f"""\
import sys
if not sys.flags.safe_path:
    del sys.path[0]  # until ours are loaded, no modules are found in the working folder
sys.orig_argv = sys.orig_argv[:1]
def begin():
    import _socket, marshal
    with open({_CODE}, "rb") as file:
        parts = marshal.load(file)
    for name, code in parts:
        module = sys.modules[name] = type(sys)(name)
        if code is not None:
            exec(code, module.__dict__)
    sys.modules["{_HOME}.runner"].forget_ourselves()
    return module.serve, _socket.socket(fileno={_CHANNEL})
serve, channel = begin()
serve(channel, ready={_READY!r})
"""


class Interpreter:
    """One that keeps its state from cell to cell. One cell at a time."""

    def __init__(self, home: StepBox, member: BoxMember) -> None:
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

    # ── Its start ──

    def begin(self) -> None:
        """A fork, which is ready at once. Raises Unavailable."""
        nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._member.order({"kind": "cells", "env": dict(self._home.env)}, [nothing, nothing, nothing])
        except OSError as exc:
            raise Unavailable("no_process", f"the interpreter was gone before its first cell: {exc}") from None
        finally:
            os.close(nothing)

    async def start(self, path: str) -> None:
        """By exec of this program; it is ready when this returns. Raises Unavailable."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(_: object) -> None:
            if not ready.done():
                ready.set_result(None)

        self._member.heard = over
        self._member.ended.add_done_callback(over)
        nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        code = memory_file(_code())
        order = {"kind": "exec_interpreter", "argv": [path, "-c", _BOOT], "env": dict(self._home.env)}
        try:
            self._member.order(order, [nothing, nothing, nothing, code])
            async with asyncio.timeout(self._home.box.pace.allow(_START_SECONDS)):
                await ready
        except OSError:  # it is gone, or not ready in time
            await self.end()
        except asyncio.CancelledError:
            await self.end()
            raise
        finally:
            self._member.heard = lambda _: None
            os.close(nothing)
            os.close(code)
        if not self.alive:
            raise Unavailable("no_interpreter", "the interpreter could not be started, or ended as soon as it was")

    async def set_up(self, source: str, limits: Limits) -> None:
        """Run code that whatever comes later counts on. Raises SetUpFailed, OutcomeUnknown, Unavailable."""
        self._unnumbered += 1
        try:
            async with self._turn:
                done = await self._run(Cell(source.encode(), limits), _unheard, _unseen, "<setup>")
        except asyncio.CancelledError:
            await self.end()
            raise
        report = done.report
        if report.ended == "exited" and report.exit_status == 0 and done.alive:
            return
        await self.end()
        if report.ended == "infra":
            raise OutcomeUnknown("box_failed", "the box ended while its set-up code ran")
        raise SetUpFailed(done.error.traceback if done.error is not None else _last_words(report))

    # ── Cells ──

    async def run(self, cell: Cell, tell: Tell, shown: OnShown) -> CellReport:
        async with self._turn:
            return await self._run(cell, tell, shown)

    async def _run(self, cell: Cell, tell: Tell, shown: OnShown, name: str | None = None) -> CellReport:
        await self._home.outputs.read_ahead()
        if not self.alive:
            raise Unavailable("no_interpreter", "the interpreter is gone; a fresh one has none of its variables")
        self._cells += 1
        self._rested = False
        claims = Claims(self._cells)
        over = asyncio.Event()
        step = Step(self._home, self._member, cell.limits, tell)
        self._running = step
        step.told = cell.told
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
                step.end_as("policy")  # whether we kill it for that or it ends by itself: this is why
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
        """Between two cells no step counts how often the system calls of what was left are refused."""

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
            step.output.open_pipes(given)
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


def _unheard(stream: Stream, data: bytes) -> None:
    """The output of set-up code is dropped."""


def _unseen(claim: Shown | Failure) -> None:
    """So are its results."""


def _last_words(report: BoxReport) -> str:
    how = f"it was stopped: {report.limit or report.ended}" if report.exit_status is None else "its interpreter ended"
    return f"{report.stderr.text[-_LAST_WORDS:]}\n{how}".lstrip()


def signal_of(ended: ProcessExit | None) -> int | None:
    """The signal that a process died of, if it died of one. One that was not reaped was killed."""
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


# ── Its main thread ──


class MainThread:
    """The main thread of an interpreter: whether it waits for its next order."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: dict[str, int] = {}
        self._look: Callable[[], bool] = self._is_in_its_call

    def waits(self) -> bool:
        """Whether it does just now. Where the kernel tells us less of others' processes, that it sleeps is enough.

        Raises ProcessLookupError where it is gone.
        """
        try:
            return self._look()
        except (PermissionError, FileNotFoundError):
            self._look = self._is_in_its_place
            return self._look()

    def _is_in_its_call(self) -> bool:
        called = self._read("syscall").split()
        return called[:1] == [_WAITS] and tuple(called[3:5]) == _AS_IT_WAITS

    def _is_in_its_place(self) -> bool:
        """Less exact: where in the kernel it sleeps; where even that is not told, whether it does."""
        place = self._read("wchan")
        if place not in (b"", b"0"):
            return _WAITS_IN in place
        return self._read("stat").rpartition(b")")[2].split()[:1] == [b"S"]

    def _read(self, name: str) -> bytes:
        """Raises PermissionError where it is not for us, ProcessLookupError where it is gone."""
        if name not in self._files:
            self._files[name] = os.open(f"/proc/{self._pid}/task/{self._pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._files[name], 4096, 0)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


# ── One that is no fork ──


@cache
def _code() -> bytes:
    """What it needs to serve cells, for an interpreter of the very version that runs this."""
    parts: list[tuple[str, object]] = [
        (name, None) for name in ("ringfence", "ringfence.sandbox", "ringfence.sandbox.process", _HOME)
    ]
    for name in _MODULES:
        source = (Path(__file__).with_name("guest") / f"{name}.py").read_bytes()
        parts.append((f"{_HOME}.{name}", compile(source, f"<{name}>", "exec", dont_inherit=True)))
    return marshal.dumps(parts)
