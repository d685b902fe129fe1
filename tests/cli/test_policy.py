"""`ringfence policy`: rules tried before they are in force."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence import config
from tests import faking, gateways
from tests.gateways import run
from tests.tooling import ROOT

CONFIG = """version: 1
gateway: {state: ./state}
servers: {desk: {url: "http://127.0.0.1:9/mcp"}}
capabilities:
  create_ticket: {mode: write, approval: boss}
  delete_ticket: {mode: write}
approvals: {boss: {when: 'has(args.priority) && args.priority == "high"'}}
policy:
  files: [rules.yaml]
  rules:
    - {id: big, action: ask, tool_patterns: [transfer], when: 'args.amount > 10'}
  cases:
    - {name: a ticket, tool: create_ticket, args: {priority: low}, expect: allow}
"""
RULES = """rules:
  - {id: no-deletes, name: Nothing is deleted, action: deny, tool_patterns: ["delete_.*"], environments: [production]}
  - {id: off, action: deny, enabled: false}
cases:
  - {name: deleting, tool: delete_ticket, environment: production, expect: deny, rules: [no-deletes]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gateways.write(tmp_path, CONFIG)
    (tmp_path / "rules.yaml").write_text(RULES)
    return tmp_path


def test_cases_that_pass_and_rules_that_none_is_about(folder: Path) -> None:
    shown = run("policy", "test", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [
        "2 of 3 rules were matched by no case:",
        "  ringfence.yaml:11:12: big",
        "  rules.yaml:3:10: off (enabled: false)",
        "Of preset standard, no case matched std-read, std-high-risk.",
        "ringfence.yaml: ok, 2 cases",
    ]
    assert not (folder / "state").exists(), "nothing is touched"


def test_a_case_that_fails_is_shown_with_the_rule_that_decided(folder: Path) -> None:
    with (folder / "rules.yaml").open("a") as file:
        file.write("  - {name: high, tool: create_ticket, args: {priority: high}, expect: deny, rules: [no-deletes]}\n")
    shown = run("policy", "test", "rules.yaml", cwd=folder)
    assert shown.returncode == 1
    assert shown.stdout.splitlines()[:6] == [
        "rules.yaml:6:5: high",
        "  expected  deny by no-deletes",
        "  got       ask: marked by std-write (audit write capabilities)",
        "  decisive  std-write, the contract of create_ticket (approval boss)",
        "  because   rule no-deletes should have matched, but did not",
        "",
    ]
    told = json.loads(run("policy", "test", "rules.yaml", "--json", cwd=folder).stdout)
    assert (told["ok"], told["passed"], told["failed"]) == (False, 1, 1)
    assert told["cases"][1]["got"]["approvals"] == ["boss"]
    assert told["unmatched"][0] == {"rule": "big", "file": "ringfence.yaml", "line": 11, "column": 12}
    assert told["unmatched_preset"] == ["std-read", "std-high-risk"]


def test_new_rules_are_tried_over_a_configuration(folder: Path) -> None:
    new = "rules: [{id: no-deletes, action: ask}]\ncases: [{name: n, tool: delete_ticket, expect: ask}]\n"
    (folder / "new.yaml").write_text(new)
    shown = run("policy", "test", "new.yaml", "--config", "ringfence.yaml", cwd=folder)
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (0, "new.yaml: ok, 1 case")


def test_a_policy_file_needs_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "alone.yaml").write_text(
        "rules: [{id: r, action: deny, tool_patterns: [x]}]\ncases: [{name: n, tool: x, mode: read, expect: deny}]\n"
    )
    assert run("policy", "test", "alone.yaml", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "cases: [{name: n, tool: delete_tickt, expect: deny}]\n",
            "bad.yaml:1:25: no capability named 'delete_tickt' (",
        ),
        ("cases: []\n", "there are no cases in bad.yaml"),
        ("rules: [\n", "not YAML"),
        ("capabilities: {a: {mod: read}}\n", "did you mean 'mode'?"),
    ],
)
def test_a_file_that_is_wrong_is_told_apart(folder: Path, text: str, said: str) -> None:
    (folder / "bad.yaml").write_text(text)
    shown = run("policy", "test", "bad.yaml", cwd=folder)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert said in shown.stderr


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert run("policy", "test", cwd=tmp_path).returncode == 2
    missing = run("policy", "test", "nowhere.yaml", cwd=tmp_path)
    assert (missing.returncode, "nowhere.yaml:1:1: cannot be read" in missing.stderr) == (2, True)


