"""The nouns of a box: what it may touch, what runs in it, and what the supervisor saw of it. Plain data, no verbs.

Whatever a `BoxSpec` does not name is forbidden. A `BoxReport` holds only what the supervisor itself observed: bytes
that came out of the box are data in it, never a statement.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, Protocol

from ringfence.core.record import plain

MIB = 1024 * 1024
MAX_SOURCE_BYTES = 10 * MIB
"""The longest program."""
LEVELS = ("none", "process", "gvisor", "microvm")
"""What may stand between a program and the host, from the weakest to the strongest: nothing, its kernel, a kernel of
its own that is a program, a machine of its own."""
BACKENDS: Mapping[str, str] = {
    "process": "process",
    "oci": "process",
    "docker": "process",
    "wasm": "process",
    "gvisor": "gvisor",
    "microvm": "microvm",
    "firecracker": "microvm",
    "microsandbox": "microvm",
}
"""What makes boxes, by name, and the level of each. Besides, `auto` chooses one of them."""
NOT_BUILT = frozenset(("microsandbox",))
CAN_DO_WITHOUT = ("landlock",)
"""The protections that an operator may give up by name; without any of the others there is no box."""

TEMPLATES: Mapping[str, tuple[str, ...]] = {"python": (), "data": ("numpy", "pandas", "matplotlib")}
"""The built-in templates, and the packages that each loads beforehand if they are installed."""
TEMPLATES_NEED: Mapping[str, str] = {"data": "numpy"}
"""The one package without which a template is of no use."""

Ended = Literal["exited", "signalled", "timeout", "oom", "pids", "disk", "output", "policy", "cancelled", "infra"]
Limit = Literal["wall", "cpu", "memory", "pids", "disk", "inodes", "files", "file_size", "output"]
Stream = Literal["stdout", "stderr"]
Layout = Literal["shared", "fresh"]
OnOutput = Callable[[Stream, bytes], None]
"""Called with what a program writes, as it comes."""


@plain
class Limits:
    """What a box may use, all of its processes together."""

    wall_seconds: float = 30.0
    cpu_seconds: float | None = None
    """Processor time; None: as much as the wall clock and the cores allow."""
    cpu_cores: float = 1.0
    memory_bytes: int = 256 * MIB
    disk_bytes: int = 512 * MIB
    inodes: int = 65_536
    processes: int = 128
    """Processes and threads together."""
    open_files: int = 1024
    """For each process."""
    file_bytes: int | None = None
    """The longest file; None: as long as the disk limit."""
    output_bytes: int = 64 * MIB
    """More on stdout and stderr together ends the run."""
    capture_bytes: int = 1_000_000
    """How much of each stream is returned, its head and its tail; the rest is counted and hashed."""


@plain
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
    cell: bool = False
    """Run the source as a notebook runs a cell: `display`, magics, and a report with the values that it shows."""


@plain
class Input:
    """A file put into /workspace/input before the start: a host file, or these bytes."""

    name: str
    """Relative to /workspace/input; may have folders."""
    source: Path | bytes
    links: bool = False
    """Whether links on the path of a host file are followed: only if the operator, or we, wrote that path. A path that
    a user names is resolved once, so that it has no links; a link that appears on it later was put there by another."""


@plain
class SetUp:
    """What boxes of an operator's template begin with, besides its packages."""

    source: str = ""
    """Python that runs once; the interpreters of sessions begin with what it made."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Host files and folders for /workspace/input, by the name that they have there."""


@plain
class Mount:
    """A folder or file of the host that a box sees."""

    host: str
    at: str
    mode: Literal["ro", "rw"] = "ro"
    unsafe: str = ""
    """The operator's reason for mounting what may contain credentials."""


def within(path: str, folder: str) -> bool:
    """Whether an absolute path is this folder or lies beneath it, by its text alone."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


@plain
class Outside:
    """What a box has that reaches beyond it."""

    sends: bool = False
    """It has a network, to any destination."""
    writes: bool = False
    """It may write to a folder that outlives it: one of the host's, or a volume."""
    sets_up: bool = False
    """Set-up code of a user runs in it before anything else."""
    opened_by: str | None = None
    """The capability whose contract granted this; None: a program of the user's opened the box."""


NO_OUTSIDE = Outside()


# ── What may run and listen in it ─────────────────────────────────────────────────────────────────


