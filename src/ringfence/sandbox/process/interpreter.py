"""An interpreter in a box that stays: it takes cell after cell, and keeps its state.

Most are forks of the zygote. Others are started by exec, with an address layout and hash seed of their own. A box does
not see our source, so such an interpreter gets the code that serves cells through a descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringfence.core.aio import finished
from ringfence.core.box import BoxReport, Limits
from ringfence.core.errors import OutcomeUnknown, SetUpFailed, Unavailable
from ringfence.core.sessions import Cell, CellReport, OnShown, Tell, discard_output, discard_value
from ringfence.sandbox.process import guest_code
from ringfence.sandbox.process.box import BoxMember, ProcessExit
from ringfence.sandbox.process.limit_watch import Termination
from ringfence.sandbox.process.memory_file import memory_file
from ringfence.sandbox.process.run import INLINE
from ringfence.sandbox.process.seccomp.notifications import MAX_DENIALS
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS
from ringfence.sandbox.process.step import Step, StepBox, box_report, survived_limit, termination_of
from ringfence.sandbox.process.untrusted_reply import Claims
from ringfence.sandbox.process.zygote import kernel

GRACE_SECONDS = 1.0
"""For a cell that was interrupted; then its interpreter is killed."""
_SHORT_CELL_MS = 2.0
"""A shorter cell needs no memory that would matter in its report."""
_KILL_SECONDS = 10.0
_LOOKS_AT_ONCE = 40
"""A main thread that is about to rest is looked at so many times in a row; after that, less and less often."""
_LOOK_SECONDS = 0.02

_RECVFROM = str(NUMBERS.get(os.uname().machine, {}).get("recvfrom")).encode()
_PEEK_ARGUMENTS = (b"0x1", b"0x22")
"""`repl` waits for its next order with these: one byte, MSG_PEEK | MSG_TRUNC, which leaves the message there."""
_CAUGHT_SIGNALS = 1 << signal.SIGINT - 1 | 1 << 32 - 1 | 1 << 33 - 1
"""What the guest itself catches, as /proc shows it, and what the C library does once there was a thread."""
_O_ASYNC = 0o20000
_SO_RCVTIMEO = 20
_RECEIVING_PLACE = b"skb_wait"
"""Part of the name of the kernel function in which a thread waits for a message."""
_CHANNEL_FD = 4
"""The descriptor of a new interpreter's channel to the supervisor, beside that of its code."""
READY = b"ready"
_START_SECONDS = 30.0
_LAST_WORDS = 2000
BOOT = f"""\
{guest_code.LOAD}
def begin():
    import _socket
    with open({guest_code.CODE_FD}, "rb") as file:
        repl = load(file.read())
    return repl.serve, _socket.socket(fileno={_CHANNEL_FD})
serve, channel = begin()
serve(channel, ready={READY!r})
"""


