"""Nothing of a box outlives it, and nothing of a supervisor outlives it for long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Input, Limits, Program
from ringfence.sandbox.process import ids as uids
from ringfence.sandbox.process import pool, zygote_handle
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.zygote.confine import Shape
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
    await settled(backend)
    return trouble


async def settled(backend: ProcessBackend) -> None:
    """Wait until what was taken is made up for: until nothing changes any more, however long that takes."""
    before: Kept | None = None
    while True:
        await tooling.until(lambda: looking.at_rest(backend))
        after = Kept.now()
        if before is not None and (after.zygotes, after.groups) == (before.zygotes, before.groups):
            return
        before = after
        await asyncio.sleep(0.3)


async def up(backend: ProcessBackend, source: str, times: int, count: int = 1) -> list[asyncio.Task[BoxReport]]:
    """So many boxes that stay at work for as long as a test may take, each of which has said so often that it is up."""
    heard = supervisor.Ups(times * count)
    order = spec(source, limits=Limits(wall_seconds=600))
    running = [asyncio.create_task(backend.run(order, heard)) for _ in range(count)]
    async with asyncio.timeout(tooling.PATIENCE):
        await heard.all.wait()
    return running


async def test_boxes_leave_nothing_behind() -> None:
    gc.collect()  # what earlier tests left open
    descriptors, mounts = looking.descriptors(), looking.mounts()
    groups = looking.groups(os.getpid())
    backend = ProcessBackend(depth=2)
    try:
        await run_many(backend, 100)
        before = Kept.now()
        trouble = await run_many(backend, BOXES)
        after = Kept.now()
    finally:
        await backend.close()
    assert not trouble
    counts, places = zip(*before.zygotes.values(), *after.zygotes.values(), strict=True)
    assert max(counts) <= min(counts) + 4  # one that has made a few boxes has a little more than one that is new
    assert len({str(each) for each in places}) == 1
    assert after.zygote_memory < before.zygote_memory + 1024 * 1024
    assert after.groups <= before.groups + 8
    assert after.descriptors <= before.descriptors + 8 * 10
    assert after.memory < before.memory + 8 * 1024 * 1024
    assert looking.zygotes() == []
    assert looking.groups(os.getpid()) <= groups
    assert looking.descriptors() <= descriptors
    assert looking.mounts() == mounts


async def test_a_burst_of_a_hundred_succeeds(backend: ProcessBackend) -> None:
    reports = await asyncio.gather(*(backend.run(spec(f"print({number})")) for number in range(100)))
    assert [report.stdout.text for report in reports] == [f"{number}\n" for number in range(100)]


async def test_of_a_burst_only_so_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that runs for long is in nobody's way."""
    making: list[int] = [0]
    spawn = zygote_handle.ZygoteHandle.spawn

    async def counted(zygote: zygote_handle.ZygoteHandle, limits: Limits, shape: Shape) -> Box:
        making.append(making[-1] + 1)
        try:
            return await spawn(zygote, limits, shape)
        finally:
            making.append(making[-1] - 1)

    monkeypatch.setattr(pool, "IN_THE_MAKING", 1)
    monkeypatch.setattr(zygote_handle.ZygoteHandle, "spawn", counted)
    backend = ProcessBackend(depth=0)
    try:
        forever = spec("import time; time.sleep(600)", limits=Limits(wall_seconds=600))
        long = [asyncio.create_task(backend.run(forever)) for _ in range(4)]
        short = asyncio.gather(*(backend.run(spec("print(1)")) for _ in range(20)))
        reports = await asyncio.wait_for(short, tooling.PATIENCE)
        assert {report.stdout.text for report in reports} == {"1\n"}
        for each in long:
            each.cancel()
        await asyncio.gather(*long, return_exceptions=True)
    finally:
        await backend.close()
    assert max(making) == len(os.sched_getaffinity(0))
    assert making[-1] == 0


async def test_what_a_program_left_is_ended_though_its_zygote_has_no_time(backend: ProcessBackend) -> None:
    """It ends when its input does."""
    source = "import subprocess, sys\nsubprocess.Popen(['sleep', '1234'])\nprint('up', flush=True)\nsys.stdin.read()"
    reading, writing = os.pipe()
    heard = supervisor.Ups(1)
    program = Program("python", source.encode(), stdin=reading)
    running = asyncio.create_task(backend.run(BoxSpec(program, Limits(wall_seconds=600)), heard))
    await heard.all.wait()
    busy = looking.zygotes()
    (left,) = [pid for zygote in busy for pid in tooling.descendants(zygote, "1234")]
    for zygote in busy:
        os.kill(zygote, signal.SIGSTOP)
    try:
        os.close(writing)
        os.close(reading)
        await tooling.until(lambda: not tooling.alive(left))
        assert not running.done(), "the box is not gone before its zygote says so"
    finally:
        for zygote in busy:
            os.kill(zygote, signal.SIGCONT)
    report = await running
    assert (report.ended, report.exit_status) == ("exited", 0)


