"""What a call brings for a server beside its arguments, in `_meta`: what its contract names, and its trace.

Keys that belong to one hop (a progress token, revision, capabilities) never get here: the client of the next hop
makes them anew. Of the rest, a key that the contract does not name stays behind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any

from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import dataclass

TRACE = ("traceparent", "tracestate", "baggage")
"""W3C's trace context and baggage. They change with every repetition of a call, so no digest of it holds them."""

FREE_TEXT = "baggage"
"""The key that holds free text of its sender. A person who approves a call does not see it, so it is not sent on."""

MAX_META_BYTES = 65_536

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_STATE_MEMBERS = 32
_STATE_LENGTH = 512
_STATE = re.compile(
    r"(?P<key>[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)

_BAGGAGE_MEMBERS = 64
_BAGGAGE_LENGTH = 8192
_NAME = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_VALUE = r"(?:[\x21\x23-\x24\x26-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]|%[0-9A-Fa-f]{2})*"
_BAGGAGE = re.compile(rf"{_NAME}[ \t]*=[ \t]*{_VALUE}(?:[ \t]*;[ \t]*{_NAME}(?:[ \t]*=[ \t]*{_VALUE})?)*")


@dataclass(slots=True)
class Carried:
    """The `_meta` of one call, sorted by what becomes of it."""

    meta: Json = field(default_factory=dict)
    """What the contract lets go on."""
    trace: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Parts of a trace that stay behind, and why."""
    stripped: int = 0
    """How many other keys stay behind."""


def split(meta: Mapping[str, Any], allowed: Collection[str]) -> Carried:
    out = Carried()
    for key, value in meta.items():
        if key in TRACE:
            problem = trace_problem(key, value)
            if problem is None:
                out.trace[key] = value
            else:
                out.refused[key] = problem
        elif key in allowed:
            out.meta[key] = value
        else:
            out.stripped += 1
    return out


def meta_problem(meta: Json) -> str | None:
    """Why this cannot go on, naming no value."""
    try:
        size = len(canonical.dumps(meta))
    except (ValueError, TypeError, RecursionError):
        return "_meta is not plain JSON"
    if size > MAX_META_BYTES:
        return f"_meta has {size} bytes, and {MAX_META_BYTES} may be sent on"
    if canonical.depth(meta) > canonical.MAX_DEPTH:
        return f"_meta is nested deeper than {canonical.MAX_DEPTH} levels"
    return None


def trace_problem(name: str, value: Any) -> str | None:
    """Why a part of a trace does not go on: no text, too long, or not as W3C writes it."""
    if not isinstance(value, str):
        return "no text"
    match name:
        case "traceparent":
            return None if _PARENT.fullmatch(value) else "syntax"
        case "tracestate":
            return _list_problem(value, _STATE, _STATE_MEMBERS, _STATE_LENGTH)
        case _:
            return _list_problem(value, _BAGGAGE, _BAGGAGE_MEMBERS, _BAGGAGE_LENGTH)


def _list_problem(value: str, member: re.Pattern[str], most: int, length: int) -> str | None:
    if len(value) > length:
        return "too long"
    entries = value.split(",")
    if len(entries) > most:
        return "too long"
    found = [member.fullmatch(entry.strip(" \t")) for entry in entries]
    if not all(found):
        return "syntax"
    keys = [each["key"] for each in found if each is not None and "key" in each.groupdict()]
    return None if len(set(keys)) == len(keys) else "syntax"
