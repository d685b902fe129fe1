"""Puts itself under the filter in a file, then becomes a command: `under_filter.py FILTER COMMAND…`."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

SECCOMP = {"x86_64": 317, "aarch64": 277}
PR_SET_NO_NEW_PRIVS, SET_MODE_FILTER = 38, 1


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(instructions: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(instructions) // 8, instructions)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if libc.syscall(SECCOMP[os.uname().machine], SET_MODE_FILTER, 0, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    install(Path(sys.argv[1]).read_bytes())
    os.execvp(sys.argv[2], sys.argv[2:])
