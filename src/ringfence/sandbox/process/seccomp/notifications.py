"""Answers the system calls that the kernel asks the supervisor about (seccomp user notifications).

It counts and refuses them, unless a program wants to wait for connections where only its own box can make any, or to
share memory within its limit, or to wait for descriptors with one more epoll.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ringfence.sandbox.process.limits.uncounted import MOST_WATCHERS
from ringfence.sandbox.process.seccomp import filter, verdicts
from ringfence.sandbox.process.zygote import kernel

_THREAD = os.O_EXCL  # PIDFD_THREAD: that one thread, whose descriptors need not be those of its process
_MOST_WAITING = 0x7FFFFFFF
_RECEIVE = 0xC0502100  # _IOWR('!', 0, struct seccomp_notif)
_SEND = 0xC0182101  # _IOWR('!', 1, struct seccomp_notif_resp)
_VALID = 0x40082102  # _IOW('!', 2, __u64)
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
MAX_DENIALS = 20_000
"""Each costs the supervisor a moment; no honest program makes so many."""
_AT_ONCE = 64
_LONG = 0.05
"""Seconds: after a look at a whole box that took longer, other boxes come first."""
_BREATH = 3.0
"""For so many times as long as the look took, the box is not looked at again."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MACHINE = os.uname().machine


# ── Waiting for connections ───────────────────────────────────────────────────────────────────────
# It is refused in a box, but for sockets that are files, which programs of one box have for each other. The filter sees
# a number where the socket is meant, and what that number stands for can change while we look. So we take a copy of the
# socket, look at that, and do to it what was asked for: nothing that the program does meanwhile makes it another.


def listen(caller: int, args: Sequence[int], still_asks: Callable[[], bool], owner: int | None = None) -> int:
    """Listen on behalf of the caller, a thread. Returns 0 or an error number for it.

    `still_asks` says whether the caller still waits: otherwise its number may belong to another thread by now. Clients
    see `owner` as the user of the socket, where that is not our own.
    """
    descriptor = args[0] & 0xFFFFFFFF
    backlog = args[1] & 0xFFFFFFFF
    try:
        handle = _opened(caller)
    except OSError:
        return errno.EACCES
    try:
        if not still_asks():
            return errno.EACCES
        copy = kernel.call("pidfd_getfd", handle, descriptor, 0)
    except OSError as exc:
        # Where the kernel gives us no copy, we cannot know what it is.
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
    # A kernel before 6.9 has handles for processes only.
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

    They are set for a thread of its own, by system calls that change no other thread: there is nothing to set back. Its
    real ids stay ours, so that processes of that id have no rights over it.
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


# ── Counting and refusing ─────────────────────────────────────────────────────────────────────────


class Account:
    """Memory that a box shares among its processes, where no control group counts it.

    When a part of a mapping is unmapped, we cannot see how much is left: so memory is given back only when no process
    has any of it left.
    """

    def __init__(self, most: int, reclaim: Callable[[], object] = lambda: None) -> None:
        """`reclaim` lowers `taken` and `watchers` where less is left."""
        self._most = most
        self._reclaim_now = reclaim
        self._next = float("-inf")
        self.taken = 0
        self.refused = False
        self.watchers = 0
        """The largest possible number of epoll instances."""

    def take(self, size: int) -> bool:
        size = -(-size // _PAGE) * _PAGE
        if self.taken + size > self._most:
            self._reclaim()
        if self.taken + size > self._most:
            self.refused = True
            return False
        self.taken += size
        return True

    def _reclaim(self) -> None:
        """A program that asks for too much must not keep us busy: a look takes as long as the box makes it."""
        began = time.monotonic()
        if began >= self._next:
            self._reclaim_now()
            took = time.monotonic() - began
            if took > _LONG:
                self._next = began + took * (1 + _BREATH)

    def watch(self) -> bool:
        """Whether there may be one more epoll instance."""
        if self.watchers >= MOST_WATCHERS:
            self._reclaim()
        if self.watchers >= MOST_WATCHERS:
            return False
        self.watchers += 1
        return True


class Denials:
    """The refused system calls of one box."""

    def __init__(self, descriptor: int | None, account: Account, owner: int | None = None) -> None:
        """`owner` is the user id of the box on the host, where that is not our own."""
        self._account = account
        self._owner = owner
        self.descriptor = descriptor
        """None where a box was made without the filter that asks."""
        self._poll: select.poll | None = None
        self.total = 0
        """All questions, whatever the answer, except for shared memory that was granted."""
        self.by_name: dict[str, int] = {}
        self.late: dict[str, int] = {}
        """Refused calls of tasks that belong to no running step; not in `by_name`."""
        self.is_late: Callable[[int], bool] = lambda _: False
        """Whether a task, by its number, belongs to no running step."""

    def answer(self) -> bool:
        """Answer the questions that wait. False once no process is left that could ask."""
        for _ in range(_AT_ONCE):
            events = self._events()
            if not events & select.POLLIN:
                return not events  # without a caller the kernel would let us wait for ever
            question = bytearray(80)
            assert self.descriptor is not None
            try:
                fcntl.ioctl(self.descriptor, _RECEIVE, question, True)
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.EINTR):
                    continue  # it was killed while it waited
                return False
            identity, caller, _, number = struct.unpack_from("=QIIi", question)
            name = filter.name_of(_MACHINE, number)
            error = errno.EPERM
            goes_on = 0
            if name == "listen":
                error = self._weighed(identity, caller, question)
            elif name == "mmap":
                # Its arguments are in registers, so the kernel continues with exactly these.
                fits = self._account.take(struct.unpack_from("=6Q", question, 32)[1])
                error, goes_on = (0, _CONTINUE) if fits else (errno.ENOMEM, 0)
            elif name in verdicts.WATCHERS:
                error, goes_on = (0, _CONTINUE) if self._account.watch() else (errno.EMFILE, 0)
            self.total += not goes_on
            if error in (errno.EPERM, errno.EACCES):
                counted = self.late if self.is_late(caller) else self.by_name
                counted[name] = counted.get(name, 0) + 1
            with contextlib.suppress(OSError):  # the caller is gone
                fcntl.ioctl(self.descriptor, _SEND, struct.pack("=QqiI", identity, 0, -error, goes_on))
        return True

    @property
    def in_use(self) -> bool:
        """Whether a process is left that could ask."""
        return self.descriptor is not None and not self._events() & (select.POLLHUP | select.POLLERR)

    def _events(self) -> int:
        if self._poll is None:
            assert self.descriptor is not None
            self._poll = select.poll()
            self._poll.register(self.descriptor, select.POLLIN)
        events = self._poll.poll(0)
        return events[0][1] if events else 0

    def _weighed(self, identity: int, caller: int, question: bytearray) -> int:
        def still_asks() -> bool:
            assert self.descriptor is not None
            try:
                fcntl.ioctl(self.descriptor, _VALID, struct.pack("=Q", identity))
            except OSError:
                return False
            return True

        return listen(caller, struct.unpack_from("=6Q", question, 32), still_asks, self._owner)
