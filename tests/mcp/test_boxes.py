"""Our own tools over MCP, in both revisions: code runs in a real box, and what a client is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from ringfence.sandbox.tools.toolkit import offered_tools
from tests import boxing, gateways, tooling
from tests.mcp.gateway import ERAS

pytestmark = pytest.mark.anyio

CONFIG = """
gateway: {state: ./state, approval_wait_seconds: 0}
sandbox: {default_timeout_seconds: 5, max_memory_mb: 64}
capabilities:
  careful: {transport: sandboxed_exec, tool: run_shell, mode: high_risk}
policy: {rules: [{id: sandbox-exec, action: sandbox, tool_patterns: ["execute_.*", "run_.*", "careful"]}]}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateways.Served]:
    boxing.need_boxes()
    with gateways.serve(gateways.write(tmp_path_factory.mktemp("boxes"), CONFIG)) as served:
        yield served


def facts(result: Any) -> dict[str, Any]:
    return dict(result.meta["ringfence/facts"])


def about(result: Any) -> dict[str, Any]:
    return dict(result.meta["ringfence/outcome"])


@pytest.fixture(params=ERAS)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_the_tools_say_what_they_take_and_their_limits(served: gateways.Served, mode: Any) -> None:
    async with Client(served.url, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(tools) == ["careful", "execute_python", *offered_tools()[2:]]
    python = tools["execute_python"]
    assert list(python.input_schema["properties"]) == ["code", "session", "language", "context"]
    assert python.output_schema is not None and "stdout" in python.output_schema["properties"]
    assert "Limits: 5 s, 64 MiB of memory" in (python.description or "")


async def test_output_comes_back_as_text_and_structured(served: gateways.Served, mode: Any) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); open('output/r', 'w').write('x')"
    async with Client(served.url, mode=mode) as client:
        result = await client.call_tool("execute_python", {"code": code})
    assert not result.is_error
    assert [block.text for block in result.content] == ["out\n", "stderr:\nerr\n"]  # type: ignore[union-attr]
    told = result.structured_content
    assert told is not None
    assert (told["stdout"], told["stderr"], told["exit_code"], told["ended"]) == ("out\n", "err\n", 0, "exited")
    assert [file["path"] for file in told["files"]] == ["/workspace/output/r"]
    assert "facts" not in told, "they stand beside it, once"
    assert facts(result)["isolation"]["level"] == "process" and facts(result)["rules"][0] == "sandbox-exec"


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("raise ValueError('x')", "failed", "exit_status"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "signalled"),
        ("while True: pass", "timeout", "timeout"),
        ("x = b'x' * (120 << 20)\nwhile True: pass", "killed", "memory"),
    ],
)
async def test_what_does_not_end_well_is_an_error(served: gateways.Served, code: str, status: str, reason: str) -> None:
    async with Client(served.url) as client:
        result = await client.call_tool("execute_python", {"code": code})
    assert result.is_error
    assert (about(result)["status"], about(result)["reason_code"]) == (status, reason)
    last: Any = result.content[-1]
    assert last.text == f"[{facts(result)['explanation']}]"
    assert facts(result)["effect"] == "none"


async def test_a_declared_contract_asks_and_nothing_else_can_be_sent(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        asked = await client.call_tool("careful", {"command": "ls"})
        with_limits = await client.call_tool("execute_python", {"code": "1", "limits": {"memory_bytes": 2**33}})
        with_session = await client.call_tool("execute_python", {"code": "1", "session": "s"})
        with_nul = await client.call_tool("execute_python", {"code": "a\0b"})
    assert about(asked)["status"] == "approval_required"
    assert (about(with_limits)["status"], about(with_limits)["reason_code"]) == ("validation_failure", "bad_arguments")
    assert about(with_session)["reason_code"] == "unknown_session"
    assert (about(with_nul)["status"], about(with_nul)["reason_code"]) == ("validation_failure", "bad_arguments")


async def test_what_could_steer_a_terminal_is_removed(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        result = await client.call_tool("execute_python", {"code": "print('a\\x1b]0;x\\x07b')"})
    assert result.structured_content is not None and result.structured_content["stdout"] == "ab\n"
    assert facts(result)["redactions"] == {"control_characters": 2}
    assert facts(result)["output"]["stdout_bytes"] == 9, "what was seen is what was written"


async def test_a_cancelled_call_ends_its_box(served: gateways.Served) -> None:
    path = gateways.write(
        served.config.parent, CONFIG.replace("timeout_seconds: 5", "timeout_seconds: 600"), "slow.yaml"
    )
    path.write_text(path.read_text().replace("./state", "./slow"))
    with gateways.serve(path) as slow:
        async with Client(slow.url) as client:
            async with anyio.create_task_group() as group:
                code = {"code": "import time; time.sleep(600)"}
                group.start_soon(lambda: client.call_tool("execute_python", code))
                await tooling.until(lambda: gateways.records(slow.state, kind="started"))
                await anyio.sleep(0.5)
                group.cancel_scope.cancel()
            await tooling.until(lambda: gateways.finished(slow.state))
            ended = gateways.finished(slow.state)
    assert [(body["status"], body["reason_code"], body["facts"]["ended"]) for body in ended] == [
        ("killed", "cancelled", "cancelled")
    ]
    assert Path(slow.state).is_dir()
