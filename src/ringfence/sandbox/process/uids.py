"""Host user ids that belong to nobody, for the boxes of a supervisor that runs as root.

A zygote takes a block of them for itself, so that no box shares a user id with a person, a service, a container or
another zygote. A block is free when the user databases do not name it and nobody holds its lock, one byte of a file
that all supervisors of the host open. The kernel drops a lock with its holder, however that ends. Group ids are taken
with the same numbers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ringfence.errors import Unavailable

SIZE = 64
FIRST = 2_000_200_000
"""Above what distributions, systemd's containers (to 1,879,048,191) and directory services (to 2,000,199,999) use."""
LAST = 2_147_352_575
"""Below systemd's range for foreign images, and below 2**31, where numbers become negative for some programs."""
BLOCKS = (LAST + 1 - FIRST) // SIZE

FOLDERS = (Path("/run/ringfence"), Path("/var/lib/ringfence"))
USERS = (Path("/etc/passwd"), Path("/etc/group"))
RANGES = (Path("/etc/subuid"), Path("/etc/subgid"))


class Block:
    """User and group ids, ours alone until they are released or this process ends."""

    def __init__(self, base: int, size: int, lock: int, groups: int | None = None) -> None:
        self.base = base
        self.groups = base if groups is None else groups
        """Where those of groups begin."""
        self.size = size
        self._lock: int | None = lock

    def release(self) -> None:
        """Give the ids back. Nothing may run under them any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take_block(folders: Sequence[Path] | None = None) -> Block:
    """A block that nobody else on this host has. Raises Unavailable.

    The lock is in the first of these folders that can be had, so those who may use the same ids must name the same.
    Left out: those of the system, and where they cannot be written one of our own among the temporary files.
    """
    if folders is None:
        folders = (*FOLDERS, Path(tempfile.gettempdir(), f"ringfence-{os.geteuid()}"))
    taken = [*named_ids(_texts(USERS)), *ranges(_texts(RANGES))]
    lock = open_locks(folders, "uids")
    try:
        for number in _order():
            base = FIRST + number * SIZE
            if any(span.start < base + SIZE and base < span.stop for span in taken):
                continue
            if lock_range(lock, number, 1):
                return Block(base, SIZE, lock)
    except OSError as problem:
        os.close(lock)
        raise Unavailable("uids", f"no user ids can be set apart for boxes: {problem.strerror}") from problem
    os.close(lock)
    raise Unavailable("uids", "no user ids can be set apart for boxes: all of them are in use")


def map_into(process: int, block: Block) -> None:
    """Write the maps of its user namespace: there, the ids begin with 0. Raises OSError."""
    for name, base in (("uid_map", block.base), ("gid_map", block.groups)):
        Path(f"/proc/{process}/{name}").write_text(f"0 {base} {block.size}", encoding="ascii")


def named_ids(texts: Iterable[str]) -> Iterator[range]:
    """The ids that files like /etc/passwd (`name:x:uid:gid:…`) and /etc/group (`name:x:gid:…`) name."""
    for text in texts:
        for line in text.splitlines():
            for number in line.split(":")[2:4]:
                if _is_number(number):
                    yield range(int(number), int(number) + 1)


def ranges(texts: Iterable[str]) -> Iterator[range]:
    """The ids that files like /etc/subuid (`name:start:count`) hand to containers."""
    for text in texts:
        for line in text.splitlines():
            parts = line.split(":")
            if len(parts) == 3 and _is_number(parts[1]) and _is_number(parts[2]):
                yield range(int(parts[1]), int(parts[1]) + int(parts[2]))


def _is_number(text: str) -> bool:
    # An id has at most ten digits; a file may hold anything.
    return text.isascii() and text.isdecimal() and len(text) <= 20


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        try:
            yield path.read_text("utf-8", "surrogateescape")
        except FileNotFoundError:
            continue
        except OSError as problem:
            raise Unavailable("uids", f"{path} cannot be read: {problem.strerror}") from problem


def _order() -> Iterator[int]:
    """The blocks in the order in which they are tried.

    Containers may share the ids of a host without sharing a folder. Each starts at a place of its own, given by its pid
    namespace, so that they hardly ever meet.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    start = int.from_bytes(hashlib.sha256(str(namespace).encode()).digest()[:8]) % BLOCKS
    for step in range(BLOCKS):
        yield (start + step) % BLOCKS


def open_locks(folders: Sequence[Path], name: str) -> int:
    """The open file of locks, in the first folder that can be made or is there."""
    problem: OSError | None = None
    for path in folders:
        try:
            folder = _open_folder(path)
        except OSError as refused:
            problem = refused
            continue
        try:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as refused:
            problem = refused
        finally:
            os.close(folder)
    why = problem.strerror if problem else "no folder was named"
    raise Unavailable("uids", f"no folder for the locks of user ids can be had: {why}")


def _open_folder(path: Path) -> int:
    """A folder that nobody but us can have put a file into. Raises OSError where it cannot be had.

    One that is there and is not safe is refused outright: whoever made it may want us to look elsewhere.
    """
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Unavailable("uids", f"{path} is not a folder, so it cannot hold the locks of user ids") from problem
        raise
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(folder)
        raise Unavailable("uids", f"{path} belongs to somebody else or can be written by others; remove it first")
    return folder


def lock_range(lock: int, start: int, length: int) -> bool:
    """Lock bytes, for this open file rather than for this process: two zygotes of ours are two as well."""
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, wanted)
    except BlockingIOError:
        return False
    return True
