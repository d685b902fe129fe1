"""What is put off happens once: when that is over which it waited for, or after a moment."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.sandbox import waiting

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_at_once_where_there_is_nothing_to_wait_for() -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    acted: list[str] = []
    waiting.when(None, lambda: acted.append("nothing"))
    waiting.when(done, lambda: acted.append("done"))
    assert acted == ["nothing", "done"]


async def test_when_it_is_done_and_not_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOMENT", 0.05)
    after: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acted: list[int] = []
    waiting.when(after, lambda: acted.append(1))
    await asyncio.sleep(0)
    assert acted == []
    after.set_result(None)
    await asyncio.sleep(0)
    assert acted == [1]
    await asyncio.sleep(0.1)
    assert acted == [1]


async def test_after_a_moment_and_not_again_when_it_is_done() -> None:
    after: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acted: list[int] = []
    waiting.when(after, lambda: acted.append(1))
    async with asyncio.timeout(5):
        while not acted:
            await asyncio.sleep(0.001)
    after.cancel()
    await asyncio.sleep(0.02)
    assert acted == [1]
