"""How far long work is: on a terminal a line that changes, elsewhere nothing."""

from __future__ import annotations

import io
import sys

import pytest

from ringfence.cli import progress
from ringfence.cli.progress import ProgressLine
from tests import tooling


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_what_how_far_and_how_long() -> None:
    line = ProgressLine("fetching")
    assert line.line() == "fetching … 0 s"
    line.step(3)
    assert line.line() == "fetching … 3, 0 s"
    line.total = 4
    assert line.line() == "fetching  [###############.....] 3/4, 0 s"
    sized = ProgressLine("put data", 4 << 20, sizes=True)
    sized.step(1 << 20)
    assert sized.line() == "put data  [#####...............] 1.0 MiB/4.0 MiB, 0 s"


def test_nothing_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("fetching", 3) as line:
        line.step()
        line.say("one came")
    assert capsys.readouterr().err == "one came\n"


def test_what_is_said_meanwhile_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    with progress.progress("fetch\x1b[2J") as line:
        tooling.wait_until(lambda: "fetch" in shown.getvalue())
        line.say("one came")
    assert "\x1b[Kone came\n" in shown.getvalue() and "fetch\x1b[2J" not in shown.getvalue()
    assert shown.getvalue().endswith("\r\x1b[K") or shown.getvalue().endswith("one came\n")
