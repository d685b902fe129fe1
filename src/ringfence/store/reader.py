"""Reading the state. Plain calls on a connection that cannot write; one per thread."""

from __future__ import annotations

import contextlib
import sqlite3
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.approvals import Proof, references
from ringfence.audit.chain import (
    ALWAYS,
    FILE_BYTES,
    ContextRecord,
    Head,
    Period,
    Record,
    identity_in,
    is_chain_name,
    is_identity_name,
    payload_is_as_recorded,
)
from ringfence.audit.tokens import CREATED, TokenProofs
from ringfence.core import canonical
from ringfence.core.errors import StoreError
from ringfence.core.model import Definition, IssuedToken, ServerSpec
from ringfence.store import clock, labels
from ringfence.store.labels import Held, Scopes
from ringfence.store.rows import (
    APPROVAL,
    BRIEF,
    RECORD,
    SETTLED,
    STANDING,
    TOKEN,
    Approval,
    KeyRow,
    Outline,
    Part,
    Payload,
    PinRow,
    StandingApproval,
    approval_by_id,
    approval_from,
    key_row,
    last_time,
    pin_rows,
    recent_times,
    record_from,
    standing_from,
    token_from,
)
from ringfence.store.schema import DATABASE, check_version, connect, schema_faults

_PAGE = 500
"""Rows per query: a slow consumer must not hold an old view of the database open."""

_MAX_PARTS = 200
_KEPT = '"kept":"'
"""How a record says that a payload was kept."""
_NAMED = '"shared":["'
"""Where a record names what it shares with others. Within a text its quotes would be escaped."""

_WAITING: tuple[str, ...] = ("pending",)
_UNANSWERED = "SELECT id FROM approvals WHERE state = 'pending' AND asked_at >= ?"


class RecordFilter(TypedDict, total=False):
    """Which records, and in which order. Everything that is left out matches."""

    chain: str | None
    call_id: str | None
    kind: str | None
    since: float | None
    until: float | None
    limit: int | None
    newest_first: bool


