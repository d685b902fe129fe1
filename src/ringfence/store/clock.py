"""The time of day, and whether it was set back: whoever can do that must not make anything young again."""

from __future__ import annotations

from ringfence import system

TOLERANCE = 2.0
"""Seconds. Less is a clock that is being corrected, or a leap second."""


class Clock:
    """What the time of day must be at least, from the newest record and the time that has passed since it was seen."""

    def __init__(self, at: object) -> None:
        """`at` stands in the newest record, which anybody may have edited."""
        self._at = float(at) if isinstance(at, int | float) else 0.0
        self._seen = system.uptime()

    @property
    def due(self) -> float:
        return self._at + system.uptime() - self._seen

    def tick(self, at: float) -> None:
        """It is `at` now, and what that may mean was dealt with."""
        self._at, self._seen = at, system.uptime()

    def learn(self, at: object) -> None:
        """The newest record is another process's. One that is older than ours was written after a set-back that they
        have put on record."""
        if isinstance(at, int | float) and (at > self.due or at < self._at - TOLERANCE):
            self.tick(float(at))
