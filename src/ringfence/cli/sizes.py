"""Sizes on the command line."""

from __future__ import annotations

from collections.abc import Callable

from ringfence.core import sizes
from ringfence.core.box import MIB

_MAX_MB = 2**24
"""The largest size that an option takes, in MiB."""


def size_in_bytes(least_mb: int) -> Callable[[str], int]:
    """Reads the value of an option for a size, whose value is in bytes. ValueError says what is understood."""

    def parse(text: str) -> int:
        number = sizes.parse_size(text)
        if number < least_mb * MIB:
            raise ValueError(f"{text} is too small: {least_mb}M is the least")
        if number > _MAX_MB * MIB:
            raise ValueError(f"{text} is too large: {_MAX_MB}M is the most")
        return number

    return parse
