"""What tests of workspaces and boxes begin with."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ringfence.core.box import Limits
from ringfence.core.box_files import BoxFiles
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.guests.files import GuestFiles, GuestPlaces
from ringfence.sandbox.guests.files_call import WayToFiles
from ringfence.sandbox.guests.link import Link
from ringfence.sandbox.process.backend import ProcessBackend
from tests.sandbox.guests.agents import agent_elsewhere


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def guest() -> Iterator[tuple[Link, asyncio.AbstractEventLoop]]:
    """An agent without a box of its own."""
    with agent_elsewhere() as served:
        yield served


@pytest.fixture
def space(work: Path, request: pytest.FixtureRequest) -> Iterator[BoxFiles]:
    """The files of a folder: by a descriptor, or, where a test asks for it, as those of a guest."""
    if getattr(request, "param", "") == "guest":
        link, loop = request.getfixturevalue("guest")
        yield GuestFiles(WayToFiles(link, loop, str(work), beneath=True), GuestPlaces(Limits()))
        return
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    yield Workspace(descriptor, None)
    os.close(descriptor)


@pytest.fixture
async def backend() -> AsyncIterator[ProcessBackend]:
    """One that keeps no boxes ready."""
    made = ProcessBackend(depth=0)
    yield made
    await made.close()
