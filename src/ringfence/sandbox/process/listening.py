"""Waiting for connections: refused in a box, but for sockets that are files, which programs of one box have for each
other.

The filter sees a number where the socket is meant, and what that number stands for can change while we look. So we take
a copy of the socket, look at that, and do to it what was asked for: nothing that the program does meanwhile makes it
another.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from ringfence.sandbox.process import kernel

_THREAD = os.O_EXCL  # PIDFD_THREAD: that one thread, whose descriptors need not be those of its process
_MOST_WAITING = 0x7FFFFFFF


def listen(caller: int, args: Sequence[int], still_asks: Callable[[], bool]) -> int:
    """What the caller, a thread, is told: 0, or the number of an error.

    `still_asks` says whether it waits for the answer still: else its number may be somebody else's by now.
    """
    descriptor, backlog = args[0] & 0xFFFFFFFF, args[1] & 0xFFFFFFFF
    try:
        handle = _opened(caller)
    except OSError:
        return errno.EACCES
    try:
        if not still_asks():
            return errno.EACCES
        copy = kernel.call("pidfd_getfd", handle, descriptor, 0)
    except OSError as exc:
        # Where the kernel does not let us have a copy, nobody knows what it is.
        return errno.EBADF if exc.errno == errno.EBADF else errno.EACCES
    finally:
        os.close(handle)
    return _on_copy(copy, backlog if backlog <= _MOST_WAITING else _MOST_WAITING)


def _opened(caller: int) -> int:
    try:
        return os.pidfd_open(caller, _THREAD)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    # A kernel before 6.9 has handles of processes alone.
    lines = Path(f"/proc/{caller}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return os.pidfd_open(next(int(line.split()[1]) for line in lines if line.startswith("Tgid:")))


def _on_copy(copy: int, backlog: int) -> int:
    try:
        held = socket.socket(fileno=copy)
    except OSError as exc:
        os.close(copy)
        return exc.errno or errno.ENOTSOCK
    with held:
        if held.family != socket.AF_UNIX and held.type == socket.SOCK_STREAM:
            return errno.EACCES
        try:
            held.listen(backlog)
        except OSError as exc:
            return exc.errno or errno.EACCES
    return 0
