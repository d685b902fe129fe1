"""Streamable HTTP, both revisions on one endpoint, on the SDK's kernel.

Ours instead of the SDK's transport because the bytes must be read strictly before anything trusts them, because Host
and Origin are checked on every bind address, and because a call that just ends should cost one plain JSON answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, modern_error_data
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    InboundLadderRejection,
    InboundModernRoute,
    classify_inbound_request,
    find_duplicated_routing_header,
    unsupported_protocol_version_rejection,
    validate_mcp_param_headers,
)
from mcp_types import HEADER_MISMATCH, INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR
from starlette.types import Message, Receive, Scope, Send

from ringfence import canonical
from ringfence.front.exchange import Exchange, encode
from ringfence.front.inbound import Asked, Inbound, with_params
from ringfence.front.mcp import McpFront
from ringfence.front.refusals import Refusal, Refusals, reason_of
from ringfence.front.session import Session, Sessions
from ringfence.model import Json, Principal
from ringfence.upstream.link import HANDSHAKES
from ringfence.upstream.roots import CHANGED as ROOTS_CHANGED

log = logging.getLogger("ringfence.front")

MAX_BODY_BYTES = 4 * 1024 * 1024
_CANCELLED = -32800
_BODY_SECONDS = 30.0
PEER = "ringfence.peer"
"""Where the scope of a request says which user made its connection; None where nobody can tell."""
Identify = Callable[[Scope], Principal | None]


class _Visit:
    """One HTTP request and who makes it. What it is refused, it is refused here, and so on record."""

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

    async def error(self, status: int, code: int, reason: str, message: str) -> None:
        await self.note(reason)
        await _error(self.send, status, code, message)


class HttpFront:
    """The ASGI application behind `/mcp`."""

    def __init__(self, front: McpFront, identify: Identify, hosts: frozenset[str], port: int | None) -> None:
        """`hosts` are names that we are called by; without a port, as over a unix socket, they stand alone."""
        self._front = front
        self._identify = identify
        self._own = frozenset(host if port is None else f"{host}:{port}" for host in hosts)
        self._origins = frozenset(f"http://{own}" for own in self._own)
        self.sessions = Sessions(front)

    @property
    def refusals(self) -> Refusals:
        return self._front.refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = _Visit(scope, receive, send, self.refusals)
        headers = visit.headers
        visit.principal = principal = self._identify(scope)
        # A page in a browser must not reach us through a name or an origin that is not ours.
        if headers.get("host", "").lower() not in self._own or _has_two_hosts(scope, headers):
            await visit.plain(421, "foreign_host", "Host is not this gateway")
        elif "origin" in headers and headers["origin"].lower() not in self._origins:
            await visit.plain(403, "foreign_origin", "Origin is not this gateway")
        elif principal is None:
            await visit.plain(403, "unknown_caller", "this gateway serves the programs of its own user only")
        elif (version := headers.get("mcp-protocol-version")) is not None and version not in HANDSHAKES:
            await self._modern(visit, principal)
        elif scope["method"] == "POST":
            await self._post(visit, principal)
        elif scope["method"] in ("GET", "DELETE"):
            await self._session_request(visit, principal)
        else:
            await visit.plain(405, "bad_method", "method not allowed", [(b"allow", b"GET, POST, DELETE")])

    # ── handshake era ─────────────────────────────────────────────────────────────────────────────

    async def _post(self, visit: _Visit, principal: Principal) -> None:
        message = await _read(visit)
        if message is None:
            return
        value, fault = message
        if value.get("method") == "initialize" and "id" in value:
            session = self.sessions.create(principal)
            if session is None:
                await visit.error(503, INVALID_REQUEST, "too_many_sessions", "too many sessions are open")
                return
            # Kept before it is answered: a quick client's next request may come before we are back here.
            self.sessions.keep(session)
            if not await self._request(session, value, fault, visit):
                await self.sessions.end(session)
            return
        session = await self._find(visit, principal)
        if session is None:
            return
        if "method" not in value:
            session.answered(value)
            await _accepted(visit.send)
        elif "id" not in value:
            await _accepted(visit.send)
            await self._notification(session, value)
        else:
            await self._request(session, value, fault, visit)

    async def _find(self, visit: _Visit, principal: Principal) -> Session | None:
        ident = visit.headers.get("mcp-session-id")
        if ident is None:
            await visit.error(400, INVALID_REQUEST, "not_initialized", "Mcp-Session-Id is missing")
            return None
        session = self.sessions.get(ident, principal)
        if session is None:
            await visit.error(404, INVALID_REQUEST, "unknown_session", "Session not found")
        return session

    async def _notification(self, session: Session, value: Json) -> None:
        params = value.get("params")
        params = params if isinstance(params, dict) else {}
        if value["method"] == "notifications/cancelled":
            session.cancel(params.get("requestId"))
            return
        if value["method"] == ROOTS_CHANGED:
            self._front.roots_changed(session.id)
            return
        exchange = Exchange(None, params, None, _nowhere)
        await session.runner.on_notify(exchange, value["method"], params)

    async def _request(self, session: Session, value: Json, fault: str | None, visit: _Visit) -> bool:
        """Serve one request; True if it was answered with a result."""
        ident = value["id"]
        taken = ident in session.in_flight
        if taken:
            fault = f"request id {str(ident)[:64]!r} is in use"
            if value["method"] != "tools/call":
                await visit.note("id_in_use")
                await _error(visit.send, 400, INVALID_REQUEST, fault, ident)
                return False
        exchange = Exchange(ident, value.get("params"), session, visit.send)
        exchange.headers.append((b"mcp-session-id", session.id.encode()))
        inbound = session.inbound(fault)
        inbound.outbound = exchange
        exchange.message_metadata.request_context = inbound
        session.busy += 1
        reply: Json = {"error": {"code": _CANCELLED, "message": "Request cancelled"}}
        try:
            # A lost connection is no cancellation in this era; the call goes on and is recorded.
            with exchange.attended(visit.receive, None):
                with anyio.CancelScope() as scope:
                    session.in_flight.setdefault(ident, (scope, exchange))
                    reply = await _outcome(self._served(session, value, exchange, inbound))
                if "error" in reply:
                    await self._unserved(visit, value, inbound, reply["error"]["code"])
                await exchange.finish({"jsonrpc": "2.0", "id": ident, **reply}, 200)
        finally:
            session.busy -= 1
            if not taken:
                session.in_flight.pop(ident, None)
        return "result" in reply

    def _served(self, session: Session, value: Json, exchange: Exchange, inbound: Inbound) -> Awaitable[Json]:
        method, params = value["method"], _params(value)
        version = session.connection.protocol_version
        if session.connection.client_params is not None and self._front.answers(method, version):
            return self._front.answer(Asked(method, params or {}, version, inbound, session.declared))
        return session.runner.on_request(exchange, method, params)

    async def _unserved(self, visit: _Visit, value: Json, inbound: Inbound, code: int) -> None:
        """An error answer that no call on record stands behind."""
        if not inbound.called and code != _CANCELLED:
            await visit.note(inbound.reason or reason_of(code), self._front.known(value["method"]))

    async def _session_request(self, visit: _Visit, principal: Principal) -> None:
        session = await self._find(visit, principal)
        if session is None:
            return
        if visit.scope["method"] == "DELETE":
            await self.sessions.end(session)
            await _plain(visit.send, 200, "")
        elif "text/event-stream" not in visit.headers.get("accept", ""):
            await visit.error(406, INVALID_REQUEST, "not_acceptable", "the client must accept text/event-stream")
        elif not await session.stream(visit.receive, visit.send):
            await visit.error(409, INVALID_REQUEST, "second_stream", "this session has a stream already")

    # ── 2026-07-28 ────────────────────────────────────────────────────────────────────────────────

    async def _modern(self, visit: _Visit, principal: Principal) -> None:
        if visit.scope["method"] != "POST":
            await visit.plain(405, "bad_method", "method not allowed", [(b"allow", b"POST")])
            return
        message = await _read(visit)
        if message is None:
            return
        value, fault = message
        if "method" not in value:
            text = "the body must be one request or notification"
            await visit.error(400, INVALID_REQUEST, "invalid_request", text)
        elif "id" not in value:
            rejection = unsupported_protocol_version_rejection(visit.headers.get("mcp-protocol-version", ""))
            await (_accepted(visit.send) if rejection is None else self._reject(visit, rejection, None))
        else:
            route = self._route(visit.scope, visit.headers, value)
            if isinstance(route, InboundLadderRejection):
                await self._reject(visit, route, value["id"], self._front.known(value["method"]))
            else:
                await self._single(value, route, Inbound(principal, "mcp-http", fault=fault), visit)

    async def _reject(
        self, visit: _Visit, rejection: InboundLadderRejection, ident: Any, method: str | None = None
    ) -> None:
        await visit.note(reason_of(rejection.code), method)
        error: Json = {"code": rejection.code, "message": rejection.message}
        if rejection.data is not None:
            error["data"] = rejection.data
        body = encode({"jsonrpc": "2.0", "id": ident, "error": error})
        await _respond(visit.send, ERROR_CODE_HTTP_STATUS.get(rejection.code, 400), body, b"application/json")

    async def _single(self, value: Json, route: InboundModernRoute, inbound: Inbound, visit: _Visit) -> None:
        exchange = Exchange(value["id"], value.get("params"), None, visit.send)
        inbound.outbound = exchange
        exchange.message_metadata.request_context = inbound
        # Closing the connection is how a client of this era cancels.
        with anyio.CancelScope() as scope, exchange.attended(visit.receive, scope):
            reply = await _outcome(self._served_alone(value, route, exchange, inbound))
            if "error" in reply:
                await self._unserved(visit, value, inbound, reply["error"]["code"])
            status = ERROR_CODE_HTTP_STATUS.get(reply["error"]["code"], 200) if "error" in reply else 200
            await exchange.finish({"jsonrpc": "2.0", "id": value["id"], **reply}, status)

    def _served_alone(
        self, value: Json, route: InboundModernRoute, exchange: Exchange, inbound: Inbound
    ) -> Awaitable[Json]:
        method, params, version = value["method"], value["params"], route.protocol_version
        if self._front.answers(method, version):
            declared = route.client_capabilities if isinstance(route.client_capabilities, dict) else {}
            return self._front.answer(Asked(method, params, version, inbound, declared))
        connection = Connection.from_envelope(version, route.client_info, route.client_capabilities)
        runner: ServerRunner[Any] = ServerRunner(self._front.server, connection, None)
        return runner.on_request(exchange, method, params)

    def _route(self, scope: Scope, headers: dict[str, str], value: Json) -> InboundModernRoute | InboundLadderRejection:
        raw = [(k.decode("latin-1"), "") for k, _ in scope["headers"] if k.startswith(b"mcp-")]
        duplicated = find_duplicated_routing_header(raw)
        if duplicated is not None:
            return InboundLadderRejection(HEADER_MISMATCH, f"{duplicated} header appears more than once")
        route = classify_inbound_request(value, headers=headers)
        if isinstance(route, InboundLadderRejection) or value["method"] != "tools/call":
            return route
        params = value["params"]
        arguments = params.get("arguments") or {}
        if isinstance(params.get("name"), str) and isinstance(arguments, dict):
            schema = self._front.shelf.header_schema(params["name"])
            if schema is not None:
                return validate_mcp_param_headers(schema, arguments, headers) or route
        return route


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


async def _read(visit: _Visit) -> tuple[Json, str | None] | None:
    """The JSON-RPC message of a POST, and what is wrong with its bytes if it is a call all the same."""
    headers = visit.headers
    accept = headers.get("accept", "")
    if "*/*" not in accept and not ("application/json" in accept and "text/event-stream" in accept):
        text = "the client must accept application/json and text/event-stream"
        await visit.error(406, INVALID_REQUEST, "not_acceptable", text)
        return None
    if not headers.get("content-type", "").lower().startswith("application/json"):
        await visit.error(415, INVALID_REQUEST, "content_type", "Content-Type must be application/json")
        return None
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            body = await _body(headers, visit.receive)
    except TimeoutError:
        text = f"the body did not arrive within {_BODY_SECONDS:g} s"
        await visit.error(408, INVALID_REQUEST, "too_slow", text)
        return None
    if body is None:
        await visit.error(413, INVALID_REQUEST, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
        return None
    fault: str | None = None
    try:
        value = canonical.loads(body)
    except canonical.NotCanonical as exc:
        value, fault = exc.value, str(exc)
        if not isinstance(value, dict) or value.get("method") != "tools/call":
            await visit.error(400, PARSE_ERROR, "not_json", f"Parse error: {exc}")
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
        await visit.error(400, code, "invalid_request", "the body must be a single JSON-RPC message")
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
