"""The hash chain and its signed checkpoints. Pure: no files, no clock, no database.

A record's *text* is the canonical JSON of its body and its place; its *hash* is the SHA-256 of that text; the next
record of the chain carries that hash as `prev`. So no record can be edited, removed or moved without breaking the link
after it, and the signed checkpoint of the head covers the last one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import dataclass, plain

GENESIS = "0" * 64
"""`prev` of a chain's first record."""
MAX_RECORD_BYTES = 8 * 1024 * 1024
"""A longer text is refused when it is written, so that a reader may refuse it too."""
MAX_FAULTS = 1000
"""A report lists no more: a log with so many faults is not repaired one by one."""

OPENED = "chain_opened"
"""The kind of a chain's first record."""
CLOSED = "chain_closed"
"""The kind of a chain's last record. Nothing may follow it, unless another process continues the chain, or closes it
again because it had no checkpoint."""
NAMED = "state_named"
"""The kind of a record that says that a state got its id only then, after its first records."""
ENDS = "chain_ends"
"""The kind of a record that names the ends of other chains that were closed meanwhile."""
MAX_PRUNER_NAME = 100
"""Characters of the name of the person who pruned: the statement has to fit its slot."""
SLOT_BYTES = 512
SLOTS = 2
PRUNED_AT = SLOT_BYTES * SLOTS
PRUNED_BYTES = 1024
FILE_BYTES = PRUNED_AT + PRUNED_BYTES * SLOTS
EMPTY_SLOT = b"".ljust(SLOT_BYTES - 1) + b"\n"

_CHAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PRUNED = "pruned"
_STATE = "state"
_RESERVED = frozenset({"v", "chain", "seq", "prev", "at", "kind", "call_id"})
_SIGNED = b"ringfence/1\0"
_SIGNED_RECORD = b"ringfence/1 record\0"
"""Prefixes of what is signed: a signature of a statement is never valid for a record, or the other way round."""


def is_chain_name(name: object) -> bool:
    """Whether a chain can have this name. Only such names are used as names of files."""
    return isinstance(name, str) and _CHAIN.fullmatch(name) is not None


# ── Records ───────────────────────────────────────────────────────────────────────────────────────


@plain
class Head:
    """Where a chain ends."""

    chain: str
    seq: int = 0
    hash: str = GENESIS


@plain
class KnownHead:
    """A head that is known from outside the log: from a witness, or from the signer."""

    head: Head
    by: str
    """Where it is known from, in words."""
    at: float = 0.0
    """When it was signed; 0: unknown."""


Since = Callable[[int], Iterable[str]]
"""Returns the texts of a chain's records after a number, up to the one that is to be signed for."""
Find = Callable[[str], str | None]
"""Returns the text of a part that records share, by its digest."""


@plain
class Record:
    """One link of a chain: its text, and its place as the database has it."""

    chain: str
    seq: int
    at: float
    kind: str
    call_id: str | None
    text: str
    hash: str
    find: Find | None = field(default=None, compare=False, repr=False)

    @property
    def body(self) -> Json:
        """The whole record as an object: its place (`chain seq prev at kind call_id v`) and its own keys.

        Shared parts are filled in. One that is missing, or does not have its digest, is left out.
        """
        read = canonical.loads(self.text)
        value: Json = read if isinstance(read, dict) else {}
        return value if self.find is None else filled(value, self.find)

    @property
    def head(self) -> Head:
        return Head(self.chain, self.seq, self.hash)


@plain
class ContextRecord:
    """A record outside of an export's period that proves that the export is complete: the last one before the period,
    and those from its end to the checkpoint."""

    record: Record


SHARED = "shared"
"""The key under which a record names the parts of its body that it shares with others, by the SHA-256 of their text."""


def shared_by(body: Json) -> list[str]:
    """The digests of the parts that a record shares with others."""
    named = body.get(SHARED)
    return [digest for digest in named if isinstance(digest, str)] if isinstance(named, list) else []


