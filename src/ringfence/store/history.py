"""An index of the calls on record, for people who look through them: which there were, by what one would look for.

It lies beside the log in a file of its own, is made from the log alone, and is made anew where it is gone. So no call
waits for it, and nothing that it says is proof: a page shows the records themselves.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringfence.audit.chain import Record
from ringfence.core import canonical, system
from ringfence.core.canonical import object_at
from ringfence.core.errors import StoreError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.store.reader import Reader
from ringfence.store.searching import (
    TEXTS,
    CallSearch,
    can_have_texts,
    conditions,
    folded,
    has_texts,
    listing,
    matching,
)

FOLDER = "history"
_FILE = "calls.db"
_VERSION = 4
_TOGETHER = 250
"""Records in one transaction: others may look meanwhile."""
_LONGEST_TEXT = 4000
_LONGEST_LEAF = 500
_UNSEARCHED = ("isolation", "digest", "contract_digest", "decision_id", "policy_digest", "prev")
_SCHEMA = """
CREATE TABLE calls (
    id      INTEGER PRIMARY KEY,
    call_id TEXT NOT NULL,
    at      REAL NOT NULL,
    tenant  TEXT NOT NULL,
    agent   TEXT NOT NULL,
    person  TEXT,
    tool    TEXT NOT NULL,
    server  TEXT,
    kind    TEXT NOT NULL,
    status  TEXT NOT NULL,
    reason  TEXT NOT NULL,
    wall_ms REAL,
    cpu_ms  REAL,
    memory  INTEGER,
    effect  TEXT NOT NULL,
    words   TEXT NOT NULL
);
CREATE INDEX calls_by_name ON calls (call_id);
CREATE INDEX calls_by_tenant ON calls (tenant, id);
CREATE INDEX calls_by_tool ON calls (tool, id);
CREATE INDEX calls_by_agent ON calls (agent, id);
CREATE INDEX calls_by_status ON calls (status, id);
CREATE INDEX calls_by_time ON calls (at);
CREATE INDEX calls_by_effect ON calls (effect, tenant, id);
CREATE TABLE seen (last INTEGER NOT NULL, settled INTEGER NOT NULL);
INSERT INTO seen VALUES (0, 0);
CREATE TABLE choices (
    name   TEXT NOT NULL,
    tenant TEXT NOT NULL,
    value  TEXT NOT NULL,
    PRIMARY KEY (name, tenant, value)
) WITHOUT ROWID;
CREATE TABLE sums (
    width   INTEGER NOT NULL,
    slot    INTEGER NOT NULL,
    tenant  TEXT NOT NULL,
    tool    TEXT NOT NULL,
    calls   INTEGER NOT NULL,
    refused INTEGER NOT NULL,
    failed  INTEGER NOT NULL,
    timed   INTEGER NOT NULL,
    wall_ms REAL NOT NULL,
    slowest REAL,
    cpu_ms  REAL NOT NULL,
    memory  INTEGER NOT NULL,
    PRIMARY KEY (width, slot, tenant, tool)
) WITHOUT ROWID;
"""
_HOW_MANY = "SELECT count(*) FROM calls"
_KEEP = "INSERT OR IGNORE INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
WIDTHS = (60, 1800, 7200, 43_200)
"""Seconds of the spans that calls are counted in, so that a chart need not look at every call."""
_ALL = ""
"""In the place of a tool: the sum of all of them."""
_OTHERS = "(no such tool)"
_CHOOSE = "INSERT OR IGNORE INTO choices VALUES (?, ?, ?)"
_ADD = (
    "INSERT INTO sums VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls +"
    " excluded.calls, refused = refused + excluded.refused, failed = failed + excluded.failed, timed = timed +"
    " excluded.timed, wall_ms = wall_ms + excluded.wall_ms, slowest = max(coalesce(slowest, excluded.slowest),"
    " coalesce(excluded.slowest, slowest)), cpu_ms = cpu_ms + excluded.cpu_ms, memory = max(memory, excluded.memory)"
)
_CHOICES = "SELECT value FROM choices WHERE name = ?"


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call as a list shows it."""

    id: int
    call_id: str
    at: float
    tenant: str
    agent: str
    person: str | None
    tool: str
    server: str | None
    kind: str
    status: str
    reason: str
    wall_ms: float | None
    cpu_ms: float | None
    memory: int | None
    effect: str
    """`settled` where it was unknown, and a person has said what became of it."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Calls of one span of time."""

    begins: float
    calls: int
    refused: int
    failed: int
    wall_ms: float | None
    """In the mean, of those that ran."""
    slowest_ms: float | None
    cpu_ms: float
    memory: int


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Calls of one tool in a span of time."""

    tool: str
    calls: int
    refused: int
    failed: int
    wall_ms: float | None
    slowest_ms: float | None
    cpu_ms: float
    memory: int


_COUNTED = (
    " sum(calls), sum(refused), sum(failed), sum(wall_ms) / nullif(sum(timed), 0), max(slowest), sum(cpu_ms),"
    " max(memory) FROM sums"
)
_SYSTEM = ("server", "listing")
_KIND = 8
_REFUSED = ("denied", "validation_failure")
_WELL = ("success", "approval_required")
_NEVER = 2**62


class History:
    """For any thread, one at a time."""

    def __init__(self, folder: Path, reader: Callable[[], Reader]) -> None:
        self._folder = folder / FOLDER
        self._reader = reader
        self._turn = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    # ── Keeping up with the log ──

    def catch_up(self, seconds: float) -> bool:
        """Take in what ended since the last time. The first time that is the whole log, so no longer than this is
        spent on it: False where there is more. Raises StoreError."""
        reader = self._reader()
        until = time.monotonic() + seconds
        with self._open() as connection:
            while True:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    last, settled = connection.execute("SELECT last, settled FROM seen").fetchone()
                    found = reader.ended_after(last, _TOGETHER)
                    rows = [row for number, record in found if (row := _row(number, record)) is not None]
                    connection.executemany(_KEEP, rows)
                    connection.executemany(_CHOOSE, {each for row in rows for each in _chosen(row)})
                    connection.executemany(_ADD, _sums(rows))
                    if found:
                        connection.execute("UPDATE seen SET last = ?", (found[-1][0],))
                    else:
                        _settle(connection, reader, settled)
                        # What was pruned meanwhile is gone here, too.
                        connection.execute("DELETE FROM calls WHERE id < ?", (reader.first_ended(),))
                        oldest = connection.execute("SELECT min(at) FROM calls").fetchone()[0]
                        bounds = [(width, _still(oldest, width)) for width in WIDTHS]
                        connection.executemany("DELETE FROM sums WHERE width = ? AND slot < ?", bounds)
                    connection.execute("COMMIT")
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                if len(found) < _TOGETHER:
                    return True
                if time.monotonic() > until:
                    return False

    # ── Looking ──

    def find(self, search: CallSearch, limit: int) -> list[PastCall]:
        """So many of them, the newest first. Raises StoreError."""
        out: list[PastCall] = []
        with self._open() as connection:
            before = search.before
            while len(out) < limit:
                text, values = listing(search, before, has_texts(connection))
                rows = connection.execute(text, [*values, limit - len(out)]).fetchall()
                found = [PastCall(*row) for row in rows]
                there = self._reader().still_there([each.id for each in found])
                out += [each for each in found if each.id in there]
                gone = [(each.id,) for each in found if each.id not in there]
                connection.executemany("DELETE FROM calls WHERE id = ?", gone)
                if not gone or search.after is not None:
                    break
                before = found[-1].id
        return out[::-1] if search.after is not None else out

    def choices(self, tenant: str | None) -> dict[str, list[str]]:
        """What there is to choose from: tools, agents and statuses. Raises StoreError."""
        where, values = (" AND tenant = ?", [tenant]) if tenant is not None else ("", [])
        text = f"{_CHOICES}{where} GROUP BY value ORDER BY value LIMIT 500"
        with self._open() as connection:
            return {
                name: [str(row[0]) for row in connection.execute(text, [name, *values])]
                for name in ("tool", "agent", "status")
            }

    def buckets(self, tenant: str | None, first: int, width: int, count: int) -> list[Bucket]:
        """What happened in each of `count` spans; `width` is one of WIDTHS, `first` the number of the first span since
        the epoch. Raises StoreError."""
        where, values = _span(tenant, first, width)
        text = f"SELECT slot,{_COUNTED}{matching([*where, 'tool = ?'])} GROUP BY slot"
        with self._open() as connection:
            found = {row[0]: row[1:] for row in connection.execute(text, [*values, _ALL])}
        empty = (0, 0, 0, None, None, 0.0, 0)
        return [Bucket(float(slot * width), *found.get(slot, empty)) for slot in range(first, first + count)]

    def tools(self, tenant: str | None, first: int, width: int, most: int) -> list[ToolUse]:
        """The tools that were called since then, those first that were called most. Raises StoreError."""
        where, values = _span(tenant, first, width)
        text = f"SELECT tool,{_COUNTED}{matching([*where, 'tool <> ?'])} GROUP BY tool ORDER BY 2 DESC, 1 LIMIT ?"
        with self._open() as connection:
            return [ToolUse(*row) for row in connection.execute(text, [*values, _ALL, most])]

    def unsettled(self, tenant: str | None) -> int:
        """Of how many calls nobody knows whether they changed something. Raises StoreError."""
        where, values = conditions(CallSearch(tenant=tenant, effect="unknown", system=True))
        with self._open() as connection:
            return int(connection.execute(f"{_HOW_MANY}{matching(where)}", values).fetchone()[0])

    # ── The file ──

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._turn:
            try:
                if self._connection is None:
                    self._connection = _opened(self._folder)
                    weakref.finalize(self, self._connection.close)
                yield self._connection
            except sqlite3.Error as exc:
                self.close()
                raise StoreError(f"the index of calls in {self._folder} cannot be used: {exc}") from exc

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def forget_pruned(folder: Path, log: sqlite3.Connection, calls: Sequence[int] | None) -> None:
    """What the log of a state folder holds no more stands in its index no more, either: these calls, or, where nobody
    knows which they were, all that the log has not. Raises StoreError."""
    place = folder / FOLDER
    if not (place / _FILE).is_file():
        return
    try:
        with contextlib.closing(_opened(place)) as connection:
            if calls is None:
                there = {row[0] for row in log.execute("SELECT id FROM records WHERE kind = 'finished'")}
                calls = [row[0] for row in connection.execute("SELECT id FROM calls") if row[0] not in there]
            connection.execute("BEGIN IMMEDIATE")
            gone = 0
            for each in calls:
                gone += connection.execute("DELETE FROM calls WHERE id = ?", (each,)).rowcount
            if gone and has_texts(connection):
                connection.execute("INSERT INTO texts (texts) VALUES ('optimize')")  # else it keeps what is deleted
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as exc:
        text = f"the log is pruned, but its index in {place} still has what went ({exc}); remove that folder"
        raise StoreError(text) from exc


def _opened(place: Path) -> sqlite3.Connection:
    path = place / _FILE
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        if system.stranger(place.lstat()) or place.is_symlink():
            raise StoreError(f"{place} is not a folder of this user's; move it away")
        _make(path)
        try:
            return _connected(path)
        except sqlite3.OperationalError:
            raise  # busy, or no room: others may be using it
        except (sqlite3.DatabaseError, _OtherVersion):
            # It can be made anew, and what it held is in the log.
            for name in (_FILE, f"{_FILE}-wal", f"{_FILE}-shm", f"{_FILE}-journal"):
                (place / name).unlink(missing_ok=True)
            _make(path)
            return _connected(path)
    except OSError as exc:
        raise StoreError(f"the index of calls cannot be kept in {place}: {exc.strerror or exc}") from exc


def _make(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | system.PLAIN, 0o600))


class _OtherVersion(Exception):
    pass


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")  # a power cut costs what can be made again
        connection.execute("PRAGMA secure_delete = ON")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            texts = TEXTS if can_have_texts(connection) else ""
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}{texts} PRAGMA user_version = {_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise _OtherVersion
    except BaseException:
        connection.close()
        raise
    return connection


def _still(oldest: float | None, width: int) -> int:
    """The first span that still has a call; of none, all spans go."""
    return _NEVER if oldest is None else int(oldest // width)


def _span(tenant: str | None, first: int, width: int) -> tuple[list[str], list[Any]]:
    if width not in WIDTHS:
        raise ValueError(f"calls are counted in spans of {WIDTHS} seconds, not of {width}")
    where, values = ["width = ?", "slot >= ?"], [width, first]
    return (where, values) if tenant is None else ([*where, "tenant = ?"], [*values, tenant])


def _chosen(row: tuple[Any, ...]) -> Iterator[tuple[str, str, str]]:
    """What a person may choose by which this call is found."""
    if row[_KIND] not in _SYSTEM:
        yield from ((name, row[3], row[place]) for name, place in (("tool", 6), ("agent", 4), ("status", 9)))


def _sums(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """What these calls add to the counts of their spans."""
    out: dict[tuple[int, int, str, str], list[Any]] = {}
    for row in rows:
        if row[_KIND] in _SYSTEM:
            continue
        at, tenant, tool, status, reason, wall, cpu, memory = (row[place] for place in (2, 3, 6, 9, 10, 11, 12, 13))
        # Callers invent as many of these as they like.
        tool = _OTHERS if reason == "unknown_tool" else tool
        for width in WIDTHS:
            for name in (_ALL, tool):
                found = out.setdefault((width, int(at // width), tenant, name), [0, 0, 0, 0, 0.0, None, 0.0, 0])
                found[0] += 1
                found[1] += status in _REFUSED
                found[2] += status not in _REFUSED and status not in _WELL
                if wall is not None:
                    found[3] += 1
                    found[4] += wall
                    found[5] = wall if found[5] is None else max(found[5], wall)
                found[6] += cpu or 0.0
                found[7] = max(found[7], int(memory or 0))
    return [(*place, *found) for place, found in out.items()]


def _settle(connection: sqlite3.Connection, reader: Reader, after: int) -> None:
    """Take in what people have said of calls whose effect was unknown."""
    newest, calls = reader.settled_after(after)
    if newest > after:
        text = "UPDATE calls SET effect = 'settled' WHERE call_id = ? AND effect = 'unknown'"
        connection.executemany(text, [(call_id,) for call_id in calls])
        connection.execute("UPDATE seen SET settled = ?", (newest,))


# ── One record ────────────────────────────────────────────────────────────────────────────────────


def _row(number: int, record: Record) -> tuple[Any, ...] | None:
    """None for one that cannot be read: `audit verify` is who tells of that."""
    try:
        body = record.body
    except canonical.NotCanonical:
        return None
    call = object_at(body, "call")
    principal = object_at(call, "principal")
    facts = object_at(body, "facts")
    usage = object_at(facts, "usage")
    own = body.get("started_seq") is not None
    tenant, agent = (str(principal.get(name, "")) for name in ("tenant", "agent"))
    tool, status = str(call.get("tool", "")), str(body.get("status", ""))
    # First what a search may name besides, so that it is never what is cut off.
    words = f"{tenant} {agent} {tool} {status} {' '.join(_leaves(body))[:_LONGEST_TEXT]}"
    return (
        number,
        str(record.call_id),
        record.at,
        tenant,
        agent,
        _text(principal.get("person")),
        tool,
        _text(call.get("server")),
        str(call.get("kind", "")),
        status,
        str(body.get("reason_code", "")),
        _number(facts.get("wall_ms")) if own else None,
        _number(usage.get("cpu_ms")),
        _number(usage.get("peak_memory_bytes")),
        effect_of(body),
        folded(words),
    )


def effect_of(body: Json) -> str:
    """What a call changed, as it ended. What was not made, as another call had its key, is not unknown by itself."""
    told_of_another = body.get("reason_code") in ("key_unknown", "result_not_kept")
    return "" if told_of_another else str(body.get("effect", ""))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _leaves(value: Any) -> Iterator[str]:
    """What somebody may search for: every text of a record but what is none to a reader."""
    if isinstance(value, str):
        if not value.startswith("sha256:") and len(value) <= _LONGEST_LEAF:
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in _UNSEARCHED:
                yield from _leaves(inner)
    elif isinstance(value, list):
        yield from _each(value)


def _each(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from _leaves(value)
