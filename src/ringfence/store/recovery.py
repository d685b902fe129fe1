"""Closing what a crash left open: every call that was started gets its one finished record, every chain its end.

Only chains whose lock is free are touched. A chain that does not fit its signed checkpoint is evidence and is left as
it stands; its calls are then closed in the chain of the process that found it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ringfence.audit.chain import (
    CLOSED,
    OPENED,
    ChainVerifier,
    Checkpoint,
    Findings,
    Head,
    Record,
    is_chain_name,
    misfiled,
)
from ringfence.audit.signer import Signer
from ringfence.core.errors import StoreError
from ringfence.core.record import dataclass
from ringfence.store import chainfiles
from ringfence.store.chainfiles import ChainLock, CheckpointFile, checkpoint_path
from ringfence.store.rows import RECORD, record_from
from ringfence.store.transaction import Transaction

T = TypeVar("T")

_OPEN = (
    "SELECT s.call_id, s.seq, s.hash FROM records AS s WHERE s.chain = ? AND s.kind = 'started' AND NOT EXISTS"
    " (SELECT 1 FROM records AS f WHERE f.call_id = s.call_id AND f.kind = 'finished')"
)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What one start found and closed."""

    chains: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    """One sentence per chain that was left as it stood."""


@contextlib.contextmanager
def durable_transaction(
    connection: sqlite3.Connection, head: Head, signer: Signer, due: float = 0.0
) -> Iterator[Transaction]:
    """One synced transaction outside the writer's thread, before that runs. Raises StoreError."""
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield Transaction(connection, head, signer, due)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as exc:
        raise StoreError(f"the record could not be written: {exc}") from exc


