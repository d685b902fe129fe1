"""The record of what a box asked for: each request once, what is under way among the sums, and a bound on them."""

from __future__ import annotations

import pytest

from ringfence.core.box import NetworkRule
from ringfence.egress import names
from ringfence.egress.ledger import EgressFact, EgressLedger, Forbidden, LedgerEntry, RuleMeter


def entry(ledger: EgressLedger, place: str = "api.example:443", rule: str = "r") -> LedgerEntry:
    made = ledger.open(inspected=False)
    made.aim(names.endpoint(place))
    made.allow(rule)
    return made


def test_what_is_let_through_is_told_while_it_is_under_way() -> None:
    heard: list[EgressFact] = []
    ledger = EgressLedger(heard.append)
    one = entry(ledger)
    one.bytes_out = 7
    (fact,) = ledger.facts()
    assert (fact["host"], fact["count"], fact["bytes_out"]) == ("api.example", 1, 7)
    assert heard == []
    ledger.close(one)
    ledger.close(one)
    assert ledger.facts() == heard == [fact]


def test_what_was_not_judged_yet_is_not_told() -> None:
    ledger = EgressLedger(lambda _: None)
    ledger.open(inspected=True)
    assert ledger.facts() == []


def test_a_tunnel_whose_requests_are_told_by_themselves_is_not() -> None:
    ledger = EgressLedger(lambda _: None)
    one = entry(ledger)
    one.closed = True
    assert ledger.facts() == []
    ledger.close(one)
    assert ledger.facts() == []


def test_beyond_two_hundred_places_the_rest_is_one() -> None:
    ledger = EgressLedger(lambda _: None)
    for number in range(250):
        ledger.close(entry(ledger, f"h{number}.example:443"))
    facts = ledger.facts()
    assert len(facts) == 201
    assert (facts[-1]["host"], facts[-1]["count"]) == ("*", 50)


# ── Budgets of a rule ────────────────────────────────────────────────────────────────────────────


def test_a_rate_fills_up_again_and_no_higher() -> None:
    now = [0.0]
    meter = RuleMeter(NetworkRule("r", ("a",), per_minute=2), clock=lambda: now[0])

    def admitted() -> int:
        count = 0
        while True:
            try:
                meter.admit()
            except Forbidden:
                return count
            count += 1

    assert admitted() == 2
    now[0] += 30
    assert admitted() == 1
    now[0] += 3600
    assert admitted() == 2


@pytest.mark.parametrize("length", [5, 500])
def test_bytes_of_a_secret_neither_count_nor_are_told(length: int) -> None:
    meter, entry = RuleMeter(NetworkRule("r", ("a",), max_bytes_out=10)), LedgerEntry(inspected=True)
    meter.outward(3 + length, entry, untold=length)
    assert entry.bytes_out == 3
    meter.outward(7, entry)
    with pytest.raises(Forbidden, match="max_bytes_out"):
        meter.outward(1, entry)


def test_bytes_out_are_refused_before_and_bytes_in_after() -> None:
    meter, entry = RuleMeter(NetworkRule("r", ("a",), max_bytes_out=10, max_bytes_in=10)), LedgerEntry(inspected=True)
    meter.outward(10, entry)
    with pytest.raises(Forbidden, match="max_bytes_out"):
        meter.outward(1, entry)
    assert entry.bytes_out == 10
    meter.inward(10, entry)
    with pytest.raises(Forbidden, match="max_bytes_in"):
        meter.inward(1, entry)
    assert entry.bytes_in == 11


def test_what_does_not_fit_is_not_admitted() -> None:
    meter = RuleMeter(NetworkRule("r", ("a",), max_bytes_out=10))
    meter.admit(10)
    with pytest.raises(Forbidden):
        meter.admit(11)
    meter.outward(10, LedgerEntry(inspected=True))
    with pytest.raises(Forbidden):
        meter.admit()


def test_nothing_is_counted_against_a_rule_without_budgets() -> None:
    meter = RuleMeter(NetworkRule("r", ("a",)))
    for _ in range(100):
        meter.admit(10**12)
        meter.outward(10**12, LedgerEntry(inspected=True))
