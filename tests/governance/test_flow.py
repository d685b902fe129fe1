"""Labels: what a call has, what is in force, to what they stick, and that nothing but time clears them."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.model import ApprovalRule, Json, Outcome, Principal, ServerVolume, StandingTerms, Status
from ringfence.governance import question
from ringfence.governance.contract import Capability
from ringfence.governance.flow import unlabelled_ways_out
from tests.faking import DESK, OK, Said, Way, contract, governed
from tests.making import definition, rule

pytestmark = pytest.mark.anyio

READ = contract("read_record", labels=["private"])
FETCH = contract("fetch", labels=["untrusted"])
SEND = contract("send", mode="write", labels=["external_sink"])
NOTE = contract("note", mode="write", place="args.key")
RECALL = contract("recall", place="args.key")
WHOLE = contract("dump")
KEEP = contract("keep", mode="write")
SHARE = contract("share", mode="write", place="args.key", labels=["external_sink"])
ASKS = rule("ask", "out", taint_all=("private", "untrusted"), sink=True)
ALLOW = rule("allow", "all")
EVERY = Said(contracts=(READ, FETCH, SEND, NOTE, RECALL, WHOLE, SHARE), rules=(ALLOW, ASKS), preset="none")
OTHER = Principal("other")


def labels_of(outcome: Outcome) -> Any:
    return outcome.facts.get("labels")


async def tainted(way: Way, **more: Any) -> None:
    for tool in ("read_record", "fetch"):
        assert (await way.call(tool, **more)).ok


async def test_after_untrusted_content_and_private_data_a_call_to_a_sink_asks(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        assert (await way.call("send")).ok
        await tainted(way)
        held = await way.call("send")
    assert (held.status, held.facts["rules"]) == (Status.APPROVAL_REQUIRED, ["all", "out"])
    assert labels_of(held) == {"call": ["external_sink"], "in_force": ["private", "untrusted"], "result": []}


@pytest.mark.parametrize("tools", [("read_record",), ("fetch",)])
async def test_one_of_the_two_alone_does_not(tmp_path: Path, tools: tuple[str, ...]) -> None:
    async with governed(tmp_path, EVERY) as way:
        for tool in tools:
            await way.call(tool)
        assert (await way.call("send")).ok


async def test_a_restart_clears_nothing(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await tainted(way)
    async with governed(tmp_path, EVERY) as way:
        assert (await way.call("send")).status is Status.APPROVAL_REQUIRED


async def test_another_agent_is_not_concerned_and_another_session_of_the_same_is(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await way.call("read_record", session="one")
        await way.call("fetch", session="two")
        assert (await way.call("send", session="three")).status is Status.APPROVAL_REQUIRED
        assert (await way.call("send", principal=OTHER)).ok


async def test_what_a_session_read_holds_for_it_longer_than_the_window(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await tainted(way, session="one")
        way.pipeline.rules = replace(way.pipeline.rules, label_seconds=-1.0)  # all of it was too long ago
        assert (await way.call("send")).ok
        assert (await way.call("send", session="one")).status is Status.APPROVAL_REQUIRED


async def test_labels_stick_to_a_place_and_whoever_reads_it_has_them(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await tainted(way)
        await way.call("note", {"key": "a", "text": "x"})
        read = await way.call("recall", {"key": "a"}, principal=OTHER)
        assert labels_of(read)["result"] == ["private", "untrusted"]
        assert (await way.call("send", principal=OTHER)).status is Status.APPROVAL_REQUIRED


async def test_another_place_of_the_same_server_has_none(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await tainted(way)
        await way.call("note", {"key": "a", "text": "x"})
        await way.call("recall", {"key": "b"}, principal=OTHER)
        assert (await way.call("send", principal=OTHER)).ok


async def test_a_tool_that_names_no_place_reads_them_all(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await tainted(way)
        await way.call("note", {"key": "a", "text": "x"})
        assert labels_of(await way.call("dump", principal=OTHER))["result"] == ["private", "untrusted"]


async def test_a_call_that_sends_a_place_out_goes_by_the_labels_of_that(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await tainted(way)
        await way.call("note", {"key": "a", "text": "x"})
        assert (await way.call("share", {"key": "b"}, principal=OTHER)).ok
        assert (await way.call("share", {"key": "a"}, principal=OTHER)).status is Status.APPROVAL_REQUIRED


async def test_labels_stick_to_a_server_that_has_a_volume_and_to_no_other(tmp_path: Path) -> None:
    plain = Said(contracts=(READ, FETCH, KEEP, WHOLE), rules=(ALLOW,), preset="none")
    kept = replace(plain, server=replace(DESK, volumes=(ServerVolume("data", "/data"),)))
    for name, said, labels in (("plain", plain, None), ("kept", kept, ["private", "untrusted"])):
        async with governed(tmp_path / name, said) as way:
            await tainted(way)
            assert (await way.call("keep", {"text": "x"})).ok
            read = labels_of(await way.call("dump", principal=OTHER))
            assert (read and read["result"]) == labels
            apart = labels_of(await way.call("dump", principal=Principal("other", tenant="acme")))
            assert apart is None, "another tenant's is another volume"


async def test_a_place_is_that_of_a_tenant(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await tainted(way)
        await way.call("note", {"key": "a", "text": "x"})
        elsewhere = Principal("other", tenant="acme")
        assert labels_of(await way.call("recall", {"key": "a"}, principal=elsewhere)) is None


async def test_a_label_can_depend_on_the_arguments(tmp_path: Path) -> None:
    when = [{"label": "external_sink", "when": '!args.to.endsWith("@corp.example")'}]
    mail = contract("mail", mode="write", labels=when)
    async with governed(tmp_path, replace(EVERY, contracts=(*EVERY.contracts, mail))) as way:
        await tainted(way)
        assert (await way.call("mail", {"to": "a@corp.example"})).ok
        assert (await way.call("mail", {"to": "a@evil.example"})).status is Status.APPROVAL_REQUIRED
        # What cannot be told counts as met.
        assert (await way.call("mail", {})).status is Status.APPROVAL_REQUIRED


async def test_an_approval_is_for_the_labels_that_it_was_asked_about(tmp_path: Path) -> None:
    asks = rule("ask", "always")
    async with governed(tmp_path, replace(EVERY, rules=(asks, ASKS), preset="none")) as way:
        first = await way.call("send")
        await tainted_by_hand(way)
        second = await way.call("send")
    assert first.approval_id != second.approval_id


async def tainted_by_hand(way: Way) -> None:
    """Where a person must agree to every call."""
    rules = way.pipeline.rules
    way.pipeline.rules = replace(rules, policy=type(rules.policy)((ALLOW,), preset="none", environment="development"))
    await tainted(way)
    way.pipeline.rules = rules


async def test_a_person_who_is_asked_is_told_since_which_call(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await way.call("read_record", id="call_a")
        await way.call("fetch", id="call_b")
        held = await way.call("send")
        (asked,) = way.store.reader().approvals()
    assert asked.id == held.approval_id
    assert asked.summary["labels"] == {
        "call": ["external_sink"],
        "in_force": ["private", "untrusted"],
        "since": {
            "private": {"call": "call_a", "tool": "read_record"},
            "untrusted": {"call": "call_b", "tool": "fetch"},
        },
    }


async def test_labels_are_on_record(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        done = await way.call("read_record", id="call_a")
        (body,) = way.finished("call_a")
    assert done.ok
    assert body["facts"]["labels"] == {"call": ["private"], "in_force": ["private"], "result": ["private"]}


async def test_a_call_that_was_refused_reads_nothing(tmp_path: Path) -> None:
    deny = rule("deny", "no", tool_patterns=("read_record",))
    async with governed(tmp_path, replace(EVERY, rules=(ALLOW, ASKS, deny))) as way:
        await way.call("fetch")
        assert (await way.call("read_record")).status is Status.DENIED
        assert (await way.call("send")).ok


async def test_the_resources_of_a_server_have_its_labels(tmp_path: Path) -> None:
    said = replace(EVERY, server=replace(DESK, labels=("untrusted",)))
    read: Json = {"contents": [{"uri": "doc:1", "text": "hello"}]}
    async with governed(tmp_path, said, [read, OK]) as way:
        await way.call("doc:1", {"uri": "doc:1"}, kind="resource", server="desk", method="resources/read")
        await way.call("read_record")
        assert (await way.call("send")).status is Status.APPROVAL_REQUIRED


async def test_a_rule_of_an_operator_can_name_labels(tmp_path: Path) -> None:
    deny = rule("deny", "no", taint_labels=("private", "secret"), tool_patterns=("send",))
    async with governed(tmp_path, replace(EVERY, rules=(ALLOW, deny))) as way:
        await way.call("fetch")
        assert (await way.call("send")).ok
        await way.call("read_record")
        assert (await way.call("send")).status is Status.DENIED


async def test_a_condition_can_see_labels(tmp_path: Path) -> None:
    when = '"private" in flow.labels && "external_sink" in contract.labels'
    async with governed(tmp_path, replace(EVERY, rules=(ALLOW, rule("deny", "no", when=when)))) as way:
        assert (await way.call("send")).ok
        await way.call("read_record")
        assert (await way.call("read_record")).ok
        assert (await way.call("send")).status is Status.DENIED


async def test_no_account_is_kept_where_nothing_has_labels(tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        await way.call(session="one")
        assert way.store.reader()._connection.execute("SELECT count(*) FROM labels").fetchone() == (0,)


async def test_the_question_says_which_labels_are_in_force_and_since_which_call(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await way.call("read_record", id="call_a")
        await way.call("fetch", id="call_b")
        await way.call("send")
        (approval,) = way.store.reader().approvals()
    said = [text for label, text in question.consequences(approval) if label == "labels"]
    assert said == [
        "this call: external_sink",
        "in force: private, since read_record (call_a)",
        "in force: untrusted, since fetch (call_b)",
    ]


async def test_an_answer_beforehand_does_not_stand_for_what_labels_ask_about(tmp_path: Path) -> None:
    stands = ApprovalRule("often", standing=StandingTerms(5, 600.0))
    rules = (ALLOW, replace(ASKS, approval="often"), rule("ask", "usual", approval="often", tool_patterns=("note",)))
    said = replace(EVERY, rules=rules, approvals={"often": stands})
    async with governed(tmp_path, said) as way:
        await tainted(way)
        await way.call("note", {"key": "a"})
        await way.call("send")
        shapes = {each.tool: each.shape for each in way.store.reader().approvals()}
    assert shapes["note"] is not None
    assert shapes["send"] is None


async def test_a_box_is_remembered_for_as_long_as_what_it_left_may_be_kept(tmp_path: Path) -> None:
    async with governed(tmp_path, EVERY) as way:
        await way.call("read_record", session="old")
        with sqlite3.connect(way.store.folder / "ringfence.db") as database:
            (old,) = database.execute("SELECT scope FROM labels WHERE scope LIKE 's:%'").fetchone()
            aged = (
                "INSERT INTO labels SELECT ?, label, first_at, last_at - ?, call_id, tool FROM labels WHERE scope = ?"
            )
            for scope, days in (("b:recent", 0), ("b:old", 760), ("b:older", 900), ("s:recent", 50), ("s:older", 70)):
                database.execute(aged, (scope, days * 86_400, old))
        database.close()
        await way.call("read_record", session="new")
        scopes = [scope for (scope,) in way.store.reader()._connection.execute("SELECT DISTINCT scope FROM labels")]
    assert [each for each in scopes if each.startswith("b:")] == ["b:old", "b:recent"]
    assert {"s:recent", old} <= set(scopes) and "s:older" not in scopes


# ── Ways out that have no label ───────────────────────────────────────────────────────────────────


def capability(name: str, shape: Json, **given: Any) -> Capability:
    return Capability(contract(name, **given), definition(name, inputSchema=shape))


def taking(*names: str) -> Json:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


LABELLED = (capability("read_record", taking("id"), labels=["private"]),)
FROM_OUTSIDE = (capability("inbox", taking("folder"), result={"trust": "untrusted"}),)


def named_ways_out(*capabilities: Capability) -> list[str]:
    told = unlabelled_ways_out((*LABELLED, *FROM_OUTSIDE, *capabilities))
    return [text.split("'")[1] for text in told]


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (taking("url"), True),
        (taking("targetUrl"), True),
        (taking("webhook_url"), True),
        (taking("command"), True),
        (taking("bcc"), True),
        ({"type": "object", "properties": {"where": {"type": "string", "format": "uri"}}}, True),
        (taking("tour"), False),
        (taking("id", "text"), False),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {"url": True}}, True),
    ],
)
def test_a_tool_that_takes_an_address_and_is_never_a_sink_is_named(shape: Json, named: bool) -> None:
    assert named_ways_out(capability("post", shape, mode="write")) == (["post"] if named else [])


def test_a_tool_that_is_a_sink_at_least_sometimes_is_not_named() -> None:
    sometimes = [{"label": "external_sink", "when": 'args.url != "x"'}]
    said: list[list[Any]] = [["external_sink"], sometimes]
    assert named_ways_out(*(capability("post", taking("url"), labels=labels) for labels in said)) == []


def test_nothing_is_named_where_no_rule_about_labels_could_stop_anything() -> None:
    post = capability("post", taking("url"), mode="write")
    for alone in (LABELLED, FROM_OUTSIDE, ()):
        assert unlabelled_ways_out((*alone, post)) == []
