"""One host, one form: whatever a name is written like, and nothing that is an address passes as a name."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ringfence.egress.names import BadName, Endpoint, Host, address_kind, address_refusal, endpoint, host, url


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("bu\u0308cher。example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("r3---sn-a.example", "r3---sn-a.example"),
        ("model_server", "model_server"),
    ],
)
def test_a_name_has_one_form(text: str, canonical: str) -> None:
    assert host(text) == Host(canonical)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "127.1",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "0X7F.1",
        "2130706433",
        "017700000001",
        "0x7f000001",
        "127.0.1",
        "127.0.0.1.",
        "１２７.０.０.１",
        "127。0。0。1",
        "::ffff:127.0.0.1",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:FFFF:7F00:1]",
    ],
)
def test_an_address_is_one_address_in_every_spelling(text: str) -> None:
    assert host(text) == Host("127.0.0.1", ipaddress.IPv4Address("127.0.0.1"))


def test_a_zone_is_no_part_of_an_address() -> None:
    assert host("fe80::1%eth0") == host("[fe80::1%25eth0]") == host("[FE80:0::1]")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a..b",
        ".a",
        "a b",
        "a\x00.b",
        "a%2eb",
        "a%00",
        "a\r\nb",
        "a\nb",
        "u@a",
        "u:p@a",
        "a/b",
        "a\\b",
        "a#b",
        "a?b",
        "-a.b",
        "a-.b",
        "a" * 64 + ".b",
        "a." * 127 + "ab",
        "1.2.3.4.5",
        "256.1.1.1",
        "1.2.3.256",
        "08.1",
        "0x",
        "a.1",
        "4294967296",
        "foo.0x7f",
        "xn--a",
        "xn--80ak6aa92e-.com",
        "ex℀mple.com",
        "a％2eb",
        "[::1",
        "::1]",
        "[127.0.0.1]",
        "[v1.a]",
        "[]",
        "::1%",
        "::1%a b",
        "[::1%25%25a]",
        "\u202ea.b",
        "☃.example",
        "a\xad-",
        "*",
        "*.a",
    ],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(BadName):
        host(text)


@pytest.mark.parametrize(
    "text", ["a", "a:", "a:0", "a:65536", "a:08", "a:+1", "a: 1", "a:1:2", "::1:443", "u@a:1", "[::1]x:1", ":1"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(BadName):
        endpoint(text)


@pytest.mark.parametrize(
    "text",
    [
        "ftp://a/",
        "http:/a",
        "http://",
        "http://u@a/",
        "http://a:b@c/",
        "http://a/#x",
        "http://a\\@b/",
        "http://a/ b",
        "http://a%2eb/",
        "http://a:/",
        "//a/",
        "http://a/\x7f",
        "http://a/é",
        "http://a/" + "b" * 9000,
        "http://a@b@c/",
    ],
)
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(BadName):
        url(text)


def test_a_url_says_whom_it_is_for() -> None:
    parsed = url("HTTPS://Example.com?q=1")
    assert (parsed.scheme, parsed.endpoint, parsed.target) == ("https", Endpoint(Host("example.com"), 443), "/?q=1")
    assert endpoint("[::1]:8080").header("http") == "[::1]:8080"
    assert endpoint("a:443").header("https") == "a"


ANY = st.text(max_size=40) | st.from_regex(r"[0-9a-fA-FxX.:\[\]%]{1,24}", fullmatch=True)


@given(ANY)
@example("0x7f.1")
@example("1.2.3.4%eth0")
def test_the_form_of_a_form_is_itself(text: str) -> None:
    try:
        once = host(text)
    except BadName:
        return
    assert host(once.text) == once
    assert host(once.text.upper()) == once
    assert once.text.isascii() and once.text == once.text.lower()


@given(ANY)
def test_nothing_that_a_resolver_takes_as_an_address_passes_as_a_name(text: str) -> None:
    try:
        found = host(text)
    except BadName:
        return
    if found.address is None:
        with pytest.raises(OSError):
            socket.inet_aton(found.text)
        with pytest.raises(OSError):
            socket.getaddrinfo(found.text, 0, flags=socket.AI_NUMERICHOST)


def spelled(value: int, shape: tuple[int, ...], bases: tuple[int, ...]) -> str:
    """The address in as many numbers as there are widths, each in its base."""
    parts, left = [], 32
    for width in shape:
        left -= width
        parts.append((value >> left) & ((1 << width) - 1))
    write: dict[int, Callable[[int], str]] = {8: lambda n: f"0{n:o}", 10: str, 16: hex, 17: lambda n: f"0X{n:X}"}
    return ".".join(write[base](part) for part, base in zip(parts, bases, strict=False))


SHAPES = st.sampled_from([(8, 8, 8, 8), (8, 8, 16), (8, 24), (32,)])


@given(st.integers(0, 2**32 - 1), SHAPES, st.tuples(*[st.sampled_from([8, 10, 16, 17])] * 4))
def test_all_spellings_of_an_address_are_equal_and_what_the_system_reads(
    value: int, shape: tuple[int, ...], bases: tuple[int, int, int, int]
) -> None:
    text = spelled(value, shape, bases)
    expected = ipaddress.IPv4Address(value)
    assert host(text) == host(f"::ffff:{expected}") == Host(str(expected), expected)
    assert socket.inet_aton(text) == expected.packed


@given(st.integers(0, 2**128 - 1))
def test_all_spellings_of_a_long_address_are_equal(value: int) -> None:
    address = ipaddress.IPv6Address(value)
    assume(address.ipv4_mapped is None)
    assert host(address.exploded) == host(f"[{address.compressed.upper()}]") == Host(str(address), address)


LABELS = st.text("abcdefghijklmnopqrstuvwxyzäöüßéñ日本", min_size=1, max_size=10)


@given(st.lists(LABELS, min_size=1, max_size=4))
def test_a_name_and_its_ascii_form_are_equal(labels: list[str]) -> None:
    try:
        known = host(".".join(labels))
    except BadName:
        return
    for other in (known.text, known.text.upper() + ".", "．".join(labels), "。".join(labels) + "。"):
        assert host(other) == known


@given(st.sampled_from("\0\r\n\t %@/\\#?:<>\"'`|{}^,;!$&()+=~*"), st.integers(0, 11))
def test_a_stray_character_anywhere_is_refused(stray: str, at: int) -> None:
    text = "example.com"
    with pytest.raises(BadName):
        host(text[:at] + stray + text[at:])


# ── Which addresses are public ───────────────────────────────────────────────────────────────────

EVERYTHING = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
METADATA = ["169.254.169.254", "169.254.170.2", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"]
CARRIED = ["::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "::169.254.169.254"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("10.1.2.3", "private"), ("172.31.255.255", "private"), ("192.168.0.1", "private"), ("fd12::1", "private")),
        *(("127.8.8.8", "loopback"), ("::1", "loopback"), ("::ffff:127.0.0.1", "loopback"), ("0.0.0.0", "unspecified")),
        *(("::", "unspecified"), ("169.254.1.1", "link_local"), ("fe80::1", "link_local"), ("100.64.0.1", "shared")),
        *(
            ("224.0.0.1", "multicast"),
            ("ff02::1", "multicast"),
            ("255.255.255.255", "reserved"),
            ("240.0.0.1", "reserved"),
        ),
        *(("192.0.2.1", "documentation"), ("2001:db8::1", "documentation"), ("198.18.0.1", "reserved")),
        *(("64:ff9b::7f00:1", "embedded"), ("64:ff9b:1::a00:1", "embedded"), ("2002:7f00:1::", "embedded")),
        *(("2002:0808:0808::", "embedded"), ("2001:0:808:808::1", "embedded"), ("::127.0.0.1", "embedded")),
        *(("2606:4700::5efe:a00:1", "embedded"), ("::ffff:0:7f00:1", "embedded")),
        *(("4000::1", "reserved"), ("100::1", "reserved"), ("2001:1::1", "reserved"), ("fec0::1", "private")),
        *(("8.8.8.8", None), ("2606:4700:4700::1111", None), ("64:ff9b::808:808", None), ("100.128.0.1", None)),
        *((text, "metadata") for text in METADATA + CARRIED),
    ],
)
def test_kind(text: str, expected: str | None) -> None:
    assert address_kind(ipaddress.ip_address(text)) == expected


@pytest.mark.parametrize("text", METADATA + CARRIED)
def test_a_metadata_service_is_reached_only_by_its_own_address(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert address_refusal(address, EVERYTHING) == "metadata"
    assert (
        address_refusal(address, (ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fd00::/8")))
        == "metadata"
    )
    own = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped else address
    assert address_refusal(address, (ipaddress.ip_network(own),)) is None


def test_a_named_range_is_reached_and_its_neighbours_are_not() -> None:
    named = (ipaddress.ip_network("10.1.0.0/16"),)
    assert address_refusal(ipaddress.ip_address("10.1.9.9"), named) is None
    assert address_refusal(ipaddress.ip_address("::ffff:10.1.9.9"), named) is None
    assert address_refusal(ipaddress.ip_address("10.2.0.1"), named) == "private"


@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public_here(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if address_kind(address) is None:
        assert not (address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified)
        assert not address.is_private or address in ipaddress.ip_network("64:ff9b::/96")


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_never_freer_than_it_is_itself(address: ipaddress.IPv4Address) -> None:
    if address_kind(address) is not None:
        for carrier in (f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"):
            assert address_kind(ipaddress.ip_address(carrier)) is not None
