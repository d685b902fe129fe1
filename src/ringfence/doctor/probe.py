"""What stands in front of every hostile program. Its text is sent into the box; outside it is only read.

A program tries one thing and says in one line of JSON what came of it: `{"done": bool, "detail": "EPERM"}`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import select
import stat
import struct
import sys
import time  # noqa: F401 - for the programs
from collections.abc import Callable
from typing import Any


class _Missing:
    """A module that is not there, to whoever needs it."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("there is no ctypes")


try:
    import ctypes

    _libc: Any = ctypes.CDLL(None, use_errno=True)
    _libc.syscall.restype = ctypes.c_long
except ImportError:
    ctypes = _libc = _Missing()  # type: ignore[assignment]

given: dict[str, Any] = {}
"""What the harness tells a program: where its canaries lie, on which port it listens, the limits."""

MIB = 1024 * 1024
REFUSED = (errno.EPERM, errno.ENOSYS)

_ARM = os.uname().machine == "aarch64"
# By name: the number on x86_64 and on aarch64; a single number is the same on both.
_NUMBERS: dict[str, int | tuple[int, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": 435,
    "close_range": 436,
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": 431,
    "fsmount": 432,
    "fsopen": 430,
    "fspick": 433,
    "get_mempolicy": (239, 236),
    "getdents64": (217, 61),
    "init_module": (175, 105),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "io_uring_setup": 425,
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_create_ruleset": 444,
    "landlock_restrict_self": 446,
    "listmount": 458,
    "mbind": (237, 235),
    "memfd_create": (319, 279),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": 442,
    "move_mount": 429,
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_timedreceive": (243, 183),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": 428,
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": 438,
    "pidfd_open": 434,
    "pidfd_send_signal": 424,
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": 440,
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": 443,
    "reboot": (169, 142),
    "renameat2": (316, 276),
    "request_key": (249, 218),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}


def number(name: str) -> int:
    found = _NUMBERS[name]
    return found if isinstance(found, int) else found[_ARM]


def call(name: str, *arguments: Any) -> int:
    """One system call, straight to the kernel."""
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number(name)), *passed))
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def word(exc: OSError) -> str:
    return errno.errorcode.get(exc.errno or 0, str(exc))


def say(done: bool, detail: object = "", **more: object) -> None:
    """What came of it. The last such line counts."""
    line = json.dumps({"done": bool(done), "detail": str(detail), **more})
    os.write(1, f"\n{line}\n".encode())


def ready(**facts: object) -> None:
    """Tell the harness that it can look now, and wait until it has: then it closes the input."""
    spaces = {}
    for name in os.listdir("/proc/self/ns"):
        try:
            spaces[name] = os.readlink(f"/proc/self/ns/{name}")
        except OSError as exc:
            spaces[name] = word(exc)
    os.write(1, f"{json.dumps({'ready': True, 'spaces': spaces, **facts})}\n".encode())
    select.select([0], [], [], given["limits"]["wall_seconds"])


def a_while(seconds: float) -> float:
    """So many seconds, on a machine that is as slow as this one."""
    return seconds * float(given.get("pace", 1.0))


def attempt(act: Callable[[], object]) -> None:
    """Do it, and say what came of it: done unless the system objects."""
    try:
        result = act()
    except OSError as exc:
        say(False, word(exc))
    except MemoryError:
        say(False, "MemoryError")
    else:
        say(True, "succeeded" if result is None else result)


def reach(name: str, *arguments: Any) -> None:
    """Make a call; any answer that the kernel's own code for it gives means that it was reached."""
    try:
        result = call(name, *arguments)
    except OSError as exc:
        say(exc.errno not in REFUSED, word(exc))
    else:
        say(True, f"{name} returned {result}")


