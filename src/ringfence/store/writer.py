"""The one thread that writes: it takes whatever waits, commits it together, signs the head, and only then answers.

What waits for no disk may also be committed by the thread that asks, in its turn, where that holds up no other. No
caller is answered before the record is in the database and the checkpoint that covers it in its file. For a record of
something that is only about to begin, and whose end is recorded and covered, too, the database is enough, or even a
file beside it (`AheadFile`), which the next commit takes along. A failure of the disk fails the whole group; the writer
goes on when the disk does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ringfence.audit import chain
from ringfence.audit.chain import Head
from ringfence.core import aio, system
from ringfence.core.errors import StoreError
from ringfence.core.model import Json, Receipt
from ringfence.core.record import dataclass
from ringfence.store.chainfiles import AheadFile, CheckpointFile, Noted, texts_to
from ringfence.store.clock import TOLERANCE, LogClock
from ringfence.store.naming import Naming
from ringfence.store.rows import last_time
from ringfence.store.schema import BUSY_SECONDS, DATABASE, connect
from ringfence.store.transaction import Transaction, apply_changes, is_known

log = logging.getLogger(__name__)

MAX_GROUP = 256
"""Jobs in one commit; more would only make the first of them wait."""
MAX_WAITING = 20_000
"""A queue longer than this is a disk that will not catch up; callers get an error at once."""
MAX_SAID = 1000
LOG_BYTES = 1024 * 1024
"""Written since the log was last moved into the database; more, and the thread moves it while no caller waits."""
_COARSE_NANOSECONDS = 2_000_000_000

Work = Callable[[Transaction], Any]


@dataclass(slots=True)
class WriteJob:
    """One piece of work and who waits for it: a task of an event loop, or a thread."""

    work: Work
    durable: bool
    covered: bool = True
    """Whether its answer waits for a checkpoint; else the next one covers it, too."""
    loop: asyncio.AbstractEventLoop | None = None
    task: asyncio.Future[Any] | None = None
    thread: Future[Any] | None = None
    result: Any = None
    error: BaseException | None = None
    over: bool = False

    async def settled(self) -> bool:
        """Wait until it is over, for a caller that was cancelled, and however often it is. Whether it was kept."""
        if not self.over:
            self.task = late = asyncio.get_running_loop().create_future()
            with aio.shield():
                while not late.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait((late,))
            late.exception()  # it is in `error`
        return self.error is None

    def resolve(self) -> None:
        """Tell the caller that waits, on its loop's own thread. One that was cancelled waits no more."""
        self.over = True
        future = self.task if self.task is not None else self.thread
        if future is None or future.done():
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.result)


