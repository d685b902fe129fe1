"""What a session's caller asks of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ringfence.core.box import Attached
from ringfence.core.model import Json, Outcome, Status
from ringfence.sdk import client, engine

pytestmark = pytest.mark.anyio


async def test_what_the_engine_takes_to_start_is_not_the_tools_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        is_ready = here = False

        async def ready(self) -> None:
            await asyncio.sleep(0.3)
            self.is_ready = True

    slow = Slow()

    async def elsewhere(work: Any) -> Any:
        return await work

    async def at_once(tool: str, arguments: Json, attached: Attached) -> Outcome:
        assert slow.is_ready
        return Outcome(Status.SUCCESS, "ok", result={"structuredContent": {"sessions": []}})

    monkeypatch.setattr(engine, "engine", lambda: slow)
    monkeypatch.setattr(engine, "elsewhere", elsewhere)
    monkeypatch.setattr(client, "call_by_engine", at_once)
    assert await client.ask(at_once, "list_sessions", {}, patience=0.1) == {"sessions": []}
