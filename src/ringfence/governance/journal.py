"""What of a call goes on record: who, what, under which contract and rules, by whose approval, how it ended.

Values never enter a record. Arguments and results appear as salted digests, and as names where the contract allows;
what may be kept of their text lies apart from the chain, where it can be erased.
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
"""Reasons whose text comes in part from a server, a client or code in a box: it may repeat a value, so only the reason
goes on record."""


_NAME_LENGTH = 1000
"""Characters. What is longer is cut when it is clean: half a secret is no longer recognised."""
_MAX_PARTS = 256
_MAX_VALUES = 2000
_LONGEST_MESSAGE = 65_536
_SHORTEST_VALUE = 4


def _withheld(_: str) -> GuardedText:
    """The stand-in for a guard: without one, no text is kept."""
    return own_words("")


@dataclass(slots=True)
class CallState:
    """One call in the pipeline: filled in step by step, so that wherever it ends, all that is known goes on record."""

    call: Call
    environment: str
    began: float = field(default_factory=time.monotonic)
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    salt: bytes = field(default_factory=lambda: os.urandom(16))
    kept: dict[str, str] = field(default_factory=dict)
    """The salted digests of what is kept of its payloads, by part: redacted, that is another text."""
    contract: Contract | None = None
    definition: Definition | None = None
    decision: Decision | None = None
    flow: FlowState | None = None
    """Its labels; None: nothing here has any."""
    is_preview: bool = False
    """Whether it is for a person who is asked about another call: its agent reads nothing by it."""
    programs: tuple[Contract, ...] = ()
    """The contracts for programs that it was decided by as well, because it runs code as they do."""
    opening: Contract | None = None
    """The contract of the capability that opened the session which it forks: each fork has what that gives."""
    possible: PossibleEffects = NO_EFFECTS
    """What it may change outside."""
    lasts: Literal["call", "server"] | None = None
    """How long that is there, where it is in the box of its server alone."""
    network: Json | None = None
    """What the box of a server asked for while it answered."""
    approval: Approval | None = None
    slot: BudgetSlot | None = None
    """The place that it has among calls at the same time."""
    key: IdempotencyKey | None = None
    """Under which it runs once, where it has one."""
    arguments_digest: str = ""
    started: Receipt | None = None
    dispatched: bool = False
    answered: int | None = None
    """The HTTP status, where that is all that its server said."""
    said: GuardedText | None = None
    """What its caller is told of its end, as it goes on record; None: the outcome's own words."""
    replayed_from: str | None = None
    answer: Answer | None = None
    """What came back from where it was dispatched to."""
    redactions: dict[str, int] = field(default_factory=dict)
    secrets: dict[str, int] = field(default_factory=dict)
    """What was removed, by secret: for the record alone, since a caller who knew could guess and try."""
    clean: Callable[[str], GuardedText] = _withheld
    """A text that its caller, its server or a rule chose, as it may be kept."""
    isolation: Json = field(default_factory=dict)
    """What it is to have; once it ran, what it had."""
    preview: Json | None = None
    """What the capability that shows what it would do said, for the person who is asked."""
    session_state: tuple[int, str, bool] | None = None
    """The last step of its session and the digest of its files, where a person is asked."""
    snapshot: str | None = None
    """The digest of the snapshot that a session is opened from, where a person is asked."""
    encoded_result: bytes | None = None
    """The guarded result's canonical form."""
    shortened: bool = False
    """Whether the result was cut for a model."""
    about: Json | None = None
    """What *started* said; *finished* says it again."""
    left_behind: Json = field(default_factory=dict)
    """What of the call's `_meta` reaches no server: how many keys, and which parts of a trace, and why."""
    watch: CallWatch | None = None
    """What tells those who operate the gateway of it."""

    def working(self, *, boxed: bool) -> AbstractContextManager[Call]:
        """While its server or box has it; `boxed`: a box of its own. Gives the call as it is sent on."""
        if self.watch is None or self.contract is None:
            return nullcontext(self.call)
        return self.watch.working(self.call, self.contract, boxed=boxed)

    def answered_by(self, answer: Answer) -> None:
        """It ran, and this came back of it."""
        self.answer = answer
        self.isolation = answer.isolation
        self.add_redactions(answer.redactions, answer.secrets)
        if self.flow is not None and self.contract is not None and self.is_own:
            self.flow.answered_by(self.call, self.contract, answer)

    def bare(self) -> CallState:
        """The same call, without anything that a caller, a server or a box had a part in."""
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
            about=self.about,
            clean=self.clean,
            watch=self.watch,
        )

    def drop_trace(self, name: str, why: str) -> None:
        """Send a part of its trace no further."""
        kept = {key: text for key, text in self.call.traced.items() if key != name}
        self.call = replace(self.call, traced=kept)
        self.left_behind = {**self.left_behind, "refused": {**self.left_behind.get("refused", {}), name: why}}

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
        """What the supervisor saw of it, where it ran in a box."""
        return None if self.answer is None else self.answer.ran

    @property
    def within(self) -> Within | None:
        """The session that it ran in."""
        return None if self.answer is None else self.answer.within

    @property
    def effect_possible(self) -> bool:
        """Whether anything outside may change."""
        return bool(self.possible)

    @property
    def durable(self) -> bool:
        """Whether what is recorded of it is on disk first."""
        return self.possible.intended

    @property
    def is_own(self) -> bool:
        """Whether it is for a tool of ours."""
        return self.contract is not None and self.contract.transport is Transport.SANDBOXED_EXEC

    @property
    def wall_ms(self) -> float:
        return (time.monotonic() - self.began) * 1000.0


