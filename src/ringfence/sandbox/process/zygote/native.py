"""Two small programs in machine code, for what must not need an interpreter. Used inside the zygote.

`first` is the first process of a box. A pid namespace lives and dies with its first process; ours does nothing but reap
orphans and wait to be killed, so it needs no copy of the interpreter: it is born into the zygote's own memory, as
`vfork` would do it, and never returns into it. What runs in the box cannot look into it: it holds capabilities that
nothing else in the box has, belongs to no Landlock domain, and system calls that could are refused.

`calls` makes a list of system calls, one after the other. Every line of Python that a box runs before its program makes
it copy memory that it shares with its zygote; this makes it copy none. A box costs two thirds of what it did with both.

`docs/decisions/0020-machine-code.md` says more. The bytes are what an assembler makes of what stands beside them; a
test compares them where one is to be had.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import ctypes
import os
from ctypes import c_int, c_long, c_void_p

FIRST = {
    "aarch64": (
        "000080d2 01008012 020080d2 883680d2 010000d4"  # close_range(0, ~0, 0)
        "e0010010 010080d2 020080d2 030180d2 281180d2 010000d4"  # wait: rt_sigtimedwait(set, 0, 0, 8)
        "00008092 010080d2 220080d2 030080d2 882080d2 010000d4"  # reap: wait4(-1, 0, WNOHANG, 0)
        "1f0000f1 2cffff54 f2ffff17"  # cmp x0, #0; b.gt reap; b wait
        "0000010000000000"  # set: SIGCHLD
    ),
    "x86_64": (
        "b8b4010000 31ff beffffffff 31d2 0f05"  # close_range(0, ~0, 0)
        "b880000000 488d3d2c000000 31f6 31d2 41ba08000000 0f05"  # wait: rt_sigtimedwait(set, 0, 0, 8)
        "b83d000000 48c7c7ffffffff 31f6 ba01000000 4531d2 0f05"  # reap: wait4(-1, 0, WNOHANG, 0)
        "4885c0 7fe3 ebc9 90"  # test %rax, %rax; jg reap; jmp wait; nop
        "0000010000000000"  # set: SIGCHLD
    ),
}
CALLS = {
    "aarch64": (
        "e90300aa 0a0080d2 eb0301aa"  # mov x9, x0; mov x10, #0; mov x11, x1
        "5f010beb 60010054"  # next: cmp x10, x11; b.eq done
        "280140a9 210941a9 231142a9 251940f9"  # ldp x8, x0, [x9]; ldp x1, x2; ldp x3, x4; ldr x5
        "010000d4 201d00f9 8000f8b7"  # svc #0; str x0, [x9, #56]; tbnz x0, #63, done
        "29010191 4a050091 f5ffff17"  # add x9, x9, #64; add x10, x10, #1; b next
        "e0030aaa c0035fd6"  # done: mov x0, x10; ret
    ),
    "x86_64": (
        "53 4154 4155 4889fb 4531e4 4989f5"  # push %rbx, %r12, %r13; mov %rdi, %rbx; xor %r12d, %r12d; mov %rsi, %r13
        "4d39ec 742f"  # next: cmp %r13, %r12; je done
        "488b03 488b7b08 488b7310 488b5318"  # mov (%rbx), %rax; mov 8(%rbx), %rdi; 16: %rsi; 24: %rdx
        "4c8b5320 4c8b4328 4c8b4b30"  # mov 32(%rbx), %r10; 40: %r8; 48: %r9
        "0f05 48894338 4885c0 7809"  # syscall; mov %rax, 56(%rbx); test %rax, %rax; js done
        "4883c340 49ffc4 ebcc"  # add $64, %rbx; inc %r12; jmp next
        "4c89e0 415d 415c 5b c3"  # done: mov %r12, %rax; pop %r13, %r12, %rbx; ret
    ),
}
_SHARE_MEMORY = 0x100
_SIGCHLD = 17
_PAGE = 16384
_READ = 1
_WRITE = 2
_EXECUTE = 4
_PRIVATE = 2
_ANONYMOUS = 0x20
_WORDS = 8
"""Layout of a call in memory: its number, six arguments, its result."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, ctypes.c_size_t, c_int, c_int, c_int, c_long]


def _place(code: str) -> int:
    """Map code and return its address. From a file, so that it is never writable and executable at once."""
    file = os.memfd_create("code", os.MFD_CLOEXEC)
    try:
        data = bytes.fromhex(code)
        os.write(file, data)
        return _mapped(_libc.mmap(None, len(data), _READ | _EXECUTE, _PRIVATE, file, 0))
    finally:
        os.close(file)


def _mapped(address: int) -> int:
    if c_long(address).value == -1:
        raise OSError(ctypes.get_errno(), "no memory can be mapped to be executed")
    return address


class First:
    """Starts first processes. All of them use one stack: each writes there what the others wrote."""

    def __init__(self) -> None:
        self._entrance = c_void_p(_place(FIRST[os.uname().machine]))
        stack = _mapped(_libc.mmap(None, _PAGE, _READ | _WRITE, _PRIVATE | _ANONYMOUS, -1, 0))
        self._stack = c_void_p(stack + _PAGE - 256)
        self._everything = signal.valid_signals()

    def start(self, spaces: int) -> int:
        """Start one in these new namespaces. Returns its process id."""
        # Block signals, which it inherits: no handler of the interpreter's may run in memory that is not its own.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, self._everything)
        try:
            pid = int(_libc.clone(self._entrance, self._stack, c_int(spaces | _SHARE_MEMORY | _SIGCHLD), None))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"clone: {os.strerror(number)}")
        return pid


class Calls:
    """System calls that are ready to be made. The numbers and arguments are plain integers and addresses."""

    def __init__(self, calls: list[tuple[int, ...]]) -> None:
        self._length = len(calls)
        self._words = (c_long * (_WORDS * self._length))()
        for index, call in enumerate(calls):
            for place, word in enumerate(call, index * _WORDS):
                self._words[place] = word
        self._make = ctypes.CFUNCTYPE(c_long, c_void_p, c_long)(_place(CALLS[os.uname().machine]))
        self._arguments = (c_void_p(ctypes.addressof(self._words)), c_long(self._length))

    def set(self, index: int, argument: int, value: int) -> None:
        self._words[index * _WORDS + 1 + argument] = value

    def make(self) -> int:
        """Make calls until one fails. Returns the index of that one, or the number of calls."""
        return int(self._make(*self._arguments))

    def result(self, index: int) -> int:
        """The result of a call that was made; below zero, an error number."""
        return self._words[index * _WORDS + _WORDS - 1]

    def put(self, index: int, result: int) -> None:
        """Set the result as if the call had been made."""
        self._words[index * _WORDS + _WORDS - 1] = result
