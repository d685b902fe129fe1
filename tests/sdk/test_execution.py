"""What a run came to: the exception that a traceback claims, exit codes, and what is raised where nothing ran."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.box import Limits, Ran
from ringfence.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.model import GuardedText, Outcome, Status
from ringfence.sandbox.results import judge
from ringfence.sdk.execution import command_result, execution, raised
from tests.boxing import report

PLAIN = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
    1/0
    ~^~
ZeroDivisionError: division by zero
"""
CHAINED = PLAIN + "\nDuring handling of the above exception, another exception occurred:\n\n" + PLAIN.replace(
    "ZeroDivisionError: division by zero", "my.own.Error: first line\nsecond: line"
)  # fmt: skip
SYNTAX = """  File "<string>", line 1
    def f(:
          ^
SyntaxError: invalid syntax
"""


@pytest.mark.parametrize(
    ("stderr", "found"),
    [
        (PLAIN, ("ZeroDivisionError", "division by zero")),
        ("warning: x\n" + PLAIN, ("ZeroDivisionError", "division by zero")),
        (CHAINED, ("Error", "first line\nsecond: line")),
        (SYNTAX, ("SyntaxError", "invalid syntax")),
        (PLAIN.replace(": division by zero", ""), ("ZeroDivisionError", "")),
        ("", None),
        ("ZeroDivisionError: division by zero\n", None),
        ("Traceback (most recent call last):\n", None),
        ("Traceback (most recent call last):\n  File x\n", None),
        ("Traceback (most recent call last):\n  File x\nnot an exception!\n", None),
    ],
)
def test_the_exception_that_last_words_tell_of(stderr: str, found: tuple[str, str] | None) -> None:
    error = raised(stderr)
    assert (None if error is None else (error.name, error.value)) == found


def test_the_traceback_is_the_last_one() -> None:
    error = raised("noise\n" + PLAIN)
    assert error is not None and error.traceback == PLAIN


@given(st.text(alphabet='Traceback (most recent call last):\n  File "x", E:\t') | st.text())
def test_whatever_a_program_writes_nothing_breaks(stderr: str) -> None:
    error = raised(stderr)
    assert error is None or error.name.isidentifier()


def outcome(seen: Any, **more: Any) -> Outcome:
    status, code = judge(seen)
    facts = {"exit_status": seen.exit_status, "signal": seen.signal, "explanation": "ended so"}
    return Outcome(status, code, result={}, facts=facts, ran=Ran(Limits(), seen), **more)


@pytest.mark.parametrize(
    ("seen", "status", "error", "code"),
    [
        (report(stdout=b"out"), "success", None, 0),
        (report(stderr=PLAIN.encode(), exit_status=1), "failed", "ZeroDivisionError", 1),
        (report(stderr=b"usage: x", exit_status=2), "failed", "SystemExit", 2),
        (report(exit_status=1), "failed", "SystemExit", 1),
        (report("signalled", signal=11), "failed", "signalled", 139),
        (report("timeout", signal=9, limit="wall"), "timeout", "timeout", 124),
        (report("oom", signal=9, limit="memory"), "killed", "memory", 137),
    ],
)
def test_a_program_that_fails_is_a_result(seen: Any, status: str, error: str | None, code: int) -> None:
    ran = execution(outcome(seen))
    assert (ran.status, ran.error.name if ran.error else None) == (status, error)
    assert ran.facts["explanation"] == "ended so"
    done = command_result(outcome(seen))
    assert (done.exit_code, done.status) == (code, status)


def test_text_is_the_last_result_or_all_of_stdout() -> None:
    ran = execution(outcome(report(stdout="é\n".encode(), stderr=b"warn")))
    assert (ran.text, ran.logs.stdout, ran.logs.stderr, ran.results) == ("é\n", ["é\n"], ["warn"], [])
    assert execution(outcome(report())).logs.stdout == []


def test_what_a_contract_had_removed_stays_removed() -> None:
    shown = {"structuredContent": {"stdout": "a [redacted]", "stderr": ""}}
    assert execution(Outcome(Status.SUCCESS, "ok", result=shown)).text == "a [redacted]"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (Status.UNAVAILABLE, Unavailable),
        (Status.UNKNOWN, OutcomeUnknown),
        (Status.DENIED, Refused),
        (Status.APPROVAL_REQUIRED, Refused),
        (Status.VALIDATION_FAILURE, Refused),
        (Status.FAILED, Refused),
    ],
)
def test_what_did_not_run_is_raised(status: Status, kind: type[Exception]) -> None:
    for convert in (execution, command_result):
        with pytest.raises(kind) as ended:
            convert(Outcome(status, "why", GuardedText("in words"), approval_id="apr_1"))  # type: ignore[operator]
        assert str(ended.value) == "in words"
        assert ended.value.reason_code == "why"  # type: ignore[attr-defined]
