"""The house: all sessions of one keeper, and everything that can be asked of them. `verbs` says what is promised.

Looking needs nothing to run: neither files nor logs resume a session that is paused. What has to run, and what changes
files, does. Policy and secrets are no business of a house: they are applied anew, by those who ask, at every step and
every request, and no snapshot has them in it.
"""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Literal, TypeVar, Unpack

from ringfence.box import FileFact
from ringfence.errors import RingfenceError
from ringfence.loans import Denial, Lent, Wish
from ringfence.sandbox.beneath import refusal
from ringfence.sandbox.capacity import HouseRules
from ringfence.sandbox.contexts import OnShown
from ringfence.sandbox.life import Peer
from ringfence.sandbox.rooms import FORK, Rooms, ServeBy, check_seconds, problem_of
from ringfence.sandbox.session import Session
from ringfence.sandbox.snapshots import Snapshot, SnapshotList
from ringfence.sandbox.threads import in_thread, pieces_of
from ringfence.sandbox.volumes import Volume, VolumeList
from ringfence.sandbox.watching import Changed
from ringfence.sandbox.workspace import Entries, Entry, Workspace
from ringfence.sessions import (
    CellRequest,
    CommandRequest,
    Logs,
    Opening,
    Owner,
    Problem,
    ProcessInfo,
    SessionInfo,
    SessionSpec,
    StepReport,
    Tell,
    Writing,
)

T = TypeVar("T")
MOST_FORKS = 64


