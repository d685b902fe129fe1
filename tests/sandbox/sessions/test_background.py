"""Commands of a session that run in the background. The boxes are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.core.box import Limits, Stream
from ringfence.core.errors import OutcomeUnknown, Unavailable
from ringfence.core.sessions import StaySpec
from ringfence.sandbox.sessions.background import MAX_KEPT, MAX_RUNNING
from tests.sandbox.fake_sessions import ME, TICK, FakeSessions, fake_sessions, refused

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[FakeSessions]:
    async with fake_sessions(tmp_path / "state") as made:
        yield made


# ── Commands in the background ──


async def test_a_background_command_is_listed_waited_for_and_read(here: FakeSessions) -> None:
    box = await here.create()
    talking, sleeping = await here.start(box, "say", "hello"), await here.start(box, "sleep", "inf")
    assert (await here.manager.wait(ME, box, sleeping, 0.01)).running
    here.backend.boxes[0].enough.set()
    over = await here.manager.wait(ME, box, sleeping, None)
    assert not over.running and over.report is not None and over.report.exit_status == 0
    assert [(info.process, info.argv, info.running) for info in await here.manager.processes(ME, box)] == [
        (talking, ("say", "hello"), False),
        (sleeping, ("sleep", "inf"), False),
    ]
    logs = await here.manager.logs(ME, box, talking, 0, 0)
    assert (logs.stdout, logs.stdout_at, logs.running) == (b"hello", 5, False)
    assert (await here.manager.logs(ME, box, talking, 3, 0)).stdout == b"lo"
    assert (await here.manager.logs(ME, box, talking, 5, 7)).stdout == b""
    assert await refused(here.manager.logs(ME, box, 99, 0, 0)) == "unknown_process"
    assert (await here.manager.info(ME, box)).step == 2


async def test_a_background_command_takes_input_and_signals(here: FakeSessions) -> None:
    box = await here.create()
    process = await here.start(box, "cat", stdin=None, pty=(80, 24))
    heard: list[tuple[Stream, bytes]] = []
    await here.manager.send(ME, box, process, b"before ")
    following = asyncio.create_task(
        here.manager.follow(ME, box, process, (3, 0), lambda s, data: heard.append((s, data)))
    )
    await asyncio.sleep(TICK)
    await here.manager.resize(ME, box, process, 100, 50)
    await asyncio.gather(here.manager.send(ME, box, process, b"one "), here.manager.send(ME, box, process, b"two"))
    await here.manager.send(ME, box, process, b"", eof=True)
    assert (await following).running is False
    assert b"".join(data for _, data in heard) == b"ore one two"
    with pytest.raises(Unavailable, match="takes no input"):
        await here.manager.send(ME, box, process, b"late")
    again: list[bytes] = []
    await here.manager.follow(ME, box, process, (0, 0), lambda _, data: again.append(data))
    assert b"".join(again) == b"before one two"
    killed = await here.start(box, "sleep", "inf")
    assert await refused(here.manager.signal(ME, box, killed, 99)) == "bad_signal"
    assert await refused(here.manager.resize(ME, box, killed, 0, 1)) == "bad_size"
    await here.manager.signal(ME, box, killed, 9)
    over = await here.manager.wait(ME, box, killed, None)
    assert over.report is not None and over.report.signal == 9
    await here.manager.signal(ME, box, killed, 9)


async def test_a_background_command_may_run_as_long_as_the_session(here: FakeSessions) -> None:
    box = await here.create(stay=StaySpec(limits=Limits(wall_seconds=0.05)))
    process = await here.start(box, "sleep", "0.2")
    over = await here.manager.wait(ME, box, process, None)
    assert over.report is not None and over.report.ended == "exited"
    told = await here.start(box, "sleep", "inf", limits=Limits(wall_seconds=0.05))
    over = await here.manager.wait(ME, box, told, None)
    assert over.report is not None and over.report.ended == "timeout"


async def test_background_commands_are_limited_and_old_ones_forgotten(here: FakeSessions) -> None:
    box = await here.create()
    await asyncio.gather(*(here.start(box, "sleep", "inf") for _ in range(MAX_RUNNING)))
    assert await refused(here.start(box, "say")) == "too_many"
    here.backend.boxes[0].enough.set()
    for info in await here.manager.processes(ME, box):
        await here.manager.wait(ME, box, info.process, None)
    for _ in range(MAX_KEPT):
        await here.manager.wait(ME, box, await here.start(box, "say"), None)
    assert len(await here.manager.processes(ME, box)) <= MAX_KEPT + 1


async def test_waiting_for_a_command_does_not_end_it(here: FakeSessions) -> None:
    box = await here.create()
    process = await here.start(box, "sleep", "0.2")
    waiting = asyncio.create_task(here.manager.wait(ME, box, process, None))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await here.manager.wait(ME, box, process, None)).report is not None


async def test_the_end_of_a_session_is_the_end_of_its_commands(here: FakeSessions) -> None:
    box = await here.create()
    process = await here.start(box, "sleep", "inf")
    waiting = asyncio.create_task(here.manager.wait(ME, box, process, None))
    await asyncio.sleep(0.02)
    await here.manager.end(ME, box)
    assert (await waiting).report is not None


async def test_input_that_was_taken_in_part_may_have_been_acted_upon(
    here: FakeSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await here.create()
    process = await here.start(box, "cat", stdin=None)
    running = here.manager.get(ME, box)._background.get(process).running
    taken = iter((4,))

    def send(data: bytes) -> int:
        if (count := next(taken, None)) is None:
            raise Unavailable("no_input", "the command takes no more input")
        return count

    monkeypatch.setattr(type(running), "send", lambda self, data: send(data))
    with pytest.raises(OutcomeUnknown, match="4 bytes"):
        await here.manager.send(ME, box, process, b"echo > there; exit\n")
    with pytest.raises(Unavailable, match="no more input"):
        await here.manager.send(ME, box, process, b"none of it")
