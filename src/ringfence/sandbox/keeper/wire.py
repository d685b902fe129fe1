"""What goes over the socket between a keeper and its clients: frames, and streams with windows.

A frame is a length, a kind and bytes. A message is a frame of JSON, followed directly by the frames of its attachments.
A chunk is a piece of a stream that belongs to a request. Many requests share a connection, so each stream has a window:
a sender that fills it waits, without holding up other requests.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, cast

from ringfence.core.box import MIB
from ringfence.core.model import Json
from ringfence.sandbox.keeper.codec import CodecError, from_json, to_json

MAX_FRAME = 16 * MIB
MAX_MESSAGE = 192 * MIB
"""Bytes of a message with its attachments."""
PIECE = 256 * 1024
_MESSAGE = 1
_PART = 2
_CHUNK = 3
_HEAD = struct.Struct(">IB")
_STREAM = struct.Struct(">QB")
_CREDENTIALS = struct.Struct("3i")
_LARGE_MESSAGE = 4 * MIB
_HIGH_WATER = 256 * 1024
_MAX_BUFFERED = 8 * MIB

WINDOW = MIB
"""How much of a stream may be in flight."""
SLACK = MIB // 2
"""How much a source that cannot wait may send beyond the window."""

# Channels of a stream.
BYTES = 0
STDOUT = 1
STDERR = 2


class WireError(Exception):
    """The peer violated the protocol."""


class FrameHandler(Protocol):
    """Receives what arrives. A WireError or CodecError that it raises ends the connection."""

    def message(self, message: Json, attachments: list[bytes], size: int) -> None: ...

    def chunk(self, number: int, channel: int, data: bytes) -> None: ...

    def lost(self, problem: Exception | None) -> None: ...


class FrameConnection(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self, handler: FrameHandler | None = None, *, mute: bool = False) -> None:
        """`mute`: stop reading from a peer that does not read. Only one side may do so: if both did, neither would ever
        read again."""
        self.handler = handler
        self._mute = mute
        self.closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._room: asyncio.Future[None] | None = None
        """Set while the peer does not read."""
        self._head: Json | None = None
        """A message whose attachments have not all arrived."""
        self._sizes: deque[int] = deque()
        self._attached: list[bytes] = []
        self._parts: list[bytes] = []
        self._missing = 0
        self._size = 0
        self._problem: Exception | None = None

    # ── Called by the event loop ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(None)
        if self.handler is not None:
            self.handler.lost(self._problem or problem)

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()
        if self._mute and self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None
        if self._mute and self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEAD.size:
                length, kind = _HEAD.unpack_from(buffer, at)
                if length > MAX_FRAME:
                    raise WireError(f"a frame of {length} bytes")
                end = at + _HEAD.size + length
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[at + _HEAD.size : end])
                at = end
                self._take(kind, payload)
                if self._transport is None or self._transport.is_closing():
                    return
        except (WireError, CodecError) as exc:
            self._problem = exc
            self.abort()
            return
        del buffer[:at]

    # ── Reading ──

    def _take(self, kind: int, payload: bytes) -> None:
        if self._head is not None:
            if kind != _PART or len(payload) > self._missing:
                raise WireError("something other than the attachment that was announced")
            self._parts.append(payload)
            self._missing -= len(payload)
            self._next_attachment()
        elif kind == _MESSAGE:
            self._begin(from_json(payload), len(payload))
        elif kind == _CHUNK and len(payload) >= _STREAM.size:
            request, channel = _STREAM.unpack_from(payload)
            if self.handler is not None:
                self.handler.chunk(request, channel, payload[_STREAM.size :])
        else:
            raise WireError(f"a frame of kind {kind}")

    def _begin(self, message: Any, size: int) -> None:
        if type(message) is not dict:
            raise WireError("a message that is no object")
        sizes = message.pop("sizes", [])
        if type(sizes) is not list or (sizes and ({*map(type, sizes)} != {int} or min(sizes) < 0)):
            raise WireError("attachments of no size")
        if sum(sizes) > MAX_MESSAGE:
            raise WireError(f"a message of {sum(sizes)} bytes")
        self._head = message
        self._sizes = deque(sizes)
        self._attached = []
        self._size = size + sum(sizes)
        self._missing = -1
        self._next_attachment()

    def _next_attachment(self) -> None:
        """Close the attachment that is complete and begin the next; -1 missing: none was begun."""
        while self._missing <= 0:
            if self._missing == 0:
                self._attached.append(b"".join(self._parts))
                self._parts = []
            if not self._sizes:
                self._deliver()
                return
            self._missing = self._sizes.popleft()

    def _deliver(self) -> None:
        message = self._head
        attached = self._attached
        self._head = None
        self._attached = []
        assert message is not None
        if "large" in message:
            if not attached:
                raise WireError("a large message without itself")
            message = from_json(attached.pop())
            if type(message) is not dict:
                raise WireError("a message that is no object")
        if self.handler is not None:
            self.handler.message(message, attached, self._size)

    # ── Writing ──

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Json, attachments: Sequence[bytes] = ()) -> int:
        """Does nothing if the connection is gone. Returns the size. Raises CodecError for what cannot be sent."""
        if attachments:
            message = {**message, "sizes": list(map(len, attachments))}
        data = to_json(message)
        if len(data) > _LARGE_MESSAGE:
            message.pop("sizes", None)
            attachments = [*attachments, to_json(message)]
            data = to_json({"large": True, "sizes": list(map(len, attachments))})
        size = sum(map(len, attachments))
        if size > MAX_MESSAGE or len(data) > MAX_FRAME:
            raise CodecError(f"{size} bytes are more than one message can carry, which is {MAX_MESSAGE}")
        if self._transport is None or self._transport.is_closing():
            return 0
        if not attachments:
            self._transport.write(_HEAD.pack(len(data), _MESSAGE) + data)
            return len(data)
        self._transport.write(_HEAD.pack(len(data), _MESSAGE) + data + b"".join(_framed(attachments)))
        return len(data) + size

    def send_chunk(self, request: int, channel: int, data: bytes) -> None:
        if self.is_open:
            assert self._transport is not None
            head = _HEAD.pack(_STREAM.size + len(data), _CHUNK) + _STREAM.pack(request, channel)
            self._transport.write(head + data)

    @property
    def room(self) -> asyncio.Future[None] | None:
        """A future to wait for while the peer has much left to read; None: there is room."""
        return self._room

    @property
    def is_overfull(self) -> bool:
        """Whether so much waits to be sent that data of sources which cannot wait has to be dropped."""
        return self._transport is not None and self._transport.get_write_buffer_size() > _MAX_BUFFERED

    async def drained(self) -> None:
        """Wait until the peer has read most of what it was sent."""
        while self._room is not None:
            await asyncio.shield(self._room)

    def peer(self) -> tuple[int, int]:
        """The process at the other end and its user, as the kernel reports them."""
        assert self._transport is not None
        connection = self._transport.get_extra_info("socket")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(credentials)
        return process, user

    def close(self) -> None:
        """Close the connection, after everything that was sent has been flushed."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _framed(attachments: Sequence[bytes]) -> list[bytes]:
    out: list[bytes] = []
    for data in attachments:
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            out += (_HEAD.pack(len(piece), _PART), piece)
    return out


