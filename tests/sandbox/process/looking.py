"""What tests can see of supervisors, zygotes and boxes from outside: processes, control groups, descriptors, memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringfence.sandbox.process.backend import ProcessBackend


@dataclass(frozen=True)
class Process:
    """One process, not just its number, which may pass to another."""

    pid: int
    started: str

    @property
    def alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found[19] == self.started and found[0] not in "ZX"


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def witnesses(zygote: int) -> list[int]:
    """Children that stand still."""
    return [pid for pid in children(zygote) if (_stat(pid) or "?")[0] == "T"]


def boxed(zygote: int) -> list[int]:
    """The others: what boxes are made of."""
    return [pid for pid in children(zygote) if (_stat(pid) or "?")[0] not in "T?"]


def descendants(pid: int) -> list[Process]:
    """A process and all below it."""
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        state = _stat(each)
        if state is not None:
            found.append(Process(each, state[19]))
        waiting += children(each)
    return found


def zygotes() -> list[int]:
    """Those of this process."""
    return [pid for pid in children(os.getpid()) if b"/sandbox/process/" in _command(pid)]


def groups(pid: int) -> set[str]:
    """The control groups that this supervisor made, by its name."""
    folders = (folder for folder, _, _ in os.walk("/sys/fs/cgroup"))
    return {folder for folder in folders if os.path.basename(folder).startswith(f"ringfence-{pid}-")}


def descriptors(pid: int | str = "self") -> int:
    # Which they are, the kernel tells the owner alone; how many, whoever may look into its user namespace.
    return len(os.listdir(f"/proc/{pid}/fdinfo"))


def mounts(pid: int | str = "self") -> list[tuple[str, str]]:
    """Where something is mounted, and what kind it is."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return sorted((line.split()[4], line.partition(" - ")[2].split()[0]) for line in lines)


def memory(pid: int | str = "self") -> int:
    """What it has that is no file's, whether or not it shares it with what it forked."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def at_rest(backend: ProcessBackend) -> bool:
    """Nothing runs there, ends, or is in the making."""
    pool = backend._pool
    coming = pool is not None and (pool._tasks or pool._starting or any(kind.coming for kind in pool._kinds.values()))
    return not (coming or backend._running or backend._removing)


def all_gone(processes: Iterable[Process]) -> Callable[[], bool]:
    return lambda: not any(process.alive for process in processes)


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
