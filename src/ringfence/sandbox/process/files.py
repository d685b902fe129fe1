"""What copying into a box and copying out of it share: open files, counted reading, and names that are safe to use."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from ringfence import invisible

DEEPEST = 32
LONGEST_PATH = 1024
CHUNK = 256 * 1024

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None)

KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class LeftOut(Exception):
    """This file is not copied, and why."""


class Copy:
    """Reads an open file to its end, but no more than `most` bytes, counting and digesting what it reads."""

    def __init__(self, source: int, most: int | None) -> None:
        self._source = source
        self._most = most
        self.size = 0
        self.digest = hashlib.sha256()

    def run(self, target: int | None) -> None:
        """Copy to an open file, if one is given. Raises OSError where that cannot be written, and LeftOut."""
        while chunk := self._read():
            self.size += len(chunk)
            if self._most is not None and self.size > self._most:
                raise LeftOut("it grew while it was read, beyond what may be collected")
            self.digest.update(chunk)
            rest = memoryview(chunk)
            while target is not None and rest:
                rest = rest[os.write(target, rest) :]

    def _read(self) -> bytes:
        try:
            return os.read(self._source, CHUNK)
        except OSError as problem:
            raise LeftOut(f"it cannot be read: {problem.strerror}") from problem


def unfit(name: str) -> str | None:
    """Why this name of a file or folder can be neither shown nor used without harm; None if it can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not valid UTF-8"
    if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in name):
        return "its name has control characters"
    if invisible.name(name) != name:
        return "its name has characters that cannot be seen"
    return None


def shown(name: str) -> str:
    """A name in a form that can be printed."""
    return invisible.visible(name)


def kind(found: os.stat_result) -> str:
    return KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")


@contextmanager
def opened(name: str, flags: int, folder: int, mode: int = 0o600) -> Iterator[int]:
    descriptor = os.open(name, flags, mode, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def acting_as(owner: int | None) -> Iterator[None]:
    """What this thread makes belongs to `owner`: the host's root has no name in a box's file system."""
    if owner is None:
        yield
        return
    _libc.setfsgid(owner)
    _libc.setfsuid(owner)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())
