"""A process that gets on is waited for, however slowly it does; one that hangs is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import Unavailable
from ringfence.sandbox.process import patience, zygote_handle
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host import capabilities

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def idle() -> Iterator[int]:
    """A process that does nothing, as soon as it does."""
    with subprocess.Popen([sys.executable, "-c", "print('', flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def future() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


async def test_what_comes_is_given() -> None:
    done = future()
    asyncio.get_running_loop().call_soon(done.set_result, "ready")
    assert await patience.while_they_work(done, lambda: (), 60.0) == "ready"


async def test_a_process_that_does_nothing_is_given_up(idle: int) -> None:
    with pytest.raises(TimeoutError):
        await patience.while_they_work(future(), lambda: (idle,), 0.06)


async def test_nobody_is_given_up_as_one_that_does_nothing() -> None:
    with pytest.raises(TimeoutError):
        await patience.while_they_work(future(), lambda: (), 0.06)


async def test_a_process_that_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far beyond the time that it may do nothing."""
    done, looks = future(), iter(range(1, 100))

    def look(_: object) -> tuple[int, bool]:
        now = next(looks)
        if now == 60:
            done.set_result("ready")
        return now // 5, False  # not at every look

    monkeypatch.setattr(patience, "_look", look)
    assert await patience.while_they_work(done, lambda: (), 0.06) == "ready"


async def test_a_process_that_waits_for_a_core_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done, looks = future(), iter(range(1, 100))

    def look(_: object) -> tuple[int, bool]:
        if next(looks) == 60:
            done.set_result("ready")
        return 0, True

    monkeypatch.setattr(patience, "_look", look)
    assert await patience.while_they_work(done, lambda: (), 0.06) == "ready"


async def test_a_process_that_goes_round_in_circles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_MAX_FACTOR", 0)
    with pytest.raises(TimeoutError):
        await patience.while_they_work(future(), lambda: (os.getpid(),), 0.6)


def test_this_process_is_seen_to_work() -> None:
    worked, _ = patience._look((os.getpid(),))
    assert worked > 0
    assert patience._look((2**22 + 1,)) == (0, False)


def test_processes_of_a_group_are_found(idle: int) -> None:
    assert idle in patience.group(os.getpgid(idle))
    assert patience.group(2**22 + 1) == []


async def test_a_slow_start_gives_everything_more_time() -> None:
    pace = patience.MachinePace()
    assert pace.allow(10.0) == 10.0
    pace.took(0.01, 1.0)
    assert pace.allow(10.0) == 10.0
    pace.took(50.0, 1.0)
    pace.took(2.0, 1.0)
    assert pace.allow(10.0) == 500.0
    pace.took(10**6, 1.0)
    assert pace.allow(10.0) == 1000.0


async def test_a_zygote_that_hangs_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := capabilities.HostCapabilities.detect().missing:
        pytest.skip(f"no box can be made here: {dict(missing)}")
    monkeypatch.setattr(patience, "IDLE_SECONDS", 0.06)
    monkeypatch.setattr(patience, "_look", lambda _: (0, False))
    # The starter of a zygote, which never gets to be one: however fast the machine is, it cannot be ready in time.
    monkeypatch.setattr(zygote_handle, "with_launcher", lambda _: ["sleep", "infinity"])
    backend = ProcessBackend(depth=0)
    try:
        with pytest.raises(Unavailable, match="the zygote was not ready, and did nothing more for it"):
            await backend.run(BoxSpec(Program("python", b"pass")))
    finally:
        await backend.close()
