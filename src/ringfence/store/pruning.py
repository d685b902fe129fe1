"""Removing the beginning of chains on purpose, so that the rest stays provable.

First what goes is put on record, then signed beside each chain's checkpoint, then removed in small steps, so that calls
go on meanwhile. A prune that was stopped in between left a log that verifies; the next one finishes it.

Of each chain a beginning goes, and never all of it. It ends before the first record that is still needed:

- a call that runs, or whose idempotency key is in force;
- a call that has any record which stays, in whatever chain: calls go whole;
- a question to people that has not expired, used or not: one that is gone could be put back, and used once more;
- a question whose answers a call that stays ran on;
- the making and the revocation of a token that has not expired.

What is signed for must have been there: a chain whose beginning does not verify is evidence, and stays as it stands.
What goes is followed to a head that was signed for, the first behind it: each prune keeps the checkpoint of its time
for those to come, so that none of them need read the whole log.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringfence.audit.approvals import ASKED
from ringfence.audit.chain import (
    MAX_PRUNER_NAME,
    ChainVerifier,
    Checkpoint,
    Findings,
    Head,
    Record,
    is_chain_name,
    misfiled,
)
from ringfence.audit.signer import Signer
from ringfence.audit.tokens import CREATED, REVOKED
from ringfence.core.errors import StoreError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.store import clock
from ringfence.store.chainfiles import ChainLock, CheckpointFile, checkpoint_path
from ringfence.store.history import forget_pruned
from ringfence.store.rows import RECORD, Conflict, recent_times, record_from
from ringfence.store.schema import connect
from ringfence.store.transaction import Transaction

log = logging.getLogger(__name__)

STEP = 200
"""Records in one commit: a call that ends meanwhile waits for no more."""
MAX_CHAINS = 10_000
"""In one prune: what it removes has to fit its own record."""
HEADS_APART = 1000
"""Records between two checkpoints that are kept for later prunes."""
MAX_HEADS = 1000
"""Of one chain that are kept; of more, every second goes."""
_LOCK = "prune"

Write = Callable[..., Any]
"""Does work in the writer's thread, and waits for it; `durable` says whether also for the disk."""

