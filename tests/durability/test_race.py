"""Two gateways on one state: an approval is used once, and a key has one effect, whoever comes first."""

from __future__ import annotations

import os
import pwd
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from ringfence.core import canonical
from ringfence.core.errors import Refused
from ringfence.core.model import Person
from ringfence.governance import approvals
from ringfence.store import Approval, Conflict, Expired
from tests import tooling
from tests.durability.stage import SERVER, Json, Running, Said, Stage, client
from tests.faking import answering_as

pytestmark = pytest.mark.anyio

CALLS = 100
BOSS = Person("boss", frozenset({"manager"}))
CLERK = Person("clerk", frozenset({"clerk"}))
ME = pwd.getpwuid(os.getuid()).pw_name
ASKED: Json = {"append": {"server": "tools", "mode": "write", "approval": "always", "log": {"arguments": "redacted"}}}


async def at_once(
    gateways: list[Running],
    arguments: Json,
    *,
    key: str | None = None,
    wait: float | None = None,
    calls: int = CALLS,
) -> list[Said]:
    """The same call from many callers at the same time, in turn through each of the gateways."""
    told: list[Said] = []

    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(client(gateway)) for gateway in gateways]

        async def one(number: int) -> None:
            told.append(await callers[number % len(callers)].call("append", arguments, key=key, wait=wait))

        async with anyio.create_task_group() as group:
            for number in range(calls):
                group.start_soon(one, number)
    return told


async def ask(gateway: Running, arguments: Json, wait: float | None = None) -> Said:
    async with client(gateway) as caller:
        return await caller.call("append", arguments, wait=wait)


def answer(stage: Stage, identity: str | None, person: Person = BOSS, *, approve: bool = True) -> Approval:
    """A person's word, given in a process that is neither gateway."""
    assert identity is not None
    with stage.opened() as store, answering_as(person.name):
        return approvals.answer(store, identity, person, approve=approve)


async def answer_the_first_question(stage: Stage) -> str:
    with anyio.fail_after(tooling.PATIENCE):
        while True:
            with stage.reading() as reader:
                if waiting := reader.approvals():
                    break
            await anyio.sleep(0.05)
    await anyio.sleep(0.5)  # most of the callers have joined by now
    await anyio.to_thread.run_sync(answer, stage, waiting[0].id)
    return waiting[0].id


def asking(stage: Stage, name: str = "ringfence.yaml", **sections: Json) -> Path:
    return stage.configure(name, **{"capabilities": ASKED, **sections})


# ── one approval ──


async def test_of_a_hundred_callers_in_two_processes_one_uses_the_approval_given_before(stage: Stage) -> None:
    config = asking(stage)
    with stage.serving(config) as one, stage.serving(config) as two:
        first = await ask(one, stage.line("paid"))
        assert first.status == "approval_required"
        answer(stage, first.approval_id)
        told = await at_once([one, two], stage.line("paid"))
    assert stage.done() == {"paid": 1}
    assert Counter(said.status for said in told) == {"success": 1, "approval_required": CALLS - 1}
    others = {said.approval_id for said in told if said.status == "approval_required"}
    assert len(others) == 1, "identical calls share one new question"
    assert first.approval_id not in others
    stage.assert_verifies()
    stage.assert_each_call_closed_once()
    stage.assert_each_effect_was_started()
    with stage.reading() as reader:
        used = reader.approval(str(first.approval_id))
    assert used is not None
    assert (used.state, used.consumed_by) == ("consumed", next(s.call_id for s in told if s.status == "success"))


