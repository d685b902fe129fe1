"""Answers the system calls that the kernel asks the supervisor about (seccomp user notifications).

It counts and refuses them, unless a program wants to share memory within its limit, to map a file, to wait for
descriptors with one more epoll, or to install one of few filters of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
import time
from collections.abc import Callable

from ringfence.sandbox.process.limits.uncounted import MAX_FILTERS, MAX_WATCHERS
from ringfence.sandbox.process.seccomp import filter, verdicts

_RECEIVE = 0xC0502100  # _IOWR('!', 0, struct seccomp_notif)
_SEND = 0xC0182101  # _IOWR('!', 1, struct seccomp_notif_resp)
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
MAX_DENIALS = 20_000
"""Each costs the supervisor a moment; no honest program makes so many."""
_AT_ONCE = 64
_GRANTED_A_SECOND = 1000
"""Beyond that the box waits: each costs us a moment too, of processor time that is not the box's."""
_OF_A_FILTER = _GRANTED_A_SECOND // 50
"""So many times as much as another question, since the kernel compiles each, and frees it in a queue of the host's."""
_ANONYMOUS = 0x20
_LONG = 0.05
"""Seconds: after a look at a whole box that took longer, other boxes come first."""
_BREATH = 3.0
"""For so many times as long as the look took, the box is not looked at again."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MACHINE = os.uname().machine


class Account:
    """Memory that a box shares among its processes, where no control group counts it.

    When a part of a mapping is unmapped, we cannot see how much is left: so memory is given back only when no process
    has any of it left.
    """

    def __init__(self, most: int, reclaim: Callable[[], object] = lambda: None) -> None:
        """`reclaim` lowers `taken`, `watchers` and `filters` where less is left."""
        self._most = most
        self._reclaim_now = reclaim
        self._next = float("-inf")
        self.taken = 0
        self.refused = False
        self.watchers = 0
        """The largest possible number of epoll instances."""
        self.filters = 0
        """The largest possible number of filters that programs installed and that are left."""
        self.file_mappings = 0
        """How often memory was shared with a file, in a box that stays."""
        self._since = 0.0
        self._granted = 0

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

    def grant(self, questions: int = 1) -> None:
        """Count questions that were granted."""
        now = time.monotonic()
        if now - self._since >= 1:
            self._since = now
            self._granted = 0
        self._granted += questions

    @property
    def pause(self) -> float:
        """For how many seconds no further question is to be answered."""
        if self._granted < _GRANTED_A_SECOND:
            return 0.0
        return max(0.0, self._since + 1 - time.monotonic())

    def watch(self) -> bool:
        """Whether there may be one more epoll instance."""
        if self.watchers >= MAX_WATCHERS:
            self._reclaim()
        if self.watchers >= MAX_WATCHERS:
            return False
        self.watchers += 1
        return True

    def filter(self) -> bool:
        """Whether a program may install one more filter."""
        if self.filters >= MAX_FILTERS:
            self._reclaim()
        if self.filters >= MAX_FILTERS:
            return False
        self.filters += 1
        return True


class Denials:
    """The refused system calls of one box."""

    def __init__(self, descriptor: int | None, account: Account) -> None:
        self._account = account
        self.descriptor = descriptor
        """None where a box was made without the filter that asks."""
        self._poll: select.poll | None = None
        self.total = 0
        """All questions that were refused."""
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
            questions = 1
            if name == "mmap":
                # Its arguments are in registers, so the kernel continues with exactly these.
                _, size, _, flags, _, _ = struct.unpack_from("=6Q", question, 32)
                of_file = not flags & _ANONYMOUS
                self._account.file_mappings += of_file
                fits = of_file or self._account.take(size)
                error, goes_on = (0, _CONTINUE) if fits else (errno.ENOMEM, 0)
            elif name in verdicts.WATCHERS:
                error, goes_on = (0, _CONTINUE) if self._account.watch() else (errno.EMFILE, 0)
            elif verdicts.FILTERS.get(name) == struct.unpack_from("=I", question, 32)[0]:
                error, goes_on = (0, _CONTINUE) if self._account.filter() else (errno.ENOMEM, 0)
                questions = _OF_A_FILTER
            if goes_on:
                self._account.grant(questions)
            else:
                self.total += 1
            if error in (errno.EPERM, errno.EACCES) or (error and name in verdicts.FILTERS):
                counted = self.late if self.is_late(caller) else self.by_name
                counted[name] = counted.get(name, 0) + 1
            with contextlib.suppress(OSError):  # the caller is gone
                fcntl.ioctl(self.descriptor, _SEND, struct.pack("=QqiI", identity, 0, -error, goes_on))
        return True

    @property
    def pause(self) -> float:
        """For how many seconds the questions that wait are to wait."""
        return self._account.pause

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
