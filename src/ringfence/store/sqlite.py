"""The store: one SQLite file, one writing thread per process, one chain per process.

`write`:  queue ─► group ─► one transaction ─► signed checkpoint ─► answers
`reader`: a connection of the thread's own that cannot write
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ringfence.audit.chain import CLOSED, OPENED
from ringfence.audit.keys import Keys
from ringfence.errors import StoreError
from ringfence.model import Json, Receipt
from ringfence.store import naming
from ringfence.store.ahead import AheadFile
from ringfence.store.chainfile import ChainLock, CheckpointFile
from ringfence.store.opening import Opened, begun, continued
from ringfence.store.pruning import Prune, Pruning
from ringfence.store.reader import Reader
from ringfence.store.recovery import Recovered, Recovery, durable_transaction
from ringfence.store.rows import last_time
from ringfence.store.schema import DATABASE, connect, migrate, prepare_folder
from ringfence.store.transaction import Transaction
from ringfence.store.waiting import Waiting
from ringfence.store.writer import Job, Writer, nothing

T = TypeVar("T")


AHEAD_SECONDS = 0.05
"""How long a call may run before the database says that it does."""
KEPT_SECONDS = 7 * 24 * 3600.0
"""How long an idempotency key keeps its outcome, and a settled question what people were shown."""


class Store:
    """The state of this installation, open for this process."""

    def __init__(self, folder: Path, writer: Writer, lock: ChainLock, files: tuple[CheckpointFile, AheadFile]) -> None:
        """Use `open`."""
        self.folder = folder
        self._keys: Keys | None = None
        self.chain = ""
        self.recovered = Recovered()
        self._writer = writer
        self._lock = lock
        self._checkpoints, self._ahead = files
        self._local = threading.local()
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._closing = threading.Lock()
        self._catching_up_at = 0.0
        self.written = asyncio.Event()
        """Set when something was written by a call of this process, for whoever tells of it."""
        self.waiting = Waiting(self.reader)

    @classmethod
    def open(cls, folder: Path, keys: Keys) -> Store:
        """Open the state, close what a crash left open, and begin a chain. Raises StoreError."""
        folder = folder.absolute()
        if keys.folder.resolve().is_relative_to(folder.resolve()):
            raise StoreError(f"the audit key in {keys.folder} must lie outside the state folder {folder}")
        prepare_folder(folder)
        connection = connect(folder)
        try:
            migrate(connection, folder / DATABASE)
            return cls._begin(folder, keys, connection)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def _begin(cls, folder: Path, keys: Keys, connection: sqlite3.Connection) -> Store:
        try:
            due = last_time(connection)
        except sqlite3.Error as exc:
            raise StoreError(f"the log could not be read: {exc}") from exc
        recovery = Recovery(connection, folder, keys)
        recovered = recovery.sweep()
        opened: Opened | None = None
        try:
            opened = continued(connection, folder, keys) or begun(folder, keys)
            with durable_transaction(connection, opened.head, keys, due) as transaction:
                opened.take(connection)
                transaction.append(OPENED, None, _opening(connection, opened.head.chain, keys))
                transaction.mark_set_back()
                recovery.adopt(transaction)
                transaction.forget_before(time.time() - KEPT_SECONDS)
                head = transaction.head
            opened.checkpoints.write(head, synced=True)
            ahead = AheadFile(folder, head.chain)
            writer = Writer(folder, connection, head, opened.checkpoints, ahead)
        except BaseException as exc:
            if opened is not None:
                opened.close()
            if isinstance(exc, OSError):
                raise StoreError(f"a chain could not be opened in {folder}: {exc.strerror or exc}") from exc
            raise
        store = cls(folder, writer, opened.lock, (opened.checkpoints, ahead))
        store.chain, store.recovered, store._keys = head.chain, recovered, keys
        writer.start()
        return store

    # ── Writing ──

    async def begin(self, call_id: str, body: Json, salt: bytes, *, alone: bool) -> Receipt:
        """Record that a call has begun which can have no effect that outlives us.

        Where its caller is `alone`, that is written ahead of the database, which has it with the call's end, or after
        a moment. Raises StoreError.
        """
        if alone and (receipt := self._writer.note("started", call_id, body, salt)) is not None:
            now = time.monotonic()
            if now > self._catching_up_at:
                self._catching_up_at = now + AHEAD_SECONDS
                asyncio.get_running_loop().call_later(AHEAD_SECONDS, self._catch_up)
            return receipt
        work: Callable[[Transaction], Receipt] = lambda tx: tx.append("started", call_id, body, salt=salt)  # noqa: E731
        return await self.write(work, alone=alone, covered=False)

    def _catch_up(self) -> None:
        """Whoever reads the database is to find calls that take their time."""
        self._catching_up_at = 0.0
        if self._writer.is_ahead:
            self._submit(Job(nothing, False, covered=False))

    async def write(
        self, work: Callable[[Transaction], T], *, durable: bool = False, alone: bool = False, covered: bool = True
    ) -> T:
        """Do `work` in the writer's thread and return what it returned, once it is kept.

        `durable` also waits for the disk; what need not be `covered` by a signed checkpoint is covered by the next.
        Where the caller is `alone`, what waits for no disk is done at once, on its own thread, if nobody writes just
        now: two changes of thread cost as much as the work. Cancelling abandons the
        answer, not the work. Raises StoreError where nothing was kept, or whatever `work` raised.
        """
        if alone and not durable and self._writer.perform(job := Job(work, durable, covered)):
            if job.error is not None:
                raise job.error
            self.written.set()
            return job.result  # type: ignore[no-any-return]
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        # Not at once: the writer would wake while this thread still holds the interpreter's lock, and the two would
        # fight over it. By its next turn the loop has little left to do but wait.
        loop.call_soon(self._submit, Job(work, durable, covered, loop, task=answer))
        result = await answer
        self.written.set()
        return result

    def _submit(self, job: Job) -> None:
        """Out of the loop nobody would hear that the queue refused a job; who waits for it does."""
        try:
            self._writer.submit(job)
        except StoreError as exc:
            job.error = exc
            job.resolve()

    def write_sync(self, work: Callable[[Transaction], T], *, durable: bool = True) -> T:
        """The same from a thread without an event loop."""
        waiting: Future[T] = Future()
        self._writer.submit(Job(work, durable, thread=waiting))
        return waiting.result()

    def prune(self, before: float, by: str) -> Prune:
        """Remove what is older than `before` from the beginning of every chain, as far as nobody needs it.

        Waits, so not to be called on an event loop. Raises StoreError, Conflict where somebody else prunes.
        """
        assert self._keys is not None
        forgotten = time.time() - KEPT_SECONDS
        return Pruning(self.folder, self._keys, self.write_sync, forgotten).run(before, by)

    # ── Reading ──

    def reader(self) -> Reader:
        """This thread's reader."""
        reader: Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = Reader(self.folder)
            self._readers.add(reader)
        return reader

    # ── Closing ──

    def close(self) -> None:
        """Finish what is queued, end the chain, let go of everything. Raises StoreError where the end failed."""
        with self._closing:
            # Before the writer: the last to let go moves the log into the database, and a reader cannot.
            for reader in list(self._readers):
                reader.close()
            ending: Future[None] = Future()
            if not self._writer.finish(Job(self._end, True, thread=ending)):
                return
            self._writer.join()
            error = ending.exception()
            try:
                if error is None:
                    self._settle()
                    self._ahead.remove()
            finally:
                self._ahead.close()
                self._checkpoints.close()
                self._lock.release()
        if error is not None:
            raise error

    async def aclose(self) -> None:
        await asyncio.sleep(0)  # what was given to `write` before now gets into the queue before its end
        await asyncio.to_thread(self.close)

    def _end(self, transaction: Transaction) -> None:
        lost = transaction.finish_lost(self.chain)
        ends = transaction.unnamed_ends()
        transaction.append(CLOSED, None, {"recovered": False, "calls": len(lost), **({"ends": ends} if ends else {})})

    def _settle(self) -> None:
        """Only now that the end is signed need no later start look at this chain."""
        connection = connect(self.folder)
        try:
            connection.execute("UPDATE chains SET settled = 1 WHERE chain = ?", (self.chain,))
        except sqlite3.Error as exc:
            raise StoreError(f"the chain could not be settled: {exc}") from exc
        finally:
            connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _opening(connection: sqlite3.Connection, own: str, keys: Keys) -> Json:
    """Names the last record of all before it, and every other chain's end that nobody has named, so that no older
    chain can vanish without a trace."""
    previous = naming.last_of_all(connection)
    ends = naming.unnamed(connection, own, live=True)
    about = {"previous": previous, "host": socket.gethostname(), "pid": os.getpid(), "key": keys.id}
    return {**about, "ends": ends} if ends else about
