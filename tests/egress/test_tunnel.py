"""The TLS hello: real ones are read however they are cut, and one for another host does not pass; then tunnels."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from contextlib import suppress

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.core.box import NetworkRule
from ringfence.core.brokering import OutboundRequest
from ringfence.egress import names
from ringfence.egress.substitution import Substitution
from ringfence.egress.tls import Authority
from ringfence.egress.tunnel import BadHello, HelloGuard, check_hello, parse_hello
from ringfence.egress.wire import HttpWire, ProxyLimits, ServedTls
from tests import tooling
from tests.egress.outside import (
    LOCAL,
    LOOPBACK,
    OK,
    Box,
    Client,
    Names,
    Server,
    answering,
    box,
    host_context,
    reason,
    serving,
    status,
    trusting,
)


def real(name: str | None, versions: tuple[ssl.TLSVersion, ssl.TLSVersion] | None = None) -> bytes:
    """The first flight of OpenSSL's own client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if versions:
        context.minimum_version, context.maximum_version = versions
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def vector(size: int, content: bytes) -> bytes:
    return len(content).to_bytes(size) + content


def extension(kind: int, content: bytes) -> bytes:
    return kind.to_bytes(2) + vector(2, content)


def sni(name: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, bytes((kind,)) + vector(2, name)))


def message(*extensions: bytes, tail: bytes = b"") -> bytes:
    body = b"\x03\x03" + bytes(32) + vector(1, b"") + vector(2, b"\x13\x01") + vector(1, b"\0")
    body += vector(2, b"".join(extensions)) + tail
    return b"\x01" + vector(3, body)


def record(content: bytes, kind: int = 22) -> bytes:
    return bytes((kind, 3, 1)) + vector(2, content)


def crafted(*extensions: bytes) -> bytes:
    return record(message(*extensions))


def fragmented(whole: bytes, sizes: list[int]) -> bytes:
    """The same handshake message in records of these lengths, the last one with what is left."""
    content, out = whole[5:], b""
    for size in sizes:
        if 0 < size < len(content):
            out, content = out + record(content[:size]), content[size:]
    return out + record(content)


EXAMPLE = names.host("example.com")
HELLO = real("example.com")
SERVER = Authority().context(EXAMPLE)


def refused(data: bytes, host: str = "example.com") -> str | None:
    guard = HelloGuard(names.host(host))
    try:
        passed = guard.feed(data)
    except BadHello as error:
        return str(error)
    assert passed == data
    return None


def test_a_real_hello_says_its_name() -> None:
    old = real("Example.com", (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2))
    for data in (HELLO, old):
        hello = parse_hello(data)
        assert hello is not None and hello.size == len(data) and not hello.encrypted
        check_hello(hello, EXAMPLE)
    without = parse_hello(real(None))
    assert without is not None and without.name is None


@given(st.lists(st.integers(1, 200), max_size=20), st.data())
def test_a_hello_is_the_same_in_any_records_and_any_pieces(sizes: list[int], data: st.DataObject) -> None:
    whole = fragmented(HELLO, sizes)
    for cut in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=5)):
        assert parse_hello(whole[:cut]) is None
    hello = parse_hello(whole + b"more")
    assert hello is not None and (hello.name, hello.size) == ("example.com", len(whole))


@given(st.lists(st.integers(1, 300), max_size=20), st.lists(st.integers(1, 99), min_size=1, max_size=30))
def test_nothing_leaves_before_the_whole_hello_was_seen(sizes: list[int], cuts: list[int]) -> None:
    whole = fragmented(HELLO, sizes)
    guard, at, passed = HelloGuard(EXAMPLE), 0, b""
    for cut in cuts:
        passed += guard.feed(whole[at : at + cut])
        at = min(at + cut, len(whole))
        assert passed == (whole if at == len(whole) else b"")


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda tail: HELLO[:80] + tail))
@settings(max_examples=tooling.examples(3))
def test_noise_is_refused_or_waited_for(data: bytes) -> None:
    with contextlib.suppress(BadHello):
        parse_hello(data)


def heard(data: bytes) -> list[str | None]:
    """The names that OpenSSL's own server reads from it."""
    found: list[str | None] = []
    SERVER.sni_callback = lambda _tls, name, _context: found.append(name)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(data)
    with contextlib.suppress(ssl.SSLError):
        SERVER.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
    return found