class Reader:
    """What is in the store, as of each call."""

    def __init__(self, folder: Path, keys: Path | None = None) -> None:
        """`keys` is the folder with the key of what is sealed; without it that cannot be read."""
        self.folder = folder
        self._keys = keys
        self._connection = connect(folder, read_only=True)
        # A tampered text must come out as something that does not verify, not as an exception.
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self._parts: dict[str, str] = {}
        self._named: set[str] = set()
        self._close = weakref.finalize(self, self._connection.close)

    @classmethod
    def open(cls, folder: Path, keys: Path | None = None) -> Reader:
        """Read a state folder without taking part in it: no chain, no lock, no key. Raises StoreError."""
        if not (folder / DATABASE).is_file():
            raise StoreError(
                f"there is no database in {folder}: no gateway has kept its state there yet. Start one (ringfence"
                " serve), or name the configuration of yours with --config FILE"
            )
        reader = cls(folder, keys)
        check_version(reader._connection, folder / DATABASE)
        return reader

    def close(self) -> None:
        self._close()

    # ── The log ──

    def records(self, **wanted: Unpack[RecordFilter]) -> Iterator[Record]:
        """Records in the order of commit, or of their chain where one is named."""
        conditions = {"chain": "chain = ?", "call_id": "call_id = ?", "kind": "kind = ?"}
        conditions |= {"since": "at >= ?", "until": "at < ?"}
        given: dict[str, Any] = {**wanted}
        if given.get("kind") == "finished":
            conditions["kind"] = "kind = 'finished' AND ? <> ''"  # in so many words, or its index is not used
        used = [name for name in conditions if given.get(name) is not None]
        where = [conditions[name] for name in used]
        yield from self._pages(where, [given[name] for name in used], given)

    def _pages(self, where: list[str], values: list[Any], given: dict[str, Any]) -> Iterator[Record]:
        order = "seq" if given.get("chain") is not None else "id"
        sign, way = ("<", "DESC") if given.get("newest_first") else (">", "ASC")
        left = given.get("limit")
        after: tuple[Any, Any] | None = None
        while left is None or left > 0:
            page = _PAGE if left is None else min(_PAGE, left)
            clauses = [*where, f"({order}, id) {sign} (?, ?)"] if after else where
            text = f"{RECORD}{' WHERE ' if clauses else ''}{' AND '.join(clauses)}"
            rows = self._all(f"{text} ORDER BY {order} {way}, id {way} LIMIT ?", [*values, *(after or ()), page])
            for row in rows:
                yield record_from(row, self._finding(row[6]))
            if len(rows) < page:
                return
            after = (rows[-1][2] if order == "seq" else rows[-1][0], rows[-1][0])
            left = None if left is None else left - len(rows)

    def ended_after(self, number: int, limit: int) -> list[tuple[int, Record]]:
        """How the next calls ended, in the order in which they did, each with its place in that."""
        rows = self._all(f"{RECORD} WHERE kind = 'finished' AND id > ? ORDER BY id LIMIT ?", [number, limit])
        return [(int(row[0]), record_from(row, self._finding(row[6]))) for row in rows]

    def settled_after(self, number: int) -> tuple[int, list[str]]:
        """The place of the newest record, and the calls of which a person said, since the place given, what became of
        them."""
        newest = int(self._all("SELECT coalesce(max(id), 0) FROM records")[0][0])
        text = "SELECT call_id FROM records WHERE id > ? AND id <= ? AND kind = ?"
        return newest, [str(row[0]) for row in self._all(text, [number, newest, SETTLED])]

    def kinds_after(self, number: int) -> tuple[int, list[str]]:
        """The place of the newest record, and of which kinds those are that came after the place given."""
        newest = self.last_number()
        text = "SELECT DISTINCT kind FROM records WHERE id > ? AND id <= ? ORDER BY kind"
        return newest, [str(row[0]) for row in self._all(text, [number, newest])]

    def first_ended(self) -> int:
        """The place of the first that is still there; where there is none, that of the next."""
        text = "SELECT coalesce((SELECT min(id) FROM records WHERE kind = 'finished'), max(id) + 1, 0) FROM records"
        return int(self._all(text)[0][0])

    def last_number(self) -> int:
        """The place of the newest record of all."""
        return int(self._all("SELECT coalesce(max(id), 0) FROM records")[0][0])

    def count_ended(self, number: int) -> int:
        """How many calls have ended after this place."""
        return int(self._all("SELECT count(*) FROM records WHERE kind = 'finished' AND id > ?", [number])[0][0])

    def still_there(self, numbers: Collection[int]) -> set[int]:
        """Those of these places that still have their record."""
        return {number for number in numbers if self._all("SELECT 1 FROM records WHERE id = ?", [number])}

    def call_ids(self, prefix: str, limit: int) -> list[str]:
        """Calls whose id begins so, the newest first."""
        text = "SELECT DISTINCT call_id FROM records WHERE call_id >= ? AND call_id < ? ORDER BY call_id DESC LIMIT ?"
        return [str(row[0]) for row in self._all(text, [prefix, prefix + chr(0x10FFFF), limit])]

    def _finding(self, text: Any) -> Callable[[str], str | None] | None:
        """What gives a record the parts that it names. They are read now: a record may outlive its reader."""
        at = text.find(_NAMED) if isinstance(text, str) else -1
        if at < 0:
            return None
        named = text[at + len(_NAMED) - 1 : text.find("]", at)]
        if named not in self._named:
            if len(self._named) >= _MAX_PARTS:  # records that were read keep the old ones
                self._named = set()
                self._parts = {}
            self._named.add(named)
            for digest in named.split(","):
                digest = digest.strip('"')
                for row in self._all("SELECT text FROM shared WHERE digest = ?", [digest]):
                    self._parts[digest] = str(row[0])
        return self._parts.get

    def chains(self) -> list[str]:
        """The names of all chains that have a record."""
        # Steps from name to name through the index; DISTINCT would read every record.
        rows = self._all(
            "WITH RECURSIVE names (name) AS (SELECT min(chain) FROM records UNION ALL"
            " SELECT (SELECT min(chain) FROM records WHERE chain > name) FROM names WHERE name IS NOT NULL)"
            " SELECT name FROM names WHERE name IS NOT NULL"
        )
        return [str(row[0]) for row in rows]

    def record(self, chain: str, seq: int) -> Record | None:
        """The record at one place."""
        rows = self._all(f"{RECORD} WHERE chain = ? AND seq = ?", [chain, seq])
        return record_from(rows[0]) if rows else None

    def approval_records(self, identity: str, asked_by: str | None = None) -> list[Record]:
        """The records of one approval: asked, each answer, and what became of it. `asked_by` is the call that asked,
        where that is known."""
        if asked_by is None:
            asked = self.approval(identity, brief=True)
            if asked is None:
                return []
            asked_by = asked.call_id
        found = self.records(call_id=asked_by)
        return [r for r in found if r.kind.startswith("approval_") and r.body.get("approval") == identity]

    def story(self, call_id: str) -> list[Record]:
        """Everything that `explain` needs of one call: its own records and those of the approvals it used."""
        own = list(self.records(call_id=call_id))
        rows = self._all("SELECT id FROM approvals WHERE call_id = ? OR consumed_by = ?", [call_id, call_id])
        used: dict[str, str | None] = {str(row[0]): None for row in rows}
        for record in own:
            approval = record.body.get("approval")
            if isinstance(approval, dict) and isinstance(approval.get("id"), str):
                used[approval["id"]] = self._asked_by(approval.get("asked"))
        places = {(record.chain, record.seq) for record in own}
        more = [r for identity, by in sorted(used.items()) for r in self.approval_records(identity, by)]
        return [*own, *(r for r in more if (r.chain, r.seq) not in places)]

    def _asked_by(self, place: Any) -> str | None:
        """The call whose question is at this place of the log, which says more than a table."""
        if not isinstance(place, dict) or not isinstance(place.get("seq"), int):
            return None
        asked = self.record(str(place.get("chain")), place["seq"])
        return None if asked is None else asked.call_id

    # ── Evidence ──

    def checkpoints(self) -> dict[str, bytes]:
        """Every chain's checkpoint file, and that which says what state this is, as they are now. Read these before the
        records."""
        out: dict[str, bytes] = {}
        try:
            for path in sorted((self.folder / "checkpoints").iterdir()):
                if (is_chain_name(path.name) or is_identity_name(path.name)) and path.is_file():
                    with path.open("rb") as file:
                        out[path.name] = file.read(FILE_BYTES)
        except OSError as exc:
            raise StoreError(f"the checkpoints cannot be read: {exc.strerror or exc}") from exc
        return out

    def evidence(self) -> tuple[dict[str, Iterator[Record]], dict[str, bytes]]:
        """What `verify_live` takes, read in the right order: the log is never behind its checkpoints."""
        checkpoints = self.checkpoints()
        return {name: self.records(chain=name) for name in self.chains()}, checkpoints

    def period(self, period: Period = ALWAYS) -> Iterator[Record | Proof | ContextRecord]:
        """What `write_export` takes: of each chain, everything from its first to its last record in the period; what
        shows that these are all; and what proves the approvals of calls in it where that lies outside.

        A clock that was set back must not tear a gap, so what lies between the two always belongs to it. The columns
        that this goes by are compared with the texts by the caller.
        """
        since = float("-inf") if period.since is None else period.since
        until = float("inf") if period.until is None else period.until
        spans: dict[str, tuple[int, int]] = {}
        wanted: dict[Head, None] = {}
        ends = "SELECT min(seq), max(seq) FROM records WHERE chain = ? AND typeof(seq) = 'integer'"
        for name in self.chains():
            first, last = self._all(f"{ends} AND at >= ? AND at < ?", [name, since, until])[0]
            if first is None:  # it has but what comes before the period, and after
                before = self._all(f"{ends} AND at < ?", [name, since])[0][1]
                first = 1 if before is None else before + 1
                last = first - 1
            spans[name] = (first, last)
            for record in self._pages(["chain = ?", "seq >= ?"], [name, first - 1], {"chain": name}):
                if first <= record.seq <= last:
                    wanted.update(dict.fromkeys(references(record.text)))
                    yield record
                else:
                    yield ContextRecord(record)
        for place in wanted:
            first, last = spans.get(place.chain, (0, -1))
            if not first <= place.seq <= last and (outside := self.record(place.chain, place.seq)) is not None:
                yield Proof(outside)

    # ── The rest ──

    def approval(self, identity: str, *, brief: bool = False) -> Approval | None:
        """An approval with what people are shown, or, in `brief`, without it."""
        with _readable():
            return approval_by_id(self._connection, identity, self._now(), brief=brief)

    def approvals(self, states: Collection[str] = _WAITING) -> list[Approval]:
        """The approvals in these states, the oldest question first."""
        stored = {*states, *(("pending", "approved") if "expired" in states else ())}
        marks = ", ".join("?" * len(stored))
        found = self._approvals(f"{APPROVAL} WHERE state IN ({marks}) ORDER BY asked_at", [*stored])
        return [approval for approval in found if approval.state in states]

    def find_approvals(self, digest: str) -> list[Approval]:
        """Every approval of exactly this call, in brief, the newest first."""
        return self._approvals(f"{BRIEF} WHERE digest = ? ORDER BY asked_at DESC", [digest])

    def pending(self, tenant: str | None = None) -> list[str]:
        """The ids of questions that wait and have not expired, of a tenant's agents or of all, the oldest first.
        Nothing else of them is read: what people are shown may be a megabyte each."""
        with _readable():
            now = self._now()
        where, values = _of_tenant(tenant)
        found = "SELECT id FROM approvals WHERE state = 'pending' AND expires_at > ?"
        return [str(row[0]) for row in self._all(f"{found}{where} ORDER BY asked_at", [now, *values])]

    def settled_approvals(self, tenant: str | None, most: int) -> list[Approval]:
        """The questions that were asked last and wait no more, in brief."""
        with _readable():
            now = self._now()
        where, values = _of_tenant(tenant)
        over = f"(state <> 'pending' OR expires_at <= ?){where} ORDER BY asked_at DESC LIMIT ?"
        # Of the rows themselves, only those that are listed are read.
        newest = "id IN (SELECT id FROM approvals WHERE "
        return self._approvals(f"{BRIEF} WHERE {newest}{over}) ORDER BY asked_at DESC", [now, *values, most])

    def outline(self, identity: str, parts: Sequence[str], longest: int, characters: int) -> Outline | None:
        """An approval, where what people are shown is longer than `longest` without these parts of it: of the first of
        them so many characters, as JSON, and how many all of it has. The whole is not read into this program."""
        extracted = ", ".join("'$.' || ?" for _ in parts)
        shown = f"CASE WHEN length(summary) <= ? THEN summary ELSE json_remove(summary, {extracted}) END"
        query = APPROVAL.replace(" summary,", f" {shown},").replace(" FROM", ", length(summary) FROM")
        rows = self._all(f"{query} WHERE id = ?", [longest, *parts, identity])
        if not rows:
            return None
        with _readable():
            approval = approval_from(self._connection, rows[0][:-1], self._now())
        size = int(rows[0][-1])
        if size <= longest:
            return Outline(approval)
        head = "SELECT substr(json_extract(summary, '$.' || ?), 1, ?) FROM approvals WHERE id = ?"
        return Outline(approval, str(self._all(head, [parts[0], characters, identity])[0][0] or ""), size)

    def _approvals(self, query: str, values: list[Any]) -> list[Approval]:
        rows = self._all(query, values)
        with _readable():
            now = self._now()
            return [approval_from(self._connection, row, now) for row in rows]

    def standing(self, tenant: str | None = None) -> list[StandingApproval]:
        """The approvals that stand, of a tenant's agents or of all, the oldest first; by the tables."""
        with _readable():
            now = self._now()
        where, values = _of_tenant(tenant)
        query = f"{STANDING} WHERE revoked_at IS NULL AND used < times AND expires_at > ?{where} ORDER BY made_at"
        return self._standing(query, [now, *values])

    def find_standing(self, digest: str) -> list[StandingApproval]:
        """Those for calls that have this digest, whatever their arguments; that which ends first comes first."""
        with _readable():
            now = self._now()
        found = self._standing(f"{STANDING} WHERE digest = ? ORDER BY expires_at", [digest])
        return [each for each in found if each.is_good(now)]

    def standing_by_id(self, prefix: str) -> list[StandingApproval]:
        """Those whose id begins so, whether they are still good or not."""
        return self._standing(f"{STANDING} WHERE id >= ? AND id < ? ORDER BY id", [prefix, prefix + chr(0x10FFFF)])

    def _standing(self, query: str, values: list[Any]) -> list[StandingApproval]:
        rows = self._all(query, values)
        with _readable():
            return [standing_from(row) for row in rows]

    def open_questions(self, principal: str) -> set[str]:
        """The ids of this principal's questions that wait for an answer."""
        with _readable():
            now = self._now()
        found = "SELECT id FROM approvals WHERE state = 'pending' AND principal = ? AND expires_at > ?"
        return {str(row[0]) for row in self._all(found, [principal, now])}

    def unanswered(self, since: float) -> set[str]:
        """The ids of all questions asked since then that have no answer; what people are shown is not read for it."""
        return {str(row[0]) for row in self._all(_UNANSWERED, [since])}

    def version(self) -> int:
        """Changes when another connection writes to the database. This costs next to nothing."""
        return int(self._all("PRAGMA data_version")[0][0])

    def _now(self) -> float:
        """What the time must be at least: no clock that was set back makes anything young again."""
        return max(time.time(), last_time(self._connection))

    def key(self, scope: str, key: str) -> KeyRow | None:
        with _readable():
            return key_row(self._connection, scope, key)

    def held_keys(self, keys: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those of these keys, each looked at once, that a call has which has not ended."""
        held = "SELECT 1 FROM keys WHERE scope = ? AND key = ? AND state = 'started'"
        return {key for key in set(keys) if self._all(held, [*key])}

    def labels(self, scopes: Scopes) -> dict[str, Held]:
        """Every label that any of these scopes has."""
        with _readable():
            return labels.held(self._connection, scopes)

    def has_labels(self) -> bool:
        """Whether anything has any."""
        return bool(self._all("SELECT 1 FROM labels LIMIT 1", []))

    def token(self, identity: str, proofs: TokenProofs) -> tuple[IssuedToken | None, float]:
        """A bearer token by its id, as far as the log proves it, and what the time must be at least."""
        rows = self._all(f"{TOKEN} WHERE id = ?", [identity])
        found = self._proven_token(rows[0], proofs) if rows else None
        with _readable():
            return found, self._now()

    def tokens(self, proofs: TokenProofs) -> list[IssuedToken]:
        """All of them, the oldest first."""
        return [self._proven_token(row, proofs) for row in self._all(f"{TOKEN} ORDER BY made_at, id")]

    def _proven_token(self, row: tuple[Any, ...], proofs: TokenProofs) -> IssuedToken:
        found = token_from(row)
        return proofs.of(found, map(record_from, self._all(f"{RECORD} WHERE call_id = ?", [found.id])))

    def has_unsigned_making(self, token: str) -> bool:
        """Whether the log has the making of a token as earlier versions wrote it."""
        written = (record.body for record in self.records(kind=CREATED))
        return any(body.get("token") == token and "signature" not in body for body in written)

    def token_proofs(self, public: Ed25519PublicKey) -> TokenProofs:
        """What proves tokens to who verifies with this key."""
        return TokenProofs(public, identity_in(self.checkpoints(), public))

    def pins(self, server: str | None = None) -> list[Definition]:
        return [row.definition for row in self.pinned(server)]

    def pinned(self, server: str | None = None) -> list[PinRow]:
        """Accepted definitions, with who accepted each."""
        with _readable():
            return pin_rows(self._connection, server)

    def accepted(self, servers: Mapping[str, ServerSpec]) -> list[PinRow]:
        """The definitions that are accepted for these servers. Another configuration with this state may have taken
        one at first use, for a server of the same name: where people are to accept, only what one did counts."""
        one = next(iter(servers)) if len(servers) == 1 else None
        return [
            row
            for row in self.pinned(one)
            if (spec := servers.get(row.definition.server)) is not None and (row.by_person or spec.pins == "first_use")
        ]

    def pin_stamp(self) -> tuple[int, float]:
        """Changes when any process accepts a definition."""
        count, newest = self._all("SELECT count(*), coalesce(max(at), 0) FROM pins")[0]
        return int(count), float(newest)

    def payload(self, call_id: str, part: Part) -> Payload | None:
        """What is kept, opened where it was sealed. Raises StoreError where the key is missing."""
        rows = self._all("SELECT salt, body FROM payloads WHERE call_id = ? AND part = ?", [call_id, part])
        if not rows:
            return None
        salt, body = rows[0]
        return Payload(salt, self._opened(call_id, part, body))

    def _opened(self, call_id: str, part: Part, body: Any) -> Any:
        """What does not open stays as it is, and is not what was recorded."""
        from ringfence.store.sealing import Sealing, is_sealed  # noqa: PLC0415 - few payloads are read

        if not isinstance(body, bytes) or not is_sealed(body):
            return body
        if self._keys is None:
            raise StoreError(f"what is kept of call {call_id} is sealed, and this process has not its key")
        found = Sealing.at(self._keys, make=False).open(call_id, part, body)
        return body if found is None else found

    def faults(self, limit: int) -> list[str]:
        """What is wrong with the database itself: other definitions than ours, or indexes unlike their tables."""
        with _readable():
            return schema_faults(self._connection, limit)

    def missing_payloads(self, limit: int) -> list[tuple[str, Part]]:
        """Payloads that a record says were kept, that are not there, and that nobody erased on record."""
        texts = "SELECT DISTINCT call_id FROM records NOT INDEXED WHERE call_id IS NOT NULL AND instr(text, ?) > 0"
        missing: list[tuple[str, Part]] = []
        for (call_id,) in self._all(texts, [_KEPT]):
            for part in get_args(Part):
                # The story is read after the payload was looked for: who erased it meanwhile has said so in it.
                if len(missing) < limit and not self._has_payload(str(call_id), part):
                    story = list(self.records(call_id=str(call_id)))
                    kept = any(isinstance(entry := r.body.get(part), dict) and "kept" in entry for r in story)
                    if kept and not any(record.kind == "payload_erased" for record in story):
                        missing.append((str(call_id), part))
        return missing

    def unsalted(self, limit: int) -> list[str]:
        """Calls whose arguments have a digest that nothing can be compared with, since its salt is gone, though nobody
        erased it on record. The start of a server keeps none."""
        rows = self._all(
            "SELECT call_id FROM records AS r NOT INDEXED WHERE kind = 'started'"
            " AND (typeof(salt) <> 'blob' OR length(salt) <> 16) AND instr(text, '\"arguments\":{\"bytes\":') > 0"
            ' AND instr(text, \'"kind":"server"\') = 0 AND NOT EXISTS'
            " (SELECT 1 FROM records AS e WHERE e.call_id = r.call_id AND e.kind = 'payload_erased') LIMIT ?",
            [limit],
        )
        return [str(row[0]) for row in rows]

    def _has_payload(self, call_id: str, part: Part) -> bool:
        return bool(self._all("SELECT 1 FROM payloads WHERE call_id = ? AND part = ?", [call_id, part]))

    def payloads(self) -> Iterator[tuple[str, Part]]:
        """The calls of which payloads are kept, page by page."""
        after: tuple[Any, ...] = ("", "")
        text = "SELECT call_id, part FROM payloads WHERE (call_id, part) > (?, ?) ORDER BY call_id, part LIMIT ?"
        while rows := self._all(text, [*after, _PAGE]):
            yield from ((str(call_id), part) for call_id, part in rows)
            after = rows[-1]

    def payload_total(self) -> tuple[int, int]:
        """How many payloads are kept, and their bytes."""
        ((count, size),) = self._all("SELECT count(*), coalesce(sum(length(body)), 0) FROM payloads")
        return int(count), int(size)

    def kept(self, call_id: str, part: Part) -> tuple[Payload | None, bool | None]:
        """What is kept of a payload, and whether that is what was recorded; None where the log does not say."""
        found = self.payload(call_id, part)
        if found is None:
            return None, None
        bodies = []
        for record in self.records(call_id=call_id):
            with contextlib.suppress(canonical.NotCanonical):
                bodies.append(record.body)
        return found, payload_is_as_recorded(bodies, part, found.salt, found.body)

    def misplaced(self, limit: int) -> list[tuple[str, int]]:
        """Records that stand, in the order of commit, before the one that they follow in their chain."""
        rows = self._all(
            "SELECT chain, seq FROM (SELECT chain, seq, id, lag(id) OVER (PARTITION BY chain ORDER BY seq) AS before"
            " FROM records) WHERE before > id LIMIT ?",
            [limit],
        )
        return [(str(chain), seq if isinstance(seq, int) else 0) for chain, seq in rows]

    def before_leap(self, farthest: float) -> float | None:
        """The newest time on record; where the last records leap ahead by more than that, the time before they did."""
        with _readable():
            times = recent_times(self._connection)
        return clock.before_leap(times, farthest) if times else None

    def running(self) -> list[str]:
        """Calls that are started and not finished."""
        return [str(row[0]) for row in self._all("SELECT call_id FROM running ORDER BY chain, seq")]

    def misreported(self, limit: int) -> list[str]:
        """Where the table of running calls is not what the log says. Each row in one look, as others write."""
        left_out = self._all(
            "SELECT s.call_id FROM records AS s WHERE s.kind = 'started' AND NOT EXISTS"
            " (SELECT 1 FROM records AS f WHERE f.call_id = s.call_id AND f.kind = 'finished') AND NOT EXISTS"
            " (SELECT 1 FROM running AS r WHERE r.call_id = s.call_id AND r.chain = s.chain AND r.seq = s.seq) LIMIT ?",
            [limit],
        )
        added = self._all(
            "SELECT r.call_id FROM running AS r WHERE NOT EXISTS (SELECT 1 FROM records AS s WHERE s.chain = r.chain"
            " AND s.seq = r.seq AND s.kind = 'started' AND s.call_id = r.call_id) LIMIT ?",
            [limit],
        )
        return [
            *(
                f"call {call_id} has not ended, and the table of running calls does not have it"
                for (call_id,) in left_out
            ),
            *(f"the table of running calls has call {call_id}, which did not begin there" for (call_id,) in added),
        ]

    def _all(self, text: str, values: list[Any] | None = None) -> list[tuple[Any, ...]]:
        with _readable():
            return self._connection.execute(text, values or []).fetchall()


def _of_tenant(tenant: str | None) -> tuple[str, list[str]]:
    """The condition on the principals of a tenant's agents; their keys begin with its name and a stroke."""
    return ("", []) if tenant is None else (" AND principal >= ? AND principal < ?", [f"{tenant}/", f"{tenant}0"])


class _readable:
    """Turns what SQLite raises into our own error. A class, as a generator costs more than the query."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if isinstance(exc, sqlite3.Error):
            raise StoreError(f"the database could not be read: {exc}") from exc
