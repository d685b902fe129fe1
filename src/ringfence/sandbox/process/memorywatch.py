"""Descriptors by which the kernel tells that the memory charged to a control group has crossed a threshold."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from dataclasses import dataclass

from ringfence.sandbox.process.cgroupfs import write


@dataclass(slots=True)
class MemoryWatch:
    """The descriptor that is handed out, and how to make it unreadable again."""

    fd: int
    threshold: int
    events: int | None = None
    """v2: the open `memory.events` behind it."""

    def settle(self) -> None:
        """Take note of what was told, so that only what comes next is told again."""
        if self.events is not None:
            os.pread(self.events, 4096, 0)
        else:
            with suppress(BlockingIOError):
                os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        if self.events is not None:
            os.close(self.events)


def watch_v1(path: str, threshold: int) -> MemoryWatch:
    """Waits for a grace period of the kernel, 8 ms and more."""
    told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        charged = os.open(path + "/memory.usage_in_bytes", os.O_RDONLY | os.O_CLOEXEC)
        try:
            write(path + "/cgroup.event_control", f"{told} {charged} {threshold}")
        finally:
            os.close(charged)
    except OSError:
        os.close(told)
        raise
    return MemoryWatch(told, threshold)


def watch_v2(path: str, threshold: int) -> MemoryWatch:
    write(path + "/memory.high", str(threshold))
    return watch_file(path + "/memory.events", threshold)


def watch_file(path: str, threshold: int = 0) -> MemoryWatch:
    """A file of cgroup v2 is always readable and tells news as priority data; the epoll around it has news only."""
    events = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        poll = select.epoll()
        try:
            poll.register(events, select.EPOLLPRI)
            told = os.dup(poll.fileno())
        finally:
            poll.close()
    except OSError:
        os.close(events)
        raise
    watch = MemoryWatch(told, threshold, events)
    watch.settle()
    return watch
