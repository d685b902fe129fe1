"""The machine code does what its comments say: what an assembler makes of them is what is there, and it works."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ringfence.sandbox.process.zygote import kernel, native

HERE = os.uname().machine

SOURCES = {
    ("FIRST", "aarch64"): """
        mov x0, #0; mov w1, #-1; mov x2, #0; mov x8, #436; svc #0
    1:  adr x0, 4f; mov x1, #0; mov x2, #0; mov x3, #8; mov x8, #137; svc #0
    2:  mov x0, #-1; mov x1, #0; mov x2, #1; mov x3, #0; mov x8, #260; svc #0
        cmp x0, #0; b.gt 2b; b 1b
        .balign 8
    4:  .quad 0x10000
    """,
    ("FIRST", "x86_64"): """
        mov $436, %eax; xor %edi, %edi; mov $-1, %esi; xor %edx, %edx; syscall
    1:  mov $128, %eax; lea 4f(%rip), %rdi; xor %esi, %esi; xor %edx, %edx; mov $8, %r10d; syscall
    2:  mov $61, %eax; mov $-1, %rdi; xor %esi, %esi; mov $1, %edx; xor %r10d, %r10d; syscall
        test %rax, %rax; jg 2b; jmp 1b
        .balign 8
    4:  .quad 0x10000
    """,
    ("CALLS", "aarch64"): """
        mov x9, x0; mov x10, #0; mov x11, x1
    1:  cmp x10, x11; b.eq 2f
        ldp x8, x0, [x9]; ldp x1, x2, [x9, #16]; ldp x3, x4, [x9, #32]; ldr x5, [x9, #48]
        svc #0; str x0, [x9, #56]; tbnz x0, #63, 2f
        add x9, x9, #64; add x10, x10, #1; b 1b
    2:  mov x0, x10; ret
    """,
    ("CALLS", "x86_64"): """
        push %rbx; push %r12; push %r13; mov %rdi, %rbx; xor %r12d, %r12d; mov %rsi, %r13
    1:  cmp %r13, %r12; je 2f
        mov (%rbx), %rax; mov 8(%rbx), %rdi; mov 16(%rbx), %rsi; mov 24(%rbx), %rdx
        mov 32(%rbx), %r10; mov 40(%rbx), %r8; mov 48(%rbx), %r9
        syscall; mov %rax, 56(%rbx); test %rax, %rax; js 2f
        add $64, %rbx; inc %r12; jmp 1b
    2:  mov %r12, %rax; pop %r13; pop %r12; pop %rbx; ret
    """,
}


def tool(name: str, machine: str) -> str:
    found = shutil.which(f"{machine}-linux-gnu-{name}") or (shutil.which(name) if machine == HERE else None)
    if found is None:
        pytest.skip(f"no assembler for {machine} (Debian: binutils-{machine.replace('_', '-')}-linux-gnu)")
    return found


@pytest.mark.parametrize(("program", "machine"), SOURCES)
def test_the_bytes_are_what_an_assembler_makes(program: str, machine: str, tmp_path: Path) -> None:
    made, plain = tmp_path / "made.o", tmp_path / "plain"
    source = SOURCES[program, machine] + "\n"
    subprocess.run([tool("as", machine), "-o", made, "-"], input=source.encode(), check=True)
    subprocess.run([tool("objcopy", machine), "-O", "binary", "-j", ".text", made, plain], check=True)
    assert plain.read_bytes() == bytes.fromhex(getattr(native, program)[machine])


needs_code = pytest.mark.skipif(HERE not in native.CALLS, reason=f"there is no code for {HERE}")


@needs_code
def test_calls_are_made_in_order_until_one_fails(tmp_path: Path) -> None:
    number = kernel.NUMBERS
    calls = native.Calls(
        [(number["dup3"], 2, 777, os.O_CLOEXEC), (number["close"], 777), (number["close"], 777), (number["setsid"],)]
    )
    before = os.getsid(0)
    assert calls.make() == 2
    assert (calls.result(0), calls.result(1), calls.result(2)) == (777, 0, -errno.EBADF)
    assert os.getsid(0) == before


@needs_code
def test_an_argument_can_be_put_in_later() -> None:
    calls = native.Calls([(kernel.NUMBERS["dup3"], -1, 778, os.O_CLOEXEC), (kernel.NUMBERS["close"], 778)])
    assert (calls.make(), calls.result(0)) == (0, -errno.EBADF)
    calls.set(0, 0, 1)
    assert calls.make() == 2