def common(state: CallState) -> Json:
    """The keys that *started* and *finished* share."""
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
        # A name that a caller chose freely does not repeat, so it is not shared.
        named = None if contract is None else _contract(contract)
        return {**out, "call": about, "contract": named, "pin": pin, "decision": decided}
    # What is this call's own stands in its record, which has its id anyway; what a call lacks, many lack.
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
    """A part that repeats from call to call: most calls find it here, and need not take its digest again."""
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
        # The session whose box it runs in; without a contract it is not known whether its server lives in one.
        **({} if call.box is None or contract is None else {"box": _name(state, call.box)}),
        "parent": call.parent,
        "trace": None if call.trace is None else _name(state, call.trace),
        "environment": state.environment,
    }


def _carried(state: CallState) -> Json:
    """What the call carries to a server beside its arguments, and what of that was left behind."""
    call = state.call
    if not (call.meta or call.traced or call.inputs or state.left_behind):
        return {}
    if state.contract is None:
        return {}  # refused before it was known what may go on
    level = state.contract.log.arguments
    carried: Json = dict(state.left_behind)
    for name, value in beside(call).items():
        carried[name] = payload(state, value, level)
    if call.traced:
        carried["trace"] = {name: payload(state, text) for name, text in call.traced.items()}
    return {"carried": carried}


def beside(call: Call) -> Json:
    """What goes to a server beside a call's arguments, by the name under which it is told."""
    return {name: value for name, value in (("meta", call.meta), ("inputs", call.inputs)) if value}


def as_sent(call: Call) -> Json:
    """All that a server gets of a call, as it may be kept: its arguments; where more goes to it, each apart. Arguments
    may have any names, so that nothing of ours is ever put between them."""
    more = beside(call)
    return {"arguments": call.arguments, **more} if more else call.arguments


def kept_parts(whole: Json, carried: Json) -> list[tuple[Json, Json, Json | None]]:
    """The arguments, `_meta` and answers that `as_sent` made this of, where the record of the call says of `carried`
    what went beside them. Before, they were among the arguments; the digests on record tell which of these it is."""
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
    """A value as it goes on record: a digest that says nothing without its salt, and names where they are wanted."""
    return _payload(state, value, None, level)


def _name(state: CallState, text: str) -> str:
    """A name as its caller gave it, whatever it holds: clean, and short enough."""
    clean = state.clean(text)
    return clean if len(clean) <= _NAME_LENGTH else clean[:_NAME_LENGTH] + "…"


def started(state: CallState) -> Json:
    state.about = common(state)
    return {**state.about, "durable": state.durable, "effect_possible": state.effect_possible}