def filled(body: Json, find: Find) -> Json:
    """A record, read as an object, with its shared parts filled in. One that is missing, or does not have its digest,
    is left out."""
    if not (named := shared_by(body)):
        return body
    value = {name: inner for name, inner in body.items() if name != SHARED}
    for digest in named:
        value = _joined(part_named(digest, find), value)
    call = value.get("call")
    facts = value.get("facts")
    decision = value.get("decision")
    # These keys repeat others of the record, so they are not stored.
    if isinstance(call, dict):
        value["call"] = {"id": value.get("call_id"), **call}
    if isinstance(facts, dict):
        identity = decision.get("id") if isinstance(decision, dict) else None
        value["facts"] = {"call_id": value.get("call_id"), "decision_id": identity, **facts}
    return value


def part_named(digest: str, find: Find) -> Json:
    """The shared part with this digest, read as an object; empty where it is missing or unreadable."""
    text = find(digest)
    if text is None or not is_part(text, digest):
        return {}
    try:
        part = canonical.loads(text)
    except canonical.NotCanonical:
        return {}
    return part if isinstance(part, dict) else {}


def is_part(text: str, digest: str) -> bool:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() == digest


def _joined(part: Json, own: Json) -> Json:
    """Merge key by key; the record's own values win."""
    if not isinstance(part, dict) or not isinstance(own, dict):
        return own
    return {**part, **{key: _joined(part[key], value) if key in part else value for key, value in own.items()}}


def named_by(body: Json) -> list[Head]:
    """The last records of other chains that a record names, and that existed before it."""
    if body.get("kind") not in (OPENED, CLOSED, ENDS):
        return []
    ends = body.get("ends")
    named = [body.get("previous"), *(ends if isinstance(ends, list) else ())]
    return [
        Head(str(end.get("chain")), end["seq"], str(end.get("hash")))
        for end in named
        if isinstance(end, dict) and isinstance(end.get("seq"), int)
    ]


class OriginVerifier:
    """Finds chains that belong to another log, given every record of one.

    One key signs for every state of an account, so the first record of a chain, and each checkpoint, name the state.
    Records from before states had ids do not: there, the first record of a chain names the last record of the log
    before it. So a log has one beginning, and a chain with another beginning is not part of it.
    """

    def __init__(self, findings: Findings, state: StateIdentity | None = None) -> None:
        self._findings = findings
        self._state = state
        self._begins: list[tuple[str, int]] = []
        self._names: dict[str, object] = {}
        """The state that each chain named when it was last opened."""

    def feed(self, body: Json) -> None:
        """Take in the next record of any chain."""
        if body["kind"] != OPENED:
            return
        if body.get("previous", body) is None and len(self._begins) <= MAX_FAULTS:
            self._begins.append((body["chain"], body["seq"]))
        named = self._names[body["chain"]] = body.get("state")
        if not admits(self._state, named, body["at"]):
            self._findings.add(f"was opened {_elsewhere(self._state, named)}", body["chain"], body["seq"])

    def signed(self, chain: str, state: str | None, what: str) -> None:
        """Check a signed statement about a chain, after all of that chain's records."""
        good = state is None if self._state is None else self._state.may_have_signed(state)
        if not good or (state is None and self._names.get(chain) is not None):
            self._findings.add(f"{what} was signed {_elsewhere(self._state, state)}", chain)

    def finish(self) -> None:
        """Called after the last record: report a second beginning."""
        for chain, seq in sorted(self._begins) if len(self._begins) > 1 else ():
            text = "begins a log, and so does another chain: those of several states were put together"
            self._findings.add(text, chain, seq)


