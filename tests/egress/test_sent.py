"""What was sent stays sent: a request that is refused when a part of it is out already is on record as both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from ringfence.core.box import NetworkRule
from ringfence.core.brokering import OutboundRequest
from ringfence.egress.substitution import Substitution
from ringfence.egress.tls import Authority
from ringfence.governance.route import network_fact
from tests import tooling
from tests.egress.outside import (
    LOCAL,
    LOOPBACK,
    OPEN,
    Box,
    answering,
    box,
    get,
    host_context,
    serving,
    status,
    trusting,
)
from tests.egress.outside import Server as Answers
from tests.egress.test_tunnel import real

pytestmark = pytest.mark.anyio

AUTHORITY = Authority()
SMALL = replace(OPEN, name="small", max_bytes_out=5000)
SMALL_IN = replace(OPEN, name="small", max_bytes_in=1000)
INSPECTED = NetworkRule("small", ("api.example",), addresses=LOOPBACK, methods=("GET",), max_bytes_out=1000)


class Listener:
    """Takes whatever comes, and says nothing."""

    def __init__(self) -> None:
        self.port = 0
        self.came = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                self.came.set()


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    made = Listener()
    async with serving(made.handle) as made.port:
        yield made


def post(port: int, body: bytes) -> bytes:
    return get(port, extra="Transfer-Encoding: chunked\r\n").replace(b"GET", b"POST") + body


def chunk(letter: bytes, size: int = 3000) -> bytes:
    return f"{size:x}\r\n".encode() + letter * size + b"\r\n"


async def bad_chunk(inside: Box, outside: Listener) -> None:
    await inside.say(post(outside.port, b"-0\r\n\r\n"))


async def endless_chunk(inside: Box, outside: Listener) -> None:
    await inside.say(post(outside.port, b"f" * 20 + b"\r\n"))


async def long_body(inside: Box, outside: Listener) -> None:
    await inside.say(post(outside.port, chunk(b"x") + chunk(b"y")))


async def placeholder(inside: Box, outside: Listener) -> None:
    await inside.say(post(outside.port, chunk(b"PLACEHOLDER", 1).replace(b"1\r\n", b"b\r\n")))


async def long_tunnel(inside: Box, outside: Listener) -> None:
    client = await inside.open()
    assert status(await client.connect(f"api.example:{outside.port}")) == 200
    client.writer.write(real("api.example"))
    await asyncio.wait_for(outside.came.wait(), tooling.PATIENCE)
    client.writer.write(b"\x17\x03\x03\x17\x70" + b"z" * 6000)
    await client.rest()


async def second_hello(inside: Box, outside: Listener) -> None:
    client = await inside.open()
    assert status(await client.connect(f"api.example:{outside.port}")) == 200
    client.writer.write(real("api.example"))
    await asyncio.wait_for(outside.came.wait(), tooling.PATIENCE)
    client.writer.write(real("other.example"))
    await client.rest()


async def told(inside: Box) -> dict[str, Any]:
    return network_fact(await inside.attached.close())


async def watching(asked: OutboundRequest) -> Substitution:
    return Substitution(forbid=(b"PLACEHOLDER",))


@pytest.mark.parametrize(
    ("said", "rule", "expected"),
    [
        (bad_chunk, OPEN, ("protocol", "chunk_syntax")),
        (endless_chunk, OPEN, ("protocol", "chunk_syntax")),
        (long_body, SMALL, ("small", "max_bytes_out")),
        (placeholder, OPEN, ("open", "placeholder")),
        (long_tunnel, SMALL, ("small", "max_bytes_out")),
        (second_hello, OPEN, ("open", "sni_mismatch")),
    ],
)
async def test_what_is_refused_after_a_part_of_it_was_sent_is_denied_and_sent(
    said: Callable[[Box, Listener], Awaitable[None]], rule: NetworkRule, expected: tuple[str, str]
) -> None:
    async with listening() as outside, box([rule], LOCAL, substitute=watching) as inside:
        await said(inside, outside)
        network = await told(inside)
    place = {"host": "api.example", "port": outside.port, "count": 1}
    assert network["denied"] == [{**place, "rule": expected[0], "reason": expected[1]}]
    (sent,) = network["allowed"]
    assert {**sent, **place, "rule": rule.name} == sent
    assert sent["bytes_out"] == network["bytes_out"] > 0


async def test_a_request_whose_answer_is_refused_was_sent() -> None:
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000
    async with answering(Answers(large)) as outside, box([SMALL_IN], LOCAL) as inside:
        await inside.say(get(outside.port))
        network = await told(inside)
    assert [each["reason"] for each in network["denied"]] == ["max_bytes_in"]
    assert [each["bytes_out"] for each in network["allowed"]] == [len(outside.requests[0])]


async def test_a_hello_of_ours_was_sent_though_the_request_was_not() -> None:
    context, trust = host_context(AUTHORITY, "api.example"), trusting(AUTHORITY)
    async with answering(Answers(), context) as outside, box([INSPECTED], LOCAL, trust) as inside:
        client = await inside.open()
        place = f"api.example:{outside.port}"
        assert status(await client.connect(place)) == 200
        await client.tls(trusting(inside.attached.authority), "api.example")
        client.writer.write(f"GET / HTTP/1.1\r\nHost: {place}\r\nX: {'x' * 2000}\r\n\r\n".encode())
        await client.rest()
        network = await told(inside)
    assert outside.requests == []
    assert [each["reason"] for each in network["denied"]] == ["max_bytes_out"]
    assert [(each["host"], each["count"], each["bytes_out"]) for each in network["allowed"]] == [("api.example", 1, 0)]


async def test_what_is_refused_before_a_byte_was_sent_is_denied_alone() -> None:
    async with listening() as outside, box([SMALL], LOCAL) as inside:
        await inside.say(get(outside.port, host="no.example"))
        await inside.say(get(outside.port, extra="Content-Length: 6000\r\n").replace(b"GET", b"POST"))
        await inside.say(get(outside.port, extra=f"X: {'x' * 6000}\r\n"))
        client = await inside.open()
        assert status(await client.connect(f"api.example:{outside.port}")) == 200
        client.writer.write(real("other.example"))
        await client.rest()
        network = await told(inside)
    assert {each["reason"]: each["count"] for each in network["denied"]} == {
        "host": 1,
        "max_bytes_out": 2,
        "sni_mismatch": 1,
    }
    assert (network["allowed"], network["bytes_out"], outside.came.is_set()) == ([], 0, False)
