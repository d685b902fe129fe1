"""The outside that the doctor plays: it sees who was dialled and what arrived, and nothing leaves this host."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator

import pytest

from ringfence.core.box import NetworkRule
from ringfence.doctor.fake_internet import ALLOWED, EVIL, PUBLIC, FakeInternet

pytestmark = pytest.mark.anyio

GET = f"GET http://{ALLOWED}/x HTTP/1.1\r\nHost: {ALLOWED}\r\n\r\n".encode()


@pytest.fixture
def outside() -> Iterator[FakeInternet]:
    made = FakeInternet({"twice.example": [["1.1.1.1"], ["2.2.2.2"]]})
    yield made
    made.close()


async def asked(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(4096), 60)
    finally:
        writer.close()


async def test_a_real_proxy_dials_it(outside: FakeInternet) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    way = await outside.serve([NetworkRule("one", (ALLOWED,))])(listener)
    try:
        assert (await asked(port, GET)).startswith(b"HTTP/1.1 200")
        assert (await asked(port, GET.replace(ALLOWED.encode(), EVIL.encode()))).startswith(b"HTTP/1.1 403")
    finally:
        await way.close()
    assert outside.dialled == [(PUBLIC, 80)] and outside.asked == [ALLOWED]
    assert outside.requests == [b"GET /x HTTP/1.1"] and b"Host: allowed.example" in outside.got


async def test_a_naive_proxy_takes_anything(outside: FakeInternet) -> None:
    for host in (EVIL, "127.0.0.1", "twice.example"):
        request = f"GET http://{host}/x HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        assert (await asked(outside.naive_port, request)).startswith(b"HTTP/1.1 200")
    assert outside.dialled == [("6.6.6.6", 80), ("127.0.0.1", 80), ("2.2.2.2", 80)]


async def test_servers_speak_tls_and_are_trusted_by_the_proxy_alone(outside: FakeInternet) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    way = await outside.serve([NetworkRule("one", (ALLOWED,), methods=("GET",))])(listener)
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(f"CONNECT {ALLOWED}:443 HTTP/1.1\r\nHost: {ALLOWED}:443\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert way.authority is not None
        context = ssl.create_default_context(cadata=way.authority.decode())
        await writer.start_tls(context, server_hostname=ALLOWED)
        writer.write(f"GET /in HTTP/1.1\r\nHost: {ALLOWED}\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
    finally:
        await way.close()
    assert outside.requests == [b"GET /in HTTP/1.1"] and outside.dialled == [(PUBLIC, 443)]
