"""Delivery of finished records to a hook: in the order of commit, each at least once, and no call waits for it.

The log itself is the queue, so a hook that fails or hangs costs neither memory nor a record: the position that it has
reached is on disk, and delivery continues from there, also after a kill. Of several processes with one state folder,
one delivers.
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
"""The most bytes of one delivery; a single record may be longer."""
_LOOK_SECONDS = 0.5
"""How often the log is searched for new records."""
_TAKE_OVER_SECONDS = 2.0
"""How often a process tries to take over the delivery from another one."""
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds before each further attempt after a failure; the last one is repeated."""


class HookFailed(Exception):
    """A hook did not take the records. The text is our own and goes on record."""

    def __init__(self, why: str, *, taken: int = 0, output: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.taken = taken
        """How many of the records it did take, from the first on."""
        self.output = output
        """The hook's own words, which go to the log of this process and not on record."""


class Hook(Protocol):
    """Receives the records of calls that ended."""

    async def take(self, records: Sequence[Json]) -> None:
        """Returns when the hook has taken all of them. Raises HookFailed, Unavailable, Refused."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class HookCounts:
    taken: int = 0
    failures: int = 0
    failing: str | None = None
    """Why the last attempt failed; None: it did not."""


class HookDelivery:
    """Delivers to one hook: first the records since its position, then each new one."""

    def __init__(self, name: str, hook: Hook, store: Store, pauses: Sequence[float] = PAUSES) -> None:
        self.name = name
        self.counts = HookCounts()
        self._hook = hook
        self._store = store
        self._pauses = pauses
        self._position = HookPosition(store.folder, name)
        self._after: int | None = None
        """The number of the last record that the hook has taken; None: this process does not deliver yet."""

    def begin(self) -> None:
        """Become the process that delivers, unless another one is. A new hook gets the records of calls that end from
        now on. Waits for the disk. Raises StoreError."""
        if self._position.take():
            self._after = self._read_position()

    async def run(self) -> None:
        """Deliver until cancelled. Neither a failure of the hook nor one of the store ends this."""
        try:
            await self._wait_for_turn()
            while True:
                await self._deliver_next()
        finally:
            with anyio.CancelScope(shield=True):
                await self._hook.close()
            self._position.release()

    def behind(self) -> int:
        """How many records wait to be delivered."""
        return 0 if self._after is None else self._store.reader().count_ended(self._after)

    # ── One step ──

    def _read_position(self) -> int:
        reader = self._store.reader()
        newest = reader.last_number()
        after = self._position.read()
        if after is None:
            self._position.write(newest)
            return newest
        if after > newest:
            log.warning(
                "hook %s: its position is past the end of the log, which may have been restored from a copy; "
                "every record is delivered again",
                self.name,
            )
            return 0
        return after

    async def _wait_for_turn(self) -> None:
        """Wait until this process delivers, and the position is known."""
        number = 0
        while self._after is None:
            try:
                await anyio.to_thread.run_sync(self.begin)
            except StoreError as exc:
                await self._failed(str(exc), "", first=number == 0)
                number += 1
            if self._after is None:
                await anyio.sleep(_TAKE_OVER_SECONDS)
        if number:
            await self._recovered(number)

    async def _deliver_next(self) -> None:
        """Deliver the next records, and try again until that succeeds."""
        number = 0
        while True:
            try:
                await self._step()
            except HookFailed as exc:
                await self._failed(exc.why, exc.output, first=number == 0)
            except RingfenceError as exc:
                await self._failed(str(exc), "", first=number == 0)
            except Exception as exc:  # the edge of a hook: a fault of ours must not end the gateway
                if number == 0:
                    log.exception("hook %s failed inside the gateway", self.name)
                await self._failed(f"the gateway itself failed ({type(exc).__name__})", "", first=number == 0)
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
        # Also while the gateway stops: the hook has these records, and should not get them a second time.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._position.write, last)

    def _next(self) -> tuple[int, list[tuple[int, Json]]]:
        """The number of the last record to deliver next, and the messages with their numbers."""
        assert self._after is not None
        out: list[tuple[int, Json]] = []
        size = 0
        for number, record in self._store.reader().ended_after(self._after, MAX_TOGETHER):
            size += len(record.text)
            if out and size > _MAX_BYTES:
                break
            out.append((number, message_of(record)))
        return (out[-1][0] if out else self._after), out

    async def _failed(self, why: str, output: str, *, first: bool) -> None:
        self.counts.failures += 1
        self.counts.failing = why
        if first:
            words = f" (its own words: {output})" if output else ""
            log.warning(
                "hook %s failed: %s%s; its records wait in the log, and it is tried again", self.name, why, words
            )
            await self._record("hook_failing", {"why": why})

    async def _recovered(self, failures: int) -> None:
        self.counts.failing = None
        log.warning("hook %s works again (failed attempts: %d)", self.name, failures)
        await self._record("hook_recovered", {"failures": failures})

    async def _record(self, kind: str, body: Json) -> None:
        try:
            await self._store.write(lambda tx: tx.append(kind, None, {"hook": self.name, **body}))
        except StoreError as exc:
            log.error("hook %s: %s could not be recorded: %s", self.name, kind, exc)


def message_of(record: Record) -> Json:
    """A record as a hook gets it, with an id by which the hook recognises one that it has had before."""
    ident = f"{record.chain}:{record.seq}"
    try:
        return {"id": ident, "hash": record.hash, "record": record.body}
    except canonical.NotCanonical:
        return {"id": ident, "hash": record.hash, "record": None, "problem": "unreadable; see ringfence audit verify"}
