"""The keeper as it is: with boxes, in a process of its own, from the first client to the last session."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.compose.backends import make_backend
from ringfence.compose.keeper import keeper_launch, keeper_of, keeper_rules, settings_digest
from ringfence.config import SandboxSettings
from ringfence.core.box import MIB, Limits
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.core.sessions import CellRequest, CommandRequest, Owner, SessionSpec, StepReport
from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.wire import SLACK, WINDOW
from tests import boxing, tooling
from tests.sandbox.keeper.parrot import quiet, short_folder

pytestmark = pytest.mark.anyio

ANN = Owner("local", "ann")
SETTINGS = SandboxSettings()


@pytest.fixture
def state() -> Iterator[Path]:
    boxing.need_boxes()
    with short_folder() as path:
        yield path
        process = process_of(path)
        if process is not None:
            os.kill(process, signal.SIGTERM)
            tooling.wait_until_gone(process)


def process_of(state: Path) -> int | None:
    try:
        process = int(json.loads((state / "keeper" / "address").read_text())["process"])
    except FileNotFoundError:
        return None
    return process if tooling.alive(process) else None


@asynccontextmanager
async def kept(state: Path, **more: Any) -> AsyncIterator[KeeperClient]:
    keeper = keeper_of(state, SETTINGS, **more)
    try:
        yield keeper
    finally:
        await keeper.close()


async def ran(keeper: KeeperClient, box: str, source: str, **limits: Any) -> StepReport:
    return await keeper.run(ANN, box, CellRequest(source, limits=Limits(**limits) if limits else None), quiet, quiet)


def text(report: StepReport) -> str:
    return report.cell.results[-1].data["text/plain"]


def below(process: int) -> set[int]:
    """All processes that descend from one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {process}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


