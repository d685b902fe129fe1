"""All of what a step writes, where that is more than is captured: in a file of its own box, piece by piece as it comes.

It is the box's room that it takes, and the box's limit that it meets; then there is none. Hostile code may do with the
file what it likes, as with all of its files.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from secrets import token_hex

from ringfence.box import Stream
from ringfence.errors import Refused
from ringfence.sandbox.beneath import full_path, made_folder
from ringfence.sandbox.process.files import CREATE, acting_as
from ringfence.sandbox.workspace import Workspace
from ringfence.sessions import Tell

_FOLDER = "tmp"


class Whole:
    """Stands between a step and whoever listens to it."""

    def __init__(self, workspace: Callable[[], Workspace], captured: int, tell: Tell, *, wanted: bool) -> None:
        """`workspace` gives one whose descriptor is to be closed; so many bytes of a stream are captured anyway."""
        self._tell = tell
        self._files: dict[Stream, _File] = {}
        if wanted:
            self._files = {
                "stdout": _File(workspace, "stdout", captured),
                "stderr": _File(workspace, "stderr", captured),
            }
        self.tell = self._keep if wanted else tell
        """What the step tells."""

    def _keep(self, stream: Stream, data: bytes) -> Awaitable[None] | None:
        self._files[stream].add(data)
        return self._tell(stream, data)

    def over(self) -> Mapping[str, str]:
        """Where it is, by stream."""
        paths = {stream: file.over() for stream, file in self._files.items()}
        return {stream: path for stream, path in paths.items() if path is not None}


class _File:
    def __init__(self, workspace: Callable[[], Workspace], stream: Stream, captured: int) -> None:
        self._workspace = workspace
        self._name = f"{stream}-{token_hex(4)}.txt"
        self._left = captured
        self._waiting: list[bytes] | None = []
        """What is not in the file yet; None where there is none, or can be none."""
        self._descriptor = -1

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
                _write(self._descriptor, data)
        except (OSError, Refused):
            self._give_up()

    def _open(self) -> int:
        workspace = self._workspace()
        try:
            made = made_folder(workspace.descriptor, (_FOLDER,), workspace.owner)
            with made as (folder, _), acting_as(workspace.owner):
                return os.open(self._name, CREATE, 0o644, dir_fd=folder)
        finally:
            os.close(workspace.descriptor)

    def _give_up(self) -> None:
        """No half of it, which would be taken for the whole."""
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
        return full_path((_FOLDER, self._name))


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
