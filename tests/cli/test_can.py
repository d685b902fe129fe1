"""`ringfence can`: what would happen to a call, told without making it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core import canonical
from ringfence.core.model import Definition
from ringfence.store import Store
from tests import gateways
from tests.gateways import run

CONFIG = """version: 1
gateway: {state: ./state}
servers:
  desk: {url: "http://127.0.0.1:9/mcp"}
  files: {command: [python3, files.py], pins: first_use, mounts: [{host: ./shared, at: /workspace/shared, mode: rw}]}
capabilities:
  create_ticket: {server: desk, mode: write, approval: boss, rate: {per_minute: 60, per_day: 500}, timeout_seconds: 15}
  delete_ticket: {server: desk, mode: write}
  search: {server: desk, mode: read, environments: [production]}
  risky: {server: desk, mode: write}
  write_file: {server: files, mode: write}
approvals: {boss: {when: 'has(args.priority) && args.priority == "high"', roles: [manager], people: 2}}
people: {ann: {roles: [manager], os_user: root}, bob: {roles: [clerk]}, cem: {roles: [manager]}}
policy:
  rules:
    - {id: no-deletes, action: deny, tool_patterns: ["delete_.*"]}
    - {id: no-secrets, action: deny, tool_patterns: [create_ticket], argument_patterns: {"*": "hunter[0-9]"}}
    - {id: boxed, action: sandbox, tool_patterns: [risky, write_file]}
    - {id: later, action: ask, mode: shadow, tool_patterns: [write_file]}
"""
SCHEMA = {"type": "object", "properties": {"priority": {"type": "string"}}, "additionalProperties": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("can")
    gateways.write(path, CONFIG)
    body = {"name": "create_ticket", "inputSchema": SCHEMA}
    pinned = [Definition("desk", "create_ticket", canonical.definition_digest(body), body)]
    pinned += [
        Definition("desk", n, canonical.definition_digest({"name": n}), {"name": n}) for n in ("risky", "search")
    ]
    store = Store.open(path / "state", load_or_create(path / "keys"))
    for each in pinned:
        store.write_sync(lambda tx, each=each: tx.put_pin(each, "ann", 1.0), durable=True)  # type: ignore[misc]
    store.close()
    return path


def can(folder: Path, *words: str) -> Any:
    return run("can", *words, cwd=folder)


def told(folder: Path, *words: str) -> Any:
    return json.loads(can(folder, *words, "--json").stdout)


def test_a_call_that_would_wait_for_a_person(folder: Path) -> None:
    before = (folder / "state/ringfence.db").read_bytes()
    shown = can(folder, "local", "create_ticket", "--args", '{"priority": "high"}')
    assert shown.returncode == 126, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == "create_ticket by local would wait for a person"
    assert lines[2].startswith("  arguments  fit the tool's accepted definition (sha256:")
    assert "  policy     marked by std-write (audit write capabilities)" in lines
    approval = "  approval   boss: 2 people, ann, cem with manager, within 3600 s; not the agent's own person"
    assert approval in lines
    assert "  budget     60 a minute, 500 a day, as configured; what is left of it is not looked at" in lines
    assert "  runs       on server desk, elsewhere: http://127.0.0.1:9/mcp; at most 15 s" in lines
    assert (folder / "state/ringfence.db").read_bytes() == before, "nothing is touched"


def test_a_call_that_would_run(folder: Path) -> None:
    shown = told(folder, "local", "create_ticket", "--args", "{}")
    assert (shown["status"], shown["verdict"], shown["effect_possible"]) == ("success", "allow", True)
    assert can(folder, "local", "create_ticket", "--args", "{}").returncode == 0


def test_without_arguments_it_says_what_depends_on_them(folder: Path) -> None:
    shown = can(folder, "local", "create_ticket")
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[0] == "create_ticket by local depends on its arguments: allow or ask or deny"
    assert told(folder, "local", "create_ticket")["depends_on"] == ["no-secrets", "approval boss"]
    certain = can(folder, "local", "delete_ticket")
    assert (certain.returncode, "would be denied, whatever its arguments are" in certain.stdout) == (126, True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("create_tickt",), 2, "(unknown_tool): There is no tool 'create_tickt'. Did you mean 'create_ticket'"),
        (("search",), 2, "(wrong_environment)"),
        (("create_ticket", "--args", '{"priorty": "x"}'), 2, "Did you mean 'priority'?"),
        (("delete_ticket", "--args", "{}"), 126, "would be denied"),
        (("risky", "--args", "{}"), 126, "(sandbox_impossible)"),
        (("run_shell", "--args", '{"command": "ls"}'), 0, "in a box (process); without network"),
    ],
)
def test_how_other_calls_would_end(folder: Path, words: tuple[str, ...], code: int, said: str) -> None:
    shown = can(folder, "analyst", *words)
    assert (shown.returncode, said in shown.stdout) == (code, True), shown.stdout


def test_a_tool_that_is_not_accepted_is_told_apart(tmp_path: Path) -> None:
    gateways.write(tmp_path, CONFIG)
    shown = can(tmp_path, "local", "create_ticket", "--args", "{}")
    assert (shown.returncode, "(not_pinned)" in shown.stdout) == (125, True)
    assert not (tmp_path / "state").exists()


def test_a_server_that_is_boxed_for_one_call_and_a_rule_in_shadow_mode(folder: Path) -> None:
    shown = can(folder, "local", "write_file", "--args", "{}")
    assert shown.returncode == 0
    assert "on server files in a fresh box for this call alone (process); without network" in shown.stdout
    assert "effect     whatever its server does" in shown.stdout
    assert "shadow     with later in force: ask+sandbox" in shown.stdout


def test_arguments_that_are_no_object_are_wrong_usage(folder: Path) -> None:
    assert can(folder, "local", "create_ticket", "--args", "[1]").returncode == 2
    assert can(folder, "local", "create_ticket", "--args", "{").returncode == 2


def test_a_declared_agent_is_held_to_what_it_may_call(tmp_path: Path) -> None:
    agents = "agents: {reader: {roles: [auditor], capabilities: [search_*]}, writer: {capabilities: [create_*]}}\n"
    deny = """{id: auditors, action: deny, tool_patterns: [search_x], when: '"auditor" in agent.roles'}"""
    rule = f"policy: {{preset: permissive, rules: [{deny}]}}"
    servers = 'servers: {desk: {url: "http://127.0.0.1:9/mcp", pins: first_use}}\n'
    tools = "capabilities: {create_x: {server: desk, mode: read}, search_x: {server: desk, mode: read}}\n"
    gateways.write(tmp_path, f"version: 1\ngateway: {{state: ./state}}\n{servers}{tools}{agents}{rule}\n")
    refused = run("can", "reader", "create_x", "--args", "{}", cwd=tmp_path)
    assert refused.returncode == 126 and "not_for_agent" in refused.stdout
    by_role = run("can", "reader", "search_x", "--args", "{}", cwd=tmp_path)
    assert by_role.returncode == 126 and "auditors" in by_role.stdout, "a rule on its role"
    assert run("can", "writer", "create_x", "--args", "{}", cwd=tmp_path).returncode == 0
    assert "unknown_agent" in run("can", "nobody", "create_x", cwd=tmp_path).stdout
