"""The whole output of a step, where it is more than is captured: spooled to a file in the step's own box.

It takes the box's space and is subject to the box's limit; when that is reached, there is no file. Hostile code can
change the file, as all of its files.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from secrets import token_hex

from ringfence.core.box import Stream
from ringfence.core.errors import Refused
from ringfence.core.sessions import Tell
from ringfence.core.system import write_all
from ringfence.sandbox.files.workspace import Workspace


class Spool:
    """Stands between a step and its listener."""

    def __init__(self, workspace: Callable[[], Workspace], captured: int, tell: Tell, *, wanted: bool) -> None:
        """`workspace` returns one that is closed here; `captured` is how much is captured anyway."""
        self._tell = tell
        self._files: dict[Stream, _File] = {}
        if wanted:
            self._files = {
                "stdout": _File(workspace, "stdout", captured),
                "stderr": _File(workspace, "stderr", captured),
            }
        self.tell = self._keep if wanted else tell
        """Called by the step with its output."""

    def _keep(self, stream: Stream, data: bytes) -> Awaitable[None] | None:
        self._files[stream].add(data)
        return self._tell(stream, data)

    def over(self) -> Mapping[str, str]:
        """The path of each file, by stream."""
        paths = {stream: file.over() for stream, file in self._files.items()}
        return {stream: path for stream, path in paths.items() if path is not None}


class _File:
    def __init__(self, workspace: Callable[[], Workspace], stream: Stream, captured: int) -> None:
        self._workspace = workspace
        self._name = f"{stream}-{token_hex(4)}.txt"
        self._left = captured
        self._waiting: list[bytes] | None = []
        """What is not in the file yet; None once the file is open, or has failed."""
        self._descriptor = -1
        self._folder = ""

    def add(self, data: bytes) -> None:
        self._left -= len(data)
        if self._waiting is not None:
            self._waiting.append(data)
        if self._left >= 0:
            return
        try:
            if self._waiting is not None:
                self._descriptor = self._open()
                data, self._waiting = b"".join(self._waiting), None
            if self._descriptor >= 0:
                write_all(self._descriptor, data)
        except (OSError, Refused):
            self._give_up()

    def _open(self) -> int:
        workspace = self._workspace()
        try:
            self._folder = workspace.temporary
            return workspace.new_file(self._folder, self._name)
        finally:
            workspace.close()

    def _give_up(self) -> None:
        """Empty the file: a part would be taken for the whole."""
        self._waiting = None
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def over(self) -> str | None:
        self._waiting = None
        if self._descriptor < 0:
            return None
        os.close(self._descriptor)
        self._descriptor = -1
        return f"{self._folder}/{self._name}"
