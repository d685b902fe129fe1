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
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from ringfence.audit.chain import CLOSED, OPENED
from ringfence.audit.signer import Signer, SigningKey
from ringfence.core.errors import StoreError
from ringfence.core.model import IssuedToken, Json, Receipt
from ringfence.store import clock, naming
from ringfence.store.chainfiles import (
    AheadFile,
    ChainLock,
    CheckpointFile,
    OpenChain,
    begin_chain,
    continue_chain,
    texts_to,
)
from ringfence.store.identity import identify
from ringfence.store.recovery import Recovered, Recovery, durable_transaction
from ringfence.store.rows import Approval, Part, last_time, recent_times
from ringfence.store.schema import DATABASE, connect, migrate, prepare_folder
from ringfence.store.transaction import Transaction
from ringfence.store.writer import WriteJob, Writer, nothing

if TYPE_CHECKING:
    from ringfence.audit.tokens import TokenProofs
    from ringfence.store.pruning import Prune
    from ringfence.store.reader import Reader
    from ringfence.store.sealing import Sealing

T = TypeVar("T")


AHEAD_SECONDS = 0.05
"""How long a call may run before the database says that it does."""
OWED_SECONDS = 5.0
"""How often it is tried to write the end of a call that could not be written."""
LOOK_SECONDS = 0.1
"""How often an answer from another process, or the end of its call, is looked for."""


