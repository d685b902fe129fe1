"""The host's end of the stream to the agent of a guest; `agent` describes the frames.

What comes from a guest is data: a frame that the agent would not send breaks the link, which ends the guest.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, socket
from typing import Any, cast

from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.files.paths import shown

CREDIT = 256 * 1024
_FRAME = struct.Struct(">IcI")
_WORD = struct.Struct(">I")
_LONGEST = 1024 * 1024
_PIECE = 64 * 1024
_LONGEST_SAID = 300
_LONGEST_RESULT = 256 * 1024
_MOST_ERRORS = 1024 * 1024
_ABOVE = 70_000
"""So much more than it has room for may come or be allowed: claims come whole, and a terminal's end is a byte of its
agent's."""
_UNSENT = 64 * 1024 * 1024
"""More than that waits for no guest: it reads nothing."""


class GuestGone(Exception):
    """The stream to a guest has ended, or what came over it was nothing that its agent sends."""


class GuestOrder:
    """One order, from when it was sent until its result is there."""

    def __init__(self, link: Link, number: int) -> None:
        self.result: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        """What the agent says in the end. Raises GuestGone."""
        self.on_output: Callable[[bytes, bytes], Awaitable[None] | None] = _ignore
        """Called with which stream it is (`1`, `2`; `3`: claims), and what was written. What it returns is awaited
        before the guest may write more."""
        self.on_note: Callable[[Json], None] = lambda note: None
        self.number = number
        self._link = link
        self._room = CREDIT
        self._unread = 0
        """What has come and was not taken yet."""
        self._may_write = asyncio.Event()
        self._may_write.set()

    async def write(self, data: bytes) -> None:
        """Input. Returns when the guest has room for it. Raises GuestGone."""
        at = 0
        while at < len(data):
            while self._room <= 0 and not self.result.done():
                self._may_write.clear()
                await self._may_write.wait()
            if self.result.done():
                return  # nothing reads it any more
            piece = data[at : at + min(_PIECE, self._room)]
            self._room -= len(piece)
            at += len(piece)
            self._link.send(b"D", self.number, piece)

    def put(self, data: bytes) -> int:
        """As much input as the guest has room for now. Returns how much that was."""
        piece = data[: max(0, min(_PIECE, self._room))]
        if piece:
            self._room -= len(piece)
            self._link.send(b"D", self.number, piece)
        return len(piece)

    def end(self) -> None:
        """There is no more input."""
        self._link.send(b"E", self.number)

    def act(self, told: Mapping[str, Any]) -> None:
        self._link.send(b"S", self.number, json.dumps(told).encode())

    def kill(self) -> None:
        self._link.send(b"X", self.number)

    # ── From the guest ──

    def take(self, kind: bytes, body: bytes) -> None:
        if kind in (b"1", b"2", b"3"):
            self._output(kind, body)
        elif kind == b"W":
            self._room += _WORD.unpack(body)[0]
            if self._room > CREDIT + _ABOVE:
                raise ValueError("room that there is not")
            self._may_write.set()
        elif kind == b"N":
            self.on_note(_plain(body))
        elif kind == b"R":
            self._link.forget(self.number)
            if not self.result.done():
                self.result.set_result(_plain(body))
            self._may_write.set()

    def _output(self, kind: bytes, body: bytes) -> None:
        if not body:
            raise ValueError("output that is none")
        self._unread += len(body)
        if self._unread > CREDIT + _ABOVE:
            raise ValueError("more than it may")
        room = self.on_output(kind, body)
        if room is None:
            self._allow(len(body))
        else:
            asyncio.ensure_future(room).add_done_callback(lambda _: self._allow(len(body)))

    def _allow(self, size: int) -> None:
        self._unread -= size
        if not self.result.done():
            self._link.send(b"W", self.number, _WORD.pack(size))

    def lose(self, problem: GuestGone) -> None:
        if not self.result.done():
            self.result.set_exception(problem)
            self.result.exception()  # it is looked at where somebody waits
        self._may_write.set()


