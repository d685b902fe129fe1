"""Defects that were proven in another gateway, and that this one must not have: what is written is what holds.

The number in a test's name is the number of the defect.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from mcp import Client

from ringfence import Gateway
from tests import gateways, tooling

pytestmark = pytest.mark.anyio

CONFIG = """
version: 1
gateway: {state: ./state}
servers: {helpdesk: {url: "@URL@", pins: first_use}}
capabilities: {create_ticket: {mode: write}, search_docs: {mode: read}}
policy:
  preset: permissive
  rules: @RULES@
  files: @FILES@
"""


@pytest.fixture(scope="module")
def helpdesk() -> Iterator[str]:
    with tooling.serve_fixture("helpdesk_server.py") as url:
        yield url


def text(url: str, rules: str = "[]", files: str = "[]") -> str:
    return CONFIG.replace("@URL@", url).replace("@RULES@", rules).replace("@FILES@", files)


async def status(url: str, tool: str = "create_ticket", **arguments: str) -> str:
    async with Client(url) as client:
        result = await client.call_tool(tool, arguments)
    return str((result.meta or {})["ringfence/outcome"]["status"])


# ── 18: what is written is what holds ─────────────────────────────────────────────────────────────


def test_defect_18_the_file_beats_the_environment(
    helpdesk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/configuration.md has it: the file, then the environment, then the defaults."""
    path = gateways.write(tmp_path, text(helpdesk))
    elsewhere = gateways.write(tmp_path, "version: 1\ngateway: {state: ./wrong}\n", "elsewhere.yaml")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "environment"))
    monkeypatch.setenv("RINGFENCE_CONFIG", str(elsewhere))
    for name in ("ENVIRONMENT", "STATE", "GATEWAY_STATE", "GATEWAY__STATE", "POLICY_PRESET", "POLICY__PRESET"):
        monkeypatch.setenv(f"RINGFENCE_{name}", "strict" if "PRESET" in name else "changed")
    called = gateways.run("call", "create_ticket", "--config", path, cwd=tmp_path)
    assert called.returncode == 0, called.stderr
    assert [body["call"]["environment"] for body in gateways.finished(tmp_path / "state")] == ["development"]
    assert not (tmp_path / "environment").exists()
    assert not (tmp_path / "wrong").exists()

    # Where the file is silent, the environment speaks; and it names the file where no option does.
    silent = gateways.write(tmp_path, text(helpdesk).replace("gateway: {state: ./state}", ""), "silent.yaml")
    monkeypatch.setenv("RINGFENCE_CONFIG", str(silent))
    called = gateways.run("call", "create_ticket", cwd=tmp_path)
    assert called.returncode == 0, called.stderr
    assert len(gateways.finished(tmp_path / "environment" / "ringfence")) == 1


WRONG = {
    "sandbox: {timeout_seconds: 5}": "sandbox.timeout_seconds",
    "sandbox: {wasm_interpreter_path: /usr/bin/python3}": "wasm_interpreter_path",
    "audit: {sign_entries: true}": "sign_entries",
    "dee: {sign_traces: true}": "dee",
    "auth: {enabled: true, api_keys: [k]}": "auth",
    "policy: {policy_paths: [policies/strict.yaml]}": "policy_paths",
    "policy: {rules: [{id: r, action: deny, arg_patterns: {path: x}}]}": "arg_patterns",
    "policy: {rules: [{id: r, action: deny, argument_pattern: {path: x}}]}": "argument_pattern",
    "policy: {rules: [{id: r, action: block}]}": "block",
    "policy: {rules: [{id: r, action: deny, taint_label: [SECRET]}]}": "taint_label",
    "policy: {rules: [{id: r, action: deny, conditions: {user: x}}]}": "user",
}


def test_defect_18_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ringfence.yaml"
    for wrong, named in WRONG.items():
        path.write_text(f"version: 1\n{wrong}\n")
        with pytest.raises(Exception, match=f"ringfence.yaml:2:[0-9]+: .*{named.rpartition('.')[2]}"):
            Gateway.from_config(path)
    path.write_text("version: 1\n" + "\n".join(list(WRONG)[1:4]))
    for verb in (["check", str(path)], ["serve", "--config", str(path), "--port", "0"]):
        refused = gateways.run(*verb)
        said = refused.stdout + refused.stderr
        assert refused.returncode == 1
        assert [said.count(f"ringfence.yaml:{line}:") for line in (2, 3, 4)] == [1, 1, 1], "every problem, at once"