# ── Streams ───────────────────────────────────────────────────────────────────────────────────────


class SendStream:
    """An outgoing stream. What was sent and not yet consumed is bounded by the window."""

    def __init__(self, wire: FrameConnection, request: int) -> None:
        self._wire = wire
        self._request = request
        self._left = WINDOW
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self.lost = 0
        """Bytes that were dropped because the window was full and the source did not wait."""

    def room(self, size: int) -> None:
        """The peer has consumed this much."""
        self._left = min(WINDOW, self._left + size)
        if self._waiter is not None and self._left > 0:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    def end(self) -> None:
        """The peer wants no more: later data is discarded, and a sender that waits continues."""
        self._over = True
        self.room(WINDOW)

    def offer(self, channel: int, data: bytes) -> asyncio.Future[None] | None:
        """For a source that cannot be made to wait here. It must wait for the returned future before it sends more."""
        if self._over:
            return None
        if self._left < -SLACK or self._wire.is_overfull:
            self.lost += len(data)
        else:
            self._left -= len(data)
            self._wire.send_chunk(self._request, channel, data)
        return self._full()

    def offer_item(self, message: Json, attachments: Sequence[bytes]) -> None:
        if self._over:
            return
        if self._left < -SLACK or self._wire.is_overfull:
            self.lost += 1
        else:
            self._left -= self._wire.send({"id": self._request, **message}, attachments)

    async def put(self, channel: int, data: bytes) -> None:
        """Send in pieces, each when the window has room."""
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


class WindowUpdates:
    """Tells the peer from time to time how much of a stream was consumed."""

    def __init__(self, wire: FrameConnection, request: int) -> None:
        self._wire = wire
        self._request = request
        self._unsent = 0

    def add(self, size: int) -> None:
        self._unsent += size
        if self._unsent >= WINDOW // 4:
            self._wire.send({"id": self._request, "room": self._unsent})
            self._unsent = 0


class ReceiveStream:
    """An incoming stream, to be iterated once."""

    def __init__(self, wire: FrameConnection, request: int) -> None:
        self._consumed = WindowUpdates(wire, request)
        self._items: deque[tuple[Any, int]] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def feed(self, item: Any, size: int) -> None:
        """Raises WireError for more than the window allows."""
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
                self._consumed.add(size)
                yield item
            if self._over:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
