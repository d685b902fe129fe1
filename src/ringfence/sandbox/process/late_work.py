"""What runs in a box that stays and is no part of the step that runs there: it has an account of its own.

A step is over when its interpreter's main thread waits for the next order; that it said so is a claim. What it left
(threads, children, tasks) may go on within the limits of the box. The kernel says how much processor time each task
uses; we ask only where there are other tasks at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from typing import Any

from ringfence.core.box import FileFact, Limit
from ringfence.core.record import dataclass
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.box_usage import descendants, process_cpu_ms

_MIN_REPORTED_MS = 1.0
_MAX_OPEN = 64


@dataclass(slots=True)
class LateWork:
    """Work in a box by what earlier steps left there, and by set-up code, since the last step that was reported."""

    cpu_ms: float = 0.0
    denials: dict[str, int] = field(default_factory=dict)
    files: tuple[FileFact, ...] = ()
    network: Mapping[str, Any] | None = None
    tasks: int = 0
    """Processes and threads that earlier steps left and that ran on beside this one: what it left of files and asked
    of the network may be theirs."""
    limit: Limit | None = None
    """A limit of the box that was met while no step ran."""

    def add(self, more: LateWork) -> None:
        """Add more; of tasks, limits and of the network, the newer value replaces the older one."""
        self.cpu_ms += more.cpu_ms
        for name, count in more.denials.items():
            self.denials[name] = self.denials.get(name, 0) + count
        self.files += more.files
        self.network = more.network or self.network
        self.tasks = more.tasks or self.tasks
        self.limit = more.limit or self.limit

    def fact(self) -> dict[str, Any] | None:
        """The `late` fact; None where there is nothing to report."""
        out: dict[str, Any] = {}
        if self.cpu_ms >= _MIN_REPORTED_MS:
            out["cpu_ms"] = round(self.cpu_ms, 3)
        if self.tasks:
            out["tasks"] = self.tasks
        if self.limit is not None:
            out["limit"] = self.limit
        if self.denials:
            out["denials"] = dict(self.denials)
        if self.files:
            out["files"] = [each.as_json() for each in self.files]
        if self.network is not None and any(self.network.get(which) for which in ("allowed", "denied", "failed")):
            out["network"] = dict(self.network)
        return out or None


class OtherTasks:
    """The tasks that were in a box when a step began, and those that they start: nothing that they do is the step's."""

    def __init__(self, tasks: TaskTable, main: int, running: Collection[int]) -> None:
        """`main` is the step's own thread, `running` those of steps that run beside it, whose tasks are not late."""
        self._tasks = tasks
        self._main = main
        self._running = frozenset(running)
        self._theirs: dict[int, _Use] = {}
        self._own: set[int] = {main}
        self._reaped: dict[int, tuple[float, float]] = {}
        """Of processes, by theirs: what children that they waited for had used, first and last."""
        for task in tasks.all():
            if task.tid != main and (used := task.used_ns()) is not None:
                late = not self._running or not self._belongs_to_a_step(task)
                self._theirs[task.tid] = _Use(task, late, used, used)
        self.tasks = sum(use.late for use in self._theirs.values())
        self._look_at_reaped()

    def look(self) -> None:
        """Read what they have used by now. A task that has ended counts with what it had used at the last look."""
        for task in self._tasks.all():
            if task.tid in self._theirs:
                self._theirs[task.tid].look()
            elif task.tid not in self._own:
                self._sort(task)
        self._look_at_reaped()

    def _look_at_reaped(self) -> None:
        for pid in {use.task.process for use in self._theirs.values() if use.task.process != self._main}:
            with contextlib.suppress(OSError, ValueError, IndexError):
                _, now = process_cpu_ms(pid)
                self._reaped[pid] = (self._reaped.get(pid, (now, now))[0], now)

    def _sort(self, task: _Task) -> bool:
        """One that was not there before: whether it is theirs, which is so if its maker is."""
        used = task.used_ns()
        if used is None or not self._made_by_them(task):
            self._own.add(task.tid)
            return False
        maker = self._theirs.get(task.parent) or self._theirs.get(task.process)
        self._theirs[task.tid] = _Use(task, maker.late if maker is not None else True, 0, used)
        return True

    def _made_by_them(self, task: _Task) -> bool:
        if task.process != task.tid:  # a thread
            return task.process != self._main and task.process in self._theirs
        if task.parent == self._main:
            # Of our own process, but perhaps of a thread that an earlier step left: each thread has its own children.
            left = any(use.task.process == self._main for use in self._theirs.values())
            return left and task.tid not in _children(self._main)
        return task.parent in self._theirs

    def _belongs_to_a_step(self, task: _Task) -> bool:
        pid = task.process
        seen = set[int]()
        while pid and pid not in seen:
            if pid in self._running:
                return True
            seen.add(pid)
            found = self._tasks.get(pid)
            pid = found.parent if found is not None else 0
        return False

    def include(self, tid: int) -> bool:
        """Whether a task is one of them."""
        if tid in self._theirs or tid in self._own:
            return tid in self._theirs
        task = self._tasks.get(tid)
        return task is not None and self._sort(task)

    @property
    def cpu_ms(self) -> float:
        """All that they used since the step began."""
        return sum(use.cpu_ms for use in self._theirs.values()) + self._by_reaped(self._reaped)

    @property
    def late_ms(self) -> float:
        """The same, without those of steps that run beside it."""
        late = [use for use in self._theirs.values() if use.late]
        return sum(use.cpu_ms for use in late) + self._by_reaped({use.task.process for use in late})

    def _by_reaped(self, pids: Iterable[int]) -> float:
        return sum(last - first for first, last in (self._reaped[pid] for pid in pids if pid in self._reaped))


