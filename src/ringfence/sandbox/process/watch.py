"""Watches the limits that the kernel does not enforce by itself, and knows afterwards which were met."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ringfence.core.box import Ended, Limit, Limits
from ringfence.core.errors import Refused
from ringfence.core.system import process_fields
from ringfence.sandbox.files import walk
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.limits import uncounted
from ringfence.sandbox.process.limits.pulse import Rhythm, worked_ms
from ringfence.sandbox.process.limits.shared_pages import LONGEST, memory
from ringfence.sandbox.process.zygote import kernel

_KCMP_VM = 1
_MOST_LOOKED_AT = 2000

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
        self._cpu_ms = 0.0
        self.peak = 0
        """The most memory seen."""
        self.overshoot = 0
        """How far memory was beyond its limit when that was seen."""

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
        """Memory and processor time; the files of the workspace are disk, though they are kept in memory."""
        group = self._box.group
        parts = group.usage_parts() if group is not None else None
        if parts is not None and group is not None:
            return _counted(self._box, *parts), group.cpu_ms() or 0.0
        used, cpu_ms, count = added_up(self._box, self._limits.memory_bytes)
        self._processes = max(self._processes, count)
        return used, cpu_ms

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
        return max(reaped, self._cpu_ms, counted or 0.0)

    def peak_memory(self, largest: int) -> int:
        """The most that was seen in use. The group's own peak is no help: it counts files and their cache."""
        return max(self.peak, largest)

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
    """After which the kernel kills a single process; 0: never. It counts in ticks, which may be too many by some, so it
    comes well after the watch, which counts better: what it kills has used all that was allowed."""
    return math.ceil(limits.cpu_seconds * 1.25) + 1 if limits.cpu_seconds else 0


def spent(cpu_ms: float, limits: Limits) -> bool:
    """Whether so much processor time is all that was allowed."""
    return limits.cpu_seconds is not None and cpu_ms >= limits.cpu_seconds * 1000


def used_up_by_process(cpu_ms: float, limits: Limits) -> bool:
    """Whether a single process used so much in all its steps that the kernel may have killed it."""
    most = kernel_cpu_seconds(limits)
    return most > 0 and cpu_ms >= most * 800


def longest_file(limits: Limits) -> int:
    """A file that fills the disk is to meet that limit first, which is one of whole pages."""
    return limits.file_bytes or limits.disk_bytes + os.sysconf("SC_PAGE_SIZE")


def has_long_file(box: Box) -> bool:
    """Whether a file in the workspace or a volume is as long as a file may be."""
    most = longest_file(box.limits)
    for name in box.written:
        with contextlib.suppress(OSError, KeyError, Refused):  # it is gone, or has more files than it is worth
            entries = walk.Walk(most=_MOST_LOOKED_AT, lenient=True).through(box.descriptors[name])
            if any(stat.S_ISREG(found.info.st_mode) and found.info.st_size >= most for found in entries):
                return True
    return False


def full(workspace: int) -> Limit | None:
    """The disk limit that is used up, if one is. Raises OSError."""
    state = os.fstatvfs(workspace)
    return "disk" if state.f_bfree == 0 else "inodes" if state.f_ffree == 0 else None


def on_disk(box: Box) -> int:
    """Bytes now in the workspace and in the volumes that it may write to: each is a file system of its own, kept in
    memory that is charged to whoever wrote it."""
    states = [os.fstatvfs(box.descriptors[name]) for name in box.written]
    return sum((state.f_blocks - state.f_bfree) * state.f_frsize for state in states)


def worked(box: Box) -> float | None:
    """Processor time of all that runs in it, as cheaply as possible; None where only a look can show it."""
    counted = box.group.cpu_ms() if box.group is not None else None
    if counted is not None:
        return counted
    pids = _inside(box)
    # A child has a clock of its own, which is unknown before a look.
    return worked_ms(pids) if pids == set(box.known) else None


def _inside(box: Box) -> set[int]:
    """The processes of a box, without the first, which never works."""
    return {pid for pid in descendants(box.first, *box.workers) if pid not in (0, box.first)}


def used_memory(box: Box) -> int:
    """Memory of all that runs in it; the files of the workspace count as disk, though they are in memory."""
    parts = box.group.usage_parts() if box.group is not None else None
    if parts is not None:
        return _counted(box, *parts)
    return added_up(box, box.limits.memory_bytes)[0]


def _counted(box: Box, files: int, rest: int) -> int:
    """What its control group counts, without the workspace, plus what it does not count. Of the workspace only what is
    charged to the group counts there: what we wrote into it ourselves is not, and makes no room for memory."""
    assert box.group is not None
    held = rest + max(0, files - on_disk(box))  # first: what is removed meanwhile would count as memory
    if not box.group.counts_sockets:
        held += uncounted.datagrams(box.first)
        held += uncounted.streams(box.first, box.limits.memory_bytes - held)
    return held + box.hub.locks.held(lambda: _inside(box), box.limits.memory_bytes)


