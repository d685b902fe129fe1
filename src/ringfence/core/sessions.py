"""The nouns of sessions: boxes that stay, what is done in them step by step, and what was seen of it. Plain data.

A step's `report` holds what the supervisor saw. What the interpreter in the box says of a cell (values, an error, that
it is done) are claims of code that is not trusted, and are kept apart from it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path
from socket import socket
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

from ringfence.core.box import (
    NOBODY_LISTENS,
    BoxReport,
    Captured,
    FileFact,
    ImageRoot,
    Input,
    Layout,
    Limits,
    Listening,
    Mount,
    NetworkRule,
    Serve,
    Shown,
    Stream,
)
from ringfence.core.box_files import BoxFiles
from ringfence.core.brokering import SessionSecrets
from ringfence.core.record import plain

State = Literal["starting", "running", "paused", "stopped"]
Why = Literal["closed", "lifetime", "keeper_died", "box_died", "killed", "failed"]
Retain = Literal["none", "output"]
Tell = Callable[[Stream, bytes], Awaitable[None] | None]
"""Called with output as it comes. Where it returns an awaitable, that is awaited before more is read."""


class TellEnds(Protocol):
    """A `Tell` that is also told when nothing more can come on a stream, though its program may live on."""

    def __call__(self, stream: Stream, chunk: bytes, /) -> Awaitable[None] | None: ...

    def closed(self, stream: Stream) -> None: ...


def timestamp(seconds: float | None = None) -> str:
    """A moment as records of sessions have it: UTC, to the millisecond; now unless it is given, since the epoch."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat(timespec="milliseconds")


class Owner(NamedTuple):
    """The owner of something: no other principal can even name it."""

    tenant: str
    agent: str


# ── A box that stays ──────────────────────────────────────────────────────────────────────────────


@plain
class Folder:
    """A file system of its own in a box, beneath /workspace, with a size limit; empty at first."""

    at: str
    max_bytes: int
    mode: Literal["ro", "rw"] = "rw"
    """The rights of the box; the supervisor always writes."""


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
    image: ImageRoot | None = None
    """An image as its root, with what is known of it: cells and programs run with the image's own interpreter."""
    level: str = "process"
    """The weakest of LEVELS that its box may have."""
    backend: str | None = None
    """What is to make it, by name; None: what the configuration names."""
    has_input: bool = False
    """It has a folder for inputs even where none are given, for those of a snapshot."""


@plain
class Cell:
    """A block of Python for an interpreter that keeps its state."""

    source: bytes
    limits: Limits = field(default_factory=Limits)
    """Of these, the clock and the two for output hold for one cell; the others are the box's."""
    env: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[str, ...] = ("png",)
    reported: bool = True
    """False where no caller gets a report of it: what it did is then reported as late, with the next step."""


@plain
class Command:
    """A command in a box that stays, or a Python program that is run once, in an interpreter of its own."""

    argv: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/workspace"
    stdin: bytes | int | None = b""
    """All of its input, or the reading end of a pipe, which stays the caller's; None keeps it open for `send`."""
    pty: tuple[int, int] | None = None
    """Columns and rows of a terminal, instead of pipes."""
    source: bytes | None = None
    """The source of a Python program; `argv` then follows its name in `sys.argv`."""
    name: str = "-c"
    reported: bool = True
    """Whether somebody waits for its report; else the next report that is waited for has what was late."""


@plain
class Failure:
    """How a cell failed. Claimed."""

    name: str
    value: str
    traceback: str = ""


@plain
class CellReport:
    """The result of a cell."""

    report: BoxReport
    """`ended` is `exited` where the interpreter claimed to be done; its exit status, 0 or 1, is claimed, too."""
    results: tuple[Shown, ...] = ()
    error: Failure | None = None
    alive: bool = True
    """Whether the interpreter, with all variables, is still there."""
    broken: str = ""
    """What was wrong with the claims of the interpreter, if they were malformed."""


# ── Sessions: what is asked of them, and what they are ────────────────────────────────────────────


@plain
class VolumeMount:
    """A volume of a session, and where it lies in the box."""

    name: str
    at: str
    """A folder beneath /workspace."""
    mode: Literal["ro", "rw"] = "rw"


