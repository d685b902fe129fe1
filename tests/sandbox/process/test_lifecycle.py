"""Nothing of a box outlives it, and nothing of a supervisor outlives it for long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringfence.box import BoxSpec, Input, Limits, Program
from ringfence.sandbox.process import pool, uids, zygotes
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.confine import Shape
from tests import tooling
from tests.sandbox import comparing
from tests.sandbox.process import looking, supervisor

pytestmark = pytest.mark.anyio

BOXES = 10_000 if os.environ.get("RINGFENCE_FULL") else 200
SOURCES = (
    "pass",
    "open('/workspace/output/x', 'w').write('y')",
    "import subprocess\nsubprocess.run(['true'])",
    "1/0",
    "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(100)",
    "import ctypes\nctypes.CDLL(None).unshare(0x10000000)",
    "import os\nos.abort()",
)


def spec(source: str, **more) -> BoxSpec:
    return BoxSpec(Program("python", source.encode()), **more)


@pytest.fixture
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened(spec("")):
        yield made


# ── Boxes ──


@dataclass(frozen=True)
class Kept:
    """What a supervisor keeps while nothing runs."""

    zygotes: dict[int, tuple[int, list[tuple[str, str]]]]
    """The descriptors and mounts of each."""
    zygote_memory: int
    groups: int
    descriptors: int
    memory: int

    @classmethod
    def now(cls) -> Kept:
        zygotes = {pid: (looking.descriptors(pid), looking.mounts(pid)) for pid in looking.zygotes()}
        gc.collect()
        return cls(
            zygotes,
            max(map(looking.memory, zygotes)),
            len(looking.groups(os.getpid())),
            looking.descriptors(),
            looking.memory(),
        )


async def run_many(backend: ProcessBackend, count: int) -> list[tuple[str, ...]]:
    """Three at a time. What went wrong, of those where something did."""
    numbers = iter(range(count))
    trouble: list[tuple[str, ...]] = []

    async def work() -> None:
        for number in numbers:
            more = {"inputs": (Input("a", b"data"),)} if number % 5 == 0 else {}
            layout = "fresh" if number % 31 == 0 else "shared"
            report = await backend.run(spec(SOURCES[number % len(SOURCES)], layout=layout, **more))
            if report.trouble:
                trouble.append(report.trouble)

    await asyncio.gather(work(), work(), work())
    await settled()
    return trouble


async def settled() -> None:
    """Wait until what was taken is made up for: until nothing changes any more, however long that takes."""
    before: Kept | None = None
    for _ in range(300):
        await asyncio.sleep(0.3)
        after = Kept.now()
        if before is not None and (after.zygotes, after.groups) == (before.zygotes, before.groups):
            return
        before = after


async def test_boxes_leave_nothing_behind() -> None:
    gc.collect()  # what earlier tests left open
    descriptors, mounts = looking.descriptors(), looking.mounts()
    backend = ProcessBackend(depth=2)
    try:
        await run_many(backend, 100)
        before = Kept.now()
        trouble = await run_many(backend, BOXES)
        after = Kept.now()
    finally:
        await backend.close()
    assert not trouble
    assert len({str(each) for each in (*before.zygotes.values(), *after.zygotes.values())}) == 1
    assert after.zygote_memory < before.zygote_memory + 1024 * 1024
    assert after.groups <= before.groups + 8
    assert after.descriptors <= before.descriptors + 8 * 10
    assert after.memory < before.memory + 8 * 1024 * 1024
    assert looking.zygotes() == []
    assert looking.groups(os.getpid()) == set()
    assert looking.descriptors() <= descriptors
    assert looking.mounts() == mounts


async def test_a_burst_of_a_hundred_succeeds(backend: ProcessBackend) -> None:
    reports = await asyncio.gather(*(backend.run(spec(f"print({number})")) for number in range(100)))
    assert [report.stdout.text for report in reports] == [f"{number}\n" for number in range(100)]


async def test_of_a_burst_only_so_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that runs for long is in nobody's way."""
    making: list[int] = [0]
    spawn = zygotes.Zygote.spawn

    async def counted(zygote: zygotes.Zygote, limits: Limits, shape: Shape) -> Box:
        making.append(making[-1] + 1)
        try:
            return await spawn(zygote, limits, shape)
        finally:
            making.append(making[-1] - 1)

    monkeypatch.setattr(pool, "IN_THE_MAKING", 1)
    monkeypatch.setattr(zygotes.Zygote, "spawn", counted)
    backend = ProcessBackend(depth=0)
    try:
        long = [asyncio.create_task(backend.run(spec("import time; time.sleep(60)"))) for _ in range(4)]
        reports = await asyncio.wait_for(asyncio.gather(*(backend.run(spec("print(1)")) for _ in range(20))), 30)
        assert {report.stdout.text for report in reports} == {"1\n"}
        for each in long:
            each.cancel()
        await asyncio.gather(*long, return_exceptions=True)
    finally:
        await backend.close()
    assert max(making) == len(os.sched_getaffinity(0))
    assert making[-1] == 0