async def test_of_a_hundred_callers_that_wait_for_one_answer_one_runs(stage: Stage) -> None:
    for seconds in (10, 120):
        config, line = asking(stage, gateway={"approval_wait_seconds": seconds}), stage.line(f"paid {seconds}")
        with stage.serving(config) as one, stage.serving(config) as two:
            told: list[Said] = []

            async def call(line: Json = line, told: list[Said] = told, both: list[Running] = [one, two]) -> None:  # noqa: B006
                told.extend(await at_once(both, line, wait=3600))

            async with anyio.create_task_group() as group:
                group.start_soon(call)
                identity = await answer_the_first_question(stage)
        if stage.done():  # otherwise the answer took so long that nobody waited any more
            break
    assert stage.done() == {f"paid {seconds}": 1}
    assert Counter(said.status for said in told) == {"success": 1, "approval_required": CALLS - 1}
    assert identity not in {said.approval_id for said in told if said.status == "approval_required"}
    stage.assert_verifies()
    stage.assert_each_call_closed_once()


async def test_an_approval_serves_the_call_that_was_asked_about_and_no_other(stage: Stage) -> None:
    config = asking(stage)
    with stage.serving(config) as gateway:
        first = await ask(gateway, stage.line("ten"))
        answer(stage, first.approval_id)
        other = await ask(gateway, stage.line("ten thousand"))
        assert (other.status, stage.done()) == ("approval_required", {})
        assert other.approval_id != first.approval_id
        assert (await ask(gateway, stage.line("ten"))).status == "success"
    assert stage.done() == {"ten": 1}


@pytest.mark.parametrize(
    ("changed", "sections"),
    [
        ("contract", {"capabilities": {"append": {**ASKED["append"], "timeout_seconds": 29}}}),
        ("policy", {"policy": {"preset": "permissive", "rules": [{"id": "more", "action": "audit"}]}}),
        ("principal", {"people": {"somebody": {"os_user": ME}}}),
        ("environment", {"environment": "production"}),
    ],
)
async def test_what_was_approved_is_void_once_anything_about_it_changes(
    stage: Stage, changed: str, sections: Json
) -> None:
    with stage.serving(asking(stage)) as gateway:
        first = await ask(gateway, stage.line("paid"))
        answer(stage, first.approval_id)
    with stage.serving(asking(stage, "changed.yaml", **sections)) as gateway:
        second = await ask(gateway, stage.line("paid"))
        assert (second.status, stage.done()) == ("approval_required", {}), changed
        assert second.approval_id != first.approval_id
    with stage.serving(asking(stage)) as gateway:
        assert (await ask(gateway, stage.line("paid"))).status == "success"


async def test_an_approval_is_void_once_the_definition_is_another(stage: Stage) -> None:
    config = asking(stage)
    with stage.serving(config) as gateway:
        first = await ask(gateway, stage.line("paid"))
        answer(stage, first.approval_id)
    renamed = stage.folder / "renamed_server.py"
    own = Path(SERVER[1]).read_text()
    renamed.write_text(own.replace('"Appends a line to a file"', '"Appends a line to a file, and more"'))
    tools = {"tools": {"command": [SERVER[0], str(renamed)], "pins": "first_use"}}
    changed = asking(stage, servers=tools)
    with stage.serving(changed) as gateway:
        hidden = await ask(gateway, stage.line("paid"))
        assert (hidden.status, hidden.reason_code, stage.done()) == ("unavailable", "pin_changed", {})
    accept(stage, {"description": "Appends a line to a file, and more"})
    with stage.serving(changed) as gateway:
        second = await ask(gateway, stage.line("paid"))
    assert (second.status, stage.done()) == ("approval_required", {})
    assert second.approval_id != first.approval_id


def accept(stage: Stage, changes: Json) -> None:
    """What a person does who accepts the changed definition."""
    with stage.opened() as store:
        pinned = next(d for d in store.reader().pins("tools") if d.name == "append")
        body = {**pinned.body, **changes}
        fresh = replace(pinned, body=body, digest=canonical.definition_digest(body))
        store.write_sync(lambda tx: tx.put_pin(fresh, "boss", time.time()))


