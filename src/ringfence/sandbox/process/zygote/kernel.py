"""System calls that Python has no name for, by number through libc. Used inside the zygote; imports nothing of ours."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import time
from ctypes import c_char_p, c_int, c_long, c_ulong

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

NEWNS = 0x00020000
NEWCGROUP = 0x02000000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
SIGCHLD = 17
_SAME_PARENT = 0x8000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4
ATTR_NOEXEC = 8
ATTR_IDMAP = 0x00100000
MNT_DETACH = 2
_TRIES_FOR_A_KEY = 50
_UNTIL_KEYS_ARE_FREE = 0.1
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 4

PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_NUMBERS = {
    "x86_64": {
        "clone": 56,
        "openat": 257,
        "write": 1,
        "close": 3,
        "mkdirat": 258,
        "chdir": 80,
        "setgroups": 116,
        "setresuid": 117,
        "setresgid": 119,
        "setfsuid": 122,
        "setfsgid": 123,
        "setsid": 112,
        "prctl": 157,
        "prlimit64": 302,
        "sched_setaffinity": 203,
        "socket": 41,
        "ioctl": 16,
        "dup3": 292,
        "pread64": 17,
        "pivot_root": 155,
        "mount": 165,
        "umount2": 166,
        "capset": 126,
        "keyctl": 250,
        "unshare": 272,
        "setns": 308,
        "seccomp": 317,
        "close_range": 436,
        "mount_setattr": 442,
        "open_tree": 428,
        "move_mount": 429,
        "openat2": 437,
        "pidfd_getfd": 438,
        "io_uring_setup": 425,
        "io_uring_register": 427,
        "landlock_create_ruleset": 444,
        "landlock_add_rule": 445,
        "landlock_restrict_self": 446,
        "kcmp": 312,
    },
    "aarch64": {
        "clone": 220,
        "openat": 56,
        "write": 64,
        "close": 57,
        "mkdirat": 34,
        "chdir": 49,
        "setgroups": 159,
        "setresuid": 147,
        "setresgid": 149,
        "setfsuid": 151,
        "setfsgid": 152,
        "setsid": 157,
        "prctl": 167,
        "prlimit64": 261,
        "sched_setaffinity": 122,
        "socket": 198,
        "ioctl": 29,
        "dup3": 24,
        "pread64": 67,
        "pivot_root": 41,
        "mount": 40,
        "umount2": 39,
        "capset": 91,
        "keyctl": 219,
        "unshare": 97,
        "setns": 268,
        "seccomp": 277,
        "close_range": 436,
        "mount_setattr": 442,
        "open_tree": 428,
        "move_mount": 429,
        "openat2": 437,
        "pidfd_getfd": 438,
        "io_uring_setup": 425,
        "io_uring_register": 427,
        "landlock_create_ruleset": 444,
        "landlock_add_rule": 445,
        "landlock_restrict_self": 446,
        "kcmp": 272,
    },
}
NUMBERS = _NUMBERS.get(os.uname().machine, {})

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = c_long
_NOTHING = (c_long(0),) * 4
_fork = ctypes.PyDLL(None, use_errno=True).fork


def call(name: str, *arguments: int | bytes | None) -> int:
    """One system call. Raises OSError with its name.

    What the kernel only reads is given as bytes: a buffer of ctypes would be a new type for each length, every time.
    """
    passed = [c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_syscall(c_long(NUMBERS[name]), *passed))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def arguments() -> tuple[int, int]:
    """The address and length of the words that /proc shows as this process's command line."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start = int(fields[45])
    end = int(fields[46])
    return (start, end - start) if end > start > 0 else (0, 0)


def overwrite(place: tuple[int, int], text: bytes) -> None:
    """Overwrite that place with a text, cut or filled up with zeros. The interpreter has copies of its own."""
    address, size = place
    if size:
        ctypes.memmove(address, text[: size - 1].ljust(size, b"\0"), size)


def prctl(option: int, second: int = 0, third: int = 0) -> int:
    result = int(_libc.prctl(c_int(option), c_ulong(second), c_ulong(third), c_ulong(0), c_ulong(0)))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")
    return result


def fork_beside(flags: int) -> int:
    """Fork into new namespaces, as a child of our own parent; returns 0 there. For a process with a single thread."""
    return _forked(lambda: _syscall(c_long(NUMBERS["clone"]), c_long(flags | _SAME_PARENT | SIGCHLD), *_NOTHING))


def fork() -> int:
    """As `os.fork`, which also counts threads by reading a file of the kernel. For a process with one thread."""
    return _forked(_fork)


def _forked(make: Callable[[], int]) -> int:
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = int(make())
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid


def unshare(flags: int) -> None:
    call("unshare", flags)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    call("mount", words[0], words[1], words[2], flags, words[3])


def set_mount(path: str, attributes: int, *, recursive: bool = False) -> None:
    """Set flags of a mount, of all beneath it too."""
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    call("mount_setattr", AT_FDCWD, path.encode(), AT_RECURSIVE if recursive else 0, wanted, len(wanted))


def open_path(path: str) -> int:
    """An O_PATH descriptor; no link on the way is followed. Raises OSError."""
    how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0x02 | 0x04)  # RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS
    try:
        return call("openat2", AT_FDCWD, os.fsencode(path), how, len(how))
    except OSError as exc:
        raise OSError(exc.errno, os.strerror(exc.errno or 0), path) from None


def bind(source: str, target: str, attributes: int) -> None:
    """Show `source` at `target`, with everything mounted beneath it, under these flags."""
    mount(source, target, None, MS_BIND | MS_REC)
    set_mount(target, attributes, recursive=True)


def pivot(root: str) -> None:
    """Make `root` the root, and unmount everything that was mounted before."""
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def close_from(first: int, last: int = 0xFFFFFFFF) -> None:
    if first <= last:
        call("close_range", first, last, 0)


def new_session_keyring() -> None:
    """A user has 200 keys, and the kernel takes those of ended processes back a moment later."""
    for left in range(_TRIES_FOR_A_KEY, -1, -1):
        try:
            call("keyctl", 1, None)
            return
        except OSError as exc:
            if exc.errno != errno.EDQUOT or not left:
                raise
        time.sleep(_UNTIL_KEYS_ARE_FREE)


def session_keyring() -> int:
    """The number of the session keyring; 0 where there is none."""
    try:
        return call("keyctl", 0, -3, 0)
    except OSError:
        return 0


def set_host_name(name: str) -> None:
    encoded = name.encode()
    if _libc.sethostname(c_char_p(encoded), ctypes.c_size_t(len(encoded))) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"sethostname: {os.strerror(number)}")


class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def prepare_filter(instructions: bytes) -> Filter:
    """A seccomp filter, ready to be installed without allocating anything."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = Filter(len(instructions) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    program.kept = buffer
    return program


def address(structure: ctypes.Structure) -> int:
    return ctypes.addressof(structure)


def set_flags(**values: int) -> None:
    """Set `sys.flags`: programs read them, and pass them on to what they start; how we were started is ours alone."""
    api = ctypes.pythonapi
    flags = ctypes.py_object(sys.flags)
    names = type(sys.flags).__match_args__
    for name, value in values.items():
        item = ctypes.py_object(value)
        api.Py_IncRef(item)
        api.PyStructSequence_SetItem(flags, ctypes.c_ssize_t(names.index(name)), item)
