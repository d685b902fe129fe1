"""The same key, one effect: a call repeated under its idempotency key joins, replays, conflicts, or is `unknown`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from ringfence.core import canonical
from ringfence.core.errors import Refused
from ringfence.core.expression import Expression, ExpressionError
from ringfence.core.model import Call, Contract, GuardedText, Json, Outcome, Status
from ringfence.core.record import dataclass
from ringfence.core.shares import level
from ringfence.governance.approvals import client_of
from ringfence.store import KeyRow, Store, Transaction

MAX_KEPT = 65_536
"""Bytes of a result that is kept for a call that changed nothing. One with a longer result is made again: callers
invent as many keys as they like, and would fill the disk."""
MAX_RESULTS = 2000
"""Results that are kept for one principal. If there are more, that of a call that changed nothing is not kept."""
MAX_OF_ONE = 64 * 2**20
MAX_OF_ALL = 512 * 2**20
"""Bytes of outcomes that are kept for one principal, and for all, about. If there are more, the oldest go, and of all
those of the tenants, and of the agents in them, that have more than the others: their calls are not made again, but
what they answered cannot be repeated."""
_LOOK_BYTES = 2**20
"""So many more of a principal are kept before they are added up again."""
_GRACE_SECONDS = 5.0
_MAX_WAITING = 200
"""Calls of one agent that wait for others under the same keys."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A key within the scope of one principal, one capability and the place that it leads to, and the request that it
    stands for."""

    scope: str
    name: str
    request_digest: str


@dataclass(slots=True)
class KeyWait:
    """For how long one call waits for others, however many of them have its key one after the other."""

    left: float

    @classmethod
    def of(cls, contract: Contract) -> KeyWait:
        return cls(contract.timeout_seconds + _GRACE_SECONDS)


class IdempotencyKeys:
    """Looks a key up before anything else happens; taking it is part of the grant."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expressions: dict[str, Expression] = {}
        self._waiting: Counter[tuple[str, str]] = Counter()
        """Calls that wait for another, by agent and client."""
        self._fresh: dict[str, int] = {}
        """Bytes that were kept since all of them were last added up, by principal."""

    def key(
        self, call: Call, contract: Contract, place: str, digest: str, variables: Callable[[], Json]
    ) -> IdempotencyKey | None:
        """The one that the contract derives from the arguments, or else the client's own. An operator who says which
        calls are the same means every caller: one with keys of its own could repeat an effect as often as it likes.

        `place` is where the call goes: several configurations may have one state, and a capability of the same name
        that leads elsewhere is another.
        """
        name = call.idempotency_key
        if contract.idempotent_key is not None:
            source = contract.idempotent_key
            if source not in self._expressions:
                self._expressions[source] = Expression(source, result="key")
            try:
                name = self._expressions[source].text(variables())
            except ExpressionError:
                # Not the engine's own words: they may quote an argument, and this goes on record.
                text = f"no idempotency key: {source!r} gives none for these arguments"
                raise Refused(Status.VALIDATION_FAILURE, "no_key", text) from None
        if name is None:
            return None
        # The name may be an argument, so it is kept as a digest, which also bounds its length.
        return IdempotencyKey(f"{call.principal.key}/{contract.name}/{place}", canonical.digest(name), digest)

    async def earlier(self, key: IdempotencyKey, call: Call, patience: KeyWait) -> tuple[str, Json] | None:
        """The id and outcome of an earlier call under this key; None if there was none. While that call runs, this one
        waits: no rate counts it yet, so there are places for a few."""
        row = self._row(key)
        if row is None or row.state != "started":
            return None if row is None else judge(row, key)
        with self._place(call), self._store.ends.wait_for((key.scope, key.name)) as ended:
            while row is not None and row.state == "started":
                if patience.left <= 0:
                    text = f"call {row.call_id} under the same key has not ended yet"
                    raise Refused(Status.UNAVAILABLE, "key_busy", text)
                since = asyncio.get_running_loop().time()
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience.left):
                        await ended.wait()
                ended.clear()
                patience.left -= asyncio.get_running_loop().time() - since
                row = self._row(key)
        return None if row is None else judge(row, key)

    def _row(self, key: IdempotencyKey) -> KeyRow | None:
        """The row of the key. Raises Refused where it stands for another request."""
        row = self._store.reader().key(key.scope, key.name)
        if row is not None and row.request_digest != key.request_digest:
            judge(row, key)
        return row

    @contextmanager
    def _place(self, call: Call) -> Iterator[None]:
        """A place for one more call that waits. Each client of an agent may have as many as are left for the others,
        so that none can take them all. Raises Refused."""
        agent = call.principal.key
        mine = (agent, client_of(call))
        own = self._waiting[mine]
        free = _MAX_WAITING - sum(count for (whose, _), count in self._waiting.items() if whose == agent)
        if own >= free:
            text = f"{own} calls of this client already wait for other calls with the same idempotency keys"
            raise Refused(Status.DENIED, "throttled", f"{text}; try again when some of them have ended")
        self._waiting[mine] += 1
        try:
            yield
        finally:
            self._waiting[mine] -= 1
            if not self._waiting[mine]:
                del self._waiting[mine]

    def bound(self, tx: Transaction, principal: str, kept: int) -> None:
        """So many more bytes are kept for a principal: hold them within the bounds.

        A process looks at its first, too: a command that keeps one result and ends would else never look.
        """
        self._fresh[principal] = self._fresh.get(principal, _LOOK_BYTES) + kept
        if self._fresh[principal] >= _LOOK_BYTES:
            if (held := tx.kept_bytes(principal).get(principal, 0)) > MAX_OF_ONE:
                tx.drop_outcomes(principal, held - _with_room(MAX_OF_ONE))
            if sum((every := tx.kept_bytes()).values()) > MAX_OF_ALL:
                for whose, excess in _beyond_their_share(every, _with_room(MAX_OF_ALL)):
                    tx.drop_outcomes(whose, excess)
            self._fresh[principal] = 0

    def ended(self) -> None:
        """A call of this process that had a key has ended."""
        self._store.ends.wake()


