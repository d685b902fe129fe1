"""HashiCorp Vault, over its HTTP interface.

Plain HTTP instead of its client library: two requests are all that is needed, they must not block, and each address has
to pass our own check before it is dialled.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from ringfence.core.model import SecretSpec
from ringfence.core.record import dataclass
from ringfence.egress.resolver import CheckedResolver
from ringfence.secrets.sources import SourceValue, missing

TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 1 << 20

Check = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host that may be dialled. Raises Unavailable or Refused where there are none."""


@dataclass(frozen=True, slots=True)
class HashiCorp:
    """One server, as a source of secrets."""

    address: str
    token: Callable[[], str | None] = field(repr=False)
    """Asked at every reading, so that a renewed one is used."""
    check: Check
    namespace: str | None = None

    async def __call__(self, spec: SecretSpec, before: SourceValue | None) -> SourceValue:
        """Read a field. Raises Unavailable."""
        if before is not None:
            return before
        try:
            body = await self._read(spec)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise missing(spec, f"the vault cannot be reached: {type(error).__name__}") from None
        data = body.get("data")
        if isinstance(data, dict) and isinstance(data.get("data"), dict) and "metadata" in data:
            data = data["data"]  # the second version of its store wraps what it holds
        value = data.get(str(spec.options["field"])) if isinstance(data, dict) else None
        if not isinstance(value, str):
            raise missing(spec, f"the vault has no text {spec.options['field']!r} at {spec.options['path']}")
        lease = body.get("lease_duration")
        lent = float(lease) if isinstance(lease, int) and lease > 0 else None
        return SourceValue(value, lifetime_seconds=lent)

    async def _read(self, spec: SecretSpec) -> dict[str, Any]:
        parts = urlsplit(self.address)
        token = self.token()
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise missing(spec, "the vault's address is no http or https URL")
        if not token:
            raise missing(spec, "there is no token for the vault")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        addresses = await self.check(parts.hostname, port)  # before anything else: then it is known why not

        async def found() -> Sequence[str]:
            return addresses

        headers = {"X-Vault-Token": token, "X-Vault-Request": "true"}
        if self.namespace is not None:
            headers["X-Vault-Namespace"] = self.namespace
        path = str(spec.options["path"]).strip("/")
        mount, _, rest = path.partition("/")
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(resolver=CheckedResolver(found), use_dns_cache=False, force_close=True)
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
            # As it is written; and, where the store is of the second version, as its interface wants it.
            status, body = await _get(session, self.address, path)
            if status in (403, 404) and not rest.startswith("data/"):
                status, body = await _get(session, self.address, f"{mount}/data/{rest}")
        if status != 200 or not isinstance(body, dict):
            raise missing(spec, f"the vault answered {status}")
        return body


async def _get(session: aiohttp.ClientSession, address: str, path: str) -> tuple[int, Any]:
    url = f"{address.rstrip('/')}/v1/{quote(path)}"
    async with session.get(url, allow_redirects=False) as answer:
        data = await answer.content.read(_MAX_BYTES)
        try:
            return answer.status, json.loads(data)
        except ValueError:
            return answer.status, None
