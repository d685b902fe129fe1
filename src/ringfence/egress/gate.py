"""Whether anything may leave now. What a box asks for meanwhile waits, and nothing of it is lost.

A session's step that ends without leaving anything behind is recorded as such. To make that true whatever the box does
later (a timer of its interpreter, bytes that are still on their way to us through the kernel), its gate is shut in the
same moment, until the next step begins.
"""

from __future__ import annotations

import asyncio


class Gate:
    """All connections of a box pass it before each piece that they send to the outside. It begins open."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.waiting = 0
        """How many pieces wait before it."""

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        """Wait until it is open. The caller awaits nothing between this and what it does outside."""
        while not self._open.is_set():  # it may have been shut again before this task had its turn
            self.waiting += 1
            try:
                await self._open.wait()
            finally:
                self.waiting -= 1
