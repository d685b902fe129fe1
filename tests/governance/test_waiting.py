"""Calls that wait for a person cost nothing while they wait: one cheap look for all, and nothing large on the loop."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core.expression import Expression
from ringfence.core.model import ApprovalRule, Outcome, Person
from ringfence.governance import approvals
from ringfence.governance.guard import Guard
from ringfence.store import Reader, Store, rows, sqlite
from tests.faking import Client, Said, Way, contract, governed, make_call

pytestmark = pytest.mark.anyio

BOB = Person("bob")
LARGE = "x" * 900_000
MANY = 20
SAID = Said(contracts=(contract("echo", mode="write", approval="always"), contract("free", tool="echo")), wait=600)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is done on the thread of the loop that takes long or reads much, counted."""
    done: Counter[str] = Counter()
    loop = threading.get_ident()

    def counted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            if threading.get_ident() == loop:
                done[name] += 1
            return plain(*args, **more)

        monkeypatch.setattr(owner, name, call)

    for name in ("approval", "approvals", "find_approvals", "version", "unanswered"):
        counted(Reader, name)
    counted(Guard, "redact_for_approval")
    counted(rows, "pack")
    return done


async def ask(way: Way, n: int, outcomes: dict[int, Outcome]) -> None:
    call = make_call("echo", {"n": n, "text": LARGE})
    outcomes[n] = await way.pipeline.handle(call, Client())


async def until(way: Way, count: int) -> dict[int, str]:
    """The ids of the questions by their number, once there are so many."""

    def look() -> dict[int, str]:
        reader = Reader.open(way.store.folder)
        try:
            return {a.summary["arguments"]["n"]: a.id for a in reader.approvals()}
        finally:
            reader.close()

    with anyio.fail_after(300):
        while len(found := await anyio.to_thread.run_sync(look)) < count:
            await anyio.sleep(0.05)
    return found


async def turns(work: Counter[str], looks: int) -> None:
    """Until so many looks more were made."""
    target = work["version"] + looks
    with anyio.fail_after(300):
        while work["version"] < target:
            await anyio.sleep(0.05)


async def test_waiting_calls_read_nothing_large_and_make_nothing_large_on_the_loop(
    tmp_path: Path, work: Counter[str]
) -> None:
    async with governed(tmp_path, SAID) as way:
        outcomes: dict[int, Outcome] = {}
        async with anyio.create_task_group() as group:
            for n in range(MANY):
                group.start_soon(ask, way, n, outcomes)
            asked = await until(way, MANY)
            await turns(work, 2)  # all wait now, and what they wrote was looked at
            assert work["redact_for_approval"] == work["pack"] == work["approvals"] == 0, (
                "summaries are no business of the loop"
            )
            before = work.copy()
            await turns(work, 10)
            spent = work - before
            assert spent.total() == spent["version"], "nothing was written, so nothing is read"
            assert (await way.call("free")).ok
            await turns(work, 2)
            assert (work - before)["approval"] == 0, "what others write wakes nobody"

            give = lambda: approvals.answer(way.store, asked[7], BOB, approve=True)  # noqa: E731
            await anyio.to_thread.run_sync(give)
            with anyio.fail_after(300):
                while 7 not in outcomes:
                    await anyio.sleep(0.01)
            assert outcomes[7].ok and len(outcomes) == 1
            group.cancel_scope.cancel()


@pytest.mark.parametrize("approve", [True, False])
async def test_an_answer_by_another_process_wakes_the_call_that_waits_for_it(tmp_path: Path, approve: bool) -> None:
    async with governed(tmp_path, SAID) as way:
        outcomes: dict[int, Outcome] = {}

        def give(identity: str) -> None:
            other = Store.open(way.store.folder, load_or_create(tmp_path / "keys"))
            try:
                approvals.answer(other, identity, BOB, approve=approve)
            finally:
                other.close()

        async with anyio.create_task_group() as group:
            for n in range(2):
                group.start_soon(ask, way, n, outcomes)
            asked = await until(way, 2)
            await anyio.to_thread.run_sync(give, asked[1])
            with anyio.fail_after(300):
                while 1 not in outcomes:
                    await anyio.sleep(0.01)
            assert outcomes[1].status == ("success" if approve else "denied") and 0 not in outcomes
            group.cancel_scope.cancel()


async def test_nobody_looks_while_nobody_waits(tmp_path: Path, work: Counter[str]) -> None:
    async with governed(tmp_path, replace(SAID, wait=0)) as way:
        assert (await way.call()).status == "approval_required"
        before = work["version"]
        await anyio.sleep(3 * sqlite.LOOK_SECONDS)
        assert work["version"] == before


async def test_a_call_that_is_cancelled_waits_no_more(tmp_path: Path, work: Counter[str]) -> None:
    async with governed(tmp_path, SAID) as way:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, way, 0, {})
            await until(way, 1)
            await turns(work, 1)
            group.cancel_scope.cancel()
        before = work["version"]
        await anyio.sleep(3 * sqlite.LOOK_SECONDS)
        assert work["version"] == before


async def test_a_database_that_cannot_be_read_for_a_moment_loses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with governed(tmp_path, SAID) as way:
        outcomes: dict[int, Outcome] = {}
        plain, failed = Reader.version, Counter[str]()

        def version(reader: Reader) -> int:
            if failed["times"] < 3:
                failed["times"] += 1
                raise rows.RowNotFound("not now")
            return plain(reader)

        monkeypatch.setattr(Reader, "version", version)
        async with anyio.create_task_group() as group:
            group.start_soon(ask, way, 0, outcomes)
            asked = await until(way, 1)
            await anyio.to_thread.run_sync(lambda: approvals.answer(way.store, asked[0], BOB, approve=True))
        assert outcomes[0].ok and failed["times"] == 3


async def test_conditions_and_keys_of_long_calls_are_tried_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []
    evaluate = Expression._evaluate

    def evaluated(self: Expression, seen: Any) -> Any:
        places.append(threading.get_ident())
        return evaluate(self, seen)

    monkeypatch.setattr(Expression, "_evaluate", evaluated)
    one = contract("echo", mode="write", approval="boss", idempotent={"key": "string(args.n)"})
    said = Said(contracts=(one,), approvals={"boss": ApprovalRule("boss", when="args.text == 'y'")})
    loop = threading.get_ident()
    async with governed(tmp_path, said) as way:
        assert (await way.call("echo", {"n": 1, "text": LARGE})).ok
        assert len(places) == 2 and loop not in places
        assert (await way.call("echo", {"n": 2, "text": "x"})).ok
        assert places[2:] == [loop, loop], "a short one costs no thread"
