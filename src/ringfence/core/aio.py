"""Asynchronous helpers: work that must be finished although its caller was cancelled, and work done in threads."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

MOMENT = 0.004
"""Seconds: work that is over by then was short, and its caller would have felt what was done beside it."""


def new_loop() -> asyncio.AbstractEventLoop:
    """The faster one where it is installed; it is worth a tenth of a run."""
    try:
        return importlib.import_module("uvloop").new_event_loop()  # type: ignore[no-any-return]
    except ImportError:
        return asyncio.new_event_loop()


def begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has done already what it can do without waiting; each turn of the loop that it need not wait for
    saves a look at every descriptor."""
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.get_running_loop().create_task(work)


async def shielded(work: asyncio.Future[T]) -> T:
    """Wait for work that goes on although its caller may give up.

    So does `asyncio.shield`; from Python 3.14 on it also complains of what fails when no caller waits for it any more,
    which is what a box does that is no longer wanted.
    """
    if not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            work.add_done_callback(_look_at)
            raise
    return work.result()


def _look_at(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()


async def to_the_end(running: Coroutine[Any, Any, T]) -> T:
    """Work is cancelled once, and then has the time that it takes to remove its box."""
    task = begun(running)
    over = asyncio.Event()
    if task.done():
        return task.result()
    task.add_done_callback(lambda _: over.set())
    try:
        await over.wait()  # and not for the task itself, which would be cancelled with us, as often as we are
    except asyncio.CancelledError:
        task.cancel()
        await finished(_over(task))
        if not task.cancelled():
            task.exception()  # looked at; whatever it was, the caller has gone
        raise
    return task.result()


async def _over(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Do work to its end, however often its caller is cancelled meanwhile; the caller is told after it."""
    task = begun(work)
    given_up: asyncio.CancelledError | None = None
    with shield():
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError as exc:
                given_up = exc
    if given_up is not None:
        _look_at(task)
        raise given_up
    return task.result()


def leave(cancelled: asyncio.CancelledError, seen: object) -> None:
    """Let who catches it know what was seen of the work until it was gone, since what is cancelled returns nothing."""
    cancelled.__dict__["seen"] = seen


def left(cancelled: asyncio.CancelledError, kind: type[T]) -> T | None:
    """What was left with it, where that is of this kind."""
    seen = cancelled.__dict__.get("seen")
    return seen if isinstance(seen, kind) else None


def shield() -> AbstractContextManager[object]:
    """No scope of anyio that is cancelled disturbs what is awaited in here.

    Where nobody has loaded anyio there is no such scope; a single run then does not wait for it to be loaded.
    """
    if "anyio" not in sys.modules:
        return nullcontext()
    return importlib.import_module("anyio").CancelScope(shield=True)  # type: ignore[no-any-return]


def call_when_done(after: asyncio.Future[Any] | None, act: Callable[[], None]) -> None:
    """Call `act` once `after` is done, or after `MOMENT` at the latest; at once where there is nothing to wait for."""
    if after is None or after.done():
        act()
        return

    def once(_: object = None) -> None:
        if not timer.cancelled():
            timer.cancel()
            act()

    timer = asyncio.get_running_loop().call_later(MOMENT, once)
    after.add_done_callback(once)


class PausableTimer:
    """Calls back when its time is used up. Time counts only while it runs."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._left = seconds
        self._call = call
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> float:
        gone = time.monotonic() - self._since if self._timer is not None else 0.0
        return max(0.0, self._left - gone)

    def start(self) -> None:
        if self._timer is None:
            self._since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(self._left, self._call)

    def stop(self) -> None:
        self._left = self.left
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def set(self, seconds: float) -> None:
        """Start over with this much time, running or stopped as before."""
        was_running = self._timer is not None
        self.stop()
        self._left = seconds
        if was_running:
            self.start()

    def cancel(self) -> None:
        """Stop for good: it calls nobody any more."""
        self.stop()
        self._call = _nothing


def _nothing() -> None:
    pass


# ── Work that blocks, in threads. A thread cannot be called back. ─────────────────────────────────


async def in_thread(work: Callable[[], T]) -> T:
    """Cancelling does not keep it from being done."""
    return await _shielded(asyncio.get_running_loop().run_in_executor(None, work))


class FairThreads:
    """A few threads for work whose length a server or a person decides. Each party has one of them at a time, so one
    whose work takes long waits for itself, and takes no thread from other work."""

    def __init__(self, most: int = 2) -> None:
        self._pool = ThreadPoolExecutor(most, "fair")
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def do(self, party: Hashable, work: Callable[[], T]) -> T:
        """Cancelling does not stop work that has begun, and the party's turn ends only with that work."""
        turn = self._turns.setdefault(party, asyncio.Lock())
        await turn.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._pool, work)
        working.add_done_callback(lambda _: turn.release())
        return await _shielded(working)


class FewThreads:
    """At most so many threads at a time for one party whose work may take long; more of it waits without a thread."""

    def __init__(self, most: int = 2) -> None:
        self._turns = asyncio.Semaphore(most)

    async def do(self, prepare: Callable[[], Callable[[], T]]) -> T:
        """Work that is prepared in the loop once there is a thread for it. Cancelling does not keep it from being done
        then, and its turn ends only with it."""
        await self._turns.acquire()
        try:
            working = asyncio.get_running_loop().run_in_executor(None, prepare())
        except BaseException:
            self._turns.release()
            raise
        working.add_done_callback(lambda _: self._turns.release())
        return await _shielded(working)


async def pieces_of(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """What an iterator gives, each piece made in a thread; no thread is held between pieces."""
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
    working.add_done_callback(_look_at)
    return await shielded(working)


class _Feed(Iterator[bytes]):
    """An iterator for a thread, which waits; what it waits for happens in the loop."""

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
            raise BrokenPipeError("the sending end is closed")
        self._waiting = asyncio.ensure_future(_piece(self._stream))
        try:
            return await self._waiting
        except asyncio.CancelledError:
            raise BrokenPipeError("the sending end is closed") from None

    def stop(self) -> None:
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()


async def _piece(stream: AsyncIterator[bytes]) -> bytes | None:
    return await anext(stream, None)
