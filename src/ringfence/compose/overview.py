"""What goes on with one state just now: calls, questions, sessions and servers of every process that uses it.

It is read from the state and the keeper, so it needs no gateway that answers, and shows nothing that is not on record.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median, quantiles

from ringfence.config.settings import Config
from ringfence.core import canonical, system
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.core.sessions import Owner, SessionInfo, UsageSample
from ringfence.store import Reader, Record

SECONDS = 60.0
"""Rates are those of so long."""
_MAX_READ = 2000
"""Ended calls that are read at once; of more, the oldest are not counted."""
_KEEPER_SECONDS = 5.0
_NOT_CALLS = ("server", "listing")


@dataclass(frozen=True, slots=True)
class _Ended:
    at: float
    tool: str
    server: str | None
    status: str
    wall_ms: float | None


class Overview:
    """Looks again and again; reads only what is new."""

    def __init__(self, settings: Config, reader: Reader) -> None:
        self._settings = settings
        self._reader = reader
        self._after = reader.last_number()
        self._ended: deque[_Ended] = deque()
        since = time.time() - SECONDS
        for record in reader.records(kind="finished", newest_first=True, limit=_MAX_READ):
            if record.at < since:
                break
            if (found := _ended(record)) is not None:
                self._ended.appendleft(found)

    async def look(self) -> Json:
        """What there is now. Raises StoreError."""
        self._catch_up()
        now = time.time()
        return {
            "at": now,
            "state": str(self._reader.folder),
            "rates": self._rates(),
            "calls": self._running(now),
            "approvals": self._questions(now),
            "sessions": await self._sessions(),
            "servers": self._servers(),
        }

    def _catch_up(self) -> None:
        newest = self._reader.last_number()
        while self._after < newest:
            found = self._reader.ended_after(self._after, _MAX_READ)
            self._ended.extend(each for _, record in found if (each := _ended(record)) is not None)
            self._after = found[-1][0] if len(found) == _MAX_READ else newest
        since = time.time() - SECONDS
        while self._ended and self._ended[0].at < since:
            self._ended.popleft()

    def _rates(self) -> Json:
        counts = Counter(each.status for each in self._ended)
        return {
            "seconds": SECONDS,
            "calls": len(self._ended),
            "per_second": round(len(self._ended) / SECONDS, 2),
            "by_status": dict(sorted(counts.items())),
            **_times([each.wall_ms for each in self._ended]),
        }

    def _running(self, now: float) -> list[Json]:
        out = []
        for call_id in self._reader.running():
            started = next(self._reader.records(call_id=call_id, kind="started", limit=1), None)
            if started is None or (about := _about(started)) is None:
                continue
            out.append(
                {
                    "call_id": call_id,
                    "tool": about["tool"],
                    "agent": about["agent"],
                    "server": about["server"],
                    "session": about["session"],
                    "seconds": round(max(0.0, now - started.at), 1),
                }
            )
        return out

    def _questions(self, now: float) -> list[Json]:
        out = []
        for ident in self._reader.pending():
            asked = self._reader.approval(ident, brief=True)
            if asked is not None and asked.state == "pending":
                out.append(
                    {
                        "id": ident,
                        "tool": asked.tool,
                        "principal": asked.principal,
                        "rule": asked.rule,
                        "seconds": round(max(0.0, now - asked.asked_at), 1),
                        "expires_in": round(asked.expires_at - now, 1),
                    }
                )
        return out

    def _servers(self) -> list[Json]:
        names = [*self._settings.servers, *(each.server for each in self._ended if each.server)]
        out = []
        for name in dict.fromkeys(names):
            calls = [each for each in self._ended if each.server == name]
            failed = sum(each.status in ("failed", "timeout", "unavailable", "unknown") for each in calls)
            out.append({"name": name, "calls": len(calls), "failed": failed, **_times([c.wall_ms for c in calls])})
        return out

    async def _sessions(self) -> list[Json] | None:
        """Those that are open; None where the keeper does not answer. Where there is no keeper, there are none."""
        if system.no_boxes() is not None:
            return []
        from ringfence.compose.keeper import keeper_launch  # noqa: PLC0415 - for Linux alone
        from ringfence.sandbox.keeper.client import KeeperClient  # noqa: PLC0415

        launch = keeper_launch(self._settings.gateway.state, replace(self._settings.sandbox))
        if not launch.folder.is_found():
            return []
        out: list[Json] = []
        try:
            # A connection for one look: a keeper stays as long as somebody is connected.
            async with KeeperClient.connect(launch, request_timeout=_KEEPER_SECONDS) as keeper:
                for info in await keeper.of_tenant(Owner("", "")):
                    if info.state == "stopped":
                        continue
                    with suppress(RingfenceError):  # it has just ended
                        out.append(_session(info, (await keeper.view(info.owner, info.id)).samples))
        except RingfenceError:
            return None
        return out


def _session(info: SessionInfo, samples: Sequence[UsageSample]) -> Json:
    cpu = None
    if len(samples) > 1 and samples[-1].at > samples[-2].at:
        spent = samples[-1].cpu_ms - samples[-2].cpu_ms
        cpu = round(max(0.0, spent / (samples[-1].at - samples[-2].at) / 10), 1)
    return {
        "id": info.id,
        "agent": info.owner.agent,
        "tenant": info.owner.tenant,
        "state": info.state,
        "template": info.template,
        "step": info.step,
        "cpu_percent": cpu,
        "cpu_ms": samples[-1].cpu_ms if samples else None,
        "memory_bytes": samples[-1].memory_bytes if samples else info.memory_bytes,
        "memory_limit_bytes": info.limits.memory_bytes,
    }


def _times(found: Sequence[float | None]) -> Json:
    known = [each for each in found if each is not None]
    if not known:
        return {"p50_ms": None, "p95_ms": None}
    late = known[0] if len(known) == 1 else quantiles(known, n=20, method="inclusive")[-1]
    return {"p50_ms": round(median(known), 1), "p95_ms": round(late, 1)}


def _about(record: Record) -> Json | None:
    """Whose call it is; None for what cannot be read, or is no call of an agent."""
    try:
        call = record.body.get("call")
    except canonical.NotCanonical:
        return None
    if not isinstance(call, dict) or call.get("kind") in _NOT_CALLS:
        return None
    principal = call.get("principal")
    agent = principal.get("agent") if isinstance(principal, dict) else None
    return {"tool": str(call.get("tool")), "server": call.get("server"), "agent": agent, "session": call.get("session")}


def _ended(record: Record) -> _Ended | None:
    about = _about(record)
    if about is None:
        return None
    body = record.body
    facts = body.get("facts")
    wall = facts.get("wall_ms") if isinstance(facts, dict) and body.get("started_seq") is not None else None
    server = about["server"] if isinstance(about["server"], str) else None
    wall_ms = float(wall) if isinstance(wall, int | float) else None
    return _Ended(record.at, about["tool"], server, str(body.get("status")), wall_ms)
