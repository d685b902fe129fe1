"""Containers of an ordinary user: the tests of `test_oci` once more, by a user with subordinate ids and control groups
of its own, as systemd gives them to users."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.sandbox.process import subordinate
from tests.tooling import ROOT, wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
_FOLDER = Path(__file__).parent
_SOME = "facts or owners or memory or cannot_give or supervisor"
_WITHOUT = """
import asyncio, sys
from pathlib import Path
from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BoxSpec, Program
backend = make_backend(SandboxSettings(backend="oci"), Path(sys.argv[1]))
asyncio.run(backend.run(BoxSpec(Program("command", argv=("id",)))))
"""


@contextmanager
def groups() -> Iterator[str]:
    """A name for control groups that are removed in the end. Skips where root may make none."""
    name = f"ringfence-tests-{os.getpid()}"
    places = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if " cgroup" in line]
    try:
        for place in places:
            (place / name).mkdir()
            (place / name).rmdir()
    except OSError as problem:
        pytest.skip(f"no control groups can be made here: {problem}")
    try:
        yield name
    finally:
        for place in places:
            for made in sorted((place / name).rglob("*/"), reverse=True):
                wait_until(lambda made=made: _removed(made))  # type: ignore[misc]
            wait_until(lambda place=place: _removed(place / name))  # type: ignore[misc]


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def as_user(folder: Path, *command: str, group: str = "") -> subprocess.CompletedProcess[str]:
    for each in ("newuidmap", "newgidmap", "runc"):
        if not shutil.which(each):
            pytest.skip(f"{each} is not installed")
    options = [f"--groups={group}"] if group else []
    words = [os.path.realpath(sys.executable), "-I", "-S", subordinate.__file__, *options, str(folder), *command]
    # Nobody but us could write down what was covered.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", "COVERED")}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3600, check=False)


def _test_as_user(folder: Path, *more: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_FOLDER / "test_oci.py"), *more]
    with groups() as group:
        done = as_user(folder, *command, group=group)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout


def test_an_ordinary_user_has_containers_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    _test_as_user(tmp_path_factory.mktemp("ordinary"), "-k", f"runc and ({_SOME})")


@pytest.mark.slow
def test_all_that_root_has_an_ordinary_user_has(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not shutil.which("crun"):
        pytest.skip("crun is not installed")
    _test_as_user(tmp_path_factory.mktemp("ordinary"))


def test_without_control_groups_there_is_no_box_and_the_reason_says_so(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("ordinary")
    done = as_user(folder, sys.executable, "-c", _WITHOUT, str(folder / "state"))
    last = done.stderr.strip().splitlines()[-1]
    assert "Unavailable" in last and "limits containers by control groups, and has none here" in last, done.stderr
    assert "`ringfence host` says what to do about it" in last