async def test_a_session_outlives_the_process_that_made_it(state: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from ringfence.config import SandboxSettings
from ringfence.compose.keeper import keeper_of
from ringfence.core.sessions import *
async def main():
    keeper = keeper_of(Path({str(state)!r}), SandboxSettings())
    ann = Owner("local", "ann")
    box = (await keeper.create(ann, SessionSpec(metadata={{"for": "a test"}}))).id
    await keeper.run(ann, box, CellRequest("x = 41; open('note', 'w').write('hello')"), print, print)
    print(box)
asyncio.run(main())
"""
    made = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    box = made.stdout.split()[-1]
    async with kept(state) as keeper:
        (info,) = await keeper.list(ANN)
        assert (info.id, info.state, info.step, info.metadata) == (box, "running", 1, {"for": "a test"})
        assert text(await ran(keeper, box, "x += 1; x")) == "42"
        assert await keeper.read(ANN, box, "note", 0, None) == b"hello"
        assert (await keeper.end(ANN, box)).why == "closed"
        assert await keeper.list(Owner("local", "bob")) == []


async def test_a_keeper_that_is_killed_takes_its_boxes_along_and_the_next_one_says_so(state: Path) -> None:
    async with kept(state) as keeper:
        box = (await keeper.create(ANN, SessionSpec())).id
        await keeper.start(ANN, box, CommandRequest(("sleep", "1000")))
        process = process_of(state)
        assert process is not None
        step = asyncio.create_task(ran(keeper, box, "import time; time.sleep(1000)", wall_seconds=600.0))
        await tooling.until(lambda: len(below(process)) >= 4)
        boxes = below(process)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(OutcomeUnknown) as unknown:
            await step
        assert unknown.value.reason_code == "keeper_died"
        for pid in boxes:
            await asyncio.to_thread(tooling.wait_until_gone, pid)
        info = await keeper.info(ANN, box)
        assert (info.state, info.why) == ("stopped", "keeper_died")
        assert process_of(state) not in (None, process)
        for asked in (ran(keeper, box, "1"), keeper.write(ANN, box, "a", b"")):
            with pytest.raises(Refused, match="keeper") as stopped:
                await asked
            assert stopped.value.reason_code == "session_stopped"
        assert text(await ran(keeper, (await keeper.create(ANN, SessionSpec())).id, "6 * 7")) == "42"


async def test_a_step_that_its_client_cancels_is_interrupted_and_the_state_stays(state: Path) -> None:
    async with kept(state) as keeper:
        box = (await keeper.create(ANN, SessionSpec())).id
        await ran(keeper, box, "x = 42")
        with anyio.move_on_after(0.3) as scope:
            await ran(keeper, box, "while True: pass", wall_seconds=60.0)
        assert scope.cancelled_caught
        again = await ran(keeper, box, "x")
        assert text(again) == "42" and not again.fresh


async def test_a_client_that_does_not_read_stops_the_program_and_not_the_keeper(state: Path) -> None:
    """The pipe of the box fills: what it writes is read no faster than it is taken."""
    async with kept(state) as keeper, kept(state) as other:
        box = (await keeper.create(ANN, SessionSpec())).id
        process = process_of(state)
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heard = 0

        def slow(stream: str, data: bytes) -> asyncio.Future[None]:
            nonlocal heard
            heard += len(data)
            return gate

        source = "import sys\nfor n in range(400): sys.stdout.write('x' * 65535 + chr(10))\nopen('done', 'w').close()"
        before = memory(process)
        step = asyncio.create_task(keeper.run(ANN, box, CellRequest(source), slow, quiet))
        await tooling.until(lambda: heard >= WINDOW)
        await asyncio.sleep(0.5)
        with pytest.raises(Refused):
            await other.stat(ANN, box, "done")
        assert WINDOW <= heard <= WINDOW + SLACK
        assert memory(process) - before < 16 * MIB
        gate.set_result(None)
        report = (await step).cell.report
        assert report.stdout.total == heard == 400 * 65536
        assert (await other.stat(ANN, box, "done")).kind == "file"


def memory(process: int | None) -> int:
    fields = Path(f"/proc/{process}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_files_go_in_and_out_as_streams(state: Path) -> None:
    async with kept(state) as keeper:
        one, two = [(await keeper.create(ANN, SessionSpec())).id for _ in range(2)]
        await keeper.write(ANN, one, "tree/a", b"a" * (5 * MIB))
        await keeper.write(ANN, one, "tree/b", b"b", mode=0o600)
        facts = await keeper.unpack(ANN, two, "copy", keeper.pack(ANN, one, "tree"))
        assert {(fact.path, fact.bytes) for fact in facts} == {
            ("/workspace/copy/a", 5 * MIB),
            ("/workspace/copy/b", 1),
        }
        assert await keeper.read(ANN, two, "copy/a", 5 * MIB - 3, None) == b"aaa"
        changes = keeper.watch(ANN, two, "/workspace", True)
        assert (await anext(changes)).kind == "begun"
        await ran(keeper, two, "open('new', 'w').close()")
        change = await anext(changes)
        assert (change.kind, change.path) == ("created", "/workspace/new")
        await changes.aclose()  # type: ignore[attr-defined]


async def test_a_keeper_leaves_after_its_last_session(state: Path) -> None:
    async with kept(state, linger=0.2) as keeper:
        box = (await keeper.create(ANN, SessionSpec(lifetime_seconds=2.0))).id
        process = process_of(state)
    assert process is not None
    await asyncio.to_thread(tooling.wait_until_gone, process)
    async with kept(state, linger=0.2) as keeper:
        info = await keeper.info(ANN, box)
        assert (info.state, info.why) == ("stopped", "lifetime")


async def test_a_keeper_that_cannot_make_boxes_says_why(state: Path) -> None:
    with pytest.raises(Unavailable, match="microsandbox is not built yet") as unavailable:
        await keeper_of(state, replace(SETTINGS, backend="microsandbox")).list(ANN)
    assert unavailable.value.reason_code == "no_backend"


async def test_boxes_with_less_protection_are_another_keepers(state: Path) -> None:
    async with kept(state) as keeper:
        await keeper.create(ANN, SessionSpec())
    with pytest.raises(Unavailable, match="other sandbox settings"):
        await keeper_of(state, replace(SETTINGS, accept_missing=("landlock",))).list(ANN)
    # How many there may be is no reason: whoever restarts with another limit finds the sessions again.
    more = keeper_of(state, replace(SETTINGS, max_sessions=5))
    assert len(await more.list(ANN)) == 1
    await more.close()


def test_what_a_keeper_is_told_is_what_the_configuration_says() -> None:
    rules = keeper_rules(replace(SETTINGS, max_sessions=3, max_sessions_memory_mb=2, session_queue_seconds=1.0))
    assert (rules.max_sessions, rules.max_memory_bytes, rules.queue_seconds) == (3, 2 * MIB, 1.0)
    assert keeper_rules(SETTINGS).max_memory_bytes is None
    assert settings_digest(SETTINGS) != settings_digest(replace(SETTINGS, templates={"mine": ("numpy",)}))
    others: list[dict[str, Any]] = [{"docker_host": "unix:///x"}, {"docker_runtime": "runsc"}, {"max_start_ms": 9.0}]
    assert len({settings_digest(SETTINGS), *(settings_digest(replace(SETTINGS, **more)) for more in others)}) == 4
    with pytest.raises(Unavailable, match="does not exist"):
        make_backend(replace(SETTINGS, backend="chroot"))


def test_neither_the_environment_nor_the_folder_says_what_a_keeper_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "evil.so")
    there = keeper_launch(tmp_path, SETTINGS)
    assert {"-E", "-P"} <= set(there.command)
    assert not {"PYTHONPATH", "LD_PRELOAD"} & set(there.environment)
    assert str(tmp_path / "keeper") in there.command
