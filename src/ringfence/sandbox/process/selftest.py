"""Before the first program of a backend runs, a box reports what it sees of itself, and the supervisor compares.

So `verified: host` in the facts means: checked on this host by this very supervisor, at the time given. The program
here is ours and runs alone in its box, so its report is trusted; no report of another program is.

Each protection is probed by an effect that it alone has, never by what happens to come with it on today's kernels: a
probe that another kernel answers otherwise would report a protection as missing that holds.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ringfence.core.box import CAN_DO_WITHOUT, BoxReport, Limits
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.sandbox.process.host.capabilities import Tested
from ringfence.sandbox.process.zygote.confine import INSIDE_ID, LOCKED_BYTES, SECURE_BITS
from ringfence.sandbox.process.zygote.template import DEVICES, HOST_NAME

_SPACES = ("user", "pid", "mnt", "ipc", "uts", "net", "cgroup")
_DEV = {*DEVICES, "fd", "ptmx", "pts", "shm", "stderr", "stdin", "stdout"}
PROC_AT = ["/proc", "/proc/mounts"]
"""Of that file, each box sees the kernel's own."""
_HIDDEN = ("cmdline", "diskstats", "interrupts", "kallsyms", "kcore", "modules", "partitions", "sys")
_SIZES = ("meminfo", "cpuinfo", "stat", "loadavg", "uptime", "version", "filesystems", "mounts")
"""Files that tell how large the box is, and its mounts."""
_MAX_PROCESSES = 9
_SHOWN = 200

PROGRAM = b"""
import ctypes, json, os, resource

def tried(act):
    try:
        act()
    except OSError as exc:
        return exc.errno
    return 0

def holds(name):
    path = "/proc/" + name
    if name.isdigit() or not os.path.lexists(path):
        return name.isdigit()
    if os.path.islink(path):
        return False
    return bool(os.listdir(path)) if os.path.isdir(path) else not tried(lambda: open(path).close())

limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
          for name in ("CORE", "NOFILE", "FSIZE", "NPROC", "MEMLOCK", "MSGQUEUE", "RTPRIO", "NICE")}
space = os.statvfs("/workspace")
mask = os.umask(0)
print(json.dumps({
    "spaces": {name: os.readlink("/proc/self/ns/" + name) for name in %(spaces)b},
    "mounts": open("/proc/self/mountinfo").read(),
    "root": os.statvfs("/").f_flag, "input": os.statvfs("/workspace/input").f_flag,
    "size": space.f_blocks * space.f_frsize, "inodes": space.f_files,
    "dev": sorted(os.listdir("/dev")),
    # A name that is not listed could still be found. Where names cannot be hidden, there is nothing behind them.
    "proc": sorted(filter(holds, {*os.listdir("/proc"), *%(hidden)b}.difference(%(sizes)b))),
    "name": os.uname().nodename, "session": os.getsid(0) == os.getpid(),
    "tty": tried(lambda: os.open("/dev/tty", os.O_RDWR)),
    "limits": limits, "umask": mask, "nice": os.getpriority(os.PRIO_PROCESS, 0),
    # Mode and mount allow writing it, so only Landlock can refuse to open it for that: no rule names it.
    "may": os.access("/proc/self/comm", os.W_OK), "open": tried(lambda: os.open("/proc/self/comm", os.O_WRONLY)),
    "bits": ctypes.CDLL(None).prctl(27, 0, 0, 0, 0), "ids": os.getresuid() + os.getresgid(),
    "maps": [open("/proc/self/" + name).read().split() for name in ("uid_map", "gid_map")],
}))
""" % {b"spaces": repr(_SPACES).encode(), b"hidden": repr(_HIDDEN).encode(), b"sizes": repr(_SIZES).encode()}


class Probe(NamedTuple):
    """How one protection is probed, and what a box that has it answers."""

    probe: str
    expected: str
    seen: Callable[[Any], object]
    """Picks the value out of all that the box reported."""
    holds: Callable[[Any], object]
    """Whether the protection is there, given that value."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one probe."""

    probe: str
    expected: str
    seen: str
    on: bool

    def __str__(self) -> str:
        return f"{self.probe}: expected {self.expected}, saw {self.seen}"


