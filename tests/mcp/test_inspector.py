"""The MCP Inspector's command line lists and calls through the gateway, over HTTP and over stdio."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import boxing, tooling
from tests.gateways import own_tools
from tests.mcp import gateway
from tests.mcp.gateway import JSON, Gateway


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    config = gateway.configuration(
        {"hostile": {"command": hostile_command, "pins": "first_use"}},
        {
            **gateway.tools("hostile", "echo", "error"),
            **gateway.tools("hostile", "counter", approval="always"),
            **gateway.tools("hostile", "append"),
        },
        gateway={"approval_wait_seconds": 3600},
        policy={
            "preset": "permissive",
            "rules": [{"id": "no-append", "action": "deny", "tool_patterns": ["append"]}],
        },
    )
    with gateway.serve(tmp_path_factory.mktemp("inspector"), config) as running:
        yield running


def inspect(target: list[str], *arguments: str) -> JSON:
    """What `mcp-inspector --cli` prints."""
    command = tooling.npm_command("mcp-inspector", "--cli", *target, *arguments)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.stdout.strip(), ended.stderr
    return json.loads(ended.stdout[ended.stdout.index("{") :])


def targets(served: Gateway, way: str) -> list[str]:
    if way == "http":
        return [served.url, "--transport", "http"]
    # A `--config` on its own command line the Inspector takes for itself, so the gateway's stands in a file.
    copy = own_copy(served)
    first, *rest = gateway.command("serve", "--stdio", "--config", copy)
    servers = {"ringfence": {"type": "stdio", "command": first, "args": rest, "env": {"HOME": os.environ["HOME"]}}}
    file = copy.parent / "mcp.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return ["--config", str(file), "--server", "ringfence"]


def own_copy(served: Gateway) -> Path:
    """The same configuration with a state of its own."""
    return gateway.write(served.config.parent / "stdio", served.config.read_text()).config


@pytest.mark.parametrize("way", ["http", "stdio"])
def test_inspector_lists_the_tools(served: Gateway, way: str) -> None:
    listed = inspect(targets(served, way), "--method", "tools/list")
    assert [tool["name"] for tool in listed["tools"]] == ["echo", "error", "counter", "append", *own_tools()]


@pytest.mark.parametrize("way", ["http", "stdio"])
def test_inspector_calls_a_tool(served: Gateway, way: str) -> None:
    arguments = ("--method", "tools/call", "--tool-name", "echo", "--tool-arg", "text=through the fence")
    result = inspect(targets(served, way), *arguments)
    assert gateway.text_of(result) == "through the fence"
    told = gateway.about(result)
    assert told["status"] == "success"
    where = served if way == "http" else Gateway(own_copy(served))
    assert where.finished(told["call_id"])["call"]["origin"] == f"mcp-{way}"


def test_inspector_shows_an_error_of_the_tool(served: Gateway) -> None:
    result = inspect(targets(served, "http"), "--method", "tools/call", "--tool-name", "error")
    assert result["isError"] is True
    assert gateway.about(result)["status"] == "failed"


def test_inspector_shows_a_refusal(served: Gateway) -> None:
    given = ("--tool-arg", "path=/nowhere", "--tool-arg", "text=never")
    result = inspect(targets(served, "http"), "--method", "tools/call", "--tool-name", "append", *given)
    assert result["isError"] is True
    assert gateway.about(result)["status"] == "denied"
    assert "no-append" in gateway.text_of(result)


def test_inspector_learns_at_once_that_a_person_must_answer(served: Gateway) -> None:
    result = inspect(targets(served, "http"), "--method", "tools/call", "--tool-name", "counter")
    assert gateway.about(result)["status"] == "approval_required"
    (asked,) = served.records(kind="approval_asked")
    assert asked.body["approval"] in gateway.text_of(result)


def test_inspector_gets_head_and_tail_of_a_long_result(served: Gateway) -> None:
    boxing.need_boxes()
    code = "code=for n in range(100_000): print('line', n)"
    arguments = ("--method", "tools/call", "--tool-name", "execute_python", "--tool-arg", code)
    result = inspect(targets(served, "http"), *arguments)
    told = gateway.text_of(result)
    assert len(told) < 12_000
    assert told.startswith("line 0\n") and "line 99999\n" in told and "line 50000\n" not in told
    assert "stdout had 1088890 bytes" in told and result["structuredContent"]["truncated"] is True
