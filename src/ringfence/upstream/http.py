"""A server behind a URL: Streamable HTTP, both revisions.

Each request is one POST; what the server asks or tells while it works comes on that POST's own stream, so it is
known whose it is. Bodies and events are bounded while they are read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
import anyio
import anyio.abc
from aiohttp.client_proto import ResponseHandler

from ringfence.core import canonical
from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable
from ringfence.core.model import Json
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.egress.resolver import Check, CheckedResolver
from ringfence.upstream.link import (
    MAX_MESSAGE_BYTES,
    MODERN,
    REMOTE,
    AnswerUnusable,
    InFlight,
    RpcError,
    read_message,
)
from ringfence.upstream.pacing import (
    LONG_BYTES,
    MAX_QUESTIONS,
    MAX_VALUES_TOLD,
    PIECE_BYTES,
    Floods,
    Intake,
    LinkBudget,
    framing,
)

log = logging.getLogger("ringfence.upstream")

_ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_TURNED_AWAY = (400, 401, 403, 404, 405, 406, 413, 415, 421, 429, 503)
_REOPEN_SECONDS = 1.0
_MIN_REOPEN = 0.1
_MAX_REOPEN = 30.0
_NOTIFY_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_PIECE_BYTES = 4096
_CHEAP = 50.0
_NO_HEADER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

_UNSAID = ("user-agent", "accept-encoding")
"""Headers that the library would add: no server needs the one, and the other buys nothing for messages this small."""

Tell = Callable[[str, Json], Awaitable[None]]
Credentials = Callable[[], Awaitable[Mapping[str, str]]]

_WHY: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.InvalidURL, "its URL is none that can be dialled"),
    (aiohttp.ClientConnectorDNSError, "its name has no address"),
    (aiohttp.ClientSSLError, "there is no TLS to be had with it"),
    (TimeoutError, "it took too long"),
    (aiohttp.ClientPayloadError, "it broke off, or is not HTTP"),
    (aiohttp.ClientResponseError, "it is not HTTP that can be read"),
    (aiohttp.ClientConnectionError, "the connection was closed"),
)


def reason_of(failed: Exception) -> str:
    """Why a connection failed or an answer was lost: in the system's words where it has some, else in ours.

    Never in the library's: it quotes what the server sent, which may hold a secret, and cuts what it quotes, and a part
    of a secret is not recognised as one.
    """
    if isinstance(failed, RingfenceError):
        return str(failed)
    if isinstance(failed, aiohttp.ClientConnectorCertificateError):
        refused = failed.certificate_error
        return refused.verify_message if isinstance(refused, ssl.SSLCertVerificationError) else "its certificate"
    cause = getattr(failed, "os_error", failed)
    if isinstance(cause.__cause__, RingfenceError):  # it may not be dialled
        return str(cause.__cause__)
    if isinstance(cause, socket.gaierror) and cause.strerror:
        return cause.strerror
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ssl.SSLError):
        return os.strerror(cause.errno)
    return next((words for kind, words in _WHY if isinstance(failed, kind)), type(failed).__name__)


class HttpLink:
    """One logical connection: a session id where the server gives one, and a pool of sockets."""

    isolation: Json | None = REMOTE
    ending = ""
    hint = ""
    last_words: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        url: str,
        credentials: Credentials | None = None,
        check: Check | None = None,
        floods: Floods | None = None,
    ) -> None:
        """`credentials` tells the headers that every request carries, as they are at that moment; `check`, where the
        name of the server may lead."""
        self._name = name
        self._url = url
        self._credentials = credentials
        self._resolver = None if check is None else CheckedResolver(partial(check, url))
        self._client: aiohttp.ClientSession | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._session: str | None = None
        self._version: str | None = None
        self._tell: Tell | None = None
        self._intake = Intake(floods)
        self._next_id = 0
        self._over = anyio.Event()
        self.unowned: Callable[[str, Json], Awaitable[Json]] | None = None

    def network_meter(self) -> Callable[[], Json | None]:
        return lambda: None

    def network_since_start(self) -> Json | None:
        return None

    async def run(self, ready: Callable[[], object], tell: Tell) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        # Cookies are state that a principal did not ask for; nothing of ours is read from the environment.
        jar = aiohttp.DummyCookieJar()
        async with (
            aiohttp.ClientSession(
                connector=connector(self._intake, self._resolver),
                timeout=timeout,
                cookie_jar=jar,
                trust_env=False,
                skip_auto_headers=_UNSAID,
            ) as client,
            anyio.create_task_group() as group,
        ):
            self._client = client
            self._group = group
            self._tell = tell
            try:
                ready()
                await self._over.wait()
            finally:
                if self._session is not None:
                    with anyio.move_on_after(2.0, shield=True):
                        await self._end_session(client)
                self._client = self._group = None
                group.cancel_scope.cancel()

    async def _end_session(self, client: aiohttp.ClientSession) -> None:
        try:
            async with client.delete(self._url, headers=await self._headers({}), allow_redirects=False):
                pass
        except (aiohttp.ClientError, Unavailable) as exc:
            log.debug("server %s: ending the session failed: %s", self._name, reason_of(exc))

    async def _headers(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Raises Unavailable."""
        headers = dict(_ACCEPT)
        if self._credentials is not None:
            headers.update(await self._credentials())
        if self._session is not None:
            headers["mcp-session-id"] = self._session
        headers.update(extra)
        for name, value in headers.items():
            if _NO_HEADER.search(value):  # the library would fail, and not say of what; and not that nothing was sent
                text = f"server {self._name}: what the header {name} is to hold cannot stand in one"
                raise Unavailable("no_secret", f"{text}: it has line breaks or control characters")
        return headers

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    async def request(self, method: str, params: Json, exchange: InFlight) -> Json:
        if self._client is None:
            raise Unavailable("server_down", f"server {self._name} is not connected")
        self._next_id += 1
        ident = self._next_id
        meta = {**params.get("_meta", {}), "progressToken": ident}
        message = {"jsonrpc": "2.0", "id": ident, "method": method, "params": {**params, "_meta": meta}}
        self._version = exchange.headers.get("mcp-protocol-version", self._version)
        try:
            return await self._post(self._client, message, exchange)
        except anyio.get_cancelled_exc_class():
            # At 2026-07-28 closing the stream is the cancellation; before it a notification is.
            if self._version != MODERN and method not in ("initialize", "server/discover") and self._group is not None:
                note = {"requestId": ident, "reason": "cancelled"}
                self._group.start_soon(self.notify, "notifications/cancelled", note, exchange.headers)
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as exc:
            raise Unavailable(
                "server_unreachable", f"server {self._name} cannot be reached: {reason_of(exc)}"
            ) from None
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise OutcomeUnknown(
                "answer_lost", f"server {self._name}: the answer was lost ({reason_of(exc)})"
            ) from None

    async def _post(self, client: aiohttp.ClientSession, message: Json, exchange: InFlight) -> Json:
        body = canonical.message(message)
        headers = await self._headers(exchange.headers)
        async with client.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            if response.status >= 300:
                raise await self._refusal(response)
            if message["method"] == "initialize":
                self._session = response.headers.get("mcp-session-id", self._session)
            kind = response.headers.get("content-type", "")
            if kind.startswith("application/json"):
                return _result(await self._parsed(await _read_bounded(response)), message["id"])
            if kind.startswith("text/event-stream"):
                return await self._follow(client, response, message["id"], exchange)
            raise AnswerUnusable(f"server {self._name} answered with content type {quoted(kind, 60)}")

    async def _follow(
        self, client: aiohttp.ClientSession, response: aiohttp.ClientResponse, ident: int, exchange: InFlight
    ) -> Json:
        """Read up to the answer. A server of the handshake era may close the stream, and continues it on request."""
        place = _Place()
        answer = await self._read(response, place, ident, exchange)
        try:
            while answer is None and place.last is not None and self._version != MODERN:
                await anyio.sleep(place.pause())
                extra = {"accept": "text/event-stream", "last-event-id": place.last, **self._version_header()}
                async with client.get(self._url, headers=await self._headers(extra), allow_redirects=False) as resumed:
                    if resumed.status != 200:
                        break
                    answer = await self._read(resumed, place, ident, exchange)
        except (aiohttp.ClientError, Unavailable, Refused) as exc:
            # The server has the request: that it cannot be reached again does not mean that it was never reached.
            raise OutcomeUnknown(
                "answer_lost", f"server {self._name}: the answer was lost ({reason_of(exc)})"
            ) from None
        if answer is None:
            raise OutcomeUnknown("answer_lost", f"server {self._name} closed the stream without an answer")
        return answer

    async def _read(
        self, response: aiohttp.ClientResponse, place: _Place, ident: int, exchange: InFlight
    ) -> Json | None:
        try:
            async for data in _events(response, place, self._intake):
                value = await self._parsed(data)
                if "method" not in value:
                    return _result(value, ident)
                await self._inbound(value, data, exchange.ask, exchange.notify)
        except aiohttp.ClientPayloadError:
            if place.last is None:
                raise
        return None

    async def _parsed(self, body: bytes) -> Json:
        return _parse(body) if len(body) < LONG_BYTES else await self._intake.floods.in_thread(lambda: _parse(body))

    async def _inbound(
        self, value: Json, data: bytes, ask: Callable[[str, Json], Awaitable[Json]] | None, tell: Tell
    ) -> None:
        method = value["method"]
        params = value.get("params")
        params = params if isinstance(params, dict) else {}
        if "id" not in value or not isinstance(method, str):
            await self._intake.notification(data)
            if isinstance(method, str) and canonical.values_at_most(data) <= MAX_VALUES_TOLD:
                if method == "notifications/progress":
                    params.pop("progressToken", None)
                await tell(method, params)
            return
        await self._intake.question(data)
        if self._group is not None and self._intake.admit_request(turn := object()):
            # Answered aside, so that the stream is read on while a person thinks.
            self._group.start_soon(self._answer, turn, value["id"], method, params, ask)

    async def _answer(
        self, turn: object, ident: Any, method: str, params: Json, ask: Callable[[str, Json], Awaitable[Json]] | None
    ) -> None:
        try:
            reply = await self._reply(method, params, ask or self.unowned)
            await self._send_unanswered({"jsonrpc": "2.0", "id": ident, **reply}, self._version_header())
        finally:
            self._intake.answered(turn)

    async def _reply(self, method: str, params: Json, ask: Callable[[str, Json], Awaitable[Json]] | None) -> Json:
        try:
            if method == "ping":
                return {"result": {}}
            if ask is None:
                return {"error": {"code": -32601, "message": f"{method} belongs to no call in progress"}}
            answer = await self._intake.answer_to(ask, method, params)
            if answer is None:
                text = f"{method}: {MAX_QUESTIONS} questions of this server wait already"
                return {"error": {"code": -32600, "message": text}}
            return {"result": answer}
        except RpcError as exc:
            return {"error": {"code": exc.code, "message": exc.message, "data": exc.data}}
        except RingfenceError as exc:  # the client has no answer; that is no reason to give up the connection
            return {"error": {"code": -32603, "message": str(exc)}}

    def _version_header(self) -> dict[str, str]:
        return {} if self._version is None else {"mcp-protocol-version": self._version}

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        """The error that an HTTP status stands for: the server's own words where it has any."""
        body = await _read_bounded(response, limit=100_000)
        if response.status == 404 and self._session is not None:
            self._over.set()
            text = f"server {self._name} answered HTTP 404: it has forgotten our session"
            return OutcomeUnknown("session_lost", text, answered=404)
        if response.headers.get("content-type", "").startswith("application/json"):
            try:
                error = _parse(body).get("error")
            except RpcError:
                error = None
            if isinstance(error, dict) and isinstance(error.get("code"), int):
                return RpcError(error["code"], str(error.get("message", "")), error.get("data"))
        text = f"server {self._name} answered HTTP {response.status}"
        turned_away = response.status in _TURNED_AWAY or 300 <= response.status < 400
        return OutcomeUnknown("server_refused" if turned_away else "server_error", text, answered=response.status)

    # ── what belongs to no request ────────────────────────────────────────────────────────────────

    async def notify(self, method: str, params: Json | None, headers: Mapping[str, str] | None = None) -> None:
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        await self._send_unanswered(message, headers or self._version_header())
        if method == "notifications/initialized" and self._session is not None and self._group is not None:
            self._group.start_soon(self._listen)

    async def _send_unanswered(self, message: Json, headers: Mapping[str, str]) -> None:
        if self._client is None:
            return
        body = canonical.message(message)
        try:
            carried = await self._headers(headers)
            with anyio.fail_after(_NOTIFY_SECONDS):  # a server that takes nothing must not hold our sockets
                async with self._client.post(self._url, data=body, headers=carried, allow_redirects=False):
                    pass
        except (aiohttp.ClientError, TimeoutError, Unavailable) as exc:
            log.debug("server %s: a message was not taken: %s", self._name, reason_of(exc))

    async def _listen(self) -> None:
        """The standing stream of the handshake era: list changes, updates, stray log lines."""
        tell = self._tell
        while self._client is not None and tell is not None:
            try:
                headers = await self._headers({"accept": "text/event-stream", **self._version_header()})
                async with self._client.get(self._url, headers=headers, allow_redirects=False) as response:
                    if response.status != 200:
                        return  # the server offers no such stream
                    async for data in _events(response, _Place(), self._intake):
                        value = await self._parsed(data)
                        if "method" in value:
                            await self._inbound(value, data, None, tell)
                        else:
                            await self._intake.notification(data)
            except (aiohttp.ClientError, RpcError, Unavailable) as exc:
                log.debug("server %s: the standing stream ended: %s", self._name, reason_of(exc))
            await anyio.sleep(_REOPEN_SECONDS)


