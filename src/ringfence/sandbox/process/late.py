"""What runs in a box that stays and is no part of the step that runs there: it has an account of its own.

A step is over when its interpreter's main thread waits for the next order; that it said so is a claim. What it left
(threads, children, tasks) may go on within the limits of the box. Who uses the processor is asked of the kernel, task
by task, and only where there is somebody else at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringfence.box import FileFact
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.syscalls import NUMBERS
from ringfence.sandbox.process.watch import descendants

_WAITS = str(NUMBERS.get(os.uname().machine, {}).get("recvfrom")).encode()
_AS_IT_WAITS = (b"0x1", b"0x22")
"""One byte, and to look at the message without taking it (MSG_PEEK | MSG_TRUNC): so `cells` asks for the next order."""
_WAITS_IN = b"skb_wait"
_TICKS_MS = 1000.0 / os.sysconf("SC_CLK_TCK")
_WORTH_TELLING_MS = 1.0


class MainThread:
    """Of an interpreter: whether it waits for its next order."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: dict[str, int] = {}

    def waits(self) -> bool:
        """Whether it does just now. Where the kernel tells us less of others' processes, that it sleeps is enough."""
        try:
            called = self._read("syscall").split()
            if called[:1] == [b"running"] or len(called) < 5:
                return False
            return called[0] == _WAITS and tuple(called[3:5]) == _AS_IT_WAITS
        except PermissionError:
            place = self._read("wchan")
            return _WAITS_IN in place if place not in (b"", b"0") else self._sleeps()
        except FileNotFoundError:
            return self._sleeps()

    def _sleeps(self) -> bool:
        return self._read("stat").rpartition(b")")[2].split()[:1] == [b"S"]

    def _read(self, name: str) -> bytes:
        """Raises OSError: PermissionError where it is not for us, ProcessLookupError where it is gone."""
        if name not in self._files:
            self._files[name] = os.open(f"/proc/{self._pid}/task/{self._pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._files[name], 4096, 0)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


@dataclass(slots=True)
class Late:
    """What was done in a box by what earlier steps left there, since the last step was told of."""

    cpu_ms: float = 0.0
    denials: dict[str, int] = field(default_factory=dict)
    files: tuple[FileFact, ...] = ()
    network: Mapping[str, Any] | None = None
    tasks: int = 0
    """Processes and threads that earlier steps left and that ran on beside this one: what it left of files and asked
    of the network may be theirs."""

    def told(self) -> dict[str, Any] | None:
        """As a fact; None where there is nothing to tell."""
        out: dict[str, Any] = {}
        if self.cpu_ms >= _WORTH_TELLING_MS:
            out["cpu_ms"] = round(self.cpu_ms, 3)
        if self.tasks:
            out["tasks"] = self.tasks
        if self.denials:
            out["denials"] = dict(self.denials)
        if self.files:
            out["files"] = [{"path": each.path, "bytes": each.bytes, "sha256": each.sha256} for each in self.files]
        if self.network is not None and any(self.network.get(which) for which in ("allowed", "denied", "failed")):
            out["network"] = dict(self.network)
        return out or None


class Others:
    """Whoever was in a box when a step began, and what comes of them: nothing that they do is the step's."""

    def __init__(self, box: Box, main: int, running: Collection[int]) -> None:
        """`main` is the step's own thread, `running` those of steps that run beside it, whose tasks are not late."""
        self._box = box
        self._main = main
        self._running = frozenset(running)
        self._theirs: dict[int, _Task] = {}
        self._own: set[int] = {main}
        self._reaped: dict[int, tuple[float, float]] = {}
        """Of processes, by theirs: what children that they waited for had used, first and last."""
        with contextlib.suppress(OSError):
            for tid in tasks(box):
                if tid not in self._own and (task := _Task.seen(tid)) is not None:
                    task.late = not self._belongs_to_a_step(task)
                    self._theirs[tid] = task
        self.tasks = sum(task.late for task in self._theirs.values())
        self.look()

    def look(self) -> None:
        """What they used until now; who has ended meanwhile had used at least what was seen last."""
        with contextlib.suppress(OSError):
            for tid in tasks(self._box):
                if tid in self._theirs:
                    self._theirs[tid].look()
                elif tid not in self._own:
                    self._sort(tid)
        for pid in {task.process for task in self._theirs.values() if task.process != self._main}:
            with contextlib.suppress(OSError, ValueError, IndexError):
                now = _reaped_ms(pid)
                self._reaped[pid] = (self._reaped.get(pid, (now, now))[0], now)

    def _sort(self, tid: int) -> bool:
        """A task that was not there before: whether it is theirs, which is so if whoever made it is."""
        task = _Task.seen(tid, since_birth=True)
        theirs = task is not None and self._made_by_them(task)
        if theirs and task is not None:
            maker = self._theirs.get(task.parent) or self._theirs.get(task.process)
            task.late = maker.late if maker is not None else True
            self._theirs[tid] = task
        else:
            self._own.add(tid)
        return theirs

    def _made_by_them(self, task: _Task) -> bool:
        if task.process != task.tid:  # a thread
            return task.process != self._main and task.process in self._theirs
        if task.parent == self._main:
            # Of our own process, but perhaps of a thread that an earlier step left: each thread has its own children.
            left = any(each.process == self._main for each in self._theirs.values())
            return left and task.tid not in _children(self._main)
        return task.parent in self._theirs

    def _belongs_to_a_step(self, task: _Task) -> bool:
        pid, seen = task.process, set[int]()
        while pid and pid not in seen:
            if pid in self._running:
                return True
            seen.add(pid)
            found = _Task.seen(pid)
            pid = found.parent if found is not None else 0
        return False

    def include(self, tid: int) -> bool:
        """Whether a task is one of them."""
        if tid in self._theirs or tid in self._own:
            return tid in self._theirs
        return self._sort(tid)

    @property
    def cpu_ms(self) -> float:
        """All that they used since the step began."""
        return sum(task.cpu_ms for task in self._theirs.values()) + self._by_reaped(self._reaped)

    @property
    def late_ms(self) -> float:
        """The same, without those of steps that run beside it."""
        late = [task for task in self._theirs.values() if task.late]
        return sum(task.cpu_ms for task in late) + self._by_reaped({task.process for task in late})

    def _by_reaped(self, pids: Iterable[int]) -> float:
        return sum(last - first for first, last in (self._reaped[pid] for pid in pids if pid in self._reaped))


@dataclass(slots=True)
class _Task:
    """A thread of a process in the box."""

    tid: int
    process: int
    parent: int
    first_ns: int
    last_ns: int
    late: bool = True

    @classmethod
    def seen(cls, tid: int, *, since_birth: bool = False) -> _Task | None:
        """None where it is gone."""
        try:
            with open(f"/proc/{tid}/status", encoding="utf-8", errors="replace") as file:
                text = file.read()
            process, parent = (int(text.partition(f"\n{name}:\t")[2].split()[0]) for name in ("Tgid", "PPid"))
            used = _used_ns(tid)
        except (OSError, ValueError, IndexError):
            return None
        return cls(tid, process, parent, 0 if since_birth else used, used)

    def look(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            self.last_ns = max(self.last_ns, _used_ns(self.tid))

    @property
    def cpu_ms(self) -> float:
        return (self.last_ns - self.first_ns) / 1e6


def tasks(box: Box) -> list[int]:
    """Every thread of every process in a box, without its first process, which never works."""
    listed = box.group.tasks() if box.group is not None else None
    if listed is None:
        listed = []
        for pid in descendants(box.first, *box.workers):
            with contextlib.suppress(OSError):
                listed += [int(tid) for tid in os.listdir(f"/proc/{pid}/task")] if pid else []
        listed = list(dict.fromkeys(listed))
    first = box.first
    return [tid for tid in listed if tid != first]


def _used_ns(tid: int) -> int:
    with open(f"/proc/{tid}/schedstat", "rb") as file:
        return int(file.read().split()[0])


def _reaped_ms(pid: int) -> float:
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return (int(words[13]) + int(words[14])) * _TICKS_MS


def _children(tid: int) -> set[int]:
    try:
        with open(f"/proc/{tid}/task/{tid}/children", encoding="ascii") as file:
            return {int(word) for word in file.read().split()}
    except OSError:
        return set()
