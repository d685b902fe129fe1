"""The limits that a caller may ask for, and limits, signals and durations in words."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from ringfence.core.box import MIB, Limits
from ringfence.core.model import Json

CALLER_LIMITS: Mapping[str, tuple[float, float]] = {
    "wall_seconds": (0.001, 86_400),
    "cpu_seconds": (0.001, 86_400),
    "cpu_cores": (0.01, 1024),
    "memory_bytes": (16 * MIB, 2**44),
    "disk_bytes": (MIB, 2**44),
    "inodes": (64, 10**9),
    "processes": (1, 1_000_000),
    "open_files": (16, 1_048_576),
    "file_bytes": (0, 2**44),
    "output_bytes": (0, 2**44),
    "capture_bytes": (0, 64 * MIB),
}
"""What a caller may ask for. Less makes no box, more is no limit."""
_FRACTIONS = frozenset({"wall_seconds", "cpu_seconds", "cpu_cores"})


def limits_problem(limits: Limits) -> str | None:
    """What is wrong with limits that a caller asks for."""
    for name, (least, most) in CALLER_LIMITS.items():
        value = getattr(limits, name)
        if value is None and name in ("cpu_seconds", "file_bytes"):
            continue
        kinds = (int, float) if name in _FRACTIONS else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            return f"{name} must be {_between(name)}, this is {value!r}"
    return None


def _between(name: str) -> str:
    least, most = CALLER_LIMITS[name]
    return f"{'a number' if name in _FRACTIONS else 'a whole number'} from {least:g} to {most:g}"


def limits_schema() -> Json:
    """The JSON Schema of limits that a caller in this process asks for."""
    properties: Json = {
        name: {"type": "number" if name in _FRACTIONS else "integer", "minimum": least, "maximum": most}
        for name, (least, most) in CALLER_LIMITS.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


# ── In words ──────────────────────────────────────────────────────────────────────────────────────


def limit_words(name: str, limits: Limits) -> str:
    """A limit in words, by its name."""
    match name:
        case "memory":
            return f"{_mib(limits.memory_bytes)} of memory"
        case "disk":
            return f"{_mib(limits.disk_bytes)} of disk"
        case "output":
            return f"{_mib(limits.output_bytes)} of output"
        case "file_size":
            return f"{_mib(limits.disk_bytes if limits.file_bytes is None else limits.file_bytes)} in one file"
        case "pids":
            return f"{limits.processes} processes"
        case "inodes":
            return f"{limits.inodes} files on its disk"
        case "files":
            return f"{limits.open_files} open files"
        case "cpu":
            seconds = limits.cpu_seconds if limits.cpu_seconds is not None else limits.wall_seconds * limits.cpu_cores
            return f"{seconds:g} s of processor time"
        case _:
            return f"{limits.wall_seconds:g} s"


def _mib(number: int) -> str:
    return f"{number / MIB:g} MiB" if number >= MIB else f"{number} bytes"


def signal_words(number: int | None) -> str:
    try:
        return f"signal {number} ({signal.Signals(number or 0).name})"
    except ValueError:
        return f"signal {number}"


def span(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def size(number: int) -> str:
    """Bytes as a person says them."""
    for unit, name in ((1024 * MIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if number >= unit and number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number / 1_000_000:g} MB" if number >= 1_000_000 and number % 10_000 == 0 else f"{number} bytes"
