"""Limits, signals and spans of time in words."""

from __future__ import annotations

import signal

from ringfence.box import MIB, Limits


def limit_words(name: str, limits: Limits) -> str:
    """How much of what, by the name of the limit."""
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
