"""Walking through a folder that hostile code changes meanwhile: to see everything in it, or to remove it.

All access is by open folders and single names, and no link is followed. However deep a box has nested its folders, a
limited number of them is open at one time.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import field

from ringfence.core.errors import Refused, WorkProgress
from ringfence.core.record import dataclass
from ringfence.sandbox.files.paths import (
    DEEPEST,
    FOLDER,
    PART,
    acting_as,
    changing,
    full_path,
    looking_as,
    opened,
    refusal,
    shown,
)

MAX_ENTRIES = 200_000
_MAX_STEPS = 2_000_000
_DEEPEST_MOUNT = 3
"""Only the supervisor makes mounts, and not deep down."""
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class WalkEntry:
    """An entry, while the walk is at it."""

    parts: tuple[str, ...]
    """Relative to the folder where the walk began."""
    folder: int
    """The open folder that it lies in; valid only while the walk is here."""
    info: os.stat_result

    @property
    def name(self) -> str:
        return self.parts[-1]

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)


def _everywhere(found: WalkEntry) -> bool:
    return True


@dataclass(slots=True)
class Walk:
    """All entries below an open folder, sorted by their bytes, folders before what is in them.

    What vanishes meanwhile is left out. Raises Refused where there are more than `most`, and, unless it is `lenient`,
    for a folder that is too deep or cannot be read.
    """

    depth: int = DEEPEST
    most: int = MAX_ENTRIES
    lenient: bool = False
    enters: Callable[[WalkEntry], bool] = _everywhere
    owner: int | None = None
    """The user who must be able to enter folders, where that is not ours."""
    _seen: int = field(default=0, init=False)

    def through(self, folder: int, inside: tuple[str, ...] = ()) -> Iterator[WalkEntry]:
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._seen += 1
                if self._seen > self.most:
                    raise too_many(self.most)
                names.append(entry.name)
        for name in sorted(names, key=os.fsencode):
            yield from self._entry(folder, (*inside, name))

    def _entry(self, folder: int, parts: tuple[str, ...]) -> Iterator[WalkEntry]:
        for _ in range(_ATTEMPTS):
            try:
                found = WalkEntry(parts, folder, os.stat(parts[-1], dir_fd=folder, follow_symlinks=False))
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
        raise changing(full_path(tuple(map(shown, parts))))

    def _open(self, found: WalkEntry) -> int | None:
        if not found.is_folder or not self.enters(found):
            return None
        if len(found.parts) >= self.depth:
            if self.lenient:
                return None
            raise too_deep(_path(found), self.depth)
        try:
            with looking_as(self.owner):
                return os.open(found.name, FOLDER, dir_fd=found.folder)
        except PermissionError:
            if self.lenient:
                return None
            raise closed(_path(found)) from None


def too_many(most: int) -> Refused:
    return refusal("too_many", f"there are more than {most} files and folders there; name a folder below")


def too_deep(path: str, most: int) -> Refused:
    return refusal("too_deep", f"{path!r} is deeper than {most} folders; remove or move it")


def closed(path: str) -> Refused:
    return refusal("no_permission", f"{path!r} is closed by its permissions; open it (chmod)")


def too_large() -> Refused:
    return refusal(
        "too_large",
        "the files are larger together than the disk that they lie on may be, or than was asked for, "
        "counting holes and each name of a file; remove some",
    )


def filled() -> Refused:
    text = "the folder is filled as fast as it is emptied; pause the box, or stop what writes to it"
    return refusal("changing", text)


def _path(found: WalkEntry) -> str:
    return full_path(tuple(map(shown, found.parts)))


class ReadBudget:
    """How much of a tree may be read: as much as its file system can hold, or `most`.

    Files with holes, and many names for one file, would otherwise make it unlimited.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._left: dict[int, int] = {}

    def take(self, descriptor: int, info: os.stat_result) -> None:
        """Before an open file is read. Raises Refused."""
        where = info.st_dev if self._most is None else 0
        left = self._left.get(where)
        if left is None:
            room = os.fstatvfs(descriptor)
            left = room.f_blocks * room.f_frsize if self._most is None else self._most
        left -= info.st_size
        if left < 0:
            raise too_large()
        self._left[where] = left