class Interpreter:
    """Runs one cell at a time and keeps its state from cell to cell."""

    def __init__(self, home: StepBox, member: BoxMember) -> None:
        self._home = home
        self._member = member
        self._cells = self._unnumbered = 0
        """All cells that ran, and how many of these were set-up code."""
        self._turn = asyncio.Lock()
        self._running: Step | None = None
        self._peak_ever = 0
        self._rested = False
        """Its main thread was seen waiting after the last cell."""
        self._main: MainThread | None = None
        member.ended.add_done_callback(self._close_main_thread)

    @property
    def alive(self) -> bool:
        return self._member.alive

    @property
    def folder(self) -> str | None:
        place = f"/proc/{self._member.pid}/cwd"
        try:
            return os.readlink(place) if os.stat(place).st_nlink else None
        except OSError:
            return None

    # ── Start ──

    def start_fork(self) -> None:
        """Serve cells in the fork, which is ready at once. Raises Unavailable."""
        nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._member.order({"kind": "cells", "env": dict(self._home.env)}, [nothing, nothing, nothing])
        except OSError as exc:
            raise Unavailable("no_process", f"the interpreter was gone before its first cell: {exc}") from None
        finally:
            os.close(nothing)

    async def start_by_exec(self, path: str, version: tuple[int, int]) -> None:
        """Exec this interpreter; it is ready when this returns. Raises Unavailable."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def over(_: object) -> None:
            if not ready.done():
                ready.set_result(None)

        self._member.on_message = over
        self._member.ended.add_done_callback(over)
        nothing = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        code = memory_file(guest_code.of_cells(version))
        order = {"kind": "exec_interpreter", "argv": [path, "-c", BOOT], "env": dict(self._home.env)}
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
            self._member.on_message = lambda _: None
            os.close(nothing)
            os.close(code)
        if not self.alive:
            raise Unavailable("no_interpreter", "the interpreter could not be started, or ended as soon as it was")

    async def set_up(self, source: str, limits: Limits) -> None:
        """Run set-up code, on which later cells depend. Raises SetUpFailed, OutcomeUnknown, Unavailable."""
        self._unnumbered += 1
        try:
            async with self._turn:
                cell = Cell(source.encode(), limits, reported=False)
                done = await self._run(cell, discard_output, discard_value, "<setup>")
        except asyncio.CancelledError:
            await self.end()
            raise
        report = done.report
        if report.ended == "exited" and report.exit_status == 0 and done.alive:
            return
        await self.end()
        if report.ended == "infra":
            raise OutcomeUnknown("box_failed", "the box ended while its set-up code ran")
        raise SetUpFailed(done.error.traceback if done.error is not None else last_words(report))

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
        # A line of the supervisor's own needs no network: what waits for its way out goes with a step that is reported.
        may_send = cell.reported or name is not None
        step = Step(self._home, self._member, cell.limits, tell, reported=cell.reported, may_send=may_send)
        self._running = step
        step.on_stop = lambda: self._stop(step, over)
        step.on_timeout = lambda: claims.done and self._allow_grace(step, over)

        def on_message(data: bytes) -> None:
            if claims.done:
                return
            for claim in claims.feed(data):
                shown(claim)
            if claims.broken is not None:
                over.set()
            elif claims.done:
                self._check_rest(over)

        def gone(_: object) -> None:
            over.set()

        self._member.on_message = on_message
        self._member.ended.add_done_callback(gone)
        try:
            try:
                self._order(cell, step, name or f"<cell {self._cells - self._unnumbered}>")
            except Unavailable:
                await self._kill()  # it can close its end of the channel, or refuse what comes, and live on
                raise
            await self._wait_until_over(over, step)
            if claims.broken is not None:
                step.end_as("policy")  # the reason, whether we kill it for that or it ends by itself
                await self.end()
        finally:
            self._running = None
            self._member.on_message = lambda _: None
            self._member.ended.remove_done_callback(gone)  # else a session would keep one for every step
            step.finish()
            self._member.on_denial = self._watch_denials_between_cells(self._member.denials.total)
        await self._home.outputs.read_ahead()
        return self._report(step, claims)

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

    async def _wait_until_over(self, over: asyncio.Event, step: Step) -> None:
        try:
            await over.wait()
        except asyncio.CancelledError:
            step.stop("cancelled", None)
            # However often it is cancelled: its clock would kill the next cell, if that began before it is over.
            await finished(over.wait())
            raise

    def _report(self, step: Step, claims: Claims) -> CellReport:
        if step.wall_ms > _SHORT_CELL_MS and self.alive:
            highest = peak_memory(self._member.pid)
            # The kernel keeps the peak of the whole process: only if it rose was it this cell's.
            step.peak, self._peak_ever = max(step.peak, highest if highest > self._peak_ever else 0), highest
        report = box_report(self._termination(step, claims), step, self._home)
        if not step.reported:
            self._home.report_later(report)
        if claims.done and step.ended is not None and not self._rested:
            report = replace(report, forged=True)
        return CellReport(report, tuple(claims.results), claims.error, self.alive, claims.broken or "")

    def _termination(self, step: Step, claims: Claims) -> Termination:
        if step.ended is not None:
            return step.ended, None, None if self.alive else signal_of(self._member.ended.result()), step.limit
        if claims.done and self._rested:
            return "exited", 0 if claims.error is None else 1, None, survived_limit(step, self._home)
        return termination_of(self._member.ended.result(), step, self._home)

    # ── Is the cell over? ──

    def _check_rest(self, over: asyncio.Event, looks: int = 0) -> None:
        """It claims that the cell is done, which is true once its main thread waits for the next order."""
        if over.is_set():
            return
        if self._is_at_rest():
            over.set()
            return
        loop = asyncio.get_running_loop()
        if looks < _LOOKS_AT_ONCE:
            os.sched_yield()
            loop.call_soon(self._check_rest, over, looks + 1)
        else:
            loop.call_later(
                min(0.001 * 2 ** (looks - _LOOKS_AT_ONCE), _LOOK_SECONDS), self._check_rest, over, looks + 1
            )

    def _is_at_rest(self) -> bool:
        if self._main is None:
            self._main = MainThread(self._member.pid)
        try:
            self._rested = self.alive and self._main.waits()
        except OSError:  # it is just ending, which the zygote reports
            self._rested = False
        return self._rested

    def _allow_grace(self, step: Step, over: asyncio.Event) -> bool:
        """Its time is up, but it claimed in time to be done: allow a moment for it to come to rest."""
        asyncio.get_running_loop().call_later(self._grace, self._kill_forged, step, over)
        return True

    def _kill_forged(self, step: Step, over: asyncio.Event) -> None:
        if not over.is_set() and step.end_as("policy", "wall"):
            self._member.kill()

    def _watch_denials_between_cells(self, before: int) -> Callable[[], None]:
        """Count refused system calls of what a cell left behind: between two cells no step does."""

        def look() -> None:
            if self._member.denials.total - before > MAX_DENIALS:
                self._member.kill()

        return look

    # ── Interrupt and end ──

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the cell that runs. False where none does."""
        if self._running is None:
            return False
        self._member.signal(signal.SIGINT)
        return True

    def _stop(self, step: Step, over: asyncio.Event) -> None:
        """Interrupt the cell first, so that variables stay; if it goes on, kill the interpreter. In a pause it cannot
        react, and has its time afterwards."""
        self._member.signal(signal.SIGINT)
        step.restart_clock(self._grace, lambda: self._kill_unless_over(over))

    @property
    def _grace(self) -> float:
        """Longer on a machine that was seen to be slow."""
        return self._home.box.pace.allow(GRACE_SECONDS)

    def _kill_unless_over(self, over: asyncio.Event) -> None:
        if not over.is_set():
            self._member.kill()

    async def end(self) -> None:
        if self.alive:
            if self._running is not None:
                self._running.end_as("cancelled")  # unless there is a reason already
            await self._kill()

    async def _kill(self) -> None:
        self._member.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._home.box.pace.allow(_KILL_SECONDS)):
                await asyncio.shield(self._member.ended)

    def _close_main_thread(self, _: object) -> None:
        if self._main is not None:
            self._main.close()


