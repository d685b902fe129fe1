"""Counters, gauges and histograms, and the text in which Prometheus reads them.

For one event loop. A family has at most so many series: labels come from configurations, and what does not fit any
more is counted together as `other`, so that nobody can fill the memory by calling names. Where one of its labels says
whose a series is, nobody can fill it for others either: whoever has more than an even share gives way, by a series
that is counted in their `other` from then on.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from ringfence.core.errors import RingfenceError
from ringfence.core.shares import over_their_share

log = logging.getLogger("ringfence.telemetry")

MAX_SERIES = 5000
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds for what takes a millisecond, or as long as a person does."""

Kind = Literal["counter", "gauge", "histogram"]


class Family:
    """One metric with all its series."""

    def __init__(self, kind: Kind, name: str, meaning: str, labels: Sequence[str]) -> None:
        self.kind = kind
        self.name = name
        self.meaning = meaning
        self.labels = tuple(labels)

    def samples(self) -> Iterator[str]:
        raise NotImplementedError

    def text(self) -> Iterator[str]:
        yield f"# HELP {self.name} {_escaped(self.meaning)}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.samples()

    def _labelled(self, values: Sequence[str], *more: tuple[str, str]) -> str:
        pairs = [*zip(self.labels, values, strict=True), *more]
        inside = ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in pairs)
        return f"{{{inside}}}" if inside else ""


class Counter(Family):
    """What only grows. One without labels is there from the beginning."""

    def __init__(self, name: str, meaning: str, *labels: str, whose: str | None = None) -> None:
        """`whose`: the label that says it."""
        super().__init__("counter", name, meaning, labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        self._whose = None if whose is None else labels.index(whose)
        self._held: Count[str] = Count()
        """How many series each has; the one of what is `other` is not counted."""

    def add(self, *values: str, by: float = 1.0) -> None:
        if values not in self._values:
            values = self._place(values)
        self._values[values] = self._values.get(values, 0.0) + by

    def _place(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """The series in which these labels are counted, which are new."""
        if self._whose is None:
            return _known(self._values, values)
        whose = values[self._whose]
        if self._held.total() >= MAX_SERIES:
            over = over_their_share(whose, self._held)
            if not over:
                return self._other(whose)
            self._fold(max(over, key=lambda each: self._held[each]))
        self._held[whose] += 1
        return values

    def _other(self, whose: str) -> tuple[str, ...]:
        return tuple(whose if place == self._whose else OTHER for place in range(len(self.labels)))

    def _fold(self, whose: str) -> None:
        """The newest series of theirs is one of `other` from now on."""
        other = self._other(whose)
        assert self._whose is not None
        newest = next(each for each in reversed(self._values) if each[self._whose] == whose and each != other)
        self._values[other] = self._values.get(other, 0.0) + self._values.pop(newest)
        self._held[whose] -= 1

    def samples(self) -> Iterator[str]:
        for values, value in self._values.items():
            yield f"{self.name}{self._labelled(values)} {_number(value)}"


Reading = float | Mapping[tuple[str, ...], float] | None


class Read(Family):
    """What is looked up when it is asked for: a gauge, or a counter that something else counts."""

    def __init__(
        self, kind: Literal["counter", "gauge"], name: str, meaning: str, *labels: str, read: Callable[[], Reading]
    ) -> None:
        """`read` gives one value, or one for each value of the labels; None, or a RingfenceError, where it cannot be
        told now."""
        super().__init__(kind, name, meaning, labels)
        self._read = read

    def samples(self) -> Iterator[str]:
        try:
            found = self._read()
        except RingfenceError as exc:
            log.warning("%s cannot be told: %s", self.name, exc)
            return
        if found is None:
            return
        for values, value in found.items() if isinstance(found, Mapping) else [((), found)]:
            yield f"{self.name}{self._labelled(values)} {_number(value)}"


class Histogram(Family):
    """How long things take, by buckets."""

    def __init__(self, name: str, meaning: str, *labels: str, bounds: Sequence[float] = SECONDS) -> None:
        super().__init__("histogram", name, meaning, labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], list[float]] = {}
        """Of each: the counts of its buckets, the one beyond the last bound, and the sum."""

    def observe(self, value: float, *values: str) -> None:
        values = _known(self._series, values)
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = [0.0] * (len(self._bounds) + 2)
        series[bisect_left(self._bounds, value)] += 1
        series[-1] += value

    def samples(self) -> Iterator[str]:
        for values, series in self._series.items():
            count = 0.0
            for bound, inside in zip((*map(_number, self._bounds), "+Inf"), series, strict=False):
                count += inside
                yield f"{self.name}_bucket{self._labelled(values, ('le', bound))} {_number(count)}"
            yield f"{self.name}_sum{self._labelled(values)} {_number(series[-1])}"
            yield f"{self.name}_count{self._labelled(values)} {_number(count)}"


def render(families: Sequence[Family]) -> str:
    """All of them as Prometheus reads them."""
    return "\n".join(line for family in families for line in family.text()) + "\n"


def _known(series: Mapping[tuple[str, ...], object], values: tuple[str, ...]) -> tuple[str, ...]:
    """These labels, or `other` for each where there are too many series already."""
    return values if values in series or len(series) < MAX_SERIES else (OTHER,) * len(values)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