@plain
class SessionSpec:
    stay: StaySpec = StaySpec()
    lifetime_seconds: float = 3600.0
    idle_seconds: float | None = 300.0
    """After so long without use it is paused; None: never."""
    auto_resume: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    volumes: tuple[VolumeMount, ...] = ()
    network: tuple[NetworkRule, ...] = ()
    """What it may reach; without any rule, nothing."""
    opened_by: str | None = None
    """The capability by which an agent opened it; None: a program of the user's did, with what it chose."""
    secrets: SessionSecrets | None = None
    """Secrets that its box may use without having them."""
    retain: Retain = "output"
    packages: tuple[str, ...] = ()
    """The names of the packages that were installed for it, for its snapshots."""


@plain
class SessionInfo:
    id: str
    owner: Owner
    state: State
    template: str
    created_at: str
    limits: Limits
    step: int = 0
    """The number of steps that were started."""
    contexts: tuple[str, ...] = ("default",)
    metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: str | None = None
    """When it is closed. A pause stops its lifetime; then this is when it is closed unless it is resumed."""
    ended_at: str | None = None
    why: Why | None = None
    isolation: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str | None = None
    """The snapshot that it was made from."""
    memory_bytes: int | None = None
    given_back_bytes: int | None = None
    """How much of its memory the host has back, since it is paused."""
    network: tuple[str, ...] = ()
    """The hosts that its box may reach."""
    rules: tuple[NetworkRule, ...] = ()
    """The rules that name these hosts, as they were when it was opened."""
    opened_by: str | None = None
    """See `SessionSpec`. An agent has no access to what a program opened."""
    secrets: SessionSecrets | None = None
    keeps: bool = False
    """Whether it may write to a volume, which outlives it."""
    planted: tuple[str, ...] = ()
    """Once it has ended: what was planted in its mounts after its last step (see `BoxReport.planted`)."""
    not_kept: tuple[str, ...] = ()
    """Once it has ended: what of its volumes and outputs could not be kept, and why."""


