"""A zygote goes on whatever becomes of a box in the making."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path

import pytest

from ringfence.core.box import BoxSpec, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import StaySpec
from ringfence.sandbox.process import zygote_handle as zygoting
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.cgroups.cgroup import Group
from ringfence.sandbox.process.pool import BoxPool
from tests import tooling
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio


async def test_a_process_that_comes_too_late_for_its_box_is_nobody_elses_end(backend: ProcessBackend) -> None:
    """A box that just ends has no room for a process; the zygote must not be caught in it."""
    refused = 0
    for _ in range(20):
        live = await backend.open(StaySpec())
        zygote = live._zygote
        late = [zygote.enter(live.box, live._shape, number) for number in range(100, 104)]
        live.box.kill()
        late += [zygote.enter(live.box, live._shape, number) for number in range(104, 108)]
        for member in late:
            try:
                await member.ready
            except Unavailable:
                refused += 1
        await live.end()
        again = await backend.open(StaySpec())
        await again.end()
    assert refused > 0
    assert (await backend.run(BoxSpec(Program("python", b"print('ran')")))).stdout.text == "ran\n"


async def test_a_box_that_could_not_be_made_leaves_no_process(backend: ProcessBackend) -> None:
    await backend.run(BoxSpec(Program("python", b"pass")))
    pool = backend._pool
    assert isinstance(pool, BoxPool)
    zygote = next(zygote for zygotes in pool._zygotes.values() for zygote in zygotes)
    shape = backend._shape(Limits())
    del shape["disk_bytes"]  # so that its steps cannot be put down
    for _ in range(5):
        with pytest.raises(Unavailable, match="disk_bytes"):
            await zygote.spawn(Limits(), shape)
    before = looking.descriptors(zygote.pid)
    for _ in range(20):
        with pytest.raises(Unavailable, match="disk_bytes"):
            await zygote.spawn(Limits(), shape)
    await tooling.until(lambda: not looking.boxed(zygote.pid))
    await tooling.until(lambda: looking.descriptors(zygote.pid) <= before)
    assert (await backend.run(BoxSpec(Program("python", b"print('ran')")))).stdout.text == "ran\n"


async def test_another_zygote_is_started_only_where_boxes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    backend = ProcessBackend(depth=1)
    pass_ = BoxSpec(Program("python", b"pass"))
    try:
        for _ in range(30):
            await backend.run(pass_)
        assert backend._pool is not None
        (zygotes,) = backend._pool._zygotes.values()
        assert len(zygotes) == 1, "one after the other, it keeps up"
        for _ in range(3):
            await asyncio.gather(*(backend.run(pass_) for _ in range(30)))
        await tooling.until(lambda: len(zygotes) >= 2)
    finally:
        await backend.close()


async def test_a_successor_is_there_before_a_zygote_is_worn(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygoting, "RECYCLE_AFTER", 40)
    monkeypatch.setattr(zygoting, "_NOTICE", 30)
    seen: list[list[int]] = []
    for _ in range(60):
        await backend.run(BoxSpec(Program("python", b"pass")))
        assert backend._pool is not None
        (zygotes,) = backend._pool._zygotes.values()
        seen.append([zygote.made for zygote in zygotes])
        # However long it takes to start: it was asked for early enough for any machine.
        await tooling.until(lambda: backend._pool is not None and not backend._pool._starting)
    assert all(len(made) == 2 for made in seen if made[0] >= 38)
    assert max(made for each in seen for made in each) == 40, "it is used to its end"


# ── Orders that do not reach it ──


async def ready(backend: ProcessBackend) -> zygoting.ZygoteHandle:
    await backend.run(BoxSpec(Program("python", b"pass")))
    assert backend._pool is not None
    return next(zygote for zygotes in backend._pool._zygotes.values() for zygote in zygotes)


async def test_a_box_whose_group_cannot_be_entered_is_the_only_one_that_fails(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    zygote = await ready(backend)
    if not backend._counts("pids"):
        pytest.skip("whoever runs this can make no control group; root can, or a user to whom one was delegated")
    free = len(zygote._free)

    def refuse(self: Group) -> list[int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Group, "entrances", refuse)
    before = looking.descriptors()
    for _ in range(3):
        with pytest.raises(Unavailable, match="Too many open files"):
            await zygote.spawn(Limits(), backend._shape(Limits()))
    await tooling.until(lambda: len(zygote._free) == free)
    assert (zygote.live, zygote.alive) == (0, True)
    assert looking.descriptors() <= before
    monkeypatch.undo()
    assert (await backend.run(BoxSpec(Program("python", b"print('ran')")))).stdout.text == "ran\n"


async def test_what_there_is_no_channel_for_takes_nothing(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    zygote = await ready(backend)
    free = len(zygote._free)

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    for _ in range(3):
        with pytest.raises(Unavailable, match="Too many open files"):
            await zygote.spawn(Limits(), backend._shape(Limits()))
    monkeypatch.undo()
    assert len(zygote._free) == free


async def test_many_long_orders_at_once_are_all_carried_out(backend: ProcessBackend) -> None:
    """More than fit between the two at a time."""
    zygote = await ready(backend)
    shape = backend._shape(Limits()) | {"executable": ["/usr"] * 1000}
    reading, writing = os.pipe()
    heard: list[bytes] = []
    program = Program("python", b"import sys\nprint('up', flush=True)\nsys.stdin.read()\nprint('on')", stdin=reading)
    order = BoxSpec(program, Limits(wall_seconds=600))
    running = asyncio.create_task(backend.run(order, lambda _, chunk: heard.append(chunk)))
    await tooling.until(lambda: heard)
    made = await asyncio.gather(*(zygote.spawn(Limits(), shape) for _ in range(40)))
    for box in made:
        box.kill()
        await box.ended
        box.remove()
    os.close(writing)
    os.close(reading)
    assert (await running).stdout.text == "up\non\n"
    assert zygote.alive


async def test_a_zygote_that_cannot_be_started_leaves_nothing(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.run(BoxSpec(Program("python", b"pass")))
    before = looking.descriptors()

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for _ in range(3):
        with pytest.raises(Unavailable, match="no process can be started"):
            await backend.run(BoxSpec(Program("python", b"pass"), tenant="another"))
    assert looking.descriptors() <= before


# ── What it leaves to others ──

WATCHERS = """
import ctypes, sys
held = 0
while ctypes.CDLL(None).inotify_init1(0) >= 0:
    held += 1
print(held, flush=True)
sys.stdin.read()
"""


MAX_WATCHERS = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())


@pytest.mark.skipif(MAX_WATCHERS > 1024, reason="a user has more file watchers here than a few boxes can hold")
async def test_boxes_leave_most_of_the_file_watchers_to_others() -> None:
    backend = ProcessBackend(depth=0)
    reading, writing = os.pipe()
    said: list[bytes] = []
    running: list[asyncio.Task[object]] = []
    program = BoxSpec(Program("python", WATCHERS.encode(), stdin=reading), Limits(open_files=200))
    try:
        for number in range(MAX_WATCHERS // 4 // 8 + 2):  # one after the other, so that one zygote makes them all
            running.append(asyncio.create_task(backend.run(program, lambda _, data: said.append(data))))
            await tooling.until(lambda number=number: len(said) > number)  # type: ignore[misc]
        os.close(writing)
        await asyncio.gather(*running)
    finally:
        await backend.close()
        os.close(reading)
    assert 0 < sum(map(int, said)) <= MAX_WATCHERS // 4
    assert max(map(int, said)) <= 8
