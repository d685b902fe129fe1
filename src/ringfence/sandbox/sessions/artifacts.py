"""Artifacts: the files in /workspace/output of a session that has ended, kept for a time, for its owner.

All artifacts together have a limit, because a box could otherwise leave any amount: a file full of holes costs a box
nothing, but is a whole file here. When the limit is reached, the oldest artifacts of the owner with the most are
removed, so that no owner can push out those of another by leaving more.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from ringfence.core.box_files import BoxFiles
from ringfence.core.record import dataclass
from ringfence.core.sessions import Owner, SessionInfo
from ringfence.sandbox.files.blobstore import private_folder, storing
from ringfence.sandbox.files.collect import LeftOut, collect
from ringfence.sandbox.files.paths import FOLDER, WORKSPACE
from ringfence.sandbox.files.workspace import Workspace

log = logging.getLogger(__name__)

_OUTPUT = "output"
OUTPUT = f"{WORKSPACE}/{_OUTPUT}"
_MAX_FILES = 10_000
_MAX_TOLD = 1000
_BLOCK = 4096


@dataclass(slots=True)
class _Kept:
    owner: Owner
    bytes: int = 0
    whole: bool = True
    """False while it is being copied and cannot be removed."""


def _cost(size: int, names: int) -> int:
    """Of a file: its length, since its holes are written, and one block for itself and for each folder it is in."""
    return -(-size // _BLOCK) * _BLOCK + names * _BLOCK


class Artifacts:
    """By session. Methods block; they raise StoreError."""

    def __init__(self, folder: Path, retain_seconds: float, retain_bytes: int, past: Mapping[str, Owner]) -> None:
        """`past`: the sessions of which artifacts may exist, oldest first."""
        self._folder = folder
        self._seconds = retain_seconds
        self._most = retain_bytes
        self._turn = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._bytes = 0
        self._uncounted = past
        self._made_room: deque[str] = deque(maxlen=_MAX_TOLD)

    @property
    def wanted(self) -> bool:
        return self._seconds > 0

    def keep(self, id_: str, owner: Owner, files: BoxFiles, max_bytes: int) -> dict[str, str]:
        """Copy the output folder of a session, if there is one. Returns what was left out, and why."""
        with storing("the output of a session"):
            private_folder(self._folder)
            with self._turn:
                self._count()
            with ExitStack() as stack:
                left_out: dict[str, str] = {}
                try:
                    output = stack.enter_context(files.output(max_bytes, left_out))
                except FileNotFoundError:
                    return {}
                except OSError as problem:
                    return {OUTPUT: f"it cannot be read: {problem.strerror}"}
                return left_out | self._keep(id_, _Kept(owner, whole=False), output, max_bytes)

    def _keep(self, id_: str, mine: _Kept, output: int, max_bytes: int) -> dict[str, str]:
        with self._turn:
            self._kept[id_] = mine
        try:
            place = Path(os.path.realpath(self._folder)) / id_ / _OUTPUT
            take = partial(self._take, mine)
            return collect(output, place, max_bytes=max_bytes, max_files=_MAX_FILES, take=take)[1]
        finally:
            with self._turn:
                mine.whole = True
                if not mine.bytes:
                    self._kept.pop(id_, None)

    def has(self, info: SessionInfo) -> bool:
        return not self._is_over(info) and (self._folder / info.id).is_dir()

    def of(self, id_: str) -> Workspace:
        """The artifacts as a workspace, by a descriptor that the caller closes."""
        with storing("the output of a session"):
            return Workspace(os.open(self._folder / id_, FOLDER), None)

    def doomed(self, past: Mapping[str, SessionInfo], alive: Container[str]) -> list[str]:
        """Sessions whose artifacts can no longer be read."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return [name for name in names if name not in alive and (name not in past or self._is_over(past[name]))]

    def made_room(self, id_: str) -> bool:
        """Whether its artifacts were removed early."""
        return id_ in self._made_room

    def remove(self, ids: Iterable[str]) -> None:
        with storing("the output of a session"), self._turn:
            for id_ in ids:
                self._remove(id_)

    # ── The limit ──

    def _take(self, mine: _Kept, size: int, names: int) -> None:
        cost = _cost(size, names)
        if cost > self._most:
            raise self._no_room()  # removing others would not help
        with self._turn:
            mine.bytes += cost
            self._bytes += cost
            try:
                self._make_room(mine.owner)
            except LeftOut:
                mine.bytes -= cost
                self._bytes -= cost
                raise

    def _make_room(self, owner: Owner | None) -> None:
        while self._bytes > self._most:
            shares: Counter[Owner] = Counter()
            for kept in self._kept.values():
                shares[kept.owner] += kept.bytes
            oldest = {kept.owner: id_ for id_, kept in reversed(self._kept.items()) if kept.whole}
            most = max(oldest, key=shares.__getitem__, default=None)
            if most is None or (owner is not None and shares[most] < shares[owner]):
                raise self._no_room()
            log.warning("what session %s left is removed: more than %d bytes are to be kept", oldest[most], self._most)
            self._made_room.append(oldest[most])
            self._remove(oldest[most])

    def _no_room(self) -> LeftOut:
        return LeftOut(f"of all sessions together no more than {self._most} bytes are kept (session_retain_mb)")

    def _count(self) -> None:
        """Count what an earlier keeper kept, once."""
        past, self._uncounted = self._uncounted, {}
        for id_, owner in past.items():
            kept = _Kept(owner, _size(self._folder / id_))
            if kept.bytes:
                self._kept[id_] = kept
                self._bytes += kept.bytes
        if past:
            self._make_room(None)

    def _remove(self, id_: str) -> None:
        shutil.rmtree(self._folder / id_, ignore_errors=True)
        if (kept := self._kept.pop(id_, None)) is not None:
            self._bytes -= kept.bytes

    def _is_over(self, info: SessionInfo) -> bool:
        if info.ended_at is None:
            return False
        return datetime.fromisoformat(info.ended_at) + timedelta(seconds=self._seconds) < datetime.now(UTC)


def _size(place: Path) -> int:
    total = 0
    for folder, _, files in os.walk(place):
        names = len(Path(folder).relative_to(place).parts)
        for name in files:
            with suppress(FileNotFoundError):
                total += _cost(os.lstat(os.path.join(folder, name)).st_size, names)
    return total
