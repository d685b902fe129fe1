"""A figure of matplotlib as data: its type, titles, labels and series, in the form that E2B gives charts.

Only what a figure itself says is read, and no more than so many points of it. A figure that is none of the known kinds
is `unknown`, with its titles alone; several axes are a `superchart` of charts.
"""

from __future__ import annotations

import sys

from ringfence.sandbox.process.guest import display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

__builtins__ = display.BUILTINS  # type: ignore[assignment]

MIME = "application/vnd.ringfence.chart+json"
_MAX_POINTS = 10_000
"""Of all series of one figure; the rest is left out, and the chart says `truncated`."""
_MAX_AXES = 64
_MAX_TICKS = 200
_CLOSED = 5
"""Points of a box that is drawn as a line."""


def forms(figure: Any) -> dict[str, str]:
    """What a figure is shown as besides a picture."""
    text = chart_text(figure)
    return {} if text is None else {MIME: text}


def chart_text(figure: Any) -> str | None:
    """The chart of a figure as JSON; None if it has none."""
    axes = list(figure.axes)[:_MAX_AXES]
    if not axes:
        return None
    budget = _Budget()
    charts = [_chart(each, budget) for each in axes]
    found: dict[str, Any] = charts[0]
    if len(charts) > 1:
        title = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
        found = {"type": "superchart", "title": title or None, "elements": charts}
    if budget.left < 0:
        found["truncated"] = True
    text: str = display.standard("json").dumps(found, allow_nan=False, ensure_ascii=False)
    return text


class _Budget:
    def __init__(self) -> None:
        self.left = _MAX_POINTS

    def take(self, values: Iterable[Any]) -> list[Any]:
        found = list(values)
        kept = found[: max(0, self.left)]
        self.left -= len(found)
        return kept


def _chart(axes: Any, budget: _Budget) -> dict[str, Any]:
    base: dict[str, Any] = {"type": "unknown", "title": axes.get_title() or None}
    lines = [line for line in axes.get_lines() if not _is_grid(line)]
    patches = _named(axes.patches)
    if patches["Wedge"] and len(patches["Wedge"]) == len(axes.patches):
        return {**base, "type": "pie", "elements": _wedges(budget.take(patches["Wedge"]))}
    base |= {f"{side}_{what}": value for side in "xy" for what, value in _axis(axes, side).items()}
    if boxes := _boxes(lines, patches["PathPatch"], axes):
        return {**base, "type": "box_and_whisker", "elements": budget.take(boxes)}
    bars = [each for each in axes.containers if type(each).__name__ == "BarContainer"]
    if bars:
        return {**base, "type": "bar", "elements": budget.take(bar for each in bars for bar in _bars(each, axes))}
    scattered = [each for each in axes.collections if type(each).__name__ == "PathCollection"]
    if scattered and not lines:
        series = [(each.get_label(), each.get_offsets()) for each in scattered]
        return {**base, "type": "scatter", **_ticks(axes), "elements": _series(series, "Series", axes, budget)}
    if lines and not axes.patches:
        series = [(line.get_label(), zip(line.get_xdata(), line.get_ydata(), strict=False)) for line in lines]
        return {**base, "type": "line", **_ticks(axes), "elements": _series(series, "Line", axes, budget)}
    return {**base, "elements": []}


# ── Axes ──────────────────────────────────────────────────────────────────────────────────────────


def _axis(axes: Any, side: str) -> dict[str, Any]:
    label = (axes.get_xlabel() if side == "x" else axes.get_ylabel()) or None
    unit = None
    if label and label[-1] in ")]":
        begin = label.rfind("(" if label[-1] == ")" else "[")
        unit = label[begin + 1 : -1].strip() if begin >= 0 else None
    return {"label": label, "unit": unit or None}


