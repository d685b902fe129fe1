"""A value that a cell showed: its forms, and what a notebook is given of it."""

from __future__ import annotations

import base64
import html
import re

from hypothesis import given
from hypothesis import strategies as st

from ringfence.sdk.result import Result

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
def test_html_of_a_box_is_shown_in_a_frame_that_runs_nothing(text: str) -> None:
    shown = Result({"text/html": text})._repr_html_()
    found = re.fullmatch(r'<iframe sandbox="" style="[^"]*" srcdoc="([^"<>]*)"></iframe>', shown or "", re.DOTALL)
    assert found is not None and html.unescape(found[1]) == html.unescape(html.escape(text))


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
