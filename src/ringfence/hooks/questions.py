"""Delivery of questions that wait for people to an address: each once, and once more when further people may answer it.

Open questions are in the store, and each delivery is on record, so a restart neither forgets a question nor repeats one
that was taken. No call waits for this; a delivery that fails is repeated a few times, without holding up other ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import anyio
import anyio.to_thread

from ringfence.core.aio import in_thread
from ringfence.core.errors import RingfenceError, StoreError
from ringfence.core.model import HookSpec, Json
from ringfence.hooks.delivery import HookCounts, HookFailed
from ringfence.hooks.position import HookPosition
from ringfence.store import Approval, Store

log = logging.getLogger("ringfence.hooks")

TOLD = "approval_told"
UNTOLD = "approval_untold"
Stage = Literal["asked", "escalated"]
Put = Callable[[Approval, Stage, str], Json]
"""Makes the message from a question, its stage and the hash of its record."""
PAUSES = (1.0, 5.0, 30.0, 120.0)
"""Seconds between attempts; after the last one the question is given up."""
_LOOK_SECONDS = 0.25
_TAKE_OVER_SECONDS = 2.0
_AT_ONCE = 8
_Told = tuple[str, Stage]


@runtime_checkable
class Post(Protocol):
    """An address that messages are posted to."""

    async def post(self, ident: str, message: Json) -> None:
        """Raises HookFailed, Unavailable, Refused."""
        ...

    async def close(self) -> None: ...


class QuestionDelivery:
    """Delivers questions to one address."""

    def __init__(self, spec: HookSpec, hook: Post, store: Store, put: Put, pauses: Sequence[float] = PAUSES) -> None:
        self.name = spec.name
        self.counts = HookCounts()
        self._tenants = spec.tenants
        self._hook = hook
        self._store = store
        self._put = put
        self._pauses = pauses
        self._position = HookPosition(store.folder, spec.name)
        self._mine = False
        self._seen: set[_Told] = set()
        """Questions that were delivered, given up, or are under way."""
        self._under_way = 0
        self._at_once = anyio.Semaphore(_AT_ONCE)

    def begin(self) -> None:
        """Become the process that delivers, unless another one is. Waits for the disk. Raises StoreError."""
        self._mine = self._position.take()

    def behind(self) -> int:
        """How many questions wait to be delivered."""
        return self._under_way

    async def run(self) -> None:
        """Deliver until cancelled."""
        try:
            while not self._mine:
                try:
                    await anyio.to_thread.run_sync(self.begin)
                except StoreError as exc:
                    log.error("hook %s: %s", self.name, exc)
                if not self._mine:
                    await anyio.sleep(_TAKE_OVER_SECONDS)
            version: int | None = None
            async with anyio.create_task_group() as group:
                while True:
                    try:
                        now = self._store.reader().version()
                        if now != version:
                            for each in await in_thread(self._waiting):
                                self._under_way += 1
                                group.start_soon(self._tell, *each)
                            version = now
                    except StoreError as exc:
                        log.error("hook %s: the questions cannot be read: %s", self.name, exc)
                    await anyio.sleep(_LOOK_SECONDS)
        finally:
            with anyio.CancelScope(shield=True):
                await self._hook.close()
            self._position.release()

    def _waiting(self) -> list[_Told]:
        """Open questions of the hook's tenants that were not delivered yet."""
        reader = self._store.reader()
        waiting: list[str] = []
        for tenant in self._tenants or (None,):
            waiting += reader.pending(tenant)
        self._seen = {each for each in self._seen if each[0] in set(waiting)}
        new: list[_Told] = []
        for ident in waiting:
            if (ident, "asked") in self._seen and (ident, "escalated") in self._seen:
                continue
            records = reader.approval_records(ident)
            mine = [r.body for r in records if r.kind in (TOLD, UNTOLD) and r.body.get("hook") == self.name]
            self._seen |= {(ident, body["stage"]) for body in mine}
            stages: list[Stage] = ["asked"]
            if any(r.kind == "approval_escalated" for r in records):
                stages.append("escalated")
            new += [(ident, stage) for stage in stages if (ident, stage) not in self._seen]
        self._seen |= set(new)
        return new

    async def _tell(self, ident: str, stage: Stage) -> None:
        try:
            await self._tell_until_taken(ident, stage)
        except StoreError as exc:
            log.error("hook %s: the delivery of question %s could not be recorded: %s", self.name, ident, exc)
        finally:
            self._under_way -= 1

    async def _tell_until_taken(self, ident: str, stage: Stage) -> None:
        """Until the address takes it, we give up, or a person answers it meanwhile."""
        number = 0
        while True:
            message = await in_thread(lambda: self._message(ident, stage))
            if message is None:
                return
            try:
                async with self._at_once:
                    await self._hook.post(f"{ident}.{stage}", {"hook": self.name, **message})
            except HookFailed as exc:
                why = exc.why
            except RingfenceError as exc:
                why = str(exc)
            except Exception as exc:  # the edge of a hook: a fault of ours must not end the gateway
                log.exception("hook %s failed inside the gateway", self.name)
                why = f"the gateway itself failed ({type(exc).__name__})"
            else:
                self.counts.taken += 1
                self.counts.failing = None
                await self._record(TOLD, ident, {"stage": stage, "asked_of": message["may_answer"]})
                return
            self.counts.failures += 1
            self.counts.failing = why
            if number == len(self._pauses):
                log.warning("hook %s failed: %s; question %s is not delivered to it", self.name, why, ident)
                await self._record(UNTOLD, ident, {"stage": stage, "why": why, "attempts": number + 1})
                return
            await anyio.sleep(self._pauses[number])
            number += 1

    def _message(self, ident: str, stage: Stage) -> Json | None:
        reader = self._store.reader()
        asked = reader.approval(ident)
        if asked is None or asked.state != "pending":
            return None
        question = next((r for r in reader.approval_records(ident) if r.kind == "approval_asked"), None)
        return None if question is None else self._put(asked, stage, question.hash)

    async def _record(self, kind: str, ident: str, body: Json) -> None:
        asked = await in_thread(lambda: self._store.reader().approval(ident, brief=True))
        if asked is not None:
            whole = {"approval": ident, "hook": self.name, **body}
            await self._store.write(lambda tx: tx.append(kind, asked.call_id, whole), durable=True)
