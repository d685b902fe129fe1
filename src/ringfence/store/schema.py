"""Opening the database file: who may read it, how it is set up, and its numbered migrations."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, Self, TypeVar
from urllib.parse import quote

from ringfence.core import system
from ringfence.core.errors import StoreError

T = TypeVar("T")

DATABASE = "ringfence.db"
BUSY_SECONDS = 5.0
"""How long a writer waits for another process before it gives up."""
APPLICATION_ID = 0x52464E43
"""Marks a file as ours (`RFNC`), so that no other program's database is ever migrated."""
_STATISTICS = ("sqlite_stat1", "sqlite_stat4")
_MIGRATION = re.compile(r"(\d{4})_\w+\.sql")


def prepare_folder(folder: Path) -> None:
    """Make the state folder, ours alone. Raises StoreError."""
    try:
        # Those on the way, too: one state may lie in the folder of another, which is made later.
        for each in (*reversed(folder.parents), folder):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
        info = folder.stat()
        if system.stranger(info):
            raise StoreError(f"the state folder {folder} belongs to another user (uid {info.st_uid})")
        if system.open_to_others(info, 0o077):
            if any(folder.iterdir()):
                # Never tighten a folder that others may be using: it might be /tmp.
                raise StoreError(f"others can reach the state folder {folder}; run: chmod 700 {folder}")
            folder.chmod(0o700)
        for name in ("chains", "checkpoints"):
            _prepare_inner(folder / name)
        _prepare_file(folder / DATABASE)
        system.sync_folder(folder)
    except OSError as exc:
        raise StoreError(f"the state folder {folder} cannot be used: {exc.strerror or exc}") from exc


def check_owner(path: Path, info: os.stat_result) -> None:
    """Check that a file in the state folder is ours. Raises StoreError.

    The folder may have been open to others for a while: whoever put a file into it may hold it open still, and would
    read and change what we write to it, whatever the folder's permissions are by now.
    """
    if system.stranger(info):
        raise StoreError(
            f"{path} belongs to another user (uid {info.st_uid}), who could read and change what is kept there; move"
            " it away, or name another folder as gateway.state"
        )


def check_plain(path: Path, info: os.stat_result) -> None:
    """The same, and that it is a plain file. Raises StoreError."""
    if not stat.S_ISREG(info.st_mode):
        raise StoreError(f"{path} is not a plain file; move it away")
    check_owner(path, info)


def _prepare_inner(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError(f"{folder} is not a folder of its own; move it away")
    check_owner(folder, info)
    if system.open_to_others(info, 0o077):
        raise StoreError(f"others can reach {folder} in the state folder; run: chmod 700 {folder}")


def _prepare_file(path: Path) -> None:
    # SQLite gives its -wal and -shm files the mode of the database, so it must be right before they exist.
    # One that exists is not opened here: closing it again would drop every lock that this process has on it, and
    # another process could then throw away the write-ahead log that we are still writing to.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | system.PLAIN, 0o600))
    info = path.lstat()
    check_plain(path, info)
    if system.open_to_others(info, 0o777) != 0o600:
        path.chmod(0o600)


def _check_files(path: Path) -> None:
    """What SQLite reads and writes, beside the database, too: it takes up a log that it finds."""
    for name in (path.name, *(f"{path.name}{ending}" for ending in ("-wal", "-shm", "-journal"))):
        each = path.with_name(name)
        try:
            check_plain(each, each.lstat())
        except FileNotFoundError:
            continue
        except OSError as exc:
            raise StoreError(f"the database {path} cannot be opened: {exc.strerror or exc}") from exc


class _SharedConnection(sqlite3.Connection):
    """A connection that another thread may close at any time: each step of a query is made before that, or not at all.
    SQLite reads memory that is gone otherwise."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.turn = RLock()
        super().__init__(*args, **named)

    def cursor(self, factory: Any = None) -> Any:
        with self.turn:
            return super().cursor(factory or _SharedCursor)

    def execute(self, *args: Any) -> sqlite3.Cursor:
        return self.cursor().execute(*args)  # type: ignore[no-any-return]  # the one of sqlite3 makes a plain cursor

    def close(self) -> None:
        with self.turn:
            super().close()


class _SharedCursor(sqlite3.Cursor):
    connection: _SharedConnection

    def execute(self, *args: Any) -> Self:
        with self.connection.turn:
            return super().execute(*args)

    def fetchone(self) -> Any:
        with self.connection.turn:
            return super().fetchone()

    def fetchmany(self, size: int | None = None) -> list[Any]:
        with self.connection.turn:
            return super().fetchmany(self.arraysize if size is None else size)

    def fetchall(self) -> list[Any]:
        with self.connection.turn:
            return super().fetchall()

    def __next__(self) -> Any:
        with self.connection.turn:
            return super().__next__()


def connect(folder: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection to a database that exists. Raises StoreError."""
    path = folder / DATABASE
    mode = "ro" if read_only else "rw"
    if not read_only:
        _check_files(path)
    try:
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            factory=_SharedConnection if read_only else sqlite3.Connection,
        )
    except sqlite3.Error as exc:
        raise StoreError(f"the database {path} cannot be opened: {exc}") from exc
    try:
        if read_only:
            connection.execute("PRAGMA query_only = ON")
        else:
            # Even its journal mode is a change that no other program's database may suffer.
            _patiently(lambda: _seen_version(connection, path))
            _refuse_triggers(connection, path)
            _set_up(connection)
    except sqlite3.Error as exc:
        connection.close()
        raise StoreError(f"the database {path} cannot be used: {exc}") from exc
    except StoreError:
        connection.close()
        raise
    return connection


