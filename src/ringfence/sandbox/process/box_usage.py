"""What a box uses now: disk, memory, processor time and processes.

A control group counts memory and time; where there is none, they are added up from `/proc`, process by process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ringfence.core.box import Limit
from ringfence.core.system import process_fields
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.cgroups.cgroup import Group
from ringfence.sandbox.process.limits import uncounted
from ringfence.sandbox.process.limits.pulse import worked_ms
from ringfence.sandbox.process.limits.shared_pages import LONGEST, memory
from ringfence.sandbox.process.zygote import kernel

_KCMP_VM = 1


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
        return counted_memory(box, *parts)
    return added_up(box, box.limits.memory_bytes)[0]


def counted_memory(box: Box, files: int, rest: int) -> int:
    """What its control group counts, without the workspace, plus what it does not count. Of the workspace only what is
    charged to the group counts there: what we wrote into it ourselves is not, and makes no room for memory."""
    assert box.group is not None
    held = rest + max(0, files - on_disk(box))  # first: what is removed meanwhile would count as memory
    return with_uncounted(held, box.first, box.group, box.hub.locks, lambda: _inside(box), box.limits.memory_bytes)


def with_uncounted(
    held: int, first: int, group: Group, locks: uncounted.Locks, inside: Callable[[], Iterable[int]], most: int
) -> int:
    """The memory of a box by its first process, with what its control group does not count."""
    # Where the group counts datagrams as well, those that wait count twice: which of them are copies is not known.
    held += uncounted.datagrams(first)
    held += uncounted.unlisted(first, most - held)
    if group.counts_sockets:
        held += uncounted.unaccepted(first, most - held)
    else:
        held += uncounted.streams(first, most - held)
    return held + locks.held(inside, most)


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
            clocks[pid] = process_cpu_ms(pid)
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
        orphans = process_cpu_ms(box.first)[1]
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
    """Let a box share memory anew, once none of its processes has any left of what was granted; likewise for epoll
    and for filters."""
    if box.account.taken and not _any_shared(box):
        box.account.taken = 0
    if box.account.watchers >= uncounted.MAX_WATCHERS:
        box.account.watchers = sum(1 for _ in uncounted.instances(_inside(box)))
    if box.account.filters >= uncounted.MAX_FILTERS:
        box.account.filters = uncounted.filters(_inside(box))


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
        return used * uncounted.sent_bytes()
    return 0


def process_cpu_ms(pid: int) -> tuple[float, float]:
    """Processor time of a process itself, and of the children that it has waited for."""
    words = process_fields(pid)
    tick = 1000.0 / os.sysconf("SC_CLK_TCK")
    return (int(words[11]) + int(words[12])) * tick, (int(words[13]) + int(words[14])) * tick


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))
