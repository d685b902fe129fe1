"""The TLS hello: real ones are read however they are cut, and what is for somebody else does not pass."""

from __future__ import annotations

import contextlib
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.egress import names
from ringfence.egress.hello import BadHello, HelloGuard, check, parse
from ringfence.egress.tls import Authority


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
        hello = parse(data)
        assert hello is not None and hello.size == len(data) and not hello.encrypted
        check(hello, EXAMPLE)
    without = parse(real(None))
    assert without is not None and without.name is None


@given(st.lists(st.integers(1, 200), max_size=20), st.data())
def test_a_hello_is_the_same_in_any_records_and_any_pieces(sizes: list[int], data: st.DataObject) -> None:
    whole = fragmented(HELLO, sizes)
    for cut in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=5)):
        assert parse(whole[:cut]) is None
    hello = parse(whole + b"more")
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
@settings(max_examples=300)
def test_noise_is_refused_or_waited_for(data: bytes) -> None:
    with contextlib.suppress(BadHello):
        parse(data)


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
@settings(max_examples=400)
def test_what_passes_has_the_name_that_a_server_reads(changes: list[tuple[int, int]]) -> None:
    assert heard(HELLO) == ["example.com"]
    changed = bytearray(HELLO)
    for at, value in changes:
        changed[at] = value
    try:
        hello = parse(changed)
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


@pytest.mark.parametrize("before", [b"", CHANGE, CHANGE + CHANGE])
def test_a_second_hello_is_read_as_well(before: bytes) -> None:
    first = crafted(sni(b"example.com"))
    assert refused(first + before + crafted(sni(b"example.com"))) is None
    assert refused(first + before + crafted(sni(b"other.com"))) == "sni_mismatch"
    assert refused(first + before + fragmented(crafted(sni(b"other.com")), [1, 1, 1])) == "sni_mismatch"
    assert refused(first * 3) == "bad_hello"


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
