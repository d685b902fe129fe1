"""What holds for a session as a whole is said once over a connection: its isolation is large, and steps are short.

Both ends go by the same rule, so that whoever is told "as before" remembers what that was.
"""

from __future__ import annotations

from typing import Any

from ringfence.box import BoxReport
from ringfence.sandbox.codec import place
from ringfence.sandbox.frames import WireError
from ringfence.sessions import CellReport, StepReport

AS_BEFORE = "as before"
"""In the place of a step's isolation, where the last step of its session had the very same."""
MOST_TOLD = 256
"""Of so many sessions a keeper takes its client to remember it."""
_SESSION, _CELL = place(StepReport, "session"), place(StepReport, "cell")
_REPORT, _ISOLATION = place(CellReport, "report"), place(BoxReport, "isolation")


class Said:
    """By a keeper, to one client."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def shorten(self, done: Any, step: StepReport) -> None:
        """The message of a step, before it is sent."""
        isolation = step.cell.report.isolation
        if self._last.get(step.session) is isolation:
            done[_CELL][_REPORT][_ISOLATION] = AS_BEFORE
            return
        if len(self._last) >= MOST_TOLD:
            self._last.clear()
        self._last[step.session] = isolation


class Heard:
    """By a client, from its keeper."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def lengthen(self, done: Any) -> None:
        """The message of a step, as it would be had it been said in full. Raises WireError."""
        try:
            session, report = done[_SESSION], done[_CELL][_REPORT]
            if report[_ISOLATION] == AS_BEFORE:
                report[_ISOLATION] = self._last[session]
                return
            self._last.pop(session, None)
            self._last[session] = report[_ISOLATION]
        except (TypeError, LookupError):
            raise WireError("a step that is none") from None
        if len(self._last) > 2 * MOST_TOLD:
            del self._last[next(iter(self._last))]  # the keeper forgot it long ago
