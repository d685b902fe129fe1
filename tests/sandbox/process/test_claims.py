"""Whatever is claimed, its reader reads the same; and it is never too much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import Shown
from ringfence.core.sessions import Failure
from ringfence.sandbox.process.guest import claims as claiming
from ringfence.sandbox.process.untrusted_reply import Claims
from tests.sandbox.process.celling import Interpreter

long = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=20), st.integers(1, 9_000))
forms = st.dictionaries(
    st.sampled_from(["text/plain", "text/html", "a/b", "x/" + "y" * 90]), long | st.text(), min_size=1
)


def read(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@given(forms, st.booleans())
def test_a_result_is_read_as_it_was_said(said: dict[str, str], main: bool) -> None:
    claims = Claims(3)
    found: list[Shown | Failure] = []
    for message in claiming.messages(f'{{"t":"result","id":3,"main":{"true" if main else "false"}', said, {"a/c": 5}):
        assert len(message) <= 60_000
        found += claims.feed(message)
    expected = Shown({mime: read(text) for mime, text in said.items()}, main, {"a/c": 5})
    assert (claims.broken, claims.results, found) == (None, [expected], [expected])


@given(long, long)
def test_an_error_is_read_as_it_was_said(value: str, traceback: str) -> None:
    claims = Claims(1)
    for message in claiming.messages('{"t":"error","id":1', {"name": "E", "value": value, "traceback": traceback}):
        claims.feed(message)
    assert claims.error == Failure("E", read(value), read(traceback))


@given(forms, st.integers(-10_000, 300_000))
def test_what_fits_costs_no_more_than_there_is(said: dict[str, str], most: int) -> None:
    fit, cut = claiming.fitting(said, most)
    size = sum(len(text.encode("utf-8", "backslashreplace")) for text in fit.values())
    assert size <= max(most, 0)
    assert set(fit) | set(cut) == set(said)
    assert all(fit[mime] == said[mime] for mime in fit if mime not in cut)
    assert set(fit) & set(cut) <= {"text/plain"}
    assert "[cut: " in fit.get("text/plain", "[cut: ") or "text/plain" not in cut


def test_a_long_value_is_cut_and_says_so() -> None:
    with Interpreter() as run:
        outcome = run("'x' * 10_000_000")
        (result,) = outcome.results
        assert result.cut == {"text/plain": 10_000_002}
        assert result.data["text/plain"].endswith("of 10,000,002 characters are shown]")
        assert 8_000_000 < len(result.data["text/plain"]) < 8_400_000
        assert max(outcome.messages) <= 60_000
        assert run("'é' * 300_000").text == repr("é" * 300_000)


def test_an_image_that_is_too_long_is_left_out_and_its_text_is_not() -> None:
    with Interpreter() as run:
        (result,) = run("class Big:\n    def _repr_png_(self): return bytes(8_000_000)\nBig()").results
        assert (list(result.data), list(result.cut)) == (["text/plain"], ["image/png"])


def test_results_beyond_the_room_are_counted() -> None:
    with Interpreter() as run:
        outcome = run("for n in range(30_000): display(n)\n'last'")
        assert outcome.ok
        assert len(outcome.results) + outcome.claims.left_out == 30_001
        assert 5_000 < len(outcome.results) < 15_000
        assert run("1").text == "1"


@pytest.mark.parametrize("text", ["\\ud800", "\\x00", "\\U0001f600", "\\u2028\\n\\r"])
def test_any_text_comes_through(text: str) -> None:
    with Interpreter() as run:
        for times in (1, 3_000, 100_000):
            cell = f"class Odd:\n    def __repr__(self): return '{text}' * {times}\nOdd()"
            assert run(cell).text == read(eval(f"'{text}'") * times)
        assert run(f"raise ValueError('{text}' * 70_000)").error.name == "ValueError"
