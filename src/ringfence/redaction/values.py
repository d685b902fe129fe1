"""Finds known values in all their forms, and the shapes of secrets, in one pass over what is clean.

All of it is one automaton, whose speed hardly depends on how many values there are. Only where that strikes is it
asked what was found: first values, then shapes, both on the text as it came, so that neither can hide the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import re2

from ringfence.redaction.forms import Form, forms
from ringfence.redaction.grammar import compiled, options, union
from ringfence.redaction.shapes import shapes
from ringfence.secret import Secret, reveal

KNOWN = "known_secret"
"""The rule of every known value. Which one it was is for the audit log alone."""
REPLACEMENT = "[redacted]"
MASK = b"*"
"""For each byte, where what is around it must keep its place: in files."""

_SHORTEST = 12
"""Nothing that is searched has fewer bytes."""
_SHORT = 200
_REMEMBERED = 256
_THOROUGH = 1000
"""So many hits are each searched for others that begin inside of them; in what repeats itself more often, no longer."""


@dataclass(slots=True)
class Span:
    """What goes."""

    start: int
    end: int
    rules: Counter[str]
    secrets: set[str] = field(default_factory=set)
    begins: int = 0
    """Where the match begins of which this is the secret piece."""


@dataclass(frozen=True, slots=True)
class Redacted:
    """What is left, and what struck."""

    data: bytes
    rules: Mapping[str, int]
    secrets: Mapping[str, int]
    """By the secret's name: for the audit log alone, since whoever is told can guess and try."""


class Values:
    """This tenant's secrets, and the shapes. Never changes; a rotated secret makes another."""

    def __init__(self, secrets: Sequence[Secret] = (), *, shaped: bool = True) -> None:
        """Without shapes, known values alone are searched for."""
        self._shaped = shaped
        self._forms: list[tuple[str, Form]] = [
            (secret.name, form) for secret in secrets for form in forms(reveal(secret))
        ]
        self._known = union(form.whole for _, form in self._forms)
        whole = (part.whole for part in _parts().values()) if shaped else ()
        self._any = union((*(form.whole for _, form in self._forms), *whole))
        self._clean: set[str] = set()
        """Short texts that were found to be so: reasons and names come again with every call."""

    def strikes(self, data: bytes) -> bool:
        """Whether anything would go; the cheapest that can be asked."""
        return len(data) >= _SHORTEST and self._any.search(data) is not None

    def redact(self, text: str) -> tuple[str, Mapping[str, int]]:
        """The text without secrets, and how often each rule struck."""
        if len(text) < _SHORTEST:
            return text, {}
        if text in self._clean:
            return text, {}
        data = text.encode("utf-8", "surrogatepass")
        if self._any.search(data) is None:
            if len(text) <= _SHORT:
                if len(self._clean) >= _REMEMBERED:
                    self._clean.clear()
                self._clean.add(text)
            return text, {}
        redacted = self.redacted(data)
        return redacted.data.decode("utf-8", "surrogatepass"), redacted.rules

    def redacted(self, data: bytes) -> Redacted:
        """The same for bytes of any kind, with the names of the secrets."""
        return _redacted(data, self.find(data))

    def find(self, data: bytes, start: int = 0) -> list[Span]:
        """What goes, from left to right; no two touch."""
        first = self._any.search(data, start)
        if first is None:
            return []
        known = _joined(self._values(data, first.start()))
        every = _shaped(data, first.start()) if self._shaped else ()
        shaped = [span for span in every if not _covered(span, known)]
        return _joined(sorted([*known, *shaped], key=lambda span: span.start))

    def begun(self, data: bytes, most: int) -> int:
        """Where a shape may begin that only what follows can settle, at most so many bytes before the end; or the
        end."""
        shape = _begun_shape().search(data, max(0, len(data) - most)) if self._shaped else None
        return len(data) if shape is None else int(shape.start())

    def within(self, data: bytes, start: int, stop: int) -> Redacted:
        """What stands between two places, redacted as a part of all the data: neither place is inside of a match, and
        nothing else moves them, so that what is left out does not tell what it was."""
        every = self.find(data)
        start = next((span.start for span in every if span.begins < start < span.end), start)
        stop = next((span.end for span in every if span.begins < stop < span.end), stop)
        spans = [span for span in every if start <= span.start and span.end <= stop]
        return _redacted(data[start:stop], spans, start)

    def _values(self, data: bytes, start: int) -> Iterator[Span]:
        if not self._forms:
            return
        hits = 0
        match = self._known.search(data, start)
        while match is not None:
            begin, end = match.span()
            hits += 1
            yield Span(begin, end, Counter({KNOWN: 1}), self._names(data[begin:end]), begin)
            # One may begin inside of another and go on behind its end.
            match = self._known.search(data, begin + 1 if hits < _THOROUGH else end)

    def _names(self, hit: bytes) -> set[str]:
        return {self._forms[index][0] for index in self._which.Match(hit)}

    @cached_property
    def reach(self) -> int:
        """How far a known value may stretch, in bytes."""
        return max((form.longest for _, form in self._forms), default=0)

    @cached_property
    def _which(self) -> Any:
        return _whole_set([form.whole for _, form in self._forms])


