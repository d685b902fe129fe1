"""Handing finished records to a hook: in the order of commit, each at least once, and no call waits for it.

The log itself is the queue, so a hook that fails or stands still costs neither memory nor a record: how far it has come
is on disk, and it goes on from there, also after a kill. Of several processes with one state, one hands over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import anyio
import anyio.to_thread

from ringfence.core import canonical
from ringfence.core.errors import RingfenceError, StoreError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.hooks.position import HookPosition
from ringfence.store import Record, Store

log = logging.getLogger("ringfence.hooks")

MAX_TOGETHER = 100
_MAX_BYTES = 1_000_000
"""Of what is handed over at once; a single record may be longer."""
_LOOK_SECONDS = 0.5
_TURN_SECONDS = 2.0
"""How often it is tried to take over from another process."""
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""After failures in a row; the last one again and again."""


class HookFailed(Exception):
    """A hook did not take what it was given. The text is in words of ours; it goes on record."""

    def __init__(self, why: str, *, taken: int = 0, said: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.taken = taken
        """How many of the records it did take, from the first on."""
        self.said = said
        """What it said itself, for the log of the process alone."""


class Hook(Protocol):
    """Whatever is told of calls that ended."""

    async def take(self, records: Sequence[Json]) -> None:
        """Returns once it has all of them. Raises HookFailed, Unavailable, Refused."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class HookCounts:
    taken: int = 0
    failures: int = 0
    failing: str | None = None
    """Why it does not go on just now."""


class HookDelivery:
    """One hook, from where it was to what comes."""

    def __init__(self, name: str, hook: Hook, store: Store, pauses: Sequence[float] = PAUSES) -> None:
        self.name = name
        self.counts = HookCounts()
        self._hook = hook
        self._store = store
        self._pauses = pauses
        self._place = HookPosition(store.folder, name)
        self._after: int | None = None

    def begin(self) -> None:
        """A hook that is new is told of what ends from now on. Waits for the disk. Raises StoreError."""
        if self._place.take():
            self._after = self._begin()

    async def run(self) -> None:
        """Hand over until cancelled. Neither a failure of the hook nor one of the store ends it."""
        try:
            await self._begun()
            while True:
                await self._patiently()
        finally:
            with anyio.CancelScope(shield=True):
                await self._hook.close()
            self._place.release()

    def behind(self) -> int:
        """How many records wait for it."""
        return 0 if self._after is None else self._store.reader().count_ended(self._after)

    # ── One step ──

    def _begin(self) -> int:
        reader = self._store.reader()
        newest = reader.last_number()
        after = self._place.read()
        if after is None:
            self._place.write(newest)
            return newest
        if after > newest:
            log.warning(
                "hook %s: the log is not the one that it knew (restored from a copy?): it gets all of it again",
                self.name,
            )
            return 0
        return after

    async def _begun(self) -> None:
        """Wait until it is this process that hands over, and it is known from where on."""
        number = 0
        while self._after is None:
            try:
                await anyio.to_thread.run_sync(self.begin)
            except StoreError as exc:
                await self._failed(str(exc), "", first=number == 0)
                number += 1
            if self._after is None:
                await anyio.sleep(_TURN_SECONDS)
        if number:
            await self._recovered(number)

    async def _patiently(self) -> None:
        """One step; after a failure the same again, until it succeeds."""
        number = 0
        while True:
            try:
                await self._step()
            except HookFailed as exc:
                await self._failed(exc.why, exc.said, first=number == 0)
            except RingfenceError as exc:
                await self._failed(str(exc), "", first=number == 0)
            except Exception as exc:  # the edge of a hook: a fault of ours must not end the gateway
                if number == 0:
                    log.exception("hook %s failed inside the gateway", self.name)
                await self._failed(f"an error of its gateway ({type(exc).__name__})", "", first=number == 0)
            else:
                if number:
                    await self._recovered(number)
                return
            await anyio.sleep(self._pauses[min(number, len(self._pauses) - 1)])
            number += 1

    async def _step(self) -> None:
        last, records = await anyio.to_thread.run_sync(self._next)
        if not records:
            await anyio.sleep(_LOOK_SECONDS)
            return
        try:
            await self._hook.take([record for _, record in records])
        except HookFailed as exc:
            if exc.taken:
                await self._taken(records[exc.taken - 1][0], exc.taken)
            raise
        await self._taken(last, len(records))

    async def _taken(self, last: int, count: int) -> None:
        self._after = last
        self.counts.taken += count
        # Also when the gateway ends just now: it has them, and need not get them again.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._place.write, last)

    def _next(self) -> tuple[int, list[tuple[int, Json]]]:
        assert self._after is not None
        found = self._store.reader().ended_after(self._after, MAX_TOGETHER)
        out: list[tuple[int, Json]] = []
        size = 0
        for number, record in found:
            size += len(record.text)
            if out and size > _MAX_BYTES:
                break
            out.append((number, told(record)))
        return (out[-1][0] if out else self._after), out

    async def _failed(self, why: str, said: str, *, first: bool) -> None:
        self.counts.failures += 1
        self.counts.failing = why
        if first:
            words = f" (it said: {said})" if said else ""
            log.warning("hook %s: %s%s; its records wait until it takes them", self.name, why, words)
            await self._record("hook_failing", {"why": why})

    async def _recovered(self, failures: int) -> None:
        self.counts.failing = None
        log.warning("hook %s: it goes on", self.name)
        await self._record("hook_recovered", {"failures": failures})

    async def _record(self, kind: str, body: Json) -> None:
        try:
            await self._store.write(lambda tx: tx.append(kind, None, {"hook": self.name, **body}))
        except StoreError as exc:
            log.error("hook %s: %s could not be recorded: %s", self.name, kind, exc)


def told(record: Record) -> Json:
    """What a hook gets of a record: what is on record, and by which it recognises one that it was given before."""
    ident = f"{record.chain}:{record.seq}"
    try:
        return {"id": ident, "hash": record.hash, "record": record.body}
    except canonical.NotCanonical:
        return {"id": ident, "hash": record.hash, "record": None, "problem": "unreadable; see ringfence audit verify"}
