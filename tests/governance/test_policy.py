"""Policy: how rules match, how they join, and what is said of a broken one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringfence.core.model import Call, Contract, Effects, Json, Mode, Principal
from ringfence.governance.policy import rule_problems
from tests.making import ANALYST, READ, WRITE, call, decide, policy, rule

# ── Matching ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("patterns", "matches"),
    [
        ((), True),
        (("create_ticket",), True),
        (("create_.*",), True),
        (("create",), False),  # the whole name, not a part of it
        (("ticket",), False),
        (("nothing", ".*_ticket"), True),
        (("(?i)CREATE_TICKET",), True),
        (("x|create_ticket",), True),
        (("create_ticketx?",), True),
        (("createx*_ticket",), True),
        (("create_ticketx{0}",), True),
    ],
)
def test_tool_patterns_match_the_whole_name(patterns: tuple[str, ...], matches: bool) -> None:
    assert decide(rule("allow", tool_patterns=patterns)).allowed is matches


@pytest.mark.parametrize(
    ("patterns", "arguments", "matches"),
    [
        ({"sql": "DROP"}, {"sql": "select 1; DROP table"}, True),  # a search, not the whole value
        ({"sql": "^DROP"}, {"sql": "select 1; DROP table"}, False),
        ({"sql": "DROP"}, {}, False),
        ({"sql": "DROP", "db": "prod"}, {"sql": "DROP"}, False),
        ({"sql": "DROP", "db": "prod"}, {"sql": "DROP", "db": "prod-1"}, True),
        ({"n": "^5$"}, {"n": 5}, True),
        ({"n": "^true$"}, {"n": True}, True),
        ({"n": "^null$"}, {"n": None}, True),
        ({"n": r'^\{"a":\[1,"x"\],"b":2\}$'}, {"n": {"b": 2, "a": [1, "x"]}}, True),
        ({"deep": "DROP"}, {"outer": {"deep": "DROP"}}, False),  # top level only
        ({"*": "DROP"}, {"outer": [{"deep": "a DROP b"}]}, True),
        ({"*": "^key$"}, {"outer": {"key": 1}}, True),
        ({"*": "DROP"}, {"outer": 1}, False),
    ],
)
def test_argument_patterns(patterns: dict[str, str], arguments: dict[str, Any], matches: bool) -> None:
    assert decide(rule("allow", argument_patterns=patterns), arguments=arguments).allowed is matches


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('args.priority == "high"', True),
        ('call.tool == "create_ticket" && call.kind == "tool" && call.origin == "cli"', True),
        ('call.server == "helpdesk" && call.session == "s1" && call.idempotent', True),
        ('agent.name == "analyst" && agent.tenant == "local" && agent.person == "alice"', True),
        ('"reader" in agent.roles && !("manager" in agent.roles)', True),
        ('contract.name == "create_ticket" && contract.server == "helpdesk" && contract.tool == "create_ticket"', True),
        ('contract.mode == "write" && contract.transport == "mcp" && contract.network == "denied"', True),
        ('"private" in contract.labels && contract.reversible && contract.secrets == ["token"]', True),
        ('environment == "development"', True),
        ("args.count > 3", False),
        ("has(args.missing)", False),
    ],
)
def test_when_sees_call_arguments_agent_contract_and_environment(condition: str, holds: bool) -> None:
    contract = replace(WRITE, labels=("private",), effects=Effects(reversible=True), secrets=("token",))
    asked = call(
        arguments={"priority": "high", "count": 3},
        principal=replace(ANALYST, person="alice"),
        origin="cli",
        session="s1",
        idempotency_key="k",
    )
    assert policy(rule("allow", when=condition)).decide(asked, contract).allowed is holds


@pytest.mark.parametrize(
    ("conditions", "matches"),
    [
        ({"agents": ("ana*",)}, True),
        ({"agents": ("Ana*", "bob")}, False),
        ({"servers": ("help*",)}, True),
        ({"servers": ("docs",)}, False),
        ({"environments": ("production", "development")}, True),
        ({"environments": ("dev*",)}, False),  # exact
        ({"modes": (Mode.WRITE,)}, True),
        ({"modes": (Mode.READ,)}, False),
        ({"enabled": False}, False),
        ({"agents": ("analyst",), "servers": ("docs",)}, False),  # all must hold
    ],
)
def test_agents_servers_environments_modes_and_enabled(conditions: dict[str, Any], matches: bool) -> None:
    assert decide(rule("allow", **conditions)).allowed is matches


def test_the_servers_of_a_rule_match_a_call_without_a_contract_of_its_own() -> None:
    listed = Contract(name="lists", server=None, mode=Mode.READ)
    asked = call("file:///a", kind="resource", server="docs")
    assert policy(rule("allow", servers=("docs",))).decide(asked, listed).allowed
    assert not policy(rule("allow", servers=("docs",))).decide(replace(asked, server=None), listed).allowed


# ── Joining ───────────────────────────────────────────────────────────────────────────────────────


def test_nothing_matched_is_denied() -> None:
    decision = decide()
    assert (decision.allowed, decision.rules, decision.error) == (False, (), None)
    assert "no rule matched" in decision.reason


def test_the_default_may_allow_reads_and_nothing_else() -> None:
    assert decide(default="allow_read", contract=READ).allowed
    assert not decide(default="allow_read").allowed
    assert not decide(rule("deny"), default="allow_read", contract=READ).allowed


def test_deny_beats_all() -> None:
    decision = decide(*(rule(action, id=action) for action in ("allow", "ask", "sandbox", "warn", "audit", "deny")))
    assert not decision.allowed
    assert (decision.asks, decision.sandbox) == ((), False)
    assert set(decision.rules) == {"allow", "ask", "sandbox", "warn", "audit", "deny"}
    assert "deny" in decision.reason


def test_an_approval_never_removes_the_sandbox() -> None:
    decision = decide(rule("ask", id="a"), rule("sandbox", id="b"), rule("allow", id="c"))
    assert (decision.allowed, decision.asks, decision.sandbox) == (True, ("always",), True)


def test_each_ask_names_its_approval_once() -> None:
    rules = (
        rule("ask", id="a", approval="manager"),
        rule("ask", id="b"),
        rule("ask", id="c", approval="manager"),
    )
    assert decide(*rules).asks == ("manager", "always")


def test_warn_and_audit_allow_and_mark() -> None:
    decision = decide(rule("warn", id="w"), rule("audit", id="a"))
    assert (decision.allowed, decision.marks, decision.asks, decision.sandbox) == (True, ("w", "a"), (), False)


def test_every_matching_rule_is_named_the_higher_priority_first() -> None:
    rules = (
        rule("allow", id="low", priority=1),
        rule("audit", id="first", priority=50),
        rule("warn", id="top", priority=900),
        rule("allow", id="second", priority=50),
        rule("deny", id="elsewhere", priority=1000, tool_patterns=("other",)),
    )
    assert decide(*rules).rules == ("top", "first", "second", "low")


def test_a_rule_that_fails_denies_and_says_which_and_why() -> None:
    decision = decide(rule("allow", id="fine"), rule("audit", id="broken", when='args.priority == "high"'))
    assert not decision.allowed
    assert decision.rules == ("fine",)
    assert decision.error is not None
    assert "'broken'" in decision.error
    assert "no such key: priority" in decision.error
    assert decision.error in decision.reason


@pytest.mark.parametrize(
    ("condition", "arguments"),
    [
        ("args[args.which] == 1", {"which": "hunter2"}),
        ('args.text.matches(args.text + "(")', {"text": "hunter2"}),
        ("args.number == 1", {"number": int("9" * 40), "text": "hunter2"}),
        ("int(args.text) > 3", {"text": "hunter2"}),
        ("args.text", {"text": "hunter2"}),
        ("args.text + 1 == 2", {"text": "hunter2"}),
    ],
)
def test_an_error_never_quotes_an_argument(condition: str, arguments: dict[str, Any]) -> None:
    decision = decide(rule("allow", when=condition), arguments=arguments)
    assert not decision.allowed
    assert decision.error is not None
    assert "hunter2" not in decision.error
    assert "9999" not in decision.error


def test_a_condition_is_not_evaluated_where_the_rest_of_the_rule_does_not_match() -> None:
    broken = rule("deny", when="args.absent == 1", argument_patterns={"other": "x"})
    assert decide(rule("allow", id="a"), broken).allowed


def test_each_decision_has_its_own_id_and_the_digest_of_the_policy() -> None:
    rules = policy(rule("allow"))
    first, second = rules.decide(call(), WRITE), rules.decide(call(), WRITE)
    assert first.id != second.id
    assert first.id.startswith("dec_")
    assert replace(first, id="") == replace(second, id="")
    assert first.policy_digest == rules.digest


def test_the_digest_follows_rules_preset_default_and_environment() -> None:
    digests = {
        policy().digest,
        policy(rule("allow")).digest,
        policy(rule("allow", priority=3)).digest,
        policy(preset="strict").digest,
        policy(default="allow_read").digest,
        policy(environment="production").digest,
    }
    assert len(digests) == 6
    assert policy(rule("allow")).digest == policy(rule("allow")).digest


def test_what_is_remembered_of_one_caller_is_not_used_for_another() -> None:
    rules = policy(rule("allow", agents=("analyst",), servers=("helpdesk",), modes=(Mode.WRITE,)))
    assert rules.decide(call(), WRITE).allowed
    assert not rules.decide(call(principal=Principal(agent="other")), WRITE).allowed
    assert not rules.decide(call(), replace(WRITE, server="docs")).allowed
    assert not rules.decide(call(), replace(WRITE, mode=Mode.READ)).allowed
    assert rules.decide(call(), WRITE).allowed


def test_what_is_remembered_of_one_call_is_not_used_for_other_arguments() -> None:
    rules = [rule("audit", f"r{n}", argument_patterns={"text": f"<{n}>"}) for n in range(8)]
    broken = rule("deny", "broken", argument_patterns={"text": "broken"}, when="args.missing == 1")
    used = policy(rule("allow", "all"), *rules, broken)
    for number in [*range(256), *range(256)]:  # more sets of rules than are remembered, each of them twice
        matching = [n for n in range(8) if number >> n & 1]
        text = "".join(f"<{n}>" for n in matching)
        decision = used.decide(call(arguments={"text": text}), WRITE)
        assert (decision.allowed, decision.error) == (True, None)
        assert decision.rules == ("all", *(f"r{n}" for n in matching))
        assert not used.decide(call(arguments={"text": f"broken {text}"}), WRITE).allowed


def test_defect_20_what_is_remembered_per_tool_is_bounded() -> None:
    rules = policy(rule("allow", tool_patterns=("file:.*",)))
    for number in range(5000):
        assert rules.decide(call(f"file:///{number}", kind="resource"), READ).allowed
    assert len(rules._cache) <= 4096
    before = dict(rules._cache)
    assert rules.decide(call("file:" + "x" * 10_000), WRITE).allowed
    assert rules._cache == before, "nor by its length"


def test_defect_19_a_pattern_is_no_glob() -> None:
    assert not decide(rule("allow", tool_patterns=("create_*",))).allowed  # "create" and any number of "_"


def test_a_policy_with_a_bad_rule_or_preset_is_not_made() -> None:
    with pytest.raises(ValueError, match=r"'bad'.*pattern"):
        policy(rule("allow", id="bad", tool_patterns=("(",)))
    with pytest.raises(ValueError, match="preset"):
        policy(preset="unheard-of")


# ── Problems of a rule ────────────────────────────────────────────────────────────────────────────


def test_a_good_rule_has_no_problems() -> None:
    good = rule("ask", tool_patterns=("a.*",), argument_patterns={"b": "c"}, when="args.x > 1", approval="manager")
    assert rule_problems(good) == []


@pytest.mark.parametrize(
    ("broken", "path", "text"),
    [
        ({"tool_patterns": ("ok", "(")}, ("tool_patterns", 1), "missing )"),
        ({"tool_patterns": (r"(a)\1",)}, ("tool_patterns", 0), "no backreferences"),
        ({"tool_patterns": ("(?=a)",)}, ("tool_patterns", 0), "no lookaround"),
        ({"tool_patterns": ("\ud800",)}, ("tool_patterns", 0), "surrogate"),
        ({"argument_patterns": {"sql": "a{2000}"}}, ("argument_patterns", "sql"), "repetition"),
        ({"when": "tol == 1"}, ("when",), "undeclared reference to 'tol'"),
        ({"when": "1 + 1"}, ("when",), "true or false"),
        ({"approval": "manager"}, ("approval",), "only a rule with action ask"),
    ],
)
def test_problems_say_where_and_what(broken: dict[str, Any], path: tuple[str | int, ...], text: str) -> None:
    [(found, message, line, column)] = rule_problems(rule("allow", **broken))
    assert found == path
    assert text in message
    assert (line, column) == (0, 0)


def test_a_problem_in_a_condition_has_its_place_inside_the_text() -> None:
    [(path, _, line, column)] = rule_problems(rule("allow", when="args.a == 1 &&\n  call.tool.startsWith(3)"))
    assert (path, line, column) == (("when",), 1, 22)


def test_all_problems_come_at_once() -> None:
    broken = rule("allow", tool_patterns=("(", "["), argument_patterns={"a": "*"}, when="nope", approval="x")
    assert len(rule_problems(broken)) == 5


# ── What can never be ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rules", "preset", "never"),
    [
        ((), "none", True),
        ((), "standard", False),
        ((rule("deny"),), "standard", True),
        ((rule("deny", tool_patterns=("create_.*",)),), "standard", True),
        ((rule("deny", tool_patterns=("delete_.*",)),), "standard", False),
        ((rule("deny", when="has(args.x)"),), "standard", False),
        ((rule("deny"), rule("allow", id="b", when="has(args.x)")), "standard", True),
        ((rule("allow"), rule("deny", id="b", when="has(args.x)")), "standard", False),
        ((rule("deny", argument_patterns={"code": "rm"}),), "standard", False),
        ((rule("ask"),), "none", False),
        ((rule("sandbox"),), "none", False),
    ],
)
def test_what_policy_never_allows_is_known_without_a_call(rules: Any, preset: str, never: bool) -> None:
    assert policy(*rules, preset=preset).never_allows(call(), WRITE) is never


# ── Names of prompts ──


def of_prompt(kind: str, offered: str, own: str = "secret") -> Call:
    ref: Json = {"type": "ref/prompt", "name": own}
    given = {"name": own} if kind == "prompt" else {"ref": ref, "argument": {"name": "a", "value": ""}}
    return call(offered, given, kind=kind, server="desk")


DESK = replace(READ, server="desk")


@pytest.mark.parametrize("kind", ["prompt", "completion"])
@pytest.mark.parametrize("offered", ["secret", "desk.secret"])
@pytest.mark.parametrize(
    "condition",
    [{"tool_patterns": ["secret"]}, {"tool_patterns": [r"desk\.secret"]}, {"when": 'call.tool == "secret"'}],
    ids=str,
)
def test_a_prompt_is_restricted_by_each_of_its_names(kind: str, offered: str, condition: Any) -> None:
    asked = of_prompt(kind, offered)
    assert not policy(rule("deny", **condition), rule("allow", id="rest")).decide(asked, DESK).allowed
    assert policy(rule("ask", **condition), rule("allow", id="rest")).decide(asked, DESK).asks == ("always",)
    assert policy(rule("deny", **condition), rule("allow", id="rest")).decide(of_prompt(kind, "b", "b"), DESK).allowed


@pytest.mark.parametrize("action", ["allow", "audit"])
def test_a_prompt_is_allowed_by_the_name_that_it_is_offered_by_alone(action: str) -> None:
    rules = policy(rule(action, tool_patterns=["secret"]))
    assert rules.decide(of_prompt("prompt", "secret"), DESK).allowed
    assert not rules.decide(of_prompt("prompt", "desk.secret"), DESK).allowed
