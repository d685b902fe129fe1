"""How often a box is looked at: often while it works, seldom while it is idle.

Memory is taken by work: a processor fills about ten megabytes in a millisecond, so what has used no processor time has
taken no memory either. The watcher of a box asks for its processor time, which is cheap, and looks at the rest only
where that has grown. All idle boxes of a supervisor share one slow timer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.75
"""How often the processor time of an idle box is read."""
BUSY_SECONDS = 0.02
"""How often a working box is looked at; this bounds what it can take beyond its limit before we see it."""
FIRST_SECONDS = 0.01
WORTH_A_LOOK_MS = 1.0
"""Processor time that needs no look; it adds up until it does."""
_BREATH = 3.0
"""After a look, other boxes come first for so many times its cost."""
_BUSY_SHARE = 0.02
"""A share of one core between two looks; a box that uses less counts as idle."""
_CALM_LOOKS = 5
"""A box is idle after so many looks at which it had done next to nothing."""


class Pulse:
    """The slow timer that idle boxes share."""

    def __init__(self) -> None:
        self._idle: set[Rhythm] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, rhythm: Rhythm) -> None:
        self._idle.add(rhythm)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._beat)

    def remove(self, rhythm: Rhythm) -> None:
        self._idle.discard(rhythm)  # the timer stops by itself: boxes come and go more often than it fires

    def _beat(self) -> None:
        self._timer = None
        if self._idle:
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._beat)
        for rhythm in list(self._idle):
            try:
                rhythm.stir()
            except OSError as problem:  # one box that is just ending
                log.debug("a box could not be looked at: %s", problem)


class Rhythm:
    """Decides when one box is looked at."""

    def __init__(
        self,
        pulse: Pulse,
        worked_ms: Callable[[], float | None],
        look: Callable[[], object],
        busy_seconds: Callable[[], float] = lambda: BUSY_SECONDS,
    ) -> None:
        """`worked_ms` is the processor time of all that runs there; None where only a look can show it."""
        self._pulse = pulse
        self._worked_ms = worked_ms
        self._look = look
        self._busy_seconds = busy_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._seen_ms = self._asked_ms = 0.0
        self._asked_at = 0.0
        self._calm = 0
        self._took = 0.0

    def start(self) -> None:
        """Something was started there: look soon."""
        self.stop()
        self._asked_at = time.monotonic()
        self._calm = 0
        self._timer = asyncio.get_running_loop().call_later(FIRST_SECONDS, self._busy)

    def rest(self) -> None:
        """Nothing that we started runs there."""
        self.stop()
        self._pulse.add(self)

    def stop(self) -> None:
        self._pulse.remove(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _busy(self) -> None:
        # The cost of looking at many processes is paid by this box: others come first.
        pause = max(self._busy_seconds(), self._took * _BREATH)
        self._timer = asyncio.get_running_loop().call_later(pause, self._busy)
        share, worth = self._ask()
        self._calm = 0 if share > _BUSY_SHARE else self._calm + 1
        if self._calm >= _CALM_LOOKS:
            self.rest()
        if worth or self._calm in (1, _CALM_LOOKS):
            self._look_now()

    def stir(self) -> None:
        """Called by the slow timer: look where something was done, and look often where much was."""
        share, worth = self._ask()
        if share > _BUSY_SHARE:
            self._pulse.remove(self)
            self._calm = 0
            self._timer = asyncio.get_running_loop().call_later(self._busy_seconds(), self._busy)
        if worth:
            self._look_now()

    def _look_now(self) -> None:
        # Our own processor time: a machine that others keep busy is no reason to look less often.
        began = time.thread_time()
        # The value from before the look: work during it may be where we have already looked.
        self._seen_ms = self._asked_ms
        self._look()
        self._took = time.thread_time() - began

    def _ask(self) -> tuple[float, bool]:
        """The share of a core used since the last call, and whether that makes a look worthwhile."""
        now = time.monotonic()
        worked = self._worked_ms()
        if worked is None:
            return 1.0, True
        passed_ms = max(1e-6, now - self._asked_at) * 1000.0
        # A process that ends takes its time with it: a sum that falls means as much as one that grows.
        share = abs(worked - self._asked_ms) / passed_ms
        self._asked_at = now
        self._asked_ms = worked
        return share, abs(worked - self._seen_ms) >= WORTH_A_LOOK_MS


def worked_ms(pids: Iterable[int]) -> float | None:
    """Processor time of these processes, without opening a file for any; None where one has ended."""
    try:
        # The clock of a process, as clock_getcpuclockid(3) makes it.
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids) * 1000.0
    except OSError:
        return None
