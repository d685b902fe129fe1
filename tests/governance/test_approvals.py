"""Approvals: what is asked, of whom, for how long, and who may answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core.errors import Refused
from ringfence.core.model import EVERY_ROLE, ApprovalRule, Decision, Json, Person, Status
from ringfence.governance import approvals as approval
from ringfence.governance.approvals import Approvals, Requirement
from ringfence.store import Conflict, Expired, RowNotFound, Store, Transaction
from tests import tooling
from tests.faking import Client, answering_as, contract, make_call

pytestmark = pytest.mark.anyio

ALICE, BOB = Person("alice", frozenset({"manager"})), Person("bob", frozenset({"auditor", "manager"}))
RULES = {
    "boss": ApprovalRule("boss", roles=("manager", "director"), expires_seconds=600, self_approval=True),
    "two": ApprovalRule("two", roles=("auditor",), expires_seconds=60, people=2),
    "big": ApprovalRule("big", when="args.amount > 1000"),
}
ONE = Requirement(("boss",), (), 600, self_approval=False, people=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "state", load_or_create(tmp_path / "keys"))
    yield opened
    opened.close()


def approvals(store: Store, wait: float = 0.0, *, single_user: bool = False) -> Approvals:
    people = {} if single_user else {"alice": ALICE, "bob": BOB}
    return Approvals(store, RULES, people, wait_seconds=wait)


def required(store: Store, asks: tuple[str, ...], own: str, arguments: Json | None = None, **more: Any) -> Any:
    decision = Decision("dec_1", True, "", asks=asks)
    one, seen = contract("echo", approval=own), {"args": arguments or {}}
    return approvals(store, **more).requirement(one, decision, lambda: seen)


# ── what is asked ──


def test_nothing_is_asked_where_nobody_asks(store: Store) -> None:
    assert required(store, (), "none") is None
    assert required(store, (), "big", {"amount": 5}) is None


@pytest.mark.parametrize("arguments", [{"amount": 5000}, {}, {"amount": "many"}, {"amount": None}, {"amount": [1]}])
def test_a_condition_that_holds_or_fails_asks(store: Store, arguments: Json) -> None:
    asked = required(store, (), "big", arguments)
    assert asked is not None
    assert asked.names == ("big",)


def test_several_rules_are_one_question_and_each_must_be_satisfied(store: Store) -> None:
    assert required(store, ("boss", "two"), "boss") == Requirement(
        names=("boss", "two"), roles=("director|manager", "auditor"), expires_seconds=60, self_approval=False, people=2
    )
    assert required(store, ("always",), "always").names == ("always",)


def test_only_one_person_may_answer_their_own_agent(store: Store) -> None:
    assert required(store, ("two",), "none").self_approval is False
    assert required(store, ("boss",), "none").self_approval is True
    assert required(store, ("boss", "always"), "none").self_approval is False
    assert required(store, ("two",), "none", single_user=True).self_approval is True


# ── who may answer ──


def asked(store: Store, **changes: Any) -> Any:
    call = make_call("pay", {"amount": 5})

    async def ask() -> None:
        wanted = replace(ONE, **changes)
        await approvals(store).obtain(call, f"digest of {wanted.names}", wanted, lambda: {"tool": "pay"}, Client())

    with pytest.raises(Refused) as refused:
        anyio.run(ask)
    assert (refused.value.status, refused.value.reason_code) == (Status.APPROVAL_REQUIRED, "approval_required")
    found = store.reader().approval(refused.value.approval_id or "")
    assert found is not None
    assert found.id in refused.value.message
    return found


@pytest.mark.parametrize(
    ("changes", "person", "objection"),
    [
        ({}, BOB, None),
        ({}, ALICE, "own agent"),
        ({"self_approval": True}, ALICE, None),
        ({"roles": ("auditor",)}, BOB, None),
        ({"roles": ("auditor|director", "manager")}, BOB, None),
        ({"roles": ("auditor", "director")}, BOB, "auditor and director"),
        ({"roles": ("director|cfo",)}, BOB, "cfo|director or|director or cfo"),
        ({"roles": ("director",)}, Person("root", EVERY_ROLE), None),
        ({"roles": ("director",)}, Person("carol"), "director"),
    ],
)
def test_only_whoever_is_entitled_answers(store: Store, changes: Any, person: Person, objection: str | None) -> None:
    question = asked(store, **changes)
    if objection is None:
        assert approval.objection(question, person) is None
        assert approval.answer(store, question.id, person, approve=True).state == "approved"
        return
    with pytest.raises(Refused, match=objection) as refused:
        approval.answer(store, question.id, person, approve=True)
    assert refused.value.reason_code == "not_entitled"
    assert approval.find(store, question.id).state == "pending"


def test_two_people_must_both_agree_and_none_counts_twice(store: Store) -> None:
    question = asked(store, people=2)
    assert approval.answer(store, question.id, BOB, approve=True).state == "pending"
    with pytest.raises(Conflict):
        approval.answer(store, question.id, BOB, approve=True)
    with answering_as("carol"):
        assert approval.answer(store, question.id, Person("carol"), approve=True).state == "approved"


def test_what_is_settled_or_unknown_cannot_be_answered(store: Store) -> None:
    question = asked(store)
    approval.answer(store, question.id, BOB, approve=False)
    with pytest.raises(Conflict):
        approval.answer(store, question.id, Person("carol"), approve=True)
    with pytest.raises(RowNotFound):
        approval.answer(store, "apr_none", BOB, approve=True)
    late = asked(store, expires_seconds=0.05, names=("late",))
    time.sleep(0.06)
    with pytest.raises((Expired, Conflict)):
        approval.answer(store, late.id, BOB, approve=True)


# ── waiting ──


async def obtain(store: Store, wait: float, client: Client, requirement: Requirement = ONE) -> None:
    await approvals(store, wait).obtain(make_call("pay"), "digest", requirement, lambda: {"tool": "pay"}, client)


async def test_an_answer_ends_the_waiting(store: Store) -> None:
    client = Client()

    async def answer_soon() -> None:
        await tooling.until(lambda: store.reader().approvals())
        (question,) = store.reader().approvals()
        await anyio.to_thread.run_sync(lambda: approval.answer(store, question.id, BOB, approve=True))

    with anyio.fail_after(tooling.PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(answer_soon)
            await obtain(store, 600, client)
    ((method, note), *_) = client.told
    assert method == "notifications/progress"
    assert "waiting for a person to answer apr_" in note["message"]


async def test_a_no_is_a_refusal_and_stands_as_long_as_the_question_would(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, now = replace(ONE, expires_seconds=600), time.time
    with pytest.raises(Refused):
        await obtain(store, 0, Client(), short)
    (question,) = store.reader().approvals()
    await anyio.to_thread.run_sync(lambda: approval.answer(store, question.id, BOB, approve=False))
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            await obtain(store, 0, Client(), short)
        assert (refused.value.status, refused.value.reason_code) == (Status.DENIED, "approval_refused")
        assert "bob" in refused.value.message
    monkeypatch.setattr(time, "time", lambda: now() + 600)
    with pytest.raises(Refused) as anew:
        await obtain(store, 0, Client(), short)
    assert anew.value.status is Status.APPROVAL_REQUIRED
    assert anew.value.approval_id != question.id


async def test_identical_calls_share_one_question(store: Store) -> None:
    identities = set()
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            await obtain(store, 0, Client())
        identities.add(refused.value.approval_id)
    assert len(identities) == 1
    again = await approvals(store).ask_again(make_call("pay"), "digest", ONE, dict)
    assert again.approval_id in identities, "while it waits, a new question is the same one"


async def test_an_answer_is_no_good_for_another_digest(store: Store) -> None:
    with pytest.raises(Refused) as refused:
        await obtain(store, 0, Client())
    given = await anyio.to_thread.run_sync(
        lambda: approval.answer(store, str(refused.value.approval_id), BOB, approve=True)
    )
    await obtain(store, 0, Client())
    with pytest.raises(Refused) as other:
        await approvals(store).obtain(make_call("pay"), "another", ONE, dict, Client())
    assert other.value.approval_id != given.id


# ── places ──


async def asks(made: Approvals, digest: str, session: str | None) -> str:
    """The reason for which this client's next question waits, or is not asked."""
    call = replace(make_call("pay"), session=session, origin="mcp-http")
    with pytest.raises(Refused) as refused:
        await made.obtain(call, digest, ONE, lambda: {"tool": "pay"}, Client())
    return refused.value.reason_code if refused.value.reason_code != "throttled" else refused.value.message


