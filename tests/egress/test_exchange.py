"""Requests and answers: each with its end where both sides see it, none before its turn, none sent twice unasked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ringfence.core.box import Installs, NetworkRule, Reply
from ringfence.core.brokering import OutboundRequest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Status
from ringfence.egress.rules import Rules
from ringfence.egress.substitution import Substitution
from ringfence.egress.wire import ProxyLimits
from tests.egress.outside import LOCAL, LOOPBACK, OK, OPEN, Names, Server, answering, box, get, reason, serving, status

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n",
            b"abcde",
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde",
            b"abcde",
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nabcde", b"abcde"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_a_real_client_gets_every_kind_of_answer(answer: bytes, body: bytes) -> None:
    closing = Server(answer, closes=True)
    async with answering(closing), box([OPEN], LOCAL) as inside, aiohttp.ClientSession() as session:
        url, proxy = f"http://api.example:{closing.port}/", f"http://127.0.0.1:{inside.port}"
        for _ in range(2):
            async with session.get(url, proxy=proxy) as got:
                assert await got.read() == body


async def test_a_real_client_sends_every_kind_of_body() -> None:
    async def parts():
        for part in (b"x" * 70000, b"y", b"z" * 3000):
            yield part

    async with answering(Server()) as server, box([OPEN], LOCAL) as inside, aiohttp.ClientSession() as session:
        url, proxy = f"http://api.example:{server.port}/", f"http://127.0.0.1:{inside.port}"
        async with session.post(url, proxy=proxy, data=b"x" * 200000) as got:
            assert got.status == 200
        async with session.put(url, proxy=proxy, data=parts(), expect100=True) as got:
            assert got.status == 200
    first, second = server.requests
    assert first.endswith(b"x" * 200000) and b"Expect" not in second
    body = second.partition(b"\r\n\r\n")[2]
    assert [body.count(letter) for letter in (b"x", b"y", b"z")] == [70000, 1, 3000]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("5;ext=1\r\nhello\r\n0\r\n\r\n", "chunk_extension"),
        ("5;\r\nhello\r\n0\r\n\r\n", "chunk_extension"),
        *(
            (f"{size}\r\nhello\r\n0\r\n\r\n", "chunk_syntax")
            for size in ("0x5", "-5", "+5", " 5", "5 ", "", "f" * 17, "5_0")
        ),
        ("5\nhello\r\n0\r\n\r\n", "chunk_syntax"),
        ("3\r\nhello\r\n0\r\n\r\n", "chunk_syntax"),
        ("5\r\nhello\n0\r\n\r\n", "chunk_syntax"),
        ("0\r\n" + "X: y\r\n" * 40 + "\r\n", "too_many_headers"),
    ],
)
async def test_a_body_in_bad_chunks_never_looks_whole_outside(body: str, expected: str) -> None:
    async with answering(Server()) as server, box([OPEN], LOCAL) as inside:
        head = get(server.port, extra="Transfer-Encoding: chunked\r\n").replace(b"GET", b"POST")
        answer = await inside.say(head + body.encode() + get(server.port, "/smuggled"))
        assert reason(answer) == expected
        assert server.requests == [], "neither the request nor what was behind it"


async def test_requests_sent_ahead_are_answered_in_order_one_at_a_time() -> None:
    seen: list[bytes] = []

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
            with pytest.raises(TimeoutError):  # The next one is not sent before this one was answered.
                await asyncio.wait_for(reader.read(1), 0.05)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + seen[-1])

    async with serving(slow) as port, box([OPEN], LOCAL) as inside:
        client = await inside.open()
        client.writer.write(get(port, "/1") + get(port, "/2"))
        answers = [await client.ask(get(port, "/3")), await client.ask(b""), await client.ask(b"")]
        assert seen == [b"/1", b"/2", b"/3"]
        assert [answer[-2:] for answer in answers] == [b"/1", b"/2", b"/3"]


async def test_what_follows_a_refused_body_is_not_taken_for_a_request() -> None:
    async with (
        answering(Server()) as server,
        box([NetworkRule("r", ("api.example",), methods=("GET",), addresses=LOOPBACK)], LOCAL) as inside,
    ):
        hidden = get(server.port, "/hidden")
        head = get(server.port, extra=f"Content-Length: {len(hidden)}\r\n").replace(b"GET", b"POST")
        answer = await inside.say(head + hidden)
        assert answer.count(b"HTTP/1.1 ") == 1 and reason(answer) == "method"
        assert server.requests == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "no_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "bad_response"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "bad_response"),
        (b"SSH-2.0-x\r\n\r\n", "bad_response"),
        (b"HTTP/1.1 200 OK\r\nX: y", "bad_response"),
        (b"HTTP/1.1 200 OK\nX: y\n\n", "bad_response"),
    ],
)
async def test_what_failed_outside_is_a_502_on_record(answer: bytes, expected: str) -> None:
    async with answering(Server(answer, closes=True)) as server, box([OPEN], LOCAL) as inside:
        got = await inside.say(get(server.port))
        assert (status(got), reason(got)) == (502, expected)
        assert [(f["verdict"], f["rule"], f["reason"]) for f in inside.facts] == [("failed", "open", expected)]


async def test_an_answer_that_breaks_off_breaks_off_for_the_client_too() -> None:
    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"
    async with answering(Server(broken, closes=True)) as server, box([OPEN], LOCAL) as inside:
        await inside.say(get(server.port))
        assert [(f["verdict"], f["reason"]) for f in inside.facts] == [("failed", "bad_response")]


async def test_a_server_that_answers_before_it_has_read_all_is_heard() -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)

    async with serving(hasty) as port, box([OPEN], LOCAL) as inside:
        head = get(port, extra="Content-Length: 9000000\r\n").replace(b"GET", b"POST")
        assert status(await inside.say(head + b"x" * 1000)) == 413


async def test_a_kept_connection_that_ended_is_opened_again_for_a_request_without_effect() -> None:
    async with answering(Server(OK, closes=True)) as server, box([OPEN], LOCAL) as inside:
        client = await inside.open()
        for _ in range(3):
            assert status(await client.ask(get(server.port))) == 200
        assert server.connections == 3


async def test_a_server_that_never_answers_fails_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)

    async with serving(silent) as port, box([OPEN], LOCAL, limits=ProxyLimits(answer_seconds=0.1)) as inside:
        assert status(await inside.say(get(port))) == 502
        posted = get(port, extra="Content-Length: 1\r\n").replace(b"GET", b"POST") + b"x"
        assert reason(await inside.say(posted)) == "timeout"


async def test_a_secret_is_never_put_into_a_request_in_clear() -> None:
    async def broker(asked: OutboundRequest) -> Substitution:
        return Substitution(put={"Authorization": "Bearer REAL"})

    async with answering(Server()) as server, box([OPEN], LOCAL, substitute=broker) as inside:
        assert reason(await inside.say(get(server.port))) == "secret_in_clear"
        assert server.connections == 0


async def test_a_broker_may_refuse_or_have_nothing() -> None:
    async def broker(asked: OutboundRequest) -> Substitution:
        if asked.path == "/refused":
            raise Refused(Status.DENIED, "placeholder", "not for this host")
        raise Unavailable("vault", "the vault does not answer")

    async with answering(Server()) as server, box([OPEN], LOCAL, substitute=broker) as inside:
        refused, failed = await inside.say(get(server.port, "/refused")), await inside.say(get(server.port))
        assert (status(refused), reason(refused), status(failed), reason(failed)) == (403, "placeholder", 502, "vault")
        assert server.connections == 0


async def test_a_broken_broker_lets_nothing_out() -> None:
    async def broker(asked: OutboundRequest) -> Substitution:
        raise ZeroDivisionError

    async with answering(Server()) as server, box([OPEN], LOCAL, substitute=broker) as inside:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        assert await inside.say(get(server.port)) == b""
        assert [(f["verdict"], f["reason"]) for f in inside.facts] == [("failed", "internal")]
        assert server.connections == 0


async def test_a_head_that_comes_byte_by_byte_is_a_head() -> None:
    async with answering(Server()) as server, box([OPEN], LOCAL) as inside:
        client = await inside.open()
        *most, last = get(server.port)
        for byte in most:
            client.writer.write(bytes((byte,)))
            await asyncio.sleep(0.001)
        assert status(await client.ask(bytes((last,)))) == 200


# ── Our own answers ──────────────────────────────────────────────────────────────────────────────

PLACE = "ours.internal"
OURS = NetworkRule("ours", (f"{PLACE}:80",), installs=Installs(("six",)))
EVERYTHING = NetworkRule("everything", ("*",))


class Answers:
    """Implements `box.InstallIndex`."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[str] = []

    async def answer(self, target: str) -> Reply:
        self.asked.append(target)
        return self.reply

    def handed_out(self) -> tuple[Mapping[str, Any], ...]:
        return ()


