"""Changes in a box's folders, as they happen, from the supervisor's side.

The kernel reports them (inotify) for open folders, not for paths: a folder is watched by its descriptor, so that no
link leads anywhere else. A box can make changes faster than they are read; then some are lost, and that is reported.
Nothing is read before the caller asks: the kernel queues, and limits, what waits. A box decides how much there is to do
for one change, as when it moves a large folder: that is done piece by piece, and others have their turn in between.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress

from ringfence.core.box_files import Change, Changed
from ringfence.core.errors import Refused, Unavailable
from ringfence.sandbox.files.paths import DEEPEST, FOLDER, PART, beneath, full_path, opened, refusal, shown
from ringfence.sandbox.files.walk import Walk

MAX_FOLDERS = 1024
"""Watched by one watcher; each of them takes kernel memory."""
MAX_TOLD = 10_000
"""Reported of the contents that new folders have already, for each time that the kernel's queue is read."""

Parts = tuple[str, ...]

_MODIFY = 0x2
_MOVED_FROM = 0x40
_MOVED_TO = 0x80
_CREATE = 0x100
_DELETE = 0x200
_OVERFLOW = 0x4000
_IGNORED = 0x8000
_ISDIR = 0x4000_0000
_ONLY_FOLDERS = 0x0100_0000
_NO_UNLINKED = 0x0400_0000
_MASK = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLY_FOLDERS | _NO_UNLINKED
_HEADER = struct.Struct("iIII")
_BUFFER = 64 * 1024
_AT_ONCE = 100
"""So many steps are done before others have their turn: each is an event, or an entry of a new folder."""
_LISTED_AT_ONCE = 20
"""So many names of a folder are a step: to list one takes a fraction of what it takes to look at an entry."""
_SECOND_HALF_SECONDS = 0.02
"""How long the second half of a rename may take; without it, the file was moved away."""

_libc = ctypes.CDLL(None, use_errno=True)


