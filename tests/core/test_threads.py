"""Work in threads: it is done when it was begun, and ends when its bytes do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from ringfence.core.aio import FairThreads, fed, in_thread, pieces_of
from tests import tooling

pytestmark = pytest.mark.anyio


async def test_work_that_was_begun_is_done() -> None:
    done = threading.Event()

    def work() -> None:
        time.sleep(0.05)
        done.set()
        raise ValueError("which nobody hears of")

    asking = asyncio.create_task(in_thread(work))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await in_thread(lambda: done.wait(60))
    with pytest.raises(ValueError, match="nobody"):
        await in_thread(work)


async def test_fair_threads_do_one_thing_at_a_time_for_each_party_and_take_no_other_threads() -> None:
    threads, go = FairThreads(2), threading.Event()
    running: list[str] = []

    def work(whose: str) -> None:
        running.append(whose)
        go.wait(30)

    tasks = [asyncio.create_task(threads.do("loud", lambda: work("loud"))) for _ in range(20)]
    tasks.append(asyncio.create_task(threads.do("quiet", lambda: work("quiet"))))
    while len(running) < 2:
        await asyncio.sleep(0.01)
    for task in tasks[:10]:
        task.cancel()
    assert await asyncio.wait_for(in_thread(lambda: "done"), 20) == "done"
    assert sorted(running) == ["loud", "quiet"], "one that was cancelled keeps its turn until it is done"
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(running) == ["loud"] * 11 + ["quiet"]


class Source:
    """A generator that knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False
        self.begun = threading.Event()

    def pieces(self, hold: threading.Event | None = None) -> Iterator[bytes]:
        try:
            for number in range(5):
                self.begun.set()
                if hold is not None:
                    hold.wait(60)
                yield str(number).encode()
        finally:
            self.closed = True


async def test_pieces_come_one_by_one_and_the_source_is_closed() -> None:
    source = Source()
    assert b"".join([piece async for piece in pieces_of(source.pieces())]) == b"01234"
    assert source.closed
    source = Source()
    pieces = pieces_of(source.pieces())
    assert await anext(pieces) == b"0"
    await pieces.aclose()
    assert source.closed
    assert [piece async for piece in pieces_of(iter([b"a", b"b"]))] == [b"a", b"b"]


async def test_a_source_is_closed_when_its_reader_is_cancelled_while_it_works() -> None:
    source, hold = Source(), threading.Event()
    pieces = pieces_of(source.pieces(hold))
    reading = asyncio.ensure_future(anext(pieces))
    await tooling.until(source.begun.is_set)
    reading.cancel()
    asyncio.get_running_loop().call_later(0.05, hold.set)
    with pytest.raises(asyncio.CancelledError):
        await reading
    await pieces.aclose()
    assert source.closed


async def _stream(*pieces: bytes, then: float = 0.0) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    await asyncio.sleep(then)


async def test_a_thread_is_fed() -> None:
    assert await fed(_stream(b"a", b"b", b"c"), lambda pieces: b"".join(pieces)) == b"abc"
    assert await fed(_stream(b"a", b"b", then=600), lambda pieces: next(pieces)) == b"a"

    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        await fed(broken(), lambda pieces: b"".join(pieces))


async def test_a_thread_that_waits_for_more_ends_with_its_caller() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(pieces: Iterator[bytes]) -> bytes:
        begun.set()
        try:
            return b"".join(pieces)
        finally:
            ended.set()

    feeding = asyncio.create_task(fed(_stream(b"a", then=600), work))
    await tooling.until(begun.is_set)
    feeding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await feeding
    assert ended.is_set()
    before = threading.active_count()
    await asyncio.sleep(0.05)
    assert threading.active_count() <= before
