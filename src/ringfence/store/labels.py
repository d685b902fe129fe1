"""Labels by scope: an agent, one of its sessions, or a place where data lies. The scopes' names are the caller's."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from ringfence.core.record import dataclass

REFRESH_SECONDS = 60.0
"""How old a label's last use may be on record before it is written again."""
MAX_PLACES = 10_000
"""Of one server of one tenant: callers name them. Beyond that, labels stick to the whole server."""
_HELD = "SELECT label, first_at, last_at, call_id, tool FROM labels WHERE "
_MORE = "scope IN (SELECT other FROM label_links WHERE scope = ?)"


@dataclass(frozen=True, slots=True)
class Held:
    """A label that is held: since when, until when at least, and by which call first."""

    first_at: float
    last_at: float
    call_id: str
    tool: str


@dataclass(frozen=True, slots=True)
class Scopes:
    """Where labels are looked for."""

    plain: tuple[str, ...] = ()
    ageing: tuple[str, ...] = ()
    """Here they count only from `since` on."""
    below: tuple[str, ...] = ()
    """Beginnings of names."""
    since: float = 0.0


def held(connection: sqlite3.Connection, scopes: Scopes) -> dict[str, Held]:
    """Every label that any of these scopes has, by the first that had it."""
    rows: list[tuple[str, float, float, str, str]] = []
    for scope in scopes.plain:
        rows += connection.execute(f"{_HELD}scope = ? OR {_MORE}", (scope, scope))
    for scope in scopes.ageing:
        rows += connection.execute(f"{_HELD}scope = ? AND last_at >= ?", (scope, scopes.since))
    for scope in scopes.below:
        rows += connection.execute(f"{_HELD}scope >= ? AND scope < ?", (scope, f"{scope}\U0010ffff"))
    found: dict[str, Held] = {}
    for label, first, last, call_id, tool in sorted(rows, key=lambda row: row[1], reverse=True):
        latest = max(last, found[label].last_at) if label in found else last
        found[label] = Held(first, latest, call_id, tool)
    return found


def add(
    connection: sqlite3.Connection, scopes: Iterable[str], labels: Sequence[str], by: tuple[str, str], now: float
) -> None:
    """Let scopes, and those that are linked to them, hold labels from now on. `by`: call id and tool."""
    every = [*scopes]
    for scope in tuple(every):
        every += [other for (other,) in connection.execute("SELECT other FROM label_links WHERE scope = ?", (scope,))]
    connection.executemany(
        "INSERT INTO labels (scope, label, first_at, last_at, call_id, tool) VALUES (?1, ?2, ?3, ?3, ?4, ?5)"
        " ON CONFLICT DO UPDATE SET last_at = max(last_at, excluded.last_at)",
        [(scope, label, now, *by) for scope in dict.fromkeys(every) for label in labels],
    )


def link(connection: sqlite3.Connection, scope: str, others: Iterable[str]) -> None:
    """What `scope` gets, the others get, and what they have, it has."""
    rows = [(scope, other) for other in others]
    connection.executemany("INSERT OR IGNORE INTO label_links (scope, other) VALUES (?, ?)", rows)


def link_like(connection: sqlite3.Connection, scope: str, like: str) -> None:
    """Link `scope` to what another is linked to."""
    copied = "INSERT OR IGNORE INTO label_links (scope, other) SELECT ?, other FROM label_links WHERE scope = ?"
    connection.execute(copied, (scope, like))


def has_room(connection: sqlite3.Connection, server: str, place: str) -> bool:
    """Whether labels can stick to this place of a server by itself."""
    if connection.execute("SELECT 1 FROM labels WHERE scope = ? LIMIT 1", (place,)).fetchone() is not None:
        return True
    counted = "SELECT count(*) FROM (SELECT 1 FROM labels WHERE scope >= ? AND scope < ? LIMIT ?)"
    (many,) = connection.execute(counted, (server, f"{server}\U0010ffff", MAX_PLACES)).fetchone()
    return bool(many < MAX_PLACES)


def forget(connection: sqlite3.Connection, beginning: str, before: float) -> None:
    """Forget scopes whose names begin so, and which nothing has used since."""
    connection.execute(
        "DELETE FROM labels WHERE scope >= ? AND scope < ? AND last_at < ?",
        (beginning, f"{beginning}\U0010ffff", before),
    )
