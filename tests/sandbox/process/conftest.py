"""What tests of boxes and of cells begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.core.sessions import StaySpec
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.live import LiveBox
from tests import tooling
from tests.sandbox.process.celling import Interpreter


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Interpreter]:
    with Interpreter(tmp_path) as interpreter:
        yield interpreter


@pytest.fixture
def plotting(fresh: Interpreter) -> Interpreter:
    """One that finds matplotlib."""
    assert fresh(f"import sys\nsys.path.append({str(tooling.charts())!r})").ok
    return fresh


@pytest.fixture
async def box(backend: ProcessBackend) -> LiveBox:
    """One that stays."""
    return await backend.open(StaySpec())
