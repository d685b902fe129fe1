"""Which calls of the index a person looks for, as queries that look at few others.

What stands somewhere in a call's texts is found by its characters in threes: of each three SQLite keeps which calls
have it, the newest first. What has all of them is then looked at, call by call, until a page is full.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from ringfence.core.record import dataclass

TEXTS = """
CREATE VIRTUAL TABLE texts USING fts5(
    words, content = 'calls', content_rowid = 'id', tokenize = 'trigram case_sensitive 1', detail = none
);
CREATE TRIGGER call_kept AFTER INSERT ON calls BEGIN
    INSERT INTO texts (rowid, words) VALUES (new.id, new.words);
END;
CREATE TRIGGER call_gone AFTER DELETE ON calls BEGIN
    INSERT INTO texts (texts, rowid, words) VALUES ('delete', old.id, old.words);
END;
"""
"""Which calls have which three characters in a row, the newest first. SQLite before 3.34 cannot make it; there, texts
are looked through one by one."""
_GRAM = 3
_CALL = (
    "SELECT id, call_id, at, tenant, agent, person, tool, server, kind, status, reason, wall_ms, cpu_ms, memory,"
    " effect FROM "
)
_OF_AGENTS = "kind NOT IN ('server', 'listing')"


@dataclass(frozen=True, slots=True)
class CallSearch:
    """Which calls. What is None matches all."""

    tenant: str | None = None
    tool: str | None = None
    agent: str | None = None
    status: str | None = None
    since: float | None = None
    until: float | None = None
    effect: str | None = None
    words: str = ""
    """Each must stand somewhere in what was recorded."""
    system: bool = False
    """Also what the gateway itself did, such as the start of a server."""
    before: int | None = None
    """Older than this one."""
    after: int | None = None
    """Newer than this one, the oldest of them."""


def can_have_texts(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("CREATE VIRTUAL TABLE temp.tried USING fts5(t, tokenize = 'trigram', detail = none)")
    except sqlite3.OperationalError:
        return False
    connection.execute("DROP TABLE temp.tried")
    return True


def has_texts(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone() is not None


def listing(search: CallSearch, before: int | None, by_texts: bool) -> tuple[str, list[Any]]:
    """The query that lists what is looked for, `by_texts` where the index has them; its last value is how many."""
    where, values = conditions(search)
    number, source = "id", "calls"
    if by_texts and (pattern := _pattern(search)):
        # In this order: what has these texts, the newest first, and then the calls of as many as are shown.
        number, source = "texts.rowid", "texts CROSS JOIN calls ON calls.id = texts.rowid"
        where.append("texts MATCH ?")
        values.append(pattern)
    if search.after is not None:
        where.append(f"{number} > ?")
        values.append(search.after)
    elif before is not None:
        where.append(f"{number} < ?")
        values.append(before)
    order = "ASC" if search.after is not None else "DESC"
    return f"{_CALL}{source}{matching(where)} ORDER BY {number} {order} LIMIT ?", values


def _pattern(search: CallSearch) -> str:
    """What must stand in the texts of a call for it to be looked at: all that is asked for, in threes. Empty where no
    word is long enough."""
    words = [each for each in _words(search.words) if len(each) >= _GRAM]
    if words:
        words += [folded(each) for each in (search.tenant, search.agent, search.tool, search.status) if each]
    threes = dict.fromkeys(each[at : at + _GRAM] for each in words for at in range(len(each) - _GRAM + 1))
    return " AND ".join('"' + three.replace('"', '""') + '"' for three in threes)


def _words(text: str) -> list[str]:
    return folded(text).split()


def folded(text: str) -> str:
    """As it stands in the index: a NUL would end it for SQLite."""
    return text.lower().replace("\0", " ")


def conditions(search: CallSearch) -> tuple[list[str], list[Any]]:
    exact = {name: getattr(search, name) for name in ("tenant", "tool", "agent", "status", "effect")}
    where = [f"{name} = ?" for name, value in exact.items() if value is not None]
    values: list[Any] = [value for value in exact.values() if value is not None]
    for condition, value in (("at >= ?", search.since), ("at < ?", search.until)):
        if value is not None:
            where.append(condition)
            values.append(value)
    if not search.system:
        where.append(_OF_AGENTS)
    for word in _words(search.words):
        where.append("instr(calls.words, ?) > 0")
        values.append(word)
    return where, values


def matching(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""
