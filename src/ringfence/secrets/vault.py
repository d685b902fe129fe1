"""Secrets by name: who may use which, how long a value that was read is good for, and which values are known.

A value past its life is read anew before it is used again. What cannot be read is unavailable: an old value is never
handed out in its place, so that a secret that was withdrawn at its source is withdrawn here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase

from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import SecretSpec, Status
from ringfence.core.record import dataclass
from ringfence.core.secret import FEW_CHARACTERS, Secret, reveal
from ringfence.secrets.sources import SecretSource, SourceValue

log = logging.getLogger("ringfence.vault")

UNUSABLE = "bad_secret"
"""The reason where there is a value, and it cannot be kept secret."""
LIFETIME_SECONDS = 300.0
_FORMER = 4
"""So many values that a secret had before are still searched for: they may be good for a while, and stand in logs."""

_GONE = 64


@dataclass(frozen=True, slots=True)
class SecretUse:
    """Who uses a secret, and what for. The start of a server is for no capability and no agent."""

    tenant: str
    environment: str
    capability: str | None = None
    server: str | None = None
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class SecretScope:
    """Whom a secret is for, by patterns. None allows all, an empty tuple none."""

    tenants: tuple[str, ...] | None = None
    environments: tuple[str, ...] | None = None
    capabilities: tuple[str, ...] | None = None
    servers: tuple[str, ...] | None = None
    agents: tuple[str, ...] | None = None

    def outside(self, use: SecretUse) -> str | None:
        """The first thing about this use that the scope does not hold."""
        asked = (
            ("tenant", use.tenant, self.tenants),
            ("environment", use.environment, self.environments),
            ("capability", use.capability, self.capabilities),
            ("server", use.server, self.servers),
            ("agent", use.agent, self.agents),
        )
        for what, name, patterns in asked:
            if not _within(name, patterns):
                return what
        return None


def _within(name: str | None, patterns: tuple[str, ...] | None) -> bool:
    if patterns is None:
        return True
    return name is not None and any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class VaultEntry:
    """One secret as the operator declared it."""

    spec: SecretSpec
    scope: SecretScope = SecretScope()
    lifetime_seconds: float = LIFETIME_SECONDS


@dataclass(slots=True)
class _Kept:
    """What is known of one secret."""

    entry: VaultEntry
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    found: SourceValue | None = None
    read_at: float = 0.0
    secret: Secret | None = None
    former: list[Secret] = field(default_factory=list)


class Vault:
    """Hands out secrets. Reads each only when it is needed."""

    def __init__(
        self,
        entries: Iterable[VaultEntry],
        sources: Mapping[str, SecretSource],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = {entry.spec.name: _Kept(entry) for entry in entries}
        self._sources = sources
        self._clock = clock
        self._known: dict[str | None, tuple[Secret, ...]] = {}
        self._gone: list[_Kept] = []
        """What is declared no more, and may still stand somewhere."""

    async def secret(self, name: str, use: SecretUse) -> Secret:
        """A handle of its own for this use; the caller revokes it when the use is over.

        Raises Refused outside of its scope, Unavailable where there is no value that is good now.
        """
        kept = self._for(name, use)
        async with kept.lock:
            return (await self._current(kept)).again()

    def check(self, name: str, use: SecretUse) -> SecretSpec:
        """Whether this use could have it, without reading anything. Raises Refused, Unavailable."""
        return self._for(name, use).entry.spec

    def _for(self, name: str, use: SecretUse) -> _Kept:
        kept = self._kept.get(name)
        if kept is None:
            raise Unavailable("no_secret", f"there is no secret {name!r}")
        outside = kept.entry.scope.outside(use)
        if outside is not None:
            raise Refused(Status.DENIED, "secret_scope", f"secret {name!r} is not for this {outside}")
        return kept

    async def load(self) -> dict[str, Unavailable]:
        """Read every secret once, so that it can be searched for. What could not be read, by name, with the reason."""
        problems: dict[str, Unavailable] = {}

        async def read(name: str, kept: _Kept) -> None:
            try:
                async with kept.lock:
                    await self._current(kept)
            except Unavailable as error:
                problems[name] = error

        async with asyncio.TaskGroup() as group:
            for name, kept in self._kept.items():
                group.create_task(read(name, kept))
        return problems

    def inherit(self, before: Vault) -> None:
        """Take the place of another vault: the values that it has read are still searched for. A caller that goes on
        with the old one no longer gets secrets that are declared differently now."""
        self._gone = before._gone[-_GONE:]
        for name, old in list(before._kept.items()):
            kept = self._kept.get(name)
            if kept is not None and kept.entry.spec == old.entry.spec:
                kept.found = old.found
                kept.read_at = old.read_at
                kept.secret = old.secret
                kept.former = old.former
            else:
                self._gone.append(before._kept.pop(name))
        self._known.clear()

    def known(self, tenant: str | None = None) -> tuple[Secret, ...]:
        """Every value that this tenant's results are searched for; the same tuple until one changes. Without a tenant:
        those of all, for what is read by any of them, and for the log, which all of them share."""
        if tenant not in self._known:
            every = (*self._kept.values(), *self._gone)
            kept = [one for one in every if tenant is None or _within(tenant, one.entry.scope.tenants)]
            secrets = [secret for one in kept for secret in (one.secret, *one.former) if secret is not None]
            self._known[tenant] = tuple(secrets)
        return self._known[tenant]

    async def _current(self, kept: _Kept) -> Secret:
        """The value that is good now. With the entry's lock held: one reading at a time."""
        now = self._clock()
        expired = now - kept.read_at >= _life(kept)
        if kept.found is not None and kept.secret is not None and not kept.found.watched and not expired:
            return kept.secret
        spec = kept.entry.spec
        source = self._sources.get(spec.source)
        if source is None:
            raise Unavailable("no_secret", f"secret {spec.name!r}: secrets from {spec.source} cannot be read here")
        found = await source(spec, None if expired else kept.found)
        kept.read_at = now if found is not kept.found else kept.read_at
        kept.found = found
        if kept.secret is None or reveal(kept.secret) != found.value:
            self._replace(kept, found.value)
        assert kept.secret is not None
        return kept.secret

    def _replace(self, kept: _Kept, value: str) -> None:
        try:
            secret = Secret(kept.entry.spec.name, value)
        except ValueError as error:
            raise Unavailable(UNUSABLE, str(error)) from None
        if kept.secret is not None:
            kept.former = [kept.secret, *kept.former][:_FORMER]
        kept.secret = secret
        self._known.clear()
        if len(value) < FEW_CHARACTERS:
            log.warning(
                "secret %s has fewer than %d characters: a caller who sees what is removed from results could guess it;"
                " use a longer one",
                secret.name,
                FEW_CHARACTERS,
            )


def _life(kept: _Kept) -> float:
    own = kept.entry.lifetime_seconds
    lent = kept.found.lifetime_seconds if kept.found is not None else None
    return own if lent is None else min(own, lent)
