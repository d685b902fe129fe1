"""How often, how many at once, and when a caller is only going round in circles.

In memory and bounded: a restart forgets it. The quota of a day is durable and is spent in the store. So is, beside the
bucket of a rate, what its calls of a minute may be at most: that holds for all gateways with one state together.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import field
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Generic, TypeVar

from ringfence.core.errors import Refused
from ringfence.core.model import Call, Contract, CostBudget, Rate, Status
from ringfence.core.record import dataclass
from ringfence.store import Transaction

LOOP_FAILURES = 200
LOOP_SECONDS = 60.0
_MINUTE = 60.0

_FAILURES = frozenset({Status.FAILED, Status.VALIDATION_FAILURE})

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def day_scope(call: Call, contract: Contract) -> str:
    """Whose quota of a day a call spends: one principal's, of one capability."""
    return f"{call.principal.key}:{contract.name}"


def agent_scope(call: Call) -> str:
    """The same of all its calls together. No capability has an empty name."""
    return f"{call.principal.key}:"


def window(budget: CostBudget, now: float) -> tuple[str, str]:
    """The window that a budget is spent from now, by a name that sorts by time; and when the next one begins."""
    return _window(budget.seconds, now // budget.seconds * budget.seconds)


@lru_cache(maxsize=256)  # every call of its time asks for the same
def _window(seconds: float, begins: float) -> tuple[str, str]:
    start, end = (datetime.fromtimestamp(at, UTC) for at in (begins, begins + seconds))
    return f"{start:%Y-%m-%dT%H:%M:%S}/{seconds:g}", f"{end:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, slots=True)
class MinuteUse:
    """What a call takes of the calls of one minute, of all processes together."""

    scope: str
    minute: str
    again: float
    """When the next minute begins."""
    rate: Rate
    what: str
    count: int = 1

    @property
    def most(self) -> int:
        """No bucket lets more through in a minute, so a gateway that is alone never meets this."""
        per_minute = self.rate.per_minute or 0
        return per_minute + (per_minute if self.rate.burst is None else self.rate.burst)

    def spend(self, tx: Transaction) -> None:
        """Raises Refused where other processes have taken what there is."""
        if not tx.spend(self.scope, self.minute, self.most, self.count):
            text = (
                f"{self.what} is limited to {self.rate.per_minute} calls a minute, and other gateways with this state, "
                f"or this one before it was started again, have made them; try again in "
                f"{_seconds(max(0.0, self.again - time.time()))}"
            )
            raise Refused(Status.DENIED, "throttled", text)


@dataclass(slots=True)
class _Bucket:
    """A token bucket and the number of calls under way."""

    tokens: float
    updated: float
    running: int = 0
    returning: list[asyncio.Event] = field(default_factory=list)
    """Of calls that have begun and wait for a place to go on; each is set when a place may be free."""

    def is_idle(self) -> bool:
        return not self.running and not self.returning

    def give_back(self) -> None:
        self.running -= 1
        for waiting in self.returning:
            waiting.set()

    def refill(self, now: float, per_second: float, most: float) -> None:
        self.tokens = min(most, self.tokens + max(0.0, now - self.updated) * per_second)
        self.updated = now


@dataclass(slots=True)
class _Limit:
    """One of the limits of a call: of its capability, or of all that its agent does."""

    bucket: _Bucket
    rate: Rate
    what: str
    scope: str

    def has_room(self) -> bool:
        """Whether there is a place; also the last one, for a call that has begun."""
        return self.rate.concurrent is None or self.bucket.running < self.rate.concurrent

    def check_room(self) -> None:
        most = self.rate.concurrent
        if most is not None and self.bucket.running + len(self.bucket.returning) >= most:
            text = f"{self.what} is limited to {most} at a time; try again when one has ended"
            raise Refused(Status.DENIED, "throttled", text)

    def check_tokens(self, count: int = 1) -> None:
        if self.rate.per_minute is not None and self.bucket.tokens < count:
            raise Refused(Status.DENIED, "throttled", self._throttled(self.bucket.tokens - count + 1.0))

    def take(self, count: int = 1) -> None:
        if self.rate.per_minute is not None:
            self.bucket.tokens -= count

    def minute_use(self, count: int = 1) -> MinuteUse | None:
        if self.rate.per_minute is None:
            return None
        now = time.time()
        # Nobody's quota of days has such a scope: no name has a slash in it.
        minute, _ = window(CostBudget(0, _MINUTE), now)
        again = now // _MINUTE * _MINUTE + _MINUTE
        return MinuteUse(f"{self.scope}/minute", minute, again, self.rate, self.what, count)

    def _throttled(self, tokens: float) -> str:
        per_minute = self.rate.per_minute or 0
        if per_minute <= 0:
            return f"{self.what} is limited to 0 calls a minute"
        wait = (1.0 - tokens) * 60.0 / per_minute
        return f"{self.what} is limited to {per_minute} calls a minute; try again in {_seconds(wait)}"


@dataclass(slots=True)
class _Streak:
    """How often a call failed in a row, with nothing else in between, and when it last did."""

    failed_at: deque[float] = field(default_factory=lambda: deque(maxlen=LOOP_FAILURES))


class BudgetSlot:
    """A place that a call has taken; released with how the call ended. Releasing it twice is harmless."""

    __slots__ = (
        "_asking",
        "_budget",
        "_call",
        "_digest",
        "_free",
        "_held",
        "_limits",
        "_open",
        "_returning",
        "minutes",
    )

    def __init__(self, budget: Budget, limits: Sequence[_Limit], call: Call, arguments_digest: str) -> None:
        self._budget = budget
        self._limits = limits
        self._call = call
        self._digest = arguments_digest
        self._open = True
        self._held = True
        self._asking = 0
        self._returning = 0
        self._free = asyncio.Event()
        self.minutes = [use for limit in limits if (use := limit.minute_use()) is not None]
        """What is still to be spent in the store, with the grant. Of the minute in which the call was let through, so
        that calls which a person lets go on all at once do not count as made at once."""

    @contextmanager
    def set_aside(self, contract: Contract) -> Iterator[None]:
        """Leave the place to others while the call waits for a person, who may take long. Raises Refused where there is
        none when it goes on; the approval stays for the next attempt."""
        self._leave()
        yield
        for limit in self._limits:
            limit.check_room()
        self._enter()

    @asynccontextmanager
    async def left_to_others(self) -> AsyncIterator[None]:
        """The same while a call that has begun waits for its client. It cannot be refused any more, so it goes on when
        there is a place again, and before any call that has not begun. A server may ask several questions at a time:
        the place comes back once, after the last answer."""
        self._asking += 1
        self._free.set()
        if self._held:
            self._leave()
        ending = False
        try:
            yield
        except asyncio.CancelledError:
            ending = True
            raise
        finally:
            self._asking -= 1
            if not ending:
                await self._come_back()

    def _leave(self) -> None:
        for limit in self._limits:
            limit.bucket.give_back()
        self._held = False

    def _enter(self) -> None:
        for limit in self._limits:
            limit.bucket.running += 1
        self._held = True

    async def _come_back(self) -> None:
        """Wait for a place, unless the call ends, or waits for its client again."""
        if not self._returning:
            for limit in self._limits:
                limit.bucket.returning.append(self._free)
        self._returning += 1
        try:
            while self._open and not (self._held or self._asking):
                if all(limit.has_room() for limit in self._limits):
                    self._enter()
                else:
                    self._free.clear()
                    await self._free.wait()
        finally:
            self._free.set()
            self._returning -= 1
            if not self._returning:
                for limit in self._limits:
                    limit.bucket.returning.remove(self._free)

    def release(self, status: Status) -> None:
        if not self._open:
            return
        self._open = False
        self._free.set()
        if self._held:
            self._leave()
        self._budget.note(self._call, self._digest, status)

    def __enter__(self) -> BudgetSlot:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release(Status.UNKNOWN)


class Budget:
    """Rates, places and the loop guard, by principal and capability."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, kept: int = 10_000, guard_loops: bool = True
    ) -> None:
        """`guard_loops` is for callers that may not know what they do: models."""
        self._clock = clock
        self._guard_loops = guard_loops
        self._buckets: _Recent[tuple[str, str], _Bucket] = _Recent(kept, _Bucket.is_idle)
        # By the digest of the call, which covers its name: a caller may give that any length.
        self._streaks: _Recent[tuple[str, str], _Streak] = _Recent(min(kept, 2000), lambda streak: True)

    def admit(self, call: Call, contract: Contract, arguments_digest: str, quota: Rate | None = None) -> BudgetSlot:
        """Take a place and a token of the capability, and of the agent's own quota. Raises Refused, which costs
        neither."""
        self.check_loop(call, arguments_digest)
        limits: list[_Limit] = []
        if contract.rate.per_minute is not None or contract.rate.concurrent is not None:
            limits.append(self._limit(call, contract.rate, contract.name))
        if quota is not None and (quota.per_minute is not None or quota.concurrent is not None):
            limits.append(self._limit(call, quota, ""))
        for limit in limits:
            limit.check_room()
            limit.check_tokens()
        for limit in limits:
            limit.take()
            limit.bucket.running += 1
        return BudgetSlot(self, limits, call, arguments_digest)

    def charge(self, slot: BudgetSlot, call: Call, contract: Contract, count: int) -> None:
        """Take so many tokens of a capability that the call is not of, and no place. Raises Refused, which costs
        none."""
        if contract.rate.per_minute is None:
            return
        limit = self._limit(call, contract.rate, contract.name)
        limit.check_tokens(count)
        limit.take(count)
        if (use := limit.minute_use(count)) is not None:
            slot.minutes.append(use)

    def _limit(self, call: Call, rate: Rate, name: str) -> _Limit:
        """That of a capability; without a name: that of all that its agent calls."""
        now = self._clock()
        burst = float(rate.burst if rate.burst is not None else rate.per_minute or 0)
        bucket = self._buckets.get((call.principal.key, name), lambda: _Bucket(burst, now))
        if rate.per_minute is not None:
            bucket.refill(now, rate.per_minute / 60.0, burst)
        scope = f"{call.principal.key}:{name}"
        return _Limit(bucket, rate, name or f"the agent {call.principal.agent}", scope)

    def check_loop(self, call: Call, arguments_digest: str) -> None:
        """Refuse a call that failed, unchanged, too many times in a row just now."""
        streak = self._streaks.peek((call.principal.key, arguments_digest))
        if streak is None or len(streak.failed_at) < LOOP_FAILURES:
            return
        wait = streak.failed_at[0] + LOOP_SECONDS - self._clock()
        if wait > 0:
            text = (
                f"the same call failed {LOOP_FAILURES} times in a row within {LOOP_SECONDS:.0f} s; "
                f"change it, or try again in {_seconds(wait)}"
            )
            raise Refused(Status.DENIED, "loop", text)

    def note(self, call: Call, arguments_digest: str, status: Status) -> None:
        """Remember how a call ended; a success ends its row of failures."""
        if not self._guard_loops:
            return
        key = (call.principal.key, arguments_digest)
        if status in _FAILURES:
            self._streaks.get(key, _Streak).failed_at.append(self._clock())
        elif status is Status.SUCCESS:
            self._streaks.drop(key)


def _seconds(wait: float) -> str:
    return f"{max(wait, 0.1):.1f} s"


class _Recent(Generic[K, V]):
    """A dictionary that forgets what was not used for longest, but never an entry that is still needed.

    What is needed is bounded by itself: it is the calls under way.
    """

    def __init__(self, kept: int, forgettable: Callable[[V], bool]) -> None:
        self._kept = kept
        self._forgettable = forgettable
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def peek(self, key: K) -> V | None:
        return self._entries.get(key)

    def get(self, key: K, make: Callable[[], V]) -> V:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            return found
        while len(self._entries) >= self._kept:
            oldest, entry = next(iter(self._entries.items()))
            if not self._forgettable(entry):
                # Still in use: put it behind the others, and grow by one rather than search them all.
                self._entries.move_to_end(oldest)
                break
            del self._entries[oldest]
        found = self._entries[key] = make()
        return found

    def drop(self, key: K) -> None:
        self._entries.pop(key, None)
