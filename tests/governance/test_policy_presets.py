"""The presets, read from their document, and what holds of policy whatever comes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.core.model import Action, Contract, Decision, Mode, Rule
from ringfence.governance.policy import PRESETS
from tests.making import READ, WRITE, call, decide, policy, rule

DOCS = Path(__file__).parents[2] / "docs" / "policy.md"


# ── Presets ───────────────────────────────────────────────────────────────────────────────────────


def tables() -> list[list[dict[str, str]]]:
    """The tables of the document, each row by its column."""
    found: list[list[dict[str, str]]] = []
    header: list[str] = []
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
            found.append([])
        elif not set(cells[0]) <= {"-", ":"}:
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


PRESET_TABLE = next(table for table in tables() if "preset" in table[0])
SINK_TABLE = next(table for table in tables() if "matches" in table[0])


def test_the_document_has_every_preset() -> None:
    assert {row["preset"] for row in PRESET_TABLE} == set(PRESETS)
    assert set(PRESET_TABLE[0]) == {"preset", *Mode}


@pytest.mark.parametrize("row", PRESET_TABLE, ids=lambda row: row["preset"])
@pytest.mark.parametrize("mode", Mode)
def test_presets_do_what_the_document_says(row: dict[str, str], mode: Mode) -> None:
    decision = decide(preset=row["preset"], contract=Contract(name="any", server="s", tool="any", mode=mode))
    said = set(row[mode].split(" + "))
    assert said <= set(Action)
    assert decision.allowed is (said != {"deny"})
    assert (decision.asks == ("always",)) is ("ask" in said)
    assert decision.sandbox is ("sandbox" in said)
    assert bool(decision.marks) is bool(said & {"warn", "audit"})
    by_id = {rule.id: rule for rule in PRESETS[row["preset"]]}
    assert {by_id[matched].action for matched in decision.rules} == said - {"deny"}


def test_the_document_has_every_sink_rule() -> None:
    denying = {rule.id: rule.owasp_asi_id for rule in PRESETS["owasp-asi"] if rule.action is Action.DENY}
    assert {row["rule"]: row["owasp_asi_id"] for row in SINK_TABLE} == denying
    assert {row["action"] for row in SINK_TABLE} == {"deny"}


@pytest.mark.parametrize(
    ("secret", "rule"),
    [
        ("-----BEGIN PRIVATE KEY-----\nMIIE", "asi-private-key"),
        ("x -----BEGIN OPENSSH PRIVATE KEY-----", "asi-private-key"),
        ("-----BEGIN RSA PRIVATE KEY-----", "asi-private-key"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----", "asi-private-key"),
        ("PuTTY-User-Key-File-3: ssh-ed25519", "asi-private-key"),
        ("AGE-SECRET-KEY-1QQQQ", "asi-private-key"),
        ("key AKIAIOSFODNN7EXAMPLE.", "asi-cloud-key"),
        ("ASIAIOSFODNN7EXAMPLE", "asi-cloud-key"),
        ("AIza" + "a" * 35, "asi-cloud-key"),
        ("DefaultEndpointsProtocol=https;AccountKey=" + "A" * 86 + "==", "asi-cloud-key"),
        ("LTAI5tExampleExample0000", "asi-cloud-key"),
        ("-----BEGIN PUBLIC KEY-----", None),
        ("nothing of note", None),
    ],
)
def test_owasp_asi_keeps_keys_from_outside_sinks(secret: str, rule: str | None) -> None:
    sink = replace(READ, labels=("external_sink",))
    arguments = {"body": [{"note": secret}]}
    outside = decide(preset="owasp-asi", contract=sink, arguments=arguments)
    inside = decide(preset="owasp-asi", contract=READ, arguments=arguments)
    assert outside.allowed is (rule is None)
    assert rule is None or rule in outside.rules
    assert inside.allowed


def test_each_rule_of_owasp_asi_names_its_entry_and_ids_are_unique() -> None:
    assert all((rule.owasp_asi_id or "").startswith("ASI-") for rule in PRESETS["owasp-asi"])
    ids = [rule.id for rules in PRESETS.values() for rule in rules]
    assert len(ids) == len(set(ids))
    assert "std-read" in ids


def test_own_rules_join_a_preset_and_are_reported_first() -> None:
    decision = decide(rule("ask", id="mine", priority=1), preset="standard")
    assert decision.rules == ("mine", "std-write")
    assert decision.asks == ("always",)


# ── Whatever comes ────────────────────────────────────────────────────────────────────────────────

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "*", "priority"]) | st.text(), JSON, max_size=5)
CONDITIONS = st.sampled_from(
    [
        None,
        "true",
        "false",
        "has(args.a)",
        'args.a == "x"',
        "args.a > 3",
        'args.a.contains("x")',
        '"reader" in agent.roles',
        'contract.mode == "write"',
        "size(args) > 1",
    ]
)
RULES = st.builds(
    Rule,
    id=st.uuids().map(str),
    action=st.sampled_from(Action),
    priority=st.integers(0, 3),
    tool_patterns=st.sampled_from([(), (".*",), ("create_.*",), ("other",)]),
    argument_patterns=st.sampled_from([{}, {"a": "x"}, {"a": "^[0-9]+$", "b": "."}, {"*": "x"}]),
    when=CONDITIONS,
    approval=st.none(),
    enabled=st.booleans(),
)


def verdict(decision: Decision) -> tuple[Any, ...]:
    return (decision.allowed, set(decision.rules), set(decision.asks), decision.sandbox, bool(decision.error))


@given(st.lists(RULES, max_size=6), ARGUMENTS, st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_the_order_of_rules(rules: list[Rule], arguments: Any, random: Any) -> None:
    shuffled = list(rules)
    random.shuffle(shuffled)
    assert verdict(decide(*rules, arguments=arguments)) == verdict(decide(*shuffled, arguments=arguments))


@given(st.lists(RULES, max_size=6), ARGUMENTS, st.sampled_from(list(PRESETS)))
def test_adding_a_matching_deny_always_denies(rules: list[Rule], arguments: Any, preset: str) -> None:
    assert not decide(*rules, rule("deny", id="no"), arguments=arguments, preset=preset).allowed


@given(st.lists(RULES, max_size=5), RULES, ARGUMENTS)
def test_adding_a_rule_never_turns_ask_or_sandbox_off(rules: list[Rule], more: Rule, arguments: Any) -> None:
    before = decide(*rules, arguments=arguments)
    after = decide(*rules, more, arguments=arguments)
    if after.allowed and before.allowed:
        assert set(before.asks) <= set(after.asks)
        assert before.sandbox <= after.sandbox
    assert set(before.rules) <= set(after.rules)
    assert not (before.rules and not before.allowed and after.allowed)


@given(st.lists(RULES, max_size=4), ARGUMENTS, st.text())
def test_decide_never_raises_and_never_allows_on_an_error(rules: list[Rule], arguments: Any, tool: str) -> None:
    decision = policy(*rules).decide(call(tool, arguments), replace(WRITE, name=tool))
    assert not (decision.error and decision.allowed)
    assert decision.allowed or not (decision.asks or decision.sandbox)
    json.dumps([decision.reason, decision.rules])


@pytest.mark.parametrize("hostile", ["\ud800", float("nan"), float("inf"), int("9" * 400), object(), {1: object()}])
def test_arguments_that_are_no_json_deny(hostile: Any) -> None:
    rules = (
        rule("allow", id="ok"),
        rule("audit", id="p", argument_patterns={"a": "x"}),
        rule("audit", id="w", when="args.a == 1"),
    )
    decision = decide(*rules, arguments={"a": hostile})
    assert not decision.allowed
    assert decision.error


def test_a_tool_name_that_is_no_text_is_denied() -> None:
    decision = policy(rule("allow", tool_patterns=(".*",))).decide(call("\ud800"), WRITE)
    assert (decision.allowed, decision.error) == (False, "the tool's name is not text")


@settings(deadline=None, max_examples=10)
@given(st.sampled_from(["(a+)+$", "(a|a)*$", "(a|aa)+$", "(.*a){20}$", "^(([a-z])+.)+[A-Z]([a-z])+$"]))
def test_hostile_patterns_and_inputs_stay_linear(pattern: str) -> None:
    # A backtracking engine would not come back from these within the age of the universe.
    text = "a" * 100_000 + "!"
    rules = (rule("deny", id="d", argument_patterns={"a": pattern, "*": pattern}), rule("allow", id="ok"))
    assert decide(*rules, arguments={"a": text}).error is None
