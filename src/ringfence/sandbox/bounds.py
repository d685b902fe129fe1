"""What the limits of a box may be."""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.box import MIB, Limits
from ringfence.model import Json

BOUNDS: Mapping[str, tuple[float, float]] = {
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
"""What each limit may be. Less makes no box, more is no limit."""
_FRACTIONS = frozenset({"wall_seconds", "cpu_seconds", "cpu_cores"})


def limits_problem(limits: Limits) -> str | None:
    """What is wrong with limits that somebody asks for."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(limits, name)
        if value is None and name in ("cpu_seconds", "file_bytes"):
            continue
        kinds = (int, float) if name in _FRACTIONS else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            return f"{name} must be {_between(name)}, this is {value!r}"
    return None


def _between(name: str) -> str:
    least, most = BOUNDS[name]
    return f"{'a number' if name in _FRACTIONS else 'a whole number'} from {least:g} to {most:g}"


def limits_schema() -> Json:
    """The JSON Schema of limits that a caller in this process asks for."""
    properties: Json = {
        name: {"type": "number" if name in _FRACTIONS else "integer", "minimum": least, "maximum": most}
        for name, (least, most) in BOUNDS.items()
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}
