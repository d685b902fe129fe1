"""Removes a tenant's known secrets, and whatever has the shape of one, from text and from streams of bytes.

All patterns are one automaton, whose speed hardly depends on how many values there are. Only where it matches is it
asked what was found: first values, then shapes, both on the text as it came, so that neither can hide the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cache, cached_property
from itertools import islice
from typing import Any

import re2

from ringfence.core.record import dataclass
from ringfence.core.secret import REPLACEMENT, Secret, reveal
from ringfence.secrets.patterns import Form, compiled, forms, loosened, options, shapes, union

KNOWN = "known_secret"
"""The rule of every known value. Which one it was is for the audit log alone."""
MASK = b"*"
"""For each byte, where what is around it must keep its place: in files."""

_SHORTEST = 12
"""Nothing that is searched has fewer bytes."""
_SHORT = 200
_REMEMBERED = 256
_MAX_HITS = 2000
"""A text with more is withheld whole: each costs a search of its own, and no reader misses what is left of it."""
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
    """What is left, and the rules that matched."""

    data: bytes
    rules: Mapping[str, int]
    secrets: Mapping[str, int]
    """By the secret's name: for the audit log alone, since a caller who knew could guess and try."""


class SecretMatcher:
    """Finds a fixed set of secrets, and the shapes. A rotated secret makes another matcher."""

    def __init__(self, secrets: Sequence[Secret] = (), *, shaped: bool = True) -> None:
        """Without shapes, known values alone are searched for."""
        self._shaped = shaped
        self._forms: list[tuple[str, Form]] = [
            (secret.name, form) for secret in secrets for form in forms(reveal(secret))
        ]
        self._known = union(form.whole for _, form in self._forms)
        shapes = tuple(_parts().values()) if shaped else ()
        known = tuple(form.whole for _, form in self._forms)
        self._wholes = (*known, *(part.whole for part in shapes))
        self._exact: Any = None
        self._loose = union((*known, *(loosened(part) for part in shapes)))
        """It does not count repetitions, so it is compiled in a tenth of the time; and it misses nothing. The exact one
        is made for the first text that matches this: in most processes none does."""
        self._clean: set[str] = set()
        """Short texts that were found to be so: reasons and names come again with every call."""

    def _any(self, data: bytes, start: int = 0) -> Any:
        """The first match of any of them, or None."""
        if self._exact is None:
            if self._loose.search(data, start) is None:
                return None
            self._exact = union(self._wholes)
        return self._exact.search(data, start)

    def matches(self, data: bytes) -> bool:
        """Whether `redact` would remove anything; cheaper than `redact`."""
        return len(data) >= _SHORTEST and self._any(data) is not None

    def knows(self, data: bytes) -> bool:
        """Whether a known value is in it. It costs one search, however many shapes there are."""
        return bool(self._forms) and self._known.search(data) is not None

    def redact(self, text: str, most: int | None = None) -> tuple[str, Mapping[str, int]]:
        """The text without secrets, and how often each rule matched. One with more than `most` pieces goes whole."""
        if len(text) < _SHORTEST:
            return text, {}
        if text in self._clean:
            return text, {}
        data = text.encode("utf-8", "surrogatepass")
        if self._any(data) is None:
            if len(text) <= _SHORT:
                if len(self._clean) >= _REMEMBERED:
                    self._clean.clear()
                self._clean.add(text)
            return text, {}
        redacted = _redacted(data, self.find(data, most=_MAX_HITS if most is None else most))
        return redacted.data.decode("utf-8", "surrogatepass"), redacted.rules

    def marked(self, text: str) -> tuple[str, Mapping[str, int]]:
        """The same, but for what only has the shape of a secret: in its place stands which, and how long it was."""
        if len(text) < _SHORTEST:
            return text, {}
        data = text.encode("utf-8", "surrogatepass")
        spans = self.find(data, most=_MAX_HITS)
        found = _redacted(data, spans, mark=_mark)
        return found.data.decode("utf-8", "surrogatepass"), found.rules

    def redacted(self, data: bytes) -> Redacted:
        """The same for bytes of any kind, with the names of the secrets."""
        return _redacted(data, self.find(data, most=_MAX_HITS))

    def find(self, data: bytes, start: int = 0, most: int | None = None) -> list[Span]:
        """The spans to remove, from left to right; no two touch. Where there are more than `most`, it is all one."""
        first = self._any(data, start)
        if first is None:
            return []
        found = list(islice(self._values(data, first.start()), most))
        every = list(islice(_shaped(data, first.start()), most)) if self._shaped else []
        if most is not None and max(len(found), len(every)) == most:
            return [_one(data, [*found, *every])]
        known = _joined(found)
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
        return SearchedText(data, self.find(data)).page(start, stop)[0]

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


