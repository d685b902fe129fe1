"""Approvals that stand, rules that want a reason, and questions that others are asked later."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.audit.export import verify_live
from ringfence.audit.keys import load_or_create
from ringfence.core.errors import Refused
from ringfence.core.model import (
    ApprovalRule,
    Escalation,
    GuardedText,
    Json,
    Outcome,
    Person,
    Principal,
    StandingTerms,
)
from ringfence.governance import approvals, standing
from ringfence.governance.standing import Wish, covers, offered, shape_of
from ringfence.store import Approval, Conflict, StandingApproval
from tests.faking import Said, Way, answering_as, contract, governed, rulebook

pytestmark = pytest.mark.anyio

MANAGER = frozenset({"manager"})
PEOPLE = {
    "alice": Person("alice", MANAGER, "alice"),
    "bob": Person("bob", MANAGER, "bob"),
    "dora": Person("dora", frozenset({"director"}), "dora"),
}
BOSS = ApprovalRule("boss", roles=("manager",), standing=StandingTerms(5, 3600))
SAID = Said(contracts=(contract("echo", mode="write", approval="boss"),), approvals={"boss": BOSS}, people=PEOPLE)


def asked_by(way: Way, outcome: Outcome) -> Approval:
    assert outcome.status == "approval_required" and outcome.approval_id is not None, outcome
    return approvals.find(way.store, outcome.approval_id)


async def allowed(way: Way, outcome: Outcome, wish: Wish, person: str = "bob", **more: Any) -> StandingApproval:
    question = asked_by(way, outcome)

    def give() -> StandingApproval:
        with answering_as(person):
            return approvals.allow(way.store, question, PEOPLE[person], offered(question, wish), **more)

    return await anyio.to_thread.run_sync(give)


async def revoked(way: Way, identity: str) -> None:
    await anyio.to_thread.run_sync(approvals.revoke, way.store, identity, PEOPLE["alice"])


def tamper(way: Way, statement: str, *values: Any) -> int:
    """What anybody does who can write the database file."""
    connection = sqlite3.connect(way.store.folder / "ringfence.db", timeout=30)
    try:
        done = connection.execute(statement, values)
        connection.commit()
        return done.rowcount
    finally:
        connection.close()


def faults(way: Way) -> list[str]:
    reader = way.store.reader()
    public = load_or_create(way.store.folder.parent / "keys").public
    return [str(fault) for fault in verify_live(*reader.evidence(), public, reader.record).faults]


# ── Shapes ──


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"path": "docs/b.md", "n": 1}, True),
        ({"path": "docs/b.md", "n": 2}, True),
        ({"path": "docs/b.md", "n": {"deep": [1]}}, True),
        ({"path": "secret/b.md", "n": 1}, False),
        ({"path": "docs/b.md\n", "n": 1}, False),
        ({"path": "x docs/b.md", "n": 1}, False),
        ({"path": ["docs/b.md"], "n": 1}, False),
        ({"path": "docs/b.md"}, False),
        ({"path": "docs/b.md", "n": 1, "more": 1}, False),
    ],
)
def test_a_shape_covers_what_it_says_and_nothing_more(arguments: Json, fits: bool) -> None:
    shape = shape_of({"path": "docs/a.md", "n": 1}, "sha256:x")
    assert covers(shape, {"path": "docs/a.md", "n": 1})
    assert not covers(shape, {"path": "docs/a.md", "n": 2})
    assert not covers(shape, {"path": "docs/a.md", "n": True})
    opened = {**shape, "arguments": {**shape["arguments"], "path": {"like": "docs/[a-z]+[.]md"}, "n": standing.ANY}}
    assert covers(opened, arguments) is fits


@pytest.mark.parametrize(
    "shape", [{}, {"arguments": {"n": {}}}, {"arguments": {"n": {"like": "("}}}, {"arguments": {"n": {"like": 1}}}]
)
def test_a_shape_that_cannot_be_read_covers_nothing(shape: Json) -> None:
    assert not covers({"salt": "00", **shape}, {"n": "x"})
    assert not covers({**shape, "salt": "no hex"}, {"n": "x"})


# ── What a person approves beforehand ──


async def test_calls_of_the_shape_run_as_often_as_was_said_and_each_is_proved(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        first = await way.call("echo", {"title": "a", "to": "team"})
        made = await allowed(way, first, Wish(2, 600, any=("title",)))
        assert (await way.call("echo", {"title": "a", "to": "team"})).status == "success"
        other = await way.call("echo", {"title": "b", "to": "all"})
        assert other.status == "approval_required"
        ran = [await way.call("echo", {"title": title, "to": "team"}) for title in ("b", "c", "d")]
        assert [each.status for each in ran] == ["success", "success", "approval_required"]
        answers = [r.body for r in way.store.reader().records(kind="approval_answered")]
        assert [(a["person"], a.get("standing", {}).get("id")) for a in answers] == [
            ("bob", None),
            ("bob", made.id),
            ("bob", made.id),
        ]
        assert answers[1]["account"]["name"] == "bob"
        assert [r.body["standing"] for r in way.store.reader().records(kind="standing_used")] == [made.id, made.id]
        assert way.store.reader().standing() == []
        assert faults(way) == []


async def test_calls_at_once_take_one_use_each(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        await allowed(way, await way.call("echo", {"n": 0}), Wish(3, 600, any=("n",)))
        await way.call("echo", {"n": 0})
        outcomes: list[Outcome] = []

        async def one(number: int) -> None:
            outcomes.append(await way.call("echo", {"n": number}))

        async with anyio.create_task_group() as group:
            for number in range(1, 9):
                group.start_soon(one, number)
        statuses = sorted(each.status for each in outcomes)
        assert statuses == ["approval_required"] * 5 + ["success"] * 3
        assert faults(way) == []


async def test_it_is_another_agents_or_under_other_rules_and_does_not_count(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        await allowed(way, await way.call("echo", {"n": 0}), Wish(5, 600, any=("n",)))
        stranger = Principal("other", person="alice")
        assert (await way.call("echo", {"n": 1}, principal=stranger)).status == "approval_required"
        elsewhere = Principal("analyst", "acme", person="alice")
        assert (await way.call("echo", {"n": 1}, principal=elsewhere)).status == "approval_required"
        assert (await way.call("echo", {"n": 1}, idempotency_key="k", meta={"x": 1})).status == "success"  # not sent on
        way.pipeline.rules = rulebook(replace(SAID, preset="standard"), way.store)
        assert (await way.call("echo", {"n": 2})).status == "approval_required"
        way.pipeline.rules = rulebook(SAID, way.store)
        assert (await way.call("echo", {"n": 3})).status == "success"
        people = {**PEOPLE, "bob": replace(PEOPLE["bob"], roles=frozenset())}
        way.pipeline.rules = rulebook(replace(SAID, people=people), way.store)
        assert (await way.call("echo", {"n": 4})).status == "approval_required"


async def test_what_is_revoked_answers_nothing_and_what_it_answered_is_void(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        made = await allowed(way, await way.call("echo", {"n": 0}), Wish(5, 600, any=("n",)))
        assert (await way.call("echo", {"n": 1})).status == "success"
        # An answer that no call has used yet: as of a call that was cancelled right after it.
        waits = asked_by(way, await way.call("echo", {"n": 2}, principal=Principal("other", person="alice")))
        assert waits.state == "pending"
        await revoked(way, made.id)
        assert (await way.call("echo", {"n": 3})).status == "approval_required"
        with pytest.raises(Conflict, match="revoked already"):
            await revoked(way, made.id)
        assert [r.body["by"] for r in way.store.reader().records(kind="standing_revoked")] == ["alice"]
        # The table set back by another program: the log still says that it is revoked.
        assert tamper(way, "UPDATE standing SET revoked_at = NULL") == 1
        assert (await way.call("echo", {"n": 4})).status == "approval_required"
        assert faults(way) == []


async def test_an_answer_that_no_call_used_is_void_once_it_is_revoked(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        made = await allowed(way, await way.call("echo", {"n": 0}), Wish(5, 600, any=("n",)))
        # Its question is answered, and then the call is refused by a quota: the answer stays for the next try.
        limited = replace(SAID.contracts[0], rate=replace(SAID.contracts[0].rate, per_day=0))
        way.pipeline.rules = rulebook(replace(SAID, contracts=(limited,)), way.store)
        assert (await way.call("echo", {"n": 1})).reason_code == "quota"
        way.pipeline.rules = rulebook(SAID, way.store)
        await revoked(way, made.id)
        assert (await way.call("echo", {"n": 1})).status == "approval_required"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE standing SET times = 1000",
        "UPDATE standing SET expires_at = expires_at + 100000",
        "UPDATE standing SET person = 'alice'",
        'UPDATE standing SET shape = replace(shape, \'"to":{"same"\', \'"to":{"like":".*","x"\')',
        "UPDATE standing SET shape = json_set(shape, '$.arguments.to', 'any')",
        "DELETE FROM records WHERE kind = 'standing_made'",
    ],
)
async def test_a_row_that_another_program_changed_answers_nothing(tmp_path: Path, change: str) -> None:
    async with governed(tmp_path, SAID) as way:
        await allowed(way, await way.call("echo", {"title": "a", "to": "team"}), Wish(1, 600, any=("title",)))
        tamper(way, change)
        for to in ("team", "all"):
            outcome = await way.call("echo", {"title": "b", "to": to})
            assert outcome.status == "approval_required"


async def test_uses_are_counted_in_the_log_whatever_the_table_says(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        await allowed(way, await way.call("echo", {"n": 0}), Wish(1, 600, any=("n",)))
        assert (await way.call("echo", {"n": 1})).status == "success"
        assert tamper(way, "UPDATE standing SET used = 0") == 1
        assert (await way.call("echo", {"n": 2})).status == "approval_required"


async def test_it_ends_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with governed(tmp_path, SAID) as way:
        await allowed(way, await way.call("echo", {"n": 0}), Wish(5, 600, any=("n",)))
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 601)
        assert (await way.call("echo", {"n": 1})).status == "approval_required"


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        (Wish(6, 600), "5 times within 3600 s at most"),
        (Wish(5, 3601), "5 times within 3600 s at most"),
        (Wish(0, 10), "5 times"),
        (Wish(1, 10, any=("nothing",)), "no argument 'nothing'; it has: n"),
        (Wish(1, 10, like={"n": "("}), "not one that RE2 reads"),
    ],
)
async def test_no_more_is_given_than_the_rule_lets(tmp_path: Path, wish: Wish, problem: str) -> None:
    async with governed(tmp_path, SAID) as way:
        question = asked_by(way, await way.call("echo", {"n": 0}))
        with pytest.raises(Conflict, match=problem):
            offered(question, wish)


async def test_a_rule_without_standing_and_one_for_two_people_let_nothing_stand(tmp_path: Path) -> None:
    for rule in (replace(BOSS, standing=None), replace(BOSS, people=2)):
        async with governed(tmp_path / str(rule.people), replace(SAID, approvals={"boss": rule})) as way:
            question = asked_by(way, await way.call("echo", {"n": 0}))
            assert question.shape is None
            with pytest.raises(Conflict, match="can stand for other calls"):
                offered(question, Wish(1, 10))


async def test_only_who_may_answer_may_make_one(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        first = await way.call("echo", {"n": 0})
        for person in ("alice", "dora"):  # whose agent it is; who has no such role
            with pytest.raises(Refused) as refused:
                await allowed(way, first, Wish(1, 10), person)
            assert refused.value.reason_code == "not_entitled"
        # Somebody whose account is another's: the answers of what they made are not believed.
        question = asked_by(way, first)
        await anyio.to_thread.run_sync(
            lambda: approvals.allow(way.store, question, PEOPLE["bob"], offered(question, Wish(1, 10, any=("n",))))
        )
        assert (await way.call("echo", {"n": 1})).reason_code == "approval_unproven"


async def test_what_is_erased_stands_no_more(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        made = await allowed(way, await way.call("echo", {"n": "value"}), Wish(5, 600))
        await way.store.write(lambda tx: tx.erase_payload(made.call_id))
        (left,) = way.store.reader().standing_by_id(made.id)
        assert left.shape == {} and left.revoked_at is not None
        assert (await way.call("echo", {"n": "value"})).status == "approval_required"


# ── A reason, and who is asked later ──


async def test_an_answer_without_the_reason_that_its_rule_wants_is_none(tmp_path: Path) -> None:
    strict = replace(BOSS, needs_reason=True)
    async with governed(tmp_path, replace(SAID, approvals={"boss": strict})) as way:
        question = asked_by(way, await way.call("echo", {"n": 0}))

        def answer(reason: str | None) -> None:
            with answering_as("bob"):
                said = None if reason is None else GuardedText(reason)
                approvals.answer(way.store, question.id, PEOPLE["bob"], approve=True, reason=said)

        for nothing in (None, ""):
            with pytest.raises(Conflict, match="with a reason only"):
                await anyio.to_thread.run_sync(answer, nothing)
        assert (await way.call("echo", {"n": 0})).status == "approval_required"
        await anyio.to_thread.run_sync(answer, "ticket 7")
        assert (await way.call("echo", {"n": 0})).status == "success"
        assert [r.body["reason"] for r in way.store.reader().records(kind="approval_answered")] == ["ticket 7"]


async def test_after_a_time_another_role_may_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = replace(BOSS, escalation=Escalation(300, ("director",)))
    async with governed(tmp_path, replace(SAID, approvals={"boss": later})) as way:
        question = asked_by(way, await way.call("echo", {"n": 0}))

        def answer() -> None:
            with answering_as("dora"):
                approvals.answer(way.store, question.id, PEOPLE["dora"], approve=True)

        with pytest.raises(Refused, match="dora may answer if nobody has 300 s after it was asked"):
            await anyio.to_thread.run_sync(answer)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 301)
        await anyio.to_thread.run_sync(answer)
        assert (await way.call("echo", {"n": 0})).status == "success"
        assert faults(way) == []


async def test_an_early_answer_of_the_later_role_is_not_believed(tmp_path: Path) -> None:
    """Whatever the program that answers makes of the rules: the gateway looks at when it was given."""
    later = replace(BOSS, escalation=Escalation(300, ("director",)))
    async with governed(tmp_path, replace(SAID, approvals={"boss": later})) as way:
        question = asked_by(way, await way.call("echo", {"n": 0}))

        def answer() -> None:
            with answering_as("dora"):
                way.store.write_sync(lambda tx: tx.answer_approval(question.id, "dora", True, time.time()))

        await anyio.to_thread.run_sync(answer)
        assert (await way.call("echo", {"n": 0})).reason_code == "approval_unproven"
