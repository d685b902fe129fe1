"""What several benchmarks need: cases that alternate, and a record of their own."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ringfence.cli.bench.measure import Row, cpu_seconds_of_all, row
from ringfence.sdk import engine

_PAUSE_SECONDS = 0.05
_CONFIG = "version: 1\ngateway: {{state: {state}, listen: {listen}}}\n"

Work = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Case:
    """Something that is run again and again, back to back."""

    name: str
    once: Work
    n: int
    baseline: str | None = None
    before: Work | None = None
    """What has to be done each time before the clock runs."""
    after: Work | None = None
    """And after it has stopped."""


async def interleaved(cases: list[Case], rounds: int, what: str, others: Callable[[], list[int]] = list) -> list[Row]:
    """In each round some runs of every case. `others` names processes that work for us and are not below us."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    cpu = dict.fromkeys(times, 0.0)
    for case in cases:
        await repeated(case, min(case.n, 20))
    for number in range(rounds):
        note(f"{what}: round {number + 1} of {rounds}")
        for case in cases:
            share = case.n * (number + 1) // rounds - case.n * number // rounds
            before = cpu_seconds_of_all(others())
            times[case.name] += await repeated(case, share)
            await asyncio.sleep(_PAUSE_SECONDS)
            cpu[case.name] += cpu_seconds_of_all(others()) - before
    rows: dict[str, Row] = {}
    for case in cases:
        rows[case.name] = made = row(case.name, times[case.name], rows.get(case.baseline or ""))
        made.cpu_ms = round(cpu[case.name] / made.n * 1000, 2)
    return list(rows.values())


async def repeated(case: Case, count: int) -> list[float]:
    """How long each took, in seconds."""
    out: list[float] = []
    for _ in range(count):
        if case.before is not None:
            await case.before()
        began = time.perf_counter()
        await case.once()
        out.append(time.perf_counter() - began)
        if case.after is not None:
            await case.after()
    return out


@contextmanager
def own_record(listen: str = "127.0.0.1:0") -> Iterator[Path]:
    """Neither the user's record nor their configuration has a part in what is measured. Yields a configuration."""
    names = ("RINGFENCE_CONFIG", "RINGFENCE_KEYS")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        path = Path(folder) / "ringfence.yaml"
        path.write_text(_CONFIG.format(listen=f'"{listen}"', state=Path(folder) / "state"), encoding="utf-8")
        engine.close()
        os.environ.update(RINGFENCE_CONFIG=str(path), RINGFENCE_KEYS=str(Path(folder) / "keys"))
        try:
            yield path
        finally:
            engine.close()
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
