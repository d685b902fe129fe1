"""Between a box and a host that knows a secret: placeholders stay in, values stay out, whatever the framing."""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from collections.abc import AsyncIterator

import pytest

from ringfence.core.box import NetworkRule
from ringfence.core.brokering import OutboundRequest
from ringfence.core.secret import Secret
from ringfence.egress.http1 import response, write_response
from ringfence.egress.ledger import Failed
from ringfence.egress.substitution import Substitution, WordScan, cleaned, cleaned_head
from ringfence.secrets.redaction import TenantRedactor
from tests.egress.outside import LOCAL, LOOPBACK, Server, answering, box

pytestmark = pytest.mark.anyio

VALUE = "correct-horse-battery-staple"
KNOWN = (Secret("horse", VALUE),)
CURRENT = TenantRedactor(lambda: KNOWN, shaped=False)


def test_a_word_is_seen_however_it_is_cut() -> None:
    dice = random.Random(3)
    for _ in range(200):
        data = b"x" * dice.randint(0, 50) + b"placeholder" + b"y" * dice.randint(0, 50)
        watch, seen = WordScan((b"placeholder", b"another")), []
        while data:
            size = dice.randint(1, 20)
            seen.append(watch.sees(data[:size]))
            data = data[size:]
        assert any(seen)
    assert not WordScan(()).sees(b"placeholder")
    assert not WordScan((b"placeholder",)).sees(b"place")


def test_the_head_of_an_answer_is_searched_and_must_be_readable() -> None:
    head = f"HTTP/1.1 302 {VALUE}\r\nLocation: https://h/?t={VALUE}\r\nContent-Length: 0\r\n\r\n".encode()
    clean = cleaned_head(response(head, "GET"), CURRENT.stream)
    assert clean.phrase == "[redacted]" and clean.headers[0] == ("Location", "https://h/?t=[redacted]")
    for encoding in ("gzip", "br", "gzip, identity"):
        packed = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: 0\r\n\r\n".encode()
        with pytest.raises(Failed):
            cleaned_head(response(packed, "GET"), CURRENT.stream)


@pytest.mark.parametrize("name", [f"X-{VALUE}", VALUE.upper(), f"x-{VALUE.lower()}-y", b64encode(VALUE.encode()).hex()])
def test_a_header_whose_name_holds_a_secret_is_left_out(name: str) -> None:
    head = f"HTTP/1.1 200 OK\r\n{name}: 1\r\nX-Fine: 2\r\n\r\n".encode()
    clean = cleaned_head(response(head, "GET"), CURRENT.stream)
    assert clean.headers == ((("X-Fine", "2"),) if VALUE.lower() in name.lower() else ((name, "1"), ("X-Fine", "2")))


@pytest.mark.parametrize(("method", "status"), [("HEAD", "200 OK"), ("GET", "304 Not Modified")])
def test_how_long_a_body_would_be_that_does_not_come_is_not_told(method: str, status: str) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Length: 131\r\nContent-Range: bytes 0-9/131\r\nX-Fine: 2\r\n\r\n".encode()
    answer = cleaned_head(response(head, method), CURRENT.stream)
    assert b"131" not in write_response(answer, method, False)
    assert b"X-Fine: 2" in write_response(answer, method, False)


@pytest.mark.parametrize("status", ["206 Partial Content", "226 IM Used"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_part_of_an_answer_does_not_come_at_all(method: str, status: str) -> None:
    """Whoever asked for it, and by whatever header: half a secret could be in it."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: 26\r\nContent-Range: bytes 0-25/131\r\n\r\n".encode()
    with pytest.raises(Failed) as failed:
        cleaned_head(response(head, method), CURRENT.stream)
    assert failed.value.reason == "partial_answer"


async def test_as_much_of_an_answer_comes_at_once_whether_or_not_a_guess_in_it_is_right() -> None:
    """A box that has its guess echoed learns nothing before the answer has ended."""
    going = asyncio.Event()

    async def pieces(guess: str) -> AsyncIterator[bytes]:
        yield b"." * 3000 + guess.encode()
        await going.wait()
        yield b"the end"

    async def first(guess: str) -> tuple[int, int]:
        answer = cleaned(pieces(guess), CURRENT.stream())
        sizes = len(await anext(answer)), len(await anext(answer))  # the second by the clock
        await answer.aclose()
        return sizes

    for length in range(1, len(VALUE), 4):
        assert await first(VALUE[:length]) == await first("~" * length)


async def test_an_answer_that_pauses_comes_on_by_the_clock() -> None:
    going = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"event: 1\n\n"
        await going.wait()
        yield b"event: 2\n\n"

    answer = cleaned(pieces(), CURRENT.stream())
    assert await anext(answer) == b"event: 1\n\n"
    going.set()
    assert b"".join([piece async for piece in answer]) == b"event: 2\n\n"


async def test_the_body_of_an_answer_in_pieces() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for letter in f"it is {VALUE}, really":
            yield letter.encode()

    assert b"".join([piece async for piece in cleaned(pieces(), CURRENT.stream())]) == b"it is [redacted], really"


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_answers_pass_through_it_whatever_their_framing(framing: str) -> None:
    body = f"before {VALUE} after".encode()
    answers = {
        "length": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body),
        "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n"
        % (body[:9], len(body) - 9, body[9:]),
        "close": b"HTTP/1.1 200 OK\r\n\r\n" + body,
    }

    async def broker(_: OutboundRequest) -> Substitution:
        return Substitution(clean=CURRENT.stream)

    rule = NetworkRule("open", ("api.example",), addresses=LOOPBACK)
    playing = Server(answers[framing], closes=framing == "close")
    async with answering(playing) as server, box([rule], LOCAL, substitute=broker) as inside:
        line = f"GET http://api.example:{server.port}/ HTTP/1.1\r\nHost: api.example:{server.port}\r\n\r\n"
        answer = await inside.say(line.encode())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b"Transfer-Encoding: chunked" in answer
    assert VALUE.encode() not in answer and b"[redacted]" in answer and answer.endswith(b"0\r\n\r\n")


async def test_nothing_tells_how_long_the_secret_is_that_was_in_an_answer() -> None:
    async def seen(value: str) -> tuple[bytes, int]:
        body = f"before {value} after".encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Range: bytes 0-%d/%d\r\nContent-Length: %d\r\n\r\n"
        known = (Secret("horse", value),)
        redactor = TenantRedactor(lambda: known, shaped=False)

        async def broker(_: OutboundRequest) -> Substitution:
            return Substitution(clean=redactor.stream)

        rule = NetworkRule("open", ("api.example",), addresses=LOOPBACK)
        playing = Server(head % (len(body) - 1, len(body), len(body)) + body)
        async with answering(playing) as server, box([rule], LOCAL, substitute=broker) as inside:
            line = f"GET http://api.example:{server.port}/ HTTP/1.1\r\nHost: api.example:{server.port}\r\n\r\n"
            answer = await inside.say(line.encode())
        return answer, inside.facts[0]["bytes_in"]

    short = await seen(VALUE)
    assert short == await seen(VALUE * 5)
    assert b"before [redacted] after" in short[0]
