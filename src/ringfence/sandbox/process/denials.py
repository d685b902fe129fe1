"""Counts the system calls that a box was refused. The kernel asks the supervisor about each; it always says no."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
from collections import Counter

from ringfence.sandbox.process import seccomp

_RECEIVE = 0xC0502100  # _IOWR('!', 0, struct seccomp_notif)
_SEND = 0xC0182101  # _IOWR('!', 1, struct seccomp_notif_resp)
MAX_DENIALS = 20_000
"""Each costs the supervisor a moment; a program that goes on like this has no honest purpose."""
_AT_ONCE = 64
_MACHINE = os.uname().machine


class Denials:
    """Of one box."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor
        """None where a box was made without the filter that asks."""
        self._poll: select.poll | None = None
        self.total = 0
        self.by_name: Counter[str] = Counter()

    def answer(self) -> bool:
        """Refuse what waits. False once nobody is left who could ask."""
        assert self.descriptor is not None
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.descriptor, select.POLLIN)
        for _ in range(_AT_ONCE):
            events = self._poll.poll(0)
            if not events or not events[0][1] & select.POLLIN:
                return not events  # without a caller the kernel would let us wait for ever
            question = bytearray(80)
            try:
                fcntl.ioctl(self.descriptor, _RECEIVE, question, True)
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.EINTR):
                    continue  # it was killed while it waited
                return False
            identity, _, _, number = struct.unpack_from("=QIIi", question)
            self.total += 1
            self.by_name[seccomp.name_of(_MACHINE, number)] += 1
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.descriptor, _SEND, struct.pack("=QqiI", identity, 0, -errno.EPERM, 0))
        return True
