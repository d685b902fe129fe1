"""What the kernel does with a seccomp filter, in Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, NOTIFY, ERRNO = 0x7FFF0000, 0x80000000, 0x7FC00000, 0x00050000


@dataclass(frozen=True)
class Answer:
    value: int
    steps: int
    """How many instructions it took."""
    looked_at: frozenset[int]
    """The offsets of the words that were loaded."""


def judge(program: bytes, number: int, arch: int, args: Sequence[int]) -> Answer:
    """Run a filter on a call. Raises on whatever the kernel would not have taken."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *args)
    instructions = list(struct.iter_unpack("=HBBI", program))
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