class Watcher:
    """An asynchronous iterator of changes in a folder, and with `recursive` in all folders below it."""

    def __init__(self, folder: int, parts: Parts, *, recursive: bool) -> None:
        self._parts = parts
        self._recursive = recursive
        self._folders: dict[int, Parts] = {}
        """By the kernel's watch descriptor, relative to the folder."""
        self._changes: deque[Changed] = deque()
        """What was found in the last steps."""
        self._work = self._take(b"")
        """What is left to do of the events that were read."""
        self._left = 0
        """How much of the contents of new folders is still reported, of these events."""
        self._moved: tuple[int, Parts, bool] | None = None
        """The first half of a rename: its cookie, the old path, and whether it is a folder."""
        self._waiter: asyncio.Future[None] | None = None
        self._root = os.open(".", FOLDER, dir_fd=folder)
        self._inotify = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._inotify < 0:
            os.close(self._root)
            text = f"nothing can be watched: {os.strerror(ctypes.get_errno())}; stop other watchers of this user"
            raise Unavailable("watches", text)
        try:
            for _ in self._watch(self._root, ()):
                pass
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the iteration for a waiting caller."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.get_loop().remove_reader(self._inotify)
            self._waiter.set_result(None)
        self._work.close()  # and the folders that it has open
        for descriptor in (self._inotify, self._root):
            if descriptor >= 0:
                os.close(descriptor)
        self._inotify = self._root = -1

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __aiter__(self) -> Watcher:
        return self

    async def __anext__(self) -> Changed:
        while not self._changes:
            if self._inotify < 0:
                raise StopAsyncIteration
            if self._goes_on():
                await asyncio.sleep(0)
                continue
            if self._changes:
                break
            try:
                data = os.read(self._inotify, _BUFFER)
            except BlockingIOError:
                await self._wait()
                continue
            self._left = MAX_TOLD
            self._work = self._take(data)
        return self._changes.popleft()

    def _goes_on(self) -> bool:
        """Do the next steps, and return whether there are more."""
        return all(next(self._work, self) is None for _ in range(_AT_ONCE))

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        loop.add_reader(self._inotify, _wake, waiter)
        try:
            async with asyncio.timeout(_SECOND_HALF_SECONDS if self._moved else None):
                await waiter
        except TimeoutError:
            self._settle()
        finally:
            if self._inotify >= 0:
                loop.remove_reader(self._inotify)

    # ── Events ──

    def _take(self, data: bytes) -> Generator[None]:
        for watch, mask, cookie, name in _events(data):
            if not (mask & _MOVED_TO and self._moved is not None and self._moved[0] == cookie):
                self._settle()
            if mask & _OVERFLOW:
                self._tell("lost", ())
            elif mask & _IGNORED:
                self._folders.pop(watch, None)  # the folder is gone
            elif watch in self._folders and name:
                yield from self._changed((*self._folders[watch], name), mask, cookie)
            yield

    def _changed(self, path: Parts, mask: int, cookie: int) -> Iterator[None]:
        is_folder = bool(mask & _ISDIR)
        if self._moved is not None:
            source = self._moved[1]
            if _ours(path):
                self._settle()
            elif not _ours(source):
                self._moved = None
                self._relabel(source, path)
                self._tell("renamed", source, path)
                return
            self._moved = None
        if mask & _MOVED_FROM:
            self._moved = (cookie, path, is_folder)
        elif mask & (_CREATE | _MOVED_TO):
            yield from self._came(path, is_folder)
        else:
            self._tell("removed" if mask & _DELETE else "modified", path)

    def _came(self, path: Parts, is_folder: bool) -> Iterator[None]:
        self._tell("created", path)
        if is_folder and self._recursive and not _ours(path):
            yield from self._follow(path)

    def _settle(self) -> None:
        """The second half of a rename did not come."""
        if self._moved is not None:
            _, path, is_folder = self._moved
            self._moved = None
            self._tell("removed", path)
            if is_folder:
                self._forget(path)

    def _tell(self, kind: Change, path: Parts, to: Parts | None = None) -> None:
        if _ours(path):
            return
        change = Changed(kind, self._shown(path), None if to is None else self._shown(to))
        if not self._changes or self._changes[-1] != change:
            self._changes.append(change)

    def _shown(self, path: Parts) -> str:
        return full_path((*self._parts, *map(shown, path)))

    # ── Folders ──

    def _watch(self, folder: int, path: Parts) -> Iterator[None]:
        """Watch an open folder, and those in it. Raises Refused and Unavailable where there are too many."""
        if len(self._folders) >= MAX_FOLDERS or len(path) > DEEPEST:
            raise refusal(
                "too_many", f"there are more than {MAX_FOLDERS} folders to watch; name one below, or watch it alone"
            )
        watch = int(_libc.inotify_add_watch(self._inotify, f"/proc/self/fd/{folder}".encode(), ctypes.c_uint32(_MASK)))
        if watch < 0:
            number = ctypes.get_errno()
            text = f"{self._shown(path)!r} cannot be watched: {os.strerror(number)}; watch fewer folders"
            raise Unavailable("watches", text)
        self._folders[watch] = path
        if not self._recursive:
            return
        names: list[str] = []
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries, 1):
                if entry.is_dir(follow_symlinks=False) and not _ours((entry.name,)):
                    names.append(entry.name)
                if number % _LISTED_AT_ONCE == 0:
                    yield
        yield
        for name in names:
            with suppress(OSError), opened(name, FOLDER, folder) as below:  # gone, or no longer a folder, or closed
                yield from self._watch(below, (*path, name))

    def _follow(self, path: Parts) -> Iterator[None]:
        """Watch a new folder, and report what was created in it before that."""
        try:
            with beneath(self._root, path, FOLDER) as folder:
                yield from self._watch(folder, path)
                for found in Walk(most=self._left, lenient=True).through(folder):
                    self._left -= 1
                    self._tell("created", (*path, *found.parts))
                    yield
        except OSError:
            return
        except (Refused, Unavailable):
            self._tell("lost", path)

    def _relabel(self, source: Parts, path: Parts) -> None:
        for watch, folder in self._folders.items():
            if folder[: len(source)] == source:
                self._folders[watch] = (*path, *folder[len(source) :])

    def _forget(self, path: Parts) -> None:
        for watch, folder in list(self._folders.items()):
            if folder[: len(path)] == path:
                del self._folders[watch]
                _libc.inotify_rm_watch(self._inotify, watch)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _ours(path: Parts) -> bool:
    """Our temporary names, of what is being written, unpacked or removed."""
    return any(name.startswith(PART) for name in path)


def _events(data: bytes) -> Iterator[tuple[int, int, int, str]]:
    at = 0
    while at < len(data):
        watch, mask, cookie, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        yield watch, mask, cookie, os.fsdecode(data[at : at + length].rstrip(b"\0"))
        at += length
