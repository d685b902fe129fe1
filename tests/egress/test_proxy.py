"""The proxy of a box: what is allowed arrives as it was meant, what is not is refused, and all of it is on record."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.core import own_ports
from ringfence.core.box import NetworkRule
from ringfence.egress.wire import ProxyLimits
from tests import tooling
from tests.egress.outside import LOCAL, LOOPBACK, OK, OPEN, Names, Server, answering, box, get, reason, serving, status

pytestmark = pytest.mark.anyio


async def test_an_allowed_request_arrives_rewritten_and_is_on_record() -> None:
    async with answering(Server()) as server, box([OPEN], LOCAL) as inside:
        client = await inside.open()
        extra = "Proxy-Authorization: x\r\nProxy-Connection: keep-alive\r\nX-Own: y\r\n"
        assert status(await client.ask(get(server.port, "/a?b", extra=extra))) == 200
        assert server.requests == [f"GET /a?b HTTP/1.1\r\nHost: api.example:{server.port}\r\nX-Own: y\r\n\r\n".encode()]
        (fact,) = await inside.attached.close()
    assert fact == {
        **{"host": "api.example", "port": server.port, "verdict": "allowed", "rule": "open", "reason": None},
        **{"inspected": True, "bytes_in": len(OK), "bytes_out": len(server.requests[0]), "count": 1},
    }
    assert inside.facts == [fact]


async def test_connections_are_kept_and_each_request_is_judged() -> None:
    rules = [NetworkRule("read", ("api.example",), methods=("GET",), paths=("/v1",), addresses=LOOPBACK)]
    async with answering(Server()) as server, box(rules, LOCAL) as inside:
        client = await inside.open()
        assert status(await client.ask(get(server.port, "/v1/a"))) == 200
        denied = await client.ask(get(server.port, "/v2"))
        assert (status(denied), reason(denied)) == (403, "path") and b"X-Ringfence-Rule: read\r\n" in denied
        posted = get(server.port, "/v1").replace(b"GET", b"POST")
        assert reason(await client.ask(posted)) == "method"
        assert status(await client.ask(get(server.port, "/v1/b"))) == 200
        assert reason(await client.ask(get(server.port, host="other.example"))) == "host"
        assert (len(server.requests), server.connections) == (2, 1)
        facts = await inside.attached.close()
    assert [(f["verdict"], f["reason"], f["rule"], f["count"]) for f in facts] == [
        *(("allowed", None, "read", 2), ("denied", "path", "read", 1)),
        *(("denied", "method", "read", 1), ("denied", "host", "denied", 1)),
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("GET http://api.example:{p}/ HTTP/1.1\r\nHost: other.example:{p}\r\n\r\n", (403, "host_mismatch")),
        ("GET http://api.example:{p}/ HTTP/1.1\r\nHost: api.example\r\n\r\n", (403, "host_mismatch")),
        ("GET http://api.example:{p}/ HTTP/1.1\r\n\r\n", (400, "host_missing")),
        (
            "GET http://api.example:{p}/ HTTP/1.1\r\nHost: api.example:{p}\r\nHost: api.example:{p}\r\n\r\n",
            (400, "host_repeated"),
        ),
        ("GET / HTTP/1.1\r\nHost: api.example:{p}\r\n\r\n", (400, "target")),
        ("GET https://api.example:{p}/ HTTP/1.1\r\nHost: api.example:{p}\r\n\r\n", (400, "https_target")),
        ("GET http://u:p@api.example:{p}/ HTTP/1.1\r\nHost: api.example:{p}\r\n\r\n", (400, "target")),
        ("GET http://api.example%00:{p}/ HTTP/1.1\r\nHost: api.example:{p}\r\n\r\n", (400, "target")),
        ("GET http://api.example:{p}/ HTTP/1.1\nHost: api.example:{p}\n\n", (400, "bare_lf")),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (505, "http2")),
        ("\x16\x03\x01\x02\x00\x01", (400, "request_line")),
        ("GET http://api.example:{p}/ HTTP/1.1\r\nX: " + "y" * 40000, (431, "head_too_large")),
        ("\r\nGET http://api.example:{p}/ HTTP/1.1\r\n\r\n", (400, "request_line")),
    ],
)
async def test_what_is_not_meant_once_is_refused_and_reaches_nobody(said: str, expected: tuple[int, str]) -> None:
    async with answering(Server()) as server, box([OPEN], LOCAL) as inside:
        answer = await inside.say(said.replace("{p}", str(server.port)).encode("latin-1"))
        assert (status(answer), reason(answer)) == expected
        assert server.requests == []
        assert [(f["verdict"], f["reason"]) for f in inside.facts] == [("denied", expected[1])]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(
            ("127.0.0.1", "host"),
            ("0x7f.1", "host"),
            ("2130706433", "host"),
            ("[::1]", "host"),
            ("[::ffff:127.0.0.1]", "host"),
        ),
        *(("169.254.169.254", "host"), ("evilapi.example", "host"), ("api.example.evil.example", "host")),
        *(("private.wild.example", "address_loopback"), ("metadata.wild.example", "address_metadata")),
        *(("mixed.wild.example", "address_private"), ("mapped.wild.example", "address_metadata")),
    ],
)
async def test_an_address_is_reached_only_where_a_rule_names_it(host: str, expected: str) -> None:
    names = Names(
        private_wild_example=["127.0.0.1"],
        metadata_wild_example=["169.254.169.254"],
        mixed_wild_example=["192.0.78.9", "10.0.0.1"],
        mapped_wild_example=["::ffff:169.254.169.254"],
    )
    rules = [NetworkRule("wild", ("*.wild.example",)), NetworkRule("api", ("api.example",), addresses=LOOPBACK)]
    async with answering(Server()) as server, box(rules, names) as inside:
        answer = await inside.say(get(server.port, host=host))
        assert (status(answer), reason(answer)) == (403, expected)
        assert server.connections == 0
        assert all(name.endswith(".wild.example") for name in names.asked), "a name no rule covers is never looked up"


async def test_a_metadata_service_stays_denied_under_every_wildcard() -> None:
    names = Names(metadata_example=["169.254.169.254"])
    rule = NetworkRule("all", ("*", "0.0.0.0/0", "::/0"), addresses=("0.0.0.0/0", "169.254.0.0/16"))
    async with box([rule], names) as inside:
        for host in ("metadata.example", "169.254.169.254", "0xa9fea9fe", "[fd00:ec2::254]", "100.100.100.200"):
            assert reason(await inside.say(get(80, host=host))) in ("address_metadata", "host_mismatch")
        assert {f["reason"] for f in inside.facts} == {"address_metadata"}


async def test_an_address_is_reached_by_a_rule_that_names_it() -> None:
    async with answering(Server()) as server, box([NetworkRule("lit", ("127.0.0.1",))]) as inside:
        client = await inside.open()
        assert status(await client.ask(get(server.port, host="0x7f.1"))) == 200
        assert server.requests[0].split(b"\r\n")[1] == f"Host: 127.0.0.1:{server.port}".encode()


async def test_what_we_listen_on_ourselves_is_reached_by_no_rule() -> None:
    async with (
        answering(Server()) as server,
        box([NetworkRule("lit", ("127.0.0.1", "0.0.0.0", "api.example"))], LOCAL) as inside,
    ):
        mark = own_ports.announce("127.0.0.1", server.port)
        assert mark is not None
        with mark:
            for host in ("127.0.0.1", "0.0.0.0", "api.example"):
                assert reason(await inside.say(get(server.port, host=host))) == "own_port"
        assert server.requests == []
        assert {(fact["verdict"], fact["reason"]) for fact in inside.facts} == {("denied", "own_port")}
        client = await inside.open()
        assert status(await client.ask(get(server.port, host="127.0.0.1"))) == 200, "the mark is gone"


async def test_the_address_that_was_checked_is_the_one_dialled() -> None:
    """A resolver that answers differently the second time gains nothing: there is no second time."""

    class Rebinding(Names):
        async def __call__(self, name: str) -> list[str]:
            self.asked.append(name)
            return ["127.0.0.1"] if len(self.asked) == 1 else ["127.9.9.9"]

    names = Rebinding()
    async with answering(Server()) as server, box([OPEN], names) as inside:
        client = await inside.open()
        for _ in range(3):
            assert status(await client.ask(get(server.port))) == 200
    assert names.asked == ["api.example"]


async def test_a_redirect_is_the_clients_to_follow() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"
    async with answering(Server(moved)) as server, box([OPEN], LOCAL) as inside:
        client = await inside.open()
        assert status(await client.ask(get(server.port))) == 302
        assert status(await client.ask(get(80, host="169.254.169.254"))) == 403


async def test_nobody_there_and_no_such_name_are_502() -> None:
    async with answering(Server()) as server:
        gone = server.port
    async with box([NetworkRule("any", ("*",), addresses=LOOPBACK)], LOCAL) as inside:
        assert reason(await inside.say(get(gone))) == "connect"
        assert reason(await inside.say(get(gone, host="unknown.example"))) == "resolve"


async def test_budgets_are_kept_to_the_byte() -> None:
    rule = NetworkRule("small", ("api.example",), addresses=LOOPBACK, max_bytes_out=400, max_bytes_in=len(OK) * 3)
    async with answering(Server()) as server, box([rule], LOCAL) as inside:
        post = get(server.port, extra="Content-Length: 1000\r\n").replace(b"GET", b"POST")
        assert reason(await inside.say(post + b"x" * 1000)) == "max_bytes_out"
        assert server.connections == 0, "a body that is too long is known before anything is sent"
        chunked = get(server.port, extra="Transfer-Encoding: chunked\r\n").replace(b"GET", b"POST")
        assert reason(await inside.say(chunked + b"1ff\r\n" + b"x" * 511 + b"\r\n0\r\n\r\n")) == "max_bytes_out"
        assert server.requests == []
        got = [await inside.say(get(server.port)) for _ in range(6)]
        assert [status(answer) for answer in got][-1] == 403
        assert sum(f["bytes_out"] for f in inside.facts) <= 400
        assert sum(f["bytes_in"] for f in inside.facts) <= len(OK) * 3


async def test_an_answer_over_its_budget_is_cut() -> None:
    rule = NetworkRule("small", ("api.example",), addresses=LOOPBACK, max_bytes_in=1000)
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500000
    async with answering(Server(large)) as server, box([rule], LOCAL) as inside:
        assert b"x" * 1000 not in await inside.say(get(server.port))
        assert inside.facts[0]["reason"] == "max_bytes_in"


async def test_a_rate_is_kept() -> None:
    rule = NetworkRule("slow", ("api.example",), addresses=LOOPBACK, per_minute=2)
    async with answering(Server()) as server, box([rule], LOCAL) as inside:
        client = await inside.open()
        got = [await client.ask(get(server.port)) for _ in range(4)]
        assert [status(answer) for answer in got] == [200, 200, 403, 403] and reason(got[3]) == "rate"


async def test_a_client_that_dawdles_or_crowds_is_sent_away() -> None:
    async with box([OPEN], LOCAL, limits=ProxyLimits(head_seconds=0.1)) as inside:
        assert reason(await inside.say(b"GET http://api.exa")) == "head_timeout"
    async with box([OPEN], LOCAL, limits=ProxyLimits(connections=2)) as inside:
        for _ in range(2):
            await inside.open()
        assert reason(await inside.say(get(1))) == "connections"
    async with box([OPEN], LOCAL, limits=ProxyLimits(idle_seconds=0.2)) as inside:
        held = await inside.open()
        assert await asyncio.wait_for(held.reader.read(), tooling.PATIENCE) == b"", "an idle connection is closed"


async def test_closing_ends_what_is_under_way_and_tells_of_it() -> None:
    begun = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        begun.set()
        await reader.read()

    async with serving(silent) as port, box([OPEN], LOCAL) as inside:
        client = await inside.open()
        client.writer.write(get(port))
        await asyncio.wait_for(begun.wait(), tooling.PATIENCE)
        (fact,) = await inside.attached.close()
        assert (fact["host"], fact["verdict"], fact["reason"]) == ("api.example", "allowed", "ended")
        assert await client.rest() == b""
        with pytest.raises(OSError):
            await inside.open()


async def test_ever_new_places_do_not_fill_the_memory() -> None:
    async with box([OPEN], LOCAL) as inside:
        client = await inside.open()
        for number in range(300):
            await client.ask(get(80, host=f"h{number}.example"))
        facts = await inside.attached.close()
    assert len(facts) == 201 and sum(f["count"] for f in facts) == 300
