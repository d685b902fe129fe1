"""The package as it is installed: a wheel of this checkout, in an environment that knows nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests import boxing
from tests.tooling import ROOT

pytestmark = pytest.mark.slow

_LONGEST = 600


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that the wheel was installed into."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    made = subprocess.run(build, capture_output=True, text=True, timeout=_LONGEST, check=False, cwd=folder)
    if "No matching distribution" in made.stderr:
        pytest.skip("the index of pip cannot be reached here, and hatchling is needed to build a wheel")
    assert made.returncode == 0, made.stderr
    (wheel,) = folder.glob("ringfence-*.whl")
    venv.create(folder / "env", with_pip=False)
    programs = folder / "env" / "bin"
    # What is required was installed once and is lent, which saves half a minute; Ringfence itself is not.
    (own,) = (folder / "env" / "lib").glob("python*/site-packages")
    (own / "lent.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    install = (
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
        wheel,
    )
    subprocess.run([sys.executable, *map(str, install)], check=True, timeout=_LONGEST, cwd=folder)
    return programs


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A program of that environment, run from a folder of its own."""
    cwd = installed.parent.parent
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(installed / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False, cwd=cwd, env=env)


def test_it_is_the_wheel_that_is_used(installed: Path) -> None:
    found = run(installed, "python", "-c", "import ringfence; print(ringfence.__file__, ringfence.__version__)")
    path, version = found.stdout.split()
    assert Path(path).is_relative_to(installed.parent), found.stdout
    told = run(installed, "ringfence", "--version")
    assert (told.stdout, told.returncode) == (f"ringfence {version}\n", 0), told.stderr


def test_a_program_runs_in_a_box(installed: Path) -> None:
    boxing.need_boxes()
    ran = run(installed, "ringfence", "run", "-c", "print(6 * 7)")
    assert (ran.stdout, ran.returncode) == ("42\n", 0), ran.stderr


def test_a_sandbox_opens_from_python(installed: Path) -> None:
    boxing.need_boxes()
    code = "import ringfence\nwith ringfence.Sandbox.create() as box: print(box.run_code('6 * 7').text)"
    ran = run(installed, "python", "-c", code)
    assert (ran.stdout, ran.returncode) == ("42\n", 0), ran.stderr


def test_the_files_beside_the_modules_are_there(installed: Path) -> None:
    (package,) = (installed.parent / "lib").glob("python*/site-packages/ringfence")
    inside = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    source = ROOT / "src" / "ringfence"
    assert inside == {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