def judge(reported: bytes, limits: Limits) -> dict[str, ProbeResult]:
    """Which protections were seen, and which not. Raises ValueError for what is no answer."""
    answers = json.loads(reported)
    found: dict[str, ProbeResult] = {}
    for name, look in {**LOOKS, **_spaces(), **_limits(limits)}.items():
        seen = look.seen(answers)
        found[name] = ProbeResult(look.probe, look.expected, str(seen)[:_SHOWN], bool(look.holds(seen)))
    return found


def tested(report: BoxReport, inherited: Iterable[str], left_out: Collection[str], given_up: Collection[str]) -> Tested:
    """The result of a box that ran the program above. Raises Unavailable for what it lacks and was not given up."""
    try:
        found = judge(report.stdout.head, Limits())
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        reported = report.stderr.text.strip().splitlines()[-1:] or [str(exc)]
        raise Unavailable("self_test", f"a box could not be looked at: {report.ended}, {reported[0]}") from None
    if without := lacking(found, given_up):
        missing = {name for name, look in found.items() if not look.on and name not in given_up}
        raise Unavailable("self_test", f"a box on this host lacks {without}. {_what_to_do(missing)}")
    on = {name: look.on for name, look in found.items()} | dict.fromkeys(inherited, True)
    return Tested(on, datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"), frozenset(left_out))


def lacking(found: Mapping[str, ProbeResult], given_up: Collection[str]) -> str:
    """What is missing and was not given up, in words; empty where nothing is."""
    those = ((name, look) for name, look in sorted(found.items()) if not look.on and name not in given_up)
    return "; ".join(f"{name} ({look})" for name, look in those)


def _what_to_do(missing: Collection[str]) -> str:
    if set(missing) <= set(CAN_DO_WITHOUT):
        return "To run without it, list it under sandbox.accept_missing."
    return "Nothing is run in such a box; please report this, with the output of `uname -a`."


def _spaces() -> dict[str, Probe]:
    def look(space: str) -> Probe:
        ours = os.readlink(f"/proc/self/ns/{space}")
        where = f"/proc/self/ns/{space}"
        return Probe(
            where, f"another than {ours}", lambda reported: reported["spaces"][space], lambda seen: seen != ours
        )

    return {f"{'mount' if space == 'mnt' else space}_namespace": look(space) for space in _SPACES}


def _limit(name: str, expected: str, holds: Callable[[int], bool]) -> Probe:
    return Probe(f"the hard limit RLIMIT_{name}", expected, lambda reported: reported["limits"][name], holds)


def _limits(limits: Limits) -> dict[str, Probe]:
    page = os.sysconf("SC_PAGE_SIZE")
    disk = limits.disk_bytes
    return {
        "workspace": Probe(
            "bytes and inodes of /workspace",
            f"{disk} and {limits.inodes}",
            lambda reported: (reported["size"], reported["inodes"]),
            lambda seen: abs(seen[0] - disk) < page and seen[1] == limits.inodes,
        ),
        "open_files": _limit("NOFILE", f"1 to {limits.open_files}", lambda seen: 0 < seen <= limits.open_files),
        "file_size": _limit("FSIZE", f"1 to {disk + page}", lambda seen: 0 < seen <= disk + page),
        "processes": _limit("NPROC", f"1 to {limits.processes + 2}", lambda seen: 0 < seen <= limits.processes + 2),
    }


class _Mount(NamedTuple):
    at: str
    flags: set[str]
    kind: str


def _mounts(reported: Any) -> list[_Mount]:
    """Sorted: kernels have changed the order."""
    out = []
    for line in reported["mounts"].splitlines():
        words = line.split(" ")
        out.append(_Mount(words[4], set(words[5].split(",")), words[words.index("-") + 1]))
    return out


def _writable(reported: Any) -> object:
    """Mounts besides the box's own, and /proc, whose files Landlock protects."""
    own = ("/workspace/", "/proc/", "/dev/pts/")
    fixed = [mount for mount in _mounts(reported) if not f"{mount.at}/".startswith(own)]
    loose = [mount.at for mount in fixed if not {"ro", "nosuid"} <= mount.flags]
    return loose if fixed else "no mount at all"


def _errno(number: int) -> str:
    return errno.errorcode.get(number, str(number)) if number else "success"


def _ids(reported: Any) -> object:
    """Of each map: the first id inside, and the number of ids."""
    return [[(words[n], words[n + 2]) for n in range(0, len(words), 3)] for words in reported["maps"]]


def _flags(where: str) -> Callable[[Any], object]:
    return lambda reported: "read-only" if reported[where] & os.ST_RDONLY else "writable"


LOOKS: dict[str, Probe] = {
    "trees_read_only": Probe("mounts that are not both ro and nosuid", "[]", _writable, lambda seen: seen == []),
    "own_devices": Probe(
        "names in /dev", ", ".join(sorted(_DEV)), lambda reported: reported["dev"], lambda seen: set(seen) == _DEV
    ),
    "identity": Probe(
        "user and group ids, each three times",
        str(INSIDE_ID),
        lambda reported: reported["ids"],
        lambda seen: seen == [INSIDE_ID] * 6,
    ),
    "mapping": Probe(
        "ids in uid_map and gid_map",
        f"{INSIDE_ID} alone",
        _ids,
        lambda seen: seen == [[(str(INSIDE_ID), "1")]] * 2,
    ),
    "own_root": Probe(
        "file systems mounted at /",
        "['tmpfs']",
        lambda reported: [mount.kind for mount in _mounts(reported) if mount.at == "/"],
        lambda seen: seen == ["tmpfs"],
    ),
    "pivot": Probe(
        "where a proc file system is mounted",
        str(PROC_AT),
        lambda reported: sorted(mount.at for mount in _mounts(reported) if mount.kind == "proc"),
        lambda seen: seen == PROC_AT,
    ),
    "proc": Probe(
        "names in /proc that something is found at",
        f"at most {_MAX_PROCESSES} processes, and nothing else",
        lambda reported: reported["proc"],
        lambda seen: len(seen) <= _MAX_PROCESSES and all(name.isdigit() for name in seen),
    ),
    "input_read_only": Probe(
        "the file system of /workspace/input", "read-only", _flags("input"), lambda seen: seen == "read-only"
    ),
    "read_only_root": Probe("the file system of /", "read-only", _flags("root"), lambda seen: seen == "read-only"),
    "host_name": Probe("the host name", HOST_NAME, lambda reported: reported["name"], lambda seen: seen == HOST_NAME),
    "session": Probe(
        "leader of a session, opening /dev/tty",
        "True, an error",
        lambda reported: (reported["session"], _errno(reported["tty"])),
        lambda seen: seen[0] and seen[1] != _errno(0),
    ),
    "umask": Probe("the umask", "0o22", lambda reported: oct(reported["umask"]), lambda seen: seen == oct(0o022)),
    "no_core_dump": _limit("CORE", "1, or 0 where the host has that", lambda seen: 0 <= seen <= 1),
    "locked_memory": _limit("MEMLOCK", f"at most {LOCKED_BYTES}", lambda seen: 0 <= seen <= LOCKED_BYTES),
    "queues": _limit("MSGQUEUE", "0", lambda seen: seen == 0),
    "priority": Probe(
        "the hard limits RLIMIT_RTPRIO and RLIMIT_NICE, and niceness",
        "0, 0, and no less than 0",
        lambda reported: (reported["limits"]["RTPRIO"], reported["limits"]["NICE"], reported["nice"]),
        lambda seen: seen[:2] == (0, 0) and seen[2] >= 0,
    ),
    # Newer kernels may have more; these are the ones that make ids meaningless.
    "secure_bits": Probe(
        "securebits",
        f"{SECURE_BITS:#x} among them",
        lambda reported: hex(reported["bits"]),
        lambda seen: int(seen, 16) & SECURE_BITS == SECURE_BITS,
    ),
    "landlock": Probe(
        "opening /proc/self/comm for writing, which its mode and mount allow",
        "EACCES",
        lambda reported: (
            _errno(reported["open"]) if reported["may"] else "that mode or mount forbid it, which shows nothing"
        ),
        lambda seen: seen == "EACCES",
    ),
}
