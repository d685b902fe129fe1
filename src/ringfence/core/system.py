"""What differs from one operating system to the next and is wanted on all of them: private files, locks, accounts.

Boxes are Linux's alone; where there can be none, what is said about it is here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
    import grp
    import pwd

_NAMES = {"darwin": "macOS", "win32": "Windows"}
_INSTEAD = {
    "darwin": "run Ringfence in a Linux virtual machine or on a Linux host",
    "win32": "run Ringfence in WSL 2 or on a Linux host",
}
_LOCKED_BYTE = 0x7FFFFFFE
"""On Windows a lock keeps everyone else from the bytes it is on, so it lies where no file of ours has any."""

PLAIN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every file that we open by descriptor."""
PRIVATE = PLAIN | getattr(os, "O_NOFOLLOW", 0)
"""And of those that must be what they seem: no link is followed."""
UNHURRIED = PLAIN | getattr(os, "O_NONBLOCK", 0)
"""And of those in whose place there may be a pipe, which must not hold us up."""


def no_boxes() -> str | None:
    """Why there are no boxes on this system, and what to do; None where there can be."""
    if sys.platform == "linux":
        return None
    name = _NAMES.get(sys.platform, sys.platform)
    instead = _INSTEAD.get(sys.platform, "run Ringfence on a Linux host")
    return f"a box needs Linux, and this is {name}: {instead} (docs/other-systems.md)"


def tells_peers() -> bool:
    """Whether the kernel says which user is at the other end of a TCP connection within this machine."""
    return sys.platform == "linux"


def same_network(process: int) -> bool:
    """Whether a process has the network that we have: what is in a box, or in another container, does not, and is none
    of our user's own programs though it has their number. One that is gone, or that we may not look at, has not."""
    try:
        return os.path.samestat(os.stat(f"/proc/{process}/ns/net"), os.stat("/proc/self/ns/net"))
    except OSError:
        return False


def process_fields(process: int | str) -> list[str]:
    """What /proc says of a process in one line, from its state on. The name before that may contain anything,
    parentheses too. Raises OSError."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


@cache
def interpreter() -> Path:
    """The interpreter of boxes, by its real path: a virtual environment's is a link to it."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))


# ── Time ──────────────────────────────────────────────────────────────────────────────────────────


def uptime() -> float:
    """Seconds on a clock that cannot be set; where the system has such a one, it goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


@cache
def boot() -> str | None:
    """Which start of the machine `uptime` counts from; None where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


# ── Accounts ──────────────────────────────────────────────────────────────────────────────────────


def user_name() -> str:
    """Name of the account that this process runs as."""
    if sys.platform == "win32":
        return os.getlogin()  # as the system has it: environment variables say whatever they were set to
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def account() -> dict[str, str | int | None]:
    """The account that this process runs as, for records: its name, and its number where accounts have one."""
    return {"name": user_name(), "uid": None if sys.platform == "win32" else os.getuid()}


def user_id(name: str) -> int | None:
    """The number of an account; None where there is none of that name, or where accounts have no numbers."""
    if sys.platform == "win32":
        return None
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def stranger(info: os.stat_result) -> bool:
    """Whether a file belongs to another user. Windows says so by access lists, which we do not read."""
    return sys.platform != "win32" and info.st_uid != os.geteuid()


def open_to_others(info: os.stat_result, bits: int) -> int:
    """Which of these permissions a file gives. Windows makes such bits up."""
    return 0 if sys.platform == "win32" else stat.S_IMODE(info.st_mode) & bits


def open_place(path: Path, trusted: Collection[int] = ()) -> tuple[Path, str] | None:
    """Where and how another user can change what is at a path: in its own place, a folder on the way to it, or a link
    there; None if none can. Root can, and so may the users of these numbers, besides ours."""
    if sys.platform == "win32":
        return None
    ours = {0, os.geteuid(), *trusted}
    for place in _way(str(path)):
        info = os.lstat(place)
        if info.st_uid not in ours:
            return Path(place), f"belongs to another user (uid {info.st_uid})"
        if stat.S_ISLNK(info.st_mode) or (stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX):
            continue  # in a sticky folder only the owner of a name can replace it
        if info.st_mode & 0o002:
            return Path(place), f"can be written by every user (chmod o-w {place})"
        if info.st_mode & 0o020 and not _is_private_group(place, info.st_gid, ours):
            return Path(place), f"can be written by the group {_group_name(info.st_gid)} (chmod g-w {place})"
    return None