async def _read_bounded(response: aiohttp.ClientResponse, limit: int = MAX_MESSAGE_BYTES) -> bytes:
    content = response.content
    out = bytearray()
    while not content.at_eof():
        out += await content.readany()
        if len(out) > limit:
            raise AnswerUnusable(f"the server sent an answer of more than {limit} bytes")
    return bytes(out)


@dataclass(slots=True)
class _Place:
    """How far a stream of events was read, should it break off."""

    last: str | None = None
    retry_seconds: float = _REOPEN_SECONDS
    _since: str | None = None
    """The last event when the stream was opened anew."""
    _idle: int = 0
    """How often in a row it was, and nothing had come."""

    def note(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.strip()
        if name == b"id":
            text = value.decode("ascii", "ignore")[:1000]
            self.last = text if text and text.isprintable() else None  # it goes back in a header
        elif name == b"retry" and value.isdigit():
            most = int(_MAX_REOPEN * 1000)
            self.retry_seconds = (most if len(value) > len(str(most)) else min(int(value), most)) / 1000

    def pause(self) -> float:
        """Seconds until the stream is opened again: what the server wishes, within bounds, and longer each time that
        it had nothing new to say."""
        self._idle = self._idle + 1 if self.last == self._since else 0
        self._since = self.last
        return min(_MAX_REOPEN, max(self.retry_seconds, _MIN_REOPEN) * float(2 ** min(self._idle, 10)))


async def _events(response: aiohttp.ClientResponse, place: _Place, intake: Intake) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    events = _Events(MAX_MESSAGE_BYTES, place)
    async for chunk in response.content.iter_any():
        for start in range(0, len(chunk), PIECE_BYTES):
            piece = chunk[start : start + PIECE_BYTES]
            found = events.feed(piece)
            await intake.reading(piece, events.wasted)
            for data in found:
                yield data


class _Events:
    """Reads server-sent events as they arrive; comments and events without data are nothing to us."""

    def __init__(self, limit: int, place: _Place | None = None) -> None:
        self._limit = limit
        self._place = place or _Place()
        self._buffer = bytearray()
        self._searched = 0
        """No line ends before here: a long line that comes in many pieces is not searched anew with each."""
        self._data: list[bytes] = []
        self._held = 0
        self.wasted = 0
        """Bytes of the last chunk's lines that were no data."""

    def feed(self, chunk: bytes) -> list[bytes]:
        out: list[bytes] = []
        self.wasted = 0
        self._buffer += chunk
        while (end := self._buffer.find(b"\n", self._searched)) >= 0:
            line = bytes(self._buffer[:end]).removesuffix(b"\r")
            del self._buffer[: end + 1]
            self._searched = 0
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._held += len(line)
            elif not line:
                whole = b"\n".join(self._data)
                self._data = []
                self._held = 0
                if whole:  # the first event of a stream that can be resumed has none
                    out.append(whole)
            else:
                self.wasted += len(line)
                self._place.note(line)
        self._searched = len(self._buffer)
        if self._held + len(self._buffer) > self._limit:
            raise AnswerUnusable(f"the server sent an event of more than {self._limit} bytes")
        return out


def _parse(body: bytes) -> Json:
    try:
        value = read_message(body)
    except canonical.NotCanonical as exc:
        raise AnswerUnusable(f"the server's answer is not usable: {exc}") from None
    if not isinstance(value, dict):
        raise AnswerUnusable("the server's answer is no JSON-RPC message")
    return value


def _result(value: Json, ident: int) -> Json:
    error = value.get("error")
    if error is not None and value.get("result") is not None:
        raise AnswerUnusable("the server's answer is both a result and an error")
    if isinstance(error, dict) and isinstance(error.get("code"), int):
        raise RpcError(error["code"], str(error.get("message", "")), error.get("data"))
    result = value.get("result")
    if value.get("id") not in (ident, str(ident)) or not isinstance(result, dict):
        raise AnswerUnusable("the server's answer belongs to no request of ours")
    return result


# ── Sockets that are read at the pace of their link ───────────────────────────────────────────────
#
# Below the events there is HTTP, and it can be flooded as well: chunks of one byte, informational answers without end.
# What these cost is spent before any content is seen, so it is counted where the bytes arrive.


class _Paced(ResponseHandler):
    """Hands on at once what arrives; what is dear, a little at a time, and meanwhile the socket is not read."""

    def __init__(self, floods: Floods, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._pace = LinkBudget(
            floods
        )  # each socket its own: one that is held back may carry the answer of another call
        self._waiting: asyncio.TimerHandle | None = None
        self._backlog = bytearray()
        self._lost: list[BaseException | None] = []

    def data_received(self, data: bytes) -> None:
        if not data:  # the library goes on with what it was handed before
            super().data_received(data)
            return
        price = framing(data)
        if price < _CHEAP and not self._backlog:
            super().data_received(data)
            self._hold(self._pace.owed(price))
        else:
            self._backlog += data
            self._work_off()

    def _work_off(self) -> None:
        while self._backlog and self._waiting is None:
            piece = bytes(self._backlog[:_PIECE_BYTES])
            del self._backlog[:_PIECE_BYTES]
            super().data_received(piece)
            self._hold(self._pace.owed(framing(piece)))
        if self._lost and not self._backlog:
            super().connection_lost(self._lost.pop())

    def _hold(self, seconds: float) -> None:
        if self.transport is None or self.transport.is_closing() or not (seconds or self._waiting):
            return
        self.transport.pause_reading()
        if self._waiting is None:
            self._pace.floods.count += 1
            self._waiting = asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._waiting = None
        self._pace.floods.count -= 1
        self._work_off()
        if self._waiting is not None or self.transport is None or self.transport.is_closing():
            return
        if not (self._reading_paused or getattr(self, "_buffer_paused", False)):  # else the library holds it itself
            self.transport.resume_reading()

    def _resume_transport_reading(self) -> None:
        """The library reads on whenever some of what it holds was taken, which is no reason to stop waiting."""
        if self._waiting is None:
            super()._resume_transport_reading()

    @property
    def should_close(self) -> bool:
        return bool(self._backlog) or super().should_close

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._backlog:
            self._lost.append(exc)  # what came before the end is heard before it
        else:
            super().connection_lost(exc)

    def close(self) -> None:
        self._backlog.clear()
        super().close()

    def abort(self) -> None:
        self._backlog.clear()
        super().abort()


def connector(intake: Intake, resolver: CheckedResolver | None) -> aiohttp.TCPConnector:
    """Must be made where a loop runs."""
    made = aiohttp.TCPConnector(limit=100, keepalive_timeout=4.0, resolver=resolver)
    # The library has no setting for this; tests/upstream/test_pacing.py fails should it take the name away.
    made._factory = partial(_Paced, intake.floods, loop=asyncio.get_running_loop())  # type: ignore[assignment]
    return made
