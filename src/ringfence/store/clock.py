"""The time of day, and whether it was set: setting it must make nothing young again, nor old too soon."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ringfence.core import system

TOLERANCE = 2.0
"""Seconds. Less is a clock that is being corrected, or a leap second."""
DAY = 24 * 3600.0
FARTHEST = 30 * DAY
"""The time of day may lie so far past the newest record, and a retention if that is shorter, but always a day."""
WAIT = DAY
"""How long a process must have run, by a clock that cannot be set, before it believes one that is farther."""
KEPT_SECONDS = 7 * DAY
"""How long at least an idempotency key keeps its outcome, and a settled question what people were shown."""


class LogClock:
    """What the time of day must be at least, from the newest record and the time that has passed since it was seen."""

    def __init__(self, at: object) -> None:
        """`at` stands in the newest record, which may have been edited."""
        self._at = float(at) if isinstance(at, int | float) else 0.0
        self._seen = system.uptime()

    @property
    def due(self) -> float:
        return self._at + system.uptime() - self._seen

    def tick(self, at: float) -> None:
        """Take `at` as the time of now, once a leap up to it was dealt with."""
        self._at = at
        self._seen = system.uptime()

    def learn(self, at: object) -> None:
        """The newest record is another process's. One that is older than ours was written after a set-back that they
        have put on record."""
        if isinstance(at, int | float) and (at > self.due or at < self._at - TOLERANCE):
            self.tick(float(at))


class Leap:
    """Whether the time of day lies implausibly far ahead: a machine that was off for long, or a clock that is wrong."""

    def __init__(self, at: float | None) -> None:
        """`at` is the newest time that is on record; None where nothing is."""
        self._at = at
        self._seen = system.uptime()
        self._since: float | None = None

    def waits(self, now: float, retention: float) -> bool:
        """Whether what is too old by `now` is not to be removed yet."""
        up = system.uptime()
        if self._at is not None and now - (self._at + up - self._seen) > farthest(retention):
            self._since = up if self._since is None else self._since
            if up - self._since < WAIT:
                return True
        self._at = now
        self._seen = up
        self._since = None
        return False


def farthest(retention: float) -> float:
    return max(DAY, min(retention, FARTHEST))


def before_leap(times: Sequence[float], farthest: float) -> float:
    """Of times on record, newest first, the first; where they leap ahead by more than that, the last one before."""
    return next((earlier for later, earlier in pairwise(times) if later - earlier > farthest), times[0])


def forgotten(now: float, times: Sequence[float]) -> float:
    """Before which moment a key is in force no longer, by the time of day and the newest times on record.

    A process that starts while the clock is ahead must not forget what others need minutes later. So a leap of more
    than a day is not believed before a thousand records, or another such leap, follow it; what one less than that may
    take off is added. Too late costs some room, too early an effect that happens twice.
    """
    return min(now, before_leap([now, *times], DAY)) - KEPT_SECONDS - DAY
