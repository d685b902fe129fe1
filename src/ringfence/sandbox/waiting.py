"""Work that must not be left half done because nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def to_the_end(running: Coroutine[Any, Any, T]) -> T:
    """What is cancelled is told so once, and then has the time that it takes to remove its box."""
    task, over = asyncio.create_task(running), asyncio.Event()
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