@plain
class Listening:
    """Whether ports that programs in a box listen on can be forwarded to the host.

    Listening itself needs no permission: a box has a network of its own, which leads nowhere.
    """

    allowed: bool = False
    ports: tuple[tuple[str, int], ...] | None = None
    """The ports that its owner can have forwarded, by name; None: any port."""

    @classmethod
    def of(cls, given: str | Mapping[str, int] | None) -> Listening:
        """`denied`, `allowed`, or ports by name."""
        if given is None or isinstance(given, str):
            return cls(given == "allowed")
        return cls(True, tuple(sorted(given.items())))


NOBODY_LISTENS = Listening()


@plain
class CommandRules:
    """Which programs a contract lets commands run, by name or by absolute path."""

    allow: tuple[str, ...] | None = None
    """None: every program of the template that neither `ask` nor `deny` names."""
    ask: tuple[str, ...] = ()
    """Only in a call that a person approved."""
    deny: tuple[str, ...] = ()


@plain
class Programs:
    """Which programs a box has besides /bin/sh, by name or by absolute path."""

    allow: tuple[str, ...] | None = None
    """None: all of the template but those of `deny`."""
    deny: tuple[str, ...] = ()


# ── The route out ─────────────────────────────────────────────────────────────────────────────────


@plain
class Installs:
    """What programs in a box may install by themselves, from the index that the gateway serves."""

    names: tuple[str, ...]
    """`name` or a pattern, optionally with `==version`, and after that optionally with ` --hash=sha256:…`."""
    required: Literal["any", "pinned", "hashed"] = "any"
    """How exactly an entry must name a package."""


@plain
class NetworkRule:
    """One rule of what a box may reach. A limit that is None does not apply; hosts that no rule has are refused."""

    name: str
    hosts: tuple[str, ...]
    """`host`, `*.suffix`, `*`, an address or a range, each with `:port` or for every port."""
    ports: tuple[int, ...] | None = None
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    """Prefixes by whole segments: `/v1` covers `/v1` and `/v1/x`; `/v1/` and `/v1/*` cover only what is below it."""
    addresses: tuple[str, ...] = ()
    """Addresses and ranges that are not public, but that the hosts may resolve to all the same."""
    max_bytes_out: int | None = None
    max_bytes_in: int | None = None
    per_minute: int | None = None
    terminate: bool = False
    """Whether the proxy ends TLS even without methods and paths: for secrets, or to have every request on record."""
    installs: Installs | None = None
    """Requests go to no host outside but to our index of packages, which allows these."""

    @property
    def inspects(self) -> bool:
        """Whether the proxy reads the requests, and so ends their TLS."""
        return self.terminate or self.methods is not None or self.paths is not None


class ServedRoute(Protocol):
    """The one route out of a box, while it is served."""

    @property
    def authority(self) -> bytes | None:
        """The certificates, in PEM, that the box is to trust for TLS that ends at the proxy; None where none does."""
        ...

    @property
    def unproxied(self) -> tuple[str, ...]:
        """Hosts inside the box, which its programs reach without the proxy."""
        ...

    @property
    def env(self) -> Mapping[str, str]:
        """Further variables that programs need to use it."""
        ...

    def facts(self) -> dict[str, Any]:
        """The `network` fact so far; under `packages`, what was installed over it."""
        ...

    def hold(self) -> None:
        """Let nothing more out until `go_on`. Requests that the box makes meanwhile wait."""
        ...

    def go_on(self) -> None: ...

    async def close(self) -> dict[str, Any]:
        """End every connection. Returns the `network` fact."""
        ...


@plain
class Reply:
    """An answer of the proxy itself, to a request for a place that it serves."""

    body: bytes | Path = b""
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    phrase: str = "OK"
    """The reason phrase of the status line, which clients show."""
    refused: str = ""
    """The reason code of a refusal, for the record; empty: nothing was refused."""


class InstallIndex(Protocol):
    """Answers requests for a place that exists only in the proxy."""

    async def answer(self, target: str) -> Reply:
        """The answer to GET and HEAD of a path."""
        ...

    def handed_out(self) -> tuple[Mapping[str, Any], ...]:
        """The packages that were installed so far, and how often each."""
        ...


Serve = Callable[[socket.socket], Awaitable[ServedRoute]]
"""Takes over the listener that waits inside a box, and serves it. Raises Unavailable."""


