"""A control for the tests that need one; a host that cannot run it says why."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import anyio
import pytest

from ringfence.box import BoxSpec, Program
from ringfence.errors import Unavailable
from ringfence.promises.control import ControlBackend, Launcher
from ringfence.promises.stage import Stage

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


@pytest.fixture(scope="module")
def launcher(stage: Stage) -> Iterator[Launcher]:
    made = Launcher()
    try:
        anyio.run(ControlBackend(made).run, BoxSpec(Program("python", b"pass")))
    except Unavailable as exc:
        made.close()
        pytest.skip(f"no control can be run here: {exc}")
    yield made
    made.close()
