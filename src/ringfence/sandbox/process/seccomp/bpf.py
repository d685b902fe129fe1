"""An assembler for the classic BPF that seccomp takes.

A program is written from its end to its beginning: jumps only go forwards, so whatever an instruction may jump to
stands already and its place is known. Where that is out of a jump's reach, a step on the way is written first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeVar

Place = int
"""Where an instruction stands, counted from the end of the program."""

_LOAD = 0x20
_AND = 0x54
_RETURN = 0x06
_GO = 0x05
_IF_EQUAL = 0x15
_IF_NOT_LESS = 0x35
_REACH = 255

Goal = TypeVar("Goal")


class BpfProgram:
    """Instructions from the last to the first: the one written last is the one that runs first."""

    def __init__(self) -> None:
        self._backwards: list[tuple[int, int, int, int]] = []
        self._returns: dict[int, Place] = {}

    def give(self, value: int) -> Place:
        """End with this value."""
        place = self._returns.get(value)
        if place is None or self._distance(place) > _REACH // 2:
            place = self._returns[value] = self._write(_RETURN, value)
        return place

    def load(self, offset: int, then: Place) -> Place:
        """Fetch a word of the call's description and go on."""
        self._next(then)
        return self._write(_LOAD, offset)

    def keep(self, bits: int, then: Place) -> Place:
        """Keep only these bits of the word and go on."""
        self._next(then)
        return self._write(_AND, bits)

    def choose(self, spans: Sequence[tuple[int, Goal]], write: Callable[[Goal], Place]) -> Place:
        """Go where the word leads, halving at each step.

        A span is its first value and the goal of all values up to the next span; the first span begins with 0, the
        last has no end. `write` writes what a goal stands for, or tells where it stands.
        """
        if len(spans) == 1:
            return write(spans[0][1])
        if len(spans) == 3 and spans[0][1] == spans[2][1] and spans[1][0] + 1 == spans[2][0]:
            other = write(spans[0][1])
            return self._jump(_IF_EQUAL, spans[1][0], write(spans[1][1]), other)
        middle = len(spans) // 2
        upper = self.choose(spans[middle:], write)
        return self._jump(_IF_NOT_LESS, spans[middle][0], upper, self.choose(spans[:middle], write))

    def __bytes__(self) -> bytes:
        """As `struct sock_filter[]`."""
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in reversed(self._backwards))

    def _write(self, code: int, operand: int, yes: int = 0, no: int = 0) -> Place:
        self._backwards.append((code, yes, no, operand))
        return len(self._backwards) - 1

    def _distance(self, place: Place) -> int:
        """How many instructions the next one to be written would have to skip."""
        return len(self._backwards) - 1 - place

    def _jump(self, code: int, operand: int, yes: Place, no: Place) -> Place:
        # Writing one step on the way may push the other goal out of reach, so there is room for two.
        no = no if self._distance(no) <= _REACH - 2 else self._step(no)
        yes = yes if self._distance(yes) <= _REACH else self._step(yes)
        return self._write(code, operand, self._distance(yes), self._distance(no))

    def _next(self, place: Place) -> None:
        """Make `place` what follows the next instruction to be written."""
        if self._distance(place):
            self._step(place)

    def _step(self, place: Place) -> Place:
        code, _, _, operand = self._backwards[place]
        if code == _RETURN:
            return self._write(_RETURN, operand)
        return self._write(_GO, self._distance(place))
