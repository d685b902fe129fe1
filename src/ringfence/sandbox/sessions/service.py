"""The verbs of sessions: what can be asked of a keeper, in this process (`manager`) or in another (`keeper/client`).

Every verb takes the owner first. A session of another owner is answered exactly like one that does not exist: Refused,
`unknown_session`. A verb that needs a running session resumes a paused one, where that is allowed; looking at it, its
files included, does not. All raise Refused, and Unavailable where nothing was done.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol, Unpack

from ringfence.core.box import FileFact
from ringfence.core.brokering import SubstitutionDenial, SubstitutionReply, SubstitutionRequest
from ringfence.core.model import Recheck, always
from ringfence.core.sessions import (
    CellRequest,
    CommandRequest,
    ForkProblem,
    OnShown,
    Owner,
    ProcessLogs,
    ProcessState,
    SessionInfo,
    SessionSpec,
    StepReport,
    Tell,
    Writing,
)
from ringfence.sandbox.files.watch import Changed
from ringfence.sandbox.files.workspace import EntryInfo
from ringfence.sandbox.sessions.snapshots import Snapshot
from ringfence.sandbox.sessions.volumes import Volume


class SessionService(Protocol):
    """The sessions of a keeper, or the connection to one."""

    def granted(self, recheck: Recheck) -> SessionService:
        """The same for one call: as long as it has begun nothing, `recheck` is awaited after every wait, and what that
        raises ends it."""
        ...

    # ── Creation, pause, end ──

    async def create(self, owner: Owner, spec: SessionSpec, recheck: Recheck = always) -> SessionInfo: ...

    async def info(self, owner: Owner, id: str) -> SessionInfo:
        """A session; also one that has stopped within the last day."""
        ...

    async def list(self, owner: Owner) -> Sequence[SessionInfo]:
        """Sessions that have not stopped."""
        ...

    async def past(self, owner: Owner) -> Sequence[SessionInfo]:
        """Sessions that stopped within the last day, the latest last."""
        ...

    async def state_of(self, owner: Owner, id: str) -> tuple[int, str, bool]:
        """The last step that was started, the digest of everything in the workspace, and whether anything runs in it
        that could change that."""
        ...

    async def pause(self, owner: Owner, id: str) -> SessionInfo: ...

    async def resume(self, owner: Owner, id: str) -> SessionInfo: ...

    async def hold_network(self, owner: Owner, id: str) -> None:
        """Let nothing more out of its box until something is run in it anew: what it may reach is less by now."""
        ...

    async def end(self, owner: Owner, id: str) -> SessionInfo: ...

    async def extend(self, owner: Owner, id: str, lifetime_seconds: float) -> SessionInfo:
        """Give it this lifetime, counted from now."""
        ...

    # ── Steps ──

    async def run(
        self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown, recheck: Recheck = always
    ) -> StepReport:
        """`recheck` is awaited when its turn has come, and raises where it may not begin any more."""
        ...

    async def interrupt(self, owner: Owner, id: str, context: str = "default") -> bool: ...

    async def end_context(self, owner: Owner, id: str, context: str, remove: bool) -> bool:
        """End the interpreter of a context: its next cell has a fresh one. `remove`: forget the context, too. False:
        there was nothing to end."""
        ...

    async def command(
        self, owner: Owner, id: str, request: CommandRequest, tell: Tell, recheck: Recheck = always
    ) -> StepReport: ...

    async def show(self, owner: Owner, id: str, port: int | str) -> int:
        """Forward a port of its box, by number or by name, to this host's loopback, for this user alone, until the
        session ends. Returns the port there."""
        ...

    # ── Secrets ──

    def substitution_requests(self, owner: Owner, broker_id: str) -> AsyncIterator[SubstitutionRequest]:
        """The requests of sessions for secrets, for a broker that has them, as long as it listens.

        `broker` is a secret name of its own. It is registered once the first request, which is empty, has come.
        """
        ...

    async def use_broker(self, owner: Owner, id: str, broker_id: str) -> None:
        """From now on the keeper asks this broker for the secrets of the session."""
        ...

    async def answer_substitution(
        self, owner: Owner, broker_id: str, number: int, answer: SubstitutionReply | SubstitutionDenial
    ) -> None:
        """The answer to a request. It is dropped where the request is gone."""
        ...

    # ── Background processes ──

    async def start(
        self, owner: Owner, id: str, request: CommandRequest, recheck: Recheck = always
    ) -> ProcessState: ...

    async def processes(self, owner: Owner, id: str) -> Sequence[ProcessState]: ...

    async def logs(
        self, owner: Owner, id: str, process: int, offset_stdout: int, offset_stderr: int
    ) -> ProcessLogs: ...

    async def follow(self, owner: Owner, id: str, process: int, offsets: tuple[int, int], tell: Tell) -> ProcessState:
        """Hand on what it wrote from these offsets of stdout and stderr on, and what it writes, until it exits."""
        ...

    async def wait(self, owner: Owner, id: str, process: int, timeout: float | None) -> ProcessState:
        """Wait until it exits or the timeout has passed. Cancelling leaves it running."""
        ...

    async def signal(self, owner: Owner, id: str, process: int, number: int) -> None: ...

    async def send(self, owner: Owner, id: str, process: int, data: bytes, eof: bool = False) -> None: ...

    async def resize(self, owner: Owner, id: str, process: int, columns: int, rows: int) -> None: ...

    # ── Files ──

    async def read(self, owner: Owner, id: str, path: str, offset: int, length: int | None) -> bytes: ...

    async def write(self, owner: Owner, id: str, path: str, data: bytes, **how: Unpack[Writing]) -> FileFact: ...

    async def entries(self, owner: Owner, id: str, path: str, depth: int) -> Sequence[EntryInfo]: ...

    async def stat(self, owner: Owner, id: str, path: str) -> EntryInfo: ...

    async def remove(self, owner: Owner, id: str, path: str) -> None: ...

    async def make_dir(self, owner: Owner, id: str, path: str) -> bool: ...

    async def rename(self, owner: Owner, id: str, old: str, new: str) -> None: ...

    async def copy(self, owner: Owner, id: str, path: str, to_id: str, to_path: str) -> FileFact: ...

    def pack(self, owner: Owner, id: str, path: str) -> AsyncIterator[bytes]: ...

    async def unpack(self, owner: Owner, id: str, path: str, stream: AsyncIterator[bytes]) -> Sequence[FileFact]: ...

    def watch(self, owner: Owner, id: str, path: str, recursive: bool) -> AsyncIterator[Changed]: ...

    # ── Snapshots, forks, volumes ──

    async def snapshot(self, owner: Owner, id: str, name: str | None = None, for_agents: bool = False) -> Snapshot: ...

    async def snapshots(self, owner: Owner) -> Sequence[Snapshot]: ...

    async def remove_snapshot(self, owner: Owner, reference: str) -> None: ...

    async def fork(self, owner: Owner, id: str, count: int) -> builtins.list[SessionInfo | ForkProblem]: ...

    async def create_volume(self, owner: Owner, name: str, max_bytes: int, mode: Literal["ro", "rw"]) -> Volume: ...

    async def volumes(self, owner: Owner) -> Sequence[Volume]: ...

    async def remove_volume(self, owner: Owner, name: str) -> None: ...

    async def close(self) -> None:
        """A client disconnects from its keeper, whose sessions stay; a manager ends its sessions."""
        ...
