"""What tests of cells begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.process.celling import Interpreter


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Interpreter]:
    with Interpreter(tmp_path) as interpreter:
        yield interpreter
