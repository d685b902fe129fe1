"""What the log proves of an approval: what was asked, who answered what and when, and which call used it.

A question and each answer are records with signatures of their own; an answer names the question by its hash, and the
question holds digests of what it is for and of what people are shown. Changing the tables of the store, or adding
records to the log, makes no such signature; so a table only says where to look.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import (
    Find,
    Findings,
    Head,
    Record,
    StateIdentity,
    admits,
    filled,
    has_signature,
    part_named,
    shared_by,
)
from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import plain

ASKED = "approval_asked"
ANSWERED = "approval_answered"
USED = "approval_used"
VOID = "approval_void"
UNFIT = "approval_answer_refused"
"""What somebody sent and is no answer to what they were asked, or not theirs to give."""
ESCALATED = "approval_escalated"
"""A question has waited so long that others may answer it, too."""
RETURNED = "approval_state_used"
"""A client came back with what it held while its person was asked; it cannot do so with the same again."""
SET_BACK = "clock_set_back"
STANDING_MADE = "standing_made"
"""A person approved calls of one shape beforehand; the answers that this gives name its record."""
STANDING_REVOKED = "standing_revoked"
_PROOFS = (ASKED, ANSWERED, STANDING_MADE)
_RUNS = ("started", "answered")
"""Records of what may run on an approval: a call, and what its caller answers to a server in the course of it."""
_RUNS_ON = '"approval":{"asked":'
"""Never within what records share: no two calls run on the same approval."""
_MAX_PARTS = 10_000
_LATE_SECONDS = 60.0
"""Between the look at the clock and the record of the start; a busy machine needs its time."""


class NotProven(ValueError):
    """The log does not say that people agreed; the text says what is missing."""

    def __init__(self, problem: str, *, older: bool = False) -> None:
        super().__init__(problem)
        self.older = older
        """Whether an earlier version is to blame, which signed no questions."""


@plain
class ProvenAnswer:
    """One person's agreement, and its record."""

    person: str
    at: float
    place: Head
    account: Json | None = None
    """The account that gave it, by the kernel; None in records of versions that did not say."""
    login: Json | None = None
    """How the person had proved who they are, where a gateway gave it for them."""
    standing: Json | None = None
    """The id and the record of what they approved beforehand, where this answer follows from that."""

    @property
    def giver(self) -> str:
        return giver_of(self.person, self.account, self.login)


@plain
class ProvenApproval:
    """What the log proves of one approval."""

    id: str
    question: Json
    """The body of the record of the question."""
    place: Head
    agreed: tuple[ProvenAnswer, ...] = ()
    refused_by: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()
    void: str | None = None
    """Why it is good for nothing any more."""

    @property
    def complete(self) -> bool:
        """Whether as many people agreed as were asked for, each from an account of their own, and none refused."""
        wanted = _count(self.question)
        people, givers = {yes.person for yes in self.agreed}, {yes.giver for yes in self.agreed}
        return min(len(people), len(givers)) >= wanted and not self.refused_by

    def expired(self, now: float, boot: str | None, uptime: float) -> bool:
        """Judged by the time of day and by the time that has passed since the question: the later counts."""
        until = self.question.get("until")
        if isinstance(until, dict) and boot is not None and until.get("boot") == boot:
            passed = until.get("uptime")
            if isinstance(passed, int | float) and uptime >= passed:
                return True
        expires_at = self.question.get("expires_at")
        return not isinstance(expires_at, int | float) or now >= expires_at

    def as_fact(self) -> Json:
        """The approval as the record of a call names it: by places in the log."""
        by = [{"person": yes.person, "at": yes.at, **_place_fact(yes.place)} for yes in self.agreed]
        stood = [yes.standing for yes in self.agreed if yes.standing is not None]
        more = {"standing": stood} if stood else {}
        return {"id": self.id, "rule": self.question.get("rule"), "asked": _place_fact(self.place), "by": by, **more}


@plain
class Proof:
    """A question or an answer that a call of an export ran on, and that lies outside of it."""

    record: Record


