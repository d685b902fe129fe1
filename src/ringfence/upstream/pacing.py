"""Limits on what a server sends by itself, for every link, over pipes or HTTP.

An answer to a request of ours is free, since each request has only one. Everything else has a price, in units: a
notification, a question, bytes and lines that turn out to be useless. A link that has spent its burst reads no further
until it has earned units again, so the server has to wait in its own socket or pipe. Links that flood us at the same
time share one allowance: a hundred of them cost the gateway no more than one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import anyio

from ringfence.core import canonical
from ringfence.core.model import Json

T = TypeVar("T")

_UNITS_PER_SECOND = 5000
_BURST = 500
_NOTIFICATION = 5
_QUESTION = 20
_BYTES_PER_UNIT = 1024
_VALUES_PER_UNIT = 20
_WASTED_BYTES_PER_UNIT = 16_384
_LINES_PER_UNIT = 20
_FRAMES_PER_UNIT = 10
_HEAD = 2
_REREAD_SECONDS = 1.0
_REREADS_BURST = 20.0
_REREADS_PER_SECOND = 0.1
_BYTES_PER_REREAD = 50_000
_DEAREST_REREAD = 60.0
LONG_BYTES = 100_000
"""Bytes. A message of this length or more is parsed in a thread."""
PIECE_BYTES = 16_384
"""A chunk is processed in pieces of this size: one that has only empty lines takes a while."""

MAX_QUESTIONS = 32
"""The questions of one link that people or clients may have before them at a time; the next one is refused."""
MAX_ANSWERS = 64
"""The requests of a server, pings included, that may wait for an answer. Further ones of a server that sends requests
and reads no answers are ignored."""
MAX_VALUES_TOLD = 20_000
"""The most values in one notification. One with more is dropped, since every client reads all of them again."""
MAX_TOLD = 64
"""The notifications that may wait for one client to take them; further ones are dropped."""


class Floods:
    """How many of a pool's links and sockets are being held back now, and what all of them share."""

    def __init__(self) -> None:
        self.count = 0
        self._long = anyio.CapacityLimiter(2)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do long work in a thread, few at a time: on the event loop it would hold up every other call."""
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._long)


class Rereads:
    """When the changed lists of one connection may be read again: soon, unless that was done often lately.

    The price of a reading depends on the size of the list, not on the time that it took: the machine may be slow.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._last = float("-inf")

    def spend(self, size: int, now: float) -> None:
        """A list of `size` bytes was read."""
        self._spent = self._left(now) + min(1.0 + size / _BYTES_PER_REREAD, _DEAREST_REREAD)
        self._last = now

    def wait(self, now: float) -> float:
        """The seconds until the next one."""
        soonest = self._last + _REREAD_SECONDS - now
        return max(0.0, soonest, (self._left(now) - _REREADS_BURST) / _REREADS_PER_SECOND)

    def _left(self, now: float) -> float:
        return max(0.0, self._spent - (now - self._last) * _REREADS_PER_SECOND) if self._spent else 0.0


class LinkBudget:
    """What one reader has spent, and for how long it must wait when that was too much."""

    def __init__(self, floods: Floods) -> None:
        self.floods = floods
        self._debt = 0.0
        self._seen = 0.0

    def owed(self, units: float) -> float:
        """Spend; the seconds in which all that was spent is earned again, none before the burst is spent."""
        self._debt += units
        if self._debt < _BURST:
            return 0.0
        now = time.monotonic()
        self._debt = max(units, self._debt - (now - self._seen) * _UNITS_PER_SECOND)
        self._seen = now
        if self._debt < _BURST:
            return 0.0
        # Until nothing is owed, not until a little less than the burst: few long waits cost less than many short ones.
        return self._debt / _UNITS_PER_SECOND * (self.floods.count + 1)


def framing(data: bytes) -> float:
    """The price of HTTP itself, whatever it carries: lines around chunks, informational answers before the one."""
    heads = data.count(b"HTTP/1.")
    return data.count(b"\r\n") / _FRAMES_PER_UNIT + max(0, heads - 1) * _HEAD


def _weight(data: bytes) -> float:
    """The price of a message by what it cost to read: a long text costs little, many small values cost much."""
    return len(data) / _BYTES_PER_UNIT + canonical.values_at_most(data) / _VALUES_PER_UNIT


class Intake:
    """The pace of one link, and the requests of its server that wait for an answer."""

    def __init__(self, floods: Floods | None = None) -> None:
        self.floods = floods or Floods()
        self._pace = LinkBudget(self.floods)
        self._unanswered: set[Hashable] = set()
        self._asking = 0

    # ── the pace ──────────────────────────────────────────────────────────────────────────────────

    async def notification(self, data: bytes) -> None:
        await self._spend(_NOTIFICATION + _weight(data))

    async def question(self, data: bytes) -> None:
        await self._spend(_QUESTION + _weight(data))

    async def reading(self, piece: bytes, wasted: int) -> None:
        """The price of searching a piece for lines, and of `wasted` bytes that were thrown away."""
        await self._spend(piece.count(b"\n") / _LINES_PER_UNIT + wasted / _WASTED_BYTES_PER_UNIT)

    async def _spend(self, units: float) -> None:
        seconds = self._pace.owed(units)
        if not seconds:
            return
        self.floods.count += 1
        try:
            await anyio.sleep(seconds)
        finally:
            self.floods.count -= 1

    # ── questions ─────────────────────────────────────────────────────────────────────────────────

    def admit_request(self, ident: Hashable) -> bool:
        """Note a request of the server, unless too many wait; False: ignore it. `answered` must follow a True."""
        if ident in self._unanswered or len(self._unanswered) >= MAX_ANSWERS:
            return False
        self._unanswered.add(ident)
        return True

    def answered(self, ident: Hashable) -> None:
        self._unanswered.discard(ident)

    async def answer_to(self, ask: Callable[[str, Json], Awaitable[Json]], method: str, params: Json) -> Json | None:
        """Ask a client or a person, and return the answer; None where too many questions wait for theirs."""
        if self._asking >= MAX_QUESTIONS:
            return None
        self._asking += 1
        try:
            return await ask(method, params)
        finally:
            self._asking -= 1
