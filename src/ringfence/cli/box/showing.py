"""What the verbs of `ringfence box` show: tables, and how far long work is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from ringfence.cli.terminal import cut, safe
from ringfence.sdk.infos import FileInfo, Progress, SandboxInfo, SnapshotInfo, VolumeInfo

_TICK_SECONDS = 0.2
_CLEAR = "\r\x1b[K"


def plain(value: Any) -> Any:
    """A record as JSON has it."""
    return asdict(value)


def table(heads: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    lines = [heads, *(tuple("-" if cell is None else cut(str(cell), 120) for cell in row) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def sandboxes(infos: list[SandboxInfo]) -> str:
    rows = [
        (
            info.id,
            info.state if info.why is None else f"{info.state} ({info.why})",
            info.template,
            _moment(info.created_at),
            _moment(info.ended_at or info.expires_at),
            info.step,
            size(info.memory_bytes),
            " ".join(f"{name}={value}" for name, value in info.metadata.items()) or None,
        )
        for info in infos
    ]
    return table(("ID", "STATE", "TEMPLATE", "CREATED", "ENDS", "STEPS", "MEMORY", "METADATA"), rows)


def snapshots(infos: list[SnapshotInfo]) -> str:
    rows = [(each.id, each.name, each.files, size(each.bytes), _moment(each.created_at)) for each in infos]
    return table(("ID", "NAME", "FILES", "SIZE", "CREATED"), rows)


def volumes(infos: list[VolumeInfo]) -> str:
    rows = [(each.name, each.files, size(each.bytes), size(each.max_bytes), _moment(each.saved_at)) for each in infos]
    return table(("NAME", "FILES", "SIZE", "MOST", "SAVED"), rows)


def files(infos: list[FileInfo]) -> str:
    rows = [
        (
            each.kind,
            f"{each.mode:04o}",
            each.bytes if each.kind == "file" else None,
            each.modified.strftime("%Y-%m-%d %H:%M:%S"),
            each.path if each.target is None else f"{each.path} -> {each.target}",
        )
        for each in infos
    ]
    return table(("KIND", "MODE", "BYTES", "MODIFIED", "PATH"), rows)


def _moment(text: str | None) -> str | None:
    return None if text is None else text[:19].replace("T", " ")


def size(number: int | None) -> str | None:
    """Bytes, short."""
    if number is None:
        return None
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return None


class Meter:
    """A line on stderr that says how far something is; on a terminal alone, and gone when it is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._far: Progress | None = None

    def __call__(self, far: Progress) -> None:
        self._far = far

    def line(self) -> str:
        took = f"{time.monotonic() - self._began:.0f} s"
        if self._far is None:
            return f"{self._what} … {took}"
        total = f" of {size(self._far.total)}" if self._far.total is not None else ""
        return f"{self._what} … {size(self._far.done)}{total}, {took}"


@asynccontextmanager
async def metered(what: str) -> AsyncIterator[Meter]:
    meter = Meter(what)
    if not sys.stderr.isatty():
        yield meter
        return
    telling = asyncio.get_running_loop().create_task(_tell(meter))
    try:
        yield meter
    finally:
        telling.cancel()
        await asyncio.wait({telling})
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()


async def _tell(meter: Meter) -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
        sys.stderr.write(_CLEAR + safe(meter.line()))
        sys.stderr.flush()
