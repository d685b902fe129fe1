"""What is watched while something runs in a box that stays: its clock, what it writes, and why it was stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from ringfence.box import Captured, FileFact, Limit, Limits, Stream, Usage
from ringfence.box import Ended as Ending
from ringfence.sandbox.process.capture import Capture
from ringfence.sandbox.process.denials import MAX_DENIALS
from ringfence.sandbox.process.hub import Hub
from ringfence.sandbox.process.late import Late, Others
from ringfence.sandbox.process.member import Member
from ringfence.sessions import Tell

_CHUNK = 65536
_MOMENT = 0.02
"""Seconds that a pipe which nobody reads any more is kept."""


class Clock:
    """Calls when so many seconds have gone by, those not counted in which it stood still."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._left = seconds
        self._call = call
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.go_on()

    def go_on(self) -> None:
        if self._timer is None and self._left > 0:
            self._began = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(self._left, self._call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = max(0.001, self._left - (time.monotonic() - self._began))

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._left = 0.0


class Place(Protocol):
    """The box that a step is in, as far as a step needs to know."""

    def cpu_ms(self) -> float: ...

    def began(self, step: Step) -> None: ...

    def over(self, step: Step) -> None: ...


class Step:
    """One cell or command, from its order until it is over."""

    def __init__(self, place: Place, member: Member, limits: Limits, hub: Hub, tell: Tell) -> None:
        self.limits = limits
        self.member = member
        self.peak = 0
        self.full: Limit | None = None
        """What of the disk was used up when somebody last looked, if anything was."""
        self.ended: Ending | None = None
        """Why it was stopped, if it was; the first reason counts."""
        self.limit: Limit | None = None
        self.on_stop: Callable[[], None] = member.kill
        self.files: tuple[FileFact, ...] = ()
        self.network_before: Mapping[str, Any] = {}
        """The `network` fact of the box when it began."""
        self._place = place
        self._hub = hub
        self._tell = tell
        self._captures: dict[Stream, Capture] = {}
        self._open: dict[int, Stream] = {}
        self._said = 0
        self._began = time.monotonic()
        self.cpu_before = place.cpu_ms()
        """Of all that ran in the box until it began; and, below, until it was over."""
        self.cpu_after: float | None = None
        self._cpu_seen = 0.0
        self.late = Late()
        self.others: Others | None = None
        """Who else is in the box, if anybody is."""
        self._denied = dict(member.denials.by_name)
        self._denials = member.denials.total
        self.on_time: Callable[[], bool] = lambda: False
        """Its time is up. True: whoever is called sees to that."""
        self.clock = Clock(limits.wall_seconds, self._time_is_up)
        member.on_denial = self._look_at_denials
        member.denials.is_late = self._is_anothers
        place.began(self)

    # ── What it writes ──

    def read_from(self, descriptor: int, stream: Stream) -> None:
        """A reading end that is ours from now on."""
        os.set_blocking(descriptor, False)
        self._open[descriptor] = stream
        self._hub.add(descriptor, partial(self._read, descriptor))

    def _read(self, descriptor: int) -> bool:
        """Whether there may be more."""
        stream = self._open.get(descriptor)
        if stream is None:
            return False
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""  # a terminal whose other side is gone
        if not chunk:
            self._close(descriptor)
            return False
        self._said += len(chunk)
        if self._said > self.limits.output_bytes:
            self.stop("output", "output")
        if stream not in self._captures:
            self._captures[stream] = Capture(self.limits.capture_bytes)
        self._captures[stream].feed(chunk)
        room = self._tell(stream, chunk)
        if room is not None:
            self._rest(descriptor, asyncio.ensure_future(room))
        return True

    def _rest(self, descriptor: int, room: asyncio.Future[None]) -> None:
        """Who listens has enough for now: the pipe fills, and the program waits."""
        self._hub.remove(descriptor)
        room.add_done_callback(lambda _: self._go_on(descriptor))

    def _go_on(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._hub.add(descriptor, partial(self._read, descriptor))

    def _close(self, descriptor: int) -> None:
        self._hub.remove(descriptor)
        os.close(descriptor)
        self._open.pop(descriptor, None)

    def captured(self, stream: Stream) -> Captured:
        """So far."""
        capture = self._captures.get(stream)
        return capture.done() if capture is not None else Captured()

    def look(self, used: int, full: Limit | None) -> None:
        """What the whole box uses now is what the step uses at most."""
        self.peak, self.full = max(self.peak, used), full or self.full
        if self.others is not None:
            self.others.look()
        self._cpu_seen = max(self._cpu_seen, self._cpu_ms(self._place.cpu_ms()))
        most = self.limits.cpu_seconds
        if most is not None and self._cpu_seen > most * 1000:
            self.stop("timeout", "cpu")

    def _cpu_ms(self, now: float) -> float:
        """Its own, of what the whole box has used by now."""
        return now - self.cpu_before - (self.others.cpu_ms if self.others is not None else 0.0)

    def _is_anothers(self, task: int) -> bool:
        return self.others is not None and self.others.include(task)

    # ── Its end ──

    def _time_is_up(self) -> None:
        if not self.on_time():
            self.stop("timeout", "wall")

    def stop(self, ended: Ending, limit: Limit | None) -> None:
        if self.end_as(ended, limit):
            self.on_stop()

    def end_as(self, ended: Ending, limit: Limit | None = None) -> bool:
        """Why it ends, unless there was a reason before: False then."""
        if self.ended is not None:
            return False
        self.ended, self.limit = ended, limit
        return True

    def _look_at_denials(self) -> None:
        if self.member.denials.total - self._denials > MAX_DENIALS:
            self.stop("policy", None)

    def finish(self, *, lingers: bool = False) -> None:
        """Read what is there, and watch no more. What others still hold open, nobody reads.

        `lingers`: whoever wrote is about to let go, and is not to fail for what they write until then.
        """
        self.clock.cancel()
        for descriptor in list(self._open):
            for _ in range(1 + self.limits.output_bytes // _CHUNK):
                if not self._read(descriptor):
                    break
            if descriptor in self._open and lingers:
                self._hub.remove(descriptor)
                asyncio.get_running_loop().call_later(_MOMENT, os.close, descriptor)
            elif descriptor in self._open:
                self._close(descriptor)
        self._open.clear()
        if self.others is not None:
            self.others.look()
            self.late.cpu_ms += self.others.late_ms
            self.late.tasks = self.others.tasks
        with contextlib.suppress(OSError, KeyError):  # the box is gone
            self.cpu_after = self._place.cpu_ms()
        self.member.denials.is_late = _always
        self._place.over(self)

    @property
    def wall_ms(self) -> float:
        return (time.monotonic() - self._began) * 1000.0

    def usage(self) -> Usage:
        now = self.cpu_after if self.cpu_after is not None else self._place.cpu_ms()
        cpu_ms = max(0.0, self._cpu_seen, self._cpu_ms(now))
        return Usage(cpu_ms=round(cpu_ms, 3), peak_memory_bytes=self.peak or None)

    def denials(self) -> dict[str, int]:
        before = self._denied
        return {
            name: count - before.get(name, 0)
            for name, count in self.member.denials.by_name.items()
            if count > before.get(name, 0)
        }


def _always(task: int) -> bool:
    """Between two steps whatever is done is late."""
    return True
