"""Hosts: one canonical form for every way to write one, and which addresses are the public Internet.

Whatever names a host (a rule, a CONNECT line, a Host header, the server name of a TLS hello, a URL) is read here, and
nothing else is compared, resolved or dialled. A text that a resolver would take as an address *is* that address, in
whichever spelling; a text that could mean two things is refused.

The tables of addresses are our own: what Python's `ipaddress` calls private or global has changed between its releases.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

import idna

from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MAX_TEXT = 253
_MAX_URL = 8192
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_ZONE = re.compile(r"%(25)?[A-Za-z0-9._~-]{1,32}\Z")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::([0-9]*))?")
_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_TARGET = re.compile(r"[!\"$-\[\]-~]*")


class BadName(ValueError):
    """The text names no host, or more than one."""


@dataclass(frozen=True, slots=True)
class Host:
    """A name in lower-case ASCII, or an address in its only spelling."""

    text: str
    address: Address | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: Host
    port: int

    def header(self, scheme: str) -> str:
        """The place as a Host header has it: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host.text else self.host.text
        return host if self.port == default_port(scheme) else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Url:
    scheme: str
    endpoint: Endpoint
    target: str
    """Path and query as they are sent in a request line."""


def default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


@lru_cache(4096)
def host(text: str) -> Host:
    """A bare host: a name, or an address with or without brackets. Raises BadName."""
    if not 0 < len(text) <= _MAX_TEXT:
        raise BadName("a host has 1 to 253 characters")
    if text.startswith("["):
        if not text.endswith("]"):
            raise BadName(f"{_shown(text)}: '[' without its ']'")
        return _address(_ipv6(text[1:-1]))
    if ":" in text:
        return _address(_ipv6(text))
    name = _ascii(text).removesuffix(".")
    labels = name.split(".")
    if len(name) > _MAX_TEXT or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadName(f"{_shown(text)} is not a host")
    # Resolvers take `127.1`, `0x7f.1` and `017700000001` as addresses: what ends in a number is one, or nothing.
    if _NUMBER.fullmatch(labels[-1]):
        return _address(_ipv4(labels, text))
    for label in labels:
        _check_punycode(label, text)
    return Host(name)


def endpoint(text: str, port: int | None = None) -> Endpoint:
    """`host:port`, or a host with the port given here. IPv6 stands in brackets. Raises BadName."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        raise BadName(f"{_shown(text)} is not host:port: write a host without scheme or path, as in example.com:443")
    if match[2] is not None:
        port = port_number(match[2])
    if port is None:
        raise BadName(f"{_shown(text)} has no port")
    return Endpoint(host(match[1]), port)


def url(text: str) -> Url:
    """An http or https URL without user, password or fragment. Raises BadName."""
    match = _URL.fullmatch(text) if len(text) <= _MAX_URL else None
    if match is None or not _TARGET.fullmatch(match[3]):
        raise BadName(f"{_shown(text)} is not an http:// or https:// URL")
    scheme = match[1].lower()
    target = match[3] if match[3].startswith("/") else f"/{match[3]}"
    return Url(scheme, endpoint(match[2], default_port(scheme)), target)


def port_number(text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise BadName(f"{_shown(text)} is not a port")
    return int(text)


def canonical_address(address: Address) -> Address:
    """One address for one place: an IPv4 address mapped into IPv6 is the IPv4 address; a zone is no part of it."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.scope_id is not None:
            return ipaddress.IPv6Address(int(address))
    return address


def _address(address: Address) -> Host:
    address = canonical_address(address)
    return Host(str(address), address)


def _ascii(text: str) -> str:
    if text.isascii():
        return text.lower()
    try:
        return idna.encode(text, uts46=True, std3_rules=True).decode("ascii").lower()
    except (UnicodeError, IndexError) as error:
        raise BadName(f"{_shown(text)} is not an international name") from error


def _check_punycode(label: str, text: str) -> None:
    """An `xn--` label must be the one way to write a valid label, or it could be a second spelling of another."""
    if not label.startswith("xn--"):
        return
    try:
        same = idna.alabel(idna.ulabel(label)).decode("ascii") == label
    except (UnicodeError, IndexError) as error:
        raise BadName(f"{_shown(text)} is not an international name") from error
    if not same:
        raise BadName(f"{_shown(text)} is not an international name")


def _ipv4(labels: list[str], text: str) -> ipaddress.IPv4Address:
    """The address as inet_aton reads it: one to four numbers, decimal, octal or hex; the last fills the rest."""
    try:
        parts = [_number(label) for label in labels]
    except ValueError as error:
        raise BadName(f"{_shown(text)} is neither a name nor an address") from error
    *first, last = parts
    if len(parts) > 4 or any(part > 255 for part in first) or last >= 256 ** (5 - len(parts)):
        raise BadName(f"{_shown(text)} is neither a name nor an address")
    value = last
    for place, part in enumerate(first):
        value |= part << (24 - 8 * place)
    return ipaddress.IPv4Address(value)


def _number(label: str) -> int:
    if label.startswith("0x"):
        return int(label[2:], 16)
    return int(label, 8 if label.startswith("0") else 10)


def _ipv6(text: str) -> ipaddress.IPv6Address:
    # A zone names an interface of the host that dials, never another host.
    bare = _ZONE.sub("", text)
    if "%" in bare:
        raise BadName(f"{_shown(text)} is not an IPv6 address")
    try:
        return ipaddress.IPv6Address(bare)
    except ValueError as error:
        raise BadName(f"{_shown(text)} is not an IPv6 address") from error


def _shown(text: str) -> str:
    return quoted(text, form=ascii)


# ── Which addresses are public, and which only a rule that names them may reach ──────────────────

Range = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA = "metadata"
_EMBEDDED = "embedded"

# Services that hand credentials to any program inside a cloud machine.
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
        "169.254.42.42",  # Scaleway
        "fd00:42::42",
        "169.254.0.23",  # Tencent
        "169.254.169.252",  # Google, nodes of GKE
        "fe80::a9fe:a9fe",  # OpenStack
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
_TABLE = tuple((address_kind, ipaddress.ip_network(text)) for address_kind, ranges in _KINDS.items() for text in ranges)

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


def address_kind(address: Address) -> str | None:
    """What makes the address special; None for one of the public Internet."""
    address = canonical_address(address)
    if address in _METADATA:
        return METADATA
    for found, network in _TABLE:
        if address in network:
            return found
    if isinstance(address, ipaddress.IPv4Address):
        return None
    inner = [address_kind(carried) for carried in _carried(address)]
    if METADATA in inner:
        return METADATA
    # A translator is the only carrier by which a public address is reached today; the rest are old tunnels.
    if address in _NAT64 and inner == [None]:
        return None
    if inner:
        return _EMBEDDED
    return None if address in _PUBLIC_V6 and not any(address in special for special in _SPECIAL_V6) else "reserved"


def address_refusal(address: Address, named: Iterable[Range]) -> str | None:
    """Why this address may not be dialled; None where it may.

    `named` are the addresses and ranges that the rule itself names. A metadata service has to be named alone.
    """
    address = canonical_address(address)
    found = address_kind(address)
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