def _way(path: str) -> Iterator[str]:
    """All folders and links that the kernel passes, and the end."""
    found = "/"
    rest = os.path.abspath(path).strip("/").split("/")
    yield found
    for _ in range(1000):
        if not rest:
            return
        part = rest.pop(0)
        if part in ("", "."):
            continue
        step = os.path.dirname(found) if part == ".." else f"{found.rstrip('/')}/{part}"
        yield step
        if os.path.islink(step):
            target = os.readlink(step)
            found = "/" if target.startswith("/") else found
            rest = [*target.split("/"), *rest]
        else:
            found = step


def _is_private_group(place: str, group: int, ours: Collection[int]) -> bool:
    """Whether the group that may write is the own one of one of these users, and nobody else is in it. With an access
    list, the bits of the group stand for all whom the list names."""
    if sys.platform == "win32":
        return True
    with contextlib.suppress(KeyError, OSError):
        if sys.platform == "linux" and "system.posix_acl_access" in os.listxattr(place):
            return False
        known = grp.getgrgid(group)
        accounts = [pwd.getpwuid(each) for each in ours]
        own = any(each.pw_gid == group and each.pw_name == known.gr_name for each in accounts)
        return own and set(known.gr_mem) <= {each.pw_name for each in accounts}
    return False


def _group_name(group: int) -> str:
    if sys.platform != "win32":
        with contextlib.suppress(KeyError):
            return grp.getgrgid(group).gr_name
    return str(group)


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────


def lock(descriptor: int) -> bool:
    """Lock a whole file until it is closed. False while another holds it. Raises OSError."""
    if sys.platform == "win32":
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold_byte(descriptor: int, at: int) -> None:
    """Hold one byte of a file, as others may, until the file is closed; waits for who has it alone. Raises OSError.

    Only where there are boxes: what is held is what boxes use."""
    if sys.platform == "linux":
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _one_byte(fcntl.F_RDLCK, at))


def take_byte(descriptor: int, at: int) -> bool:
    """Have one byte of a file alone until the file is closed. False while another holds it, and where that cannot be
    known. Raises OSError."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _one_byte(fcntl.F_WRLCK, at))
    except BlockingIOError:
        return False
    return True


def _one_byte(kind: int, at: int) -> bytes:
    """The kernel's `struct flock`; the lock belongs to whoever opened the file."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)


def umask() -> int:
    """The umask of this process, read without changing it where the kernel tells it."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    os.umask(found := os.umask(0o077))
    return found


def check_own_folder(path: Path, info: os.stat_result) -> None:
    """Check that a folder of ours is no link, and that no other user can put anything into it. Raises OSError."""
    why = None
    if not stat.S_ISDIR(info.st_mode):
        why = "it is not a folder of its own; move it away"
    elif stranger(info):
        why = f"it belongs to another user (uid {info.st_uid})"
    elif open_to_others(info, 0o022):
        why = f"others can write to it; run: chmod 700 {path}"
    if why is not None:
        raise PermissionError(errno.EPERM, why, str(path))


def open_own_folder(path: Path) -> int:
    """The same, opened: what is done by this descriptor is done there, whatever the path leads to by then."""
    check_own_folder(path, os.lstat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | PRIVATE)
    try:
        check_own_folder(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it, however little the system takes at a time. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_at(descriptor: int, data: bytes, offset: int) -> int:
    """How much of it was written. The place where others read and write on is not promised to stay."""
    if sys.platform == "win32":
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)
    return os.pwrite(descriptor, data, offset)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    if sys.platform == "win32":
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)
    return os.pread(descriptor, size, offset)


def restrict(descriptor: int, mode: int) -> None:
    """Whatever our umask says. On Windows a file has the access list of its folder."""
    if sys.platform != "win32":
        os.fchmod(descriptor, mode)


def sync_folder(folder: Path) -> None:
    """Names in it are on disk afterwards. Windows keeps its own journal of names, and opens no folder."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def watched(folder: Path) -> int | Path:
    """What `os.stat` takes to look at a folder again and again: where it can be had, a descriptor, which is cheaper."""
    if sys.platform == "win32":
        return folder
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def unwatch(watched: int | Path) -> None:
    if isinstance(watched, int):
        os.close(watched)
