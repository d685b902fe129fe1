"""What the patterns of one schema may take when they are compiled, in time and in memory.

A pattern is read before it is built. The engine bounds only what it builds, so what reading takes is estimated from the
text first. Then each pattern is tried with a small limit, then with larger ones: the limit it fits in is its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jsonschema_rs

from ringfence.core.record import dataclass

MAX_BYTES = 32 * 1024 * 1024
"""Of all patterns of a schema, by the limits they were tried with. It takes about ten milliseconds to build each MB."""
_SIZES = tuple(10 * 1024 * 4**step for step in range(6))
"""From what hundreds of ordinary patterns may take each, up to 10 MB: `^\\p{L}{1,100}$` has 4 MB."""
_SIZE_OF_A_CLASS = 160 * 1024
"""More than any class of Unicode has by itself."""
_MAX_CACHE = 2_000_000
_BACKTRACKS = 10_000

_MAX_READING = 100_000
"""Microseconds, for all patterns of a schema once."""
_READING_AN_OPTION = 10
_READING_A_CLASS = 50
_READING_A_CLASS_IN_ANY_CASE = 250
_READING_A_WIDE_RANGE_IN_ANY_CASE = 6_000
_BYTES_A_MICROSECOND = 128
"""A pattern that takes long to read is not tried with small limits first."""

# These may find too much, never too little.
_NOT_LINEAR = re.compile(r"\?<?[=!]|\\[0-9]")
_PIECE = re.compile(r"[(\[\\.{*+?|^$]")
_COUNTED = re.compile(r"(?<!\\[pP])\{")
_SHORT = re.compile(r"\\[dDwWc]")
_SPACE = re.compile(r"\\[sS]")
_UNICODE = re.compile(r"\\[pP]")
_UNICODE_OR_SHORT = re.compile(r"\\[pPdDwWsS]")
_IN_ANY_CASE = re.compile(r"\?[imsUuxR-]*i")
_WIDE = re.compile(r"-(?![A-Za-z0-9]|\\[dws])|\\[pPDWSHNO]")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASS_IN_A_CLASS = re.compile(r"\[\^?\]?[^\]]*\[")


class TooCostly(Exception):
    """The patterns of a schema take more than they may."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """How the patterns of a schema are to be compiled, and how much of `MAX_BYTES` they have been charged."""

    options: Any
    bytes: int


def bounded(patterns: Iterable[str]) -> Compiling:
    """Raises TooCostly."""
    distinct = {pattern: _reading(pattern) for pattern in patterns}
    if sum(distinct.values()) > _MAX_READING:
        raise TooCostly
    # Lookarounds, which common schema generators emit, need the other engine, which has bounds as well. The two do not
    # read every pattern alike (`a{9}{9}` is text to one), so each is tried with the one that will compile it.
    linear = not any(map(_NOT_LINEAR.search, distinct))
    charged = 0
    for pattern, reading in distinct.items():
        charged = _charge(pattern, linear, reading * _BYTES_A_MICROSECOND, charged)
    return Compiling(_options(linear, _SIZES[-1], MAX_BYTES // max(len(distinct), 1)), charged)


def _charge(pattern: str, linear: bool, least: int, charged: int) -> int:
    for size in _SIZES:
        if size < least and size != _SIZES[-1]:
            continue
        charged += size * _pieces(pattern, size)  # also where it does not fit, as so much is built until then
        if charged > MAX_BYTES:
            raise TooCostly
        try:
            jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=_options(linear, size, size))
            break
        except ValueError:
            continue
    return charged  # what fits in no limit is no pattern or too large: the whole schema will not compile


def _pieces(pattern: str, size: int) -> int:
    """How many pieces of a pattern may each be as large as the limit: one with lookarounds is built in pieces."""
    if not _NOT_LINEAR.search(pattern):
        return 1
    if size <= _SIZE_OF_A_CLASS:
        return 1 + len(_PIECE.findall(pattern))
    # Only a counted repetition, several classes or a long text makes a piece larger than a class.
    classes = len(_UNICODE_OR_SHORT.findall(pattern))
    return 1 + len(_COUNTED.findall(pattern)) + classes // 2 + len(pattern) // 1000


def _options(linear: bool, size: int, cache: int) -> Any:
    # What a pattern keeps from matching is bounded too, so that all of them together do not keep more than they are.
    cache = min(cache, _MAX_CACHE)
    if linear:
        return jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=cache)
    return jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKS, size_limit=size, dfa_size_limit=cache)


def _reading(pattern: str) -> int:
    """About how many microseconds reading takes, once.

    A short class such as `\\d` is written out one at a time, and the pattern is read again after each. A class of
    Unicode is a list of hundreds of ranges; where case does not matter, all its characters are looked up.
    """
    short, spaces = len(_SHORT.findall(pattern)), len(_SPACE.findall(pattern))
    written_out = len(pattern) + 12 * short + 66 * spaces
    in_any_case = _IN_ANY_CASE.search(pattern) is not None
    cost = written_out * (2 if in_any_case else 1) + written_out * (short + spaces) // 8
    cost += (pattern.count("?") + pattern.count("|")) * _READING_AN_OPTION
    classes = len((_UNICODE_OR_SHORT if _NOT_LINEAR.search(pattern) else _UNICODE).findall(pattern))
    cost += classes * (_READING_A_CLASS_IN_ANY_CASE if in_any_case else _READING_A_CLASS)
    if in_any_case:
        wide = len(_WIDE.findall(pattern))
        if _CLASS_IN_A_CLASS.search(_ESCAPED.sub("", pattern)):
            wide += pattern.count("[") + pattern.count("^")  # a class may be looked up with each that it is in
        cost += wide * _READING_A_WIDE_RANGE_IN_ANY_CASE
    return cost
