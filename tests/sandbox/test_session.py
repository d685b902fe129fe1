"""A session: its steps, its contexts, its end. The boxes are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.box import Limits
from ringfence.errors import Refused
from ringfence.sandbox.contexts import MOST_CONTEXTS, MOST_WAITING
from ringfence.sessions import CellRequest, CommandRequest
from tests.sandbox.lodging import ME, TICK, Lodging, lodging, refused, unheard, unseen, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Lodging]:
    async with lodging(tmp_path / "state") as made:
        yield made


# ── Steps ──


async def test_steps_are_numbered_and_keep_their_state(here: Lodging) -> None:
    box = await here.create()
    first = await here.cell(box, "set x 1")
    assert (first.session, first.step, first.context, first.fresh, first.state) == (box, 1, "default", True, "running")
    assert await here.got(box, "x") == "1"
    command = await here.command(box, "say", "hello")
    assert (command.step, command.context, command.cell.report.stdout.head) == (3, None, b"hello")
    info = await here.house.info(ME, box)
    assert (info.step, info.contexts, info.state, info.memory_bytes) == (3, ("default",), "running", 1000)


async def test_contexts_have_variables_of_their_own(here: Lodging) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    await here.cell(box, "set x 2", context="other")
    assert (await here.got(box, "x"), await here.got(box, "x", context="other")) == ("1", "2")
    assert (await here.house.info(ME, box)).contexts == ("default", "other")
    assert await refused(here.cell(box, "set x 1", context="../x")) == "bad_context"
    for number in range(MOST_CONTEXTS - 2):
        await here.cell(box, "set x 1", context=f"c{number}")
    assert await refused(here.cell(box, "set x 1", context="onemore")) == "too_many"


async def test_cells_of_a_context_come_one_after_another(here: Lodging) -> None:
    box = await here.create()
    order: list[int] = []

    async def one(number: int) -> None:
        report = await here.cell(box, f"sleep 0.01\nset last {number}")
        order.append(number)
        assert report.step == number + 1

    await asyncio.gather(*(one(number) for number in range(8)))
    assert order == list(range(8))
    assert await here.got(box, "last") == "7"


async def test_contexts_do_not_wait_for_each_other(here: Lodging) -> None:
    box = await here.create()
    long = asyncio.create_task(here.cell(box, "sleep inf"))
    await until(lambda: here.backend.boxes[0].begun)
    await here.cell(box, "set x 1", context="other")
    assert not long.done()
    await here.house.end(ME, box)
    assert (await long).cell.report.ended == "cancelled"


async def test_too_many_cells_in_line_are_refused(here: Lodging) -> None:
    box = await here.create()
    waiting = [asyncio.create_task(here.cell(box, "sleep inf")) for _ in range(MOST_WAITING + 1)]
    contexts = here.house._rooms.own(ME, box).contexts._contexts
    await until(lambda: "default" in contexts and contexts["default"].turn._inside == MOST_WAITING + 1)
    assert await refused(here.cell(box, "set x 1")) == "busy"
    await here.cell(box, "set x 1", context="other")
    await here.house.end(ME, box)
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [end.reason_code for end in ends if isinstance(end, Refused)] == ["session_stopped"] * MOST_WAITING


async def test_a_step_runs_only_after_the_step_that_it_was_meant_for(here: Lodging) -> None:
    box = await here.create()
    await here.cell(box, "set x 1", after_step=0)
    assert await refused(here.cell(box, "set x 2", after_step=0)) == "session_changed"
    assert await refused(here.house.command(ME, box, CommandRequest(("say",), after_step=0), unheard)) == (
        "session_changed"
    )
    # What is in line before it counts: the turn decides, not the moment of asking.
    first, second = here.cell(box, "sleep 0.02", after_step=1), here.cell(box, "set x 3", after_step=1)
    ends = await asyncio.gather(first, second, return_exceptions=True)
    assert [isinstance(end, Refused) for end in ends] == [False, True]
    assert await here.got(box, "x") == "1"


async def test_an_interrupt_keeps_the_state(here: Lodging) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    assert await here.house.interrupt(ME, box) is False
    running = asyncio.create_task(here.cell(box, "sleep inf"))
    while not await here.house.interrupt(ME, box):
        await asyncio.sleep(TICK)
    report = (await running).cell
    assert report.error is not None and report.error.name == "KeyboardInterrupt" and report.alive
    assert await here.got(box, "x") == "1"
    assert await here.house.interrupt(ME, box, "never") is False


async def test_a_dead_interpreter_is_told_and_replaced(here: Lodging) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    died = await here.cell(box, "die")
    assert (died.cell.alive, died.cell.report.ended, died.state) == (False, "signalled", "running")
    again = await here.cell(box, "get x")
    assert (again.cell.alive, again.fresh, again.cell.results[0].data["text/plain"]) == (True, True, "nothing")


async def test_a_run_timeout_stops_the_work_and_not_the_session(here: Lodging) -> None:
    box = await here.create()
    report = await here.cell(box, "sleep inf", limits=Limits(wall_seconds=0.05))
    assert (report.cell.report.ended, report.state) == ("timeout", "running")


async def test_source_that_is_no_text_is_refused(here: Lodging) -> None:
    box = await here.create()
    assert await refused(here.cell(box, "set x \ud800")) == "bad_source"
    assert await refused(here.command(box)) == "bad_command"
    assert (await here.house.info(ME, box)).step == 0


async def test_a_command_whose_caller_is_gone_is_killed(here: Lodging) -> None:
    box = await here.create()
    running = asyncio.create_task(here.command(box, "sleep", "inf"))
    await until(lambda: here.backend.boxes[0].begun)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await here.command(box, "say", "on")).step == 2


# ── The end ──


async def test_a_session_ends_once(here: Lodging) -> None:
    box = await here.create()
    ends = await asyncio.gather(*(here.house.end(ME, box) for _ in range(5)))
    assert len({(info.ended_at, info.why) for info in ends}) == 1
    assert await here.house.end(ME, box) == await here.house.info(ME, box)
    assert here.journal().count('"ended"') == 1
    assert await refused(here.house.pause(ME, box)) == "session_stopped"
    assert await refused(here.house.resume(ME, box)) == "session_stopped"
    assert await refused(here.house.extend(ME, box, 1.0)) == "session_stopped"


async def test_the_death_of_a_box_is_noticed(here: Lodging) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep inf"))
    await until(lambda: here.backend.boxes[0].begun)
    here.backend.boxes[0].die("the zygote died")
    report = await running
    assert (report.cell.report.ended, report.cell.alive) == ("infra", False)
    await until(lambda: "the zygote died" in here.journal())
    info = await here.house.info(ME, box)
    assert (info.state, info.why) == ("stopped", "box_died")


async def test_the_end_comes_before_what_waits_for_a_turn(here: Lodging) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep inf"))
    waiting = asyncio.create_task(here.house.run(ME, box, CellRequest("set x 1"), unheard, unseen))
    await until(lambda: here.backend.boxes[0].begun)
    await here.house.end(ME, box)
    assert (await running).state == "stopped"
    assert await refused(waiting) == "session_stopped"
