"""Bearer tokens: 256 random bits for one agent or one person, known to us by their digest alone.

A token is `rft_`, its id, which lists show and which finds it, and its secret. The prefix is one that redaction knows.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from ringfence.core.errors import StoreError
from ringfence.core.model import IssuedToken

PREFIX = "rft_"
TOKEN_ID = "tok_"  # noqa: S105 - how ids begin
_TOKEN = re.compile(r"rft_([0-9a-f]{20})_([A-Za-z0-9_-]{43})")
KEPT_SECONDS = 0.5
"""How long a token that was found good is taken for good. After that it was revoked, it is good for no longer."""
_MAX_KEPT = 1000
_NOBODY = "0" * 64
MIN_SECONDS, USUAL_SECONDS, MAX_SECONDS = 1, 30 * 86_400, 366 * 86_400


class NotAdmitted(Exception):
    """A request that is not served, because of who makes it, or because nobody knows who does."""

    def __init__(self, status: int, reason_code: str, message: str, error: str | None = None, scope: str = "") -> None:
        """`error` is the word of RFC 6750 for it, if the request carried a credential; `scope` is what it lacks."""
        super().__init__(message)
        self.status = status
        self.reason_code = reason_code
        self.message = message
        self.error = error
        self.scope = scope


def new_token() -> tuple[str, str, str]:
    """The id of a new token, its text, and what is kept of it."""
    ident = secrets.token_hex(10)
    secret = secrets.token_urlsafe(32)
    return f"{TOKEN_ID}{ident}", f"{PREFIX}{ident}_{secret}", digest_of(secret)


def digest_of(secret: str) -> str:
    # Of 256 random bits; a slow function is for what people choose.
    return hashlib.sha256(secret.encode()).hexdigest()


class TokenCheck:
    """Says whose a token is. What it found is kept for half a second, so that a revoked one is refused within that."""

    def __init__(self, find: Callable[[str], tuple[IssuedToken | None, float]]) -> None:
        """`find` looks a token up by its id, and says what the time must be at least. It may raise StoreError."""
        self._find = find
        self._kept: OrderedDict[str, tuple[float, float, IssuedToken]] = OrderedDict()

    def __call__(self, text: str) -> IssuedToken:
        """The token that this text is. Raises NotAdmitted."""
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise NotAdmitted(401, "bad_token", "this is no token of this gateway", "invalid_token")
        found, now = self._found(f"{TOKEN_ID}{match[1]}")
        # The same work for a token that there is and for one that there is not.
        same = hmac.compare_digest(digest_of(match[2]), _NOBODY if found is None else found.digest)
        if found is None or not same:
            raise NotAdmitted(401, "bad_token", "this token is not known here", "invalid_token")
        state = found.state(now)
        if state != "valid":
            text = f"this token is {state}; ask the operator for another (ringfence token create)"
            raise NotAdmitted(401, f"token_{state}", text, "invalid_token")
        return found

    def _found(self, ident: str) -> tuple[IssuedToken | None, float]:
        at = time.monotonic()
        kept = self._kept.get(ident)
        if kept is not None and at - kept[0] < KEPT_SECONDS:
            return kept[2], max(time.time(), kept[1])
        self._kept.pop(ident, None)
        try:
            found, now = self._find(ident)
        except StoreError:
            raise NotAdmitted(503, "store", "the state cannot be read, so no token can be checked") from None
        if found is not None and found.state(now) == "valid":
            self._kept[ident] = (at, now, found)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found, now