# ── Removing ──────────────────────────────────────────────────────────────────────────────────────


def remove_entry(folder: int, name: str, owner: int | None, progress: WorkProgress | None = None) -> None:
    """Remove a file, a link, or a folder with its contents. Raises OSError and Refused.

    A folder disappears from its place at once, with which `progress` begins; removing its contents takes its time.
    Needs no space on the disk.
    """
    os.stat(name, dir_fd=folder, follow_symlinks=False)
    check_no_mount(folder, name)
    with acting_as(owner):
        if _drop(folder, name):
            return
        gone = f"{PART}{secrets.token_hex(8)}.gone"
        os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=folder)
        if progress is not None:
            progress.begin()
        if _drop(folder, gone):  # something else had taken its place
            return
        below = _open_by_force(folder, gone)
        try:
            _flatten(below)
        finally:
            os.close(below)
        os.rmdir(gone, dir_fd=folder)


def empty(folder: int, owner: int | None) -> None:
    """Remove everything in an open folder, except our mounts."""
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            if not is_mount(folder, name):
                remove_entry(folder, name, owner)


def is_mount(folder: int, name: str) -> bool:
    """Whether this entry of the folder, a folder or a file, is one of our mounts. Raises OSError.

    Removing, renaming or replacing it from outside would take the mount away from the box: the kernel only stops
    processes in the same mount namespace from doing so. What is mounted over itself has the same device, so the mounts
    themselves are compared.
    """
    entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        return _mount_of(entry) != _mount_of(folder)
    finally:
        os.close(entry)


def _mount_of(descriptor: int) -> bytes:
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        return next(line for line in file if line.startswith(b"mnt_id:"))


def check_no_mount(folder: int, name: str) -> None:
    """Raises OSError where this entry is one of our mounts, or a folder with one in it."""
    with suppress(FileNotFoundError):
        if is_mount(folder, name):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
        _check_for_mounts(folder, name)


def _check_for_mounts(folder: int, name: str, depth: int = _DEEPEST_MOUNT) -> None:
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError), opened(name, FOLDER, folder) as below:
        with os.scandir(below) as entries:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        for inner, is_folder in names.items():
            with suppress(FileNotFoundError):
                if is_mount(below, inner):
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), inner)
            if is_folder and depth > 1:
                _check_for_mounts(below, inner, depth - 1)


def _flatten(folder: int) -> None:
    """Empty a folder. Nested folders are moved up into it first, so that only two levels are ever open."""
    steps = 0
    while names := os.listdir(folder):
        for name in names:
            if _drop(folder, name):
                continue
            with suppress(FileNotFoundError, NotADirectoryError):
                below = _open_by_force(folder, name)
                try:
                    steps += _lift(below, folder)
                finally:
                    os.close(below)
        steps += len(names)
        if steps > _MAX_STEPS:
            raise filled()


def _lift(below: int, folder: int) -> int:
    """Remove the entries of a folder, or move them into its parent, which is being emptied. Returns their number."""
    names = os.listdir(below)
    for name in names:
        if _drop(below, name):
            continue
        up = f"{PART}{secrets.token_hex(8)}.up"
        with suppress(FileNotFoundError):
            try:
                os.rename(name, up, src_dir_fd=below, dst_dir_fd=folder)
            except PermissionError:  # a folder that moves must be writable itself
                os.close(_open_by_force(below, name))
                os.rename(name, up, src_dir_fd=below, dst_dir_fd=folder)
    return len(names)


def _open_by_force(folder: int, name: str) -> int:
    """Open a folder whose permissions the box may have removed."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
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
        elif info.st_dev != os.fstat(folder).st_dev:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)
        else:
            os.rmdir(name, dir_fd=folder)
    except OSError as problem:
        if problem.errno in (errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR):
            return False
        if problem.errno != errno.ENOENT:
            raise
    return True
