"""Locks, and work that outlives its caller."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.core.errors import Refused
from ringfence.sandbox.sessions.concurrency import BoundedLock, DetachedTasks, SharedLock

pytestmark = pytest.mark.anyio


async def test_turns_come_in_order_and_the_line_is_limited() -> None:
    turn, order = BoundedLock(2, "the tests"), list[int]()

    async def one(number: int) -> None:
        async with turn:
            await asyncio.sleep(0.01)
            order.append(number)

    assert turn.idle
    waiting = [asyncio.create_task(one(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert not turn.idle
    with pytest.raises(Refused, match="2 cells wait for the tests already"):
        await one(3)
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [0, 2]
    assert turn.idle


async def test_one_alone_waits_for_all_others_and_they_for_it() -> None:
    gate, log = SharedLock(), list[str]()

    async def together(name: str) -> None:
        async with gate.shared():
            log.append(f"{name} in")
            await asyncio.sleep(0.02)
            log.append(f"{name} out")

    async def alone() -> None:
        async with gate.exclusive():
            log.append("alone in")
            await asyncio.sleep(0.02)
            log.append("alone out")

    first = [asyncio.create_task(together(name)) for name in "ab"]
    await asyncio.sleep(0)
    middle = asyncio.create_task(alone())
    await asyncio.sleep(0)
    last = asyncio.create_task(together("c"))
    await asyncio.gather(*first, middle, last)
    assert log[:2] == ["a in", "b in"]
    assert log[4:] == ["alone in", "alone out", "c in", "c out"]


async def test_who_gives_up_waiting_to_be_alone_holds_nobody_up() -> None:
    gate = SharedLock()
    async with gate.shared():
        waiting = asyncio.create_task(_alone(gate))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(60), gate.shared():
            pass
    async with asyncio.timeout(60), gate.exclusive():
        pass


async def _alone(gate: SharedLock) -> None:
    async with gate.exclusive():
        pass


async def test_work_goes_on_without_those_who_asked_for_it() -> None:
    tasks, done = DetachedTasks(), list[str]()

    async def work() -> str:
        await asyncio.sleep(0.02)
        done.append("done")
        raise RuntimeError("which nobody hears of")

    asking = asyncio.create_task(tasks.run(work()))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await tasks.join()
    assert done == ["done"]
    with pytest.raises(RuntimeError):
        await tasks.run(work())
