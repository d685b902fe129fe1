"""What the kernel does with a seccomp filter, in Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, NOTIFY, ERRNO = 0x7FFF0000, 0x80000000, 0x7FC00000, 0x00050000


@dataclass(frozen=True)
class Answer:
    value: int
    steps: int
    """How many instructions it took."""
    looked_at: frozenset[int]
    """The offsets of the words that were loaded."""


def instructions_of(program: bytes) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("=HBBI", program))


_decoded = lru_cache(maxsize=128)(instructions_of)


def refused(program: bytes) -> list[str]:
    """What the kernel would say against a filter when it is installed, whether or not a call ever gets there."""
    instructions = instructions_of(program)
    problems = [] if 1 <= len(instructions) <= 4096 else [f"{len(instructions)} instructions"]
    if instructions[-1][0] != 0x06:
        problems.append("does not end with an answer")
    for place, (code, yes, no, operand) in enumerate(instructions):
        match code:
            case 0x20 if operand % 4 or operand >= 64:
                problems.append(f"{place}: there is no word at {operand}")
            case 0x05 if place + 1 + operand >= len(instructions):
                problems.append(f"{place}: leads out")
            case 0x15 | 0x35 if place + 1 + max(yes, no) >= len(instructions):
                problems.append(f"{place}: leads out")
            case 0x20 | 0x05 | 0x15 | 0x35 | 0x54 | 0x06:
                pass
            case _:
                problems.append(f"{place}: not an instruction of ours: {code:#x}")
    return problems


def judge(program: bytes, number: int, arch: int, args: Sequence[int]) -> Answer:
    """Run a filter on a call. Raises on whatever the kernel would not have taken."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *args)
    instructions = _decoded(program)
    place, word, steps, looked_at = 0, 0, 0, set()
    while True:
        code, yes, no, operand = instructions[place]
        steps, place = steps + 1, place + 1
        match code:
            case 0x20:
                assert operand % 4 == 0
                word = struct.unpack_from("=I", data, operand)[0]
                looked_at.add(operand)
            case 0x54:
                word &= operand
            case 0x05:
                place += operand
            case 0x15:
                place += yes if word == operand else no
            case 0x35:
                place += yes if word >= operand else no
            case 0x06:
                return Answer(operand, steps, frozenset(looked_at))
            case _:
                raise AssertionError(f"not an instruction of ours: {code:#x}")
