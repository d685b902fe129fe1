"""What vouches for the log: the key that signs it, in this process or in one of its own."""

from __future__ import annotations

from ringfence import config
from ringfence.audit.signer import SigningKey
from ringfence.audit.signing import signing_key
from ringfence.config.settings import AuditSettings


def key_of(settings: AuditSettings) -> SigningKey:
    """What signs the log. Raises StoreError."""
    folder = config.key_folder()
    if settings.signer == "inline":
        return signing_key(folder)
    from ringfence.audit.signing_client import give_to_signer  # noqa: PLC0415 - most have no signer

    return give_to_signer(folder, settings.signer_user)