def test_defect_18_a_mistyped_condition_never_widens_a_rule(helpdesk: str, tmp_path: Path) -> None:
    """Ignored, `arg_patterns` would make this rule match, and allow, every call."""
    rules = '[{id: only-docs, action: allow, arg_patterns: {title: "^docs"}}]'
    path = gateways.write(tmp_path, text(helpdesk, rules).replace("preset: permissive", "preset: none"))
    called = gateways.run("call", "create_ticket", "--args", '{"title": "anything"}', "--config", path)
    assert called.returncode not in (0, 126)
    assert "arg_patterns" in called.stderr
    assert "argument_patterns" in called.stderr, "it says what was meant"
    assert not (tmp_path / "state").exists()


# ── 19: reload, patterns ──────────────────────────────────────────────────────────────────────────


async def test_defect_19_a_removed_rule_is_gone(helpdesk: str, tmp_path: Path) -> None:
    deny = '[{id: no-tickets, action: deny, tool_patterns: ["create_.*"]}]'
    path = gateways.write(tmp_path, text(helpdesk, deny, "[more.yaml]"))
    more = gateways.write(tmp_path, 'rules: [{id: no-docs, action: deny, tool_patterns: ["search_.*"]}]\n', "more.yaml")
    with gateways.serve(path) as served:
        assert [await status(served.url, tool) for tool in ("create_ticket", "search_docs")] == ["denied", "denied"]

        # Removing a rule that denies loosens, so it waits for the word of whoever runs the gateway.
        path.write_text(text(helpdesk, "[]", "[more.yaml]"))
        os.kill(served.pid, signal.SIGHUP)
        await until(served.url, "create_ticket", "success")
        assert await status(served.url, "search_docs") == "denied"

        more.write_text("rules: []\n")
        os.kill(served.pid, signal.SIGHUP)
        await until(served.url, "search_docs", "success")

        # Adding one tightens, and needs no more than the change of the file.
        more.write_text('rules: [{id: no-docs-at-all, action: deny, tool_patterns: ["search_.*"]}]\n')
        await until(served.url, "search_docs", "denied")  # by the rule, or as rules that changed while it was under way
        assert await status(served.url, "search_docs") == "denied"
        assert await status(served.url, "create_ticket") == "success"
        matched = [body["decision"]["rules"] for body in gateways.finished(served.state)][-2]
        assert matched[0] == "no-docs-at-all", "the old rule is gone from the decision too"
        assert "no-docs" not in matched
    assert len(gateways.records(served.state, kind="reload")) == 3


async def until(url: str, tool: str, wanted: str) -> None:
    with anyio.fail_after(tooling.PATIENCE):
        while await status(url, tool) != wanted:
            await anyio.sleep(0.05)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("create_.*", True),
        ("create_ticket", True),
        ("(?i)CREATE_TICKET", True),
        (".*_ticket|search", True),
        ("create", False),  # whole names only
        ("ticket", False),
        ("create_*", False),  # no glob: underscores, any number of them
        ("*_ticket", None),  # no pattern at all
        ("(a)\\1", None),  # RE2 has no backreference
        ("create_(?=ticket)ticket", None),  # nor a look ahead
    ],
)
async def test_defect_19_patterns_are_what_the_documentation_says(
    helpdesk: str, tmp_path: Path, pattern: str, matches: bool | None
) -> None:
    path = gateways.write(tmp_path, text(helpdesk, f"[{{id: r, action: deny, tool_patterns: ['{pattern}']}}]"))
    if matches is None:
        with pytest.raises(Exception, match="pattern"):
            Gateway.from_config(path)
        return
    async with Gateway.from_config(path) as gateway:
        outcome = await gateway.call_tool("create_ticket")
    assert outcome.status == ("denied" if matches else "success")
    assert "RE2" in (tooling.ROOT / "docs/policy.md").read_text()
