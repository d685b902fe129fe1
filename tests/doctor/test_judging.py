"""Judges: a program's word breaks a promise, and never keeps one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ringfence.core.box import BoxReport, Captured, Limits, Usage
from ringfence.doctor import judging
from ringfence.doctor.case import Case, Judge, Trial, claimed
from ringfence.doctor.cases import CATALOGUE
from ringfence.doctor.props import Props
from ringfence.doctor.stage import Stage
from ringfence.doctor.suite import claim_of
from tests import tooling

DENIED = {"done": False, "detail": "EPERM"}
DONE = {"done": True, "detail": "read it"}


@pytest.fixture
def props(stage: Stage) -> Iterator[Props]:
    made = stage.props(("tree", "output", "tcp", "victim"))
    yield made
    made.close()


def trial(props: Props, claim: dict[str, Any] | None = None, **report: Any) -> Trial:
    return Trial(BoxReport(**{"ended": "exited", "exit_status": 0, **report}), Limits(wall_seconds=1), props, claim)


def case(hit: Judge = claimed, **more: Any) -> Case:
    return Case("F99", "try", "no", "pass", hit, **more)


def test_an_admission_breaks(props: Props) -> None:
    assert judging.verdict(case(), trial(props, DONE)) == (False, "read it")


def test_a_denial_with_nothing_against_it_keeps(props: Props) -> None:
    assert judging.verdict(case(), trial(props, DENIED)) == (True, "EPERM")


def test_silence_keeps_nothing(props: Props) -> None:
    kept, got = judging.verdict(case(), trial(props))
    assert not kept and "did not say" in got
    assert judging.verdict(case(silent=True), trial(props))[0]


def test_a_box_that_failed_keeps_nothing(props: Props) -> None:
    kept, got = judging.verdict(case(), trial(props, DENIED, ended="infra", trouble=("mount: no",)))
    assert (kept, got) == (False, "the box itself failed; mount: no")


def test_a_lie_about_a_changed_canary_is_not_believed(props: Props) -> None:
    (props.folder / "canary" / "canary.txt").write_text("other")
    kept, got = judging.verdict(case(judging.changed), trial(props, DENIED))
    assert not kept and "canary.txt" in got


def test_a_lie_about_a_canary_that_was_read_is_not_believed(props: Props) -> None:
    told = trial(props, DENIED, stdout=Captured(head=props.secret.encode()))
    assert judging.revealed(told) == "it read the canary"


def test_a_lie_about_a_connection_is_not_believed(props: Props) -> None:
    import socket

    with socket.create_connection(("127.0.0.1", props.given["port"])):
        assert judging.reached("tcp")(trial(props, DENIED)) is not None
    assert judging.reached("tcp")(trial(props, DENIED)) is None


def test_a_lie_about_a_dead_victim_is_not_believed(props: Props) -> None:
    import os

    assert judging.victim_hurt(trial(props, DENIED)) is None
    os.kill(props.given["victim"], 9)
    tooling.wait_until(lambda: not props.victim_lives())
    assert judging.victim_hurt(trial(props, DENIED)) == "the victim was ended"


def test_what_lies_among_the_results_counts_whoever_says_what(props: Props) -> None:
    assert props.output is not None
    (props.output / "result").write_text(f"x{props.secret}")
    assert judging.collected_secret(trial(props, DENIED)) == "result holds the canary"


@pytest.mark.parametrize(
    ("ask", "report", "right"),
    [
        (judging.refused("bpf"), {"denials": {"bpf": 1}}, True),
        (judging.refused("bpf"), {"denials": {}}, False),
        (judging.counted("bpf", 3), {"denials": {"bpf": 3}}, True),
        (judging.counted("bpf", 3), {"denials": {"bpf": 2}}, False),
        (judging.limited("disk"), {"limit": "disk"}, True),
        (judging.limited("disk"), {"limit": None}, False),
        (judging.limited("wall", ended=("timeout",)), {"limit": "wall", "ended": "timeout"}, True),
        (judging.limited("memory"), {"limit": "memory", "ended": "oom"}, False),
        (judging.limited("pids"), {"limit": None, "isolation": {"limits": {"pids": {"by": "rlimit"}}}}, True),
        (judging.limited("pids"), {"limit": None, "isolation": {"limits": {"pids": {"by": "cgroup"}}}}, False),
        (judging.ended_as("timeout"), {"ended": "timeout"}, True),
        (judging.ended_as("timeout"), {"ended": "exited"}, False),
        (judging.answered("EPERM"), {}, True),
        (judging.answered("ENOENT"), {}, False),
        (judging.misreported(exit_status=0), {}, True),
        (judging.misreported(exit_status=7), {}, False),
        (judging.outlasted, {"wall_ms": 900.0}, True),
        (judging.outlasted, {"wall_ms": 1950.0}, False),
    ],
)
def test_the_facts_are_asked(props: Props, ask: Judge, report: dict[str, Any], right: bool) -> None:
    assert (ask(trial(props, DENIED, **report)) is None) == right


def test_a_call_that_does_not_exist_need_not_be_in_the_facts(props: Props) -> None:
    assert judging.refused("bpf")(trial(props, {"done": False, "detail": "ENOSYS"})) is None


def test_facts_that_are_owed_break_a_promise_when_they_are_missing(props: Props) -> None:
    asked = case(owed=(judging.refused("bpf"),))
    assert judging.verdict(asked, trial(props, DENIED)) == (False, "refused, but not in the facts: bpf")


def test_a_control_is_asked_whether_it_could_and_not_for_facts(props: Props) -> None:
    asked = case(owed=(judging.refused("bpf"),))
    assert judging.control_says(asked, trial(props, DONE)) == (True, "succeeded: read it")
    assert judging.control_says(asked, trial(props, DENIED)) == (False, "failed: EPERM")
    assert isinstance(judging.control_says(asked, trial(props, ended="timeout"))[1], judging.NeedsMoreTime)


def test_what_the_clock_stopped_may_have_needed_more_time(props: Props) -> None:
    stopped: dict[str, Any] = {"ended": "timeout", "limit": "wall"}
    for asked in (case(), case(judging.misreported(ended="exited")), case(judging.collector_hurt)):
        kept, got = judging.verdict(asked, trial(props, **stopped))
        assert not kept and isinstance(got, judging.NeedsMoreTime)
    waited = {"done": False, "detail": "timed out"}
    kept, got = judging.verdict(case(owed=(judging.answered("403"),)), trial(props, waited))
    assert not kept and isinstance(got, judging.NeedsMoreTime)
    kept, got = judging.verdict(case(), trial(props, DONE, **stopped))
    assert not kept and not isinstance(got, judging.NeedsMoreTime), "harm was done, whatever the clock says"
    assert not isinstance(judging.verdict(case(), trial(props))[1], judging.NeedsMoreTime), (
        "it had the time that it wanted"
    )


def test_the_last_claim_counts_and_only_a_claim() -> None:
    lines = b'{"done": true}\nnoise\n{"done": false, "detail": "x"}\n{"exit_code": 0}\n[1]\n{"done": 1}\n{broken\n'
    assert claim_of(Captured(head=lines)) == {"done": False, "detail": "x"}
    assert claim_of(Captured(head=b"nothing")) is None
    assert claim_of(Captured(head=b'{"done": true}\n', tail=b'x\n{"done": false}\n')) == {"done": False}


def test_no_case_is_kept_by_a_report_that_says_nothing(stage: Stage) -> None:
    """An empty report, as of a backend that never ran anything, must not pass for a kept promise."""
    for each in CATALOGUE:
        made = stage.props(each.props)
        try:
            if each.network:
                made.play(each.names)
            report = BoxReport("exited", usage=Usage())
            kept, got = judging.verdict(each, Trial(report, each.limits, made))
        finally:
            made.close()
        assert not kept, (each.id, got)
