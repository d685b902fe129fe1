"""Work that must not be left half done because nobody waits for it any more."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

MOMENT = 0.004
"""Seconds: what is over by then was short, and whoever waited for it would have felt what was done beside it."""


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
    """Wait for what goes on although whoever waits here may give up.

    So does `asyncio.shield`; from Python 3.14 on it also complains of what fails when nobody waits for it any more,
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
    """What is cancelled is told so once, and then has the time that it takes to remove its box."""
    task, over = begun(running), asyncio.Event()
    if task.done():
        return task.result()
    task.add_done_callback(lambda _: over.set())
    try:
        await over.wait()  # and not for the task itself, which would be cancelled with us, as often as we are
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at; whatever it was, the caller has gone
        raise
    return task.result()


def when(after: asyncio.Future[Any] | None, act: Callable[[], None]) -> None:
    """Once: when that is done, or after a moment; at once where there is nothing to wait for."""
    if after is None or after.done():
        act()
        return

    def once(_: object = None) -> None:
        if not timer.cancelled():
            timer.cancel()
            act()

    timer = asyncio.get_running_loop().call_later(MOMENT, once)
    after.add_done_callback(once)