class Recovery:
    """One start's sweep over the chains of processes that are gone."""

    def __init__(self, connection: sqlite3.Connection, folder: Path, signer: Signer) -> None:
        self._connection = connection
        self._folder = folder
        self._signer = signer
        self._chains: list[str] = []
        self._calls: list[str] = []
        self._damaged: dict[str, str] = {}

    def sweep(self) -> Recovered:
        """Close every chain that can be closed. Raises StoreError."""
        for name in self._unsettled():
            if not is_chain_name(name):
                continue  # nothing of ours; `audit verify` reports it
            lock = self._lock(name)
            if lock is None:
                continue
            try:
                self._close(name)
            finally:
                lock.release()
        return Recovered(tuple(self._chains), tuple(self._calls), tuple(self._damaged.values()))

    def adopt(self, transaction: Transaction) -> None:
        """Record in our own chain what could not be recorded in theirs."""
        waiting = self._unsettled() if self._damaged else []
        for name, reason in self._damaged.items():
            if name not in waiting:
                continue  # another start has recorded it meanwhile
            transaction.append("chain_damaged", None, {"damaged": name, "message": reason})
            self._calls += transaction.finish_lost(name, self._suspected(name), damaged=True)
            self._settle(name)

    def _unsettled(self) -> list[str]:
        try:
            rows = self._connection.execute("SELECT chain FROM chains WHERE settled = 0 ORDER BY chain").fetchall()
        except sqlite3.Error as exc:
            raise StoreError(f"the chains could not be read: {exc}") from exc
        return [row[0] for row in rows]

    def _lock(self, name: str) -> ChainLock | None:
        return self._attempt(name, lambda: ChainLock.take(self._folder, name))

    @staticmethod
    def _attempt(name: str, step: Callable[[], T]) -> T:
        try:
            return step()
        except OSError as exc:
            raise StoreError(f"chain {name} could not be recovered: {exc.strerror or exc}") from exc

    def _close(self, name: str) -> None:
        if name not in self._unsettled():
            return  # another start closed it between our look and our lock
        if not checkpoint_path(self._folder, name).exists():
            self._damaged[name] = f"chain {name} has no checkpoint file"
            return
        file = self._attempt(name, lambda: CheckpointFile(self._folder, name, self._signer))
        try:
            self._close_with(name, file)
        finally:
            file.close()

    def _close_with(self, name: str, file: CheckpointFile) -> None:
        held = self._attempt(name, file.read).newest
        if held is None:
            self._damaged[name] = f"no checkpoint of chain {name} verifies with this key"
            return
        if not self._signer.state.may_have_signed(held.state):
            self._damaged[name] = f"the checkpoint of chain {name} was signed in another state"
            return
        known = self._signer.last(name)
        if known is not None and known.seq < held.seq:
            self._damaged[name] = f"the signer has not signed the checkpoint of chain {name}: it knows an earlier head"
            return
        if known is not None:  # it knows what it signed last, whatever became of the file
            held = replace(held, seq=known.seq, head=known.hash)
        closed: list[str] = []
        with durable_transaction(self._connection, Head(name), self._signer) as transaction:
            last, begun, fault = self._follow(name, held)
            if fault is not None:
                self._damaged[name] = fault
                return
            transaction.head = last.head if last is not None else Head(name)
            if last is not None and (last.kind != CLOSED or last.seq > held.seq):
                noted = self._attempt(name, lambda: chainfiles.read_ahead(self._folder, transaction.head))
                transaction.take_along(noted)
                transaction.head = noted[-1][0].head if noted else transaction.head
                found = transaction.head.seq
                begun |= {str(record.call_id): record.head for record, _ in noted}
                closed = transaction.finish_lost(name, begun)
                # What was not signed is signed now: a reader must be able to tell that it was only found.
                unsigned = {"unsigned": {"from": held.seq + 1, "to": found}} if found > held.seq else {}
                transaction.append(CLOSED, None, {"recovered": True, "calls": len(closed), **unsigned})
            head = transaction.head
        self._calls += closed
        since = chainfiles.texts_to(self._connection, head)
        self._attempt(name, lambda: file.write(head, since, synced=True))
        with durable_transaction(self._connection, head, self._signer):
            self._settle(name)
        chainfiles._remove_file(chainfiles.ahead_path(self._folder, name))
        self._chains.append(name)

    def _follow(self, name: str, held: Checkpoint) -> tuple[Record | None, dict[str, Head], str | None]:
        """The chain's last record and the calls that began in it and have not ended, by its own texts, once these lead
        to its checkpoint and on from there; else what is wrong."""
        begun: dict[str, Head] = {}
        found = Findings()
        since = self._oldest_open(name, held.seq)
        verifier = ChainVerifier(name, found, partial=since > 1)
        last: Record | None = None
        seen = held.seq == 0
        for row in self._connection.execute(f"{RECORD} WHERE chain = ? AND seq >= ? ORDER BY seq", (name, since)):
            record = record_from(row)
            if record.seq == held.seq:
                seen = True
                if record.hash != held.head:
                    text = f"record {held.seq} of chain {name} is not the one that its checkpoint was signed for"
                    return None, {}, text
            body = verifier.feed(record.text, record.hash)
            for field in () if body is None else misfiled(record, body):
                found.add(f"is filed under another {field} than its text has", name, record.seq)
            if found.faults:
                return None, {}, str(found.faults[0])
            if record.kind == "started":
                begun[str(record.call_id)] = record.head
            elif record.kind == "finished":
                begun.pop(str(record.call_id), None)
            last = record
        if held.seq and (last is None or last.seq < held.seq):
            return None, {}, f"chain {name} ends before record {held.seq}, where its checkpoint stands"
        if not seen:
            return None, {}, f"record {held.seq} of chain {name}, where its checkpoint stands, is missing"
        return last, begun, None

    def _oldest_open(self, name: str, signed: int) -> int:
        """Where to begin to read: at the first call that has not ended, if that began before the checkpoint.

        By the columns beside the texts: where these were changed, calls stay open in a chain that is closed, which
        `audit verify` finds.
        """
        opened = self._connection.execute(
            "SELECT seq FROM records WHERE chain = ? AND kind = ? ORDER BY seq DESC LIMIT 1", (name, OPENED)
        ).fetchone()
        row = self._connection.execute(f"{_OPEN} AND s.seq > ? ORDER BY s.seq LIMIT 1", (name, *(opened or (0,))))
        first = row.fetchone()
        return min(signed, first[1]) if first is not None and isinstance(first[1], int) else signed

    def _suspected(self, name: str) -> dict[str, Head]:
        """The calls that may run in a chain that is damaged: what its records say, and what the table says."""
        rows = self._connection.execute(f"{_OPEN} ORDER BY s.seq", (name,)).fetchall()
        begun = {str(call): Head(name, seq if isinstance(seq, int) else 0, str(digest)) for call, seq, digest in rows}
        for (call_id,) in self._connection.execute("SELECT call_id FROM running WHERE chain = ? ORDER BY seq", (name,)):
            begun.setdefault(str(call_id), Head(name))
        return begun

    def _settle(self, name: str) -> None:
        self._connection.execute("UPDATE chains SET settled = 1 WHERE chain = ?", (name,))
