"""The verbs of sessions: what can be asked of a keeper, in this process (`manager`) or in another (`keeper/client`).

Every verb takes the owner first. A session of another owner is answered exactly like one that does not exist: Refused,
`unknown_session`. A verb that needs a running session resumes a paused one, where that is allowed; looking at it, its
files included, does not. All raise Refused, and Unavailable where nothing was done.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, Unpack

from ringfence.core.box import FileFact
from ringfence.core.box_files import Changed, EntryInfo
from ringfence.core.brokering import SubstitutionDenial, SubstitutionReply, SubstitutionRequest
from ringfence.core.model import Recheck, always
from ringfence.core.record import dataclass
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
    SessionView,
    StepReport,
    Tell,
    Writing,
)
from ringfence.sandbox.sessions.snapshots import Snapshot
from ringfence.sandbox.sessions.volumes import Volume

CONDUCT = "conduct"
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Conduct:
    """What a keeper and its clients must know of a verb; every verb declares both."""

    changes: bool
    """Whether it changes anything that outlives a keeper. If the answer to a verb that changes nothing is lost, its
    outcome is unavailable and not unknown: the verb may be repeated at the next keeper."""
    in_line: bool
    """Whether it waits in line while many others of its client work. Three kinds of verbs do not: those that end the
    work of others, those that others wait for, and those that may last for ever at no cost."""


def verb(*, changes: bool, in_line: bool) -> Callable[[_Method], _Method]:
    def declare(method: _Method) -> _Method:
        setattr(method, CONDUCT, Conduct(changes, in_line))
        return method

    return declare


class SessionService(Protocol):
    """The sessions of a keeper, or the connection to one."""

    def granted(self, recheck: Recheck) -> SessionService:
        """The service for one call: as long as the call has begun nothing, `recheck` is awaited after every wait. An
        error that it raises ends the call."""
        ...

    # ── Creation, pause, end ──

    @verb(changes=True, in_line=True)
    async def create(self, owner: Owner, spec: SessionSpec, recheck: Recheck = always) -> SessionInfo: ...

    @verb(changes=False, in_line=False)
    async def info(self, owner: Owner, id: str) -> SessionInfo:
        """A session; also one that has stopped within the last day."""
        ...

    @verb(changes=False, in_line=False)
    async def list(self, owner: Owner) -> Sequence[SessionInfo]:
        """Sessions that have not stopped."""
        ...

    @verb(changes=False, in_line=False)
    async def past(self, owner: Owner) -> Sequence[SessionInfo]:
        """Sessions that stopped within the last day, the latest last."""
        ...

    @verb(changes=False, in_line=False)
    async def of_tenant(self, owner: Owner) -> Sequence[SessionInfo]:
        """For operators: the sessions of all agents of the owner's tenant, or of all tenants if the owner has none.
        Sessions that stopped within the last day come first."""
        ...

    @verb(changes=False, in_line=False)
    async def view(self, owner: Owner, id: str) -> SessionView:
        """A session with what it used over time and what its last steps wrote."""
        ...

    @verb(changes=False, in_line=False)
    async def state_of(self, owner: Owner, id: str) -> tuple[int, str, bool]:
        """The last step that was started, the digest of everything in the workspace, and whether anything runs in it
        that could change that."""
        ...

    @verb(changes=True, in_line=False)
    async def pause(self, owner: Owner, id: str) -> SessionInfo: ...

    @verb(changes=True, in_line=False)
    async def resume(self, owner: Owner, id: str) -> SessionInfo: ...

    @verb(changes=True, in_line=False)
    async def hold_network(self, owner: Owner, id: str) -> None:
        """Close the network of its box until its next step, since the rules allow less now."""
        ...

    @verb(changes=True, in_line=False)
    async def end(self, owner: Owner, id: str) -> SessionInfo: ...

    @verb(changes=True, in_line=False)
    async def extend(self, owner: Owner, id: str, lifetime_seconds: float) -> SessionInfo:
        """Give it this lifetime, counted from now."""
        ...

    # ── Steps ──

    @verb(changes=True, in_line=True)
    async def run(
        self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown, recheck: Recheck = always
    ) -> StepReport:
        """`recheck` is awaited when the cell's turn has come, and raises if it may not begin any more."""
        ...

    @verb(changes=True, in_line=False)
    async def interrupt(self, owner: Owner, id: str, context: str = "default") -> bool: ...

    @verb(changes=True, in_line=True)
    async def end_context(self, owner: Owner, id: str, context: str, remove: bool) -> bool:
        """End the interpreter of a context: its next cell gets a fresh one. `remove`: forget the context, too. Returns
        False if there was nothing to end."""
        ...

    @verb(changes=True, in_line=True)
    async def command(
        self, owner: Owner, id: str, request: CommandRequest, tell: Tell, recheck: Recheck = always
    ) -> StepReport: ...

    @verb(changes=True, in_line=True)
    async def show(self, owner: Owner, id: str, port: int | str) -> int:
        """Forward a port of its box, by number or by name, to this host's loopback, for this user alone, until the
        session ends. Returns the port there."""
        ...

    # ── Secrets ──

    @verb(changes=False, in_line=False)
    def substitution_requests(self, owner: Owner, broker_id: str) -> AsyncIterator[SubstitutionRequest]:
        """The requests of sessions for secrets, sent to the broker that has these, as long as it listens.

        `broker_id` is a secret that the broker chose. The broker is registered once the first request, an empty one,
        has come.
        """
        ...

    @verb(changes=False, in_line=False)
    async def use_broker(self, owner: Owner, id: str, broker_id: str) -> None:
        """From now on the keeper asks this broker for the secrets of the session."""
        ...

    @verb(changes=False, in_line=False)
    async def answer_substitution(
        self, owner: Owner, broker_id: str, number: int, answer: SubstitutionReply | SubstitutionDenial
    ) -> None:
        """Answer a request. The answer is dropped if the request has ended."""
        ...

    # ── Background processes ──

    @verb(changes=True, in_line=True)
    async def start(
        self, owner: Owner, id: str, request: CommandRequest, recheck: Recheck = always
    ) -> ProcessState: ...

    @verb(changes=False, in_line=False)
    async def processes(self, owner: Owner, id: str) -> Sequence[ProcessState]: ...

    @verb(changes=False, in_line=False)
    async def logs(
        self, owner: Owner, id: str, process: int, offset_stdout: int, offset_stderr: int
    ) -> ProcessLogs: ...

    @verb(changes=False, in_line=False)
    async def follow(self, owner: Owner, id: str, process: int, offsets: tuple[int, int], tell: Tell) -> ProcessState:
        """Pass on its output, from these offsets of stdout and stderr on, until it exits."""
        ...

    @verb(changes=False, in_line=False)
    async def wait(self, owner: Owner, id: str, process: int, timeout: float | None) -> ProcessState:
        """Wait until it exits or the timeout has passed. Cancelling leaves it running."""
        ...

    @verb(changes=True, in_line=False)
    async def signal(self, owner: Owner, id: str, process: int, number: int) -> None: ...

    @verb(changes=True, in_line=False)
    async def send(self, owner: Owner, id: str, process: int, data: bytes, eof: bool = False) -> None: ...

    @verb(changes=True, in_line=False)
    async def resize(self, owner: Owner, id: str, process: int, columns: int, rows: int) -> None: ...

    # ── Files ──

    @verb(changes=False, in_line=True)
    async def read(self, owner: Owner, id: str, path: str, offset: int, length: int | None) -> bytes: ...

    @verb(changes=True, in_line=True)
    async def write(self, owner: Owner, id: str, path: str, data: bytes, **how: Unpack[Writing]) -> FileFact: ...

    @verb(changes=False, in_line=True)
    async def entries(self, owner: Owner, id: str, path: str, depth: int) -> Sequence[EntryInfo]: ...

    @verb(changes=False, in_line=True)
    async def stat(self, owner: Owner, id: str, path: str) -> EntryInfo: ...

    @verb(changes=True, in_line=True)
    async def remove(self, owner: Owner, id: str, path: str) -> None: ...

    @verb(changes=True, in_line=True)
    async def make_dir(self, owner: Owner, id: str, path: str) -> bool: ...

    @verb(changes=True, in_line=True)
    async def rename(self, owner: Owner, id: str, old: str, new: str) -> None: ...

    @verb(changes=True, in_line=True)
    async def copy(self, owner: Owner, id: str, path: str, to_id: str, to_path: str) -> FileFact: ...

    @verb(changes=False, in_line=True)
    def pack(self, owner: Owner, id: str, path: str) -> AsyncIterator[bytes]: ...

    @verb(changes=True, in_line=True)
    async def unpack(self, owner: Owner, id: str, path: str, stream: AsyncIterator[bytes]) -> Sequence[FileFact]: ...

    @verb(changes=False, in_line=False)
    def watch(self, owner: Owner, id: str, path: str, recursive: bool) -> AsyncIterator[Changed]: ...

    # ── Snapshots, forks, volumes ──

    @verb(changes=True, in_line=True)
    async def snapshot(self, owner: Owner, id: str, name: str | None = None, for_agents: bool = False) -> Snapshot: ...

    @verb(changes=False, in_line=True)
    async def snapshots(self, owner: Owner) -> Sequence[Snapshot]: ...

    @verb(changes=True, in_line=True)
    async def remove_snapshot(self, owner: Owner, reference: str) -> None: ...

    @verb(changes=True, in_line=True)
    async def fork(self, owner: Owner, id: str, count: int) -> builtins.list[SessionInfo | ForkProblem]: ...

    @verb(changes=True, in_line=True)
    async def create_volume(self, owner: Owner, name: str, max_bytes: int, mode: Literal["ro", "rw"]) -> Volume: ...

    @verb(changes=False, in_line=True)
    async def volumes(self, owner: Owner) -> Sequence[Volume]: ...

    @verb(changes=True, in_line=True)
    async def remove_volume(self, owner: Owner, name: str) -> None: ...

    async def close(self) -> None:
        """A client disconnects from its keeper, whose sessions stay; a manager ends its sessions."""
        ...
