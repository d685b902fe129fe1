"""What becomes of a box's requests: the errors that stop one, the record of each and their sums, a rule's budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypedDict

from ringfence.core.box import NetworkRule
from ringfence.core.record import dataclass
from ringfence.egress import names
from ringfence.egress.names import Endpoint


class Stopped(Exception):
    """The request goes no further; the client gets the status, the record the rule and the reason.

    None of these errors leaves this package.
    """

    verdict = "denied"

    def __init__(self, status: int, rule: str, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.status = status
        self.rule = rule
        self.reason = reason
        self.detail = detail


class Forbidden(Stopped):
    """A rule does not let it through."""

    def __init__(self, rule: str, reason: str, detail: str = "") -> None:
        super().__init__(403, rule, reason, detail)


class Malformed(Stopped):
    """The request is not HTTP as the proxy speaks it: refused for every host."""

    def __init__(self, reason: str, detail: str = "", status: int = 400) -> None:
        super().__init__(status, "protocol", reason, detail)


class Failed(Stopped):
    """The request was allowed, and the host outside did not answer as it should."""

    verdict = "failed"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(502, "", reason, detail)


def looked_up(host: str, reason: str | None) -> bool:
    """Whether a request to this host that was denied for this reason had its name looked up before: then the name,
    which the program may have chosen, was sent to whoever answers for its domain."""
    if reason is None or not reason.startswith(("address_", "own_port")):
        return False
    try:
        return names.host(host).address is None
    except names.BadName:  # it stands for many
        return True


# ── The record ───────────────────────────────────────────────────────────────────────────────────

_MAX_PLACES = 200


class EgressFact(TypedDict):
    host: str
    port: int
    verdict: Literal["allowed", "denied", "failed"]
    rule: str
    reason: str | None
    inspected: bool
    bytes_in: int
    bytes_out: int
    count: int


@dataclass(slots=True)
class LedgerEntry:
    """One request, or one tunnel, while it lasts."""

    inspected: bool
    host: str = ""
    port: int = 0
    verdict: Literal["allowed", "denied", "failed"] = "failed"
    rule: str = ""
    reason: str | None = "internal"
    bytes_in: int = 0
    bytes_out: int = 0
    sent: bool = False
    """Whether the connection that it goes over wrote anything of it. A refusal that comes later undoes none of that."""
    granted: str = ""
    """The rule that let it out, whatever refused it later."""
    promised: bool = False
    """A tunnel: the client got the answer that it is open."""
    closed: bool = False

    def aim(self, place: Endpoint) -> None:
        self.host = place.host.text
        self.port = place.port

    def allow(self, rule: str) -> None:
        self.verdict = "allowed"
        self.rule = rule
        self.reason = None
        self.granted = rule

    def stop(self, stopped: Stopped) -> None:
        self.verdict = "failed" if stopped.verdict == "failed" else "denied"
        self.rule = stopped.rule or self.rule
        self.reason = stopped.reason


class EgressLedger:
    """The record of all that one box asked of the network: each request as it ends, and the sum of them."""

    def __init__(self, on_fact: Callable[[EgressFact], None]) -> None:
        self._on_fact = on_fact
        self._sums: dict[tuple[object, ...], EgressFact] = {}
        self._open: dict[int, LedgerEntry] = {}

    def open(self, *, inspected: bool) -> LedgerEntry:
        """Begin an entry."""
        entry = LedgerEntry(inspected)
        self._open[id(entry)] = entry
        return entry

    def close(self, entry: LedgerEntry) -> None:
        """End an entry. A second call does nothing: the end of a request and the clean-up after it may both make it."""
        self._open.pop(id(entry), None)
        if entry.closed:
            return
        entry.closed = True
        for fact in _facts(entry):
            _add(self._sums, fact)
            self._on_fact(fact)

    def facts(self) -> list[EgressFact]:
        """One for each place, verdict and reason; what was let through and is under way among them."""
        sums = {key: fact.copy() for key, fact in self._sums.items()}
        for entry in self._open.values():
            if entry.verdict == "allowed" and not entry.closed:
                _add(sums, _fact(entry))
        return list(sums.values())


def _facts(entry: LedgerEntry) -> list[EgressFact]:
    """One that was refused after something of it was sent is two: the refusal, and what was let out, with its bytes."""
    fact = _fact(entry)
    if entry.verdict != "denied" or not entry.sent:
        return [fact]
    let_out: EgressFact = {**fact, "verdict": "allowed", "rule": entry.granted, "reason": None}
    return [{**fact, "bytes_in": 0, "bytes_out": 0}, let_out]


def _fact(entry: LedgerEntry) -> EgressFact:
    return EgressFact(
        host=entry.host,
        port=entry.port,
        verdict=entry.verdict,
        rule=entry.rule,
        reason=entry.reason,
        inspected=entry.inspected,
        bytes_in=entry.bytes_in,
        bytes_out=entry.bytes_out,
        count=1,
    )


def _add(sums: dict[tuple[object, ...], EgressFact], fact: EgressFact) -> None:
    key = (fact["host"], fact["port"], fact["verdict"], fact["rule"], fact["reason"], fact["inspected"])
    if key not in sums and len(sums) >= _MAX_PLACES:
        # A box that asks for ever new names must not fill our memory: the rest is counted together.
        key = ("*", 0, *key[2:])
        fact = {**fact, "host": "*", "port": 0}
    known = sums.get(key)
    if known is None:
        sums[key] = fact.copy()
        return
    known["count"] += 1
    known["bytes_in"] += fact["bytes_in"]
    known["bytes_out"] += fact["bytes_out"]


# ── The budget of a rule ─────────────────────────────────────────────────────────────────────────


class RuleMeter:
    """What a rule has left: bytes in each direction, requests by the minute. All connections of a box share it."""

    def __init__(self, rule: NetworkRule, clock: Callable[[], float] = time.monotonic) -> None:
        self._rule = rule
        self._clock = clock
        self._out = 0
        self._in = 0
        self._tokens = float(rule.per_minute or 0)
        self._filled = clock()

    def admit(self, length: int = 0) -> None:
        """Count one more request, with a body of at least that length. Raises Forbidden."""
        rule = self._rule
        if rule.max_bytes_out is not None and self._out + max(length, 1) > rule.max_bytes_out:
            raise Forbidden(rule.name, "max_bytes_out")
        if rule.max_bytes_in is not None and self._in >= rule.max_bytes_in:
            raise Forbidden(rule.name, "max_bytes_in")
        if rule.per_minute is not None:
            now = self._clock()
            self._tokens = min(rule.per_minute, self._tokens + (now - self._filled) * rule.per_minute / 60)
            self._filled = now
            if self._tokens < 1:
                raise Forbidden(rule.name, "rate")
            self._tokens -= 1

    def outward(self, size: int, entry: LedgerEntry, untold: int = 0) -> None:
        """Count bytes before they are sent. Raises Forbidden: not one byte of the box's goes over the budget. `untold`
        of them are a secret's, in no record and in no budget: what is still admitted would tell the box its length."""
        size -= untold
        most = self._rule.max_bytes_out
        if most is not None and self._out + size > most:
            raise Forbidden(self._rule.name, "max_bytes_out")
        self._out += size
        entry.bytes_out += size

    def inward(self, size: int, entry: LedgerEntry | None) -> None:
        """Count bytes after they came, before the box gets them. Raises Forbidden. Without an entry they are on record
        when it gets them, for fewer may be left then."""
        self._in += size
        if entry is not None:
            entry.bytes_in += size
        if self._rule.max_bytes_in is not None and self._in > self._rule.max_bytes_in:
            raise Forbidden(self._rule.name, "max_bytes_in")
