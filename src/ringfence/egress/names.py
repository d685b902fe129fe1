"""One canonical form for every way to write a host.

Whatever names a host (a rule, a CONNECT line, a Host header, the server name of a TLS hello, a URL) is read here, and
nothing else is compared, resolved or dialled. A text that a resolver would take as an address *is* that address, in
whichever spelling; a text that could mean two things is refused.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache

import idna

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TEXT_MOST = 253
_URL_MOST = 8192
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
        """As a Host header says it: the port only where it is not the scheme's own."""
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
    if not 0 < len(text) <= _TEXT_MOST:
        raise BadName("a host has 1 to 253 characters")
    if text.startswith("["):
        if not text.endswith("]"):
            raise BadName(f"{_shown(text)}: '[' without its ']'")
        return _address(_ipv6(text[1:-1]))
    if ":" in text:
        return _address(_ipv6(text))
    name = _ascii(text).removesuffix(".")
    labels = name.split(".")
    if len(name) > _TEXT_MOST or not all(_LABEL.fullmatch(label) for label in labels):
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
        raise BadName(f"{_shown(text)} is not host:port")
    if match[2] is not None:
        port = port_number(match[2])
    if port is None:
        raise BadName(f"{_shown(text)} has no port")
    return Endpoint(host(match[1]), port)


def url(text: str) -> Url:
    """An http or https URL without user, password or fragment. Raises BadName."""
    match = _URL.fullmatch(text) if len(text) <= _URL_MOST else None
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
    """As inet_aton reads it: one to four numbers, decimal, octal or hexadecimal; the last fills what is left."""
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
    # A zone names an interface of whoever dials, never another host.
    bare = _ZONE.sub("", text)
    if "%" in bare:
        raise BadName(f"{_shown(text)} is not an IPv6 address")
    try:
        return ipaddress.IPv6Address(bare)
    except ValueError as error:
        raise BadName(f"{_shown(text)} is not an IPv6 address") from error


def _shown(text: str) -> str:
    return ascii(text[:80])
