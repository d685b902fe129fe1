"""Work that blocks, done in threads, for callers who do not.

A thread cannot be called back. So what was begun here goes on to its end when its caller is gone, with descriptors of
its own: none is closed, and its number given to another file, while a thread still uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ringfence.sandbox.waiting import shielded

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Cancelling does not keep it from being done."""
    return await _shielded(asyncio.get_running_loop().run_in_executor(None, work))


async def pieces_of(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """What an iterator gives, each piece made in a thread; none is held while nobody asks."""
    loop = asyncio.get_running_loop()
    working: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            working = loop.run_in_executor(None, next, pieces, None)
            piece = await _shielded(working)
            if piece is None:
                return
            yield piece
    finally:
        if working is not None:
            await asyncio.wait((working,))
        if isinstance(pieces, Generator):
            await in_thread(pieces.close)


async def fed(stream: AsyncIterator[bytes], work: Callable[[Iterator[bytes]], T]) -> T:
    """Work that takes bytes as they come. Cancelling ends it, and waits until it is ended."""
    feed = _Feed(stream)
    # Of its own: who sends slowly would keep others from theirs.
    pool = ThreadPoolExecutor(1, "feed")
    working = asyncio.get_running_loop().run_in_executor(pool, work, feed)
    try:
        return await _shielded(working)
    except asyncio.CancelledError:
        feed.stop()
        await asyncio.wait((working,))
        raise
    finally:
        pool.shutdown(wait=False)


async def _shielded(working: asyncio.Future[T]) -> T:
    working.add_done_callback(_seen)
    return await shielded(working)


def _seen(done: asyncio.Future[T]) -> None:
    if not done.cancelled():
        done.exception()


class _Feed(Iterator[bytes]):
    """For the thread an iterator that waits; what it waits for happens in the loop."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self._waiting: asyncio.Task[bytes | None] | None = None

    def __next__(self) -> bytes:
        piece = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
        if piece is None:
            raise StopIteration
        return piece

    async def _next(self) -> bytes | None:
        if self._stopped:
            raise BrokenPipeError("nobody sends any more")
        self._waiting = asyncio.ensure_future(_piece(self._stream))
        try:
            return await self._waiting
        except asyncio.CancelledError:
            raise BrokenPipeError("nobody sends any more") from None

    def stop(self) -> None:
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()


async def _piece(stream: AsyncIterator[bytes]) -> bytes | None:
    return await anext(stream, None)