def _ticks(axes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side in "xy":
        axis = axes.xaxis if side == "x" else axes.yaxis
        ticks = list(axis.get_ticklocs())[:_MAX_TICKS]
        labels = [label.get_text() for label in axis.get_ticklabels()[:_MAX_TICKS]]
        found[f"{side}_ticks"] = [_coordinate(tick, axis) for tick in ticks]
        found[f"{side}_tick_labels"] = labels
        found[f"{side}_scale"] = _scale(axis)
    return found


def _scale(axis: Any) -> str:
    kind = _converter(axis)
    if "Date" in kind:
        return "datetime"
    return "categorical" if "StrCategory" in kind else str(axis.get_scale())


def _converter(axis: Any) -> str:
    converter = axis.get_converter() if hasattr(axis, "get_converter") else getattr(axis, "converter", None)
    return type(converter).__name__


def _coordinate(value: Any, axis: Any) -> Any:
    """A coordinate as a number, or as text if the axis has dates or categories."""
    if isinstance(value, str):
        return value
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "datetime64":
        return str(value.astype("datetime64[s]"))
    if "Date" in _converter(axis):
        return sys.modules["matplotlib.dates"].num2date(float(value)).isoformat()
    return _number(value)


def _number(value: Any) -> float | None:
    number = float(value)
    return number if number - number == 0.0 else None  # JSON has neither infinities nor NaN


def _tick_names(axis: Any) -> list[tuple[float, str]]:
    labels = [label.get_text() for label in axis.get_ticklabels()]
    return [(float(at), label) for at, label in zip(axis.get_ticklocs(), labels, strict=False) if label]


def _name_at(at: float, width: float, names: list[tuple[float, str]]) -> str:
    near = min(names, key=lambda each: abs(each[0] - at), default=None)
    return near[1] if near is not None and abs(near[0] - at) <= abs(width) / 2 else f"{at:g}"


# ── Series ────────────────────────────────────────────────────────────────────────────────────────


def _named(artists: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"Wedge": [], "PathPatch": []}
    for each in artists:
        found.setdefault(type(each).__name__, []).append(each)
    return found


def _is_grid(line: Any) -> bool:
    """A line across the whole axes, which marks a place and is no series."""
    xs, ys = list(line.get_xdata()), list(line.get_ydata())
    return len(xs) == len(ys) == 2 and (xs == [0, 1] or ys == [0, 1]) and (xs[0] == xs[1] or ys[0] == ys[1])


def _series(series: Iterable[tuple[str, Any]], word: str, axes: Any, budget: _Budget) -> list[dict[str, Any]]:
    found = []
    for number, (label, points) in enumerate(series):
        kept = budget.take([_coordinate(x, axes.xaxis), _coordinate(y, axes.yaxis)] for x, y in points)
        found.append({"label": f"{word} {number}" if str(label).startswith("_") else str(label), "points": kept})
    return found


def _wedges(wedges: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "label": "" if str(each.get_label()).startswith("_") else str(each.get_label()),
            "angle": round(abs(float(each.theta2) - float(each.theta1)), 6),
            "radius": _number(each.r),
        }
        for each in wedges
    ]


def _bars(container: Any, axes: Any) -> list[dict[str, Any]]:
    lying = getattr(container, "orientation", None) == "horizontal"
    names = _tick_names(axes.yaxis if lying else axes.xaxis)
    label = str(container.get_label())
    if label.startswith("_"):
        label = f"Group {label.removeprefix('_container')}"
    found = []
    for bar in container:
        size, at, value = bar.get_width(), bar.get_x(), bar.get_height()
        if lying:
            size, at, value = bar.get_height(), bar.get_y(), bar.get_width()
        middle = float(at) + float(size) / 2
        found.append({"label": _name_at(middle, float(size), names), "group": label, "value": _number(value)})
    return found


def _boxes(lines: list[Any], patches: list[Any], axes: Any) -> list[dict[str, Any]]:
    """Boxes with whiskers, drawn as patches or as lines; [] if these are none."""
    drawn = [[(float(x), float(y)) for x, y in patch.get_path().vertices[:_CLOSED]] for patch in patches]
    rest: list[list[tuple[float, float]]] = []
    for line in lines:
        try:
            points = [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=False)]
        except (TypeError, ValueError):  # dates, categories
            return []
        is_box = len(points) == _CLOSED and points[0] == points[-1]
        (drawn if is_box else rest).append(points)
    for lying in (False, True):
        found = [_box([_turned(points, lying) for points in (box, *rest)], axes, lying) for box in drawn]
        if found and all(each is not None for each in found):
            return [each for each in found if each is not None]
    return []


def _turned(points: list[tuple[float, float]], lying: bool) -> list[tuple[float, float]]:
    return [(y, x) for x, y in points] if lying else points


def _box(parts: list[list[tuple[float, float]]], axes: Any, lying: bool) -> dict[str, Any] | None:
    box, *lines = parts
    left, right = min(x for x, _ in box), max(x for x, _ in box)
    low, high = min(y for _, y in box), max(y for _, y in box)
    near = (right - left) * 1e-6
    lowest, highest, median, outliers = None, None, None, []
    for points in lines:
        if not all(left - near <= x <= right + near for x, _ in points):
            continue
        ys = [y for _, y in points]
        pair = len(points) == 2
        if pair and points[0][0] == points[1][0]:  # a whisker
            if max(ys) == low:
                lowest = min(ys)
            elif min(ys) == high:
                highest = max(ys)
        elif pair and ys[0] == ys[1] and low <= ys[0] <= high and abs(points[0][0] - left) <= near:
            median = ys[0]
        elif not pair:
            outliers += ys
    if lowest is None or highest is None or median is None:
        return None
    name = _name_at((left + right) / 2, right - left, _tick_names(axes.yaxis if lying else axes.xaxis))
    found = {"label": name, "min": lowest, "first_quartile": low, "median": median}
    return {**found, "third_quartile": high, "max": highest, "outliers": outliers}
