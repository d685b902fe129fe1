"""The records of a call, *started* and *finished*: who called what, under which contract and rules, by whose approval,
and how it ended.

Values never enter a record. Arguments and results appear as salted digests, and by their names where the contract
allows that. Texts that may be kept are stored apart from the chain, where they can be erased.
"""

from __future__ import annotations

import marshal
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from ringfence.audit.chain import SHARED
from ringfence.core import canonical
from ringfence.core.box import Ran
from ringfence.core.errors import SetUpFailed
from ringfence.core.model import (
    Answer,
    Call,
    Contract,
    Decision,
    Definition,
    GuardedText,
    Json,
    Outcome,
    Receipt,
    Shadow,
    Transport,
    own_words,
)
from ringfence.core.record import dataclass
from ringfence.core.sessions import Within
from ringfence.governance import disclosure
from ringfence.governance.budget import BudgetSlot
from ringfence.governance.effects import NO_EFFECTS, PossibleEffects
from ringfence.governance.flow import FlowState
from ringfence.governance.idempotency import IdempotencyKey
from ringfence.store import Approval

if TYPE_CHECKING:
    from ringfence.telemetry.watch import CallWatch

SAID_BY_OTHERS = frozenset(
    {"upstream_error", "answer_unusable", "answer_lost", "client_refused", "server_question", "bad_output"}
    | {"server_start", "server_listing", "server_version", "server_down", SetUpFailed.REASON}
)
"""Reason codes whose message comes in part from a server, a client or code in a box: it may repeat a value, so only the
code goes on record."""


_MAX_NAME = 1000
"""Characters. A longer name is cut after it was redacted: half a secret would not be recognised."""
_MAX_PARTS = 256
_MAX_VALUES = 2000
_MAX_MESSAGE = 65_536
_MIN_VALUE = 4
"""Characters. A shorter argument value reveals nothing, and would be found everywhere."""


def _withheld(_: str) -> GuardedText:
    """Stands in for a guard where there is none: no text is kept."""
    return own_words("")


