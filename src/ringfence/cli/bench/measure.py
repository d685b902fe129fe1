"""What the benchmarks share: rows, clocks, cases that alternate, and a record of their own."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringfence.cli import terminal
from ringfence.core.record import dataclass
from ringfence.core.system import process_fields
from ringfence.sdk import engine

_PAUSE_SECONDS = 0.05
_TIMES = ("p50_ms", "p95_ms", "p99_ms")
_ALWAYS = (*_TIMES, "ratio", "baseline")
_CONFIG = "version: 1\ngateway: {{state: {state}, listen: {listen}}}\n"

Work = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class Row:
    """One measured case; `ratio` is its p50 against the baseline's, measured in the same run."""

    name: str
    n: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    ratio: float | None = None
    baseline: str | None = None
    cpu_ms: float | None = None
    """Processor time of one, of all processes together."""
    per_second: float | None = None
    added_ms: float | None = None
    """Its p50 less the baseline's."""
    mb_per_second: float | None = None
    memory_kb: float | None = None
    """What one alone needs; what it shares with others is not counted."""
    why: str | None = None
    """Why it could not be measured; then `n` is 0, and no figure means anything."""


def row(name: str, seconds: list[float], base: Row | None = None) -> Row:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 4)

    made = Row(name, len(ordered), round(statistics.median(ordered) * 1000, 4), at(0.95), at(0.99))
    if base is not None:
        made.ratio = round(made.p50_ms / base.p50_ms, 3)
        made.baseline = base.name
    return made


def absent(name: str, why: str) -> Row:
    """What could not be measured here."""
    return Row(name, 0, 0.0, 0.0, 0.0, why=why)


# ── Processor time and memory, from the kernel ────────────────────────────────────────────────────


def cpu_seconds(pid: int, *, with_reaped: bool = False) -> float:
    """User and system time of a process; with that of all it has waited for, if wanted."""
    fields = process_fields(pid)
    return sum(int(word) for word in fields[11 : 15 if with_reaped else 13]) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_all(others: Iterable[int] = ()) -> float:
    """The processor time of this process and these others, with all children, also those that ended."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + reaped.ru_utime + reaped.ru_stime
    for pid in (*below(os.getpid()), *others, *(pid for other in others for pid in below(other))):
        with suppress(OSError, IndexError):
            total += cpu_seconds(pid, with_reaped=True)
    return total


def fine_cpu_seconds(pid: int) -> float:
    """The same of a process alone, to the nanosecond: the kernel's other figures come in hundredths of a second."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of that process, as in clock_getcpuclockid(3)


def below(pid: int) -> Iterator[int]:
    """Every process that this one started, and that those started."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="utf-8").split():
                yield int(child)
                yield from below(int(child))


def private_kb(pid: int) -> int:
    """Memory that this process shares with no other. Raises OSError where we may not look."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


# ── Output ────────────────────────────────────────────────────────────────────────────────────────


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [{k: v for k, v in _told(r).items() if v is not None or k in _ALWAYS} for r in rows]


def _told(row: Row) -> dict[str, Any]:
    """Its fields; of one that was not measured, no times."""
    return asdict(row) | (dict.fromkeys(_TIMES) if row.n == 0 else {})


def table(rows: list[Row]) -> str:
    every = (
        "name",
        "n",
        "p50_ms",
        "p95_ms",
        "p99_ms",
        "ratio",
        "baseline",
        "added_ms",
        "cpu_ms",
        "per_second",
        "mb_per_second",
        "memory_kb",
        "why",
    )
    told = [_told(r) for r in rows]
    heads = [head for head in every if any(each[head] is not None for each in told)]
    cells = [["" if each[h] is None else str(each[h]) for h in heads] for each in told]
    return terminal.table(heads, cells)


# ── Cases ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BenchCase:
    """Something that is run again and again, back to back."""

    name: str
    once: Work
    n: int
    baseline: str | None = None
    before: Work | None = None
    """What has to be done each time before the clock runs."""
    after: Work | None = None
    """And after it has stopped."""


async def interleaved(
    cases: list[BenchCase], rounds: int, what: str, others: Callable[[], list[int]] = list
) -> list[Row]:
    """Measure some runs of every case in each round. `others` names processes that work for us and are not below us."""
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


async def repeated(case: BenchCase, count: int) -> list[float]:
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
