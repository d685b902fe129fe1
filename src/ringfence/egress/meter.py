"""What a rule has left: bytes in each direction, and requests by the minute. One meter for all connections of a box."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringfence.box import NetworkRule
from ringfence.egress.ledger import Entry
from ringfence.egress.refusal import Denied


class Meter:
    def __init__(self, rule: NetworkRule, clock: Callable[[], float] = time.monotonic) -> None:
        self._rule = rule
        self._clock = clock
        self._out = 0
        self._in = 0
        self._tokens = float(rule.per_minute or 0)
        self._filled = clock()

    def admit(self, length: int = 0) -> None:
        """One more request, with a body of at least that length. Raises Denied."""
        rule = self._rule
        if rule.max_bytes_out is not None and self._out + max(length, 1) > rule.max_bytes_out:
            raise Denied(rule.name, "max_bytes_out")
        if rule.max_bytes_in is not None and self._in >= rule.max_bytes_in:
            raise Denied(rule.name, "max_bytes_in")
        if rule.per_minute is not None:
            now = self._clock()
            self._tokens = min(rule.per_minute, self._tokens + (now - self._filled) * rule.per_minute / 60)
            self._filled = now
            if self._tokens < 1:
                raise Denied(rule.name, "rate")
            self._tokens -= 1

    def outward(self, size: int, entry: Entry) -> None:
        """Before they are sent. Raises Denied: not one byte goes over the budget."""
        most = self._rule.max_bytes_out
        if most is not None and self._out + size > most:
            raise Denied(self._rule.name, "max_bytes_out")
        self._out += size
        entry.bytes_out += size

    def inward(self, size: int, entry: Entry) -> None:
        """After they came, before the box gets them. Raises Denied."""
        self._in += size
        entry.bytes_in += size
        if self._rule.max_bytes_in is not None and self._in > self._rule.max_bytes_in:
            raise Denied(self._rule.name, "max_bytes_in")