def last_words(report: BoxReport) -> str:
    cause = f"it was stopped: {report.limit or report.ended}" if report.exit_status is None else "its interpreter ended"
    return f"{report.stderr.text[-_LAST_WORDS:]}\n{cause}".lstrip()


def signal_of(ended: ProcessExit | None) -> int | None:
    """The signal that killed a process, if one did. A process that was not reaped was killed."""
    if ended is None:
        return int(signal.SIGKILL)
    return os.WTERMSIG(ended.status) if os.WIFSIGNALED(ended.status) else None


def peak_memory(pid: int) -> int:
    """The most memory that a process has ever used, in bytes."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return int(file.read().partition("\nVmHWM:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


# ── The main thread ───────────────────────────────────────────────────────────────────────────────


class MainThread:
    """Tells whether the main thread of an interpreter waits for its next order."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: dict[str, int] = {}
        self._look: Callable[[], bool] = self._is_in_recvfrom

    def waits(self) -> bool:
        """Whether it waits right now. Where the kernel hides its system call from us, that it sleeps is enough.

        Raises ProcessLookupError where it is gone.
        """
        try:
            return self._look()
        except (PermissionError, FileNotFoundError):
            self._look = self._is_in_receiving_place
            return self._look()

    def _is_in_recvfrom(self) -> bool:
        called = self._read("syscall").split()
        return called[:1] == [_RECVFROM] and tuple(called[3:5]) == _PEEK_ARGUMENTS

    def _is_in_receiving_place(self) -> bool:
        """Less exact: by the place in the kernel where it sleeps; where that is hidden, by whether it sleeps."""
        place = self._read("wchan")
        if place not in (b"", b"0"):
            return _RECEIVING_PLACE in place
        return self._read("stat").rpartition(b")")[2].split()[:1] == [b"S"]

    def acts_only_on_orders(self) -> bool:
        """Whether the whole process stands still until its next order, as far as the kernel shows that to us.

        It waits on the channel to us and without a deadline, and no signal can call a function of its own: it catches
        none but SIGINT and those of the C library, and nothing that it holds (a timer, a descriptor) would send one of
        these. Raises OSError.
        """
        if not self.waits() or self._caught_signals() & ~_CAUGHT_SIGNALS:
            return False
        try:
            waiting_at = int(self._read("syscall").split()[1], 16)
            return (
                not self._has_timers() and not self._is_signalled_by_files() and _is_our_channel(self._pid, waiting_at)
            )
        except PermissionError:  # a box with an id of its own, under an ordinary user: the signals are all that we see
            return True

    def _caught_signals(self) -> int:
        return int(self._read("status").partition(b"\nSigCgt:")[2].split()[0], 16)

    def _has_timers(self) -> bool:
        try:
            with open(f"/proc/{self._pid}/timers", "rb") as file:
                return bool(file.read(1))
        except FileNotFoundError:  # a kernel that does not list them
            return False

    def _is_signalled_by_files(self) -> bool:
        folder = f"/proc/{self._pid}/fdinfo"
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError), open(f"{folder}/{name}", "rb") as file:
                if int(file.read(200).partition(b"flags:")[2].split()[0], 8) & _O_ASYNC:
                    return True
        return False

    def _read(self, name: str) -> bytes:
        """Raises PermissionError where we may not read it, ProcessLookupError where it is gone."""
        if name not in self._files:
            self._files[name] = os.open(f"/proc/{self._pid}/task/{self._pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._files[name], 4096, 0)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _is_our_channel(pid: int, descriptor: int) -> bool:
    """Whether this descriptor of a process is a socket that we made, and that it waits at without a deadline."""
    handle = os.pidfd_open(pid)
    try:
        with socket.socket(fileno=kernel.call("pidfd_getfd", handle, descriptor, 0)) as found:
            if found.family != socket.AF_UNIX:
                return False
            maker = int.from_bytes(found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
            return maker == os.getpid() and not any(found.getsockopt(socket.SOL_SOCKET, _SO_RCVTIMEO, 16))
    finally:
        os.close(handle)


# ── Code for an interpreter started by exec ───────────────────────────────────────────────────────
