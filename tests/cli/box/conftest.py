"""A home of each file's own, as for all verbs, and a box in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import boxing, gateways


@pytest.fixture(scope="module")
def box(own_home: Path) -> Iterator[str]:
    """The id of a box that is there while the tests of a file run."""
    boxing.need_boxes()
    made = gateways.run("box", "create", "--metadata", "of=tests")
    assert made.returncode == 0, made.stderr
    yield made.stdout.strip()
    gateways.run("box", "rm", "--all")