async def test_approvals_expire(stage: Stage) -> None:
    tools = {"append": {**ASKED["append"], "approval": "brief"}}
    for seconds in (1.5, 15, 60):
        brief = {"brief": {"expires_seconds": seconds}}
        with stage.serving(asking(stage, capabilities=tools, approvals=brief)) as gateway:
            given = await ask(gateway, stage.line(f"given {seconds}"))
            left = await ask(gateway, stage.line(f"left {seconds}"))
            with suppress(Expired):  # where that took longer than it was good for
                answer(stage, given.approval_id)
                await anyio.sleep(seconds + 0.1)
                late = await ask(gateway, stage.line(f"given {seconds}"))
                assert (late.status, stage.done()) == ("approval_required", {})
                assert late.approval_id != given.approval_id
                break
    with pytest.raises(Expired):
        answer(stage, left.approval_id)


async def test_a_question_that_expires_while_its_call_waits_is_put_anew(stage: Stage) -> None:
    tools = {"append": {**ASKED["append"], "approval": "brief"}}
    for seconds in (2, 20, 60):
        brief = {"brief": {"expires_seconds": seconds}}
        wait = {"approval_wait_seconds": seconds + 1}
        with stage.serving(asking(stage, capabilities=tools, approvals=brief, gateway=wait)) as gateway:
            waited = await ask(gateway, stage.line(f"paid {seconds}"), wait=3600)
            assert waited.status == "approval_required"
            with suppress(Expired):  # where the answer took longer than the new question was good for
                assert answer(stage, waited.approval_id).state == "approved"
                return
    pytest.fail("no question was put anew")


async def test_a_call_waits_for_a_person_only_if_its_caller_says_so(stage: Stage) -> None:
    with stage.serving(asking(stage, gateway={"approval_wait_seconds": 3600})) as gateway:
        first = await ask(gateway, stage.line("paid"))
        assert first.status == "approval_required" and first.approval_id is not None, "at once"
        assert first.approval_id in first.text and "make the same call again" in first.text
        assert "ringfence" not in first.text, "what a person types is nothing for the agent"
        with anyio.fail_after(tooling.PATIENCE):  # for the person at the gateway's terminal
            while f"approvals approve {first.approval_id} --config " not in gateway.output():
                await anyio.sleep(0.02)
        told: list[Said] = []

        async def wait() -> None:
            told.append(await ask(gateway, stage.line("paid"), wait=3600))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            answer(stage, first.approval_id)
        assert [said.status for said in told] == ["success"] and stage.done() == {"paid": 1}
        for wrong in (-1, True, "5"):
            refused = await ask(gateway, stage.line("paid"), wait=wrong)  # type: ignore[arg-type]
            assert refused.status == "validation_failure" and "ringfence/wait_seconds" in refused.text


async def test_a_refusal_stays_one(stage: Stage) -> None:
    config = asking(stage)
    with stage.serving(config) as gateway:
        first = await ask(gateway, stage.line("paid"))
        answer(stage, first.approval_id, approve=False)
        told = await at_once([gateway], stage.line("paid"), calls=5)
        assert {(s.status, s.reason_code) for s in told} == {("denied", "approval_refused")}
    with stage.serving(config) as gateway:
        again = await ask(gateway, stage.line("paid"))
    assert (again.status, again.reason_code, stage.done()) == ("denied", "approval_refused", {})
    with pytest.raises(Conflict):
        answer(stage, first.approval_id, CLERK)


