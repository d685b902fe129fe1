"""Defects that were proven in another gateway, and that this one must not have: starting, refusing, answering.

The number in a test's name is the number of the defect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client

from tests import gateways, tooling

pytestmark = pytest.mark.anyio

# The two examples of the design, as users write them.
CAPABILITIES = """
capabilities:
  search_docs:   {transport: mcp, mode: read,  network: internal_only, secrets: none, timeout_seconds: 8,  approval: none}
  create_ticket: {transport: mcp, mode: write, network: internal_only, secrets: service_account_helpdesk, timeout_seconds: 15,
                  approval: manager_for_high_priority}
  run_shell:     {transport: sandboxed_exec, mode: high_risk, network: denied, filesystem: workspace_only, secrets: none,
                  timeout_seconds: 10, approval: always}
"""  # noqa: E501
RULES = """
rules:
  - {id: sandbox-exec, name: Sandbox all code execution, action: sandbox, priority: 20,
     tool_patterns: ["execute_.*", "run_.*", "code_.*"], owasp_asi_id: ASI-02}
"""
NAMES = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
servers: {helpdesk: {url: "@URL@", pins: first_use}}
networks: {internal_only: {allow: ["127.0.0.1"]}}
secrets: {service_account_helpdesk: {from: env, name: HELPDESK_TOKEN}}
approvals: {manager_for_high_priority: {when: 'has(args.priority) && args.priority == "high"'}}
policy: {preset: standard, files: [policies/sandbox_code.yaml]}
"""
OUTCOMES = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
servers: {helpdesk: {url: "@URL@", pins: first_use}}
capabilities:
  search_docs:   {mode: read, rate: {per_minute: 1, burst: 1}}
  create_ticket: {mode: write}
  reject_ticket: {mode: write}
  crash_ticket:  {mode: write}
  ask_ticket:    {mode: write, tool: create_ticket, approval: always}
  production:    {mode: read, tool: search_docs, environments: [production]}
  absent:        {mode: read}
  nap:           {mode: read}
  short_nap:     {mode: read, tool: nap, timeout_seconds: 0.2}
policy:
  preset: permissive
  rules: [{id: no-secrets, action: deny, argument_patterns: {title: "^secret"}}]