async def test_no_client_takes_all_places_of_waiting_questions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval, "_MAX_WAITING", 8)
    made = approvals(store)
    for number in range(4):
        assert await asks(made, f"greedy {number}", "greedy") == "approval_required"
    refused = await asks(made, "greedy 4", "greedy")
    assert refused == "4 calls of this client wait for a person already; the 4 places left are for other clients"
    assert await asks(made, "greedy 0", "greedy") == "approval_required", "what was asked already is no new question"
    assert [await asks(made, f"other {number}", "other") for number in range(2)] == ["approval_required"] * 2
    assert await asks(made, "alone", None) == "approval_required"
    last = await asks(made, "late", "late")
    assert last == "approval_required"
    assert await asks(made, "too late", "later") == "8 calls of this agent wait for a person already"
    (question,) = [q for q in store.reader().approvals() if q.digest == "greedy 0"]
    await anyio.to_thread.run_sync(lambda: approval.answer(store, question.id, BOB, approve=True))
    assert await asks(made, "later", "later") == "approval_required", "an answer makes room"


async def test_questions_that_are_asked_at_the_same_time_share_the_places(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval, "_MAX_WAITING", 8)
    made = approvals(store)
    reasons: list[str] = []

    async def one(number: int) -> None:
        reasons.append(await asks(made, f"greedy {number}", "greedy"))

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(one, number)
    assert reasons.count("approval_required") == 4
    assert len(store.reader().approvals()) == 4 and not made._places._taken


