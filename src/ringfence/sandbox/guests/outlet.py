"""The one way out of a guest: a listener on its own loopback. Where its agent can pass that to the host, the proxy
serves it; elsewhere each connection is a channel of the stream, and the host joins it to a socket that the proxy serves
as it serves any listener."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Awaitable

from ringfence.core.box import Serve
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.guests.engine import Guest
from ringfence.sandbox.guests.link import GuestGone, GuestOrder, Link, said
from ringfence.sandbox.process.outlet import PORT, NetworkOutlet, proxy_environment, trusted_authorities

_CERTIFICATES = "/home/user/.certificates.pem"
"""The authorities to trust where TLS ends at the proxy. Programs may change that: it is they who look there."""
_PIECE = 64 * 1024
_BACKLOG = 128
_MOST = 128
"""Connections at a time; an agent has fewer that are open or wait."""
_LINGER_SECONDS = 600.0
"""A connection that was answered to the end, and that sends nothing for so long, is over; a program may take its time
to read the answer."""


class GuestOutlet(NetworkOutlet):
    """The outlet of one guest, from before its program begins until after it is gone."""

    _carried: CarriedOutlet | None = None

    @classmethod
    async def of(cls, guest: Guest, serve: Serve) -> GuestOutlet:
        """Of a guest whose agent is ready. Raises Unavailable."""
        assert guest.link is not None
        carried = None if guest.hands_over else await CarriedOutlet.open(guest.link, PORT)
        listener = socket.socket(fileno=guest.link.given.pop()) if carried is None else carried.listener
        try:
            way = await serve(listener)
        except BaseException:
            listener.close()
            if carried is not None:
                await carried.close()
            raise
        outlet = cls(way, proxy_environment(way, _CERTIFICATES))
        outlet._carried = carried
        try:
            trusted = trusted_authorities(way)
            if trusted is not None:
                await guest.link.open({"do": "write", "path": _CERTIFICATES}, trusted).result
        except BaseException as problem:
            await outlet.close()
            if isinstance(problem, GuestGone):
                raise Unavailable("no_box", f"the box was gone before anything ran: {problem}") from None
            raise
        return outlet

    async def close(self) -> None:
        await super().close()
        if self._carried is not None:
            await self._carried.close()


class CarriedOutlet:
    """A listener on this host, for the connections that programs make to a port of the guest's loopback."""

    def __init__(self, link: Link) -> None:
        self.listener, self._place = _listener()
        """The listener is for whoever serves it, and closes it."""
        self._link = link
        self._listening: GuestOrder | None = None
        self._carried: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MOST)
        self._last = 0

    @classmethod
    async def open(cls, link: Link, port: int) -> CarriedOutlet:
        """Raises Unavailable where the guest does not listen."""
        outlet = cls(link)
        try:
            await outlet._listen(port)
        except BaseException:
            outlet.listener.close()
            await outlet.close()
            raise
        return outlet

    async def _listen(self, port: int) -> None:
        listens: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def noted(note: Json) -> None:
            if "listens" in note and not listens.done():
                listens.set_result(None)
            elif isinstance(which := note.get("connection"), int):
                self._take(which)

        try:
            listening = self._listening = self._link.open({"do": "listen", "port": port})
            listening.on_note = noted
            await asyncio.wait((listens, listening.result), return_when=asyncio.FIRST_COMPLETED)
            why = None if listens.done() else said((await listening.result).get("failed", "it ended"))
        except GuestGone as problem:
            why = str(problem)
        if why is not None:
            raise Unavailable("no_box", f"the guest has no way out: {why}")

    def _take(self, which: int) -> None:
        if which <= self._last or len(self._carried) >= 2 * _MOST:
            return  # an agent counts them, and never has as many: half of these wait for one that just ends
        self._last = which
        task = asyncio.ensure_future(self._carry(which))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    async def _carry(self, which: int) -> None:
        """One connection, until both ends are done or one of them is gone."""
        assert self._listening is not None
        order = {"do": "connection", "of": self._listening.number, "which": which}
        async with self._room:
            with contextlib.suppress(OSError, GuestGone):
                await self._joined(order)

    async def _joined(self, order: Json) -> None:
        """Raises OSError, GuestGone."""
        try:
            # By the descriptor: its place has no other name any more.
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{self._place}")
        except OSError:
            self._link.open(order).kill()  # nobody serves it
            return
        try:
            await _join(self._link.open(order), reader, writer)
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        """End every connection."""
        if self._place < 0:
            return
        carried = list(self._carried)
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)
        if self._listening is not None:
            self._listening.kill()
        os.close(self._place)
        self._place = -1


def _listener() -> tuple[socket.socket, int]:
    """A listener that nobody else can find, and a descriptor of its place: its name is gone when it begins."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with tempfile.TemporaryDirectory(prefix="ringfence-way-") as folder:  # as every such folder, its owner's alone
            path = f"{folder}/way"
            listener.bind(path)
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, place


async def _join(channel: GuestOrder, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pieces = 0

    def sent(kind: bytes, data: bytes) -> Awaitable[None]:
        nonlocal pieces
        pieces += 1
        writer.write(data)
        return _taken(writer)

    def noted(note: Json) -> None:
        if note.get("sent") == "all" and not writer.is_closing():
            writer.write_eof()

    channel.on_output = sent
    channel.on_note = noted
    answering = asyncio.ensure_future(_answer(channel, reader))
    try:
        await asyncio.wait((answering, channel.result), return_when=asyncio.FIRST_COMPLETED)
        if not channel.result.done():
            answering.result()
        before = -1
        while not channel.result.done() and pieces > before:
            before = pieces
            await asyncio.wait((channel.result,), timeout=_LINGER_SECONDS)
        if not channel.result.done():
            return
        await channel.result
        writer.close()
        await writer.wait_closed()
    finally:
        channel.kill()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


async def _answer(channel: GuestOrder, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(_PIECE):
        await channel.write(data)
    channel.end()


async def _taken(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # whoever reads finds out by itself
        await writer.drain()
