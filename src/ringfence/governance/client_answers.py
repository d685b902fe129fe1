"""What a client answers to a server's questions (elicitation, sampling, roots) in the course of a call.

Only what was asked for goes on: an answer that does not fit its question stays behind, and so does every field of it
that was not asked for. What goes on is matched by rules as arguments are, is put to a person where the call needs one,
and is on record before it is sent. For each round of questions anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import field, replace
from typing import Any

from ringfence.core import canonical
from ringfence.core.errors import Refused, StoreError
from ringfence.core.model import Call, Decision, Json, Status
from ringfence.core.ports import Channel
from ringfence.core.record import dataclass
from ringfence.core.schema import MAX_COST, Schema, Unusable
from ringfence.governance import approval_binding, journal
from ringfence.governance.approvals import unproven
from ringfence.governance.guard import Guard
from ringfence.governance.journal import CallState
from ringfence.governance.rulebook import Rulebook
from ringfence.store import Approval, Store, Transaction, Unproven

log = logging.getLogger("ringfence.rounds")

RECORD = "answered"

_ACTIONS = ("accept", "decline", "cancel")
_ROLES = ("assistant", "user")
_MAX_BYTES = 1_000_000
_MAX_ROOTS = 1000
_SHORT = 1000


@dataclass(slots=True)
class AnswerChannel:
    """Implements `ports.Channel`: through it a server asks the client, for one call."""

    channel: Channel
    """With everything cleaned that a server says on it."""
    client: Channel
    """The same without that, for words of our own."""
    rules: Callable[[], Rulebook]
    """Those in force now, which may have been tightened since the call began. Raises Refused where they changed what
    the call is."""
    state: CallState
    guard: Guard
    store: Store
    count: int = 0
    given: Json = field(default_factory=dict)
    """Answers that came with the call, not used yet."""

    def __post_init__(self) -> None:
        self.given = dict(self.state.call.inputs or {})

    @property
    def capabilities(self) -> Json:
        return self.channel.capabilities

    async def notify(self, method: str, params: Json) -> None:
        await self.channel.notify(method, params)

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        """Answers that fit their questions; where one is missing, the server may ask again. Raises Refused."""
        place = self.state.slot.left_to_others() if self.state.slot is not None else nullcontext()
        async with place:
            return await self._ask(questions)

    async def _ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        self.count += 1
        unfit: list[str] = []
        early = _fitting(questions, {key: self.given.pop(key) for key in questions if key in self.given}, unfit)
        rest = {key: question for key, question in questions.items() if key not in early}
        fresh = _fitting(rest, await self.channel.ask(rest), unfit) if rest or not questions else {}
        answers = {**early, **fresh}
        if answers or unfit:
            await self._admit(questions, answers, unfit)
        return answers

    async def _admit(self, questions: Mapping[str, Json], answers: Json, unfit: list[str]) -> None:
        """Rules, and where need be a person, decide on the answers; then they are on record."""
        contract = self.state.contract
        assert contract is not None
        call = replace(self.state.call, inputs=answers)
        rules = self._rules()
        decision = await rules.policy.decided(call, contract)
        body: Json = {
            "call": journal.of_call(self.state),
            "round": self.count,
            "methods": sorted({str(question.get("method")) for question in questions.values()}),
            "answers": journal.payload(self.state, answers, contract.log.arguments),
            "unfit": len(unfit),
            "decision": journal.of_decision(decision, self.state.clean),
        }
        if not decision.allowed:
            await self._record(body)
            raise Refused(Status.FAILED, "policy", f"An answer was not sent on, by policy: {decision.reason}")
        begun = self.state.decision
        if decision.sandbox and not (begun is not None and begun.sandbox):
            await self._record(body)
            text = "An answer was not sent on: policy wants a fresh box for it, and the call has begun without one."
            raise Refused(Status.FAILED, "sandbox_impossible", text)
        # Whoever approved the call saw what came with it, but not what it is the answer to. What says nothing, no
        # person need see.
        if any(_says_something(questions[key], answer) for key, answer in answers.items()):
            await self._agreed(rules, questions, call, decision, body)
        else:
            await self._record(body)

    def _rules(self) -> Rulebook:
        try:
            return self.rules()
        except Refused as exc:
            # The call has begun, so it cannot end as one that never ran.
            raise Refused(Status.FAILED, exc.reason_code, exc.message) from None

    async def _agreed(
        self, rules: Rulebook, questions: Mapping[str, Json], call: Call, decision: Decision, body: Json
    ) -> None:
        contract = self.state.contract
        assert contract is not None
        requirement = await rules.approvals.required(call, contract, decision, rules.environment)
        if requirement is None:
            await self._record(body)
            return
        # The same answer to another question is another one; in which round it comes, may differ when it is repeated.
        about = [self.state.arguments_digest, [_put(question) for question in questions.values()], call.inputs]
        asked = replace(self.state, call=call, decision=decision, arguments_digest=canonical.digest(about))
        digest = approval_binding.binding(rules, asked, contract, requirement)
        words = {key: _words(question) for key, question in questions.items()}

        def shown() -> Json:
            summary = approval_binding.summary(self.guard, asked)
            return {**summary, "asked": self.guard.redact_for_approval(contract, words)[0]}

        try:
            await rules.approvals.obtain(approval_binding.named(asked), digest, requirement, shown, self.client)
            if approval_binding.binding(self._rules(), asked, contract, requirement) != digest:
                text = "The rules were changed while a person was asked about an answer; make the call again."
                raise Refused(Status.FAILED, "rules_changed", text)
            await self._record(body, (rules, digest))
        except Refused as exc:
            # The call has begun, so it cannot end as one that never ran.
            raise Refused(Status.FAILED, exc.reason_code, exc.message, approval_id=exc.approval_id) from None

    async def _record(self, body: Json, agreed: tuple[Rulebook, str] | None = None) -> None:
        """Record an answer and the approval that it uses up; on disk before it leaves, if the call is no read."""

        def work(tx: Transaction) -> Approval | None:
            approval = None
            if agreed is not None:
                approval = approval_binding.use(agreed[0], tx, agreed[1], self.state.call.id)
                if approval is None:
                    text = "the approval of this answer was used or ran out meanwhile"
                    raise Refused(Status.FAILED, "approval_required", text)
                body["approval"] = journal.of_approval(approval)
            tx.append(RECORD, self.state.call.id, body)
            return approval

        try:
            await self.store.write(work, durable=self.state.durable or agreed is not None)
        except Unproven as exc:
            log.error("an answer in call %s is not sent on: %s", self.state.call.id, exc)
            refused = unproven(exc)
            raise Refused(Status.FAILED, refused.reason_code, refused.message) from None
        except StoreError:
            raise Refused(Status.FAILED, "store", "an answer could not be recorded, so it was not sent on") from None


def _says_something(question: Json, answer: Json) -> bool:
    """The folders that a client works on are sent once for each connection, whichever call opens it."""
    return question.get("method") != "roots/list" and answer.get("action") not in ("decline", "cancel")


def _put(question: Json) -> Json:
    """A question without what is said about it."""
    params = question.get("params")
    params = params if isinstance(params, dict) else {}
    return {"method": question.get("method"), "params": {k: v for k, v in params.items() if k != "_meta"}}


def _words(question: Json) -> Any:
    """A question as it is shown to the person who must approve the answer: its message, and what it asks for. A field
    says by its name, its type, what may be chosen and its default what its answer will be taken for."""
    params = question.get("params")
    params = params if isinstance(params, dict) else {}
    message = params.get("message")
    text = message if isinstance(message, str) else str(question.get("method"))
    if params.get("mode") == "url":
        return {"message": text, "url": params.get("url")}
    schema = params.get("requestedSchema")
    fields = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(fields, dict) or not fields:
        return text
    needed = schema.get("required") if isinstance(schema, dict) else None
    needed = needed if isinstance(needed, list) else []
    return {
        "message": text,
        "fields": {name: _field(field, needed=name in needed) for name, field in fields.items()},
    }


def _field(field: Any, *, needed: bool) -> Any:
    """One field of a question, with its type first; the rest as the server says it."""
    if not isinstance(field, dict):
        return field
    kind = {"type": field.get("type", "any"), **({"default": field["default"]} if "default" in field else {})}
    return {**kind, **({"required": True} if needed else {}), **{k: v for k, v in field.items() if k not in kind}}


# ── Whether an answer fits ────────────────────────────────────────────────────────────────────────


def _fitting(questions: Mapping[str, Json], answers: Mapping[str, Any], unfit: list[str]) -> dict[str, Json]:
    out: dict[str, Json] = {}
    compiled = _Compiled()
    for key, question in questions.items():
        if key in answers:
            fitted = fitted_answer(question, answers[key], compiled)
            if fitted is None:
                unfit.append(key)
            else:
                out[key] = fitted
    return out


class _Compiled:
    """Compiles the schemas of one round: there may be many questions in it, so that all of them have one bound."""

    def __init__(self) -> None:
        self._cost = 0

    def __call__(self, root: Any) -> Schema:
        if self._cost >= MAX_COST:
            raise Unusable("the patterns of the other questions already cost all that may be spent on compiling")
        try:
            schema = Schema(root)
        except Unusable as exc:
            self._cost += exc.cost
            raise
        self._cost += schema.cost
        return schema


def fitted_answer(question: Json, answer: Any, compiled: Callable[[Any], Schema] = Schema) -> Json | None:
    """What of an answer was asked for; None where it is no answer to this question."""
    params = question.get("params")
    params = params if isinstance(params, dict) else {}
    if not isinstance(answer, dict):
        return None
    match question.get("method"):
        case "elicitation/create":
            return _elicited(params, answer, compiled)
        case "sampling/createMessage":
            return _sampled(answer)
        case "roots/list":
            return _roots(answer)
    return None


def _elicited(params: Json, answer: Json, compiled: Callable[[Any], Schema]) -> Json | None:
    action = answer.get("action")
    if action not in _ACTIONS:
        return None
    if action != "accept" or params.get("mode") == "url":
        return {"action": action}
    schema = params.get("requestedSchema")
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    content = answer.get("content", {})
    if not isinstance(content, dict):
        return None
    wanted = {name: value for name, value in content.items() if isinstance(properties, dict) and name in properties}
    try:
        problem = compiled(schema).problem(wanted, "content", _MAX_BYTES)
    except Unusable:
        return None
    return None if problem is not None else {"action": action, "content": wanted}


def _sampled(answer: Json) -> Json | None:
    content = answer.get("content")
    blocks = content if isinstance(content, list) else [content]
    fits = (
        answer.get("role") in _ROLES
        and _is_short(answer.get("model"))
        and all(isinstance(block, dict) and _is_short(block.get("type")) for block in blocks)
        and (answer.get("stopReason") is None or _is_short(answer["stopReason"]))
        and _is_bounded(content)
    )
    return (
        {name: answer[name] for name in ("role", "content", "model", "stopReason") if name in answer} if fits else None
    )


def _roots(answer: Json) -> Json | None:
    roots = answer.get("roots")
    if not isinstance(roots, list) or len(roots) > _MAX_ROOTS:
        return None
    out: list[Json] = []
    for root in roots:
        uri, name = (root.get("uri"), root.get("name")) if isinstance(root, dict) else (None, None)
        if not isinstance(uri, str) or not uri.startswith("file://") or not uri.isprintable() or len(uri) > 8 * _SHORT:
            return None
        if name is not None and not _is_short(name):
            return None
        out.append({"uri": uri} if name is None else {"uri": uri, "name": name})
    return {"roots": out}


def _is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _SHORT


def _is_bounded(value: Any) -> bool:
    try:
        size = len(canonical.dumps(value))
    except (ValueError, TypeError, RecursionError):
        return False
    return size <= _MAX_BYTES and canonical.depth(value) <= canonical.MAX_DEPTH