CHANGES = st.lists(st.tuples(st.integers(0, len(HELLO) - 1), st.integers(0, 255)), min_size=1, max_size=3)
AT_THE_NAME = st.tuples(st.integers(-24, 14).map(lambda by: HELLO.index(b"example.com") + by), st.integers(0, 255))


@given(CHANGES | st.lists(AT_THE_NAME, min_size=1, max_size=3))
@settings(max_examples=tooling.examples(4))
def test_what_passes_has_the_name_that_a_server_reads(changes: list[tuple[int, int]]) -> None:
    assert heard(HELLO) == ["example.com"]
    changed = bytearray(HELLO)
    for at, value in changes:
        changed[at] = value
    try:
        hello = parse_hello(changed)
    except BadHello:
        return
    for name in heard(bytes(changed)):
        assert hello is None or hello.name == name


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (crafted(sni(b"other.com")), "sni_mismatch"),
        (crafted(sni(b"example.com.evil.com")), "sni_mismatch"),
        (crafted(sni(b"127.0.0.1")), "sni_mismatch"),
        (crafted(), "sni_missing"),
        (record(b"\x01" + vector(3, message()[4:-2])), "sni_missing"),
        (record(b"\x01" + vector(3, message()[4:-1])), "bad_hello"),
        (crafted(sni(b"example.com\0.evil.com")), "bad_sni"),
        (crafted(sni(b"example%2ecom")), "bad_sni"),
        (crafted(sni("exämple.com".encode())), "bad_sni"),
        (crafted(sni(b"example.com", kind=1)), "bad_sni"),
        (crafted(extension(0, vector(2, b"\0" + vector(2, b"example.com") + b"\0" + vector(2, b"b.c")))), "bad_sni"),
        (crafted(sni(b"example.com"), sni(b"other.com")), "bad_hello"),
        (crafted(sni(b"example.com"), extension(0xFE0D, b"\0\0\1")), "encrypted_hello"),
        (record(message(sni(b"example.com"), tail=b"x")), "bad_hello"),
        (record(message(sni(b"example.com")) + message(sni(b"example.com"))), "bad_hello"),
        (record(b""), "bad_hello"),
        (record(b"\x01\xff\xff\xff"), "bad_hello"),
        (record(b"\x02" + bytes(40)), "not_tls"),
        (b"GET / HTTP/1.1\r\n", "not_tls"),
        (b"SSH-2.0-x\r\n", "not_tls"),
        (b"\x80\x2e\x01\x03\x01", "not_tls"),
        (b"".join(record(message(sni(b"example.com"))[i : i + 1]) for i in range(70)), "bad_hello"),
    ],
)
def test_a_hello_for_somebody_else_or_for_nobody_is_refused(data: bytes, reason: str) -> None:
    assert refused(data) == reason


@pytest.mark.parametrize("name", [b"example.com", b"EXAMPLE.com", b"example.com."])
def test_every_spelling_of_the_host_passes(name: bytes) -> None:
    assert refused(crafted(sni(name))) is None


def test_an_address_needs_no_name_and_takes_no_other() -> None:
    assert refused(crafted(), "192.0.2.1") is None
    assert refused(crafted(sni(b"192.0.2.1")), "192.0.2.1") is None
    assert refused(crafted(sni(b"example.com")), "192.0.2.1") == "sni_mismatch"


CHANGE = record(b"\1", kind=20)
WARNING = record(b"\1\x5a", kind=21)


@pytest.mark.parametrize("before", [b"", CHANGE, CHANGE + CHANGE, WARNING, WARNING * 3 + CHANGE, record(b"", kind=21)])
def test_a_second_hello_is_read_as_well(before: bytes) -> None:
    first = crafted(sni(b"example.com"))
    assert refused(first + before + crafted(sni(b"example.com"))) is None
    assert refused(first + before + crafted(sni(b"other.com"))) == "sni_mismatch"
    assert refused(first + before + fragmented(crafted(sni(b"other.com")), [1, 1, 1])) == "sni_mismatch"
    assert refused(first * 3) == "bad_hello"


@pytest.mark.parametrize("between", [record(b""), record(b"\1", kind=24), record(b"", kind=0), b"\x80\x2e\1\3\1"])
def test_what_no_client_sends_between_hellos_ends_the_tunnel(between: bytes) -> None:
    first = crafted(sni(b"example.com"))
    assert refused(first + between + crafted(sni(b"other.com"))) == "bad_hello"


