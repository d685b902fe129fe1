"""Streams within a connection between a keeper and its clients.

Many requests share a connection, so each stream has a window: whoever sends more than the other side has room for
waits, and holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ringfence.box import MIB
from ringfence.model import Json
from ringfence.sandbox.frames import PIECE, Wire, WireError

WINDOW = MIB
"""What of a stream may be under way."""
SLACK = MIB // 2
"""What may come beyond the window from a source that cannot wait."""

BYTES, STDOUT, STDERR = 0, 1, 2


class Outlet:
    """A stream that goes out. What was sent and not yet taken is bounded by the window."""

    def __init__(self, wire: Wire, request: int) -> None:
        self._wire = wire
        self._request = request
        self._left = WINDOW
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self.lost = 0
        """Bytes that were not sent, since the other side had no room and the source did not wait."""

    def room(self, size: int) -> None:
        """The other side has taken so much."""
        self._left = min(WINDOW, self._left + size)
        if self._waiter is not None and self._left > 0:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    def end(self) -> None:
        """Nobody takes any more: what is still offered goes nowhere, and whoever waits goes on."""
        self._over = True
        self.room(WINDOW)

    def offer(self, channel: int, data: bytes) -> asyncio.Future[None] | None:
        """For a source that cannot be made to wait here: what it gets back, it is to wait for before it goes on."""
        if self._over:
            return None
        if self._left < -SLACK or self._wire.is_stuffed:
            self.lost += len(data)
        else:
            self._left -= len(data)
            self._wire.send_chunk(self._request, channel, data)
        return self._full()

    def offer_item(self, message: Json, attachments: Sequence[bytes]) -> None:
        if self._over:
            return
        if self._left < -SLACK or self._wire.is_stuffed:
            self.lost += 1
        else:
            self._left -= self._wire.send({"id": self._request, **message}, attachments)

    async def put(self, channel: int, data: bytes) -> None:
        """In pieces, each when there is room."""
        for at in range(0, len(data), PIECE):
            await self._roomy()
            piece = data[at : at + PIECE]
            self._left -= len(piece)
            self._wire.send_chunk(self._request, channel, piece)

    async def put_item(self, message: Json, attachments: Sequence[bytes]) -> None:
        await self._roomy()
        self._left -= self._wire.send({"id": self._request, **message}, attachments)

    async def _roomy(self) -> None:
        while (waiter := self._full()) is not None:
            await asyncio.shield(waiter)

    def _full(self) -> asyncio.Future[None] | None:
        if self._over:
            return None
        if self._left > 0:
            return self._wire.room
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class Taken:
    """Tells the other side what was taken of a stream, now and then."""

    def __init__(self, wire: Wire, request: int) -> None:
        self._wire = wire
        self._request = request
        self._untold = 0

    def add(self, size: int) -> None:
        self._untold += size
        if self._untold >= WINDOW // 4:
            self._wire.send({"id": self._request, "room": self._untold})
            self._untold = 0


class Inlet:
    """A stream that comes in, to be taken one by one."""

    def __init__(self, wire: Wire, request: int) -> None:
        self._taken = Taken(wire, request)
        self._items: deque[tuple[Any, int]] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def feed(self, item: Any, size: int) -> None:
        """Raises WireError for more than there was room for."""
        self._size += size
        if self._size - size > WINDOW + SLACK:
            raise WireError("more of a stream than there is room for")
        self._items.append((item, size))
        self._wake()

    def end(self) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            while self._items:
                item, size = self._items.popleft()
                self._size -= size
                self._taken.add(size)
                yield item
            if self._over:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
