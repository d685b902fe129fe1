"""Room for sessions: as many as the host bears, and the others in line."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.core.box import Limits
from ringfence.core.errors import Unavailable
from ringfence.sandbox.sessions.capacity import MAX_WAITING, Capacity, KeeperRules

pytestmark = pytest.mark.anyio


async def test_first_come_first_served_however_large() -> None:
    room = Capacity(KeeperRules(max_memory_bytes=10, queue_seconds=600))
    small, large = Limits(memory_bytes=4), Limits(memory_bytes=8)
    await room.enter("a", small)
    await room.enter("b", small)
    order: list[str] = []

    async def come(name: str, limits: Limits) -> None:
        await room.enter(name, limits)
        order.append(name)

    coming = [asyncio.create_task(come("large", large)), asyncio.create_task(come("small", small))]
    await asyncio.sleep(0.01)
    room.leave("a")
    await asyncio.sleep(0.01)
    assert order == []  # the small one would fit, and is not first
    room.leave("b")
    await asyncio.sleep(0.01)
    assert order == ["large"]
    room.leave("large")
    await asyncio.gather(*coming)
    assert order == ["large", "small"]


async def test_who_gives_up_makes_room_for_the_next() -> None:
    room = Capacity(KeeperRules(max_sessions=1, queue_seconds=0.1))
    await room.enter("a", Limits())
    gone = asyncio.create_task(room.enter("b", Limits()))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    with pytest.raises(Unavailable, match=r"within 0\.1 s"):
        await room.enter("c", Limits())
    waiting = asyncio.create_task(room.enter("d", Limits()))
    await asyncio.sleep(0)
    room.leave("a")
    # Admitted and cancelled in the same moment: the room is not lost.
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await room.enter("e", Limits())
    room.leave("never")
    room.leave("e")
    await room.enter("f", Limits())


async def test_the_line_is_not_endless() -> None:
    room = Capacity(KeeperRules(max_sessions=1, queue_seconds=600))
    await room.enter("a", Limits())
    waiting = [asyncio.create_task(room.enter(f"b{n}", Limits())) for n in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="max_sessions"):
        await room.enter("c", Limits())
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    room.leave("a")
    await room.enter("c", Limits())
