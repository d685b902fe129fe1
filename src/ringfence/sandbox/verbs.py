"""What can be asked of whoever keeps sessions, in this process or in another.

Every verb takes the owner first. What belongs to somebody else is answered exactly like what does not exist:
Refused, `unknown_session`. A session that is paused is resumed by what needs it to run, where it may be; looking at it,
its files included, needs nothing to run. All raise Refused, and Unavailable where nothing was done.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, Protocol, Unpack

from ringfence.box import FileFact, Stream
from ringfence.loans import Denial, Lent, Wish
from ringfence.sandbox.snapshots import Snapshot
from ringfence.sandbox.volumes import Volume
from ringfence.sandbox.watching import Changed
from ringfence.sandbox.workspace import Entry
from ringfence.sessions import (
    CellRequest,
    CommandRequest,
    Failure,
    Logs,
    Owner,
    Problem,
    ProcessInfo,
    SessionInfo,
    SessionSpec,
    Shown,
    StepReport,
    Tell,
    Writing,
)

OnShown = Callable[[Shown | Failure], None]


def unheard(stream: Stream, data: bytes) -> None:
    """For `tell`, where nobody listens: nothing is sent to them before the end."""
    return


def unseen(claim: Shown | Failure) -> None:
    """Likewise for `shown`."""
    return


class Keeping(Protocol):
    """The house of a keeper, or the way to one."""

    # ── their life ──

    async def create(self, owner: Owner, spec: SessionSpec) -> SessionInfo: ...

    async def info(self, owner: Owner, id: str) -> SessionInfo:
        """Of one that was stopped too, for a day."""
        ...

    async def list(self, owner: Owner) -> Sequence[SessionInfo]:
        """Those that are not stopped."""
        ...

    async def past(self, owner: Owner) -> Sequence[SessionInfo]:
        """Those that were stopped within a day, the latest last."""
        ...

    async def state_of(self, owner: Owner, id: str) -> tuple[int, str]:
        """The last step that was begun, and the digest of everything in the workspace."""
        ...

    async def pause(self, owner: Owner, id: str) -> SessionInfo: ...

    async def resume(self, owner: Owner, id: str) -> SessionInfo: ...

    async def end(self, owner: Owner, id: str) -> SessionInfo: ...

    async def extend(self, owner: Owner, id: str, lifetime_seconds: float) -> SessionInfo:
        """So long to live, from now on."""
        ...

    # ── steps ──

    async def run(self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown) -> StepReport: ...

    async def interrupt(self, owner: Owner, id: str, context: str = "default") -> bool: ...

    async def command(self, owner: Owner, id: str, request: CommandRequest, tell: Tell) -> StepReport: ...

    async def show(self, owner: Owner, id: str, port: int | str) -> int:
        """A port of its box, by number or by name, on this host's loopback, for this user alone, until it ends.

        Which it is there.
        """
        ...

    # ── secrets ──

    def wishes(self, owner: Owner, lender: str) -> AsyncIterator[Wish]:
        """Whoever has secrets hears by this what sessions want of them, as long as it listens; `lender` is its own
        secret name. It is known once the first has come, which is empty."""
        ...

    async def lend(self, owner: Owner, id: str, lender: str) -> None:
        """From now on it is asked for what this session wants."""
        ...

    async def settle(self, owner: Owner, lender: str, number: int, answer: Lent | Denial) -> None:
        """The answer to a wish. One that nobody waits for any more is nothing."""
        ...

    # ── commands in the background ──

    async def start(self, owner: Owner, id: str, request: CommandRequest) -> ProcessInfo: ...

    async def processes(self, owner: Owner, id: str) -> Sequence[ProcessInfo]: ...

    async def logs(self, owner: Owner, id: str, process: int, offset_stdout: int, offset_stderr: int) -> Logs: ...

    async def follow(self, owner: Owner, id: str, process: int, offsets: tuple[int, int], tell: Tell) -> ProcessInfo:
        """Tell what it wrote from these places of stdout and stderr on, and what it writes, until it is over."""
        ...

    async def wait(self, owner: Owner, id: str, process: int, timeout: float | None) -> ProcessInfo:
        """Until it is over, or so long. Cancelling leaves it running."""
        ...

    async def signal(self, owner: Owner, id: str, process: int, number: int) -> None: ...

    async def send(self, owner: Owner, id: str, process: int, data: bytes, eof: bool = False) -> None: ...

    async def resize(self, owner: Owner, id: str, process: int, columns: int, rows: int) -> None: ...

    # ── files ──

    async def read(self, owner: Owner, id: str, path: str, offset: int, length: int | None) -> bytes: ...

    async def write(self, owner: Owner, id: str, path: str, data: bytes, **how: Unpack[Writing]) -> FileFact: ...

    async def entries(self, owner: Owner, id: str, path: str, depth: int) -> Sequence[Entry]: ...

    async def stat(self, owner: Owner, id: str, path: str) -> Entry: ...

    async def remove(self, owner: Owner, id: str, path: str) -> None: ...

    async def make_dir(self, owner: Owner, id: str, path: str) -> bool: ...

    async def rename(self, owner: Owner, id: str, old: str, new: str) -> None: ...

    async def copy(self, owner: Owner, id: str, path: str, to_id: str, to_path: str) -> FileFact: ...

    def pack(self, owner: Owner, id: str, path: str) -> AsyncIterator[bytes]: ...

    async def unpack(self, owner: Owner, id: str, path: str, stream: AsyncIterator[bytes]) -> Sequence[FileFact]: ...

    def watch(self, owner: Owner, id: str, path: str, recursive: bool) -> AsyncIterator[Changed]: ...

    # ── what outlives them ──

    async def snapshot(self, owner: Owner, id: str, name: str | None = None) -> Snapshot: ...

    async def snapshots(self, owner: Owner) -> Sequence[Snapshot]: ...

    async def remove_snapshot(self, owner: Owner, reference: str) -> None: ...

    async def fork(self, owner: Owner, id: str, count: int) -> builtins.list[SessionInfo | Problem]: ...

    async def create_volume(self, owner: Owner, name: str, max_bytes: int, mode: Literal["ro", "rw"]) -> Volume: ...

    async def volumes(self, owner: Owner) -> Sequence[Volume]: ...

    async def remove_volume(self, owner: Owner, name: str) -> None: ...

    async def close(self) -> None:
        """Of the way to a keeper: let go of it. Sessions stay."""
        ...
