"""An approval is what the signed log says, for the rules in force: no table and no earlier rule makes one."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.to_thread
import pytest

from ringfence.audit.approvals import Proof
from ringfence.audit.chain import ALWAYS, Period, Verification
from ringfence.audit.explain import explain
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import load_or_create
from ringfence.core import canonical
from ringfence.core.model import ApprovalRule, GuardedText, Json, Outcome, Person
from ringfence.governance import approval_binding, approvals
from ringfence.governance.journal import CallState
from ringfence.store import Conflict, Store, Unproven, pruning
from tests.faking import Said, Way, answering_as, contract, governed, make_call, rulebook

pytestmark = pytest.mark.anyio

MANAGER = frozenset({"manager"})
PEOPLE = {name: Person(name, MANAGER, name) for name in ("alice", "bob", "carol")}
BOSS = ApprovalRule("boss", roles=("manager",), self_approval=True)
ASKING = Said(contracts=(contract("echo", mode="write", approval="boss"),), approvals={"boss": BOSS}, people=PEOPLE)


async def answer(way: Way, asked: Outcome, person: str = "bob", *, approve: bool = True) -> str:
    assert asked.status == "approval_required" and asked.approval_id is not None, asked
    identity = asked.approval_id

    def give() -> None:
        with answering_as(person):
            approvals.answer(way.store, identity, PEOPLE[person], approve=approve)

    await anyio.to_thread.run_sync(give)
    return identity


def tamper(way: Way, statement: str, *values: Any) -> int:
    """What anybody does who can write the database file."""
    connection = sqlite3.connect(way.store.folder / "ringfence.db", timeout=30)
    try:
        done = connection.execute(statement, values)
        connection.commit()
        return done.rowcount
    finally:
        connection.close()


def verified(way: Way) -> Verification:
    reader = way.store.reader()
    return verify_live(*reader.evidence(), keys(way).public, reader.record)


def keys(way: Way) -> Any:
    return load_or_create(way.store.folder.parent / "keys")


def exported(way: Way, period: Period = ALWAYS) -> tuple[Path, Verification]:
    path = way.store.folder.parent / f"export-{time.monotonic_ns()}"
    reader = way.store.reader()
    write_export(path, reader.period(period), keys(way), period, reader.checkpoints())
    return path, verify_export(path, keys(way).public)


# ── the rules that ask, and who may answer ──

TIGHTER: dict[str, Said] = {
    "two people": replace(ASKING, approvals={"boss": replace(BOSS, people=2)}),
    "not one's own": replace(ASKING, approvals={"boss": replace(BOSS, self_approval=False)}),
    "another role": replace(ASKING, approvals={"boss": replace(BOSS, roles=("director",))}),
    "a shorter time": replace(ASKING, approvals={"boss": replace(BOSS, expires_seconds=60)}),
    "another condition": replace(ASKING, approvals={"boss": replace(BOSS, when="true")}),
    "a role removed": replace(ASKING, people={**PEOPLE, "bob": Person("bob", frozenset({"clerk"}), "bob")}),
    "a person removed": replace(ASKING, people={name: p for name, p in PEOPLE.items() if name != "bob"}),
    "another account": replace(ASKING, people={**PEOPLE, "bob": Person("bob", MANAGER, "eve")}),
}


@pytest.mark.parametrize("answered", [True, False], ids=["given", "asked"])
@pytest.mark.parametrize("name", TIGHTER)
async def test_tightened_rules_void_what_was_given_or_asked_before(tmp_path: Path, name: str, answered: bool) -> None:
    async with governed(tmp_path, ASKING) as way:
        first = await way.call()
        if answered:
            await answer(way, first)
        way.pipeline.rules = rulebook(TIGHTER[name], way.store)
        second = await way.call()
        assert second.status == "approval_required" and second.approval_id != first.approval_id
        if not answered:
            await answer(way, first)
            assert (await way.call()).status == "approval_required", "an answer to the old question is none to the new"
        assert way.servers.requests == []
        way.pipeline.rules = rulebook(ASKING, way.store)
        assert (await way.call()).ok, "under the rules that it was given for it is good"


async def test_somebody_who_may_not_answer_changes_nothing(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        await answer(way, await way.call())
        more = replace(ASKING, people={**PEOPLE, "dave": Person("dave", frozenset({"clerk"}))})
        way.pipeline.rules = rulebook(more, way.store)
        assert (await way.call()).ok


@pytest.mark.parametrize("name", [*TIGHTER, "policy", "contract", "unchanged"])
async def test_rules_that_are_tightened_while_a_call_waits_hold_for_it(tmp_path: Path, name: str) -> None:
    others = {
        "policy": replace(ASKING, preset="standard"),
        "contract": replace(ASKING, contracts=(contract("echo", mode="write", approval="boss", timeout_seconds=7),)),
        "unchanged": replace(ASKING),
    }
    async with governed(tmp_path, replace(ASKING, wait=60)) as way:
        outcomes: list[Outcome] = []

        async def run() -> None:
            outcomes.append(await way.call())

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            identity = await pending(way)
            way.pipeline.rules = rulebook({**TIGHTER, **others}[name], way.store)
            give = lambda: approvals.answer(way.store, identity, PEOPLE["bob"], approve=True)  # noqa: E731
            with answering_as("bob"):
                await anyio.to_thread.run_sync(give)
        if name == "unchanged":
            assert outcomes[0].ok
        else:
            assert (outcomes[0].status, outcomes[0].reason_code) == ("denied", "rules_changed")
            assert way.servers.requests == []


async def pending(way: Way) -> str:
    with anyio.fail_after(60):
        while not (found := way.store.reader().approvals()):
            await anyio.sleep(0.01)
    return found[0].id


# ── the signed log ──


async def test_who_agreed_when_and_to_what_they_were_shown_is_in_the_chain(tmp_path: Path) -> None:
    async with governed(tmp_path, replace(ASKING, approvals={"boss": replace(BOSS, people=2)})) as way:
        asked = await way.call(arguments={"amount": 5})
        for person in ("bob", "carol"):
            identity = await answer(way, asked, person)
        ran = await way.call(arguments={"amount": 5})
        assert ran.ok
        story = [record.body for record in way.store.reader().story(ran.facts["call_id"])]
        (question,) = [r for r in story if r["kind"] == "approval_asked"]
        answers = [r for r in story if r["kind"] == "approval_answered"]
        assert [(a["person"], a["approve"], a["shown"]) for a in answers] == [
            ("bob", True, question["shown"]),
            ("carol", True, question["shown"]),
        ]
        (started,) = [r for r in story if r["kind"] == "started"]
        places = [(a["chain"], a["seq"]) for a in answers]
        assert [(by["chain"], by["seq"]) for by in started["approval"]["by"]] == places
        assert started["approval"]["id"] == identity
        told = explain(story, keys(way).public)
        assert "bob approved it" in told and "carol approved it" in told and "does not prove" not in told
        assert verified(way).ok and exported(way)[1].ok


FORGED: dict[str, tuple[str, ...]] = {
    "the state": ("UPDATE approvals SET state = 'approved'",),
    "the state and an answer": (
        "UPDATE approvals SET state = 'approved'",
        "INSERT INTO answers SELECT id, 'bob', 1, asked_at, NULL FROM approvals",
    ),
    "how many people": ("UPDATE approvals SET state = 'approved', people = 0",),
    "an unsigned record": (
        "UPDATE approvals SET state = 'approved'",
        "INSERT INTO records (chain, seq, at, kind, call_id, text, hash) SELECT 'forged', 1, at, 'approval_answered',"
        " call_id, json_set(replace(text, 'approval_asked', 'approval_answered'), '$.approve', json('true'),"
        " '$.person', 'bob', '$.asked', hash), 'x' FROM records WHERE kind = 'approval_asked'",
    ),
}


@pytest.mark.parametrize("name", FORGED)
async def test_no_change_of_a_table_lets_a_call_run(tmp_path: Path, name: str) -> None:
    async with governed(tmp_path, ASKING) as way:
        asked = await way.call()
        for statement in FORGED[name]:
            assert tamper(way, statement) == 1
        refused = await way.call()
        assert (refused.status, refused.reason_code) == ("denied", "approval_unproven")
        assert refused.approval_id == asked.approval_id and "Another program changed the database" in refused.message
        assert way.servers.requests == []
        record = way.finished(refused.facts["call_id"])[0]
        assert (record["reason_code"], record["approval"]) == ("approval_unproven", None)


async def test_an_approval_of_one_call_is_not_moved_to_another(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        small = await answer(way, await way.call(arguments={"amount": 5}))
        large = await way.call(arguments={"amount": 5000})
        moved = "UPDATE approvals SET digest = (SELECT digest FROM approvals WHERE id = ?) WHERE id = ?"
        assert tamper(way, moved, large.approval_id, small) == 1
        refused = await way.call(arguments={"amount": 5000})
        assert (refused.status, refused.reason_code) == ("denied", "approval_unproven")
        assert way.servers.requests == []


async def test_a_used_approval_stays_used(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        await answer(way, await way.call())
        assert (await way.call()).ok
        assert tamper(way, "UPDATE approvals SET state = 'approved', consumed_by = NULL") == 1
        again = await way.call()
        assert (again.status, again.reason_code) == ("denied", "approval_unproven")
        assert len(way.servers.requests) == 1


async def test_a_refusal_stays_one(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        await answer(way, await way.call(), approve=False)
        assert tamper(way, "UPDATE approvals SET state = 'approved'") == 1
        assert (await way.call()).reason_code == "approval_unproven"


@pytest.mark.parametrize(
    "change",
    [
        """summary = json_set(summary, '$.arguments.amount', 5)""",
        "tool = 'search_docs'",
        "roles = '[]'",
        "people = 1",
        "self_approval = 0",
        "person = 'nobody'",
        "rule = 'none'",
        "digest = 'another'",
        "call_id = 'call_another'",
    ],
)
async def test_nobody_answers_a_question_that_was_changed_after_it_was_asked(tmp_path: Path, change: str) -> None:
    two = replace(ASKING, approvals={"boss": replace(BOSS, people=2)})
    async with governed(tmp_path, two) as way:
        asked = await way.call(arguments={"amount": 5000})
        assert tamper(way, f"UPDATE approvals SET {change}") == 1
        with pytest.raises(Unproven, match="Another program changed the database"):
            await answer(way, asked)


async def test_what_is_changed_while_somebody_reads_it_is_not_answered(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        asked = await way.call(arguments={"amount": 5000})
        seen = approvals.find(way.store, str(asked.approval_id))
        shown = replace(seen, summary={**seen.summary, "arguments": {"amount": 5}})

        def give() -> None:
            approvals.answer(way.store, seen.id, PEOPLE["bob"], approve=True, seen=shown)

        with pytest.raises(Conflict, match="changed while it was being read"):
            await anyio.to_thread.run_sync(give)


async def test_whoever_answers_by_another_configuration_answers_nothing(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        asked = await way.call()
        eve = Person("eve", MANAGER)
        give = lambda: approvals.answer(way.store, str(asked.approval_id), eve, approve=True)  # noqa: E731
        await anyio.to_thread.run_sync(give)
        refused = await way.call()
        assert (refused.status, refused.reason_code) == ("denied", "approval_unproven")
        assert "eve may not answer it" in refused.message and way.servers.requests == []


async def test_an_account_that_answers_as_another_person_answers_nothing(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        asked = await way.call()

        def give() -> None:
            with answering_as("mallory"):
                approvals.answer(way.store, str(asked.approval_id), Person("bob", MANAGER, "mallory"), approve=True)

        await anyio.to_thread.run_sync(give)
        refused = await way.call()
        assert (refused.status, refused.reason_code) == ("denied", "approval_unproven")
        assert "account mallory answered as bob" in refused.message and way.servers.requests == []


async def test_one_account_does_not_answer_as_two_people(tmp_path: Path) -> None:
    async with governed(tmp_path, replace(ASKING, approvals={"boss": replace(BOSS, people=2)})) as way:
        asked = await way.call()

        def give() -> None:
            with answering_as("bob"):
                approvals.answer(way.store, str(asked.approval_id), PEOPLE["bob"], approve=True)
                with pytest.raises(Conflict, match="account bob has already answered"):
                    approvals.answer(way.store, str(asked.approval_id), Person("carol", MANAGER, "bob"), approve=True)

        await anyio.to_thread.run_sync(give)
        assert (await way.call()).status == "approval_required" and way.servers.requests == []


# ── verification ──


async def ran_on(way: Way, proof: Json | None, *, call_id: str = "call_x", shared: bool = False, **more: Any) -> None:
    """A call that some gateway wrote down as run, whatever it ran on; in its record, or in what that shares."""
    call: Json = {"kind": "tool", "tool": "echo", "principal": {"tenant": "local", "agent": "analyst"}}
    call |= more.pop("call", {})
    part: Json = {"call": call, "decision": {"asks": []}, **more}
    body: Json = {**part, "call": {"id": call_id, **call}, "approval": proof}
    if shared:
        quiet = {"approval": None} if proof is None else {}
        body = {"shared": [canonical.Shared({**part, **quiet})], **({"approval": proof} if proof is not None else {})}
    await way.store.write(lambda tx: tx.append("started", call_id, body))
    await way.store.write(lambda tx: tx.append("finished", call_id, {**body, "status": "success"}))


def find_leave(way: Way) -> Json:
    (started,) = [r.body for r in way.store.reader().records(kind="started")]
    proof = started["approval"]
    assert isinstance(proof, dict)
    return proof


Change = Callable[[Json], Json | None]
UNPROVEN: dict[str, tuple[Change, str]] = {
    "nothing": (lambda proof: {"id": "apr_0", "by": [{"person": "bob", "at": 1.0}]}, "are not signed"),
    "nobody": (lambda proof: {"id": "apr_0", "by": []}, "are not signed"),
    "no answers": (lambda proof: {**proof, "by": []}, "0 of 1 people agree"),
    "an answer that is not there": (
        lambda proof: {**proof, "by": [{**proof["by"][0], "hash": "0" * 64}]},
        "0 of 1 people agree",
    ),
    "a question that is not there": (
        lambda proof: {**proof, "asked": {**proof["asked"], "hash": "0" * 64}},
        "no question for it",
    ),
    "the same approval": (lambda proof: proof, "had used"),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", UNPROVEN)
async def test_verify_finds_a_call_that_ran_on_an_approval_that_is_not_in_the_log(
    tmp_path: Path, name: str, shared: bool
) -> None:
    change, said = UNPROVEN[name]
    async with governed(tmp_path, ASKING) as way:
        await answer(way, await way.call())
        assert (await way.call()).ok
        assert verified(way).ok
        await ran_on(way, change(find_leave(way)), shared=shared)
        for report in (verified(way), exported(way)[1]):
            assert not report.ok and len(report.faults) == 1
            assert said in str(report) and "call_x" in str(report)


@pytest.mark.parametrize("shared", [False, True])
async def test_verify_finds_a_call_that_ran_without_the_approval_that_policy_demanded(
    tmp_path: Path, shared: bool
) -> None:
    async with governed(tmp_path, ASKING) as way:
        await ran_on(way, None, shared=shared, decision={"asks": ["always"]})
        for report in (verified(way), exported(way)[1]):
            assert "call call_x ran without the approval that policy demanded" in str(report)


@pytest.mark.parametrize("shared", [False, True])
async def test_verify_finds_a_call_that_ran_on_leave_for_another(tmp_path: Path, shared: bool) -> None:
    async with governed(tmp_path, ASKING) as way:
        await answer(way, await way.call())
        (given,) = way.store.reader().approvals(("approved",))
        used = await way.store.write(lambda tx: tx.consume_approval(given.digest, "call_x", time.time()))
        assert used is not None and used.proof is not None
        await ran_on(way, used.proof.as_fact(), shared=shared, call={"tool": "pay"})
        for report in (verified(way), exported(way)[1]):
            assert "which was for another call" in str(report)


async def test_an_export_of_a_period_has_the_answers_from_before_it(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        await answer(way, await way.call())
        await anyio.sleep(0.01)
        since = time.time()
        await anyio.sleep(0.01)
        assert (await way.call()).ok
        period = Period(since, None)
        outside = [each for each in way.store.reader().period(period) if isinstance(each, Proof)]
        assert [each.record.kind for each in outside] == ["approval_asked", "approval_answered"]
        path, report = exported(way, period)
        assert report.ok, str(report)
        public = keys(way).public
        lines = path.read_bytes().splitlines(keepends=True)
        forged = [line.replace(b"bob", b"eve") if b'"proof"' in line else line for line in lines]
        path.write_bytes(b"".join(forged))
        assert "is no proof" in str(verify_export(path, public))
        assert "0 of 1 people agree" in str(verify_export(path, public))


async def test_an_answer_from_another_process_while_the_log_is_read_is_found(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        asked = await way.call()
        reader = way.store.reader()
        records, checkpoints = reader.evidence()
        other = Store.open(way.store.folder, keys(way))
        try:
            with answering_as("bob"):
                approvals.answer(other, str(asked.approval_id), PEOPLE["bob"], approve=True)
        finally:
            other.close()
        assert (await way.call()).ok
        assert verify_live(records, checkpoints, keys(way).public, reader.record).ok


async def test_what_a_version_recorded_that_signed_no_answers_proves_nothing(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        asked = {"approval": "apr_0", "tool": "echo", "people": 1, "expires_at": time.time() + 60}
        told = {"approval": "apr_0", "tool": "echo", "person": "bob", "approve": True, "state": "approved"}
        await way.store.write(lambda tx: tx.append("approval_asked", "call_0", asked))
        await way.store.write(lambda tx: tx.append("approval_answered", "call_0", told))
        await ran_on(way, {"id": "apr_0", "rule": "boss", "by": [{"person": "bob", "at": time.time()}]})
        for report in (verified(way), exported(way)[1]):
            assert "approval apr_0, the question and answers of which are not signed" in str(report)


# ── what was pruned ──


async def apart() -> float:
    """A time after all that is on record and before all that will be."""
    await anyio.sleep(0.01)
    moment = time.time()
    await anyio.sleep(0.01)
    return moment


class Later:
    """A time at which every question has expired."""

    @staticmethod
    def time() -> float:
        return time.time() + 1e6


async def prune(way: Way, before: float, clock: Any = Later) -> None:
    with mock.patch.object(pruning, "time", clock):
        await anyio.to_thread.run_sync(way.store.prune, before, "anna")


def on_record(way: Way) -> list[str]:
    """What of calls and of their approvals is there, but for calls that got no leave."""
    told = [r.kind for r in way.store.reader().records() if r.call_id is not None]
    return [kind for kind in told if kind != "finished"]


LEAVE = ["approval_asked", "approval_answered", "approval_used", "started"]


async def allowed(way: Way, amount: int) -> Outcome:
    await answer(way, await way.call(arguments={"amount": amount}))
    ran = await way.call(arguments={"amount": amount})
    assert ran.ok
    return ran


async def test_leave_is_pruned_with_the_call_that_ran_on_it_and_what_is_left_is_proved(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        old = await allowed(way, 1)
        used = find_leave(way)
        moment = await apart()
        new = await allowed(way, 2)
        assert on_record(way) == LEAVE * 2 and verified(way).ok
        await prune(way, moment)
        assert on_record(way) == LEAVE
        assert list(way.store.reader().story(old.facts["call_id"])) == []
        for report in (verified(way), exported(way)[1], exported(way, Period(moment, None))[1]):
            assert report.ok, str(report)
        told = explain([r.body for r in way.store.reader().story(new.facts["call_id"])], keys(way).public)
        assert "bob approved it" in told and "does not prove" not in told
        # That something was pruned excuses nothing: neither what is gone, nor what is there and was used.
        await ran_on(way, find_leave(way), call_id="call_y", shared=True)
        await ran_on(way, used, shared=True)
        for report in (verified(way), exported(way)[1]):
            assert f"call call_x ran on approval {used['id']}, and this log has no question for it" in str(report)
            assert "had used" in str(report) and len(report.faults) == 2


async def test_an_answer_that_is_changed_after_a_prune_is_found(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        await allowed(way, 1)
        moment = await apart()
        await allowed(way, 2)
        await prune(way, moment)
        path, report = exported(way)
        assert report.ok
        path.write_bytes(path.read_bytes().replace(b"bob", b"eve"))
        assert "0 of 1 people agree" in str(verify_export(path, keys(way).public))
        assert tamper(way, "UPDATE records SET text = replace(text, 'bob', 'eve') WHERE kind = 'approval_answered'")
        report = verified(way)
        assert "was edited" in str(report) and "0 of 1 people agree" in str(report)


async def test_leave_stays_as_long_as_the_call_that_ran_on_it(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        await answer(way, await way.call())
        moment = await apart()
        ran = await way.call()
        assert ran.ok
        await prune(way, moment)
        assert on_record(way) == LEAVE
        assert verified(way).ok and exported(way)[1].ok
        told = explain([r.body for r in way.store.reader().story(ran.facts["call_id"])], keys(way).public)
        assert "bob approved it" in told and "does not prove" not in told
        await prune(way, await apart())
        assert on_record(way) == []
        assert verified(way).ok and exported(way)[1].ok


async def test_leave_that_was_used_and_has_not_expired_is_not_pruned_so_nobody_can_put_it_back(tmp_path: Path) -> None:
    async with governed(tmp_path, ASKING) as way:
        await allowed(way, 1)
        moment = await apart()
        await way.call("echo", {"amount": 2})
        await prune(way, moment, time)
        assert on_record(way)[:4] == LEAVE
        assert tamper(way, "UPDATE approvals SET state = 'approved', consumed_by = NULL, expires_at = 1")
        await prune(way, moment, time)
        assert on_record(way)[:4] == LEAVE


async def test_a_call_that_ran_on_leave_that_somebody_refused_is_found(tmp_path: Path) -> None:
    """The refusal is hidden while another person is asked, and put back afterwards."""
    async with governed(tmp_path, ASKING) as way:
        asked = await way.call()
        await answer(way, asked, "bob", approve=False)
        assert tamper(way, "UPDATE records SET kind = 'x' WHERE kind = 'approval_answered'")
        assert tamper(way, "UPDATE approvals SET state = 'pending'")
        await answer(way, asked, "carol")
        assert (await way.call()).ok
        assert tamper(way, "UPDATE records SET kind = 'approval_answered' WHERE kind = 'x'")
        for report in (verified(way), exported(way)[1]):
            assert f"ran on approval {asked.approval_id}, which bob refused" in str(report)


class Stopped(BaseException):
    """As good as a kill: nothing of ours catches it."""


@pytest.mark.parametrize("where", ["_sign", "_finish"])
async def test_a_prune_that_is_stopped_takes_no_answer_from_a_call_that_stays(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of two chains it is signed, or done, and in the other it is not."""
    async with governed(tmp_path, ASKING) as way:
        asked = await way.call()
        with Store.open(way.store.folder, keys(way)) as other, answering_as("bob"):
            approvals.answer(other, str(asked.approval_id), PEOPLE["bob"], approve=True)
        assert (await way.call()).ok
        moment = await apart()
        await way.store.write(lambda tx: tx.append("noted", None, {}))  # the last record of a chain stays anyway
        sign, remove = pruning.Pruning._sign, pruning.Pruning._remove

        def half_signed(self: pruning.Pruning, ends: Any, before: float, by: str) -> None:
            sign(self, [end for end in ends if end[0].chain == other.chain], before, by)
            raise Stopped

        def half_done(self: pruning.Pruning, connection: sqlite3.Connection, **_: object) -> dict[str, int]:
            due = connection.execute("SELECT seq FROM prunes WHERE chain = ?", (other.chain,)).fetchone()
            if due is None:
                return {}
            remove(self, other.chain, *due)
            raise Stopped

        with monkeypatch.context() as patched:
            patched.setattr(pruning.Pruning, where, half_signed if where == "_sign" else half_done)
            with pytest.raises(Stopped):
                await prune(way, moment)
        left = {"_sign": [LEAVE, LEAVE, []], "_finish": [[LEAVE[0], *LEAVE[2:]], [], []]}[where]
        for before, kinds in zip((None, 0.0, moment), left, strict=True):
            if before is not None:
                await prune(way, before)
            assert on_record(way) == kinds
            for report in (verified(way), exported(way)[1]):
                assert report.ok, str(report)


async def test_what_a_resource_is_called_by_its_caller_is_asked_about_and_recorded_as_the_guard_has_it() -> None:
    clean = lambda text: GuardedText(text.replace("secret", "[redacted]"))  # noqa: E731
    made = CallState(make_call("file:///docs/secret", kind="resource"), "development", clean=clean)
    assert approval_binding.named(made).tool == "file:///docs/[redacted]"
    tool = CallState(make_call("secret"), "development", clean=clean)
    assert approval_binding.named(tool) is tool.call