@plain
class CellRequest:
    source: str
    context: str = "default"
    limits: Limits | None = None
    """None: the session's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    after_step: int | None = None
    """Run only if this is the last step that was started; else Refused, `session_changed`. None: in any case."""
    keep_whole: bool = False
    """Put output beyond what is captured into a file of the session: `StepReport.whole`."""


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
    """Append to the existing file, instead of replacing it."""
    mode: int | None
    """Its permissions; None: those of the existing file, else the default."""


@plain
class StepReport:
    """A step that is over."""

    session: str
    step: int
    cell: CellReport
    """For a command only its `report` is filled."""
    context: str | None = None
    fresh: bool = False
    """Its interpreter was started for it: variables of earlier steps of this context, if any, are gone."""
    state: State = "running"
    whole: Mapping[str, str] = field(default_factory=dict)
    """The file in the session with the whole of a stream, of which only a part was captured."""


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
    """Output of a background command, from the offsets that were asked for."""

    stdout: bytes
    stderr: bytes
    stdout_at: int
    """The offset to ask from next time."""
    stderr_at: int
    running: bool


@plain
class UsageSample:
    """What a session used at one moment."""

    at: float
    cpu_ms: float
    """Since it began."""
    memory_bytes: int


@plain
class StepOutput:
    """The end of what a step wrote."""

    step: int
    at: str
    """When it was over."""
    what: str
    """The context of a cell, or the words of a command."""
    ended: str
    stdout: bytes
    stderr: bytes


@plain
class SessionView:
    """A session as people look at it."""

    info: SessionInfo
    samples: tuple[UsageSample, ...] = ()
    """The oldest first."""
    steps: tuple[StepOutput, ...] = ()
    """The last ones, the oldest first; none where the session is to leave nothing."""


@plain
class Within:
    """The session that a call was carried out in, as far as it is known."""

    session: str
    step: int | None = None
    context: str | None = None
    state: State | None = None
    report: StepReport | None = None
    """The report of a step, unabridged."""
    given: tuple[FileFact, ...] = ()
    """Files that the call put into the workspace."""
    packages: tuple[Mapping[str, str], ...] = ()
    """What was installed for it, when it was opened."""
    planted: tuple[str, ...] = ()
    """What was planted in its mounts after its last step, when it was closed."""
    not_kept: tuple[str, ...] = ()
    """What of its volumes and outputs could not be kept, when it was closed."""


@plain
class ForkProblem:
    """Why one of several forks was not made."""

    reason_code: str
    message: str


# ── Callbacks of a step ───────────────────────────────────────────────────────────────────────────

OnShown = Callable[[Shown | Failure], None]


def discard_output(stream: Stream, data: bytes) -> None:
    """For `tell`, where the caller does not listen: nothing is sent before the end."""


def discard_value(claim: Shown | Failure) -> None:
    """Likewise for `shown`."""


# ── Ports of a backend whose boxes can stay ───────────────────────────────────────────────────────


class BoxInterpreter(Protocol):
    """An interpreter in a box that stays."""

    @property
    def alive(self) -> bool: ...

    @property
    def folder(self) -> str | None:
        """Its working directory, by the kernel's word; None where that is gone or not known."""
        ...

    async def run(self, cell: Cell, tell: Tell, shown: OnShown) -> CellReport:
        """Run one cell to its end, one at a time. Cancelling interrupts it, and kills the interpreter if that does not
        help."""
        ...

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the cell that runs. False where none does."""
        ...

    async def end(self) -> None: ...


class StartedCommand(Protocol):
    """A command that was started in a box that stays."""

    @property
    def logs(self) -> tuple[Captured, Captured]: ...

    async def over(self) -> BoxReport:
        """Wait for its end. Cancelling leaves it running."""
        ...

    def signal(self, number: int) -> None: ...

    def send(self, data: bytes) -> int:
        """Returns how many bytes were taken. Raises Unavailable where the program reads no input."""
        ...

    def close_input(self) -> None: ...

    def resize(self, columns: int, rows: int) -> bool:
        """Give its terminal another size. False where it has none."""
        ...


class StayingBox(Protocol):
    """A box that stays until it is ended."""

    @property
    def isolation(self) -> Mapping[str, Any]: ...

    @property
    def mounted(self) -> Mapping[str, tuple[bool, tuple[int, int]]]:
        """Its mounts by path: whether it may write to them, and their device and inode."""
        ...

    async def connect(self, port: int) -> socket:
        """A connection to this port on its own loopback; it does not block. Raises OSError where nothing listens there,
        Unavailable."""
        ...

    def network_meter(self) -> Callable[[], dict[str, Any] | None]:
        """A function that returns the `network` fact of what happened since this call; None where that is not known."""
        ...

    def files(self, on_host: tuple[str, ...] = ()) -> BoxFiles:
        """Its files, and the means to fill it before anything runs; the caller closes them. `on_host`: where it sees
        folders of the host that it may write to. Raises OSError and KeyError where the box is gone."""
        ...

    async def interpreter(self) -> BoxInterpreter: ...

    async def command(self, command: Command, tell: Tell) -> StartedCommand: ...

    async def pause(self) -> None:
        """Raises OSError, Unavailable."""
        ...

    async def resume(self) -> None:
        """Raises OSError, Unavailable."""
        ...

    def hold_network(self) -> None:
        """Let nothing more out of it until something is run in it anew."""
        ...

    def give_back(self) -> int | None:
        """Give the memory of a paused box back to the host, until it is used again. Blocks. Returns how many bytes that
        freed; None where this host has no way to, and it stays resident. Raises OSError."""
        ...

    def memory(self) -> int: ...

    def cpu_ms(self) -> float:
        """Processor time of everything that ran in it."""
        ...

    def runs_on(self) -> bool:
        """Whether something that a step started goes on in it, or another step."""
        ...

    async def end(self) -> None: ...

    async def ended(self) -> str:
        """Wait until it has ended, for whatever reason; returns the reason."""
        ...


@runtime_checkable
class SessionBackend(Protocol):
    """A backend whose boxes can stay."""

    async def open(self, spec: StaySpec, network: Serve | None = None) -> StayingBox:
        """Raises ValueError for a spec that makes no sense, Unavailable where no box can be made."""
        ...
