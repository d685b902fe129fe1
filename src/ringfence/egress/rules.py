"""What a box may reach: rules as plain data, and the one place that judges a request by them.

Nothing is allowed that no rule names. Of several rules for one host the first that allows a request serves it.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Iterable
from typing import Literal
from urllib.parse import unquote_to_bytes

from ringfence.core.box import InstallIndex, NetworkRule
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.egress import names
from ringfence.egress.http1 import as_variable
from ringfence.egress.names import Endpoint, Host, Range

DENIED = "denied"
"""The name of the rule that denies what no other names."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:-]{0,127}")
_METHOD = re.compile(r"[A-Z][A-Z0-9-]{0,31}")
_RANGE = re.compile(r"\[?([0-9A-Fa-f:.]+/[0-9]{1,3})\]?(?::([0-9]+))?")
_WILD = re.compile(r"\*(?:\.([^:]+))?(?::([0-9]+))?")
_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_ENCODED = re.compile(rb"%[0-9A-Fa-f]{2}")
_OVERLONG = re.compile(rb"[\xc0\xc1]|\xe0[\x80-\x9f]|\xf0[\x80-\x8f]")
"""A character in more bytes than UTF-8 has for it, which some servers decode nevertheless: a dot, a slash."""
_DOTS = re.compile(r"\.[. ]*")
"""`.` and `..`, also for servers that drop dots and spaces at the end of a name."""
_DECODINGS = 3
_LOOPBACK: tuple[Range, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

# Frameworks take the real method or path from these, behind the back of the request line.
_METHOD_OVERRIDES = frozenset(
    {"x-http-method-override", "x-http-method", "x-method-override", "x-original-method", "x-forwarded-method"}
)
_PATH_OVERRIDES = frozenset({"x-original-url", "x-rewrite-url", "x-original-uri", "x-rewrite-uri", "x-forwarded-uri"})


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    rule: str
    reason: str | None = None
    granted: NetworkRule | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    kind: Literal["exact", "suffix", "any", "range"]
    text: str
    port: int | None
    range: Range | None = None

    def covers(self, host: Host, port: int) -> bool:
        if self.port is not None and self.port != port:
            return False
        if self.range is not None:
            return host.address is not None and host.address in self.range
        # An address is reached by naming it: no wildcard of names covers one.
        if host.address is not None:
            return False
        if self.kind == "suffix":
            return host.text.endswith(self.text)
        return self.kind == "any" or host.text == self.text


def pattern(text: str) -> Pattern:
    """An entry of `hosts`. Raises ValueError."""
    if match := _RANGE.fullmatch(text):
        network = ipaddress.ip_network(match[1])
        return Pattern("range", str(network), _port(match[2]), network)
    if match := _WILD.fullmatch(text):
        if match[1] is None:
            return Pattern("any", "", _port(match[2]))
        ending = names.host(match[1])
        if ending.address is not None:
            raise names.BadName(f"{quoted(text, form=ascii)}: '*.' stands before a domain, not before an address")
        return Pattern("suffix", f".{ending}", _port(match[2]))
    if text.count(":") > 1 and not text.startswith("["):
        return _exact(names.host(text), None)
    place = names.endpoint(text, 0)
    return _exact(place.host, place.port or None)


def _port(text: str | None) -> int | None:
    return None if text is None else names.port_number(text)


def _exact(host: Host, port: int | None) -> Pattern:
    if host.address is None:
        return Pattern("exact", host.text, port)
    return Pattern("range", host.text, port, ipaddress.ip_network(host.address))


@dataclass(frozen=True, slots=True)
class _Compiled:
    rule: NetworkRule
    patterns: tuple[Pattern, ...]
    ranges: tuple[Range, ...]

    def covers(self, place: Endpoint) -> bool:
        if self.rule.ports is not None and place.port not in self.rule.ports:
            return False
        return any(entry.covers(place.host, place.port) for entry in self.patterns)


class Rules:
    """The rules of one box. Raises ValueError where one of them cannot be meant."""

    def __init__(self, rules: Iterable[NetworkRule] = (), index: InstallIndex | None = None) -> None:
        """`index` answers for the place that is ours, where one of them is for it."""
        self.index = index
        self._compiled = tuple(_compile(rule) for rule in rules)
        self.all = tuple(entry.rule for entry in self._compiled)
        if len({rule.name for rule in self.all}) != len(self.all):
            raise ValueError("two rules have one name")

    def reaching(self, place: Endpoint) -> tuple[NetworkRule, ...]:
        """The rules for this host and port, in their order."""
        return tuple(entry.rule for entry in self._compiled if entry.covers(place))

    def named(self, rule: NetworkRule, port: int) -> tuple[Range, ...]:
        """The addresses that are not public and that this rule names."""
        entry = next(entry for entry in self._compiled if entry.rule is rule)
        here = [pattern for pattern in entry.patterns if pattern.port in (None, port)]
        own = (pattern.range for pattern in here if pattern.range is not None)
        # Who writes localhost means this machine: the name can mean nothing else.
        loopback = _LOOPBACK if any(pattern.kind == "exact" and pattern.text == "localhost" for pattern in here) else ()
        return (*entry.ranges, *own, *loopback)

    def name(self, host: Host) -> bool:
        """Whether any rule is for this host, on whichever port."""
        patterns = (pattern for entry in self._compiled for pattern in entry.patterns)
        return any(pattern.covers(host, pattern.port or 0) for pattern in patterns)


def judge(candidates: tuple[NetworkRule, ...], method: str, target: str, headers: Iterable[str]) -> RuleVerdict:
    """One request to a host that these rules are for; `headers` are the names of its headers in lower case."""
    present = frozenset(headers)
    refused = RuleVerdict(DENIED, "host")
    for rule in candidates:
        reason = _objection(rule, method, target, present)
        if reason is None:
            return RuleVerdict(rule.name, None, rule)
        if refused.rule == DENIED:
            refused = RuleVerdict(rule.name, reason)
    return refused


def _objection(rule: NetworkRule, method: str, target: str, headers: frozenset[str]) -> str | None:
    if rule.methods is not None:
        if method not in rule.methods:
            return "method"
        if overrides_method(headers):
            return "method_override"
    if rule.paths is not None:
        if overrides_path(headers):
            return "path_override"
        path = plain_path(target)
        if path is None:
            return "ambiguous_path"
        if not any(_under(path, prefix) for prefix in rule.paths):
            return "path"
    return None


def overrides_method(headers: Iterable[str]) -> bool:
    """Whether one of these names of headers, in lower case, gives the request another method."""
    return not _METHOD_OVERRIDES.isdisjoint(map(as_variable, headers))


def overrides_path(headers: Iterable[str]) -> bool:
    """Whether one of these names of headers, in lower case, gives the request another path."""
    return not _PATH_OVERRIDES.isdisjoint(map(as_variable, headers))


def plain_path(target: str) -> str | None:
    """The decoded path of a request, or None where two servers could take it for two paths."""
    path = target.partition("?")[0].encode("latin-1")
    decoded = path
    for _ in range(_DECODINGS):
        if _PERCENT.search(decoded):
            return None
        decoded = unquote_to_bytes(decoded)
        if _OVERLONG.search(decoded):
            return None
        # Some servers take characters of other widths for dots and slashes.
        folded = unicodedata.normalize("NFKC", decoded.decode("utf-8", "surrogateescape"))
        if folded.count("/") != path.count(b"/") or re.search(r"[\\\0-\x1f\x7f]|//", folded):
            return None
        if any(_DOTS.fullmatch(segment.partition(";")[0]) for segment in folded.split("/")):
            return None
        if not _ENCODED.search(decoded):
            break
    else:
        return None
    return unquote_to_bytes(path).decode("utf-8", "surrogateescape")


def only_path(target: str) -> str | None:
    """The decoded path of a request, or None where two servers could take it for two paths, even under one prefix.

    Stricter than `plain_path`: a prefix is left by no parameter and by no second decoding, but a rule that forbids some
    paths must see the one that is meant. An encoded slash, which APIs have within a name (`group%2Fproject`), is one:
    whichever way the host reads it, nothing is forbidden under the one path and allowed under the other.
    """
    path = plain_path(re.sub("%2[fF]", "/", target.partition("?")[0]))
    if path is None or re.search(r"[;?\udc80-\udcff]|%[0-9A-Fa-f]{2}", path):
        return None
    return path


def _under(path: str, prefix: str) -> bool:
    prefix = prefix.removesuffix("*")
    return path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/")


def _compile(rule: NetworkRule) -> _Compiled:
    if not _NAME.fullmatch(rule.name):
        raise ValueError(f"{quoted(rule.name)} is not the name of a rule")
    for method in rule.methods or ():
        if not _METHOD.fullmatch(method):
            raise ValueError(f"{quoted(method)} is not a method: they are written in capitals")
    for prefix in rule.paths or ():
        if not prefix.startswith("/") or plain_path(prefix) != prefix or "*" in prefix.removesuffix("/*"):
            raise ValueError(f"{quoted(prefix)} is not a path prefix")
    ranges = tuple(ipaddress.ip_network(text) for text in rule.addresses)
    return _Compiled(rule, tuple(pattern(text) for text in rule.hosts), ranges)
