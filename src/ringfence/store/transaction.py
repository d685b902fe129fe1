"""The verbs of one unit of work. All of one unit are kept, or none is."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ringfence.audit import approvals, chain, standing, tokens
from ringfence.audit.calls import RUNNING_CHANGED
from ringfence.audit.chain import Head
from ringfence.audit.signer import Signer
from ringfence.core import canonical, system
from ringfence.core.errors import StoreError
from ringfence.core.model import Definition, GuardedText, IssuedToken, Json, Login, Receipt
from ringfence.store import labels, naming
from ringfence.store.chainfiles import Noted
from ringfence.store.clock import TOLERANCE
from ringfence.store.labels import Held, Scopes
from ringfence.store.rows import (
    APPROVAL,
    BRIEF,
    RECORD,
    SETTLED,
    STANDING,
    TOKEN,
    Approval,
    ApprovalQuestion,
    Conflict,
    Expired,
    KeyRow,
    Offer,
    Part,
    RowNotFound,
    SentBefore,
    StandingApproval,
    Unproven,
    approval_by_id,
    approval_from,
    key_row,
    pack,
    pin_rows,
    record_from,
    standing_from,
    token_from,
    unpack,
)

KEPT_DAYS = 8
"""How many days' quotas of one scope are kept."""
SAID_SECONDS = 3600.0
"""After so long a process says again what its records share: by then a reader may have forgotten it."""
_SAY = "INSERT INTO shared (digest, text, at) VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET at = excluded.at"
_COPIED = ("call", "contract", "pin", "decision", "approval", "arguments", "durable", "effect_possible", "shared")
_LOST = {
    "crash": "the gateway stopped while this call was running",
    "store": "the outcome could not be recorded, so it is withheld",
}
_MAX_NAMED = 100
_MAX_REFUSED = 20
"""Refused messages about the questions of one call that are on record."""
_OF_STANDING = ("principal", "tool", "rule", "person", "times", "expires_at")
"""What the record of an approval that stands says in plain words."""
_CHANGED = "Another program changed the database"
_RUNNING = "INSERT OR REPLACE INTO running (call_id, chain, seq) VALUES (?, ?, ?)"
_INSERT = "INSERT INTO records (chain, seq, at, kind, call_id, text, hash, salt) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class Transaction:
    """Handed to each piece of work; not to be kept after it returns."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        head: Head,
        signer: Signer,
        due: float,
        said: Mapping[str, float] | None = None,
        running: Mapping[str, Head] | None = None,
    ) -> None:
        self._connection = connection
        self._signer = signer
        self._due = due
        """What the time of day must be at least."""
        self._said = said or {}
        self.saying: dict[str, float] = {}
        """What records share and this transaction says, by its digest, and when; `said` is what was said before."""
        self.began = time.time()
        self.head = head
        """The end of the chain as this transaction would leave it."""
        self.erased = False
        self.written = 0
        """Bytes, but for small change."""
        self.begun: dict[str | None, int] = {}
        """Calls whose *started* is taken along: by the end, those that still run are put down as running."""
        self._running = running or {}
        self.changes: list[tuple[str | None, Head | None]] = []
        """Calls that this transaction begins, with the place of their *started*, and those that it ends; `running` were
        begun before it by this process, which believes no table in that."""

    # ── The log ──

    def take_along(self, noted: list[Noted]) -> None:
        """Records that were written ahead of the database; `head` is behind them already."""
        for record, salt in noted:
            self._insert(record, salt)
            if record.kind == "started":
                self.begun[record.call_id] = record.seq
                self.changes.append((record.call_id, record.head))

    def put_running(self) -> None:
        """Write the rows of running calls, before this transaction ends."""
        for call_id, seq in self.begun.items():
            self._connection.execute(_RUNNING, (call_id, self.head.chain, seq))
        self.begun = {}

    def append(self, kind: str, call_id: str | None, body: Json, *, salt: bytes | None = None) -> Receipt:
        """Add a record to this process's chain; `salt`, which opens the digests in it, lies beside it."""
        try:
            record = chain.seal(self.head, time.time(), kind, call_id, body)
        except ValueError as exc:
            raise StoreError(f"a record cannot be written: {exc}") from None
        self._insert(record, salt)
        if chain.SHARED in body:
            self._say(body[chain.SHARED])
        if kind == "started":
            self._connection.execute(_RUNNING, (call_id, record.chain, record.seq))
            self.changes.append((call_id, record.head))
        elif kind == "finished":
            self.changes.append((call_id, None))
            if self.begun.pop(call_id, None) is None:
                self._connection.execute("DELETE FROM running WHERE call_id = ?", (call_id,))
        self.head = record.head
        return Receipt(record.chain, record.seq, record.hash)

    def _append_signed(self, kind: str, call_id: str | None, body: Json, salt: bytes | None = None) -> None:
        """Add a record that is proof by itself."""
        try:
            record = self._signer.record(self.head, time.time(), (kind, call_id), body)
        except ValueError as exc:
            raise StoreError(f"a record cannot be written: {exc}") from None
        self._insert(record, salt)
        self.head = record.head

    def record_identity(self, *, again: bool) -> None:
        """Put it on record that a state which had records before got its id only at its time. Unless `again`, not where
        that is on record: its file is written first, and what wrote it may have been killed between the two."""
        state = self._signer.state
        named = "SELECT 1 FROM records WHERE call_id = ? AND kind = ?"
        if again or self._connection.execute(named, (state.id, chain.NAMED)).fetchone() is None:
            self._append_signed(chain.NAMED, state.id, {"at_first": state.at})

    def mark_set_back(self) -> bool:
        """Put it on record where the time of day was set back. Questions that are open are void then: whether they
        would have expired meanwhile, is not known. True where it was."""
        now = self.began
        if now >= self._due - TOLERANCE:
            return False
        rows = self._connection.execute(
            "SELECT id, call_id FROM approvals WHERE state IN ('pending', 'approved') AND expires_at > ?", (now,)
        ).fetchall()
        self.append(approvals.SET_BACK, None, {"from": self._due, "to": now, "void": len(rows)})
        for identity, call_id in rows:
            self._connection.execute("UPDATE approvals SET state = 'expired' WHERE id = ?", (identity,))
            self.append(approvals.VOID, call_id, {"approval": identity, "why": approvals.SET_BACK})
        for (identity,) in self._connection.execute(
            "SELECT id FROM standing WHERE revoked_at IS NULL AND expires_at > ?", (now,)
        ).fetchall():
            self._end_standing(identity, now, {"why": approvals.SET_BACK})
        self._due = now
        return True

    def unnamed_ends(self) -> list[Json]:
        """Where other chains have ended and no record has named that; the caller does."""
        return naming.unnamed(self._connection, self.head.chain, live=False)

    def _insert(self, record: chain.Record, salt: bytes | None) -> None:
        row = (record.chain, record.seq, record.at, record.kind, record.call_id, record.text, record.hash, salt)
        try:
            self._connection.execute(_INSERT, row)
        except sqlite3.IntegrityError as exc:
            raise Conflict(f"record {record.seq} of chain {record.chain} cannot be added: {exc}") from exc
        self.written += len(record.text)

    def _say(self, parts: list[Any]) -> None:
        now = time.time()
        for part in parts:
            # Of a record that was copied only the names are known, and what they name is there.
            if (
                not isinstance(part, canonical.Shared)
                or is_known(self._said, part.digest, now)
                or part.digest in self.saying
            ):
                continue
            self._connection.execute(_SAY, (part.digest, part.text, now))
            self.saying[part.digest] = now
            self.written += len(part.text)

    def running(self) -> dict[str, Head]:
        """The calls that this process has begun and not ended, with the places of their *started*."""
        return dict(apply_changes({**self._running}, self.changes))

    def finish_lost(self, chain_name: str, begun: Mapping[str, Head], *, damaged: bool = False) -> list[str]:
        """Close every call that was `begun` in that chain and has no outcome, and lose the keys that it held.

        What was begun is what the chain itself says, or the process that wrote it. The table of running calls is only
        compared with that: where it says otherwise, another program has changed it, and that goes on record. Of a chain
        that is `damaged` all that may have begun is closed, and nothing can be compared.
        """
        self.put_running()
        rows = self._connection.execute("SELECT call_id, seq FROM running WHERE chain = ?", (chain_name,)).fetchall()
        if not damaged:
            self._compare_running(chain_name, begun, dict(rows))
        for call_id in {*begun, *(call_id for call_id, _ in rows)}:
            self.lose_keys(call_id)
        closed = [call_id for call_id in begun if not self._has_ended(call_id)]
        for call_id in closed:
            self._finish_bare(call_id, begun[call_id], "crash")
        self._connection.execute("DELETE FROM running WHERE chain = ?", (chain_name,))
        return closed

    def finish_owed(self, call_ids: Iterable[str]) -> bool:
        """Close calls of this process that have ended, and whose end could not be written. True where there are any."""
        running = self.running()
        owed = [call_id for call_id in call_ids if call_id in running and not self._has_ended(call_id)]
        for call_id in owed:
            self._finish_bare(call_id, running[call_id], "store")
            self.lose_keys(call_id)
        return bool(owed)

    def _compare_running(self, chain_name: str, begun: Mapping[str, Head], rows: Mapping[Any, Any]) -> None:
        """Put it on record where the table of running calls does not say what the chain says."""
        places = {call_id: place.seq for call_id, place in begun.items() if not self._has_ended(call_id)}
        missing = [call_id for call_id, seq in places.items() if rows.get(call_id) != seq]
        # A row of a call that has ended misleads nobody: an interrupted start may have left it.
        added = [call_id for call_id in rows if call_id not in places and not self._has_ended(call_id)]
        if missing or added:
            body = {"changed": chain_name, "missing": missing[:_MAX_NAMED], "count": len(missing), "added": len(added)}
            self.append(RUNNING_CHANGED, None, body)

    def _finish_bare(self, call_id: str, place: Head, reason: str) -> None:
        """Write *finished* for a call of which no more is known than its *started*, if that still is what was there."""
        row = self._connection.execute(
            "SELECT text FROM records WHERE chain = ? AND seq = ?", (place.chain, place.seq)
        ).fetchone()
        text = row[0] if row is not None and isinstance(row[0], str) and chain.is_part(row[0], place.hash) else None
        began = {"started_seq": place.seq or None, "started_chain": place.chain}
        self.append("finished", call_id, {**_lost(text, call_id, reason), **began})

    def _has_ended(self, call_id: str) -> bool:
        ended = "SELECT 1 FROM records WHERE call_id = ? AND kind = 'finished'"
        return self._connection.execute(ended, (call_id,)).fetchone() is not None

    # ── Approvals ──

    def ask_approval(self, question: ApprovalQuestion) -> Approval:
        """Put a question to people, or join the identical one that still waits. A new one is recorded."""
        row = self._connection.execute(
            f"{BRIEF} WHERE digest = ? AND state = 'pending' AND expires_at > ? ORDER BY asked_at LIMIT 1",
            (question.digest, max(question.asked_at, self._due)),
        ).fetchone()
        if row is not None:
            return approval_from(self._connection, row, question.asked_at)
        identity = canonical.new_id("apr")
        shape = None if question.shape is None else pack(question.shape)
        self.written += len(question.text)
        self._connection.execute(
            "INSERT INTO approvals (id, digest, call_id, principal, person, tool, summary, rule, roles, self_approval,"
            " people, state, asked_at, expires_at, terms, shape)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', ?, ?, ?, ?)",
            (
                identity,
                question.digest,
                question.call_id,
                question.principal,
                question.person,
                question.tool,
                question.text,
                question.rule,
                pack(list(question.roles)),
                question.self_approval,
                question.people,
                question.asked_at,
                question.expires_at,
                pack(question.terms),
                shape,
            ),
        )
        salt = os.urandom(16)
        seconds = question.expires_at - question.asked_at
        # Neither summary nor plain digests: the one holds values, the others could be tried against guesses of them.
        body = {
            "approval": identity,
            "tool": question.tool,
            "principal": question.principal,
            "asked_for": question.person,
            "rule": question.rule,
            "roles": list(question.roles),
            "people": question.people,
            "self_approval": question.self_approval,
            "expires_at": question.expires_at,
            "until": {"boot": system.boot(), "uptime": system.uptime() + seconds},
            "bound": canonical.salted_bytes(question.digest.encode(), salt),
            "shown": canonical.salted_bytes(question.text.encode(), salt),
            **({"terms": question.terms} if question.terms else {}),
            **({} if shape is None else {"shape": canonical.salted_bytes(shape.encode(), salt)}),
        }
        self._append_signed(approvals.ASKED, question.call_id, body, salt)
        return self._brief(identity, question.asked_at)

    def answer_approval(
        self,
        identity: str,
        person: str,
        approve: bool,
        now: float,
        seen: Approval | None = None,
        *,
        login: Login | None = None,
        reason: GuardedText | None = None,
    ) -> Approval:
        """Record one person's answer to the question as they have `seen` it. Who may answer is for the caller to know;
        here each answers once, and each account does: it is on record by the kernel's word, and whoever uses the answer
        looks whether it is that person's. `login` is how the person proved who they are, where this process is not
        theirs.

        Raises RowNotFound, Expired, Conflict where the question is settled or the person or the account has answered
        it, or Unproven where it is not the one that was asked.
        """
        now = max(now, self._due)
        asked, shown = self._approval(identity, now)
        signed = None if login is None else login.signed
        if signed is not None and self._had(asked.call_id, signed["id"]):
            raise SentBefore(f"this message came before: approval {identity} has it on record")
        if asked.state == "expired":
            raise Expired(f"approval {identity} has expired")
        if asked.state != "pending":
            raise Conflict(f"approval {identity} is already {asked.state}")
        proven = self._proven(asked, shown)
        if signed is not None and canonical.loads(signed["body"])["asked"] != proven.place.hash:
            raise Conflict(
                f"it answers another question than approval {identity} is: it names the hash of another record"
            )
        if seen is not None and (_question(seen), pack(seen.summary)) != (_question(asked), shown):
            raise Conflict(f"approval {identity} was changed while it was being read")
        if proven.void is not None or proven.expired(now, system.boot(), system.uptime()):
            raise Expired(f"approval {identity} has expired")
        if person in (*proven.refused_by, *(yes.person for yes in proven.agreed)):
            raise Conflict(f"{person} has already answered approval {identity}")
        if asked.terms.get("reason") and not reason:
            raise Conflict(f"approval {identity} is answered with a reason only: its rule says so")
        account = system.account()
        known = None if login is None else login.as_fact()
        if approvals.giver_of(person, account, known) in (yes.giver for yes in proven.agreed):
            raise Conflict(f"account {account['name']} has already answered approval {identity}, as somebody else")
        given: Json = {
            "person": person,
            "account": account,
            **({} if known is None else {"login": known}),
            "approve": approve,
            **({} if reason is None else {"reason": reason}),
        }
        return self._give_answer(asked, proven, given, now)

    def refuse_answer(self, asked: Approval, person: str | None, nonce: str, said: Json) -> None:
        """Put on record that a message of this person's answers nothing; it never will. Of one question that is told
        so often; what is beyond is refused all the same."""
        refused = "SELECT count(*) FROM records WHERE call_id = ? AND kind = ?"
        (count,) = self._connection.execute(refused, (asked.call_id, approvals.UNFIT)).fetchone()
        if count < _MAX_REFUSED and (said["why"] == "replayed" or not self._had(asked.call_id, nonce)):
            body = {"approval": asked.id, "principal": asked.principal, "person": person, "nonce": nonce, **said}
            self.append(approvals.UNFIT, asked.call_id, body)

    def use_state(self, identity: str, nonce: str) -> None:
        """Put on record that a client came back with what it held of this question. Raises SentBefore where it did so
        before, and RowNotFound."""
        asked, _ = self._approval(identity, max(time.time(), self._due))
        if self._had(asked.call_id, nonce):
            raise SentBefore(f"approval {identity} has it on record that this state was used")
        self.append(approvals.RETURNED, asked.call_id, {"approval": identity, "nonce": nonce})

    def _had(self, call_id: str, nonce: str) -> bool:
        """Whether what has this nonce is on record beside the call, as an answer, as refused or as used."""
        found = f"{RECORD} WHERE call_id = ? AND kind IN (?, ?, ?)"
        kinds = (approvals.ANSWERED, approvals.UNFIT, approvals.RETURNED)
        for row in self._connection.execute(found, (call_id, *kinds)):
            body = record_from(row).body
            signed = (body.get("login") or {}).get("signed") or {}
            if nonce in (body.get("nonce"), signed.get("id")):
                return True
        return False

    def escalate_approval(self, identity: str, roles: str, after_seconds: float) -> bool:
        """Put on record, once, that from now on others may answer a question which waits. False if that was done, or
        the question waits no more."""
        asked, _ = self._approval(identity, max(time.time(), self._due))
        body = {"approval": identity, "roles": roles, "after_seconds": after_seconds}
        had = self._connection.execute(
            f"{RECORD} WHERE call_id = ? AND kind = ?", (asked.call_id, approvals.ESCALATED)
        ).fetchall()
        if asked.state != "pending" or any(body.items() <= record_from(row).body.items() for row in had):
            return False
        self.append(approvals.ESCALATED, asked.call_id, {**body, "tool": asked.tool, "principal": asked.principal})
        return True

    def _give_answer(self, asked: Approval, proven: approvals.ProvenApproval, given: Json, now: float) -> Approval:
        """Record an answer that may be given."""
        approve = given["approve"]
        self._connection.execute(
            "INSERT OR REPLACE INTO answers (approval_id, person, approve, at, reason) VALUES (?, ?, ?, ?, ?)",
            (asked.id, given["person"], approve, now, given.get("reason")),
        )
        count = len(proven.agreed) + approve
        state = "denied" if not approve or proven.refused_by else "approved" if count >= asked.people else "pending"
        self._connection.execute("UPDATE approvals SET state = ? WHERE id = ?", (state, asked.id))
        body = {
            "approval": asked.id,
            "tool": asked.tool,
            **given,
            "state": state,
            "asked": proven.place.hash,
            "shown": proven.question.get("shown"),
        }
        self._append_signed(approvals.ANSWERED, asked.call_id, body)
        return self._brief(asked.id, now)

    def consume_approval(self, digest: str, call_id: str, now: float) -> Approval | None:
        """Use up an approval of exactly this digest for this call, or None where there is none to use.

        Raises Unproven where a table says that there is one and the signed log does not.
        """
        now = max(now, self._due)
        rows = self._connection.execute(
            f"{BRIEF} WHERE digest = ? AND state = 'approved' AND expires_at > ? ORDER BY asked_at", (digest, now)
        ).fetchall()
        for row in rows:
            found = approval_from(self._connection, row, now)
            proven = self._proven(found)
            if proven.used_by:
                raise Unproven(found.id, f"call {proven.used_by[0]} has used it already. {_CHANGED}")
            if not proven.complete:
                raise Unproven(found.id, f"the signed log does not hold every answer that it needs. {_CHANGED}")
            if proven.void is not None or proven.expired(now, system.boot(), system.uptime()):
                continue
            if any(self._has_ended_standing(yes.standing) for yes in proven.agreed if yes.standing is not None):
                self._connection.execute("UPDATE approvals SET state = 'expired' WHERE id = ?", (found.id,))
                self.append(approvals.VOID, found.call_id, {"approval": found.id, "why": standing.REVOKED})
                continue
            self._connection.execute(
                "UPDATE approvals SET state = 'consumed', consumed_by = ? WHERE id = ?", (call_id, found.id)
            )
            self.append(approvals.USED, found.call_id, {"approval": found.id, "used_by": call_id})
            return replace(found, state="consumed", consumed_by=call_id, proof=proven)
        return None

    def _brief(self, identity: str, now: float) -> Approval:
        found = approval_by_id(self._connection, identity, now, brief=True)
        assert found is not None
        return found

    def _approval(self, identity: str, now: float) -> tuple[Approval, str]:
        """The approval, and the text of its summary, which is not parsed here."""
        row = self._connection.execute(f"{APPROVAL} WHERE id = ?", (identity,)).fetchone()
        if row is None:
            raise RowNotFound(f"there is no approval {identity}")
        return approval_from(self._connection, (*row[:6], "{}", *row[7:]), now), str(row[6])

    def _proven(self, asked: Approval, shown: str | None = None) -> approvals.ProvenApproval:
        """What the log proves of it; that must be what the tables say. Raises Unproven."""
        kinds = (approvals.ASKED, approvals.ANSWERED, approvals.USED, approvals.VOID)
        marks = ", ".join("?" * len(kinds))
        rows = self._connection.execute(
            f"{RECORD} WHERE call_id = ? AND kind IN ({marks}) ORDER BY id", (asked.call_id, *kinds)
        ).fetchall()
        try:
            proven = approvals.prove(asked.id, map(record_from, rows), self._signer.public, self._signer.state.id)
        except approvals.NotProven as exc:
            raise Unproven(asked.id, str(exc) if exc.older else f"{exc}. {_CHANGED}") from None
        place = proven.place
        row = self._connection.execute(
            "SELECT salt FROM records WHERE chain = ? AND seq = ?", (place.chain, place.seq)
        ).fetchone()
        salt = row[0] if row is not None and isinstance(row[0], bytes) else b""
        stated = {**_question(asked), "bound": canonical.salted_bytes(asked.digest.encode(), salt)}
        if shown is not None:
            stated["shown"] = canonical.salted_bytes(shown.encode(), salt)
        if asked.shape is not None:
            stated["shape"] = canonical.salted_bytes(pack(asked.shape).encode(), salt)
        if any(proven.question.get(name) != value for name, value in stated.items()):
            raise Unproven(asked.id, f"it differs from the question in the signed log. {_CHANGED}")
        return proven

    # ── Approvals that stand ──

    def make_standing(
        self, asked: Approval, person: str, offer: Offer, login: Login | None = None, reason: GuardedText | None = None
    ) -> StandingApproval:
        """Record that a person approves calls beforehand that are like the one they were asked about. Who may, is for
        the caller to know. Raises RowNotFound, Expired, Conflict or Unproven, as `answer_approval` does."""
        now = max(time.time(), self._due)
        found, shown = self._approval(asked.id, now)
        if found.state not in ("pending", "approved", "consumed"):
            raise Conflict(f"approval {asked.id} is {found.state}: approve a call like it first")
        proven = self._proven(found, shown)
        if proven.void is not None or (asked, pack(asked.summary)) != (replace(found, summary=asked.summary), shown):
            raise Conflict(f"approval {asked.id} was changed while it was being read")
        if found.shape is None:
            raise Conflict(f"approval {asked.id} is for one call: its rule lets no answer stand for others")
        identity = canonical.new_id("std")
        shape = pack(offer.shape)
        made = StandingApproval(
            *(identity, found.shape["digest"], found.call_id, found.principal, found.tool, found.rule, person),
            offer.shape,
            *(offer.times, 0, now, offer.expires_at, None),
        )
        self._connection.execute(
            "INSERT INTO standing (id, digest, call_id, principal, tool, rule, person, shape, times, made_at,"
            " expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(made.id, made.digest, made.call_id, made.principal, made.tool, made.rule, made.person, shape),
                *(made.times, made.made_at, made.expires_at),
            ),
        )
        self.written += len(shape)
        salt = os.urandom(16)
        body = {
            "standing": identity,
            "from": asked.id,
            "asked": proven.place.hash,
            **{name: getattr(made, name) for name in _OF_STANDING},
            "until": {"boot": system.boot(), "uptime": system.uptime() + offer.expires_at - now},
            "account": system.account(),
            **({} if login is None else {"login": login.as_fact()}),
            **({} if reason is None else {"reason": reason}),
            "shape": canonical.salted_bytes(shape.encode(), salt),
        }
        self._append_signed(standing.MADE, identity, body, salt)
        return made

    def answer_by_standing(self, identity: str, chosen: StandingApproval) -> Approval | None:
        """Answer a question by what a person approved beforehand, which has one use less then; None where it has none
        left, or is over. That the call is one that they approved, is for the caller to know. Raises Unproven where the
        signed log does not say what the tables say."""
        now = max(time.time(), self._due)
        row = self._connection.execute(f"{STANDING} WHERE id = ?", (chosen.id,)).fetchone()
        found = None if row is None else standing_from(row)
        if found is None or not found.is_good(now) or replace(found, used=chosen.used) != chosen:
            return None
        proven = self._proven_standing(found, identity)
        if not proven.good(now, system.boot(), system.uptime()):
            return None
        asked, _ = self._approval(identity, now)
        question = self._proven(asked)
        if asked.state != "pending" or question.void is not None or question.agreed or question.refused_by:
            return None
        self._connection.execute("UPDATE standing SET used = ? WHERE id = ?", (proven.used + 1, found.id))
        self.append(standing.USED, found.id, {"standing": found.id, "approval": identity})
        place = proven.place
        given = {
            "person": found.person,
            "account": proven.body["account"],
            **({"login": proven.body["login"]} if "login" in proven.body else {}),
            "approve": True,
            **({"reason": proven.body["reason"]} if "reason" in proven.body else {}),
            "standing": {"id": found.id, "chain": place.chain, "seq": place.seq, "hash": place.hash},
        }
        return self._give_answer(asked, question, given, now)

    def revoke_standing(self, identity: str, by: str, login: Login | None = None) -> StandingApproval:
        """From now on it answers nothing, and what it has answered and no call has used is void. Raises RowNotFound, or
        Conflict where it is over."""
        now = max(time.time(), self._due)
        row = self._connection.execute(f"{STANDING} WHERE id = ?", (identity,)).fetchone()
        if row is None:
            raise RowNotFound(f"there is no standing approval {identity}")
        found = standing_from(row)
        if found.revoked_at is not None:
            raise Conflict(f"standing approval {identity} is revoked already")
        known = {} if login is None else {"login": login.as_fact()}
        self._end_standing(identity, now, {"by": by, "account": system.account(), **known})
        return replace(found, revoked_at=now)

    def _end_standing(self, identity: str, now: float, body: Json) -> None:
        self._connection.execute("UPDATE standing SET revoked_at = ? WHERE id = ?", (now, identity))
        self.append(standing.REVOKED, identity, {"standing": identity, **body})

    def _has_ended_standing(self, fact: Json) -> bool:
        """Whether what an answer follows from was revoked meanwhile, by the table or by the log."""
        identity = fact.get("id")
        row = self._connection.execute("SELECT revoked_at FROM standing WHERE id = ?", (identity,)).fetchone()
        logged = "SELECT 1 FROM records WHERE call_id = ? AND kind = ?"
        known = self._connection.execute(logged, (identity, standing.REVOKED)).fetchone()
        return row is None or row[0] is not None or known is not None

    def _proven_standing(self, found: StandingApproval, approval: str) -> standing.ProvenStanding:
        rows = self._connection.execute(f"{RECORD} WHERE call_id = ? ORDER BY id", (found.id,)).fetchall()
        try:
            proven = standing.prove(found.id, map(record_from, rows), self._signer.public, self._signer.state.id)
        except approvals.NotProven as exc:
            raise Unproven(approval, f"{exc}. {_CHANGED}") from None
        place = proven.place
        row = self._connection.execute(
            "SELECT salt FROM records WHERE chain = ? AND seq = ?", (place.chain, place.seq)
        ).fetchone()
        salt = row[0] if row is not None and isinstance(row[0], bytes) else b""
        stated = {name: getattr(found, name) for name in _OF_STANDING}
        stated["shape"] = canonical.salted_bytes(pack(found.shape).encode(), salt)
        if found.shape.get("digest") != found.digest or any(proven.body.get(n) != v for n, v in stated.items()):
            raise Unproven(approval, f"{found.id} differs from what the signed log says of it. {_CHANGED}")
        return proven

    # ── Idempotency keys ──

    def take_key(self, scope: str, key: str, request_digest: str, call_id: str) -> KeyRow | None:
        """None: the key is taken now, by this call. Else the row of the call that has it."""
        taken = self._connection.execute(
            "INSERT INTO keys (scope, key, request_digest, call_id, state, at) VALUES (?, ?, ?, ?, 'started', ?)"
            " ON CONFLICT DO NOTHING",
            (scope, key, request_digest, call_id, time.time()),
        )
        return None if taken.rowcount == 1 else key_row(self._connection, scope, key)

    def settle_key(self, scope: str, key: str, state: Literal["done", "unknown"], outcome: Json | None) -> int:
        """Keep what became of the call that took the key. How many bytes are kept."""
        kept = None if outcome is None else pack(outcome)
        size = len((kept or "").encode())
        self.written += size
        done = self._connection.execute(
            "UPDATE keys SET state = ?, outcome = ?, bytes = ? WHERE scope = ? AND key = ?",
            (state, kept, size, scope, key),
        )
        if done.rowcount != 1:
            raise RowNotFound(f"idempotency key {key!r} was not taken")
        return size

    def kept_bytes(self, principal: str | None = None) -> dict[str, int]:
        """How many bytes of outcomes are kept, by principal; of one alone, where that is given."""
        begin, end = ("", "\U0010ffff") if principal is None else (f"{principal}/", f"{principal}0")  # 0 comes after /
        text = "SELECT scope, sum(bytes) FROM keys WHERE bytes > 0 AND scope >= ? AND scope < ? GROUP BY scope"
        held: dict[str, int] = {}
        for scope, size in self._connection.execute(text, (begin, end)):
            whose = "/".join(scope.split("/")[:2])
            held[whose] = held.get(whose, 0) + size
        return held

    def drop_outcomes(self, principal: str, excess: int) -> None:
        """So many bytes of a principal's outcomes go, at least, and the oldest of them. The keys stay taken."""
        gone: list[tuple[str, str]] = []
        oldest_first = "SELECT scope, key, bytes FROM keys WHERE bytes > 0 AND scope >= ? AND scope < ? ORDER BY at"
        for scope, key, size in self._connection.execute(oldest_first, (f"{principal}/", f"{principal}0")):
            if excess <= 0:
                break
            gone.append((scope, key))
            excess -= size
        self._connection.executemany("UPDATE keys SET outcome = NULL, bytes = 0 WHERE scope = ? AND key = ?", gone)

    def has_kept(self, principal: str, most: int) -> bool:
        """Whether so many outcomes are kept for this principal's keys."""
        begin = f"{principal}/"
        counted = (
            "SELECT count(*) FROM (SELECT 1 FROM keys WHERE scope >= ? AND scope < ? AND outcome IS NOT NULL LIMIT ?)"
        )
        found = self._connection.execute(counted, (begin, f"{principal}0", most)).fetchone()  # 0 comes after /
        return int(found[0]) >= most

    def release_key(self, scope: str, key: str, call_id: str) -> None:
        """Give back the key of a call that provably never ran. One that is settled, or another call's, stays."""
        self._connection.execute(
            "DELETE FROM keys WHERE scope = ? AND key = ? AND call_id = ? AND state = 'started'", (scope, key, call_id)
        )

    def lose_keys(self, call_id: str) -> None:
        """Mark what this call held as unknown: it may have run, and its outcome will never be known."""
        self._connection.execute(
            "UPDATE keys SET state = 'unknown' WHERE call_id = ? AND state = 'started'", (call_id,)
        )

    def settle_unknown(self, call_id: str, happened: bool, said: Json) -> bool:
        """Record what a person found out about a call whose effect was unknown, once. Its idempotency key is free again
        if it had none; else it stays taken, and the call is not made again. Whether there was a key."""
        if self._connection.execute(
            "SELECT 1 FROM records WHERE call_id = ? AND kind = ?", (call_id, SETTLED)
        ).fetchone():
            raise Conflict(f"somebody has settled call {call_id} already")
        text = (
            "UPDATE keys SET state = 'done' WHERE call_id = ? AND state = 'unknown'"
            if happened
            else "DELETE FROM keys WHERE call_id = ? AND state = 'unknown'"
        )
        keys = self._connection.execute(text, (call_id,)).rowcount
        self.append(SETTLED, call_id, {**said, "happened": happened, "keys": keys})
        return bool(keys)

    # ── Tokens ──

    def put_token(self, token: IssuedToken) -> None:
        """Keep what is to be known of a new bearer token. It is on record, signed, and good by that record alone."""
        self._connection.execute(
            "INSERT INTO tokens (id, digest, kind, name, tenant, made_by, made_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(token.id, token.digest, token.kind, token.name, token.tenant, token.made_by),
                *(token.made_at, token.expires_at),
            ),
        )
        self._append_signed(tokens.CREATED, token.id, tokens.making(token))

    def revoke_token(self, identity: str, by: str, now: float) -> IssuedToken:
        """From now on the token is good for nothing. It is on record, signed. Raises RowNotFound, or Conflict where it
        is revoked already."""
        row = self._connection.execute(f"{TOKEN} WHERE id = ?", (identity,)).fetchone()
        if row is None:
            raise RowNotFound(f"there is no token {identity}")
        token = token_from(row)
        if token.revoked_at is not None:
            raise Conflict(f"token {identity} is revoked already")
        self._connection.execute("UPDATE tokens SET revoked_at = ? WHERE id = ?", (now, identity))
        self._append_signed(tokens.REVOKED, identity, {**tokens.about(token), "by": by})
        return replace(token, revoked_at=now)

    # ── Pins and payloads ──

    def put_pin(self, definition: Definition, by: str, at: float, named: str | None = None) -> None:
        """Accept a definition, in place of the one that was accepted before. It is recorded, as `named`."""
        place = (definition.server, definition.kind, definition.name)
        before = self._connection.execute(
            "SELECT digest FROM pins WHERE server = ? AND kind = ? AND name = ?", place
        ).fetchone()
        self._connection.execute(
            "INSERT INTO pins (server, kind, name, digest, body, by, at) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (server, kind, name) DO UPDATE SET digest = excluded.digest, body = excluded.body,"
            " by = excluded.by, at = excluded.at",
            (*place, definition.digest, pack(definition.body), by, at),
        )
        body = {"server": place[0], "definition": place[1], "digest": definition.digest, "by": by}
        body["name"] = place[2] if named is None else named
        self.append("pin_accepted", None, {**body, "before": before[0] if before else None})

    def bind_pin(self, server: str, tool: str, *, instead_of: str | None = None) -> None:
        """Capabilities that name the tool and no server mean this server's from now on. It is recorded."""
        self._connection.execute(
            "UPDATE pins SET bound = NULL WHERE server = ? AND kind = 'tool' AND name = ?", (instead_of, tool)
        )
        bound = self._connection.execute(
            "UPDATE pins SET bound = (SELECT coalesce(max(bound), 0) + 1 FROM pins)"
            " WHERE server = ? AND kind = 'tool' AND name = ? AND bound IS NULL",
            (server, tool),
        )
        if bound.rowcount:
            self.append("pin_bound", None, {"server": server, "tool": tool, "before": instead_of})

    def drop_pins(self, server: str, definitions: Sequence[Definition]) -> None:
        """Forget accepted definitions of a server. How many is recorded."""
        self._connection.executemany(
            "DELETE FROM pins WHERE server = ? AND kind = ? AND name = ?",
            [(server, definition.kind, definition.name) for definition in definitions],
        )
        self.append("pins_dropped", None, {"server": server, "count": len(definitions)})

    def pins(self, server: str | None = None) -> list[Definition]:
        return [row.definition for row in pin_rows(self._connection, server)]

    def put_payload(self, call_id: str, part: Part, salt: bytes, body: bytes) -> None:
        """Keep a payload that the contract lets us keep, and its salt, apart from the log."""
        self.written += len(body)
        self._connection.execute(
            "INSERT OR REPLACE INTO payloads (call_id, part, salt, body) VALUES (?, ?, ?, ?)",
            (call_id, part, salt, body),
        )

    def erase_payload(self, call_id: str) -> bool:
        """Forget every value of a call. Its digests in the log stay, and say nothing without the salt.

        A kept outcome and what people were shown go too. True where there was something to erase.
        """
        gone = self._connection.execute("DELETE FROM payloads WHERE call_id = ?", (call_id,)).rowcount
        gone += self._connection.execute(
            "UPDATE records SET salt = NULL WHERE call_id = ? AND salt IS NOT NULL", (call_id,)
        ).rowcount
        gone += self._connection.execute(
            "UPDATE keys SET outcome = NULL, bytes = 0 WHERE call_id = ? AND outcome IS NOT NULL", (call_id,)
        ).rowcount
        gone += self._connection.execute(
            "UPDATE approvals SET summary = '{}' WHERE (call_id = ? OR consumed_by = ?) AND summary <> '{}'",
            (call_id, call_id),
        ).rowcount
        gone += self._connection.execute(
            "UPDATE approvals SET shape = NULL WHERE (call_id = ? OR consumed_by = ?) AND shape IS NOT NULL",
            (call_id, call_id),
        ).rowcount
        for (identity,) in self._connection.execute(
            "SELECT id FROM standing WHERE call_id = ? AND shape <> '{}'", (call_id,)
        ).fetchall():
            # It was shown with the values of this call, which nobody can be shown any more.
            self._connection.execute("UPDATE standing SET shape = '{}' WHERE id = ?", (identity,))
            self._connection.execute("UPDATE records SET salt = NULL WHERE call_id = ?", (identity,))
            self._end_standing(identity, time.time(), {"why": "erased"})
            gone += 1
        used = "SELECT call_id, id FROM approvals WHERE consumed_by = ?"
        for asked_by, identity in self._connection.execute(used, (call_id,)).fetchall():
            gone += self._connection.execute(
                "UPDATE records SET salt = NULL WHERE call_id = ? AND instr(text, ?) AND salt IS NOT NULL",
                (asked_by, identity),
            ).rowcount
        # No person can be shown any more what they would agree to.
        self._connection.execute(
            "UPDATE approvals SET state = 'expired' WHERE call_id = ? AND state IN ('pending', 'approved')", (call_id,)
        )
        self.erased = True  # also where nothing is left: the files may have kept what was erased before
        return gone > 0

    def forget_before(self, moment: float) -> None:
        """Values that served their purpose before `moment` go: outcomes kept for replay, and what people were shown."""
        self._connection.execute("DELETE FROM keys WHERE at < ? AND state <> 'started'", (moment,))
        self._connection.execute(
            "UPDATE approvals SET summary = '{}', shape = NULL WHERE expires_at < ? AND summary <> '{}'", (moment,)
        )
        self._connection.execute("UPDATE standing SET shape = '{}' WHERE expires_at < ?", (moment,))

    # ── Pruning ──

    def begin_prune(self, chain_name: str, seq: int) -> None:
        self._connection.execute("INSERT OR REPLACE INTO prunes (chain, seq) VALUES (?, ?)", (chain_name, seq))

    def end_prunes(self) -> None:
        """All that was begun is removed. What can be given back to the disk is."""
        self._connection.execute("DELETE FROM prunes")
        self.erased = True

    def remove_records(self, chain_name: str, last: int, most: int) -> int:
        """Remove the first records of a chain, at most so many, and all that was kept beside them. How many went."""
        first = self._connection.execute("SELECT min(seq) FROM records WHERE chain = ?", (chain_name,)).fetchone()[0]
        if first is None or first > last:
            return 0
        part = (chain_name, first, min(last, first + most - 1))
        rows = self._connection.execute(
            "SELECT DISTINCT call_id FROM records WHERE chain = ? AND seq BETWEEN ? AND ? AND call_id IS NOT NULL", part
        ).fetchall()
        now = time.time()
        over = "SELECT id FROM approvals WHERE call_id = ? AND (state = 'consumed' OR expires_at <= ?)"
        for (call_id,) in rows:
            self._connection.execute("DELETE FROM payloads WHERE call_id = ?", (call_id,))
            for approval in self._connection.execute(over, (call_id, now)).fetchall():
                self._connection.execute("DELETE FROM answers WHERE approval_id = ?", approval)
                self._connection.execute("DELETE FROM approvals WHERE id = ?", approval)
        naming.forget_named(self._connection, part)
        done = self._connection.execute("DELETE FROM records WHERE chain = ? AND seq BETWEEN ? AND ?", part)
        self.written += done.rowcount * 1024
        return done.rowcount

    # ── Labels ──

    def labels(self, scopes: Scopes) -> dict[str, Held]:
        """Every label that any of these scopes has."""
        return labels.held(self._connection, scopes)

    def add_labels(self, scopes: Iterable[str], words: Sequence[str], by: tuple[str, str]) -> None:
        """Let scopes hold labels from now on. `by`: call id and tool."""
        labels.add(self._connection, scopes, words, by, time.time())

    def link_labels(self, scope: str, others: Iterable[str]) -> None:
        """What `scope` gets, the others get, and what they have, it has."""
        labels.link(self._connection, scope, others)

    def has_room_for_labels(self, server: str, place: str) -> bool:
        """Whether labels can stick to this place of a server by itself."""
        return labels.has_room(self._connection, server, place)

    def link_labels_like(self, scope: str, like: str) -> None:
        """Link `scope` to what another is linked to."""
        labels.link_like(self._connection, scope, like)

    def forget_labels(self, beginning: str, seconds: float) -> None:
        """Forget scopes whose names begin so, and which nothing has used for so long."""
        labels.forget(self._connection, beginning, time.time() - seconds)

    # ── Quotas ──

    def spend(self, scope: str, day: str, limit: int, amount: int = 1) -> bool:
        """Take one, or more, of `limit` for this day, or for the window that begins then; False where too few are left.

        What was spent on the last days on record stays, whatever day it is by the clock: one that was ahead for a while
        must not give back what today has spent.
        """
        if limit < amount:
            return False
        # Nearly every call: the first of a day alone makes its row, and lets old ones go.
        more = "UPDATE quotas SET used = used + ?4 WHERE scope = ?1 AND day = ?2 AND used + ?4 <= ?3"
        if self._connection.execute(more, (scope, day, limit, amount)).rowcount == 1:
            return True
        self._connection.execute(
            "DELETE FROM quotas WHERE scope = ?1 AND day < ?2 AND day NOT IN"
            " (SELECT day FROM quotas WHERE scope = ?1 ORDER BY day DESC LIMIT ?3)",
            (scope, day, KEPT_DAYS),
        )
        first = "INSERT OR IGNORE INTO quotas (scope, day, used) VALUES (?, ?, ?)"
        return self._connection.execute(first, (scope, day, amount)).rowcount == 1


