"""Carries out what is for a session, by whoever keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from ringfence.box import NetworkRule
from ringfence.errors import Refused
from ringfence.model import Answer, Grant, Json, Principal, Status
from ringfence.ports import Packed
from ringfence.sandbox.calls import files, life, processes, resources, steps
from ringfence.sandbox.calls.task import Carry, Task, owner_of
from ringfence.sandbox.order import Provision
from ringfence.sandbox.screening import Screen
from ringfence.sandbox.tools import PROGRAMS
from ringfence.sandbox.verbs import Keeping

_CALLS: Mapping[str, Carry] = {**life.CALLS, **files.CALLS, **processes.CALLS}
RulesFor = Callable[[Grant], Awaitable[tuple[NetworkRule, ...]]]
PackedFor = Callable[[Grant], Awaitable[Packed | None]]
_MOST_KNOWN = 10_000


class Carrying:
    """Tools of sessions, over one keeper."""

    def __init__(
        self,
        keeper: Keeping,
        provision: Provision,
        rules: RulesFor | None = None,
        packed: PackedFor | None = None,
    ) -> None:
        """`rules` says what a session that a grant opens may reach, `packed` what is installed for it."""
        self._keeper = keeper
        self._provision = provision
        self._rules = rules or _none
        self._packed = packed or _nothing
        self._reaching: dict[str, bool] = {}

    async def run(self, grant: Grant, isolation: Json, screen: Screen) -> Answer:
        """Once. Raises Refused, and Unavailable where nothing was done."""
        contract = grant.contract
        task = Task(grant, self._keeper, self._provision, isolation, screen)
        if contract.tool == life.open_session.__name__:
            task = replace(task, network=await self._rules(grant), packed=await self._packed(grant))
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

    async def reaches(self, principal: Principal, session: str) -> bool:
        """Whether its box has a way out, which is so for as long as it lives."""
        if session not in self._reaching:
            if len(self._reaching) >= _MOST_KNOWN:
                self._reaching.clear()
            self._reaching[session] = bool((await self._keeper.info(owner_of(principal), session)).network)
        return self._reaching[session]

    async def resources(self, principal: Principal, *, templates: bool) -> Sequence[Json]:
        return resources.templates() if templates else await resources.listed(self._keeper, principal)

    async def close(self) -> None:
        """Let go of the keeper; sessions stay."""
        await self._keeper.close()


async def _nothing(_: Grant) -> Packed | None:
    return None


async def _none(_: Grant) -> tuple[NetworkRule, ...]:
    return ()
