"""One HTTP request and its answer: plain JSON if the call just ends, a stream of events once it has more to say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import anyio
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from starlette.types import Receive, Send

from ringfence import canonical
from ringfence.model import Json

PING_SECONDS = 15.0
ATTEND_SECONDS = 0.02
"""A call that takes longer is worth watching whether its client is still there."""
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


def encode(message: Json) -> bytes:
    return canonical.message(message, "surrogatepass")


def event(message: Json) -> bytes:
    return b"event: message\r\ndata: " + encode(message) + b"\r\n\r\n"


class Asks(Protocol):
    """Whoever can pair a request of ours with the answer that the client posts later."""

    async def ask(self, exchange: Exchange, method: str, params: Mapping[str, Any] | None) -> Json: ...


class Exchange:
    """The SDK's dispatch context for one HTTP request, and the writer of its response."""

    def __init__(self, request_id: Any, params: Any, asks: Asks | None, send: Send) -> None:
        self.request_id = request_id
        self.transport = TransportContext(kind="streamable-http", can_send_request=asks is not None)
        self.message_metadata = ServerMessageMetadata()
        self.headers: list[tuple[bytes, bytes]] = []
        self._asks = asks
        self._send = send
        self._streaming = False
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        meta = params.get("_meta") if isinstance(params, dict) else None
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        self._progress_token = token if isinstance(token, str | int) and not isinstance(token, bool) else None

    # ── what the SDK asks of a dispatch context ───────────────────────────────────────────────────

    @cached_property
    def cancel_requested(self) -> anyio.Event:
        return anyio.Event()  # made when somebody looks: nobody does in a call of ours that just ends

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
