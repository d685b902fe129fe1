"""MCP over our own stdin and stdout, both revisions, read as strictly as over HTTP."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.connection import Connection, NotifyOnlyOutbound
from mcp.server.runner import ServerRunner, aclose_shielded, modern_error_data, serve_one
from mcp.shared.dispatcher import DispatchContext, coerce_request_id
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import InboundLadderRejection, classify_inbound_request
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from pydantic_core import PydanticSerializationError

from ringfence.core import canonical
from ringfence.core.model import Json, Principal
from ringfence.core.quoting import quoted
from ringfence.front.inbound import (
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
from ringfence.front.refusals import Refusal, reason_of
from ringfence.upstream.connection import ROOTS_CHANGED
from ringfence.upstream.stdio import Lines, TooLong, to_message

log = logging.getLogger("ringfence.front")

MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_UNREAD = 64
"""Messages that wait for the client to read them. Then nothing more is read of it, until it does."""
_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"


class StdioFront:
    """One client on the other end of a pipe."""

    def __init__(self, front: McpFront, principal: Callable[[], Principal]) -> None:
        self._front = front
        self._principal = principal
        self._session = canonical.new_id("stdio")
        self._level = ["debug"]
        self._open: set[Any] = set()
        """Ids of requests under way, as the SDK tells them apart."""
        self._alias = f"{secrets.token_hex(8)}:"
        """Begins the ids that we give to requests whose own id is in use: to the SDK two requests never share one, so
        that the first can still be cancelled. The rest of such an id is what the client wrote."""
        self._watching = Watching()
        self._initialized = False
        """Whether a client of the handshake era is there: only such a one is told what it did not ask for."""
        self._dispatcher: JSONRPCDispatcher[TransportContext] | None = None
        self._written = anyio.Event()
        """Set, and replaced, when the client has read a message."""

    async def tell(self, method: str, params: Json) -> None:
        if self._dispatcher is not None and self._initialized and wants(method, params, self._watching, self._level[0]):
            await self._dispatcher.notify(method, params or None)

    async def run(self) -> None:
        """Serve until the client closes our stdin."""
        # The wire keeps its descriptors to itself: whatever else prints goes to stderr.
        source = os.dup(0)
        sink = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        inbound_send, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outbound, outbound_receive = anyio.create_memory_object_stream[SessionMessage](0)
        dispatcher: JSONRPCDispatcher[TransportContext] = JSONRPCDispatcher(
            inbound, outbound, inline_methods=frozenset({"initialize"})
        )
        connection = Connection.for_loop(dispatcher, session_id=None)
        runner: ServerRunner[Any] = ServerRunner(
            self._front.server, connection, None, init_options=self._front.init_options
        )
        quiet = NotifyOnlyOutbound(dispatcher)

        async def on_request(
            dctx: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
        ) -> Json:
            try:
                with self._answering(dctx, method):
                    return await answer(dctx, method, params)
            except Exception as exc:
                # The dispatcher makes an error answer of it; where no call stands behind that, it is recorded here.
                inbound = _inbound(dctx)
                if not inbound.called:
                    code = exc.code if isinstance(exc, MCPError) else INTERNAL_ERROR
                    await self._refused(inbound.reason or reason_of(code), self._front.known(method))
                raise

        async def answer(
            dctx: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
        ) -> Json:
            meta = (params or {}).get("_meta")
            if method == "initialize":
                params = handshake(params or {})
            if method == "initialize" or not (isinstance(meta, dict) and _VERSION_KEY in meta):
                return await runner.on_request(dctx, method, params)
            route = classify_inbound_request({"method": method, "params": params})
            if isinstance(route, InboundLadderRejection):
                raise MCPError(route.code, route.message, route.data)
            problem = declared_problem(route.client_info, route.client_capabilities)
            if problem is not None:
                raise MCPError(INVALID_PARAMS, problem)
            info = without_icons(route.client_info)
            once = Connection.from_envelope(route.protocol_version, info, route.client_capabilities, outbound=quiet)
            try:
                return await serve_one(self._front.server, dctx, method, params, connection=once, lifespan_state=None)
            except Exception as exc:  # the edge: as over HTTP, details stay in our log
                error = modern_error_data(exc)
                raise MCPError(error.code, error.message, error.data) from None

        async def on_notify(
            dctx: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
        ) -> None:
            self._initialized = self._initialized or method == "notifications/initialized"
            if method == ROOTS_CHANGED:
                self._front.roots_changed(self._session)
            else:
                await runner.on_notify(dctx, method, params)

        self._dispatcher = dispatcher
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read, source, inbound_send, outbound.clone())
                group.start_soon(self._write, sink, outbound_receive)
                await dispatcher.run(on_request, on_notify)
                group.cancel_scope.cancel()
        finally:
            self._dispatcher = None
            await aclose_shielded(connection)

    @contextmanager
    def _answering(self, dctx: DispatchContext[TransportContext], method: str) -> Iterator[None]:
        """A request under way. Its id is its own until it ends; a call that takes it as well is at fault."""
        inbound = _inbound(dctx)
        inbound.outbound = dctx
        assert dctx.request_id is not None
        try:
            if str(dctx.request_id).startswith(self._alias):
                problem = f"request id {quoted(self._own_id(dctx.request_id), 64)} is in use"
                if method != "tools/call":
                    inbound.reason = "id_in_use"
                    raise MCPError(INVALID_REQUEST, problem)
                inbound.fault = problem
            yield
        finally:
            self._open.discard(coerce_request_id(dctx.request_id))

    def _own_id(self, ident: Any) -> Any:
        """The id that the client wrote."""
        if not (isinstance(ident, str) and ident.startswith(self._alias)):
            return ident
        return json.loads(ident.removeprefix(self._alias).partition(":")[2])

    async def _read(
        self,
        source: int,
        out: MemoryObjectSendStream[SessionMessage | Exception],
        errors: MemoryObjectSendStream[SessionMessage],
    ) -> None:
        with os.fdopen(source, "rb", buffering=0) as raw:
            lines = Lines(MAX_LINE_BYTES)
            async with out, errors:
                while True:
                    chunk = await anyio.to_thread.run_sync(raw.read, 65536, abandon_on_cancel=True)
                    if not chunk:
                        return
                    for line in lines.feed(chunk):
                        while errors.statistics().tasks_waiting_send >= MAX_UNREAD:
                            await self._written.wait()
                        if isinstance(line, TooLong):
                            await self._refused("line_too_long")
                            await errors.send(_problem(None, f"a line of more than {MAX_LINE_BYTES} bytes"))
                        else:
                            await self._line(line, out, errors)

    async def _line(
        self,
        line: bytes,
        out: MemoryObjectSendStream[SessionMessage | Exception],
        errors: MemoryObjectSendStream[SessionMessage],
    ) -> None:
        fault: str | None = None
        try:
            value = read_request(line)
        except canonical.NotCanonical as exc:
            value = exc.value
            fault = str(exc)
        value, fault = with_params(value, fault)
        message = to_message(value)
        if isinstance(message, JSONRPCNotification) and not message.method.startswith("notifications/"):
            message = None  # a request without an id, so there is no answer to it
        is_call = isinstance(message, JSONRPCRequest) and message.method == "tools/call"
        if message is None or (fault is not None and not is_call):
            ident = value.get("id") if isinstance(value, dict) else None
            await self._refused("not_json" if fault is not None else "invalid_request")
            await errors.send(_problem(ident, fault or "not a JSON-RPC message"))
            return
        inbound = Inbound(self._principal(), "mcp-stdio", session=self._session, fault=fault)
        inbound.log_level = self._level
        inbound.watching = self._watching
        if isinstance(message, JSONRPCRequest):
            if coerce_request_id(message.id) in self._open:
                alias = f"{self._alias}{secrets.token_hex(8)}:{json.dumps(message.id)}"
                message = message.model_copy(update={"id": alias})
            self._open.add(coerce_request_id(message.id))
        await out.send(SessionMessage(message, ServerMessageMetadata(request_context=inbound)))

    async def _write(self, sink: int, source: MemoryObjectReceiveStream[SessionMessage]) -> None:
        with os.fdopen(sink, "wb", buffering=0) as raw:
            async with source:
                async for item in source:
                    message = item.message
                    if isinstance(message, JSONRPCResponse | JSONRPCError):
                        own = self._own_id(message.id)
                        message = message if own is message.id else message.model_copy(update={"id": own})
                    await anyio.to_thread.run_sync(_write_all, raw, _encoded(message) + b"\n")
                    self._written.set()
                    self._written = anyio.Event()

    async def _refused(self, reason: str, method: str | None = None) -> None:
        refusal = Refusal("mcp-stdio", reason, principal=self._principal())
        await self._front.refusals.record(refusal, method)


def _inbound(dctx: DispatchContext[TransportContext]) -> Inbound:
    metadata = dctx.message_metadata
    assert isinstance(metadata, ServerMessageMetadata) and isinstance(metadata.request_context, Inbound)
    return metadata.request_context


def _problem(ident: Any, text: str) -> SessionMessage:
    """The answer to a line that is no request which could be served."""
    known = ident if isinstance(ident, str | int) and not isinstance(ident, bool) else None
    error = ErrorData(code=PARSE_ERROR, message=f"Parse error: {text}")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=known, error=error))


def _encoded(message: JSONRPCMessage) -> bytes:
    try:
        return message.model_dump_json(by_alias=True, exclude_unset=True).encode()
    except PydanticSerializationError:  # a half of a surrogate pair, as in an id that a client chose
        return canonical.reply(message.model_dump(by_alias=True, exclude_unset=True))


def _write_all(raw: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = raw.write(view)
        view = view[written:]