def references(text: str) -> list[Head]:
    """Where the question and the answers are that a call, by the text of this record, ran on."""
    # A look for the words first: most calls run without, and to read their records would take long.
    if _RUNS_ON not in text:
        return []
    try:
        body = canonical.loads(text)
    except canonical.NotCanonical:
        return []
    return _places(body.get("approval")) if isinstance(body, dict) and body.get("kind") in _RUNS else []


def prove(identity: str, records: Iterable[Record], public: Ed25519PublicKey, state: str) -> ProvenApproval:
    """What these records prove of an approval in the state of this id. Raises NotProven where they do not even prove
    that it was asked for."""
    found = [entry for record in records if (entry := read_entry(record)) is not None and _id(entry[0]) == identity]
    signed = [(body, place) for body, place in found if body["kind"] == ASKED and has_signature(public, body)]
    asked = [(body, place) for body, place in signed if body.get("state") == state]
    if len(asked) != 1:
        if any(body["kind"] == ASKED and "signature" not in body for body, _ in found):
            raise NotProven("it was asked by a version that signed no questions; have the call made again", older=True)
        if any("state" not in body for body, _ in signed):
            text = "it was asked by a version that did not sign in which state; have the call made again"
            raise NotProven(text, older=True)
        if signed:
            raise NotProven("it was asked in another state")
        raise NotProven("the signed log does not have its question")
    (question, place), *_ = asked
    answers = [
        (body, at)
        for body, at in found
        if body["kind"] == ANSWERED and body.get("asked") == place.hash
        if body.get("state") == state and has_signature(public, body)
    ]
    return ProvenApproval(
        identity,
        question,
        place,
        tuple(_agreement(body, at) for body, at in answers if body.get("approve") is True),
        tuple(str(b.get("person")) for b, _ in answers if b.get("approve") is not True),
        tuple(str(b.get("used_by")) for b, _ in found if b["kind"] == USED),
        next((str(b.get("why")) for b, _ in found if b["kind"] == VOID), None),
    )


def proves(public: Ed25519PublicKey, record: Record) -> bool:
    """Whether a question or an answer is one by its own signature."""
    entry = read_entry(record)
    return entry is not None and _is_signed(public, entry, record.hash)


def _is_signed(public: Ed25519PublicKey, entry: tuple[Json, Head], digest: str) -> bool:
    return entry[1].hash == digest and has_signature(public, entry[0])


def read_entry(record: Record) -> tuple[Json, Head] | None:
    """A record and its place, read from its text alone: the columns beside it in the table can hold anything."""
    try:
        body = canonical.loads(record.text)
    except canonical.NotCanonical:
        return None
    if not isinstance(body, dict) or not isinstance(body.get("at"), int | float):
        return None
    place = _place({**body, "hash": hashlib.sha256(record.text.encode("utf-8", "surrogatepass")).hexdigest()})
    return None if place is None or not isinstance(body.get("kind"), str) else (body, place)


def _id(body: Json) -> Any:
    return body.get("approval")


def _agreement(body: Json, place: Head) -> ProvenAnswer:
    stood = _object(body, "standing")
    return ProvenAnswer(
        str(body.get("person")), float(body["at"]), place, _object(body, "account"), login_of(body), stood
    )


def _object(body: Json, name: str) -> Json | None:
    found = body.get(name)
    return found if isinstance(found, dict) else None


def login_of(body: Json) -> Json | None:
    """How whoever gave an answer had logged in, by the record of it."""
    return _object(body, "login")


def giver_of(person: str, account: Json | None, login: Json | None = None) -> str:
    """Who counts once, whatever people they answer as: an account; or a person, where the record names no account, or
    where they had a credential of their own, and the account is that of the gateway."""
    if account is None or (login is not None and login.get("way") != "link"):
        return f"person {person}"
    uid = account.get("uid")
    return f"uid {uid}" if isinstance(uid, int) else f"account {account.get('name')}"


def _count(question: Json) -> int:
    people = question.get("people")
    return max(1, people) if isinstance(people, int) else 1


def _place_fact(place: Head) -> Json:
    return {"chain": place.chain, "seq": place.seq, "hash": place.hash}


