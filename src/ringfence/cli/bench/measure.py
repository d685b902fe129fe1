"""Rows and clocks that every benchmark shares."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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


def row(name: str, seconds: list[float], base: Row | None = None) -> Row:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 4)

    made = Row(name, len(ordered), round(statistics.median(ordered) * 1000, 4), at(0.95), at(0.99))
    if base is not None:
        made.ratio, made.baseline = round(made.p50_ms / base.p50_ms, 3), base.name
    return made


# ── Processor time and memory, from the kernel ────────────────────────────────────────────────────


def cpu_seconds(pid: int, *, with_reaped: bool = False) -> float:
    """User and system time of a process; with that of all it has waited for, if wanted."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return sum(int(word) for word in fields[11 : 15 if with_reaped else 13]) / os.sysconf("SC_CLK_TCK")


def cpu_seconds_of_all(others: Iterable[int] = ()) -> float:
    """Of this process and these others, everything below them, and whatever any of them has waited for."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + reaped.ru_utime + reaped.ru_stime
    for pid in (*below(os.getpid()), *others, *(pid for other in others for pid in below(other))):
        with suppress(OSError, IndexError):
            total += cpu_seconds(pid, with_reaped=True)
    return total


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


# ── Telling ───────────────────────────────────────────────────────────────────────────────────────


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(r).items() if v is not None or k in ("ratio", "baseline")} for r in rows]


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
    )
    heads = [head for head in every if any(getattr(r, head) is not None for r in rows)]
    lines = [heads, *(["" if getattr(r, h) is None else str(getattr(r, h)) for h in heads] for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
