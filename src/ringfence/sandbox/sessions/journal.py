"""The journal of sessions: one line of JSON for each that was created, paused, resumed or ended.

It outlives the keeper: sessions that are open when it starts ended with the keeper before it, and are closed as such. A
line is in the file when `write` returns, so that it outlives this process, and on the disk after `synced`. Pauses and
resumptions are noted, and written a little later: they are history, and no caller waits for them. What cannot be read
is skipped; a crash may leave half a line, never a wrong one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from ringfence.core.aio import shielded
from ringfence.core.box import Limits
from ringfence.core.errors import StoreError, Unavailable
from ringfence.core.sessions import Owner, SessionInfo, timestamp
from ringfence.sandbox.files.blobstore import private_folder, storing, try_lock, write_whole

log = logging.getLogger(__name__)

REMEMBERED_SECONDS = 86_400.0
_MAX_REMEMBERED = 10_000
_MAX_LINES = 20_000
"""Beyond this, sessions that can no longer be asked for are dropped from the file."""
_SOON_SECONDS = 0.05

Event = Literal["created", "ended"]


class SessionJournal:
    """Held by one keeper at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises Unavailable while another keeper holds it, and StoreError."""
        self.past: dict[str, SessionInfo] = {}
        """Sessions that ended, oldest first, for a day."""
        self._path = folder / "sessions.jsonl"
        self._lines = 0
        self._created: dict[str, bytes] = {}
        self._ended: dict[str, bytes] = {}
        self._written = self._durable = 0
        self._syncing: asyncio.Task[None] | None = None
        self._noted: list[tuple[str, str, Owner, int, float]] = []
        self._soon: asyncio.TimerHandle | None = None
        self._torn = False
        self._file = -1
        with storing("the journal of sessions"):
            private_folder(folder)
            self._lock = _locked(folder / "lock")
            try:
                self._begin()
            except BaseException:
                self.close()
                raise

    def write(self, event: Event, info: SessionInfo, more: Mapping[str, Any] | None = None) -> None:
        """Raises StoreError."""
        self._write_noted()
        line = _line(event, info, more or {})
        if event == "created":
            self._created[info.id] = line
        elif event == "ended":
            self._ended[info.id] = line
            self.past[info.id] = info
            self._forget()
        self._append(line)
        if self._lines > _MAX_LINES:
            with storing("the journal of sessions"):
                self._rewrite()

    async def synced(self) -> None:
        """Wait until everything written so far is on the disk. Raises StoreError."""
        mine = self._written
        while self._durable < mine:
            if self._syncing is None:
                self._syncing = asyncio.get_running_loop().create_task(self._sync())
            await shielded(self._syncing)

    def note(self, event: Literal["paused", "resumed"], id_: str, owner: Owner, step: int) -> None:
        """Note a line, to be written soon."""
        self._noted.append((event, id_, owner, step, time.time()))
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_SOON_SECONDS, self._sync_noted)

    def _sync_noted(self) -> None:
        self._soon = None
        try:
            self._write_noted()
        except StoreError as problem:
            log.warning("%s", problem)
        if self._syncing is None and self._durable < self._written:
            self._syncing = asyncio.get_running_loop().create_task(self._sync())
            self._syncing.add_done_callback(_seen)

    def _write_noted(self) -> None:
        noted, self._noted = self._noted, []
        entries = [
            {"at": timestamp(at), "event": event, "session": id_, "owner": list(owner), "step": step}
            for event, id_, owner, step, at in noted
        ]
        if entries:
            self._append(b"".join(map(_encoded, entries)), len(entries))

    def close(self) -> None:
        """Close the file; then another keeper may hold it."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    async def settle(self) -> None:
        """Write what was noted and wait for the disk; then it can be closed."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        with suppress(StoreError):
            self._write_noted()
            await self.synced()

    # ── The file ──

    def _begin(self) -> None:
        for line in _lines(self._path):
            self._take(line)
        now = timestamp()
        for id_, line in self._created.items():
            if id_ not in self._ended:
                info = replace(_info(line), state="stopped", ended_at=now, why="keeper_died")
                self._ended[id_] = _line("ended", info, {})
                self.past[id_] = info
        self.past = dict(sorted(self.past.items(), key=lambda item: item[1].ended_at or ""))
        self._forget()
        self._rewrite()

    def _take(self, line: bytes) -> None:
        with suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if entry["event"] == "created":
                _info(line)
                self._created[entry["session"]] = line
            elif entry["event"] == "ended" and entry["session"] in self._created:
                self.past[entry["session"]] = _ended(self._created[entry["session"]], entry)
                self._ended[entry["session"]] = line

    def _forget(self) -> None:
        """Drop those that ended more than a day ago, and the oldest where there are too many."""
        oldest = (datetime.now(UTC) - timedelta(seconds=REMEMBERED_SECONDS)).isoformat()
        while self.past:
            id_, info = next(iter(self.past.items()))
            if len(self.past) <= _MAX_REMEMBERED and (info.ended_at or "") >= oldest:
                return
            for known in (self.past, self._created, self._ended):
                known.pop(id_, None)

    def _append(self, lines: bytes, count: int = 1) -> None:
        data = (b"\n" if self._torn else b"") + lines
        self._torn = True
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(None, "the line was cut short")
        except OSError as problem:
            text = f"the journal of sessions cannot be written: {problem.strerror}; make room on the disk"
            raise StoreError(text) from problem
        self._torn = False
        self._written += count
        self._lines += count

    def _rewrite(self) -> None:
        kept = [line for id_, line in self._created.items() for line in (line, self._ended.get(id_, b"")) if line]
        write_whole(self._path, b"".join(kept))
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._lines = len(kept)
        self._durable = self._written
        self._torn = False

    async def _sync(self) -> None:
        written = self._written
        descriptor = os.dup(self._file)  # the file may be replaced before this is done
        try:
            await asyncio.to_thread(os.fdatasync, descriptor)
            self._durable = max(self._durable, written)
        except OSError as problem:
            raise StoreError(f"the journal of sessions cannot be written: {problem.strerror}") from problem
        finally:
            self._syncing = None
            os.close(descriptor)


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # the next caller of `synced` gets it


def _locked(path: Path) -> int:
    descriptor = try_lock(path)
    if descriptor is None:
        text = f"another keeper has the sessions in {path.parent}; connect to it, or end it first"
        raise Unavailable("in_use", text)
    return descriptor


def _lines(path: Path) -> list[bytes]:
    try:
        return [line + b"\n" for line in path.read_bytes().split(b"\n") if line]
    except FileNotFoundError:
        return []


def _line(event: Event, info: SessionInfo, more: Mapping[str, Any]) -> bytes:
    entry: dict[str, Any] = {"at": timestamp(), "event": event, "session": info.id, "owner": list(info.owner)}
    if event == "created":
        entry |= {"template": info.template, "created_at": info.created_at, "snapshot": info.snapshot}
        entry |= {"opened_by": info.opened_by}
        entry |= {"limits": asdict(info.limits), "metadata": dict(info.metadata)}
    else:
        # Not the names of its contexts: callers chose them, and one may hold a secret, which nobody here knows.
        entry |= {"step": info.step, "why": info.why, "ended_at": info.ended_at}
    return _encoded(entry | dict(more))


def _encoded(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _info(line: bytes) -> SessionInfo:
    """The session of a `created` line. Raises ValueError, TypeError, KeyError."""
    entry = json.loads(line)
    tenant, agent = entry["owner"]
    return SessionInfo(
        id=entry["session"],
        owner=Owner(tenant, agent),
        state="starting",
        template=entry["template"],
        created_at=entry["created_at"],
        limits=Limits(**entry["limits"]),
        metadata=entry["metadata"],
        snapshot=entry["snapshot"],
        opened_by=entry.get("opened_by"),
    )


def _ended(created: bytes, entry: Mapping[str, Any]) -> SessionInfo:
    changes = {"step": entry["step"], "why": entry["why"], "ended_at": str(entry["ended_at"])}
    return replace(_info(created), state="stopped", **changes)
