"""Recorded calls decided again: what the record tells, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringfence.core import canonical
from ringfence.core.model import Action, ApprovalRule, Contract, Json, Principal, Rule
from ringfence.governance.approvals import ApprovalTerms
from ringfence.governance.foresight import Foresight
from ringfence.governance.policy import AS_SENT, MISSES, Policy, Weighed
from ringfence.governance.redecide import Again, Kept, Redecision
from tests import faking
from tests.making import WRITE, call, policy, rule

pytestmark = pytest.mark.anyio
BOSS = ApprovalRule("boss", when='args.text == "x"')


def ahead(rules: Sequence[Rule], contract: Contract = faking.ECHO) -> Foresight:
    terms = ApprovalTerms({"boss": BOSS}, {})
    rulebook = Policy(rules, preset="permissive", environment="development")
    return Foresight({contract.name: contract}, {"desk": faking.DESK}, rulebook, terms)


async def recorded(
    folder: Path, *rules: Rule, contract: Contract = faking.ECHO, **made: Any
) -> tuple[Json, Kept | None]:
    said = faking.Said(rules=rules, contracts=(contract,), approvals={"boss": BOSS})
    async with faking.governed(folder, said) as way:
        await way.call(**{"arguments": {"text": "x"}, **made})
        (body,) = way.finished()
        payload = way.store.reader().payload(body["call_id"], "arguments")
    kept = None if payload is None else Kept(payload.salt, canonical.loads(payload.body))
    return body, kept


async def again(
    folder: Path,
    old: Sequence[Rule],
    new: Sequence[Rule],
    *,
    contract: Contract = faking.ECHO,
    after: Contract | None = None,
    **made: Any,
) -> Again:
    body, kept = await recorded(folder, *old, contract=contract, **made)
    got = Redecision(ahead(old, contract), ahead(new, after or contract), Principal).again(body, kept)
    assert isinstance(got, Again), got
    return got


async def test_a_rule_that_looks_at_no_arguments_is_decided_again(tmp_path: Path) -> None:
    got = await again(tmp_path, [], [rule("deny", "never", tool_patterns=("echo",))])
    assert (got.old, got.old_rules, set(got.new)) == ("allow", ("perm-read",), {"deny"})
    assert got.new_rules == ("never", "perm-read")
    assert (got.decided, got.changed) == (True, True)


async def test_a_new_rule_that_looks_at_arguments_depends_on_what_is_not_on_record(tmp_path: Path) -> None:
    new = [rule("deny", "x", argument_patterns={"text": "x"}), rule("warn", "w", argument_patterns={"*": "y"})]
    got = await again(tmp_path, [], new)
    assert (set(got.new), got.depends, got.decided) == ({"allow", "deny"}, ("x",), False)


@pytest.mark.parametrize("text", ["x", "y"])
@pytest.mark.parametrize("old", ["deny", "ask", "sandbox", "warn"])
@pytest.mark.parametrize("new", ["deny", "ask", "warn"])
async def test_a_rule_that_was_in_force_matches_as_it_did_then(tmp_path: Path, text: str, old: str, new: str) -> None:
    looking: dict[str, Any] = {"argument_patterns": {"text": "x"}}
    before, after = [rule(old, "r", **looking)], [rule(new, "other", **looking)]
    got = await again(tmp_path, before, after, arguments={"text": text})
    word = {"warn": "allow"}.get(new, new) if text == "x" else "allow"
    assert got.new == {word}


async def test_a_rule_that_only_allowed_says_less_of_one_that_restricts(tmp_path: Path) -> None:
    looking: dict[str, Any] = {"argument_patterns": {"text": "x"}}
    one = await again(tmp_path / "1", [rule("allow", "r", **looking)], [rule("deny", "r", **looking)])
    assert one.new == {"deny"}
    other = await again(
        tmp_path / "2", [rule("allow", "r", **looking)], [rule("deny", "r", **looking)], arguments={"text": "y"}
    )
    assert other.new == {"allow", "deny"}, "it is tried on more forms of the text"


async def test_a_condition_that_failed_then_fails_again(tmp_path: Path) -> None:
    broken = rule("deny", "r", when="args.missing > 1")
    got = await again(tmp_path, [broken], [broken, rule("warn", "more")])
    assert (got.old, set(got.new), got.changed) == ("error", {"error"}, False)
    gone = await again(tmp_path / "gone", [broken], [])
    assert (set(gone.new), gone.changed) == ({"allow"}, True)


async def test_a_rule_in_shadow_mode_can_be_enforced_on_record(tmp_path: Path) -> None:
    shadow = rule("deny", "r", when='args.text == "x"', mode="shadow")
    in_force = rule("deny", "r", when='args.text == "x"')
    assert (await again(tmp_path / "1", [shadow], [in_force])).new == {"deny"}
    assert (await again(tmp_path / "2", [shadow], [in_force], arguments={"text": "y"})).new == {"allow"}
    assert (await again(tmp_path / "3", [in_force], [shadow])).new == {"allow"}


async def test_another_policy_of_then_says_nothing(tmp_path: Path) -> None:
    looking = rule("deny", "r", argument_patterns={"text": "x"})
    body, _ = await recorded(tmp_path, looking)
    got = Redecision(ahead([rule("warn")]), ahead([looking]), Principal).again(body)
    assert isinstance(got, Again)
    assert got.new == {"allow", "deny"}


async def test_conditions_on_what_is_on_record_are_evaluated(tmp_path: Path) -> None:
    when = 'agent.name == "analyst" && contract.mode == "read" && call.tool == "echo" && environment == "development"'
    got = await again(tmp_path, [], [rule("deny", "r", when=when)])
    assert got.decided


async def test_kept_arguments_decide_where_nothing_was_redacted(tmp_path: Path) -> None:
    keeps = faking.contract("echo", log={"arguments": "redacted"})
    new = [rule("deny", "r", when='args.text == "x"')]
    assert (await again(tmp_path / "1", [], new, contract=keeps)).new == {"deny"}
    assert (await again(tmp_path / "2", [], new, contract=keeps, arguments={"text": "y"})).new == {"allow"}
    hides = faking.contract("echo", log={"arguments": "redacted"}, redact=["hunter[0-9]"])
    hidden = await again(tmp_path / "3", [], new, contract=hides, arguments={"text": "hunter2"})
    assert (hidden.decided, hidden.depends) == (False, ("r",))


async def test_kept_arguments_decide_with_what_went_beside_them_and_as_they_were_kept_before(tmp_path: Path) -> None:
    """Records made earlier have it among the arguments."""
    keeps = faking.contract("echo", log={"arguments": "redacted"}, meta=["vendor.example/v"])
    sent: Json = {"arguments": {"text": "x", "_meta": "own"}, "meta": {"vendor.example/v": 1}, "inputs": {"q": {}}}
    body, kept = await recorded(tmp_path, contract=keeps, **sent)
    assert kept is not None
    assert kept.whole == sent
    old = {"text": "x", "_meta": sent["meta"], "inputResponses": sent["inputs"]}
    new = [rule("deny", "r", when='args.text == "x" && call.inputs.q == {}')]
    got = Redecision(ahead([], keeps), ahead(new, keeps), Principal)
    assert isinstance(now := got.again(body, kept), Again) and now.new == {"deny"}
    assert isinstance(lost := got.again(body, Kept(kept.salt, old)), Again) and not lost.decided, (
        "`_meta` is not as it was"
    )
    body, kept = await recorded(tmp_path / "2", contract=keeps, **{**sent, "arguments": {"text": "x"}})
    assert kept is not None
    assert isinstance(before := got.again(body, Kept(kept.salt, old)), Again) and before.new == {"deny"}


async def test_no_arguments_at_all_are_known_by_their_length(tmp_path: Path) -> None:
    got = await again(tmp_path, [], [rule("deny", "r", argument_patterns={"*": "."})], arguments={})
    assert got.new == {"allow"}


async def test_names_on_record_tell_which_patterns_cannot_match(tmp_path: Path) -> None:
    names = faking.contract("echo", log={"arguments": "names"})
    here, absent = rule("deny", "r", argument_patterns={"text": "x"}), rule("deny", "r", argument_patterns={"sql": "x"})
    assert (await again(tmp_path / "1", [], [here], contract=names)).new == {"allow", "deny"}
    assert (await again(tmp_path / "2", [], [absent], contract=names)).new == {"allow"}


async def test_a_tool_that_is_gone_or_new(tmp_path: Path) -> None:
    gone = await again(tmp_path / "1", [], [], after=WRITE)
    assert (set(gone.new), gone.why, gone.changed) == ({"deny"}, "unknown_tool", True)
    body, _ = await recorded(tmp_path / "2", contract=faking.contract("other"))
    got = Redecision(ahead([], WRITE), ahead([]), Principal).again(body)
    assert isinstance(got, Again)
    assert (got.old, set(got.new)) == ("deny", {"allow"})


async def test_what_the_contract_asks_counts_on_both_sides(tmp_path: Path) -> None:
    asking = faking.contract("echo", approval="always")
    same = await again(tmp_path / "1", [], [rule("warn")], contract=asking)
    assert (same.old, set(same.new), same.changed) == ("ask", {"ask"}, False)
    stricter = await again(tmp_path / "2", [], [], after=asking)
    assert (stricter.old, set(stricter.new)) == ("allow", {"ask"})
    unsure = await again(tmp_path / "3", [], [], after=faking.contract("echo", approval="boss"))
    assert (set(unsure.new), unsure.depends) == ({"allow", "ask"}, ("approval boss",))
    known = faking.contract("echo", approval="boss")
    assert (await again(tmp_path / "4", [], [rule("warn")], contract=known)).new == {"ask"}
    assert (await again(tmp_path / "5", [], [rule("warn")], contract=known, arguments={"text": "y"})).new == {"allow"}


async def test_calls_that_never_got_to_policy_are_not_decided_again(tmp_path: Path) -> None:
    body, _ = await recorded(tmp_path)
    refused = {**body, "decision": None, "reason_code": "bad_arguments"}
    assert Redecision(ahead([]), ahead([]), Principal).again(refused) == "it did not get to policy (bad_arguments)"
    start = {**body, "call": {**body["call"], "kind": "server"}}
    assert Redecision(ahead([]), ahead([]), Principal).again(start) == "a server"


# ── Three values ──────────────────────────────────────────────────────────────────────────────────


def weigh(*rules: Rule, known: dict[str, str] | None = None) -> Weighed:
    told = known or {}
    return policy(*rules).weigh(call(), WRITE, lambda each: told.get(each.id))


ARGS: dict[str, Any] = {"argument_patterns": {"a": "x"}}


@pytest.mark.parametrize(
    ("rules", "verdicts", "depends"),
    [
        ([("allow", {})], {"allow"}, ()),
        ([("allow", ARGS)], {"allow", "deny"}, ("allow",)),
        ([("allow", {}), ("deny", {}), ("ask", ARGS)], {"deny"}, ()),
        ([("allow", {}), ("warn", ARGS)], {"allow"}, ()),
        ([("allow", {}), ("sandbox", ARGS), ("ask", {})], {"ask", "ask+sandbox"}, ("sandbox",)),
        ([("sandbox", ARGS)], {"deny", "sandbox"}, ("sandbox",)),
        ([("allow", {}), ("audit", {"when": "args.a == 1"})], {"allow", "error"}, ("audit",)),
        ([("allow", {}), ("deny", {"when": 'agent.name == "nobody"'})], {"allow"}, ()),
        ([("allow", {}), ("deny", {"when": 'agent.name == "analyst"'})], {"deny"}, ()),
        ([("allow", {}), ("deny", {"when": "call.meta.x == 1"})], {"allow", "deny", "error"}, ("deny",)),
    ],
)
def test_all_verdicts_that_are_possible(rules: list[Any], verdicts: set[str], depends: tuple[str, ...]) -> None:
    got = weigh(*(rule(action, action, **more) for action, more in rules))
    assert (set(got.verdicts), got.depends) == (verdicts, depends)


def test_what_is_known_of_a_rule_is_taken() -> None:
    looking = Rule("r", Action.DENY, argument_patterns={"a": "x"})
    assert weigh(rule("allow", "a"), looking, known={"r": MISSES}).verdicts == {"allow"}
    assert weigh(rule("allow", "a"), looking, known={"r": AS_SENT}).verdicts == {"deny"}


async def test_labels_on_record_decide_again(tmp_path: Path) -> None:
    read = faking.contract("echo", labels=["private"])
    out = rule("deny", "out", taint_labels=("private",))
    got = await again(tmp_path, (), (out,), contract=read)
    assert (got.old, got.new, got.new_rules[:1]) == ("allow", frozenset({"deny"}), ("out",))


async def test_a_label_that_depends_on_arguments_leaves_it_open(tmp_path: Path) -> None:
    sends = faking.contract("echo", labels=[{"label": "external_sink", "when": 'args.text == "x"'}])
    got = await again(tmp_path, (), (rule("deny", "out", sink=True),), contract=sends)
    assert (got.new, got.depends) == (frozenset({"allow", "deny"}), ("out",))
