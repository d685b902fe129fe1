"""The authority of a run: believed by whoever was given its certificate, for one host at a time, while it lasts."""

from __future__ import annotations

import datetime
import ssl

import pytest

from ringfence.core.errors import Unavailable
from ringfence.egress import names, tls
from ringfence.egress.tls import Authority
from tests.egress.outside import trusting


def shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> ssl.SSLObject:
    """Both ends in memory; what one says the other hears. Raises SSLError."""
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (server.wrap_bio(here, there, server_side=True), client.wrap_bio(there, here, server_hostname=name))
    for _ in range(6):
        for end in reversed(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert all(end.version() for end in ends)
    return ends[1]


@pytest.mark.parametrize(
    "name", ["api.example", "xn--bcher-kva.example", "127.0.0.1", "::1", "a" * 60 + "." + "b" * 60 + ".example"]
)
def test_whoever_trusts_it_believes_it_for_that_host(name: str) -> None:
    authority = Authority()
    client = shake(authority.context(names.host(name)), trusting(authority), name)
    assert client.selected_alpn_protocol() is None and client.version() == "TLSv1.3"


def test_nobody_else_does() -> None:
    authority = Authority()
    context = authority.context(names.host("api.example"))
    for client, name in ((trusting(Authority()), "api.example"), (tls.outside(), "api.example")):
        with pytest.raises(ssl.SSLError):
            shake(context, client, name)


def test_the_handshake_itself_refuses_another_name() -> None:
    authority = Authority()
    context = authority.context(names.host("api.example"))
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    shake(context, careless, "API.example")
    for name in ("other.example", "127.0.0.1"):
        with pytest.raises(ssl.SSLError):
            shake(context, careless, name)


def test_a_host_is_signed_for_once_and_not_for_ever() -> None:
    authority = Authority()
    first = authority.context(names.host("a.example"))
    assert authority.context(names.host("A.example.")) is first
    for number in range(300):
        authority.context(names.host(f"h{number}.example"))
    assert authority.context(names.host("a.example")) is not first


def test_an_expired_authority_signs_nothing() -> None:
    expired = Authority(datetime.timedelta(seconds=-1))
    for refused in (expired.check, lambda: expired.context(names.host("a.example"))):
        with pytest.raises(Unavailable) as caught:
            refused()
        assert caught.value.reason_code == "authority_expired"


def test_dialling_verifies_names_and_chains() -> None:
    context = tls.outside()
    assert context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
