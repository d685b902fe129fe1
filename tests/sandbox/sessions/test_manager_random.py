"""Sessions at random: made, used, paused, copied, forked and ended side by side, by callers who give up now and then.

Whatever happens, nothing is left over, and every end is written down. The boxes are fakes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import MIB, Limits
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.core.sessions import SessionInfo, VolumeMount
from tests.sandbox.fake_sessions import COLLEAGUE, ME, FakeSessions, fake_sessions

pytestmark = pytest.mark.anyio

EXPECTED = {
    *("session_stopped", "session_starting", "session_paused", "busy", "capacity", "no_process", "volume_busy"),
    *("not_found", "no_interpreter", "no_input", "unknown_process"),
}
STEPS = 120


class Walk:
    def __init__(self, here: FakeSessions, seed: int) -> None:
        self.here = here
        self.random = random.Random(seed)
        self.seen: set[str] = set()

    def some(self) -> str:
        return self.random.choice(sorted(self.seen)) if self.seen else "box_none"

    async def one(self) -> None:
        """Something, to somebody; maybe given up before it is done."""
        what = self.random.choice(
            ["create"] * 3
            + ["cell"] * 6
            + [
                "command",
                "start",
                "write",
                "read",
                "pause",
                "resume",
                "snapshot",
                "fork",
                "end",
                "die",
                "watch",
                "unpack",
            ]
        )
        box = self.some()
        act = asyncio.ensure_future(getattr(self, what)(box))
        try:
            if self.random.random() < 0.25:
                await asyncio.sleep(self.random.random() * 0.03)
                act.cancel()
            await act
        except asyncio.CancelledError:
            pass
        except (OutcomeUnknown, Refused, Unavailable) as problem:
            expected = EXPECTED | ({"unknown_session"} if box == "box_none" else set())
            if problem.reason_code not in expected:
                raise

    async def create(self, box: str) -> None:
        volumes = (VolumeMount("data", "data", self.random.choice(["ro", "rw"])),) if self.random.random() < 0.2 else ()
        self.seen.add(
            await self.here.create(
                lifetime_seconds=self.random.choice([0.1, 0.5, 60]),
                idle_seconds=self.random.choice([0.05, 60, None]),
                auto_resume=self.random.random() < 0.9,
                volumes=volumes,
                retain=self.random.choice(["none", "output", "output"]),
            )
        )

    async def cell(self, box: str) -> None:
        source = self.random.choice(["set x 1", "get x", "sleep 0.02", "die", "put output/a text", "say hello"])
        context = self.random.choice(["default", "default", "other"])
        report = await self.here.cell(box, source, context=context, limits=Limits(wall_seconds=1))
        assert report.cell.report.ended in ("exited", "signalled", "infra", "cancelled")

    async def command(self, box: str) -> None:
        await self.here.command(box, *self.random.choice([("say", "hello"), ("sleep", "0.03")]))

    async def start(self, box: str) -> None:
        process = await self.here.start(
            box, *self.random.choice([("sleep", "0.1"), ("cat",), ("say", "x")]), stdin=None
        )
        await self.here.manager.send(ME, box, process, b"hello", eof=self.random.random() < 0.7)
        if self.random.random() < 0.5:
            await self.here.manager.signal(ME, box, process, 9)
            await self.here.manager.wait(ME, box, process, 0.05)

    async def write(self, box: str) -> None:
        await self.here.manager.write(
            ME, box, f"output/{self.random.randrange(5)}", b"x" * self.random.randrange(10_000)
        )

    async def read(self, box: str) -> None:
        await self.here.manager.entries(ME, box, "output", 2)
        async for _ in self.here.manager.pack(ME, box, "output"):
            await asyncio.sleep(0)

    async def unpack(self, box: str) -> None:
        async def stream() -> Any:
            for _ in range(3):
                yield bytes(512)
                await asyncio.sleep(0.01)

        await self.here.manager.unpack(ME, box, "in", stream())

    async def watch(self, box: str) -> None:
        changes = self.here.manager.watch(ME, box, ".", True)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.03):
                async for _ in changes:
                    await asyncio.sleep(0)
        await changes.aclose()

    async def pause(self, box: str) -> None:
        await self.here.manager.pause(ME, box)

    async def resume(self, box: str) -> None:
        await self.here.manager.resume(ME, box)

    async def snapshot(self, box: str) -> None:
        with RetainNone():
            snapshot = await self.here.manager.snapshot(ME, box)
            self.seen.add(await self.here.create(snapshot=snapshot.id))
            await self.here.manager.remove_snapshot(ME, snapshot.id)

    async def fork(self, box: str) -> None:
        with RetainNone():
            for made in await self.here.manager.fork(ME, box, 2):
                if isinstance(made, SessionInfo):
                    self.seen.add(made.id)

    async def end(self, box: str) -> None:
        assert (await self.here.manager.end(ME, box)).state == "stopped"

    async def die(self, box: str) -> None:
        boxes = [fake for fake in self.here.backend.boxes if not fake.gone.done()]
        if boxes:
            self.random.choice(boxes).die()

    async def look(self) -> None:
        for info in await self.here.manager.list(ME):
            assert info.state in ("starting", "running", "paused")
        assert await self.here.manager.list(COLLEAGUE) == []


class RetainNone:
    """Some of them keep nothing."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> bool:
        return isinstance(problem, Refused) and problem.reason_code == "retain_none"


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_left_over(tmp_path: Path, seed: int) -> None:
    async with fake_sessions(tmp_path, max_sessions=6, queue_seconds=0.05) as here:
        await here.manager.create_volume(ME, "data", MIB, "ro")
        walk = Walk(here, seed)
        async with asyncio.TaskGroup() as group:
            going = set()
            for number in range(STEPS):
                going.add(group.create_task(walk.one()))
                await asyncio.sleep(walk.random.random() * 0.015)
                if number % 10 == 0:
                    await walk.look()
            while not all(task.done() for task in going):  # a cell of a paused session waits until that ends
                await asyncio.sleep(0.1)
                for info in await here.manager.list(ME):
                    if info.state == "paused":
                        await here.manager.end(ME, info.id)
    lines = [json.loads(line) for line in here.journal().splitlines()]
    created = [line["session"] for line in lines if line["event"] == "created"]
    ended = [line["session"] for line in lines if line["event"] == "ended"]
    assert walk.seen <= set(created)
    assert sorted(created) == sorted(ended)
    assert len(here.backend.boxes) <= len(created)
    whys = Counter(line["why"] for line in lines if line["event"] == "ended")
    assert set(whys) <= {"closed", "lifetime", "box_died", "killed", "failed"}
