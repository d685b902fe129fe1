"""What is promised of a fresh box holds for the box of an MCP server, which has folders of the host besides."""

from __future__ import annotations

import pytest

from ringfence.promises import CATALOGUE, Options, run
from ringfence.promises.inserver import NOT_THERE, InServer
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host import Host

pytestmark = pytest.mark.anyio


async def test_every_promise_is_kept_by_the_box_of_a_server() -> None:
    missing = Host.detect().missing
    if missing:
        pytest.skip(f"no box can be made here: {dict(missing)}")
    backend = InServer(ProcessBackend(depth=0))
    cases = tuple(case for case in CATALOGUE if case.id not in NOT_THERE)
    try:
        report = await run(backend, Options(cases=cases, controls=False))
        broken = {result.case.id: result.got for result in report.results if result.kept is False}
    finally:
        await backend.close()
    assert broken == {}
    assert len(report.results) > 240


def test_what_is_left_out_exists() -> None:
    assert NOT_THERE.keys() <= {case.id for case in CATALOGUE}