async def test_cancelling_kills_the_box_at_once(backend: ProcessBackend) -> None:
    (running,) = await up(backend, supervisor.PROGRAMS["busy"], 8)
    busy = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)[1:]]
    assert len(busy) > 8
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await backend.run(spec("print(1)"))).ended == "exited"
    # Those that were kept ready live on.
    await tooling.until(lambda: sum(process.alive for process in busy) <= len(busy) - 8)


async def test_cancelling_while_a_box_is_made_leaves_nothing(backend: ProcessBackend) -> None:
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        running = [asyncio.create_task(backend.run(spec("pass", limits=Limits(processes=40)))) for _ in range(3)]
        await asyncio.sleep(delay)
        for task in running:
            task.cancel()
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    await tooling.until(lambda: looking.at_rest(backend))
    before = looking.descriptors()
    assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"
    await tooling.until(lambda: looking.descriptors() <= before + 8)


async def test_a_box_that_was_killed_from_outside_is_not_handed_out(backend: ProcessBackend) -> None:
    await tooling.until(lambda: looking.at_rest(backend))
    ready = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)[1:]]
    assert ready
    for process in ready:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    tooling.wait_until(looking.all_gone(ready))  # the loop stands still meanwhile, so nobody was told
    report = await backend.run(spec("print(1)"))
    assert (report.ended, report.stdout.head) == ("exited", b"1\n")


# ── Zygotes ──


async def test_a_zygote_that_dies_takes_its_boxes_along_and_is_replaced(backend: ProcessBackend) -> None:
    running = await up(backend, "import time\nprint('up', flush=True)\ntime.sleep(600)", 1, count=3)
    boxes = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)]
    for zygote in looking.zygotes():
        os.kill(zygote, signal.SIGKILL)
    reports = await asyncio.wait_for(asyncio.gather(*running), tooling.PATIENCE)
    assert [(report.ended, report.exit_status) for report in reports] == [("infra", None)] * 3
    assert all(report.trouble == ("its zygote died",) for report in reports)
    await tooling.until(looking.all_gone(boxes))
    assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"


async def test_a_zygote_that_is_killed_while_it_starts_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = zygote_handle.ZygoteHandle._configure
    starts: list[int] = []

    def killed_at_first(self: zygote_handle.ZygoteHandle) -> None:
        assert self._process is not None
        starts.append(self._process.pid)
        if len(starts) == 1:
            self._process.kill()
        told(self)

    monkeypatch.setattr(zygote_handle.ZygoteHandle, "_configure", killed_at_first)
    backend = ProcessBackend(depth=1)
    try:
        assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"
    finally:
        await backend.close()
    assert len(set(starts)) >= 2


async def test_a_zygote_that_died_unnoticed_is_replaced(backend: ProcessBackend) -> None:
    for _ in range(5):
        processes = [each for zygote in looking.zygotes() for each in looking.descendants(zygote)]
        for zygote in looking.zygotes():
            os.kill(zygote, signal.SIGKILL)
        tooling.wait_until(looking.all_gone(processes))  # the loop stands still meanwhile
        assert (await backend.run(spec("print(1)"))).stdout.head == b"1\n"


async def test_a_zygote_is_replaced_after_so_many_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_handle, "RECYCLE_AFTER", 10)
    backend = ProcessBackend(depth=1)
    seen: set[int] = set()
    try:
        for _ in range(8):
            reports = await asyncio.gather(*(backend.run(spec("print(1)")) for _ in range(5)))
            assert all(report.stdout.head == b"1\n" for report in reports)
            seen |= set(looking.zygotes())
            # Those that were replaced may still be ending.
            await tooling.until(lambda: len(looking.zygotes()) <= len(os.sched_getaffinity(0)) + 2)
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
    groups = looking.groups(os.getpid())
    running = await up(backend, supervisor.PROGRAMS["daemons"], supervisor.UPS["daemons"], count=3)
    processes = [process for zygote in looking.zygotes() for process in looking.descendants(zygote)]
    await asyncio.wait_for(backend.close(), tooling.PATIENCE)
    tooling.wait_until(looking.all_gone(processes))
    reports = await asyncio.wait_for(asyncio.gather(*running), tooling.PATIENCE)
    assert [report.ended for report in reports] == ["cancelled"] * 3
    assert looking.groups(os.getpid()) <= groups


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
        tooling.wait_until(looking.all_gone(processes))
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
        (child,) = set(tooling.descendants(process.pid, supervisor.__file__)) - {process.pid}
        process.kill()
        try:
            tooling.wait_until(looking.all_gone(boxes))
            assert tooling.alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_loop_that_ends_without_closing_leaves_no_process(tmp_path: Path) -> None:
    with supervising("forgetful", tmp_path) as process:
        tooling.wait_until(lambda: not [each for each in looking.descendants(process.pid)[1:] if each.alive])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give boxes user ids of their own")
async def test_supervisors_of_one_host_have_different_user_ids(tmp_path: Path) -> None:
    with supervising("stopped", tmp_path) as first, supervising("stopped", tmp_path) as second:
        ids = [_ids(first.pid), _ids(second.pid)]
        assert ids[0] and ids[1]
        assert not ids[0] & ids[1]
        assert 0 not in ids[0] | ids[1]
    # What they had is free again.
    tooling.wait_until(lambda: not (_ids(first.pid) or _ids(second.pid)))
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