@dataclass(slots=True)
class CallState:
    """One call in the pipeline. Each stage fills in what it finds out, so that wherever the call ends, all of that goes
    on record."""

    call: Call
    environment: str
    began: float = field(default_factory=time.monotonic)
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    salt: bytes = field(default_factory=lambda: os.urandom(16))
    kept: dict[str, str] = field(default_factory=dict)
    """The salted digests of the payloads that are kept, by part. They differ from the digests of the call's own
    arguments and result where something was redacted."""
    contract: Contract | None = None
    definition: Definition | None = None
    decision: Decision | None = None
    flow: FlowState | None = None
    """Its labels; None: no label is declared."""
    is_preview: bool = False
    """Whether it previews another call for the person who is asked to approve that one. Its agent gets no result."""
    programs: tuple[Contract, ...] = ()
    """The contracts of the tools that run code like the code in this call: it was judged by them, too."""
    opening: Contract | None = None
    """If it forks a session: the contract of the capability that opened the session, by which it was judged, too."""
    possible: PossibleEffects = NO_EFFECTS
    """What it may change outside."""
    lasts: Literal["call", "server"] | None = None
    """How long such a change lasts, if it can only be in the box of its server."""
    network: Json | None = None
    """The network requests of its server's box while the call ran."""
    approval: Approval | None = None
    slot: BudgetSlot | None = None
    """Its place among the calls that may run at the same time."""
    key: IdempotencyKey | None = None
    """Its idempotency key, if it has one: with that key it runs once."""
    arguments_digest: str = ""
    started: Receipt | None = None
    dispatched: bool = False
    answered: int | None = None
    """The HTTP status of the server's answer, if there was nothing else in it."""
    recorded_message: GuardedText | None = None
    """The message to the caller as it goes on record; None: the outcome's own, without argument values."""
    replayed_from: str | None = None
    """The id of the earlier call whose outcome this one got."""
    answer: Answer | None = None
    """What the server or the box answered."""
    redactions: dict[str, int] = field(default_factory=dict)
    """How often each rule of redaction removed something."""
    secrets: dict[str, int] = field(default_factory=dict)
    """How often each secret was removed. For the record alone: a caller who knew could confirm a guess."""
    clean: Callable[[str], GuardedText] = _withheld
    """Guards a text that the caller, a server or a rule chose, so that it can be kept."""
    isolation: Json = field(default_factory=dict)
    """The isolation that it is to have; once it ran, the one that it had."""
    preview: Json | None = None
    """The preview of what it would do, for the person who is asked."""
    session_state: tuple[int, str, bool] | None = None
    """If a person is asked: the last step of its session, the digest of the session's files, and whether anything runs
    in it that could change them."""
    snapshot: str | None = None
    """If a person is asked: the digest of the snapshot that a session is opened from."""
    encoded_result: bytes | None = None
    """The guarded result's canonical form."""
    shortened: bool = False
    """Whether the result was cut for a model."""
    common: Json | None = None
    """The keys that its *started* record has in common with *finished*; None: there is no *started* record."""
    dropped_meta: Json = field(default_factory=dict)
    """What of the call's `_meta` is not sent to the server: how many keys, and which parts of a trace, and why."""
    watch: CallWatch | None = None
    """Reports the call to metrics, traces and logs."""

    def working(self, *, boxed: bool) -> AbstractContextManager[Call]:
        """Measures the time in which the server or box works. `boxed`: it is a box of the call's own. Yields the call
        as it is to be sent."""
        if self.watch is None or self.contract is None:
            return nullcontext(self.call)
        return self.watch.working(self.call, self.contract, boxed=boxed)

    def answered_by(self, answer: Answer) -> None:
        """Take over the answer of the server or box."""
        self.answer = answer
        self.isolation = answer.isolation
        self.add_redactions(answer.redactions, answer.secrets)
        if self.flow is not None and self.contract is not None and self.is_own:
            self.flow.answered_by(self.call, self.contract, answer)

    def bare(self) -> CallState:
        """The same call, without anything that its caller, a server or a box chose."""
        return CallState(
            replace(self.call, arguments={}, meta={}, inputs=None),
            self.environment,
            began=self.began,
            began_at=self.began_at,
            salt=self.salt,
            contract=self.contract,
            definition=self.definition,
            decision=self.decision,
            flow=self.flow,
            possible=self.possible,
            approval=self.approval,
            slot=self.slot,
            key=self.key,
            started=self.started,
            dispatched=self.dispatched,
            common=self.common,
            clean=self.clean,
            watch=self.watch,
        )

    def drop_trace(self, name: str, why: str) -> None:
        """Send a part of its trace no further."""
        kept = {key: text for key, text in self.call.traced.items() if key != name}
        self.call = replace(self.call, traced=kept)
        self.dropped_meta = {**self.dropped_meta, "refused": {**self.dropped_meta.get("refused", {}), name: why}}

    def add_redactions(self, rules: Mapping[str, int], secrets: Mapping[str, int]) -> None:
        """Count what was removed, by rule and by secret."""
        for kept, new in ((self.redactions, rules), (self.secrets, secrets)):
            for name, count in new.items():
                kept[name] = kept.get(name, 0) + count

    @property
    def attempts(self) -> int:
        return 0 if self.answer is None else self.answer.attempts

    @property
    def ran(self) -> Ran | None:
        """The supervisor's report, if it ran in a box."""
        return None if self.answer is None else self.answer.ran

    @property
    def within(self) -> Within | None:
        """The session that it ran in, if any."""
        return None if self.answer is None else self.answer.within

    @property
    def effect_possible(self) -> bool:
        """Whether anything outside may change."""
        return bool(self.possible)

    @property
    def durable(self) -> bool:
        """Whether *started* is to be on disk before the call begins."""
        return self.possible.intended

    @property
    def is_own(self) -> bool:
        """Whether it is a call of one of our own tools."""
        return self.contract is not None and self.contract.transport is Transport.SANDBOXED_EXEC

    @property
    def wall_ms(self) -> float:
        return (time.monotonic() - self.began) * 1000.0


