"""What is promised of a fresh box holds for later steps of a session, whatever earlier ones left there."""

from __future__ import annotations

import pytest

from ringfence.promises import CATALOGUE
from ringfence.promises.insession import NOT_THERE, InSession
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.diagnosis import diagnose_refusals
from tests.promises.keeping import kept

pytestmark = pytest.mark.anyio


async def test_every_promise_is_kept_after_a_hostile_step() -> None:
    missing = diagnose_refusals().missing
    if missing:
        pytest.skip(f"no box can be made here: {missing}")
    backend = InSession(ProcessBackend(depth=0))
    assert await kept(backend, NOT_THERE) > 240


def test_what_is_left_out_exists() -> None:
    assert NOT_THERE.keys() <= {case.id for case in CATALOGUE}