class Store:
    """The state of this installation, open for this process."""

    def __init__(self, folder: Path, writer: Writer, lock: ChainLock, files: tuple[CheckpointFile, AheadFile]) -> None:
        """Use `open`."""
        self.folder = folder
        self._signer: Signer | None = None
        self._key_folder = folder
        self._sealing: Sealing | None = None
        self._proofs: TokenProofs | None = None
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
        """Set when something was written by a call of this process, for the program that reports it."""
        self.answers = Waiters(self.reader, _answered)
        """Those who wait for a person's answer."""
        self.ends = Waiters(self.reader, _settled)
        """Those who wait for the end of the call that has an idempotency key, by its scope and name."""

    @classmethod
    def open(cls, folder: Path, keys: SigningKey) -> Store:
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
    def _begin(cls, folder: Path, keys: SigningKey, connection: sqlite3.Connection) -> Store:
        try:
            due = last_time(connection)
            forgotten = clock.forgotten(time.time(), recent_times(connection))
        except sqlite3.Error as exc:
            raise StoreError(f"the log could not be read: {exc}") from exc
        signer, named_now = identify(connection, folder, keys)
        recovery = Recovery(connection, folder, signer)
        recovered = recovery.sweep()
        opened: OpenChain | None = None
        try:
            opened = continue_chain(connection, folder, signer) or begin_chain(folder, signer)
            with durable_transaction(connection, opened.head, signer, due) as transaction:
                opened.take(connection)
                transaction.append(OPENED, None, _opening(connection, opened.head.chain, signer))
                if signer.state.older:
                    transaction.record_identity(again=named_now)
                transaction.mark_set_back()
                recovery.adopt(transaction)
                transaction.forget_before(forgotten)
                head = transaction.head
            opened.checkpoints.write(head, texts_to(connection, head), synced=True)
            ahead = AheadFile(folder, head.chain)
            writer = Writer(folder, connection, head, opened.checkpoints, ahead)
        except BaseException as exc:
            if opened is not None:
                opened.close()
            if isinstance(exc, OSError):
                raise StoreError(f"a chain could not be opened in {folder}: {exc.strerror or exc}") from exc
            raise
        store = cls(folder, writer, opened.lock, (opened.checkpoints, ahead))
        store.chain = head.chain
        store.recovered = recovered
        store._signer = signer
        store._key_folder = keys.folder
        writer.start()
        return store

    # ── Writing ──

    async def begin(
        self, call_id: str, body: Json, salt: bytes, *, alone: bool, on_commit: Callable[[Receipt], None] | None = None
    ) -> Receipt:
        """Record the begin of a call that has no effect which outlives us. `on_commit` is as for `write`.

        If the call is the only one (`alone`), the record is written to a file ahead of the database, which gets it with
        the call's end or after a moment. Raises StoreError.
        """
        if alone and (receipt := self._writer.note("started", call_id, body, salt)) is not None:
            now = time.monotonic()
            if now > self._catching_up_at:
                self._catching_up_at = now + AHEAD_SECONDS
                asyncio.get_running_loop().call_later(AHEAD_SECONDS, self._catch_up)
            return receipt
        work: Callable[[Transaction], Receipt] = lambda tx: tx.append("started", call_id, body, salt=salt)  # noqa: E731
        return await self.write(work, alone=alone, covered=False, on_commit=on_commit)

    def _catch_up(self) -> None:
        """A reader of the database is to find calls that take their time."""
        self._catching_up_at = 0.0
        if self._writer.is_ahead:
            self._submit(WriteJob(nothing, False, covered=False))

    async def write(
        self,
        work: Callable[[Transaction], T],
        *,
        durable: bool = False,
        alone: bool = False,
        covered: bool = True,
        on_commit: Callable[[T], None] | None = None,
    ) -> T:
        """Do `work` in the writer's thread and return its result once it is committed.

        `durable` waits for the disk, too. Without `covered` the caller does not wait for a signed checkpoint of the
        record: the next one covers it. If the caller is `alone` and need not wait for the disk, the work is done on its
        own thread, unless another writes just now: two changes of thread cost as much as the work. Cancelling abandons
        the result, not the work. A caller with `on_commit`, which gets the result, is cancelled only when the work is
        over, so that nothing it writes next comes before it. Raises StoreError where nothing was committed, or what
        `work` raised.
        """
        if alone and not durable and self._writer.perform(job := WriteJob(work, durable, covered)):
            if job.error is not None:
                raise job.error
            self.written.set()
            if on_commit is not None:
                on_commit(job.result)
            return job.result  # type: ignore[no-any-return]
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        # Not at once: the writer would wake while this thread still holds the interpreter's lock, and the two would
        # fight over it. By its next turn the loop has little left to do but wait.
        job = WriteJob(work, durable, covered, loop, task=answer)
        loop.call_soon(self._submit, job)
        try:
            result = await answer
        except asyncio.CancelledError:
            if on_commit is not None and await job.settled():
                on_commit(job.result)
            raise
        self.written.set()
        if on_commit is not None:
            on_commit(result)
        return result

    def owe(self, call_id: str) -> None:
        """Close a call whose *finished* could not be written, with the next thing that can be: on record it would run
        for ever, and have its idempotency key. Until something can be, that is tried again and again."""
        self._writer.owe(call_id)
        asyncio.get_running_loop().call_later(OWED_SECONDS, self._pay)

    def _pay(self) -> None:
        if self._writer.owes:
            self._submit(WriteJob(nothing, False))
            asyncio.get_running_loop().call_later(OWED_SECONDS, self._pay)

    def _submit(self, job: WriteJob) -> None:
        """Outside of the loop a refusal by the queue would be lost; the waiting caller hears of it."""
        try:
            self._writer.submit(job)
        except StoreError as exc:
            job.error = exc
            job.resolve()

    def write_sync(self, work: Callable[[Transaction], T], *, durable: bool = True) -> T:
        """The same from a thread without an event loop."""
        waiting: Future[T] = Future()
        self._writer.submit(WriteJob(work, durable, thread=waiting))
        return waiting.result()

    @property
    def waiting(self) -> int:
        """How many writes wait to be committed."""
        return self._writer.waiting

    @property
    def records(self) -> int:
        """How many records the chain of this process has."""
        return self._writer.records

    def prune(self, before: float, by: str) -> Prune:
        """Remove what is older than `before` from the beginning of every chain, as far as it is not needed.

        Waits, so not to be called on an event loop. Raises StoreError, Conflict where another process prunes.
        """
        assert self._signer is not None
        from ringfence.store.pruning import Pruning  # noqa: PLC0415 - seldom done

        return Pruning(self.folder, self._signer, self.write_sync).run(before, by)

    @property
    def has_left_over(self) -> bool:
        """Whether what this process has erased may still stand in the files of the database, since another program
        reads an older state of it. Once that has ended, the next write, or erasure, removes it."""
        return self._writer.has_left_over

    # ── Reading ──

    def reader(self) -> Reader:
        """This thread's reader."""
        reader: Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            from ringfence.store.reader import Reader  # noqa: PLC0415 - a run that asks nobody reads nothing

            reader = self._local.reader = Reader(self.folder, self._key_folder)
            self._readers.add(reader)
        return reader

    def seal(self, call_id: str, part: Part, body: bytes) -> bytes:
        """A payload as it is to be kept, readable only with our key. From any thread. Raises StoreError."""
        return self.sealing().seal(call_id, part, body)

    def sealing(self) -> Sealing:
        """Our key for what others keep for us, or can see. From any thread. Raises StoreError."""
        from ringfence.store.sealing import Sealing  # noqa: PLC0415 - few contracts keep anything in full

        if self._sealing is None:
            self._sealing = Sealing.at(self._key_folder, make=True)
        return self._sealing

    def token(self, identity: str) -> tuple[IssuedToken | None, float]:
        """A bearer token by its id, as far as the log proves it, and what the time must be at least."""
        if self._proofs is None:
            assert self._signer is not None
            from ringfence.audit.tokens import TokenProofs  # noqa: PLC0415 - a run that serves nobody has no tokens

            self._proofs = TokenProofs(self._signer.public, self._signer.state)
        return self.reader().token(identity, self._proofs)

    # ── Closing ──

    def close(self) -> None:
        """Finish what is queued, end the chain, let go of everything. Raises StoreError where the end failed."""
        with self._closing:
            # Before the writer: the last to let go moves the log into the database, and a reader cannot.
            for reader in list(self._readers):
                reader.close()
            ending: Future[None] = Future()
            if not self._writer.finish(WriteJob(self._end, True, thread=ending)):
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
                if self._signer is not None:
                    self._signer.keys.close()
        if error is not None:
            raise error

    async def aclose(self) -> None:
        await asyncio.sleep(0)  # what was given to `write` before now gets into the queue before its end
        await asyncio.to_thread(self.close)

    def _end(self, transaction: Transaction) -> None:
        lost = transaction.finish_lost(self.chain, transaction.running())
        ends = transaction.unnamed_ends()
        transaction.append(CLOSED, None, {"recovered": False, "calls": len(lost), **({"ends": ends} if ends else {})})

    def _settle(self) -> None:
        """Mark the chain as settled: now that its end is signed, no later start need look at it."""
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


