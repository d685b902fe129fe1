"""Where secrets come from: read when they are needed, handed on as handles, never kept longer than they live."""

from ringfence.vault.hashicorp import HashiCorp
from ringfence.vault.keeping import Entry, Scope, Use, Vault
from ringfence.vault.sources import Found, local_sources

__all__ = ["Entry", "Found", "HashiCorp", "Scope", "Use", "Vault", "local_sources"]
