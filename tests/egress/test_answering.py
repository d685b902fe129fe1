"""What a box asks of us and not of the outside: answered here, and nothing leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ringfence.box import Installs, NetworkRule, Reply
from ringfence.egress.rules import Rules
from tests.egress.outside import Names, box, get, reason, status

pytestmark = pytest.mark.anyio

PLACE = "ours.internal"
OURS = NetworkRule("ours", (f"{PLACE}:80",), installs=Installs(("six",)))
EVERYTHING = NetworkRule("everything", ("*",))


class Answers:
    """Implements `box.Desk`."""

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
    desk, names = Answers(Reply(b"page", "text/html")), Names()
    async with box(Rules([OURS], desk), names) as inside:
        client = await inside.open()
        for _ in range(2):
            answer = await client.ask(request("GET"))
            assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"page")
        assert b"text/html" in await client.ask(request("GET", "/", "Connection: close\r\n"))
    assert desk.asked == ["/simple/six/", "/simple/six/", "/"] and names.asked == []
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
    desk = Answers(Reply(b"page"))
    async with box(Rules([OURS], desk)) as inside:
        answer = await inside.say(request(method, extra="Content-Length: 1\r\n") + b"x")
    assert (status(answer), reason(answer), desk.asked) == (403, "method", [])


async def test_there_is_no_tunnel_there_and_no_other_rule_has_that_place() -> None:
    desk, names = Answers(Reply(b"page")), Names()
    async with box(Rules([OURS, EVERYTHING], desk), names) as inside:
        client = await inside.open()
        assert b" 403 " in await client.connect(f"{PLACE}:80")
        assert (await inside.say(request("GET"))).endswith(b"page")
        assert status(await inside.say(get(81, host=PLACE))) == 502
    assert names.asked == [PLACE]  # another port of that name is the outside's, where it is not known


async def test_a_refusal_is_on_record_as_one() -> None:
    desk = Answers(Reply(b"no", status=403, words="not that one", refused="package_denied"))
    async with box(Rules([OURS], desk)) as inside:
        answer = await inside.say(request("GET"))
    assert answer.startswith(b"HTTP/1.1 403 not that one\r\n")
    assert [(fact["verdict"], fact["reason"]) for fact in inside.facts] == [("denied", "package_denied")]


async def test_without_an_index_it_fails() -> None:
    async with box([OURS]) as inside:
        answer = await inside.say(request("GET"))
    assert (status(answer), reason(answer)) == (502, "no_index")
