"""The record of what a box asked for: each request once, what is under way among the sums, and a bound on them."""

from __future__ import annotations

from ringfence.egress import names
from ringfence.egress.ledger import Entry, Fact, Ledger


def entry(ledger: Ledger, place: str = "api.example:443", rule: str = "r") -> Entry:
    made = ledger.open(inspected=False)
    made.aim(names.endpoint(place))
    made.allow(rule)
    return made


def test_what_is_let_through_is_told_while_it_is_under_way() -> None:
    heard: list[Fact] = []
    ledger = Ledger(heard.append)
    one = entry(ledger)
    one.bytes_out = 7
    (fact,) = ledger.facts()
    assert (fact["host"], fact["count"], fact["bytes_out"]) == ("api.example", 1, 7)
    assert heard == []
    ledger.close(one)
    ledger.close(one)
    assert ledger.facts() == heard == [fact]


def test_what_was_not_judged_yet_is_not_told() -> None:
    ledger = Ledger(lambda _: None)
    ledger.open(inspected=True)
    assert ledger.facts() == []


def test_a_tunnel_whose_requests_are_told_by_themselves_is_not() -> None:
    ledger = Ledger(lambda _: None)
    one = entry(ledger)
    one.closed = True
    assert ledger.facts() == []
    ledger.close(one)
    assert ledger.facts() == []


def test_beyond_two_hundred_places_the_rest_is_one() -> None:
    ledger = Ledger(lambda _: None)
    for number in range(250):
        ledger.close(entry(ledger, f"h{number}.example:443"))
    facts = ledger.facts()
    assert len(facts) == 201
    assert (facts[-1]["host"], facts[-1]["count"]) == ("*", 50)
