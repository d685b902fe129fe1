"""Every promise is kept on this host, by the backend that boxes are made by unless somebody says otherwise."""

from __future__ import annotations

import pytest

from ringfence.compose.runs import make_executor
from ringfence.config.settings import SandboxSettings
from ringfence.core.errors import Unavailable
from ringfence.doctor import Options, run

pytestmark = pytest.mark.anyio


async def test_the_process_backend_keeps_every_promise() -> None:
    try:
        backend = make_executor(SandboxSettings()).backend
    except Unavailable as exc:
        pytest.skip(f"no box can be made here: {exc}")
    options = Options()
    try:
        report = await run(backend, options)
    finally:
        await backend.close()
    broken = {result.case.id: (result.got, result.control) for result in report.results if result.kept is False}
    assert broken == {}
    assert report.kept >= 120
