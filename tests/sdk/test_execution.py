"""What a run came to: the exception that a traceback claims, exit codes, and what is raised where nothing ran."""

from __future__ import annotations

import base64
import html
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import Limits, Ran
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.core.model import GuardedText, Outcome, Status
from ringfence.sandbox.tools.results import judge
from ringfence.sdk.execution import Result, command_result, execution, raised
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


# ── Values that were shown ────────────────────────────────────────────────────────────────────────


HOSTILE = '<script>steal()</script>"></iframe><script>steal()</script>'


def test_forms_have_short_names() -> None:
    result = Result({"text/plain": "7", "image/png": "aGk=", "application/vnd.own+json": "{}"}, True)
    assert (result.text, result.png, result.html, result.is_main_result) == ("7", "aGk=", None, True)
    assert result.formats() == ["text", "png", "application/vnd.own+json"]
    assert str(result) == "7" and str(Result({"image/png": "aGk="})) == "Result(png)"


def test_what_the_tool_told_becomes_a_result() -> None:
    told = {"data": {"text/html": "<b>x</b>"}, "main": True, "cut": {"text/plain": 99}}
    assert Result.of(told) == Result({"text/html": "<b>x</b>"}, True, {"text/plain": 99})
    assert Result.of({}) == Result({})


def test_json_is_its_value_and_what_cannot_be_read_is_none() -> None:
    assert Result({"application/json": '{"a": [1]}'}).json == {"a": [1]}
    assert Result({"application/json": "{"}).json is None
    assert Result({"application/json": "[" * 100_000}).json is None
    assert Result({}).json is None


@given(st.text() | st.just(HOSTILE))
def test_html_of_a_box_is_shown_in_a_frame_that_runs_and_loads_nothing(text: str) -> None:
    shown = Result({"text/html": text})._repr_html_()
    found = re.fullmatch(r'<iframe sandbox="" style="[^"]*" srcdoc="([^"<>]*)"></iframe>', shown or "", re.DOTALL)
    assert found is not None
    policy, text_shown = html.unescape(found[1]).split(">", 1)
    assert policy.startswith('<meta http-equiv="Content-Security-Policy" content="default-src \'none\';')
    assert text_shown == html.unescape(html.escape(text))


def test_a_drawing_is_an_image_and_a_script_is_never_shown() -> None:
    drawing = "<svg onload='steal()'/>"
    shown = Result({"image/svg+xml": drawing})._repr_html_() or ""
    found = re.fullmatch(r'<img src="data:image/svg\+xml;base64,([A-Za-z0-9+/=]*)">', shown)
    assert found is not None and base64.b64decode(found[1]).decode() == drawing
    script = Result({"application/javascript": "steal()"})
    assert script._repr_html_() is None and not hasattr(script, "_repr_javascript_")
    assert script.javascript == "steal()"


def test_images_and_formulas_are_shown_as_they_are() -> None:
    result = Result({"image/png": "cG5n", "image/jpeg": "anBn", "text/latex": "$x$", "application/json": "[1]"})
    assert (result._repr_png_(), result._repr_jpeg_(), result._repr_latex_()) == ("cG5n", "anBn", "$x$")
    assert result._repr_json_() == [1]