def added_up(box: Box, enough: int) -> tuple[int, float, int]:
    """Memory, processor time and number of all processes and threads, without a group that counts.

    What the kernel holds for them in sockets and page tables is memory, too, and granted shared memory counts whole.
    Only beyond `enough`, or where there are several, is it worth asking which of it they share.
    """
    resident = 0
    shared = 0
    tables = 0
    count = 0
    clocks: dict[int, tuple[float, float]] = {}
    box.known = sorted(_inside(box))
    of_each: dict[int, tuple[int, int, int]] = {}
    for pid in box.known:
        with contextlib.suppress(OSError, ValueError, IndexError):
            of_each[pid] = own, common, for_tables = _resident(pid)
            resident, shared, tables = resident + own, shared + common, tables + for_tables
            clocks[pid] = _cpu_ms(pid)
            count += _threads(pid)
    box.tasks = count
    if resident + shared > enough or count > 1:
        of_each = _each_once(of_each)
        resident, shared = box.parts.added_up({pid: (own, common) for pid, (own, common, _) in of_each.items()})
        tables = sum(each[2] for each in of_each.values())
    if box.account.taken and resident + box.account.taken > enough and not _any_shared(box):
        box.account.taken = 0
    # Files of the workspace that are mapped are shared memory too, but they are disk.
    shared = max(box.account.taken, shared - on_disk(box))
    most = box.limits.memory_bytes
    kept = box.hub.locks.held(lambda: box.known, most) + box.watched.held(box.account.watchers, box.known, most)
    return resident + shared + tables + kept + _in_sockets(box.workers[0]), _spent(box, clocks), count


def _spent(box: Box, clocks: dict[int, tuple[float, float]]) -> float:
    """Processor time of live and ended processes, by two accounts; the larger one counts.

    The kernel's account: a process that waits for a child gets its time, and the box's first process waits for orphans.
    A program can prevent that its children are waited for; so we keep our own account of the last value seen of each.
    """
    orphans = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        orphans = _cpu_ms(box.first)[1]
    for pid, (own, _) in list(box.clocks.items()):
        if pid not in clocks or clocks[pid][0] < own:  # ended, or another process of that number
            box.ended_ms += own
    box.clocks = clocks
    waited_for = sum(own + waited for own, waited in clocks.values()) + orphans
    return max(waited_for, sum(own for own, _ in clocks.values()) + box.ended_ms)


def descendants(*pids: int) -> Iterator[int]:
    """Processes and everything below them. What is orphaned in a box belongs to its first process."""
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        yield pid
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                waiting += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]


def reclaim(box: Box) -> None:
    """Let a box share memory anew, once none of its processes has any left of what was granted; likewise for epoll."""
    if box.account.taken and not _any_shared(box):
        box.account.taken = 0
    if box.account.watchers >= uncounted.MOST_WATCHERS:
        box.account.watchers = sum(1 for _ in uncounted.instances(_inside(box)))


def _any_shared(box: Box) -> bool:
    """Whether a process has anonymous shared memory mapped; one that we may not look at counts as such, and so do
    more areas than can be looked at in time."""
    until = time.thread_time() + LONGEST
    try:
        return any(has_shared(Path(f"/proc/{pid}/maps"), until) for pid in _inside(box))
    except OSError:
        return True


def has_shared(maps: Path, until: float) -> bool:
    """Whether this list of areas has such memory: a file with a special name, or none at all. True if our own processor
    time passes `until`: a box can make the list very long. Raises OSError."""
    with maps.open("r", encoding="utf-8", errors="replace") as areas:
        for number, line in enumerate(areas):
            words = line.split(None, 5)
            named = len(words) == 6 and words[5].startswith("/") and not words[5].startswith("/dev/zero")
            if (words[1].endswith("s") and not named) or (number % 128 == 0 and time.thread_time() > until):
                return True
    return False


_STATUS = ("RssAnon:", "VmSwap:", "RssShmem:", "VmPTE:")


def _resident(pid: int) -> tuple[int, int, int]:
    """Anonymous memory, shared memory, and page tables of a process."""
    found = memory(f"/proc/{pid}/status", *_STATUS)
    if not found[3]:
        # Its first thread has ended: only the files of the others still show their memory.
        for thread in os.listdir(f"/proc/{pid}/task"):
            found = memory(f"/proc/{pid}/task/{thread}/status", *_STATUS)
            if found[3]:
                break
    return found[0] + found[1], found[2], found[3]


def _each_once(of_each: dict[int, tuple[int, int, int]]) -> dict[int, tuple[int, int, int]]:
    """Without processes that use the memory of another one, as between vfork and exec."""
    once: dict[int, tuple[int, int, int]] = {}
    for pid, found in of_each.items():
        alike = [other for other, of_other in once.items() if _are_alike(of_other, found)]
        if not any(_same_memory(pid, other) for other in alike):
            once[pid] = found
    return once


def _are_alike(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    """Whether two accounts may be of the same memory, which may have changed a little between the looks at them."""
    return one == other or abs(one[0] - other[0]) < max(one[0], other[0]) // 8


def _same_memory(one: int, other: int) -> bool:
    try:
        return kernel.call("kcmp", one, other, _KCMP_VM, 0, 0) == 0
    except OSError:
        return False


def _in_sockets(pid: int) -> int:
    """The most that sockets of the box may hold: the kernel shows how many there are, not what is in them."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        used = int(Path(f"/proc/{pid}/net/sockstat").read_text().split()[2])
        return used * int(Path("/proc/sys/net/core/wmem_default").read_text())
    return 0


def _cpu_ms(pid: int) -> tuple[float, float]:
    """Processor time of a process itself, and of the children that it has waited for."""
    words = process_fields(pid)
    tick = 1000.0 / os.sysconf("SC_CLK_TCK")
    return (int(words[11]) + int(words[12])) * tick, (int(words[13]) + int(words[14])) * tick


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))
