"""An HTTP API as a server: its tools come from its OpenAPI document, and a call is one request to its base URL.

To the layers above it looks like any server: its definitions are pinned, its calls governed. There is no server
process. Nothing but the base URL's host is ever dialled, at addresses that were checked, and no redirect is followed.
"""

from __future__ import annotations

import base64
import codecs
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
from yarl import URL

from ringfence.core import canonical
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, WorkProgress
from ringfence.core.model import Json, ServerSpec, Status
from ringfence.core.quoting import quoted
from ringfence.egress.resolver import Check, CheckedResolver
from ringfence.upstream.http import Credentials, connector, reason_of
from ringfence.upstream.link import HANDSHAKE, MAX_MESSAGE_BYTES, REMOTE, AnswerUnusable, InFlight, RpcError
from ringfence.upstream.openapi import document, template
from ringfence.upstream.openapi.document import BadDocument
from ringfence.upstream.openapi.operation import ApiRequest, BadArguments, Operation, request_of
from ringfence.upstream.pacing import Floods, Intake

log = logging.getLogger("ringfence.upstream")

_CONNECT_SECONDS = 10.0
_INVALID_PARAMS = -32602
_METHOD_NOT_FOUND = -32601
_NO_HEADER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LINK = re.compile(r'<([^<>]*)>((?:\s*;\s*[\w!#$&+.^`|~-]+\*?=(?:"[^"]*"|[^\s";,]*))*)')
_REL = re.compile(r';\s*rel="?([^";,]+)"?')
_MAX_LINKS = 20
_ENCODINGS = frozenset(
    {"utf-8", "ascii", "iso8859-1", "iso8859-15", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "shift_jis", "euc_jp"}
    | {"gb18030", "gbk", "big5", "koi8-r", "cp1251"}
)
"""Of texts that are read as such; others are given as they are."""
_SAID = {
    "user-agent": "ringfence",
    "accept": "application/json, text/*;q=0.9, */*;q=0.5",
    "accept-encoding": "identity",
}


