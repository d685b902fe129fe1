"""What the log proves of a bearer token: that it was made so, and whether it was revoked.

Its making and its revocation are records with signatures of their own, found by the token's id. What a table says of a
token that they do not is worth nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.approvals import read_entry
from ringfence.audit.chain import Record, StateIdentity, has_signature
from ringfence.core.model import IssuedToken, Json

CREATED = "token_created"
REVOKED = "token_revoked"
_MAX_KNOWN = 10_000


def about(token: IssuedToken) -> Json:
    """What a token is, as the records about it say it."""
    whose = {"token": token.id, "for": token.kind, "name": token.name, "tenant": token.tenant}
    return {**whose, "expires_at": token.expires_at}


def making(token: IssuedToken) -> Json:
    """The record of its making. The digest is one of 256 random bits, and says nothing of them."""
    return {**about(token), "by": token.made_by, "digest": token.digest}


class TokenProofs:
    """Proves tokens of one state. A signature that was found good is not looked at again."""

    def __init__(self, public: Ed25519PublicKey, state: StateIdentity | None) -> None:
        self._public = public
        self._state = state
        self._good: dict[str, None] = {}

    def of(self, token: IssuedToken, records: Iterable[Record]) -> IssuedToken:
        """The token as these records, of its id, say that it is; one whose making they do not prove is good for
        nothing."""
        made = False
        revoked = token.revoked_at
        for record in records:
            entry = read_entry(record)
            if entry is None or entry[0].get("token") != token.id:
                continue
            body, place = entry
            if body["kind"] == REVOKED:
                revoked = body["at"] if revoked is None else revoked
            elif body["kind"] == CREATED and not made:
                made = making(token).items() <= body.items() and self._is_signed(body, place.hash)
        return replace(token, revoked_at=revoked, proven=made)

    def _is_signed(self, body: Json, digest: str) -> bool:
        if digest in self._good:
            return True
        if self._state is None or body.get("state") != self._state.id or not has_signature(self._public, body):
            return False
        if len(self._good) >= _MAX_KNOWN:
            self._good.clear()
        self._good[digest] = None
        return True
