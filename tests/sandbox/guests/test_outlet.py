"""The way out of a guest over its stream: a real agent, as a process of its own, in no container."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ringfence.core.errors import Unavailable
from ringfence.sandbox.guests.link import Link
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


async def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with agent() as link:
            with pytest.raises(Unavailable, match=r"no way out: OSError: .*in use"):
                await CarriedOutlet.open(link, taken.getsockname()[1])
