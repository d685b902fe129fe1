"""Counts the system calls that a box was refused. The kernel asks the supervisor about each; it says no, unless a
program wants to wait for connections where only its own box can make any, or to share memory within its limit, or to
wait for descriptors with one more epoll."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
import time
from collections.abc import Callable

from ringfence.sandbox.process import listening, seccomp, verdicts
from ringfence.sandbox.process.uncounted import MOST_WATCHERS

_RECEIVE = 0xC0502100  # _IOWR('!', 0, struct seccomp_notif)
_SEND = 0xC0182101  # _IOWR('!', 1, struct seccomp_notif_resp)
_VALID = 0x40082102  # _IOW('!', 2, __u64)
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
MAX_DENIALS = 20_000
"""Each costs the supervisor a moment; a program that goes on like this has no honest purpose."""
_AT_ONCE = 64
_LONG = 0.05
"""Seconds: after a look at a whole box that took longer, others have their turn."""
_BREATH = 3.0
"""So many times as long as it took, it is not looked at again."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MACHINE = os.uname().machine


class Account:
    """Memory that a box has shared among its processes, where no control group counts it.

    How much of a mapping is left when a part of it is unmapped, nobody can tell: so it is given back only when no
    process has any of it left.
    """

    def __init__(self, most: int, reclaim: Callable[[], object] = lambda: None) -> None:
        """`reclaim` sets `taken` and `watchers` back where less is left."""
        self._most = most
        self._reclaim_now = reclaim
        self._next = float("-inf")
        self.taken = 0
        self.refused = False
        self.watchers = 0
        """Instances of epoll, as many as there can be."""

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
        """Who asks for what it cannot have must not keep us busy: looking takes as long as the box makes it."""
        began = time.monotonic()
        if began >= self._next:
            self._reclaim_now()
            took = time.monotonic() - began
            if took > _LONG:
                self._next = began + took * (1 + _BREATH)

    def watch(self) -> bool:
        """Whether there may be one more instance of epoll."""
        if self.watchers >= MOST_WATCHERS:
            self._reclaim()
        if self.watchers >= MOST_WATCHERS:
            return False
        self.watchers += 1
        return True


class Denials:
    """Of one box."""

    def __init__(self, descriptor: int | None, account: Account, owner: int | None = None) -> None:
        """`owner` is who the box is on the host, where that is not our own user."""
        self._account = account
        self._owner = owner
        self.descriptor = descriptor
        """None where a box was made without the filter that asks."""
        self._poll: select.poll | None = None
        self.total = 0
        """What was asked, whatever the answer, but for memory that was let be shared."""
        self.by_name: dict[str, int] = {}
        self.late: dict[str, int] = {}
        """Of these, apart: those of tasks that no step which runs has to do with."""
        self.is_late: Callable[[int], bool] = lambda _: False
        """Whether a task, by its number, is such a one."""

    def answer(self) -> bool:
        """Refuse what waits. False once nobody is left who could ask."""
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
            name = seccomp.name_of(_MACHINE, number)
            told, goes_on = errno.EPERM, 0
            if name == "listen":
                told = self._weighed(identity, caller, question)
            elif name == "mmap":
                # Its arguments are in registers, so what goes on is what was asked for.
                fits = self._account.take(struct.unpack_from("=6Q", question, 32)[1])
                told, goes_on = (0, _CONTINUE) if fits else (errno.ENOMEM, 0)
            elif name in verdicts.WATCHERS:
                told, goes_on = (0, _CONTINUE) if self._account.watch() else (errno.EMFILE, 0)
            self.total += not goes_on
            if told in (errno.EPERM, errno.EACCES):
                counted = self.late if self.is_late(caller) else self.by_name
                counted[name] = counted.get(name, 0) + 1
            with contextlib.suppress(OSError):  # who asked is gone
                fcntl.ioctl(self.descriptor, _SEND, struct.pack("=QqiI", identity, 0, -told, goes_on))
        return True

    @property
    def in_use(self) -> bool:
        """Whether somebody is left who could ask."""
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

        return listening.listen(caller, struct.unpack_from("=6Q", question, 32), still_asks, self._owner)