def _opening(connection: sqlite3.Connection, own: str, signer: Signer) -> Json:
    """Says which state this is, and names the last record of all before it, and every other chain's end that no record
    has named, so that no older chain can vanish without a trace."""
    previous = naming.last_of_all(connection)
    ends = naming.unnamed(connection, own, live=True)
    about = {"previous": previous, "host": socket.gethostname(), "pid": os.getpid(), "key": signer.keys.id}
    about["state"] = signer.state.id
    return {**about, "ends": ends} if ends else about


# ── Waking those who wait for something in the state to change ────────────────────────────────────
#
# One cheap look serves all of them. Another process may make the change: a person's answer, the end of a call. SQLite
# tells at once whether another connection wrote; only then is it asked, once, for whom the wait is over. What people
# were shown and what calls returned, which may be large, is not read for that.


class Waiters(Generic[T]):
    """The waiters of one event loop. While there are none, nothing is done."""

    def __init__(
        self, reader: Callable[[], Reader], over: Callable[[Reader, Collection[T]], Callable[[T], bool]]
    ) -> None:
        """`over` looks once, and then says of each that is waited for whether the wait is over."""
        self._reader = reader
        self._over = over
        self._waiting: dict[asyncio.Event, T] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.TimerHandle | None = None
        self._version: int | None = None

    @contextmanager
    def wait_for(self, awaited: T) -> Iterator[asyncio.Event]:
        """Set once the wait for it is over. How long to wait is for others to say. Whoever clears it waits for the
        next change."""
        self._loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        self._waiting[changed] = awaited
        try:
            self._look_again()
            yield changed
        finally:
            del self._waiting[changed]
            if not self._waiting and self._next is not None:
                self._next.cancel()

    def wake(self) -> None:
        """Look now, from any thread: something was changed in this process."""
        loop = self._loop
        if loop is not None and self._waiting and not loop.is_closed():
            loop.call_soon_threadsafe(self._look_again)

    def _look_again(self) -> None:
        """Look again at once, whichever connection wrote."""
        self._version = None
        self._look()

    def _look(self) -> None:
        if self._next is not None:
            self._next.cancel()
        if not self._waiting or self._loop is None:
            return
        self._next = self._loop.call_later(LOOK_SECONDS, self._look)
        try:
            version = self._reader().version()
            if version == self._version:
                return
            over = self._over(self._reader(), self._waiting.values())
            self._version = version
        except StoreError:
            return  # the caller that waits has a limit, and then hears what is wrong
        for changed, awaited in self._waiting.items():
            if over(awaited):
                changed.set()


def _answered(reader: Reader, questions: Collection[Approval]) -> Callable[[Approval], bool]:
    """That a question may have expired is for others to see."""
    open_ = reader.unanswered(min(question.asked_at for question in questions))
    return lambda question: question.id not in open_


def _settled(reader: Reader, keys: Collection[tuple[str, str]]) -> Callable[[tuple[str, str]], bool]:
    held = reader.held_keys(keys)
    return lambda key: key not in held