def _place(fact: Any) -> Head | None:
    if not isinstance(fact, dict):
        return None
    chain = fact.get("chain")
    seq = fact.get("seq")
    digest = fact.get("hash")
    good = isinstance(chain, str) and isinstance(seq, int) and isinstance(digest, str)
    return Head(chain, seq, digest) if good else None  # type: ignore[arg-type]


# ── Every call of a log ───────────────────────────────────────────────────────────────────────────


class ApprovalVerifier:
    """Given every record of a log, its chains in any order, finds calls that ran on approvals that it does not have."""

    def __init__(self, findings: Findings, public: Ed25519PublicKey, state: StateIdentity | None = None) -> None:
        self._findings = findings
        self._public = public
        self._state = state
        self._records: dict[str, Json] = {}
        """Questions and answers by their hash."""
        self._runs: list[Json] = []
        self._void: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._stood: dict[str, set[str]] = {}
        """By the hash of what stands: the approvals that it gave."""
        self._revoked: dict[str, float] = {}
        self._speaking: dict[str, bool] = {}
        """Of parts that records share, whether they say that people were asked."""

    def feed(self, body: Json, digest: str, find: Find | None = None, *, pruned: bool = False) -> None:
        """A record that its chain has; `find` gives what it shares with others.

        One that was `pruned` and still stands is proof for others as before; what it ran on itself may be gone.
        """
        kind = body["kind"]
        if kind in _RUNS:
            if pruned:
                return
            # Most calls need no approval, and to fill in the records of those would take long.
            if find is not None and (body.get("approval") is not None or self._speaks(body, find)):
                body = filled(body, find)
            if body.get("approval") is not None or (kind == "started" and _asks(body)):
                self._runs.append({name: body.get(name) for name in ("chain", "seq", "at", "call", "approval")})
        elif kind == STANDING_REVOKED:
            self._revoked[str(body.get("standing"))] = body["at"]
        elif kind in _PROOFS:
            self._records[digest] = body
            if kind == ANSWERED and body.get("approve") is not True:
                self._refused[str(_id(body))] = str(body.get("person"))
        elif kind == VOID:
            self._void[str(_id(body))] = str(body.get("why"))

    def _speaks(self, body: Json, find: Find) -> bool:
        for digest in shared_by(body):
            speaks = self._speaking.get(digest)
            if speaks is None:
                part = part_named(digest, find)
                speaks = part.get("approval") is not None or _asks(part)
                if part:
                    if len(self._speaking) >= _MAX_PARTS:
                        self._speaking.clear()
                    self._speaking[digest] = speaks
            if speaks:
                return True
        return False

    def vouch(self, text: str, digest: str) -> bool:
        """A question or answer from outside of what is verified, which its own signature must prove."""
        entry = read_entry(Record("", 0, 0.0, "", None, text, digest))
        if entry is None or not _is_signed(self._public, entry, digest):
            return False
        if entry[0]["kind"] in _PROOFS:
            self._records[digest] = entry[0]
        return True

    def wanted(self) -> list[Head]:
        """Where questions and answers are that calls ran on and that were not seen."""
        places = [place for run in self._runs for place in _places(run["approval"])]
        return list(dict.fromkeys(place for place in places if place.hash not in self._records))

    def finish(self) -> None:
        """All was seen that there is."""
        used: dict[str, str] = {}
        for run in self._runs:
            approval = run["approval"] if isinstance(run["approval"], dict) else {}
            identity = approval.get("id")
            call = run["call"].get("id") if isinstance(run["call"], dict) else None
            problem = self._problem(run, approval)
            if problem is None and used.setdefault(str(identity), str(call)) != str(call):
                problem = f"ran on approval {identity}, which call {used[str(identity)]} had used"
            if problem is not None:
                self._findings.add(f"call {call} {problem}", run["chain"], run["seq"])

    def _problem(self, run: Json, approval: Json) -> str | None:
        identity = approval.get("id")
        if not isinstance(identity, str):
            return "ran without the approval that policy demanded"
        if identity in self._void:
            return f"ran on approval {identity}, which was void ({self._void[identity]})"
        if identity in self._refused:
            return f"ran on approval {identity}, which {self._refused[identity]} refused"
        if "asked" not in approval:
            return f"ran on approval {identity}, the question and answers of which are not signed"
        question = self._signed(approval["asked"], identity, ASKED)
        if question is None:
            return f"ran on approval {identity}, and this log has no question for it that was asked in this state"
        place = _place(approval["asked"])
        agreed, givers = set(), set()
        for entry in approval.get("by") or ():
            answer = self._signed(entry, identity, ANSWERED)
            if answer is not None and answer.get("approve") is True and place and answer.get("asked") == place.hash:
                problem = self._stands(answer, question, identity)
                if problem is not None:
                    return f"ran on approval {identity}, which was given by {problem}"
                agreed.add(answer.get("person"))
                givers.add(giver_of(str(answer.get("person")), _object(answer, "account"), login_of(answer)))
        count = min(len(agreed), len(givers))
        if count < (wanted := _count(question)):
            return f"ran on approval {identity}, which this log has {count} of {wanted} people agree to"
        return _mismatch(run, identity, question)

    def _stands(self, answer: Json, question: Json, identity: str) -> str | None:
        """Why an answer does not follow from what its person approved beforehand, where it says that it does."""
        fact = answer.get("standing")
        if fact is None:
            return None
        named = fact.get("id") if isinstance(fact, dict) else None
        made = self._made(fact, named)
        if made is None:
            return f"standing approval {named}, which this log does not have"
        alike = ("person", "account", "login")
        same = all(made.get(name) == answer.get(name) for name in alike)
        if not same or any(made.get(name) != question.get(name) for name in ("tool", "principal", "rule")):
            return f"standing approval {named}, which is for other calls or by somebody else"
        expires_at, times = made.get("expires_at"), made.get("times")
        if not isinstance(expires_at, int | float) or answer["at"] >= expires_at + _LATE_SECONDS:
            return f"standing approval {named} after that had expired"
        if answer["at"] > self._revoked.get(str(named), float("inf")) + _LATE_SECONDS:
            return f"standing approval {named} after that was revoked"
        given = self._stood.setdefault(str(named), set())
        given.add(identity)
        if not isinstance(times, int) or len(given) > times:
            return f"standing approval {named} more often than it was made for"
        return None

    def _made(self, fact: Any, named: Any) -> Json | None:
        place = _place(fact)
        body = None if place is None else self._records.get(place.hash)
        if body is None or body["kind"] != STANDING_MADE or body.get("standing") != named:
            return None
        return self._good(body)

    def _signed(self, fact: Any, identity: str, kind: str) -> Json | None:
        place = _place(fact)
        body = None if place is None else self._records.get(place.hash)
        if body is None or body["kind"] != kind or _id(body) != identity:
            return None
        return self._good(body)

    def _good(self, body: Json) -> Json | None:
        if not admits(self._state, body.get("state"), body["at"]):
            return None
        return body if has_signature(self._public, body) else None


