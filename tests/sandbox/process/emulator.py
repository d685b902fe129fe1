"""Runs a few instructions of either machine, on any machine, before a kernel that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from unicorn import arm64_const, unicorn_const, x86_const
from unicorn.unicorn import Uc

CODE, DATA, STACK, BACK = 0x7F10_0001_0000, 0x7F20_0001_0000, 0x7F30_0001_0000, 0x7F40_0001_0000
"""Where things are: where half a register does not reach. `BACK` is where a function returns to."""
_SIZE = 0x10000
TOP = STACK + _SIZE // 2 - 8
"""Where the stack ends when a function begins: on x86_64 the address to return to lies there."""
_SOFTWARE_INTERRUPT = 2
_MAX_STEPS = 100_000

Call = tuple[int, ...]
"""The number, and six arguments."""
Kernel = Callable[[Call], int | None]
"""Its answer to a call; None: it ends the process."""


@dataclass(frozen=True)
class _Registers:
    """Those of a machine, by name."""

    constants: Any
    prefix: str
    call: tuple[str, ...]
    """The number of a system call, its arguments, its result."""
    arguments: tuple[str, ...]
    """Of a function, and what it returns."""
    lost: tuple[str, ...]
    """What a system call leaves undefined."""
    kept: tuple[str, ...]
    """What a function has to leave as it was."""
    others: tuple[str, ...]
    stack: str

    def __getitem__(self, name: str) -> int:
        return int(getattr(self.constants, f"{self.prefix}{name.upper()}"))


def _words(names: str) -> tuple[str, ...]:
    return tuple(names.split())


_REGISTERS = {
    "x86_64": _Registers(
        x86_const,
        "UC_X86_REG_",
        call=_words("rax rdi rsi rdx r10 r8 r9 rax"),
        arguments=_words("rdi rsi rax"),
        lost=_words("rcx r11"),
        kept=_words("rbx rbp r12 r13 r14 r15"),
        others=_words("rax rcx rdx rsi rdi r8 r9 r10 r11"),
        stack="rsp",
    ),
    "aarch64": _Registers(
        arm64_const,
        "UC_ARM64_REG_",
        call=_words("x8 x0 x1 x2 x3 x4 x5 x0"),
        arguments=_words("x0 x1 x0"),
        lost=(),
        # x18 belongs to the platform, x30 says where to return to.
        kept=_words("x18 x19 x20 x21 x22 x23 x24 x25 x26 x27 x28 x29 d8 d9 d10 d11 d12 d13 d14 d15"),
        others=_words("x0 x1 x2 x3 x4 x5 x6 x7 x8 x9 x10 x11 x12 x13 x14 x15 x16 x17"),
        stack="sp",
    ),
}


class Machine:
    """Its registers hold anything at first."""

    def __init__(self, name: str, code: bytes, kernel: Kernel, chance: Random) -> None:
        self.calls: list[Call] = []
        self.writes: list[tuple[int, int]] = []
        """Addresses and lengths."""
        self.steps: list[int] = []
        """Addresses of the instructions that were carried out."""
        self._registers, self._kernel, self._chance, self._intel = _REGISTERS[name], kernel, chance, name == "x86_64"
        uc = unicorn_const
        self._uc = Uc(*((uc.UC_ARCH_X86, uc.UC_MODE_64) if self._intel else (uc.UC_ARCH_ARM64, uc.UC_MODE_ARM)))
        for place in (CODE, DATA, STACK, BACK):
            self._uc.mem_map(place, _SIZE, uc.UC_PROT_READ | uc.UC_PROT_WRITE)
        self._uc.mem_write(CODE, code)
        for place in (CODE, BACK):
            self._uc.mem_protect(place, _SIZE, uc.UC_PROT_READ | uc.UC_PROT_EXEC)
        for register in (*self._registers.kept, *self._registers.others):
            self[register] = chance.getrandbits(64)
        self[self._registers.stack] = TOP
        self._uc.hook_add(uc.UC_HOOK_CODE, lambda _, address, size, data: self.steps.append(address))
        self._uc.hook_add(uc.UC_HOOK_MEM_WRITE, lambda _, kind, at, size, value, data: self.writes.append((at, size)))
        if self._intel:
            self._uc.hook_add(uc.UC_HOOK_INSN, lambda _, data: self._called(), None, 1, 0, x86_const.UC_X86_INS_SYSCALL)
        else:
            self._uc.hook_add(uc.UC_HOOK_INTR, lambda _, number, data: self._interrupted(number))

    def __getitem__(self, register: str) -> int:
        return int(self._uc.reg_read(self._registers[register]))

    def __setitem__(self, register: str, value: int) -> None:
        self._uc.reg_write(self._registers[register], value & 2**64 - 1)

    def put(self, data: bytes) -> None:
        self._uc.mem_write(DATA, data)

    def memory(self, address: int, length: int) -> bytes:
        return bytes(self._uc.mem_read(address, length))

    def run(self) -> None:
        """From the beginning, until the kernel ends it. Raises what an illegal access or instruction raises."""
        self._uc.emu_start(CODE, BACK, count=_MAX_STEPS)

    def function(self, *arguments: int) -> int:
        """Called as C would: what it returns. It must leave what it has to."""
        for register, value in zip(self._registers.arguments, arguments, strict=False):
            self[register] = value
        if self._intel:
            self._uc.mem_write(TOP, BACK.to_bytes(8, "little"))
        else:
            self["x30"] = BACK
        before = {register: self[register] for register in self._registers.kept}
        self._uc.emu_start(CODE, BACK, count=_MAX_STEPS)
        assert len(self.steps) < _MAX_STEPS, "it never returned"
        assert self["rip" if self._intel else "pc"] == BACK
        assert {register: self[register] for register in self._registers.kept} == before
        assert self[self._registers.stack] == TOP + 8 * self._intel
        return self[self._registers.arguments[-1]]

    def _interrupted(self, number: int) -> None:
        assert number == _SOFTWARE_INTERRUPT, f"interrupt {number}"
        self._called()

    def _called(self) -> None:
        *asked, result = self._registers.call
        self.calls.append(tuple(self[register] for register in asked))
        answer = self._kernel(self.calls[-1])
        if answer is None:
            self._uc.emu_stop()
            return
        for register in self._registers.lost:
            self[register] = self._chance.getrandbits(64)
        self[result] = answer


def inside(writes: Sequence[tuple[int, int]], first: int, length: int) -> bool:
    return all(first <= at and at + size <= first + length for at, size in writes)
