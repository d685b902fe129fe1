"""Agent frameworks work with the gateway: what their models get to read of calls, refusals, approvals and long results.

The MCP Inspector, the fifth client, is in `test_inspector.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import boxing, tooling
from tests.gateways import own_tools
from tests.mcp import gateway
from tests.mcp.gateway import JSON, Gateway

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("agent_clients.py")
PYTHONS = {
    "openai-agents": tooling.agents,
    "pydantic-ai-slim": tooling.agents,
    "langchain-mcp-adapters": tooling.client1x,
    "fastmcp": tooling.agents,
}
# Over HTTP what two of them have, the clients of both lines of the SDK: more would repeat it.
WAYS = [(name, "stdio") for name in PYTHONS] + [("langchain-mcp-adapters", "http"), ("fastmcp", "http")]
LINES = "for n in range(100_000): print('line', n)"
CALLS: tuple[tuple[str, JSON], ...] = (
    ("echo", {"text": "through the fence"}),
    ("append", {"path": "/nowhere", "text": "never"}),
    ("counter", {}),
    ("execute_python", {"code": LINES}),
)


def configuration(hostile_command: list[str]) -> JSON:
    return gateway.configuration(
        {"hostile": {"command": hostile_command, "pins": "first_use"}},
        {**gateway.tools("hostile", "echo", "append"), **gateway.tools("hostile", "counter", approval="always")},
        # No client has so much patience: a call that waited for a person would end in an error of the client's own.
        gateway={"approval_wait_seconds": 3600},
        policy={
            "preset": "permissive",
            "rules": [{"id": "no-append", "action": "deny", "tool_patterns": ["append"], "name": "Files are not ours"}],
        },
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    with gateway.serve(tmp_path_factory.mktemp("served"), configuration(hostile_command)) as running:
        yield running


@pytest.fixture(scope="module", params=WAYS, ids=" over ".join)
def seen(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    hostile_command: list[str],
    served: Gateway,
) -> JSON:
    """What a framework's model saw, and the gateway that it used."""
    boxing.need_boxes()
    framework, way = request.param
    used = served
    if way == "stdio":
        used = gateway.write(tmp_path_factory.mktemp("stdio"), configuration(hostile_command))
    target = used.url if way == "http" else json.dumps(gateway.command("serve", "--stdio", "--config", used.config))
    words = [str(PYTHONS[framework]()), str(SCRIPT), framework, target, json.dumps(CALLS)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return {**json.loads(ended.stdout.splitlines()[-1]), "gateway": used}


def test_the_tools_are_listed(seen: JSON) -> None:
    assert set(seen["tools"]) == {"echo", "append", "counter", *own_tools()}


def test_the_text_of_a_result_arrives(seen: JSON) -> None:
    assert "through the fence" in seen["read"][0]


def test_a_refusal_says_which_rule(seen: JSON) -> None:
    assert "no-append" in seen["read"][1] and "Files are not ours" in seen["read"][1]


def test_that_a_person_must_answer_is_learned_at_once(seen: JSON) -> None:
    asked = [record.body["approval"] for record in seen["gateway"].records(kind="approval_asked")]
    assert any(approval in seen["read"][2] for approval in asked)
    assert "approval_required" in seen["read"][2]


def test_of_a_long_result_head_and_tail_arrive_and_that_it_was_cut(seen: JSON) -> None:
    read = seen["read"][3]
    assert len(read) < 12_000
    assert all(line in read for line in ("line 0", "line 1", "line 99999"))
    assert "line 50000" not in read
    assert "stdout had 1088890 bytes" in read or '"truncated":true' in read, "in text, or in structure"
