"""Zygotes and the boxes they have ready. A box that is taken from here waits only for its order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Coroutine
from dataclasses import field
from functools import partial
from typing import Any

from ringfence.core.aio import shielded
from ringfence.core.box import Limits
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.sandbox.process.baseline import Baseline
from ringfence.sandbox.process.box import Box, Hub, SharedServices
from ringfence.sandbox.process.cgroups.cgroup import GroupPool
from ringfence.sandbox.process.zygote.confine import Shape
from ringfence.sandbox.process.zygote_handle import ZygoteHandle

log = logging.getLogger(__name__)

IN_THE_MAKING = 5
"""Boxes that are made at once for each core. More would not be ready sooner, and each would need a control group of
its own where it could reuse the last one."""
CROWD = 4
"""Boxes that one zygote makes at once before another zygote is started."""
KINDS = 4
"""Kinds of boxes that are kept ready: those that were used last."""
HOST_MOUNTS_SECONDS = 5.0
"""How long a zygote that uses mounts of the host is kept without a box."""
_ZYGOTES_TRIED = 3
"""Zygotes that may die, one after the other, before we give up making a box."""


@dataclass(slots=True)
class _Kind:
    """Boxes of one baseline under the same limits."""

    baseline: Baseline
    limits: Limits
    shape: Shape
    ready: deque[Box] = field(default_factory=deque)
    coming: int = 0


class BoxPool:
    def __init__(self, groups: GroupPool, depth: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        self._shared = SharedServices(Hub(), groups)
        self._cores = cores
        self._depth = depth if depth is not None else 2 * cores
        """Boxes of a kind that are kept ready."""
        self._zygotes: dict[Baseline, list[ZygoteHandle]] = {}
        self._starting: dict[Baseline, asyncio.Task[ZygoteHandle]] = {}
        self._kinds: OrderedDict[tuple[Baseline, Limits], _Kind] = OrderedDict()
        self._with_host_mounts: set[Baseline] = set()
        """Baselines that use mounts of the host; a timer stops their unused zygotes."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._making = asyncio.Semaphore(IN_THE_MAKING * cores)
        self._shut = False

    async def take(self, baseline: Baseline, limits: Limits, shape: Shape) -> Box:
        """A ready box, or one made now. Raises Unavailable."""
        if baseline.uses_host_mounts:
            return (await self.spawn(baseline, limits, shape))[1]
        kind = self._kind(baseline, limits, shape)
        box = self._ready(kind)
        if box is None:
            async with self._making:
                box = self._ready(kind) or await self._make(kind)
        return box

    def _ready(self, kind: _Kind) -> Box | None:
        while kind.ready:
            box = kind.ready.popleft()
            if box.lives():
                return box
            self._in_background(_end(box))
        return None

    async def stay(self, baseline: Baseline, limits: Limits, shape: Shape) -> tuple[ZygoteHandle, Box]:
        """As `take`, a box that stays, and its zygote, which can start more in it. Raises Unavailable."""
        kind = self._kind(baseline, limits, shape)
        while kind.ready:
            box = kind.ready.popleft()
            zygote = next((zygote for zygote in self._zygotes.get(baseline, ()) if zygote.owns(box)), None)
            if zygote is not None and box.lives():
                return zygote, box
            self._in_background(_end(box))
        return await self.spawn(baseline, limits, shape)

    async def spawn(self, baseline: Baseline, limits: Limits, shape: Shape) -> tuple[ZygoteHandle, Box]:
        """A box made now, and its zygote, which can start more in it. Raises Unavailable."""
        zygote = await self._zygote(baseline)
        while zygote.full:
            zygote = await self._zygote(baseline)
        if baseline.uses_host_mounts and baseline not in self._with_host_mounts:
            self._with_host_mounts.add(baseline)
            asyncio.get_running_loop().call_later(HOST_MOUNTS_SECONDS, self._stop_unused, baseline)
        return zygote, await zygote.spawn(limits, shape)

    def _stop_unused(self, baseline: Baseline) -> None:
        """Stop zygotes that use mounts of the host and have no box."""
        those = self._zygotes.get(baseline, [])
        for zygote in [zygote for zygote in those if not zygote.live]:
            those.remove(zygote)
            zygote.stop()
        if not those and baseline not in self._starting:
            self._zygotes.pop(baseline, None)
            self._with_host_mounts.discard(baseline)
        elif not self._shut:
            asyncio.get_running_loop().call_later(HOST_MOUNTS_SECONDS, self._stop_unused, baseline)

    def refill(self, baseline: Baseline, limits: Limits, after: asyncio.Future[Any] | None = None) -> None:
        """Replace the box that was taken; called when its caller no longer waits.

        `after`: start when that is done, or soon after. Until then the cores belong to the run.
        """
        kind = self._kinds.get((baseline, limits))
        depth = min(1, self._depth) if baseline.stays else self._depth
        if self._making.locked():
            return  # callers that wait for a box go first
        while kind is not None and not self._shut and len(kind.ready) + kind.coming < depth:
            zygote = self._idlest(baseline)
            if zygote is None:
                kind.coming += 1
                self._in_background(self._add(kind))
                continue
            try:
                box = zygote.start_box(limits, kind.shape, after)
            except Unavailable as exc:
                log.warning("no box could be kept ready: %s", exc)
                return
            kind.coming += 1
            box.when_closed(partial(self._box_closed, kind, box))

    async def fill(self, baseline: Baseline, limits: Limits, shape: Shape) -> None:
        """Have boxes of this kind ready before the first is asked for. Raises Unavailable."""
        kind = self._kind(baseline, limits, shape)
        kind.ready.append(await self._make(kind))
        self.refill(baseline, limits)

    async def drain(self) -> None:
        """End every box that is kept ready."""
        for kind in self._kinds.values():
            await self._empty(kind)

    def _kind(self, baseline: Baseline, limits: Limits, shape: Shape) -> _Kind:
        key = (baseline, limits)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = _Kind(baseline, limits, shape)
            if len(self._kinds) > KINDS:
                _, oldest = self._kinds.popitem(last=False)
                self._in_background(self._empty(oldest))
        self._kinds.move_to_end(key)
        return found

    def _box_closed(self, kind: _Kind, box: Box, closed: asyncio.Future[None]) -> None:
        kind.coming -= 1
        problem = closed.exception()
        if problem is not None and not self._shut:
            log.warning("no box could be kept ready: %s", problem)
        if problem is not None or self._shut or self._kinds.get((kind.baseline, kind.limits)) is not kind:
            self._in_background(_end(box))
        else:
            kind.ready.append(box)

    async def _add(self, kind: _Kind) -> None:
        try:
            box = await self._make(kind)
        except Unavailable as exc:
            if not self._shut:
                log.warning("no box could be kept ready: %s", exc)
            return
        finally:
            kind.coming -= 1
        if self._shut or self._kinds.get((kind.baseline, kind.limits)) is not kind:
            await _end(box)
        else:
            kind.ready.append(box)

    async def _make(self, kind: _Kind) -> Box:
        for _ in range(_ZYGOTES_TRIED):
            zygote = await self._zygote(kind.baseline)
            while zygote.full:  # many may have waited for it to start, and only the first found room
                zygote = await self._zygote(kind.baseline)
            try:
                return await zygote.spawn(kind.limits, kind.shape)
            except Unavailable as exc:
                if zygote.alive or self._shut:
                    raise
                problem = exc
            # It died, and not because of our order: others had the same. Try another zygote.
        raise problem

    async def _empty(self, kind: _Kind) -> None:
        while kind.ready:
            await _end(kind.ready.popleft())

    # ── Zygotes ──

    async def _zygote(self, baseline: Baseline) -> ZygoteHandle:
        idlest = self._idlest(baseline)
        return idlest if idlest is not None else await shielded(self._start_task(baseline))

    def _idlest(self, baseline: Baseline) -> ZygoteHandle | None:
        """The least busy one. Another is started where boxes wait for it, up to one for each core, or to succeed it."""
        those = self._zygotes.setdefault(baseline, [])
        for old in [zygote for zygote in those if not zygote.alive or (zygote.worn and not zygote.live)]:
            those.remove(old)
            old.stop()
        usable = [zygote for zygote in those if not zygote.worn and not zygote.full]
        if not usable:
            return None
        # One alone as long as it keeps up: its memory stays where the cores have it at hand.
        best = min(usable, key=lambda zygote: zygote.making)
        crowded = best.making >= CROWD and sum(zygote.made for zygote in usable) > 2 * self._depth
        if (crowded and len(usable) < self._cores) or (best.tired and len(usable) < 2):
            self._start_task(baseline)
        return best

    def _start_task(self, baseline: Baseline) -> asyncio.Task[ZygoteHandle]:
        if baseline not in self._starting:
            task = asyncio.get_running_loop().create_task(self._start_zygote(baseline))
            self._starting[baseline] = task
            task.add_done_callback(lambda done: self._zygote_started(baseline, done))
        return self._starting[baseline]

    async def _start_zygote(self, baseline: Baseline) -> ZygoteHandle:
        zygote = ZygoteHandle(baseline, self._shared, rehearses=self._depth > 0)
        try:
            await zygote.start()
        except BaseException:
            zygote.stop()  # it is not waited for any more
            raise
        if self._shut:
            zygote.stop()
            raise Unavailable("closed", "the backend is closed")
        self._zygotes.setdefault(baseline, []).append(zygote)
        return zygote

    def _zygote_started(self, baseline: Baseline, task: asyncio.Task[ZygoteHandle]) -> None:
        self._starting.pop(baseline, None)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a zygote could not be started: %s", task.exception())

    # ── The end ──

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._shut = True
        for starting in list(self._starting.values()):
            starting.cancel()
            with contextlib.suppress(Unavailable, asyncio.CancelledError):
                await starting
        for zygotes in self._zygotes.values():
            for zygote in zygotes:
                zygote.stop()
        await asyncio.sleep(0)  # boxes that were being made are reported only now
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # those that are done leave the set only now
        for kind in self._kinds.values():
            while kind.ready:
                kind.ready.popleft().remove()
        self._shared.hub.close()


async def _end(box: Box) -> None:
    """End a box that is no longer needed."""
    box.kill()
    await box.ended
    box.remove()
