"""What goes on record: everything about a call but its values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.audit.approvals import ProvenAnswer, ProvenApproval
from ringfence.audit.chain import Head, seal
from ringfence.core import canonical
from ringfence.core.model import Contract, Decision, GuardedText, LogPolicy, Mode, Outcome, Receipt, Status
from ringfence.governance import facts, journal
from ringfence.governance.effects import PossibleEffects
from ringfence.governance.journal import CallState
from ringfence.store import Answered, Approval
from tests.faking import contract, definition, make_call

ECHO = contract("echo")
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=40)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
objects = st.dictionaries(names, values, max_size=4)


def state_of(arguments: dict[str, Any], one: Contract = ECHO) -> CallState:
    made = CallState(make_call("echo", arguments, session="s", trace="t"), "development", clean=GuardedText)
    made.contract, made.definition = one, definition("echo")
    made.decision = Decision("dec_1", True, "a read is allowed", rules=("std-read",))
    return made


def ended(made: CallState, outcome: Outcome) -> dict[str, Any]:
    ending = facts.FinishedCall(replace(made, dispatched=True), outcome, made.wall_ms)
    return read(journal.finished(made, outcome, facts.build(ending)), made.call.id)


def began(made: CallState) -> dict[str, Any]:
    return read(journal.started(made), made.call.id)


def read(body: dict[str, Any], call_id: str = "call_1") -> dict[str, Any]:
    """What a reader of the log gets to see: with what is shared filled in, and without the record's place."""
    parts = {part.digest: part.text for part in body.get("shared", ())}
    record = seal(Head("c"), 0.0, "k", call_id, body)
    whole = replace(record, find=parts.get).body
    return {name: value for name, value in whole.items() if name not in ("v", "chain", "seq", "prev", "at", "kind")}


