"""Streamable HTTP, both revisions on one endpoint, on the SDK's kernel.

Ours instead of the SDK's transport because the bytes must be read strictly before anything trusts them, because Host
and Origin are checked on every bind address, and because a call that just ends should cost one plain JSON answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, aclose_shielded, modern_error_data
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    InboundLadderRejection,
    InboundModernRoute,
    classify_inbound_request,
    find_duplicated_routing_header,
    unsupported_protocol_version_rejection,
    validate_mcp_param_headers,
)
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import CONNECTION_CLOSED, HEADER_MISMATCH, INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR
from starlette.types import Message, Receive, Scope, Send

from ringfence.core import canonical
from ringfence.core.model import SYSTEM, Json, Principal
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.front import results
from ringfence.front.identify import PEER, Caller, challenge, has_token_in_address
from ringfence.front.inbound import (
    ClientRequest,
    Inbound,
    Watching,
    declared_problem,
    handshake,
    read_request,
    wants,
    with_params,
    without_icons,
)
from ringfence.front.mcp import McpFront
from ringfence.front.refusals import Refusal, Refusals, reason_of
from ringfence.identity import NotAdmitted
from ringfence.upstream.connection import ROOTS_CHANGED
from ringfence.upstream.link import HANDSHAKES

log = logging.getLogger("ringfence.front")

MAX_BODY_BYTES = 4 * 1024 * 1024
_CANCELLED = -32800
_BODY_SECONDS = 30.0
IDLE_SECONDS = 1800.0
MAX_SESSIONS = 10_000
_BACKLOG = 256
PING_SECONDS = 15.0
ATTEND_SECONDS = 0.02
"""A call that takes longer is worth watching whether its client is still there."""
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_LONGEST_TOKEN = 1000
"""Characters of a progress token; of a call with a longer one, nobody is told how far it is."""
Identify = Callable[[Scope], Principal | Awaitable[Caller] | None]
"""Says who makes a request: None, or NotAdmitted, where it is not to be served."""
CHECK_SECONDS = 0.5
"""How often it is looked whether those whose requests go on may still make them."""
_STILL_SECONDS = 5.0
"""For looking up one caller. One that takes longer is looked up again."""


# ── One request and its answer ────────────────────────────────────────────────────────────────────


def encode(message: Json) -> bytes:
    return canonical.reply(message)


def event(message: Json) -> bytes:
    return b"event: message\r\ndata: " + encode(message) + b"\r\n\r\n"


class Asks(Protocol):
    """Pairs a request of ours with the answer that the client posts later."""

    async def ask(self, exchange: HttpExchange, method: str, params: Mapping[str, Any] | None) -> Json: ...


class HttpExchange:
    """The SDK's dispatch context for one HTTP request, and the writer of its response: plain JSON if the call just
    ends, a stream of events once it has more to say."""

    def __init__(self, request_id: Any, params: Any, asks: Asks | None, send: Send) -> None:
        self.request_id = request_id
        self.transport = TransportContext(kind="streamable-http", can_send_request=asks is not None)
        self.message_metadata = ServerMessageMetadata()
        self.headers: list[tuple[bytes, bytes]] = []
        self._asks = asks
        self._send = send
        self._streaming = False
        self._over = False
        self.to_tell: set[anyio.Event] = set()
        """Set when the client goes away: of what waits for it, which can no longer get an answer."""
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        meta = params.get("_meta") if isinstance(params, dict) else None
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        usable = isinstance(token, str | int) and not isinstance(token, bool)
        # It is sent back every few seconds, by each call that waits.
        self._progress_token = token if usable and len(str(token)) <= _LONGEST_TOKEN else None

    # ── what the SDK asks of a dispatch context ───────────────────────────────────────────────────

    @cached_property
    def cancel_requested(self) -> anyio.Event:
        return anyio.Event()  # made on first use: a call that just ends never looks at it

    @property
    def can_send_request(self) -> bool:
        return self._asks is not None and not self._over

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> Json:
        if self._asks is None or self._over:
            raise NoBackChannelError(method)
        return await self._asks.ask(self, method, params)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = dict(params)
        await self.emit(message)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        if self._progress_token is None:
            return
        params: Json = {"progressToken": self._progress_token, "progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        await self.notify("notifications/progress", params)

    # ── the response ──────────────────────────────────────────────────────────────────────────────

    async def emit(self, message: Json) -> None:
        """Send something before the answer; from then on the response is a stream."""
        if self._over:
            return
        await self._open_stream()
        await self._body(event(message), more=True)

    async def finish(self, message: Json, status: int) -> None:
        """Send the answer itself."""
        if self._over:
            return
        self._over = True
        if self._streaming:
            await self._body(event(message), more=False)
            return
        body = encode(message)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._body(body, more=False)

    @contextmanager
    def attended(self, receive: Receive, scope: anyio.CancelScope | None) -> Iterator[None]:
        """While this holds, a silent stream is pinged, and when the client goes away `scope` is cancelled, where
        going away is the client's word for it."""
        # A timer, not a task: this is on the path of every call, and most are over before a task would be worth it.
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(ATTEND_SECONDS, self._attend, loop, receive, scope)
        try:
            yield
        finally:
            self._timer.cancel()
            if self._watching is not None:
                self._watching.cancel()

    def _attend(self, loop: asyncio.AbstractEventLoop, receive: Receive, scope: anyio.CancelScope | None) -> None:
        self._watching = loop.create_task(self._watch(receive, scope))
        self._timer = loop.call_later(PING_SECONDS, self._ping_soon, loop)

    async def _watch(self, receive: Receive, scope: anyio.CancelScope | None) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._over = True
            for waiting in self.to_tell:
                waiting.set()
            if scope is not None:
                self.cancel_requested.set()
                scope.cancel()

    def _ping_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pinging = loop.create_task(self._ping())
        self._timer = loop.call_later(PING_SECONDS, self._ping_soon, loop)

    async def _ping(self) -> None:
        if not self._over:
            await self._open_stream()
            await self._body(b": ping\r\n\r\n", more=True)

    async def _open_stream(self) -> None:
        if not self._streaming:
            self._streaming = True
            headers = [*_EVENT_HEADERS, *self.headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


# ── Sessions of handshake-era clients ─────────────────────────────────────────────────────────────


class HttpSession:
    """One handshake-era client. Its id is a name, never a credential: the principal must match as well."""

    def __init__(self, front: McpFront, principal: Principal) -> None:
        self.id = secrets.token_hex(16)
        self.principal = principal
        self.log_level = ["debug"]
        self.watching = Watching()
        self.last_used = anyio.current_time()
        self.busy = 0
        self.connection = Connection.for_loop(self, session_id=self.id)
        self.runner: ServerRunner[Any] = ServerRunner(
            front.server, self.connection, None, init_options=front.init_options
        )
        self.in_flight: dict[Any, tuple[anyio.CancelScope, HttpExchange]] = {}
        self._questions: dict[str, tuple[anyio.Event, list[Json]]] = {}
        """What is asked, by id: set when it is over, and the answer, where there is one."""
        self._outbox: MemoryObjectSendStream[Json]
        self._inbox: MemoryObjectReceiveStream[Json]
        self._outbox, self._inbox = anyio.create_memory_object_stream[Json](_BACKLOG)
        self._listening = False
        self._declared: Json | None = None

    def inbound(self, fault: str | None) -> Inbound:
        return Inbound(
            self.principal,
            "mcp-http",
            session=self.id,
            fault=fault,
            log_level=self.log_level,
            watching=self.watching,
        )

    @property
    def in_use(self) -> bool:
        """Whether its client waits for an answer, or listens."""
        return self.busy > 0 or self._listening

    @property
    def declared(self) -> Json:
        """What the client declared in its handshake."""
        if self._declared is None:
            self._declared = results.declared(self.connection.client_capabilities)
        return self._declared

    # ── the client's messages ─────────────────────────────────────────────────────────────────────

    def answered(self, message: Json) -> None:
        """The client posts the answer to a question of ours."""
        waiting = self._questions.get(str(message.get("id")))
        if waiting is not None:
            waiting[1].append(message)
            waiting[0].set()

    def cancel(self, request_id: Any) -> None:
        entry = self.in_flight.get(request_id) if isinstance(request_id, str | int) else None
        if entry is not None:
            entry[1].cancel_requested.set()
            entry[0].cancel()

    # ── questions on a call's own stream ──────────────────────────────────────────────────────────

    async def ask(self, exchange: HttpExchange, method: str, params: Mapping[str, Any] | None) -> Json:
        ident = "rf-" + secrets.token_hex(8)
        answered = anyio.Event()
        box: list[Json] = []
        self._questions[ident] = (answered, box)
        exchange.to_tell.add(answered)
        try:
            await exchange.emit({"jsonrpc": "2.0", "id": ident, "method": method, "params": dict(params or {})})
            await answered.wait()
        finally:
            exchange.to_tell.discard(answered)
            del self._questions[ident]
        if not box:
            raise MCPError(CONNECTION_CLOSED, "it closed the stream of its call")
        reply = box[0]
        error = reply.get("error")
        if isinstance(error, dict):
            code = error.get("code")
            raise MCPError(code if isinstance(code, int) else -32603, str(error.get("message", "")), error.get("data"))
        result = reply.get("result")
        if not isinstance(result, dict):
            raise MCPError(-32603, "the client's answer is no result")
        return result

    # ── the SDK's standalone channel ──────────────────────────────────────────────────────────────

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> Json:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Queued for the standing stream; a client that never opens one, or stops reading, loses the oldest."""
        message: Json = {"jsonrpc": "2.0", "method": method}
        if params:
            message["params"] = dict(params)
        try:
            self._outbox.send_nowait(message)
        except anyio.WouldBlock:
            self._inbox.receive_nowait()
            self._outbox.send_nowait(message)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            log.debug("session %s is closed; %s is dropped", self.id, method)

    async def stream(self, receive: Receive, send: Send) -> bool:
        """Serve the standing stream; False if another request has it."""
        if self._listening:
            return False
        self._listening = True
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache, no-transform"),
            (b"mcp-session-id", self.id.encode()),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b": open\r\n\r\n", "more_body": True})
            async with anyio.create_task_group() as group:

                async def until_gone() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(until_gone)
                while True:
                    body = b": ping\r\n\r\n"
                    with anyio.move_on_after(PING_SECONDS):
                        body = event(await self._inbox.receive())
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except* (anyio.EndOfStream, anyio.ClosedResourceError):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._listening = False
        return True

    async def close(self) -> None:
        for scope, _ in list(self.in_flight.values()):
            scope.cancel()
        self._outbox.close()
        self._inbox.close()
        await aclose_shielded(self.connection)


class HttpSessions:
    """All of them, by id."""

    def __init__(self, front: McpFront) -> None:
        self._front = front
        self._sessions: dict[str, HttpSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, principal: Principal) -> HttpSession | None:
        """A new session; None where all others are in use. If there are too many, whoever has most of them loses the
        one that is not in use for longest: its client is told that it is gone, and begins another."""
        if len(self._sessions) >= MAX_SESSIONS:
            spared = self._dispensable()
            if spared is None:
                return None
            del self._sessions[spared.id]
            self._front.meanwhile(partial(self.end, spared))  # its servers may be slow
        return HttpSession(self._front, principal)

    def _dispensable(self) -> HttpSession | None:
        have = Counter(session.principal.key for session in self._sessions.values())
        idle = (session for session in self._sessions.values() if not session.in_use)
        return min(idle, key=lambda session: (-have[session.principal.key], session.last_used), default=None)

    def keep(self, session: HttpSession) -> None:
        self._sessions[session.id] = session

    def get(self, ident: str, principal: Principal) -> HttpSession | None:
        """The session of that id, if it is this principal's; to others it does not exist."""
        session = self._sessions.get(ident)
        if session is None or session.principal.key != principal.key:
            return None
        session.principal = principal  # whom the agent acts for may have changed with the configuration
        session.last_used = anyio.current_time()
        return session

    async def end(self, session: HttpSession) -> None:
        self._sessions.pop(session.id, None)
        await session.close()
        await self._front.ended(session.id, session.principal, session.watching)

    async def close(self) -> None:
        """The gateway stops: every session ends."""
        for session in list(self._sessions.values()):
            await self.end(session)

    async def tell(self, principal: Principal | None, method: str, params: Json) -> None:
        """A notification to every session of one principal, or of all."""
        for session in list(self._sessions.values()):
            mine = principal is None or session.principal.key == principal.key
            if mine and wants(method, params, session.watching, session.log_level[0]):
                await session.notify(method, params)

    async def sweep(self) -> None:
        """Runs for as long as the gateway: idle sessions end."""
        while True:
            await anyio.sleep(30.0)
            now = anyio.current_time()
            for session in list(self._sessions.values()):
                if not session.busy and now - session.last_used > IDLE_SECONDS:
                    await self.end(session)


# ── The endpoint ──────────────────────────────────────────────────────────────────────────────────


class _HttpRequest:
    """One HTTP request and its caller. Every refusal is made by its methods, which put it on record."""

    __slots__ = ("_refusals", "_uid", "headers", "principal", "receive", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send, refusals: Refusals) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.headers = {k.decode("latin-1"): v.decode("latin-1").strip(" \t") for k, v in scope["headers"]}
        self.principal: Principal | None = None
        self._uid: int | None = scope.get(PEER)
        self._refusals = refusals

    async def note(self, reason: str, method: str | None = None) -> None:
        await self._refusals.record(Refusal("mcp-http", reason, self._uid, self.principal), method)

    async def plain(self, status: int, reason: str, text: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        await self.note(reason)
        await _plain(self.send, status, text, headers)

    async def not_admitted(self, exc: NotAdmitted, base: str) -> None:
        said = challenge(exc, base)
        await self.plain(exc.status, exc.reason_code, exc.message, [] if said is None else [said])

    async def error(self, status: int, code: int, reason: str, message: str) -> None:
        await self.note(reason)
        await _error(self.send, status, code, message)


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """What stands at `/metrics`."""

    text: Callable[[], Awaitable[str]]
    kind: bytes
    """Its content type."""
    is_operator: Callable[[Scope], bool]
    """Whether a request comes from the gateway's own account, by the kernel's word, and shows no other credential."""


class HttpFront:
    """The ASGI application behind `/mcp`."""

    def __init__(
        self,
        front: McpFront,
        identify: Identify,
        hosts: frozenset[str],
        port: int | None,
        url: str | None = None,
        scheme: Literal["http", "https"] = "http",
    ) -> None:
        """`hosts` are names that we are called by; without a port, as over a unix socket, they stand alone. `url` is
        our address as others know it, and `scheme` what we speak ourselves."""
        self._front = front
        self._identify = identify
        self._url = url
        own = {host if port is None else f"{host}:{port}" for host in hosts}
        self._own = frozenset(own if url is None else {*own, url.partition("://")[2]})
        origins = {f"{scheme}://{name}" for name in own}
        self._origins = frozenset(origins if url is None else {*origins, url})
        self.sessions = HttpSessions(front)
        self._lasting: dict[anyio.CancelScope, Caller] = {}
        """Requests under way whose callers may be shut out meanwhile."""

    @property
    def refusals(self) -> Refusals:
        return self._front.refusals

    def _is_foreign(self, scope: Scope, headers: dict[str, str]) -> bool:
        return headers.get("host", "").lower() not in self._own or _has_two_hosts(scope, headers)

    async def refuses(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether a request to another path is refused, and on record: it means another host, or shows a token where
        tokens get known."""
        request = _HttpRequest(scope, receive, send, self.refusals)
        if self._is_foreign(scope, request.headers):
            await request.plain(421, "foreign_host", "Host is not this gateway")
        elif has_token_in_address(scope):
            await request.plain(400, "token_in_address", _IN_ADDRESS)
        else:
            return False
        return True

    def is_ours(self, origin: bytes) -> bool:
        """Whether an `Origin` is our own address."""
        return origin.decode("latin-1").strip(" \t").lower() in self._origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _HttpRequest(scope, receive, send, self.refusals)
        caller = await self._admitted(request)
        if caller is None:
            return
        if caller.still is None:
            await self._serve(request, caller.principal)
        else:
            await self._serve_while_admitted(request, caller)

    async def _admitted(self, request: _HttpRequest, *, known: Callable[[Scope], bool] | None = None) -> Caller | None:
        """Who makes a request; None where it was refused. Whoever is `known` need not say which agent it is."""
        scope, headers = request.scope, request.headers
        caller: Caller | None = None
        refused: NotAdmitted | None = None
        try:
            found = self._identify(scope)
            caller = Caller(found) if isinstance(found, Principal) else None if found is None else await found
        except NotAdmitted as exc:
            refused = exc
        if caller is None and known is not None and known(scope):
            caller, refused = Caller(SYSTEM), None
        request.principal = None if caller is None else caller.principal
        # A page in a browser must not reach us through a name or an origin that is not ours.
        if self._is_foreign(scope, headers):
            await request.plain(421, "foreign_host", "Host is not this gateway")
        elif any(name == b"origin" and not self.is_ours(value) for name, value in scope["headers"]):
            await request.plain(403, "foreign_origin", "Origin is not this gateway")
        elif has_token_in_address(scope):
            await request.plain(400, "token_in_address", _IN_ADDRESS)
        elif refused is not None:
            await request.not_admitted(refused, self.base(scope))
        elif caller is None:
            await request.plain(403, "unknown_caller", "this gateway serves the programs of its own user only")
        else:
            return caller
        return None

    async def metrics(self, page: MetricsPage, scope: Scope, receive: Receive, send: Send) -> None:
        """What Prometheus reads: for the gateway's own account, and for agents whom the operator lets read it."""
        request = _HttpRequest(scope, receive, send, self.refusals)
        caller = await self._admitted(request, known=page.is_operator)
        if caller is None:
            return
        if scope["method"] not in ("GET", "HEAD"):
            await request.plain(405, "bad_method", "method not allowed", [(b"allow", b"GET, HEAD")])
        elif not (page.is_operator(scope) or self._front.may_read_metrics(caller.principal)):
            text = "this agent may not read metrics: the operator allows it by `metrics: true` under the agent"
            await request.not_admitted(NotAdmitted(403, "not_for_agent", text), self.base(scope))
        else:
            body = (await page.text()).encode() if scope["method"] == "GET" else b""
            await _respond(send, 200, body, page.kind, [(b"cache-control", b"no-store")])

    def base(self, scope: Scope) -> str:
        """Our own address: as others know it, or as the client wrote it and it was found to be ours."""
        if self._url is not None:
            return self._url
        host = next((value for name, value in scope["headers"] if name == b"host"), b"localhost")
        return f"{scope.get('scheme', 'http')}://{host.decode('latin-1').strip().lower()}"

    async def _serve_while_admitted(self, request: _HttpRequest, caller: Caller) -> None:
        """Serve a request that ends when its caller is shut out."""
        begun, ended = False, False
        send = request.send

        async def told(message: Message) -> None:
            nonlocal begun, ended
            begun = True
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body", False))
            await send(message)

        request.send = told
        with anyio.CancelScope() as scope:
            self._lasting[scope] = caller
            try:
                await self._serve(request, caller.principal)
            finally:
                del self._lasting[scope]
        if scope.cancelled_caught and not ended:
            if begun:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                shut_out = NotAdmitted(401, "shut_out", _SHUT_OUT, "invalid_token")
                await request.not_admitted(shut_out, self.base(request.scope))

    async def shut_out(self) -> None:
        """Runs for as long as the gateway: requests under way end when their callers' credentials do."""
        while True:
            await anyio.sleep(CHECK_SECONDS)
            await self.check_lasting()

    async def check_lasting(self) -> None:
        # All at once: an identity provider that hangs must not keep those in whose own tokens are revoked.
        async with anyio.create_task_group() as group:
            for scope, caller in self._lasting.items():
                group.start_soon(self._check, scope, caller)

    @staticmethod
    async def _check(scope: anyio.CancelScope, caller: Caller) -> None:
        assert caller.still is not None
        holds = True
        try:
            with anyio.move_on_after(_STILL_SECONDS):
                holds = (await caller.still()).key == caller.principal.key
        except NotAdmitted as exc:
            holds = exc.status == 503  # what cannot be looked up now is looked up again
        if not holds:
            scope.cancel()

    async def _serve(self, request: _HttpRequest, principal: Principal) -> None:
        scope, headers = request.scope, request.headers
        if (version := headers.get("mcp-protocol-version")) is not None and version not in HANDSHAKES:
            await self._modern(request, principal)
        elif scope["method"] == "POST":
            await self._post(request, principal)
        elif scope["method"] in ("GET", "DELETE"):
            await self._session_request(request, principal)
        else:
            await request.plain(405, "bad_method", "method not allowed", [(b"allow", b"GET, POST, DELETE")])

    # ── handshake era ─────────────────────────────────────────────────────────────────────────────

    async def _post(self, request: _HttpRequest, principal: Principal) -> None:
        message = await _read(request)
        if message is None:
            return
        value, fault = message
        if value.get("method") == "initialize" and "id" in value:
            try:
                value = {**value, "params": handshake(_params(value) or {})}
            except MCPError as exc:
                await request.note(reason_of(exc.code), "initialize")
                await _error(request.send, 400, exc.code, exc.message, value["id"])
                return
            session = self.sessions.create(principal)
            if session is None:
                await request.error(503, INVALID_REQUEST, "too_many_sessions", "too many sessions are open")
                return
            # Kept before it is answered: a quick client's next request may come before we are back here.
            self.sessions.keep(session)
            if not await self._request(session, value, fault, request):
                await self.sessions.end(session)
            return
        session = await self._find(request, principal)
        if session is None:
            return
        if "method" not in value:
            session.answered(value)
            await _accepted(request.send)
        elif "id" not in value:
            await _accepted(request.send)
            await self._notification(session, value)
        elif not await self._must_step_up(request, principal, value):
            await self._request(session, value, fault, request)

    async def _must_step_up(self, request: _HttpRequest, principal: Principal, value: Json) -> bool:
        """Whether the caller's token lacks a scope for this call. Its client is told which to ask for, and does so."""
        lacking = self._front.lacking_scopes(principal, value["method"], value.get("params"))
        if not lacking:
            return False
        text = f"this call needs a token with the scope {' '.join(lacking)}"
        wanted = " ".join(sorted({*(principal.scopes or ()), *lacking}))
        exc = NotAdmitted(403, "insufficient_scope", text, "insufficient_scope", wanted)
        await request.note("insufficient_scope", value["method"])
        said = challenge(exc, self.base(request.scope))
        error = {"code": INVALID_REQUEST, "message": text}
        body = encode({"jsonrpc": "2.0", "id": value["id"], "error": error})
        await _respond(request.send, 403, body, b"application/json", [] if said is None else [said])
        return True

    async def _find(self, request: _HttpRequest, principal: Principal) -> HttpSession | None:
        ident = request.headers.get("mcp-session-id")
        if ident is None:
            await request.error(400, INVALID_REQUEST, "not_initialized", "Mcp-Session-Id is missing")
            return None
        session = self.sessions.get(ident, principal)
        if session is None:
            await request.error(404, INVALID_REQUEST, "unknown_session", "Session not found")
        return session

    async def _notification(self, session: HttpSession, value: Json) -> None:
        params = value.get("params")
        params = params if isinstance(params, dict) else {}
        if value["method"] == "notifications/cancelled":
            session.cancel(params.get("requestId"))
            return
        if value["method"] == ROOTS_CHANGED:
            self._front.roots_changed(session.id)
            return
        exchange = HttpExchange(None, params, None, _nowhere)
        await session.runner.on_notify(exchange, value["method"], params)

    async def _request(self, session: HttpSession, value: Json, fault: str | None, request: _HttpRequest) -> bool:
        """Serve one request; True if it was answered with a result."""
        ident = value["id"]
        taken = ident in session.in_flight
        if taken:
            fault = f"request id {quoted(ident, 64)} is in use"
            if value["method"] != "tools/call":
                await request.note("id_in_use")
                await _error(request.send, 400, INVALID_REQUEST, fault, ident)
                return False
        exchange = HttpExchange(ident, value.get("params"), session, request.send)
        exchange.headers.append((b"mcp-session-id", session.id.encode()))
        inbound = session.inbound(fault)
        inbound.outbound = exchange
        exchange.message_metadata.request_context = inbound
        session.busy += 1
        reply: Json = {"error": {"code": _CANCELLED, "message": "Request cancelled"}}
        try:
            # A lost connection is no cancellation in this era; the call goes on and is recorded.
            with exchange.attended(request.receive, None):
                with anyio.CancelScope() as scope:
                    session.in_flight.setdefault(ident, (scope, exchange))
                    reply = await _outcome(self._served(session, value, exchange, inbound))
                if "error" in reply:
                    await self._unserved(request, value, inbound, reply["error"]["code"])
                await exchange.finish({"jsonrpc": "2.0", "id": ident, **reply}, 200)
        finally:
            session.busy -= 1
            if not taken:
                session.in_flight.pop(ident, None)
        return "result" in reply

    def _served(self, session: HttpSession, value: Json, exchange: HttpExchange, inbound: Inbound) -> Awaitable[Json]:
        method = value["method"]
        params = _params(value)
        version = session.connection.protocol_version
        if session.connection.client_params is not None and self._front.answers(method, version):
            return self._front.answer(ClientRequest(method, params or {}, version, inbound, session.declared))
        return session.runner.on_request(exchange, method, params)

    async def _unserved(self, request: _HttpRequest, value: Json, inbound: Inbound, code: int) -> None:
        """An error answer that no call on record stands behind."""
        if not inbound.called and code != _CANCELLED:
            await request.note(inbound.reason or reason_of(code), self._front.known(value["method"]))

    async def _session_request(self, request: _HttpRequest, principal: Principal) -> None:
        session = await self._find(request, principal)
        if session is None:
            return
        if request.scope["method"] == "DELETE":
            await self.sessions.end(session)
            await _plain(request.send, 200, "")
        elif "text/event-stream" not in request.headers.get("accept", ""):
            await request.error(406, INVALID_REQUEST, "not_acceptable", "the client must accept text/event-stream")
        elif not await session.stream(request.receive, request.send):
            await request.error(409, INVALID_REQUEST, "second_stream", "this session has a stream already")

    # ── 2026-07-28 ────────────────────────────────────────────────────────────────────────────────

    async def _modern(self, request: _HttpRequest, principal: Principal) -> None:
        if request.scope["method"] != "POST":
            await request.plain(405, "bad_method", "method not allowed", [(b"allow", b"POST")])
            return
        message = await _read(request)
        if message is None:
            return
        value, fault = message
        if "method" not in value:
            text = "the body must be one request or notification"
            await request.error(400, INVALID_REQUEST, "invalid_request", text)
        elif "id" not in value:
            rejection = unsupported_protocol_version_rejection(request.headers.get("mcp-protocol-version", ""))
            await (_accepted(request.send) if rejection is None else self._reject(request, rejection, None))
        else:
            route = self._route(request.scope, request.headers, value)
            if isinstance(route, InboundLadderRejection):
                await self._reject(request, route, value["id"], self._front.known(value["method"]))
            elif not await self._must_step_up(request, principal, value):
                await self._single(value, route, Inbound(principal, "mcp-http", fault=fault), request)

    async def _reject(
        self, request: _HttpRequest, rejection: InboundLadderRejection, ident: Any, method: str | None = None
    ) -> None:
        await request.note(reason_of(rejection.code), method)
        error: Json = {"code": rejection.code, "message": rejection.message}
        if rejection.data is not None:
            error["data"] = rejection.data
        body = encode({"jsonrpc": "2.0", "id": ident, "error": error})
        await _respond(request.send, ERROR_CODE_HTTP_STATUS.get(rejection.code, 400), body, b"application/json")

    async def _single(self, value: Json, route: InboundModernRoute, inbound: Inbound, request: _HttpRequest) -> None:
        exchange = HttpExchange(value["id"], value.get("params"), None, request.send)
        inbound.outbound = exchange
        exchange.message_metadata.request_context = inbound
        # Closing the connection is how a client of this era cancels.
        with anyio.CancelScope() as scope, exchange.attended(request.receive, scope):
            reply = await _outcome(self._served_alone(value, route, exchange, inbound))
            if "error" in reply:
                await self._unserved(request, value, inbound, reply["error"]["code"])
            status = ERROR_CODE_HTTP_STATUS.get(reply["error"]["code"], 200) if "error" in reply else 200
            await exchange.finish({"jsonrpc": "2.0", "id": value["id"], **reply}, status)

    def _served_alone(
        self, value: Json, route: InboundModernRoute, exchange: HttpExchange, inbound: Inbound
    ) -> Awaitable[Json]:
        method = value["method"]
        params = value["params"]
        version = route.protocol_version
        if self._front.answers(method, version):
            declared = route.client_capabilities if isinstance(route.client_capabilities, dict) else {}
            return self._front.answer(ClientRequest(method, params, version, inbound, declared))
        connection = Connection.from_envelope(version, without_icons(route.client_info), route.client_capabilities)
        runner: ServerRunner[Any] = ServerRunner(self._front.server, connection, None)
        return runner.on_request(exchange, method, params)

    def _route(self, scope: Scope, headers: dict[str, str], value: Json) -> InboundModernRoute | InboundLadderRejection:
        raw = [(k.decode("latin-1"), "") for k, _ in scope["headers"] if k.startswith(b"mcp-")]
        duplicated = find_duplicated_routing_header(raw)
        if duplicated is not None:
            return InboundLadderRejection(HEADER_MISMATCH, f"{duplicated} header appears more than once")
        route = classify_inbound_request(value, headers=headers)
        if isinstance(route, InboundLadderRejection):
            return route
        problem = declared_problem(route.client_info, route.client_capabilities)
        if problem is not None:
            return InboundLadderRejection(INVALID_PARAMS, problem)
        if value["method"] != "tools/call":
            return route
        params = value["params"]
        arguments = params.get("arguments") or {}
        if isinstance(params.get("name"), str) and isinstance(arguments, dict):
            schema = self._front.listing.header_schema(params["name"])
            if schema is not None:
                return validate_mcp_param_headers(schema, arguments, headers) or route
        return route


_IN_ADDRESS = (
    "a token must not stand in an address, where it is logged: revoke this one, and send another in the header"
    " Authorization"
)
_SHUT_OUT = "the credential of this request was revoked, or its time is over, while the request was served"


def _has_two_hosts(scope: Scope, headers: dict[str, str]) -> bool:
    return len(headers) != len(scope["headers"]) and sum(name == b"host" for name, _ in scope["headers"]) > 1


def _params(value: Json) -> Json | None:
    params = value.get("params")
    return params if isinstance(params, dict) else None


async def _outcome(work: Awaitable[Json]) -> Json:
    """A handler's result or error as the members of a JSON-RPC response."""
    try:
        return {"result": await work}
    except Exception as exc:  # the edge: whatever a handler raises becomes an error answer, details stay in our log
        error = modern_error_data(exc)
        return {"error": error.model_dump(mode="json", exclude_none=True)}


async def _read(request: _HttpRequest) -> tuple[Json, str | None] | None:
    """The JSON-RPC message of a POST, and what is wrong with its bytes if it is a call all the same."""
    headers = request.headers
    accept = headers.get("accept", "")
    if "*/*" not in accept and not ("application/json" in accept and "text/event-stream" in accept):
        text = "the client must accept application/json and text/event-stream"
        await request.error(406, INVALID_REQUEST, "not_acceptable", text)
        return None
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        await request.error(415, INVALID_REQUEST, "content_type", "Content-Type must be application/json")
        return None
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            body = await _body(headers, request.receive)
    except TimeoutError:
        text = f"the body did not arrive within {_BODY_SECONDS:g} s"
        await request.error(408, INVALID_REQUEST, "too_slow", text)
        return None
    if body is None:
        await request.error(413, INVALID_REQUEST, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
        return None
    fault: str | None = None
    try:
        value = read_request(body)
    except canonical.NotCanonical as exc:
        value = exc.value
        fault = str(exc)
        if not isinstance(value, dict) or value.get("method") != "tools/call":
            await request.error(400, PARSE_ERROR, "not_json", f"Parse error: {exc}")
            return None
    ident = value.get("id") if isinstance(value, dict) else None
    value, fault = with_params(value, fault)
    if (
        not isinstance(value, dict)
        or value.get("jsonrpc") != "2.0"
        or not isinstance(method := value.get("method", ""), str)
        or ("id" not in value and method and not method.startswith("notifications/"))
        or ("id" in value and (isinstance(ident, bool) or not isinstance(ident, str | int)))
        or not isinstance(value.get("params", {}), dict)
    ):
        code = INVALID_PARAMS if isinstance(value, dict) and "params" in value else INVALID_REQUEST
        await request.error(400, code, "invalid_request", "the body must be a single JSON-RPC message")
        return None
    return value, fault


async def _body(headers: dict[str, str], receive: Receive) -> bytes | None:
    declared = headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        return None
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] != "http.request":
            return b""
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _error(send: Send, status: int, code: int, message: str, ident: Any = None) -> None:
    body = encode({"jsonrpc": "2.0", "id": ident, "error": {"code": code, "message": message}})
    await _respond(send, status, body, b"application/json")


async def _plain(send: Send, status: int, text: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await _respond(send, status, text.encode(), b"text/plain; charset=utf-8", headers)


async def _accepted(send: Send) -> None:
    await _respond(send, 202, b"", b"application/json")


async def _respond(
    send: Send, status: int, body: bytes, kind: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    fields = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _nowhere(message: Message) -> None:
    return None
