"""Signed requests of ours to others, in the form of Standard Webhooks: whoever has the secret can tell that a request
is ours, that nothing in it was changed, and when it was made."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

from ringfence.core.errors import Unavailable
from ringfence.core.secret import Secret, reveal

_ENCODED = "whsec_"
_FEWEST_BYTES = 16


def signed_headers(secret: Secret, ident: str, at: float, body: bytes) -> Mapping[str, str]:
    """The headers that prove `body` to who knows the secret. Raises Unavailable for one that proves nothing."""
    moment = str(int(at))
    signed = b".".join((ident.encode(), moment.encode(), body))
    made = hmac.new(_key(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": ident,
        "webhook-timestamp": moment,
        "webhook-signature": f"v1,{base64.b64encode(made).decode()}",
    }


def _key(secret: Secret) -> bytes:
    value = reveal(secret)
    key = value.encode()
    if value.startswith(_ENCODED):
        try:
            key = base64.b64decode(value.removeprefix(_ENCODED), validate=True)
        except binascii.Error:
            raise Unavailable("bad_secret", f"secret {secret.name!r} has no base64 after {_ENCODED}") from None
    if len(key) < _FEWEST_BYTES:
        text = f"secret {secret.name!r} is too short to sign with: {_FEWEST_BYTES} bytes are the least"
        raise Unavailable("bad_secret", text)
    return key