class SearchedText:
    """A text, and what goes of it: a page of it shows the same wherever its borders are."""

    def __init__(self, data: bytes, spans: list[Span]) -> None:
        self._data = data
        self._spans = spans

    def page(self, start: int, stop: int) -> tuple[Redacted, int]:
        """What stands between two places, and where the page really ends: neither of its borders is inside of what
        goes."""
        start = next((span.start for span in self._spans if span.begins < start < span.end), start)
        stop = next((span.end for span in self._spans if span.begins < stop < span.end), stop)
        spans = [span for span in self._spans if start <= span.start and span.end <= stop]
        return _redacted(self._data[start:stop], spans, start), stop

    def masked(self, start: int, stop: int) -> Redacted:
        """The same for what is no text: as long as before, so neither border moves."""
        spans = [span for span in self._spans if span.start < stop and span.end > start]
        gone = _redacted(self._data, spans)
        return replace(gone, data=without(self._data, spans, masked=True)[start:stop])


def searched(data: bytes, values: SecretMatcher | None, patterns: Sequence[str] = ()) -> SearchedText:
    """Search a text for secrets and for an operator's own patterns, so that it can be shown page by page."""
    spans = [] if values is None or not values.matches(data) else values.find(data, most=_MAX_HITS)
    for index, pattern in enumerate(patterns):
        own = list(islice(_matches(pattern, data, f"redact[{index}]"), _MAX_HITS))
        spans = [_one(data, [*spans, *own])] if len(own) == _MAX_HITS else [*spans, *own]
    return SearchedText(data, _joined(sorted(spans, key=lambda span: span.start)))


def _matches(pattern: str, data: bytes, rule: str) -> Iterator[Span]:
    for match in re2.finditer(pattern, data):
        begin, end = match.span()
        if begin < end:
            yield Span(begin, end, Counter({rule: 1}), begins=begin)


def _mark(span: Span, gone: bytes) -> bytes:
    # How long a known secret is, is no one's business.
    if span.secrets or not span.rules:
        return REPLACEMENT.encode()
    size = len(gone.decode("utf-8", "surrogatepass"))
    return f"[redacted: {size} characters that look like {' and '.join(sorted(span.rules))}]".encode()


def _redacted(
    data: bytes, spans: list[Span], place: int = 0, mark: Callable[[Span, bytes], bytes] | None = None
) -> Redacted:
    if not spans:
        return Redacted(data, {}, {})
    rules: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for span in spans:
        rules.update(span.rules)
        names.update(span.secrets)
    return Redacted(without(data, spans, place, mark=mark), dict(rules), dict(names))


def without(
    data: bytes,
    spans: list[Span],
    place: int = 0,
    *,
    masked: bool = False,
    mark: Callable[[Span, bytes], bytes] | None = None,
) -> bytes:
    """The data with each span replaced; masked, it is as long as before. `place` is where in the spans' it begins.
    `mark` says what stands in the place of one."""
    pieces: list[bytes] = []
    end = 0
    for span in spans:
        gone = MASK * (span.end - span.start) if masked else REPLACEMENT.encode()
        if mark is not None:
            gone = mark(span, data[span.start - place : span.end - place])
        pieces += (data[end : span.start - place], gone)
        end = span.end - place
    return b"".join((*pieces, data[end:]))


_parts = cache(shapes)


@cache
def _shapes() -> tuple[Any, Any, list[tuple[str, Any]]]:
    """One pattern that finds any shape, one set that says which it is, and each by itself for the piece to remove."""
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


def _one(data: bytes, spans: list[Span]) -> Span:
    """All of the data, for what was found in a part of it."""
    whole = Span(0, len(data), Counter())
    for span in spans:
        whole.rules.update(span.rules)
        whole.secrets |= span.secrets
    return whole


def _whole_set(patterns: list[str]) -> Any:
    chosen = re2.Set.FullMatchSet(options(sum(map(len, patterns))))
    for pattern in patterns:
        chosen.Add(pattern.encode("ascii"))
    chosen.Compile()
    return chosen


# ── Streams ──────────────────────────────────────────────────────────────────────────────────────

MAX_HELD = 16_384
"""Bytes that may wait. A shape that goes on longer is gone already: only its end is still awaited."""

_PEM = compiled(r"[A-Za-z0-9+/=\r\n\t \\]*")
_TOKEN = compiled(r"[A-Za-z0-9._~+/=-]*")


