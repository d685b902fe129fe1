"""Naming the ends of other chains, so that none can be removed, or cut back with an old copy of its checkpoint, unseen.

A process that starts names where every other chain ends, as far as no record has named that yet. One that runs names
those that ended meanwhile, when it writes anyway: at most every few seconds, and those that are still written to at
most every few minutes. One that ends names in its last record what has ended by then. So each end is named once, by a
chain that goes on after it. A verifier looks for every record that is named.

    chain A   opened ─ … ─ closed
                              ▲
    chain B   opened ─ … ─ ends ─ …
"""

from __future__ import annotations

import sqlite3
import time

from ringfence.audit.chain import CLOSED, ENDS, OPENED, is_chain_name, named_by
from ringfence.core import canonical
from ringfence.core.model import Json

MAX_NAMES = 64
"""Ends that one record names; the next names more."""
ENDED_SECONDS = 5.0
"""How often a process that runs names chains that ended."""
LIVE_SECONDS = 600.0
"""How often it names how far the others are that are still written to."""
_LAST = "SELECT seq, hash FROM records WHERE chain = ? ORDER BY seq DESC LIMIT 1"
_UNNAMED = "SELECT chain, settled, named FROM chains WHERE named IS NOT NULL AND settled >= ? AND chain <> ?"


def last_of_all(connection: sqlite3.Connection) -> Json | None:
    """The last record of all chains, for the opening record that names it. It counts as named from then on."""
    row = connection.execute("SELECT chain, seq, hash FROM records ORDER BY id DESC LIMIT 1").fetchone()
    if row is None:
        return None
    chain = connection.execute("SELECT settled FROM chains WHERE chain = ? AND named IS NOT NULL", row[:1]).fetchone()
    if chain is not None and connection.execute(_LAST, row[:1]).fetchone() == row[1:]:
        _mark(connection, row[0], row[1], ended=bool(chain[0]))
    return dict(zip(("chain", "seq", "hash"), row, strict=True))


def unnamed(connection: sqlite3.Connection, own: str, *, live: bool) -> list[Json]:
    """Where other chains than our own end, as far as no record has named that: for the record that does so now.

    Without `live` only those that have ended. In the transaction that writes that record.
    """
    ends: list[Json] = []
    for name, settled, named in connection.execute(_UNNAMED, (0 if live else 1, own)).fetchall():
        if len(ends) == MAX_NAMES:
            break
        row = connection.execute(_LAST, (name,)).fetchone() if is_chain_name(name) else None
        # We never leave a chain without records, or columns of other types: another program did.
        if row is None or not isinstance(row[0], int) or not isinstance(row[1], str) or not isinstance(named, int):
            continue
        if row[0] > named:
            ends.append({"chain": name, "seq": row[0], "hash": row[1]})
        if row[0] > named or settled:
            _mark(connection, name, row[0], ended=bool(settled))
    return ends


def _mark(connection: sqlite3.Connection, name: str, seq: int, *, ended: bool) -> None:
    connection.execute("UPDATE chains SET named = ? WHERE chain = ?", (None if ended else seq, name))


def forget_named(connection: sqlite3.Connection, part: tuple[str, int, int]) -> None:
    """Pruned records no longer name the ends of other chains, so these ends have to be named again."""
    rows = connection.execute(
        f"SELECT text FROM records WHERE chain = ? AND seq BETWEEN ? AND ? AND kind IN ('{OPENED}', '{CLOSED}',"  # noqa: S608
        f" '{ENDS}')",
        part,
    ).fetchall()
    for (text,) in rows:
        try:
            body = canonical.loads(text)
        except canonical.NotCanonical:
            continue
        for head in named_by(body) if isinstance(body, dict) else ():
            last = connection.execute(_LAST, (head.chain,)).fetchone()
            if last is not None and last[0] == head.seq and head.chain != part[0]:
                connection.execute("UPDATE chains SET named = 0 WHERE chain = ?", (head.chain,))


class Naming:
    """When a process that runs names the ends of other chains."""

    def __init__(self) -> None:
        self._ended = self._live = False
        """Whether others have written since chains that ended, and those that are in use, were last looked at."""
        self._ended_at = 0.0
        self._live_at = time.monotonic() + LIVE_SECONDS
        self._put: tuple[bool, bool] | None = None

    def others_wrote(self) -> None:
        self._ended = self._live = True

    def due(self, connection: sqlite3.Connection, own: str) -> list[Json]:
        """The ends to name now, in the transaction that does."""
        self._put = None
        if not self._ended and not self._live:
            return []
        now = time.monotonic()
        live = self._live and now >= self._live_at
        if not live and not (self._ended and now >= self._ended_at):
            return []
        ends = unnamed(connection, own, live=live)
        self._put = (live, len(ends) == MAX_NAMES)
        return ends

    def kept(self) -> None:
        """Note that the transaction was committed."""
        if self._put is None:
            return
        live, more = self._put
        self._put = None
        now = time.monotonic()
        self._ended = more
        self._ended_at = now + ENDED_SECONDS
        if live:
            self._live = more
            self._live_at = now + LIVE_SECONDS
