"""Rows and clocks that every benchmark shares."""

from __future__ import annotations

import os
import statistics
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
    per_second: float | None = None


def row(name: str, seconds: list[float]) -> Row:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 4)

    return Row(name, len(ordered), round(statistics.median(ordered) * 1000, 4), at(0.95), at(0.99))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(r).items() if v is not None or k in ("ratio", "baseline")} for r in rows]


def table(rows: list[Row]) -> str:
    heads = ("name", "n", "p50_ms", "p95_ms", "p99_ms", "ratio", "baseline", "cpu_ms", "per_second")
    lines = [heads, *(tuple("" if getattr(r, h) is None else str(getattr(r, h)) for h in heads) for r in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
