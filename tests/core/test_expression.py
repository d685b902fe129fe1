"""Conditions: names and types are checked when they are read, and no error ever counts as a yes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.expression import Expression, ExpressionError, variables
from ringfence.core.model import Call, Contract, Effects, Mode, Principal
from tests.faking import make_call

CONTRACT = Contract("pay", server="bank", tool="transfer", mode=Mode.WRITE, labels=("private",), secrets=("token",))
CALL = make_call("pay", {"amount": 5, "to": "x"}, principal=Principal("a", person="alice", roles=frozenset({"r", "q"})))

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
arguments = st.dictionaries(
    st.sampled_from(["amount", "to", "x"]),
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)),
)


def holds(source: str, args: dict[str, Any] | None = None) -> bool:
    return Expression(source).test({**variables(CALL, CONTRACT, "development"), "args": args or CALL.arguments})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("args.amount > 1", True),
        ("args.amount > 1 && args.to == 'y'", False),
        ("has(args.missing) && args.missing == 1", False),
        ("call.tool == 'pay' && call.kind == 'tool' && call.origin == 'sdk'", True),
        ("call.server == 'bank' && contract.server == 'bank' && contract.tool == 'transfer'", True),
        ("call.idempotent", False),
        ("agent.name == 'a' && agent.person == 'alice' && agent.tenant == 'local'", True),
        ("'q' in agent.roles && !('s' in agent.roles)", True),
        ("contract.mode == 'write' && contract.transport == 'mcp' && contract.network == 'denied'", True),
        ("'private' in contract.labels && 'token' in contract.secrets && !contract.reversible", True),
        ("environment == 'development'", True),
        ("args.to.matches('^x$')", True),
        ("args.to.startsWith('y')", False),
    ],
)
def test_what_a_condition_sees(source: str, expected: bool) -> None:
    assert holds(source) is expected


@pytest.mark.parametrize(
    ("source", "place", "text"),
    [
        ("arg.amount > 1", (1, 4), "undeclared reference to 'arg.amount'"),
        ("args.amount >", (1, 14), "mismatched input|Syntax error"),
        ("true &&\n  nobody", (2, 3), "undeclared reference to 'nobody'"),
        ("environment > 5", (1, 13), "no matching overload"),
        ("1 + 1", (1, 1), "a condition must be true or false, this is int"),
        ("environment", (1, 1), "a condition must be true or false, this is string"),
        ("[1]", (1, 1), "a condition must be true or false"),
    ],
)
def test_a_bad_condition_is_told_with_its_place(source: str, place: tuple[int, int], text: str) -> None:
    with pytest.raises(ExpressionError, match=text) as refused:
        Expression(source)
    assert (refused.value.line, refused.value.column) == place


@pytest.mark.parametrize(
    "source",
    [
        "args.missing", "args.missing == 1", "args.amount", "args.to > 1", "1 / (args.amount - 5) == 1",
        "args.to.a == 1", "args.to[0] == 'x'", "agent.missing == ''", "args.amount.size() == 1", "int(args.to) == 1",
    ],
)  # fmt: skip
def test_an_error_is_raised_and_never_a_yes(source: str) -> None:
    with pytest.raises(ExpressionError):
        holds(source)


@given(arguments)
def test_any_arguments_give_a_truth_value_or_an_error(args: dict[str, Any]) -> None:
    for source in ("args.amount > 1", "args.to == 'x'", "has(args.x) && args.x.y == 1", "args.x"):
        try:
            assert holds(source, args) in (True, False)
        except ExpressionError:
            continue


@pytest.mark.parametrize(
    ("source", "expected"),
    [("args.to", "x"), ("args.amount", "5"), ("args.to + '/' + string(args.amount)", "x/5"), ("1.5", "1.5")],
)
def test_a_key_is_text(source: str, expected: str) -> None:
    assert Expression(source, result="key").text(variables(CALL, CONTRACT, "development")) == expected


@pytest.mark.parametrize("source", ["args.missing", "true", "''", "[1]", "null", "{'a': 1}", "args"])
def test_what_is_no_key_is_an_error(source: str) -> None:
    with pytest.raises(ExpressionError):
        Expression(source, result="key").text(variables(CALL, CONTRACT, "development"))


def test_absent_parts_of_a_call_are_empty_texts() -> None:
    call = Call("c", Principal("a"), "t", {}, idempotency_key="k", session=None)
    seen = variables(call, Contract("t", effects=Effects(reversible=True)), "production")
    assert (seen["call"]["session"], seen["call"]["server"], seen["agent"]["person"]) == ("", "", "")
    assert (seen["call"]["idempotent"], seen["contract"]["reversible"]) == (True, True)
    assert seen["environment"] == "production"


@pytest.mark.parametrize(
    ("source", "args"),
    [
        ("args.to.contains('evil')", {"to": "x\0 evil"}),
        ("args.to != 'read'", {"to": "read\0write"}),
        ("args.to.exists(each, each == 'evil')", {"to": ["x", "\0evil"]}),
        ("'to' in args && args.size() == 1", {"to\0": 1, "to": "evil"}),
        ("args.to.inner.size() > 5", {"to": {"inner": "x\0" + "y" * 9}}),
    ],
)
def test_text_that_the_engine_would_read_only_up_to_a_nul_is_an_error(source: str, args: dict[str, Any]) -> None:
    with pytest.raises(ExpressionError, match="NUL"):
        holds(source, args)
    assert holds("environment == 'development' && call.tool == 'pay'", args)


def test_answers_and_meta_with_a_nul_are_no_more_readable() -> None:
    beside: list[tuple[str, Any]] = [("meta", {"k": "x\0evil"}), ("inputs", {"q": {"content": {"n": "x\0evil"}}})]
    for name, value in beside:
        seen = variables(replace(CALL, **{name: value}), CONTRACT, "development")
        with pytest.raises(ExpressionError, match="NUL"):
            Expression(f"call.{name}.size() > 9").test(seen)
        assert Expression("call.kind == 'tool'").test(seen), "what a condition does not read, it cannot misread"


class _Unreadable:
    """What the engine cannot convert: a condition that reads it fails."""


@pytest.mark.parametrize(
    "source",
    [
        "has(args.priority) && args.priority == 'high'",
        "args['priority'] == 'high' && args . priority.startsWith('h')",
        'args["priority"].size() == 4 && args.inner.deep.n == 1 && args.inner.list[0] == 1',
        "args.inner.deep == {'n': 1} && args.inner.deep.n == 1",
        "(args.priority == 'high' ? args.inner.deep.n : args.absent) == 1",
    ],
)
def test_a_condition_reads_only_the_fields_that_it_names(source: str) -> None:
    args = {"priority": "high", "inner": {"deep": {"n": 1}, "list": [1], "x": _Unreadable()}, "x": _Unreadable()}
    assert holds(source, args)
    assert holds(source, {**args, "x": "\0", "y": ["a"] * 100_000})


@pytest.mark.parametrize(
    "source",
    [
        "args.size() == 2 && args.priority == 'high'",
        "args.all // whichever\n (key, key != 'none')",
        "args // all of it\n .size() == 2",
        "'x' in args && args.priority == 'high'",
        "args == {'priority': 'high', 'x': 1} || args.priority == 'high'",
        "[args].exists(each, each.x == 1)",
        "args['pri' + 'ority'] == 'high' && args.x == 1",
        r"args['\u0078'] == 1",
        "args.exists(name, args[name] == 1)",
    ],
)
def test_a_condition_that_may_look_at_all_of_a_variable_sees_all_of_it(source: str) -> None:
    assert holds(source, {"priority": "high", "x": 1})
    with pytest.raises(ExpressionError):
        holds(source, {"priority": "high", "x": _Unreadable()})


@pytest.mark.parametrize("much", [["a"] * 60_000, {str(n): [] for n in range(30_000)}, [[0] * 60] * 1000])
def test_a_condition_that_would_read_very_many_values_fails(much: Any) -> None:
    with pytest.raises(ExpressionError, match="at most 50,000 values"):
        holds("args.rows.size() > 0", {"rows": much})
    with pytest.raises(ExpressionError, match="at most 50,000 values"):
        holds("args.size() > 0", {"rows": much})
    assert holds("args.amount == 1", {"rows": much, "amount": 1})