class Writer(threading.Thread):
    """Owns the writing connection, the head of the chain and its checkpoint file."""

    def __init__(
        self, folder: Path, connection: sqlite3.Connection, head: Head, checkpoints: CheckpointFile, ahead: AheadFile
    ) -> None:
        super().__init__(name="ringfence-store", daemon=True)
        self._folder = folder
        self._connection: sqlite3.Connection | None = connection
        self._checkpoints = checkpoints
        self._ahead = ahead
        self._noted: list[Noted] = []
        """Records that are in that file and not in the database."""
        self._head = head
        self._kept = head
        """The head that the database has."""
        self._running: dict[str, Head] = {}
        """The calls that have begun in this chain and not ended, by the place of their *started*."""
        self._doubtful: Transaction | None = None
        """One whose commit failed; the disk may yet show that it did not."""
        self._said: dict[str, float] = {}
        """What records share and the database has, by its digest, and when this process said it."""
        self._owed: dict[str, None] = {}
        """Calls that have ended, and whose end could not be written."""
        self._covered = head.seq
        self._clock = LogClock(time.time())
        self._naming = Naming()
        self._version: int | None = None
        """Of the database, as we left it: another one, and another process has written."""
        self._unmoved = 0
        self.has_left_over = False
        """Whether what was erased may still stand in the files, since a reader was in the way."""
        self._full = False
        self._patient = True
        self._path = str(folder / DATABASE)  # a Path would be taken apart again for every group
        self._log_path = f"{self._path}-wal"
        self._file = _identity(self._path)
        self._log = _identity(self._log_path)
        self._watched = system.watched(folder)
        self._unchanged: tuple[int, int] | None = None
        """The folder's times when the files in it were last looked at."""
        self._jobs: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._turn = threading.Lock()
        """Held by the thread that commits; the connection and the head are its own meanwhile."""
        self._closed = False

    def submit(self, job: WriteJob) -> None:
        """Queue a job. Raises StoreError when closed or hopelessly behind."""
        with self._gate:  # so that no job can come after the end of the queue
            if self._closed:
                raise StoreError("the store is closed")
            if self._jobs.qsize() >= MAX_WAITING:
                raise StoreError(f"the store is overloaded: {MAX_WAITING} writes are waiting")
            self._jobs.put(job)

    def finish(self, last: WriteJob) -> bool:
        """Let the queue run out with `last` as its end. False where that was already under way."""
        with self._gate:
            if self._closed:
                return False
            self._closed = True
            self._jobs.put(last)
            self._jobs.put(None)
            return True

    def perform(self, job: WriteJob) -> bool:
        """Commit a job that waits for no disk in this thread. False where another thread or process is in the way."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            if self._closed or self._connection is None or not self._jobs.empty():
                return False
            if not self._settle([job], patient=False):
                return False
            if self._unmoved > LOG_BYTES:
                self._jobs.put(WriteJob(nothing, False))  # moving the log waits for the disk, so the thread does it
            return True
        finally:
            self._turn.release()

    def note(self, kind: str, call_id: str, body: Json, salt: bytes) -> Receipt | None:
        """Write a record ahead of the database. None where that would wait for another thread or process, or cannot be.

        Raises StoreError.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            if self._closed or self._connection is None or not self._jobs.empty():
                return None
            self._check_files()
            now = time.time()
            if now < self._clock.due - TOLERANCE:
                return None  # first that is put on record
            if not all(is_known(self._said, part.digest, now) for part in body.get(chain.SHARED, ())):
                return None  # it names what only the database can take
            record = chain.seal(self._head, now, kind, call_id, body)
            if not self._ahead.append(record, salt):
                return None
            self._noted.append((record, salt))
            self._head = record.head
            return Receipt(record.chain, record.seq, record.hash)
        except (OSError, ValueError):
            return None  # the database says what is wrong
        finally:
            self._turn.release()

    def owe(self, call_id: str) -> None:
        """Close a call with the next transaction: its own end could not be written."""
        self._owed[call_id] = None

    @property
    def owes(self) -> bool:
        return bool(self._owed) and not self._closed

    @property
    def waiting(self) -> int:
        """How many jobs wait for a commit."""
        return self._jobs.qsize()

    @property
    def records(self) -> int:
        """How many records its chain has."""
        return self._head.seq

    @property
    def is_ahead(self) -> bool:
        return bool(self._noted)

    # ── The thread ──

    def run(self) -> None:
        going = True
        while going:
            group, going = self._take()
            if not group:
                continue
            with self._turn:
                self._settle(group, patient=True)
            _answer(group)
            if self.has_left_over:
                with self._turn:
                    self._clear_left_over()
            elif self._unmoved > LOG_BYTES:
                with self._turn:  # what is written meanwhile would stay behind, and the log never be empty
                    self._move_log("PASSIVE")
        self._drop_connection()
        system.unwatch(self._watched)

    def _settle(self, group: list[WriteJob], *, patient: bool) -> bool:
        """Commit a group, or fail it. False where another process has the database, and we are not to wait for it."""
        try:
            return self._commit(group, patient)
        except StoreError as exc:
            _fail(group, exc)
        except Exception as exc:  # the edge of the writer: whatever it was, no caller may wait for ever
            self._drop_connection()
            _fail(group, StoreError(f"the store failed: {exc!r}"))
        return True

    def _take(self) -> tuple[list[WriteJob], bool]:
        group: list[WriteJob] = []
        job = self._jobs.get()
        while job is not None:
            group.append(job)
            if len(group) == MAX_GROUP or self._jobs.empty():  # no other thread takes from it
                return group, True
            job = self._jobs.get()
        return group, False

    def _commit(self, group: list[WriteJob], patient: bool) -> bool:
        connection = self._connect()
        durable = True in [job.durable for job in group]
        try:
            if durable is not self._full:
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._full = durable
            if not self._begin(connection, patient):
                return False
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                self._clock.learn(last_time(connection))
                self._version = version
                self._naming.others_wrote()
            transaction = Transaction(
                connection, self._head, self._checkpoints.signer, self._clock.due, self._said, self._running
            )
            if self._noted:
                transaction.take_along(self._noted)
            owed = tuple(self._owed)
            first = transaction.mark_set_back() | self._finish(connection, transaction, owed)
            if not self._closed and (ends := self._naming.due(connection, self._head.chain)):
                transaction.append(chain.ENDS, None, {"ends": ends})  # before the end: that record names what is left
            if self._perform(connection, transaction, group, alone=len(group) == 1 and not first) or first:
                transaction.put_running()
                self._doubtful = transaction
                connection.execute("COMMIT")
                self._head = self._kept = transaction.head
                self._doubtful = None
                apply_changes(self._running, transaction.changes)
                for call_id in owed:
                    self._owed.pop(call_id, None)
                self._clock.tick(transaction.began)
                self._naming.kept()
                self._caught_up()
                self._have_said(transaction.saying)
            else:
                connection.execute("ROLLBACK")
        except sqlite3.Error as exc:
            self._drop_connection()
            raise StoreError(f"the record could not be written: {exc}") from exc
        self._unmoved += transaction.written
        if self._kept.seq > self._covered and True in [job.covered for job in group]:
            self._cover()
        if transaction.erased:
            self.has_left_over = not self._move_log("TRUNCATE")  # erased bytes also stand in the log
        return True

    @staticmethod
    def _finish(connection: sqlite3.Connection, transaction: Transaction, owed: tuple[str, ...]) -> bool:
        """Write the ends that are owed. One that can never be written must not keep others from being."""
        if not owed:
            return False
        head = transaction.head
        changed = len(transaction.changes)
        connection.execute("SAVEPOINT owed")
        try:
            written = transaction.finish_owed(owed)
        except StoreError as exc:
            log.error("calls %s stay open on record: %s", ", ".join(owed), exc)
            connection.execute("ROLLBACK TO owed")
            transaction.head = head
            del transaction.changes[changed:]
            written = False
        connection.execute("RELEASE owed")
        return written

    def _have_said(self, parts: dict[str, float]) -> None:
        if len(self._said) + len(parts) > MAX_SAID:
            self._said.clear()  # it is said once more
        self._said.update(parts)

    def _caught_up(self) -> None:
        """What was written ahead is in the database."""
        if self._noted:
            self._noted = []
            self._ahead.begin_anew()

    def _begin(self, connection: sqlite3.Connection, patient: bool) -> bool:
        if patient is not self._patient:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000) if patient else 0}")
            self._patient = patient
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as exc:
            if patient or exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        return True

    def _perform(
        self, connection: sqlite3.Connection, transaction: Transaction, group: list[WriteJob], *, alone: bool
    ) -> bool:
        """Run each job in a savepoint of its own; True where any of them is to be kept. One that is `alone`, with
        nothing before it, needs none."""
        kept = False
        for job in group:
            head = transaction.head
            changed = len(transaction.changes)
            if not alone:
                begun = dict(transaction.begun)
                saying = dict(transaction.saying)
                connection.execute("SAVEPOINT job")
            try:
                job.result = job.work(transaction)
                kept = True
            except sqlite3.Error:
                raise  # the database itself failed, and with it the whole group
            except BaseException as exc:  # the work is the caller's; whatever it raises is the caller's answer
                job.error = exc
                transaction.head = head
                del transaction.changes[changed:]
                if not alone:
                    transaction.begun = begun
                    transaction.saying = saying
                    connection.execute("ROLLBACK TO job")
            if not alone:
                connection.execute("RELEASE job")
        return kept

    def _cover(self) -> None:
        """What the database has, and no more: one signed for what is only ahead of it would speak of a cut."""
        try:
            self._checkpoints.write(
                self._kept, None if self._connection is None else texts_to(self._connection, self._kept)
            )
        except OSError as exc:
            raise StoreError(f"the checkpoint could not be written: {exc.strerror or exc}") from exc
        self._covered = self._kept.seq

    def _connect(self) -> sqlite3.Connection:
        """The connection; after a failure a new one, if the chain is still as we left it."""
        self._check_files()
        if self._connection is not None:
            return self._connection
        connection = connect(self._folder)
        try:
            row = connection.execute(
                "SELECT seq, hash FROM records WHERE chain = ? ORDER BY seq DESC LIMIT 1", (self._head.chain,)
            ).fetchone()
        except sqlite3.Error as exc:
            connection.close()
            raise StoreError(f"the chain could not be read again: {exc}") from exc
        found = Head(self._head.chain, *row) if row else Head(self._head.chain)
        doubtful = self._doubtful
        if found != self._kept:
            if doubtful is None or found != doubtful.head:
                connection.close()
                raise StoreError(f"chain {found.chain} was changed by another program; nothing more is written to it")
            apply_changes(self._running, doubtful.changes)
            self._caught_up()
        self._kept = found
        self._head = self._noted[-1][0].head if self._noted else found
        self._doubtful = None
        self._full = False
        self._patient = True
        self._version = None
        self._connection = connection
        self._log = _identity(self._log_path)
        return connection

    def _check_files(self) -> None:
        """A database or log that was removed would go on taking records that could never be read.

        Neither can be without a change of the folder, and to ask that is cheaper.
        """
        folder = os.stat(self._watched)
        times = (folder.st_mtime_ns, folder.st_ctime_ns)
        if times == self._unchanged and self._connection is not None:
            return
        if _identity(self._path) != self._file:
            raise StoreError("the database file was replaced while it was in use")
        if self._connection is not None and _identity(self._log_path) != self._log:
            raise StoreError("the write-ahead log of the database was replaced while it was in use")
        # Times are coarse: what changed just now may change again and still have the same.
        self._unchanged = times if time.time_ns() - max(times) > _COARSE_NANOSECONDS else None

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # it may be given up just because it failed
                connection.close()

    def _move_log(self, how: str) -> bool:
        """Move the write-ahead log into the database. What fails, or has a reader in the way, is tried again. Whether
        all was done."""
        if self._connection is None:
            return False
        try:
            busy, there, moved = self._connection.execute(f"PRAGMA wal_checkpoint({how})").fetchone()
        except sqlite3.Error:  # it stays in the log, where it is as safe
            return False
        self._unmoved = 0 if moved == there else self._unmoved
        return not busy

    def _clear_left_over(self) -> None:
        """Try again, without waiting for whoever reads."""
        if self._connection is not None:
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._patient = False
            self.has_left_over = not self._move_log("TRUNCATE")


def nothing(transaction: Transaction) -> None:
    return None


def _identity(path: str) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except OSError as exc:
        raise StoreError(f"the database is gone ({path}): {exc.strerror or exc}") from exc
    return info.st_ino, info.st_dev


def _fail(group: list[WriteJob], error: StoreError) -> None:
    for job in group:
        if job.error is None:
            job.error = error


def _answer(group: list[WriteJob]) -> None:
    """Wake every waiting thread, and each event loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[WriteJob]] = {}
    for job in group:
        if job.loop is None:
            job.resolve()
        else:
            loops.setdefault(job.loop, []).append(job)
    for loop, jobs in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits there any more
            loop.call_soon_threadsafe(_resolve_all, jobs)


def _resolve_all(jobs: list[WriteJob]) -> None:
    for job in jobs:
        job.resolve()
