"""Where secrets come from: read when they are needed, handed on as handles, never kept longer than they live."""

from ringfence.vault.keeping import UNUSABLE, Entry, Scope, Source, Use, Vault
from ringfence.vault.sources import Found, local_sources

__all__ = ["UNUSABLE", "Entry", "Found", "Scope", "Source", "Use", "Vault", "local_sources"]
