"""The tree of errors is drawn at the top of its file, and the drawing is right."""

from __future__ import annotations

import re

import pytest

from ringfence.core import errors
from ringfence.core.errors import (
    ConfigError,
    OutcomeUnknown,
    Problem,
    Refused,
    RingfenceError,
    Unavailable,
    UpstreamFailed,
)
from ringfence.core.model import Status


def drawn() -> dict[str, str]:
    """Each class of the drawing with the one above it."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([\s│├└─]*)([A-Z]\w+)(?:\s{2,}\S.*)?$", line)
        if match is None:
            continue
        depth, name = len(match[1]), match[2]
        while above and above[-1][0] >= depth:
            above.pop()
        found[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    return found


def test_the_drawing_is_the_tree() -> None:
    own = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert drawn() == {name: kind.__bases__[0].__name__ for name, kind in own.items()}
    assert len(own) < 16


def test_every_class_says_who_must_act() -> None:
    for line in (errors.__doc__ or "").splitlines():
        if "── " in line:
            assert re.search(r"\w  +\S", line), line


def test_problems_are_told_all_at_once_in_the_order_given() -> None:
    problems = [Problem("f.yaml", 2, 1, "unknown key"), Problem("f.yaml", 1, 5, "bad")]
    raised = ConfigError(problems)
    assert str(raised) == "f.yaml:2:1: unknown key\nf.yaml:1:5: bad"
    assert sorted(problems) == problems[::-1]
    assert raised.problems is problems


@pytest.mark.parametrize("kind", [Unavailable, OutcomeUnknown])
def test_an_error_carries_its_reason_and_its_words(kind: type[Unavailable] | type[OutcomeUnknown]) -> None:
    raised = kind("server_down", "it is down")
    assert (raised.reason_code, raised.message, str(raised)) == ("server_down", "it is down", "it is down")
    assert isinstance(raised, RingfenceError)


def test_a_refusal_names_the_outcome_that_it_becomes() -> None:
    raised = Refused(Status.APPROVAL_REQUIRED, "approval_required", "wait", approval_id="apr_1")
    assert (raised.status, raised.approval_id) == (Status.APPROVAL_REQUIRED, "apr_1")
    failed = UpstreamFailed("upstream_error", -32602, "no", {"x": 1})
    assert (failed.status, failed.code, failed.data) == (Status.FAILED, -32602, {"x": 1})