def test_early_data_hides_no_second_hello() -> None:
    first = crafted(sni(b"example.com"), extension(42, b""))
    early = record(bytes(500), kind=23)
    assert refused(first + early + early + CHANGE + crafted(sni(b"other.com"))) == "sni_mismatch"


@pytest.mark.parametrize(
    "after", [record(b"\x10" + bytes(40)), CHANGE + record(b"\x01\xff" + bytes(38)), record(b"x", kind=23)]
)
def test_what_follows_a_hello_passes_untouched(after: bytes) -> None:
    guard = HelloGuard(EXAMPLE)
    data = crafted(sni(b"example.com")) + after
    assert b"".join(guard.feed(data[at : at + 1]) for at in range(len(data))) == data
    assert guard.open and guard.feed(crafted(sni(b"other.com"))) == crafted(sni(b"other.com"))


# ── TLS through the proxy ────────────────────────────────────────────────────────────────────────

pytestmark = pytest.mark.anyio

OUTSIDE = Authority()
TRUST = trusting(OUTSIDE)
PLAIN = NetworkRule("plain", ("api.example",), addresses=LOOPBACK)
READ = NetworkRule("read", ("api.example",), addresses=LOOPBACK, methods=("GET", "HEAD"), paths=("/v1",))
ALERT = b"\x15\x03\x03\x00\x02\x02\x31"


def serves(server: Server, name: str = "api.example"):
    return answering(server, host_context(OUTSIDE, name))


def get(path: str = "/v1/x", host: str = "", extra: str = "", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n".encode()


async def tunnelled(inside: Box, place: str, context: ssl.SSLContext, name: str | None = "api.example") -> Client:
    client = await inside.open()
    assert status(await client.connect(place)) == 200
    await client.tls(context, name)
    return client


# ── tunnels ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_tunnel_is_not_inspected_and_says_so() -> None:
    async with serves(Server()) as server, box([PLAIN], LOCAL) as inside:
        client = await tunnelled(inside, f"api.example:{server.port}", TRUST)
        assert (await client.ask(get(host="whoever.example"))).endswith(b"ok")
        client.writer.close()
        await asyncio.sleep(0.05)
        (fact,) = await inside.attached.close()
    assert (fact["host"], fact["verdict"], fact["rule"], fact["inspected"]) == (
        "api.example",
        "allowed",
        "plain",
        False,
    )
    assert fact["bytes_out"] > 500 and fact["bytes_in"] > 500


async def test_nothing_leaves_through_a_tunnel_that_is_held() -> None:
    async with serves(Server()) as server, box([PLAIN], LOCAL) as inside:
        client = await tunnelled(inside, f"api.example:{server.port}", TRUST)
        assert (await client.ask(get(host="whoever.example"))).endswith(b"ok")
        inside.attached.hold()
        before = inside.attached.facts()[0]["bytes_out"]
        client.writer.write(get(host="whoever.example"))
        await tooling.until(lambda: inside.attached.waiting == 1)
        assert (inside.attached.facts()[0]["bytes_out"], len(server.requests)) == (before, 1)
        inside.attached.go_on()
        assert (await client.ask(b"")).endswith(b"ok")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (real("other.example"), "sni_mismatch"),
        (real(None), "sni_missing"),
        (crafted(sni(b"api.example"), extension(0xFE0D, b"\0")), "encrypted_hello"),
        (b"GET / HTTP/1.1\r\nHost: api.example\r\n\r\n", "not_tls"),
        (b"SSH-2.0-x\r\n", "not_tls"),
        (crafted(sni(b"api.example")) + crafted(sni(b"other.example")), "sni_mismatch"),
    ],
    ids=["another name", "no name", "a hidden name", "http", "ssh", "another name the second time"],
)
async def test_a_hello_for_somebody_else_ends_a_tunnel(said: bytes, expected: str) -> None:
    came = bytearray()

    async def listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            came.extend(data)

    async with serving(listening) as port, box([PLAIN], LOCAL) as inside:
        client = await inside.open()
        assert status(await client.connect(f"api.example:{port}")) == 200
        client.writer.write(said)
        assert await client.rest() == ALERT
        assert b"other.example" not in came
        facts = await inside.attached.close()
        assert [(f["verdict"], f["rule"], f["reason"]) for f in facts] == [("denied", "plain", expected)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [(real("other.example"), "sni_mismatch"), (real(None), "sni_missing"), (b"SSH-2.0-x\r\n", "not_tls")],
)
async def test_tls_that_ends_here_is_for_the_host_of_the_tunnel(said: bytes, expected: str) -> None:
    async with box([READ], LOCAL) as inside:
        client = await inside.open()
        assert status(await client.connect("api.example:443")) == 200
        client.writer.write(said)
        assert await client.rest() == ALERT
        facts = await inside.attached.close()
        assert [(f["verdict"], f["rule"], f["reason"]) for f in facts] == [("denied", "read", expected)]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        *(("other.example:443", (403, "host")), ("127.0.0.1:443", (403, "host")), ("0x7f.1:443", (403, "host"))),
        *(("api.example", (400, "target")), ("api.example:0", (400, "target")), ("u@api.example:443", (400, "target"))),
        *(("https://api.example/", (400, "target")), ("api.example%00:443", (400, "target")), ("/", (400, "target"))),
    ],
)
async def test_a_tunnel_elsewhere_is_refused(place: str, expected: tuple[int, str]) -> None:
    async with box([PLAIN], LOCAL) as inside:
        answer = await inside.say(f"CONNECT {place} HTTP/1.1\r\n\r\n".encode())
        assert (status(answer), reason(answer)) == expected


