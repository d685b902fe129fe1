"""The files left in /workspace/output. In a box that stays, only what is new or changed is read again."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ringfence.core.aio import shielded
from ringfence.core.box import FileFact
from ringfence.core.record import plain
from ringfence.sandbox.files import collect

EMPTY_FOLDER = 40
"""The size of an empty folder on tmpfs; each entry adds to it."""
_MAX_FILES = 10_000
_MUCH = 1_000_000
_FEW_FILES = 100
_MAPS_AT_ONCE = 128 * 1024
_MAPS_AHEAD = 4 * 1024 * 1024
"""How much of the lists of memory areas is read to find a mapped file: 60 bytes or more an area, 10 ms a megabyte."""
_DEEPEST = 32
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


_Look = tuple[tuple[int, int, int, int], ...]
"""Of each file and folder its inode, its size, and when it and its contents were changed."""
_UNKNOWN = -1


@plain
class Mappings:
    """Memory that the processes of a box share with its files: what is written there leaves no trace in their times."""

    made: Callable[[], int | None]
    """How many have been made so far; None where that is not counted."""
    exist: Callable[[int], bool]
    """Whether a process has one now. It may read so many bytes to find out, and is to say yes where that is not
    enough."""


@plain
class _Found:
    look: _Look
    mappings: int
    """How many had been made, none of which existed any more; or `_UNKNOWN`."""
    facts: tuple[FileFact, ...]
    skipped: dict[str, str]


def left_any(workspace: int) -> bool:
    """Whether there may be any files: the size of the folder shows it."""
    try:
        return os.stat("output", dir_fd=workspace, follow_symlinks=False).st_size != EMPTY_FOLDER
    except OSError:
        return False


def collected(
    workspace: int, into: Path | None, max_bytes: int, max_files: int
) -> tuple[tuple[FileFact, ...], dict[str, str]]:
    """The files, and what cannot be taken, and why. Even the name of the folder was in the program's hands."""
    try:
        folder = os.open("output", _FLAGS, dir_fd=workspace)
    except PermissionError as problem:  # a box with an id of its own may close it to us
        return (), {collect.OUTPUT: f"it cannot be read: {problem.strerror}"}
    except OSError:
        return (), {}
    try:
        return collect.collect(folder, into, max_bytes=max_bytes, max_files=max_files)
    finally:
        os.close(folder)


class OutputFiles:
    """The output files of a box that stays.

    `read_ahead` comes before each `changed`, and does what takes long, in a thread. What is little is done at once, by
    `changed`: a box decides how much there is and may add to it at any time, so that has a limit of its own, and what
    no longer fits is left to the next call.
    """

    def __init__(self, workspace: int, max_bytes: int, mappings: Mappings) -> None:
        self._mappings = mappings
        self._workspace = workspace
        self._max_bytes = max_bytes
        self._look: _Look = ()
        self._unmapped_since = 0
        """As `_Found.mappings`, when the files were read last."""
        self._known: dict[str, str] = {}
        self._ahead: _Found | None = None
        """What was read ahead for the next call of `changed`."""
        self._turn = asyncio.Lock()

    async def read_ahead(self) -> None:
        """Read much data ahead, in a thread, so that other callers need not wait. The size on disk does not show how
        much there is, since files can have holes."""
        async with self._turn:
            ahead = None
            if not _is_little(self._seen(_FEW_FILES)):
                ahead = await shielded(asyncio.ensure_future(asyncio.to_thread(self._found_if_changed)))
            self._ahead = ahead

    def changed(self) -> tuple[tuple[FileFact, ...], dict[str, str]]:
        """Files that are new or changed since the last call, and what cannot be taken, and why."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            look = self._seen(_FEW_FILES)
            if not look:
                self._look = ()
                self._known = {}
                return (), {}
            if not _is_little(look) or (look == self._look and not self._may_differ(_MAPS_AT_ONCE)):
                return (), {}
            ahead = self._found(min(self._max_bytes, 2 * _MUCH), _MAPS_AT_ONCE)
            if ahead.skipped and not _is_little(self._seen(_FEW_FILES)):
                return (), {}  # it grew while it was read
        # A file may change all the time: what was seen before it was read counts, so that it is read again next time.
        self._look = ahead.look
        self._unmapped_since = ahead.mappings
        new = tuple(fact for fact in ahead.facts if self._known.get(fact.path) != fact.sha256)
        self._known = {fact.path: fact.sha256 for fact in ahead.facts}
        return new, ahead.skipped

    def _found_if_changed(self) -> _Found | None:
        if self._seen() == self._look and not self._may_differ(_MAPS_AHEAD):
            return None
        return self._found(self._max_bytes, _MAPS_AHEAD)

    def _may_differ(self, most: int) -> bool:
        """Whether a file may have been changed through a mapping since they were read last."""
        made = self._mappings.made()
        return self._mappings.exist(most) if made is None else made != self._unmapped_since

    def _seen(self, most: int = _MAX_FILES) -> _Look:
        """The metadata of everything in it, up to `most`, without reading contents; empty where there is nothing."""
        if not left_any(self._workspace):
            return ()
        try:
            folder = os.open("output", _FLAGS, dir_fd=self._workspace)
        except PermissionError:
            closed = os.stat("output", dir_fd=self._workspace, follow_symlinks=False)
            return ((closed.st_ino, 0, closed.st_mtime_ns, closed.st_ctime_ns),)
        except OSError:
            return ()
        try:
            look: list[tuple[int, int, int, int]] = []
            _stat(folder, look, 0, most)
            return tuple(look)
        finally:
            os.close(folder)

    def _found(self, max_bytes: int, most: int) -> _Found:
        # In this order: what is made after the count is found next time, as is what exists before the files are read.
        made = self._mappings.made()
        look = self._seen()
        if made is None or (made != self._unmapped_since and self._mappings.exist(most)):
            made = _UNKNOWN
        return _Found(look, made, *collected(self._workspace, None, max_bytes, _MAX_FILES))


def _is_little(look: _Look) -> bool:
    """Whether so much is read as fast as it can be asked for."""
    return len(look) < _FEW_FILES and sum(size for _, size, _, _ in look) <= _MUCH


def _stat(folder: int, look: list[tuple[int, int, int, int]], depth: int, most: int) -> None:
    """The metadata of everything beneath."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if len(look) >= most:
                return
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                look.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
                if stat.S_ISDIR(found.st_mode) and depth < _DEEPEST:
                    inner = os.open(entry.name, _FLAGS, dir_fd=folder)
                    try:
                        _stat(inner, look, depth + 1, most)
                    finally:
                        os.close(inner)
