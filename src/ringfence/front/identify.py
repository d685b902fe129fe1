"""Which agent makes a request: by its bearer token, or by the account that the kernel names for its connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field

from starlette.types import Scope

from ringfence.core.model import Json, Principal, TokenClaims
from ringfence.core.record import dataclass
from ringfence.identity import Directory, NotAdmitted, TokenCheck
from ringfence.identity.peers import PEER as PEER
from ringfence.identity.tokens import PREFIX

METADATA = "/.well-known/oauth-protected-resource"
"""Where RFC 9728 has what a client must know of us; also with the path of the resource behind it."""
RESOURCE = "/mcp"
Issued = Callable[[str], Awaitable[TokenClaims]]
_LONGEST_TOKEN = 16_384
"""Characters; what other issuers put into theirs may be long."""
_IN_ADDRESS = (b"access_token=", b"rft_")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request, and how to see whether that still holds."""

    principal: Principal
    still: Callable[[], Awaitable[Principal]] | None = field(default=None, compare=False)
    """The same again, or NotAdmitted, once the credential is revoked or its time is over; None: it cannot be."""


def has_token_in_address(scope: Scope) -> bool:
    """Whether the address of a request carries a token: addresses are logged, and sent on."""
    asked: bytes = scope.get("query_string", b"")
    return bool(asked) and any(mark in asked.lower() for mark in _IN_ADDRESS)


class Identities:
    """Identifies callers where agents are declared."""

    def __init__(
        self,
        directory: Callable[[], Directory],
        tokens: TokenCheck,
        *,
        by_account: bool,
        issued: Callable[[], Issued | None] = lambda: None,
    ) -> None:
        """`issued` reads tokens of an identity provider, where there is one. `by_account`: a connection without a token
        may be known by its account, since nobody hands on another's."""
        self._directory = directory
        self._tokens = tokens
        self._issued = issued
        self._by_account = by_account

    async def __call__(self, scope: Scope) -> Caller:
        """Raises NotAdmitted."""
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if not shown:
            return Caller(self._without_token(scope))
        kind, _, text = shown[0].decode("latin-1").partition(" ")
        text = text.strip(" ")
        if len(shown) > 1 or kind.lower() != "bearer" or not text or len(text) > _LONGEST_TOKEN:
            problem = "Authorization must be there once, as: Bearer TOKEN"
            raise NotAdmitted(401, "bad_token", problem, "invalid_token")

        async def still() -> Principal:
            return await self._holder(text)

        return Caller(await still(), still)

    async def _holder(self, text: str) -> Principal:
        issued = self._issued()
        if issued is not None and not text.startswith(PREFIX):
            return self._directory().of_claims(await issued(text))
        return self._directory().holder(self._tokens(text))

    def _without_token(self, scope: Scope) -> Principal:
        known = self._directory().of_account(scope.get(PEER)) if self._by_account else None
        if known is None:
            text = "a bearer token is needed: ringfence token create --agent NAME, and send it as Authorization: Bearer"
            raise NotAdmitted(401, "no_token", text)
        return known


def challenge(exc: NotAdmitted, base: str) -> tuple[bytes, bytes] | None:
    """The header that tells a client how to do better, as RFC 6750 and RFC 9728 have it. `base` is our own address."""
    if exc.status not in (401, 403):
        return None
    words: dict[str, str] = {}
    if exc.error is not None:
        words |= {"error": exc.error, "error_description": exc.message}
    if exc.scope:
        words["scope"] = exc.scope
    words["resource_metadata"] = f"{base}{METADATA}{RESOURCE}"
    said = ", ".join(f'{name}="{_quotable(value)}"' for name, value in words.items())
    return b"www-authenticate", f"Bearer {said}".encode("latin-1")


def _quotable(text: str) -> str:
    return "".join(c if " " <= c <= "~" and c not in '"\\' else "'" for c in text)


def metadata(base: str, more: Mapping[str, object]) -> Json:
    """What RFC 9728 publishes of us."""
    about = {"resource": f"{base}{RESOURCE}", "bearer_methods_supported": ["header"], "resource_name": "Ringfence"}
    return {**about, **more}
