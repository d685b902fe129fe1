"""Fifty times `kill -9` of a gateway under load: what it acknowledged is there, and what it left open is closed."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from tests import tooling
from tests.durability.stage import Json, Running, Said, Stage, client
from tests.durability.tracing import failing

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROUNDS = 50
EXECUTED = (0, 25, 49)
"""Rounds that start the program as a user does; the others fork it with its imports done."""
AT_START = 5
"""Every so many rounds a second gateway is killed while it starts, over what the first left behind."""


@dataclass(slots=True)
class Load:
    """Four clients that call until their gateway is gone, and what they were told."""

    stage: Stage
    number: int
    told: list[Said] = field(default_factory=list)
    connected: int = 0

    async def run(self, gateway: Running, seconds: float) -> None:
        async with anyio.create_task_group() as group:
            for lane in range(3):
                group.start_soon(self._calls, gateway, lane)
            group.start_soon(self._dawdle, gateway)
            # However slow they are: some calls have been answered, and the one that takes its time has begun.
            with anyio.fail_after(tooling.PATIENCE):
                while self.connected < 4 or len(self.told) < 3 or not self._dawdles():
                    await anyio.sleep(0.005)
            await anyio.sleep(seconds)
            gateway.kill()
            group.cancel_scope.cancel()

    async def _calls(self, gateway: Running, lane: int) -> None:
        with suppress(Exception):  # its gateway dies under it: whatever a client makes of that
            async with client(gateway, "legacy" if lane else "2026-07-28") as caller:
                self.connected += 1
                for step in range(10_000):
                    name = f"{self.number}-{lane}-{step}"
                    if step % 3:
                        self.told.append(await caller.call("append", self.stage.line(name)))
                    else:
                        self.told.append(await caller.call("echo", {"text": name}))

    def _dawdles(self) -> bool:
        with self.stage.reading() as reader:
            open_ = reader.running()
            return any(r.body["call"]["tool"] == "slow" for call in open_ for r in reader.records(call_id=call))

    async def _dawdle(self, gateway: Running) -> None:
        """A call that is under way whenever the kill comes."""
        with suppress(Exception):
            async with client(gateway) as caller:
                self.connected += 1
                await caller.call("slow", {"seconds": 600})


def receipts(told: list[Said]) -> list[Json]:
    assert {said.status for said in told} <= {"success"}
    return [said.receipt for said in told if said.receipt is not None]


def assert_kept_as_it_lies(stage: Stage, told: list[Said]) -> list[str]:
    """Right after the kill, before any start has tidied up. Returns the calls that were left open."""
    for chain in {receipt["chain"] for receipt in receipts(told)}:
        there = {r.seq: r for r in stage.records(chain=chain)}
        for said in told:
            assert said.receipt is not None
            record = there[said.receipt["seq"]]
            assert (record.hash, record.kind, record.call_id) == (said.receipt["head"], "finished", said.call_id)
            assert record.body["status"] == said.status
    with stage.reading() as reader:
        return reader.running()


def assert_closed_as_unknown(stage: Stage, calls: list[str]) -> None:
    with stage.reading() as reader:
        for call in calls:
            ends = [r.body for r in reader.records(call_id=call, kind="finished")]
            assert [(end["status"], end["reason_code"]) for end in ends] == [("unknown", "crash")]
        assert not set(calls) & set(reader.running())


def kill_while_starting(stage: Stage, after: float) -> None:
    log = stage.folder / "killed-early.log"
    argv = ["serve", "--config", str(stage.folder / "ringfence.yaml")]
    pid = stage.zygote.fork({"argv": argv, "env": stage.env, "log": str(log)})
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    tooling.wait_until_gone(pid)


def wait_for_no_servers(stage: Stage) -> None:
    """Nobody ends the server of a killed gateway: its stdin closes, and it ends by itself."""
    deadline = time.monotonic() + tooling.PATIENCE
    while left := stage.servers():
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


async def test_fifty_kills_under_load_lose_nothing_that_was_acknowledged(stage: Stage) -> None:
    config, dice = stage.configure(), random.Random(7)
    told: list[Said] = []
    dangling: list[str] = []
    for number in range(ROUNDS):
        gateway = stage.start(config, exec=number in EXECUTED)
        assert_closed_as_unknown(stage, dangling)
        load = Load(stage, number)
        await load.run(gateway, dice.uniform(0.03, 0.25))
        wait_for_no_servers(stage)
        dangling = assert_kept_as_it_lies(stage, load.told)
        told += load.told
        if number % AT_START == 0:
            kill_while_starting(stage, dice.uniform(0.0, 0.2))
            wait_for_no_servers(stage)
    with stage.serving(config):
        assert_closed_as_unknown(stage, dangling)
    assert len(told) > 2 * ROUNDS
    stage.assert_kept(receipts(told))
    stage.assert_verifies()
    stage.assert_each_call_closed_once()
    stage.assert_each_effect_was_started()
    lost = [r.body for r in stage.records(kind="finished") if r.body["status"] == "unknown"]
    assert sum(end["call"]["tool"] == "slow" for end in lost) > ROUNDS // 4
    with stage.reading() as reader:
        assert reader.running() == []


# ── killed at a certain step ──


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + tooling.PATIENCE
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_whole(stage: Stage) -> None:
    with stage.serving(stage.folder / "ringfence.yaml"):
        pass
    stage.assert_verifies()
    stage.assert_each_call_closed_once()
    stage.assert_each_effect_was_started()
    with stage.reading() as reader:
        assert reader.running() == []
    wait_for_no_servers(stage)


@pytest.mark.parametrize(("call", "steps"), [("pwrite64", 26), ("fdatasync", 2)])
async def test_a_kill_before_each_write_and_sync_of_a_call(stage: Stage, call: str, steps: int) -> None:
    """Each time the next gateway finds what the last one left."""
    tooling.need("strace")
    config, told = stage.configure(), list[Said]()
    for step in range(1, steps + 1):
        gateway = stage.start(config)
        with failing(gateway.pid, [], f"{call}:signal=KILL:when={step}"):
            with anyio.move_on_after(tooling.PATIENCE):
                async with anyio.create_task_group() as group:
                    group.start_soon(call_once, stage, gateway, step, told)
                    before = len(told)
                    while tooling.alive(gateway.pid) and len(told) == before:
                        await anyio.sleep(0.005)
                    group.cancel_scope.cancel()
            with anyio.move_on_after(2):  # what it writes behind an answer
                while tooling.alive(gateway.pid):
                    await anyio.sleep(0.005)
        if tooling.alive(gateway.pid):
            gateway.kill()
        stage.assert_kept(receipts(told))
    assert len(told) <= steps // 3
    assert_whole(stage)


async def call_once(stage: Stage, gateway: Running, step: int, told: list[Said]) -> None:
    with suppress(Exception):  # its gateway dies under it
        async with client(gateway) as caller:
            told.append(await caller.call("append", stage.line(f"step {step}")))


@pytest.mark.parametrize(
    ("call", "steps", "made"),
    [
        ("pwrite64", 8, False),
        ("fdatasync", 4, False),
        ("fsync", 4, False),
        ("pwrite64", 30, True),
        ("fdatasync", 8, True),
    ],
)
def test_a_kill_at_each_step_of_a_start(stage: Stage, call: str, steps: int, made: bool) -> None:
    """Each over what the killed starts before it left; the first of them over no state, or over a crashed gateway's."""
    tooling.need("strace")
    config = stage.configure()
    if made:
        stage.start(config).kill()
    for step in range(1, steps + 1):
        log = stage.folder / f"start-{step}.log"
        order = {"argv": ["serve", "--config", str(config)], "env": stage.env, "log": str(log), "stopped": True}
        pid = stage.zygote.fork(order)
        wait_until_stopped(pid)
        with failing(pid, [], f"{call}:signal=KILL:when={step}"):
            os.kill(pid, signal.SIGCONT)
            while tooling.alive(pid) and "Ringfence serves" not in (log.read_text() if log.exists() else ""):
                time.sleep(0.005)
        if tooling.alive(pid):
            os.kill(pid, signal.SIGKILL)
        tooling.wait_until_gone(pid)
    assert_whole(stage)
