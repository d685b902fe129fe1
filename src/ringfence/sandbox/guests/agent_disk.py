"""What the agent's children need to work on files while programs change them: records to and from the host, opening,
walking, removing. Runs in the guest.

All access is by open folders and single names, and no link is followed unless that is asked for. Nothing rests on it: a
program in the guest can do as much.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PART = ".ringfence-"
DEEPEST = 64
CHUNK = 256 * 1024
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HEADER = struct.Struct(">cI")
_LONGEST = 1024 * 1024
_ATTEMPTS = 8
_MAX_STEPS = 2_000_000
_DEEPEST_MOUNT = 3
_OPENAT2 = 437
_NO_MAGIC_LINKS = 2


class NotDone(Exception):
    """Why something is refused: a word, and what it is about."""

    def __init__(self, code: str, **about: Any) -> None:
        super().__init__(code)
        self.told = {"refused": code, **about}


# ── Records ───────────────────────────────────────────────────────────────────────────────────────


def put(kind: bytes, data: bytes) -> None:
    rest = memoryview(_HEADER.pack(kind, len(data)) + data)
    while rest:
        rest = rest[os.write(1, rest) :]


def tell(told: Any) -> None:
    put(b"J", json.dumps(told).encode())


def _exactly(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, min(size - len(data), CHUNK))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def records() -> Iterator[tuple[bytes, bytes]]:
    """What the host sends, to the record that says that it is all. Raises EOFError where that does not come."""
    while True:
        kind, size = _HEADER.unpack(_exactly(_HEADER.size))
        if size > _LONGEST:
            raise EOFError
        data = _exactly(size)
        if kind == b".":
            return
        yield kind, data


# ── Opening ───────────────────────────────────────────────────────────────────────────────────────


def open_at(folder: int, path: str, flags: int, mode: int = 0, resolve: int = 0) -> int:
    import ctypes  # noqa: PLC0415 - the agent has it by now, or there is none

    name = os.fsencode(path or ".")
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, resolve | _NO_MAGIC_LINKS)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number = 0
    for _ in range(64):
        found = call(ctypes.c_long(_OPENAT2), ctypes.c_long(folder), name, how, ctypes.c_long(len(how)))
        if found >= 0:
            return int(found)
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EPERM):  # there is no such call
            return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=folder)
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number))


def only_regular(descriptor: int) -> int:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.ENXIO, "not a regular file")


def device(descriptor: int) -> int:
    return os.fstat(descriptor).st_dev


def is_mount(folder: int, name: str) -> bool:
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return info.st_dev != device(folder) and not stat.S_ISLNK(info.st_mode)


def check_no_mount(folder: int, name: str, depth: int = _DEEPEST_MOUNT) -> None:
    """Raises OSError where this entry is a file system of its own, or a folder with one in it."""
    try:
        if is_mount(folder, name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        below = os.open(name, FOLDER, dir_fd=folder)
    except OSError as problem:
        if problem.errno == errno.EBUSY:
            raise
        return
    try:
        with os.scandir(below) as entries:
            names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for inner, is_folder in names:
            if is_folder and depth > 0:
                check_no_mount(below, inner, depth - 1)
    finally:
        os.close(below)


# ── Walking ───────────────────────────────────────────────────────────────────────────────────────


class FoundEntry:
    """An entry, while the walk is at it."""

    def __init__(self, parts: tuple[str, ...], folder: int, info: os.stat_result) -> None:
        self.parts = parts
        self.name = parts[-1]
        self.folder = folder
        self.info = info


class DiskWalk:
    """All entries below an open folder, sorted by their bytes, folders before what is in them. What vanishes meanwhile
    is left out."""

    def __init__(self, most: int, depth: int = DEEPEST, *, lenient: bool = False) -> None:
        self.most = most
        self.depth = depth
        self.lenient = lenient
        self.enters: Callable[[FoundEntry], bool] = lambda found: True
        self._seen = 0

    def through(self, folder: int, inside: tuple[str, ...] = ()) -> Iterator[FoundEntry]:
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._seen += 1
                if self._seen > self.most:
                    raise NotDone("too_many", most=self.most)
                names.append(entry.name)
        for name in sorted(names, key=os.fsencode):
            yield from self._entry(folder, (*inside, name))

    def _entry(self, folder: int, parts: tuple[str, ...]) -> Iterator[FoundEntry]:
        for _ in range(_ATTEMPTS):
            try:
                found = FoundEntry(parts, folder, os.stat(parts[-1], dir_fd=folder, follow_symlinks=False))
                below = self._open(found)
            except FileNotFoundError:
                return
            except (NotADirectoryError, BlockingIOError):
                continue  # it was a folder a moment ago; look again
            except OSError as problem:
                if problem.errno != errno.ELOOP:
                    raise
                continue
            try:
                yield found
                if below is not None:
                    yield from self.through(below, parts)
            finally:
                if below is not None:
                    os.close(below)
            return
        raise NotDone("changing", path="/".join(parts))

    def _open(self, found: FoundEntry) -> int | None:
        if not stat.S_ISDIR(found.info.st_mode) or not self.enters(found):
            return None
        if len(found.parts) >= self.depth:
            if self.lenient:
                return None
            raise NotDone("too_deep", path="/".join(found.parts), most=self.depth)
        try:
            return os.open(found.name, FOLDER, dir_fd=found.folder)
        except PermissionError:
            if self.lenient:
                return None
            raise NotDone("no_permission", path="/".join(found.parts)) from None


class DiskBudget:
    """How much may be read: as much as the file system can hold, or `most`."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._left: dict[int, int] = {}

    def take(self, descriptor: int, info: os.stat_result) -> None:
        where = info.st_dev if self._most is None else 0
        left = self._left.get(where)
        if left is None:
            room = os.fstatvfs(descriptor)
            left = room.f_blocks * room.f_frsize if self._most is None else self._most
        left -= info.st_size
        if left < 0:
            raise NotDone("too_large")
        self._left[where] = left