def test_check_finds_problems_of_cases(folder: Path) -> None:
    (folder / "rules.yaml").write_text(RULES.replace("expect: deny", "expect: denied"))
    shown = run("check", cwd=folder)
    assert (shown.returncode, shown.stdout.startswith("rules.yaml:5:")) == (1, True)
    assert "did you mean 'deny'?" in shown.stdout


def test_the_cases_of_the_example_pass(tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples/ringfence.yaml", tmp_path)
    shown = run("policy", "test", "ringfence.yaml", cwd=tmp_path)
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (0, "ringfence.yaml: ok, 4 cases")


# ── policy diff ───────────────────────────────────────────────────────────────────────────────────

DIFFED = """version: 1
gateway: {state: ./state}
servers: {desk: {url: "http://127.0.0.1:9/mcp"}}
capabilities: {echo: {server: desk, mode: read}}
policy:
  preset: permissive
  rules: [{id: later, action: ask, mode: shadow, when: 'args.text == "x"'}]
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of three calls of a tool and one of a tool that is not there."""
    folder = tmp_path_factory.mktemp("diff")
    gateways.write(folder, DIFFED)
    settings = config.load(folder / "ringfence.yaml")
    said = faking.Said(rules=settings.policy.rules, contracts=tuple(settings.contracts.values()))

    async def make() -> None:
        async with faking.governed(folder, said) as way:
            for text in ("x", "y", "x"):
                await way.call(arguments={"text": text})
            await way.call("ecko")

    anyio.run(make)
    return folder


def diff(log: Path, rules: str, *words: str) -> Any:
    (log / "new.yaml").write_text(f"rules: [{rules}]\n")
    return run("policy", "diff", "new.yaml", *words, cwd=log)


def test_calls_that_would_end_differently_are_listed_with_their_rules(log: Path) -> None:
    shown = diff(log, "{id: later, action: ask, when: 'args.text == \"x\"'}")
    assert shown.returncode == 1, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[:3] == ["echo: allow -> ask, 2 calls", "  rules then  perm-read", "  rules now   later, perm-read"]
    assert lines[3].startswith("  calls       call_")
    assert lines[-2] == "in shadow mode, on record: later matched 2 calls, which would have been: ask 2"
    assert lines[-1] == "4 calls on record: 2 would end differently, 2 the same"


def test_calls_that_cannot_be_decided_again_say_on_which_rules_they_depend(log: Path) -> None:
    told = json.loads(
        diff(log, "{id: more, action: deny, argument_patterns: {text: z}}", "--json", "--ids", "1").stdout
    )
    (group,) = told["unknown"]
    assert (told["calls"], told["same"], told["changed"], group["count"]) == (4, 1, [], 3)
    assert group["new"]["verdicts"] == ["allow", "deny"]
    assert (group["depends_on"], len(group["calls"])) == (["more"], 1)
    assert told["shadow"] == {"later": {"ask": 2}}
    shown = diff(log, "{id: more, action: deny, argument_patterns: {text: z}}")
    assert "These depend on arguments that are not on record, so they cannot be decided again:" in shown.stdout
    assert "  depends on  more" in shown.stdout


def test_a_period_and_a_file_that_changes_nothing(log: Path) -> None:
    assert diff(log, "{id: none, action: deny, tool_patterns: [other]}").returncode == 0
    later = diff(log, "{id: all, action: deny}", "--since", "2199-01-01")
    assert (later.returncode, later.stdout) == (0, "0 calls on record: 0 would end differently, 0 the same\n")


def test_a_whole_configuration_may_be_new(log: Path) -> None:
    (log / "whole.yaml").write_text(DIFFED.replace("echo:", "echo2:"))
    shown = run("policy", "diff", "whole.yaml", "--config", "ringfence.yaml", cwd=log)
    assert shown.returncode == 1
    assert "  rules now   none: refused before policy (unknown_tool)" in shown.stdout


@pytest.mark.parametrize(
    "words", [("nowhere.yaml",), ("new.yaml", "--since", "soon"), ("new.yaml", "--config", "no.yaml")]
)
def test_what_cannot_be_read_is_wrong_usage(log: Path, words: tuple[str, ...]) -> None:
    (log / "new.yaml").write_text("rules: []\n")
    assert run("policy", "diff", *words, cwd=log).returncode == 2
