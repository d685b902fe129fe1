"""The life of a session: starting, running, paused, stopped, and never back from there.

Its clocks stand still while it is paused. Whatever ends it, it ends once: volumes are saved, outputs kept, the box
removed, the end written down, in this order. What was begun here goes on to its end when its caller is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from ringfence.errors import Refused, RingfenceError, Unavailable
from ringfence.sandbox.artifacts import Artifacts
from ringfence.sandbox.beneath import refusal
from ringfence.sandbox.ledger import Ledger
from ringfence.sandbox.mounts import Mounts
from ringfence.sandbox.threads import in_thread
from ringfence.sandbox.turns import Countdown, Gate, Tasks, Use
from ringfence.sandbox.waiting import shielded
from ringfence.sandbox.workspace import Workspace
from ringfence.sessions import Living, Owner, SessionInfo, SessionSpec, State, Why

log = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_TOLD = 10
_REASONS: dict[Why, str] = {
    "closed": "it was closed",
    "lifetime": "its lifetime was over",
    "keeper_died": "the keeper of sessions died, and its boxes with it",
    "box_died": "its box died",
    "killed": "the keeper of sessions was stopped",
    "failed": "it could not be started",
}


Peer = Callable[[socket.socket], int | None]
"""The user at the far end of a connection within this host; None where there is any doubt."""


@dataclass(slots=True)
class Keep:
    """What all sessions of a house share."""

    ledger: Ledger
    artifacts: Artifacts
    tasks: Tasks
    paused_seconds: float
    """How long one of them may stay paused."""
    peer: Peer | None = None
    """Who is at a door of theirs."""


def stopped(info: SessionInfo, besides: str = "") -> Refused:
    reason = "; ".join(filter(None, (_REASONS[info.why] if info.why is not None else "it is being ended", besides)))
    return refusal("session_stopped", f"session {info.id} was stopped at {info.ended_at}: {reason}; create another")


class Life:
    """Methods raise Refused, Unavailable and StoreError."""

    def __init__(self, id_: str, owner: Owner, spec: SessionSpec, keep: Keep) -> None:
        self.id = id_
        self.owner = owner
        self.spec = spec
        self.state: State = "starting"
        self.step = 0
        self.contexts: list[str] = ["default"]
        self.mounts = Mounts()
        self.tasks = keep.tasks
        self.gate = Gate()
        """Who begins something or writes files is inside together with others; who pauses or copies it all, alone."""
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether anything goes on that nobody waits for."""
        self.before_pause: Callable[[], Awaitable[None]] | None = None
        self.on_end: list[Callable[[], None]] = []
        self._keep = keep
        self._created_at = now()
        self._ended_at: str | None = None
        self._why: Why | None = None
        self.in_use = Use()
        """Meanwhile it is not idle."""
        self._lifetime = Countdown(spec.lifetime_seconds, lambda: self._end_soon("lifetime"))
        self._paused = Countdown(keep.paused_seconds, lambda: self._end_soon("lifetime"))
        self._idle: asyncio.TimerHandle | None = None
        self._box: Living | None = None
        self._workspace: Workspace | None = None
        self._frozen = False
        self._ending: asyncio.Task[SessionInfo] | None = None

    # ── What it is ──

    @property
    def info(self) -> SessionInfo:
        box = self._box if self.state in ("running", "paused") else None
        return self.brief if box is None else replace(self.brief, memory_bytes=_memory(box))

    @property
    def brief(self) -> SessionInfo:
        """What is known without looking into it."""
        spec, box, expires = self.spec, self._box, None
        if self.state in ("running", "paused"):
            left = (self._paused if self.state == "paused" else self._lifetime).left
            expires = (datetime.now(UTC) + timedelta(seconds=left)).isoformat(timespec="milliseconds")
        return SessionInfo(
            id=self.id,
            owner=self.owner,
            state=self.state,
            template=spec.stay.template,
            created_at=self._created_at,
            limits=spec.stay.limits,
            step=self.step,
            contexts=tuple(self.contexts),
            metadata=spec.metadata,
            expires_at=expires,
            ended_at=self._ended_at,
            why=self._why,
            isolation=box.isolation if box is not None else {},
            snapshot=spec.snapshot,
            network=tuple(host for rule in spec.network for host in rule.hosts),
            lending=spec.lending,
            keeps=any(mount.mode == "rw" for mount in spec.volumes),
        )

    @property
    def lifetime_left(self) -> float:
        return self._lifetime.left

    @property
    def was_taken_away(self) -> bool:
        """Whether we ended it, and not something in it."""
        return self._why in ("closed", "lifetime", "killed")

    @property
    def box(self) -> Living:
        self.check_there()
        assert self._box is not None
        return self._box

    def workspace(self) -> Workspace:
        """By a descriptor that is the caller's to close: ours may be gone any time."""
        self.check_there()
        assert self._workspace is not None
        return Workspace(os.dup(self._workspace.descriptor), self._workspace.owner)

    def check_there(self) -> None:
        if self.state == "stopped":
            raise stopped(self.info)
        if self.state == "starting":
            raise refusal("session_starting", f"session {self.id} is still starting; wait until it runs")

    # ── Its beginning ──

    def move_in(self, box: Living) -> Workspace:
        """Its box is there; what is to be in it goes here, before anything runs."""
        self._box = box
        try:
            # Of our own: a box that dies takes its own with it, and what it wrote is wanted all the same.
            self._workspace = Workspace(os.dup(box.workspace), box.host_id)
            self.mounts.hold(box)
        except (OSError, KeyError) as problem:
            raise Unavailable("no_box", "the box was gone before anything could be put into it") from problem
        return self._workspace

    def begin(self) -> None:
        box = self._box
        assert box is not None
        self.state = "running"
        self._lifetime.go()
        self.used()
        self.tasks.begin(self._notice_end(box))

    async def _notice_end(self, box: Living) -> None:
        said = await box.ended()
        if self._ending is None:
            log.warning("the box of session %s is gone: %s", self.id, said)
            await self.end("box_died", said)

    def extend(self, seconds: float) -> None:
        self.check_there()
        self._lifetime.set(seconds)

    # ── In use, idle ──

    def used(self) -> None:
        """Just now; from now on it may be idle."""
        self.in_use.last = time.monotonic()
        if self._idle is None and self.spec.idle_seconds is not None:
            self._look_in(self.spec.idle_seconds)

    def _is_idle(self) -> bool:
        return not self.in_use.inside and not self.is_busy()

    def _look_in(self, seconds: float) -> None:
        self._idle = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """A step that begins or ends costs nothing for this, but to remember when."""
        self._idle = None
        idle = self.spec.idle_seconds
        if idle is None or self.state != "running":
            return
        left = self.in_use.last + idle - time.monotonic() if self._is_idle() else idle
        if left > 0:
            self._look_in(left)
        else:
            self.tasks.begin(self._pause_idle(idle))

    async def _pause_idle(self, idle: float) -> None:
        try:
            await self._pause(only_idle=True)
        except RingfenceError as problem:
            log.warning("session %s could not be paused: %s", self.id, problem)
        if self.state == "running" and self._idle is None:
            self._look_in(idle)

    # ── Pausing, resuming ──

    async def pause(self) -> None:
        """Everything in it stands still, its clocks included. Volumes are saved; if they cannot be, it goes on."""
        await self.tasks.carry_out(self._pause(only_idle=False))

    async def _pause(self, *, only_idle: bool) -> None:
        async with self.gate.alone():
            await self._prepare()
            if only_idle and (self.state != "running" or not self._is_idle()):
                return
            self.check_there()
            if self.state == "paused":
                return
            self._freeze()
            try:
                await self._save()
            except RingfenceError as problem:
                if not only_idle:
                    self._thaw()
                    raise
                log.warning("the volumes of session %s were not saved: %s", self.id, problem)
            if self.state == "running":
                self.state = "paused"
                self._lifetime.stand()
                self._paused.set(self._keep.paused_seconds)
                self._paused.go()
                self._keep.ledger.note("paused", self.id, self.owner, self.step)

    async def resume(self) -> None:
        async with self.gate.alone():
            self.check_there()
            if self.state == "paused":
                self._thaw()
                self.state = "running"
                self._paused.stand()
                self._lifetime.go()
                self.used()
                self._keep.ledger.note("resumed", self.id, self.owner, self.step)

    async def awake(self) -> None:
        """It is running when this returns; a paused one is resumed, where it may be."""
        while self.state != "running":
            self.check_there()
            if not self.spec.auto_resume:
                text = f"session {self.id} is paused, and is not to be resumed by itself; resume it first"
                raise refusal("session_paused", text)
            await self.resume()

    async def still(self, work: Callable[[Workspace], T]) -> T:
        """Do something with its files, in a thread, while nothing in it moves; volumes are saved first."""
        return await self.tasks.carry_out(self._still(work))

    async def _still(self, work: Callable[[Workspace], T]) -> T:
        async with self.gate.alone():
            await self._prepare()
            was_frozen, workspace = self._frozen, self.workspace()
            try:
                self._freeze()
                await self._save()
                return await in_thread(lambda: work(workspace))
            finally:
                os.close(workspace.descriptor)
                if not was_frozen:
                    self._thaw()

    async def _prepare(self) -> None:
        if self.before_pause is not None and self.state == "running":
            await self.before_pause()

    async def _save(self) -> None:
        if self.mounts:
            await in_thread(self.mounts.save)

    def _freeze(self) -> None:
        if not self._frozen:
            try:
                self.box.pause()
            except OSError as problem:
                raise Unavailable("not_paused", f"session {self.id} cannot be paused: {problem}") from problem
            self._frozen = True

    def _thaw(self) -> None:
        if self._frozen and self.state != "stopped":
            try:
                self.box.resume()
            except OSError as problem:
                raise Unavailable("not_resumed", f"session {self.id} cannot be resumed: {problem}") from problem
            self._frozen = False

    # ── Its end ──

    def _end_soon(self, why: Why) -> None:
        self.tasks.begin(self.end(why))

    async def end(self, why: Why, said: str = "") -> SessionInfo:
        """Once, however often it is asked for. Raises StoreError where the end could not be written down."""
        if self._ending is None:
            self._ending = self.tasks.begin(self._end(why, said))
        return await shielded(self._ending)

    async def _end(self, why: Why, said: str) -> SessionInfo:
        self.state, self._ended_at, self._why = "stopped", now(), why
        self._lifetime.stand()
        self._paused.stand()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        trouble = [said] if said else []
        try:
            if self._box is not None:
                if why != "failed":
                    trouble += await self._keep_files(self._box)
                trouble += await self._remove(self._box)
        finally:
            await in_thread(self.mounts.close)
            for call in self.on_end:
                call()
            self._keep.ledger.write("ended", self.brief, {"trouble": trouble} if trouble else None)
        await self._keep.ledger.synced()
        return self.info

    async def _keep_files(self, box: Living) -> list[str]:
        """What could not be kept."""
        with suppress(OSError, RingfenceError):
            box.pause()  # so that what is kept is of one moment
        trouble: list[str] = []
        try:
            await self._save()
        except RingfenceError as problem:
            trouble.append(f"volumes were not saved: {problem}")
        try:
            trouble += await in_thread(self._keep_outputs)
        except RingfenceError as problem:
            trouble.append(f"outputs were not kept: {problem}")
        return trouble

    async def _remove(self, box: Living) -> list[str]:
        try:
            await box.end()
        except (OSError, RingfenceError) as problem:
            return [f"the box was not removed: {problem}"]
        finally:
            if self._workspace is not None:
                os.close(self._workspace.descriptor)
        return []

    def _keep_outputs(self) -> list[str]:
        if self.spec.retain != "output" or not self._keep.artifacts.wanted or self._workspace is None:
            return []
        most = self.spec.stay.limits.disk_bytes
        left_out = self._keep.artifacts.keep(self.id, self.owner, self._workspace.descriptor, most)
        return [f"{path} was not kept: {why}" for path, why in list(left_out.items())[:_MOST_TOLD]]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _memory(box: Living) -> int | None:
    with suppress(OSError, KeyError):
        return box.memory()
    return None
