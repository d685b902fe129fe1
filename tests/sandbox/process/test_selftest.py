"""What a box is seen to be before the first program is let into one."""

from __future__ import annotations

import pytest

from ringfence.box import BoxSpec, Limits, Program
from ringfence.sandbox.process import host, selftest
from ringfence.sandbox.process.backend import ProcessBackend

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("without", [(), ("landlock",)], ids=["whole", "without"])
async def test_landlock_is_told_from_all_else_that_refuses(without: tuple[str, ...]) -> None:
    """What is asked for is refused by Landlock alone, on every kernel: newer ones let anybody make empty devices."""
    if missing := host.Host.detect().missing:
        pytest.skip(f"no box can be made here: {dict(missing)}")
    backend = ProcessBackend(without=without, depth=0)
    try:
        report = await backend.run(BoxSpec(Program("python", source=selftest.PROGRAM)))
    finally:
        await backend.close()
    found = selftest.judge(report.stdout.head, Limits())
    assert found["landlock"] is not bool(without)
    assert [name for name, on in found.items() if not on] == list(without)