async def test_calls_that_wait_for_an_answer_have_room_and_each_client_as_much_as_is_left_for_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval, "_MAX_WEIGHT", 100_000)
    made = approvals(store, wait=tooling.PATIENCE)
    waiting = 0

    class Patient(Client):
        async def notify(self, method: str, params: Json) -> None:
            nonlocal waiting
            waiting += not self.told
            await Client.notify(self, method, params)

    def has_waiting(count: int) -> bool:
        return waiting == count

    async def one(session: str, size: int) -> None:
        call = replace(make_call("pay", {"text": "x" * size}), session=session)
        with pytest.raises(Refused) as refused:
            await made.obtain(call, "the same", ONE, lambda: {"tool": "pay"}, Patient())
        assert refused.value.reason_code == "approval_required"

    async with anyio.create_task_group() as group:
        for number, session in enumerate(("greedy", "greedy", "other"), 1):
            group.start_soon(one, session, 1000)
            await tooling.until(partial(has_waiting, number))
        await one("greedy", 1000)  # is told at once, as one that is not patient
        await one("new", 50_000)
        assert waiting == 3
        group.cancel_scope.cancel()
    assert not made._places._weights


async def test_a_question_that_is_cancelled_while_it_is_written_counts_to_its_client(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun, go_on = approvals(store), threading.Event(), threading.Event()
    real = Transaction.ask_approval

    def slowly(tx: Transaction, question: Any) -> Any:
        begun.set()
        go_on.wait(tooling.PATIENCE)
        return real(tx, question)

    monkeypatch.setattr(Transaction, "ask_approval", slowly)
    async with anyio.create_task_group() as group:
        group.start_soon(asks, made, "greedy 0", "greedy")
        await anyio.to_thread.run_sync(begun.wait)
        group.cancel_scope.cancel()
        go_on.set()
    (question,) = store.reader().approvals()
    assert made._places._askers == {question.principal: {question.id: "greedy"}} and not made._places._taken


async def test_a_client_whose_questions_take_long_to_prepare_holds_up_itself(store: Store) -> None:
    made = approvals(store)
    prepared: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    async def one(session: str, number: int) -> None:
        def summary() -> Json:
            begun.set()
            go_on.wait(tooling.PATIENCE)
            prepared.append(session)
            return {"tool": "pay"}

        call = replace(make_call("pay"), session=session)
        with pytest.raises(Refused):
            await made.obtain(call, f"{session} {number}", ONE, summary, Client())

    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(one, "greedy", number)
        await anyio.to_thread.run_sync(begun.wait)
        group.start_soon(one, "other", 0)
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert prepared.index("other") <= 2 and prepared.count("greedy") == 10
    assert not made._turns