@plain
class ImageRoot:
    """An unpacked image that is the root of a box."""

    folder: Path
    name: str
    digest: str
    """Of its every file, folder and link."""
    python: str = ""
    """Its interpreter, by its path in it; empty: it has none that programs could run with."""
    version: tuple[int, int] = (0, 0)
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that it sets for its programs."""


@plain
class BoxSpec:
    """One box: its program and everything that it may touch."""

    program: Program
    limits: Limits = Limits()
    env: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    output: Path | None = None
    """A host folder that the files of /workspace/output are copied to."""
    output_files: int = 10_000
    """The most files that are copied."""
    trees: tuple[Path, ...] = ()
    """Host folders that are readable in the box, at the same path: a virtual environment, say. No link on these paths
    is followed: the caller has resolved them."""
    template: str = "python"
    """An operator-made baseline: `python`, or `data` with packages loaded."""
    layout: Layout = "shared"
    """`fresh`: started by exec, with an address layout and hash seed of its own."""
    tenant: str = "local"
    mounts: tuple[Mount, ...] = ()
    network: Serve | None = None
    """None: no network at all."""
    packages: tuple[Path, ...] = ()
    """Folders of Python packages that were installed for it, readable at the same path, where Python looks for them."""
    listening: Listening = NOBODY_LISTENS
    programs: Programs | None = None
    """None: all of the template, and files that were written in the box may be executed, too."""
    installs: bool = False
    """Whether programs in it may install packages by themselves. Python then looks for them in that place, too."""
    root: Path | None = None
    """A host folder with an unpacked image that is its root, read-only, instead of the host's system; for commands."""
    level: str = "process"
    """The weakest of LEVELS that its box may have."""
    backend: str | None = None
    """What is to make it, by name; None: what the configuration names."""
    image: ImageRoot | None = None
    """An image as its root, with what is known of it: Python programs run with the image's own interpreter."""


@plain
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
        """The stream as text, with a note in place of what was left out."""
        if not self.head and not self.total:
            return ""
        if not self.truncated:
            return (self.head + self.tail).decode("utf-8", "replace")
        left_out = self.total - len(self.head) - len(self.tail)
        middle = f"\n… {left_out} bytes left out …\n"
        return self.head.decode("utf-8", "replace") + middle + self.tail.decode("utf-8", "replace")


@plain
class Shown:
    """A value that a program or a cell showed, in one or several forms. Claimed."""

    data: Mapping[str, str]
    """MIME type to text; what is binary is in base64."""
    main: bool = False
    """The value of its last expression."""
    cut: Mapping[str, int] = field(default_factory=dict)


@plain
class FileFact:
    """A file that went in or came out."""

    path: str
    """As the box sees it, `/workspace/…`."""
    bytes: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.bytes, "sha256": self.sha256}


@plain
class Usage:
    """What a box used, from the kernel's own accounting; None where the kernel does not say."""

    cpu_ms: float | None = None
    peak_memory_bytes: int | None = None
    io_bytes: int | None = None
    processes: int | None = None
    """The most at one time, where the kernel tells; threads count."""


@plain
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
    shown: tuple[Shown, ...] = ()
    """What a program that ran as a cell showed. Of all fields this alone is claimed by the program."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What was in /workspace/output and was not collected, and why."""
    network: Mapping[str, Any] | None = None
    """The `network` fact of a box that had a route out."""
    packages: tuple[Mapping[str, str], ...] = ()
    """What was installed for it: names, versions, and what the index says of their bytes."""
    commands: Literal["enforced", "advisory"] | None = None
    """Whether the limit to named programs held (`enforced`), or one of them can run any code (`advisory`); None: every
    program was allowed."""
    forged: bool = False
    """Its interpreter reported that it was done, but went on, so the supervisor ended it."""
    late: Mapping[str, Any] | None = None
    """What processes left by earlier steps did since the previous step; it is not part of this step."""
    late_stdout: Captured = Captured()
    late_stderr: Captured = Captured()
    """What those wrote since the previous step."""
    left: bool = False
    """Whether it left processes or threads that go on in its box and have a route out."""
    planted: tuple[str, ...] = ()
    """Files that appeared or changed in the host folders that it may write to, and that programs of the host obey or
    run, such as `.git/hooks`. Another program may have made them."""
    trouble: tuple[str, ...] = ()
    """Steps of tear-down that failed, and the box's own words on a set-up that failed."""


# ── Between a caller in this process and its box ──────────────────────────────────────────────────


@plain
class Attached:
    """What a call carries besides its arguments: bytes, and where bytes go. The arguments name and digest it.

    Only a caller in this process can attach anything; over MCP there are arguments alone.
    """

    inputs: tuple[Input, ...] = ()
    stdin: bytes | int = b""
    output: Path | None = None
    tell: OnOutput | None = None
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


@plain
class Ran:
    """A run that is over, and the limits that it had."""

    limits: Limits
    report: BoxReport
