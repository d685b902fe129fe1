"""Tokens of an identity provider: which are taken, and how its keys are had."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
import warnings
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ringfence.core.errors import Unavailable
from ringfence.core.model import AgentSpec, Issuer, Person, Principal, TokenClaims
from ringfence.identity import Directory, NotAdmitted, oidc
from ringfence.identity.oidc import TokenReader

pytestmark = pytest.mark.anyio

ISSUER, AUDIENCE = "https://id.corp.example", "https://gateway.corp.example/mcp"
RSA, WEAK = (rsa.generate_private_key(public_exponent=65537, key_size=size) for size in (2048, 1024))
EC, OTHER = ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(public_exponent=65537, key_size=2048)
ED = ed25519.Ed25519PrivateKey.generate()


def public(key: Any, ident: str, **more: Any) -> dict[str, Any]:
    kinds: dict[Any, Any] = {
        ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
        ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
    }
    made = next((maker for kind, maker in kinds.items() if isinstance(key, kind)), jwt.algorithms.RSAAlgorithm)
    return {**json.loads(made.to_jwk(key.public_key())), "kid": ident, "use": "sig", **more}


class Provider:
    """What a provider publishes, and how often it is asked."""

    def __init__(self, **about: Any) -> None:
        self.keys = [public(RSA, "r"), public(EC, "e"), public(WEAK, "w"), public(ED, "d")]
        self.about = {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys", **about}
        self.asked: list[str] = []
        self.down = False

    async def fetch(self, url: str) -> bytes:
        self.asked.append(url)
        if self.down:
            raise Unavailable("no_issuer", "it is down")
        found = self.about if url.endswith("/.well-known/openid-configuration") else {"keys": self.keys}
        return json.dumps(found).encode()

    def reader(self, **more: Any) -> TokenReader:
        return TokenReader(Issuer(ISSUER, AUDIENCE, **more), self.fetch)


def token(key: Any = RSA, algorithm: str = "RS256", head: dict[str, Any] | None = None, **claims: Any) -> str:
    now = int(time.time())
    said = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 36_000, "iat": now, "sub": "u1", "client_id": "c1", **claims}
    given = {name: value for name, value in said.items() if value is not None}
    return jwt.encode(given, key, algorithm, headers={"kid": "r", **(head or {})})


async def refused(reader: TokenReader, text: str) -> tuple[int, str]:
    with pytest.raises(NotAdmitted) as caught:
        await reader(text)
    return caught.value.status, caught.value.reason_code


async def test_a_token_says_who_it_is_for_and_its_keys_are_fetched_once() -> None:
    provider = Provider()
    reader = provider.reader(roles=("reader", "boss"), roles_claim="realm.roles")
    said = await reader(token(scope="a b", realm={"roles": ["reader", "root"]}, head={"typ": "at+jwt"}))
    assert said == TokenClaims("c1", "u1", frozenset("ab"), frozenset({"reader"})), "no role that was not named"
    assert (await reader(token(sub="c1", client_id=None, azp="c1", scp=["x"]))).subject is None
    assert (await reader(token(EC, "ES256", {"kid": "e"}, aud=["other", AUDIENCE]))).client == "c1"
    assert provider.asked == [f"{ISSUER}/.well-known/openid-configuration", f"{ISSUER}/keys"]


def hs256(secret: bytes) -> str:
    """A token that the public key signs as if it were a shared secret, which libraries refuse to make."""
    parts = [{"alg": "HS256", "kid": "r", "typ": "JWT"}, jwt.decode(token(), options={"verify_signature": False})]
    text = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    mac = base64.urlsafe_b64encode(hmac.new(secret, text, hashlib.sha256).digest()).rstrip(b"=")
    return (text + b"." + mac).decode()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that its key is too short is what is meant
    WEAK_TOKEN = token(WEAK, "RS256", {"kid": "w"})
PEM = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
WRONG: dict[str, Any] = {
    "none": jwt.encode({"iss": ISSUER, "aud": AUDIENCE}, "", "none", headers={"kid": "r"}),
    "public key as a secret": hs256(PEM),
    "another's key": token(OTHER),
    "a key of another kind": token(EC, "ES256", {"kid": "r"}),
    "an algorithm that was not named": token(RSA, "RS384"),
    "another that was not named": token(ED, "EdDSA", {"kid": "d"}),
    "a weak key": WEAK_TOKEN,
    "a key that is not published": token(OTHER, "RS256", {"kid": "x"}),
    "a key in the token": token(OTHER, "RS256", {"jwk": public(OTHER, "r"), "jku": "https://evil.example", "kid": "r"}),
    "another issuer": token(iss="https://id.evil.example"),
    "an issuer with a slash": token(iss=f"{ISSUER}/"),
    "another audience": token(aud="https://other.corp.example/mcp"),
    "no audience": token(aud=None),
    "a part of the audience": token(aud=AUDIENCE[:-1]),
    "another resource": token(resource="https://other.corp.example"),
    "no end": token(exp=None),
    "not yet": token(nbf=int(time.time()) + 18_000),
    "no client": token(client_id=None),
    "nobody": token(sub=None),
    "nobody by name": token(sub=""),
    "two clients": token(azp="c2"),
    "an identity token by its type": token(head={"typ": "id+jwt"}),
    "something critical": token(head={"crit": ["b64"], "b64": False}),
    "no token": "a.b.c",
    "nothing": "",
    "text": "x" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_a_token_that_is_not_for_us_is_refused(case: str) -> None:
    assert await refused(Provider().reader(), WRONG[case]) == (401, "bad_token")


async def test_an_expired_token_says_so_and_one_that_lacks_a_scope_says_which() -> None:
    reader = Provider().reader(scopes=("mcp", "more"))
    assert await refused(reader, token(exp=int(time.time()) - 60)) == (401, "token_expired")
    with pytest.raises(NotAdmitted) as caught:
        await reader(token(scope="mcp"))
    assert (caught.value.status, caught.value.error, caught.value.scope) == (403, "insufficient_scope", "mcp more")


async def test_keys_are_rotated_and_nobody_makes_us_fetch_them_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider()
    reader = provider.reader()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    await reader(token())
    for _ in range(50):
        assert await refused(reader, token(OTHER, "RS256", {"kid": "new"})) == (401, "bad_token")
    assert len(provider.asked) == 2, "within ten seconds it is not asked again"
    provider.keys = [public(OTHER, "new")]
    now[0] += oidc._PAUSE_SECONDS
    assert (await reader(token(OTHER, "RS256", {"kid": "new"}))).client == "c1"
    assert await refused(reader, token()) == (401, "bad_token"), "a key that was withdrawn is good for nothing"
    provider.down = True
    now[0] += oidc.REFRESH_SECONDS
    assert (await reader(token(OTHER, "RS256", {"kid": "new"}))).client == "c1", "keys are used while it is down"
    now[0] += oidc.KEPT_SECONDS
    assert await refused(reader, token(OTHER, "RS256", {"kid": "new"})) == (503, "no_issuer"), "but not for ever"


async def test_one_request_waits_for_a_provider_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = Provider()
    reader = provider.reader()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    await reader(token())
    hangs, fails = asyncio.Event(), asyncio.Event()

    async def fetch(url: str) -> bytes:
        provider.asked.append(url)
        hangs.set()
        await fails.wait()
        raise Unavailable("no_issuer", "no answer in time")

    reader._fetch = fetch
    now[0] += oidc.REFRESH_SECONDS
    first = asyncio.ensure_future(reader(token()))
    await hangs.wait()
    strangers = [asyncio.ensure_future(refused(reader, token(OTHER, "RS256", {"kid": "new"}))) for _ in range(5)]
    for _ in range(5):
        assert (await reader(token())).client == "c1", "those that come meanwhile do not wait"
    assert not first.done()
    fails.set()
    assert (await first).client == "c1"
    assert await asyncio.gather(*strangers) == [(401, "bad_token")] * 5
    assert len(provider.asked) == 3, "one try for all"
    now[0] += oidc._PAUSE_SECONDS - 1
    await reader(token())
    assert len(provider.asked) == 3, "the pause begins when the try has ended"


@pytest.mark.parametrize(
    "about", [{"issuer": "https://id.evil.example"}, {"jwks_uri": "http://id.corp.example/keys"}, {"jwks_uri": None}]
)
async def test_a_document_that_cannot_be_trusted_gives_no_keys(about: dict[str, Any]) -> None:
    assert await refused(Provider(**about).reader(), token()) == (503, "no_issuer")


@pytest.mark.parametrize("keys", [None, {}, [{}] * 101, [1, None, {"kty": "oct", "k": "AA", "kid": "r"}]])
async def test_keys_that_are_none_verify_nothing(keys: Any) -> None:
    provider = Provider()
    provider.keys = keys
    assert (await refused(provider.reader(), token()))[0] in (401, 503)


PEOPLE = {"alice": Person("alice", oidc_subject="u1"), "bob": Person("bob", oidc_subject="u2")}
AGENTS = {
    "robot": AgentSpec("robot", oidc_client="c1"),
    "alices": AgentSpec("alices", oidc_client="c1", person="alice", roles=frozenset({"r"})),
    "other": AgentSpec("other", person="bob"),
}


def test_a_client_is_one_agent_for_each_user_that_it_acts_for() -> None:
    directory = Directory(AGENTS, PEOPLE)
    none: frozenset[str] = frozenset()
    assert directory.of_claims(TokenClaims("c1", None, none, none)) == Principal("robot", scopes=none)
    hers = directory.of_claims(TokenClaims("c1", "u1", frozenset("s"), frozenset("q")))
    assert hers == Principal("alices", "local", "alice", frozenset("rq"), scopes=frozenset("s"))
    for client, user in (("c1", "u2"), ("c1", "u3"), ("c2", "u1")):
        claims = TokenClaims(client, user, none, none)
        with pytest.raises(NotAdmitted) as caught:
            directory.of_claims(claims)
        assert (caught.value.status, caught.value.reason_code) == (403, "unknown_agent")