# ── Removing ──────────────────────────────────────────────────────────────────────────────────────


def remove(folder: int, name: str, begin: Callable[[], None]) -> None:
    """Remove a file, a link, or a folder with its contents. A folder disappears from its place at once."""
    os.stat(name, dir_fd=folder, follow_symlinks=False)
    check_no_mount(folder, name)
    if _drop(folder, name):
        return
    gone = new_name("gone")
    os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=folder)
    begin()
    if _drop(folder, gone):
        return
    below = _open_by_force(folder, gone)
    try:
        _flatten(below)
    finally:
        os.close(below)
    os.rmdir(gone, dir_fd=folder)


def empty(folder: int, stays: tuple[str, ...] = (), skips: tuple[str, ...] = ()) -> None:
    """Remove everything in it but file systems of their own, and folders that always stay, which are emptied."""
    for name in os.listdir(folder):
        if name in skips:
            continue
        try:
            if name in stays and stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                below = _open_by_force(folder, name)
                try:
                    empty(below)
                finally:
                    os.close(below)
            elif not is_mount(folder, name):
                remove(folder, name, lambda: None)
        except FileNotFoundError:
            continue


def _flatten(folder: int) -> None:
    steps = 0
    while True:
        names = os.listdir(folder)
        if not names:
            return
        for name in names:
            if _drop(folder, name):
                continue
            try:
                below = _open_by_force(folder, name)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                steps += _lift(below, folder)
            finally:
                os.close(below)
        steps += len(names)
        if steps > _MAX_STEPS:
            raise NotDone("filled")


def _lift(below: int, folder: int) -> int:
    """Remove the entries of a folder, or move them into its parent, which is being emptied. Returns their number."""
    names = os.listdir(below)
    for name in names:
        if _drop(below, name):
            continue
        up = new_name("up")
        try:
            os.rename(name, up, src_dir_fd=below, dst_dir_fd=folder)
        except FileNotFoundError:
            continue
        except PermissionError:  # a folder that moves must be writable itself
            os.close(_open_by_force(below, name))
            os.rename(name, up, src_dir_fd=below, dst_dir_fd=folder)
    return len(names)


def _open_by_force(folder: int, name: str) -> int:
    """Open a folder whose permissions a program may have removed."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", FOLDER, dir_fd=handle)
    finally:
        os.close(handle)


def _drop(folder: int, name: str) -> bool:
    """Remove a file, or an empty folder. False for a folder that is not empty."""
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=folder)
        elif info.st_dev != device(folder):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        else:
            os.rmdir(name, dir_fd=folder)
    except OSError as problem:
        if problem.errno in (errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR):
            return False
        if problem.errno != errno.ENOENT:
            raise
    return True


def new_name(what: str) -> str:
    return f"{PART}{os.urandom(8).hex()}.{what}"