# What must stay whatever its age, as the calls that it belongs to.
_NEEDED = """
    SELECT call_id FROM running
    UNION SELECT call_id FROM keys WHERE state = 'started' OR at >= :forgotten
    UNION SELECT call_id FROM approvals WHERE expires_at > :now
    UNION SELECT id FROM tokens WHERE expires_at > :now
    UNION SELECT id FROM standing WHERE expires_at > :now
"""
# CROSS JOIN: in this order, so that no more is looked at than would go.
_STAYS = "SELECT 1 FROM records AS r LEFT JOIN limits AS l ON l.chain = r.chain WHERE r.seq > ifnull(l.seq, 0)"
_HELD = f"SELECT chain, min(seq) FROM records WHERE call_id IN ({_NEEDED}) GROUP BY chain"  # noqa: S608
_TORN = f"""
    SELECT a.chain, min(a.seq) FROM limits AS m CROSS JOIN records AS a ON a.chain = m.chain AND a.seq <= m.seq
    WHERE a.call_id IS NOT NULL AND EXISTS ({_STAYS} AND r.call_id = a.call_id) GROUP BY a.chain
"""  # noqa: S608
_USED = f"""
    SELECT a.chain, min(a.seq) FROM limits AS m CROSS JOIN records AS a ON a.chain = m.chain AND a.seq <= m.seq
    CROSS JOIN approvals AS p ON p.call_id = a.call_id
    WHERE p.consumed_by IS NOT NULL AND EXISTS ({_STAYS} AND r.call_id = p.consumed_by) GROUP BY a.chain
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Prune:
    """What one prune removed."""

    chains: int = 0
    records: int = 0


class Pruning:
    """One prune of a state folder, by a process that has its store open."""

    def __init__(self, folder: Path, signer: Signer, write: Write) -> None:
        self._folder = folder
        self._signer = signer
        self._write = write

    def run(self, before: float, by: str) -> Prune:
        """Remove what is older than `before`, as far as it is not needed. Raises StoreError."""
        try:
            lock = ChainLock.take(self._folder, _LOCK)
        except OSError as exc:
            raise StoreError(f"nothing can be pruned: {exc.strerror or exc}") from exc
        if lock is None:
            raise Conflict("another process prunes this log just now")
        try:
            with contextlib.closing(connect(self._folder)) as connection:
                left = self._finish(connection, stopped=True)
                gone: dict[str, int] = {}
                if ends := self._plan(connection, before):
                    self._put_on_record(ends, before, by)
                    self._sign(ends, before, by)
                    gone = self._finish(connection)
                self._keep_heads(connection)
            return Prune(len(left | gone), sum(left.values()) + sum(gone.values()))
        except sqlite3.Error as exc:
            raise StoreError(f"the log could not be pruned: {exc}") from exc
        except OSError as exc:
            raise StoreError(f"the log could not be pruned: {exc.strerror or exc}") from exc
        finally:
            lock.release()

    # ── What can go ──

    def _plan(self, connection: sqlite3.Connection, before: float) -> list[tuple[Head, int]]:
        """The last record that can go in each chain, and how many go."""
        connection.execute("CREATE TEMP TABLE limits (chain TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID")
        for name, settled in connection.execute("SELECT chain, settled FROM chains ORDER BY chain").fetchall():
            if is_chain_name(name) and (end := self._old(connection, name, bool(settled), before)):
                end = self._proven(connection, name, end, before)
                connection.execute("INSERT INTO limits VALUES (?, ?)", (name, end))
        connection.execute("DELETE FROM limits WHERE seq = 0")
        connection.execute(
            "DELETE FROM limits WHERE chain NOT IN (SELECT chain FROM limits ORDER BY chain LIMIT ?)", (MAX_CHAINS,)
        )
        now = time.time()
        moments = {"forgotten": clock.forgotten(now, recent_times(connection)), "now": now}
        _lower(connection, connection.execute(_HELD, moments).fetchall())
        while _lower(connection, [*connection.execute(_TORN).fetchall(), *connection.execute(_USED).fetchall()]):
            pass
        rows = connection.execute(
            "SELECT r.chain, r.seq, r.hash, r.seq - (SELECT min(seq) FROM records AS f WHERE f.chain = r.chain) + 1"
            " FROM limits AS l CROSS JOIN records AS r ON r.chain = l.chain AND r.seq = l.seq ORDER BY r.chain"
        ).fetchall()
        return [(Head(chain, seq, digest), count) for chain, seq, digest, count in rows]

    def _old(self, connection: sqlite3.Connection, name: str, settled: bool, before: float) -> int:
        """The last record of a chain that is old, with all before it; 0 where there is none."""
        place = "SELECT {} FROM records WHERE chain = ?"
        first, last = (connection.execute(place.format(end), (name,)).fetchone()[0] for end in ("min(seq)", "max(seq)"))
        if not isinstance(first, int) or not isinstance(last, int):
            return 0
        last -= 1
        if not settled:  # the process that closes it after a crash goes by its checkpoint
            held = self._held(name)
            last = min(last, 0 if held is None else held.seq - 1)
        low = first - 1
        high = last
        while low < high:
            middle = (low + high + 1) // 2
            (at,) = connection.execute(place.format("max(at)") + " AND seq = ?", (name, middle)).fetchone()
            low, high = (middle, high) if isinstance(at, int | float) and at < before else (low, middle - 1)
        # A clock that was set back may have left a newer one among them.
        text = place.format("min(seq)") + " AND seq <= ? AND at >= ?"
        newer = connection.execute(text, (name, low, before)).fetchone()[0]
        end = low if newer is None else newer - 1
        return int(end) if end >= first else 0

    def _proven(self, connection: sqlite3.Connection, name: str, end: int, before: float) -> int:
        """Up to where the texts themselves say what the columns do; 0 where they do not lead to what was signed.

        What stays is followed, too, up to the next head that was signed for: whoever edits a record chains those after
        it anew.
        """
        held = self._signed_after(connection, name, end)
        if held is None:
            log.error("chain %s has no checkpoint that verifies, so nothing of it is pruned", name)
            return 0
        found = Findings()
        verifier = ChainVerifier(name, found, pruned=self._pruned(name))
        verifier.signed = held.seq
        stays = end + 1
        now = time.time()
        for record in _first(connection, name, max(held.seq, end + 1)):
            body = verifier.feed(record.text, record.hash)
            for field in () if body is None else misfiled(record, body):
                found.add(f"is filed under another {field} than its text has", name, record.seq)
            if record.seq == held.seq and record.hash != held.head:
                found.add("is not the record that the checkpoint was signed for", name, record.seq)
            if found.faults or body is None:
                log.error("chain %s does not verify, so nothing of it is pruned: %s", name, found.faults[0])
                return 0
            old = body["at"] < before and not (body["kind"] in (ASKED, CREATED, REVOKED) and not _is_over(body, now))
            if not old and record.seq <= end:
                stays = min(stays, record.seq)
        if verifier.seq < held.seq or held.seq <= end:
            log.error("chain %s does not lead to its checkpoint, so nothing of it is pruned", name)
            return 0
        return stays - 1

    def _pruned(self, name: str) -> Head | None:
        if not is_chain_name(name) or not checkpoint_path(self._folder, name).exists():
            return None
        file = CheckpointFile(self._folder, name, self._signer)
        try:
            word = file.read_pruned()
        finally:
            file.close()
        return None if word is None else word.end

    def _signed_after(self, connection: sqlite3.Connection, name: str, end: int) -> Checkpoint | None:
        """The first checkpoint behind that record, of those that were kept, else the last one."""
        text = "SELECT line FROM heads WHERE chain = ? AND seq > ? ORDER BY seq LIMIT 1"
        for (line,) in connection.execute(text, (name, end)):
            kept = Checkpoint.verify(self._signer.public, line) if isinstance(line, bytes) else None
            if kept is not None and kept.chain == name and kept.seq > end and self._is_ours(kept):
                return kept
        held = self._held(name)
        return held if held is not None and self._is_ours(held) else None

    def _is_ours(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.period is None and self._signer.state.may_have_signed(checkpoint.state)

    def _keep_heads(self, connection: sqlite3.Connection) -> None:
        """What is signed now is where a later prune can stop reading."""
        for (name,) in connection.execute("SELECT chain FROM chains ORDER BY chain").fetchall():
            if not is_chain_name(name) or not checkpoint_path(self._folder, name).exists():
                continue
            file = CheckpointFile(self._folder, name, self._signer)
            try:
                line = file.newest_line()
            finally:
                file.close()
            head = Checkpoint.verify(self._signer.public, line)
            (last,) = connection.execute("SELECT max(seq) FROM heads WHERE chain = ?", (name,)).fetchone()
            if head is not None and self._is_ours(head) and (last is None or head.seq >= last + HEADS_APART):
                # Not by the writer: to remember this is no reason to put a changed clock on record.
                with contextlib.suppress(sqlite3.OperationalError):  # others write just now: the next prune does it
                    _keep_head(connection, head, line)

    def _held(self, name: str) -> Checkpoint | None:
        if not checkpoint_path(self._folder, name).exists():
            return None
        file = CheckpointFile(self._folder, name, self._signer)
        try:
            return file.read().newest
        finally:
            file.close()

    # ── Removing it ──

    def _put_on_record(self, ends: list[tuple[Head, int]], before: float, by: str) -> None:
        pruned = [{"chain": end.chain, "seq": end.seq, "hash": end.hash, "count": count} for end, count in ends]

        def work(tx: Transaction) -> None:
            tx.append("pruned", None, {"by": by, "before": before, "chains": pruned})
            for end, _ in ends:
                tx.begin_prune(end.chain, end.seq)

        self._write(work, durable=True)

    def _sign(self, ends: list[tuple[Head, int]], before: float, by: str) -> None:
        now = time.time()
        for end, count in ends:
            file = CheckpointFile(self._folder, end.chain, self._signer)
            try:
                file.write_pruned(self._signer.pruned(end, count, now, before, by[:MAX_PRUNER_NAME]))
            finally:
                file.close()

    def _finish(self, connection: sqlite3.Connection, *, stopped: bool = False) -> dict[str, int]:
        """Remove what is signed for as pruned, by this prune or by one that was stopped: how many, by chain. What of it
        stood in the index of calls goes there, too; of one that was stopped, nobody knows what that was.

        One that was stopped before all of it was signed removes nothing: a call in one chain may need the answers in
        another. The next begins anew.
        """
        gone: dict[str, int] = {}
        due = connection.execute("SELECT chain, seq FROM prunes ORDER BY chain").fetchall()
        if due and all(self._is_signed(name, seq) for name, seq in due):
            text = "SELECT id FROM records WHERE chain = ? AND seq <= ? AND kind = 'finished'"
            calls = [row[0] for name, seq in due for row in connection.execute(text, (name, seq))]
            gone = {name: self._remove(name, seq) for name, seq in due}
            forget_pruned(self._folder, connection, None if stopped else calls)
        if due:
            self._write(lambda tx: tx.end_prunes(), durable=True)
        return gone

    def _is_signed(self, name: str, seq: int) -> bool:
        signed = self._pruned(name)
        return signed is not None and signed.seq >= seq

    def _remove(self, name: str, seq: int) -> int:
        removed = 0
        while step := self._write(lambda tx: tx.remove_records(name, seq, STEP), durable=False):
            removed += step
        return removed


def _keep_head(connection: sqlite3.Connection, head: Checkpoint, line: bytes) -> None:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        gone = "DELETE FROM heads WHERE chain = ?1 AND seq < (SELECT min(seq) FROM records WHERE chain = ?1)"
        connection.execute(gone, (head.chain,))
        kept = connection.execute("SELECT seq FROM heads WHERE chain = ? ORDER BY seq", (head.chain,)).fetchall()
        if len(kept) >= MAX_HEADS:
            thinned = [(head.chain, seq) for (seq,) in kept[1::2]]
            connection.executemany("DELETE FROM heads WHERE chain = ? AND seq = ?", thinned)
        connection.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?)", (head.chain, head.seq, line))


def _first(connection: sqlite3.Connection, name: str, last: int) -> Iterator[Record]:
    """The records of a chain up to that one, page by page: nothing may keep others from moving the log."""
    page = f"{RECORD} WHERE chain = ? AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
    after = -1
    while rows := connection.execute(page, (name, after, last, STEP)).fetchall():
        yield from map(record_from, rows)
        after = rows[-1][2]


def _is_over(body: Json, now: float) -> bool:
    expires_at = body.get("expires_at")
    return not isinstance(expires_at, int | float) or now >= expires_at


def _lower(connection: sqlite3.Connection, needed: list[tuple[str, int]]) -> bool:
    """Let each chain end before a record that is needed. True where that changed anything."""
    changed = 0
    for name, seq in needed:
        text = "UPDATE limits SET seq = ? WHERE chain = ? AND seq >= ?"
        changed += connection.execute(text, (seq - 1, name, seq)).rowcount
    connection.execute("DELETE FROM limits WHERE seq < (SELECT min(seq) FROM records WHERE chain = limits.chain)")
    return changed > 0
