"""Redaction follows the secrets as they rotate."""

from __future__ import annotations

from ringfence.redaction import KNOWN, Current
from ringfence.secret import Secret


def test_a_rotated_value_is_searched_from_the_next_text_on() -> None:
    known: tuple[Secret, ...] = (Secret("one", "the-first-value"),)
    current = Current(lambda: known)
    assert current.redact("the-first-value the-second-value") == ("[redacted] the-second-value", {KNOWN: 1})
    before = current.values
    assert current.values is before
    known = (Secret("one", "the-second-value"), *known)
    assert current.redact("the-first-value the-second-value") == ("[redacted] [redacted]", {KNOWN: 2})
    assert current.redacted(b"the-second-value").secrets == {"one": 1}
    stream = current.stream()
    assert stream.feed(b"the-second-") + stream.feed(b"value.") + stream.finish() == b"[redacted]."
