"""The tutorial for platform teams, run as it stands: a gateway, a person at a terminal, and an auditor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests import boxing, tooling
from tests.cli.terminals import at_terminal

pytestmark = pytest.mark.slow

PAGE = tooling.ROOT / "docs" / "tutorial-platform.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w.]+)\n")
_SERVE, _ANSWER = "ringfence serve\n", "ringfence approvals approve last\n"


def as_shown(expected: str, said: str) -> bool:
    """Whether it is what the page shows; `…` stands for anything within a line, and blanks count as one."""
    pattern = re.escape(re.sub(r"(?<=\S) +", " ", expected)).replace("…", r"[^\n]+")
    return re.fullmatch(pattern, re.sub(r"(?<=\S) +", " ", said)) is not None


def test_the_tutorial_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxing.need_boxes()
    home, programs, work = (tmp_path / name for name in ("home", "bin", "work"))
    for folder in (home, programs, work):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    (programs / "ringfence").write_text(f'#!/bin/sh\nexec {sys.executable} -m ringfence.cli.main "$@"\n')
    (programs / "ringfence").chmod(0o755)
    port = tooling.free_port()
    blocks = _BLOCK.findall(PAGE.read_text().replace("127.0.0.1:8700", f"127.0.0.1:{port}"))
    at = next(number for number, (_, text) in enumerate(blocks) if text == _SERVE)
    follow(blocks[:at], work)
    with tooling.start_process(["ringfence", "serve"], cwd=work) as serving:
        serving.wait_for("Paste into")
        follow(blocks[at + 1 :], work)
        assert "ringfence approvals approve apr_" in serving.output()


def follow(blocks: list[tuple[str, str]], work: Path) -> None:
    """Do what the blocks say, in their order, and look at what comes out."""
    said, changed, line = "", False, ""
    for kind, text in blocks:
        if name := _FILE.match(text):
            (work / name[1]).write_text(text)
            changed = True
        elif text == _ANSWER:
            with at_terminal(*text.split()[1:], cwd=work) as terminal:
                terminal.expect("[y/N]")
                terminal.type("y\n")
                assert terminal.end() == 0, terminal.shown
        elif kind == "sh":
            line, said = text, shell(text, work)
        elif changed:  # a gateway that runs notices in its own time
            tooling.wait_until(partial(shows, line, text, work))
            changed = False
        else:
            assert as_shown(text, said), said


def shows(line: str, expected: str, work: Path) -> bool:
    return as_shown(expected, shell(line, work))


def shell(line: str, work: Path) -> str:
    ended = subprocess.run(
        ["bash", "-e", "-c", line], cwd=work, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