def _with_room(most: int) -> int:
    """So much is left, that the next result has room."""
    return most - most // 8


def _beyond_their_share(held: Mapping[str, int], most: int) -> Iterator[tuple[str, int]]:
    """How much each principal gives up, so that no tenant, and in it no agent, keeps more than the others at the cost
    of one that has less."""
    tenants: dict[str, dict[str, int]] = {}
    for principal, size in held.items():
        tenants.setdefault(principal.partition("/")[0], {})[principal] = size
    share = level({tenant: sum(agents.values()) for tenant, agents in tenants.items()}, most)
    for agents in tenants.values():
        each = level(agents, share)
        yield from ((principal, size - each) for principal, size in agents.items() if size > each)


def judge(row: KeyRow, key: IdempotencyKey) -> tuple[str, Json]:
    if row.request_digest != key.request_digest:
        raise Refused(
            Status.VALIDATION_FAILURE, "key_conflict", f"the same key was used by {row.call_id} for another request"
        )
    if row.state == "done" and row.outcome is not None:
        return row.call_id, row.outcome
    if row.state == "done":
        text = f"{row.call_id} under the same key has ended, and what it answered is no longer kept"
        raise Refused(Status.UNKNOWN, "result_not_kept", f"{text}; it is not made again")
    raise Refused(
        Status.UNKNOWN, "key_unknown", f"the outcome of {row.call_id} under the same key is unknown; it may have run"
    )


def settle(tx: Transaction, key: IdempotencyKey, call_id: str, outcome: Outcome | None) -> int:
    """What the key says from now on: the outcome, that it is unknown, or nothing if the call never ran (None). How many
    bytes of the outcome are kept."""
    if outcome is None:
        # A failed write may have taken the key all the same; one that another call has stays with it.
        tx.release_key(key.scope, key.name, call_id)
        return 0
    if outcome.status in (Status.SUCCESS, Status.FAILED):
        return tx.settle_key(key.scope, key.name, "done", pack(outcome))
    return tx.settle_key(key.scope, key.name, "unknown", None)


def pack(outcome: Outcome) -> Json:
    """An outcome as it is kept for replay."""
    return {
        "status": str(outcome.status),
        "reason_code": outcome.reason_code,
        "message": outcome.message,
        "result": outcome.result,
        "trust": outcome.trust,
        "error": outcome.error,
    }


def unpack(kept: Json, clean: Callable[[str], GuardedText]) -> Outcome:
    """The outcome again. More may be secret by now than when it was kept."""
    return Outcome(
        status=Status(kept["status"]),
        reason_code=kept["reason_code"],
        message=clean(kept["message"]),
        result=kept["result"],
        trust=kept["trust"],
        error=kept["error"],
    )
