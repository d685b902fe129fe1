"""Budgets of a rule: bytes and requests, for all connections together."""

from __future__ import annotations

import pytest

from ringfence.box import NetworkRule
from ringfence.egress.ledger import Entry
from ringfence.egress.meter import Meter
from ringfence.egress.refusal import Denied


def test_a_rate_fills_up_again_and_no_higher() -> None:
    now = [0.0]
    meter = Meter(NetworkRule("r", ("a",), per_minute=2), clock=lambda: now[0])

    def admitted() -> int:
        count = 0
        while True:
            try:
                meter.admit()
            except Denied:
                return count
            count += 1

    assert admitted() == 2
    now[0] += 30
    assert admitted() == 1
    now[0] += 3600
    assert admitted() == 2


def test_bytes_out_are_refused_before_and_bytes_in_after() -> None:
    meter, entry = Meter(NetworkRule("r", ("a",), max_bytes_out=10, max_bytes_in=10)), Entry(inspected=True)
    meter.outward(10, entry)
    with pytest.raises(Denied, match="max_bytes_out"):
        meter.outward(1, entry)
    assert entry.bytes_out == 10
    meter.inward(10, entry)
    with pytest.raises(Denied, match="max_bytes_in"):
        meter.inward(1, entry)
    assert entry.bytes_in == 11


def test_what_does_not_fit_is_not_admitted() -> None:
    meter = Meter(NetworkRule("r", ("a",), max_bytes_out=10))
    meter.admit(10)
    with pytest.raises(Denied):
        meter.admit(11)
    meter.outward(10, Entry(inspected=True))
    with pytest.raises(Denied):
        meter.admit()


def test_nothing_is_counted_against_a_rule_without_budgets() -> None:
    meter = Meter(NetworkRule("r", ("a",)))
    for _ in range(100):
        meter.admit(10**12)
        meter.outward(10**12, Entry(inspected=True))
