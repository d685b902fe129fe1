"""The way out of a guest over its stream: a real agent, as a process of its own, in no container."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ringfence.core.errors import Unavailable
from ringfence.sandbox.guests import outlet as outlet_module
from ringfence.sandbox.guests.link import GuestOrder, Link
from ringfence.sandbox.guests.outlet import CarriedOutlet
from tests.sandbox.guests.test_link import agent

pytestmark = pytest.mark.anyio


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says everything that it was told, after the end of it."""
    told = await reader.read()
    writer.write(b"told: " + told)
    writer.close()


@asynccontextmanager
async def way(link: Link, serve: object = echo) -> AsyncIterator[tuple[CarriedOutlet, int]]:
    port = free_port()
    outlet = await CarriedOutlet.open(link, port)
    server = await asyncio.start_server(serve, sock=outlet.listener)  # type: ignore[arg-type]
    try:
        yield outlet, port
    finally:
        server.close()
        await outlet.close()


async def said(port: int, words: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("size", [0, 5, 3_000_000])
async def test_a_connection_is_carried_whole_and_both_ends_end_by_themselves(size: int) -> None:
    words = os.urandom(size)
    async with agent() as link, way(link) as (_, port):
        answer = await said(port, words)
        assert hashlib.sha256(answer).digest() == hashlib.sha256(b"told: " + words).digest()
        assert await said(port, b"again") == b"told: again"


async def test_many_at_once_and_more_than_there_is_room_for() -> None:
    async with agent() as link, way(link) as (_, port):
        answers = await asyncio.gather(*(said(port, b"%d" % number) for number in range(200)))
        assert answers == [b"told: %d" % number for number in range(200)]


async def test_what_nobody_reads_holds_up_that_connection_alone() -> None:
    waiting = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(4) == b"fast":
            writer.write(b"yes")
        else:
            await waiting.wait()
        writer.close()

    async with agent() as link, way(link, slow) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(8_000_000))
        drained = asyncio.ensure_future(writer.drain())
        assert await said(port, b"fast") == b"yes"
        assert not drained.done()
        waiting.set()
        with pytest.raises(OSError):
            await asyncio.gather(drained, writer.wait_closed())
        writer.transport.abort()


async def test_a_program_that_leaves_is_gone_for_the_host() -> None:
    left = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        left.set()
        writer.close()

    async with agent() as link, way(link, wait) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        await writer.drain()
        writer.transport.abort()
        await left.wait()


async def test_a_host_that_leaves_is_gone_for_the_program() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.transport.abort()

    async with agent() as link, way(link, leave) as (_, port):
        assert await said(port, b"x") == b""


async def test_nothing_is_left_of_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    here = asyncio.Event()

    async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here.set()
        await echo(reader, writer)

    async with agent() as link:
        async with way(link, come) as (_, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await here.wait()
        writer.transport.abort()
        await link.open({"do": "run", "argv": ["true"], "cwd": "/"}).result  # orders are taken one after the other
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
    while len(os.listdir("/proc/self/fd")) > before:  # the loop closes sockets in its next turns
        await asyncio.sleep(0)


async def test_connections_that_an_agent_makes_up_are_few() -> None:
    link = Listens()
    outlet = await CarriedOutlet.open(link, 1)
    for which in (1, *range(5000), 7):
        link.orders[0].on_note({"connection": which})
    assert len(outlet._carried) == 2 * outlet_module._MOST
    while len(link.orders) < 1 + outlet_module._MOST:
        await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(link.orders) == 1 + outlet_module._MOST
    outlet.listener.close()
    await outlet.close()


async def test_a_connection_that_nobody_ends_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "_LINGER_SECONDS", 0.05)
    link = Listens()
    async with way(link, echo_nothing) as (outlet, _):
        link.orders[0].on_note({"connection": 1})
        while outlet._carried:
            await asyncio.sleep(0.01)
    assert link.killed == 2


async def echo_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write_eof()
    await reader.read()
    writer.close()


class Listens(Link):
    """A link to an agent that says that it listens, and then nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[GuestOrder] = []
        self.killed = 0

    def open(self, order: Mapping[str, Any], data: bytes = b"") -> GuestOrder:
        channel = super().open(order, data)
        self.orders.append(channel)
        if order["do"] == "listen":
            asyncio.get_running_loop().call_soon(lambda: channel.on_note({"listens": 1}))
        return channel

    def send(self, kind: bytes, number: int, *parts: bytes) -> None:
        self.killed += kind == b"X"


async def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with agent() as link:
            with pytest.raises(Unavailable, match=r"no way out: OSError: .*in use"):
                await CarriedOutlet.open(link, taken.getsockname()[1])
