"""Redaction of what comes in pieces, cut anywhere.

The last bytes always wait for what follows, as many as the longest secret could need, whatever they are: what waits
only because it looks like the beginning of a secret tells whoever wrote it that it is one. A shape is no secret, so
what may be the beginning of one waits as long as it may.
"""

from __future__ import annotations

from collections import Counter

from ringfence.redaction.grammar import compiled
from ringfence.redaction.values import Span, Values, without

MOST_HELD = 16_384
"""Bytes that may wait. A shape that goes on longer is gone already: only its end is still awaited."""

_PEM = compiled(r"[A-Za-z0-9+/=\r\n\t \\]*")
_TOKEN = compiled(r"[A-Za-z0-9._~+/=-]*")


class Stream:
    """One stream of bytes. Not for several at a time."""

    def __init__(self, values: Values, *, masked: bool = False) -> None:
        """Masked, what comes out is as long as what went in."""
        self._masked = masked
        self.rules: Counter[str] = Counter()
        self.secrets: Counter[str] = Counter()
        """For the audit log alone."""
        self._values = values
        self._wait = min(max(values.reach - 1, 0), MOST_HELD)
        self._seen = b""
        """The last that went on: where a word begins is told by it, and after a release, what began in it."""
        self._held = b""
        self._swallowing: str | None = None
        """The rule of a shape that was told already and still goes on."""

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
        if last is not None and last.end == len(data) and len(data) - last.begins > MOST_HELD and not last.secrets:
            self._swallowing = None if self._masked else next(iter(last.rules))
            return self._emit(data, start, len(data), spans)
        cut = max(start, min(len(data) - self._wait, self._values.begun(data, MOST_HELD)))
        while spans and spans[-1].end > cut:
            cut = max(start, min(cut, spans.pop().begins))
        return self._emit(data, start, cut, spans)

    def finish(self) -> bytes:
        """The rest. What was only the beginning of a secret is none."""
        data, start = self._seen + self._held, len(self._seen)
        return self._emit(data, start, len(data), self._spans(data, start))

    def release(self) -> bytes:
        """What waits, though more may come: for a clock that does not ask what it is. Where it turns out to have been
        the beginning of a secret, the rest of that goes."""
        data = self._seen + self._held
        clean = self.finish()
        self._seen = data[max(0, len(data) - max(self._wait, 1)) :]
        return clean

    def _spans(self, data: bytes, start: int) -> list[Span]:
        if start <= 1:
            return self._values.find(data, start)
        # After a release: what ended before was told then, and of what began before only the rest is still here.
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
        return without(data[start:cut], spans, start, masked=self._masked)

    def _after_shape(self, chunk: bytes) -> bytes:
        if self._swallowing is None:
            return chunk
        rest = chunk[(_PEM if self._swallowing == "private_key" else _TOKEN).match(chunk).end() :]
        if rest:
            self._swallowing = None
        return rest
