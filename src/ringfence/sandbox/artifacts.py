"""What of a session's files is kept when it has ended: those of /workspace/output, for a time, for its owner."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ringfence.sandbox.beneath import WORKSPACE
from ringfence.sandbox.keeping import private_folder, storing
from ringfence.sandbox.process.collect import collect
from ringfence.sandbox.process.files import FOLDER
from ringfence.sandbox.workspace import Workspace
from ringfence.sessions import SessionInfo

_OUTPUT = "output"
OUTPUT = f"{WORKSPACE}/{_OUTPUT}"
_MOST_FILES = 10_000


class Artifacts:
    """By session. Methods want a thread; they raise StoreError."""

    def __init__(self, folder: Path, retain_seconds: float) -> None:
        self._folder = folder
        self._seconds = retain_seconds

    @property
    def wanted(self) -> bool:
        return self._seconds > 0

    def keep(self, id_: str, workspace: int, max_bytes: int) -> dict[str, str]:
        """Copy what lies in the output folder of an open workspace; what was left out, and why."""
        with storing("the output of a session"):
            private_folder(self._folder)
            try:
                output = os.open(_OUTPUT, FOLDER, dir_fd=workspace)  # its name, too, was in the box's hands
            except OSError as problem:
                return {OUTPUT: f"it cannot be read: {problem.strerror}"}
            try:
                place = self._folder / id_
                return collect(output, place / _OUTPUT, max_bytes=max_bytes, max_files=_MOST_FILES)[1]
            finally:
                os.close(output)

    def has(self, info: SessionInfo) -> bool:
        return not self._is_over(info) and (self._folder / info.id).is_dir()

    def of(self, id_: str) -> Workspace:
        """What was kept, to be read as if the session were still there, by a descriptor that is the caller's."""
        with storing("the output of a session"):
            return Workspace(os.open(self._folder / id_, FOLDER), None)

    def doomed(self, past: Mapping[str, SessionInfo], alive: Container[str]) -> list[str]:
        """Of which sessions there is something that nobody may read any more."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return [name for name in names if name not in alive and (name not in past or self._is_over(past[name]))]

    def remove(self, ids: Iterable[str]) -> None:
        with storing("the output of a session"):
            for id_ in ids:
                shutil.rmtree(self._folder / id_, ignore_errors=True)

    def _is_over(self, info: SessionInfo) -> bool:
        if info.ended_at is None:
            return False
        return datetime.fromisoformat(info.ended_at) + timedelta(seconds=self._seconds) < datetime.now(UTC)
