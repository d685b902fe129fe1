"""The supervisor's end of a box: whatever becomes of what it is told, the box can be ended."""

from __future__ import annotations

import asyncio
import os
import resource

import pytest

from ringfence.box import BoxSpec, Limits, Program
from ringfence.errors import Unavailable
from ringfence.sandbox.process import box as boxes
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.zygotes import Zygote
from tests import tooling
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio


def spec(source: str, **limits: float) -> BoxSpec:
    return BoxSpec(Program("python", source.encode()), Limits(**limits))  # type: ignore[arg-type]


async def zygote_of(backend: ProcessBackend) -> Zygote:
    await backend.run(spec("pass"))
    assert backend._pool is not None
    return next(zygote for zygotes in backend._pool._zygotes.values() for zygote in zygotes)


@pytest.mark.parametrize("room", [0, 1, 2])
async def test_a_box_whose_descriptors_got_lost_is_not_used(
    room: int, backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops what a process has no place for. A box that cannot be ended is none."""
    zygote = await zygote_of(backend)
    hear = Box._hear

    def crowded(self: Box) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(map(int, os.listdir("/proc/self/fd"))) + 1
        held: list[int] = []
        while (descriptor := os.dup(0)) < top:
            held.append(descriptor)
        os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + room, before[1]))
        try:
            hear(self)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in held:
                os.close(descriptor)

    monkeypatch.setattr(Box, "_hear", crowded)
    with pytest.raises(Unavailable, match="descriptors were lost"):
        await zygote.spawn(Limits(), backend._shape(Limits()))
    monkeypatch.setattr(Box, "_hear", hear)
    await tooling.until(lambda: not looking.boxed(zygote.pid) and zygote.live == 0)
    report = await backend.run(spec("import time\ntime.sleep(600)", wall_seconds=0.3))
    assert (report.ended, zygote.alive) == ("timeout", True)


async def test_a_box_that_is_late_is_ended(backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it never said how: its zygote knows."""
    zygote = await zygote_of(backend)
    free = len(zygote._free)
    monkeypatch.setattr(boxes, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(Box, "_hear", lambda self: None)
    shape = backend._shape(Limits())
    for _ in range(3):
        with pytest.raises(Unavailable, match="not ready in time"):
            await zygote.spawn(Limits(), shape)
    await tooling.until(lambda: not looking.boxed(zygote.pid) and len(zygote._free) == free)


async def test_a_box_that_nobody_waits_for_any_more_is_ended(backend: ProcessBackend) -> None:
    zygote = await zygote_of(backend)
    free, shape = len(zygote._free), backend._shape(Limits())
    for moment in (0.0, 0.0005, 0.001, 0.002, 0.004) * 4:
        making = asyncio.create_task(zygote.spawn(Limits(), shape))
        await asyncio.sleep(moment)
        making.cancel()
        try:
            box = await making
        except asyncio.CancelledError:
            continue
        box.kill()
        await box.ended
        box.remove()
    await tooling.until(lambda: not looking.boxed(zygote.pid) and len(zygote._free) == free)