"""


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("helpdesk") / "effects"


@pytest.fixture(scope="module")
def helpdesk(effects: Path) -> Iterator[str]:
    with tooling.serve_fixture("helpdesk_server.py", "--effects", str(effects)) as url:
        yield url


@pytest.fixture(scope="module")
def outcomes(helpdesk: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateways.Served]:
    folder = tmp_path_factory.mktemp("outcomes")
    with gateways.serve(gateways.write(folder, OUTCOMES.replace("@URL@", helpdesk))) as served:
        yield served


def about(result: types.CallToolResult) -> dict[str, Any]:
    return (result.meta or {})["ringfence/outcome"]


async def test_defect_01_documented_configuration_with_policy_files_starts_and_serves(
    helpdesk: str, tmp_path: Path
) -> None:
    (tmp_path / "policies").mkdir()
    gateways.write(tmp_path, RULES, "policies/sandbox_code.yaml")
    path = gateways.write(tmp_path, NAMES.replace("@URL@", helpdesk) + CAPABILITIES)
    with gateways.serve(path) as served:
        async with Client(served.url) as client:
            listed = [tool.name for tool in (await client.list_tools()).tools]
            found = await client.call_tool("search_docs", {"query": "refunds"})
            filed = await client.call_tool("create_ticket", {"title": "x"})
            shell = await client.call_tool("run_shell", {"command": "id"})
        assert {"search_docs", "create_ticket"} <= set(listed)
        assert not found.is_error
        assert found.content == [types.TextContent(type="text", text="Found: refunds")]
        # What cannot be given yet is refused by name, never done with less.
        assert (about(filed)["status"], about(filed)["reason_code"]) == ("unavailable", "no_secret")
        # It runs in a box, which is what the rule wants; and its contract asks a person.
        status = "approval_required" if "run_shell" in listed else "unavailable"
        assert about(shell)["status"] == status
        rules = {body["call"]["tool"]: body["decision"]["rules"] for body in gateways.finished(served.state)}
        assert rules["run_shell"][0] == "sandbox-exec"
        assert "sandbox-exec" not in rules["search_docs"]


REFUSALS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "unknown tool": ("serch_docs", {}, "validation_failure", "unknown_tool"),
    "bad arguments": ("create_ticket", {"title": 5}, "validation_failure", "bad_arguments"),
    "environment": ("production", {}, "validation_failure", "wrong_environment"),
    "policy": ("create_ticket", {"title": "secret plan"}, "denied", "policy"),
    "approval": ("ask_ticket", {"title": "x"}, "approval_required", "approval_required"),
    "not offered by its server": ("absent", {}, "unavailable", "not_pinned"),
    "timeout": ("short_nap", {"seconds": 5}, "timeout", "timeout"),
    "protocol error": ("crash_ticket", {"title": "x"}, "failed", "upstream_error"),
    "failure of the tool": ("reject_ticket", {"title": "x"}, "failed", "tool_error"),
}


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
@pytest.mark.parametrize("case", REFUSALS)
async def test_defect_05_refusals_are_audited_and_are_errors(outcomes: gateways.Served, case: str, mode: Any) -> None:
    tool, arguments, status, reason = REFUSALS[case]
    async with Client(outcomes.url, mode=mode) as client:
        result = await client.call_tool(tool, arguments)
    said = about(result)
    assert result.is_error
    assert (said["status"], said["reason_code"]) == (status, reason)
    assert result.content, "a refusal is readable"
    on_record = gateways.records(outcomes.state, call_id=said["call_id"], kind="finished")
    assert [(body["status"], body["reason_code"], body["call"]["tool"]) for body in on_record] == [
        (status, reason, tool)
    ]


async def test_defect_05_as_many_calls_as_records(outcomes: gateways.Served, effects: Path) -> None:
    before = len(gateways.finished(outcomes.state))
    filed = effects.read_text().count("secret") if effects.exists() else 0
    async with Client(outcomes.url) as client:
        ended = [await client.call_tool("create_ticket", {"title": f"{word} {n}"}) for n, word in enumerate(
            ["plain", "secret", "secret", "plain", "secret"]
        )]  # fmt: skip
        throttled = [about(await client.call_tool("search_docs", {}))["reason_code"] for _ in range(3)]
    assert [result.is_error for result in ended] == [False, True, True, False, True]
    assert throttled[1:] == ["throttled", "throttled"]
    assert len(gateways.finished(outcomes.state)) == before + 8
    assert effects.read_text().count("secret") == filed == 0
    assert gateways.verified(outcomes.state).ok


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_defect_06_typed_results_stay_whole(outcomes: gateways.Served, helpdesk: str, mode: Any) -> None:
    async with Client(helpdesk, mode=mode) as direct, Client(outcomes.url, mode=mode) as through:
        tools = {tool.name: tool for tool in (await through.list_tools()).tools}
        assert tools["create_ticket"].output_schema is not None
        for tool in ("create_ticket", "reject_ticket"):
            own = await direct.call_tool(tool, {"title": "typed"})
            ours = await through.call_tool(tool, {"title": "typed"})  # the SDK validates it against the schema
            assert ours.content == own.content
            assert ours.structured_content == own.structured_content != None  # noqa: E711
            assert ours.is_error == own.is_error
    assert [block.type for block in own.content] == ["text", "image"]
    assert own.is_error


async def test_defect_06_an_effect_is_not_repeated_or_hidden(outcomes: gateways.Served, effects: Path) -> None:
    async with Client(outcomes.url) as client:
        result = await client.call_tool("create_ticket", {"title": "one effect"})
    assert not result.is_error
    assert [block.type for block in result.content] == ["text", "image", "audio"]
    assert result.structured_content == {"number": 7} == json.loads(result.content[0].text)  # type: ignore[union-attr]
    assert effects.read_text().splitlines().count("one effect") == 1
    assert (result.meta or {})["ringfence/facts"]["effect"] == "confirmed"


async def test_defect_12_wall_time_is_the_real_duration(outcomes: gateways.Served) -> None:
    async with Client(outcomes.url) as client:
        began = time.monotonic()
        slow = await client.call_tool("nap", {"seconds": 0.3})
        stopped = await client.call_tool("short_nap", {"seconds": 5})
        most = (time.monotonic() - began) * 1000
    # A timer may go off as much too early as the clock is coarse.
    for result, least in ((slow, 299), (stopped, 199)):
        facts = (result.meta or {})["ringfence/facts"]
        assert least <= facts["wall_ms"] <= most
        on_record = gateways.records(outcomes.state, call_id=facts["call_id"], kind="finished")
        assert on_record[0]["facts"]["wall_ms"] == facts["wall_ms"]
        assert facts["isolation"] == {"backend": "remote", "level": "none", "protections": {}}
    assert (stopped.meta or {})["ringfence/facts"]["ended"] == "timeout"


async def test_defect_12_failures_have_facts_too(outcomes: gateways.Served) -> None:
    async with Client(outcomes.url) as client:
        for tool, arguments, _, _ in REFUSALS.values():
            result = await client.call_tool(tool, arguments)
            facts = (result.meta or {})["ringfence/facts"]
            assert facts["call_id"] == about(result)["call_id"]
            assert facts["wall_ms"] > 0
            assert facts["started_at"].endswith("Z")
            assert facts["explanation"]
