"""Before the first program of a backend runs, a box says what it sees of itself, and the supervisor compares.

So `verified: host` in the facts means: looked at on this host by this very supervisor, at the time given. The program
here is ours and runs alone in its box, so it may be believed; what others run in theirs never is.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

from ringfence.box import Limits
from ringfence.sandbox.process.confine import LOCKED_BYTES
from ringfence.sandbox.process.template import HOST_NAME

_SPACES = ("user", "pid", "mnt", "ipc", "uts", "net", "cgroup")

PROGRAM = b"""
import ctypes, json, os, resource

def tried(act):
    try:
        act()
    except OSError as exc:
        return exc.errno
    return 0

limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
          for name in ("CORE", "NOFILE", "FSIZE", "NPROC", "MEMLOCK", "MSGQUEUE", "RTPRIO", "NICE")}
space = os.statvfs("/workspace")
mask = os.umask(0)
print(json.dumps({
    "spaces": {name: os.readlink("/proc/self/ns/" + name) for name in %(spaces)b},
    "mounts": open("/proc/self/mountinfo").read(),
    "root": os.statvfs("/").f_flag, "input": os.statvfs("/workspace/input").f_flag,
    "size": space.f_blocks * space.f_frsize, "inodes": space.f_files,
    "dev": sorted(os.listdir("/dev")), "proc": sorted(os.listdir("/proc")),
    "name": os.uname().nodename, "session": os.getsid(0) == os.getpid(),
    "tty": tried(lambda: os.open("/dev/tty", os.O_RDWR)),
    "limits": limits, "umask": mask, "nice": os.getpriority(os.PRIO_PROCESS, 0),
    # Mode and mount let it be written, so that whoever refuses to open it for that is Landlock: no rule names it.
    "may": os.access("/proc/self/comm", os.W_OK), "open": tried(lambda: os.open("/proc/self/comm", os.O_WRONLY)),
    "bits": ctypes.CDLL(None).prctl(27, 0, 0, 0, 0), "ids": os.getresuid() + os.getresgid(),
}))
""" % {b"spaces": repr(_SPACES).encode()}


def judge(said: bytes, limits: Limits) -> dict[str, bool]:
    """Which protections were seen to be there, and which not. Raises ValueError for what is no answer."""
    seen = json.loads(said)
    found = {name: bool(look(seen)) for name, look in {**_LOOKS, **_limit_looks(limits)}.items()}
    for space in _SPACES:
        name = f"{'mount' if space == 'mnt' else space}_namespace"
        found[name] = seen["spaces"][space] != os.readlink(f"/proc/self/ns/{space}")
    return found


def _limit_looks(limits: Limits) -> dict[str, Callable[[Any], object]]:
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "workspace": lambda seen: abs(seen["size"] - limits.disk_bytes) < page and seen["inodes"] == limits.inodes,
        "open_files": lambda seen: seen["limits"]["NOFILE"] == limits.open_files,
        "file_size": lambda seen: 0 < seen["limits"]["FSIZE"] <= limits.disk_bytes + page,
        "processes": lambda seen: 0 < seen["limits"]["NPROC"] <= limits.processes + 2,
    }


def _mounts(seen: Any) -> list[tuple[str, list[str], str]]:
    """Where, how, and of which kind."""
    out = []
    for line in seen["mounts"].splitlines():
        words = line.split(" ")
        out.append((words[4], words[5].split(","), words[words.index("-") + 1]))
    return out


def _trees_read_only(seen: Any) -> bool:
    ours = ("/workspace", "/proc")
    trees = [(where, how) for where, how, _ in _mounts(seen) if not where.startswith(ours)]
    return bool(trees) and all({"ro", "nosuid"} <= set(how) for _, how in trees)


_LOOKS: dict[str, Callable[[Any], object]] = {
    "trees_read_only": _trees_read_only,
    "own_devices": lambda seen: (
        set(seen["dev"]) == {"fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"}
    ),
    "identity": lambda seen: seen["ids"] == [1000] * 6,
    "own_root": lambda seen: _mounts(seen)[0][0] == "/",
    "pivot": lambda seen: [kind for _, _, kind in _mounts(seen)].count("proc") == 1,
    "proc": lambda seen: set(seen["proc"]) <= {"self", "thread-self", *map(str, range(1, 10))},
    "input_read_only": lambda seen: seen["input"] & os.ST_RDONLY,
    "read_only_root": lambda seen: seen["root"] & os.ST_RDONLY,
    "host_name": lambda seen: seen["name"] == HOST_NAME,
    "session": lambda seen: seen["session"] and seen["tty"],
    "umask": lambda seen: seen["umask"] == 0o022,
    "no_core_dump": lambda seen: seen["limits"]["CORE"] == 0,
    "locked_memory": lambda seen: 0 <= seen["limits"]["MEMLOCK"] <= LOCKED_BYTES,
    "queues": lambda seen: 0 <= seen["limits"]["MSGQUEUE"] <= 819_200,
    "priority": lambda seen: seen["limits"]["RTPRIO"] == seen["limits"]["NICE"] == 0 and seen["nice"] >= 0,
    "secure_bits": lambda seen: seen["bits"] == 0xEF,
    "landlock": lambda seen: seen["may"] and seen["open"] == errno.EACCES,
    "mapping": lambda seen: seen["ids"] == [1000] * 6,
}
