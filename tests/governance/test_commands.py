"""A contract that names programs, on the governed way: what is there, what is asked for, and what is told of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence import config
from ringfence.compose.runs import Runs
from ringfence.core.box import Attached
from ringfence.core.model import Outcome, Person
from ringfence.governance import approvals
from tests import boxing, gateways
from tests.tooling import ROOT

pytestmark = pytest.mark.anyio

DOCUMENT = (ROOT / "docs/commands.md").read_text()
CONTRACT = "capabilities: {run_shell: {transport: sandboxed_exec, approval: none, commands: {%s}}}"


@asynccontextmanager
async def running(folder: Path, commands: str) -> AsyncIterator[Runs]:
    boxing.need_boxes()
    said = boxing.settings(folder, CONTRACT % commands)
    async with Runs.open(replace(said, gateway=replace(said.gateway, approval_wait_seconds=0))) as runs:
        yield runs


async def shell(runs: Runs, command: str, **more: object) -> Outcome:
    return await runs.call("run_shell", {"command": command, **more}, Attached(), origin="sdk")


def answer(runs: Runs, asked: Outcome, *, approve: bool = True) -> None:
    assert asked.status == "approval_required" and asked.approval_id is not None, asked
    approvals.answer(runs.pipeline._store, asked.approval_id, Person("bob"), approve=approve)


async def test_only_named_programs_run_and_the_facts_say_so(tmp_path: Path) -> None:
    async with running(tmp_path, "allow: [ls, cat]") as runs:
        done = await shell(runs, "ls /workspace; id")
        assert done.structured["stdout"] == "input\noutput\ntmp\n"
        assert "id: not found" in done.structured["stderr"]
        assert done.facts["commands"] == "enforced"
        assert "only the programs that its contract names could be run" in done.facts["explanation"]


async def test_an_interpreter_is_told_of(tmp_path: Path) -> None:
    async with running(tmp_path, "allow: [python3]") as runs:
        done = await shell(runs, "python3 -c 'print(6 * 7)'")
        assert (done.structured["stdout"], done.facts["commands"]) == ("42\n", "advisory")
        assert "one of them runs code of its own" in done.facts["explanation"]


async def test_what_is_asked_for_is_there_once_a_person_agreed_to_this_command(tmp_path: Path) -> None:
    async with running(tmp_path, "allow: [ls], ask: [id]") as runs:
        asked = await shell(runs, "id -u")
        assert "the command names id" in asked.facts["explanation"] or asked.approval_id is not None
        shown = approvals.find(runs.pipeline._store, asked.approval_id or "").summary
        assert shown["programs"] == ["id"]
        answer(runs, asked)
        done = await shell(runs, "id -u")
        assert done.structured["stdout"] == "1000\n"
        assert (await shell(runs, "id -u")).status == "approval_required", "it was for one call"
        hidden = await shell(runs, "i''d -u; /usr/bin/i?")
        assert hidden.status == "failed" and "not found" in hidden.structured["stderr"]


async def test_where_a_person_refuses_nothing_runs(tmp_path: Path) -> None:
    async with running(tmp_path, "ask: [id]") as runs:
        answer(runs, await shell(runs, "id"), approve=False)
        assert (await shell(runs, "id")).reason_code == "approval_refused"
        done = await shell(runs, "ls /usr/bin | grep -cx 'i''d'")
        assert done.structured["stdout"] == "0\n"


async def test_a_session_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with running(tmp_path, "allow: [ls]") as runs:
        refused = await shell(runs, "ls", session="box_x")
        assert refused.reason_code == "commands_in_session"
        assert "leave session out" in refused.message


def test_the_tool_says_which_programs_there_are(tmp_path: Path) -> None:
    path = gateways.write(tmp_path, f"gateway: {{state: ./state}}\n{CONTRACT % 'allow: [ls], ask: [git]'}")
    told = gateways.run("check", path, "--print").stdout
    assert re.search(r"commands:\n +allow:\n +- ls\n +ask:\n +- git", told)


def test_a_program_that_nobody_has_is_warned_of(tmp_path: Path) -> None:
    (warning,) = config.loads(CONTRACT % "deny: [whoamii]", file="f", base=tmp_path).warnings
    assert "this host has no program 'whoamii' that boxes see (did you mean 'whoami'?)" in str(warning)


def test_the_document_says_what_works(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert config.loads(block, file="f", base=tmp_path).contracts["run_shell"].commands is not None
    boxing.need_boxes()
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "hello\n", done.stderr
