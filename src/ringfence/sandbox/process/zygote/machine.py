"""What a box sees of a machine: files of /proc and /sys that tell how large it is, with its limits as the sizes.

Boxes with the same limits share the files, which are written once and never change: no number in them is the host's,
but for the kind of its processors, its kernel and when it was started, which system calls tell as well.
"""

from __future__ import annotations

import errno
import os
import time
from functools import partial

from ringfence.sandbox.process.zygote import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = "/p"
_NOTHING = "nothing"
_NOWHERE = "nowhere"
_SHOWN = frozenset({"meminfo", "cpuinfo", "stat", "loadavg", "uptime", "version", "filesystems"})
CPU = "/sys/devices/system/cpu"
_READ_ONLY = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV | kernel.ATTR_NOEXEC
_KIB = 1024
_EMPTY = (
    *("Buffers", "Cached", "SwapCached", "Active", "Inactive", "SwapTotal", "SwapFree", "Dirty", "Writeback"),
    *("AnonPages", "Mapped", "Shmem", "Slab", "SReclaimable", "SUnreclaim", "Committed_AS"),
)
_OF_A_PROCESSOR = (
    *("CPU ", "Features", "BogoMIPS", "bogomips", "vendor_id", "cpu family", "model", "stepping", "flags"),
    *("cpu MHz", "cache size", "clflush size", "address sizes", "isa", "mmu"),
)
"""Lines of the host's that are shown. Boards add others about themselves, such as a serial number."""


class MachineFiles:
    """The files, each made when the first box needs it."""

    def __init__(self, *, subset: bool) -> None:
        """Boxes see the folder read-only, whoever owns it; it is written to beneath that. `subset`: hide names in
        /proc by a remount, if the kernel allows it."""
        os.mkdir(FOLDER, 0o755)
        self._folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.mkdir(_NOWHERE, 0o555, dir_fd=self._folder)
        os.close(os.open(_NOTHING, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o000, dir_fd=self._folder))
        self._subset = subset and _can_become_subset(f"{FOLDER}/{_NOWHERE}")
        kernel.bind(FOLDER, FOLDER, _READ_ONLY)
        self._made: set[str] = set()

    def sized(self, memory: int, processors: int) -> list[tuple[bytes, bytes]]:
        """Where a box of this size sees something, and what: a file or a folder."""
        shown = described(memory, processors)
        for _, name, text in shown:
            self._make(name, text)
        folder = f"cpu-{processors}"
        if folder not in self._made:
            os.mkdir(folder, 0o755, dir_fd=self._folder)
            self._made.add(folder)
        for name, line in processor_files(processors):
            self._make(f"{folder}/{name}", partial(str, line))
        found = [(at, name) for at, name, _ in shown]
        return [(at.encode(), f"{FOLDER}/{name}".encode()) for at, name in (*found, (CPU, folder))]

    def covers(self) -> list[tuple[bytes, bytes]] | None:
        """Names in /proc that must be hidden one by one, and by what; None if the kernel hides them all at once."""
        if self._subset:
            return None
        # A link leads to what else the box has: `net` to `self/net`.
        others = [each for each in os.scandir("/proc") if not each.name.isdigit() and not each.is_symlink()]
        cover = {each.name: _NOWHERE if each.is_dir() else _NOTHING for each in others if each.name not in _SHOWN}
        return [(f"/proc/{name}".encode(), f"{FOLDER}/{by}".encode()) for name, by in sorted(cover.items())]

    def _make(self, name: str, text: Callable[[], str]) -> None:
        if name not in self._made:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444, dir_fd=self._folder)
            os.write(descriptor, text().encode())
            os.close(descriptor)
            self._made.add(name)


def described(memory: int, processors: int) -> tuple[tuple[str, str, Callable[[], str]], ...]:
    """Files of /proc for a box of this size, those of `_SHOWN`: where each is, a name for it, and its content."""
    return (
        ("/proc/meminfo", f"meminfo-{memory}", lambda: _meminfo(memory)),
        ("/proc/cpuinfo", f"cpuinfo-{processors}", lambda: _cpuinfo(processors)),
        ("/proc/stat", f"stat-{processors}", lambda: _stat(processors)),
        ("/proc/loadavg", "loadavg", lambda: "0.00 0.00 0.00 1/1 1\n"),
        ("/proc/uptime", "uptime", lambda: f"{time.clock_gettime(time.CLOCK_BOOTTIME):.2f} 0.00\n"),
        ("/proc/version", "version", _version),
        ("/proc/filesystems", "filesystems", lambda: "nodev\tproc\nnodev\ttmpfs\nnodev\tdevpts\n"),
    )


def processor_files(many: int) -> list[tuple[str, str]]:
    """Files of the folder `CPU`, with their content."""
    numbers = f"0-{many - 1}\n" if many > 1 else "0\n"
    return [*((name, numbers) for name in ("online", "possible", "present")), ("kernel_max", f"{many - 1}\n")]


def _can_become_subset(place: str) -> bool:
    """Whether a /proc that was mounted whole can be told to show processes alone. Linux 7 no longer allows it."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("proc", place, "proc", flags)
    try:
        kernel.mount("proc", place, "proc", flags | kernel.MS_REMOUNT, "subset=pid")
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return False
    finally:
        kernel.call("umount2", place.encode(), kernel.MNT_DETACH)
    return True


def _meminfo(memory: int) -> str:
    size = memory // _KIB
    shown = dict.fromkeys(("MemTotal", "MemFree", "MemAvailable"), size) | dict.fromkeys(_EMPTY, 0)
    return "".join(f"{name + ':':<16}{value:>8} kB\n" for name, value in (shown | {"CommitLimit": size}).items())


def _cpuinfo(processors: int) -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first = file.read().partition("\n\n")[0].splitlines()
    same = [line for line in first if line.startswith(_OF_A_PROCESSOR)]
    return "".join("\n".join([f"processor\t: {number}", *same, "", ""]) for number in range(processors))


def _stat(processors: int) -> str:
    # None has worked yet, but programs divide by the sum.
    names = ["cpu ", *(f"cpu{number}" for number in range(processors))]
    lines = [f"{name} 0 0 0 100 0 0 0 0 0 0" for name in names]
    started = int(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    lines += ["intr 0", "ctxt 0", f"btime {started}", "processes 1", "procs_running 1", "procs_blocked 0", "softirq 0"]
    return "\n".join(lines) + "\n"


def _version() -> str:
    system = os.uname()
    return f"{system.sysname} version {system.release} (box) {system.version}\n"
