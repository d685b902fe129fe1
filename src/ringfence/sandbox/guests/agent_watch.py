"""What changes in a guest's folders, as it happens: one piece of work for `agent_files`, which goes on until the host
ends it. Runs in the guest. The kernel reports changes (inotify) for open folders; some are lost where they come faster
than the host takes them, and that is told.
"""

from __future__ import annotations

import errno
import os
import select
import struct

from ringfence.sandbox.guests import agent_files
from ringfence.sandbox.guests.agent_disk import DEEPEST, FOLDER, PART, DiskWalk, NotDone, tell
from ringfence.sandbox.guests.agent_files import Work

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Parts = tuple[str, ...]

_MODIFY = 0x2
_MOVED_FROM = 0x40
_MOVED_TO = 0x80
_CREATE = 0x100
_DELETE = 0x200
_OVERFLOW = 0x4000
_IGNORED = 0x8000
_ISDIR = 0x4000_0000
_MASK = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | 0x0100_0000 | 0x0400_0000
_EVENT = struct.Struct("iIII")
_BUFFER = 64 * 1024
_SECOND_HALF_MS = 20
"""How long the second half of a rename may take; without it, the file was moved away."""


class DiskWatch:
    """Tells of the changes in a folder, and, where that is asked, in all folders below it."""

    def __init__(self, folder: int, order: dict[str, Any]) -> None:
        import ctypes  # noqa: PLC0415 - the agent has it by now, or there is none

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._number = ctypes.get_errno
        self._mask = ctypes.c_uint32(_MASK)
        self._root = folder
        self._recursive = order["recursive"]
        self._most = order["most"]
        self._told_most = order["told"]
        self._folders: dict[int, Parts] = {}
        self._moved: tuple[int, Parts, bool] | None = None
        self._last: list[Any] = []
        self._left = 0
        self._inotify = self._libc.inotify_init1(os.O_CLOEXEC)
        if self._inotify < 0:
            raise NotDone("watches", text=os.strerror(self._number()))
        self._watch(folder, ())

    def run(self) -> None:
        tell(["begun"])
        waiting = select.poll()
        waiting.register(self._inotify, select.POLLIN)
        while True:
            if not waiting.poll(_SECOND_HALF_MS if self._moved else None):
                self._settle()
                continue
            data = os.read(self._inotify, _BUFFER)
            self._left = self._told_most
            self._last = []
            at = 0
            while at < len(data):
                watch, mask, cookie, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                self._take(watch, mask, cookie, os.fsdecode(data[at : at + length].rstrip(b"\0")))
                at += length

    # ── Events ──

    def _take(self, watch: int, mask: int, cookie: int, name: str) -> None:
        if not (mask & _MOVED_TO and self._moved is not None and self._moved[0] == cookie):
            self._settle()
        if mask & _OVERFLOW:
            self._tell("lost", ())
        elif mask & _IGNORED:
            self._folders.pop(watch, None)
        elif watch in self._folders and name:
            self._changed((*self._folders[watch], name), mask, cookie)

    def _changed(self, path: Parts, mask: int, cookie: int) -> None:
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
            self._tell("created", path)
            if is_folder and self._recursive and not _ours(path):
                self._follow(path)
        else:
            self._tell("removed" if mask & _DELETE else "modified", path)

    def _settle(self) -> None:
        """The second half of a rename did not come."""
        if self._moved is not None:
            _, path, is_folder = self._moved
            self._moved = None
            self._tell("removed", path)
            if is_folder:
                self._forget(path)

    def _tell(self, kind: str, path: Parts, to: Parts | None = None) -> None:
        said = [kind, list(path), None if to is None else list(to)]
        if not _ours(path) and said != self._last:
            self._last = said
            tell(said)

    # ── Folders ──

    def _watch(self, folder: int, path: Parts) -> None:
        if len(self._folders) >= self._most or len(path) > DEEPEST:
            raise NotDone("many_folders", most=self._most)
        watch = self._libc.inotify_add_watch(self._inotify, f"/proc/self/fd/{folder}".encode(), self._mask)
        if watch < 0:
            raise NotDone("not_watched", path="/".join(path), text=os.strerror(self._number()))
        self._folders[watch] = path
        if not self._recursive:
            return
        with os.scandir(folder) as entries:
            names = [each.name for each in entries if each.is_dir(follow_symlinks=False) and not _ours((each.name,))]
        for name in names:
            try:
                below = os.open(name, FOLDER, dir_fd=folder)
            except OSError:
                continue  # gone, or no longer a folder, or closed
            try:
                self._watch(below, (*path, name))
            finally:
                os.close(below)

    def _follow(self, path: Parts) -> None:
        """Watch a new folder, and tell what was created in it before that."""
        try:
            folder = os.open("/".join(path), FOLDER, dir_fd=self._root)
            try:
                self._watch(folder, path)
                for found in DiskWalk(self._left, lenient=True).through(folder):
                    self._left -= 1
                    self._tell("created", (*path, *found.parts))
            finally:
                os.close(folder)
        except NotDone:
            self._tell("lost", path)
        except OSError as problem:
            if problem.errno == errno.EPIPE:  # the host listens no more
                raise

    def _relabel(self, source: Parts, path: Parts) -> None:
        for watch, folder in self._folders.items():
            if folder[: len(source)] == source:
                self._folders[watch] = (*path, *folder[len(source) :])

    def _forget(self, path: Parts) -> None:
        for watch, folder in list(self._folders.items()):
            if folder[: len(path)] == path:
                del self._folders[watch]
                self._libc.inotify_rm_watch(self._inotify, watch)


def _ours(path: Parts) -> bool:
    """Our temporary names, of what is being written, unpacked or removed."""
    return any(name.startswith(PART) for name in path)


def watch(work: Work) -> None:
    DiskWatch(work.folder(work.order["path"]), work.order).run()


agent_files.WORK["watch"] = watch
