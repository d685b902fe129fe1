"""The suites that agent frameworks have for providers of sandboxes, run against ours through thin adapters.

Each runs in a Python of its own, where its framework is installed. What fails is named here with its reason; anything
else that fails, and anything named that does not, fails the test.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import boxing, tooling

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

_GLOB = "the suite expects paths relative to the folder; deepagents 0.7 gives absolute ones, and no folders"
OLDER_THAN_DEEPAGENTS = {
    "test_glob": _GLOB,
    "test_glob_basic_pattern": _GLOB,
    "test_glob_hidden_files_explicitly": _GLOB,
    "test_glob_with_character_class": _GLOB,
    "test_glob_with_directories": _GLOB,
    "test_glob_with_question_mark": _GLOB,
    "test_write_existing_file_fails": "the suite expects a refusal; deepagents 0.7 writes anew",
}
OF_INSPECT = {"test_exec_as_user": "a box has one user"}


def outcomes(folder: Path, *words: str) -> dict[str, dict[str, str]]:
    """What became of each test, by its class: nothing if it passed, or what it said."""
    boxing.need_boxes()
    report = folder / "report.xml"
    plain = ("-q", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", f"--rootdir={HERE}")
    command = [str(tooling.suites()), "-m", "pytest", *plain, f"--junit-xml={report}", *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
    assert report.exists(), ended.stdout + ended.stderr
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        said = "" if bad is None else f"{bad.tag}: {bad.attrib.get('message')}\n{bad.text}"
        found.setdefault(case.attrib["classname"].rpartition(".")[2], {})[case.attrib["name"]] = said
    return found


def unexpected(found: Mapping[str, str], known: Mapping[str, str]) -> str:
    """What failed and is not known to, and what is known to fail and did not."""
    told = [f"{name}\n{said}" for name, said in found.items() if said and name not in known]
    told += [f"{name} does not fail any more ({why})" for name, why in known.items() if not found.get(name)]
    return "\n\n".join(told)


def test_the_sandbox_suite_of_langchain(tmp_path: Path) -> None:
    module = HERE / "deepagents_sandbox.py"
    plain = [f"{module}::TestPlain::{name}" for name in OLDER_THAN_DEEPAGENTS]
    found = outcomes(tmp_path, "-o", "asyncio_mode=auto", f"{module}::TestRingfence", *plain)
    assert not unexpected(found["TestRingfence"], OLDER_THAN_DEEPAGENTS)
    assert len(found["TestRingfence"]) == 86
    assert not unexpected(found["TestPlain"], OLDER_THAN_DEEPAGENTS), "without any sandbox the same fail"


def test_the_workspace_suite_of_pydantic_ai(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "-p", "no:asyncio", f"{HERE}/pydantic_workspace.py")
    assert not unexpected(found["TestRingfence"], {})
    assert len(found["TestRingfence"]) == 38


def test_the_self_check_of_inspect(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "-o", "asyncio_mode=auto", f"{HERE}/inspect_sandbox.py")
    assert not unexpected(found["inspect_sandbox"], OF_INSPECT)
    assert len(found["inspect_sandbox"]) == 44
