"""What is said once: both ends agree on what was, however many sessions there are."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.box import BoxReport
from ringfence.sandbox.codec import pack, unpack
from ringfence.sandbox.frames import WireError
from ringfence.sandbox.repeats import AS_BEFORE, MOST_TOLD, Heard, Said
from ringfence.sessions import CellReport, StepReport


def step(session: str, isolation: dict[str, Any]) -> StepReport:
    return StepReport(session, 1, CellReport(BoxReport("exited", isolation=isolation)))


def passed(said: Said, heard: Heard, report: StepReport) -> tuple[bool, StepReport]:
    """Whether it was said in full, and what arrives."""
    beside: list[bytes] = []
    done = pack(StepReport, report, beside)
    said.shorten(done, report)
    full = AS_BEFORE not in str(done)
    heard.lengthen(done)
    return full, unpack(StepReport, done, beside)


def test_the_same_is_said_once_and_another_again() -> None:
    said, heard, one, other = Said(), Heard(), {"level": "process"}, {"level": "other"}
    told = [passed(said, heard, step("a", isolation)) for isolation in (one, one, other, one)]
    assert [full for full, _ in told] == [True, False, True, True]
    assert [report.cell.report.isolation for _, report in told] == [one, one, other, one]


def test_whatever_a_keeper_remembers_its_client_does_too() -> None:
    said, heard = Said(), Heard()
    isolations = {str(number): {"number": number} for number in range(3 * MOST_TOLD)}
    for session in [*isolations, *isolations, *reversed(isolations)]:
        _, report = passed(said, heard, step(session, isolations[session]))
        assert report.cell.report.isolation == isolations[session]


@pytest.mark.parametrize("done", [None, [], ["a"], {"session": "a"}, ["a", 1, [["x"]]]])
def test_a_step_that_is_none_is_not_taken(done: Any) -> None:
    with pytest.raises(WireError):
        Heard().lengthen(done)


def test_nobody_is_told_as_before_who_was_not_told() -> None:
    said, isolation = Said(), {"level": "process"}
    passed(said, Heard(), step("a", isolation))
    with pytest.raises(WireError):
        passed(said, Heard(), step("a", isolation))
