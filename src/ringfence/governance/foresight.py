"""What a configuration would make of a call, without making it: no store, no server, no box, no state.

It goes the first stops of the pipeline (contract, policy, which people are asked) with the same functions. What only a
running gateway knows is not in it: budgets that are used up, earlier calls under the same key, sessions.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ringfence.core.errors import Refused
from ringfence.core.expression import variables
from ringfence.core.labels import in_force
from ringfence.core.model import Call, Contract, Decision, Flow, ServerSpec, Status, Transport
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.governance import approval_binding, call_meta
from ringfence.governance.approvals import ApprovalTerms, Requirement
from ringfence.governance.flow import own_labels
from ringfence.governance.policy import Policy, Weighed, both, joined, looks_within, verdict, widened
from ringfence.governance.rulebook import implicit_contract, is_listed, settled
from ringfence.sandbox.tools.toolkit import carried_code, may_run_as


@dataclass(frozen=True, slots=True)
class Judgement:
    """What would be decided on one call."""

    call: Call
    """As it would go on: its `_meta` without what the contract keeps back."""
    contract: Contract
    decision: Decision
    requirement: Requirement | None
    """What people would be asked, for the rules and for the contract."""
    decisive: tuple[str, ...]
    """The rules that made it so."""

    @property
    def asks(self) -> tuple[str, ...]:
        return self.requirement.names if self.requirement is not None else ()

    @property
    def verdict(self) -> str:
        return verdict(self.decision, self.asks)

    @property
    def would(self) -> str:
        """The verdict, had the rules in shadow mode been in force."""
        shadow = self.decision.shadow
        if shadow is None or shadow.verdict in ("deny", "error"):
            return self.verdict if shadow is None else shadow.verdict
        own = [name for name in self.asks if name not in self.decision.asks]
        words = {*shadow.verdict.split("+"), *(["ask"] if own else [])} - {"allow"}
        return "+".join(sorted(words)) or "allow"

    @property
    def matched(self) -> tuple[str, ...]:
        """Every rule that matched, those in shadow mode after the others."""
        return self.decision.rules + (self.decision.shadow.rules if self.decision.shadow is not None else ())


class Foresight:
    """The contracts, rules and approvals of a configuration, in one environment."""

    def __init__(
        self,
        contracts: Mapping[str, Contract],
        servers: Mapping[str, ServerSpec],
        policy: Policy,
        approvals: ApprovalTerms,
    ) -> None:
        self.contracts = contracts
        self.servers = servers
        self.policy = policy
        self.approvals = approvals

    @property
    def environment(self) -> str:
        return self.policy.environment

    def contract(self, call: Call) -> tuple[Call, Contract]:
        """The call in its settled form, and the contract that it would come under. Raises Refused."""
        if call.kind == "tool":
            contract = self.contracts.get(call.tool)
            if contract is None:
                raise self._unknown(call.tool)
            self.check_environment(contract)
            return call, contract
        spec = self.servers.get(call.server or "")
        known = settled(call)
        if spec is None or known is None or not is_listed(spec, known):
            text = f"no {call.kind} {quoted(call.tool, 1000)} is offered"
            raise Refused(Status.VALIDATION_FAILURE, f"unknown_{call.kind}", text)
        return known, implicit_contract(spec)

    def _unknown(self, tool: str) -> Refused:
        names = [
            c.name for c in self.contracts.values() if c.environments is None or self.environment in c.environments
        ]
        near = difflib.get_close_matches(tool[:128], names, n=3)
        hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
        return Refused(Status.VALIDATION_FAILURE, "unknown_tool", f"There is no tool {quoted(tool, 128)}.{hint}")

    def check_environment(self, contract: Contract) -> None:
        """Raises Refused where the contract is not for this environment."""
        if contract.environments is not None and self.environment not in contract.environments:
            text = f"The tool {contract.name!r} is not offered in the environment {self.environment!r}."
            raise Refused(Status.VALIDATION_FAILURE, "wrong_environment", text)

    def judge(self, call: Call, contract: Contract) -> Judgement:
        """What policy, the contract and the approvals say of this call."""
        carried = call_meta.split(call.meta, contract.meta)
        call = self._labelled(replace(call, meta=carried.meta, traced=carried.trace), contract)
        decision = self.policy.decide(call, contract)
        if contract.commands is not None and decision.allowed:
            decision = approval_binding.for_programs(decision, call, contract)
        code = carried_code(call, contract) if decision.allowed else None
        if code is not None:
            decision = self._as_program(call, decision, *code)
        requirement = None
        if decision.allowed:
            see = partial(variables, call, contract, self.environment)
            requirement = self.approvals.requirement(contract, decision, see)
        return Judgement(call, contract, decision, requirement, self.policy.decisive(decision))

    def _labelled(self, call: Call, contract: Contract) -> Call:
        """The call with the labels of this contract, and those in force that it is said to have."""
        before = call.flow or Flow()
        own = tuple(dict.fromkeys((*before.own, *own_labels(call, contract, self.environment))))
        return replace(call, flow=Flow(own, in_force(own, before.labels)))

    def _as_program(self, call: Call, decision: Decision, tool: str, arguments: dict[str, object]) -> Decision:
        """Code is code, whichever call brings it: the decision on it as a call of what would run it."""
        programs = self._programs(tool)
        if not programs:
            text = f"{call.tool} would run code as {tool} does, and that is not offered here"
            return replace(decision, allowed=False, asks=(), sandbox=False, reason=text)
        for each in programs:
            also = self._labelled(replace(call, tool=each.name, arguments=arguments), each)
            asks = self.approvals.asked_by(each, partial(variables, also, each, self.environment))
            decision = joined(decision, self.policy.decide(also, each), each.name, asks)
        return decision

    def _programs(self, tool: str) -> list[Contract]:
        """The contracts for one of our own tools in this environment."""
        here = [c for c in self.contracts.values() if c.environments is None or self.environment in c.environments]
        return [each for each in here if each.tool == tool and each.transport is Transport.SANDBOXED_EXEC]

    def weigh(self, call: Call, contract: Contract) -> Weighed:
        """What policy says of calls like this one, of which no arguments are known."""
        if call.flow is not None:
            own = tuple(dict.fromkeys((*call.flow.own, *contract.labels)))
            call = replace(call, flow=Flow(own, in_force(own, call.flow.labels)))
        got = self.policy.weigh(call, contract, lambda _: None)
        tool = may_run_as(contract)
        if tool is None:
            return got
        verdicts, depends = got.verdicts, got.depends
        programs = self._programs(tool)
        for each in programs:
            also = self.policy.weigh(replace(call, tool=each.name), each, lambda _: None)
            asks = self.contract_asks(call, each)
            wide = also.verdicts if asks is False else widened(also.verdicts)
            verdicts |= {both(one, other) for one in got.verdicts for other in wide}
        if not programs:
            verdicts |= {"deny"}
        if verdicts != got.verdicts:
            depends = (*depends, f"whether it runs code as {tool} does")
        return replace(got, verdicts=verdicts, depends=depends)

    def contract_asks(self, call: Call, contract: Contract) -> bool | None:
        """Whether the contract itself has a person asked, whatever the arguments are; None where they decide."""
        if contract.commands is not None and contract.commands.ask:
            return None
        if contract.approval == "none":
            return False
        condition = self.approvals.condition(contract.approval)
        if condition is None:
            return True
        if looks_within(condition):
            return None
        return bool(self.approvals.asked_by(contract, partial(variables, call, contract, self.environment)))
