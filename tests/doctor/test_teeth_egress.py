"""The suite has teeth for the way out of a box: without any one defence of it, harm is done in a case that was kept.

Each defence is taken away in the proxy's process, by the smallest change that makes it as if nobody had thought of it.
"""

from __future__ import annotations

import ast
import ipaddress
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringfence import egress
from ringfence.core.brokering import OutboundRequest
from ringfence.doctor.cases.egress import SPECIAL
from ringfence.egress import dial, exchange, http1, names, proxy, rules, substitution, tunnel
from ringfence.egress.dial import Dialler
from ringfence.egress.exchange import ProxyExchange
from ringfence.egress.http1 import NO_BODY, Framing, Headers, HttpRequest, HttpResponse
from ringfence.egress.ledger import Forbidden, LedgerEntry, RuleMeter
from ringfence.egress.names import Address, Endpoint, Host
from ringfence.egress.rules import Pattern
from ringfence.egress.tunnel import BadHello, ClientHello, HelloGuard
from ringfence.egress.wire import HttpWire, OutsideWire, ProxyLimits
from ringfence.governance import broker
from ringfence.governance.broker import BoxBroker, BoxSecrets
from tests.doctor.teeth import Defence, Layers, Row, Taken, instead, tried, without_all

pytestmark = pytest.mark.anyio


# ── Whom a rule is for, and where that is ──


async def leave_out(self: Dialler, host: Host, named: Iterable[names.Range], rule: str = "") -> list[Address]:
    """Dials those that may be, where another answer may not."""
    found = await self._lookup(host)
    fit = [address for address in found if names.address_refusal(address, tuple(named)) is None]
    if not fit:
        raise Forbidden(rule, "address")
    return fit


def looked_up_again() -> Taken:
    real = Dialler._open

    async def again(
        self: Dialler, place: Endpoint, _: Address, entry: LedgerEntry, tls: ssl.SSLContext | None
    ) -> OutsideWire:
        return await real(self, place, (await self._lookup(place.host))[0], entry, tls)

    return instead(Dialler, "_open", again)


def trusting(*, chain: bool) -> Taken:
    """Whoever answers is believed; or whoever has a good certificate, for whichever name."""
    real = Dialler._open

    async def believe(
        self: Dialler, place: Endpoint, address: Address, entry: LedgerEntry, tls: ssl.SSLContext | None
    ) -> OutsideWire:
        if tls is not None:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_REQUIRED if chain else ssl.CERT_NONE
        return await real(self, place, address, entry, tls)

    return instead(Dialler, "_open", believe)


def tunnel_to_ours() -> Taken:
    """The place of our own index is a host like any other."""
    real = proxy.BoxProxy._through

    async def through(self: proxy.BoxProxy, place: Endpoint, wire: HttpWire, entry: LedgerEntry) -> Any:
        found = self._context.rules.reaching(place)
        if found and found[0].installs is not None:
            return await (await self._open(place, found[0], wire, entry)).run(place.host, self._context.limits)
        return await real(self, place, wire, entry)

    return instead(proxy.BoxProxy, "_through", through)


def covering(also: Callable[[Pattern, Host, int], bool]) -> Taken:
    """A rule is also for whom it does not name."""
    real = Pattern.covers
    return instead(Pattern, "covers", lambda self, host, port: real(self, host, port) or also(self, host, port))


def no_numbers(patch: pytest.MonkeyPatch) -> None:
    """What a resolver takes for an address is a name like any other."""
    patch.setattr(names, "host", names.host.__wrapped__)  # nothing that was read before
    patch.setattr(names, "_NUMBER", re.compile("(?!)"))


