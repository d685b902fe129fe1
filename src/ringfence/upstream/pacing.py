"""How much of what a server says unasked is taken: the one discipline of every link, pipes or HTTP.

An answer to a request of ours is taken as it comes, for each request has only one. Everything else has a price, in
units: a notification, a question, bytes and lines that turn out to be nothing. Once a link has spent its burst it reads
no further until the time has come, so the server waits in its own socket or pipe. Links that flood at the same time
share one allowance: a hundred floods cost the gateway no more than one.
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
"""From this length on a message is parsed beside the loop."""
PIECE_BYTES = 16_384
"""A chunk is looked at in pieces of this size: one of empty lines alone takes a while."""

MAX_QUESTIONS = 32
"""Questions of one link that people or clients think about at a time; the next one is refused."""
MAX_ANSWERS = 64
"""Requests of a server that are not answered yet, pings included: one that asks on and takes no answers is ignored."""
MAX_VALUES_TOLD = 20_000
"""Values of one notification; one with more is dropped, for whoever hears it reads all of them again."""
MAX_TOLD = 64
"""Notifications on their way to one client that does not take them; what comes then is dropped."""


class Floods:
    """How many of a pool's links and sockets are being held back now, and what all of them share."""

    def __init__(self) -> None:
        self.count = 0
        self._long = anyio.CapacityLimiter(2)

    async def aside(self, work: Callable[[], T]) -> T:
        """Do work on something long beside the loop, where it would hold up every other call; few at a time."""
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._long)


class Rereads:
    """When the changed lists of one connection may be read again: soon, unless that was done much lately.

    What a reading costs grows with the list, not with the time that it took: a slow machine is no busy server.
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
    """What one link has taken lately, and what it was asked."""

    def __init__(self, floods: Floods | None = None) -> None:
        self.floods = floods or Floods()
        self._pace = LinkBudget(self.floods)
        self._unanswered: set[Hashable] = set()
        self._thinking = 0

    # ── the pace ──────────────────────────────────────────────────────────────────────────────────

    async def notification(self, data: bytes) -> None:
        await self._spend(_NOTIFICATION + _weight(data))

    async def question(self, data: bytes) -> None:
        await self._spend(_QUESTION + _weight(data))

    async def reading(self, piece: bytes, wasted: int) -> None:
        """Whatever else is in it: its lines were looked for, and `wasted` bytes were for nothing."""
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

    def asked(self, ident: Hashable) -> bool:
        """Whether this request of the server is taken at all; `answered` must follow."""
        if ident in self._unanswered or len(self._unanswered) >= MAX_ANSWERS:
            return False
        self._unanswered.add(ident)
        return True

    def answered(self, ident: Hashable) -> None:
        self._unanswered.discard(ident)

    async def thought(self, ask: Callable[[str, Json], Awaitable[Json]], method: str, params: Json) -> Json | None:
        """The answer to a question that a person or client must give; None where too many are being thought about."""
        if self._thinking >= MAX_QUESTIONS:
            return None
        self._thinking += 1
        try:
            return await ask(method, params)
        finally:
            self._thinking -= 1
