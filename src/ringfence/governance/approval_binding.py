"""What a person is asked about one call, and what their answer is bound to."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from ringfence.core import canonical
from ringfence.core.model import Call, Contract, Decision, Json
from ringfence.governance import flow, journal, question, standing
from ringfence.governance.approvals import Requirement
from ringfence.governance.guard import Guard
from ringfence.governance.journal import CallState
from ringfence.governance.rulebook import Rulebook
from ringfence.sandbox.tools.request import asked_for
from ringfence.store import Approval, Transaction, Unproven


def binding(rules: Rulebook, state: CallState, contract: Contract, requirement: Requirement) -> str:
    """The digest of all that matters of a call: change any of it and it is another question.

    That is also which rules ask and who may answer: once they are tightened, what was asked or answered before is void.
    So are the command, mounts and placement of its server, the contents of the snapshot that it opens, and the
    capability that opened the session which it forks. In a session it is its last step and the files in it, too: when
    another step came between, the answer is void.
    """
    return canonical.digest(_bound(rules, state, contract, requirement))


def shape(rules: Rulebook, state: CallState, contract: Contract, requirement: Requirement) -> Json | None:
    """What a call must have for an answer about this one to stand for it; None where none may. What a call carries
    beside its arguments, and the session that it changes, no person can know beforehand."""
    call = state.call
    beside = call.inputs or call.meta or call.box is not None or call.session_named is not None
    if requirement.standing is None or call.kind != "tool" or beside or state.session_state or state.snapshot:
        return None
    if state.decision is not None and rules.policy.by_labels(state.decision):
        return None  # each has to be looked at: what would be sent out is not the same twice
    bound = _bound(rules, state, contract, requirement)
    del bound["arguments"]
    return standing.shape_of(call.arguments, canonical.digest(bound))


def _bound(rules: Rulebook, state: CallState, contract: Contract, requirement: Requirement) -> Json:
    bound: Json = {
        "principal": [state.call.principal.key, state.call.principal.person],
        "tool": state.call.tool,
        "pin": state.definition.digest if state.definition is not None else None,
        "arguments": state.arguments_digest,
        "contract": contract.digest,
        "policy": rules.policy.enforced_digest,
        "environment": rules.environment,
        "approval": rules.approvals.terms(requirement),
    }
    spec = rules.servers.get(contract.server or "")
    if spec is not None:
        # What runs, where, and what it has: all that the operator wrote of it. A secret's value is no part of it.
        bound["server"] = canonical.digest(asdict(spec))
    if state.flow is not None and state.decision is not None and rules.policy.by_labels(state.decision):
        bound["labels"] = [sorted(state.flow.own), list(state.flow.flow.labels)]
    if state.programs:
        bound["programs"] = [each.digest for each in state.programs]
    if state.opening is not None:
        bound["opening"] = state.opening.digest
    if state.snapshot is not None:
        bound["snapshot"] = state.snapshot
    if state.session_state is not None:
        bound["session"] = [state.call.session_named, *state.session_state]
    return bound


async def judged(rules: Rulebook, state: CallState) -> Json:
    """What rules make of a call. While that is the same, a reload that changed other things does not concern it."""
    contract = state.contract
    decision = state.decision
    assert contract is not None and decision is not None
    requirement = await rules.approvals.required(state.call, contract, decision, rules.environment)
    spec = rules.servers.get(contract.server or "")
    return {
        "contract": contract.digest,
        "pin": state.definition.digest if state.definition is not None else None,
        "environment": rules.environment,
        "approval": None if requirement is None else rules.approvals.terms(requirement),
        "sandbox": decision.sandbox,
        "server": None if spec is None else asdict(spec),
        "programs": [each.digest for each in state.programs],
        "opening": None if state.opening is None else state.opening.digest,
    }


def named(state: CallState) -> Call:
    """The call by a name that may be kept and shown: that of a resource or prompt is whatever its caller wrote."""
    call = state.call
    return call if call.kind == "tool" else replace(call, tool=state.clean(call.tool))


def use(rules: Rulebook, tx: Transaction, digest: str, call_id: str) -> Approval | None:
    """Consume the approval; None where there is none. Raises Unproven where the log does not prove it."""
    approval = tx.consume_approval(digest, call_id, time.time())
    if approval is None:
        return None
    problem = "nothing proves it" if approval.proof is None else rules.approvals.doubt(approval.proof)
    if problem is not None:
        raise Unproven(approval.id, problem)
    return approval


def for_programs(decision: Decision, call: Call, contract: Contract) -> Decision:
    """The decision with a question for a person, where the command names programs that they are to be asked for."""
    programs = asked_for(call, contract)
    if not programs:
        return decision
    reason = f"{decision.reason}; a person must approve it (the command names {', '.join(programs)})"
    return replace(decision, asks=tuple(dict.fromkeys((*decision.asks, "always"))), reason=reason)


def summary(guard: Guard, state: CallState) -> Json:
    """What the person who answers is shown."""
    contract = state.contract
    call = state.call
    assert contract is not None and state.decision is not None
    arguments, removed = guard.redact_for_approval(contract, call.arguments)
    beside = journal.beside_arguments(call)
    if beside:
        beside, more = guard.redact_for_approval(contract, beside)
        removed = {name: removed.get(name, 0) + more.get(name, 0) for name in (*removed, *more)}
    shown: Json = {
        "tool": named(state).tool,
        "server": contract.server,
        "mode": str(contract.mode),
        **({"method": call.method} if call.kind != "tool" else {}),
        "arguments": arguments,
        "removed": removed,
        "agent": call.principal.agent,
        "person": call.principal.person,
        "origin": call.origin,
        "rules": list(state.decision.rules),
        "reversible": contract.effects.reversible,
        **({"compensate": contract.effects.compensate} if contract.effects.compensate is not None else {}),
        "contract": question.of_contract(contract),
        "effects": question.of_effects(state.possible),
        **beside,
    }
    if state.flow is not None and flow.as_fact(state.flow) is not None:
        shown["labels"] = flow.shown(state.flow)
    if state.preview is not None:
        shown["preview"] = state.preview
    programs = asked_for(call, contract)
    if programs:
        shown["programs"] = list(programs)
    if call.box is not None:
        shown["session"] = {"id": state.clean(call.box)}
    if state.snapshot is not None:
        shown["snapshot"] = state.snapshot  # its digest: a name can be given to another
    if state.session_state is not None:
        step, files, runs_on = state.session_state
        shown["session"] = {"id": state.clean(str(call.session_named)), "after_step": step, "files": files}
        if runs_on:  # it can change any file between the answer and the run, and while the step runs
            shown["session"]["runs_on"] = "what earlier steps left running can change these files at any time"
    return shown
