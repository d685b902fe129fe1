"""The chain of a process that starts: a new one, or one that an ended process left.

A chain has files of its own, and whoever verifies reads them all. So once enough have ended, the next process takes one
of them up where it was closed, and a thousand short processes leave no more chains than a few long ones.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from ringfence.audit.chain import CLOSED, Head, is_chain_name
from ringfence.audit.keys import Keys
from ringfence.errors import StoreError
from ringfence.store.chainfile import ChainLock, CheckpointFile, checkpoint_path

MOST_ENDED = 8
"""Chains that may stand ended before one of them is taken up again."""
_TRIES = 4
_LAST = "SELECT seq, hash, kind FROM records WHERE chain = ? ORDER BY seq DESC LIMIT 1"


@dataclass(frozen=True, slots=True)
class Opened:
    """A chain that is ours to write, and its end so far."""

    lock: ChainLock
    checkpoints: CheckpointFile
    head: Head

    def take(self, connection: sqlite3.Connection) -> None:
        """Say, in the transaction that writes its next record, that the chain is in use. Raises StoreError."""
        if self.head.seq == 0:
            connection.execute("INSERT INTO chains (chain) VALUES (?)", (self.head.chain,))
            return
        taken = connection.execute(
            "UPDATE chains SET settled = 0, named = ifnull(named, ?) WHERE chain = ? AND settled = 1",
            (self.head.seq, self.head.chain),
        )
        if taken.rowcount != 1 or connection.execute(_LAST, (self.head.chain,)).fetchone()[1] != self.head.hash:
            raise StoreError(f"chain {self.head.chain} was changed by somebody else while it was taken up")

    def close(self) -> None:
        self.checkpoints.close()
        self.lock.release()


def begun(folder: Path, keys: Keys) -> Opened:
    """A new chain. Raises OSError, StoreError."""
    chain = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(5)}"
    # The lock first, then a signed word that the chain exists, and only then the chain itself: whoever
    # sees the chain finds it in use, and no chain is ever without its checkpoint.
    lock = ChainLock.take(folder, chain)
    if lock is None:
        raise StoreError(f"chain {chain} is in use")
    try:
        return Opened(lock, CheckpointFile.create(folder, Head(chain), keys), Head(chain))
    except BaseException:
        lock.release()
        raise


def continued(connection: sqlite3.Connection, folder: Path, keys: Keys) -> Opened | None:
    """A chain that was closed in order, where many were. Raises OSError, StoreError."""
    try:
        rows = connection.execute(
            "SELECT chain FROM chains WHERE settled = 1 ORDER BY chain DESC LIMIT ?", (MOST_ENDED,)
        ).fetchall()
    except sqlite3.Error as exc:
        raise StoreError(f"the chains could not be read: {exc}") from exc
    if len(rows) < MOST_ENDED:
        return None
    for (name,) in rows[:_TRIES]:
        found = _taken(connection, folder, name, keys) if is_chain_name(name) else None
        if found is not None:
            return found
    return None


def _taken(connection: sqlite3.Connection, folder: Path, name: str, keys: Keys) -> Opened | None:
    """None where somebody has it, or it does not end as its checkpoint says: that is evidence, and left alone."""
    if not checkpoint_path(folder, name).exists():
        return None
    lock = ChainLock.take(folder, name)
    if lock is None:
        return None
    checkpoints = None
    try:
        checkpoints = CheckpointFile(folder, name, keys)
        held = checkpoints.read().newest
        row = connection.execute(_LAST, (name,)).fetchone()
        settled = connection.execute("SELECT settled FROM chains WHERE chain = ?", (name,)).fetchone() == (1,)
        if settled and held is not None and row == (held.seq, held.head, CLOSED):
            return Opened(lock, checkpoints, Head(name, held.seq, held.head))
    except BaseException:
        _release(lock, checkpoints)
        raise
    _release(lock, checkpoints)
    return None


def _release(lock: ChainLock, checkpoints: CheckpointFile | None) -> None:
    if checkpoints is not None:
        checkpoints.close()
    lock.release()
