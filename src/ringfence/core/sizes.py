"""Sizes and times as people write and read them. In here they are bytes and seconds."""

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


_TIMES = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def short_time(seconds: float, *, units: int = 1) -> str:
    """How long, for a person: in the largest unit that it fills, and as many smaller ones as `units` allows."""
    left = max(0, int(seconds))
    first = next((place for place, (size, _) in enumerate(_TIMES) if left >= size), len(_TIMES) - 1)
    said: list[str] = []
    for size, name in _TIMES[first : first + units]:
        count, left = divmod(left, size)
        if count or not said:
            said.append(f"{count} {name}")
    return " ".join(said)
