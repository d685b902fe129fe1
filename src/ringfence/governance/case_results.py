"""Runs the test cases of policy files: what policy decides on each, and how that differs from what was expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ringfence.core.errors import Refused
from ringfence.core.model import Call, Contract, Flow, Mode, Principal
from ringfence.core.record import dataclass
from ringfence.governance.cases import PolicyCase
from ringfence.governance.foresight import Foresight, Judgement


@dataclass(frozen=True, slots=True)
class TriedCase:
    """A case, and the decision on it."""

    case: PolicyCase
    verdict: str
    reason: str
    judgement: Judgement | None
    """None where the call was refused before policy was asked."""
    unlike: tuple[str, ...]
    """The differences from what was expected, a sentence each."""

    @property
    def ok(self) -> bool:
        return not self.unlike


def run_case(
    case: PolicyCase, foresight: Callable[[str | None], Foresight], principal: Callable[[str], Principal]
) -> TriedCase:
    """Decide one case. `foresight` returns the rules in force in an environment, `principal` the agent of a name."""
    ahead = foresight(case.environment)
    try:
        judgement = ahead.judge(*_call(case, ahead, principal(case.agent)))
    except Refused as exc:
        missing = [f"rule {name} should have matched, but policy was not asked" for name in case.rules or ()]
        wrong = [] if case.expect == "deny" else [f"expected {case.expect}, got deny"]
        return TriedCase(case, "deny", exc.message, None, (*wrong, *missing))
    unlike = tuple(_unlike(case, judgement))
    return TriedCase(case, judgement.verdict, judgement.decision.reason, judgement, unlike)


def _call(case: PolicyCase, ahead: Foresight, principal: Principal) -> tuple[Call, Contract]:
    if case.person is not None:
        principal = replace(principal, person=case.person)
    if case.roles:
        principal = replace(principal, roles=frozenset(case.roles))
    call = Call("call_case", principal, case.tool, case.arguments, case.kind, "mcp-http", server=case.server)
    call = replace(call, meta=case.meta, flow=Flow((), case.taint))
    if case.kind == "tool" and case.tool not in ahead.contracts:
        contract = Contract(case.tool, server=case.server, tool=case.tool, mode=case.mode or Mode.WRITE)
        contract = replace(contract, meta=tuple(case.meta))
    else:
        call, contract = ahead.contract(call)
    return call, contract if case.labels is None else replace(contract, labels=case.labels, labels_when=())


def _unlike(case: PolicyCase, got: Judgement) -> Iterator[str]:
    if got.verdict != case.expect:
        yield f"expected {case.expect}, got {got.verdict}"
    if case.would is not None and got.would != case.would:
        yield f"with the rules in shadow mode, expected {case.would}, got {got.would}"
    matched = got.matched
    for name in case.rules or ():
        if name not in matched:
            yield f"rule {name} should have matched, but did not"
    if case.rules == () and matched:
        yield f"no rule should have matched, but {', '.join(matched)} did"
    for name in case.not_rules:
        if name in matched:
            yield f"rule {name} should not have matched, but did"
    if case.approval is not None and case.approval not in got.asks:
        yield f"approval {case.approval} should have been asked for, but {', '.join(got.asks) or 'none'} was"