@plain
class StateIdentity:
    """The state that a log is of: a random id, signed when the state was made or got its id."""

    id: str
    at: float
    older: bool
    """Whether the state had records before it got the id. Those do not name it."""

    def may_have_signed(self, state: str | None) -> bool:
        """Whether a statement that names this `state` can be one of ours. Those of earlier versions name none."""
        return state == self.id or (state is None and self.older)

    def message(self, key: str) -> bytes:
        """The bytes that are signed with the key of that id."""
        named = {"state": self.id, "at": self.at, "older": self.older, "key": key}
        return canonical.dumps({"type": _STATE, "v": 1, **named})

    @classmethod
    def verify(cls, public: Ed25519PublicKey, line: bytes | str) -> StateIdentity | None:
        """The identity in `line` if it is one and `public` signed it, else None."""
        try:
            return cls.of(signed_by(public, canonical.loads(line)))
        except canonical.NotCanonical:
            return None

    @classmethod
    def of(cls, statement: Json | None) -> StateIdentity | None:
        """Parse a statement whose signature was verified before; None where it is of another kind."""
        if statement is None or statement.get("type") != _STATE:
            return None
        named, at, older = (statement.get(name) for name in ("state", "at", "older"))
        good = is_chain_name(named) and isinstance(at, int | float) and isinstance(older, bool)
        return cls(str(named), at, older) if good else None  # type: ignore[arg-type]


def admits(state: StateIdentity | None, named: object, at: float) -> bool:
    """Whether a record of that time that names the state `named`, or none, can be of the log of `state`. If `state` is
    None, the log is of an earlier version, in which no record names one."""
    if state is None:
        return named is None
    return named == state.id or (named is None and state.older and at < state.at)


def _elsewhere(state: StateIdentity | None, named: object) -> str:
    if named is None:
        return "without naming its state"
    if state is None:
        return f"in a state ({f'{named}'[:64]}), and no signed statement says that this is that state"
    return f"in another state ({f'{named}'[:64]}); this one is {state.id}"


def seal(head: Head, at: float, kind: str, call_id: str | None, body: Json) -> Record:
    """The record that follows `head`. Raises ValueError for a body that could not be read back."""
    if not _RESERVED.isdisjoint(body):
        raise ValueError(f"a record body may not set {', '.join(sorted(_RESERVED & body.keys()))}")
    seq = head.seq + 1
    place = {"v": 1, "chain": head.chain, "seq": seq, "prev": head.hash, "at": at, "kind": kind, "call_id": call_id}
    try:
        text = canonical.dumps({**place, **body})
    except (TypeError, RecursionError) as exc:
        raise ValueError(f"a record body must be JSON: {exc}") from None
    if len(text) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(text)} bytes is over the limit of {MAX_RECORD_BYTES}")
    # Only so many brackets can be nested too deeply for a verifier.
    if text.count(b"[") + text.count(b"{") > canonical.MAX_DEPTH and canonical.depth(body) > canonical.MAX_DEPTH:
        raise ValueError(f"a record body may not be nested deeper than {canonical.MAX_DEPTH} levels")
    return Record(head.chain, seq, at, kind, call_id, text.decode(), hashlib.sha256(text).hexdigest())


def seal_proved(
    sign: Callable[[bytes], str], head: Head, at: float, about: tuple[str, str | None], body: Json
) -> Record:
    """The record that follows `head`, with a signature of its own. `about` is its kind and call; `sign` signs the text
    of the record without that signature.

    Such a record proves by itself what any other proves only with the chain up to a checkpoint. Raises ValueError.
    """
    bare = seal(head, at, *about, body)
    return seal(head, at, *about, {**body, "signature": sign(bare.text.encode())})


def sign_record(private: Ed25519PrivateKey, text: bytes) -> str:
    """The signature for a record, over its text without a signature."""
    return private.sign(_SIGNED_RECORD + text).hex()


def has_signature(public: Ed25519PublicKey, body: Json) -> bool:
    """Whether a record, read as an object, has a valid signature of this key, in whichever state it was made."""
    bare = dict(body)
    signature = bare.pop("signature", None)
    if not isinstance(signature, str):
        return False
    try:
        public.verify(bytes.fromhex(signature), _SIGNED_RECORD + canonical.dumps(bare))
    except (InvalidSignature, ValueError):
        return False
    return True


# ── Reports ───────────────────────────────────────────────────────────────────────────────────────


