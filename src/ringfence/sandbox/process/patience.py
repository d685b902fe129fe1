"""How long to wait for processes of ours: as long as they make progress, however slow the machine is.

An emulated or overloaded machine takes a hundred times as long as others for the same. A clock alone cannot tell that
from a process that hangs, but its processor time can.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ringfence.core.system import process_fields

T = TypeVar("T")

_LOOKS = 6
"""How often a process is looked at within the time that it may be idle."""
_MAX_FACTOR = 20
"""A process that uses this many times its idle time of processor time is looping, not slow."""
_SLOWEST = 100.0
IDLE_SECONDS = 30.0
_USUAL_SECONDS = 1.0
"""More than an interpreter needs to start on any ordinary machine."""


class MachinePace:
    """How many times as long as usual everything takes on this machine, by experience."""

    def __init__(self) -> None:
        self._times = 1.0

    def took(self, seconds: float, usually: float) -> None:
        """Note how long something took. The slowest counts: the machine may be so slow again."""
        self._times = min(max(self._times, seconds / usually), _SLOWEST)

    async def start(self, ready: asyncio.Future[T], processes: Callable[[], Iterable[int]]) -> T:
        """As `while_they_work`, for an interpreter that starts, which shows how slow the machine is."""
        clock = asyncio.get_running_loop().time
        began = clock()
        result = await while_they_work(ready, processes, IDLE_SECONDS)
        self.took(clock() - began, _USUAL_SECONDS)
        return result

    def allow(self, seconds: float) -> float:
        """How long to allow for work that usually takes much less than `seconds`."""
        return seconds * self._times


async def while_they_work(done: asyncio.Future[T], processes: Callable[[], Iterable[int]], seconds: float) -> T:
    """Wait for their result. Raises TimeoutError when none of them did anything for so long."""
    patience = Patience(processes, seconds)
    while True:
        await asyncio.wait({done}, timeout=patience.pause)
        if done.done():
            return done.result()
        if patience.is_over():
            raise TimeoutError


class Patience:
    """Patience with processes that are to do something; for callers that look at them again and again."""

    def __init__(self, processes: Callable[[], Iterable[int]], seconds: float) -> None:
        """`seconds` is how long none of them may do anything."""
        self.pause = seconds / _LOOKS
        """The time between two looks."""
        self._processes = processes
        self._most = _MAX_FACTOR * seconds * 1e9
        self._idle = 0
        self._before = -1

    def is_over(self) -> bool:
        worked, wants = _look(self._processes())
        self._idle = 0 if wants or worked > self._before else self._idle + 1
        self._before = worked
        return self._idle >= _LOOKS or worked > self._most


def group(leader: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(process_fields(name)[2]) == leader:
                found.append(int(name))
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return found


def _nanoseconds(process: int, state: list[str]) -> int:
    """Processor time; in ticks where the kernel was built without better statistics."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[0])
    except FileNotFoundError:
        return (int(state[11]) + int(state[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _look(processes: Iterable[int]) -> tuple[int, bool]:
    """Their processor time in nanoseconds, and whether one of them waits for a core or for a disk."""
    worked = 0
    wants = False
    for process in processes:
        try:
            state = process_fields(process)
            worked += _nanoseconds(process, state)
        except (OSError, ValueError, IndexError):
            continue  # it is gone, and another has taken over
        wants = wants or state[0] in "RD"
    return worked, wants
