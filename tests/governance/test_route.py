"""From names to a way out: what a name and a place stand for, what cannot be meant, and how the facts are told."""

from __future__ import annotations

import pytest

from ringfence.core.box import NetworkRule
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import NetworkSpec
from ringfence.core.ports import Access
from ringfence.governance.route import ALLOWED, ConfiguredRouter, network_fact, rule_of

pytestmark = pytest.mark.anyio

CORP = NetworkSpec("corp", ("*.corp.example:443",), methods=("GET",), max_bytes_out=10, per_minute=5)


def test_a_name_stands_for_its_rule() -> None:
    assert ConfiguredRouter({"corp": CORP}).rules(Access("corp")) == (
        NetworkRule("corp", ("*.corp.example:443",), methods=("GET",), max_bytes_out=10, per_minute=5),
    )
    assert rule_of(NetworkSpec("n", inspect=True)).inspects
    assert not rule_of(NetworkSpec("n")).inspects


def test_places_of_the_caller_are_a_rule_beside_it() -> None:
    rules = ConfiguredRouter({"corp": CORP}).rules(Access("corp", places=("10.0.0.1:80", "*.example")))
    assert [rule.name for rule in rules] == ["corp", ALLOWED]
    assert rules[1].hosts == ("10.0.0.1:80", "*.example")


async def test_without_a_network_there_is_no_way() -> None:
    route = await ConfiguredRouter({}).route(Access())
    assert (route.serve, route.rules, dict(route.env)) == (None, (), {})


@pytest.mark.parametrize("place", ["", "a b", "user@host", "host:0", "*.10.0.0.1", "http://host", "host:99999"])
def test_a_place_that_cannot_be_meant_is_refused(place: str) -> None:
    with pytest.raises(Refused) as refused:
        ConfiguredRouter({}).check(Access(places=(place,)))
    assert refused.value.reason_code == "bad_network"


def test_a_network_that_nobody_declared_is_not_there() -> None:
    with pytest.raises(Unavailable, match="no network 'corp'"):
        ConfiguredRouter({}).check(Access("corp"))


def test_the_network_fact_is_sorted_by_verdict() -> None:
    one = {"host": "a", "port": 1, "rule": "r", "inspected": False, "bytes_in": 3, "bytes_out": 4, "count": 2}
    told = network_fact(
        [
            {**one, "verdict": "allowed", "reason": None},  # type: ignore[typeddict-item]
            {**one, "verdict": "denied", "reason": "host"},  # type: ignore[typeddict-item]
            {**one, "verdict": "failed", "reason": "connect"},  # type: ignore[typeddict-item]
        ]
    )
    assert told["allowed"] == [one]
    assert told["denied"] == [{"host": "a", "port": 1, "count": 2, "rule": "r", "reason": "host"}]
    assert told["failed"] == [{"host": "a", "port": 1, "count": 2, "rule": "r", "reason": "connect"}]
    assert (told["bytes_in"], told["bytes_out"]) == (9, 12)


def test_what_looks_the_same_in_the_network_fact_is_one() -> None:
    one = {"host": "a", "port": 1, "rule": "r", "inspected": False, "bytes_in": 3, "bytes_out": 4, "count": 2}
    told = network_fact({**one, "verdict": "allowed", "reason": reason} for reason in (None, "client_left"))  # type: ignore[typeddict-item]
    assert told["allowed"] == [{**one, "bytes_in": 6, "bytes_out": 8, "count": 4}]
