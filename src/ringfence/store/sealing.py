"""What is kept of calls in full is encrypted at rest: whoever has the state alone, or a copy of it, cannot read it.

The key lies in the folder of the signing key, outside of the state. Each text is bound to its call and part, so none
can be put in the place of another.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence.audit.keys import kept
from ringfence.core.errors import StoreError

KEY = "payloads.key"
_KEY_BYTES = 32
_NONCE_BYTES = 12
_MARK = b"ringfence sealed 1\0"


def is_sealed(body: bytes) -> bool:
    return body.startswith(_MARK)


class Sealing:
    """Seals and opens with one key."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    @classmethod
    def at(cls, folder: Path, *, make: bool) -> Sealing:
        """`make` the key where there is none yet. Raises StoreError."""
        if not make and not (folder / KEY).exists():
            raise StoreError(f"what is kept of this call was sealed with {KEY}, which is not in {folder}")
        key = kept(folder, KEY, lambda: os.urandom(_KEY_BYTES))
        if len(key) != _KEY_BYTES:
            raise StoreError(f"{folder / KEY} is not a key of {_KEY_BYTES} bytes")
        return cls(key)

    @classmethod
    def for_now(cls) -> Sealing:
        """With a key that nobody keeps."""
        return cls(os.urandom(_KEY_BYTES))

    def seal(self, call_id: str, part: str, body: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return _MARK + nonce + self._cipher.encrypt(nonce, body, _bound(call_id, part))

    def open(self, call_id: str, part: str, sealed: bytes) -> bytes | None:
        """None for what was not sealed by this key for this part of this call."""
        if not is_sealed(sealed):
            return None
        nonce, text = sealed[len(_MARK) :][:_NONCE_BYTES], sealed[len(_MARK) + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, text, _bound(call_id, part))
        except (InvalidTag, ValueError):
            return None


def _bound(call_id: str, part: str) -> bytes:
    return f"{part}\0{call_id}".encode()
