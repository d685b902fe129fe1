# mypy: ignore-errors
# (what it imports is installed in environments of its own)
"""Agent frameworks as clients: each lists the tools and makes some calls, as an agent whose model was told what to do.

It prints as JSON what a model of that framework gets to read.

    python agent_clients.py FRAMEWORK TARGET CALLS

TARGET is a URL, or the command of a server on stdio as a JSON array; CALLS is a JSON array of [tool, arguments].
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import metadata
from typing import Any

PATIENCE = 120.0
"""Seconds that a client waits for an answer: those of their own may be too few on a busy machine."""
Calls = list[tuple[str, dict[str, Any]]]
Told = tuple[list[str], list[str]]


def stdio(target: list[str]) -> dict[str, Any]:
    return {"command": target[0], "args": target[1:], "env": dict(os.environ)}


async def openai_agents(target: Any, calls: Calls) -> Told:
    from agents import Agent, Runner, set_tracing_disabled
    from agents.mcp import MCPServerStdio, MCPServerStreamableHttp
    from agents.testing import ScriptedModel
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    set_tracing_disabled(True)
    made = MCPServerStreamableHttp if isinstance(target, str) else MCPServerStdio
    params = {"url": target} if isinstance(target, str) else stdio(target)
    steps = [
        [
            ResponseFunctionToolCall(
                arguments=json.dumps(arguments), call_id=str(number), name=tool, type="function_call"
            )
        ]
        for number, (tool, arguments) in enumerate(calls)
    ]
    said = ResponseOutputText(text="done", type="output_text", annotations=[])
    steps.append(
        [ResponseOutputMessage(id="end", content=[said], role="assistant", status="completed", type="message")]
    )
    async with made(params, client_session_timeout_seconds=PATIENCE) as server:
        agent = Agent("agent", mcp_servers=[server], model=ScriptedModel(steps))
        ended = await Runner.run(agent, "go", max_turns=len(calls) + 1)
        names = [tool.name for tool in await server.list_tools()]
    outputs = [item.output for item in ended.new_items if item.type == "tool_call_output_item"]
    return names, [output if isinstance(output, str) else json.dumps(output) for output in outputs]


async def pydantic_ai(target: Any, calls: Calls) -> Told:
    from fastmcp.client.transports import StdioTransport
    from pydantic_ai import Agent, ModelResponse, RetryPromptPart, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.models.function import FunctionModel

    waiting = [ToolCallPart(tool, arguments) for tool, arguments in calls]
    read: list[str] = []
    offered: list[str] = []

    def model(messages: Any, info: Any) -> ModelResponse:
        offered[:] = [tool.name for tool in info.function_tools]
        for part in messages[-1].parts:
            if isinstance(part, ToolReturnPart):
                read.append(part.model_response_str())
            elif isinstance(part, RetryPromptPart):
                read.append(part.model_response())
        return ModelResponse([waiting.pop(0) if waiting else TextPart("done")])

    where = target if isinstance(target, str) else StdioTransport(**stdio(target))
    toolset = MCPToolset(where, init_timeout=PATIENCE, read_timeout=PATIENCE, max_retries=len(calls))
    async with Agent(FunctionModel(model), toolsets=[toolset]) as agent:
        await agent.run("go")
    return offered, read


async def langchain(target: Any, calls: Calls) -> Told:
    from langchain_mcp_adapters.client import MultiServerMCPClient
    from langchain_mcp_adapters.tools import load_mcp_tools

    way = {"url": target, "transport": "http"} if isinstance(target, str) else {**stdio(target), "transport": "stdio"}
    read = []
    async with MultiServerMCPClient({"ringfence": way}).session("ringfence") as session:
        tools = {tool.name: tool for tool in await load_mcp_tools(session)}
        for number, (tool, arguments) in enumerate(calls):
            call = {"type": "tool_call", "name": tool, "args": arguments, "id": str(number)}
            read.append(str((await tools[tool].ainvoke(call)).text))
    return list(tools), read


async def fastmcp(target: Any, calls: Calls) -> Told:
    from fastmcp import Client

    where = target if isinstance(target, str) else {"mcpServers": {"ringfence": stdio(target)}}
    read = []
    async with Client(where, timeout=PATIENCE, init_timeout=PATIENCE) as client:
        names = [tool.name for tool in await client.list_tools()]
        for tool, arguments in calls:
            result = await client.call_tool(tool, arguments, raise_on_error=False)
            read.append("".join(getattr(block, "text", "") for block in result.content))
    return names, read


CLIENTS = {
    "openai-agents": openai_agents,
    "pydantic-ai-slim": pydantic_ai,
    "langchain-mcp-adapters": langchain,
    "fastmcp": fastmcp,
}


def main(framework: str, target: str, calls: str) -> None:
    where = target if target.startswith("http") else json.loads(target)
    names, read = asyncio.run(CLIENTS[framework](where, [tuple(call) for call in json.loads(calls)]))
    print(json.dumps({"version": metadata.version(framework), "tools": names, "read": read}))


main(*sys.argv[1:])
