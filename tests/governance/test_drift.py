"""What a person sees of a definition that changed: every line of both, and no more work than a page is worth."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.governance.drift import compared

LINES = st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=12).map("\n".join)


@given(LINES, LINES)
def test_every_line_of_both_is_shown_in_its_order(before: str, after: str) -> None:
    shown = list(compared(before, after))
    assert "\n".join(line for sign, line in shown if sign != "+") == before
    assert "\n".join(line for sign, line in shown if sign != "-") == after


def test_what_stayed_is_not_shown_as_new() -> None:
    before = "\n".join(map(str, range(5000)))
    after = before.replace("\n2500\n", "\nnew\n")
    assert [each for each in compared(before, after) if each[0] != " "] == [("-", "2500"), ("+", "new")]


def test_a_server_cannot_have_thousands_of_lines_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Counting(difflib.SequenceMatcher[str]):
        def __init__(self, junk: None, old: list[str], new: list[str], autojunk: bool) -> None:
            asked.append(len(old) * len(new))
            super().__init__(junk, old, new, autojunk)

    monkeypatch.setattr(difflib, "SequenceMatcher", Counting)
    same = "\n".join(["same"] * 1000)
    assert len(list(compared(f"a\n{same}\nb", f"c\n{same}\n{same}\nd"))) == 1002 + 2002
    assert asked == []
    assert len(list(compared("a\nb", "c\nd"))) == 4 and asked == [4]
