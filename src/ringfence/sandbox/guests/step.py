"""One cell or command in a guest that stays: its clock, what it writes and uses, why it was stopped, and its report."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from ringfence.core.aio import PausableTimer
from ringfence.core.box import BoxReport, Captured, Ended, FileFact, Limit, Limits, Stream, Usage
from ringfence.core.model import Json
from ringfence.core.sessions import Tell
from ringfence.sandbox.process.capture import Capture
from ringfence.sandbox.process.late_work import LateWork
from ringfence.sandbox.process.limit_watch import Termination, killed_by, spent
from ringfence.sandbox.process.seccomp.notifications import MAX_DENIALS

if TYPE_CHECKING:
    from ringfence.sandbox.guests.staying import StayingGuest

KILL_SECONDS = 20.0
"""For an agent to end what it must; else its whole guest is ended: no limit rests on its word."""
STREAMS: Mapping[bytes, Stream] = {b"1": "stdout", b"2": "stderr"}


class GuestStep:
    """One cell or command, from its order until it is over."""

    def __init__(
        self, home: StayingGuest, limits: Limits, tell: Tell, *, reported: bool = True, may_send: bool = True
    ) -> None:
        """`reported`: a caller gets its report; else late work is reported with the next step that is. `may_send`:
        while it runs, the box may use its way out."""
        self.limits = limits
        self.reported = reported
        self.may_send = may_send
        self.peak = 0
        self.full: Limit | None = None
        """The disk limit that was used up at the last look, if any was."""
        self.ended: Ended | None = None
        """Why it was stopped, if it was; the first reason counts."""
        self.limit: Limit | None = None
        self.on_stop: Callable[[], None] = lambda: None
        self.on_timeout: Callable[[], bool] = lambda: False
        """Called when its time is up. True: the callee ends the step."""
        self.network_before: Mapping[str, Any] = {}
        self.late = LateWork()
        self.late_output: Mapping[Stream, Captured] = {}
        self.cpu_before = 0.0
        """Processor time of all that ran in the box until it began; and, below, until it was over."""
        self.cpu_after: float | None = None
        self._home = home
        self._tell = tell
        self._captures = {stream: Capture(limits.capture_bytes) for stream in STREAMS.values()}
        self._written = 0
        self._denied: dict[str, int] = {}
        self._denials = 0
        self._began = time.monotonic()
        self.clock = PausableTimer(limits.wall_seconds, self._time_is_up)

    async def begin(self) -> None:
        """It gets its order next. Raises Unavailable."""
        await self._home.step_begins(self)
        denials = self._home.denials
        self._denied = dict(denials.by_name)
        self._denials = denials.total
        self.cpu_before = self._home.cpu_ms()
        self._began = time.monotonic()
        self._home.step_began(self)
        if not self._home.paused:
            self.clock.start()

    # ── While it runs ──

    def take(self, kind: bytes, data: bytes) -> Awaitable[None] | None:
        """What it writes, as it comes."""
        stream = STREAMS[kind]
        self._written += len(data)
        if self._written > self.limits.output_bytes:
            self.stop("output", "output")
        self._captures[stream].feed(data)
        return self._tell(stream, data)

    def closed(self, stream: Stream) -> None:
        """Nothing more comes of this stream."""
        tell: Any = self._tell
        if hasattr(tell, "closed"):
            tell.closed(stream)

    def captured(self, stream: Stream) -> Captured:
        return self._captures[stream].done()

    def look(self, used: int, cpu_ms: float, full: Limit | None) -> None:
        """Note what the whole box uses now: the step uses no more than that."""
        self.peak = max(self.peak, used)
        self.full = full or self.full
        if spent(cpu_ms - self.cpu_before, self.limits):
            self.stop("timeout", "cpu")

    def look_at_denials(self) -> None:
        if self._home.denials.total - self._denials > MAX_DENIALS:
            self.stop("policy", None)

    # ── Its end ──

    def _time_is_up(self) -> None:
        if not self.on_timeout():
            self.stop("timeout", "wall")

    def stop(self, ended: Ended, limit: Limit | None) -> None:
        if self.end_as(ended, limit):
            self.on_stop()

    def restart_clock(self, seconds: float, call: Callable[[], None]) -> None:
        """From here on, this is called when its time is up. A pause does not count, as before."""
        self.clock.cancel()
        self.clock = PausableTimer(seconds, call)
        if not self._home.paused:
            self.clock.start()

    def must_end(self) -> None:
        """Its end was ordered: where its agent does not see to it in time, the guest is ended."""
        self.restart_clock(KILL_SECONDS, self._home.guest.kill)

    def end_as(self, ended: Ended, limit: Limit | None = None) -> bool:
        """Set why it ends. False where there was a reason before, which stands."""
        if self.ended is not None:
            return False
        self.ended = ended
        self.limit = limit
        return True

    def finish(self, told: Json | None) -> None:
        """It is over. `told`: what the agent says of that moment."""
        self.clock.cancel()
        if told is not None:
            self.peak = max(self.peak, whole(told, "peak") or whole(told, "peak_memory_bytes") or 0)
            if told.get("full") in ("disk", "inodes"):
                self.full = told["full"]
        if self.reported:
            self.late_output = self._home.late_output.take()
        self._home.step_over(self, told)

    @property
    def wall_ms(self) -> float:
        return (time.monotonic() - self._began) * 1000.0

    @property
    def cpu_ms(self) -> float:
        now = self.cpu_after if self.cpu_after is not None else self._home.cpu_ms()
        return max(0.0, now - self.cpu_before)

    def denials(self) -> dict[str, int]:
        now = self._home.denials.by_name
        before = self._denied
        return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}


def box_report(
    ending: Termination, step: GuestStep, home: StayingGuest, changed: tuple[tuple[FileFact, ...], Mapping[str, str]]
) -> BoxReport:
    ended, status, number, limit = ending
    files, skipped = changed
    late = home.late_fact(step)
    if written := step.late_output:
        late = {**(late or {}), **{f"{stream}_bytes": captured.total for stream, captured in written.items()}}
    return BoxReport(
        ended=ended,
        exit_status=status,
        signal=number,
        limit=limit,
        wall_ms=step.wall_ms,
        usage=Usage(cpu_ms=round(step.cpu_ms, 3), peak_memory_bytes=step.peak or None),
        isolation=dict(home.isolation),
        denials=step.denials(),
        stdout=step.captured("stdout"),
        stderr=step.captured("stderr"),
        files=files,
        skipped=skipped,
        network=home.network_fact(step),
        late=late,
        late_stdout=written.get("stdout", Captured()),
        late_stderr=written.get("stderr", Captured()),
        left=home.leaves_work(),
    )


def termination_of(result: Json | None, step: GuestStep, home: StayingGuest) -> Termination:
    """How a process ended that ended by itself or by the kernel; None: the guest has ended."""
    status = whole(result, "status")
    if status is None:
        return "infra", None, None, None
    if not status & 0x7F:
        return "exited", status >> 8 & 0xFF, None, survived_limit(step, home)
    number = status & 0x7F
    too_long = number == signal.SIGXFSZ and home.limits.file_bytes is not None
    return killed_by(
        number,
        home.out_of_memory,
        lambda: spent(step.cpu_ms, step.limits),
        lambda: survived_limit(step, home),
        lambda: too_long,
    )


def survived_limit(step: GuestStep, home: StayingGuest) -> Limit | None:
    """A limit that a step met and survived."""
    return "memory" if home.out_of_memory() else home.new_limit_met() or step.full


def whole(result: Json | None, name: str) -> int | None:
    """A number that a guest says, if it is one that can be."""
    value = None if result is None else result.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None