def _common(state: CallState) -> Json:
    """The keys that *started* and *finished* both have."""
    call = state.call
    contract = state.contract
    decision = state.decision
    level = contract.log.arguments if contract is not None else "digest"
    about = of_call(state)
    decided = None if decision is None else of_decision(decision, state.clean)
    pin = state.definition.digest if state.definition is not None else None
    out: Json = {
        "approval": None if state.approval is None else of_approval(state.approval),
        "arguments": payload(state, call.arguments, level) | _kept(state, "arguments"),
        **_carried(state),
    }
    if contract is None or call.kind != "tool":
        # A name that a caller chose freely is rarely repeated, so no record shares it.
        named = None if contract is None else _contract(contract)
        return {**out, "call": about, "contract": named, "pin": pin, "decision": decided}
    # Values of this call alone stay in its record; the rest, nulls included, is a part that many records share.
    own = {name: about.pop(name) for name in ("session", "box", "parent", "trace") if about.get(name) is not None}
    del about["id"]
    if decided is not None:
        out["decision"] = {"id": decided.pop("id")}
    part: Json = {"call": about, "contract": _contract(contract), "pin": pin, "decision": decided}
    if out["approval"] is None:
        part["approval"] = out.pop("approval")
    return {**out, **({"call": own} if own else {}), SHARED: [_shared(part)]}


def _contract(contract: Contract) -> Json:
    named = {"name": contract.name, "digest": contract.digest, "mode": str(contract.mode)}
    return {**named, "secrets": list(contract.secrets)} if contract.secrets else named


_parts: dict[bytes, canonical.Shared] = {}


def _shared(part: Json) -> canonical.Shared:
    """The part as records share it. Parts repeat from call to call, so their digests are cached."""
    text = canonical.dumps(part)
    found = _parts.get(text)
    if found is None:
        if len(_parts) >= _MAX_PARTS:
            _parts.clear()
        found = _parts[text] = canonical.Shared(part)
    return found


def of_call(state: CallState) -> Json:
    """Which call it is, and whose."""
    call = state.call
    contract = state.contract
    principal = state.call.principal
    return {
        "id": call.id,
        "kind": call.kind,
        "method": call.method,
        "tool": call.tool if contract is not None and call.kind == "tool" else _name(state, call.tool),
        "server": contract.server if contract is not None else call.server,
        "origin": call.origin,
        "principal": {
            "tenant": principal.tenant,
            "agent": principal.agent,
            "person": principal.person,
            "kind": principal.kind,
        },
        "session": None if call.session is None else _name(state, call.session),
        # The session whose box it runs in; without a contract it is not known whether the server runs in sessions.
        **({} if call.box is None or contract is None else {"box": _name(state, call.box)}),
        "parent": call.parent,
        "trace": None if call.trace is None else _name(state, call.trace),
        "environment": state.environment,
    }


def _carried(state: CallState) -> Json:
    """What the call carries to a server besides its arguments, and what of that was not sent on."""
    call = state.call
    if not (call.meta or call.traced or call.inputs or state.dropped_meta):
        return {}
    if state.contract is None:
        return {}  # refused before it was known what may go on
    level = state.contract.log.arguments
    carried: Json = dict(state.dropped_meta)
    for name, value in beside_arguments(call).items():
        carried[name] = payload(state, value, level)
    if call.traced:
        carried["trace"] = {name: payload(state, text) for name, text in call.traced.items()}
    return {"carried": carried}


def beside_arguments(call: Call) -> Json:
    """What is sent to a server besides a call's arguments, by the names that records and questions use."""
    return {name: value for name, value in (("meta", call.meta), ("inputs", call.inputs)) if value}


def as_sent(call: Call) -> Json:
    """All that a server gets of a call, in the form in which it is kept: the arguments alone, or, if more is sent, an
    object with a key for each. Arguments may have any names, so no key of ours is added among them."""
    more = beside_arguments(call)
    return {"arguments": call.arguments, **more} if more else call.arguments


