"""OpenAPI documents that lie behind a URL: fetched when a person asks for it, and kept as they were then."""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path

import aiohttp
import anyio
from yarl import URL

from ringfence.compose.servers import address_of
from ringfence.config import Config
from ringfence.core.errors import RingfenceError, Unavailable
from ringfence.egress.resolver import CheckedResolver
from ringfence.upstream.http import reason_of
from ringfence.upstream.openapi import document

_SECONDS = 60.0


async def fetch_documents(settings: Config) -> list[str]:
    """Fetch what the configuration names by URL. Returns what went wrong; the copy from before stays then."""
    problems: list[str] = []
    for spec in settings.servers.values():
        if spec.openapi_url is None or spec.openapi is None:
            continue
        try:
            data = await _fetched(spec.openapi_url)
            await anyio.to_thread.run_sync(partial(_keep, Path(spec.openapi), data))
        except (Unavailable, document.BadDocument) as exc:
            problems.append(f"server {spec.name}: {spec.openapi_url}: {exc}")
    return problems


def _keep(place: Path, data: bytes) -> None:
    """Raises BadDocument for what is none: that never takes the place of one."""
    document.read(data)
    for folder in (place.parent.parent, place.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}-{secrets.token_hex(4)}")
    part.write_bytes(data)
    os.replace(part, place)


async def _fetched(url: str) -> bytes:
    """Raises Unavailable."""
    out = bytearray()
    connector = aiohttp.TCPConnector(resolver=CheckedResolver(partial(address_of, url)))
    jar = aiohttp.DummyCookieJar()
    try:
        async with aiohttp.ClientSession(connector=connector, cookie_jar=jar, trust_env=False) as client:
            with anyio.fail_after(_SECONDS):
                async with client.get(URL(url), allow_redirects=False) as answer:
                    if answer.status != 200:
                        raise Unavailable("server_listing", f"it was answered with HTTP {answer.status}")
                    async for piece in answer.content.iter_any():
                        out += piece
                        if len(out) > document.MAX_BYTES:
                            raise Unavailable("server_listing", f"it has more than {document.MAX_BYTES:,} bytes")
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise Unavailable("server_listing", f"it cannot be fetched: {reason_of(exc)}") from None
    except RingfenceError as exc:
        raise Unavailable("server_listing", str(exc)) from None
    return bytes(out)
