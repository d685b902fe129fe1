"""What the tables hold, as plain data, and how each row is read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ringfence.audit.chain import Record
from ringfence.core import canonical
from ringfence.core.errors import StoreError
from ringfence.core.model import Definition, IssuedToken, Json
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass

if TYPE_CHECKING:
    from ringfence.audit.approvals import ProvenApproval

ApprovalState = Literal["pending", "approved", "denied", "expired", "consumed"]
KeyState = Literal["started", "done", "unknown"]
Part = Literal["arguments", "result", "run"]
"""`run`: what it takes to run it again."""
T = TypeVar("T")
_LATEST = 253_402_300_800.0
"""No calendar shows a later time."""
_LOOKED_AT = 1000
"""Records, for a leap of the time of day."""
_DEPTH = 4 * canonical.MAX_DEPTH
"""Rows wrap what came from outside, so they may be nested deeper than that may."""


class RowNotFound(StoreError):
    """There is nothing of that id."""


class Conflict(StoreError):
    """The row is not in a state in which this can be done."""


class Expired(Conflict):
    """Its time is over."""


class SentBefore(Conflict):
    """This very message came before."""


class Unproven(Conflict):
    """The tables say more of an approval than the signed log does."""

    def __init__(self, identity: str, problem: str) -> None:
        super().__init__(f"approval {identity} cannot be used: {problem}")
        self.identity = identity


@dataclass(frozen=True, slots=True)
class ApprovalQuestion:
    """What is asked of people, before it is stored."""

    digest: str
    call_id: str
    principal: str
    tool: str
    rule: str
    asked_at: float
    expires_at: float
    summary: Json = field(default_factory=dict)
    """What a person is shown. It may hold values, so it never enters the log."""
    person: str | None = None
    """Whom the agent acts for."""
    roles: tuple[str, ...] = ()
    self_approval: bool = False
    people: int = 1
    terms: Json = field(default_factory=dict)
    """What else an answer is given under, by the names of `TERMS`."""
    shape: Json | None = None
    """What a call must have to be like this one; None where no answer may stand for others. It holds digests of
    values, so it never enters the log."""
    text: str = field(init=False, repr=False, compare=False)
    """The summary for its column; made with the question, so that no transaction is held up for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", pack(self.summary))


@dataclass(frozen=True, slots=True)
class Answered:
    """One person's answer."""

    person: str
    approve: bool
    at: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Approval:
    """A question to people and how it stands."""

    id: str
    digest: str
    call_id: str
    principal: str
    person: str | None
    tool: str
    summary: Json
    rule: str
    roles: tuple[str, ...]
    self_approval: bool
    people: int
    state: ApprovalState
    asked_at: float
    expires_at: float
    answers: tuple[Answered, ...] = ()
    consumed_by: str | None = None
    terms: Json = field(default_factory=dict)
    shape: Json | None = None
    proof: ProvenApproval | None = None
    """What the log proves of it, where that was looked at."""


@dataclass(frozen=True, slots=True)
class Outline:
    """An approval as a list shows it."""

    approval: Approval
    beginning: str | None = None
    """Of what was left out of it; None: it is whole."""
    size: int = 0
    """Characters of all that people are shown."""


SETTLED = "outcome_settled"
"""The kind of records of what people say of calls whose effect was unknown."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a person approves beforehand, from one question that they were asked: calls of this shape."""

    shape: Json
    """That of the question, with what they left open; and, as `shown`, what they were shown of it."""
    times: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class StandingApproval:
    """An approval that stands: for so many calls of one shape, until a time."""

    id: str
    digest: str
    """Of all that a call must have but its arguments."""
    call_id: str
    """The call that was asked about when it was made."""
    principal: str
    tool: str
    rule: str
    person: str
    shape: Json
    times: int
    used: int
    made_at: float
    expires_at: float
    revoked_at: float | None

    def is_good(self, now: float) -> bool:
        """By the tables alone."""
        return self.revoked_at is None and self.used < self.times and now < self.expires_at


