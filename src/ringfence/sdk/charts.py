"""Charts as data, in the form that E2B gives them. Code in the box made them: they are its claims.

What does not have that form is no chart. All numbers, labels and points are as the box says.
"""

from __future__ import annotations

import json
from typing import Any

from ringfence.core.model import Json
from ringfence.core.record import plain

_TYPES = ("line", "scatter", "bar", "pie", "box_and_whisker", "superchart", "unknown")
_MAX_DEEP = 2


@plain
class Chart:
    """A chart: what it shows, and its series as `elements`.

    `line`, `scatter`: `label`, `points` (pairs of x and y). `bar`: `label`, `group`, `value`. `pie`: `label`, `angle`,
    `radius`. `box_and_whisker`: `label`, `min`, `first_quartile`, `median`, `third_quartile`, `max`, `outliers`. Those
    of a `superchart` are charts, one for each of its axes.
    """

    type: str
    title: str | None
    elements: list[Any]
    x_label: str | None = None
    y_label: str | None = None
    x_unit: str | None = None
    y_unit: str | None = None
    data: Json | None = None
    """All that is known of it, with ticks and scales."""

    def to_dict(self) -> Json:
        return dict(self.data or {})


def chart_of(text: str | None) -> Chart | None:
    """The chart in a result; None if there is none."""
    try:
        return None if text is None else _chart(json.loads(text), _MAX_DEEP)
    except (ValueError, RecursionError):
        return None


def _chart(found: Any, deep: int) -> Chart | None:
    if not isinstance(found, dict) or found.get("type") not in _TYPES or not isinstance(found.get("elements"), list):
        return None
    elements = found["elements"]
    if found["type"] == "superchart":
        elements = [chart for each in elements if deep and (chart := _chart(each, deep - 1)) is not None]
    labels = {name: _text(found.get(name)) for name in ("x_label", "y_label", "x_unit", "y_unit")}
    return Chart(found["type"], _text(found.get("title")), elements, **labels, data=found)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