async def test_what_a_program_left_is_ended_though_its_zygote_has_no_time(backend: ProcessBackend) -> None:
    source = "import os, time\nif not os.fork(): time.sleep(100)\ntime.sleep(1)"
    running = asyncio.create_task(backend.run(spec(source)))
    await asyncio.sleep(0.5)
    busy = looking.zygotes()
    own = [child for zygote in busy for child in looking.children(zygote)]
    left = [each for zygote in busy for each in looking.descendants(zygote) if each.pid not in (*busy, *own)]
    assert len(left) == 1 and left[0].alive
    for zygote in busy:
        os.kill(zygote, signal.SIGSTOP)
    try:
        async with asyncio.timeout(10):
            while left[0].alive:
                await asyncio.sleep(0.01)
        assert not running.done(), "the box is not gone before its zygote says so"
    finally:
        for zygote in busy:
            os.kill(zygote, signal.SIGCONT)
    report = await running
    assert (report.ended, report.exit_status) == ("exited", 0)


async def test_cancelling_kills_the_box_at_once(backend: ProcessBackend) -> None:
    running = asyncio.create_task(backend.run(spec(supervisor.PROGRAMS["busy"])))
    await asyncio.sleep(0.5)
    busy = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)[1:]]
    assert len(busy) > 8
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began < 2
    assert (await backend.run(spec("print(1)"))).ended == "exited"
    assert sum(process.alive for process in busy) <= len(busy) - 8  # those that were kept ready live on


async def test_cancelling_while_a_box_is_made_leaves_nothing(backend: ProcessBackend) -> None:
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        running = [asyncio.create_task(backend.run(spec("pass", limits=Limits(processes=40)))) for _ in range(3)]
        await asyncio.sleep(delay)
        for task in running:
            task.cancel()
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    await asyncio.sleep(0.3)
    before = looking.descriptors()
    assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"
    await asyncio.sleep(0.3)
    assert looking.descriptors() <= before + 8


async def test_a_box_that_was_killed_from_outside_is_not_handed_out(backend: ProcessBackend) -> None:
    await asyncio.sleep(0.3)
    ready = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)[1:]]
    assert ready
    for process in ready:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    looking.wait_until(looking.all_gone(ready), 5)  # the loop stands still meanwhile, so nobody was told
    report = await backend.run(spec("print(1)"))
    assert (report.ended, report.stdout.head) == ("exited", b"1\n")


# ── Zygotes ──


async def test_a_zygote_that_dies_takes_its_boxes_along_and_is_replaced(backend: ProcessBackend) -> None:
    running = [asyncio.create_task(backend.run(spec("import time\ntime.sleep(60)"))) for _ in range(3)]
    await asyncio.sleep(0.7)
    boxes = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)]
    for zygote in looking.zygotes():
        os.kill(zygote, signal.SIGKILL)
    reports = await asyncio.wait_for(asyncio.gather(*running), 10)
    assert [(report.ended, report.exit_status) for report in reports] == [("infra", None)] * 3
    assert all(report.trouble == ("its zygote died",) for report in reports)
    looking.wait_until(looking.all_gone(boxes), 1)
    assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"


async def test_a_zygote_that_died_unnoticed_is_replaced(backend: ProcessBackend) -> None:
    for _ in range(5):
        processes = [each for zygote in looking.zygotes() for each in looking.descendants(zygote)]
        for zygote in looking.zygotes():
            os.kill(zygote, signal.SIGKILL)
        looking.wait_until(looking.all_gone(processes), 5)  # the loop stands still meanwhile
        assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"
    await asyncio.sleep(0.3)


async def test_a_zygote_is_replaced_after_so_many_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygotes, "RECYCLE_AFTER", 10)
    backend = ProcessBackend(depth=1)
    seen: set[int] = set()
    try:
        for _ in range(8):
            reports = await asyncio.gather(*(backend.run(spec("print(1)")) for _ in range(5)))
            assert all(report.stdout.head == b"1\n" for report in reports)
            seen |= set(looking.zygotes())
            assert len(looking.zygotes()) <= len(os.sched_getaffinity(0)) + 2
    finally:
        await backend.close()
    assert len(seen) >= 3


