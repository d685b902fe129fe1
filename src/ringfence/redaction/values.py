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
from ringfence.redaction.heads import Heads
from ringfence.redaction.shapes import shapes
from ringfence.secret import Secret, reveal

KNOWN = "known_secret"
"""The rule of every known value. Which one it was is for the audit log alone."""
REPLACEMENT = "[redacted]"
MASK = b"*"
"""For each byte, where what is around it must keep its place: in files."""

_SHORTEST = 12
"""Nothing that is searched has fewer bytes."""
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
        self._texts = {text for secret in secrets for text in (reveal(secret), reveal(secret)[::-1])}
        self._known = union(form.whole for _, form in self._forms)
        whole = (part.whole for part in _parts().values()) if shaped else ()
        self._any = union((*(form.whole for _, form in self._forms), *whole))

    def strikes(self, data: bytes) -> bool:
        """Whether anything would go; the cheapest that can be asked."""
        return len(data) >= _SHORTEST and self._any.search(data) is not None

    def redact(self, text: str) -> tuple[str, Mapping[str, int]]:
        """The text without secrets, and how often each rule struck."""
        if len(text) < _SHORTEST:
            return text, {}
        data = text.encode("utf-8", "surrogatepass")
        if self._any.search(data) is None:
            return text, {}
        redacted = self.redacted(data)
        return redacted.data.decode("utf-8", "surrogatepass"), redacted.rules

    def redacted(self, data: bytes) -> Redacted:
        """The same for bytes of any kind, with the names of the secrets."""
        spans = self.find(data)
        if not spans:
            return Redacted(data, {}, {})
        rules: Counter[str] = Counter()
        names: Counter[str] = Counter()
        for span in spans:
            rules.update(span.rules)
            names.update(span.secrets)
        return Redacted(without(data, spans), dict(rules), dict(names))

    def find(self, data: bytes, start: int = 0) -> list[Span]:
        """What goes, from left to right; no two touch."""
        first = self._any.search(data, start)
        if first is None:
            return []
        known = _joined(self._values(data, first.start()))
        every = _shaped(data, first.start()) if self._shaped else ()
        shaped = [span for span in every if not _covered(span, known)]
        return _joined(sorted([*known, *shaped], key=lambda span: span.start))

    def unfinished(self, data: bytes, most: int, spans: list[Span]) -> int:
        """Where the first match may begin that only what follows can settle; at most so many bytes before the end."""
        end = len(data)
        shape = _begun_shape().search(data, max(0, end - most)) if self._shaped else None
        place: int = end if shape is None else shape.start()
        if not self._forms:
            return place
        whole = set() if self._heads.alike else {span.begins for span in spans}
        return min(place, self._heads.unfinished(data, most, whole))

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

    @property
    def reach(self) -> int:
        """How far a known value may stretch, in bytes: what follows a gap may begin with the end of one."""
        return max((form.longest for _, form in self._forms), default=0)

    @cached_property
    def _which(self) -> Any:
        return _whole_set([form.whole for _, form in self._forms])

    @cached_property
    def _heads(self) -> Heads:
        return Heads([form for _, form in self._forms], self._texts)


def without(data: bytes, spans: list[Span], *, masked: bool = False) -> bytes:
    """The data with each span replaced; masked, it is as long as before."""
    pieces: list[bytes] = []
    end = 0
    for span in spans:
        pieces += (data[end : span.start], MASK * (span.end - span.start) if masked else REPLACEMENT.encode())
        end = span.end
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
