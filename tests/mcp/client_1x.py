# mypy: ignore-errors
# (its types are those of the other line of the SDK)
"""A client on the 1.x SDK, run by that SDK's own Python: does a little of everything and prints what it saw as JSON.

It is no part of the tests' own environment, where the other line of the SDK is installed.

    python client_1x.py http URL
    python client_1x.py stdio COMMAND…
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client

ASKED: list[str] = []
LOGGED: list[Any] = []
PROGRESS: list[float] = []


async def elicited(context: Any, params: Any) -> types.ElicitResult:
    ASKED.append(params.message)
    return types.ElicitResult(action="accept", content={"username": "ann", "email": "ann@example.org"})


async def logged(params: types.LoggingMessageNotificationParams) -> None:
    LOGGED.append(params.data)


async def progressed(progress: float, total: float | None, message: str | None) -> None:
    PROGRESS.append(progress)


@asynccontextmanager
async def connected(way: str, target: list[str]) -> Any:
    if way == "http":
        async with streamablehttp_client(target[0]) as (read, write, _):
            yield read, write
    else:
        parameters = StdioServerParameters(command=target[0], args=target[1:], env=dict(os.environ))
        async with stdio_client(parameters) as (read, write):
            yield read, write


def plain(result: types.CallToolResult) -> dict[str, Any]:
    return result.model_dump(by_alias=True, mode="json", exclude_none=True)


async def main(way: str, target: list[str]) -> None:
    async with (
        connected(way, target) as (read, write),
        ClientSession(read, write, elicitation_callback=elicited, logging_callback=logged) as session,
    ):
        hello = await session.initialize()
        told = {
            "sdk": version("mcp"),
            "revision": hello.protocolVersion,
            "tools": [tool.name for tool in (await session.list_tools()).tools],
            "call": plain(await session.call_tool("test_simple_text", {})),
            "progress_call": plain(
                await session.call_tool("test_tool_with_progress", {}, progress_callback=progressed)
            ),
            "elicitation": plain(await session.call_tool("test_elicitation", {"message": "Who are you?"})),
            "structured": plain(await session.call_tool("get-structured-content", {"location": "Chicago"})),
            "error": plain(await session.call_tool("test_error_handling", {})),
            "unknown": plain(await session.call_tool("test_simple_txt", {})),
            "logging": plain(await session.call_tool("test_tool_with_logging", {})),
        }
    print(json.dumps({**told, "asked": ASKED, "progress": PROGRESS, "logged": LOGGED}))


asyncio.run(main(sys.argv[1], sys.argv[2:]))