async def test_two_backends_live_side_by_side(backend: ProcessBackend) -> None:
    other = ProcessBackend(depth=1)
    reports = await asyncio.gather(*(each.run(spec("print(1)")) for each in (backend, other) for _ in range(4)))
    await other.close()
    reports.append(await backend.run(spec("print(1)")))
    assert [report.stdout.head for report in reports] == [b"1\n"] * 9


# ── The end of a backend ──


async def test_closing_ends_what_runs(backend: ProcessBackend) -> None:
    running = [asyncio.create_task(backend.run(spec(supervisor.PROGRAMS["daemons"]))) for _ in range(3)]
    await asyncio.sleep(0.7)
    processes = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)]
    await asyncio.wait_for(backend.close(), 5)
    looking.wait_until(looking.all_gone(processes), 1)
    reports = await asyncio.wait_for(asyncio.gather(*running), 1)
    assert [report.ended for report in reports] == ["cancelled"] * 3
    assert looking.groups(os.getpid()) == set()


async def test_a_closed_backend_opens_again(backend: ProcessBackend) -> None:
    await backend.close()
    await backend.close()
    assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"


# ── The end of a supervisor ──


@contextlib.contextmanager
def supervising(what: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "PYTHONPATH": str(tooling.ROOT / "src"), "TMPDIR": str(folder)}
    command = [sys.executable, supervisor.__file__, what]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                _, errors = process.communicate()
                if b"missing_protection" in errors or b"would lack a protection" in errors:
                    pytest.skip(errors.decode().splitlines()[-1])
                pytest.fail(errors.decode())
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("what", ["busy", "stopped", "daemons", "making"])
async def test_after_a_supervisor_was_killed_nothing_is_left(what: str, tmp_path: Path) -> None:
    mounts = looking.mounts()
    with supervising(what, tmp_path) as process:
        processes = looking.descendants(process.pid)
        assert len(processes) > 3
        process.kill()
        looking.wait_until(looking.all_gone(processes), 1)
    # Nothing but the file by whose locks supervisors of one user keep their ids apart.
    assert {path.name for path in tmp_path.rglob("*")} <= {f"ringfence-{os.geteuid()}", "subids"}
    assert looking.mounts() == mounts
    backend = ProcessBackend(depth=0)
    await backend.run(spec("pass"))  # the next start
    await backend.close()
    assert looking.groups(process.pid) == set()


async def test_a_child_of_the_supervisor_does_not_keep_its_boxes_alive(tmp_path: Path) -> None:
    with supervising("forked", tmp_path) as process:
        zygotes_of_it = [pid for pid in looking.children(process.pid) if looking.children(pid)]
        boxes = [each for pid in zygotes_of_it for each in looking.descendants(pid)]
        assert len(boxes) > 1
        process.kill()
        looking.wait_until(looking.all_gone(boxes), 1)


async def test_a_loop_that_ends_without_closing_leaves_no_process(tmp_path: Path) -> None:
    with supervising("forgetful", tmp_path) as process:
        looking.wait_until(lambda: not [each for each in looking.descendants(process.pid)[1:] if each.alive], 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give boxes user ids of their own")
async def test_supervisors_of_one_host_have_different_user_ids(tmp_path: Path) -> None:
    with supervising("stopped", tmp_path) as first, supervising("stopped", tmp_path) as second:
        ids = [_ids(first.pid), _ids(second.pid)]
        assert ids[0] and ids[1]
        assert not ids[0] & ids[1]
        assert 0 not in ids[0] | ids[1]
    # What they had is free again.
    looking.wait_until(lambda: not (_ids(first.pid) or _ids(second.pid)), 2)
    taken = [uids.take_block() for _ in range(8)]
    try:
        spans = [range(block.base, block.base + block.size) for block in taken]
        assert any(min(ids[0]) in span for span in spans) and any(min(ids[1]) in span for span in spans)
    finally:
        for block in taken:
            block.release()


def _ids(pid: int) -> set[int]:
    """Which users of the host the boxes of a supervisor are."""
    found: set[int] = set()
    for process in looking.descendants(pid)[1:]:
        with contextlib.suppress(OSError):
            found.add(os.stat(f"/proc/{process.pid}").st_uid)
    return found
