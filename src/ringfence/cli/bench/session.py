"""Boxes that stay: a step in one, resume, templates, snapshots, and what one needs while it lives.

Through the public API, contract, policy, record and facts included, with every protection on. Cases alternate with the
bare interpreter in one run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
from contextlib import suppress
from pathlib import Path

from ringfence.cli.bench.measure import (
    BenchCase,
    Row,
    Work,
    below,
    interleaved,
    note,
    own_record,
    private_kb,
    repeated,
    row,
)
from ringfence.core.box import MIB
from ringfence.core.errors import Unavailable
from ringfence.core.system import interpreter
from ringfence.sdk.blocking import Sandbox
from ringfence.sdk.execution import Execution
from ringfence.sdk.infos import SnapshotInfo

_DATA = ("numpy", "pandas")
_LIVE = 20
_SETTLE_SECONDS = 0.5
_FILES = 100
"""Of one MiB each, in the snapshot."""
_FILL = "import os\nfor n in range({}): open(str(n), 'wb').write(os.urandom({}))"


def run(runs: int, rounds: int = 10) -> list[Row]:
    """`runs` of the cases that matter, fewer of what is slow. Raises Unavailable where there are no boxes here."""
    with own_record() as path:
        return asyncio.run(_Sessions(path.parent / "state").measure(runs, rounds))


class _Sessions:
    """What is measured, and who keeps it."""

    def __init__(self, state: Path) -> None:
        self._address = state / "keeper" / "address"
        self._made: list[Sandbox] = []

    async def measure(self, runs: int, rounds: int) -> list[Row]:
        # In this thread, which has nothing else to do: sandboxes are served by another.
        note("session: a snapshot to start from")
        with Sandbox.create() as live:
            taken = _filled()
            cases = self._cases(live, taken, runs)
            rows = await interleaved(cases, rounds, "session", self._keeper)
            Sandbox.remove_snapshot(taken)
        return rows + await self._memory(rows[0])

    def _keeper(self) -> list[int]:
        with suppress(OSError, ValueError, KeyError):
            return [int(json.loads(self._address.read_text(encoding="utf-8"))["process"])]
        return []

    def _cases(self, live: Sandbox, taken: SnapshotInfo, runs: int) -> list[BenchCase]:
        few = max(10, runs // 5)
        fewest = max(5, runs // 50)
        bare = BenchCase("bare python -c pass", _bare, few)
        cases = [
            bare,
            BenchCase("session: a step", _step(live), runs, bare.name),
            BenchCase("session: resumed, to the first result", _step(live), runs, bare.name, before=_paused(live)),
            BenchCase("session: opened, to the first result", self._opened(), few, bare.name, after=self._killed),
        ]
        if all(importlib.util.find_spec(name) for name in _DATA):
            name = "session: of template data, to the first result"
            warmed = self._opened("import numpy, pandas", template="data")
            cases.append(BenchCase(name, warmed, few, bare.name, after=self._killed))
        else:
            note("numpy and pandas are not installed here, so a template with them is not measured")
        restored = self._opened(f"import os\nassert len(os.listdir()) >= {_FILES}", snapshot=taken.id)
        name = f"session: of a snapshot of {_FILES} MiB, to the first result"
        return [*cases, BenchCase(name, restored, fewest, bare.name, after=self._killed)]

    def _opened(self, code: str = "pass", **options: str) -> Work:
        async def once() -> None:
            self._made.append(Sandbox.create(**options))  # type: ignore[arg-type]
            _checked(self._made[-1].run_code(code))

        return once

    async def _killed(self) -> None:
        while self._made:
            self._made.pop().kill()

    # ── What one needs while it lives ──

    async def _memory(self, bare: Row) -> list[Row]:
        note("session: memory")
        open_one = self._opened()
        await repeated(BenchCase("", open_one, 1), 3)
        await self._killed()
        before = await self._private_kb()
        idle = row(
            f"idle session, {_LIVE} of them: to open one", await repeated(BenchCase("", open_one, 1), _LIVE), bare
        )
        idle.memory_kb = _each(before, await self._private_kb())
        waiting = list(self._made)

        async def pause() -> None:
            waiting.pop().pause()

        paused = row(
            f"paused session, {_LIVE} of them: to pause one", await repeated(BenchCase("", pause, 1), _LIVE), bare
        )
        paused.memory_kb = _each(before, await self._private_kb())
        await self._killed()
        return [idle, paused]

    async def _private_kb(self) -> int | None:
        """The memory of the keeper and its children, once the boxes that it keeps ready are there again."""
        await asyncio.sleep(_SETTLE_SECONDS)
        total = 0
        try:
            for pid in (pid for keeper in self._keeper() for pid in (keeper, *below(keeper))):
                with suppress(ProcessLookupError, FileNotFoundError):  # it is over, or has no memory of its own
                    total += private_kb(pid)
        except OSError:
            note("memory is not shown: only root may look into boxes")
            return None
        return total


def _each(before: int | None, after: int | None) -> float | None:
    return None if before is None or after is None else round((after - before) / _LIVE, 1)


def _filled() -> SnapshotInfo:
    with Sandbox.create() as full:
        _checked(full.run_code(_FILL.format(_FILES, MIB), timeout=120))
        return full.snapshot()


async def _bare() -> None:
    _start()


def _start() -> None:
    started = subprocess.Popen((str(interpreter()), "-c", "pass"), stdin=subprocess.DEVNULL)
    if started.wait() != 0:
        raise Unavailable("bench", f"the interpreter ended with {started.returncode}")


def _step(sandbox: Sandbox) -> Work:
    async def once() -> None:
        _checked(sandbox.run_code("pass"))

    return once


def _paused(sandbox: Sandbox) -> Work:
    async def once() -> None:
        sandbox.pause()

    return once


def _checked(execution: Execution) -> None:
    if execution.status != "success":
        raise Unavailable("bench", f"a step ended as {execution.status}: {execution.error}")