def _redacted(data: bytes, spans: list[Span], place: int = 0) -> Redacted:
    if not spans:
        return Redacted(data, {}, {})
    rules: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for span in spans:
        rules.update(span.rules)
        names.update(span.secrets)
    return Redacted(without(data, spans, place), dict(rules), dict(names))


def without(data: bytes, spans: list[Span], place: int = 0, *, masked: bool = False) -> bytes:
    """The data with each span replaced; masked, it is as long as before. `place` is where in the spans' it begins."""
    pieces: list[bytes] = []
    end = 0
    for span in spans:
        gone = MASK * (span.end - span.start) if masked else REPLACEMENT.encode()
        pieces += (data[end : span.start - place], gone)
        end = span.end - place
    return b"".join((*pieces, data[end:]))


_parts = cache(shapes)


@cache
def _shapes() -> tuple[Any, Any, list[tuple[str, Any]]]:
    """One pattern that finds any shape, one set that tells which, and each by itself for the piece that goes."""
    wholes = [part.whole for part in _parts().values()]
    each = [(name, compiled(part.whole)) for name, part in _parts().items()]
    return union(wholes), _whole_set(wholes), each


@cache
def _begun_shape() -> Any:
    return compiled(f"(?:{'|'.join(part.begun for part in _parts().values())})\\z")


def _shaped(data: bytes, start: int) -> Iterator[Span]:
    anywhere, which, each = _shapes()
    match = anywhere.search(data, start)
    while match is not None:
        begin, end = match.span()
        name, shape = each[min(which.Match(data[begin:end]))]
        inner = shape.match(data, begin)
        groups = [inner.span(number) for number in range(1, shape.groups + 1) if inner.start(number) >= 0]
        first, last = groups[-1] if groups else (begin, end)
        yield Span(first, last, Counter({name: 1}), begins=begin)
        match = anywhere.search(data, end)


def _covered(span: Span, known: list[Span]) -> bool:
    place = bisect_right(known, span.start, key=lambda other: other.start)
    return place > 0 and span.end <= known[place - 1].end


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap are one. Of a value's own overlaps only one is counted."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is None or span.start >= last.end:
            joined.append(span)
            continue
        last.end = max(last.end, span.end)
        last.begins = min(last.begins, span.begins)
        last.secrets |= span.secrets
        last.rules |= span.rules
    return joined


def _whole_set(patterns: list[str]) -> Any:
    chosen = re2.Set.FullMatchSet(options(sum(map(len, patterns))))
    for pattern in patterns:
        chosen.Add(pattern.encode("ascii"))
    chosen.Compile()
    return chosen
