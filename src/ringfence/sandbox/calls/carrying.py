"""Carries out what is for a session, by whoever keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ringfence.errors import Refused
from ringfence.model import Answer, Grant, Json, Principal, Status
from ringfence.sandbox.calls import files, life, processes, resources, steps
from ringfence.sandbox.calls.task import Carry, Task, owner_of
from ringfence.sandbox.order import Provision
from ringfence.sandbox.tools import PROGRAMS
from ringfence.sandbox.verbs import Keeping

_CALLS: Mapping[str, Carry] = {**life.CALLS, **files.CALLS, **processes.CALLS}


class Carrying:
    """Tools of sessions, over one keeper."""

    def __init__(self, keeper: Keeping, provision: Provision) -> None:
        self._keeper = keeper
        self._provision = provision

    async def run(self, grant: Grant, isolation: Json) -> Answer:
        """Once. Raises Refused, and Unavailable where nothing was done."""
        task, contract = Task(grant, self._keeper, self._provision, isolation), grant.contract
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

    async def resources(self, principal: Principal, *, templates: bool) -> Sequence[Json]:
        return resources.templates() if templates else await resources.listed(self._keeper, principal)

    async def close(self) -> None:
        """Let go of the keeper; sessions stay."""
        await self._keeper.close()
