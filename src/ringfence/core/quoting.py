"""How a message repeats what somebody else wrote: whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable


def quoted(value: object, most: int = 80, form: Callable[[str], str] = repr) -> str:
    """A value as it stands in a message. Of a longer one only the length is said.

    Messages are cleaned later, when it is known what is secret and what was an argument, and a part of either would not
    be recognised then. So no message may cut what it quotes; it is cut itself once it is clean.
    """
    text = value if isinstance(value, str) else str(value)
    return form(text) if len(text) <= most else f"… ({len(text)} characters)"


def whole_lines(tail: bytes | bytearray, most: int) -> str:
    """The end of a stream, of which the last `most` bytes were kept, without the line that this has cut."""
    return (tail if len(tail) < most else tail.partition(b"\n")[2]).decode("utf-8", "replace")
