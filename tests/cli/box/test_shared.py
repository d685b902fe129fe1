"""What is shown of boxes: tables that nothing in them can break, and how far long work is."""

from __future__ import annotations

import io
import re
import sys

import pytest

from ringfence.cli import progress
from ringfence.cli.box import shared
from ringfence.sdk.infos import Progress, SandboxInfo
from tests import tooling


def test_a_table_has_one_line_for_each_whatever_their_words_say() -> None:
    info = SandboxInfo(
        "box_1", "stopped", "python", "2026-01-02T03:04:05.678Z", why="lifetime", metadata={"a": "x\n\x1b[2J"}
    )
    head, line = shared.sandboxes([info]).splitlines()
    assert head.split()[:2] == ["ID", "STATE"]
    assert "stopped (lifetime)" in line and "2026-01-02 03:04:05" in line and "\\x1b" in line


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, None), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (2**50, "1048576.0 GiB")],
)
def test_sizes_are_short(number: int | None, text: str | None) -> None:
    assert shared.size(number) == text


@pytest.mark.anyio
async def test_nobody_is_told_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async with shared.metered("put data") as meter:
        meter(Progress(1, 2))
    assert capsys.readouterr().err == ""


@pytest.mark.anyio
async def test_on_a_terminal_a_line_says_how_far_it_is_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    async with shared.metered("put a\x1b[2Jb") as meter:
        meter(Progress(512, 1024))
        await tooling.until(lambda: "512 B" in shown.getvalue())
    assert re.search(r"put a\\x1b\[2Jb  \[#{10}\.{10}\] 512 B/1\.0 KiB, \d+ s", shown.getvalue())
    assert shown.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "there is no session 'x'; list_sessions, or `ringfence box list`, shows which there are",
            "there is no box 'x'; `ringfence box list` shows which there are",
        ),
        ("there are 3 sessions already", "there are 3 boxes already"),
        ("/workspace/session.txt and `session` and my-session", "/workspace/session.txt and `session` and my-session"),
    ],
)
def test_on_the_command_line_a_session_is_a_box(said: str, shown: str) -> None:
    assert shared.as_boxes(said) == shown
