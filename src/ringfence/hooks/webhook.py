"""A hook that is an address: records, or questions to people, are posted to it, signed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from ringfence.core import canonical
from ringfence.core.model import HookSpec, Json
from ringfence.core.secret import Secret
from ringfence.egress.dial import check_url
from ringfence.egress.names import url as url_parts
from ringfence.egress.resolver import CheckedResolver
from ringfence.hooks.delivery import HookFailed
from ringfence.secrets.signing import signed_headers

_TYPE = "ringfence.calls_ended"


class WebhookHook:
    """Posts to one address, after checking what it resolves to, and follows no redirect."""

    def __init__(self, spec: HookSpec, secret: Callable[[], Awaitable[Secret]]) -> None:
        """`secret` returns a handle for one use."""
        assert spec.url is not None
        self._spec = spec
        self._url = spec.url
        self._secret = secret

    async def take(self, records: Sequence[Json]) -> None:
        ident = f"{records[0]['id']}+{len(records)}"
        await self.post(ident, {"type": _TYPE, "hook": self._spec.name, "records": list(records)})

    async def post(self, ident: str, message: Json) -> None:
        """Post one message. Its receiver recognises by the id one that it has already. Raises as `take` does."""
        body = canonical.dumps(message)
        secret = await self._secret()
        try:
            signed = signed_headers(secret, ident, time.time(), body)
        finally:
            secret.revoke()
        host = url_parts(self._url).endpoint.host
        # An IP address in the URL counts as one that the configuration names.
        literal = () if host.address is None else (str(host.address),)
        addresses = await check_url(self._url, (*self._spec.addresses, *literal))

        async def checked() -> Sequence[str]:
            return addresses

        connector = aiohttp.TCPConnector(resolver=CheckedResolver(checked), use_dns_cache=False, force_close=True)
        timeout = aiohttp.ClientTimeout(total=self._spec.timeout_seconds)
        headers = {**signed, "content-type": "application/json", "user-agent": "ringfence"}
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
                ) as http,
                http.post(self._url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                status = answer.status
        except TimeoutError:
            raise HookFailed(f"it did not answer within {self._spec.timeout_seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise HookFailed(f"it cannot be reached: {type(error).__name__}") from None
        if not 200 <= status < 300:
            raise HookFailed(f"it answered {status}")

    async def close(self) -> None:
        return None
