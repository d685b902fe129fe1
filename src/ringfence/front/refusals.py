"""Requests that are refused before they become calls. All of them are recorded, whoever sends them and however many.

Each refusal of an identified caller gets its own record. Refusals of unidentified callers, and of identified callers
who flood us, are counted by user, reason and minute, with the times of the first and the last. The number of records is
bounded either way, so no sender can make the log grow by being refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import anyio
from mcp_types import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    PARSE_ERROR,
    UNSUPPORTED_PROTOCOL_VERSION,
)

from ringfence.core.errors import StoreError
from ringfence.core.model import Json, Origin, Principal
from ringfence.core.record import dataclass
from ringfence.store import Store

log = logging.getLogger("ringfence.front")

KIND = "request_refused"
SECONDS = 60.0
"""Refusals within this time share one count."""
_MAX_KINDS = 64
"""Pairs of user and reason that have counts of their own at one time; the others share one."""
_REASONS = {
    PARSE_ERROR: "not_json",
    INVALID_REQUEST: "invalid_request",
    METHOD_NOT_FOUND: "unknown_method",
    INVALID_PARAMS: "invalid_params",
    HEADER_MISMATCH: "header_mismatch",
    MISSING_REQUIRED_CLIENT_CAPABILITY: "missing_capability",
    UNSUPPORTED_PROTOCOL_VERSION: "unsupported_version",
}


def reason_of(code: int) -> str:
    """The reason code of a JSON-RPC error. Its message is not kept: it may repeat what the caller sent."""
    return _REASONS.get(code, "error")


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was refused, and of whom as much as is known."""

    origin: Origin
    reason: str
    uid: int | None = None
    """The user at the other end, as the kernel has it; None where it does not say."""
    principal: Principal | None = None
    """None: the caller was refused before it was identified."""


@dataclass(slots=True)
class _Repeated:
    first: float
    last: float
    count: int = 1


class _Account:
    """Refusals of one kind of caller that are not recorded yet, and how many records they may still make."""

    def __init__(self, burst: int, per_minute: float) -> None:
        self._most = float(burst)
        self._per_second = per_minute / 60.0
        self._left = float(burst)
        self._at = time.monotonic()
        self._waiting: dict[Refusal, _Repeated] = {}

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def take(self) -> bool:
        """Use up one record. False if none is left now."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def add(self, refused: Refusal) -> None:
        now = time.time()
        if refused not in self._waiting and len(self._waiting) >= _MAX_KINDS:
            refused = replace(refused, reason="other", uid=None, principal=None)
        repeated = self._waiting.setdefault(refused, _Repeated(now, now, 0))
        repeated.last, repeated.count = now, repeated.count + 1

    def due(self, *, everything: bool) -> list[Json]:
        """Bodies of records that may be written now; the others wait, and are counted on."""
        out: list[Json] = []
        for refused in list(self._waiting):
            if not everything and not self.take():
                break
            out.append(_body(refused, self._waiting.pop(refused)))
        return out


class Refusals:
    """The refused requests of one gateway. Whatever becomes of the record, the refusal stands."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._unknown = _Account(burst=32, per_minute=2)
        self._known = _Account(burst=120, per_minute=12)
        self._noted = anyio.Event()
        self.seen: Callable[[str], None] = _unseen
        """Called with the reason of each."""

    def count(self, refused: Refusal) -> None:
        """Count a refusal of a caller who is not known yet, for the next minute's records."""
        self.seen(refused.reason)
        self._unknown.add(refused)
        self._noted.set()

    async def record(self, refused: Refusal, method: str | None = None) -> None:
        """Record a refusal of a known caller, at once unless the caller floods. `method` is one of MCP's."""
        if refused.principal is None:
            self.count(refused)
            return
        self.seen(refused.reason)
        if self._known.take():
            now = time.time()
            await self._write([_body(refused, _Repeated(now, now)) | ({} if method is None else {"method": method})])
        else:
            self._known.add(refused)
            self._noted.set()

    async def run(self) -> None:
        """Write the counted refusals every minute, for as long as the gateway runs."""
        while True:
            await self._noted.wait()
            await anyio.sleep(SECONDS)
            await self.flush(everything=False)
            if self._unknown.is_idle and self._known.is_idle:
                self._noted = anyio.Event()

    async def flush(self, *, everything: bool = True) -> None:
        """Record what was counted: at the end all of it, since it is never much."""
        await self._write([*self._unknown.due(everything=everything), *self._known.due(everything=everything)])

    async def _write(self, bodies: list[Json]) -> None:
        if not bodies or self._store is None:
            return
        try:
            await self._store.write(lambda tx: [tx.append(KIND, None, body) for body in bodies])
        except StoreError as exc:
            log.error("refused requests could not be recorded: %s", exc)


def _unseen(reason: str) -> None:
    return None


def _body(refused: Refusal, repeated: _Repeated) -> Json:
    who = refused.principal
    return {
        "origin": refused.origin,
        "reason_code": refused.reason,
        "peer_uid": refused.uid,
        "principal": None
        if who is None
        else {"tenant": who.tenant, "agent": who.agent, "person": who.person, "kind": who.kind},
        "count": repeated.count,
        "first": repeated.first,
        "last": repeated.last,
    }
