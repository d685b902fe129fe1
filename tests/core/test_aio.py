"""What is put off happens once: when that is over which it waited for, or after a moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from ringfence.core import aio
from tests import tooling
from tests.sandbox.process.test_pulse import Timers

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_one_party_has_a_few_threads_and_its_turns_end_with_its_work() -> None:
    few = aio.FewThreads()
    go = threading.Event()
    begun: list[int] = []

    def prepared(number: int) -> Callable[[], int]:
        begun.append(number)
        return lambda: number if go.wait(60) else -1

    def refused() -> Callable[[], int]:
        raise ValueError

    working = [asyncio.ensure_future(few.do(partial(prepared, number))) for number in range(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    working[0].cancel()
    working[2].cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == [0, 1], "what was given up and goes on has its turn"
    go.set()
    assert (await working[1], await working[3]) == (1, 3)
    for _ in range(3):
        with pytest.raises(ValueError):
            await few.do(refused)
    assert await few.do(partial(prepared, 4)) == 4


async def test_at_once_where_there_is_nothing_to_wait_for() -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    acted: list[str] = []
    aio.call_when_done(None, lambda: acted.append("nothing"))
    aio.call_when_done(done, lambda: acted.append("done"))
    assert acted == ["nothing", "done"]


async def test_when_it_is_done_and_not_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    put_off: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()

    def call_later(_: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        put_off.append(call)
        return loop.call_at(loop.time() + 600, call)

    monkeypatch.setattr(loop, "call_later", call_later)
    after: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acted: list[int] = []
    aio.call_when_done(after, lambda: acted.append(1))
    await asyncio.sleep(0)
    assert acted == []
    after.set_result(None)
    await asyncio.sleep(0)
    assert acted == [1]
    put_off[0]()  # as when the moment is over
    assert acted == [1]


async def test_after_a_moment_and_not_again_when_it_is_done() -> None:
    after: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acted: list[int] = []
    aio.call_when_done(after, lambda: acted.append(1))
    await tooling.until(lambda: acted)
    after.cancel()
    await asyncio.sleep(0.02)
    assert acted == [1]


def test_a_clock_that_stands_does_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: timers)
    monkeypatch.setattr(aio, "time", timers)
    rung: list[bool] = []
    clock = aio.PausableTimer(0.1, lambda: rung.append(True))
    timers.pass_(0.15)
    assert clock.left == 0.1
    clock.start()
    clock.start()
    timers.pass_(0.06)
    clock.stop()
    left = clock.left
    assert left == pytest.approx(0.04)
    timers.pass_(0.1)
    assert (clock.left, rung) == (left, [])
    clock.start()
    timers.pass_(0.1)
    assert rung == [True]
    clock.set(0.02)
    timers.pass_(0.05)
    assert rung == [True, True]
    clock.stop()
    clock.set(0.01)
    timers.pass_(0.03)
    assert rung == [True, True]
    clock.start()
    clock.cancel()
    clock.start()
    timers.pass_(0.03)
    assert rung == [True, True]