PLACES = {
    "no special address": Defence(
        instead(dial, "address_refusal", lambda *_: None), ("N44", "N45", "N46", "N48"), ("address",)
    ),
    "no metadata service": Defence(instead(names, "_METADATA", frozenset()), ("N45",)),
    "one such address refuses all": Defence(instead(Dialler, "addresses", leave_out), ("N48",)),
    "what was looked at is dialled": Defence(looked_up_again(), ("N47",)),
    "hosts that a rule names": Defence(
        covering(lambda self, host, port: host.address is None and self.port in (None, port)),
        ("N43", "N49", "N50", "N57", "N59"),
        ("host",),
    ),
    "the whole of a name": Defence(covering(lambda self, host, port: self.text in host.text), ("N49",)),
    "an ending with its dot": Defence(
        covering(lambda self, host, port: self.kind == "suffix" and host.text.endswith(self.text[1:])), ("N49",)
    ),
    "the port of a host": Defence(covering(lambda self, host, port: self.text == host.text), ("N51",)),
    "the ports of a rule": Defence(
        instead(
            rules._Compiled,
            "covers",
            lambda self, place: any(entry.covers(place.host, place.port) for entry in self.patterns),
        ),
        ("N51",),
    ),
    "no address for a wildcard": Defence(covering(lambda self, host, port: self.kind == "any"), ("N63",)),
    "numbers are addresses": Defence(no_numbers, ("N63",)),
    "no tunnel to what is ours": Defence(tunnel_to_ours(), ("N81",), ("no_tunnel",)),
    "a certificate that somebody vouches for": Defence(trusting(chain=False), ("N65",), ("upstream_certificate",)),
    "a certificate for that name": Defence(trusting(chain=True), ("N65",)),
}


# ── What is said in a tunnel ──


def believed() -> Taken:
    """Of a hello that two readers may take for two, one reading is enough."""
    real = tunnel._hello

    def read(body: bytes, size: int) -> ClientHello:
        try:
            return real(body, size)
        except BadHello:
            return ClientHello("allowed.example", False, False, size)

    return instead(tunnel, "_hello", read)


def seen_enough(self: HelloGuard) -> bool:
    self.open = True
    return True


TUNNELS = {
    "a hello for the host of the tunnel": Defence(
        instead(tunnel, "check_hello", lambda *_: None), ("N52", "N53"), ("sni_missing", "sni_mismatch")
    ),
    "nothing but TLS": Defence(instead(HelloGuard, "feed", lambda self, data: data), ("N54",), ("not_tls",)),
    "a hello that says one thing": Defence(believed(), ("N64",), ("bad_hello", "bad_sni")),
    "no hello in a hello": Defence(instead(tunnel, "_ENCRYPTED_HELLO", -1), ("N64",), ("encrypted_hello",)),
    "the second hello": Defence(instead(HelloGuard, "_record", seen_enough), ("N64",)),
}


# ── What is asked for ──


def unheeding() -> Taken:
    """Whatever Host says."""
    real = ProxyExchange._aim

    def aim(self: ProxyExchange, request: HttpRequest, entry: LedgerEntry) -> tuple[Endpoint, str]:
        place = self._inside or names.url(request.target).endpoint
        right = place.header(self._scheme)
        headers = tuple((name, right if name.lower() == "host" else value) for name, value in request.headers)
        return real(self, replace(request, headers=headers), entry)

    return instead(ProxyExchange, "_aim", aim)


def no_objection(reason: str) -> Taken:
    real = rules._objection

    def objection(*given: Any) -> str | None:
        found = real(*given)
        return None if found == reason else found

    return instead(rules, "_objection", objection)


def longest(headers: Headers) -> Framing:
    """As a reader does who knows of one header alone."""
    lengths = [int(value) for name, value in headers if name.lower() == "content-length"]
    return Framing("length", lengths[0]) if lengths and lengths[0] else NO_BODY


def counted(self: RuleMeter, size: int, entry: LedgerEntry, hidden: int = 0) -> None:
    """And no more."""


REQUESTS = {
    "Host is whom the request is for": Defence(unheeding(), ("N55", "N56"), ("host_mismatch",)),
    "methods": Defence(no_objection("method"), ("N60",), ("method",)),
    "headers that override the method": Defence(no_objection("method_override"), ("N60",), ("method_override",)),
    "paths": Defence(no_objection("path"), ("N61",), ("path",)),
    "paths with one meaning": Defence(no_objection("ambiguous_path"), ("N61",), ("ambiguous_path",)),
    "headers that override the path": Defence(no_objection("path_override"), ("N61",), ("path_override",)),
    "whole segments of a path": Defence(instead(rules, "_under", str.startswith), ("N61",)),
    "bytes that go out": Defence(instead(RuleMeter, "outward", counted), ("N62",), ("max_bytes_out",)),
    "bytes that come in": Defence(instead(RuleMeter, "inward", counted), ("N66",), ("max_bytes_in",)),
    "requests by the minute": Defence(instead(RuleMeter, "admit", lambda self, length=0: None), ("N67",), ("rate",)),
    "the length of a head": Defence(
        instead(proxy, "ProxyLimits", partial(ProxyLimits, head_bytes=1 << 20)), ("N68",), ("head_too_large",)
    ),
    "connections of one box": Defence(
        instead(proxy, "ProxyLimits", partial(ProxyLimits, connections=1 << 20)), ("N69",), ("connections",)
    ),
}