def is_known(said: Mapping[str, float], digest: str, now: float) -> bool:
    """Whether a process has said this part, and of late."""
    at = said.get(digest)
    return at is not None and abs(now - at) < SAID_SECONDS


def _question(asked: Approval) -> Json:
    """What the record of a question says in plain words."""
    return {
        "call_id": asked.call_id,
        "tool": asked.tool,
        "principal": asked.principal,
        "asked_for": asked.person,
        "rule": asked.rule,
        "roles": list(asked.roles),
        "people": asked.people,
        "self_approval": asked.self_approval,
        "expires_at": asked.expires_at,
        "terms": asked.terms or None,
    }


def apply_changes(running: dict[str, Head], changes: list[tuple[str | None, Head | None]]) -> dict[str, Head]:
    """What runs, once calls have begun and ended."""
    for call_id, place in changes:
        if call_id is not None:
            if place is None:
                running.pop(call_id, None)
            else:
                running[call_id] = place
    return running


def _lost(text: str | None, call_id: str, reason: str) -> Json:
    """The finished record of a call whose outcome is unknown, from its started one."""
    started: Any = {}
    if text is not None:
        with contextlib.suppress(StoreError):  # a damaged record still has to be closed
            started = unpack(text)
    if not isinstance(started, dict) or (started.get("kind"), started.get("call_id")) != ("started", call_id):
        started = {}
    possible = started.get("effect_possible") is not False
    # Of what may change something, only the record of a declared read does not wait for the disk. As when its answer is
    # lost, `governance/facts.py`, it has no effect but what its server may have done beside it.
    declared = possible and started.get("durable") is False
    return {
        **{name: started[name] for name in _COPIED if name in started},
        "status": "unknown",
        "reason_code": reason,
        "message": _LOST[reason],
        "effect": "unknown" if possible and not declared else "none",
        "result": None,
        "facts": {"effect_basis": "declared"} if declared else {},
        "recovered": reason == "crash",
    }
