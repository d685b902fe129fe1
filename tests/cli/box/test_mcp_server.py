"""`ringfence box mcp`: one box as a server of its own, to a client that we did not write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from ringfence.cli.box.mcp_server import TOOLS
from tests.gateways import finished, ringfence, run

pytestmark = pytest.mark.anyio


def client(box: str) -> Any:
    command = ringfence("box", "mcp", box)
    return Client(stdio_client(StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))))


async def test_its_tools_are_for_this_box_alone(box: str, own_home: Path) -> None:
    other = run("box", "create").stdout.strip()
    run("box", "exec", other, "--shell", "echo other > secret")
    run("box", "exec", other, "--shell", "mkdir output; echo other > output/secret")
    async with client(box) as connected:
        tools = {tool.name: tool.input_schema for tool in (await connected.list_tools()).tools}
        assert set(tools) == set(TOOLS)
        assert not [name for name, schema in tools.items() if {"session", "to_session"} & set(schema["properties"])]
        assert not [name for name, schema in tools.items() if "session" in schema.get("required", ())]
        await connected.call_tool("execute_python", {"code": "x = 6"})
        result = await connected.call_tool("execute_python", {"code": "x * 7"})
        assert "42" in json.dumps(result.structured_content)
        await connected.call_tool("write_file", {"path": "a.txt", "text": "written"})
        read = await connected.call_tool("read_file", {"path": "a.txt"})
        assert read.structured_content["text"] == "written"
        shell = await connected.call_tool("run_shell", {"command": "cat a.txt; ls"})
        assert shell.structured_content["stdout"].startswith("written")
        for name, given in (
            ("read_file", {"path": "secret", "session": other}),
            ("copy_file", {"path": "a.txt", "to_path": "b", "to_session": other}),
            ("execute_python", {"code": "1", "session": other}),
        ):
            refused = await connected.call_tool(name, given)
            assert refused.is_error and "cannot be given" in refused.content[0].text
        await connected.call_tool("run_shell", {"command": "mkdir output; echo mine > output/result.txt"})
        listed = [str(each.uri) for each in (await connected.list_resources()).resources]
        assert listed == [f"ringfence://session/{box}/output/result.txt"]
        assert (await connected.read_resource(listed[0])).contents[0].text == "mine\n"
        with pytest.raises(MCPError, match="has no resource"):
            await connected.read_resource(listed[0].replace(box, other).replace("result.txt", "secret"))
        for name in ("close_session", "list_sessions", "open_session"):
            refused = await connected.call_tool(name, {"session": other})
            assert refused.is_error and "has no tool" in refused.content[0].text
    assert run("box", "files", "get", box, "a.txt", "-").stdout == "written", "the box stays"
    records = finished(own_home / ".local/state/ringfence")
    assert {record["call"]["origin"] for record in records} >= {"mcp-stdio", "cli"}


def test_a_box_that_is_not_there_is_told_at_once(box: str) -> None:
    ended = run("box", "mcp", "box_nowhere")
    assert ended.returncode == 2 and "box_nowhere" in ended.stderr and ended.stdout == ""
