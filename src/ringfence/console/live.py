"""Events for open pages: that something was written, and how many questions wait for an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from starlette.types import Receive, Send

from ringfence.console.page import HEADERS
from ringfence.store import Reader

LOOK_SECONDS = 0.25
_PING_SECONDS = 15.0
MOST_STREAMS = 100


class Live:
    """The streams of all open pages. While there are none, nothing is done."""

    def __init__(self, reader: Callable[[], Reader]) -> None:
        self._reader = reader
        self._open = 0

    @property
    def full(self) -> bool:
        return self._open >= MOST_STREAMS

    async def stream(self, receive: Receive, send: Send, waiting: Callable[[], int | None]) -> None:
        """Serve one page until it is left. `waiting` counts what waits for its person; None: it is over."""
        self._open += 1
        fields = {**HEADERS, "content-type": "text/event-stream", "x-accel-buffering": "no"}
        head = [(name.encode(), value.encode()) for name, value in fields.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": head})
            left = asyncio.ensure_future(_left(receive))
            try:
                await self._tell(left, send, waiting)
            finally:
                left.cancel()
        finally:
            self._open -= 1

    async def _tell(self, left: asyncio.Future[None], send: Send, waiting: Callable[[], int | None]) -> None:
        loop = asyncio.get_running_loop()
        version: int | None = None
        told = loop.time()
        while not left.done():
            now = self._reader().version()
            if (count := waiting()) is None:
                await send({"type": "http.response.body", "body": b"event: over\ndata: {}\n\n", "more_body": False})
                return
            body = b""
            if now != version:
                version = now
                body = f"event: change\ndata: {json.dumps({'waiting': count})}\n\n".encode()
            elif loop.time() - told > _PING_SECONDS:
                body = b": ping\n\n"
            if body:
                told = loop.time()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.wait((left,), timeout=LOOK_SECONDS)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
