"""Which addresses are the public Internet, and which only a rule that names them may reach.

The tables are our own: what Python's `ipaddress` calls private or global has changed between its releases.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from ringfence.egress.names import Address, canonical_address

Range = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA = "metadata"
_EMBEDDED = "embedded"

# Services that hand credentials to whoever asks from inside of a cloud.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Azure, Google, OpenStack, Oracle, DigitalOcean …
        "169.254.169.253",  # AWS, the resolver
        "169.254.170.2",  # AWS, tasks of ECS
        "169.254.170.23",  # AWS, pods of EKS
        "fd00:ec2::254",
        "fd00:ec2::253",
        "fd00:ec2::23",
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure, the host agent: an address that looks public
        "192.0.0.192",  # Oracle, the older one
    )
)

_KINDS: dict[str, tuple[str, ...]] = {
    "unspecified": ("0.0.0.0/8", "::/128"),
    "loopback": ("127.0.0.0/8", "::1/128"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"),
    "link_local": ("169.254.0.0/16", "fe80::/10"),
    "shared": ("100.64.0.0/10",),
    "multicast": ("224.0.0.0/4", "ff00::/8"),
    "documentation": ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),
    "reserved": ("192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4"),
}
_TABLE = tuple((kind, ipaddress.ip_network(text)) for kind, ranges in _KINDS.items() for text in ranges)

# Within 2000::/3, where all public IPv6 lies, these are not it.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = (ipaddress.IPv6Network("2001::/23"), ipaddress.IPv6Network("2002::/16"))

# Where an IPv4 address stands in an IPv6 one: the range, and how many bits lie to its right.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_CARRIERS = (
    (_NAT64, 0),
    (ipaddress.IPv6Network("::/96"), 0),
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b:1::/48"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
    (ipaddress.IPv6Network("2001::/32"), 64),
)
_TEREDO = ipaddress.IPv6Network("2001::/32")
_ISATAP = (0x00005EFE, 0x02005EFE)


def kind(address: Address) -> str | None:
    """What makes the address special; None for one of the public Internet."""
    address = canonical_address(address)
    if address in _METADATA:
        return METADATA
    for found, network in _TABLE:
        if address in network:
            return found
    if isinstance(address, ipaddress.IPv4Address):
        return None
    inner = [kind(carried) for carried in _carried(address)]
    if METADATA in inner:
        return METADATA
    # A translator is the only carrier by which a public address is reached today; the rest are old tunnels.
    if address in _NAT64 and inner == [None]:
        return None
    if inner:
        return _EMBEDDED
    return None if address in _PUBLIC_V6 and not any(address in special for special in _SPECIAL_V6) else "reserved"


def refusal(address: Address, named: Iterable[Range]) -> str | None:
    """Why this address may not be dialled; None where it may.

    `named` are the addresses and ranges that the rule itself names. A metadata service has to be named alone.
    """
    address = canonical_address(address)
    found = kind(address)
    if found is None:
        return None
    for network in named:
        if address in network and (found != METADATA or network.num_addresses == 1):
            return None
    return found


def _carried(address: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    value = int(address)
    for network, right in _CARRIERS:
        if address in network:
            yield ipaddress.IPv4Address((value >> right) & 0xFFFFFFFF)
    if address in _TEREDO:
        yield ipaddress.IPv4Address(~value & 0xFFFFFFFF)
    if (value >> 32) & 0xFFFFFFFF in _ISATAP:
        yield ipaddress.IPv4Address(value & 0xFFFFFFFF)