def strings(value: Any) -> Iterator[str]:
    """Every text in a value that is no name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


@pytest.mark.parametrize("level", ["digest", "names", "redacted"])
@given(arguments=objects, result=objects)
def test_values_never_enter(level: Any, arguments: dict[str, Any], result: dict[str, Any]) -> None:
    one = replace(ECHO, log=LogPolicy(level, level))
    empty = state_of({}, one)
    made = replace(empty, call=replace(empty.call, arguments=arguments))
    own, record = (
        json.dumps([began(one), ended(one, Outcome(Status.SUCCESS, "ok", result=got))], ensure_ascii=False)
        for one, got in ((empty, {}), (made, result))
    )
    allowed = own + "".join(keys(arguments)) + "".join(keys(result))
    for said in (*strings(arguments), *strings(result)):
        if len(said) >= 4 and said not in allowed:
            assert json.dumps(said, ensure_ascii=False)[1:-1] not in record


@given(arguments=objects)
def test_a_digest_says_nothing_without_its_salt(arguments: dict[str, Any]) -> None:
    first, second = state_of(arguments), state_of(arguments)
    entry = began(first)["arguments"]
    text = canonical.dumps(arguments)
    assert entry == {"digest": canonical.salted_bytes(text, first.salt), "bytes": len(text)}
    assert entry["digest"] != began(second)["arguments"]["digest"]
    assert entry["digest"] != canonical.digest(arguments)


def test_names_are_there_where_the_contract_lets_them_be() -> None:
    arguments = {"to": {"name": "x", "deep": {"deeper": {"deepest": 1}}}, "list": [{"hidden": 1}], "a": 1}
    shown = began(state_of(arguments, replace(ECHO, log=LogPolicy("names"))))["arguments"]["names"]
    assert shown == ["a", "list", "to", "to.deep", "to.deep.deeper", "to.name"]
    many = {f"k{n:04}": n for n in range(1000)}
    assert len(began(state_of(many, replace(ECHO, log=LogPolicy("names"))))["arguments"]["names"]) == 200


def test_a_record_says_who_what_and_by_whose_approval() -> None:
    made = state_of({"a": 1}, replace(ECHO, mode=Mode.WRITE))
    made.approval = Approval(
        "apr_1", "d", "call_0", "p", None, "echo", {"secret": "summary"}, "boss", (), False, 1, "consumed", 1.0, 2.0,
        (Answered("bob", True, 1.5), Answered("eve", True, 1.6)),
        proof=ProvenApproval(
            "apr_1", {"rule": "boss"}, Head("c", 3, "q"), (ProvenAnswer("bob", 1.5, Head("d", 2, "a")),)
        ),
    )  # fmt: skip
    made.started, made.possible = Receipt("c", 7, "h"), PossibleEffects(acts=True)
    started, finished = began(made), ended(made, Outcome(Status.SUCCESS, "ok", result={"content": []}))
    assert started["call"] == {
        "id": made.call.id, "kind": "tool", "method": "tools/call", "tool": "echo", "server": "desk", "origin": "sdk",
        "principal": {"tenant": "local", "agent": "analyst", "person": "alice", "kind": "agent"},
        "session": "s", "parent": None, "trace": "t", "environment": "development",
    }  # fmt: skip
    assert started["contract"] == {"name": "echo", "digest": ECHO.digest, "mode": "write"}
    assert started["pin"] == definition("echo").digest
    assert started["decision"]["rules"] == ["std-read"]
    assert started["approval"] == {
        "id": "apr_1", "rule": "boss", "asked": {"chain": "c", "seq": 3, "hash": "q"},
        "by": [{"person": "bob", "at": 1.5, "chain": "d", "seq": 2, "hash": "a"}],
    }, "what a table says of answers is no evidence"  # fmt: skip
    assert (started["durable"], started["effect_possible"]) == (True, True)
    shared = set(started) - {"durable", "effect_possible"}
    assert {name: finished[name] for name in shared} == {name: started[name] for name in shared}
    assert (finished["status"], finished["started_seq"], finished["effect"]) == ("success", 7, "confirmed")
    assert finished["facts"]["output"]["sha256"] is None, "a plain digest of the output could be tried against guesses"


def test_a_call_that_is_known_by_its_name_alone_is_recorded_all_the_same() -> None:
    made = CallState(
        make_call("ecko", {"x": float("nan"), "y": "\ud800"}, server="desk"), "development", clean=GuardedText
    )
    record = ended(made, Outcome(Status.VALIDATION_FAILURE, "unknown_tool", GuardedText("There is no tool 'ecko'.")))
    assert (record["contract"], record["pin"], record["decision"], record["result"]) == (None, None, None, None)
    assert record["arguments"] == {"digest": None, "bytes": None}
    assert record["message"] == "There is no tool 'ecko'."
    assert record["effect"] == "none"


@pytest.mark.parametrize("code", ["upstream_error", "answer_lost", "client_refused", "server_start", "server_down"])
def test_words_of_others_are_not_recorded(code: str) -> None:
    said = "no user alice@example.org with token 12345"
    assert said not in json.dumps(ended(state_of({}), Outcome(Status.FAILED, code, GuardedText(said))))


def test_a_message_on_record_quotes_no_argument() -> None:
    state = state_of({"path": "/workspace/patients/Jane Doe\n.csv", "deep": [{"name": "patients"}], "n": "it"})
    told = "there is no file '/workspace/patients/Jane Doe\\n.csv' in it, and nothing named patients"
    body = journal.finished(state, Outcome(Status.VALIDATION_FAILURE, "not_found", GuardedText(told)), {})
    assert body["message"] == "there is no file '…' in it, and nothing named …"


def test_time_passes_on_the_way() -> None:
    made = state_of({})
    first = made.wall_ms
    assert 0 <= first <= made.wall_ms
    assert not made.effect_possible
    assert not CallState(made.call, "development").effect_possible


def test_files_are_on_record_by_salted_digest_and_not_by_the_name_that_a_program_gave_them() -> None:
    made = state_of({"a": 1}, ECHO)
    files = [{"path": f"/workspace/output/SECRET-{n}", "bytes": n, "sha256": "ab" * 32} for n in range(300)]
    output = {"sha256": "cd", "stdout_sha256": "ef", "stderr_sha256": "ef", "stdout_bytes": 3}
    facts = {"inputs": files[:1], "files": files, "skipped": {"SECRET": "a link"}, "output": output}
    told = read(journal.finished(made, Outcome(Status.SUCCESS, "ok"), facts))["facts"]
    assert "SECRET" not in str(told) and "abab" not in str(told) and "ef" not in str(told["output"].values())
    assert (len(told["files"]), told["skipped"], told["output"]["stdout_bytes"]) == (100, 1, 3)
    assert (told["files_left_out"], "inputs_left_out" in told) == (200, False)
    assert set(told["inputs"][0]) == {"bytes", "digest"}
    assert told["inputs"][0]["digest"] == canonical.salted_bytes(("ab" * 32).encode(), made.salt)
    assert facts["files"] == files, "what the caller gets is not touched"


def test_when_a_process_tried_its_host_is_no_part_of_what_records_share() -> None:
    """Else each process would leave a part of its own, and none of them is ever pruned."""
    found = []
    for moment in ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"):
        made = state_of({"a": 1})
        made.isolation = {"level": "process", "verified_at": moment, "protections": {"seccomp": {"on": True}}}
        began(made)
        body = journal.finished(made, Outcome(Status.SUCCESS, "ok"), {"isolation": made.isolation})
        assert read(body)["facts"]["isolation"] == made.isolation
        found.append([part.digest for part in body["shared"]])
    assert found[0] == found[1]
