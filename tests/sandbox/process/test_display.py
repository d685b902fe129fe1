"""The forms of a value: those that it has of itself, and those of frames and figures."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.sandbox.process.guest.charts import MIME
from tests import tooling
from tests.sandbox.process.celling import Interpreter, needs

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def run() -> Iterator[Interpreter]:
    with Interpreter() as interpreter:
        yield interpreter


def thing(**methods: str) -> str:
    """A cell that ends with a value that has these methods."""
    lines = [f"    def {name}(self, *_, **__): return {value}" for name, value in methods.items()]
    return "\n".join(["class Thing:", "    def __repr__(self): return 'a thing'", *lines, "Thing()"])


# ── The last expression ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("1 + 1", "2"),
        ("x = 1\n'text'", "'text'"),
        ("(1,\n 2)", "(1, 2)"),
        ("x = 1", None),
        ("None", None),
        ("", None),
        ("# nothing", None),
        ("for n in (1, 2): n", None),
        ("def f(): return 1", None),
        ("1; 2", "2"),
        ("1;", None),
        ("(1);  # quiet", None),
        ("'é' ;", None),
        ("';'", "';'"),
        ("'a;b'  # ;", "'a;b'"),
        ("print(end='')", None),
        ("1\r\n2", "2"),
        ("1 ;\r\n", None),
        ("lambda: 1;", None),
        ("int", "<class 'int'>"),
        ("'\\ud800' + chr(0)", r"'\ud800\x00'"),
        ("\ufeff3", "3"),
    ],
)
def test_the_value_of_the_last_expression_is_shown(run: Interpreter, cell: str, text: str | None) -> None:
    outcome = run(cell)
    assert outcome.ok
    assert outcome.text == text


def test_it_is_not_shown_to_whoever_does_not_want_it(run: Interpreter) -> None:
    assert run("made = 5\ndisplay('seen')\nmade", answer=False).text is None
    assert run("made").text == "5"


def test_a_value_without_a_text_is_an_error_of_the_cell(run: Interpreter) -> None:
    error = run("class Bad:\n    def __repr__(self):\n        raise ValueError('no text')\nBad()").error
    assert (error.name, error.value) == ("ValueError", "no text")
    assert "in __repr__" in error.traceback and "display.py" not in error.traceback


def test_a_text_that_takes_forever_can_be_interrupted(fresh: Interpreter) -> None:
    cell = "class Slow:\n    def __repr__(self):\n        print('go')\n        while True: pass\nSlow()"
    assert fresh(cell, fresh.interrupt_when_it_speaks()).error.name == "KeyboardInterrupt"
    assert fresh("1").text == "1"


# ── Forms ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "given", "mime", "text"),
    [
        ("_repr_html_", "'<b>x</b>'", "text/html", "<b>x</b>"),
        ("_repr_markdown_", "'**x**'", "text/markdown", "**x**"),
        ("_repr_latex_", "'$x$'", "text/latex", "$x$"),
        ("_repr_svg_", "b'<svg/>'", "image/svg+xml", "<svg/>"),
        ("_repr_png_", "b'\\x89PNG'", "image/png", "iVBORw=="),
        ("_repr_png_", "'iVBO\\nRw=='", "image/png", "iVBORw=="),
        ("_repr_png_", "(b'\\x89PNG', {'width': 1})", "image/png", "iVBORw=="),
        ("_repr_jpeg_", "b'jpeg'", "image/jpeg", "anBlZw=="),
        ("_repr_json_", "{'a': [1, None]}", "application/json", '{"a": [1, null]}'),
        ("_repr_html_", "('<i>', {})", "text/html", "<i>"),
    ],
)
def test_a_value_gives_its_own_forms(run: Interpreter, method: str, given: str, mime: str, text: str) -> None:
    (result,) = run(thing(**{method: given})).results
    assert result.data == {"text/plain": "a thing", mime: text}


def test_a_bundle_has_the_last_word(run: Interpreter) -> None:
    bundle = (
        "({'text/plain': 'other', 'image/png': b'png', 'application/x+json': {'a': 1}, 'no mime': 'x', 5: 'y'}, {})"
    )
    (result,) = run(thing(_repr_mimebundle_=bundle, _repr_html_="'<i>'")).results
    assert result.data == {
        "text/plain": "other",
        "text/html": "<i>",
        "image/png": "cG5n",
        "application/x+json": '{"a": 1}',
    }


@pytest.mark.parametrize("bad", ["1 / 0", "object()", "3j"])
def test_a_form_that_fails_is_left_out_and_said_so(run: Interpreter, bad: str) -> None:
    outcome = run(thing(_repr_html_=bad, _repr_markdown_="'fine'"))
    assert outcome.results[0].data == {"text/plain": "a thing", "text/markdown": "fine"}
    assert outcome.stderr.startswith("_repr_html_ failed: ")


@pytest.mark.parametrize("bad", ["'no base64!'", "object()"])
def test_an_image_that_is_none_is_left_out(run: Interpreter, bad: str) -> None:
    outcome = run(thing(_repr_png_=bad))
    assert outcome.results[0].data == {"text/plain": "a thing"}
    assert "_repr_png_ failed" in outcome.stderr


def test_none_and_what_is_not_implemented_are_no_forms(run: Interpreter) -> None:
    cell = thing(_repr_html_="None", _repr_mimebundle_="None").replace("return None", "raise NotImplementedError", 1)
    outcome = run(cell)
    assert (outcome.results[0].data, outcome.stderr) == ({"text/plain": "a thing"}, "")


def test_what_answers_to_every_name_has_a_text_alone(run: Interpreter) -> None:
    outcome = run("import unittest.mock\nunittest.mock.Mock(spec=None)")
    assert list(outcome.results[0].data) == ["text/plain"]
    assert list(run(thing(_repr_html_="'x'")[: -len("()")]).results[0].data) == ["text/plain"]  # a class


@pytest.mark.parametrize("value", ["{'a': [1, 2.5, None, True, 'é']}", "[]", "[{'deep': [[[]]]}]"])
def test_plain_data_is_json_too(run: Interpreter, value: str) -> None:
    (result,) = run(value).results
    assert json.loads(result.data["application/json"]) == eval(value)


@pytest.mark.parametrize(
    "value", ["(1, 2)", "{1: 2}", "[(1,)]", "[float('nan')]", "{'a': {1, 2}}", "(lambda x: x.append(x) or x)([])", "5"]
)
def test_what_json_would_change_is_no_json(run: Interpreter, value: str) -> None:
    assert list(run(value).results[0].data) == ["text/plain"]


def test_a_file_of_the_users_does_not_stand_in_for_what_we_need(fresh: Interpreter, tmp_path: Path) -> None:
    for name in ("json", "traceback", "binascii", "linecache", "asyncio", "tokenize"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    assert list(fresh("[1]").results[0].data) == ["text/plain", "application/json"]
    assert "1 / 0" in fresh("1 / 0").error.traceback
    assert fresh("async def f(): return 1\nawait f()").text == "1"


# ── display ───────────────────────────────────────────────────────────────────────────────────────


def test_display_shows_values_in_their_order(run: Interpreter) -> None:
    outcome = run("for n in range(3):\n    display(n, str(n))\n'last'")
    assert [result.data["text/plain"] for result in outcome.results] == ["0", "'0'", "1", "'1'", "2", "'2'", "'last'"]
    assert [result.main for result in outcome.results] == [False] * 6 + [True]


def test_display_takes_forms_as_they_are(run: Interpreter) -> None:
    (result,) = run("display({'text/html': '<b>', 'image/png': b'png'}, raw=True)").results
    assert result.data == {"text/html": "<b>", "image/png": "cG5n"}
    assert run("display({}, raw=True)").results == []


def test_modules_can_display(fresh: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def tell():\n    display('from a module')")
    assert len(fresh("import helper\nhelper.tell()").results) == 1


def test_threads_display_in_the_cell_that_runs(fresh: Interpreter, tmp_path: Path) -> None:
    fresh("import threading\nwords = ['x' * 100_000] * 20")
    cell = "threads = [threading.Thread(target=display, args=words) for _ in range(4)]\n"
    cell += "for thread in threads: thread.start()\nfor thread in threads: thread.join()"
    assert len(fresh(cell).results) == 80
    late = "import os, time\ndef late():\n    while not os.path.exists('over'): time.sleep(0.01)\n"
    late += "    display('late')\n    os.mkdir('shown')\n"
    fresh(late + "threading.Thread(target=late).start()")
    (tmp_path / "over").touch()
    tooling.wait_until((tmp_path / "shown").exists)
    assert len(fresh("5").results) == 1


# ── Frames and figures ────────────────────────────────────────────────────────────────────────────


@needs("pandas")
def test_a_frame_is_a_table(fresh: Interpreter) -> None:
    (result,) = fresh("import pandas\npandas.DataFrame({'a': [1, 2]})").results
    assert "<table" in result.data["text/html"] and "a" in result.data["text/plain"]


def test_open_figures_are_results_and_are_closed(plotting: Interpreter) -> None:
    outcome = plotting("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nplt.plot([3]);")
    assert [set(result.data) for result in outcome.results] == [{"text/plain", "image/png", MIME}] * 2
    assert base64.b64decode(outcome.results[0].data["image/png"]).startswith(SIGNATURE)
    assert plotting("plt.get_fignums()").text == "[]"
    assert plotting("plt.get_backend().lower()").text == "'agg'"


def test_a_shown_figure_is_a_result_of_its_own(plotting: Interpreter) -> None:
    plotting("from matplotlib import pyplot as plt")
    outcome = plotting("plt.plot([1, 2])\nplt.show()\nplt.plot([2, 1])\nplt.show()")
    pictures = [result.data["image/png"] for result in outcome.results]
    assert len(pictures) == 2 and pictures[0] != pictures[1]
    assert outcome.stderr == ""


def test_a_figure_that_is_the_value_or_was_displayed_is_shown_once(plotting: Interpreter) -> None:
    plotting("import matplotlib.pyplot as plt")
    (result,) = plotting("figure, axes = plt.subplots()\naxes.plot([1, 2])\nfigure").results
    assert result.main and "image/png" in result.data
    assert len(plotting("figure, axes = plt.subplots()\ndisplay(figure)\naxes.plot([1, 2]);").results) == 1
    assert "image/png" in plotting("figure").results[0].data


def test_figures_are_drawn_as_asked(plotting: Interpreter) -> None:
    (result,) = plotting("import matplotlib.pyplot as plt\nplt.plot([1]);", figures=["png", "svg"]).results
    assert set(result.data) == {"text/plain", "image/png", "image/svg+xml", MIME}
    assert "<svg" in result.data["image/svg+xml"]


def test_figures_of_a_cell_that_failed_are_not_left_to_the_next(plotting: Interpreter) -> None:
    outcome = plotting("import matplotlib.pyplot as plt\nplt.plot([1])\n1 / 0")
    assert outcome.error.name == "ZeroDivisionError"
    assert "image/png" in outcome.results[0].data
    assert plotting("1").text == "1"


def test_a_figure_that_cannot_be_drawn_is_an_error_once(plotting: Interpreter) -> None:
    assert plotting("import matplotlib.pyplot as plt\nplt.title('$\\\\frac{$');").error.name == "ValueError"
    assert plotting("1").text == "1"
