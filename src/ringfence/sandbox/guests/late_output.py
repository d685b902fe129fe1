"""What is written in a guest by what earlier steps left running, in bounded memory, until a step reports it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from ringfence.core.box import Captured, Stream
from ringfence.sandbox.guests.step import STREAMS
from ringfence.sandbox.process.capture import Capture

_BYTES = 64 * 1024
"""What is kept of each stream that nobody waits for."""
_SECONDS = 0.02
"""After a piece of late output that long nothing is read: nobody waits for it, and its writer may never stop."""


class GuestLateOutput:
    def __init__(self) -> None:
        self._captures: dict[Stream, Capture] = {}

    def feed(self, kind: bytes, data: bytes) -> Awaitable[None]:
        self._captures.setdefault(STREAMS[kind], Capture(_BYTES)).feed(data)
        return asyncio.sleep(_SECONDS)

    def take(self) -> dict[Stream, Captured]:
        """All that came since the last time."""
        taken, self._captures = self._captures, {}
        return {stream: capture.done() for stream, capture in taken.items()}
