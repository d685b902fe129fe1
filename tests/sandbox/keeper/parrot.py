"""A house without boxes: what its sessions do, the words of a test say. Also a keeper's program around one.

A cell's source is a word and a number: `say 3` tells three lines, `flood N` N chunks of 64 KiB, as fast as it is let,
`blind N` the same without waiting for anybody, `show N` N values, `sleep N` waits, `fail 1` is a defect of ours.
"""

from __future__ import annotations

import asyncio
import builtins
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from ringfence.core.box import BoxReport, Captured, FileFact, Limits, Shown
from ringfence.core.box_files import Changed, EntryInfo
from ringfence.core.brokering import OutboundRequest, SubstitutionDenial, SubstitutionReply, SubstitutionRequest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Recheck, Status, always
from ringfence.core.sessions import (
    CellReport,
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
from ringfence.sandbox.keeper import process
from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.process import KeeperFolder, KeeperLaunch, KeeperProcess
from ringfence.sandbox.keeper.server import KeeperServer
from ringfence.sandbox.sessions.snapshots import Snapshot
from ringfence.sandbox.sessions.volumes import Volume

ROOT = Path(__file__).resolve().parents[3]
CHUNK = 65_536
ANN = Owner("local", "ann")
BOB = Owner("local", "bob")
EXITED = BoxReport("exited", 0, stdout=Captured(b"out", b"", 3))


def quiet(*told: Any) -> None:
    """Nobody looks."""


@dataclass
class Parrot:
    """What it was asked for, it remembers."""

    sessions: dict[str, SessionInfo] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    told: int = 0
    poured: int = 0
    closed: bool = False
    begun: int = 0
    """Steps that run, or did, and those who wait."""
    hold: asyncio.Event | None = None
    """For which whoever waits has to wait."""

    @property
    def live(self) -> int:
        return sum(info.state != "stopped" for info in self.sessions.values())

    def _find(self, owner: Owner, id: str) -> SessionInfo:
        info = self.sessions.get(id)
        if info is None or info.owner != owner:
            raise Refused(Status.VALIDATION_FAILURE, "unknown_session", f"there is no session {id!r}")
        return info

    def granted(self, recheck: Recheck) -> Parrot:
        return self

    async def create(self, owner: Owner, spec: SessionSpec, recheck: Recheck = always) -> SessionInfo:
        if spec.metadata.get("slow"):
            await asyncio.sleep(float(spec.metadata["slow"]))
        if spec.snapshot == "full":
            raise Unavailable("capacity", "no room")
        id_ = f"box-{len(self.sessions)}"
        self.sessions[id_] = SessionInfo(id_, owner, "running", spec.stay.template, "now", spec.stay.limits)
        return self.sessions[id_]

    async def info(self, owner: Owner, id: str) -> SessionInfo:
        return self._find(owner, id)

    async def list(self, owner: Owner) -> Sequence[SessionInfo]:
        return [info for info in self.sessions.values() if info.owner == owner]

    async def past(self, owner: Owner) -> Sequence[SessionInfo]:
        return [info for info in await self.list(owner) if info.state == "stopped"]

    async def of_tenant(self, owner: Owner) -> Sequence[SessionInfo]:
        return [info for info in self.sessions.values() if info.owner.tenant == owner.tenant]

    async def view(self, owner: Owner, id: str) -> SessionView:
        return SessionView(self._find(owner, id))

    async def state_of(self, owner: Owner, id: str) -> tuple[int, str, bool]:
        return self._find(owner, id).step, "0" * 64, False

    async def pause(self, owner: Owner, id: str) -> SessionInfo:
        return replace(self._find(owner, id), state="paused")

    async def hold_network(self, owner: Owner, id: str) -> None:
        self._find(owner, id)

    async def resume(self, owner: Owner, id: str) -> SessionInfo:
        return self._find(owner, id)

    async def end(self, owner: Owner, id: str) -> SessionInfo:
        self.sessions[id] = replace(self._find(owner, id), state="stopped", why="closed")
        return self.sessions[id]

    async def extend(self, owner: Owner, id: str, lifetime_seconds: float) -> SessionInfo:
        return self._find(owner, id)

    async def run(
        self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown, recheck: Recheck = always
    ) -> StepReport:
        self._find(owner, id)
        self.begun += 1
        word, number = request.source.split()
        results: builtins.list[Shown] = []
        try:
            for at in range(int(number)):
                if word == "say":
                    tell("stdout" if at % 2 == 0 else "stderr", b"line %d\n" % at)
                elif word in ("flood", "blind"):
                    room: Any = cast(Any, tell)("stdout", bytes(CHUNK))
                    self.told += CHUNK
                    if room is not None and word == "flood":
                        await room
                elif word == "show":
                    results.append(Shown({"text/plain": str(at), "text/html": "x" * 100_000}, main=True))
                    shown(results[-1])
                elif word == "sleep":
                    await asyncio.sleep(1)
                else:
                    raise RuntimeError("a defect")
        except asyncio.CancelledError:
            self.done.append(f"{word} was cancelled")
            raise
        self.done.append(word)
        return StepReport(id, 1, CellReport(EXITED, tuple(results)), request.context)

    async def show(self, owner: Owner, id: str, port: int | str) -> int:
        return int(port) + 1

    async def interrupt(self, owner: Owner, id: str, context: str = "default") -> bool:
        return context == "default"

    async def end_context(self, owner: Owner, id: str, context: str, remove: bool) -> bool:
        return remove

    async def command(
        self, owner: Owner, id: str, request: CommandRequest, tell: Tell, recheck: Recheck = always
    ) -> StepReport:
        tell("stdout", (request.stdin or b"") + " ".join(request.argv).encode())
        return StepReport(id, 2, CellReport(EXITED))

    async def start(self, owner: Owner, id: str, request: CommandRequest, recheck: Recheck = always) -> ProcessState:
        return ProcessState(1, request.argv, "now", True)

    async def processes(self, owner: Owner, id: str) -> Sequence[ProcessState]:
        return (ProcessState(1, ("a",), "now", False, EXITED),)

    async def logs(self, owner: Owner, id: str, process: int, offset_stdout: int, offset_stderr: int) -> ProcessLogs:
        return ProcessLogs(b"out"[offset_stdout:], b"err"[offset_stderr:], 3, 3, False)

    async def follow(self, owner: Owner, id: str, process: int, offsets: tuple[int, int], tell: Tell) -> ProcessState:
        tell("stdout", b"out"[offsets[0] :])
        tell("stderr", b"err"[offsets[1] :])
        return ProcessState(process, ("a",), "now", False, EXITED)

    async def wait(self, owner: Owner, id: str, process: int, timeout: float | None) -> ProcessState:
        self.begun += 1
        await (self.hold.wait() if self.hold else asyncio.sleep(timeout or 0))
        return ProcessState(process, ("a",), "now", False, EXITED)

    async def signal(self, owner: Owner, id: str, process: int, number: int) -> None:
        self.done.append(f"signal {number}")

    async def send(self, owner: Owner, id: str, process: int, data: bytes, eof: bool = False) -> None:
        self.done.append(f"send {data!r} {eof}")

    async def resize(self, owner: Owner, id: str, process: int, columns: int, rows: int) -> None:
        self.done.append(f"resize {columns} {rows}")

    async def read(self, owner: Owner, id: str, path: str, offset: int, length: int | None) -> bytes:
        self.done.append("read")
        return bytes(length or 0)

    async def write(self, owner: Owner, id: str, path: str, data: bytes, **how: Unpack[Writing]) -> FileFact:
        self.done.append(f"write {how}")
        return FileFact(path, len(data), "0" * 64)

    async def entries(self, owner: Owner, id: str, path: str, depth: int) -> Sequence[EntryInfo]:
        return [entry(f"file {number}") for number in range(depth)]

    async def stat(self, owner: Owner, id: str, path: str) -> EntryInfo:
        return entry(path)

    async def remove(self, owner: Owner, id: str, path: str) -> None:
        raise Refused(Status.VALIDATION_FAILURE, "not_found", f"{path!r} is not there")

    async def make_dir(self, owner: Owner, id: str, path: str) -> bool:
        return True

    async def rename(self, owner: Owner, id: str, old: str, new: str) -> None:
        self.done.append(f"rename {old} {new}")

    async def copy(self, owner: Owner, id: str, path: str, to_id: str, to_path: str) -> FileFact:
        return FileFact(to_path, 1, "0" * 64)

    async def pack(self, owner: Owner, id: str, path: str) -> AsyncIterator[bytes]:
        try:
            for _ in range(int(path)):
                self.poured += CHUNK
                yield bytes(CHUNK)
            if path == "3":
                raise Refused(Status.VALIDATION_FAILURE, "changed", "it was changed meanwhile")
        finally:
            self.done.append("pack is over")

    async def unpack(self, owner: Owner, id: str, path: str, stream: AsyncIterator[bytes]) -> Sequence[FileFact]:
        size = 0
        async for piece in stream:
            size += len(piece)
            if path == "refuse" and size > CHUNK:
                raise Refused(Status.VALIDATION_FAILURE, "bad_archive", "no archive")
            await asyncio.sleep(0)
        return (FileFact(path, size, "0" * 64),)

    async def watch(self, owner: Owner, id: str, path: str, recursive: bool) -> AsyncIterator[Changed]:
        try:
            for number in range(1_000_000):
                self.poured += 1
                yield Changed("created", f"{path}/{number}")
        finally:
            self.done.append("watch is over")

    async def snapshot(self, owner: Owner, id: str, name: str | None = None, for_agents: bool = False) -> Snapshot:
        return Snapshot("snap-0", name, "0" * 64, 1, 1, "now", "/workspace", {}, ("a",))

    async def snapshots(self, owner: Owner) -> Sequence[Snapshot]:
        return [await self.snapshot(owner, "")]

    async def remove_snapshot(self, owner: Owner, reference: str) -> None:
        self.done.append(f"remove_snapshot {reference}")

    async def fork(self, owner: Owner, id: str, count: int) -> builtins.list[SessionInfo | ForkProblem]:
        made: builtins.list[SessionInfo | ForkProblem] = [self._find(owner, id), ForkProblem("capacity", "no room")]
        return made[:count]

    async def substitution_requests(self, owner: Owner, broker_id: str) -> AsyncIterator[SubstitutionRequest]:
        yield SubstitutionRequest(0)
        yield SubstitutionRequest(
            7, broker_id, asked=OutboundRequest("https", "a.example", 443, "GET", "/", (("A", "b"),), "rule")
        )

    async def use_broker(self, owner: Owner, id: str, broker_id: str) -> None:
        self.done.append(f"use_broker {id} {broker_id}")

    async def answer_substitution(
        self, owner: Owner, broker_id: str, number: int, answer: SubstitutionReply | SubstitutionDenial
    ) -> None:
        self.done.append(f"answer_substitution {broker_id} {number} {answer}")

    async def create_volume(self, owner: Owner, name: str, max_bytes: int, mode: Literal["ro", "rw"]) -> Volume:
        return Volume(name, (owner.tenant, owner.agent), max_bytes, mode, (), "now")

    async def volumes(self, owner: Owner) -> Sequence[Volume]:
        return [await self.create_volume(owner, "one", 1, "ro")]

    async def remove_volume(self, owner: Owner, name: str) -> None:
        self.done.append(f"remove_volume {name}")

    async def close(self) -> None:
        self.closed = True


def entry(path: str) -> EntryInfo:
    return EntryInfo(path, f"/workspace/{path}", "file", 1, datetime(2026, 1, 1, tzinfo=UTC), 0o644)


# ── Keepers of one ────────────────────────────────────────────────────────────────────────────────


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose sockets have a path that the kernel takes."""
    with tempfile.TemporaryDirectory(prefix="rf-") as folder:
        yield Path(folder)


def keeper_launch(folder: Path, *, settings_digest: str = "these", linger: float = 10.0, **more: Any) -> KeeperLaunch:
    """A keeper of a parrot, in a process of its own."""
    home = KeeperFolder(folder / "keeper", (folder / "keeper",))
    boot = (
        "import os, sys; os.fork() and os._exit(0); sys.path[:0] = sys.argv.pop(1).split(':');"
        "from tests.sandbox.keeper.parrot import main; main()"
    )
    where = f"{ROOT}:{ROOT / 'src'}"
    words = (str(home.path), settings_digest, str(linger))
    return KeeperLaunch(home, (sys.executable, "-c", boot, where, *words), {}, b"", settings_digest, **more)


def main() -> None:
    folder, settings_digest, linger, ready = sys.argv[1:]

    @asynccontextmanager
    async def open_sessions() -> AsyncIterator[Parrot]:
        yield Parrot()

    process._REACHABLE_SECONDS = 0.2
    home = KeeperFolder(Path(folder), (Path(folder),))
    KeeperProcess(home, settings_digest, float(linger), open_sessions).run(int(ready))


@asynccontextmanager
async def kept(parrot: Parrot, *, linger: float = 10.0) -> AsyncIterator[tuple[KeeperServer, KeeperLaunch]]:
    """A keeper of this parrot, in this process."""
    with short_folder() as folder:
        there = keeper_launch(folder)
        there.folder.prepare()
        server = KeeperServer(parrot, "these", linger)
        await server.listen(there.folder.listen())
        serving = asyncio.get_running_loop().create_task(server.serve())
        try:
            yield server, there
        finally:
            server.leave()
            await serving


@asynccontextmanager
async def linked(parrot: Parrot, **more: Any) -> AsyncIterator[KeeperClient]:
    """A client of such a keeper."""
    async with kept(parrot) as (_, there), KeeperClient.connect(there, **more) as keeper:
        yield keeper


def session(parrot: Parrot, owner: Owner = ANN) -> str:
    """One that is there already."""
    id_ = f"box-{len(parrot.sessions)}"
    parrot.sessions[id_] = SessionInfo(id_, owner, "running", "python", "now", Limits())
    return id_