async def test_a_tunnel_says_whom_it_is_for_once() -> None:
    async with box([PLAIN], LOCAL) as inside:
        answer = await inside.say(b"CONNECT api.example:443 HTTP/1.1\r\nHost: other.example:443\r\n\r\n")
        assert (status(answer), reason(answer)) == (403, "host_mismatch")


async def test_a_tunnel_to_what_is_not_public_or_not_there_is_refused_before_it_is_promised() -> None:
    rules = [NetworkRule("any", ("*",)), NetworkRule("lit", ("127.0.0.1:1",))]
    async with box(rules, Names(inner_example=["10.0.0.1"])) as inside:
        client = await inside.open()
        assert reason(await client.connect("inner.example:443")) == "address_private"
        client = await inside.open()
        assert reason(await client.connect("unknown.example:443")) == "resolve"
        client = await inside.open()
        assert reason(await client.connect("127.0.0.1:1")) == "connect"


async def test_a_tunnel_to_an_address_needs_no_name() -> None:
    async with serves(Server(), "127.0.0.1") as server, box([NetworkRule("lit", ("127.0.0.1",))]) as inside:
        client = await tunnelled(inside, f"127.0.0.1:{server.port}", TRUST, "127.0.0.1")
        assert (await client.ask(get(host="127.0.0.1"))).endswith(b"ok")


async def test_budgets_cut_a_tunnel() -> None:
    rule = NetworkRule("small", ("api.example",), addresses=LOOPBACK, max_bytes_out=3000)
    async with serves(Server()) as server, box([rule], LOCAL) as inside:
        client = await tunnelled(inside, f"api.example:{server.port}", TRUST)
        client.writer.write(get(extra=f"X: {'y' * 4000}\r\n"))
        assert await client.rest() == b""
        assert server.requests == [] and inside.facts[0]["reason"] == "max_bytes_out"
        assert inside.facts[0]["bytes_out"] <= 3000


async def test_a_silent_tunnel_ends() -> None:
    async with serves(Server()) as server, box([PLAIN], LOCAL, limits=ProxyLimits(head_seconds=0.2)) as inside:
        client = await inside.open()
        await client.connect(f"api.example:{server.port}")
        assert await asyncio.wait_for(client.reader.read(), tooling.PATIENCE) == b""
        assert inside.facts[-1]["reason"] == "sni_missing"
    for seconds in tooling.LONGER:
        async with serves(Server()) as server, box([PLAIN], LOCAL, limits=ProxyLimits(idle_seconds=seconds)) as inside:
            with suppress(OSError, EOFError):  # a handshake may take longer than that, too
                client = await tunnelled(inside, f"api.example:{server.port}", TRUST)
                assert await asyncio.wait_for(client.reader.read(), tooling.PATIENCE) == b""
                assert inside.facts[-1]["verdict"] == "allowed" and inside.facts[-1]["reason"] is None
                return
    pytest.fail("there was no tunnel")


