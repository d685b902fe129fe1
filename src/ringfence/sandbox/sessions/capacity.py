"""How many sessions may exist at one time, by number, memory and cores. When it is full, callers wait in line."""

from __future__ import annotations

import asyncio
from collections import deque

from ringfence.core.box import MIB, Limits
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass

MAX_WAITING = 128


@dataclass(frozen=True, slots=True)
class KeeperRules:
    """What a keeper may hold. Paused sessions count: they still have their memory."""

    max_sessions: int = 32
    max_memory_bytes: int | None = None
    """The memory limits of all sessions together."""
    max_cores: float | None = None
    """The cores of all sessions together."""
    queue_seconds: float = 5.0
    """How long a caller waits for capacity."""
    retain_seconds: float = 86_400.0
    """How long outputs are kept after a session's end; 0: not at all."""
    retain_bytes: int = 2048 * MIB
    """Of all ended sessions together."""
    paused_seconds: float = 86_400.0
    """How long a session may stay paused; then it is closed."""
    reclaim_seconds: float | None = 60.0
    """How long a session is paused until its memory is given back; None: never."""


class Capacity:
    """First come, first served: small sessions do not starve a large one."""

    def __init__(self, rules: KeeperRules) -> None:
        self._rules = rules
        self._inside: dict[str, Limits] = {}
        self._line: deque[tuple[str, Limits, asyncio.Future[None]]] = deque()

    async def enter(self, id_: str, limits: Limits) -> None:
        """Reserve capacity for a session, until it leaves. Raises Unavailable."""
        if lacking := self._lacking({}, limits):
            raise Unavailable("capacity", f"a session of this size never fits: {lacking}")
        if not self._line and not self._lacking(self._inside, limits):
            self._inside[id_] = limits
            return
        if len(self._line) >= MAX_WAITING:
            raise self._full(limits)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (id_, limits, admitted)
        self._line.append(waiting)
        try:
            async with asyncio.timeout(self._rules.queue_seconds):
                await admitted
        except TimeoutError:
            if id_ not in self._inside:  # else it was admitted at the same moment
                raise self._full(limits) from None
        except asyncio.CancelledError:
            self.leave(id_)
            raise
        finally:
            if waiting in self._line:
                self._line.remove(waiting)
                self._admit()

    def leave(self, id_: str) -> None:
        if self._inside.pop(id_, None) is not None:
            self._admit()

    def _admit(self) -> None:
        while self._line:
            id_, limits, admitted = self._line[0]
            if not admitted.done():
                if self._lacking(self._inside, limits):
                    return
                self._inside[id_] = limits
                admitted.set_result(None)
            self._line.popleft()

    def _lacking(self, inside: dict[str, Limits], limits: Limits) -> str:
        """Which limit one more session like this would exceed; empty where it fits."""
        rules = self._rules
        together = [*inside.values(), limits]
        if len(together) > rules.max_sessions:
            return f"{rules.max_sessions} sessions at most may exist at one time (max_sessions)"
        if rules.max_memory_bytes is not None and sum(each.memory_bytes for each in together) > rules.max_memory_bytes:
            most = rules.max_memory_bytes // MIB
            return f"{most} MiB at most for all sessions together (max_sessions_memory_mb)"
        if rules.max_cores is not None and sum(each.cpu_cores for each in together) > rules.max_cores:
            return f"{rules.max_cores:g} cores at most for all sessions together (max_sessions_cpu_cores)"
        return ""

    def _full(self, limits: Limits) -> Unavailable:
        lacking = self._lacking(self._inside, limits) or "others were first"
        remedy = "close a session, ask for a smaller one, try again later, or raise the limit"
        return Unavailable(
            "capacity", f"no room for a session within {self._rules.queue_seconds:g} s: {lacking}; {remedy}"
        )
