"""The record of all that a box asked of the network: each request as it ends, and the sum of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from ringfence.egress.names import Endpoint
from ringfence.egress.refusal import Stopped

_PLACES_MOST = 200


class Fact(TypedDict):
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
class Entry:
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
    """A tunnel: the client was told that it is open."""
    closed: bool = False

    def aim(self, place: Endpoint) -> None:
        self.host, self.port = place.host.text, place.port

    def allow(self, rule: str) -> None:
        self.verdict, self.rule, self.reason = "allowed", rule, None
        self.granted = rule

    def stop(self, stopped: Stopped) -> None:
        self.verdict = "failed" if stopped.verdict == "failed" else "denied"
        self.rule = stopped.rule or self.rule
        self.reason = stopped.reason


class Ledger:
    def __init__(self, on_fact: Callable[[Fact], None]) -> None:
        self._on_fact = on_fact
        self._sums: dict[tuple[object, ...], Fact] = {}
        self._open: dict[int, Entry] = {}

    def open(self, *, inspected: bool) -> Entry:
        """One that begins now."""
        entry = Entry(inspected)
        self._open[id(entry)] = entry
        return entry

    def close(self, entry: Entry) -> None:
        """Once: what ends a request and what tidies up after it may both say so."""
        self._open.pop(id(entry), None)
        if entry.closed:
            return
        entry.closed = True
        for fact in _facts(entry):
            _add(self._sums, fact)
            self._on_fact(fact)

    def facts(self) -> list[Fact]:
        """One for each place, verdict and reason; what was let through and is under way among them."""
        sums = {key: fact.copy() for key, fact in self._sums.items()}
        for entry in self._open.values():
            if entry.verdict == "allowed" and not entry.closed:
                _add(sums, _fact(entry))
        return list(sums.values())


def _facts(entry: Entry) -> list[Fact]:
    """One that was refused after something of it was sent is two: the refusal, and what was let out, with its bytes."""
    fact = _fact(entry)
    if entry.verdict != "denied" or not entry.sent:
        return [fact]
    let_out: Fact = {**fact, "verdict": "allowed", "rule": entry.granted, "reason": None}
    return [{**fact, "bytes_in": 0, "bytes_out": 0}, let_out]


def _fact(entry: Entry) -> Fact:
    return Fact(
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


def _add(sums: dict[tuple[object, ...], Fact], fact: Fact) -> None:
    key = (fact["host"], fact["port"], fact["verdict"], fact["rule"], fact["reason"], fact["inspected"])
    if key not in sums and len(sums) >= _PLACES_MOST:
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