async def test_a_tunnel_carries_much_in_both_directions() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async with serving(echo, host_context(OUTSIDE, "api.example")) as port, box([PLAIN], LOCAL) as inside:
        client = await tunnelled(inside, f"api.example:{port}", TRUST)
        client.writer.write(b"z" * 3_000_000)
        assert await client.reader.readexactly(3_000_000) == b"z" * 3_000_000


async def test_closing_ends_tunnels_and_counts_them() -> None:
    async with serves(Server()) as server, box([PLAIN], LOCAL) as inside:
        client = await tunnelled(inside, f"api.example:{server.port}", TRUST)
        (fact,) = await inside.attached.close()
        assert (fact["verdict"], fact["reason"], fact["count"]) == ("allowed", "ended", 1)
        assert await client.rest() == b""


# ── TLS that ends here ────────────────────────────────────────────────────────────────────────────


async def test_methods_and_paths_are_judged_inside_of_tls() -> None:
    async with serves(Server()) as server, box([READ], LOCAL, TRUST) as inside:
        host = f"api.example:{server.port}"
        client = await tunnelled(inside, host, trusting(inside.attached.authority))
        assert (await client.ask(get(host=host))).endswith(b"ok")
        assert reason(await client.ask(get(host=host, method="DELETE"))) == "method"
        assert reason(await client.ask(get("/v2", host=host))) == "path"
        assert reason(await client.ask(get("/v1/../v2", host=host))) == "ambiguous_path"
        assert (await client.ask(get("/v1/y", host=host))).endswith(b"ok")
        assert [request.split(b" ")[1] for request in server.requests] == [b"/v1/x", b"/v1/y"]
        facts = await inside.attached.close()
    assert all(f["inspected"] and f["host"] == "api.example" for f in facts)
    assert [(f["verdict"], f["reason"], f["count"]) for f in facts] == [
        *(("allowed", None, 2), ("denied", "method", 1), ("denied", "path", 1), ("denied", "ambiguous_path", 1)),
    ]


@pytest.mark.parametrize("box_ends", [True, False])
async def test_nothing_is_left_open_for_a_server_that_never_says_goodbye(box_ends: bool) -> None:
    heard: list[bytes] = []
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        secured = ServedTls(HttpWire(reader, writer), host_context(OUTSIDE, "api.example"))
        await secured.handshake()
        await secured.head(1000)
        await secured.send(OK)
        while data := await reader.read(1000):
            heard.append(data)
        over.set()

    async with serving(silent) as port, box([READ], LOCAL, TRUST) as inside:
        host = f"api.example:{port}"
        client = await tunnelled(inside, host, trusting(inside.attached.authority))
        assert (await client.ask(get(host=host))).endswith(b"ok")
        await (inside.attached.close() if box_ends else asyncio.sleep(0))
        client.writer.transport.abort()
        await asyncio.wait_for(over.wait(), tooling.PATIENCE)
    assert len(heard) == (0 if box_ends else 1), "a goodbye, unless there is nobody any more to say it"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (get(host="other.example"), "host_mismatch"),
        (get(host="api.example:1"), "host_mismatch"),
        (get("https://other.example/v1", host="{host}"), "target"),
        (get(host="{host}", extra="Host: other.example\r\n"), "host_repeated"),
        (get(host="{host}", extra="Upgrade: h2c\r\nConnection: Upgrade\r\n"), "upgrade"),
        (get("other.example:443", host="{host}", method="CONNECT"), "target"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "http2"),
        (b"GET /v1 HTTP/1.1\r\n\r\n", "host_missing"),
    ],
)
async def test_every_request_inside_is_for_the_host_of_the_tunnel(said: bytes, expected: str) -> None:
    async with serves(Server()) as server, box([READ], LOCAL, TRUST) as inside:
        host = f"api.example:{server.port}"
        client = await tunnelled(inside, host, trusting(inside.attached.authority))
        assert (await client.ask(get(host=host))).endswith(b"ok")
        assert reason(await client.ask(said.replace(b"{host}", host.encode()))) == expected
        assert len(server.requests) == 1
        assert inside.facts[-1]["host"] == "api.example"


async def test_the_box_has_to_trust_this_runs_authority_and_no_other() -> None:
    async with serves(Server()) as server, box([READ], LOCAL, TRUST) as inside:
        client = await inside.open()
        await client.connect(f"api.example:{server.port}")
        with pytest.raises(ssl.SSLError):
            await client.tls(TRUST, "api.example")
        await tooling.until(lambda: inside.facts)
        assert [(f["verdict"], f["reason"]) for f in inside.facts] == [("failed", "client_tls")]


