"""A control for the tests that need one; a host that cannot run it says why."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import anyio
import pytest

from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import Unavailable
from ringfence.doctor.control import ControlBackend, ControlLauncher
from ringfence.doctor.stage import Stage

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


@pytest.fixture(scope="module")
def launcher(stage: Stage) -> Iterator[ControlLauncher]:
    made = ControlLauncher()
    try:
        anyio.run(ControlBackend(made).run, BoxSpec(Program("python", b"pass")))
    except Unavailable as exc:
        made.close()
        pytest.skip(f"no control can be run here: {exc}")
    yield made
    made.close()
