"""The fixture servers and the helpers that start them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx2
import pytest
from ruamel.yaml import YAML

from tests import tooling


def test_missing_tool_skips_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is missing: run scripts/setup --tests"):
        tooling.need("no-such-tool")


def test_missing_tool_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no-such-tool is missing"):
        tooling.need("no-such-tool")


def test_process_is_gone_after_the_block_with_its_children() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print('child', p.pid, flush=True); p.wait()"
    with tooling.start_process([sys.executable, "-c", code]) as started:
        child = int(started.wait_for("\n").split()[1])
    assert started.process.returncode is not None
    tooling.wait_until_gone(child)


def test_process_that_ends_early_is_reported_with_its_output() -> None:
    with (
        tooling.start_process([sys.executable, "-c", "print('could not start')"]) as started,
        pytest.raises(AssertionError, match="could not start"),
    ):
        started.wait_for_port(tooling.free_port())


def test_everything_config_has_a_capability_for_every_tool(everything_url: str) -> None:
    config = YAML(typ="safe").load((tooling.FIXTURES / "everything.yaml").read_text())
    versions = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": versions}}
    headers = {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/list",
    }
    answer = httpx2.post(everything_url, json=request, headers=headers)
    tools = {tool["name"] for tool in answer.json()["result"]["tools"]}
    assert tools == set(config["capabilities"])
    assert {contract["server"] for contract in config["capabilities"].values()} == set(config["servers"])


def test_hostile_server_has_a_real_effect(hostile_command: list[str], tmp_path: Path) -> None:
    effect = tmp_path / "effect"
    call = {"name": "append", "arguments": {"path": str(effect), "text": "once"}}
    with subprocess.Popen(hostile_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        server.stdin.close()
    assert answer == {"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "appended"}]}}
    assert effect.read_text() == "once\n"


def test_set_up_classifiers_and_docs_name_the_same_pythons() -> None:
    project = tomllib.loads((tooling.ROOT / "pyproject.toml").read_text())["project"]
    classified = {text.rpartition(" ")[2] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)}
    (tried,) = re.findall(r"for version in ([\d. ]+); do", (tooling.ROOT / "scripts/setup").read_text())
    (told,) = re.findall(r"^Python (3[^:]*):$", (tooling.ROOT / "docs/other-systems.md").read_text(), re.MULTILINE)
    assert {"3.11", "3.14"} < classified == set(tried.split()) == set(re.findall(r"3\.\d+", told))
    assert project["requires-python"] == f">={min(classified)}"