class House:
    """Methods raise Refused, Unavailable and StoreError."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    @classmethod
    async def open(
        cls,
        backend: Opening,
        folder: Path,
        rules: HouseRules,
        serve: ServeBy | None = None,
        peer: Peer | None = None,
    ) -> House:
        """In this folder, which no other keeper has. What one left that died is closed, and can be asked for."""
        rooms = Rooms(backend, folder, rules, serve, peer)
        await rooms.begin()
        return cls(rooms)

    async def close(self) -> None:
        """End every session. The backend stays its maker's to close."""
        await self._rooms.close()

    @property
    def live(self) -> int:
        """How many sessions are not stopped."""
        return self._rooms.live

    # ── Their life ──

    async def create(self, owner: Owner, spec: SessionSpec) -> SessionInfo:
        return await self._rooms.create(owner, spec)

    async def info(self, owner: Owner, id: str) -> SessionInfo:
        return self._rooms.info(owner, id)

    async def list(self, owner: Owner) -> builtins.list[SessionInfo]:
        return self._rooms.of(owner)

    async def past(self, owner: Owner) -> builtins.list[SessionInfo]:
        return self._rooms.past(owner)

    async def state_of(self, owner: Owner, id: str) -> tuple[int, str]:
        """A step that begins meanwhile is not in it: who acts upon this says after which step, and is told."""
        step = self._rooms.own(owner, id).life.step
        return step, await self._rooms.look(owner, id, ".", lambda workspace: workspace.tree_hash())

    async def pause(self, owner: Owner, id: str) -> SessionInfo:
        session = self._rooms.own(owner, id)
        await session.life.pause()
        return session.life.info

    async def resume(self, owner: Owner, id: str) -> SessionInfo:
        session = self._rooms.own(owner, id)
        await session.life.resume()
        return session.life.info

    async def end(self, owner: Owner, id: str) -> SessionInfo:
        """One that has ended already is as it was."""
        if id not in self._rooms:
            return self._rooms.info(owner, id)
        session = self._rooms.own(owner, id)
        if session.life.state == "starting":
            session.life.check_there()
        return await session.life.end("closed")

    async def extend(self, owner: Owner, id: str, lifetime_seconds: float) -> SessionInfo:
        check_seconds("lifetime_seconds", lifetime_seconds)
        session = self._rooms.own(owner, id)
        session.life.extend(lifetime_seconds)
        return session.life.info

    # ── Steps ──

    async def run(self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown) -> StepReport:
        return await self._rooms.own(owner, id).run(request, tell, shown)

    async def interrupt(self, owner: Owner, id: str, context: str = "default") -> bool:
        session = self._rooms.own(owner, id)
        session.life.check_there()
        return session.contexts.interrupt(context)

    async def command(self, owner: Owner, id: str, request: CommandRequest, tell: Tell) -> StepReport:
        return await self._rooms.own(owner, id).command(request, tell)

    async def show(self, owner: Owner, id: str, port: int | str) -> int:
        return await self._rooms.own(owner, id).doors.show(port)

    # ── Secrets ──

    async def wishes(self, owner: Owner, lender: str) -> AsyncGenerator[Wish, None]:
        async with aclosing(self._rooms.lenders.wishes(lender)) as wishes:
            async for wish in wishes:
                yield wish

    async def lend(self, owner: Owner, id: str, lender: str) -> None:
        session = self._rooms.own(owner, id)
        session.life.check_there()
        if session.borrower is not None:
            session.borrower.lent_by(lender)

    async def settle(self, owner: Owner, lender: str, number: int, answer: Lent | Denial) -> None:
        self._rooms.lenders.settle(lender, number, answer)

    # ── Commands in the background ──

    async def start(self, owner: Owner, id: str, request: CommandRequest) -> ProcessInfo:
        return await self._rooms.own(owner, id).start(request)

    async def processes(self, owner: Owner, id: str) -> builtins.list[ProcessInfo]:
        return self._rooms.own(owner, id).processes.infos()

    async def logs(self, owner: Owner, id: str, process: int, offset_stdout: int, offset_stderr: int) -> Logs:
        return self._rooms.own(owner, id).processes.get(process).logs(offset_stdout, offset_stderr)

    async def follow(self, owner: Owner, id: str, process: int, offsets: tuple[int, int], tell: Tell) -> ProcessInfo:
        session = self._rooms.own(owner, id)
        found = session.processes.get(process)
        await session.life.awake()
        return await found.follow(offsets, tell)

    async def wait(self, owner: Owner, id: str, process: int, timeout: float | None) -> ProcessInfo:
        session = self._rooms.own(owner, id)
        found = session.processes.get(process)
        if not found.is_over:
            await session.life.awake()
        return await found.wait(timeout)

    async def signal(self, owner: Owner, id: str, process: int, number: int) -> None:
        await self._rooms.own(owner, id).signal(process, number)

    async def send(self, owner: Owner, id: str, process: int, data: bytes, eof: bool = False) -> None:
        await self._rooms.own(owner, id).send(process, data, eof=eof)

    async def resize(self, owner: Owner, id: str, process: int, columns: int, rows: int) -> None:
        await self._rooms.own(owner, id).resize(process, columns, rows)

    # ── Files ──

    async def read(self, owner: Owner, id: str, path: str, offset: int, length: int | None) -> bytes:
        return await self._rooms.look(owner, id, path, lambda workspace: workspace.read(path, offset, length))

    async def entries(self, owner: Owner, id: str, path: str, depth: int) -> Entries:
        return await self._rooms.look(owner, id, path, lambda workspace: workspace.list(path, depth))

    async def stat(self, owner: Owner, id: str, path: str) -> Entry:
        return await self._rooms.look(owner, id, path, lambda workspace: workspace.stat(path))

    async def write(self, owner: Owner, id: str, path: str, data: bytes, **how: Unpack[Writing]) -> FileFact:
        return await self._change(owner, id, lambda workspace: workspace.write(path, data, **how))

    async def remove(self, owner: Owner, id: str, path: str) -> None:
        await self._change(owner, id, lambda workspace: workspace.remove(path))

    async def make_dir(self, owner: Owner, id: str, path: str) -> bool:
        return await self._change(owner, id, lambda workspace: workspace.make_dir(path))

    async def rename(self, owner: Owner, id: str, old: str, new: str) -> None:
        await self._change(owner, id, lambda workspace: workspace.rename(old, new))

    async def _change(self, owner: Owner, id: str, work: Callable[[Workspace], T]) -> T:
        return await self._rooms.own(owner, id).change(work)

    async def copy(self, owner: Owner, id: str, path: str, to_id: str, to_path: str) -> FileFact:
        """Between sessions of one owner; no caller gets the bytes."""
        target = self._rooms.own(owner, to_id)
        return await self._rooms.tasks.carry_out(
            self._copy(self._rooms.reading(owner, id, path), path, target, to_path)
        )

    async def _copy(self, source: Workspace, path: str, target: Session, to_path: str) -> FileFact:
        try:
            return await target.change(lambda workspace: workspace.write(to_path, source.stream(path)))
        finally:
            os.close(source.descriptor)

    async def pack(self, owner: Owner, id: str, path: str) -> AsyncGenerator[bytes, None]:
        workspace = self._rooms.reading(owner, id, path)
        try:
            async with aclosing(pieces_of(workspace.pack(path))) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            os.close(workspace.descriptor)

    async def unpack(self, owner: Owner, id: str, path: str, stream: AsyncIterator[bytes]) -> builtins.list[FileFact]:
        return builtins.list(await self._rooms.own(owner, id).unpack(path, stream))

    async def watch(self, owner: Owner, id: str, path: str, recursive: bool) -> AsyncGenerator[Changed, None]:
        async with aclosing(self._rooms.own(owner, id).watch(path, recursive=recursive)) as changes:
            async for change in changes:
                yield change

    # ── What outlives them ──

    async def snapshot(self, owner: Owner, id: str, name: str | None = None) -> Snapshot:
        if name is not None and name.startswith(FORK):
            raise refusal("bad_name", f"{name!r} cannot be the name of a snapshot; do not begin it with {FORK!r}")
        return await self._snapshot(self._rooms.own(owner, id), name)

    async def _snapshot(self, session: Session, name: str | None) -> Snapshot:
        life = session.life
        if life.spec.retain == "none":
            text = f"session {life.id} is to leave nothing on the disk, so it has no snapshots and forks"
            raise refusal("retain_none", f"{text}; create one with retain 'output'")
        env, owner, take = life.spec.stay.env, life.owner, self._rooms.snapshots.take
        return await life.still(
            lambda workspace: take(workspace, owner=owner, env=env, cwd=session.contexts.folder, name=name)
        )

    async def snapshots(self, owner: Owner) -> SnapshotList:
        found = await in_thread(lambda: self._rooms.snapshots.list(owner))
        return [each for each in found if each.name is None or not each.name.startswith(FORK)]

    async def remove_snapshot(self, owner: Owner, reference: str) -> None:
        await in_thread(lambda: self._rooms.snapshots.remove(reference, owner=owner))

    async def fork(self, owner: Owner, id: str, count: int) -> builtins.list[SessionInfo | Problem]:
        """So many sessions that begin as this one is now. Volumes that it writes to, they can only read."""
        if not 0 < count <= MOST_FORKS:
            raise refusal("bad_count", f"a session can be forked into 1 to {MOST_FORKS} at a time, not {count}")
        session = self._rooms.own(owner, id)
        snapshot = await self._snapshot(session, f"{FORK}{token_hex(8)}")
        volumes = tuple(replace(mount, mode="ro") for mount in session.life.spec.volumes)
        spec = replace(session.life.spec, snapshot=snapshot.id, volumes=volumes)
        made = [self._rooms.tasks.begin(self._rooms.create(owner, spec)) for _ in range(count)]
        try:
            await asyncio.wait(made)
        except asyncio.CancelledError:
            for each in made:
                each.add_done_callback(self._unwanted)
            raise
        finally:
            self._rooms.tasks.begin(self._drop(snapshot, owner, made))
        return [_result(each) for each in made]

    async def _drop(self, snapshot: Snapshot, owner: Owner, made: builtins.list[asyncio.Task[SessionInfo]]) -> None:
        await asyncio.wait(made)
        await in_thread(lambda: self._rooms.snapshots.remove(snapshot.id, owner=owner))

    def _unwanted(self, made: asyncio.Task[SessionInfo]) -> None:
        if not made.cancelled() and made.exception() is None:
            info = made.result()
            self._rooms.tasks.begin(self.end(info.owner, info.id))

    async def create_volume(self, owner: Owner, name: str, max_bytes: int, mode: Literal["ro", "rw"]) -> Volume:
        return await in_thread(lambda: self._rooms.volumes.create(name, owner=owner, max_bytes=max_bytes, mode=mode))

    async def volumes(self, owner: Owner) -> VolumeList:
        return await in_thread(lambda: self._rooms.volumes.list(owner))

    async def remove_volume(self, owner: Owner, name: str) -> None:
        await in_thread(lambda: self._rooms.volumes.remove(name, owner=owner))


def _result(made: asyncio.Task[SessionInfo]) -> SessionInfo | Problem:
    try:
        return made.result()
    except RingfenceError as problem:
        return Problem(*problem_of(problem))
