"""The life of a session: pauses, and clocks that stand still meanwhile. The boxes are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from ringfence.errors import Refused
from tests import tooling
from tests.sandbox.lodging import ME, Lodging, lodging, pieces, refused, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Lodging]:
    async with lodging(tmp_path / "state") as made:
        yield made


# ── Pausing ──


async def test_a_paused_session_stands_still_and_goes_on_where_it_was(here: Lodging) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep inf\nset x 1"))
    await until(lambda: here.backend.boxes[0].begun)
    info = await here.house.pause(ME, box)
    assert (info.state, info.expires_at is None) == ("paused", False)
    here.backend.boxes[0].enough.set()
    await asyncio.sleep(0.3)
    assert not running.done()
    assert (await here.house.pause(ME, box)).state == "paused"
    assert (await here.house.resume(ME, box)).expires_at is not None
    assert (await running).cell.report.ended == "exited"
    assert await here.got(box, "x") == "1"
    assert (await here.house.resume(ME, box)).state == "running"


async def test_what_must_run_resumes_a_paused_session_and_what_looks_does_not(here: Lodging) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    process = await here.start(box, "say", "hello")
    await here.house.wait(ME, box, process, None)
    await here.house.write(ME, box, "a", b"text")
    await here.house.pause(ME, box)
    assert await here.house.read(ME, box, "a", 0, None) == b"text"
    assert (await here.house.stat(ME, box, "a")).bytes == 4
    assert "/workspace/a" in {entry.path for entry in await here.house.entries(ME, box, "/workspace", 1)}
    assert (await here.house.logs(ME, box, process, 0, 0)).stdout == b"hello"
    assert len(await here.house.processes(ME, box)) == 1
    assert (await here.house.state_of(ME, box))[0] == 2
    assert (await here.house.wait(ME, box, process, 0)).running is False
    assert await here.house.interrupt(ME, box) is False
    assert [piece async for piece in here.house.pack(ME, box, ".")]
    await here.house.snapshot(ME, box)
    assert await here.state(box) == "paused"
    for use in (
        lambda: here.cell(box, "get x"),
        lambda: here.command(box, "say"),
        lambda: here.start(box, "say"),
        lambda: here.house.write(ME, box, "b", b""),
        lambda: here.house.copy(ME, box, "a", box, "c"),
        lambda: here.house.remove(ME, box, "b"),
        lambda: here.house.rename(ME, box, "a", "d"),
        lambda: here.house.make_dir(ME, box, "e"),
    ):
        await here.house.pause(ME, box)
        await use()
        assert await here.state(box) == "running"
    assert await here.got(box, "x") == "1"


async def test_a_session_that_is_not_to_resume_by_itself_refuses_until_it_is_resumed(here: Lodging) -> None:
    box = await here.create(auto_resume=False)
    process = await here.start(box, "cat", stdin=None)
    await here.house.pause(ME, box)
    assert await refused(here.cell(box, "set x 1")) == "session_paused"
    assert await refused(here.command(box, "say")) == "session_paused"
    assert await refused(here.house.write(ME, box, "a", b"")) == "session_paused"
    assert await refused(here.house.send(ME, box, process, b"")) == "session_paused"
    assert await refused(here.house.signal(ME, box, process, 9)) == "session_paused"
    assert await refused(here.house.unpack(ME, box, ".", pieces())) == "session_paused"
    await here.house.resume(ME, box)
    await here.cell(box, "set x 1")


async def test_fifty_pauses_lose_nothing(here: Lodging) -> None:
    box = await here.create()
    for number in range(50):
        await here.cell(box, f"set v{number} {number}")
        await here.house.write(ME, box, f"f{number}", str(number).encode())
        await here.house.pause(ME, box)
    for number in range(50):
        assert await here.got(box, f"v{number}") == str(number)
        assert await here.house.read(ME, box, f"f{number}", 0, None) == str(number).encode()
    await here.house.end(ME, box)
    assert (here.journal().count('"paused"'), here.journal().count('"resumed"')) == (50, 50)


async def test_two_who_pause_at_once_pause_once(here: Lodging) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    pauses = [here.house.pause(ME, box) for _ in range(5)]
    assert {info.state for info in await asyncio.gather(*pauses)} == {"paused"}
    await here.house.resume(ME, box)
    await until(lambda: '"resumed"' in here.journal())
    assert here.journal().count('"paused"') == 1
    assert await here.state(box) == "running"


async def test_a_caller_who_gives_up_leaves_no_half_pause(here: Lodging) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    pausing = asyncio.create_task(here.house.pause(ME, box))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    await until(lambda: here.backend.boxes[0].paused)
    assert await here.got(box, "x") == "1"


# ── Clocks ──


async def test_an_idle_session_is_paused_and_a_busy_one_is_not(here: Lodging) -> None:
    idle = await here.create(idle_seconds=0.1)
    busy = await here.create(idle_seconds=0.1)
    working = await here.create(idle_seconds=0.1)
    never = await here.create(idle_seconds=None)
    process = await here.start(working, "sleep", "inf")
    cell = asyncio.create_task(here.cell(busy, "sleep inf"))
    await here.becomes(idle, "paused")
    await asyncio.sleep(0.3)
    # The others may have been idle at first; from now on they are at work.
    for box in (busy, working):
        await here.house.resume(ME, box)
    await asyncio.sleep(0.3)
    assert [await here.state(box) for box in (idle, busy, working, never)] == [
        "paused",
        "running",
        "running",
        "running",
    ]
    for each in here.backend.boxes:
        each.enough.set()
    await cell
    await here.house.wait(ME, working, process, None)
    for box in (busy, working):
        await here.becomes(box, "paused")
    assert await here.state(never) == "running"
    resumed = here.journal().count('"resumed"')
    await here.cell(idle, "set x 1")
    await until(lambda: here.journal().count('"resumed"') > resumed)
    await here.becomes(idle, "paused")


async def test_use_puts_the_idle_clock_back(here: Lodging) -> None:
    box = await here.create(idle_seconds=60)
    life = here.house._rooms.own(ME, box).life
    for use in (True, True, False):
        life.in_use.last -= 60  # as if nobody had come for so long
        if use:
            await here.house.entries(ME, box, ".", 1)
        assert life._idle is not None
        life._idle.cancel()
        life._look()  # as when its time is up
        assert (life._idle is not None) == use, "it is looked at again later, or paused"
    await here.becomes(box, "paused")


async def test_a_session_ends_when_its_lifetime_is_over(here: Lodging) -> None:
    for seconds in tooling.LONGER:  # one that was over before the cell began has refused it
        box = await here.create(lifetime_seconds=seconds, idle_seconds=None)
        running = asyncio.create_task(here.cell(box, "sleep inf"))
        await asyncio.wait({running})
        if running.exception() is None:
            break
    assert (await running).cell.report.ended == "cancelled"
    await here.becomes(box, "stopped")
    info = await here.house.info(ME, box)
    assert (info.state, info.why, info.expires_at) == ("stopped", "lifetime", None)
    assert info.ended_at is not None
    with pytest.raises(Refused, match=f"session {box} was stopped at .*: its lifetime was over"):
        await here.cell(box, "set x 1")


async def test_the_lifetime_stands_still_while_it_is_paused(here: Lodging) -> None:
    for seconds in tooling.LONGER:
        box = await here.create(lifetime_seconds=seconds)
        with suppress(Refused):  # it was over before it was paused
            await here.house.pause(ME, box)
            break
    await asyncio.sleep(2 * seconds)
    assert await here.state(box) == "paused"
    assert (await here.house.resume(ME, box)).state == "running"
    await here.becomes(box, "stopped")


async def test_a_session_that_nobody_resumes_is_closed(tmp_path: Path) -> None:
    for number, seconds in enumerate(tooling.LONGER):
        async with lodging(tmp_path / f"state{number}", paused_seconds=seconds) as here:
            box, other = await here.create(), await here.create()
            await here.house.pause(ME, other)
            with suppress(Refused):  # it was resumed too late
                await here.house.resume(ME, other)
                await here.house.pause(ME, box)
                await here.becomes(box, "stopped")
                await asyncio.sleep(seconds)
                assert (await here.house.info(ME, box)).why == "lifetime"
                assert await here.state(other) == "running"
                return
    pytest.fail("it was closed at once")


async def test_a_lifetime_can_be_given_anew(here: Lodging) -> None:
    for seconds in tooling.LONGER:
        box = await here.create(lifetime_seconds=seconds)
        before = (await here.house.info(ME, box)).expires_at
        with suppress(Refused):  # it was over before
            after = (await here.house.extend(ME, box, 600.0)).expires_at
            break
    assert before is not None and after is not None and after > before
    await asyncio.sleep(2 * seconds)
    assert await here.state(box) == "running"
    assert await refused(here.house.extend(ME, box, 0)) == "bad_spec"
    await here.house.extend(ME, box, 0.05)
    await here.becomes(box, "stopped")
