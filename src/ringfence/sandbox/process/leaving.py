"""The end of a program, before the kernel has taken its process apart: that takes longer than most programs run.

A program that is through asks to end with a mark, which the filter has the supervisor asked about, and the kernel holds
it in that call: nothing but an answer or its death leads out. Where it is all that there is in its box, nothing can
change there any more. So what it used is read, the box is killed, and nobody has to wait for that. In every other case
it is let go on, and its end is awaited.
"""

from __future__ import annotations

import os
import time

from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.cgroupfs import read
from ringfence.sandbox.process.member import Ended

_OF_A_PROCESS = 2
"""With the complement of its number before it: its clock, which counts the processor time of all its threads."""
_HIGHEST = "\nVmHWM:"
_READ, _WRITTEN = "\nread_bytes: ", "\nwrite_bytes: "
_OF_CHILDREN = slice(8, 11, 2)
"""In its line of numbers: pages that its children, all reaped, were given without and with reading a disk."""


def ended(box: Box, status: int) -> Ended | None:
    """How the program ended that asks to, as its reaper would have said; None where the box is not still."""
    try:
        if not _alone(box):
            return None
        process = f"/proc/{box.worker}"
        peak = int(read(f"{process}/status").partition(_HIGHEST)[2].split(maxsplit=1)[0]) * 1024
        told = read(f"{process}/io")
        moved = sum(int(told.partition(name)[2].partition("\n")[0]) for name in (_READ, _WRITTEN))
        cpu_ms = box.group.count().cpu_ms if box.group is not None else None  # read once: it is over
        if cpu_ms is None:
            words = read(f"{process}/stat").rpartition(")")[2].split()
            if any(int(word) for word in words[_OF_CHILDREN]):
                return None  # what they used nobody tells so well as the reaper
            cpu_ms = time.clock_gettime(~box.worker << 3 | _OF_A_PROCESS) * 1000.0
        return Ended((status & 0xFF) << 8, cpu_ms, peak, moved)
    except (OSError, ValueError, IndexError):
        return None


def _alone(box: Box) -> bool:
    """Whether the process that asks is all there is. It can start nothing, so the answer stays true."""
    tasks = box.group.tasks() if box.group is not None else None
    if tasks is not None:
        return tasks == 1
    # Whatever it started is below it, or, once orphaned, below the first process; looked at in this order, nothing
    # can move from where it would still be seen to where it was looked for already.
    process, first = f"/proc/{box.worker}/task", box.first
    return (
        first > 0
        and len(os.listdir(process)) == 1
        and not read(f"{process}/{box.worker}/children")
        and not read(f"/proc/{first}/task/{first}/children")
    )
