"""Boxes that are sandboxes of runsc: the cases of containers, as far as they are the same, and what differs."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, BoxSpec, Limits, Mount, Program
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.sandbox.guests.gvisor import GvisorEngine
from tests.sandbox.guests import test_oci as containers
from tests.sandbox.guests.test_oci import SUPERVISOR, command, run, sleeping

pytestmark = pytest.mark.anyio
OTHERWISE = (
    "test_the_facts_say_what_protects_it_and_that_it_was_looked_at",
    "test_no_more_processes_than_allowed",
    "test_refused_calls_are_counted",
    "test_what_it_cannot_give_is_refused",
    "test_an_engine_that_is_not_there_is_named_with_the_remedy",
    "test_nothing_is_left_of_one_that_was_cancelled",
    "test_nothing_is_left_of_a_supervisor_that_was_killed",
)
"""Cases of containers that are other ones here, below, or are about folders of the host that programs write to."""
for name, case in vars(containers).items():
    if name.startswith("test_") and name not in OTHERWISE and "writable" not in name:
        globals()[name] = case


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
async def backend(state: Path) -> AsyncIterator[Backend]:
    made = make_backend(SandboxSettings(backend="gvisor"), state)
    try:
        await made.run(BoxSpec(Program("command", argv=("true",))))
    except Unavailable as exc:
        await made.close()
        pytest.skip(str(exc))
    yield made
    await made.close()
