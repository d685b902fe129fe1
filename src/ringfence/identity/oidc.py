"""Tokens of an identity provider: JWTs that it signed for us, with keys that it publishes.

Only asymmetric algorithms that the operator named are taken, each with a key of its own kind, so that neither `none`
nor a public key used as a shared secret ever verifies anything. Keys are fetched seldom, from the one place that the
provider's own document or the operator names; whatever a token says of keys is not looked at.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from ringfence.core.errors import RingfenceError
from ringfence.core.model import Issuer, Json, TokenClaims
from ringfence.identity.tokens import NotAdmitted

log = logging.getLogger("ringfence")

Fetch = Callable[[str], Awaitable[bytes]]
"""What is at an address, within bounds of size and time. Raises RingfenceError."""
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
_TYPES = (None, "jwt", "at+jwt", "application/at+jwt")
_LEEWAY_SECONDS = 30
REFRESH_SECONDS = 600.0
"""How long keys are used before they are fetched again."""
KEPT_SECONDS = 3600.0
"""How long keys are used that cannot be fetched again: a provider that withdrew one must not be trusted for ever."""
_PAUSE_SECONDS = 10.0
"""Between two fetches, however many tokens name a key that is not there."""
_MAX_KEYS = 100
_MIN_BITS = 2048


class TokenReader:
    """Verifies tokens of one issuer."""

    def __init__(self, issuer: Issuer, fetch: Fetch) -> None:
        self.issuer = issuer
        self._fetch = fetch
        self._keys: list[Json] = []
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        """When the last try ended."""
        self._fetching: asyncio.Task[None] | None = None

    async def __call__(self, text: str) -> TokenClaims:
        """What a token says. Raises NotAdmitted."""
        try:
            head = jwt.get_unverified_header(text)
        except jwt.PyJWTError:
            raise _bad("this is no token that could be read") from None
        algorithm, kind, ident = head.get("alg"), head.get("typ"), head.get("kid")
        if algorithm not in self.issuer.algorithms:
            raise _bad("this token is signed in a way that is not accepted here")
        if "crit" in head or (kind.lower() if isinstance(kind, str) else kind) not in _TYPES:
            raise _bad("this token is none for access to a resource")
        said = self._verified(text, algorithm, await self._key(ident if isinstance(ident, str) else None, algorithm))
        return self._claims(said)

    def _verified(self, text: str, algorithm: str, key: Json) -> Mapping[str, Any]:
        try:
            made = jwt.PyJWK(key, algorithm)
            if isinstance(made.key, RSAPublicKey) and made.key.key_size < _MIN_BITS:
                raise _bad("this token is signed with a key that is too short")
            return jwt.decode(
                text,
                key=made.key,
                algorithms=[algorithm],
                audience=self.issuer.audience,
                issuer=self.issuer.issuer,
                leeway=_LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            text = "this token is expired; get another from the identity provider"
            raise NotAdmitted(401, "token_expired", text, "invalid_token") from None
        except jwt.InvalidAudienceError:
            raise _bad("this token is for another resource") from None
        except jwt.InvalidIssuerError:
            raise _bad("this token is of another issuer") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise _bad("this token does not verify") from None

    def _claims(self, said: Mapping[str, Any]) -> TokenClaims:
        resource = said.get("resource")
        if resource is not None and self.issuer.audience not in _texts(resource):
            raise _bad("this token is for another resource")
        clients = {said[name] for name in ("client_id", "azp") if isinstance(said.get(name), str)}
        if len(clients) != 1:
            raise _bad("this token does not say which client it was issued to")
        (client,) = clients
        subject = said.get("sub")
        if not isinstance(subject, str) or not subject:
            # Without it a user's token would count as the client's own.
            raise _bad("this token does not say whose it is (sub)")
        scopes = frozenset([*_words(said.get("scope")), *_words(said.get("scp"))])
        lacking = [scope for scope in self.issuer.scopes if scope not in scopes]
        if lacking:
            text = f"this token lacks the scope {' '.join(lacking)}"
            raise NotAdmitted(403, "insufficient_scope", text, "insufficient_scope", " ".join(self.issuer.scopes))
        roles: Any = said
        for step in self.issuer.roles_claim.split("."):
            roles = roles.get(step) if isinstance(roles, dict) else None
        given = frozenset(_texts(roles)) & frozenset(self.issuer.roles)
        return TokenClaims(client, None if subject == client else subject, scopes, given)

    # ── Keys ──

    async def _key(self, ident: str | None, algorithm: str) -> Json:
        """The key that a token names, of the kind that its algorithm needs."""
        if self._named(ident, algorithm) is None or self._age() > KEPT_SECONDS:
            await self._refreshed()
        elif self._age() >= REFRESH_SECONDS and self._fetching is None:
            # One request waits; those that come meanwhile use what is there, however long the provider takes.
            await self._refreshed()
        if self._age() > KEPT_SECONDS:
            raise NotAdmitted(503, "no_issuer", "the identity provider's keys cannot be had now; try again later")
        found = self._named(ident, algorithm)
        if found is None:
            raise _bad("this token is signed with a key that its issuer does not publish")
        return found

    def _named(self, ident: str | None, algorithm: str) -> Json | None:
        fitting = [key for key in self._keys if algorithm in _FAMILIES.get(str(key.get("kty")), ())]
        if ident is None:
            return fitting[0] if len(fitting) == 1 else None
        return next((key for key in fitting if key.get("kid") == ident), None)

    def _age(self) -> float:
        """Of the keys, in seconds."""
        return math.inf if self._fetched_at is None else time.monotonic() - self._fetched_at

    async def _refreshed(self) -> None:
        """Wait until the keys were fetched again, by one try for all who wait, or until that failed."""
        if self._fetching is None:
            if self._tried_at is not None and time.monotonic() - self._tried_at < _PAUSE_SECONDS:
                return  # another request has just looked
            self._fetching = asyncio.create_task(self._refresh())
        await asyncio.shield(self._fetching)

    async def _refresh(self) -> None:
        try:
            self._keys = await self._published()
            self._fetched_at = time.monotonic()
        except RingfenceError as exc:
            log.error("the keys of %s cannot be fetched: %s", self.issuer.issuer, exc)
        except (ValueError, RecursionError):
            log.error("the keys of %s cannot be read", self.issuer.issuer)
        finally:
            self._tried_at, self._fetching = time.monotonic(), None

    async def _published(self) -> list[Json]:
        place = self.issuer.jwks or await self._place()
        found = json.loads(await self._fetch(place))
        keys = found.get("keys") if isinstance(found, dict) else None
        if not isinstance(keys, list) or len(keys) > _MAX_KEYS:
            raise ValueError("no list of keys")
        return [key for key in keys if isinstance(key, dict) and key.get("use", "sig") == "sig"]

    async def _place(self) -> str:
        """The address of the keys, from the metadata of this very issuer; not `http` where that is `https`."""
        about = json.loads(await self._fetch(f"{self.issuer.issuer.rstrip('/')}/.well-known/openid-configuration"))
        if not isinstance(about, dict) or about.get("issuer") != self.issuer.issuer:
            raise ValueError("the document is of another issuer")
        place = about.get("jwks_uri")
        if not isinstance(place, str) or urlsplit(place).scheme not in ("https", urlsplit(self.issuer.issuer).scheme):
            raise ValueError("the document names no address that can be trusted")
        return place


def _bad(text: str) -> NotAdmitted:
    return NotAdmitted(401, "bad_token", text, "invalid_token")


def _words(value: Any) -> Sequence[str]:
    return value.split() if isinstance(value, str) else _texts(value)


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
