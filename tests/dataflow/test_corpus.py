"""The corpus is whole: as many attempts as twins, half of each held out, and every step can be carried out."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.dataflow.scenarios import scenarios, tools

CORPORA = ("corpus", "second", "third")


def test_there_are_a_hundred_attempts_and_a_hundred_twins_half_of_them_held_out() -> None:
    counted = Counter((each.attempt, each.held_out) for each in scenarios())
    assert counted == {(attempt, held_out): 50 for attempt in (True, False) for held_out in (True, False)}
    assert len({each.id for each in scenarios()}) == 200


@pytest.mark.parametrize("corpus", CORPORA)
def test_every_attempt_has_a_way_out_and_no_twin_has_one(corpus: str) -> None:
    for each in scenarios(corpus):
        assert any(step.leak for step in each.steps) is each.attempt, each.id


@pytest.mark.parametrize("corpus", CORPORA)
def test_every_step_is_of_a_tool_that_takes_its_arguments(corpus: str) -> None:
    for each in scenarios(corpus):
        for step in each.steps:
            assert set(step.arguments) <= set(tools()[step.tool]["args"]), (each.id, step.tool)


def test_an_attempt_differs_from_all_others_and_from_its_twin() -> None:
    shapes = Counter(str(each.steps) for corpus in CORPORA for each in scenarios(corpus))
    assert max(shapes.values()) == 1


@pytest.mark.parametrize("corpus", CORPORA)
def test_the_same_call_always_gets_the_same_answer(corpus: str) -> None:
    answers: dict[str, str] = {}
    for each in scenarios(corpus):
        for step in each.steps:
            key = f"{step.tool} {sorted(step.arguments.items())}"
            assert answers.setdefault(key, step.back) == step.back, (each.id, key)