class TaskTable:
    """The threads of all processes in a box, as they were last seen. What each used is asked again and again, so it
    stays open: to open a file of /proc takes longer than to read it."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._first = 0
        self._known: dict[int, _Task] = {}

    def all(self) -> list[_Task]:
        listed = self.numbers()
        for gone in self._known.keys() - set(listed):
            self._known.pop(gone).close()
        return [task for tid in listed if (task := self.get(tid)) is not None]

    def numbers(self) -> list[int]:
        self._first = self._first or self._box.first
        try:
            return tasks(self._box, self._first)
        except OSError:  # the box is just ending
            return []

    def get(self, tid: int) -> _Task | None:
        """None where it is gone."""
        known = self._known.get(tid)
        if known is not None and known.used_ns() is not None:
            return known
        if known is not None:  # another task has its number by now, or none
            self._known.pop(tid).close()
        task = _Task.seen(tid, keep=len(self._known) < _MAX_OPEN)
        if task is not None:
            self._known[tid] = task
        return task

    def close(self) -> None:
        for task in self._known.values():
            task.close()
        self._known.clear()


@dataclass(slots=True)
class _Task:
    """A thread of a process in the box."""

    tid: int
    process: int
    parent: int
    _descriptor: int

    @classmethod
    def seen(cls, tid: int, *, keep: bool) -> _Task | None:
        """None where it is gone. `keep`: what it used stays open."""
        try:
            with open(f"/proc/{tid}/status", encoding="utf-8", errors="replace") as file:
                text = file.read()
            process, parent = (int(text.partition(f"\n{name}:\t")[2].split()[0]) for name in ("Tgid", "PPid"))
            descriptor = os.open(f"/proc/{tid}/schedstat", os.O_RDONLY | os.O_CLOEXEC) if keep else -1
        except (OSError, ValueError, IndexError):
            return None
        return cls(tid, process, parent, descriptor)

    def used_ns(self) -> int | None:
        """Processor time; None where it is gone."""
        try:
            if self._descriptor >= 0:
                return int(os.pread(self._descriptor, 100, 0).split()[0])
            with open(f"/proc/{self.tid}/schedstat", "rb") as file:
                return int(file.read().split()[0])
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(slots=True)
class _Use:
    """What a task used since a step began."""

    task: _Task
    late: bool
    first_ns: int
    last_ns: int

    def look(self) -> None:
        self.last_ns = max(self.last_ns, self.task.used_ns() or 0)

    @property
    def cpu_ms(self) -> float:
        return (self.last_ns - self.first_ns) / 1e6


def tasks(box: Box, first: int) -> list[int]:
    """Every thread of every process in a box, without its `first` process, which never works."""
    listed = box.group.tasks() if box.group is not None else None
    if listed is None:
        listed = []
        for pid in descendants(first, *box.workers):
            with contextlib.suppress(OSError):
                listed += [int(tid) for tid in os.listdir(f"/proc/{pid}/task")] if pid else []
        listed = list(dict.fromkeys(listed))
    return [tid for tid in listed if tid != first]


def _children(tid: int) -> set[int]:
    try:
        with open(f"/proc/{tid}/task/{tid}/children", encoding="ascii") as file:
            return {int(word) for word in file.read().split()}
    except OSError:
        return set()