def _refuse_triggers(connection: sqlite3.Connection, path: Path) -> None:
    """No trigger acts when we write: one that is there is refused, and one that comes later stays idle. Raises
    StoreError."""
    row = _patiently(lambda: connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchone())
    if row is not None:
        raise StoreError(
            f"the database {path} has the trigger {row[0]!r}, which Ringfence did not make and which would act on each"
            " call; find out who did (ringfence audit verify), and put back a copy without it"
        )
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_ENABLE_TRIGGER, False)


def _set_up(connection: sqlite3.Connection) -> None:
    mode = _patiently(lambda: connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
    if mode != "wal":
        raise sqlite3.OperationalError(f"its file system cannot hold a write-ahead log (journal mode {mode})")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    # What is erased must be gone from the file, not only from the tables.
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    # Not within a commit, where a caller waits: the writer moves the log into the database in between.
    connection.execute("PRAGMA wal_autocheckpoint = 0")


def _patiently(step: Callable[[], T]) -> T:
    """SQLite does not wait by itself for another process that just makes, or just leaves, a write-ahead log."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return step()
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.005)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the schema up to date, once, even where other processes start now. Raises StoreError."""
    steps = _migrations()
    newest = max(steps)
    try:
        if _seen_version(connection, path) == newest:
            return
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _version(connection, path)
            for number in range(version + 1, newest + 1):
                for statement in _statements(steps[number]):
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {newest}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as exc:
        raise StoreError(f"the database {path} cannot be brought up to date: {exc}") from exc


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Check the version for a reader, which never migrates. Raises StoreError."""
    newest = max(_migrations())
    try:
        version = _patiently(lambda: _seen_version(connection, path))
    except sqlite3.Error as exc:
        raise StoreError(f"the database {path} cannot be read: {exc}") from exc
    if version != newest:
        raise StoreError(f"the database {path} has schema {version}, {newest} is needed: start the gateway once")


def schema_faults(connection: sqlite3.Connection, limit: int) -> list[str]:
    """Where the database is not what the migrations make, or an index tells another story than its table.

    Lists and single calls are read by indexes: one that was made for other rows would show what is not in the log.
    """
    expected = sqlite3.connect(":memory:")
    try:
        steps = _migrations()
        for number in sorted(steps):
            for statement in _statements(steps[number]):
                expected.execute(statement)
        ours = _definitions(expected)
    finally:
        expected.close()
    found = _definitions(connection)
    faults = [f"{kind} {name} of the database is missing" for kind, name in sorted(ours.keys() - found.keys())]
    faults += [f"{kind} {name} of the database is none of ours" for kind, name in sorted(found.keys() - ours.keys())]
    changed = sorted(key for key in ours.keys() & found.keys() if ours[key] != found[key])
    faults += [f"{kind} {name} of the database was defined anew" for kind, name in changed]
    if not faults:  # with other definitions, what it finds would mean nothing
        rows = connection.execute(f"PRAGMA integrity_check({limit})").fetchall()
        faults = [f"the database is damaged: {text}" for (text,) in rows if text != "ok"]
    return faults[:limit]


def _definitions(connection: sqlite3.Connection) -> dict[tuple[str, str], object]:
    # Names like SQLite's own, too: no statement gives one, but whoever edits this table does. The indexes that SQLite
    # makes for keys are in both databases alike. Statistics are an operator's, who may have had it collect them.
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
    return {
        (str(kind), str(name)): (table, text)
        for kind, name, table, text in rows
        if not (kind == "table" and name in _STATISTICS)
    }


def _seen_version(connection: sqlite3.Connection, path: Path) -> int:
    """The version as of one moment, while another process may be making the schema."""
    connection.execute("BEGIN")
    try:
        return _version(connection, path)
    finally:
        connection.execute("ROLLBACK")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if owner != APPLICATION_ID and (owner or version or tables):
        raise StoreError(f"{path} is the database of another program")
    if version > (newest := max(_migrations())):
        raise StoreError(f"{path} was written by a newer version (schema {version}, this one knows {newest})")
    return version


@cache
def _migrations() -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in Path(__file__).parent.iterdir():
        if match := _MIGRATION.fullmatch(entry.name):
            found[int(match[1])] = entry.read_text(encoding="utf-8")
    return found


def _statements(script: str) -> list[str]:
    """The statements of a script one by one, as `executescript` would commit the transaction around them."""
    out: list[str] = []
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            out.append(pending)
            pending = ""
    if any(not line.lstrip().startswith("--") for line in pending.splitlines() if line.strip()):
        raise sqlite3.ProgrammingError("a migration ends within a statement")
    return out
