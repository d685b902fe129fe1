"""The secrets of a configuration, put together: where they are read, and what is removed from whatever leaves."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ringfence.config import paths
from ringfence.config.settings import Config
from ringfence.core import invisible
from ringfence.core.errors import ConfigError, Problem, Refused, Unavailable
from ringfence.core.model import SecretSpec, VaultSpec
from ringfence.sandbox.tools.screening import OutputScreen
from ringfence.secrets.redaction import TenantRedactor
from ringfence.secrets.sources import SecretSource, local_sources
from ringfence.secrets.vault import UNUSABLE, SecretScope, Vault, VaultEntry

if TYPE_CHECKING:
    from ringfence.governance.broker import VaultBroker
    from ringfence.governance.permission import Permissions
    from ringfence.governance.policy import Policy
    from ringfence.store import Store

log = logging.getLogger("ringfence")

_MAX_TOKEN_BYTES = 4096


class ConfiguredSecrets:
    """The secrets of one configuration in force."""

    def __init__(self, settings: Config, before: ConfiguredSecrets | None = None) -> None:
        """`before` is whose place it takes: what that one has read is still searched for."""
        sources = dict(local_sources(paths.variable))
        if settings.vault is not None:
            sources["vault"] = _remote(settings.vault)
        self._places = settings.places
        self._environment = settings.environment
        self.vault = Vault((_entry(spec) for spec in settings.secrets.values()), sources)
        if before is not None:
            self.vault.inherit(before.vault)
        known = self.vault.known
        self.shown = TenantRedactor(known)
        """For all that a person or a model reads."""
        self.kept = TenantRedactor(known, shaped=False)
        """For files: a shape may be what was to be made."""

    async def load(self) -> None:
        """Read every value once. One that cannot be kept secret raises ConfigError; one that is not there is logged,
        and calls that need it are refused."""
        problems: list[Problem] = []
        for name, error in (await self.vault.load()).items():
            if error.reason_code == UNUSABLE:
                problems.append(Problem(*self._places.get(name, ("secrets", 1, 1)), error.message))
            else:
                log.warning("%s; calls that need it are refused", error.message)
        if problems:
            raise ConfigError(sorted(problems))

    def broker(
        self, policy: Callable[[], Policy], store: Store, permissions: Callable[[], Permissions] | None = None
    ) -> VaultBroker:
        """The same as boxes and servers get them: each use by this policy, and on record."""
        from ringfence.governance.broker import PolicyJudge, VaultBroker  # noqa: PLC0415 - most boxes have no secrets

        judge = PolicyJudge(policy, store) if permissions is None else PolicyJudge(policy, store, permissions)
        return VaultBroker(self.vault, self._environment, judge)

    def screen(self) -> OutputScreen:
        """A screen for what one call brings out of a box."""
        return OutputScreen(self.shown, self.kept)


def _entry(spec: SecretSpec) -> VaultEntry:
    scope = SecretScope(spec.tenants, spec.environments, spec.capabilities, spec.servers, spec.agents)
    return VaultEntry(spec, scope, spec.lifetime_seconds)


def _remote(spec: VaultSpec) -> SecretSource:
    # Most configurations name no vault server, and load nothing of what it takes to speak to one.
    from ringfence.egress.dial import check_url  # noqa: PLC0415
    from ringfence.secrets.hashicorp import HashiCorp  # noqa: PLC0415

    host = urlsplit(spec.address).hostname or ""
    # An address in numbers is named by being written down.
    literal = (host,) if host.replace(".", "").isdecimal() or ":" in host else ()

    async def check(_host: str, _port: int) -> Sequence[str]:
        try:
            return await check_url(spec.address, (*spec.addresses, *literal))
        except Refused as exc:
            text = (
                f"requests to the vault are refused: {exc.message}; a private address is named under vault: addresses"
            )
            raise Unavailable("no_secret", text) from None

    return HashiCorp(spec.address, lambda: _token(spec), check, spec.namespace)


def _token(spec: VaultSpec) -> str | None:
    if spec.token_file is None:
        return paths.variable(spec.token_env)
    try:
        with open(spec.token_file, encoding="utf-8") as file:
            return file.read(_MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError):
        return None


_MARGIN = "    | "
_BREAK = re.compile(r"\n(?!    \| )")
"""A record comes here once for every handler."""


class _Filter(logging.Filter):
    """Removes secrets from what is logged, and shows what cannot be seen, wherever the record comes from.

    Only its first line stands at the edge: what others say may hold line breaks, and must not pass for another record.
    """

    def __init__(self, secrets: Callable[[], ConfiguredSecrets]) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            return True  # it does not fit its own format: the handler that writes it says so
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        clean = _BREAK.sub(f"\n{_MARGIN}", self._clean(text))
        if clean != text:
            record.msg = clean
            record.args = None
        if record.exc_text:
            shown = _BREAK.sub(f"\n{_MARGIN}", f"\n{self._clean(record.exc_text)}")
            record.exc_text = shown.removeprefix("\n")
        return True

    def _clean(self, text: str) -> str:
        """Others have a hand in it: no terminal obeys it, and nothing unseen stands between a secret's letters."""
        shown = self._secrets().shown
        if not invisible.suspect(text):
            return shown.redact(text)[0]
        bare, hits = shown.redact(invisible.bare(invisible.without_controls(text)[0]))
        clean, found = shown.redact(invisible.visible(text, lines=True))
        return bare if sum(hits.values()) > sum(found.values()) else clean


@asynccontextmanager
async def redacted_logs(secrets: Callable[[], ConfiguredSecrets]) -> AsyncIterator[None]:
    """Meanwhile no log that this process writes holds a secret."""
    handlers = list(logging.getLogger().handlers)
    without = _Filter(secrets)
    for handler in handlers:
        handler.addFilter(without)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(without)
