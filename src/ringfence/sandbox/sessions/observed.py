"""What people are shown of a session while it lives: what it used over time, and what its last steps wrote.

Both are kept in memory, and never much of them: of a long life there are fewer moments, not more.
"""

from __future__ import annotations

from collections import deque

from ringfence.core.box import BoxReport, Captured
from ringfence.core.sessions import StepOutput, UsageSample, timestamp

FIRST_SECONDS = 5.0
"""Between two looks at a young session."""
MAX_SAMPLES = 240
_MAX_STEPS = 12
_MAX_WORDS = 300
_MAX_OUTPUT = 8_000
"""Bytes of each stream of a step, the last ones. Twice as many as are shown: whoever shows them cuts once they are
clean."""


class Observed:
    """Of one session."""

    def __init__(self) -> None:
        self.samples: list[UsageSample] = []
        self.seconds = FIRST_SECONDS
        """Until the next look."""
        self._steps: deque[StepOutput] = deque(maxlen=_MAX_STEPS)

    @property
    def steps(self) -> tuple[StepOutput, ...]:
        return tuple(self._steps)

    def sample(self, at: float, cpu_ms: float, memory_bytes: int) -> None:
        """Note what it uses at a moment. Processor time never goes back, whatever was counted."""
        before = self.samples[-1].cpu_ms if self.samples else 0.0
        self.samples.append(UsageSample(at, max(before, cpu_ms), memory_bytes))
        if len(self.samples) >= MAX_SAMPLES:
            self.samples = [*self.samples[:-1:2], self.samples[-1]]
            self.seconds *= 2

    def step(self, number: int, what: str, report: BoxReport) -> None:
        """Keep the end of what a step wrote."""
        self._steps.append(
            StepOutput(
                number, timestamp(), what[:_MAX_WORDS], report.ended, _end_of(report.stdout), _end_of(report.stderr)
            )
        )


def _end_of(captured: Captured) -> bytes:
    """The last bytes that were captured, which are the last that were written."""
    return (captured.tail if captured.truncated else captured.head + captured.tail)[-_MAX_OUTPUT:]
