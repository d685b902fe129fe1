"""Text that a terminal shows and does not obey."""

from __future__ import annotations

import io
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli import terminal
from ringfence.core import invisible
from ringfence.core.errors import Unavailable

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m‮txt\r\x08\U000e0041"


@given(st.text())
def test_safe_text_is_printable_on_one_line(text: str) -> None:
    shown = terminal.safe(text)
    assert invisible.bare(shown).isprintable()
    assert invisible.without_hidden(shown) == (shown, 0)


@given(st.text())
def test_safe_lines_keep_their_newlines_and_nothing_else(text: str) -> None:
    shown = terminal.safe(text, lines=True)
    assert shown.count("\n") == text.count("\n")
    assert all(c.isprintable() or c in "\n\t" for c in invisible.bare(shown))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain – ä 漢", "plain – ä 漢"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\u202e", "\\u{202e}"),
        ("a\ufe0fb", "a\\u{fe0f}b"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_escapes_say_what_was_there(text: str, shown: str) -> None:
    assert terminal.safe(text) == shown


def test_nobody_can_write_outside_of_the_margin() -> None:
    lines = terminal.quoted(f"first\nApprove this call? [y/N] y\n{HOSTILE}", "  | ").split("\n")
    assert len(lines) == 3 and all(line.startswith("  | ") and line.isprintable() for line in lines)


@pytest.mark.parametrize("letter", ["x", "\u4e2d"])
def test_what_a_terminal_would_wrap_stays_behind_a_margin(letter: str) -> None:
    forged = f"{letter}{' ' * 68}Approve this call as root? [y/N] y"
    shown = terminal.within(f"ours\n{terminal.quoted(forged, '    | ')}\n  short", 72)
    first, *rest, last = shown.split("\n")
    assert (first, last) == ("ours", "  short")
    assert rest[0].startswith("    | ") and all(line.startswith("    : ") for line in rest[1:])
    assert all(len(line) + line.count("\u4e2d") <= 72 for line in rest)
    assert "".join(line[6:] for line in rest) == forged


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n")), st.integers(40, 100))
def test_nothing_is_lost_where_a_line_is_broken(text: str, columns: int) -> None:
    first, *rest = terminal.within(terminal.MARGIN + text, columns).split("\n")
    assert first + "".join(line.removeprefix("    : ") for line in rest) == terminal.MARGIN + text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_json_text_means_the_same_and_is_harmless(value: object) -> None:
    text = terminal.json_text(value)
    assert json.loads(text) == value
    assert all(c.isprintable() or c == "\n" for c in invisible.bare(text))
    assert invisible.without_hidden(text) == (text, 0)


@given(st.text(), st.integers(min_value=4, max_value=50))
def test_cut_text_is_no_longer_than_wanted(text: str, most: int) -> None:
    assert len(terminal.cut(text, most)) <= most


def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_TERMINAL", "/nonexistent/tty")
    with pytest.raises(Unavailable, match="no terminal"):
        terminal.confirm("what", "Well?")


def test_what_was_typed_before_a_question_does_not_answer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    try:
        monkeypatch.setattr(terminal, "_TERMINAL", os.ttyname(theirs))
        os.write(ours, b"y\n")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(terminal.confirm, "what", "Well?")
            shown = b""
            while b"[y/N]" not in shown:
                shown += os.read(ours, 4096)
            os.write(ours, b"n\n")
            assert answer.result(timeout=60) is False
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("at", [float("inf"), float("nan"), -1e300, 1e18])
def test_a_time_that_is_none_is_shown_all_the_same(at: float) -> None:
    assert terminal.moment(at) == "no time"


# ── Colours ──


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.painted("ok", "good", Terminal()) == "\x1b[32mok\x1b[0m"
    assert terminal.painted("ok", "good", io.StringIO()) == "ok"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.painted("ok", "good", Terminal()) == "ok"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert terminal.painted("ok", "good", Terminal()) == "ok"


def test_a_table_is_as_wide_with_colours_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a", "running", "x"), ("bb", "stopped (lifetime)", None)]
    plain = terminal.table(("ID", "STATE", "NAME"), rows)
    monkeypatch.setattr(terminal, "painted", lambda text, kind, file=None: f"\x1b[1m{text}\x1b[0m" if kind else text)
    coloured = terminal.table(("ID", "STATE", "NAME"), rows)
    assert coloured != plain and re.sub(r"\x1b\[\d+m", "", coloured) == plain


# ── Names that others chose ──


@pytest.mark.parametrize("name", ["create_ticket", "ses_1a2b", "file:///docs/a.txt", "desk/echo", "a=b&c#d~e@f,g"])
def test_a_plain_name_stands_as_it_is(name: str) -> None:
    assert terminal.foreign(name) == name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("two words", '"two words"'),
        ("", '""'),
        (" edge ", r'"\x20edge\x20"'),
        ("a   b", r'"a \x20\x20b"'),
        ("a\nb\tc", r'"a\nb\tc"'),
        ("a\u00a0b\u3000c", r'"a\u{a0}b\u{3000}c"'),
        ('say "no"', r'"say \"no\""'),
        ("a\x1b[2Jb\u202e", r'"a\x1b[2Jb\u{202e}"'),
        ("x" * 61, '"' + "x" * 60 + '…" (61 characters)'),
        ("語" * 31, '"' + "語" * 30 + '…" (31 characters)'),
        ("±" * 31, '"' + "±" * 30 + '…" (31 characters)'),
    ],
)
def test_a_name_that_others_chose_cannot_pass_for_a_line_or_a_column_of_ours(name: str, shown: str) -> None:
    assert terminal.foreign(name) == shown


def test_a_cell_of_a_table_cannot_pass_for_two() -> None:
    first, second = terminal.table(None, [("a", "b"), ("x  y", "z")]).splitlines()
    assert (first.split(), second) == (["a", "b"], r"x \x20y  z")


def test_what_a_terminal_may_show_in_two_columns_is_broken_in_time() -> None:
    for wide in ("語", "±"):
        shown = terminal.within(terminal.MARGIN + wide * 60, 80)
        assert all(len(line.lstrip(" |:")) * 2 + 6 <= 80 for line in shown.splitlines()) and shown.count(wide) == 60