class ApiLink:
    """Implements `link.ServerLink`."""

    isolation: Json | None = REMOTE
    ending = ""
    hint = ""
    last_words: tuple[str, ...] = ()

    def __init__(
        self,
        spec: ServerSpec,
        credentials: Credentials | None = None,
        check: Check | None = None,
        floods: Floods | None = None,
    ) -> None:
        """`credentials` tells the headers that every request carries; `check`, where the host's name may lead."""
        self._spec = spec
        self._name = spec.name
        self._base = (spec.url or "").rstrip("/")
        self._credentials = credentials
        self._check = check
        self._intake = Intake(floods)
        self._client: aiohttp.ClientSession | None = None
        self._offers: Mapping[str, tuple[Operation, Callable[[Mapping[str, Any]], ApiRequest]]] = {}
        self.unowned: Callable[[str, Json], Awaitable[Json]] | None = None

    def network_meter(self) -> Callable[[], Json | None]:
        return lambda: None

    def network_since_start(self) -> Json | None:
        return None

    async def notify(self, method: str, params: Json | None, headers: Mapping[str, str] | None = None) -> None:
        """It has no place that notifications could go to."""

    async def run(self, ready: Callable[[], object], tell: Callable[[str, Json], Awaitable[None]]) -> None:
        resolver = None if self._check is None else CheckedResolver(partial(self._check, self._base))
        async with _session(self._intake, resolver) as client:
            self._client = client
            try:
                ready()
                await anyio.sleep_forever()
            finally:
                self._client = None

    async def request(self, method: str, params: Json, exchange: InFlight) -> Json:
        if self._client is None:
            raise Unavailable("server_down", f"server {self._name} is not connected")
        if method == "initialize":
            await self._read()
            about = {"name": self._name, "version": "openapi"}
            return {"protocolVersion": HANDSHAKE, "capabilities": {"tools": {}}, "serverInfo": about}
        if method == "tools/list":
            return {"tools": [operation.definition for operation, _ in self._offers.values()]}
        if method == "tools/call":
            return await self._call(self._client, params, exchange)
        raise RpcError(_METHOD_NOT_FOUND, f"an HTTP API has no {method}")

    # ── What it offers ──

    async def _read(self) -> None:
        """Raises Unavailable."""
        declared = self._spec.direct
        if declared is not None:
            name = self._name.removeprefix(template.DIRECT)
            operation = template.operation_of(name, declared, None)
            self._offers = {name: (operation, partial(template.request_by, declared))}
            return
        place = self._spec.openapi or ""
        try:
            data = await anyio.to_thread.run_sync(document.read_file, Path(place))
            found = await self._intake.floods.in_thread(partial(document.read, data))
        except (BadDocument, OSError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise Unavailable("server_listing", f"server {self._name}: {place} cannot be used: {why}") from None
        self._offers = {each.name: (each, partial(request_of, each)) for each in found.operations}
        for where, why in found.left_out:
            log.info("server %s: %s is left out: %s", self._name, where, why)

    # ── A call ──

    async def _call(self, client: aiohttp.ClientSession, params: Json, exchange: InFlight) -> Json:
        offered = self._offers.get(str(params.get("name")))
        if offered is None:
            raise RpcError(_INVALID_PARAMS, f"there is no operation {quoted(str(params.get('name')))}")
        arguments = params.get("arguments")
        try:
            request = offered[1](arguments if isinstance(arguments, dict) else {})
        except BadArguments as exc:
            text = f"{self._name}: {exc}; nothing was sent"
            with WorkProgress():
                raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", text) from None
        given = (_SAID, request.headers, await self._secret_headers(exchange))
        headers = {name.lower(): value for each in given for name, value in each.items()}  # a secret is the last word
        for name, value in headers.items():
            if _NO_HEADER.search(value):
                text = f"server {self._name}: what the header {name} is to hold cannot stand in one"
                raise Unavailable("no_secret", f"{text}: it has line breaks or control characters")
        return await self._sent(client, request, headers)

    async def _secret_headers(self, exchange: InFlight) -> dict[str, str]:
        """Raises Unavailable."""
        own = {} if self._credentials is None else await self._credentials()
        return {**own, **exchange.own_headers}

    async def _sent(self, client: aiohttp.ClientSession, request: ApiRequest, headers: Mapping[str, str]) -> Json:
        url = URL(f"{self._base}{request.target}", encoded=True)  # or %2F would become a slash again
        try:
            async with client.request(
                request.method, url, data=request.body, headers=headers, allow_redirects=False
            ) as answer:
                data = b"" if request.method == "HEAD" else await _bounded(answer, MAX_MESSAGE_BYTES)
                return _result(answer, data)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as exc:
            raise Unavailable(
                "server_unreachable", f"server {self._name} cannot be reached: {reason_of(exc)}"
            ) from None
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise OutcomeUnknown(
                "answer_lost", f"server {self._name}: the answer was lost ({reason_of(exc)})"
            ) from None


def _session(intake: Intake, resolver: CheckedResolver | None) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    return aiohttp.ClientSession(
        connector=connector(intake, resolver),
        timeout=timeout,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        skip_auto_headers=("user-agent", "accept-encoding", "content-type"),
    )


async def _bounded(answer: aiohttp.ClientResponse, most: int) -> bytes:
    out = bytearray()
    while not answer.content.at_eof():
        out += await answer.content.readany()
        if len(out) > most:
            raise AnswerUnusable(f"the API sent an answer of more than {most} bytes")
    return bytes(out)


# ── Answers ───────────────────────────────────────────────────────────────────────────────────────


def _result(answer: aiohttp.ClientResponse, data: bytes) -> Json:
    structured: Json = {"status": answer.status}
    text = _content(answer, data, structured)
    if links := _links(answer):
        structured["links"] = links
    if answer.status < 300:
        return {"content": [{"type": "text", "text": text}], "structuredContent": structured}
    if answer.status < 400 and answer.status != 304:
        return _problem(f"HTTP {answer.status}: it refers to another address, which is not followed.", structured)
    reason = f" {answer.reason}" if answer.reason else ""
    return _problem(f"HTTP {answer.status}{reason[:100]}" + (f"\n{text}" if text else ""), structured)


def _content(answer: aiohttp.ClientResponse, data: bytes, structured: Json) -> str:
    """The answer as a text; as data it goes into `structured`."""
    if not data:
        return "" if answer.status >= 300 else f"HTTP {answer.status}, without a body"
    kind = answer.content_type.lower()
    if kind.endswith(("/json", "+json")) or data[:1] in (b"{", b"["):
        try:
            structured["body"] = canonical.loads(data)
        except canonical.NotCanonical as exc:
            if kind.endswith(("/json", "+json")):
                log.debug("an answer calls itself JSON and is none: %s", exc)
        else:
            return data.decode("utf-8", "replace")
    try:
        # Some codecs take minutes for a megabyte; whoever answers chooses the name.
        encoding = codecs.lookup(answer.charset or "utf-8").name
        if encoding not in _ENCODINGS:
            raise LookupError(encoding)
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError, ValueError):
        structured["base64"] = base64.b64encode(data).decode()
        return f"{len(data)} bytes of {kind}"
    structured["body"] = text
    return text


def _links(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """What its Link header names; those on other hosts too, since a link alone reaches nothing."""
    found: dict[str, Any] = {}
    for value in answer.headers.getall("link", [])[:_MAX_LINKS]:
        for target, parameters in _LINK.findall(value[:10_000])[:_MAX_LINKS]:
            rel = _REL.search(parameters)
            if rel is not None:
                found.setdefault(rel[1].strip()[:50], target[:2000])
    return found


def _problem(text: str, structured: Json | None = None) -> Json:
    result: Json = {"content": [{"type": "text", "text": text}], "isError": True}
    if structured is not None:
        result["structuredContent"] = structured
    return result
