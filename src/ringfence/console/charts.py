"""Charts, drawn on the server as SVG: lines over time and stacked bars, by shapes and classes alone, so that no page
needs a style or a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from markupsafe import Markup, escape

from ringfence.core.model import Json
from ringfence.core.record import dataclass

_WIDTH = 640
_HEIGHT = 120
_TOP = 8
_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Line:
    """One value at each moment; None where there is none. Its name is also the class that colours it."""

    name: str
    values: Sequence[float | None]


Say = Callable[[float], str]


def line_chart(title: str, times: Sequence[float], lines: Sequence[Line], say: Say, limit: float | None = None) -> Json:
    """Lines over time; `limit` is drawn where it is near enough to be worth its room."""
    high = max((value for line in lines for value in line.values if value is not None), default=0.0)
    top = limit if limit is not None and high > limit / 4 else nice(high)
    begin, span = times[0], max(0.001, times[-1] - times[0])

    def x(at: float) -> float:
        return (at - begin) / span * _WIDTH

    shapes = [_ceiling(top)] if limit is not None and top == limit else []
    for line in lines:
        for piece in _pieces(times, line.values):
            points = " ".join(f"{x(at):.1f},{_y(value, top):.1f}" for at, value in piece)
            if len(piece) == 1:  # a line of one point would not be seen
                shapes.append(
                    Markup('<polyline class="line dot {}" points="{} {}"/>').format(line.name, points, points)
                )
                continue
            first, last = x(piece[0][0]), x(piece[-1][0])
            shapes.append(
                Markup('<polygon class="area {}" points="{:.1f},{} {} {:.1f},{}"/>').format(
                    line.name, first, _HEIGHT, points, last, _HEIGHT
                )
            )
            shapes.append(Markup('<polyline class="line {}" points="{}"/>').format(line.name, points))
    return _figure(title, lines, shapes, (begin, times[-1]), (top, say))


def bar_chart(title: str, times: Sequence[float], parts: Sequence[Line], say: Say, width_seconds: float) -> Json:
    """Bars over time, of parts that add up, the first at the bottom. Each tells its numbers when it is pointed at."""
    sums = [sum(part.values[at] or 0.0 for part in parts) for at in range(len(times))]
    top = nice(max(sums, default=0.0))
    wide = _WIDTH / max(1, len(times))
    shapes = []
    for number, begins in enumerate(times):
        base = 0.0
        bars = Markup("")
        for part in parts:
            value = part.values[number] or 0.0
            if value:
                high = value / top * (_HEIGHT - _TOP)
                bars += Markup('<rect class="bar {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                    part.name, number * wide + wide * 0.08, _y(base + value, top), wide * 0.84, high
                )
                base += value
        told = ", ".join(f"{say(part.values[number] or 0.0)} {part.name.replace('_', ' ')}" for part in parts)
        text = f"{clock(begins)} to {clock(begins + width_seconds)}: {told}"
        # What is pointed at is the whole column: a thin bar is hard to meet.
        column = Markup('<rect class="column" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>')
        shapes.append(
            Markup("<g>{}{}<title>{}</title></g>").format(column.format(number * wide, wide, _HEIGHT), bars, text)
        )
    last = times[-1] + width_seconds if times else 0.0
    return _figure(title, parts, shapes, (times[0] if times else 0.0, last), (top, say))


def nice(value: float) -> float:
    """The next round number."""
    if value <= 0:
        return 1.0
    size = 1.0
    while size * 10 <= value:
        size *= 10
    while size > value:
        size /= 10
    return next(size * step for step in _NICE if size * step >= value)


def clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M")


def _y(value: float, top: float) -> float:
    return _HEIGHT - min(1.0, value / top) * (_HEIGHT - _TOP)


def _ceiling(top: float) -> Markup:
    return Markup('<line class="limit" x1="0" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
        _WIDTH, _y(top, top), _y(top, top)
    )


def _pieces(times: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Runs of moments that have a value: a line is not drawn through what is not known."""
    out: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(times, values, strict=True):
        if value is not None:
            out[-1].append((at, value))
        elif out[-1]:
            out.append([])
    return [piece for piece in out if piece]


def _figure(
    title: str, lines: Sequence[Line], shapes: Sequence[Markup], times: tuple[float, float], scale: tuple[float, Say]
) -> Json:
    top, say = scale
    known = [value for line in lines for value in line.values if value is not None]
    now = [f"{line.name.replace('_', ' ')} {say(value)}" for line in lines if (value := _last(line.values)) is not None]
    told = f"{title}: {', '.join(now) or 'nothing'} at the end, at most {say(max(known, default=0.0))}"
    svg = Markup(
        '<svg viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{told}" focusable="false">'
        '<line class="axis" x1="0" x2="{w}" y1="{h}" y2="{h}"/>{shapes}</svg>'
    ).format(w=_WIDTH, h=_HEIGHT, told=escape(told), shapes=Markup("").join(shapes))
    return {
        "title": title,
        "svg": svg,
        "top": say(top),
        "begins": times[0],
        "ends": times[1],
        "names": [line.name for line in lines] if len(lines) > 1 else [],
        "last": now[0].partition(" ")[2] if len(now) == 1 else "",
    }


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
