"""The tutorial on servers, run as it stands: five servers that we did not write, from their registries, in boxes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import boxing
from tests.tooling import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "tutorial-servers.md"
PACKAGES = ROOT / "docs" / "packages.md"
IMAGES = ROOT / "docs" / "images.md"
_BLOCK = re.compile(r"^```(sh|json|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LONGEST = 600


def need_registries() -> None:
    """Whether npm and pip can fetch here at all."""
    boxing.need_boxes()
    for program in ("npm", "git"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here")
    asked = ["npm", "view", "@modelcontextprotocol/server-memory", "version"]
    if subprocess.run(asked, capture_output=True, timeout=300, check=False, cwd="/").returncode:
        pytest.skip("the npm registry cannot be reached here")


def test_the_tutorial_ends_in_a_gateway_that_works(tmp_path: Path) -> None:
    need_registries()
    commands: list[str] = []
    expected = ""
    for kind, text in _BLOCK.findall(PAGE.read_text()):
        if kind == "json":
            (tmp_path / ".mcp.json").write_text(text)
        elif kind == "text":
            expected += text
        else:
            commands.append(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ringfence").write_text(f'#!/bin/sh\nexec {sys.executable} -m ringfence.cli.main "$@"\n')
    (programs / "ringfence").chmod(0o755)
    env = {**os.environ, "HOME": str(tmp_path / "home"), "PATH": f"{programs}:{os.environ['PATH']}"}
    (tmp_path / "home").mkdir()
    taking = re.compile(r"^ringfence init --from .*$", re.MULTILINE)
    steps = taking.sub(lambda found: f"{found[0]} >init.txt 2>&1", "".join(commands))
    ended = subprocess.run(
        ["bash", "-e", "-c", steps],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=_LONGEST,
        check=False,
    )
    said = (tmp_path / "init.txt").read_text() if (tmp_path / "init.txt").exists() else ""
    assert (ended.stdout, ended.returncode) == (expected, 0), ended.stderr + said
    assert '"--stdio"' in said


def example(number: int, then: str, folder: Path) -> str:
    """What an example of the page on packages says."""
    boxing.need_boxes()
    code = re.findall(r"^```python\n(.*?)^```$", PACKAGES.read_text(), re.MULTILINE | re.DOTALL)[number]
    env = {**os.environ, "HOME": str(folder)}
    command = [sys.executable, "-c", f"{code}\n{then}"]
    ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if "could not be fetched" in ended.stderr or "No matching distribution" in ended.stderr:
        pytest.skip("the index of pip cannot be reached here")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_example_of_packages(tmp_path: Path) -> None:
    said = example(0, "print(done.text)", tmp_path)
    assert said.endswith("1.16.0\n\n")
    assert "'name': 'six'" in said


def test_the_example_of_pip_inside_a_box(tmp_path: Path) -> None:
    said = example(1, "", tmp_path)
    assert said.endswith("'iniconfig'\n")
    assert "'name': 'iniconfig'" in said


@pytest.mark.parametrize("page", [PAGE, PACKAGES, IMAGES], ids=lambda page: page.name)
def test_its_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([\w.-]+\.md)(?:#[\w-]+)?\)", page.read_text())
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
