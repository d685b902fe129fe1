"""One tool call to a gateway that runs elsewhere: MCP over Streamable HTTP, spoken plainly.

Results pass as they came, unknown content included, and arguments go out as they were typed, so that what is wrong
with them is found, and recorded, by the gateway.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp
import anyio

from ringfence import __version__, canonical, system
from ringfence.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.model import Json, Status

_REVISION = "2025-11-25"
_ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_CONNECT_SECONDS = 10.0
_PARTING_SECONDS = 2.0
_MOST_BYTES = 16_000_000
_CALL_ID = 2
_UNIX, _AT_A_SOCKET = "unix:", "http://localhost/mcp"
_INVALID = (-32700, -32600, -32602)
"""JSON-RPC: no JSON, no request, wrong parameters."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the gateway at `url`."""

    url: str
    tool: str
    arguments: str
    """JSON as it was typed: well-formed, and nothing more is promised of it."""
    idempotency_key: str | None = None
    timeout: float | None = None
    token: str | None = field(default=None, repr=False)
    """What shows the gateway whose call this is, where it cannot see that by itself."""


async def call(request: Request, tell: Callable[[Json], None]) -> Json:
    """The raw result. `tell` gets the parameters of each progress notification meanwhile.

    Raises Unavailable where the call never left, Refused for an error or when the time was up, and OutcomeUnknown
    where the answer was lost.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    path = request.url.removeprefix(_UNIX) if request.url.startswith(_UNIX) else None
    connector = None if path is None else _at_socket(path)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=jar, connector=connector) as http:
        gateway = _Gateway(http, request.url if path is None else _AT_A_SOCKET, request.token)
        try:
            await gateway.greet()
        except (aiohttp.InvalidURL, ValueError):
            raise Unavailable("bad_url", f"{request.url} is no address of a gateway") from None
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise Unavailable("unreachable", f"no gateway answers at {request.url}: {exc}") from None
        except (Refused, OutcomeUnknown) as exc:
            raise Unavailable("no_gateway", f"what answers at {request.url} is no gateway: {exc}") from None
        try:
            with anyio.move_on_after(request.timeout):
                return await gateway.call(request, tell)
            text = f"gave up after {request.timeout:g} s; the call is cancelled"
            raise Refused(Status.TIMEOUT, "caller_timeout", text)
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise OutcomeUnknown("answer_lost", f"the gateway's answer was lost: {exc or type(exc).__name__}") from None
        finally:
            await gateway.part()


def _at_socket(path: str) -> aiohttp.UnixConnector:
    """Raises Unavailable for a socket of somebody else's, who would be told what is asked of ours."""
    try:
        info = os.lstat(path)
    except OSError as exc:
        raise Unavailable("unreachable", f"no gateway answers at {_UNIX}{path}: {exc.strerror}") from None
    if not stat.S_ISSOCK(info.st_mode) or system.stranger(info):
        raise Unavailable("unreachable", f"{path} is no socket of yours: no gateway that serves you listens there")
    return aiohttp.UnixConnector(path)


class _Gateway:
    """A session with one gateway."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str | None) -> None:
        self._http = http
        self._url = url
        self._headers = dict(_ACCEPT)
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    async def greet(self) -> None:
        about = {"name": "ringfence-cli", "version": __version__}
        params = {"protocolVersion": _REVISION, "capabilities": {}, "clientInfo": about}
        hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        result = await self._request(json.dumps(hello), 1, lambda _: None)
        self._headers["mcp-protocol-version"] = str(result.get("protocolVersion", _REVISION))
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def call(self, request: Request, tell: Callable[[Json], None]) -> Json:
        meta: Json = {"progressToken": "progress"}
        if request.idempotency_key is not None:
            meta["ringfence/idempotency_key"] = request.idempotency_key
        name, about = json.dumps(request.tool), json.dumps(meta)
        params = f'{{"name": {name}, "arguments": {request.arguments}, "_meta": {about}}}'
        body = f'{{"jsonrpc": "2.0", "id": {_CALL_ID}, "method": "tools/call", "params": {params}}}'
        try:
            return await self._request(body, _CALL_ID, tell)
        except anyio.get_cancelled_exc_class():
            # A connection that goes away is no cancellation: without a word the call would run on.
            note = {"requestId": _CALL_ID, "reason": "the caller gave up"}
            with anyio.move_on_after(_PARTING_SECONDS, shield=True):
                await self._send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": note})
            raise

    async def part(self) -> None:
        with anyio.move_on_after(_PARTING_SECONDS, shield=True):
            try:
                async with self._http.delete(self._url, headers=self._headers, allow_redirects=False):
                    pass
            except aiohttp.ClientError:
                return  # it forgets us by itself

    async def _send(self, message: Json) -> None:
        async with self._http.post(self._url, json=message, headers=self._headers, allow_redirects=False):
            pass

    async def _request(self, body: str, ident: int, tell: Callable[[Json], None]) -> Json:
        posting = self._http.post(
            self._url, data=body.encode("utf-8", "surrogateescape"), headers=self._headers, allow_redirects=False
        )
        async with posting as response:
            if "mcp-session-id" in response.headers:
                self._headers["mcp-session-id"] = response.headers["mcp-session-id"]
            async for message in _messages(response):
                if message.get("method") == "notifications/progress" and isinstance(message.get("params"), dict):
                    tell(message["params"])
                elif "error" in message:
                    raise _rpc_failed(message["error"])
                elif message.get("id") == ident and isinstance(message.get("result"), dict):
                    return dict(message["result"])
            raise _http_failed(response.status, self._url)


async def _messages(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """What a response holds: one message, or those of a stream; nothing where it is something else."""
    kind = response.headers.get("content-type", "")
    streams = kind.startswith("text/event-stream")
    if not streams and not kind.startswith("application/json"):
        return
    buffer = b""
    async for chunk in response.content.iter_any():
        buffer += chunk
        if len(buffer) > _MOST_BYTES:
            raise OutcomeUnknown("answer_unusable", f"the gateway sent more than {_MOST_BYTES} bytes in one message")
        if streams:
            *events, buffer = buffer.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                data = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
                if data:
                    yield _message(b"\n".join(data))
    if not streams:
        yield _message(buffer)


def _message(data: bytes) -> Json:
    try:
        value = canonical.loads(data)
    except canonical.NotCanonical as exc:
        raise OutcomeUnknown("answer_unusable", f"the gateway's answer cannot be read: {exc}") from None
    return value if isinstance(value, dict) else {}


def _rpc_failed(error: object) -> Refused:
    error = error if isinstance(error, dict) else {}
    status = Status.VALIDATION_FAILURE if error.get("code") in _INVALID else Status.FAILED
    return Refused(status, "rpc_error", f"{error.get('message', 'no message')} (JSON-RPC error {error.get('code')})")


def _http_failed(status: int, url: str) -> Exception:
    if status == 413:
        return Refused(Status.VALIDATION_FAILURE, "too_large", "the arguments are larger than the gateway takes")
    if status >= 300:
        return Unavailable("http", f"{url} answered HTTP {status}: is it a gateway of this user, and its /mcp?")
    return OutcomeUnknown("answer_lost", "the gateway ended its answer before the result")
