"""What tests of workspaces and boxes begin with."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.process.backend import ProcessBackend


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


@pytest.fixture
async def backend() -> AsyncIterator[ProcessBackend]:
    """One that keeps no boxes ready."""
    made = ProcessBackend(depth=0)
    yield made
    await made.close()
