"""The secrets of a configuration, put together: where they are read, and what is removed from whatever leaves.

A part of the composition root; whoever has no secrets makes no vault.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ringfence import invisible
from ringfence.config import paths
from ringfence.config.settings import Config
from ringfence.errors import ConfigError, Problem, Refused, Unavailable
from ringfence.model import SecretSpec, VaultSpec
from ringfence.redaction import Current
from ringfence.sandbox.screening import Screen
from ringfence.vault import UNUSABLE, Entry, Scope, Source, Vault, local_sources

if TYPE_CHECKING:
    from ringfence.brokering import Secrets
    from ringfence.policy import Policy
    from ringfence.store import Store

log = logging.getLogger("ringfence")

_TENANT = "local"
_MOST_TOKEN_BYTES = 4096


class Safe:
    """The secrets of one configuration in force."""

    def __init__(self, settings: Config, before: Safe | None = None) -> None:
        """`before` is whose place it takes: what that one has read is still searched for."""
        sources = dict(local_sources(paths.variable))
        if settings.vault is not None:
            sources["vault"] = _remote(settings.vault)
        self._places = settings.places
        self._environment = settings.environment
        self.vault = Vault((_entry(spec) for spec in settings.secrets.values()), sources)
        if before is not None:
            self.vault.inherit(before.vault)
        known = lambda: self.vault.known(_TENANT)  # noqa: E731
        self.shown = Current(known)
        """For all that somebody reads."""
        self.kept = Current(known, shaped=False)
        """For files: a shape may be what was to be made."""

    async def load(self) -> None:
        """Read every value once. One that cannot be kept secret raises ConfigError; one that is not there is told of,
        and whoever needs it is refused."""
        problems: list[Problem] = []
        for name, error in (await self.vault.load()).items():
            if error.reason_code == UNUSABLE:
                problems.append(Problem(*self._places.get(name, ("secrets", 1, 1)), error.message))
            else:
                log.warning("%s; calls that need it are refused", error.message)
        if problems:
            raise ConfigError(sorted(problems))

    def lending(self, policy: Callable[[], Policy], store: Store) -> Secrets:
        """The same as boxes and servers get them: each use by this policy, and on record."""
        module: Any = importlib.import_module("ringfence.brokering")
        lent: Secrets = module.Secrets(self.vault, self._environment, module.Judge(policy, store))
        return lent

    def screen(self) -> Screen:
        """For what one call brings out of a box."""
        return Screen(self.shown, self.kept)


def _entry(spec: SecretSpec) -> Entry:
    scope = Scope(spec.tenants, spec.environments, spec.capabilities, spec.servers, spec.agents)
    return Entry(spec, scope, spec.lifetime_seconds)


def _remote(spec: VaultSpec) -> Source:
    """Most have none, and load nothing of what it takes to speak to one."""
    dial: Any = importlib.import_module("ringfence.egress.dial")
    module: Any = importlib.import_module("ringfence.vault.hashicorp")
    host = urlsplit(spec.address).hostname or ""
    # An address in numbers is named by being written down.
    literal = (host,) if host.replace(".", "").isdecimal() or ":" in host else ()

    async def check(_host: str, _port: int) -> Sequence[str]:
        try:
            found: Sequence[str] = await dial.check_url(spec.address, (*spec.addresses, *literal))
        except Refused as exc:
            text = f"the vault may not be asked: {exc.message}; a private address is named under vault: addresses"
            raise Unavailable("no_secret", text) from None
        return found

    source: Source = module.HashiCorp(spec.address, lambda: _token(spec), check, spec.namespace)
    return source


def _token(spec: VaultSpec) -> str | None:
    if spec.token_file is None:
        return paths.variable(spec.token_env)
    try:
        with open(spec.token_file, encoding="utf-8") as file:
            return file.read(_MOST_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError):
        return None


class _Filter(logging.Filter):
    """Removes secrets from what is logged, and shows what cannot be seen, wherever the record comes from."""

    def __init__(self, safe: Callable[[], Safe]) -> None:
        super().__init__()
        self._safe = safe

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            return True  # it does not fit its own format: whoever writes it down says so
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        clean = self._clean(text)
        if clean != text:
            record.msg, record.args = clean, None
        if record.exc_text:
            record.exc_text = self._clean(record.exc_text)
        return True

    def _clean(self, text: str) -> str:
        """Others have a hand in it: no terminal obeys it, and nothing unseen stands between a secret's letters."""
        shown = self._safe().shown
        if not invisible.suspect(text):
            return shown.redact(text)[0]
        bare, struck = shown.redact(invisible.bare(invisible.without_controls(text)[0]))
        clean, found = shown.redact(invisible.visible(text, lines=True))
        return bare if sum(struck.values()) > sum(found.values()) else clean


@asynccontextmanager
async def quiet(safe: Callable[[], Safe]) -> AsyncIterator[None]:
    """Meanwhile no log that this process writes holds a secret."""
    handlers, without = list(logging.getLogger().handlers), _Filter(safe)
    for handler in handlers:
        handler.addFilter(without)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(without)
