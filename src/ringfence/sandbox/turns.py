"""Who goes when: one after another, many together or one alone, and clocks that can stand still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ringfence.errors import Refused
from ringfence.model import Status
from ringfence.sandbox.waiting import shielded

T = TypeVar("T")


class Turn:
    """One at a time, in the order in which they came; no more than so many wait."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._inside = 0
        self._lock = asyncio.Lock()

    @property
    def idle(self) -> bool:
        return not self._inside

    async def __aenter__(self) -> None:
        if self._inside > self._most:
            text = f"{self._most} cells wait for {self._what} already; wait for some to end, or use another context"
            raise Refused(Status.VALIDATION_FAILURE, "busy", text)
        self._inside += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self._inside -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        self._inside -= 1


class Use:
    """How many are at something, and when the last of them left."""

    def __init__(self) -> None:
        self.inside = 0
        self.last = 0.0

    def __enter__(self) -> None:
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1
        self.last = time.monotonic()


class Gate:
    """Many may be inside together, or one alone. Who wants to be alone waits for those inside, and others for him."""

    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self._inside = 0
        self._left = asyncio.Event()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._door:
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._left.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._door:
            while self._inside:
                self._left.clear()
                await self._left.wait()
            yield


class Countdown:
    """Calls when its time is used up, of which only the time counts while it goes."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._left = seconds
        self._call = call
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> float:
        gone = time.monotonic() - self._since if self._timer is not None else 0.0
        return max(0.0, self._left - gone)

    def go(self) -> None:
        if self._timer is None:
            self._since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(self._left, self._call)

    def stand(self) -> None:
        self._left = self.left
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def set(self, seconds: float) -> None:
        """Begin anew with so much time, going or standing as before."""
        went = self._timer is not None
        self.stand()
        self._left = seconds
        if went:
            self.go()


class Tasks:
    """Work that goes on to its end, whatever becomes of those who asked for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def carry_out(self, work: Coroutine[Any, Any, T]) -> T:
        return await shielded(self.begin(work))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # somebody was told, or nobody wants to know any more

    async def all_done(self) -> None:
        me = asyncio.current_task()
        while others := {task for task in self._tasks if task is not me}:
            await asyncio.wait(others)