def finished(state: CallState, outcome: Outcome, facts: Json) -> Json:
    contract = state.contract
    result: Json | None = None
    if outcome.result is not None:
        level = contract.log.result if contract is not None else "digest"
        result = _payload(state, outcome.result, state.encoded_result, level) | _kept(state, "result")
    about = state.about or common(state)
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
    if SHARED not in about:  # it got nowhere, so it is short, and said in full
        if recorded.get("isolation"):
            recorded["isolation"] = state.isolation
        return {**about, **ended, "facts": recorded}
    recorded, part = _shared_facts(recorded, ended, state)
    return {**about, **ended, "facts": recorded, SHARED: [*about[SHARED], part]}


def _message(state: CallState, outcome: Outcome) -> str:
    return state.said if state.said is not None else unquoted(outcome.message or "", state.call)


def unquoted(message: str, call: Call) -> str:
    """A message as it goes on record: the caller is told which path is not there, but what stays says only that one
    was named. Very short values say nothing, and would be found everywhere."""
    if not message:
        return message
    if len(message) > _LONGEST_MESSAGE:
        return ""
    values = {text for text in islice(_texts(call.arguments), _MAX_VALUES) if len(text) >= _SHORTEST_VALUE}
    for text in sorted(values, key=len, reverse=True):
        if len(text) > len(message):
            continue
        for form in (text, repr(text)[1:-1]):
            message = message.replace(form, "…")
    return message


def _texts(value: Any) -> Iterator[str]:
    """However deep they lie: a call may be refused because they lie too deep."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left.extend(reversed(value.values()))
        elif isinstance(value, list):
            left.extend(reversed(value))


_REPEATED = ("contract_digest", "rules", "shadow", "ended", "effect", "effect_basis", "lasts", "labels")
_COUNTED = ("output", "usage", "network", "session")
_ECHOED = ("call_id", "decision_id")
_ENDED = ("message", "replayed_from", "attempts", "status", "reason_code", "effect")
_VERIFIED = "verified_at"
_ends: dict[tuple[int, bytes], tuple[Json | None, canonical.Shared]] = {}


def _shared_facts(facts: Json, ended: Json, state: CallState) -> tuple[Json, canonical.Shared]:
    """Facts as they stand in the record itself, and what it shares with others: how it was isolated, and all that is
    as usual. What is moved there is taken out of `ended`."""
    isolated = facts.pop("isolation", None)
    quiet: Json = {}
    own: Json = {}
    for name, value in facts.items():
        if name in _REPEATED or _is_quiet(value):
            quiet[name] = value
        elif name in _COUNTED and isinstance(value, dict):
            quiet[name], own[name] = _halves(value)
        elif name not in _ECHOED:
            own[name] = value
    usual: Json = {"facts": quiet}
    if state.started is not None and not ended["message"]:
        usual |= {name: ended.pop(name) for name in _ENDED}
    isolation = state.isolation if isolated else None
    if isolation and (at := isolation.get(_VERIFIED)) is not None:
        own["isolation"] = {_VERIFIED: at}
    return own, _ending(usual, isolation)


def _halves(counts: Json) -> tuple[Json, Json]:
    """What is as usual, and what is not."""
    quiet: Json = {}
    own: Json = {}
    for name, value in counts.items():
        (quiet if _is_quiet(value) else own)[name] = value
    return quiet, own


def _ending(usual: Json, isolation: Json | None) -> canonical.Shared:
    """The shared part of a record, by the identity of the isolation, which boxes of one kind have in common."""
    try:
        form = marshal.dumps(usual, 2)  # it is never read again, and it is quicker than JSON
    except ValueError:  # a text of a type of its own is none to it
        form = canonical.dumps(usual)
    key = (id(isolation), form)
    known = _ends.get(key)
    if known is None or known[0] is not isolation:
        if len(_ends) >= _MAX_PARTS:
            _ends.clear()
        # Each process tries its host anew, so what it shares with others must not say when.
        common = isolation and {name: value for name, value in isolation.items() if name != _VERIFIED}
        part = canonical.Shared({**usual, "facts": {**usual["facts"], "isolation": common}})
        known = _ends[key] = (isolation, part)
    return known[1]


def _is_quiet(value: Any) -> bool:
    """Whether a value is zero, null, or holds nothing else; an empty text says something."""
    if not value:
        return bool(value != "")
    return isinstance(value, dict) and all(map(_is_quiet, value.values()))


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
    """The approval by what the log proves of it, and where; what a table says is no evidence."""
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
