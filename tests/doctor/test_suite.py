"""The suite itself: a backend that protects nothing breaks most promises, and what could never be is not counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Captured, Stream
from ringfence.core.errors import Unavailable
from ringfence.core.model import Recheck, always
from ringfence.doctor import CATALOGUE, Case, Options, run
from ringfence.doctor.case import Control, Trial
from ringfence.doctor.control import ControlBackend, ControlLauncher
from ringfence.doctor.props import Props

pytestmark = pytest.mark.anyio


class Scripted:
    """A backend whose boxes say what they are told to say, and run nothing."""

    name = "scripted"

    def __init__(self, *, said: bytes = b"", ended: str = "exited", refuses: str = "") -> None:
        self._report = BoxReport(ended, 0, stdout=Captured(head=said), denials={"bpf": 1})  # type: ignore[arg-type]
        self._refuses = refuses
        self.first: BoxReport | None = None
        self.runs = 0

    def says(self, **other: object) -> None:
        self._report = replace(self._report, **other)  # type: ignore[arg-type]

    async def run(
        self, spec: BoxSpec, tell: Callable[[Stream, bytes], None] | None = None, recheck: Recheck = always
    ) -> BoxReport:
        await recheck()
        self.runs += 1
        if self._refuses and self.runs > 1:
            raise Unavailable(self._refuses, "there is no box")
        return self.first if self.first is not None and self.runs == 1 else self._report

    async def close(self) -> None:
        return None


def case(**more: object) -> Case:
    return Case("F99", "try", "no", "say(False, 'no')", **more)  # type: ignore[arg-type]


async def test_a_backend_that_is_only_the_control_breaks_most_promises(launcher: ControlLauncher) -> None:
    cases = tuple(each for each in CATALOGUE if each.kind in "FDKX" and not each.beside)
    report = await run(ControlBackend(launcher), Options(cases=cases, controls=False))
    assert report.broken > 0.9 * len(cases)
    assert report.broken + report.kept == len(cases)


async def test_what_the_control_could_not_do_either_is_not_counted() -> None:
    never = case(control=Control(impossible="no"))
    report = await run(Scripted(said=b'{"done": false, "detail": "EPERM"}\n'), Options(cases=(never,)))
    assert (report.kept, report.broken, report.not_counted) == (0, 0, 1)
    assert report.results[0].control == "not possible here: no"


async def test_what_is_broken_counts_whatever_the_control_says() -> None:
    never = case(control=Control(impossible="no"))
    report = await run(Scripted(said=b'{"done": true, "detail": "did"}\n'), Options(cases=(never,)))
    assert (report.kept, report.broken, report.results[0].got) == (0, 1, "did")


async def test_a_control_that_fails_leaves_the_case_uncounted(launcher: ControlLauncher) -> None:
    report = await run(Scripted(said=b'{"done": false, "detail": "EPERM"}\n'), Options(cases=(case(),)))
    assert report.results[0].kept is None and report.results[0].control == "failed: no"


async def test_without_controls_everything_counts() -> None:
    report = await run(Scripted(said=b'{"done": false}\n'), Options(cases=(case(),), controls=False))
    assert report.results[0].kept is True and report.results[0].control == "not run"


async def test_a_backend_that_makes_no_box_at_all_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        await run(Scripted(ended="infra"), Options(cases=(case(),), controls=False))


async def test_a_box_that_cannot_be_made_for_a_case_breaks_it() -> None:
    report = await run(Scripted(refuses="no_box"), Options(cases=(case(),), controls=False))
    assert report.results[0].got == "no box was made: there is no box" and report.broken == 1


async def test_what_is_rightly_refused_on_this_host_is_not_counted_and_says_why() -> None:
    report = await run(Scripted(refuses="maps_no_ids"), Options(cases=(case(),), controls=False))
    assert (report.kept, report.broken, report.not_counted) == (0, 0, 1)
    assert report.as_json()["cases"][0]["reason"] == "there is no box"


async def test_what_cannot_be_set_up_here_is_not_counted_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Props) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(Props, "_mq", none)
    report = await run(Scripted(said=b'{"done": false}\n'), Options(cases=(case(props=("mq",)),), controls=False))
    assert report.results[0].kept is None and "Function not implemented" in report.results[0].reason


async def test_what_there_is_nothing_to_try_with_is_not_counted_and_says_why() -> None:
    said = b'{"done": false, "detail": "x", "cannot": "there is no such program"}\n'
    report = await run(Scripted(said=said), Options(cases=(case(),), controls=False))
    assert (report.results[0].kept, report.results[0].reason) == (None, "there is no such program")


async def test_what_rests_on_a_protection_that_was_given_up_is_not_counted() -> None:
    backend = Scripted(said=b'{"done": true}\n')
    for on, given_up, kept in ((False, ("landlock",), None), (True, ("landlock",), False), (False, (), False)):
        backend.says(isolation={"protections": {"landlock": {"on": on}}})
        report = await run(backend, Options((case(rests_on="landlock"),), controls=False, given_up=given_up))
        assert report.results[0].kept is kept
    assert "accept_missing" not in report.results[0].reason


class Slow(Scripted):
    """Whose programs are over only when they had long enough."""

    def __init__(self, seconds: float) -> None:
        super().__init__(said=b'{"done": false, "detail": "EPERM"}\n')
        self._seconds = seconds
        self.had: list[float] = []

    async def run(
        self, spec: BoxSpec, tell: Callable[[Stream, bytes], None] | None = None, recheck: Recheck = always
    ) -> BoxReport:
        await recheck()
        report = await super().run(spec, tell)
        if self.runs > 1:
            self.had.append(spec.limits.wall_seconds)
            if spec.limits.wall_seconds < self._seconds:
                return BoxReport("timeout", None, signal=9, limit="wall")
        return report


async def test_a_case_that_was_not_over_in_time_is_tried_again_with_more_of_it() -> None:
    slow = Slow(100)
    report = await run(slow, Options(cases=(case(),), controls=False))
    assert slow.had == [20, 80, 320] and report.results[0].kept is True


async def test_a_case_that_is_never_over_is_broken() -> None:
    slow = Slow(10**6)
    heard: list[bool | None] = []
    options = Options((case(),), controls=False, progress=lambda result: heard.append(result.kept))
    report = await run(slow, options)
    assert len(slow.had) == 3 and report.broken == 1 and heard == [False]


async def test_harm_that_was_done_is_not_tried_again() -> None:
    backend = Scripted(said=b'{"done": true, "detail": "did"}\n')
    backend.says(ended="timeout", limit="wall")
    backend.first = BoxReport("exited", 0)
    report = await run(backend, Options(cases=(case(),), controls=False))
    assert (report.broken, report.results[0].got, backend.runs) == (1, "did", 2)


async def test_a_control_is_run_once_for_several_backends() -> None:
    asked: list[Trial] = []

    def hit(trial: Trial) -> str | None:
        asked.append(trial)
        return None

    options = Options(cases=(case(hit=hit, control=Control(impossible="no")),), known={"F99": (True, "succeeded")})
    for _ in range(2):
        report = await run(Scripted(said=b'{"done": false}\n'), options)
    assert len(asked) == 2 and report.results[0].kept is True


async def test_json_has_the_shape_that_programs_rely_on() -> None:
    report = await run(Scripted(said=b'{"done": false, "detail": "no"}\n'), Options(cases=(case(),), controls=False))
    told = json.loads(json.dumps(report.as_json()))
    assert set(told) == {"backend", "host", "cases", "kept", "broken", "not_counted"}
    assert told["cases"] == [
        {
            "id": "F99",
            "class": "F",
            "tried": "try",
            "expected": "no",
            "got": "no",
            "control": "not run",
            "kept": True,
        }
    ]
    assert (told["backend"], told["kept"], told["broken"]) == ("scripted", 1, 0)


async def test_results_come_in_the_order_of_the_cases_and_progress_hears_of_each() -> None:
    cases = tuple(replace(case(), id=f"F{n}") for n in range(10, 30))
    heard: list[str] = []
    options = Options(cases=cases, controls=False, progress=lambda result: heard.append(result.case.id))
    report = await run(Scripted(said=b'{"done": false}\n'), options)
    assert [result.case.id for result in report.results] == [each.id for each in cases]
    assert sorted(heard) == sorted(each.id for each in cases)
