"""A manager of sessions: whose they are, how many there may be, what is written down. The boxes are fakes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import MIB, Limits
from ringfence.core.errors import Refused, RingfenceError, StoreError, Unavailable
from ringfence.core.sessions import Owner, SessionSpec, StaySpec
from ringfence.sandbox.sessions.capacity import KeeperRules
from ringfence.sandbox.sessions.manager import SessionManager
from tests.sandbox.fake_sessions import (
    COLLEAGUE,
    ME,
    STRANGER,
    FakeBackend,
    FakeSessions,
    fake_sessions,
    refused,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[FakeSessions]:
    async with fake_sessions(tmp_path / "state") as made:
        yield made


# ── Whose they are ──


async def test_what_is_anothers_is_what_does_not_exist(here: FakeSessions) -> None:
    box, manager = await here.create(), here.manager
    await manager.write(ME, box, "a", b"")
    texts = set()
    for owner in (COLLEAGUE, STRANGER, Owner("t", ""), Owner("", "me")):
        mine = await here.create(owner)
        for asked in (
            manager.info(owner, box),
            manager.state_of(owner, box),
            manager.pause(owner, box),
            manager.resume(owner, box),
            manager.end(owner, box),
            manager.extend(owner, box, 1.0),
            here.cell(box, "set x 1", owner),
            manager.interrupt(owner, box),
            manager.processes(owner, box),
            manager.logs(owner, box, 1, 0, 0),
            manager.signal(owner, box, 1, 9),
            manager.read(owner, box, "a", 0, None),
            manager.write(owner, box, "a", b""),
            manager.copy(owner, box, "a", mine, "a"),
            manager.copy(owner, mine, "a", box, "a"),
            anext(manager.pack(owner, box, ".")),
            anext(manager.watch(owner, box, ".", False)),
            manager.snapshot(owner, box),
            manager.fork(owner, box, 1),
        ):
            with pytest.raises(Refused) as problem:
                await asked
            assert problem.value.reason_code == "unknown_session"
            texts.add(problem.value.message.replace(box, "ID"))
        assert [info.id for info in await manager.list(owner)] == [mine]
    with pytest.raises(Refused) as nobody:
        await manager.info(ME, "box_none")
    assert texts == {nobody.value.message.replace("box_none", "ID")}
    await manager.end(ME, box)
    assert await refused(manager.info(COLLEAGUE, box)) == "unknown_session"


async def test_ids_cannot_be_guessed(here: FakeSessions) -> None:
    ids = [await here.create() for _ in range(5)]
    assert len({box[-16:] for box in ids}) == 5
    assert all(box.startswith("box_") for box in ids)


async def test_a_box_belongs_to_the_tenant_of_its_owner(here: FakeSessions) -> None:
    await here.create(STRANGER, stay=StaySpec(tenant="t"))
    assert here.backend.boxes[0].spec.tenant == "other"


async def test_who_looks_after_a_tenant_sees_the_sessions_of_all_its_agents(here: FakeSessions) -> None:
    mine, others, elsewhere = [await here.create(owner) for owner in (ME, COLLEAGUE, STRANGER)]
    await here.manager.end(COLLEAGUE, others)
    seen = await here.manager.of_tenant(Owner(ME.tenant, ""))
    assert [(info.id, info.state) for info in seen] == [(others, "stopped"), (mine, "running")]
    assert {info.id for info in await here.manager.of_tenant(Owner("", ""))} == {mine, others, elsewhere}
    with pytest.raises(Refused):
        await here.manager.view(Owner(ME.tenant, ""), mine)


async def test_a_view_has_what_was_used_and_the_end_of_what_steps_wrote(here: FakeSessions) -> None:
    box = await here.create()
    await here.command(box, "say", "hello")
    view = await here.manager.view(ME, box)
    assert [(step.step, step.what, step.stdout) for step in view.steps] == [(1, "say hello", b"hello")]
    assert [sample.memory_bytes for sample in view.samples] == [1000]
    silent = await here.create(retain="none")
    await here.command(silent, "say", "hello")
    assert (await here.manager.view(ME, silent)).steps == ()
    await here.manager.end(ME, box)
    assert (await here.manager.view(ME, box)).info.state == "stopped"


# ── Making them ──


async def test_what_a_session_is_can_be_asked(here: FakeSessions) -> None:
    stay = StaySpec(limits=Limits(memory_bytes=64 * MIB), template="data", env={"A": "1"})
    made = await here.manager.create(ME, SessionSpec(stay, metadata={"for": "tests"}, lifetime_seconds=60))
    assert (made.state, made.template, made.limits, made.metadata) == ("running", "data", stay.limits, {"for": "tests"})
    assert (made.owner, made.isolation) == (ME, {"backend": "fake"})
    assert replace(made, expires_at=None) == replace(await here.manager.info(ME, made.id), expires_at=None)
    assert [info.id for info in await here.manager.list(ME)] == [made.id]
    assert here.backend.boxes[0].spec.env == {"A": "1"}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"lifetime_seconds": 0}, "lifetime_seconds"),
        ({"lifetime_seconds": float("inf")}, "lifetime_seconds"),
        ({"idle_seconds": -1}, "idle_seconds"),
        ({"idle_seconds": float("nan")}, "idle_seconds"),
        ({"metadata": {str(n): "" for n in range(100)}}, "metadata"),
        ({"metadata": {"a": "b" * 20_000}}, "metadata"),
    ],
)
async def test_a_spec_that_makes_no_sense_is_refused(here: FakeSessions, how: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why) as problem:
        await here.create(**how)
    assert problem.value.reason_code == "bad_spec"
    assert here.backend.boxes == []
    assert here.journal() == ""


@pytest.mark.parametrize(
    ("problem", "told"),
    [(ValueError("no such template"), "bad_spec"), (Unavailable("no_box", "nothing there"), "no_box")],
)
async def test_a_box_that_cannot_be_had_leaves_nothing(here: FakeSessions, problem: Exception, told: str) -> None:
    here.backend.problem = problem
    with pytest.raises(RingfenceError) as shown:
        await here.create()
    assert isinstance(shown.value, Refused | Unavailable) and shown.value.reason_code == told
    assert here.manager.live == 0
    assert [json.loads(line)["event"] for line in here.journal().splitlines()] == ["created", "ended"]
    here.backend.problem = None
    await here.create()


async def test_a_session_that_nobody_waits_for_any_more_is_ended(here: FakeSessions) -> None:
    here.backend.held = asyncio.Event()
    creating = asyncio.create_task(here.create())
    async with asyncio.timeout(60):
        while not await here.manager.list(ME):
            await asyncio.sleep(0.01)
    assert [info.state for info in await here.manager.list(ME)] == ["starting"]
    starting = (await here.manager.list(ME))[0].id
    assert await refused(here.cell(starting, "set x 1")) == "session_starting"
    assert await refused(here.manager.end(ME, starting)) == "session_starting"
    assert await refused(here.manager.pause(ME, starting)) == "session_starting"
    assert await refused(here.manager.read(ME, starting, "a", 0, None)) == "session_starting"
    creating.cancel()
    here.backend.held.set()
    await asyncio.gather(creating, return_exceptions=True)
    await until(lambda: '"closed"' in here.journal())
    assert here.manager.live == 0


# ── How many there may be ──


async def test_who_comes_when_it_is_full_waits_and_is_told(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, max_sessions=2, queue_seconds=0.2) as here:
        first, _ = await here.create(), await here.create()
        with pytest.raises(Unavailable, match=r"2 sessions at most .*max_sessions.*close a session") as full:
            await here.create()
        assert full.value.reason_code == "capacity"
        await here.manager.pause(ME, first)
        with pytest.raises(Unavailable):
            await here.create()
    async with fake_sessions(tmp_path / "patient", max_sessions=2, queue_seconds=600) as here:
        first, second = await here.create(), await here.create()
        waiting = asyncio.create_task(here.create())
        await asyncio.sleep(0.05)
        await here.manager.end(ME, first)
        third = await waiting
        assert {info.id for info in await here.manager.list(ME)} == {second, third}


async def test_memory_and_cores_count_together(tmp_path: Path) -> None:
    stay = StaySpec(limits=Limits(memory_bytes=100 * MIB, cpu_cores=1.0))
    async with fake_sessions(tmp_path / "m", max_memory_bytes=250 * MIB, queue_seconds=0.05) as here:
        boxes = [await here.create(stay=stay) for _ in range(2)]
        with pytest.raises(Unavailable, match="250 MiB"):
            await here.create(stay=stay)
        await here.create(stay=StaySpec(limits=Limits(memory_bytes=50 * MIB)))
        with pytest.raises(Unavailable, match="never fits"):
            await here.create(stay=StaySpec(limits=Limits(memory_bytes=300 * MIB)))
        await here.manager.end(ME, boxes[0])
        await here.create(stay=stay)
    async with fake_sessions(tmp_path / "c", max_cores=1.5, queue_seconds=0.05) as here:
        await here.create(stay=stay)
        with pytest.raises(Unavailable, match=r"1\.5 cores"):
            await here.create(stay=stay)


# ── What is written down ──


async def test_the_journal_tells_the_life_of_each_session(here: FakeSessions) -> None:
    box = await here.create(metadata={"for": "tests"})
    await here.cell(box, "set x 1")
    await here.manager.pause(ME, box)
    await here.cell(box, "get x")
    await here.manager.end(ME, box)
    lines = [json.loads(line) for line in here.journal().splitlines()]
    assert [line["event"] for line in lines] == ["created", "paused", "resumed", "ended"]
    assert {line["session"] for line in lines} == {box}
    assert all(line["owner"] == ["t", "me"] and line["at"] for line in lines)
    assert (lines[0]["metadata"], lines[-1]["why"], lines[-1]["step"]) == ({"for": "tests"}, "closed", 2)


async def test_sessions_of_a_keeper_that_died_are_closed_as_such(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path / "a") as here:
        ended, running = await here.create(), await here.create(metadata={"for": "tests"})
        await here.cell(running, "set x 1")
        await here.manager.end(ME, ended)
        (tmp_path / "b").mkdir(mode=0o700)
        # As the file is while the keeper lives, and half a line that it was about to write.
        (tmp_path / "b" / "sessions.jsonl").write_text(here.journal() + '{"event": "ended", "session": "box')
    async with fake_sessions(tmp_path / "b") as here:
        info = await here.manager.info(ME, running)
        assert (info.state, info.why, info.metadata) == ("stopped", "keeper_died", {"for": "tests"})
        assert (await here.manager.info(ME, ended)).why == "closed"
        assert await here.manager.list(ME) == []
        with pytest.raises(Refused, match="the keeper of sessions died") as problem:
            await here.cell(running, "get x")
        assert problem.value.reason_code == "session_stopped"
        assert await refused(here.manager.info(COLLEAGUE, running)) == "unknown_session"
        assert here.journal().count('"ended"') == 2
    async with fake_sessions(tmp_path / "b") as here:
        assert (await here.manager.info(ME, running)).why == "keeper_died"


async def test_a_house_that_closes_ends_its_sessions(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path) as here:
        box = await here.create()
        await here.manager.write(ME, box, "output/a", b"kept")
        running = asyncio.create_task(here.cell(box, "sleep inf"))
        await until(lambda: here.backend.boxes[0].begun)
        await here.manager.close()
        assert (await running).cell.report.ended == "cancelled"
        with pytest.raises(Unavailable, match="being stopped"):
            await here.create()
        again = await SessionManager.open(FakeBackend(), tmp_path, KeeperRules())
        assert (await again.info(ME, box)).why == "killed"
        assert await again.read(ME, box, "output/a", 0, None) == b"kept"
        await again.close()


async def test_one_keeper_at_a_time_has_the_place(here: FakeSessions) -> None:
    with pytest.raises(Unavailable, match="another keeper") as problem:
        await SessionManager.open(FakeBackend(), here.folder, KeeperRules())
    assert problem.value.reason_code == "in_use"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreError):
        await SessionManager.open(FakeBackend(), tmp_path / "closed" / "state", KeeperRules())
