"""Events for open pages: that something was written, of which kinds the new records are, and how many questions wait
for an answer. What is in a record is never told: that is for the page, which shows people what concerns their tenant.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable

from starlette.types import Receive, Send

from ringfence.console.page import HEADERS
from ringfence.core.errors import StoreError
from ringfence.core.model import Person
from ringfence.core.shares import over_their_share
from ringfence.store import Reader

LOOK_SECONDS = 0.25
_PING_SECONDS = 15.0
MAX_STREAMS = 100
"""Of all people. If there are more, those give way who have more than an even share."""
_AGAIN_MS = 2_000
"""When a page whose stream ended has another."""
_NOW_AND_THEN_MS = 10_000
"""The same, where there are too many: such a page is told each time that something changed, and looks."""
_OVER = b"event: over\ndata: {}\n\n"


class Live:
    """The event streams of all open pages. While there are none, nothing is read."""

    def __init__(self, reader: Callable[[], Reader]) -> None:
        self._reader = reader
        self._open: dict[asyncio.Future[None], str] = {}
        """For each stream, what ends it, and whose it is; the oldest first."""

    def close(self) -> None:
        """End all of them, before the store is closed. Pages have another once a gateway is there again."""
        for left in self._open:
            left.cancel()

    async def stream(
        self, receive: Receive, send: Send, still: Callable[[], Person | None], count: Callable[[Person], int]
    ) -> None:
        """Serve one page until it is closed. `still` gives its person, None once they are logged out; `count`, how
        many questions wait for them."""
        fields = {**HEADERS, "content-type": "text/event-stream", "x-accel-buffering": "no"}
        head = [(name.encode(), value.encode()) for name, value in fields.items()]
        person = still()
        whose = "" if person is None else person.name
        once = len(self._open) >= MAX_STREAMS and not self._one_gave_way(whose)
        left = asyncio.ensure_future(_left(receive))
        if not once:
            self._open[left] = whose
        last = b""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await _more(send, f"retry: {_NOW_AND_THEN_MS if once else _AGAIN_MS}\n\n".encode())
            last = await self._tell(left, send, still, count, once)
        except StoreError:
            # The page asks for its stream again, and shows the same error if it lasts.
            pass
        finally:
            self._open.pop(left, None)
            left.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _one_gave_way(self, whose: str) -> bool:
        """End the oldest stream of whoever has the most, if that is more than their share and this person has less."""
        held = Counter(self._open.values())
        over = over_their_share(whose, held)
        if not over:
            return False
        most = max(over, key=lambda each: held[each])
        oldest = next(left for left, each in self._open.items() if each == most)
        del self._open[oldest]
        oldest.cancel()
        return True

    async def _tell(
        self,
        left: asyncio.Future[None],
        send: Send,
        still: Callable[[], Person | None],
        count: Callable[[Person], int],
        once: bool,
    ) -> bytes:
        loop = asyncio.get_running_loop()
        version: int | None = None
        newest = 0
        told = loop.time()
        while not left.done():
            now = self._reader().version()
            if (person := still()) is None:
                return _OVER
            body = b""
            if now != version:
                first, version = version is None, now
                newest, kinds = (self._reader().last_number(), []) if first else self._reader().kinds_after(newest)
                data = json.dumps({"waiting": count(person), "kinds": kinds})
                body = f"event: change\ndata: {data}\n\n".encode()
            elif loop.time() - told > _PING_SECONDS:
                body = b": ping\n\n"
            if once:
                return body
            if body:
                told = loop.time()
                await _more(send, body)
            await asyncio.wait((left,), timeout=LOOK_SECONDS)
        return b""


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