FIRST_USE = "first_use"
"""In the place of the person who accepted a definition: nobody did."""


@dataclass(frozen=True, slots=True)
class PinRow:
    """An accepted definition, and who relies on it."""

    definition: Definition
    by: str
    at: float
    bound: int | None
    """The place in the order in which tools came to capabilities that name no server; None: it came to none."""

    @property
    def by_person(self) -> bool:
        return self.by != FIRST_USE


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An idempotency key and what became of the call that took it."""

    scope: str
    key: str
    request_digest: str
    call_id: str
    state: KeyState
    outcome: Json | None
    at: float


@dataclass(frozen=True, slots=True)
class Payload:
    """What is kept of one payload, and the salt of its digest."""

    salt: bytes
    body: bytes


def pack(value: Any) -> str:
    """JSON for a column. Raises StoreError for what could not be read back."""
    try:
        text = canonical.dumps(value).decode()
        if text.count("[") + text.count("{") > _DEPTH:
            canonical.loads(text, max_depth=_DEPTH)
    except (ValueError, TypeError, RecursionError) as exc:
        raise StoreError(f"what should be stored is not JSON: {exc}") from None
    return text


def unpack(text: str) -> Any:
    try:
        return canonical.loads(text, max_depth=_DEPTH)
    except canonical.NotCanonical as exc:
        raise StoreError(f"the database holds a row that cannot be read: {exc}") from None


APPROVAL = (
    "SELECT id, digest, call_id, principal, person, tool, summary, rule, roles, self_approval, people, state,"
    " asked_at, expires_at, consumed_by, terms, shape FROM approvals"
)
BRIEF = APPROVAL.replace(" summary,", " '{}',")
"""Without what people are shown, which may be large."""
STANDING = (
    "SELECT id, digest, call_id, principal, tool, rule, person, shape, times, used, made_at, expires_at, revoked_at"
    " FROM standing"
)
KEY = "SELECT scope, key, request_digest, call_id, state, outcome, at FROM keys WHERE scope = ? AND key = ?"
PIN = "SELECT server, name, digest, body, kind, by, at, bound FROM pins"
TOKEN = "SELECT id, digest, kind, name, tenant, made_by, made_at, expires_at, revoked_at FROM tokens"  # noqa: S105 - a query
RECORD = "SELECT id, chain, seq, at, kind, call_id, text, hash FROM records"


def approval_from(connection: sqlite3.Connection, row: tuple[Any, ...], now: float) -> Approval:
    """An APPROVAL row with its answers; what can no longer be used at `now` reads as expired."""
    asked = connection.execute(
        "SELECT person, approve, at, reason FROM answers WHERE approval_id = ? ORDER BY at, person", (row[0],)
    )
    answers = asked.fetchall()
    _check_approval(row, answers)
    state: ApprovalState = row[11]
    if state in ("pending", "approved") and now >= row[13]:
        state = "expired"
    return Approval(
        id=row[0],
        digest=row[1],
        call_id=row[2],
        principal=row[3],
        person=row[4],
        tool=row[5],
        summary=_unpacked(row[6], dict),
        rule=row[7],
        roles=tuple(map(str, _unpacked(row[8], list))),
        self_approval=bool(row[9]),
        people=row[10],
        state=state,
        asked_at=row[12],
        expires_at=row[13],
        answers=tuple(Answered(person, bool(approve), at, reason) for person, approve, at, reason in answers),
        consumed_by=row[14],
        terms=_unpacked(row[15], dict),
        shape=None if row[16] is None else _unpacked(row[16], dict),
    )


def _check_approval(row: tuple[Any, ...], answers: list[Any]) -> None:
    """A changed file may hold any type in any column. Raises StoreError."""
    texts = (*row[:4], *row[5:9], row[11], row[15], *(each[0] for each in answers))
    times = (*row[12:14], *(each[2] for each in answers))
    if not (
        all(isinstance(text, str) for text in texts)
        and all(
            text is None or isinstance(text, str) for text in (row[4], row[14], row[16], *(each[3] for each in answers))
        )
        and all(isinstance(number, int) for number in (*row[9:11], *(each[1] for each in answers)))
        and all(isinstance(time, int | float) and 0 <= time < _LATEST for time in times)
        and row[11] in get_args(ApprovalState)
    ):
        raise StoreError(
            f"the database holds an approval that cannot be read ({quoted(row[0], 40)}): another program changed it;"
            " run: ringfence audit verify"
        )


def _unpacked(text: str, kind: type[T]) -> T:
    value = unpack(text)
    if not isinstance(value, kind):
        raise StoreError("the database holds a row that cannot be read: another program changed it")
    return value


def approval_by_id(
    connection: sqlite3.Connection, identity: str, now: float, *, brief: bool = False
) -> Approval | None:
    row = connection.execute(f"{BRIEF if brief else APPROVAL} WHERE id = ?", (identity,)).fetchone()
    return None if row is None else approval_from(connection, row, now)


def standing_from(row: tuple[Any, ...]) -> StandingApproval:
    """A STANDING row. A changed file may hold any type in any column. Raises StoreError."""
    numbers = (row[8], row[9], row[10], row[11], *([] if row[12] is None else [row[12]]))
    if not (all(isinstance(text, str) for text in row[:8]) and all(isinstance(n, int | float) for n in numbers)):
        raise StoreError("the database holds a standing approval that cannot be read: another program changed it")
    return StandingApproval(*(*row[:7], _unpacked(row[7], dict), *row[8:]))


def last_time(connection: sqlite3.Connection) -> float:
    """The time in the newest record; a tampered file may hold any type there."""
    row = connection.execute("SELECT at FROM records ORDER BY id DESC LIMIT 1").fetchone()
    return float(row[0]) if row is not None and isinstance(row[0], int | float) else 0.0


def recent_times(connection: sqlite3.Connection) -> list[float]:
    """The times in the last records, newest first, to look for a leap of the time of day in them."""
    rows = connection.execute("SELECT at FROM records ORDER BY id DESC LIMIT ?", (_LOOKED_AT,)).fetchall()
    return [float(at) for (at,) in rows if isinstance(at, int | float)]


def token_from(row: tuple[Any, ...]) -> IssuedToken:
    """A TOKEN row. A changed file may hold any type in any column. Raises StoreError."""
    texts, times = row[:6], (*row[6:8], *row[8:][: row[8] is not None])
    sound = all(isinstance(text, str) for text in texts) and all(isinstance(time, int | float) for time in times)
    if not sound or row[2] not in ("agent", "person", "link", "login"):
        raise StoreError("the database holds a token that cannot be read: another program changed it")
    return IssuedToken(*row)


def key_row(connection: sqlite3.Connection, scope: str, key: str) -> KeyRow | None:
    row = connection.execute(KEY, (scope, key)).fetchone()
    if row is None:
        return None
    outcome = None if row[5] is None else unpack(row[5])
    return KeyRow(row[0], row[1], row[2], row[3], row[4], outcome, row[6])


def pin_rows(connection: sqlite3.Connection, server: str | None) -> list[PinRow]:
    where, values = (" WHERE server = ?", (server,)) if server is not None else ("", ())
    rows = connection.execute(f"{PIN}{where} ORDER BY server, kind, name", values)
    return [PinRow(Definition(row[0], row[1], row[2], unpack(row[3]), row[4]), *row[5:]) for row in rows]


def record_from(row: tuple[Any, ...], find: Callable[[str], str | None] | None = None) -> Record:
    """A RECORD row. A tampered file may hold any type in any column; the verifier must get to see it."""
    seq = row[2]
    at = row[3]
    if type(seq) is not int or type(at) is not float:  # another program wrote that
        seq, at = seq if isinstance(seq, int) else 0, float(at) if isinstance(at, int | float) else 0.0
    return Record(row[1], seq, at, row[4], row[5], str(row[6]), str(row[7]), find)