async def test_who_may_answer(stage: Stage) -> None:
    people = {
        "me": {"os_user": ME, "roles": ["manager"]},
        "boss": {"os_user": "boss", "roles": ["manager"]},
        "chair": {"os_user": "chair", "roles": ["manager"]},
        "clerk": {"os_user": "clerk", "roles": ["clerk"]},
    }
    rules = {"two": {"roles": ["manager"], "people": 2}}
    tools = {"append": {**ASKED["append"], "approval": "two"}}
    with stage.serving(asking(stage, capabilities=tools, approvals=rules, people=people)) as gateway:
        first = await ask(gateway, stage.line("paid"))
        with pytest.raises(Refused, match="another person must answer"):
            answer(stage, first.approval_id, Person("me", frozenset({"manager"})))
        with pytest.raises(Refused, match="clerk does not have the role"):
            answer(stage, first.approval_id, CLERK)
        assert answer(stage, first.approval_id, BOSS).state == "pending"
        with pytest.raises(Conflict, match="already answered"):
            answer(stage, first.approval_id, BOSS)
        waiting = await ask(gateway, stage.line("paid"))
        assert (waiting.status, waiting.approval_id) == ("approval_required", first.approval_id)
        assert answer(stage, first.approval_id, Person("chair", frozenset({"manager"}))).state == "approved"
        assert (await ask(gateway, stage.line("paid"))).status == "success"
    assert stage.done() == {"paid": 1}
    record = next(
        r.body for r in stage.records(kind="finished") if r.body["status"] == "success" and r.body["approval"]
    )
    assert [by["person"] for by in record["approval"]["by"]] == ["boss", "chair"]


# ── one key ──


async def test_a_hundred_calls_with_one_key_in_two_processes_have_one_effect(stage: Stage) -> None:
    config = stage.configure()
    with stage.serving(config) as one, stage.serving(config) as two:
        told = await at_once([one, two], stage.line("paid"), key="order-1")
        assert stage.done() == {"paid": 1}
        assert Counter((s.status, s.text) for s in told) == {("success", "appended"): CALLS}
        later = await at_once([one, two], stage.line("paid"), key="order-1", calls=2)
        other = await at_once([one, two], stage.line("paid twice"), key="order-1", calls=2)
    assert {s.status for s in later} == {"success"}
    assert {(s.status, s.reason_code) for s in other} == {("validation_failure", "key_conflict")}
    assert stage.done() == {"paid": 1}
    ends = [r.body for r in stage.records(kind="finished") if r.body["call"]["tool"] == "append"]
    ran = [end["call"]["id"] for end in ends if end["started_seq"] is not None]
    assert len(ran) == 1
    assert Counter(end["replayed_from"] for end in ends) == {None: 3, ran[0]: CALLS + 1}
    stage.assert_verifies()
    stage.assert_each_call_closed_once()


async def test_an_approved_call_with_a_key_is_joined_by_the_others(stage: Stage) -> None:
    config = asking(stage)
    with stage.serving(config) as one, stage.serving(config) as two:
        async with client(one) as caller:
            first = await caller.call("append", stage.line("paid"), key="order-1")
        assert first.status == "approval_required"
        answer(stage, first.approval_id)
        told = await at_once([one, two], stage.line("paid"), key="order-1")
    assert stage.done() == {"paid": 1}
    assert {said.status for said in told} <= {"success", "approval_required"}
    assert sum(said.status == "success" for said in told) > CALLS // 2


async def test_a_key_is_unknown_after_a_crash(stage: Stage) -> None:
    config = stage.configure()
    gateway = stage.start(config)
    async with anyio.create_task_group() as group:
        group.start_soon(call_and_lose, gateway)
        with anyio.fail_after(tooling.PATIENCE):
            while not (open_calls := running(stage)):
                await anyio.sleep(0.02)
        gateway.kill()
        group.cancel_scope.cancel()
    with stage.serving(config) as gateway, stage.serving(config) as other:
        for each in (gateway, other):
            async with client(each) as caller:
                again = await caller.call("slow", {"seconds": 600}, key="order-1")
                assert (again.status, again.reason_code) == ("unknown", "key_unknown")
                assert open_calls[0] in again.text
                changed = await caller.call("slow", {"seconds": 601}, key="order-1")
                assert changed.reason_code == "key_conflict"
    slow = [r for r in stage.records(kind="started") if r.body["call"]["tool"] == "slow"]
    assert [r.call_id for r in slow] == open_calls


async def call_and_lose(gateway: Running) -> None:
    with suppress(Exception):  # its gateway is killed under it
        async with client(gateway) as caller:
            await caller.call("slow", {"seconds": 600}, key="order-1")


def running(stage: Stage) -> list[str]:
    with stage.reading() as reader:
        return reader.running()
