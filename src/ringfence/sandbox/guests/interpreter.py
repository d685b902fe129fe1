"""An interpreter in a guest that stays: it takes cell after cell, and keeps its state."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING

from ringfence.core.aio import finished
from ringfence.core.box import Limits
from ringfence.core.errors import OutcomeUnknown, SetUpFailed, Unavailable
from ringfence.core.model import Json
from ringfence.core.sessions import Cell, CellReport, OnShown, Tell, discard_output, discard_value
from ringfence.sandbox.guests.link import GuestGone, GuestOrder, said
from ringfence.sandbox.guests.step import KILL_SECONDS, GuestStep, box_report, survived_limit, termination_of, whole
from ringfence.sandbox.process import guest_code
from ringfence.sandbox.process.interpreter import BOOT, READY, last_words
from ringfence.sandbox.process.limit_watch import Termination
from ringfence.sandbox.process.untrusted_reply import Claims

if TYPE_CHECKING:
    from ringfence.sandbox.guests.staying import StayingGuest

GRACE_SECONDS = 2.0
"""For a cell that was interrupted; then its interpreter is killed."""
_START_SECONDS = 120.0
_LONGEST_FOLDER = 4096


class GuestInterpreter:
    """Runs one cell at a time and keeps its state from cell to cell."""

    def __init__(self, home: StayingGuest) -> None:
        self._home = home
        self._channel: GuestOrder | None = None
        self._cells = self._unnumbered = 0
        """All cells that ran, and how many of these were set-up code."""
        self._turn = asyncio.Lock()
        self._running: _RunningCell | None = None
        self._folder: str | None = "/workspace"
        self._peak_ever = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return self._channel is not None and not self._channel.result.done()

    @property
    def folder(self) -> str | None:
        return self._folder

    # ── Start ──

    async def start(self, python: str, version: tuple[int, int]) -> None:
        """Raises Unavailable."""
        code = guest_code.of_cells(version)
        order = {"do": "cells", "argv": [python, "-c", BOOT], "env": dict(self._home.env)}
        try:
            channel = self._channel = self._home.link.open(order, code)
            channel.on_output = self._take
            channel.on_note = self._note
            channel.result.add_done_callback(lambda _: self._is_ready())
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.shield(self._ready)
        except (GuestGone, TimeoutError):
            await self.end()
        except asyncio.CancelledError:
            await self.end()
            raise
        if not self.alive:
            raise Unavailable("no_interpreter", "the interpreter could not be started, or ended as soon as it was")

    def _is_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

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

    # ── From the guest ──

    def _take(self, kind: bytes, data: bytes) -> Awaitable[None] | None:
        running = self._running
        if kind != b"3":
            return running.step.take(kind, data) if running is not None else self._home.late_output.feed(kind, data)
        if not self._ready.done():
            if data == READY:
                self._is_ready()
        elif running is not None:
            running.claim(data)
        return None

    def _note(self, told: Json) -> None:
        if self._running is not None:
            self._running.note(told)

    # ── Cells ──

    async def run(self, cell: Cell, tell: Tell, shown: OnShown) -> CellReport:
        async with self._turn:
            return await self._run(cell, tell, shown)

    async def _run(self, cell: Cell, tell: Tell, shown: OnShown, name: str | None = None) -> CellReport:
        if not self.alive:
            raise Unavailable("no_interpreter", "the interpreter is gone; a fresh one has none of its variables")
        assert self._channel is not None
        self._cells += 1
        # A line of the supervisor's own needs no network: what waits for its way out goes with a step that is reported.
        may_send = cell.reported or name is not None
        step = GuestStep(self._home, cell.limits, tell, reported=cell.reported, may_send=may_send)
        await step.begin()
        running = self._running = _RunningCell(self._cells, step, self._channel, shown)
        gone = running.gone
        self._channel.result.add_done_callback(gone)
        try:
            await self._order(cell, running, name or f"<cell {self._cells - self._unnumbered}>")
            await self._wait_until_over(running)
            if running.claims.broken is not None:
                step.end_as("policy")  # the reason, whether we kill it for that or it ends by itself
                await self.end()
        finally:
            self._running = None
            self._channel.result.remove_done_callback(gone)
            step.finish(running.told)
        return await self._report(running)

    async def _order(self, cell: Cell, running: _RunningCell, name: str) -> None:
        assert self._channel is not None
        order = {"id": self._cells, "name": name, "env": dict(cell.env), "figures": list(cell.figures)}
        await self._channel.write(cell.source)
        self._channel.act({"cell": order})

    async def _wait_until_over(self, running: _RunningCell) -> None:
        try:
            await running.over.wait()
        except asyncio.CancelledError:
            running.step.stop("cancelled", None)
            # However often it is cancelled: its clock would kill the next cell, if that began before it is over.
            await finished(running.over.wait())
            raise
        if running.refused is not None:
            await self.end()
            text = f"the interpreter was gone before it got the cell: {running.refused}"
            raise Unavailable("no_interpreter", text)

    async def _report(self, running: _RunningCell) -> CellReport:
        step, claims = running.step, running.claims
        self._note_folder(running.told)
        changed = await self._home.outputs.changed()
        report = box_report(self._termination(running), step, self._home, changed)
        if not step.reported:
            self._home.report_later(report)
        if claims.done and step.ended is not None and not running.rested:
            report = replace(report, forged=True)
        return CellReport(report, tuple(claims.results), claims.error, self.alive, claims.broken or "")

    def _note_folder(self, told: Json | None) -> None:
        if told is not None:
            folder = told.get("folder")
            self._folder = folder if isinstance(folder, str) and len(folder) <= _LONGEST_FOLDER else None

    def _termination(self, running: _RunningCell) -> Termination:
        step, claims = running.step, running.claims
        if step.ended is not None:
            return step.ended, None, None if self.alive else self._signal(), step.limit
        if claims.done and running.rested:
            return "exited", 0 if claims.error is None else 1, None, survived_limit(step, self._home)
        return termination_of(self._result, step, self._home)

    @property
    def _result(self) -> Json | None:
        """What the agent says of its end; None where the guest ended."""
        assert self._channel is not None
        result = self._channel.result
        return result.result() if result.done() and result.exception() is None else None

    def _signal(self) -> int | None:
        """The signal that killed it, if one did."""
        status = whole(self._result, "status")
        return int(signal.SIGKILL) if status is None else status & 0x7F or None

    # ── Interrupt and end ──

    def interrupt(self) -> bool:
        if self._running is None:
            return False
        self._running.interrupt()
        return True

    async def end(self) -> None:
        if self._running is not None:
            self._running.step.end_as("cancelled")  # unless there is a reason already
        channel = self._channel
        if channel is None or channel.result.done():
            return
        async with self._home.awake():
            channel.kill()
            await asyncio.wait((channel.result,), timeout=KILL_SECONDS)
        if not channel.result.done():
            self._home.guest.kill()


class _RunningCell:
    """A cell that runs: what is claimed of it, and how it is stopped."""

    def __init__(self, number: int, step: GuestStep, channel: GuestOrder, shown: OnShown) -> None:
        self.step = step
        self.claims = Claims(number)
        self.over = asyncio.Event()
        self.rested = False
        """Its main thread was seen waiting after it."""
        self.refused: str | None = None
        self.told: Json | None = None
        self._number = number
        self._channel = channel
        self._shown = shown
        step.on_stop = self._stop
        step.on_timeout = lambda: self.claims.done and self._allow_grace()

    def claim(self, data: bytes) -> None:
        if self.claims.done:
            return
        for claim in self.claims.feed(data):
            self._shown(claim)
        if self.claims.broken is not None:
            self.over.set()

    def note(self, told: Json) -> None:
        if "refused" in told:
            self.refused = said(told["refused"])
            self.over.set()
        elif told.get("over") == self._number and self.claims.done:
            self.rested = True
            self.told = told
            self.over.set()

    def gone(self, _: object) -> None:
        self.over.set()

    def interrupt(self) -> None:
        self._channel.act({"signal": int(signal.SIGINT)})

    def _stop(self) -> None:
        """Interrupt the cell first, so that variables stay; if it goes on, kill the interpreter. In a pause it cannot
        react, and has its time afterwards."""
        self.interrupt()
        self.step.restart_clock(GRACE_SECONDS, self._kill_unless_over)

    def _kill_unless_over(self) -> None:
        if not self.over.is_set():
            self._channel.kill()
            self.step.must_end()

    def _allow_grace(self) -> bool:
        """Its time is up, but it claimed in time to be done: allow a moment for it to come to rest."""
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._kill_forged)
        return True

    def _kill_forged(self) -> None:
        if not self.over.is_set() and self.step.end_as("policy", "wall"):
            self._channel.kill()
            self.step.must_end()
