"""Sockets to a server behind a URL, read at the pace of their link.

Below the events there is HTTP, and it can be flooded as well: chunks of one byte, informational answers without end.
What these cost is spent before anybody sees a byte of content, so it is counted where the bytes arrive.
"""

from __future__ import annotations

import asyncio
from functools import partial

import aiohttp
from aiohttp.client_proto import ResponseHandler

from ringfence.upstream.checked import Checked
from ringfence.upstream.pacing import Floods, Intake, Pace, framing

_PIECE_BYTES = 4096
_CHEAP = 50.0


class _Paced(ResponseHandler):
    """Hands on at once what arrives; what is dear, a little at a time, and meanwhile the socket is not read."""

    def __init__(self, floods: Floods, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._pace = Pace(floods)  # each socket its own: one that is held back may carry the answer of another call
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


def connector(intake: Intake, resolver: Checked | None) -> aiohttp.TCPConnector:
    """Must be made where a loop runs."""
    made = aiohttp.TCPConnector(limit=100, keepalive_timeout=4.0, resolver=resolver)
    # The library has no setting for this; tests/upstream/test_pacing.py fails should it take the name away.
    made._factory = partial(_Paced, intake.floods, loop=asyncio.get_running_loop())  # type: ignore[assignment]
    return made
