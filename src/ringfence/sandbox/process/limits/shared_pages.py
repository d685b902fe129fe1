"""Each process's part of the memory that several share, where no control group counts it.

The kernel walks through all memory of a process to say it, and waits for its changes. A box can make that slow:
many processes with many areas each. So one look takes only so long, there is a pause before the next one, and it
goes on where the last one stopped. Meanwhile a process counts with its last reading, and what it has taken since then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

LONGEST = 0.05
"""Seconds of our own processor time for one look, and what one process takes beyond. That others keep the machine busy
is no reason to know less."""
_REST = 20.0
"""So many times as long as one took that was not done in that time, the kernel is not asked again."""

Memory = tuple[int, int]
"""Of its own, and shared."""


class _Reading(NamedTuple):
    """What the kernel last said of a process."""

    resident: Memory
    """What it had then, shared or not."""
    part: Memory


class Parts:
    """The memory of the processes of one box."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._spent = spent
        self._readings: dict[int, _Reading] = {}
        """The oldest first."""
        self._next = float("-inf")

    def added_up(self, resident: Mapping[int, Memory]) -> Memory:
        """What these processes have together; `resident` is what each has when shared pages count for everyone."""
        for pid in self._readings.keys() - resident.keys():
            del self._readings[pid]
        fresh = [pid for pid in resident if pid not in self._readings]
        began = self._spent()
        if self._clock() >= self._next:
            for pid in (*fresh, *list(self._readings)):
                # A process can close its maps to us (PR_SET_DUMPABLE); then all that it sees counts as its own.
                reading = _Reading(resident[pid], _part(pid) or resident[pid])
                self._readings.pop(pid, None)
                self._readings[pid] = reading
                took = self._spent() - began
                if took > LONGEST:
                    self._next = self._clock() + took * _REST
                    break
        unknown = {pid: _Reading(resident[pid], (0, 0)) for pid in fresh if pid not in self._readings}
        self._readings = unknown | self._readings  # as a child is made, all that it has is its parent's
        now = [(resident[pid], reading) for pid, reading in self._readings.items()]
        own = sum(reading.part[0] + max(0, has[0] - reading.resident[0]) for has, reading in now)
        return own, sum(reading.part[1] + max(0, has[1] - reading.resident[1]) for has, reading in now)


def _part(pid: int) -> Memory | None:
    """None where that cannot be read."""
    own, swapped, common = memory(f"/proc/{pid}/smaps_rollup", "Pss_Anon:", "SwapPss:", "Pss_Shmem:")
    return (own + swapped, common) if own or common else None


def memory(path: str, *names: str) -> tuple[int, ...]:
    """These numbers of a file in /proc, in bytes; what is mapped from files can be given up at any time."""
    found = dict.fromkeys(names, 0)
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name = line.partition(" ")[0].partition("\t")[0]
            if name in found:
                found[name] = int(line.split()[1]) * 1024
    return tuple(found.values())
