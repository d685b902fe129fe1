"""The nouns of a box: what it may touch, what runs in it, and what the supervisor saw of it. Plain data, no verbs.

Whatever a `BoxSpec` does not name is forbidden. A `BoxReport` holds only what the supervisor itself observed: bytes
that came out of the box are data in it, never a statement.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MIB = 1024 * 1024

Ended = Literal["exited", "signalled", "timeout", "oom", "pids", "disk", "output", "policy", "cancelled", "infra"]
Limit = Literal["wall", "cpu", "memory", "pids", "disk", "inodes", "files", "file_size", "output"]
Stream = Literal["stdout", "stderr"]
Layout = Literal["shared", "fresh"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a box may use, all of its processes together."""

    wall_seconds: float = 30.0
    cpu_seconds: float | None = None
    """Processor time; None: as much as the wall clock and the cores allow."""
    cpu_cores: float = 1.0
    memory_bytes: int = 256 * MIB
    disk_bytes: int = 512 * MIB
    inodes: int = 65_536
    processes: int = 64
    """Processes and threads together."""
    open_files: int = 1024
    """For each process."""
    file_bytes: int | None = None
    """The longest file; None: as long as the disk limit."""
    output_bytes: int = 64 * MIB
    """More on stdout and stderr together ends the run."""
    capture_bytes: int = 1_000_000
    """Of each stream this much is returned, its head and its tail; the rest is counted and hashed."""


@dataclass(frozen=True, slots=True)
class Program:
    """What runs: Python source in the box's interpreter, or any command."""

    kind: Literal["python", "command"]
    source: bytes = b""
    """Python source, for `python`."""
    argv: tuple[str, ...] = ()
    """For a command all of its words; for Python what follows the program's name in `sys.argv`."""
    name: str = "-c"
    """What Python calls the source: `-c`, or the file name that tracebacks and `__file__` show."""
    stdin: bytes | int = b""
    """Bytes, or a descriptor: the reading end of a pipe that is for this box alone. It stays the caller's to close."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file put into /workspace/input before the start: a host file, or these bytes."""

    name: str
    """Relative to /workspace/input; may have folders."""
    source: Path | bytes


@dataclass(frozen=True, slots=True)
class SetUp:
    """What boxes of an operator's template begin with, beside its packages."""

    source: str = ""
    """Python, run once; what it makes, the interpreters of sessions begin with."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Host files and folders for /workspace/input, by the name that they have there."""


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """One box: its program and everything that it may touch."""

    program: Program
    limits: Limits = Limits()
    env: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    output: Path | None = None
    """A host folder that the files of /workspace/output are copied to."""
    trees: tuple[Path, ...] = ()
    """Host folders that are readable in the box, at the same path: a virtual environment, say."""
    template: str = "python"
    """An operator-made baseline: `python`, or `data` with packages loaded."""
    layout: Layout = "shared"
    """`fresh`: started by exec, with an address layout and hash seed of its own."""
    tenant: str = "local"


@dataclass(frozen=True, slots=True)
class Captured:
    """What came out of one stream."""

    head: bytes = b""
    tail: bytes = b""
    """Empty where the head is all of it."""
    total: int = 0
    sha256: str = hashlib.sha256(b"").hexdigest()

    @property
    def truncated(self) -> bool:
        return len(self.head) + len(self.tail) < self.total

    @property
    def text(self) -> str:
        """Readable text; what was left out is said in its place."""
        if not self.truncated:
            return (self.head + self.tail).decode("utf-8", "replace")
        left_out = self.total - len(self.head) - len(self.tail)
        middle = f"\n… {left_out} bytes left out …\n"
        return self.head.decode("utf-8", "replace") + middle + self.tail.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file that went in or came out."""

    path: str
    """As the box sees it, `/workspace/…`."""
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Usage:
    """From the kernel's own accounting; None where it does not tell."""

    cpu_ms: float | None = None
    peak_memory_bytes: int | None = None
    io_bytes: int | None = None
    processes: int | None = None
    """The most at one time, where the kernel tells; threads count."""


@dataclass(frozen=True, slots=True)
class BoxReport:
    """How a run ended, as its supervisor saw it."""

    ended: Ended
    exit_status: int | None = None
    signal: int | None = None
    limit: Limit | None = None
    wall_ms: float = 0.0
    usage: Usage = Usage()
    isolation: dict[str, Any] = field(default_factory=dict)
    """The `isolation` fact: backend, level, memory_layout, protections, and by which means each limit is enforced."""
    denials: Mapping[str, int] = field(default_factory=dict)
    """Refused system calls by name."""
    stdout: Captured = Captured()
    stderr: Captured = Captured()
    inputs: tuple[FileFact, ...] = ()
    files: tuple[FileFact, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What lay in /workspace/output and was not collected, and why."""
    trouble: tuple[str, ...] = ()
    """Steps of tear-down that failed, and what the box itself said about a set-up that failed."""


# ── Between a caller in this process and its box ──────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Attached:
    """What goes beside the arguments of a call: bytes, and where bytes go. The arguments name and digest it.

    Only a caller in this process can attach anything; over MCP there are arguments alone.
    """

    inputs: tuple[Input, ...] = ()
    stdin: bytes | int = b""
    output: Path | None = None
    tell: Callable[[Stream, bytes], None] | None = None
    """Gets what the program writes, as it comes."""
    shown: Callable[[Any], None] | None = None
    """Gets each `sessions.Shown` or `sessions.Failure` of a cell, as it comes."""
    data: bytes | AsyncIterator[bytes] = b""
    """What is to be written, whole or piece by piece."""
    sink: Callable[[bytes], Awaitable[None]] | None = None
    """Gets what is read, piece by piece, and may take its time."""
    changed: Callable[[Any], None] | None = None
    """Gets each change of a folder that is watched."""
    keys: AsyncIterator[bytes | tuple[int, int]] | None = None
    """What is typed into a command as it runs; a pair is the new size of its terminal, in columns and rows."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that is over, and the limits that it had."""

    limits: Limits
    report: BoxReport
