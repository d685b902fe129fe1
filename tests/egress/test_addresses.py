"""Which addresses are outside, and that a wildcard never reaches the ones that are not."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.addresses import kind, refusal

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
    assert kind(ipaddress.ip_address(text)) == expected


@pytest.mark.parametrize("text", METADATA + CARRIED)
def test_a_metadata_service_is_reached_only_by_its_own_address(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert refusal(address, EVERYTHING) == "metadata"
    assert refusal(address, (ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fd00::/8"))) == "metadata"
    own = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped else address
    assert refusal(address, (ipaddress.ip_network(own),)) is None


def test_a_named_range_is_reached_and_its_neighbours_are_not() -> None:
    named = (ipaddress.ip_network("10.1.0.0/16"),)
    assert refusal(ipaddress.ip_address("10.1.9.9"), named) is None
    assert refusal(ipaddress.ip_address("::ffff:10.1.9.9"), named) is None
    assert refusal(ipaddress.ip_address("10.2.0.1"), named) == "private"


@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public_here(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if kind(address) is None:
        assert not (address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified)
        assert not address.is_private or address in ipaddress.ip_network("64:ff9b::/96")


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_never_freer_than_it_is_itself(address: ipaddress.IPv4Address) -> None:
    if kind(address) is not None:
        for carrier in (f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"):
            assert kind(ipaddress.ip_address(carrier)) is not None
