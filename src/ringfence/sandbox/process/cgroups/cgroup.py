"""Control groups of boxes, made below our own group and nowhere else, for cgroup v1, v2, and both side by side.

A group stands for one box and is one folder in each hierarchy that we can use. A *role* is what a folder is used for:
`memory`, `pids` and `cpu` limit, `freezer` stops, `time` counts processor time, `kill` ends everything at once. With v1
each controller has a hierarchy of its own; with v2 one folder has all roles; a host with v1 controllers usually has an
empty v2 hierarchy beside them, which still serves `freezer`, `time` and `kill`.

A value that the kernel does not report is None. Everything here is synchronous, and cheap unless stated otherwise.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from ringfence.core.box import Limits
from ringfence.core.record import plain
from ringfence.sandbox.process.cgroups.cgroupfs import (
    CgroupFiles,
    fields,
    limit_cpu,
    limit_memory,
    number,
    read,
    rmdir,
    write,
)
from ringfence.sandbox.process.cgroups.hierarchy import CgroupFolder, GroupOwner, Manager, find, left_behind, roles_of

LIMITING = ("memory", "pids", "cpu", "freezer")
STALE_CACHE_BYTES = 8 * 1024 * 1024
"""A group that is used again gives back file cache beyond this much; below it that costs more than it is worth."""

MIN_PROCESSES = 2
"""No box has fewer, so a lower peak need not be reset: the next one will be at least as high."""

HANDLES = 128
SWAPS = "/proc/swaps"
_A_PAGE = 4000
"""Bytes; one read gives only the beginning of a longer list."""
log = logging.getLogger(__name__)

KEPT = 128
STALE_BYTES = 1024 * 1024
"""Files of a box are freed with a delay; a group that is still charged for more of them is not given to another box."""
_ROLES = ("memory", "pids", "cpu", "time")
"""What a box needs that is never paused."""

_BATCH_PAGES = 2 * 64
"""For each processor: what the kernel charges ahead, and by how much its sums may be behind."""

_numbers = itertools.count(1)
"""For all groups that this process makes, in any backend."""


@plain
class Allowance:
    """The limits of a group, kept so that they can be set again."""

    memory_bytes: int
    hard_bytes: int
    processes: int
    cpu_cores: float


class Counted(NamedTuple):
    """What a box has used; None where the kernel does not report it."""

    oom_kills: int | None
    pids_denied: int | None
    pids_peak: int | None
    cpu_ms: float | None


@plain
class _Before:
    """What the kernel had already counted when a group was last reset."""

    charged: int = 0
    oom_kills: int = 0
    cpu_ms: float = 0.0


class Group:
    """The group of one box."""

    def __init__(self, name: str, folders: Mapping[str, CgroupFolder]) -> None:
        """`folders`: the folder of each role. They must exist: `Cgroups.make` makes them."""
        self.name = name
        self._folders = dict(folders)
        self.paths = tuple(dict.fromkeys(folder.path for folder in folders.values()))
        """Its folders, each once."""
        self._allowance: Allowance | None = None
        self._before = _Before()
        self._counted: Counted | None = None
        self._files = CgroupFiles()
        self._swaps = False
        """Some of its memory may be in swap space."""
        self.pauses = False
        """It can stop processes, for a box that stays."""

    @property
    def place(self) -> str:
        """Its path beneath the mount of each hierarchy; where that differs, relative to this process's own groups."""
        places = {folder.path.removeprefix(folder.mount) for folder in self._folders.values()}
        return places.pop() if len(places) == 1 else self.name

    def keep_files_open(self) -> None:
        """Keep files open, for a group that is read again and again."""
        self._files.keep()

    def limit(self, *, memory_bytes: int, hard_bytes: int, processes: int, cpu_cores: float) -> None:
        """Set what the group may use. The kernel enforces `hard_bytes`; `memory_bytes` is for watchers of `usage`."""
        self._allowance = Allowance(memory_bytes, hard_bytes, processes, cpu_cores)
        self._apply(self._allowance, self.paths)

    def _apply(self, limits: Allowance, paths: Collection[str]) -> None:
        memory, pids, cpu = (self._folders.get(role) for role in ("memory", "pids", "cpu"))
        if memory and memory.path in paths:
            limit_memory(memory.path, memory.v2, limits.hard_bytes)
        if pids and pids.path in paths:
            write(pids.path + "/pids.max", str(limits.processes))
        if cpu and cpu.path in paths:
            limit_cpu(cpu.path, cpu.v2, limits.cpu_cores)

    def entrances(self) -> list[int]:
        """Descriptors, to be given back with `entered`. A process with one thread that writes "0" into each enters the
        group.

        To move a process, the kernel keeps the whole host from forking until all cores have taken notice; with v1, a
        thread can move itself without that.
        """
        opened: list[int] = []
        by_path = {folder.path: folder for folder in self._folders.values()}
        try:
            for path, folder in by_path.items():
                opened.append(self._files.opened(path + ("/cgroup.procs" if folder.v2 else "/tasks"), os.O_WRONLY))
        except OSError:
            self.entered(opened)
            raise
        return opened

    def entered(self, entrances: list[int]) -> None:
        for descriptor in entrances:
            self._files.done(descriptor)

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children belong to it. Memory that it already has stays where it
        was."""
        for path in self.paths:
            write(path + "/cgroup.procs", str(pid))

    def processes(self) -> frozenset[int]:
        """All processes in the group now, without those that wait to be reaped."""
        listed = (int(pid) for path in self.paths for pid in read(path + "/cgroup.procs").split())
        # 0 stands for a process that our pid namespace does not show.
        return frozenset(pid for pid in listed if pid)

    def tasks(self) -> list[int] | None:
        """Every thread in the group; None where the kernel does not list them."""
        if not self._folders:
            return None
        folder = next((each for each in self._folders.values() if each.v2), next(iter(self._folders.values())))
        path = folder.path + ("/cgroup.threads" if folder.v2 else "/tasks")
        listed = self._files.read(path) if folder.v2 else b""
        if not listed or len(listed) > _A_PAGE:
            # Opened anew, to the end: v1 repeats a list that was read a moment ago.
            listed = read(path).encode()
        return [int(tid) for tid in listed.split() if tid != b"0"]

    def tasks_now(self) -> int | None:
        """How many threads are in the group, including those that wait to be reaped; None where the kernel does not
        count."""
        pids = self._folders.get("pids")
        return self._files.number(pids.path + "/pids.current") if pids is not None else None

    def is_empty(self) -> bool:
        """Whether nothing is in it or waits to be reaped. False where the kernel does not count."""
        pids = self._folders.get("pids")
        return pids is not None and self._files.number(pids.path + "/pids.current") == 0

    @property
    def counts_sockets(self) -> bool:
        """Whether data that waits in sockets is part of `usage`."""
        memory = self._folders.get("memory")
        return memory is not None and memory.v2

    def usage(self) -> int | None:
        """Bytes in use now, without file cache that the kernel would give up at once."""
        parts = self.usage_parts()
        return None if parts is None else sum(parts)

    def usage_parts(self) -> tuple[int, int] | None:
        """The same in two parts: files that are memory, and all the rest."""
        memory = self._folders.get("memory")
        if memory is None:
            return None
        stat = fields(memory.path + "/memory.stat")
        if memory.v2:
            parts = ("kernel_stack", "pagetables", "percpu", "slab")  # before Linux 5.18 there is no sum of them
            kernel = stat.get("kernel", sum(stat.get(part, 0) for part in parts)) - stat.get("slab_reclaimable", 0)
            # What is in swap space may be of files, too: as many of them as are in no memory.
            swapped = (number(memory.path + "/memory.swap.current") or 0) if self._swaps else 0
            rest = stat["anon"] + stat.get("sock", 0) + max(0, kernel)
            if "kernel" in stat:
                listed = stat["anon"] + stat["file"] + stat["kernel"] + stat.get("sock", 0) + stat.get("swapcached", 0)
                rest += _beyond(listed, self._files.number(memory.path + "/memory.current"))
            return stat["shmem"] + swapped, rest
        kernel = number(memory.path + "/memory.kmem.usage_in_bytes") or 0
        rest = stat["total_rss"] + stat.get("total_swap", 0) + kernel
        listed = stat["total_rss"] + stat["total_cache"] + kernel
        return stat["total_shmem"], rest + _beyond(listed, number(memory.path + "/memory.usage_in_bytes"))

    @property
    def charged(self) -> int:
        """Bytes that were still charged to it when it was reset, file cache included."""
        return self._before.charged

    def oom_kills(self) -> int | None:
        """How many processes the kernel killed because the group met `hard_bytes`."""
        if memory := self._folders.get("memory"):
            place = memory.path + ("/memory.events" if memory.v2 else "/memory.oom_control")
            killed = self._files.field(place, b"oom_kill")
            return None if killed is None else killed - self._before.oom_kills
        return None

    def pids_denied(self) -> int | None:
        """How many processes or threads were refused."""
        pids = self._folders.get("pids")
        return self._files.field(pids.path + "/pids.events", b"max") if pids else None

    def pids_peak(self) -> int | None:
        """The most processes and threads at one time."""
        pids = self._folders.get("pids")
        return self._files.number(pids.path + "/pids.peak") if pids else None

    def cpu_ms(self) -> float | None:
        """Processor time used so far, by what still runs and by what has ended."""
        if folder := self._folders.get("time"):
            used = (
                (self._files.field(folder.path + "/cpu.stat", b"usage_usec") or 0) / 1e3
                if folder.v2
                else (self._files.number(folder.path + "/cpuacct.usage") or 0) / 1e6
            )
            return used - self._before.cpu_ms
        return None

    def count(self) -> Counted:
        """All counters of a box that is over, read once."""
        if self._counted is None:
            peak = self.pids_peak()
            full = peak is None or self._allowance is None or peak >= self._allowance.processes
            self._counted = Counted(self.oom_kills(), self.pids_denied() if full else 0, peak, self.cpu_ms())
        return self._counted

    def kill(self) -> None:
        """Kill every process in the group. Returns when all of them have the signal."""
        if folder := self._folders.get("kill"):
            write(folder.path + "/cgroup.kill", "1")
        else:
            if pids := self._folders.get("pids"):
                # Frozen, nothing can fork while we count.
                write(pids.path + "/pids.max", "0")
            deadline = time.monotonic() + 1.0
            while self._signal_all() and time.monotonic() < deadline:
                self._thaw_dying()
                time.sleep(0.001)
        self._thaw_dying()

    def freeze(self) -> None:
        """Stop everything in the group. It has stopped once `frozen` says so, a fraction of a millisecond later."""
        self._set_frozen(True)

    def thaw(self) -> None:
        self._set_frozen(False)

    def frozen(self) -> bool | None:
        if folder := self._folders.get("freezer"):
            if folder.v2:
                return fields(folder.path + "/cgroup.events").get("frozen") == 1
            return read(folder.path + "/freezer.state").strip() == "FROZEN"
        return None

    def gives_back(self) -> bool:
        """Whether the host has a place for its memory while nothing runs in it, and the kernel puts it there."""
        memory = self._folders.get("memory")
        if memory is None or not memory.v2 or not os.path.exists(memory.path + "/memory.reclaim"):
            return False
        with suppress(OSError):
            return os.path.exists(memory.path + "/memory.swap.max") and len(read(SWAPS).splitlines()) > 1
        return False

    def give_back(self) -> int:
        """Have its memory swapped out, while everything in it is stopped. Returns how many bytes that freed."""
        memory = self._folders["memory"]
        before = number(memory.path + "/memory.current") or 0
        self._swaps = True
        write(memory.path + "/memory.swap.max", "max")
        try:
            with suppress(OSError):  # the kernel says so where it was not all of it
                write(memory.path + "/memory.reclaim", str(before))
        finally:
            write(memory.path + "/memory.swap.max", "0")  # swap is no way around its limit
        return max(0, before - (number(memory.path + "/memory.current") or 0))

    def reset(self) -> None:
        """Reset the empty group for the next box, with the same limits.

        Where memory has a v1 hierarchy the folders stay, except that of `pids` if there were many, since no kernel
        resets its peak: while file cache of a box exists, the kernel keeps a removed memory group in memory. With v2
        all folders are made anew. Close what holds files of the box open first: they are charged to it.
        Raises OSError when processes are left in the group.
        """
        memory = self._folders.get("memory")
        pids = self._folders.get("pids")
        renewed = self.paths
        if memory is not None and not memory.v2:
            counted = self.count()
            crowded = (counted.pids_peak or 0) > MIN_PROCESSES or counted.pids_denied
            renewed = (pids.path,) if pids is not None and pids.path != memory.path and crowded else ()
        # Opened anew: v1 repeats a list that was read a moment ago.
        if not renewed and not self.is_empty() and read(self.paths[0] + "/cgroup.procs"):
            raise OSError(errno.EBUSY, "processes are still in the group", self.name)
        for path in renewed:
            self._files.forget(path)
            rmdir(path, patience=0.2)
            os.mkdir(path)
        if memory is None or memory.path in renewed:
            self._before = _Before()
        else:
            self._before = self._counted_before(memory.path)
        self._counted = None
        self._swaps = False
        if self._allowance is not None:
            self._apply(self._allowance, renewed)

    def remove(self, *, patience: float = 0.2) -> None:
        """Remove the folders, waiting this many seconds for what is just ending. Raises OSError if one stays."""
        stayed: OSError | None = None
        self._files.forget()
        for path in self.paths:
            try:
                rmdir(path, patience=patience)
            except OSError as problem:
                stayed = problem
        if stayed is not None:
            raise stayed

    def _signal_all(self) -> bool:
        """Send SIGKILL to all, or to the first of very many; False if there was none."""
        handles: dict[int, int] = {}
        try:
            for pid in islice(self.processes(), HANDLES):
                with suppress(ProcessLookupError):
                    handles[pid] = os.pidfd_open(pid)
            # Its number may have passed to another process before its handle was opened, one that is not in the group.
            for pid in self.processes() & handles.keys():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handles[pid], signal.SIGKILL)
        finally:
            for handle in handles.values():
                os.close(handle)
        return bool(handles)

    def _thaw_dying(self) -> None:
        """With v1 a frozen process does not even die."""
        folder = self._folders.get("freezer")
        if folder is not None and not folder.v2:
            self.thaw()

    def _set_frozen(self, frozen: bool) -> None:
        if folder := self._folders.get("freezer"):
            if folder.v2:
                write(folder.path + "/cgroup.freeze", "1" if frozen else "0")
            else:
                write(folder.path + "/freezer.state", "FROZEN" if frozen else "THAWED")

    def _counted_before(self, memory: str) -> _Before:
        """Initial values of the counters of kept v1 folders, since they cannot be reset."""
        before = self._before
        counted = self.count()
        self._before = _Before()
        charged = self._files.number(memory + "/memory.usage_in_bytes") or 0
        if charged > STALE_CACHE_BYTES:
            with suppress(OSError):  # it gives back what it can
                write(memory + "/memory.force_empty", "0")
            charged = self._files.number(memory + "/memory.usage_in_bytes") or 0
        oom_kills = before.oom_kills + (counted.oom_kills or 0)
        cpu_ms = before.cpu_ms + (counted.cpu_ms or 0.0)
        return _Before(charged, oom_kills, cpu_ms)


class Cgroups:
    """The places on this host where we can make groups."""

    def __init__(self, folders: Mapping[str, CgroupFolder], why: Mapping[str, str], owner: GroupOwner) -> None:
        self.available = frozenset(role for role in LIMITING if role in folders)
        self.why = {role: why[role] for role in LIMITING if role not in folders}
        """Why the other roles are not available."""
        self.of_v1 = any(not folder.v2 for folder in folders.values())
        """Whether some folders are of v1, which let in no process of another user."""
        self._folders = dict(folders)
        self._owner = owner

    @classmethod
    def detect(cls, proc: str = "/proc", manager: Manager | None = None) -> Cgroups:
        """Find out by trying, which takes about a millisecond. Never fails: what is not available is in `why`.

        With a `manager` of the host's groups, this process may be moved into a group of its own, which takes longer.
        """
        owner = GroupOwner.of_this_process()
        folders, why = find(proc, owner.group("probe"), manager)
        return cls(folders, why, owner)

    def make(self, name: str, roles: Collection[str] | None = None) -> Group:
        """A new group without limits. The name needs to be unique in this process. Raises OSError."""
        inside = self._owner.group(name)
        wanted = self._folders if roles is None else [role for role in self._folders if role in roles]
        folders = {role: self._folders[role].below(inside) for role in wanted}
        there = folders.get("kill", folders.get("freezer"))
        if there is not None and there.v2 and "time" in folders:
            folders["time"] = there  # this folder is made anyway, and counts processor time, too
        group = Group(inside, folders)
        made: list[str] = []
        try:
            for path in group.paths:
                os.mkdir(path)
                made.append(path)
        except OSError:
            for path in made:
                with suppress(OSError):
                    os.rmdir(path)
            raise
        return group

    def left_behind(self) -> list[Group]:
        """Groups, ours by name, whose maker has died.

        A maker that was killed may have been in another group than we are, so all mounted hierarchies are searched.
        """
        groups: dict[str, dict[str, CgroupFolder]] = {}
        for mount, v2 in {folder.mount: folder.v2 for folder in self._folders.values()}.items():
            for path in left_behind(mount):
                folder = CgroupFolder(path, v2, mount)
                groups.setdefault(os.path.basename(path), {}).update(dict.fromkeys(roles_of(folder), folder))
        return [Group(name, folders) for name, folders in groups.items()]


def sweep(cgroups: Cgroups) -> tuple[str, ...]:
    """Remove the groups whose maker has died, killing what is still in them. Returns the folders removed."""
    removed: list[str] = []
    for group in cgroups.left_behind():
        with suppress(OSError):  # another process may be sweeping too, and the next start finds what is left
            group.kill()
        with suppress(OSError):
            group.remove()
        removed += [path for path in group.paths if not os.path.exists(path)]
    return tuple(removed)


# ── Groups that serve one box after the other ─────────────────────────────────────────────────────
# Making one and setting its limits costs more than reading its counters.


class GroupPool:
    """The groups of one backend."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups
        self._used: dict[Limits, deque[Group]] = {}
        """The longest unused first: what a box left behind is gone by the time its group is used again."""
        self._leaving: list[tuple[Group, Callable[[], object]]] = []
        """Groups that could not be removed yet, and the function to call when they are."""
        self._closing = False

    @property
    def of_v1(self) -> bool:
        """Whether a box enters groups of v1."""
        return self._cgroups.of_v1

    def take(self, limits: Limits, *, pauses: bool = False, in_volumes: int = 0) -> Group | None:
        """An empty group with these limits; None where there can be none. Raises OSError.

        `pauses`: it is for a box that stays, and is not used again. `in_volumes`: what it may write into volumes.
        """
        self.remove_leaving()
        while not pauses and (used := self._used.get(limits)):
            group = used.popleft()
            if self._reusable(group):
                return group
        if not self._cgroups.available:
            return None
        group = self._cgroups.make(str(next(_numbers)), (*_ROLES, "freezer", "kill") if pauses else _ROLES)
        group.pauses = pauses
        group.limit(
            memory_bytes=limits.memory_bytes,
            hard_bytes=limits.memory_bytes + limits.disk_bytes + in_volumes,
            processes=limits.processes,
            cpu_cores=limits.cpu_cores,
        )
        if pauses:
            group.keep_files_open()  # of a box that stays, and is looked at in each step
        return group

    def give_back(self, group: Group, limits: Limits, *, reaped: bool, removed: Callable[[], object]) -> None:
        """Take back the group of a box that is gone. Once its first process was reaped, nothing is left in the group.

        Raises OSError where something is. Removal is then tried again whenever another group is taken or given back,
        and `removed` is called once it is gone.
        """
        self.remove_leaving()
        if group.pauses or not reaped or self._closing or sum(map(len, self._used.values())) >= KEPT:
            try:
                group.remove()
            except OSError:
                self._leaving.append((group, removed))
                raise
        else:
            group.keep_files_open()
            self._used.setdefault(limits, deque()).append(group)

    def remove_leaving(self) -> bool:
        """Try again to remove groups that were left; True when none is."""
        for entry in list(self._leaving):
            group, removed = entry
            try:
                group.remove(patience=0.0)
            except OSError:
                continue
            self._leaving.remove(entry)
            removed()
        return not self._leaving

    def close(self) -> None:
        """Remove all groups that are given back from now on."""
        self._closing = True
        for used in self._used.values():
            while used:
                self._remove_unused(used.popleft())

    def _reusable(self, group: Group) -> bool:
        """Reset it; remove it if that fails."""
        try:
            group.reset()
            if group.charged <= STALE_BYTES or (group.usage() or 0) <= STALE_BYTES:
                return True
        except OSError as exc:
            log.warning("a control group cannot be used again: %s", exc)
        self._remove_unused(group)
        return False

    def _remove_unused(self, group: Group) -> None:
        try:
            group.remove(patience=0.0)
        except OSError:
            self._leaving.append((group, lambda: None))


def _beyond(listed: int, charged: int | None) -> int:
    """What is charged to a group and in none of its sums: pages of files that were cut while a socket or a pipe still
    holds them, for one. Where it is so little that the sums may just be behind: nothing."""
    unlisted = (charged or 0) - listed
    return unlisted if unlisted > _BATCH_PAGES * os.sysconf("SC_PAGE_SIZE") * (os.cpu_count() or 1) else 0
