"""Argument patterns see what a server makes of arguments: strings inside, lists as one line, look-alikes as alike."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.invisible import bare, folded
from ringfence.core.model import Json, Mode, Status
from ringfence.governance.policy import Policy
from tests.faking import Said, contract, governed
from tests.making import READ, WRITE, call, decide, policy, rule

DESTROYS = r"rm\s+-rf"

HIDDEN: dict[str, tuple[Any, str]] = {
    "as it is": ("rm -rf /", "as_sent"),
    "a list of words": (["rm", "-rf", "/"], "joined"),
    "words with a number among them": (["rm", "-rf", 1], "joined"),
    "a line break in a list": (["rm\n-rf"], "string"),
    "a tab in an object": ({"line": "rm\t-rf"}, "string"),
    "a key": ({"rm\n-rf": 1}, "string"),
    "a list in an object in a list": ([{"argv": ["sudo", "rm", "-rf"]}], "joined"),
    "full width": ("ｒｍ -rf /", "normalized"),
    "full width in a list": (["ｒｍ", "-rf"], "normalized"),
    "a soft hyphen": ("r\u00adm -rf", "normalized"),
    "a zero width space": ("rm -r\u200bf", "normalized"),
    "a variation selector": ("rm\ufe0f -rf", "normalized"),
    "a tag": ("rm -r\U000e0066f", "normalized"),
    "a filler": ("r\u3164m -rf", "normalized"),
    "an ideographic space": ("rm\u3000-rf", "normalized"),
    "a NUL": ("r\0m -rf", "normalized"),
    "a backspace": ("rm \b-rf", "normalized"),
    "a DEL": ("r\x7fm -rf", "normalized"),
    "a control character of the second set": ("r\x90m -rf", "normalized"),
    "an annotation": ("r\ufff9m -rf", "normalized"),
    "no character": ("r\ufffem -rf", "normalized"),
    "a vertical tab": ("rm\x0b-rf", "normalized"),
    "a separator of files": ("rm\x1c-rf", "normalized"),
    "a separator of lines": ("rm\u2028-rf", "normalized"),
    "a next line": ("rm\x85-rf", "normalized"),
    "an Ogham space": ("rm\u1680-rf", "normalized"),
    "mathematical letters": ("𝐫𝐦 -rf", "normalized"),
}


BLANKS = {"tab": "rm\t-rf", "line break": "rm\n-rf", "return": "rm\r-rf", "Ogham space and tab": "ｒｍ\t-rf\u1680/"}


@pytest.mark.parametrize("case", BLANKS)
@pytest.mark.parametrize("name", ["command", "*"])
def test_every_blank_is_a_space_in_the_normalized_form(case: str, name: str) -> None:
    strict, rest = rule("deny", id="no-rm", argument_patterns={name: "rm -rf"}), rule("allow", id="rest")
    for value in (BLANKS[case], [BLANKS[case]]):
        assert dict(decide(strict, rest, arguments={"command": value}).forms) == {"no-rm": "normalized"}
    lenient = rule("deny", id="no-rm", argument_patterns={name: "rm -rf"}, normalize=False)
    assert decide(lenient, rest, arguments={"command": BLANKS[case]}).allowed


def test_lines_stay_lines_in_the_normalized_form_too() -> None:
    by_line = rule("deny", id="no-rm", argument_patterns={"command": "(?m)^rm"})
    assert not decide(by_line, rule("allow"), arguments={"command": "ls\nｒｍ -rf"}).allowed


@pytest.mark.parametrize("case", HIDDEN)
@pytest.mark.parametrize("action", ["deny", "ask"])
@pytest.mark.parametrize("name", ["command", "*"])
def test_a_pattern_finds_what_is_spelled_otherwise(case: str, action: str, name: str) -> None:
    value, form = HIDDEN[case]
    strict = rule(action, id="no-rm", argument_patterns={name: DESTROYS})
    decision = decide(strict, rule("allow", id="rest"), arguments={"command": value})
    assert decision.allowed is (action == "ask") and (decision.asks == ("always",)) is (action == "ask")
    # With "*" every string inside is looked at as it was sent.
    expected = "as_sent" if name == "*" and form == "string" else form
    assert dict(decision.forms) == {"no-rm": expected}
    assert ("no-rm (matched" in decision.reason) is (expected != "as_sent")


@pytest.mark.parametrize(
    "value", ["ls", ["rm", "x", "-rf"], {"rm": "-rf"}, "r m -rf", 7, None, [], ["rm", ["-rf"]], "rm…-rf"]
)
def test_what_is_something_else_is_not_found(value: Any) -> None:
    strict = rule("deny", argument_patterns={"command": DESTROYS})
    assert decide(strict, rule("allow", id="rest"), arguments={"command": value}).allowed


def test_the_json_of_a_value_is_matched_still() -> None:
    strict = rule("deny", argument_patterns={"limits": r'"memory":-1'})
    decision = decide(strict, rule("allow", id="rest"), arguments={"limits": {"memory": -1}})
    assert not decision.allowed and dict(decision.forms) == {"r": "as_sent"}


def test_a_rule_can_do_without_the_normal_form() -> None:
    exact = rule("deny", argument_patterns={"command": DESTROYS}, normalize=False)
    assert decide(exact, rule("allow", id="rest"), arguments={"command": "ｒｍ -rf"}).allowed
    assert not decide(exact, rule("allow", id="rest"), arguments={"command": ["rm", "-rf"]}).allowed


def test_an_ellipsis_is_no_path_that_climbs() -> None:
    strict = rule("deny", argument_patterns={"text": r"\.\."})
    assert decide(strict, rule("allow", id="rest"), arguments={"text": "and so on… ünd"}).allowed
    assert not decide(strict, rule("allow", id="rest"), arguments={"text": "\u2025/etc"}).allowed


@pytest.mark.parametrize("value", [["ls", "rm -rf /"], "ｌｓ", "l\u200bs", {"x": "ls"}])
@pytest.mark.parametrize("action", ["allow", "audit", "warn", "sandbox"])
def test_another_form_never_allows_more(value: Any, action: str) -> None:
    lenient = rule(action, argument_patterns={"command": "^ls$"})
    assert decide(lenient, arguments={"command": "ls"}).allowed
    decision = decide(lenient, arguments={"command": value})
    assert not decision.allowed
    assert decision.reason.startswith("denied: no rule matched")


def test_what_a_rule_demands_holds_in_every_form() -> None:
    boxed = rule("sandbox", id="box", argument_patterns={"command": "curl"})
    marked = rule("warn", id="mark", argument_patterns={"command": "curl"})
    decision = decide(boxed, marked, rule("allow", id="rest"), arguments={"command": "ｃｕｒｌ"})
    assert (decision.allowed, decision.sandbox, decision.marks) == (True, True, ("mark",))


def test_a_default_that_allows_reads_still_does() -> None:
    marked = rule("audit", id="mark", argument_patterns={"command": "curl"})
    rules = policy(marked, default="allow_read")
    decision = rules.decide(call("search_docs", {"command": "ｃｕｒｌ"}), READ)
    assert decision.allowed and decision.marks == ("mark",) and "default allows reads" in decision.reason
    assert not rules.decide(call("create_ticket", {"command": "ｃｕｒｌ"}), WRITE).allowed
    assert WRITE.mode is Mode.WRITE


def test_forms_of_one_call_do_not_stick_to_the_next() -> None:
    rules = policy(rule("deny", id="no-rm", argument_patterns={"command": DESTROYS}), rule("allow", id="rest"))
    found = [
        rules.decide(call("create_ticket", {"command": text}), WRITE)
        for text in ("ｒｍ -rf", "rm -rf", "ls", "ｒｍ -rf")
    ]
    assert [(one.allowed, dict(one.forms)) for one in found] == [
        (False, {"no-rm": "normalized"}), (False, {"no-rm": "as_sent"}), (True, {}), (False, {"no-rm": "normalized"}),
    ]  # fmt: skip


def test_every_pattern_of_a_rule_must_be_found_and_the_farthest_form_is_named() -> None:
    both = rule("deny", argument_patterns={"command": "rm", "where": "prod"})
    rest = rule("allow", id="rest")
    assert decide(both, rest, arguments={"command": "ｒｍ"}).allowed
    decision = decide(both, rest, arguments={"command": "ｒｍ", "where": "prod"})
    assert not decision.allowed and dict(decision.forms) == {"r": "normalized"}


@pytest.mark.anyio
async def test_the_form_is_on_record(tmp_path: Path) -> None:
    strict = rule("deny", id="no-rm", name="Nothing is destroyed", argument_patterns={"command": DESTROYS})
    async with governed(tmp_path, Said(contracts=(contract("echo"),), rules=(strict,))) as way:
        outcome = await way.call("echo", {"command": "ｒｍ -rf"})
        assert outcome.status is Status.DENIED
        assert outcome.message == "Refused by policy: denied by no-rm (Nothing is destroyed, matched normalized)"
        assert way.finished()[0]["decision"]["forms"] == {"no-rm": "normalized"}


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b"]), values, max_size=2))
def test_whatever_is_sent_is_decided(arguments: Json) -> None:
    rules = (rule("deny", id="d", argument_patterns={"*": "q"}), rule("ask", id="k", argument_patterns={"a": "z"}))
    assert decide(*rules, rule("allow", id="rest"), arguments=arguments).error is None


@given(st.text())
def test_folding_is_done_once(text: str) -> None:
    assert folded(folded(text)) == folded(text)
    assert bare(folded(text)) == folded(text)


# ── Arguments of prompts and completions ──

SHADOW = "/etc/shadow"
REF = {"type": "ref/prompt", "name": "p"}
WITHIN: dict[str, tuple[str, Json, str]] = {
    "a prompt's argument": ("prompt", {"name": "p", "arguments": {"path": SHADOW}}, "as_sent"),
    "a list": ("prompt", {"name": "p", "arguments": {"path": ["cat", SHADOW]}}, "as_sent"),
    "a look-alike": ("prompt", {"name": "p", "arguments": {"path": "/etc/sha\u200bdow"}}, "normalized"),
    "what is completed": ("completion", {"ref": REF, "argument": {"name": "path", "value": SHADOW}}, "string"),
    "what is filled in": (
        "completion",
        {"ref": REF, "argument": {"name": "x", "value": ""}, "context": {"arguments": {"path": SHADOW}}},
        "string",
    ),
}


@pytest.mark.parametrize("case", WITHIN)
def test_arguments_of_prompts_and_completions_are_seen_under_their_names(case: str) -> None:
    kind, arguments, form = WITHIN[case]
    rules = policy(rule("deny", id="no", argument_patterns={"path": SHADOW}), rule("allow", id="rest"))
    decision = rules.decide(call("p", arguments, kind=kind), READ)
    assert not decision.allowed and dict(decision.forms) == {"no": form}
    other = policy(rule("deny", id="no", argument_patterns={"file": SHADOW}), rule("allow", id="rest"))
    assert other.decide(call("p", arguments, kind=kind), READ).allowed


def test_the_fields_of_a_prompt_and_a_completion_are_seen_as_before() -> None:
    prompt = {"name": "p", "arguments": {"name": SHADOW}}
    for name, form in (("name", "string"), ("arguments", "as_sent")):
        rules = policy(rule("deny", id="no", argument_patterns={name: SHADOW}), rule("allow", id="rest"))
        assert dict(rules.decide(call("p", prompt, kind="prompt"), READ).forms) == {"no": form}
    named = policy(rule("deny", id="no", argument_patterns={"name": "^p$"}), rule("allow", id="rest"))
    assert dict(named.decide(call("p", prompt, kind="prompt"), READ).forms) == {"no": "as_sent"}
    completion = {"ref": REF, "argument": {"name": "path", "value": SHADOW}}
    whole = policy(rule("deny", id="no", argument_patterns={"argument": SHADOW}), rule("allow", id="rest"))
    assert not whole.decide(call("p", completion, kind="completion"), READ).allowed


def test_no_argument_of_a_completion_is_allowed_for_another_of_its_name() -> None:
    both = {"ref": REF, "argument": {"name": "path", "value": "/pub"}, "context": {"arguments": {"path": SHADOW}}}
    rules = policy(rule("allow", argument_patterns={"path": "^/pub"}), preset="none")
    assert not rules.decide(call("p", both, kind="completion"), READ).allowed
    prompt = {"name": "p", "arguments": {"path": "/pub"}}
    assert rules.decide(call("p", prompt, kind="prompt"), READ).allowed


BLOCK = {"type": "text", "text": "evil"}
BESIDE: dict[str, Json] = {
    "a block": {"inputs": {"q": {"role": "assistant", "model": "m", "content": BLOCK}}},
    "a list of blocks": {"inputs": {"q": {"role": "assistant", "model": "m", "content": [{"type": "image"}, BLOCK]}}},
    "a block within a block": {"inputs": {"q": {"content": [{"type": "tool_result", "content": [BLOCK]}]}}},
    "a field of a form": {"inputs": {"q": {"action": "accept", "content": {"text": "evil"}}}},
    "a root": {"inputs": {"q": {"roots": [{"uri": "file:///a", "name": "a"}, {"uri": "file:///b", "text": "evil"}]}}},
    "a key of _meta": {"meta": {"text": "evil"}},
    "a field within a value of _meta": {"meta": {"vendor.example/customer": {"deep": [{"text": ["evil"]}]}}},
    "a part of the trace": {"traced": {"text": "k=%65vil"}},
}


@pytest.mark.parametrize("case", BESIDE)
def test_a_named_pattern_sees_fields_of_its_name_beside_the_arguments_at_any_depth(case: str) -> None:
    strict, rest = rule("deny", id="no-evil", argument_patterns={"text": "evil"}), rule("allow", id="rest")
    decision = policy(strict, rest).decide(call(arguments={"text": "fine"}, **BESIDE[case]), WRITE)
    assert not decision.allowed and dict(decision.forms) == {"no-evil": "carried"}
    other = rule("deny", id="no-evil", argument_patterns={"other": "evil"})
    assert policy(other, rest).decide(call(arguments={"text": "fine"}, **BESIDE[case]), WRITE).allowed
    allows = rule("allow", argument_patterns={"text": "evil"})
    assert not policy(allows).decide(call(arguments={"text": "fine"}, **BESIDE[case]), WRITE).allowed


@pytest.mark.parametrize("name", ["uri", "name"])
def test_a_named_pattern_sees_roots(name: str) -> None:
    roots = {"roots": [{"uri": "file:///a", "name": "a"}, {"uri": "file:///mallory", "name": "mallory"}]}
    strict, rest = rule("deny", argument_patterns={name: "mallory"}), rule("allow", id="rest")
    assert not policy(strict, rest).decide(call(inputs={"q": roots}), WRITE).allowed
    assert policy(strict, rest).decide(call(inputs={name: {"roots": []}}), WRITE).allowed


# ── Many values ───────────────────────────────────────────────────────────────────────────────────

PATTERNS = [r"rm\s+-rf", "^/etc", r"key$", r"\bkey\b", r"(?i)secret", r"\Ahost\z", "a|^b", r"x\By", "", "[^k]ey"]


@given(st.sampled_from(PATTERNS), st.lists(st.text("rmfekytcshoab -/\n\tＫ", max_size=6), min_size=33, max_size=60))
def test_many_values_are_judged_as_each_of_them_is(pattern: str, values: list[str]) -> None:
    strict, rest = rule("deny", id="strict", argument_patterns={"*": pattern}), rule("allow", id="rest")
    together = decide(strict, rest, arguments={"values": {"inside": values}})
    alone = [decide(strict, rest, arguments={"values": value}).allowed for value in ("values", "inside", *values)]
    joined = decide(strict, rest, arguments={"values": [" ".join(values)]}).allowed
    assert together.allowed == (all(alone) and joined)


def test_rules_that_would_look_at_too_many_values_one_by_one_deny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.governance.policy._MAX_SEARCHES", 250)
    last, rest = rule("deny", id="last", argument_patterns={"*": r"\Ano\z"}), rule("allow", id="rest")
    values = [f"value {number}" for number in range(100)]
    assert decide(last, rest, arguments={"values": values}).allowed
    many = [rule("deny", id=f"{number}", argument_patterns={"*": r"\Ano\z"}) for number in range(3)]
    more = decide(*many, rest, arguments={"values": values})
    assert not more.allowed and more.error is not None and "too many values" in more.error


def test_texts_that_are_far_longer_when_normalized_deny() -> None:
    """One character of them is eighteen of the form that rules are tried on."""
    strict, rest = rule("deny", id="strict", argument_patterns={"*": "rm"}), rule("allow", id="rest")
    long = decide(strict, rest, arguments={"values": "\ufdfa" * 300_000})
    assert not long.allowed and long.error is not None and "too long ones" in long.error
    assert decide(strict, rest, arguments={"values": "\ufdfa" * 1000}).allowed


@pytest.mark.anyio
async def test_a_long_call_is_judged_while_others_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = threading.get_ident()
    seen: list[bool] = []
    decided = Policy.decide

    def spied(self: Policy, *given: Any) -> Any:
        seen.append(threading.get_ident() == ours)
        return decided(self, *given)

    monkeypatch.setattr(Policy, "decide", spied)
    async with governed(tmp_path) as way:
        assert (await way.call("echo", {"values": ["short"]})).ok
        assert (await way.call("echo", {"values": [f"{number}" for number in range(10_000)]})).ok
    assert seen == [True, False]
