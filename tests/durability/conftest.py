"""What these tests share: one process that forks gateways, and a fresh installation for each test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import tooling
from tests.durability.stage import Stage, Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def stage(tmp_path: Path, zygote: Zygote) -> Iterator[Stage]:
    made = Stage(tmp_path, zygote)
    yield made
    for gateway in made.running:
        if tooling.alive(gateway.pid):
            with suppress(ProcessLookupError):
                os.kill(gateway.pid, signal.SIGKILL)
            tooling.wait_until_gone(gateway.pid)
