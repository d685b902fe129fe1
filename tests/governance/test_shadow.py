"""Rules in shadow mode: they decide nothing, and what they would have done is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.explain import explain
from ringfence.core.model import Decision, Rule, Shadow
from ringfence.governance.policy import joined
from tests import faking
from tests.making import READ, WRITE, call, decide, policy, rule


def shadow(action: str, id: str = "s", **more: Any) -> Rule:
    return rule(action, id, mode="shadow", **more)


def bare(decision: Decision) -> tuple[object, ...]:
    return (decision.allowed, decision.reason, decision.rules, decision.asks, decision.sandbox, decision.marks)


RULES = {
    "settled": {},
    "by argument": {"argument_patterns": {"*": "x"}},
    "by condition": {"when": 'args.a == "x"'},
    "that fails": {"when": "args.missing > 1"},
}


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("action", ["allow", "audit", "warn", "sandbox", "ask", "deny"])
@pytest.mark.parametrize("others", ["none", "settled", "looking"])
def test_a_rule_in_shadow_mode_changes_nothing(how: str, action: str, others: str) -> None:
    around = {"none": [], "settled": [rule("allow")], "looking": [rule("allow", argument_patterns={"a": "x"})]}[others]
    without = decide(*around, arguments={"a": "x"})
    beside = decide(*around, shadow(action, **RULES[how]), arguments={"a": "x"})  # type: ignore[arg-type]
    assert bare(beside) == bare(without)
    assert (beside.error, beside.forms) == (without.error, without.forms)
    in_force = decide(*around, rule(action, "s", **RULES[how]), arguments={"a": "x"})  # type: ignore[arg-type]
    assert beside.shadow is not None
    assert (beside.shadow.reason, beside.shadow.error) == (in_force.reason, in_force.error)


@pytest.mark.parametrize(
    ("actions", "would"),
    [
        ("allow", "allow"),
        ("warn", "allow"),
        ("ask", "ask"),
        ("sandbox", "sandbox"),
        ("ask sandbox", "ask+sandbox"),
        ("ask deny", "deny"),
    ],
)
def test_the_verdict_that_it_would_be(actions: str, would: str) -> None:
    got = decide(rule("allow"), *(shadow(action, action) for action in actions.split()))
    assert got.shadow == Shadow(tuple(actions.split()), would, got.shadow.reason if got.shadow else "")
    assert got.allowed


def test_what_does_not_match_is_not_told() -> None:
    assert decide(rule("allow"), shadow("deny", tool_patterns=("other",))).shadow is None
    assert decide(rule("allow"), shadow("deny", argument_patterns={"a": "x"})).shadow is None
    assert decide(rule("allow"), shadow("deny", enabled=False)).shadow is None


def test_an_error_in_shadow_mode_denies_nothing() -> None:
    got = decide(rule("allow"), shadow("deny", when="args.amount > 1"))
    assert (got.allowed, got.error) == (True, None)
    assert got.shadow == Shadow((), "error", got.shadow.reason, "rule 's' could not be evaluated: no such key: amount")  # type: ignore[union-attr]


def test_other_names_of_a_resource_count_in_shadow_mode_too() -> None:
    asked = call("file:///docs/%61", {"uri": "file:///docs/%61"}, kind="resource", server="docs")
    rules = policy(rule("allow"), shadow("deny", tool_patterns=("file:///docs/a",)))
    got = rules.decide(asked, READ)
    assert (got.allowed, got.shadow and got.shadow.verdict) == (True, "deny")


def test_of_two_decisions_the_shadows_join() -> None:
    one = decide(rule("allow"), shadow("ask", "a"))
    two = decide(rule("allow"), shadow("deny", "b"))
    plain = decide(rule("sandbox"))
    both = joined(one, two, "run_shell").shadow
    assert both is not None
    assert (both.rules, both.verdict) == (("a", "b"), "deny")
    half = joined(one, plain, "run_shell").shadow
    assert half is not None
    assert (half.rules, half.verdict) == (("a",), "ask+sandbox")
    assert joined(plain, plain, "run_shell").shadow is None


def test_what_is_bound_to_a_decision_does_not_change_with_it() -> None:
    plain, beside = policy(rule("allow")), policy(rule("allow"), shadow("deny"))
    assert beside.enforced_digest == plain.enforced_digest == plain.digest != beside.digest


def test_calls_that_are_never_allowed_are_so_without_it() -> None:
    assert policy(shadow("allow")).never_allows(call(), WRITE)
    assert not policy(rule("allow"), shadow("deny")).never_allows(call(), WRITE)


@pytest.mark.anyio
async def test_facts_and_record_tell_it_and_explain_says_it(tmp_path: Path) -> None:
    never = shadow("deny", "never", name="Not this")
    async with faking.governed(tmp_path, faking.Said(rules=(never,), preset="standard")) as way:
        outcome = await way.call()
        (finished,) = way.finished()
    assert outcome.ok
    assert outcome.facts["shadow"] == {"rules": ["never"], "verdict": "deny"}
    assert finished["facts"]["shadow"] == outcome.facts["shadow"]
    told = {"rules": ["never"], "verdict": "deny", "reason": "denied by never (Not this)"}
    assert finished["decision"]["shadow"] == told
    line = "in shadow mode, and without effect: with rule never it would be deny: denied by never (Not this)"
    assert line in explain([finished])
