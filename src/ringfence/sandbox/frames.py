"""What goes over the socket between a keeper and its clients: frames of a length, a kind, and bytes.

A message is a frame of JSON, with frames of its attachments right behind it. A chunk is a piece of a stream that
belongs to a request.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

from ringfence.box import MIB
from ringfence.model import Json
from ringfence.sandbox.codec import CodecError, from_json, to_json

MOST_FRAME = 16 * MIB
MOST_MESSAGE = 192 * MIB
"""With its attachments."""
PIECE = 256 * 1024
_MESSAGE, _PART, _CHUNK = 1, 2, 3
_HEAD = struct.Struct(">IB")
_STREAM = struct.Struct(">QB")
_CREDENTIALS = struct.Struct("3i")
_LARGE = 4 * MIB
_HIGH_WATER = 256 * 1024
_STUFFED = 8 * MIB


class WireError(Exception):
    """The other side does not speak as agreed."""


class Taker(Protocol):
    """Who gets what comes. Whatever it raises as WireError or CodecError ends the connection."""

    def message(self, message: Json, attachments: list[bytes], size: int) -> None: ...

    def chunk(self, request: int, channel: int, data: bytes) -> None: ...

    def lost(self, problem: Exception | None) -> None: ...


class Wire(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self, taker: Taker | None = None, *, mute: bool = False) -> None:
        """`mute`: nothing is heard from a side that does not listen. Only one of the two sides can be so."""
        self.taker = taker
        self._mute = mute
        self.closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._room: asyncio.Future[None] | None = None
        """While the other side does not read."""
        self._head: Json | None = None
        """A message whose attachments are still coming."""
        self._sizes: deque[int] = deque()
        self._attached: list[bytes] = []
        self._parts: list[bytes] = []
        self._missing = 0
        self._size = 0
        self._problem: Exception | None = None

    # ── The loop's side ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(None)
        if self.taker is not None:
            self.taker.lost(self._problem or problem)

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
                if length > MOST_FRAME:
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
            if self.taker is not None:
                self.taker.chunk(request, channel, payload[_STREAM.size :])
        else:
            raise WireError(f"a frame of kind {kind}")

    def _begin(self, message: Any, size: int) -> None:
        if type(message) is not dict:
            raise WireError("a message that is no object")
        sizes = message.pop("sizes", [])
        if type(sizes) is not list or (sizes and ({*map(type, sizes)} != {int} or min(sizes) < 0)):
            raise WireError("attachments of no size")
        if sum(sizes) > MOST_MESSAGE:
            raise WireError(f"a message of {sum(sizes)} bytes")
        self._head, self._sizes, self._attached = message, deque(sizes), []
        self._size = size + sum(sizes)
        self._missing = -1
        self._next_attachment()

    def _next_attachment(self) -> None:
        """Go on where one is complete; -1: none was begun."""
        while self._missing <= 0:
            if self._missing == 0:
                self._attached.append(b"".join(self._parts))
                self._parts = []
            if not self._sizes:
                self._deliver()
                return
            self._missing = self._sizes.popleft()

    def _deliver(self) -> None:
        message, attached = self._head, self._attached
        self._head, self._attached = None, []
        assert message is not None
        if "large" in message:
            if not attached:
                raise WireError("a large message without itself")
            message = from_json(attached.pop())
            if type(message) is not dict:
                raise WireError("a message that is no object")
        if self.taker is not None:
            self.taker.message(message, attached, self._size)

    # ── Writing ──

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Json, attachments: Sequence[bytes] = ()) -> int:
        """Nothing happens where the connection is gone. Gives the size. Raises CodecError for what cannot be sent."""
        if attachments:
            message = {**message, "sizes": list(map(len, attachments))}
        data = to_json(message)
        if len(data) > _LARGE:
            message.pop("sizes", None)
            attachments = [*attachments, to_json(message)]
            data = to_json({"large": True, "sizes": list(map(len, attachments))})
        size = sum(map(len, attachments))
        if size > MOST_MESSAGE or len(data) > MOST_FRAME:
            raise CodecError(f"{size} bytes are more than one message can carry, which is {MOST_MESSAGE}")
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
        """To wait for, where the other side has much to read already."""
        return self._room

    @property
    def is_stuffed(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > _STUFFED

    async def drained(self) -> None:
        """Wait until the other side has read most of what it was sent."""
        while self._room is not None:
            await asyncio.shield(self._room)

    def peer(self) -> tuple[int, int]:
        """The process at the other end and its user, as the kernel says."""
        assert self._transport is not None
        connection = self._transport.get_extra_info("socket")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, user, _ = _CREDENTIALS.unpack(credentials)
        return process, user

    def close(self) -> None:
        """Once what was sent is on its way."""
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
