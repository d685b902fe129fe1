"""What would be made of a call: the same as the pipeline makes of it, without a store, a server or a box."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringfence.core.box import CommandRules
from ringfence.core.errors import Refused
from ringfence.core.model import Action, ApprovalRule, Contract, Mode, Person, Principal, Rule, ServerSpec, Transport
from ringfence.governance.approvals import ApprovalTerms
from ringfence.governance.case_results import TriedCase, run_case
from ringfence.governance.cases import PolicyCase
from ringfence.governance.foresight import Foresight, Judgement
from tests.making import WRITE, call, policy, rule

PROGRAM = {"transport": Transport.SANDBOXED_EXEC, "mode": Mode.HIGH_RISK}
PYTHON = Contract("execute_python", tool="execute_python", **PROGRAM)  # type: ignore[arg-type]
SHELL = Contract("run_shell", tool="run_shell", **PROGRAM)  # type: ignore[arg-type]
BOSS = ApprovalRule("boss", when='args.priority == "high"', roles=("manager",))
ANN = Person("ann", roles=frozenset({"manager"}))


def ahead(*rules: Rule, contracts: tuple[Contract, ...] = (WRITE,), preset: str = "standard", **more: Any) -> Foresight:
    known = {contract.name: contract for contract in contracts}
    desk = ServerSpec("helpdesk", url="http://127.0.0.1:1/mcp", resources=("file:///docs/*",))
    terms = ApprovalTerms({"boss": BOSS}, {"ann": ANN})
    return Foresight(known, {"helpdesk": desk}, policy(*rules, preset=preset, **more), terms)


def judged(foresight: Foresight, tool: str = "create_ticket", **more: Any) -> Judgement:
    return foresight.judge(*foresight.contract(call(tool, **more)))


def test_a_contracts_own_approval_is_part_of_the_verdict() -> None:
    asking = ahead(contracts=(replace(WRITE, approval="boss"),))
    assert judged(asking, arguments={"priority": "high"}).verdict == "ask"
    assert judged(asking, arguments={"priority": "low"}).verdict == "allow"
    assert judged(asking).asks == ("boss",), "a condition that fails asks"


@pytest.mark.parametrize(
    ("actions", "verdict", "decisive"),
    [
        ([], "allow", ("std-write",)),
        (["ask"], "ask", ("ask",)),
        (["ask", "sandbox"], "ask+sandbox", ("ask", "sandbox")),
        (["sandbox", "allow"], "sandbox", ("sandbox",)),
        (["ask", "sandbox", "deny"], "deny", ("deny",)),
    ],
)
def test_the_verdict_in_a_word_and_the_rules_that_made_it(
    actions: list[str], verdict: str, decisive: tuple[str, ...]
) -> None:
    got = judged(ahead(*(rule(action, id=action) for action in actions)))
    assert (got.verdict, got.decisive) == (verdict, decisive)


def test_an_error_is_no_deny_of_a_rule() -> None:
    got = judged(ahead(rule("deny", when="args.amount > 1")))
    assert (got.verdict, got.decisive) == ("error", ())


def test_code_in_another_language_is_decided_as_the_program_that_runs_it() -> None:
    never = rule("deny", id="never", tool_patterns=("run_shell",))
    both = ahead(never, contracts=(PYTHON, SHELL))
    assert judged(both, "execute_python", arguments={"code": "1"}).verdict == "allow"
    assert judged(both, "execute_python", arguments={"code": "ls", "language": "bash"}).decisive == ("never",)
    alone = ahead(contracts=(PYTHON,))
    got = judged(alone, "execute_python", arguments={"code": "ls", "language": "bash"})
    assert (got.verdict, "not offered here" in got.decision.reason) == ("deny", True)


def test_without_arguments_a_program_may_be_any_that_it_can_run() -> None:
    never = rule("deny", id="never", tool_patterns=("run_shell",))
    got = ahead(never, contracts=(PYTHON, SHELL)).weigh(call("execute_python"), PYTHON)
    assert set(got.verdicts) == {"allow", "deny"}
    assert got.depends == ("whether it runs code as run_shell does",)
    asking = ahead(contracts=(PYTHON, replace(SHELL, approval="always"))).weigh(call("execute_python"), PYTHON)
    assert set(asking.verdicts) == {"allow", "ask"}
    assert set(ahead(contracts=(PYTHON, SHELL)).weigh(call("execute_python"), PYTHON).verdicts) == {"allow"}
    assert set(ahead(contracts=(PYTHON,)).weigh(call("execute_python"), PYTHON).verdicts) == {"allow", "deny"}


def test_a_command_with_a_program_that_people_are_asked_for() -> None:
    asking = ahead(contracts=(replace(SHELL, commands=CommandRules(ask=("make",))),))
    assert judged(asking, "run_shell", arguments={"command": "make all"}).verdict == "ask"
    assert judged(asking, "run_shell", arguments={"command": "ls"}).verdict == "allow"


def test_rules_see_only_the_meta_that_the_contract_lets_through() -> None:
    low = rule("deny", argument_patterns={"*": "low"})
    kept = ahead(low, contracts=(replace(WRITE, meta=("v.example/x",)),))
    assert judged(kept, meta={"v.example/x": "low"}).verdict == "deny"
    assert judged(kept, meta={"v.example/y": "low"}).verdict == "allow"


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (call("create_tickt"), "unknown_tool"),
        (call("file:///etc/passwd", kind="resource", server="helpdesk"), "unknown_resource"),
        (call("hello", {"name": "hello"}, kind="prompt", server="helpdesk"), "unknown_prompt"),
    ],
)
def test_what_is_not_offered_is_refused_before_policy(asked: Any, code: str) -> None:
    with pytest.raises(Refused) as raised:
        ahead().contract(asked)
    assert raised.value.reason_code == code


def test_a_resource_comes_under_its_servers_list() -> None:
    asked = call("file:///docs/a", {"uri": "file:///docs/a"}, kind="resource", server="helpdesk")
    foresight = ahead()
    assert foresight.judge(*foresight.contract(asked)).decisive == ("std-read",)


# ── Cases ─────────────────────────────────────────────────────────────────────────────────────────


def tried(*rules: Rule, contract: Contract = WRITE, **given: Any) -> TriedCase:
    case = PolicyCase("n", ("f", 1, 1), **{"tool": "create_ticket", "expect": "allow", **given})
    environments = {
        name: ahead(*rules, contracts=(contract,), environment=name or "development") for name in (None, "production")
    }
    return run_case(case, environments.__getitem__, Principal)


def test_a_case_is_tried_as_its_agent_in_its_environment() -> None:
    prod = rule("deny", id="prod", environments=("production",))
    assert tried(prod).ok
    assert tried(prod, environment="production", expect="deny", rules=("prod",)).ok
    analysts = rule("deny", id="analysts", agents=("ana*",), when='"reader" in agent.roles && agent.person == "ann"')
    assert tried(analysts, agent="analyst", roles=("reader",), person="ann", expect="deny").ok
    assert tried(analysts, agent="analyst", roles=("writer",), person="ann").ok


def test_a_case_gives_labels_and_a_mode_to_a_tool_without_contract() -> None:
    sinks = rule("deny", id="sinks", when='"external_sink" in contract.labels')
    assert tried(sinks, labels=("external_sink",), expect="deny").ok
    assert tried(sinks).ok
    assert tried(sinks, tool="transfer", mode=Mode.READ, rules=("std-read",), not_rules=("sinks",)).ok


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"expect": "deny"}, "expected deny, got allow"),
        ({"rules": ("other",)}, "rule other should have matched, but did not"),
        ({"rules": ()}, "no rule should have matched, but std-write did"),
        ({"not_rules": ("std-write",)}, "rule std-write should not have matched, but did"),
        ({"approval": "boss"}, "approval boss should have been asked for, but none was"),
    ],
)
def test_a_case_that_fails_says_why(given: dict[str, Any], said: str) -> None:
    assert tried(**given).unlike == (said,)


def test_a_denial_by_an_error_is_not_the_denial_that_was_expected() -> None:
    broken = Rule(id="broken", action=Action.DENY, when="args.amount > 1")
    assert tried(broken, expect="deny").unlike == ("expected deny, got error",)
    assert tried(broken, expect="error").ok


def test_a_call_that_never_gets_to_policy_is_denied() -> None:
    nowhere = replace(WRITE, environments=("production",))
    assert tried(contract=nowhere, expect="deny").ok
    assert tried(contract=nowhere, expect="deny", rules=("std-write",)).unlike == (
        "rule std-write should have matched, but policy was not asked",
    )
