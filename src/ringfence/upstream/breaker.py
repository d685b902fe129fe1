"""A server that fails again and again is left alone for a while, and then tried with one call.

Only failures of the server itself count: it died, could not be reached, gave no answer in time or none that can be
read, or said by HTTP that it has trouble. A tool's own error is an answer. Each principal has its own count, since its
calls may be what the server fails at, and must not take the server from others.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container

import anyio

from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable, UpstreamFailed
from ringfence.core.model import Json, Principal, Status
from ringfence.core.record import dataclass

log = logging.getLogger("ringfence.upstream")

FAILURES = 5
"""In a row, with no answer in between, before calls are refused."""
PAUSES = (10.0, 30.0, 60.0, 300.0)
"""Seconds until the next trial; the last from then on."""
_OWN = frozenset({"server_died", "server_down", "server_unreachable", "server_error", "answer_lost", "answer_unusable"})

Told = Callable[[str, Principal, Json], Awaitable[None]]
"""(server, for whom, what changed)"""


@dataclass(slots=True)
class Circuit:
    """How one server does for one principal."""

    failures: int = 0
    pauses: int = 0
    """How often it was left alone since it last answered."""
    not_before: float = 0.0
    problem: str = ""
    trying: bool = False
    """One call is under way that finds out whether it works again."""


class Breakers:
    """Which servers are left alone now, and for whom. A server that works has no entry."""

    def __init__(self, told: Told, *, clock: Callable[[], float] = anyio.current_time) -> None:
        self._told = told
        self._clock = clock
        self._circuits: dict[tuple[str, str], Circuit] = {}

    def forget(self, servers: Container[str]) -> None:
        """These were changed or removed."""
        for key in [key for key in self._circuits if key[0] in servers]:
            del self._circuits[key]

    async def watch(self, server: str, principal: Principal, call: Callable[[], Awaitable[Json]]) -> Json:
        """Make the call, or refuse it at once where the server is left alone. Raises Unavailable."""
        key = (server, principal.key)
        circuit = self._circuits.get(key)
        pauses = 0 if circuit is None else circuit.pauses
        trial = circuit if pauses else None
        if trial is not None:
            self._admit(server, trial)
        try:
            answer = await call()
        except (Refused, OutcomeUnknown, Unavailable) as exc:
            if _is_its_own(exc):
                await self._failed(key, principal, exc, pauses)
            elif isinstance(exc, UpstreamFailed):
                await self._answered(key, principal)
            raise
        finally:
            if trial is not None:
                trial.trying = False
        if key in self._circuits:
            await self._answered(key, principal)
        return answer

    def _admit(self, server: str, circuit: Circuit) -> None:
        wait = circuit.not_before - self._clock()
        if wait > 0 or circuit.trying:
            why = f"server {server} failed {circuit.failures} times in a row (the last time: {circuit.problem})"
            then = f"next try in {wait:.1f} s" if wait > 0 else "one call finds out now whether it works again"
            raise Unavailable("circuit_open", f"{why}, so it is left alone; {then}")
        circuit.trying = True

    async def _failed(self, key: tuple[str, str], principal: Principal, exc: RingfenceError, pauses: int) -> None:
        """`pauses`: how many there were when the call began."""
        circuit = self._circuits.setdefault(key, Circuit())
        circuit.failures += 1
        circuit.problem = str(getattr(exc, "reason_code", ""))
        if circuit.failures < FAILURES or circuit.pauses > pauses:
            return  # what began before it was left alone fails now: that is no further reason
        pause = PAUSES[min(circuit.pauses, len(PAUSES) - 1)]
        circuit.pauses += 1
        circuit.not_before = self._clock() + pause
        log.warning(
            "server %s failed %d times in a row for %s (%s): it is left alone for %g s",
            *(key[0], circuit.failures, key[1], circuit.problem, pause),
        )
        change = {"state": "open", "failures": circuit.failures, "reason_code": circuit.problem}
        await self._told(key[0], principal, {**change, "pause_seconds": pause})

    async def _answered(self, key: tuple[str, str], principal: Principal) -> None:
        circuit = self._circuits.pop(key, None)
        if circuit is not None and circuit.pauses:
            log.warning("server %s works again for %s", *key)
            await self._told(key[0], principal, {"state": "closed", "failures": circuit.failures})


def _is_its_own(exc: RingfenceError) -> bool:
    """Whether it is the server that failed, and not the call."""
    if isinstance(exc, OutcomeUnknown) and exc.answered is not None:
        return exc.answered == 429 or exc.answered >= 500
    if isinstance(exc, Refused):
        return exc.status is Status.TIMEOUT
    return getattr(exc, "reason_code", None) in _OWN
