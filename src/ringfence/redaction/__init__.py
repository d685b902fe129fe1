"""Removes this tenant's known secrets, and whatever has the shape of one, from text and from streams of bytes."""

from ringfence.redaction.current import Current
from ringfence.redaction.stream import MOST_HELD, Stream
from ringfence.redaction.values import KNOWN, REPLACEMENT, Redacted, Values

__all__ = ["KNOWN", "MOST_HELD", "REPLACEMENT", "Current", "Redacted", "Stream", "Values"]
