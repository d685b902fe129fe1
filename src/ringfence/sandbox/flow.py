"""What a stream of a server brought and nobody took yet: so much, and then the server waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable

_HELD = 65_536
"""Bytes that may wait for us; then the pipe fills."""


class Flow:
    """One stream."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._forgotten = False
        self._come = asyncio.Event()
        self._room: asyncio.Future[None] | None = None

    def put(self, chunk: bytes) -> Awaitable[None] | None:
        if self._forgotten:
            return None
        self._chunks.append(chunk)
        self._size += len(chunk)
        self._come.set()
        if self._size <= _HELD:
            return None
        self._room = asyncio.get_running_loop().create_future()
        return self._room

    async def get(self) -> bytes:
        while not self._chunks and not self._ended:
            self._come.clear()
            await self._come.wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        self._make_room()
        return data

    def end(self) -> None:
        self._ended = True
        self._come.set()

    def forget(self) -> None:
        """Nobody reads any more: what comes is thrown away, so that whoever writes can end."""
        self._forgotten = True
        self._chunks.clear()
        self._make_room()
        self.end()

    def _make_room(self) -> None:
        self._size = 0
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None
