"""Sizes as people write and read them: MiB as a plain number, or a number with a unit. In here they are bytes."""

from __future__ import annotations

import re

from ringfence.core.box import MIB
from ringfence.core.quoting import quoted

_UNITS = {"K": 1024, "M": MIB, "G": 1024 * MIB, "T": 1024 * 1024 * MIB}
_WRITTEN = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,20}))? ?(?:([KMGT])(?:I?B)?)?", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """The bytes of `512` (MiB), `512M`, `1.5G`, `2GiB`, `800MB` or `64k`; every unit is a power of 1024, and a part of
    a byte is dropped. Raises ValueError with a sentence that says what is understood."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{quoted(text)} is not a size: write MiB as a plain number, as in 512, or a number with K, M, G or T, as"
            " in 512M or 1.5G"
        )
    whole, part, unit = found.groups(default="")
    # No float comes in between: 0.1T is what it says.
    parts: int = 10 ** len(part)
    return int(whole + part) * _UNITS[(unit or "M").upper()] // parts


def short_size(number: int) -> str:
    """Bytes for a person, in the largest unit that they fill."""
    value = float(number)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
