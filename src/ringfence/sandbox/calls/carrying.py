"""Carries out what is for a session, by whoever keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ringfence.box import Outside
from ringfence.errors import Refused
from ringfence.loans import Lending
from ringfence.model import Answer, Grant, Json, Principal, Status
from ringfence.ports import Lender, Packed, Passage
from ringfence.sandbox.calls import files, life, processes, resources, steps
from ringfence.sandbox.calls.lending import Lends
from ringfence.sandbox.calls.task import Carry, Task, owner_of
from ringfence.sandbox.order import Provision
from ringfence.sandbox.screening import Screen
from ringfence.sandbox.tools import PROGRAMS
from ringfence.sandbox.verbs import Keeping
from ringfence.sessions import Owner, SessionInfo

_CALLS: Mapping[str, Carry] = {**life.CALLS, **files.CALLS, **processes.CALLS}
PassageFor = Callable[[Grant], Awaitable[Passage]]
PackedFor = Callable[[Grant], Awaitable[Packed | None]]
_MOST_KNOWN = 10_000
_RUNNING = (*PROGRAMS, processes.send_input.__name__, life.resume_session.__name__)
"""What makes something run in a session."""


class _Has(NamedTuple):
    """What a session has of the outside, for as long as it lives."""

    network: tuple[str, ...]
    lending: Lending | None
    outside: Outside


class Carrying:
    """Tools of sessions, over one keeper."""

    def __init__(
        self,
        keeper: Keeping,
        provision: Provision,
        passage: PassageFor | None = None,
        packed: PackedFor | None = None,
        lender: Callable[[], Lender] | None = None,
    ) -> None:
        """`passage` is the way out of a session that a grant opens, `packed` what is installed for it; `lender` has the
        secrets that sessions use."""
        self._keeper = keeper
        self._provision = provision
        self._passage = passage or _none
        self._packed = packed or _nothing
        self._lends = Lends(keeper, lender)
        self._known: dict[str, _Has] = {}

    async def run(self, grant: Grant, isolation: Json, screen: Screen) -> Answer:
        """Once. Raises Refused, and Unavailable where nothing was done."""
        contract = grant.contract
        task = Task(grant, self._keeper, self._provision, isolation, screen)
        if contract.tool == life.open_session.__name__:
            task = replace(
                task, passage=await self._passage(grant), packed=await self._packed(grant), learn=self._learn
            )
        else:
            await self._lend(task)
        if contract.tool in PROGRAMS:
            return await steps.run(task)  # its clock is the step's own
        carry: Carry = resources.read if task.call.kind == "resource" else _CALLS[contract.tool]
        if task.wide or contract.tool == processes.wait_process.__name__:
            return await carry(task)  # it has no clock, or one of its own
        try:
            async with asyncio.timeout(contract.timeout_seconds):
                return await carry(task)
        except TimeoutError:
            text = f"{contract.name} was given up after {contract.timeout_seconds:g} s; the session may still be at it"
            raise Refused(Status.TIMEOUT, "timeout", text) from None

    async def state_of(self, principal: Principal, session: str) -> tuple[int, str]:
        return await self._keeper.state_of(owner_of(principal), session)

    async def outside(self, principal: Principal, session: str) -> Outside:
        """What its box has of the outside, for as long as it lives."""
        return (await self._has(owner_of(principal), session)).outside

    async def _has(self, owner: Owner, session: str) -> _Has:
        if session not in self._known:
            self._learn(await self._keeper.info(owner, session))
        return self._known[session]

    def _learn(self, info: SessionInfo) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        writes = info.keeps or any(mount.get("mode") == "rw" for mount in info.isolation.get("mounts") or ())
        sets_up = (info.isolation.get("template") or {}).get("setup") == "user"
        self._known[info.id] = _Has(info.network, info.lending, Outside(bool(info.network), writes, sets_up))

    async def _lend(self, task: Task) -> None:
        """What a session may use of secrets is decided anew before anything runs there. Raises Refused, Unavailable."""
        tool, forks = task.grant.contract.tool, task.grant.contract.tool == life.fork_session.__name__
        if not forks and (tool not in _RUNNING or "session" not in task.given):
            return
        has = await self._has(task.owner, task.session)
        if has.lending is not None:
            apply = self._lends.ready if forks else self._lends.offer
            await apply(task.owner, task.session, has.network, has.lending)

    async def resources(self, principal: Principal, *, templates: bool) -> Sequence[Json]:
        return resources.templates() if templates else await resources.listed(self._keeper, principal)

    async def close(self) -> None:
        """Let go of the keeper; sessions stay."""
        await self._lends.close()
        await self._keeper.close()


async def _nothing(_: Grant) -> Packed | None:
    return None


async def _none(_: Grant) -> Passage:
    return Passage()
