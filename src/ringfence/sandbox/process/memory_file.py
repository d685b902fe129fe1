"""Bytes for a process of a box, in a file that exists only in memory and that the process can neither change nor
execute."""

from __future__ import annotations

import fcntl
import os
from functools import cache

from ringfence.core.system import write_all

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL


def memory_file(data: bytes) -> int:
    """Bytes in a memory file, sealed: the program that gets it could open it again for writing, and fill it."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    descriptor = _unexecutable("payload")
    try:
        write_all(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)


def _unexecutable(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if can_be_sealed():
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    descriptor = os.memfd_create(name, flags)
    os.fchmod(descriptor, 0o444)
    return descriptor


@cache
def can_be_sealed() -> bool:
    """Whether the kernel can keep a memory file from ever being executed; before 6.3 it cannot."""
    try:
        os.close(os.memfd_create("probe", os.MFD_CLOEXEC | _NOEXEC_SEAL))
    except OSError:
        return False
    return True
