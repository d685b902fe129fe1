"""Metrics as Prometheus reads them: parsed by its own parser."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringfence.core.errors import StoreError
from ringfence.telemetry import registry
from ringfence.telemetry.registry import Counter, Family, Histogram, Read, render


def parsed(*families: Family) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = text_string_to_metric_families(render(families))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in found for s in family.samples}


def unreadable() -> float:
    raise StoreError("the disk is full")


def test_what_is_counted_is_read_by_prometheus_whatever_stands_in_labels() -> None:
    calls = Counter("calls_total", 'Calls, "all"\nof them \\.', "tool", "status")
    calls.add("a", "ok")
    calls.add("a", "ok", by=2)
    calls.add('odd "\\\n', "no")
    plain = Counter("plain_total", "Nothing yet.")
    now = Read("gauge", "now", "Now.", read=lambda: 1.5)
    each = Read("gauge", "each", "Each.", "server", read=lambda: {("x",): 2.0})
    silent = Read("gauge", "silent", "Cannot be told.", read=lambda: None)
    failing = Read("gauge", "failing", "Cannot be looked up.", read=unreadable)
    assert parsed(calls, plain, failing, now, each, silent) == {
        ("calls_total", (("status", "ok"), ("tool", "a"))): 3.0,
        ("calls_total", (("status", "no"), ("tool", 'odd "\\\n'))): 1.0,
        ("plain_total", ()): 0.0,
        ("now", ()): 1.5,
        ("each", (("server", "x"),)): 2.0,
    }


def test_a_histogram_counts_what_is_at_most_its_bound_and_all_of_it() -> None:
    took = Histogram("took", "Seconds.", "kind", bounds=(0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        took.observe(seconds, "tool")
    found = parsed(took)
    buckets = {dict(labels)["le"]: value for (name, labels), value in found.items() if name == "took_bucket"}
    assert buckets == {"0.1": 2.0, "1": 3.0, "+Inf": 4.0}
    assert found["took_count", (("kind", "tool"),)] == 4.0
    assert found["took_sum", (("kind", "tool"),)] == pytest.approx(7.65)


@pytest.mark.parametrize("made", [Counter, Histogram])
def test_nobody_fills_the_memory_with_labels(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_SERIES", 3)
    family = made("many", "Many.", "name")
    for number in range(10):
        family.add(f"n{number}") if made is Counter else family.observe(1.0, f"n{number}")
    names = {dict(labels)["name"] for _, labels in parsed(family)}
    assert names == {"n0", "n1", "n2", "other"}


def test_one_owner_leaves_others_their_share_and_loses_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_SERIES", 8)
    calls = Counter("calls", "Calls.", "tool", "agent", "reason", whose="agent")
    for number in range(20):
        calls.add(f"t{number}", "greedy", "ok", by=2.0)
    for number in range(3):
        calls.add(f"t{number}", "late", "ok")
        calls.add(f"t{number}", "last", "ok")
    calls.add("t0", "late", "ok")

    def of(agent: str) -> dict[str, float]:
        return {
            dict(labels)["tool"]: value
            for (_, labels), value in parsed(calls).items()
            if dict(labels)["agent"] == agent
        }

    greedy, late, last = of("greedy"), of("late"), of("last")
    assert sum(greedy.values()) == 40.0 and greedy["other"] > 20.0, "what gave way is counted all the same"
    assert late.items() >= {"t0": 2.0, "t1": 1.0}.items() and last.items() >= {"t0": 1.0, "t1": 1.0}.items()
    assert len(greedy) + len(late) + len(last) <= 8 + 3
    calls.add("t99", "greedy", "ok")
    assert of("greedy") == {**greedy, "other": greedy["other"] + 1.0}
