"""What tests of workspaces begin with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.sandbox.workspace import Workspace


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def space(work: Path) -> Iterator[Workspace]:
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    yield Workspace(descriptor, None)
    os.close(descriptor)