async def test_certificates_outside_are_verified() -> None:
    for context in (host_context(Authority(), "api.example"), host_context(OUTSIDE, "other.example")):
        context.sni_callback = None
        async with answering(Server(), context) as server, box([READ], LOCAL, TRUST) as inside:
            host = f"api.example:{server.port}"
            client = await tunnelled(inside, host, trusting(inside.attached.authority))
            answer = await client.ask(get(host=host))
            assert (status(answer), reason(answer)) == (502, "upstream_certificate")
            assert server.requests == []


async def test_a_broker_puts_the_secret_in_and_takes_the_callers_own_off() -> None:
    asked: list[OutboundRequest] = []

    async def broker(request: OutboundRequest) -> Substitution:
        asked.append(request)
        return Substitution(strip=frozenset({"x-placeholder"}), put={"Authorization": "Bearer REAL"})

    rule = NetworkRule("api", ("api.example",), addresses=LOOPBACK, terminate=True)
    async with serves(Server()) as server, box([rule], LOCAL, TRUST, substitute=broker) as inside:
        host = f"api.example:{server.port}"
        client = await tunnelled(inside, host, trusting(inside.attached.authority))
        await client.ask(get("/a?b", host=host, extra="authorization: Bearer FAKE\r\nX-Placeholder: p\r\nX-Own: y\r\n"))
    assert server.requests == [
        f"GET /a?b HTTP/1.1\r\nHost: {host}\r\nX-Own: y\r\nAuthorization: Bearer REAL\r\n\r\n".encode()
    ]
    assert (asked[0].scheme, asked[0].host, asked[0].method, asked[0].path, asked[0].rule) == (
        "https",
        "api.example",
        "GET",
        "/a?b",
        "api",
    )
    assert "REAL" not in repr(Substitution(put={"Authorization": "Bearer REAL"}))


async def test_a_secret_that_is_more_than_a_line_goes_nowhere() -> None:
    async def broker(request: OutboundRequest) -> Substitution:
        return Substitution(put={"Authorization": "a\r\nHost: b"})

    async with serves(Server()) as server, box([READ], LOCAL, TRUST, substitute=broker) as inside:
        host = f"api.example:{server.port}"
        client = await tunnelled(inside, host, trusting(inside.attached.authority))
        assert reason(await client.ask(get(host=host))) == "bad_secret"
        assert server.connections == 0


async def test_a_real_client_works_through_both() -> None:
    for rule in (PLAIN, READ):
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        async with serves(Server(chunked)) as server, box([rule], LOCAL, TRUST) as inside:
            context = TRUST if rule is PLAIN else trusting(inside.attached.authority)
            async with aiohttp.ClientSession() as session:
                url, proxy = f"https://api.example:{server.port}/v1/x", f"http://127.0.0.1:{inside.port}"
                for _ in range(2):
                    async with session.get(url, proxy=proxy, ssl=context) as got:
                        assert await got.text() == "hello"
            assert len(server.requests) == 2


async def test_large_bodies_pass_through_both_ends_of_tls() -> None:
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 2_000_000
    rule = NetworkRule("api", ("api.example",), addresses=LOOPBACK, terminate=True)
    async with serves(Server(large)) as server, box([rule], LOCAL, TRUST) as inside:
        host = f"api.example:{server.port}"
        client = await tunnelled(inside, host, trusting(inside.attached.authority))
        body = b"y" * 1_000_000
        got = await client.ask(get(host=host, method="PUT", extra=f"Content-Length: {len(body)}\r\n") + body)
        assert got.endswith(b"x" * 2_000_000) and server.requests[0].endswith(body)
        assert (await client.ask(get(host=host))).startswith(b"HTTP/1.1 200")


async def test_a_server_that_closes_after_each_answer_is_dialled_again() -> None:
    async with serves(Server(OK, closes=True)) as server, box([READ], LOCAL, TRUST) as inside:
        host = f"api.example:{server.port}"
        client = await tunnelled(inside, host, trusting(inside.attached.authority))
        for _ in range(3):
            assert (await client.ask(get(host=host))).endswith(b"ok")
        assert server.connections == 3
