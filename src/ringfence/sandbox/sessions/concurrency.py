"""What coordinates the callers of a session: locks, a timer that can be stopped, work that outlives its caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ringfence.core.aio import shielded
from ringfence.core.errors import Refused
from ringfence.core.model import Status

T = TypeVar("T")


class BoundedLock:
    """A lock that is given in order of arrival, with a limit on how many may wait."""

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


class UseCounter:
    """How many are using something, and when the last of them stopped."""

    def __init__(self) -> None:
        self.inside = 0
        self.last = 0.0

    def __enter__(self) -> None:
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1
        self.last = time.monotonic()


class SharedLock:
    """A readers-writer lock: many may share it, or one has it alone. An exclusive caller goes before later
    sharers."""

    def __init__(self) -> None:
        self._entry = asyncio.Lock()
        self._inside = 0
        self._left = asyncio.Event()
        self._turns = 0
        """How many have had it alone."""

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[bool]:
        """Yields whether an exclusive holder came in between."""
        before = self._turns
        async with self._entry:
            self._inside += 1
        try:
            yield self._turns != before
        finally:
            self._inside -= 1
            self._left.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._entry:
            while self._inside:
                self._left.clear()
                await self._left.wait()
            try:
                yield
            finally:
                self._turns += 1


class DetachedTasks:
    """Work that runs to its end even when its caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await shielded(self.start(work))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or has gone

    async def join(self) -> None:
        me = asyncio.current_task()
        while others := {task for task in self._tasks if task is not me}:
            await asyncio.wait(others)