# ── Secrets ──


def fit_for(reason: str) -> Taken:
    real = broker._unfit

    def unfit(*given: Any) -> tuple[str, str] | None:
        found = real(*given)
        return None if found is not None and found[0] == reason else found

    return instead(broker, "_unfit", unfit)


def unasked_scheme(patch: pytest.MonkeyPatch) -> None:
    """The proxy itself takes every request for one over TLS; what the broker is told stays as it is."""
    real = ProxyExchange._given

    async def brokered(self: ProxyExchange, *given: Any) -> Any:
        scheme, self._scheme = self._scheme, "https"
        patch.setattr(exchange, "OutboundRequest", lambda **said: OutboundRequest(**{**said, "scheme": scheme}))
        try:
            return await real(self, *given)
        finally:
            self._scheme = scheme

    patch.setattr(ProxyExchange, "_given", brokered)


async def anywhere(self: BoxBroker, asked: Any, here: list[Any]) -> list[Any]:
    """A placeholder may stand wherever it likes."""
    return here


async def as_it_comes(pieces: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    async for piece in pieces:
        yield piece


def packed_too() -> Taken:
    real = substitution.cleaned_head

    def head(answer: HttpResponse, clean: Any) -> HttpResponse:
        plain = tuple((name, value) for name, value in answer.headers if name.lower() != "content-encoding")
        return real(replace(answer, headers=plain), clean)

    return instead(exchange, "cleaned_head", head)


SECRETS = {
    "hosts of a secret": Defence(instead(broker._Brokered, "covers", lambda *_: True), ("X52",)),
    "the header of a secret": Defence(instead(BoxBroker, "_presented", anywhere), ("X53",)),
    "no placeholder in a body": Defence(
        instead(substitution.WordScan, "sees", lambda *_: None), ("X52", "X53"), ("placeholder",)
    ),
    "methods of a secret": Defence(fit_for("secret_method"), ("X54",)),
    "no method that a header overrides": Defence(fit_for("method_override"), ("X54",)),
    "every request is looked at": Defence(instead(BoxSecrets, "rules", lambda self, given: tuple(given)), ("X52",)),
    "bodies of answers": Defence(instead(exchange, "cleaned", as_it_comes), ("X51",)),
    "headers of answers": Defence(instead(substitution, "_cleaned", lambda text, _: text), ("X51",)),
    "no answer that is packed": Defence(packed_too(), ("X51",), ("encoded_answer",)),
    "no answer in pieces": Defence(instead(broker, "_UNWANTED", frozenset()), ("X51",)),
}


def bodies_anywhere(patch: pytest.MonkeyPatch) -> None:
    instead(exchange, "_BODILESS", ())(patch)
    instead(exchange, "is_last", lambda request: False)(patch)


DEFENCES = {**PLACES, **TUNNELS, **REQUESTS, **SECRETS}
LAYERS = {
    "no request within a request": Layers(
        {
            "one way to end a body": instead(http1, "_framing", longest),
            "written anew": instead(http1, "HOP_BY_HOP", http1.HOP_BY_HOP - {"transfer-encoding"}),
            "no body where none belongs, and nothing after one": bodies_anywhere,
        },
        ("N58",),
        ("te_and_cl", "transfer_encoding", "content_length", "body"),
    ),
    "a secret goes over TLS alone": Layers(
        {"the broker": fit_for("secret_in_clear"), "the proxy": unasked_scheme}, ("X55",), ("secret_in_clear",)
    ),
}
ROWS: tuple[Row, ...] = (*DEFENCES.values(), *LAYERS.values())


async def test_with_all_of_them_no_harm_is_done() -> None:
    ids = {id for row in ROWS for id in row.cases}
    assert (await tried(ids, told=True)).harm == {}


@pytest.mark.parametrize("name", DEFENCES)
async def test_harm_is_done_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DEFENCES[name].without(monkeypatch)
    assert (await tried(DEFENCES[name].cases)).shows()


@pytest.mark.parametrize("name", LAYERS)
async def test_harm_is_done_without_both(name: str) -> None:
    assert (await without_all(LAYERS[name])).shows()


@pytest.mark.parametrize(("name", "kept"), [(name, kept) for name, row in LAYERS.items() for kept in row.without])
async def test_each_of_two_holds_alone(name: str, kept: str) -> None:
    assert (await without_all(LAYERS[name], but=kept)).harm == {}


# ── Nothing is forgotten ──

SAID_OTHERWISE = {
    "denied": "what is said where a rule gives no reason",
    **dict.fromkeys(("http_version", "http2", "upgrade", "connection_option", "expect"), "no other protocol is spoken"),
    **dict.fromkeys(
        ("request_line", "target", "https_target"), "what cannot be read is not sent on: it is written anew"
    ),
    **dict.fromkeys(("bare_lf", "obs_fold", "header_syntax", "status_line"), "likewise; N58"),
    **dict.fromkeys(("chunk_syntax", "chunk_extension", "connect_body"), "likewise, and so are bodies"),
    **dict.fromkeys(("too_many_headers", "head_timeout"), "bounds for one connection, beside the length of a head"),
    **dict.fromkeys(("host_repeated", "host_missing"), "Host is written anew, once"),
    "own_port": "the doctor has no gateway to listen; tests/egress/test_proxy.py has one",
    "trace": "a secret is for its own methods, and TRACE is none that one can have",
}
"""Reasons with which nothing is prevented that another defence would not prevent as well."""
OURS = ("Forbidden", "Malformed", "BadHello")


def reasons() -> Iterator[str]:
    """With which the proxy refuses, as its source says them."""
    for path in Path(egress.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OURS:
                at = 1 if node.func.id == "Forbidden" else 0
                yield from texts(node.args[at])
            elif isinstance(node, ast.FunctionDef) and node.name == "_objection":
                yield from (text for each in ast.walk(node) if isinstance(each, ast.Return) for text in texts(each))


def texts(node: ast.AST) -> Iterator[str]:
    """Of which it may be one."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value.removesuffix("_")


def test_every_reason_to_refuse_has_teeth_or_says_why_not() -> None:
    bites = {reason for row in ROWS for reason in row.stops}
    known = bites | set(SAID_OTHERWISE)
    assert set(reasons()) - known == set()
    assert not bites & set(SAID_OTHERWISE)


@pytest.mark.parametrize("missing", names._TABLE, ids=str)
def test_every_range_has_an_address_that_a_case_asks_for(
    missing: tuple[str, names.Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beneath IPv6 ranges lies that all but one eighth of it is no public address; that is taken away with them."""
    within = [address for address in map(ipaddress.ip_address, SPECIAL) if address in missing[1]]
    monkeypatch.setattr(names, "_TABLE", tuple(entry for entry in names._TABLE if entry != missing))
    if isinstance(missing[1], ipaddress.IPv6Network):
        monkeypatch.setattr(names, "_PUBLIC_V6", ipaddress.IPv6Network("::/0"))
        monkeypatch.setattr(names, "_CARRIERS", ())
    assert any(names.address_kind(address) is None for address in within)


def special() -> set[Address]:
    """Of the addresses that a case asks for, those that are refused as things are now."""
    return {address for address in map(ipaddress.ip_address, SPECIAL) if names.address_kind(address) is not None}


ONCE = tuple(each for each in names._CARRIERS if each[0] != names._TEREDO)


@pytest.mark.parametrize("carrier", [*ONCE, "teredo", "isatap"], ids=str)
def test_every_way_to_carry_an_address_in_another_is_one_that_a_case_tries(
    carrier: tuple[names.Range, int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer beneath is the same."""
    monkeypatch.setattr(names, "_PUBLIC_V6", ipaddress.IPv6Network("::/0"))
    monkeypatch.setattr(names, "_SPECIAL_V6", ())
    before = special()
    if carrier == "isatap":
        monkeypatch.setattr(names, "_ISATAP", ())
    elif carrier == "teredo":  # which carries two, and either alone refuses it
        monkeypatch.setattr(names, "_TEREDO", ipaddress.IPv6Network("::/128"))
        monkeypatch.setattr(names, "_CARRIERS", ONCE)
    else:
        monkeypatch.setattr(names, "_CARRIERS", tuple(each for each in names._CARRIERS if each != carrier))
    assert before - special()


@pytest.mark.parametrize(("name", "value"), [("_PUBLIC_V6", ipaddress.IPv6Network("::/0")), ("_SPECIAL_V6", ())])
def test_what_lies_beneath_the_ranges_refuses_what_no_range_names(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = special()
    monkeypatch.setattr(names, name, value)
    assert before - special()
