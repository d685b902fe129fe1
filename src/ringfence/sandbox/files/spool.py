"""The whole output of a step, where it is more than is captured: spooled to a file in the step's own box.

It takes the box's space and is subject to the box's limit; when that is reached, there is no file. Hostile code can
change the file, as all of its files.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from secrets import token_hex

from ringfence.core.box import Stream
from ringfence.core.box_files import BoxFiles, SpoolFile
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.sessions import Tell


class Spool:
    """Stands between a step and its listener."""

    def __init__(self, files: Callable[[], BoxFiles], captured: int, tell: Tell, *, wanted: bool) -> None:
        """`files` returns some that are closed here; `captured` is how much is captured anyway."""
        self._tell = tell
        self._files: dict[Stream, _File] = {}
        if wanted:
            self._files = {
                "stdout": _File(files, "stdout", captured),
                "stderr": _File(files, "stderr", captured),
            }
        self.tell = self._keep if wanted else tell
        """Called by the step with its output."""

    def _keep(self, stream: Stream, data: bytes) -> Awaitable[None] | None:
        kept = self._files[stream].add(data)
        told = self._tell(stream, data)
        return told if kept is None else kept if told is None else _both(kept, told)

    async def over(self) -> Mapping[str, str]:
        """The path of each file, by stream."""
        paths = {stream: await file.over() for stream, file in self._files.items()}
        return {stream: path for stream, path in paths.items() if path is not None}


async def _both(first: Awaitable[None], second: Awaitable[None]) -> None:
    await first
    await second


class _File:
    def __init__(self, files: Callable[[], BoxFiles], stream: Stream, captured: int) -> None:
        self._files = files
        self._name = f"{stream}-{token_hex(4)}.txt"
        self._left = captured
        self._waiting: list[bytes] | None = []
        """What is not in the file yet; None once the file is open, or has failed."""
        self._file: SpoolFile | None = None
        self._folder = ""

    def add(self, data: bytes) -> Awaitable[None] | None:
        self._left -= len(data)
        if self._waiting is not None:
            self._waiting.append(data)
        if self._left >= 0:
            return None
        try:
            if self._waiting is not None:
                self._file = self._open()
                data, self._waiting = b"".join(self._waiting), None
            return None if self._file is None else self._file.write(data)
        except (OSError, Refused, Unavailable):
            self._give_up()
            return None

    def _open(self) -> SpoolFile:
        files = self._files()
        try:
            self._folder = files.temporary
            return files.spool(self._folder, self._name)
        finally:
            files.close()

    def _give_up(self) -> None:
        """Empty the file: a part would be taken for the whole."""
        self._waiting = None
        if self._file is not None:
            self._file.drop()
            self._file = None

    async def over(self) -> str | None:
        self._waiting = None
        file, self._file = self._file, None
        if file is None or not await file.close():
            return None
        return f"{self._folder}/{self._name}"