class RedactingStream:
    """Redacts one stream of bytes that comes in pieces, cut anywhere.

    The last bytes always wait for what follows, as many as the longest secret could need, whatever they are: bytes that
    wait only because they look like the beginning of a secret tell the program that wrote them that they are one. A
    shape is no secret, so what may be the beginning of one waits as long as it may.
    """

    def __init__(self, values: SecretMatcher, *, masked: bool = False) -> None:
        """Masked, what comes out is as long as what went in."""
        self._masked = masked
        self.rules: Counter[str] = Counter()
        self.secrets: Counter[str] = Counter()
        """For the audit log alone."""
        self._values = values
        self._wait = min(max(values.reach - 1, 0), MAX_HELD)
        self._seen = b""
        """The last bytes that went on: they show where a word begins, and after a release, what began in them."""
        self._held = b""
        self._released = False
        """Whether what was seen went on before anyone knew what it begins."""
        self._swallowing: str | None = None
        """The rule of a shape that was counted already and still goes on."""

    @property
    def held(self) -> int:
        """Bytes that wait for what follows."""
        return len(self._held)

    def feed(self, chunk: bytes) -> bytes:
        """What may go on of everything so far."""
        chunk = self._after_shape(chunk)
        if not chunk:
            return b""
        data = self._seen + self._held + chunk
        start = len(self._seen)
        spans = self._spans(data, start)
        last = spans[-1] if spans else None
        if last is not None and last.end == len(data) and len(data) - last.begins > MAX_HELD and not last.secrets:
            self._swallowing = None if self._masked else next(iter(last.rules))
            return self._emit(data, start, len(data), spans)
        cut = max(start, min(len(data) - self._wait, self._values.begun(data, MAX_HELD)))
        while spans and spans[-1].end > cut:
            cut = max(start, min(cut, spans.pop().begins))
        return self._emit(data, start, cut, spans)

    def went_before(self, data: bytes) -> None:
        """What was shown already, before this stream begins: of a secret that began in it, the rest goes."""
        self._seen = data[max(0, len(data) - max(self._wait, 1)) :]
        self._released = True

    def finish(self) -> bytes:
        """The rest. What was only the beginning of a secret is none."""
        data = self._seen + self._held
        start = len(self._seen)
        return self._emit(data, start, len(data), self._spans(data, start))

    def release(self) -> bytes:
        """What waits, though more may come: for a clock that does not ask what it is. Where it turns out to have been
        the beginning of a secret, the rest of that goes."""
        data = self._seen + self._held
        clean = self.finish()
        self.went_before(data)
        return clean

    def _spans(self, data: bytes, start: int) -> list[Span]:
        if not self._released:
            return self._values.find(data, start)
        # After a release: what ended before was counted then, and of what began before only the rest is still here.
        spans = [span for span in self._values.find(data) if span.end > start]
        for span in spans:
            span.start = max(span.start, start)
        return spans

    def _emit(self, data: bytes, start: int, cut: int, spans: list[Span]) -> bytes:
        for span in spans:
            self.rules.update(span.rules)
            self.secrets.update(span.secrets)
        self._held = data[cut:]
        if cut > start:
            self._seen = data[cut - 1 : cut]
            self._released = False
        return without(data[start:cut], spans, start, masked=self._masked)

    def _after_shape(self, chunk: bytes) -> bytes:
        if self._swallowing is None:
            return chunk
        rest = chunk[(_PEM if self._swallowing == "private_key" else _TOKEN).match(chunk).end() :]
        if rest:
            self._swallowing = None
        return rest


class CountingCleaner:
    """Removes secrets from an answer to a box, and counts them by rule."""

    def __init__(self, stream: RedactingStream, removed: Counter[str]) -> None:
        self._stream = stream
        self._removed = removed

    def feed(self, chunk: bytes) -> bytes:
        return self._stream.feed(chunk)

    def release(self) -> bytes:
        return self._stream.release()

    def finish(self) -> bytes:
        rest = self._stream.finish()
        self._removed.update(self._stream.rules)
        return rest


# ── Secrets that rotate ──────────────────────────────────────────────────────────────────────────


class TenantRedactor:
    """The redactor of one tenant, which follows its secrets as they rotate."""

    def __init__(self, known: Callable[[], tuple[Secret, ...]], *, shaped: bool = True) -> None:
        """`known` tells the tenant's secrets, and the very same tuple as long as they are the same."""
        self._known = known
        self._shaped = shaped
        self._secrets: tuple[Secret, ...] | None = None
        self._values: SecretMatcher | None = None

    @property
    def values(self) -> SecretMatcher:
        """The matcher for the secrets that are known now."""
        secrets = self._known()
        if self._values is None or secrets is not self._secrets:
            self._values = SecretMatcher(secrets, shaped=self._shaped)
            self._secrets = secrets
        return self._values

    @property
    def basis(self) -> object:
        return self._known()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to search for. Costs nothing: the automaton is made when text comes."""
        return not self._shaped and not self._known()

    def matches(self, data: bytes) -> bool:
        return self.values.matches(data)

    def knows(self, data: bytes) -> bool:
        return self.values.knows(data)

    def redact(self, text: str, most: int | None = None) -> tuple[str, Mapping[str, int]]:
        return self.values.redact(text, most)

    def marked(self, text: str) -> tuple[str, Mapping[str, int]]:
        return self.values.marked(text)

    def redacted(self, data: bytes) -> Redacted:
        return self.values.redacted(data)

    def secrets(self, text: str) -> Mapping[str, int]:
        """Which secrets are in a text, by name: for the audit log alone."""
        if len(text) < _SHORTEST:
            return {}
        return self.values.redacted(text.encode("utf-8", "surrogatepass")).secrets

    def stream(self, *, masked: bool = False) -> RedactingStream:
        """A redacting stream, with the secrets that are known at its beginning."""
        return RedactingStream(self.values, masked=masked)
