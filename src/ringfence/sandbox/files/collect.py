"""Files that come out of a box.

Hostile code wrote what is in /workspace/output, and an earlier run may have written what is in the host folder that it
is copied to. So all access is by open folders and single names: no link is followed on either side, only regular files
are opened, no open blocks, and sizes are counted while reading. Hard links are files like any other: inside the box
they lead nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ringfence.core.box import FileFact
from ringfence.core.system import write_all
from ringfence.sandbox.files.acted_upon import WHY, is_acted_upon
from ringfence.sandbox.files.paths import CREATE, FOLDER, READ, kind, make_folder_without_links, opened, shown, unfit

OUTPUT = "/workspace/output"
DEEPEST = 32
LONGEST_PATH = 1024
_CHUNK = 256 * 1024
MAX_ENTRIES = 200_000
MAX_REASONS = 1000
"""Beyond this many, files that are left out are counted and no longer named."""

Take = Callable[[int, int], None]
"""Called before a file is copied, with its size and the number of names in its path. Raises LeftOut."""


class LeftOut(Exception):
    """Why a file is not copied."""


class Copy:
    """Reads an open file to its end, up to `most` bytes, counting and digesting what it reads."""

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
            if target is not None:
                write_all(target, chunk)

    def _read(self) -> bytes:
        try:
            return os.read(self._source, _CHUNK)
        except OSError as problem:
            raise LeftOut(f"it cannot be read: {problem.strerror}") from problem


def collect(
    root_fd: int, output: Path | None, *, max_bytes: int, max_files: int, take: Take | None = None
) -> tuple[tuple[FileFact, ...], dict[str, str]]:
    """Read the files below an open folder, and copy them to `output` if one is given. Also returns what was left out,
    and why.

    `output` is a path without links, made when there is something to put into it. Regular files there are replaced,
    each atomically. Files keep the right to be executed and no other. Reads up to `max_bytes`: run it in a thread where
    that is much.
    """
    collector = _Collector(max_bytes, max_files, take)
    target = _Target(None, output) if output is not None else None
    try:
        with opened(".", FOLDER, root_fd) as root:
            collector.device = os.fstat(root).st_dev
            collector.folder(root, (), target)
    except OSError as problem:
        # A box may have removed the permission to read its own folder.
        collector.skipped[OUTPUT] = f"it cannot be read: {problem.strerror}"
    finally:
        if target is not None:
            target.close()
    if collector.unnamed:
        collector.skipped[OUTPUT] = f"{collector.unnamed} more were left out"
    return tuple(sorted(collector.files, key=lambda fact: fact.path)), collector.skipped


class _Collector:
    """The state of one walk: what was found, and how much more may be read."""

    def __init__(self, max_bytes: int, max_files: int, take: Take | None) -> None:
        self.files: list[FileFact] = []
        self.skipped: dict[str, str] = {}
        self.unnamed = 0
        self.device = 0
        self._bytes_left = max_bytes
        self._max_files = max_files
        self._entries_left = MAX_ENTRIES
        self._take = take

    def folder(self, folder: int, inside: tuple[str, ...], target: _Target | None) -> None:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, self._entries_left + 1)]
        if len(names) > self._entries_left:
            self._skip(inside, f"there are more than {MAX_ENTRIES} entries to look at")
            return
        self._entries_left -= len(names)
        for name in sorted(names, key=os.fsencode):
            parts = (*inside, name)
            try:
                self._entry(folder, parts, target)
            except LeftOut as why:
                self._skip(parts, str(why))
            except OSError as problem:
                self._skip(parts, f"it cannot be read: {problem.strerror}")

    def _entry(self, folder: int, parts: tuple[str, ...], target: _Target | None) -> None:
        name = parts[-1]
        if problem := unfit(name):
            raise LeftOut(problem)
        if len(os.fsencode("/".join(parts))) > LONGEST_PATH:
            raise LeftOut(f"its path is longer than {LONGEST_PATH} bytes")
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if is_acted_upon(name, folder=stat.S_ISDIR(found.st_mode)):
            raise LeftOut(WHY)
        if stat.S_ISDIR(found.st_mode):
            if len(parts) > DEEPEST:
                raise LeftOut(f"it is deeper than {DEEPEST} folders")
            with opened(name, FOLDER, folder) as below:
                if os.fstat(below).st_dev != self.device:
                    raise LeftOut("it is on another file system")
                below_target = None if target is None else _Target(target, name)
                try:
                    self.folder(below, parts, below_target)
                finally:
                    if below_target is not None:
                        below_target.close()
        elif stat.S_ISREG(found.st_mode):
            with opened(name, READ, folder) as source:
                self._file(source, parts, target)
        else:
            raise LeftOut(f"it is {kind(found)}")

    def _file(self, source: int, parts: tuple[str, ...], target: _Target | None) -> None:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode):
            raise LeftOut(f"it is {kind(found)}")
        if len(self.files) >= self._max_files:
            raise LeftOut(f"there are more than {self._max_files} files")
        if found.st_size > self._bytes_left:
            raise LeftOut(f"it has {found.st_size} bytes, and {self._bytes_left} more may be collected")
        if self._take is not None:
            self._take(found.st_size, len(parts))
        copy = Copy(source, self._bytes_left if self._take is None else found.st_size)
        try:
            if target is None:
                copy.run(None)
            else:
                target.receive(parts[-1], copy, executable=bool(found.st_mode & stat.S_IXUSR))
        finally:
            self._bytes_left -= min(copy.size, self._bytes_left)
        self.files.append(FileFact("/".join((OUTPUT, *parts)), copy.size, copy.digest.hexdigest()))

    def _skip(self, parts: tuple[str, ...], reason: str) -> None:
        if len(self.skipped) < MAX_REASONS:
            self.skipped["/".join((OUTPUT, *map(shown, parts)))] = reason
        else:
            self.unnamed += 1


class _Target:
    """A folder on the host, made and opened once there is something to put into it."""

    def __init__(self, above: _Target | None, name: str | Path) -> None:
        self._above = above
        self._name = name
        self._fd: int | None = None

    def receive(self, name: str, copy: Copy, *, executable: bool) -> None:
        """Write a file beside the existing one, if any, and replace that."""
        try:
            folder = self._open()
        except (FileExistsError, NotADirectoryError) as problem:
            raise LeftOut("on the host something that is not a folder is in the place of its folder") from problem
        except OSError as problem:
            raise LeftOut(f"its folder on the host cannot be had: {problem.strerror}") from problem
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise LeftOut("on the host something that is not a regular file is in its place")
        part = f".ringfence-{secrets.token_hex(8)}.part"
        try:
            with opened(part, CREATE, folder, 0o755 if executable else 0o644) as written:
                try:
                    copy.run(written)
                    os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    os.unlink(part, dir_fd=folder)
                    raise
        except OSError as problem:
            raise LeftOut(f"it cannot be written: {problem.strerror}") from problem

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            if self._above is None:
                # Where its path leads was looked up when it was named: a link on it came later, maybe from the box.
                self._fd = make_folder_without_links(str(self._name))
            else:
                above = self._above._open()
                with suppress(FileExistsError):
                    os.mkdir(self._name, 0o755, dir_fd=above)
                self._fd = os.open(self._name, FOLDER, dir_fd=above)
        return self._fd
