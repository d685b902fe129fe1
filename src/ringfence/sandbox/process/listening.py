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
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ringfence.sandbox.process import kernel

_THREAD = os.O_EXCL  # PIDFD_THREAD: that one thread, whose descriptors need not be those of its process
_MOST_WAITING = 0x7FFFFFFF


def listen(caller: int, args: Sequence[int], still_asks: Callable[[], bool], owner: int | None = None) -> int:
    """What the caller, a thread, is told: 0, or the number of an error.

    `still_asks` says whether it waits for the answer still: else its number may be somebody else's by now. Whoever
    connects is told that the socket is `owner`'s, where that is not our own user.
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
    return _on_copy(copy, backlog if backlog <= _MOST_WAITING else _MOST_WAITING, owner)


def _opened(caller: int) -> int:
    try:
        return os.pidfd_open(caller, _THREAD)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    # A kernel before 6.9 has handles of processes alone.
    lines = Path(f"/proc/{caller}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return os.pidfd_open(next(int(line.split()[1]) for line in lines if line.startswith("Tgid:")))


def _on_copy(copy: int, backlog: int, owner: int | None) -> int:
    try:
        held = socket.socket(fileno=copy)
    except OSError as exc:
        os.close(copy)
        return exc.errno or errno.ENOTSOCK
    with held:
        if held.family != socket.AF_UNIX and held.type == socket.SOCK_STREAM:
            return errno.EACCES
        try:
            if owner is None:
                held.listen(backlog)
            else:
                _as_owner(owner, lambda: held.listen(backlog))
        except OSError as exc:
            return exc.errno or errno.EACCES
    return 0


def _as_owner(owner: int, act: Callable[[], object]) -> None:
    """Raises OSError. The kernel keeps the effective ids of the thread that listens, and shows them to clients.

    They are those of a thread of its own, by system calls that change no other: there is nothing to set back. Its real
    ids stay ours, so that nobody of that id may do anything to it.
    """
    problems: list[OSError] = []

    def acting() -> None:
        try:
            with suppress(OSError):  # a user namespace may forbid it, to all that are in it
                kernel.call("setgroups", 0, None)
            kernel.call("setresgid", -1, owner, -1)
            kernel.call("setresuid", -1, owner, -1)
            act()
        except OSError as exc:
            problems.append(exc)

    shown = kernel.prctl(kernel.PR_GET_DUMPABLE)
    thread = threading.Thread(target=acting, name="listen")
    try:
        thread.start()
    except RuntimeError as exc:  # there are too many
        raise OSError(errno.ENOBUFS, str(exc)) from None
    thread.join()
    if shown == 1:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # other ids take it from the whole process
    if problems:
        raise problems[0]
