"""Sessions of handshake-era clients over HTTP: who owns one, what is under way in it, what it is told unasked."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.connection import Connection
from mcp.server.runner import ServerRunner, aclose_shielded
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError, NoBackChannelError
from starlette.types import Receive, Send

from ringfence.front import wire
from ringfence.front.exchange import PING_SECONDS, Exchange, event
from ringfence.front.inbound import Inbound, wants
from ringfence.front.mcp import McpFront
from ringfence.model import Json, Principal

log = logging.getLogger("ringfence.front")

IDLE_SECONDS = 1800.0
MAX_SESSIONS = 10_000
_BACKLOG = 256


class Session:
    """One handshake-era client. Its id is a name, never a credential: the principal must match as well."""

    def __init__(self, front: McpFront, principal: Principal) -> None:
        self.id = secrets.token_hex(16)
        self.principal = principal
        self.log_level = ["debug"]
        self.watching: set[str] = set()
        self.last_used = anyio.current_time()
        self.busy = 0
        self.connection = Connection.for_loop(self, session_id=self.id)
        self.runner: ServerRunner[Any] = ServerRunner(
            front.server, self.connection, None, init_options=front.init_options
        )
        self.in_flight: dict[Any, tuple[anyio.CancelScope, Exchange]] = {}
        self._questions: dict[str, tuple[anyio.Event, list[Json]]] = {}
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
    def declared(self) -> Json:
        """What the client declared in its handshake."""
        if self._declared is None:
            self._declared = wire.declared(self.connection.client_capabilities)
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

    async def ask(self, exchange: Exchange, method: str, params: Mapping[str, Any] | None) -> Json:
        ident = "rf-" + secrets.token_hex(8)
        answered = anyio.Event()
        box: list[Json] = []
        self._questions[ident] = (answered, box)
        try:
            await exchange.emit({"jsonrpc": "2.0", "id": ident, "method": method, "params": dict(params or {})})
            await answered.wait()
        finally:
            del self._questions[ident]
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


class Sessions:
    """All of them, by id."""

    def __init__(self, front: McpFront) -> None:
        self._front = front
        self._sessions: dict[str, Session] = {}

    def create(self, principal: Principal) -> Session | None:
        if len(self._sessions) >= MAX_SESSIONS:
            return None
        return Session(self._front, principal)

    def keep(self, session: Session) -> None:
        self._sessions[session.id] = session

    def get(self, ident: str, principal: Principal) -> Session | None:
        """The session of that id, if it is this principal's; to anybody else it does not exist."""
        session = self._sessions.get(ident)
        if session is None or session.principal.key != principal.key:
            return None
        session.principal = principal  # whom the agent acts for may have changed with the configuration
        session.last_used = anyio.current_time()
        return session

    async def end(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        await session.close()
        await self._front.ended(session.id, session.principal, session.watching)

    async def close(self) -> None:
        """The gateway stops: every session ends."""
        for session in list(self._sessions.values()):
            await self.end(session)

    async def tell(self, principal: Principal | None, method: str, params: Json) -> None:
        """A notification to every session of a principal, or of everybody."""
        for session in list(self._sessions.values()):
            mine = principal is None or session.principal.key == principal.key
            if mine and wants(method, params, session.watching, session.log_level[0]):
                await session.notify(method, params)

    async def sweep(self) -> None:
        """Runs for as long as the gateway: sessions that nobody uses end."""
        while True:
            await anyio.sleep(30.0)
            now = anyio.current_time()
            for session in list(self._sessions.values()):
                if not session.busy and now - session.last_used > IDLE_SECONDS:
                    await self.end(session)