def request(method: str, target: str = "/simple/six/", extra: str = "") -> bytes:
    return f"{method} http://{PLACE}{target} HTTP/1.1\r\nHost: {PLACE}\r\n{extra}\r\n".encode()


async def test_a_page_is_answered_and_the_connection_is_kept() -> None:
    index, names = Answers(Reply(b"page", "text/html")), Names()
    async with box(Rules([OURS], index), names) as inside:
        client = await inside.open()
        for _ in range(2):
            answer = await client.ask(request("GET"))
            assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"page")
        assert b"text/html" in await client.ask(request("GET", "/", "Connection: close\r\n"))
    assert index.asked == ["/simple/six/", "/simple/six/", "/"] and names.asked == []
    assert [(fact["verdict"], fact["rule"], fact["bytes_out"]) for fact in inside.facts] == [("allowed", "ours", 0)] * 3


async def test_a_head_has_a_length_and_no_body() -> None:
    async with box(Rules([OURS], Answers(Reply(b"page")))) as inside:
        answer = await inside.say(request("HEAD"))
    assert b"Content-Length: 4\r\n" in answer and answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
async def test_a_file_is_sent_as_it_is(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    async with box(Rules([OURS], Answers(Reply(path)))) as inside:
        answer = await (await inside.open()).ask(request("GET"))
    assert answer.partition(b"\r\n\r\n")[2] == b"x" * size


async def test_a_file_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    async with box(Rules([OURS], Answers(Reply(tmp_path / "none")))) as inside:
        await inside.say(request("GET"))
    assert [(fact["verdict"], fact["reason"]) for fact in inside.facts] == [("failed", "no_answer")]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_nothing_can_be_sent_there(method: str) -> None:
    index = Answers(Reply(b"page"))
    async with box(Rules([OURS], index)) as inside:
        answer = await inside.say(request(method, extra="Content-Length: 1\r\n") + b"x")
    assert (status(answer), reason(answer), index.asked) == (403, "method", [])


async def test_there_is_no_tunnel_there_and_no_other_rule_has_that_place() -> None:
    index, names = Answers(Reply(b"page")), Names()
    async with box(Rules([OURS, EVERYTHING], index), names) as inside:
        client = await inside.open()
        assert b" 403 " in await client.connect(f"{PLACE}:80")
        assert (await inside.say(request("GET"))).endswith(b"page")
        assert status(await inside.say(get(81, host=PLACE))) == 502
    assert names.asked == [PLACE]  # another port of that name is the outside's, where it is not known


async def test_a_refusal_is_on_record_as_one() -> None:
    index = Answers(Reply(b"no", status=403, phrase="not that one", refused="package_denied"))
    async with box(Rules([OURS], index)) as inside:
        answer = await inside.say(request("GET"))
    assert answer.startswith(b"HTTP/1.1 403 not that one\r\n")
    assert [(fact["verdict"], fact["reason"]) for fact in inside.facts] == [("denied", "package_denied")]


async def test_without_an_index_it_fails() -> None:
    async with box([OURS]) as inside:
        answer = await inside.say(request("GET"))
    assert (status(answer), reason(answer)) == (502, "no_index")
