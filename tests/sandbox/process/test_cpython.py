"""CPython's own tests end in a box as they do outside of it, but for what a promise of the box explains."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ringfence.core.box import MIB, BoxSpec, Limits, Program
from ringfence.sandbox.process.backend import ProcessBackend
from tests import tooling
from tests.sandbox import comparing
from tests.sandbox.process import cpython, cpython_driver

pytestmark = pytest.mark.anyio

MODULES = cpython.MODULES if os.environ.get("RINGFENCE_FULL") else cpython.HANDFUL
LIMITS = Limits(
    wall_seconds=900,
    memory_bytes=1024 * MIB,
    disk_bytes=2048 * MIB,
    processes=512,
    cpu_cores=float(os.cpu_count() or 1),
)
DRIVER = Path(cpython_driver.__file__).read_bytes()
DOCUMENT = tooling.ROOT / "docs" / "compatibility.md"

Outcomes = dict[str, tuple[str, str]]


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened(BoxSpec(Program("python"), LIMITS)):
        yield made


def outcomes(results: Path) -> Outcomes:
    """The last word on every test."""
    lines = results.read_text("utf-8", "replace").splitlines() if results.exists() else []
    words = (line.split("\t") for line in lines)
    return {each[0]: (each[1], each[2]) for each in words if len(each) == 3}


def bare(module: str) -> Outcomes:
    place = os.path.realpath(tempfile.mkdtemp(prefix="bare-"))
    try:
        comparing.furnish(place, DRIVER)
        command = [*comparing.ORDINARY, comparing.PYTHON, f"{place}/prog.py", module]
        with subprocess.Popen(
            command,
            cwd=place,
            env=comparing.environment(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                process.wait(LIMITS.wall_seconds)
            finally:
                process.kill()
        return outcomes(Path(place, "output/results"))
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def boxed(backend: ProcessBackend, module: str) -> Outcomes:
    with tempfile.TemporaryDirectory() as output:
        program = Program("python", DRIVER, (module,), "/workspace/prog.py")
        report = await backend.run(BoxSpec(program, LIMITS, output=Path(output)))
        assert report.ended == "exited", report
        return outcomes(Path(output, "results"))


def explained(module: str, test: str) -> bool:
    patterns = cpython.DIFFERENCES.get(module.partition(".")[0], {})
    _, _, name = test.removeprefix("test.").partition(".")
    return any(fnmatchcase(name, pattern) for pattern in patterns)


async def differences(backend: ProcessBackend, module: str) -> dict[str, list[tuple[str, str]]]:
    """Tests that end worse, or not as well, in a box, and that nothing explains."""
    without, within = await asyncio.gather(asyncio.to_thread(bare, module), boxed(backend, module))
    assert "the end" in without, f"{module} does not even run bare"
    assert "the end" in within
    none = ("absent", "")
    pairs = {test: [without.get(test, none), within.get(test, none)] for test in {*without, *within}}
    return {
        test: pair
        for test, pair in pairs.items()
        if pair[0][0] != pair[1][0] and pair[1][0] != "ok" and not explained(module, test)
    }


@pytest.mark.parametrize("module", MODULES)
async def test_a_module_of_cpythons_tests_ends_the_same(backend: ProcessBackend, module: str) -> None:
    if importlib.util.find_spec(f"test.{module.partition('.')[0]}") is None:
        pytest.skip(f"test.{module} is not installed (Debian: libpython3-testsuite), or this Python has none")
    found = await differences(backend, module)
    if found:
        again = await differences(backend, module)  # some depend on how busy the machine is
        found = {test: pair for test, pair in found.items() if test in again}
    assert found == {}


def test_every_difference_is_explained_by_a_promise() -> None:
    headings = [line.removeprefix("### ") for line in DOCUMENT.read_text().splitlines() if line.startswith("### ")]
    used = {promise for tests in cpython.DIFFERENCES.values() for promise in tests.values()}
    assert used == set(cpython.PROMISES)
    assert used <= set(headings)


def test_enough_modules_are_run() -> None:
    assert len(cpython.MODULES) == len(set(cpython.MODULES)) >= 60
    assert {module.partition(".")[0] for module in cpython.HANDFUL} <= set(cpython.MODULES)
    assert set(cpython.DIFFERENCES) <= set(cpython.MODULES)
