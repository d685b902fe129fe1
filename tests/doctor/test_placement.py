"""What is promised of a fresh box holds for later steps of a session, and for the box of an MCP server."""

from __future__ import annotations

import pytest

from ringfence.doctor import CATALOGUE
from ringfence.doctor.placement import NOT_IN_SERVER, NOT_IN_SESSION, InServer, InSession
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host.diagnosis import diagnose_refusals
from tests.boxing import need_boxes
from tests.doctor.keeping import kept

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_every_promise_is_kept_after_a_hostile_step() -> None:
    missing = diagnose_refusals().missing
    if missing:
        pytest.skip(f"no box can be made here: {missing}")
    backend = InSession(ProcessBackend(depth=0))
    assert await kept(backend, NOT_IN_SESSION) > 240


async def test_every_promise_is_kept_by_the_box_of_a_server() -> None:
    need_boxes()
    backend = InServer(ProcessBackend(depth=0))
    assert await kept(backend, NOT_IN_SERVER) > 240


def test_what_is_left_out_exists() -> None:
    known = {case.id for case in CATALOGUE}
    assert NOT_IN_SESSION.keys() <= known and NOT_IN_SERVER.keys() <= known
