"""Watches the limits that the kernel does not enforce by itself, and says afterwards which were met."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
from collections.abc import Callable
from functools import partial

from ringfence.core.box import Ended, Limit, Limits
from ringfence.core.errors import Refused
from ringfence.sandbox.files import walk
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.box_usage import added_up, counted_memory, full, reclaim, worked
from ringfence.sandbox.process.limits.pulse import Rhythm

_MAX_LOOKED_AT = 2000

Termination = tuple[Ended, int | None, int | None, Limit | None]
"""Why something ended, its exit status or signal, and the limit that was the reason."""
Stop = Callable[[Ended, Limit | None], None]


class RunWatch:
    """Watches one run. With a control group it reads the kernel's own count, else it adds up the processes."""

    def __init__(self, box: Box, limits: Limits, stop: Stop) -> None:
        self._box = box
        box.reclaim = partial(reclaim, box)
        self._limits = limits
        self._stop = stop
        self._rhythm = Rhythm(box.hub.pulse, lambda: worked(box), self._look)
        self._full: Limit | None = None
        self._processes = 0
        self._cpu_before = 0.0
        self._memory_before = 0
        self._resident_before = 0
        self._cpu_ms = 0.0
        self.peak = 0
        """The most memory seen."""
        self.overshoot = 0
        """How far memory use was beyond its limit when that was noticed."""
        if box.warmed:
            with contextlib.suppress(OSError, KeyError):  # it is gone, which its order will tell
                self._memory_before, self._cpu_before = self._usage()
                self._resident_before = resident(box.worker)

    def start(self) -> None:
        self._rhythm.start()

    def stop(self) -> None:
        self._rhythm.stop()
        self._look_at_disk()

    def _look(self) -> None:
        self._look_at_disk()
        used, cpu_ms = self._usage()
        self.peak = max(self.peak, used)
        self._cpu_ms = max(self._cpu_ms, cpu_ms)
        if used > self._limits.memory_bytes:
            self.overshoot = used - self._limits.memory_bytes
            self._stop("oom", "memory")
        most = self._limits.cpu_seconds
        if most is not None and cpu_ms > most * 1000:
            self._stop("timeout", "cpu")

    def _usage(self) -> tuple[int, float]:
        """Memory and processor time. Files of the workspace count as disk, although they are in memory."""
        group = self._box.group
        parts = group.usage_parts() if group is not None else None
        if parts is not None and group is not None:
            return counted_memory(self._box, *parts), (group.cpu_ms() or 0.0) - self._cpu_before
        used, cpu_ms, count = added_up(self._box, self._limits.memory_bytes)
        self._processes = max(self._processes, count)
        return used, cpu_ms - self._cpu_before

    def _look_at_disk(self) -> None:
        with contextlib.suppress(OSError, KeyError):
            self._full = full(self._box.descriptors["workspace"]) or self._full

    # ── Afterwards ──

    def out_of_memory(self) -> bool:
        group = self._box.group
        return group is not None and bool(group.count().oom_kills)

    def out_of_time(self, reaped: float) -> bool:
        """A program can kill itself with the same signal; only the time used shows the difference."""
        return spent(self.cpu_ms(reaped), self._limits)

    def cpu_ms(self, reaped: float) -> float:
        """All time used; processes killed with the box's first one are not in the account of the reaped."""
        group = self._box.group
        counted = group.count().cpu_ms if group is not None else None
        return max(reaped - self._cpu_before, self._cpu_ms, (counted or 0.0) - self._cpu_before)

    def peak_memory(self, largest: int) -> int:
        """The most that was seen in use. The group's own peak is no help: it counts files and their cache."""
        return max(self.peak - self._memory_before, largest - self._resident_before, 0)

    def most_processes(self) -> int | None:
        group = self._box.group
        peak = group.count().pids_peak if group is not None else None
        return peak if peak is not None else self._processes or None

    def survived_limit(self) -> Limit | None:
        """A limit that the program met and survived."""
        group = self._box.group
        if self.out_of_memory() or self._box.account.refused:
            return "memory"
        if group is not None and group.count().pids_denied:
            return "pids"
        if group is None and self._processes >= self._limits.processes:
            return "pids"
        return self._full


def killed_by(
    number: int,
    out_of_memory: Callable[[], bool],
    out_of_time: Callable[[], bool],
    survived_limit: Callable[[], Limit | None],
    has_long_file: Callable[[], bool],
) -> Termination:
    """Why a process died of this signal, which we did not send. It may have sent the signal itself, so that alone shows
    nothing: a limit is named only where what it limits was used up."""
    if number == signal.SIGKILL and out_of_memory():
        return "oom", None, number, "memory"
    if number == signal.SIGXFSZ and has_long_file():
        return "disk", None, number, "file_size"
    if number in (signal.SIGXCPU, signal.SIGKILL) and out_of_time():
        return "timeout", None, number, "cpu"
    return "signalled", None, number, survived_limit()


def kernel_cpu_seconds(limits: Limits) -> int:
    """Processor seconds after which the kernel kills a single process; 0: never. The kernel counts in ticks, and may
    count some too many, so its limit is well above ours: a process that it kills has used all that was allowed."""
    return math.ceil(limits.cpu_seconds * 1.25) + 1 if limits.cpu_seconds else 0


def spent(cpu_ms: float, limits: Limits) -> bool:
    """Whether so much processor time uses up the limit."""
    return limits.cpu_seconds is not None and cpu_ms >= limits.cpu_seconds * 1000


def used_up_by_process(cpu_ms: float, limits: Limits) -> bool:
    """Whether a single process used so much in all its steps that the kernel may have killed it."""
    most = kernel_cpu_seconds(limits)
    return most > 0 and cpu_ms >= most * 800


def resident(process: int) -> int:
    """What a process has in memory now, files that it looks at included: the kernel's word for its peak counts them."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def longest_file(limits: Limits) -> int:
    """The limit for one file: by default one page above the disk limit, so that a file that fills the disk meets that
    limit first."""
    return limits.file_bytes or limits.disk_bytes + os.sysconf("SC_PAGE_SIZE")


def has_long_file(box: Box) -> bool:
    """Whether a file in the workspace or a volume is as long as a file may be."""
    most = longest_file(box.limits)
    for name in box.written:
        with contextlib.suppress(OSError, KeyError, Refused):  # it is gone, or has too many files to search
            entries = walk.Walk(most=_MAX_LOOKED_AT, lenient=True).through(box.descriptors[name])
            if any(stat.S_ISREG(found.info.st_mode) and found.info.st_size >= most for found in entries):
                return True
    return False