def kept_parts(whole: Json, carried: Json) -> list[tuple[Json, Json, Json | None]]:
    """The arguments, `_meta` and answers that `as_sent` made `whole` of; `carried` is what the record says of the two
    that were sent besides the arguments. An earlier version kept them among the arguments: where both readings are
    possible, both are returned, and the digests on record tell which is right."""
    names = [name for name in ("meta", "inputs") if carried.get(name)]
    if not names:
        return [(whole, {}, None)]
    flat = dict(whole)
    flat_meta = flat.pop("_meta", None) if "meta" in names else None
    flat_inputs = flat.pop("inputResponses", None) if "inputs" in names else None
    found = [(flat, flat_meta or {}, flat_inputs)]
    if set(whole) == {"arguments", *names}:
        found.insert(0, (whole["arguments"], whole.get("meta", {}), whole.get("inputs")))
    return found


def payload(state: CallState, value: Any, level: str = "digest") -> Json:
    """A value as it goes on record: a digest that reveals nothing without its salt, and at other levels than `digest`
    the names of its fields."""
    return _payload(state, value, None, level)


def _name(state: CallState, text: str) -> str:
    """A name that a caller chose, redacted and cut."""
    clean = state.clean(text)
    return clean if len(clean) <= _MAX_NAME else clean[:_MAX_NAME] + "…"


def started(state: CallState) -> Json:
    state.common = _common(state)
    return {**state.common, "durable": state.durable, "effect_possible": state.effect_possible}


def finished(state: CallState, outcome: Outcome, facts: Json) -> Json:
    contract = state.contract
    result: Json | None = None
    if outcome.result is not None:
        level = contract.log.result if contract is not None else "digest"
        result = _payload(state, outcome.result, state.encoded_result, level) | _kept(state, "result")
    about = state.common or _common(state)
    ended: Json = {
        "status": str(outcome.status),
        "reason_code": outcome.reason_code,
        "message": "" if outcome.reason_code in SAID_BY_OTHERS else _message(state, outcome),
        "effect": facts.get("effect"),
        "result": result,
        "started_seq": state.started.seq if state.started is not None else None,
        "replayed_from": state.replayed_from,
        "attempts": state.attempts,
        **({"secrets": dict(state.secrets)} if state.secrets else {}),
        **({"run": _kept(state, "run")} if "run" in state.kept else {}),
    }
    recorded = disclosure.for_record(facts, state.salt)
    if SHARED not in about:  # refused early: the record is short, and shares nothing
        if recorded.get("isolation"):
            recorded["isolation"] = state.isolation
        return {**about, **ended, "facts": recorded}
    recorded, part = _shared_facts(recorded, ended, state)
    return {**about, **ended, "facts": recorded, SHARED: [*about[SHARED], part]}


def _message(state: CallState, outcome: Outcome) -> str:
    return (
        state.recorded_message
        if state.recorded_message is not None
        else without_values(outcome.message or "", state.call)
    )


def without_values(message: str, call: Call) -> str:
    """A message without the values of the call's arguments, as it goes on record. The caller may be told which path
    does not exist; the record says only that some path does not."""
    if not message:
        return message
    if len(message) > _MAX_MESSAGE:
        return ""
    values = {text for text in islice(_texts(call.arguments), _MAX_VALUES) if len(text) >= _MIN_VALUE}
    for text in sorted(values, key=len, reverse=True):
        if len(text) > len(message):
            continue
        for form in (text, repr(text)[1:-1]):
            message = message.replace(form, "…")
    return message


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value. Not recursive: a call may be refused because its arguments are nested too deeply."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left.extend(reversed(value.values()))
        elif isinstance(value, list):
            left.extend(reversed(value))


_USUALLY_SAME = ("contract_digest", "rules", "shadow", "ended", "effect", "effect_basis", "lasts", "labels")
_COUNTS = ("output", "usage", "network", "session")
_SAID_ELSEWHERE = ("call_id", "decision_id")
_ENDING_KEYS = ("message", "replayed_from", "attempts", "status", "reason_code", "effect")
_VERIFIED_AT = "verified_at"
_endings: dict[tuple[int, bytes], tuple[Json | None, canonical.Shared]] = {}


