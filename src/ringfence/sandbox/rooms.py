"""All sessions of a house: how they are made, who may have them, what is left of those that have ended."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ringfence import canonical
from ringfence.box import Input, NetworkRule, Serve
from ringfence.errors import Refused, RingfenceError, SetUpFailed, Unavailable
from ringfence.ports import Borrowing
from ringfence.sandbox.artifacts import Artifacts
from ringfence.sandbox.beneath import parts_of, refusal
from ringfence.sandbox.capacity import Capacity, HouseRules
from ringfence.sandbox.ledger import Ledger
from ringfence.sandbox.lenders import Borrower, Lenders
from ringfence.sandbox.life import Keep, Peer, stopped
from ringfence.sandbox.process.inputs import put_inputs
from ringfence.sandbox.session import Session, then_close
from ringfence.sandbox.snapshots import Snapshot, Snapshots
from ringfence.sandbox.threads import in_thread
from ringfence.sandbox.turns import Tasks
from ringfence.sandbox.volumes import Volumes
from ringfence.sandbox.waiting import shielded
from ringfence.sandbox.workspace import Workspace
from ringfence.sessions import Opening, Owner, SessionInfo, SessionSpec

log = logging.getLogger(__name__)

T = TypeVar("T")
ServeBy = Callable[[tuple[NetworkRule, ...], Borrowing | None], Serve]
FORK = "fork."
"""What the names of snapshots begin with that are taken for a fork alone."""
_MOST_METADATA, _LONGEST_METADATA = 64, 16_384
_TIDY_SECONDS = 60.0
_OUTPUT = ("output",)


class Rooms:
    """Methods raise Refused, Unavailable and StoreError."""

    def __init__(
        self,
        backend: Opening,
        folder: Path,
        rules: HouseRules,
        serve: ServeBy | None = None,
        peer: Peer | None = None,
    ) -> None:
        """`serve` makes a way out of rules, `peer` tells who is at a door; None: no session has any."""
        self.snapshots = Snapshots(folder / "snapshots")
        self.volumes = Volumes(folder / "volumes")
        self.tasks = Tasks()
        self.lenders = Lenders()
        self._backend = backend
        self._serve = serve
        self._capacity = Capacity(rules)
        self._ledger = Ledger(folder)
        past = {id_: info.owner for id_, info in self._ledger.past.items()}
        self._artifacts = Artifacts(folder / "artifacts", rules.retain_seconds, rules.retain_bytes, past)
        self._keep = Keep(self._ledger, self._artifacts, Tasks(), rules.paused_seconds, peer=peer)
        self._sessions: dict[str, Session] = {}
        self._tidying: asyncio.Task[None] | None = None
        self._closing = False

    def __contains__(self, id_: str) -> bool:
        """Whether it is there, if only for its end."""
        return id_ in self._sessions

    @property
    def live(self) -> int:
        return sum(session.life.state != "stopped" for session in self._sessions.values())

    async def begin(self) -> None:
        """Put in order what a keeper left that died."""
        died = {info.owner for info in self._ledger.past.values() if info.why == "keeper_died"}
        for owner in died:
            try:
                await in_thread(partial(self._remove_forks, owner))
            except RingfenceError as problem:
                log.warning("what a fork left could not be removed: %s", problem)
        self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    def _remove_forks(self, owner: Owner) -> None:
        for snapshot in self.snapshots.list(owner):
            if snapshot.name is not None and snapshot.name.startswith(FORK):
                self.snapshots.remove(snapshot.id, owner=owner)
        self.snapshots.sweep(owner)

    async def _tidy(self) -> None:
        while True:
            doomed = self._artifacts.doomed(self._ledger.past, self._sessions)
            if doomed:
                await in_thread(partial(self._artifacts.remove, doomed))
            await asyncio.sleep(_TIDY_SECONDS)

    # ── Whose they are ──

    def own(self, owner: Owner, id_: str) -> Session:
        """One that is there. Somebody else's is one that does not exist."""
        session = self._sessions.get(id_)
        if session is None or session.life.owner != owner:
            raise stopped(self._past(owner, id_))
        return session

    def info(self, owner: Owner, id_: str) -> SessionInfo:
        session = self._sessions.get(id_)
        return session.life.info if session is not None and session.life.owner == owner else self._past(owner, id_)

    def of(self, owner: Owner) -> list[SessionInfo]:
        """Those that are not stopped."""
        mine = (session.life for session in self._sessions.values() if session.life.owner == owner)
        return [life.info for life in mine if life.state != "stopped"]

    def past(self, owner: Owner) -> list[SessionInfo]:
        """Those that are no more, the latest last."""
        mine = [info for info in self._ledger.past.values() if info.owner == owner]
        return sorted(mine, key=lambda info: info.ended_at or "")

    def _past(self, owner: Owner, id_: str) -> SessionInfo:
        info = self._ledger.past.get(id_)
        if info is None or info.owner != owner:
            text = f"there is no session {id_[:80]!r}; list the sessions to see which there are"
            raise refusal("unknown_session", text)
        return info

    async def look(self, owner: Owner, id_: str, path: str, work: Callable[[Workspace], T]) -> T:
        """Look at files of a session, or at what was kept of one, in a thread. It need not be running."""
        workspace = self.reading(owner, id_, path)
        session = self._sessions.get(id_)
        with session.life.in_use if session is not None else nullcontext():
            return await in_thread(then_close(workspace, work))

    def reading(self, owner: Owner, id_: str, path: str) -> Workspace:
        """Files of a session, or what was kept of one, by a descriptor that is the caller's to close."""
        session = self._sessions.get(id_)
        if session is not None and session.life.owner == owner:
            return session.life.workspace()
        info = self._past(owner, id_)
        if parts_of(path)[:1] != _OUTPUT or not self._artifacts.has(info):
            raise stopped(info, "what it left was removed to make room" if self._artifacts.made_room(id_) else "")
        return self._artifacts.of(id_)

    # ── Making them ──

    async def create(self, owner: Owner, spec: SessionSpec) -> SessionInfo:
        if self._closing:
            raise Unavailable("closing", "the keeper of sessions is being stopped; try again in a moment")
        _check(spec)
        making = self.tasks.begin(self._create(owner, spec))
        try:
            session = await shielded(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._unwanted)
            raise
        return session.life.info

    def _unwanted(self, made: asyncio.Task[Session]) -> None:
        """Whoever asked for it is gone, and knows no name to end it by."""
        if not made.cancelled() and made.exception() is None:
            self.tasks.begin(made.result().life.end("closed"))

    async def _create(self, owner: Owner, spec: SessionSpec) -> Session:
        snapshot = None
        if spec.snapshot is not None:
            reference = spec.snapshot
            snapshot = await in_thread(lambda: self.snapshots.get(reference, owner=owner))
            spec = replace(spec, snapshot=snapshot.id)
        id_ = canonical.new_id("box")
        await self._capacity.enter(id_, spec.stay.limits)
        session = Session(id_, owner, spec, self._keep)
        session.life.on_end.append(lambda: self._over(id_))
        self._sessions[id_] = session
        try:
            info = session.life.info
            self._ledger.write("created", info if spec.retain != "none" else replace(info, metadata={}))
            # The disk and the box are waited for at the same time.
            written = self.tasks.begin(self._ledger.synced())
            await self._make(session, snapshot)
            await written
        except BaseException as problem:
            # What code in a box said is for whoever wanted it to run, and is not kept.
            said = problem.reason_code if isinstance(problem, SetUpFailed) else str(problem)
            await session.life.end("failed", said)
            raise
        return session

    def _over(self, id_: str) -> None:
        self._sessions.pop(id_, None)
        self._capacity.leave(id_)

    async def _make(self, session: Session, snapshot: Snapshot | None) -> None:
        life = session.life
        owner, stay = life.owner, replace(life.spec.stay, tenant=life.owner.tenant)
        inputs = stay.inputs
        if life.spec.volumes:
            wanted = life.spec.volumes
            folders = await in_thread(lambda: life.mounts.take(self.volumes, owner, wanted))
            stay = replace(stay, folders=folders)
        if snapshot is not None:
            # What is restored would take the place of the inputs: they come after it.
            stay = replace(stay, env={**snapshot.env, **stay.env}, inputs=())
        # The bytes of inputs need not stay here as long as the session does.
        life.spec = replace(life.spec, stay=replace(stay, inputs=(), folders=()))
        if life.spec.lending is not None:
            # Of this box alone: neither a snapshot nor a fork has what stands for a secret here.
            session.borrower = Borrower(life.id, owner, life.spec.lending, self.lenders)
            stay = replace(stay, env={**session.borrower.env, **stay.env})
        try:
            box = await self._backend.open(stay, self._way_out(life.spec, session.borrower))
            workspace = life.move_in(box)
            if snapshot is not None:
                into = Workspace(
                    workspace.descriptor, workspace.owner, None if box.input is None else os.dup(box.input)
                )
                await in_thread(lambda: self._restore(into, snapshot.id, owner, inputs))
            if life.mounts:
                await in_thread(life.mounts.load)
        except ValueError as problem:
            raise refusal("bad_spec", f"no session can be made like this: {problem}") from problem
        session.contexts.folder = snapshot.cwd if snapshot is not None else session.contexts.folder
        if stay.setup is not None:
            await session.contexts.set_up(box)
        life.begin()

    def _way_out(self, spec: SessionSpec, borrower: Borrower | None) -> Serve | None:
        """Raises ValueError for rules that cannot be meant."""
        if not spec.network:
            return None
        if self._serve is None:
            raise Unavailable("no_network_control", "sessions have no network here")
        return self._serve(spec.network, borrower)

    def _restore(self, workspace: Workspace, snapshot: str, owner: Owner, inputs: tuple[Input, ...]) -> None:
        try:
            self.snapshots.restore(snapshot, workspace, owner=owner)
            if inputs and workspace.input_descriptor is not None:
                put_inputs(workspace.input_descriptor, inputs, workspace.owner)
        finally:
            if workspace.input_descriptor is not None:
                os.close(workspace.input_descriptor)

    # ── The end of it all ──

    async def close(self) -> None:
        """End every session, and let another keeper have the place."""
        self._closing = True
        await self.tasks.all_done()
        sessions = list(self._sessions.values())
        ends = await asyncio.gather(*(session.life.end("killed") for session in sessions), return_exceptions=True)
        for session, end in zip(sessions, ends, strict=True):
            if isinstance(end, BaseException):
                log.error("the end of session %s: %s", session.life.id, end)
        await self._keep.tasks.all_done()
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait((self._tidying,))
        await self._ledger.settle()
        self._ledger.close()


def _check(spec: SessionSpec) -> None:
    check_seconds("lifetime_seconds", spec.lifetime_seconds)
    if spec.idle_seconds is not None:
        check_seconds("idle_seconds", spec.idle_seconds)
    texts = [*spec.metadata, *spec.metadata.values()]
    if len(spec.metadata) > _MOST_METADATA or sum(map(len, texts)) > _LONGEST_METADATA:
        text = f"metadata may have {_MOST_METADATA} entries and {_LONGEST_METADATA} characters"
        raise refusal("bad_spec", f"{text}, not {len(spec.metadata)} and {sum(map(len, texts))}")


def check_seconds(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise refusal("bad_spec", f"{name} must be a positive number of seconds, not {seconds}")


def problem_of(error: RingfenceError) -> tuple[str, str]:
    """The reason code and the text of an error, for those who get several answers at once."""
    if isinstance(error, Refused | Unavailable):
        return error.reason_code, error.message
    return "store", str(error)
