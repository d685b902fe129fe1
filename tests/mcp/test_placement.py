"""Where a server runs: in a box of its own, in a fresh one for a single call, or in the agent's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from tests.cli.terminals import at_terminal
from tests.mcp import gateway
from tests.mcp.gateway import JSON, Gateway, about, facts, text_of

pytestmark = pytest.mark.anyio

SERVER = """
import json, os, sys
TOOL = {"name": "NAME", "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}}}
calls = 0
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "x", "version": "1"}
    elif method == "tools/list":
        result = {"tools": [TOOL]}
    elif method == "tools/call":
        calls += 1
        path = params["arguments"].get("path", "/workspace/mark")
        try:
            text = open(path).read()
            if "write" in params["arguments"]:
                open(params["arguments"]["write"], "w").write("here")
        except OSError as exc:
            text = exc.strerror
        open("/workspace/mark", "w").write("left behind")
        result = {"content": [{"type": "text", "text": f"{calls} {text}"}]}
    else:
        error = {"code": -32601, "message": "no"}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def server(folder: Path, name: str, **more: object) -> JSON:
    (folder / name).mkdir()
    script = folder / name / "server.py"
    script.write_text(SERVER.replace("NAME", name))
    return {"command": [sys.executable, str(script)], "pins": "first_use", **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    base = tmp_path_factory.mktemp("placement")
    servers = {
        "look": server(base, "look"),
        "once": server(base, "once"),
        "bare": server(base, "bare", placement="unsafe_host"),
        "lodger": server(base, "lodger", placement="session"),
    }
    folders = [base / each for each in ("kept", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "a.txt").write_text(folder.name)
    mounts = [{"host": str(each), "at": f"/{each.name}", "mode": "rw"} for each in folders]
    servers["narrow"] = server(base, "narrow", mounts=mounts)
    contracts: dict[str, JSON] = {}
    for name in servers:
        contracts |= gateway.tools(name, name, timeout_seconds=30)
    contracts["narrow"]["filesystem"] = {"mounts": [{**mounts[0], "mode": "ro"}]}
    contracts["wide"] = {**gateway.tools("narrow", "narrow")["narrow"], "tool": "narrow"}
    contracts["asked"] = {**contracts["lodger"], "tool": "lodger", "approval": "always"}
    rule = {"id": "apart", "action": "sandbox", "tool_patterns": ["once", "bare"]}
    settings = gateway.configuration(servers, contracts, policy={"preset": "permissive", "rules": [rule]})
    with gateway.serve(base / "gateway", settings) as running:
        yield running


async def said(client: Client, tool: str, arguments: JSON | None = None, **more: JSON) -> str:
    result = await client.call_tool(tool, arguments or {}, **more)  # type: ignore[arg-type]
    assert not result.is_error, text_of(result)
    return text_of(result)


async def test_one_of_its_own_stays(served: Gateway) -> None:
    async with served.client("legacy") as client:
        assert await said(client, "look") == "1 No such file or directory"
        assert await said(client, "look") == "2 left behind"


@pytest.mark.parametrize("tool", ["once", "bare"])
async def test_where_policy_wants_a_sandbox_each_call_has_a_fresh_one(served: Gateway, tool: str) -> None:
    async with served.client("legacy") as client:
        for _ in range(2):
            result = await client.call_tool(tool, {})
            assert text_of(result) == "1 No such file or directory"
            assert facts(result)["isolation"]["level"] == "process"
    assert not Path("/workspace/mark").exists()


async def test_in_the_agents_own_box_it_sees_what_the_agent_left_and_is_not_trusted(served: Gateway) -> None:
    async with served.client("legacy") as client:
        opened = await client.call_tool("open_session", {})
        session = str((opened.structured_content or {})["session"])
        await said(
            client, "execute_python", {"code": "open('/workspace/mine', 'w').write('by the agent')", "session": session}
        )
        meta = {"ringfence/session": session}
        result = await client.call_tool("lodger", {"path": "/workspace/mine"}, meta=meta)  # type: ignore[arg-type]
        assert text_of(result) == "1 by the agent"
        assert about(result)["trust"] == "untrusted"
        assert facts(result)["isolation"]["session"] == session
        again = await client.call_tool("lodger", {"path": "/workspace/mine"}, meta=meta)  # type: ignore[arg-type]
        assert text_of(again) == "2 by the agent"
        assert await said(client, "read_file", {"path": "/workspace/mark", "session": session}) == "left behind"

        without = await client.call_tool("lodger", {})
        assert (about(without)["status"], about(without)["reason_code"]) == ("validation_failure", "no_session")
        strange = await client.call_tool("lodger", {}, meta={"ringfence/session": "ses_none"})  # type: ignore[arg-type]
        assert about(strange)["status"] == "unavailable"
        await said(client, "close_session", {"session": session})
        gone = await client.call_tool("lodger", {}, meta=meta)  # type: ignore[arg-type]
        assert about(gone)["status"] in ("unavailable", "unknown")


async def test_an_approval_is_for_one_session_as_it_was_and_names_it(served: Gateway) -> None:
    async with served.client("legacy") as client:
        opened = [await client.call_tool("open_session", {}) for _ in range(2)]
        one, other = (str((each.structured_content or {})["session"]) for each in opened)

        async def ask(session: str) -> Any:
            return await client.call_tool("asked", {}, meta={"ringfence/session": session})  # type: ignore[arg-type]

        first = about(await ask(one))["approval_id"]
        with at_terminal("approvals", "approve", first, "--config", served.config) as terminal:
            terminal.expect("[y/N]")
            terminal.type("y\n")
            assert terminal.end() == 0
            assert f"{one}, after its step 0" in terminal.shown
        assert about(await ask(other))["status"] == "approval_required"
        await said(client, "write_file", {"path": "late", "text": "x", "session": one})
        assert about(await ask(one))["approval_id"] not in (None, first), "its files are others by now"
        await said(client, "remove_file", {"path": "late", "session": one})
        assert text_of(await ask(one)) == "1 No such file or directory"
        strange = await ask("ses_none")
        assert about(strange)["reason_code"] == "unknown_session"


async def test_one_in_no_box_is_warned_of(served: Gateway) -> None:
    assert "server bare runs on this host without a box" in served.log()


async def test_a_contract_that_has_less_than_its_server_is_served_by_an_instance_that_sees_no_more(
    served: Gateway,
) -> None:
    async with served.client("legacy") as client:
        for path in ("/kept/a.txt", "/other/a.txt"):
            assert (await said(client, "wide", {"path": path})).endswith(path.split("/")[1])
        assert await said(client, "narrow", {"path": "/kept/a.txt"}) == "1 kept"
        # Neither what other calls left, nor what its server sees for them, nor leave to write.
        assert await said(client, "narrow", {"path": "/other/a.txt"}) == "1 No such file or directory"
        planted = served.config.parent.parent / "kept" / "planted"
        result = await client.call_tool("narrow", {"path": "/kept/a.txt", "write": "/kept/planted"})
        assert text_of(result) == "1 Read-only file system" and facts(result)["isolation"]["level"] == "process"
        assert not planted.exists()
        assert (await said(client, "wide", {"path": "/kept/a.txt", "write": "/kept/planted"})).endswith("kept")
        assert planted.read_text() == "here"
