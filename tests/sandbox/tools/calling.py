"""Tools of sessions, carried out on a house whose boxes are fakes: each call held to its own schemas, both ways."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ringfence.compose.backends import templates
from ringfence.config import SandboxSettings
from ringfence.core.box import Attached, Limits
from ringfence.core.model import Answer, Call, Contract, Decision, Definition, Grant, Json, Principal, Status
from ringfence.core.schema import Schema
from ringfence.governance.contract import build, built_in
from ringfence.sandbox.tools.executor import Executor
from ringfence.sandbox.tools.request import BoxContents, Provision, SessionLifetimes
from ringfence.sandbox.tools.toolkit import definition
from tests.boxing import FakeBackend
from tests.faking import make_call
from tests.sandbox.fake_sessions import FakeSessions, fake_sessions

ALLOWED = Decision("dec_1", True, "allowed", sandbox=True)
MINE, OTHERS = Principal("me", tenant="t"), Principal("me", tenant="other")


LISTS = build("ringfence:lists", {"transport": "sandboxed_exec", "tool": "resources/read", "mode": "read"})[0]


@dataclass(slots=True)
class Caller:
    """Makes calls as the pipeline would, once they were granted."""

    executor: Executor
    place: FakeSessions
    contracts: dict[str, Contract]
    principal: Principal = MINE

    def contract(self, tool: str) -> Contract:
        return self.contracts.get(tool) or built_in(tool, 5)

    def granted(self, tool: str, arguments: Json, attached: Attached | None = None, **more: Any) -> Grant:
        contract, wide = self.contract(tool), attached is not None
        given = self.executor.provision
        own: Definition = definition(contract, given.limits, BoxContents(), given.lives, wide=wide)
        problem = Schema(own.body["inputSchema"]).problem(arguments, "arguments")
        assert problem is None, problem
        call: Call = make_call(contract.name, arguments, attached=attached, principal=more.pop("principal", MINE))
        self.executor.check(call, contract)
        return Grant(call, contract, ALLOWED, own, "d", None, time.monotonic() + 600, **more)

    async def __call__(self, tool: str, attached: Attached | None = None, **arguments: Any) -> Answer:
        """An agent's call, or, with something attached, that of somebody in this process."""
        grant = self.granted(tool, arguments, attached, principal=self.principal)
        answer = await self.executor.run(grant)
        if attached is None and answer.status is Status.SUCCESS:
            assert grant.definition is not None and answer.result is not None
            told = answer.result["structuredContent"]
            problem = Schema(grant.definition.body["outputSchema"]).problem(told, "result")
            assert problem is None, problem
        return answer

    async def told(self, tool: str, attached: Attached | None = None, **arguments: Any) -> Json:
        """The structured content of what must go well."""
        answer = await self(tool, attached, **arguments)
        assert answer.status is Status.SUCCESS and answer.result is not None, answer
        return dict(answer.result["structuredContent"])

    async def listing(self, method: str, principal: Principal = MINE) -> Json:
        asked = make_call(method, {}, kind="listing", method=method, server="ringfence", principal=principal)
        self.executor.check(asked, LISTS)
        answer = await self.executor.run(Grant(asked, LISTS, ALLOWED, None, "d", None, time.monotonic() + 600))
        assert answer.result is not None
        return answer.result

    async def opened(self, **arguments: Any) -> str:
        return str((await self.told("open_session", **arguments))["session"])

    def file(self, path: str) -> Path:
        """In the box that was made last."""
        return self.place.backend.boxes[-1].place / path


@asynccontextmanager
async def calling(
    folder: Path, *contracts: Contract, limits: Limits | None = None, **rules: Any
) -> AsyncIterator[Caller]:
    async with fake_sessions(folder, **rules) as place:
        given = Provision(limits or Limits(), templates(SandboxSettings()), lives=SessionLifetimes())
        yield Caller(Executor(FakeBackend(), given, lambda: place.manager), place, {one.tool: one for one in contracts})


def words(answer: Answer) -> str:
    """All texts of a result."""
    assert answer.result is not None
    return "\n".join(block["text"] for block in answer.result["content"] if block["type"] == "text")


def named(data: bytes) -> Json:
    return {"bytes": len(data), "sha256": sha256(data).hexdigest()}
