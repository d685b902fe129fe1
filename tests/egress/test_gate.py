"""While a box is held, nothing of it leaves, not even a piece of what is under way; afterwards all of it does."""

from __future__ import annotations

import pytest

from tests import tooling
from tests.egress.outside import LOCAL, OPEN, Box, Server, answering, box, get, status

pytestmark = pytest.mark.anyio


async def held(inside: Box, count: int = 1) -> None:
    """Until so many pieces wait."""
    await tooling.until(lambda: inside.attached.waiting == count)


async def test_a_request_that_comes_while_it_is_held_waits_and_is_on_record_when_it_leaves() -> None:
    async with answering(Server()) as server, box([OPEN], LOCAL) as inside:
        inside.attached.hold()
        client = await inside.open()
        client.writer.write(get(server.port))
        await held(inside)
        assert (server.connections, inside.attached.facts()) == (0, [])
        inside.attached.go_on()
        assert status(await client.ask(b"")) == 200
        (fact,) = inside.attached.facts()
    assert (fact["verdict"], fact["count"], len(server.requests)) == ("allowed", 1, 1)


async def test_what_no_rule_allows_is_refused_at_once_also_while_it_is_held() -> None:
    async with box([OPEN], LOCAL) as inside:
        inside.attached.hold()
        assert status(await inside.say(get(80, host="unnamed.test"))) == 403


async def test_a_body_stops_in_its_middle_and_goes_on() -> None:
    async with answering(Server()) as server, box([OPEN], LOCAL) as inside:
        client = await inside.open()
        head = get(server.port, extra="Content-Length: 6\r\n").replace(b"GET", b"POST", 1)
        client.writer.write(head + b"abc")
        await tooling.until(lambda: any(fact["bytes_out"] for fact in inside.attached.facts()))
        await tooling.until(
            lambda: inside.attached.facts()[0]["bytes_out"] > len(head) - len("http://api.example:00000")
        )
        before = inside.attached.facts()
        inside.attached.hold()
        client.writer.write(b"def")
        await held(inside)
        assert (inside.attached.facts(), server.requests) == (before, [])
        inside.attached.go_on()
        assert status(await client.ask(b"")) == 200
    assert server.requests[0].endswith(b"abcdef")


async def test_what_is_held_when_it_ends_has_never_left() -> None:
    async with answering(Server()) as server, box([OPEN], LOCAL) as inside:
        inside.attached.hold()
        client = await inside.open()
        client.writer.write(get(server.port))
        await held(inside)
        facts = await inside.attached.close()
    assert server.connections == 0
    assert [(fact["verdict"], fact["reason"]) for fact in facts] == [("failed", "ended")]
