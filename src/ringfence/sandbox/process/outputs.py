"""What a step left in /workspace/output of a box that stays: only what is new or changed is read again."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ringfence.box import FileFact
from ringfence.sandbox.process import collect

_MOST_FILES = 10_000
_DEEPEST = 32
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Outputs:
    """Of one box."""

    def __init__(self, workspace: int, max_bytes: int) -> None:
        self._workspace = workspace
        self._max_bytes = max_bytes
        self._look: tuple[tuple[int, ...], ...] = ()
        self._known: dict[str, str] = {}

    def changed(self) -> tuple[tuple[FileFact, ...], dict[str, str]]:
        """Files that are new, or other than they were when this was asked last; what is no file to take, and why."""
        try:
            if os.stat("output", dir_fd=self._workspace, follow_symlinks=False).st_size == collect.EMPTY_FOLDER:
                self._look, self._known = (), {}
                return (), {}
            folder = os.open("output", _FLAGS, dir_fd=self._workspace)
        except OSError:
            return (), {}
        try:
            look: list[tuple[int, ...]] = []
            _stat(folder, look, 0)
            if tuple(look) == self._look:
                return (), {}
            self._look = tuple(look)
            facts, skipped = collect.collect(folder, None, max_bytes=self._max_bytes, max_files=_MOST_FILES)
        finally:
            os.close(folder)
        new = tuple(fact for fact in facts if self._known.get(fact.path) != fact.sha256)
        self._known = {fact.path: fact.sha256 for fact in facts}
        return new, skipped


def _stat(folder: int, look: list[tuple[int, ...]], depth: int) -> None:
    """What can be seen of everything beneath without reading it."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if len(look) >= _MOST_FILES:
                return
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                look.append((found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
                if stat.S_ISDIR(found.st_mode) and depth < _DEEPEST:
                    inner = os.open(entry.name, _FLAGS, dir_fd=folder)
                    try:
                        _stat(inner, look, depth + 1)
                    finally:
                        os.close(inner)
