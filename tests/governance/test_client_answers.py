"""Answers to a server's questions: fitted to what was asked, matched by rules, shown, bound and recorded."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import anyio
import anyio.to_thread
import pytest

from ringfence.audit.explain import explain
from ringfence.audit.export import verify_live
from ringfence.audit.keys import load_or_create
from ringfence.core.model import AgentSpec, ApprovalRule, Json, Outcome, Person, Rate, Status
from ringfence.core.ports import UpstreamRequest
from ringfence.governance import approvals
from ringfence.governance.client_answers import _fitting, fitted_answer
from ringfence.store import pruning
from tests import tooling
from tests.faking import OK, Client, Said, Way, contract, governed, make_call, rulebook
from tests.making import rule

pytestmark = pytest.mark.anyio

PEM = "-----BEGIN PRIVATE KEY-----"
SCHEMA = {"type": "object", "properties": {"folder": {"type": "string"}}, "required": ["folder"]}
FORM: Json = {"method": "elicitation/create", "params": {"message": "Which folder?", "requestedSchema": SCHEMA}}
SAMPLE: Json = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
ROOTS: Json = {"method": "roots/list", "params": {}}


def accept(**content: Any) -> Json:
    return {"action": "accept", "content": content}


def asking(heard: list[Any], *rounds: Json) -> Callable[[UpstreamRequest], Awaitable[Json]]:
    """A server that asks these questions, one round after the other, and remembers what it is told."""

    async def answer(request: UpstreamRequest) -> Json:
        for questions in rounds:
            heard.append(dict(await request.channel.ask(questions)))
        return OK

    return answer


def records(way: Way) -> list[Json]:
    return [record.body for record in way.store.reader().records(kind="answered")]


async def test_only_what_was_asked_for_goes_on(tmp_path: Path) -> None:
    heard: list[Any] = []
    async with governed(tmp_path, replies=[asking(heard, {"q": FORM})]) as way:
        way.client.answers = {"q": {**accept(folder="a", more="b"), "_meta": {"x": 1}, "extra": 2}}
        assert (await way.call()).ok
    assert heard == [{"q": {"action": "accept", "content": {"folder": "a"}}}]


HIDDEN = ["q\u202e", "q\u200b", "q\x1b[2J"]


async def test_the_name_of_a_question_tells_the_client_nothing_more(tmp_path: Path) -> None:
    heard: list[Any] = []
    asked = {**dict.fromkeys(HIDDEN, FORM), "question-2": FORM, "plain": FORM}
    async with governed(tmp_path, replies=[asking(heard, asked)]) as way:
        way.client.answers = {f"question-{n}": accept(folder=f"{n}") for n in range(1, 6)} | {
            "plain": accept(folder="p")
        }
        assert (await way.call()).ok
        assert list(way.client.asked[0]) == ["question-1", "question-2", "question-3", "question-4", "plain"]
    assert {key: answer["content"]["folder"] for key, answer in heard[0].items()} == {
        **dict(zip([*HIDDEN, "question-2"], "1234", strict=True)),
        "plain": "p",
    }


async def test_the_name_of_a_question_looks_like_no_other_and_like_none_of_ours(tmp_path: Path) -> None:
    heard: list[Any] = []
    asked = dict.fromkeys(("folder", "Folder", "f\u043elder", "ringfence/approve", "Ring-Fence", "k" * 300), FORM)
    names = ["folder", *(f"question-{n}" for n in range(1, 6))]
    async with governed(tmp_path, replies=[asking(heard, asked)]) as way:
        way.client.answers = {name: accept(folder=name) for name in names}
        assert (await way.call()).ok
        assert list(way.client.asked[0]) == names
    assert [answer["content"]["folder"] for answer in heard[0].values()] == names


class Eager(Client):
    """A client that answers more than it was asked."""

    async def ask(self, questions: Any) -> Any:
        return self.answers


async def test_an_answer_that_nobody_asked_for_stays_behind(tmp_path: Path) -> None:
    heard: list[Any] = []
    async with governed(tmp_path, replies=[asking(heard, {"q": FORM})]) as way:
        way.client = Eager(answers={"q": accept(folder="a"), "other": accept(folder=PEM)})
        assert (await way.call()).ok
    assert heard == [{"q": accept(folder="a")}]


UNFIT: dict[str, tuple[Json, Any]] = {
    "no object": (FORM, 12345),
    "no action": (FORM, {"content": {"folder": "a"}}),
    "another action": (FORM, {"action": "accepted", "content": {"folder": "a"}}),
    "content of another type": (FORM, accept(folder=["a"])),
    "content that is missing": (FORM, {"action": "accept"}),
    "content that is a list": (FORM, {"action": "accept", "content": ["a"]}),
    "nothing that was asked for": (FORM, accept(other="a")),
    "a schema that cannot be used": (
        {"method": "elicitation/create", "params": {"requestedSchema": {"type": "object", "$ref": "http://x/y"}}},
        accept(),
    ),
    "a schema whose patterns take too much": (
        {
            "method": "elicitation/create",
            "params": {
                "requestedSchema": {
                    "type": "object",
                    "properties": {f"p{n}": {"type": "string", "pattern": rf"^\pL{{{100 + n}}}$"} for n in range(20)},
                }
            },
        },
        accept(),
    ),
    "a message without a role": (SAMPLE, {"content": {"type": "text", "text": "x"}, "model": "m"}),
    "a message without content": (SAMPLE, {"role": "assistant", "model": "m"}),
    "a message of no model": (SAMPLE, {"role": "assistant", "content": {"type": "text", "text": "x"}}),
    "an elicitation for a sample": (SAMPLE, accept()),
    "no list of folders": (ROOTS, {"roots": {}}),
    "a folder that is none": (ROOTS, {"roots": [{"uri": "http://x/"}]}),
    "a folder with a line break": (ROOTS, {"roots": [{"uri": "file:///a\nb"}]}),
    "a method that is not relayed": ({"method": "tools/call", "params": {}}, {}),
}


@pytest.mark.parametrize("case", UNFIT)
async def test_an_answer_that_does_not_fit_stays_behind_and_is_counted(case: str, tmp_path: Path) -> None:
    question, answer = UNFIT[case]
    assert fitted_answer(question, answer) is None
    heard: list[Any] = []
    async with governed(tmp_path, replies=[asking(heard, {"q": question})]) as way:
        way.client.answers = {"q": answer}
        assert (await way.call()).ok
        assert heard == [{}]
        assert [(body["round"], body["unfit"]) for body in records(way)] == [(1, 1)]


FIT: dict[str, tuple[Json, Json, Json]] = {
    "declined": (FORM, {"action": "decline", "content": {"folder": PEM}}, {"action": "decline"}),
    "cancelled": (FORM, {"action": "cancel"}, {"action": "cancel"}),
    "a link": (
        {"method": "elicitation/create", "params": {"mode": "url", "url": "https://x/"}},
        accept(secret="x"),
        {"action": "accept"},
    ),
    "a sample": (
        SAMPLE,
        {"role": "assistant", "content": {"type": "text", "text": "x"}, "model": "m", "_meta": {"a": 1}, "b": 2},
        {"role": "assistant", "content": {"type": "text", "text": "x"}, "model": "m"},
    ),
    "folders": (
        ROOTS,
        {"roots": [{"uri": "file:///a", "name": "A", "more": 1}, {"uri": "file:///b"}], "_meta": {}},
        {"roots": [{"uri": "file:///a", "name": "A"}, {"uri": "file:///b"}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FIT)
def test_what_fits_goes_on_and_nothing_else(case: str) -> None:
    question, answer, fitted = FIT[case]
    assert fitted_answer(question, answer) == fitted


async def test_rules_match_the_answers_of_each_round(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", labels=["external_sink"]),), preset="owasp-asi")
    heard: list[Any] = []
    async with governed(tmp_path, said, [asking(heard, {"a": FORM}, {"b": FORM})]) as way:
        way.client.answers = {"a": accept(folder="x"), "b": accept(folder=PEM)}
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == (Status.FAILED, "policy")
        assert "asi-private-key" in outcome.message
        assert heard == [{"a": accept(folder="x")}]
        told = [(body["round"], body["decision"]["allowed"]) for body in records(way)]
        assert told == [(1, True), (2, False)]


async def test_a_pattern_for_an_argument_holds_for_a_field_of_an_answer(tmp_path: Path) -> None:
    strict = rule("deny", argument_patterns={"folder": "^/etc"})
    async with governed(tmp_path, Said(rules=(strict,)), [asking([], {"q": FORM})]) as way:
        way.client.answers = {"q": accept(folder="/etc/ssh")}
        assert (await way.call()).reason_code == "policy"


@pytest.mark.parametrize("how", ["rule", "contract", "gone", "unchanged"])
async def test_answers_go_by_the_rules_of_the_moment_that_they_come(tmp_path: Path, how: str) -> None:
    heard: list[Any] = []
    strict = rule("deny", argument_patterns={"folder": "^b"})
    later = {
        "rule": Said(rules=(strict,)),
        "contract": Said(contracts=(contract("echo", timeout_seconds=7),)),
        "gone": Said(contracts=(contract("other"),)),
        "unchanged": Said(),
    }[how]

    async def server(request: UpstreamRequest) -> Json:
        heard.append(dict(await request.channel.ask({"q": FORM})))
        way.client.answers = {"q": accept(folder="b")}
        way.pipeline.rules = rulebook(later, way.store)
        heard.append(dict(await request.channel.ask({"q": FORM})))
        return OK

    async with governed(tmp_path, replies=[server]) as way:
        way.client.answers = {"q": accept(folder="a")}
        outcome = await way.call()
        expected = {"rule": "policy", "unchanged": "ok"}.get(how, "rules_changed")
        assert outcome.reason_code == expected or (outcome.ok and how == "unchanged"), outcome
        assert len(heard) == (2 if how == "unchanged" else 1)


async def test_an_answer_for_which_policy_wants_a_box_does_not_leave_without_one(tmp_path: Path) -> None:
    boxed = rule("sandbox", argument_patterns={"folder": "danger"})
    heard: list[Any] = []
    async with governed(tmp_path, Said(rules=(boxed,)), [asking(heard, {"q": FORM})] * 2) as way:
        way.client.answers = {"q": accept(folder="danger")}
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == (Status.FAILED, "sandbox_impossible")
        assert heard == [] and records(way)[-1]["decision"]["sandbox"] is True
        way.client.answers = {"q": accept(folder="harmless")}
        assert (await way.call()).ok


async def test_an_answer_never_makes_a_rule_allow(tmp_path: Path) -> None:
    lenient = rule("allow", argument_patterns={"folder": "^tmp$"})
    async with governed(tmp_path, Said(rules=(lenient,), preset="none")) as way:
        assert (await way.call("echo", {}, inputs={"q": accept(folder="tmp")})).status is Status.DENIED
        assert (await way.call("echo", {"folder": "tmp"})).ok


async def test_a_refused_answer_of_a_write_leaves_its_effect_unknown(tmp_path: Path) -> None:
    strict = rule("deny", argument_patterns={"*": "^/etc"})
    said = Said(contracts=(contract("echo", mode="write"),), rules=(strict,))
    async with governed(tmp_path, said, [asking([], {"q": FORM})]) as way:
        way.client.answers = {"q": accept(folder="/etc/ssh")}
        outcome = await way.call()
        assert (outcome.status, outcome.facts["effect"]) == (Status.FAILED, "unknown")


def approve(way: Way, outcome: Outcome) -> str:
    assert outcome.approval_id is not None, outcome
    approvals.answer(way.store, outcome.approval_id, Person("bob"), approve=True)
    return outcome.approval_id


def test_the_schemas_of_one_round_are_bounded_together() -> None:
    def question(number: int) -> Json:
        fields = {"a": {"type": "string", "pattern": rf"^\pL{{{100 + number}}}$"}}
        return {"method": "elicitation/create", "params": {"requestedSchema": {"properties": fields}}}

    unfit: list[str] = []
    asked = {f"q{number}": question(number) for number in range(12)} | {"plain": FORM}
    fitting = _fitting(asked, {**dict.fromkeys(asked, accept()), "plain": accept(folder="a")}, unfit)
    assert list(fitting) == ["q0", "q1", "q2"], "the third brings it over the bound"
    assert len(unfit) == 10


async def test_a_person_sees_each_field_of_a_question_with_its_type_and_default(tmp_path: Path) -> None:
    fields = {"wipe": {"title": "Be polite?", "type": "boolean", "default": True}, "n": {"type": "integer"}, "odd": 5}
    asked = {
        **FORM,
        "params": {"message": "Well?", "requestedSchema": {**SCHEMA, "properties": fields, "required": []}},
    }
    visit = {**FORM, "params": {"message": "Go", "mode": "url", "url": "https://a.example/x"}}
    said = Said(contracts=(contract("echo", mode="write", approval="always"),))
    async with governed(tmp_path, said, [asking([], {"q": asked, "v": visit})]) as way:
        way.client.answers = {"q": accept(wipe=True), "v": accept()}
        approve(way, await way.call())
        shown = way.store.reader().approval(approve(way, await way.call()))
    assert shown is not None and shown.summary["asked"] == {
        "q": {
            "message": "Well?",
            "fields": {
                "wipe": {"type": "boolean", "default": True, "title": "Be polite?"},
                "n": {"type": "integer"},
                "odd": 5,
            },
        },
        "v": {"message": "Go", "url": "https://a.example/x"},
    }


async def test_a_person_who_must_agree_sees_the_answers_too(tmp_path: Path) -> None:
    """The call, and then each round of answers: an approval of one is none of another."""
    said = Said(contracts=(contract("echo", mode="write", approval="always"),))
    heard: list[Any] = []
    async with governed(tmp_path, said, [asking(heard, {"q": FORM})]) as way:
        way.client.answers = {"q": accept(folder="safe")}
        approve(way, await way.call())
        waits = await way.call()
        assert (waits.status, waits.reason_code, waits.facts["effect"]) == (
            Status.FAILED, "approval_required", "unknown",
        )  # fmt: skip
        shown = way.store.reader().approval(approve(way, waits))
        assert shown is not None and shown.summary["inputs"] == {"q": accept(folder="safe")}
        folder = {"type": "string", "required": True}
        assert shown.summary["asked"] == {"q": {"message": "Which folder?", "fields": {"folder": folder}}}
        assert heard == []

        way.client.answers = {"q": accept(folder="everything")}
        approve(way, await way.call())
        other = await way.call()
        assert other.reason_code == "approval_required" and other.approval_id != waits.approval_id
        assert heard == []

        way.client.answers = {"q": accept(folder="safe")}
        approve(way, await way.call())
        assert (await way.call()).ok
        assert heard == [{"q": accept(folder="safe")}]
        assert records(way)[-1]["approval"]["id"] == waits.approval_id


async def test_nobody_is_asked_about_a_no(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", approval="always"),))
    heard: list[Any] = []
    async with governed(tmp_path, said, [asking(heard, {"q": FORM})]) as way:
        way.client.answers = {"q": {"action": "decline"}}
        approve(way, await way.call())
        assert (await way.call()).ok
        assert heard == [{"q": {"action": "decline"}}]


async def test_a_condition_of_an_approval_sees_the_answers(tmp_path: Path) -> None:
    when = 'has(call.inputs.q) && call.inputs.q.content.folder == "everything"'
    said = Said(contracts=(contract("echo", approval="large"),), approvals={"large": ApprovalRule("large", when=when)})
    async with governed(tmp_path, said, [asking([], {"q": FORM})]) as way:
        way.client.answers = {"q": accept(folder="one")}
        assert (await way.call()).ok
        way.client.answers = {"q": accept(folder="everything")}
        assert (await way.call()).reason_code == "approval_required"


async def test_an_answer_that_came_with_the_call_is_used_where_it_fits_what_is_asked(tmp_path: Path) -> None:
    heard: list[Any] = []
    async with governed(tmp_path, replies=[asking(heard, {"q": FORM})]) as way:
        early = {"q": accept(folder="a", more="b"), "unknown": accept(x=1)}
        assert (await way.call(inputs=early)).ok
        assert heard == [{"q": accept(folder="a")}]
        assert way.client.asked == []


async def test_an_answer_that_came_with_the_call_is_approved_together_with_its_question(tmp_path: Path) -> None:
    heard: list[Any] = []
    said = Said(contracts=(contract("echo", mode="write", approval="always"),))
    early = {"q": accept(folder="a")}
    async with governed(tmp_path, said, [asking(heard, {"q": FORM})]) as way:
        approve(way, await way.call(inputs=early))
        waits = await way.call(inputs=early)
        assert (waits.reason_code, heard) == ("approval_required", [])
        shown = way.store.reader().approval(approve(way, waits))
        assert shown is not None and shown.summary["inputs"] == early
        assert shown.summary["asked"]["q"]["message"] == "Which folder?"
        approve(way, await way.call(inputs=early))
        assert (await way.call(inputs=early)).ok
        assert heard == [early] and way.client.asked == []
        # A person who saw the answer to one question has said nothing about another under the same key.
        other: Json = {"method": "elicitation/create", "params": {"message": "Erase?", "requestedSchema": SCHEMA}}
        way.servers.replies = [asking(heard, {"q": other})]
        approve(way, await way.call(inputs=early))
        assert (await way.call(inputs=early)).reason_code == "approval_required"
        assert heard == [early]


async def test_an_answer_that_came_with_the_call_goes_by_the_rules_of_the_moment_that_it_is_used(
    tmp_path: Path,
) -> None:
    heard: list[Any] = []
    async with governed(tmp_path) as way:

        async def answer(request: UpstreamRequest) -> Json:
            said = Said(rules=(rule("ask", tool_patterns=("echo",)),))
            way.pipeline.rules = rulebook(said, way.store)
            heard.append(dict(await request.channel.ask({"q": FORM})))
            return OK

        way.servers.replies = [answer]
        assert (await way.call(inputs={"q": accept(folder="a")})).reason_code == "approval_required"
        assert heard == []


async def test_an_early_answer_that_does_not_fit_is_asked_for(tmp_path: Path) -> None:
    heard: list[Any] = []
    async with governed(tmp_path, replies=[asking(heard, {"q": FORM})]) as way:
        way.client.answers = {"q": accept(folder="asked")}
        assert (await way.call(inputs={"q": 12345})).ok
    assert heard == [{"q": accept(folder="asked")}]


async def test_the_record_of_answers_holds_no_value(tmp_path: Path) -> None:
    async with governed(tmp_path, replies=[asking([], {"q": FORM})]) as way:
        way.client.answers = {"q": accept(folder="unmistakable-value")}
        outcome = await way.call()
        assert way.kinds(outcome.facts["call_id"]) == ["started", "answered", "finished"]
        (told,) = records(way)
        assert set(told["answers"]) == {"digest", "bytes"} and told["methods"] == ["elicitation/create"]
        assert "unmistakable" not in str(told)


async def test_an_answer_that_was_approved_is_none_to_another_question(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", approval="always"),))
    other: Json = {"method": "elicitation/create", "params": {"message": "What to erase?", "requestedSchema": SCHEMA}}
    heard: list[Any] = []
    async with governed(tmp_path, said, [asking(heard, {"q": FORM})]) as way:
        way.client.answers = {"q": accept(folder="a")}
        approve(way, await way.call())
        approve(way, await way.call())
        way.servers.replies = [asking(heard, {"q": other})]
        approve(way, await way.call())
        assert (await way.call()).reason_code == "approval_required"
        assert heard == []


async def test_folders_are_told_before_and_change_nothing_of_an_approval(tmp_path: Path) -> None:
    """A connection that is opened anew asks for them first; the answer that a person saw is the same."""
    said = Said(contracts=(contract("echo", approval="always"),))
    heard: list[Any] = []
    async with governed(tmp_path, said, [asking(heard, {"roots": ROOTS}, {"q": FORM})]) as way:
        way.client.answers = {"roots": {"roots": [{"uri": "file:///a"}]}, "q": accept(folder="a")}
        approve(way, await way.call())
        approve(way, await way.call())
        way.servers.replies = [asking(heard, {"q": FORM})]
        approve(way, await way.call())
        assert (await way.call()).ok
        assert heard[-1] == {"q": accept(folder="a")}


async def test_what_was_answered_is_pruned_with_its_call_and_what_it_ran_on_with_both(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", mode="write", approval="always"),))
    async with governed(tmp_path, said, [asking([], {"q": FORM})]) as way:
        keys = load_or_create(way.store.folder.parent / "keys")

        async def pruned() -> list[Json]:
            await anyio.sleep(0.01)
            # When every question has expired: until then those that were used stay, too.
            with mock.patch.object(pruning, "time", SimpleNamespace(time=lambda: time.time() + 1e6)):
                await anyio.to_thread.run_sync(way.store.prune, moment or time.time(), "anna")
            reader = way.store.reader()
            report = verify_live(*reader.evidence(), keys.public, reader.record)
            assert report.ok, str(report)
            return records(way)

        way.client.answers = {"q": accept(folder="safe")}
        approve(way, await way.call())
        approve(way, await way.call())
        approve(way, await way.call())
        await anyio.sleep(0.01)
        moment = time.time()
        assert (await way.call()).ok
        (told,) = await pruned()
        reader = way.store.reader()
        assert told["approval"]["id"] in {r.body["approval"] for r in reader.records(kind="approval_answered")}
        moment = 0.0
        assert await pruned() == []
        assert [r.kind for r in reader.records() if r.call_id is not None] == []


async def test_explain_tells_of_answers(tmp_path: Path) -> None:
    async with governed(tmp_path, replies=[asking([], {"q": FORM, "p": FORM})]) as way:
        way.client.answers = {"q": accept(folder="a"), "p": 5}
        outcome = await way.call()
        told = explain([record.body for record in way.store.reader().records(call_id=outcome.facts["call_id"])])
    assert "  client     the answer of round 1 was sent on" in told
    assert "1 of the answers of round 1 did not fit the questions and were left out" in told


class Slow(Client):
    """A client that answers when it is told to."""

    def __init__(self, answers: Json) -> None:
        super().__init__(answers=answers)
        self.may = anyio.Event()

    async def ask(self, questions: Any) -> Any:
        self.asked.append(questions)
        await self.may.wait()
        return self.answers


@pytest.mark.parametrize("limit", ["capability", "agent"])
async def test_a_call_that_waits_for_its_client_leaves_its_place_to_others(limit: str, tmp_path: Path) -> None:
    heard: list[Any] = []
    most = Rate(concurrent=1)
    one = contract("echo", rate={"concurrent": 1}) if limit == "capability" else contract("echo")
    agents = {"analyst": AgentSpec("analyst", capabilities=("*",), quota=most if limit == "agent" else Rate())}
    release = anyio.Event()

    async def hold(_: UpstreamRequest) -> Json:
        await release.wait()
        return OK

    said = Said(contracts=(one,), agents=agents)
    async with governed(tmp_path, said, [asking(heard, {"q": FORM}), OK, hold, OK]) as way:
        client = Slow({"q": accept(folder="a")})
        ended: list[Outcome] = []

        async def waits() -> None:
            ended.append(await way.pipeline.handle(make_call(arguments={"n": 1}), client))

        async def runs() -> None:
            ended.append(await way.call("echo", {"n": 3}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waits)
            await tooling.until(lambda: bool(client.asked))
            assert (await way.call("echo", {"n": 2})).ok, "the place is free while nobody answers"
            tasks.start_soon(runs)
            await tooling.until(lambda: len(way.servers.requests) == 3)
            client.may.set()
            bucket = next(iter(way.budget._buckets._entries.values()))
            await tooling.until(lambda: bool(bucket.returning))
            assert (heard, ended) == ([], []), "it goes on when there is a place, and is not refused"
            assert (await way.call("echo", {"n": 4})).reason_code == "throttled"
            release.set()
        assert [each.ok for each in ended] == [True, True] and heard
        assert (await way.call("echo", {"n": 5})).ok, "the place of each call is free again"


async def test_a_call_that_is_cancelled_while_it_waits_for_its_client_keeps_no_place(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", rate={"concurrent": 1}),))
    async with governed(tmp_path, said, [asking([], {"q": FORM}), OK]) as way:
        client = Slow({})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(way.pipeline.handle, make_call(), client)
            await tooling.until(lambda: bool(client.asked))
            tasks.cancel_scope.cancel()
        for _ in range(2):
            assert (await way.call()).ok
