"""The nouns of sessions: boxes that stay, what is done in them step by step, and what was seen of it. Plain data.

A step's `report` holds what the supervisor saw. What the interpreter in the box says of a cell (values, an error, that
it is done) are claims of code that is not trusted, and are kept apart from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from pathlib import Path
from socket import socket
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

from ringfence.core.box import (
    NOBODY_LISTENS,
    BoxReport,
    Captured,
    FileFact,
    Input,
    Layout,
    Limits,
    Listening,
    Mount,
    NetworkRule,
    Serve,
    Stream,
)
from ringfence.core.brokering import SessionSecrets
from ringfence.core.record import plain

State = Literal["starting", "running", "paused", "stopped"]
Why = Literal["closed", "lifetime", "keeper_died", "box_died", "killed", "failed"]
Retain = Literal["none", "output"]
Tell = Callable[[Stream, bytes], Awaitable[None] | None]
"""Gets what is written, as it comes. Where it gives something back, that is to be waited for before more is read."""


class Owner(NamedTuple):
    """Whose something is: no other principal can even name it."""

    tenant: str
    agent: str


# ── A box that stays ──────────────────────────────────────────────────────────────────────────────


@plain
class Folder:
    """A file system of its own in a box, beneath /workspace, so large and no larger; empty at first."""

    at: str
    max_bytes: int
    mode: Literal["ro", "rw"] = "rw"
    """What the box may do; we always write."""


@plain
class StaySpec:
    """What a box that stays may touch; its programs come later, one by one."""

    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    folders: tuple[Folder, ...] = ()
    trees: tuple[Path, ...] = ()
    template: str = "python"
    layout: Layout = "shared"
    """`fresh`: each interpreter is started by exec, with an address layout and hash seed of its own."""
    setup: str | None = None
    """Python source that runs in each interpreter before its first cell; such interpreters are `fresh`."""
    tenant: str = "local"
    mounts: tuple[Mount, ...] = ()
    packages: tuple[Path, ...] = ()
    installs: bool = False
    listening: Listening = NOBODY_LISTENS
    root: Path | None = None
    """A host folder with an unpacked image that is its root, read-only, instead of the host's system; for commands."""


@plain
class Cell:
    """A block of Python for an interpreter that keeps its state."""

    source: bytes
    limits: Limits = field(default_factory=Limits)
    """Of these, the clock and the two for output hold for one cell; the others are the box's."""
    env: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[str, ...] = ("png",)
    told: bool = True
    """False: no caller is told of it, as of what we say to an interpreter ourselves."""


@plain
class Command:
    """A command in a box that stays, or a Python program that is run once, in an interpreter of its own."""

    argv: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/workspace"
    stdin: bytes | int | None = b""
    """All there is, or the reading end of a pipe, which stays the caller's; None keeps it open for `send`."""
    pty: tuple[int, int] | None = None
    """Columns and rows of a terminal, instead of pipes."""
    source: bytes | None = None
    """Of a Python program; `argv` then is what follows its name in `sys.argv`."""
    name: str = "-c"


@plain
class Shown:
    """A value that the interpreter showed, in one or several forms. Claimed."""

    data: Mapping[str, str]
    """MIME type to text; what is binary is in base64."""
    main: bool = False
    """The value of the cell's last expression."""
    cut: Mapping[str, int] = field(default_factory=dict)


@plain
class Failure:
    """How a cell failed. Claimed."""

    name: str
    value: str
    traceback: str = ""


@plain
class CellReport:
    """What became of a cell."""

    report: BoxReport
    """`ended` is `exited` where the interpreter said that it is done; its exit status, 0 or 1, is claimed, too."""
    results: tuple[Shown, ...] = ()
    error: Failure | None = None
    alive: bool = True
    """Whether the interpreter, and with it every variable, is still there."""
    broken: str = ""
    """What was wrong with what the interpreter said, if it did not say it as agreed."""


# ── What is wanted of a session, and what it is ───────────────────────────────────────────────────


@plain
class VolumeMount:
    name: str
    at: str
    """A folder beneath /workspace."""
    mode: Literal["ro", "rw"] = "rw"


@plain
class SessionSpec:
    stay: StaySpec = StaySpec()
    lifetime_seconds: float = 3600.0
    idle_seconds: float | None = 300.0
    """Then it is paused; None: never."""
    auto_resume: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    volumes: tuple[VolumeMount, ...] = ()
    network: tuple[NetworkRule, ...] = ()
    """What it may reach; nothing: it has no way out at all."""
    lending: SessionSecrets | None = None
    """Secrets that its box may use without having them."""
    retain: Retain = "output"


@plain
class SessionInfo:
    id: str
    owner: Owner
    state: State
    template: str
    created_at: str
    limits: Limits
    step: int = 0
    """How many steps were begun."""
    contexts: tuple[str, ...] = ("default",)
    metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: str | None = None
    """While it is paused, its lifetime stands still: when it is closed unless it is resumed."""
    ended_at: str | None = None
    why: Why | None = None
    isolation: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str | None = None
    """What it was made from."""
    memory_bytes: int | None = None
    network: tuple[str, ...] = ()
    """Whom its box may reach."""
    lending: SessionSecrets | None = None
    keeps: bool = False
    """It has a volume that it may write to, which outlives it."""


