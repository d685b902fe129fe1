"""How the keys of an identity provider are fetched: by one request, to an address that passed our own check."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp

from ringfence.core.errors import Unavailable
from ringfence.core.model import Issuer
from ringfence.egress.dial import check_url
from ringfence.egress.resolver import CheckedResolver
from ringfence.identity.oidc import TokenReader

_SECONDS = 10.0
_MAX_BYTES = 256 * 1024


def token_reader(issuer: Issuer) -> TokenReader:
    """Verifies tokens of this issuer."""
    host = urlsplit(issuer.issuer).hostname or ""
    # An address in numbers is named by being written down.
    literal = (host,) if host.replace(".", "").isdecimal() or ":" in host else ()

    async def fetch(url: str) -> bytes:
        addresses = await check_url(url, (*issuer.addresses, *literal))

        async def found() -> Sequence[str]:
            return addresses

        connector = aiohttp.TCPConnector(resolver=CheckedResolver(found), use_dns_cache=False, force_close=True)
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        jar = aiohttp.DummyCookieJar()
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar) as http,
                http.get(url, allow_redirects=False, headers={"accept": "application/json"}) as answer,
            ):
                if answer.status != 200:
                    raise Unavailable("no_issuer", f"it answered {answer.status}")
                body = b""
                async for part in answer.content.iter_chunked(65_536):
                    body += part
                    if len(body) > _MAX_BYTES:
                        raise Unavailable("no_issuer", f"its answer has more than {_MAX_BYTES} bytes")
                return body
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable("no_issuer", f"it cannot be reached: {type(error).__name__}") from None

    return TokenReader(issuer, fetch)
