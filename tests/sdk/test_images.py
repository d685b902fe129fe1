"""Sandboxes whose root is a container image."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ringfence.core import errors
from ringfence.sdk.blocking import Sandbox
from tests.rooting import system_root, variant


@pytest.fixture(scope="module")
def root(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return system_root(tmp_path_factory.mktemp("system") / "root")


@pytest.mark.parametrize("backend", ["process", "oci"])
def test_cells_run_with_the_interpreter_of_the_image_and_keep_their_state(root: Path, backend: str) -> None:
    try:
        sandbox = Sandbox.create(image=str(root), envs={"MINE": "yes"}, backend=backend)
    except errors.Unavailable as refused:
        if backend == "process" or refused.reason_code != "no_backend":
            raise
        pytest.skip(str(refused))
    with sandbox:
        there = sandbox.run_code("import os, sys\nx = 6\n(sys.executable, os.environ['MINE'], os.getcwd())").text
        assert there == "('/usr/bin/python3', 'yes', '/workspace')"
        name = os.path.basename(os.path.realpath(root / "usr/bin/python3"))
        assert sandbox.run_code("print(f'python{sys.version_info[0]}.{sys.version_info[1]}')").logs.stdout == [
            f"{name}\n"
        ]
        done = sandbox.run_code("x * 7")
        assert done.text == "42" and done.facts["isolation"]["root"] == "image"
        assert done.facts["isolation"]["image"]["name"] == f"local/{root.name}"
        failed = sandbox.run_code("def broken():\n    return 1 / 0\nbroken()").error
        assert failed is not None and failed.name == "ZeroDivisionError" and "return 1 / 0" in failed.traceback
        sandbox.files.write("/workspace/a.txt", "written")
        assert sandbox.commands.run("cat a.txt; echo x > /usr/x").stdout == "written"
        assert sandbox.run_code("open('/workspace/a.txt').read(), x").text == "('written', 6)"
        there = sandbox.run_code(f"os.path.exists({sys.base_prefix!r})").text
        assert there == str(not os.path.relpath(sys.base_prefix, "/usr").startswith(".."))


def test_set_up_code_runs_in_it(root: Path) -> None:
    with Sandbox.create(image=str(root), setup="import sys\nready = sys.executable") as sandbox:
        assert sandbox.run_code("ready").text == "'/usr/bin/python3'"


@pytest.mark.parametrize(
    ("has", "why"),
    [
        ("", "has no Python of 3.8 or later; use commands"),
        ("python3.9", "has Python 3.9, and interpreters that keep their state need 3.11 or later; use commands"),
    ],
)
def test_an_image_that_cannot_serve_cells_runs_commands(root: Path, has: str, why: str, tmp_path: Path) -> None:
    other = variant(root, tmp_path / "other")
    real = os.path.realpath(root / "usr/bin/python3")
    for path in (other / "usr/bin").glob("python*"):
        path.unlink()
    if has:
        os.link(real, other / "usr/bin" / has)
        (other / "usr/bin/python3").symlink_to(has)
    with Sandbox.create(image=str(other)) as sandbox:
        with pytest.raises(errors.Unavailable) as refused:
            sandbox.run_code("1")
        assert refused.value.reason_code == "no_interpreter" and why in str(refused.value)
        assert sandbox.commands.run("echo $((6 * 7))").stdout == "42\n"


def test_what_belongs_to_the_host_is_refused_with_an_image(root: Path) -> None:
    with pytest.raises(errors.RingfenceError, match="it cannot have the template data"):
        Sandbox.create(image=str(root), template="data")
    with pytest.raises(errors.Unavailable, match="cannot be read: No such file or directory"):
        Sandbox.create(image=str(root.parent / "nothing"))