def _asks(body: Json) -> bool:
    decision = body.get("decision")
    return isinstance(decision, dict) and bool(decision.get("asks"))


def _places(approval: Any) -> list[Head]:
    if not isinstance(approval, dict):
        return []
    by, stood = approval.get("by"), approval.get("standing")
    places = [
        approval.get("asked"),
        *(by if isinstance(by, list) else []),
        *(stood if isinstance(stood, list) else []),
    ]
    return [place for place in map(_place, places) if place is not None]


def _mismatch(run: Json, identity: str, question: Json) -> str | None:
    """What was asked was about another call, or about one of another time."""
    call = run["call"] if isinstance(run["call"], dict) else {}
    principal = call.get("principal")
    caller = f"{principal.get('tenant')}/{principal.get('agent')}" if isinstance(principal, dict) else None
    # The names of resources and prompts are kept in a cleaned form.
    tool = question.get("tool") if call.get("kind") != "tool" else call.get("tool")
    if (question.get("tool"), question.get("principal")) != (tool, caller):
        return f"ran on approval {identity}, which was for another call"
    at = run["at"]
    asked_at = question["at"]
    expires_at = question.get("expires_at")
    if not isinstance(expires_at, int | float) or at >= expires_at + _LATE_SECONDS:
        return f"ran on approval {identity} after that had expired"
    return f"ran on approval {identity} before that was asked for" if at < asked_at - _LATE_SECONDS else None
