"""How often, how many at once, and when a caller is only going round in circles.

In memory and bounded: a restart forgets it. The quota of a day is durable and is spent in the store.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import field
from types import TracebackType
from typing import Generic, TypeVar

from ringfence.core.errors import Refused
from ringfence.core.model import Call, Contract, Status
from ringfence.core.record import dataclass

LOOP_FAILURES = 200
LOOP_SECONDS = 60.0

_FAILURES = frozenset({Status.FAILED, Status.VALIDATION_FAILURE})

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def day_scope(call: Call, contract: Contract) -> str:
    """Whose quota of a day a call spends: one principal's, of one capability."""
    return f"{call.principal.key}:{contract.name}"


@dataclass(slots=True)
class _Bucket:
    """A token bucket and the number of calls under way."""

    tokens: float
    updated: float
    running: int = 0

    def refill(self, now: float, per_second: float, most: float) -> None:
        self.tokens = min(most, self.tokens + max(0.0, now - self.updated) * per_second)
        self.updated = now


@dataclass(slots=True)
class _Streak:
    """How often a call failed in a row, with nothing else in between, and when it last did."""

    failed_at: deque[float] = field(default_factory=lambda: deque(maxlen=LOOP_FAILURES))


class BudgetSlot:
    """A place that a call has taken; released with how the call ended. Releasing it twice is harmless."""

    __slots__ = ("_bucket", "_budget", "_call", "_digest", "_held", "_open")

    def __init__(self, budget: Budget, bucket: _Bucket | None, call: Call, arguments_digest: str) -> None:
        self._budget = budget
        self._bucket = bucket
        self._call = call
        self._digest = arguments_digest
        self._open = True
        self._held = bucket is not None

    @contextmanager
    def set_aside(self, contract: Contract) -> Iterator[None]:
        """Leave the place to others while the call waits for a person, who may take long. Raises Refused where there is
        none when it goes on; the approval stays for the next attempt."""
        bucket = self._bucket
        if bucket is None:
            yield
            return
        bucket.running -= 1
        self._held = False
        yield
        _check_room(bucket, contract)
        bucket.running += 1
        self._held = True

    def release(self, status: Status) -> None:
        if not self._open:
            return
        self._open = False
        if self._bucket is not None and self._held:
            self._bucket.running -= 1
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
        self._buckets: _Recent[tuple[str, str], _Bucket] = _Recent(kept, lambda bucket: bucket.running == 0)
        # By the digest of the call, which covers its name: a caller may give that any length.
        self._streaks: _Recent[tuple[str, str], _Streak] = _Recent(min(kept, 2000), lambda streak: True)

    def admit(self, call: Call, contract: Contract, arguments_digest: str) -> BudgetSlot:
        """Take a place and a token. Raises Refused, which costs neither."""
        self.check_loop(call, arguments_digest)
        rate = contract.rate
        if rate.per_minute is None and rate.concurrent is None:
            return BudgetSlot(self, None, call, arguments_digest)
        bucket = self._bucket(call, contract)
        _check_room(bucket, contract)
        if rate.per_minute is not None:
            if bucket.tokens < 1.0:
                raise Refused(Status.DENIED, "throttled", _throttled(contract, bucket.tokens))
            bucket.tokens -= 1.0
        bucket.running += 1
        return BudgetSlot(self, bucket, call, arguments_digest)

    def charge(self, call: Call, contract: Contract, count: int) -> None:
        """Take so many tokens of a capability that the call is not of, and no place. Raises Refused, which costs
        none."""
        rate = contract.rate
        if rate.per_minute is None:
            return
        bucket = self._bucket(call, contract)
        if bucket.tokens < count:
            raise Refused(Status.DENIED, "throttled", _throttled(contract, bucket.tokens - count + 1.0))
        bucket.tokens -= count

    def _bucket(self, call: Call, contract: Contract) -> _Bucket:
        rate = contract.rate
        now = self._clock()
        burst = float(rate.burst if rate.burst is not None else rate.per_minute or 0)
        bucket = self._buckets.get((call.principal.key, contract.name), lambda: _Bucket(burst, now))
        if rate.per_minute is not None:
            bucket.refill(now, rate.per_minute / 60.0, burst)
        return bucket

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


def _check_room(bucket: _Bucket, contract: Contract) -> None:
    most = contract.rate.concurrent
    if most is not None and bucket.running >= most:
        text = f"{contract.name} is limited to {most} at a time; try again when one has ended"
        raise Refused(Status.DENIED, "throttled", text)


def _throttled(contract: Contract, tokens: float) -> str:
    per_minute = contract.rate.per_minute or 0
    if per_minute <= 0:
        return f"{contract.name} is limited to 0 calls a minute"
    wait = (1.0 - tokens) * 60.0 / per_minute
    return f"{contract.name} is limited to {per_minute} calls a minute; try again in {_seconds(wait)}"


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