def reach_fork(name: str, *arguments: Any, sibling: bool = False) -> None:
    """The same for a call that makes a process; a sibling is not ours to wait for."""
    try:
        pid = call(name, *arguments)
    except OSError as exc:
        say(exc.errno not in REFUSED, word(exc))
        return
    if pid == 0:
        os._exit(0)
    if not sibling:
        os.waitpid(pid, 0)
    say(True, "made" if sibling else "forked")


def any_of(tries: dict[str, Callable[[], object]]) -> None:
    """Several ways to the same end: done if one of them works."""
    worked = []
    refused = []
    for label, act in tries.items():
        try:
            act()
            worked.append(label)
        except OSError as exc:
            refused.append(f"{label} {word(exc)}")
        except ValueError as exc:
            refused.append(f"{label} {exc}")
    say(bool(worked), ", ".join(worked or refused))


def alone() -> bool:
    """Numbers of processes are the box's own here. Where they are not, one must not be tried on."""
    return os.getpid() < 1000 and not os.path.exists(f"/proc/{given['harness']}/stat")


def there(*paths: str) -> None:
    """Which of these exist at all."""
    found = [path for path in paths if os.path.lexists(path) and not _covered(path)]
    say(bool(found), ", ".join(found) or "ENOENT")


def _covered(path: str) -> bool:
    """Whether nothing is there but a name: an empty folder, or an empty file that nobody may open."""
    found = os.lstat(path)
    if stat.S_ISDIR(found.st_mode):
        return not os.listdir(path)
    return stat.S_ISREG(found.st_mode) and not stat.S_IMODE(found.st_mode) and not found.st_size


def status(*names: str) -> dict[str, str]:
    """Lines of /proc/self/status."""
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    if untold := [name for name in names if name not in lines or not lines[name].strip()]:
        cannot(f"this kernel does not tell: {', '.join(untold)}")
    return {name: lines.get(name, "").strip() for name in names}


def mounts() -> list[dict[str, str]]:
    """Every mount in sight: where, its kind, its flags. Of several in one place the last covers the others."""
    out: dict[str, dict[str, str]] = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, right = line.split(" - ", 1)
            at = left.split()[4]
            out[at] = {"at": at, "flags": left.split()[5], "kind": right.split()[0]}
    return list(out.values())


def buffer(size: int, content: bytes = b"") -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(content, size)


def iovec(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    return buffer(16, struct.pack("QQ", address, size))


def memory_of(process: object, start: bytes, end: bytes) -> str:
    """Look for one word followed by another in the memory of a process; where they were found.

    In two parts, so that the program that looks for them does not find what it looks for in itself.
    """
    with open(f"/proc/{process}/maps") as lines, open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        for line in lines:
            span, rights = line.split()[:2]
            first, last = (int(part, 16) for part in span.split("-"))
            if not rights.startswith("r") or last - first > 256 * MIB or "[v" in line:
                continue
            try:
                memory.seek(first)
                content = memory.read(last - first)
            except (OSError, ValueError, OverflowError):
                continue
            at = content.find(start)
            while at >= 0:
                if content.startswith(end, at + len(start)):
                    return line.split()[-1] if len(line.split()) > 5 else "anonymous memory"
                at = content.find(start, at + 1)
    return ""


def cannot(reason: str) -> None:
    """This host has nothing to try it with."""
    say(False, reason, cannot=reason)
    leave()


def leave() -> None:
    """End at once, without what the interpreter does at its end."""
    sys.stdout.flush()
    os._exit(0)


def _tell_what_lacks(kind: type[BaseException], exc: BaseException, trace: object) -> None:
    cannot(f"in WebAssembly a program cannot even try it: {exc}")


class _Whole(io.FileIO):
    """A file that writes all that it is given: the runtime takes little at a time."""

    def write(self, data: Any) -> int:
        at = 0
        while at < len(data):
            at += super().write(data[at:])
        return at


_usual = open


def _open(file: Any, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
    return _Whole(file, mode.replace("b", "")) if buffering == 0 else _usual(file, mode, buffering, **more)


if sys.platform == "wasi":
    sys.excepthook = _tell_what_lacks
    open = _open
