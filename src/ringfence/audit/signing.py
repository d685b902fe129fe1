"""What signs for a folder of keys: the key in it, or the process that it was given to."""

from __future__ import annotations

from pathlib import Path

from ringfence.audit.keys import SIGNER, load_or_create
from ringfence.audit.signer import SigningKey


def signing_key(folder: Path) -> SigningKey:
    """Raises StoreError."""
    if not (folder / SIGNER).is_dir():
        return load_or_create(folder)
    from ringfence.audit.signing_client import SignerProcess  # noqa: PLC0415 - most have no signer

    return SignerProcess(folder)
