"""A connection to a port of a guest's own loopback: a socket of this host, whose other end is a channel of the link."""

from __future__ import annotations

import asyncio
import contextlib
from socket import socket, socketpair

from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.guests.link import GuestGone, GuestOrder, Link, said

_CONNECT_SECONDS = 30.0
_PIECE = 64 * 1024


async def connected(link: Link, port: int) -> tuple[socket, asyncio.Task[None]]:
    """The socket, and the task that carries what is written to it; it ends with either side. Raises OSError where
    nothing listens there, Unavailable."""
    ours, theirs = socketpair()
    ours.setblocking(False)
    try:
        reader, writer = await asyncio.open_connection(sock=theirs)
        try:
            channel = await _opened(link, port, writer)
        except BaseException:
            writer.transport.abort()
            raise
    except BaseException:
        ours.close()
        raise
    return ours, asyncio.get_running_loop().create_task(_carry(channel, reader, writer))


async def _opened(link: Link, port: int, writer: asyncio.StreamWriter) -> GuestOrder:
    there: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def noted(told: Json) -> None:
        if "connected" in told and not there.done():
            there.set_result(None)

    async def taken() -> None:
        with contextlib.suppress(OSError):  # whoever writes finds out by itself
            await writer.drain()

    def take(kind: bytes, data: bytes) -> asyncio.Future[None]:
        writer.write(data)
        return asyncio.ensure_future(taken())

    try:
        channel = link.open({"do": "connect", "port": port})
        channel.on_note = noted
        channel.on_output = take
        async with asyncio.timeout(_CONNECT_SECONDS):
            await asyncio.wait((there, channel.result), return_when=asyncio.FIRST_COMPLETED)
        if not there.done():
            raise ConnectionRefusedError(111, said((await channel.result).get("failed", "it ended")))
    except GuestGone as gone:
        raise Unavailable("no_box", f"the box is gone: {gone}") from None
    except BaseException:
        channel.kill()
        raise
    return channel


async def _carry(channel: GuestOrder, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sending = asyncio.ensure_future(_send(channel, reader))
    try:
        await asyncio.wait((channel.result,))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    finally:
        channel.kill()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()


async def _send(channel: GuestOrder, reader: asyncio.StreamReader) -> None:
    try:
        while data := await reader.read(_PIECE):
            await channel.write(data)
        channel.end()
    except OSError:
        channel.kill()