def _shared_facts(facts: Json, ended: Json, state: CallState) -> tuple[Json, canonical.Shared]:
    """Split facts into those that stay in the record itself and a part that it shares with other records: the
    isolation, and values that most calls have, such as counts of zero. Moves keys of `ended` into that part, too."""
    isolated = facts.pop("isolation", None)
    empty: Json = {}
    own: Json = {}
    for name, value in facts.items():
        if name in _USUALLY_SAME or _is_empty(value):
            empty[name] = value
        elif name in _COUNTS and isinstance(value, dict):
            empty[name], own[name] = _split(value)
        elif name not in _SAID_ELSEWHERE:
            own[name] = value
    usual: Json = {"facts": empty}
    if state.started is not None and not ended["message"]:
        usual |= {name: ended.pop(name) for name in _ENDING_KEYS}
    isolation = state.isolation if isolated else None
    if isolation and (at := isolation.get(_VERIFIED_AT)) is not None:
        own["isolation"] = {_VERIFIED_AT: at}
    return own, _shared_ending(usual, isolation)


def _split(counts: Json) -> tuple[Json, Json]:
    """The counts that are empty, and those that are not."""
    empty: Json = {}
    own: Json = {}
    for name, value in counts.items():
        (empty if _is_empty(value) else own)[name] = value
    return empty, own


def _shared_ending(usual: Json, isolation: Json | None) -> canonical.Shared:
    """The shared part of a *finished* record, cached by the identity of `isolation`: boxes of one kind have the same
    object."""
    try:
        form = marshal.dumps(usual, 2)  # only a key of the cache, and quicker than JSON
    except ValueError:  # it takes no subclass of `str`
        form = canonical.dumps(usual)
    key = (id(isolation), form)
    known = _endings.get(key)
    if known is None or known[0] is not isolation:
        if len(_endings) >= _MAX_PARTS:
            _endings.clear()
        # Each process checks its host anew: with the time of that, no two processes would share the part.
        common = isolation and {name: value for name, value in isolation.items() if name != _VERIFIED_AT}
        part = canonical.Shared({**usual, "facts": {**usual["facts"], "isolation": common}})
        known = _endings[key] = (isolation, part)
    return known[1]


def _is_empty(value: Any) -> bool:
    """Whether a value is zero, null, or holds nothing else; an empty text says something."""
    if not value:
        return bool(value != "")
    return isinstance(value, dict) and all(map(_is_empty, value.values()))


def of_decision(decision: Decision, clean: Callable[[str], GuardedText]) -> Json:
    return {
        "id": decision.id,
        "allowed": decision.allowed,
        "reason": clean(decision.reason),
        "rules": list(decision.rules),
        "marks": list(decision.marks),
        "asks": list(decision.asks),
        "sandbox": decision.sandbox,
        "policy_digest": decision.policy_digest,
        "error": None if decision.error is None else clean(decision.error),
        **({"forms": dict(decision.forms)} if decision.forms else {}),
        **({"shadow": _of_shadow(decision.shadow, clean)} if decision.shadow is not None else {}),
    }


def _of_shadow(shadow: Shadow, clean: Callable[[str], GuardedText]) -> Json:
    error = {} if shadow.error is None else {"error": clean(shadow.error)}
    return {"rules": list(shadow.rules), "verdict": shadow.verdict, "reason": clean(shadow.reason), **error}


def of_approval(approval: Approval) -> Json:
    """The approval as the signed log proves it. The table of approvals is no evidence."""
    return {"id": approval.id, "by": []} if approval.proof is None else approval.proof.as_fact()


def _payload(state: CallState, value: Any, encoded: bytes | None, level: str) -> Json:
    try:
        text = encoded if encoded is not None else canonical.dumps(value)
    except (ValueError, RecursionError, UnicodeEncodeError):
        return {"digest": None, "bytes": None}  # refused at the contract: it has no canonical form
    entry: Json = {"digest": canonical.salted_bytes(text, state.salt), "bytes": len(text)}
    if level != "digest":
        entry["names"] = [_name(state, name) for name in _names(value)]
    return entry


def _kept(state: CallState, part: str) -> Json:
    return {"kept": state.kept[part]} if part in state.kept else {}


def _names(value: Any, prefix: str = "", depth: int = 3) -> list[str]:
    """Field names, dotted, a few levels deep."""
    if not isinstance(value, dict) or depth == 0:
        return []
    out: list[str] = []
    for key in sorted(value):
        out.append(prefix + key)
        out.extend(_names(value[key], f"{prefix}{key}.", depth - 1))
    return out[:200]
