"""Patterns that know their own beginnings.

A stream is cut anywhere, so beside the pattern of a whole match it needs the pattern of every beginning of one. Both
are built here from the same parts, in the syntax of RE2, on bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import re2


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a pattern."""

    whole: str
    begun: str
    """What matches every beginning of it that is not empty, itself included."""
    longest: int = 1
    """In bytes; what has no end counts as `_RUN`."""
    loose: str = ""
    """The whole without counting far, for beginnings: to wait once too often costs less than to count backwards."""


_RUN = 8


def some(kind: str, least: int = 1, most: int | None = 1) -> Part:
    """So many bytes of one kind: a class, or a single byte as RE2 writes it. None: as many as there are."""
    if (least, most) == (1, 1):
        return Part(kind, kind)
    upper = "" if most is None else str(most)
    begun = f"{kind}+" if most is None or most > _RUN else f"{kind}{{1,{most}}}"
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    whole = kind + (short or f"{{{least},{upper}}}")
    loose = whole if max(least, most or 0) <= _RUN else kind + ("+" if least else "*")
    return Part(whole, begun, max(least, _RUN if most is None else most), loose)


def literal(data: bytes, *, any_case: bool = False) -> Part:
    """Exactly these bytes."""
    return sequence(*(some(_byte(byte, any_case=any_case)) for byte in data))


def sequence(*parts: Part) -> Part:
    """One after the other."""
    return reduce(lambda rest, part: _joined(part, rest), reversed(parts[:-1]), parts[-1])


def either(*parts: Part) -> Part:
    """One of them."""
    if len(parts) == 1:
        return parts[0]
    whole, begun = "|".join(part.whole for part in parts), "|".join(part.begun for part in parts)
    loose = "|".join(map(_loose, parts))
    return Part(f"(?:{whole})", f"(?:{begun})", max(part.longest for part in parts), f"(?:{loose})")


def maybe(*parts: Part) -> Part:
    """All of them in sequence, or nothing."""
    inner = sequence(*parts)
    return Part(f"(?:{inner.whole})?", inner.begun, inner.longest, f"(?:{_loose(inner)})?")


def secret(part: Part) -> Part:
    """The piece of a match that goes; without one it is the whole."""
    return Part(f"({part.whole})", part.begun, part.longest, _loose(part))


def word(part: Part) -> Part:
    """The same, where a word begins."""
    return Part(rf"\b{part.whole}", rf"\b{part.begun}", part.longest, rf"\b{_loose(part)}")


def _loose(part: Part) -> str:
    return part.loose or part.whole


def _joined(part: Part, rest: Part) -> Part:
    begun = f"(?:{part.begun}|{_loose(part)}{rest.begun})"
    return Part(part.whole + rest.whole, begun, part.longest + rest.longest, _loose(part) + _loose(rest))


def _byte(byte: int, *, any_case: bool = False) -> str:
    letter = bytes((byte,))
    if any_case and letter.isalpha():
        return f"[{letter.lower().decode()}{letter.upper().decode()}]"
    return letter.decode() if letter.isalnum() else f"\\x{byte:02x}"


_MEMORY, _MEMORY_PER_CHARACTER = 64 << 20, 384
"""The most that an automaton may take. It grows as texts need it; with too little it is given up, and all is slow."""


def compiled(pattern: str) -> Any:
    """For bytes of any kind; the longest of the leftmost matches counts."""
    return re2._Regexp(
        pattern.encode("ascii"), options(len(pattern))
    )  # past the cache of `re2.compile`: patterns hold values


def union(patterns: Iterable[str]) -> Any:
    """Any of them; nothing at all where there are none."""
    return compiled("|".join(patterns) or r"[^\x00-\xff]")


def options(size: int = 0) -> Any:
    chosen = re2.Options()
    chosen.encoding = re2.Options.Encoding.LATIN1
    chosen.longest_match = True
    chosen.log_errors = False
    chosen.max_mem = max(_MEMORY, _MEMORY_PER_CHARACTER * size)
    return chosen