@plain
class Fault:
    """One thing that is not as it was written."""

    text: str
    chain: str | None = None
    seq: int | None = None

    def __str__(self) -> str:
        place = "" if self.chain is None else f"chain {self.chain}"
        if self.seq is not None:
            place += f"{', ' if place else ''}record {self.seq}"
        return f"{place}: {self.text}" if place else self.text


@plain
class Verification:
    """What a verification found. `notes` are worth knowing and no sign of tampering."""

    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    records: int = 0
    heads: tuple[Head, ...] = ()
    state: str | None = None
    """The id of the state whose log it is, by what was signed."""

    @property
    def ok(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        chains = f"{len(self.heads)} chain{'' if len(self.heads) == 1 else 's'}"
        counted = f"{self.records} record{'' if self.records == 1 else 's'} in {chains}"
        lines = [f"{counted}: {'verified' if self.ok else f'{len(self.faults)} faults'}."]
        # A database may have any text as the name of a chain; it must not forge a line of the report.
        lines += [text.replace("\n", "\\n") for text in (*map(str, self.faults), *self.notes)]
        return "\n".join(lines)


@dataclass(slots=True)
class Findings:
    """Collects faults, up to MAX_FAULTS, and notes."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, text: str, chain: str | None = None, seq: int | None = None) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(text, chain, seq))
        elif len(self.faults) == MAX_FAULTS:
            self.faults.append(Fault(f"more than {MAX_FAULTS} faults; the rest are not listed"))


class ChainVerifier:
    """Checks one chain record by record. With `partial`, the chain may begin past its first record.

    With `pruned` it begins after that record, or, if a prune was interrupted, with one that it was to remove. The
    records of that part must lead to `pruned` without a gap; else `torn` is the first of them.
    """

    def __init__(
        self, chain: str | None, findings: Findings, *, partial: bool = False, pruned: Head | None = None
    ) -> None:
        self.chain = chain
        self.count = 0
        self.first: int | None = None
        self.seq = 0 if pruned is None else pruned.seq
        self.hash = GENESIS if pruned is None else pruned.hash
        self.closed = False
        self.torn: int | None = None
        """The first record of the pruned part that is still there and does not chain to its signed end."""
        self.signed = 0
        """A signature covers the chain up to this number, so its texts are our own, and need no strict reading."""
        self._partial = partial
        self._pruned = pruned
        self._findings = findings

    @property
    def head(self) -> Head:
        return Head(self.chain or "", self.seq, self.hash)

    def feed(self, text: str, digest: str) -> Json | None:
        """Check the next record and return it as an object, or None where it cannot be read."""
        self.count += 1
        due = self.seq + 1
        body = _read(text, strict=due > self.signed)
        computed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if computed != digest:
            self._findings.add("was edited: its text does not have its hash", self.chain, due)
        if body is None:
            self._findings.add("is not a record: its text cannot be read as one", self.chain, due)
            self.seq = due
            self.hash = digest
            return None
        self._place(body, digest, due)
        return body

    def _place(self, body: Json, digest: str, due: int) -> None:
        found = self._findings
        seq = int(body["seq"])
        if self.chain is None:
            self.chain = str(body["chain"])
        if body["chain"] != self.chain:
            found.add(f"belongs to chain {body['chain']}, not to this one", self.chain, seq)
        if self.first is None:
            self.first = seq
            if self._partial or seq < due:
                due = seq
                self.hash = GENESIS if seq == 1 and not self._partial else str(body["prev"])
        elif self._pruned is not None and due < seq <= self._pruned.seq + 1:
            # The records between were pruned while the chain was read. If those before them are still there afterwards,
            # somebody inserted them.
            self.torn = self.first
            due = seq
            self.hash = self._pruned.hash if seq > self._pruned.seq else str(body["prev"])
        if self._pruned is not None and seq == self._pruned.seq and digest != self._pruned.hash:
            found.add("is not the last record that was pruned, by the signed statement about it", self.chain, seq)
        if self.closed and body["kind"] not in (OPENED, CLOSED):
            found.add("was added after the chain was closed", self.chain, seq)
        if seq > due:
            missing = f"record {due} is" if seq == due + 1 else f"records {due} to {seq - 1} are"
            found.add(f"{missing} missing before it", self.chain, seq)
        elif seq < due:
            found.add(f"stands out of order: record {due} was due here", self.chain, seq)
        elif body["prev"] != self.hash:
            what = f"record {seq - 1} was replaced" if seq > 1 else "the chain's beginning was cut off"
            found.add(f"does not follow the record before it: {what}", self.chain, seq)
        self.seq = seq
        self.hash = digest
        self.closed = body["kind"] == CLOSED or (self.closed and body["kind"] != OPENED)


def misfiled(record: Record, body: Json) -> Sequence[str]:
    """The columns of a record that differ from its text, of which `body` is the parsed form."""
    columns = (record.chain, record.seq, record.at, record.kind, record.call_id)
    if columns == (body["chain"], body["seq"], body["at"], body["kind"], body.get("call_id")):
        return ()
    names = ("chain", "seq", "at", "kind", "call_id")
    return [name for name, value in zip(names, columns, strict=True) if body.get(name) != value]


_plainly = canonical.reader()


def _read(text: str, *, strict: bool) -> Json | None:
    if len(text) > MAX_RECORD_BYTES:
        return None
    try:
        body: Any = canonical.loads(text) if strict else _plainly(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or body.get("v") != 1:
        return None
    seq = body.get("seq")
    at = body.get("at")
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 1 or not isinstance(at, int | float):
        return None
    well = isinstance(body.get("prev"), str) and isinstance(body.get("kind"), str)
    return body if well and is_chain_name(body.get("chain")) else None


def verify_records(records: Iterable[tuple[str, str]], *, chain: str | None = None) -> Verification:
    """Verify one whole chain given as (text, hash) in order; `chain` is its name where that is known.

    A chain that lost its end still verifies here: only a signed checkpoint knows where it ended.
    """
    findings = Findings()
    verifier = ChainVerifier(chain, findings)
    for text, digest in records:
        verifier.feed(text, digest)
    heads = (verifier.head,) if verifier.count else ()
    return Verification(tuple(findings.faults), tuple(findings.notes), verifier.count, heads)


# ── Signatures ────────────────────────────────────────────────────────────────────────────────────


def key_id(public: Ed25519PublicKey) -> str:
    """A short name of a public key, to tell a wrong key from a forged signature."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def sign_statement(private: Ed25519PrivateKey, statement: Json) -> bytes:
    """One line, `{"signature":…,"statement":…}`, in canonical form and without the newline."""
    return sign_message(private, canonical.dumps(statement))


def sign_message(private: Ed25519PrivateKey, message: bytes) -> bytes:
    """The same for a statement that is in canonical form already."""
    signature = private.sign(_SIGNED + message).hex()
    return b'{"signature":"' + signature.encode() + b'","statement":' + message + b"}"


def signed_by(public: Ed25519PublicKey, signed: Any) -> Json | None:
    """The statement of a parsed line if `public` signed it, else None."""
    if not isinstance(signed, dict) or signed.keys() != {"signature", "statement"}:
        return None
    statement = signed["statement"]
    signature = signed["signature"]
    if not isinstance(statement, dict) or not isinstance(signature, str):
        return None
    try:
        raw = bytes.fromhex(signature)
        public.verify(raw, _SIGNED + canonical.dumps(statement))
    except (InvalidSignature, ValueError):
        return None
    return statement if raw.hex() == signature else None


@plain
class Period:
    """From a time up to another, which is not included; None: without that bound."""

    since: float | None = None
    until: float | None = None

    @property
    def whole(self) -> bool:
        return self.since is None and self.until is None


ALWAYS = Period()


@plain
class Checkpoint:
    """A signed statement that a chain had this head. With a period it closes the chain in an export."""

    chain: str
    seq: int
    head: str
    count: int
    at: float
    period: Period | None = None
    state: str | None = None
    """The state of the chain; None in statements of versions in which states had no ids."""

    def statement(self) -> Json:
        out: Json = {"chain": self.chain, "seq": self.seq, "head": self.head, "count": self.count, "at": self.at}
        if self.state is not None:
            out["state"] = self.state
        if self.period is None:
            return {"type": "checkpoint", "v": 2 if self.state is None else 3, **out}
        return {"type": "closing", **out, "from": self.period.since, "to": self.period.until}

    def sign(self, private: Ed25519PrivateKey) -> bytes:
        return sign_message(private, self.message())

    def message(self) -> bytes:
        """The bytes that are signed."""
        if self.period is not None or self.state is None:
            return canonical.dumps(self.statement())
        # The same bytes, written out: this is signed twice in every call.
        message = (
            f'{{"at":{self.at!r},"chain":"{self.chain}","count":{self.count},"head":"{self.head}",'
            f'"seq":{self.seq},"state":"{self.state}","type":"checkpoint","v":3}}'
        )
        return message.encode()

    @classmethod
    def verify(cls, public: Ed25519PublicKey, line: bytes | str) -> Checkpoint | None:
        """The checkpoint in `line` if it is one and `public` signed it, else None.

        Other keys are ignored, both in the statement, such as who signed it for us, and besides it, such as the
        signature of a witness.
        """
        try:
            read = canonical.loads(line)
        except canonical.NotCanonical:
            return None
        if isinstance(read, dict):
            read = {name: value for name, value in read.items() if name in ("signature", "statement")}
        return cls.of(signed_by(public, read))

    @classmethod
    def of(cls, statement: Json | None) -> Checkpoint | None:
        """Parse a statement whose signature was verified before; None where it is no checkpoint."""
        if statement is None or statement.get("type") not in ("checkpoint", "closing"):
            return None
        period = None
        if statement["type"] == "closing":
            period = Period(statement.get("from"), statement.get("to"))
        try:
            chain, seq, head, count, at = (statement[name] for name in ("chain", "seq", "head", "count", "at"))
        except KeyError:
            return None
        return cls(chain, seq, head, count, at, period, statement.get("state"))


# ── Pruned beginnings ─────────────────────────────────────────────────────────────────────────────
#
# A signed statement that the beginning of a chain was removed on purpose. It names the last removed record by its hash,
# which the first remaining record carries as `prev`. So a chain that begins after a signed prune verifies like one that
# begins at its first record, and any other cut is still found.


@plain
class Pruned:
    """The records of `chain` up to `seq`, the hash of the last of which is `head`, are gone."""

    chain: str
    seq: int
    head: str
    count: int
    """How many this prune removed."""
    at: float
    before: float
    """Records older than this were to be removed."""
    by: str
    state: str | None = None
    """The state of the chain; None in statements of versions in which states had no ids."""

    @property
    def end(self) -> Head:
        return Head(self.chain, self.seq, self.head)

    def sign(self, private: Ed25519PrivateKey) -> bytes:
        return sign_message(private, self.message(key_id(private.public_key())))

    def message(self, key: str) -> bytes:
        """The bytes that are signed with the key of that id."""
        place = {"chain": self.chain, "seq": self.seq, "head": self.head, "count": self.count}
        who: Json = {"at": self.at, "before": self.before, "by": self.by, "key": key}
        if self.state is not None:
            who["state"] = self.state
        return canonical.dumps({"type": _PRUNED, "v": 1, **place, **who})

    @classmethod
    def verify(cls, public: Ed25519PublicKey, line: bytes | str) -> Pruned | None:
        """The statement in `line` if it is one and `public` signed it, else None."""
        try:
            return cls.of(signed_by(public, canonical.loads(line)))
        except canonical.NotCanonical:
            return None

    @classmethod
    def of(cls, statement: Json | None) -> Pruned | None:
        """Parse a statement whose signature was verified before; None where it is of another kind."""
        if statement is None or statement.get("type") != _PRUNED:
            return None
        shape = {"chain": str, "seq": int, "head": str, "count": int, "at": int | float, "before": int | float}
        if not all(isinstance(statement.get(name), kind) for name, kind in {**shape, "by": str}.items()):
            return None
        if not is_chain_name(statement["chain"]) or statement["seq"] < 1:
            return None
        return cls(**{name: statement[name] for name in (*shape, "by")}, state=statement.get("state"))


# ── The checkpoint file ───────────────────────────────────────────────────────────────────────────
#
# Two slots of fixed size, written in turn: a crash may tear the one that is being written, and the other still has the
# last good checkpoint. Once the chain was pruned, two larger slots follow, for the statement on that.


def pack_slot(line: bytes, size: int = SLOT_BYTES) -> bytes:
    """A signed line, padded with blanks to the size of a slot."""
    if len(line) >= size:
        raise ValueError(f"a statement of {len(line)} bytes does not fit its slot")
    return line.ljust(size - 1) + b"\n"


@dataclass(frozen=True, slots=True)
class Slots:
    """What a checkpoint file holds."""

    newest: Checkpoint | None
    """The newest checkpoint of this chain that verifies."""
    index: int
    """Its slot; -1 where there is none."""
    unreadable: int
    """How many slots have something else than a checkpoint that verifies."""


def read_slots(data: bytes, chain: str, public: Ed25519PublicKey) -> Slots:
    """Read the checkpoint file of `chain`, which may be damaged."""
    newest = None
    index = -1
    unreadable = 0
    for number in range(SLOTS):
        slot = data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
        if not slot.strip():
            continue
        found = Checkpoint.verify(public, slot)
        if found is None or found.chain != chain or found.period is not None:
            unreadable += 1
        elif newest is None or found.seq >= newest.seq:
            newest = found
            index = number
    return Slots(newest, index, unreadable)


_IDENTITY = "state."


def identity_name(public: Ed25519PublicKey) -> str:
    """The name of the file, in the folder of the checkpoints, with the identity of the state signed by this key."""
    return f"{_IDENTITY}{key_id(public)}"


def is_identity_name(name: str) -> bool:
    """Whether this is the name of such a file. No chain can have it: it has a dot."""
    return name.startswith(_IDENTITY)


def identity_in(checkpoints: Mapping[str, bytes], public: Ed25519PublicKey) -> StateIdentity | None:
    """The identity in that file, if this key signed it; else None."""
    return StateIdentity.verify(public, checkpoints.get(identity_name(public), b""))


def read_pruned(data: bytes, chain: str, public: Ed25519PublicKey) -> tuple[Pruned | None, int]:
    """The newest statement of a checkpoint file on what was pruned from `chain`, and its slot; None and -1 without
    one."""
    newest = None
    index = -1
    for number in range(SLOTS):
        start = PRUNED_AT + number * PRUNED_BYTES
        slot = data[start : start + PRUNED_BYTES].strip(b"\0 \n")
        found = Pruned.verify(public, slot) if slot else None
        if found is not None and found.chain == chain and (newest is None or found.seq > newest.seq):
            newest = found
            index = number
    return newest, index


# ── Payloads that are kept apart from the log, so that they can be erased ─────────────────────────


SALT_BYTES = 16


def payload_is_as_recorded(records: Iterable[Json], part: str, salt: object, body: object) -> bool | None:
    """Whether the records of its call, read as objects, confirm a kept payload. None where none of them says that
    anything was kept: records of earlier versions do not."""
    entries = [entry for record in records if isinstance(entry := record.get(part), dict)]
    if not isinstance(salt, bytes) or not isinstance(body, bytes) or len(salt) != SALT_BYTES:
        return False if any("kept" in entry for entry in entries) else None
    digest = canonical.salted_bytes(body, salt)
    kept = [entry["kept"] for entry in entries if "kept" in entry]
    if kept:
        return all(each == digest for each in kept)
    # Records of earlier versions have only the digest of the call's own value: the same, if nothing was redacted.
    return True if digest in [entry.get("digest") for entry in entries] else None
