"""What the documentation shows is what happens: its blocks are run, in order, and print what stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import boxing
from tests.sandbox.staying import NAMES
from tests.tooling import ROOT

PAGES = ("tutorial-sessions.md", "e2b.md", "sessions.md")
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> tuple[str, str]:
    """All the code of a page, and all that it says is printed."""
    found = _BLOCK.findall((ROOT / "docs" / page).read_text())
    return tuple("".join(text for kind, text in found if kind == wanted) for wanted in ("python", "text"))  # type: ignore[return-value]


def run(words: list[str], env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=500, check=False)


def need_backend(env: dict[str, str], folder: Path) -> None:
    """Skip with the backend's own reason where it makes no boxes here."""
    tried = run(["-m", "ringfence.cli.main", "run", "-c", "pass"], env, folder)
    if tried.returncode == 125:
        pytest.skip(tried.stderr.strip().rpartition("\n")[2])


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("backend", NAMES)
def test_the_blocks_of_a_page_print_what_stands_under_them(page: str, backend: str, tmp_path: Path) -> None:
    boxing.need_boxes()
    code, expected = blocks(page)
    config = tmp_path / "ringfence.yaml"
    config.write_text(f"version: 1\nsandbox: {{backend: {backend}}}\n")
    env = {**os.environ, "HOME": str(tmp_path), "RINGFENCE_CONFIG": str(config)}
    need_backend(env, tmp_path)
    ended = run(["-c", code], env, tmp_path)
    assert (ended.stdout, ended.returncode) == (expected, 0), ended.stderr


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([\w.-]+\.md)(?:#[\w-]+)?\)", (ROOT / "docs" / page).read_text())
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