class Link(asyncio.Protocol):
    """All channels of one guest."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[str] = loop.create_future()
        """Why the stream has ended."""
        self.given: list[int] = []
        """The descriptors that the agent began with; whoever has the link closes them."""
        self.counted: Json = {}
        """What the guest counted of itself when it told last."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._channels: dict[int, GuestOrder] = {}
        self._number = 0
        self._hello: asyncio.Future[Json] = loop.create_future()

    @classmethod
    async def over(
        cls, stream: socket, first: bytes, *, settle: Callable[[], None] = lambda: None, given: int = 0
    ) -> Link:
        """Over this stream, which is the link's from now on. The first process is sent `first` when it is there; before
        that, `settle` is called. `given`: how many descriptors the agent begins with. Raises GuestGone."""
        stream.setblocking(False)
        loop = asyncio.get_running_loop()
        descriptors: list[int] = []
        try:
            if await loop.sock_recv(stream, 1) != b"+":
                raise GuestGone("its first process did not start")
            settle()
            await loop.sock_sendall(stream, first)
            if given:
                descriptors = await _received_descriptors(stream, given)
        except OSError as problem:
            raise GuestGone(f"its agent has ended: {problem.strerror}") from None
        _, link = await loop.create_connection(cls, sock=stream)
        link.given = descriptors
        return link

    async def ready(self) -> Json:
        """What the agent says of itself. Raises GuestGone."""
        return await asyncio.shield(self._hello)

    def open(self, order: Mapping[str, Any], data: bytes = b"") -> GuestOrder:
        """Raises GuestGone."""
        if self.gone.done():
            raise GuestGone(self.gone.result())
        self._number += 1
        channel = self._channels[self._number] = GuestOrder(self, self._number)
        self.send(b"O", self._number, *_with_json(order), data)
        return channel

    def send(self, kind: bytes, number: int, *parts: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_FRAME.pack(5 + sum(map(len, parts)), kind, number) + b"".join(parts))
            if self._transport.get_write_buffer_size() > _UNSENT:
                self._end("its agent takes nothing of what it is sent")
                self.close()

    def count(self) -> None:
        """Ask for that anew."""
        self.send(b"C", 0)

    def forget(self, number: int) -> None:
        self._channels.pop(number, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ── Of the transport ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # as it is in every loop, though not by its class

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while len(self._received) >= _FRAME.size:
                size, kind, number = _FRAME.unpack_from(self._received)
                if not _FRAME.size - 4 <= size <= _LONGEST:
                    raise ValueError("a frame of impossible length")
                end = 4 + size
                if len(self._received) < end:
                    return
                body = bytes(memoryview(self._received)[_FRAME.size : end])
                del self._received[:end]
                self._take(kind, number, body)
        except (ValueError, struct.error, RecursionError) as problem:
            self._end(f"its agent sent what it never sends: {problem}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("its agent has ended")

    def _take(self, kind: bytes, number: int, body: bytes) -> None:
        if kind == b"H" and not self._hello.done():
            self._hello.set_result(_plain(body))
            return
        if kind == b"C":
            self.counted = _plain(body)
            return
        channel = self._channels.get(number)
        if channel is not None:
            channel.take(kind, body)

    def _end(self, why: str) -> None:
        if self.gone.done():
            return
        self.gone.set_result(why)
        problem = GuestGone(why)
        if not self._hello.done():
            self._hello.set_exception(problem)
            self._hello.exception()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.lose(problem)


async def pass_on(channel: GuestOrder, given: bytes | int) -> None:
    """Give these bytes, or what comes from this descriptor, as all input. Raises GuestGone."""
    if isinstance(given, bytes):
        await channel.write(given)
    else:
        descriptor = os.dup(given)
        try:
            while data := await asyncio.to_thread(os.read, descriptor, _PIECE):
                await channel.write(data)
        finally:
            os.close(descriptor)
    channel.end()


async def collected(channel: GuestOrder, errors: bytearray | None = None) -> AsyncIterator[bytes]:
    """What is written to standard output, piece by piece, at the pace of the reader; the beginning of what is written
    to standard error goes into `errors`. Raises GuestGone, Unavailable."""
    waiting: asyncio.Queue[tuple[bytes, asyncio.Future[None]] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    errors = bytearray() if errors is None else errors

    def put(kind: bytes, data: bytes) -> Awaitable[None] | None:
        if kind == b"2":
            errors.extend(data[: _MOST_ERRORS - len(errors)])
            return None
        taken = loop.create_future()
        waiting.put_nowait((data, taken))
        return taken

    channel.on_output = put
    channel.result.add_done_callback(lambda _: waiting.put_nowait(None))  # after all that was written
    while (entry := await waiting.get()) is not None:
        yield entry[0]
        entry[1].set_result(None)
    result = await channel.result
    if result.get("status") != 0:
        words = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise Unavailable(
            "guest_failed", f"the guest could not do it: {said(words or result.get('failed') or 'no reason')}"
        )


def said(words: object) -> str:
    """What a guest says, for an error: its beginning, in printable form."""
    return shown(str(words)[:_LONGEST_SAID])


def first_words(agent: bytes, told: Mapping[str, Any], machine_code: bytes) -> bytes:
    """What a guest is sent first: the agent itself, which its interpreter waits for, and what that must know."""
    begin = b"".join((*_with_json(told), machine_code))
    return _WORD.pack(len(agent)) + agent + _FRAME.pack(5 + len(begin), b"H", 0) + begin


async def _received_descriptors(stream: socket, many: int) -> list[int]:
    """Raises GuestGone."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def come() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(stream.fileno(), come)
    try:
        await readable
    finally:
        loop.remove_reader(stream.fileno())
    try:
        data, ancillary, _, _ = stream.recvmsg(1, CMSG_SPACE(4 * many), MSG_CMSG_CLOEXEC)
    except OSError:
        data, ancillary = b"", []
    given = [number for _, _, packed in ancillary for number in struct.unpack(f"{len(packed) // 4}i", packed)]
    if not data or len(given) != many:
        for descriptor in given:
            os.close(descriptor)
        raise GuestGone("its agent has ended before it was ready")
    return given


def _ignore(kind: bytes, data: bytes) -> None:
    """For output that nobody wants."""


def _with_json(told: Mapping[str, Any]) -> tuple[bytes, bytes]:
    text = json.dumps(told).encode()
    return _WORD.pack(len(text)), text


def _plain(body: bytes) -> Json:
    """A JSON object of the guest's. Raises ValueError."""
    if len(body) > _LONGEST_RESULT:
        raise ValueError("a note that is too long")
    told = json.loads(body)
    if not isinstance(told, dict):
        raise ValueError("a note that is no object")
    return told
