"""The log as lines of JSON: which call each line is about."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from ringfence.core.model import GuardedText, Outcome, Status
from ringfence.telemetry.logs import JsonLines
from ringfence.telemetry.metrics import GatewayMetrics
from ringfence.telemetry.watch import CallWatcher
from tests.making import call


def call_of_a_line() -> str | None:
    line: dict[str, str] = json.loads(JsonLines().format(logging.makeLogRecord({"msg": "said"})))
    return line.get("call_id")


@pytest.mark.anyio
async def test_what_a_call_began_and_outlives_it_is_logged_about_no_call() -> None:
    watcher = CallWatcher(GatewayMetrics())
    asked, logged = asyncio.Event(), []

    async def connection() -> None:
        """Such as one to a server: it is opened in the start that its first call needs, and stays."""
        for _ in range(3):
            await asked.wait()
            asked.clear()
            logged.append(call_of_a_line())

    async def log_there() -> str | None:
        count = len(logged)
        asked.set()
        while len(logged) == count:
            await asyncio.sleep(0)
        return logged[-1]

    made = call("echo")
    asking = watcher.begin(made, GuardedText)
    start = replace(call("desk", kind="server"), id="call_2")
    starting = watcher.begin(start, GuardedText)
    task = asyncio.ensure_future(connection())
    assert await log_there() == start.id
    starting.ended(None, Outcome(Status.SUCCESS, "ok"), removed=0)
    assert await log_there() == made.id == call_of_a_line()
    asking.ended(None, Outcome(Status.SUCCESS, "ok"), removed=0)
    assert (await log_there(), call_of_a_line()) == (None, None)
    await task
