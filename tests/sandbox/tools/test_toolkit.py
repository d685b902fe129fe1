"""Our own tools: what they take, in both forms, and that they say what their limits are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringfence.core.box import MIB, TEMPLATES, Limits
from ringfence.core.schema import Schema
from ringfence.governance.contract import build, built_in
from ringfence.sandbox.tools.request import BoxContents, SessionLifetimes
from ringfence.sandbox.tools.results import explain
from ringfence.sandbox.tools.toolkit import PROGRAMS, all_tools, declarable_tools, definition, mode, offered_tools

PYTHON, SHELL = built_in("execute_python", 8), built_in("run_shell", 30)


def fits(contract: Any, arguments: Any, *, wide: bool = False) -> bool:
    body = definition(contract, Limits(), BoxContents(), SessionLifetimes(), wide=wide).body
    return Schema(body["inputSchema"]).problem(arguments, "arguments") is None


@pytest.mark.parametrize(
    ("contract", "arguments", "agent", "local"),
    [
        (PYTHON, {"code": "1"}, True, True),
        (PYTHON, {"code": "1", "session": "s"}, True, True),
        (PYTHON, {}, False, False),
        (PYTHON, {"code": 1}, False, False),
        (PYTHON, {"code": "1", "limits": {"memory_bytes": 2**30}}, False, True),
        (PYTHON, {"code": "1", "output": "/etc"}, False, True),
        (PYTHON, {"code": "1", "trees": ["/home"]}, False, True),
        (PYTHON, {"code": "1", "env": {"A": "b"}}, False, True),
        (PYTHON, {"code": "1", "template": "data"}, False, True),
        (PYTHON, {"code": "1", "listen": "allowed"}, False, True),
        (PYTHON, {"code": "1", "listen": {"web": 8000}}, False, True),
        (PYTHON, {"code": "1", "listen": {"web": 0}}, False, False),
        (PYTHON, {"code": "1", "listen": "yes"}, False, False),
        (PYTHON, {"code": "1", "argv": ["a"], "name": "x.py", "stdin": "stream"}, False, True),
        (PYTHON, {"code": "1", "stdin": {"bytes": 1, "sha256": "0"}}, False, True),
        (PYTHON, {"code": "1", "stdin": "text"}, False, False),
        (PYTHON, {"code": "1", "limits": {"memory_bytes": -1}}, False, False),
        (PYTHON, {"code": "1", "limits": {"memory_bytes": 1.5 * 2**30}}, False, True),
        (PYTHON, {"code": "1", "limits": {"wall_seconds": 1e9}}, False, False),
        (PYTHON, {"code": "1", "limits": {"wall": 1}}, False, False),
        (PYTHON, {"code": "1", "root": True}, False, False),
        (PYTHON, {"code": "1", "session": "s", "context": "c"}, True, True),
        (PYTHON, {"code": "1", "session": None}, False, False),
        (SHELL, {"command": "ls"}, True, True),
        (SHELL, {"command": "ls", "session": "s", "background": True}, True, True),
        (SHELL, {"command": "ls", "session": "s", "cwd": "/workspace/a", "pty": [80, 24]}, False, True),
        (SHELL, {"command": "ls", "session": "s", "pty": [80]}, False, False),
        (SHELL, {"argv": ["ls"]}, False, True),
        (SHELL, {"argv": ["ls"], "command": "ls"}, False, False),
        (SHELL, {}, False, False),
    ],
)
def test_an_agent_sends_a_program_and_nothing_else(contract: Any, arguments: Any, agent: bool, local: bool) -> None:
    assert fits(contract, arguments) is agent
    assert fits(contract, arguments, wide=True) is local


@pytest.mark.parametrize("contract", [PYTHON, SHELL], ids=lambda c: c.tool)
def test_a_description_states_the_effective_limits(contract: Any) -> None:
    limits = Limits(memory_bytes=512 * MIB, disk_bytes=2048 * MIB, processes=7, cpu_cores=1.5, output_bytes=MIB)
    text = definition(contract, limits, BoxContents(TEMPLATES["data"])).body["description"]
    for stated in (
        *(f"{contract.timeout_seconds:g} s", "512 MiB of memory", "2 GiB of disk", "7 processes and threads"),
        *(
            "1.5 processor cores",
            "1 MiB of output",
            "10,000 characters in all",
            "Network: none",
            "numpy, pandas, matplotlib",
        ),
        *("/workspace/output", "/workspace/tmp", "standard library"),
    ):
        assert stated in text, stated
    assert "numpy" not in definition(contract, limits, BoxContents()).body["description"]


def said(tool: str, **keys: Any) -> str:
    contract, _ = build(tool, {"transport": "sandboxed_exec", **keys})
    return str(definition(contract, Limits(), BoxContents(), SessionLifetimes()).body["description"])


@pytest.mark.parametrize("tool", ["execute_python", "run_shell", "open_session"])
def test_a_description_states_who_may_listen(tool: str) -> None:
    assert "Listening: on the box's own loopback." in said(tool)
    assert "ports can be shown on this machine's, to its owner alone" in said(tool, listen="allowed")
    assert "to its owner alone, can be: web (port 8000)" in said(tool, listen={"web": 8000})


def test_a_description_states_which_programs_there_are() -> None:
    assert "Programs:" not in said("run_shell") and "session" in said("run_shell")
    told = said("run_shell", commands={"allow": ["ls", "cat"], "ask": ["git"]})
    assert "Programs: beside sh only ls, cat; for git a person is asked;" in told
    assert "Python" not in told.partition("Limits")[0] and "open_session" not in told
    assert "those of the system without curl" in said("run_shell", commands={"deny": ["curl"]})
    assert "sh alone" in said("run_shell", commands={"allow": []})


def test_a_definition_changes_with_what_it_promises() -> None:
    digests = {
        definition(contract, limits, BoxContents(packages)).digest
        for contract in (PYTHON, SHELL, built_in("execute_python", 9))
        for limits in (Limits(), Limits(memory_bytes=MIB * 128))
        for packages in ((), ("numpy",))
    }
    assert len(digests) == 12
    assert definition(PYTHON, Limits(), BoxContents()).server == "ringfence"
    assert [definition(built_in(tool, 1), Limits(), BoxContents()).name for tool in offered_tools()] == list(
        offered_tools()
    )


def test_a_result_that_is_an_error_is_explained() -> None:
    facts = {"explanation": "ended"}
    fine: dict[str, Any] = {"content": [], "structuredContent": {}}
    explain(fine, facts)
    assert fine == {"content": [], "structuredContent": {}}
    failed: dict[str, Any] = {"content": [], "isError": True}  # a contract that lets only some fields through
    explain(failed, facts)
    assert failed == {"content": [{"type": "text", "text": "[ended]"}], "isError": True}


# ── sessions ──


def taken(tool: str, lives: SessionLifetimes, *, wide: bool = False) -> Any:
    return definition(built_in(tool, 7), Limits(), BoxContents(), lives, wide=wide).body


def test_what_an_agent_may_do_with_a_session_and_what_only_somebody_in_this_process() -> None:
    assert set(offered_tools()) < set(declarable_tools()) < set(all_tools())
    assert set(declarable_tools()) - set(offered_tools()) == {"expose_port"}, "only where a contract is for it"
    only = {
        "restart_context",
        "remove_context",
        "extend_session",
        "list_snapshots",
        "remove_snapshot",
        "create_volume",
        "list_volumes",
        "remove_volume",
    }
    assert set(all_tools()) - set(declarable_tools()) == only | {
        "rename_file",
        "read_folder",
        "write_folder",
        "watch_files",
    }
    for tool in all_tools():
        Schema(taken(tool, SessionLifetimes(), wide=True)["inputSchema"])
    for tool in declarable_tools():
        body = taken(tool, SessionLifetimes())
        Schema(body["outputSchema"])
        assert "facts" not in body["outputSchema"]["properties"]
        assert "{" not in body["description"], tool
        assert not {"oneOf", "anyOf", "allOf", "not", "enum"} & set(body["inputSchema"]), "models' providers refuse it"


def test_each_tool_says_how_much_harm_it_can_do() -> None:
    risky = {tool for tool in all_tools() if mode(tool) == "high_risk"}
    assert risky == {*PROGRAMS, "send_input"}, "what is typed into a shell is a command"
    reading = {tool for tool in all_tools() if mode(tool) == "read"}
    assert {"read_file", "list_files", "list_sessions", "process_output"} < reading
    assert not reading & {tool for tool in all_tools() if tool.startswith(("write", "remove", "close", "stop", "copy"))}
    hints = {tool: taken(tool, SessionLifetimes()).get("annotations", {}) for tool in offered_tools()}
    assert {tool for tool in offered_tools() if hints[tool].get("readOnlyHint", False)} == reading & set(
        offered_tools()
    )
    destructive = {tool for tool in set(offered_tools()) - reading if hints[tool].get("destructiveHint", True)}
    assert destructive == {"close_session", "remove_file", "stop_process"}


def test_an_agent_stays_within_the_clocks_of_the_configuration() -> None:
    lives = SessionLifetimes(lifetime_seconds=60, most_lifetime_seconds=100, idle_seconds=5, most_idle_seconds=10)
    text = taken("open_session", lives)["description"]
    for stated in (
        "256 MiB of memory",
        "of one step: 7 s",
        "closed 60 s after",
        "100 s at most",
        "after 5 s without work",
    ):
        assert stated in text, stated
    narrow, wide = (Schema(taken("open_session", lives, wide=form)["inputSchema"]) for form in (False, True))
    assert narrow.problem({"lifetime_seconds": 100, "idle_seconds": 10}, "arguments") is None
    assert narrow.problem({"lifetime_seconds": 101}, "arguments") is not None
    assert narrow.problem({"idle_seconds": 11}, "arguments") is not None
    assert narrow.problem({"idle_seconds": None}, "arguments") is not None
    assert wide.problem({"lifetime_seconds": 1e6, "idle_seconds": None}, "arguments") is None


def test_where_there_are_no_sessions_nothing_is_said_of_them() -> None:
    for contract in (PYTHON, SHELL):
        assert "open_session" not in definition(contract, Limits(), BoxContents()).body["description"]
        assert "open_session" in definition(contract, Limits(), BoxContents(), SessionLifetimes()).body["description"]


@pytest.mark.parametrize(
    ("tool", "arguments", "fine"),
    [
        ("write_file", {"session": "s", "path": "a", "text": ""}, True),
        ("write_file", {"session": "s", "path": "a", "base64": ""}, True),
        ("write_file", {"session": "s", "path": "a", "data": {"bytes": 1, "sha256": "-"}}, False),
        ("write_file", {"path": "a", "text": ""}, False),
        ("fork_session", {"session": "s", "count": 0}, False),
        ("fork_session", {"session": "s", "count": 1000}, False),
        ("stop_process", {"session": "s", "process": 1, "signal": "TERM"}, True),
        ("stop_process", {"session": "s", "process": 1, "signal": 15}, True),
        ("stop_process", {"session": "s", "process": 1, "signal": True}, False),
        ("read_file", {"session": "s", "path": 1}, False),
        ("read_file", {"session": "s", "path": "a", "offset": -1}, False),
        ("list_files", {"session": "s", "depth": 0}, False),
        ("open_session", {"volumes": [{"name": "v", "at": "/workspace/v", "mode": "rw"}]}, True),
        ("open_session", {"volumes": [{"name": "v"}]}, False),
        ("open_session", {"metadata": {"a": 1}}, False),
        ("open_session", {"retain": "none"}, False),
    ],
)
def test_what_tools_of_sessions_take(tool: str, arguments: Any, fine: bool) -> None:
    problem = Schema(taken(tool, SessionLifetimes())["inputSchema"]).problem(arguments, "arguments")
    assert (problem is None) is fine, problem


def test_all_definitions_together_cost_a_model_few_tokens() -> None:
    """The same holds for a gateway's answer (tests/compose/test_gateway.py); this needs no box."""
    offers = [
        definition(built_in(tool, 30), Limits(), BoxContents(), SessionLifetimes()).body for tool in offered_tools()
    ]
    assert len(json.dumps(offers, ensure_ascii=False, separators=(",", ":")).encode()) <= 12_000
