"""MCP over our own stdin and stdout, both revisions, read as strictly as over HTTP."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.connection import Connection, NotifyOnlyOutbound
from mcp.server.runner import ServerRunner, aclose_shielded, modern_error_data, serve_one
from mcp.shared.dispatcher import DispatchContext
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import InboundLadderRejection, classify_inbound_request
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp.shared.transport_context import TransportContext
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCRequest

from ringfence import canonical
from ringfence.front.inbound import Inbound, wants
from ringfence.front.mcp import McpFront
from ringfence.model import Json, Principal
from ringfence.upstream.stdio import to_message

log = logging.getLogger("ringfence.front")

MAX_LINE_BYTES = 4 * 1024 * 1024
_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"


class StdioFront:
    """One client on the other end of a pipe."""

    def __init__(self, front: McpFront, principal: Callable[[], Principal]) -> None:
        self._front = front
        self._principal = principal
        self._session = canonical.new_id("stdio")
        self._level = ["debug"]
        self._watching: set[str] = set()
        self._dispatcher: JSONRPCDispatcher[TransportContext] | None = None

    async def tell(self, method: str, params: Json) -> None:
        if self._dispatcher is not None and wants(method, params, self._watching, self._level[0]):
            await self._dispatcher.notify(method, params or None)

    async def run(self) -> None:
        """Serve until the client closes our stdin."""
        # The wire keeps its descriptors to itself: whatever else prints goes to stderr.
        source, sink = os.dup(0), os.dup(1)
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
            metadata = dctx.message_metadata
            assert isinstance(metadata, ServerMessageMetadata)
            metadata.request_context.outbound = dctx
            meta = (params or {}).get("_meta")
            if method == "initialize" or not (isinstance(meta, dict) and _VERSION_KEY in meta):
                return await runner.on_request(dctx, method, params)
            route = classify_inbound_request({"method": method, "params": params})
            if isinstance(route, InboundLadderRejection):
                raise MCPError(route.code, route.message, route.data)
            once = Connection.from_envelope(
                route.protocol_version, route.client_info, route.client_capabilities, outbound=quiet
            )
            try:
                return await serve_one(self._front.server, dctx, method, params, connection=once, lifespan_state=None)
            except Exception as exc:  # the edge: as over HTTP, details stay in our log
                error = modern_error_data(exc)
                raise MCPError(error.code, error.message, error.data) from None

        self._dispatcher = dispatcher
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read, source, inbound_send, outbound.clone())
                group.start_soon(_write, sink, outbound_receive)
                await dispatcher.run(on_request, runner.on_notify)
                group.cancel_scope.cancel()
        finally:
            self._dispatcher = None
            await aclose_shielded(connection)

    async def _read(
        self,
        source: int,
        out: MemoryObjectSendStream[SessionMessage | Exception],
        errors: MemoryObjectSendStream[SessionMessage],
    ) -> None:
        with os.fdopen(source, "rb", buffering=0) as raw:
            buffer = bytearray()
            async with out, errors:
                while True:
                    chunk = await anyio.to_thread.run_sync(raw.read, 65536, abandon_on_cancel=True)
                    if not chunk:
                        return
                    buffer += chunk
                    *lines, rest = buffer.split(b"\n")
                    buffer = bytearray(rest)
                    for line in lines:
                        await self._line(bytes(line), out, errors)
                    if len(buffer) > MAX_LINE_BYTES:
                        log.error("a line of more than %d bytes; closing", MAX_LINE_BYTES)
                        return

    async def _line(
        self,
        line: bytes,
        out: MemoryObjectSendStream[SessionMessage | Exception],
        errors: MemoryObjectSendStream[SessionMessage],
    ) -> None:
        if not line.strip():
            return
        fault: str | None = None
        try:
            value = canonical.loads(line)
        except canonical.NotCanonical as exc:
            value, fault = exc.value, str(exc)
        message = to_message(value)
        is_call = isinstance(message, JSONRPCRequest) and message.method == "tools/call"
        if message is None or (fault is not None and not is_call):
            problem = ErrorData(code=PARSE_ERROR, message=f"Parse error: {fault or 'not a JSON-RPC message'}")
            ident = value.get("id") if isinstance(value, dict) else None
            if isinstance(ident, bool) or not isinstance(ident, str | int):
                ident = None
            await errors.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=ident, error=problem)))
            return
        inbound = Inbound(self._principal(), "mcp-stdio", session=self._session, fault=fault)
        inbound.log_level, inbound.watching = self._level, self._watching
        await out.send(SessionMessage(message, ServerMessageMetadata(request_context=inbound)))


async def _write(sink: int, source: MemoryObjectReceiveStream[SessionMessage]) -> None:
    with os.fdopen(sink, "wb", buffering=0) as raw:
        async with source:
            async for item in source:
                data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                await anyio.to_thread.run_sync(_write_all, raw, data)


def _write_all(raw: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = raw.write(view)
        view = view[written:]