@plain
class CellRequest:
    source: str
    context: str = "default"
    limits: Limits | None = None
    """None: the session's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    after_step: int | None = None
    """Only where this is the last step that was begun; else Refused, `session_changed`. None: whatever came before."""
    keep_whole: bool = False
    """What is more than is captured is put into a file of the session: `StepReport.whole`."""


@plain
class CommandRequest:
    argv: tuple[str, ...]
    limits: Limits | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/workspace"
    stdin: bytes | None = b""
    pty: tuple[int, int] | None = None
    after_step: int | None = None
    keep_whole: bool = False


class Writing(TypedDict, total=False):
    """How a file is written."""

    append: bool
    """To what is there, instead of in its place."""
    mode: int | None
    """Its permissions; None: those of the file that was there, else the usual."""


@plain
class StepReport:
    """A step that is over."""

    session: str
    step: int
    cell: CellReport
    """For a command only its `report` is filled."""
    context: str | None = None
    fresh: bool = False
    """Its interpreter was started for it: what earlier steps of this context had in memory, if any, is not there."""
    state: State = "running"
    whole: Mapping[str, str] = field(default_factory=dict)
    """Where in the session all of a stream lies, of which only a part was captured."""


@plain
class ProcessState:
    """A command that was started in the background."""

    process: int
    argv: tuple[str, ...]
    started_at: str
    running: bool
    report: BoxReport | None = None
    """Once it is over."""


@plain
class ProcessLogs:
    """What a background command wrote, from where was asked on."""

    stdout: bytes
    stderr: bytes
    stdout_at: int
    """Where to ask from next time."""
    stderr_at: int
    running: bool


@plain
class Within:
    """The session that a call was carried out in, as far as it is known."""

    session: str
    step: int | None = None
    context: str | None = None
    state: State | None = None
    report: StepReport | None = None
    """Of a step, unabridged."""
    given: tuple[FileFact, ...] = ()
    """Files that the call put into the workspace."""
    packages: tuple[Mapping[str, str], ...] = ()
    """What was installed for it, when it was opened."""


@plain
class ForkProblem:
    """Why one of several forks was not made."""

    reason_code: str
    message: str


# ── Ports of a backend that keeps boxes ───────────────────────────────────────────────────────────


class Interpreting(Protocol):
    """An interpreter in a box that stays."""

    @property
    def alive(self) -> bool: ...

    async def run(self, cell: Cell, tell: Tell, shown: Callable[[Shown | Failure], None]) -> CellReport:
        """One cell, to its end. One at a time. Cancelling interrupts it, and kills it where that does not help."""
        ...

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the cell that runs. False where none does."""
        ...

    async def end(self) -> None: ...


class Commanding(Protocol):
    """A command that was started in a box that stays."""

    @property
    def logs(self) -> tuple[Captured, Captured]: ...

    async def over(self) -> BoxReport:
        """Wait for it. Cancelling leaves it running."""
        ...

    def signal(self, number: int) -> None: ...

    def send(self, data: bytes) -> int:
        """How much of it was taken. Raises Unavailable where the program reads no input."""
        ...

    def close_input(self) -> None: ...

    def resize(self, columns: int, rows: int) -> None: ...


class Living(Protocol):
    """A box that stays until it is ended."""

    @property
    def isolation(self) -> Mapping[str, Any]: ...

    @property
    def held(self) -> Mapping[str, tuple[bool, tuple[int, int]]]:
        """What is mounted, by where: whether it may be written to; and its device and inode."""
        ...

    async def reach(self) -> socket:
        """A socket in its network, not connected yet. Raises Unavailable."""
        ...

    def asking(self) -> Callable[[], dict[str, Any] | None]:
        """From now on: what it asks of the network, as a `network` fact; None where that is not known."""
        ...

    @property
    def workspace(self) -> int:
        """A descriptor of /workspace."""
        ...

    @property
    def input(self) -> int | None:
        """A writable descriptor of /workspace/input."""
        ...

    @property
    def folders(self) -> Mapping[str, int]:
        """Writable descriptors of the spec's folders, by where they are."""
        ...

    @property
    def host_id(self) -> int | None:
        """Whom its files belong to on the host, where that is not ourselves."""
        ...

    async def interpreter(self) -> Interpreting: ...

    async def command(self, command: Command, tell: Tell) -> Commanding: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def memory(self) -> int: ...

    async def end(self) -> None: ...

    async def ended(self) -> str:
        """Wait until it is gone, for whatever reason; says why."""
        ...


@runtime_checkable
class Opening(Protocol):
    """A backend whose boxes can stay."""

    async def open(self, spec: StaySpec, network: Serve | None = None) -> Living:
        """Raises ValueError for a spec that makes no sense, Unavailable where there is no box to be had."""
        ...
