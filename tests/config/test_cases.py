"""Cases beside the rules: how they are written, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.core.errors import ConfigError
from ringfence.core.model import Mode

TOP = """version: 1
servers: {desk: {url: "http://127.0.0.1:9101/mcp", resources: ["file:///docs/*"], prompts: ["hello"]}}
capabilities: {create_ticket: {mode: write}}
approvals: {boss: {roles: [manager]}}
"""
RULES = "policy: {rules: [{id: no-deletes, action: deny, tool_patterns: ['delete_.*']}], cases: [%s]}\n"


def load(case: str) -> config.Config:
    return config.loads(TOP + RULES % case, file="f", base=Path("/etc/ringfence"))


def problem(case: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(case)
    return [each.text for each in raised.value.problems]


def test_a_case_has_the_call_and_what_is_expected() -> None:
    given = (
        "{name: n, tool: delete_ticket, args: {id: 7}, meta: {v.example/x: 1}, agent: analyst, roles: [reader], "
        "person: ann, environment: production, labels: [private], mode: write, server: desk, "
        "expect: [sandbox, ask], rules: [no-deletes, std-write], not_rules: [std-read], approval: boss}"
    )
    (case,) = load(given).cases
    assert (case.tool, case.kind, case.arguments, case.meta) == ("delete_ticket", "tool", {"id": 7}, {"v.example/x": 1})
    assert (case.agent, case.roles, case.person) == ("analyst", ("reader",), "ann")
    assert (case.environment, case.labels, case.mode, case.server) == ("production", ("private",), Mode.WRITE, "desk")
    assert (case.expect, case.rules, case.not_rules) == ("ask+sandbox", ("no-deletes", "std-write"), ("std-read",))
    assert case.place == ("f", 5, 89)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("{tool: create_ticket, expect: allow}", "missing key 'name'"),
        ("{name: n, expect: allow}", "missing key 'tool': what is called? (or resource, or prompt)"),
        ("{name: n, tool: create_ticket}", "missing key 'expect'"),
        ("{name: n, tool: create_tickt, expect: deny}", "did you mean 'create_ticket'?"),
        ("{name: n, tool: transfer, expect: deny}", "of a tool without a contract, say its mode:"),
        ("{name: n, tool: create_ticket, mode: read, expect: deny}", "'create_ticket' has a contract"),
        ("{name: n, tool: create_ticket, resource: 'file:///docs/a', expect: deny}", "a case is one call"),
        ("{name: n, resource: 'file:///docs/a', server: dask, expect: deny}", "did you mean 'desk'?"),
        ("{name: n, tool: create_ticket, expect: denied}", "did you mean 'deny'?"),
        ("{name: n, tool: create_ticket, expect: [allow, deny]}", "allow and deny cannot both be"),
        ("{name: n, tool: create_ticket, expect: [ask, ask]}", "the same word twice"),
        ("{name: n, tool: create_ticket, expect: []}", "must not be empty"),
        ("{name: n, tool: create_ticket, expect: deny, rules: [no-delete]}", "did you mean 'no-deletes'?"),
        ("{name: n, tool: create_ticket, expect: ask, approval: bos}", "did you mean 'boss'?"),
        ("{name: n, tool: create_ticket, arguments: {}, expect: ask}", "did you mean 'args'?"),
        ("{name: n, tool: create_ticket, _meta: {}, expect: ask}", "did you mean 'meta'?"),
        ("not a case", "must be a mapping"),
    ],
)
def test_a_case_that_is_wrong_is_a_problem_at_its_place(case: str, said: str) -> None:
    assert any(said in each for each in problem(case)), problem(case)


def test_two_cases_of_one_name_are_a_problem() -> None:
    one = "{name: n, tool: create_ticket, expect: allow}"
    assert problem(f"{one}, {one}") == ["duplicate case 'n' (first at f:5:96)"]


def test_cases_decide_nothing() -> None:
    assert load("").digest == load("{name: n, tool: create_ticket, expect: deny}").digest
    assert config.loosens(load("{name: n, tool: create_ticket, expect: deny}"), load("")) == []


def test_a_policy_file_has_cases_too_that_know_every_rule(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("cases: [{name: a, tool: create_ticket, expect: deny, rules: [later]}]\n")
    (tmp_path / "b.yaml").write_text("rules: [{id: later, action: deny}]\n")
    found = config.loads("policy: {files: [a.yaml, b.yaml]}\n" + TOP, file="f", base=tmp_path)
    assert [case.name for case in found.cases] == ["a"]
    assert found.rule_places == {"later": ("b.yaml", 1, 14)}
    (tmp_path / "b.yaml").write_text("rules: []\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:1:\d+: no rule has the id 'later'"):
        config.loads("policy: {files: [a.yaml, b.yaml]}\n" + TOP, file="f", base=tmp_path)


def test_rules_of_a_policy_file_come_over_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text(
        "rules: [{id: no-deletes, action: ask, approval: boss}, {id: more, action: deny, servers: [desk]}]\n"
        "cases: [{name: n, tool: create_ticket, expect: ask, rules: [no-deletes]}]\n"
    )
    assert config.is_policy_file(path)
    old = load("{name: o, tool: create_ticket, expect: allow}")
    new = config.with_policy_file(old, path)
    assert [(rule.id, rule.action) for rule in new.policy.rules] == [("no-deletes", "ask"), ("more", "deny")]
    assert [case.name for case in new.cases] == ["n"]
    assert new.digest != old.digest
    path.write_text("rules: [{id: a, action: ask, approval: bos}]\n")
    with pytest.raises(ConfigError, match="did you mean 'boss'"):
        config.with_policy_file(old, path)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("rules: []", True),
        ("cases: []", True),
        ("version: 1", False),
        ("servers: {}\nrules: []", False),
        ("- a", False),
    ],
)
def test_which_files_are_policy_files(tmp_path: Path, text: str, is_one: bool) -> None:
    (tmp_path / "f.yaml").write_text(text)
    assert config.is_policy_file(tmp_path / "f.yaml") is is_one
