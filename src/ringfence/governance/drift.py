"""How what a server shows differs from what was accepted of it, field by field, for the person who is to accept it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ringfence.core import invisible
from ringfence.core.model import Definition, Json
from ringfence.core.record import dataclass

_FIRST = ("title", "description")
"""Shown first: a model reads these."""
_MAX_COMPARED = 10_000
"""Pairs of lines. A server decides how many there are, and comparing lines that repeat costs more than their square."""

Sign = Literal[" ", "-", "+"]


class FieldChange(NamedTuple):
    """One field, before and after, line by line. Of a new definition all lines are new."""

    name: str
    lines: list[tuple[Sign, str]]


@dataclass(frozen=True, slots=True)
class Drift:
    """A definition that is not accepted yet; `old` is the accepted one that it replaces."""

    new: Definition
    old: Definition | None

    def fields(self) -> Iterator[FieldChange]:
        """All that is accepted with it: nothing may be accepted of which only a part was seen."""
        old = {} if self.old is None else self.old.body
        for name in ordered({**old, **self.new.body}):
            before, after = old.get(name), self.new.body.get(name)
            if self.old is None:
                yield FieldChange(name, [("+", line) for line in text(after).split("\n")])
            elif before != after:
                yield FieldChange(name, list(compared(text(before), text(after))))


def ordered(body: Json) -> list[str]:
    """The fields of a definition but its name, those first that a model reads."""
    first = [name for name in _FIRST if name in body]
    return [*first, *sorted(name for name in body if name not in (*_FIRST, "name"))]


def compared(before: str, after: str) -> Iterator[tuple[Sign, str]]:
    """The lines of both, and which of them are gone or new."""
    old, new = before.split("\n"), after.split("\n")
    shorter = min(len(old), len(new))
    head = next((at for at in range(shorter) if old[at] != new[at]), shorter)
    tail = next((at for at in range(shorter - head) if old[-1 - at] != new[-1 - at]), shorter - head)
    yield from ((" ", line) for line in old[:head])
    yield from _compared(old[head : len(old) - tail], new[head : len(new) - tail])
    yield from ((" ", line) for line in old[len(old) - tail :])


def _compared(old: list[str], new: list[str]) -> Iterator[tuple[Sign, str]]:
    if len(old) * len(new) > _MAX_COMPARED:
        yield from (("-", line) for line in old)
        yield from (("+", line) for line in new)
        return
    for tag, left, left_end, right, right_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from ((" ", line) for line in old[left:left_end])
            continue
        yield from (("-", line) for line in old[left:left_end])
        yield from (("+", line) for line in new[right:right_end])


def text(value: object) -> str:
    if value is None:
        return "(none)"
    return value if isinstance(value, str) else invisible.json_text(value)
