"""Code that comes by another call than a program's own: what is demanded of the program is demanded of that call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.runs import Runs
from ringfence.core.box import Attached
from ringfence.core.model import Outcome, Person
from ringfence.governance import approvals
from ringfence.sandbox.tools.definition import Changes
from ringfence.sandbox.tools.toolkit import KIT, PROGRAMS
from tests import gateways
from tests.boxing import settings
from tests.sandbox.tools.calling import Caller, calling

pytestmark = pytest.mark.anyio

ASKED = """capabilities:
  execute_python: {transport: sandboxed_exec, mode: high_risk, approval: always}
  run_shell: {transport: sandboxed_exec, mode: high_risk, approval: always}
"""
RULE = "policy: {rules: [{id: mine, action: %s, tool_patterns: ['%s'], %s}]}"
SETUP = "say x"


class Agent:
    """Calls our own tools by the configuration that a test says."""

    def __init__(self, runs: Runs, house: Caller) -> None:
        self.runs = runs
        self.house = house

    async def __call__(self, tool: str, **arguments: Any) -> Outcome:
        return await self.runs.call(tool, arguments, Attached(), origin="sdk")

    async def session(self, **how: Any) -> str:
        """One that was opened before the rules said what they say now."""
        return await self.house.opened(**how)

    def approve(self, asked: Outcome) -> None:
        assert asked.status == "approval_required" and asked.approval_id is not None, asked
        approvals.answer(self.runs.pipeline._store, asked.approval_id, Person("bob"), approve=True)

    @property
    def boxes(self) -> int:
        return len(self.house.place.backend.boxes)


@asynccontextmanager
async def agent(folder: Path, text: str) -> AsyncIterator[Agent]:
    async with calling(folder / "house") as house, Runs.open(settings(folder, text), house.executor) as runs:
        house.principal = runs._agent
        yield Agent(runs, house)


def ways(session: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "opening": ("open_session", {"setup": SETUP}),
        "forking": ("fork_session", {"session": session, "count": 1}),
        "typing": ("send_input", {"session": session, "process": 1, "text": "id\n"}),
    }


WAYS = tuple(ways(""))


def test_every_tool_that_runs_code_says_which_program_would_run_it() -> None:
    runs = {name for name, tool in KIT.items() if tool.changes is Changes.CODE}
    assert {name for name in runs if KIT[name].carries is None} == set(PROGRAMS)
    for tool in KIT.values():
        if "setup" in {**tool.takes, **tool.wide} or tool.name in runs - set(PROGRAMS):
            assert tool.carries is not None
        if tool.carries is not None:
            program = KIT[tool.carries.program]
            assert program.name in PROGRAMS and tool.carries.taken_as in program.takes


@pytest.mark.parametrize("way", WAYS)
async def test_where_a_person_is_asked_about_a_program_they_are_asked_about_code_that_comes_otherwise(
    way: str, tmp_path: Path
) -> None:
    async with agent(tmp_path, ASKED) as call:
        session = await call.session(setup=SETUP)
        tool, arguments = ways(session)[way]
        before = call.boxes
        asked = await call(tool, **arguments)
        assert (asked.status, call.boxes) == ("approval_required", before), asked
        call.approve(asked)
        assert (await call(tool, **arguments)).reason_code in ("ok", "unknown_process")


async def test_a_contract_for_the_call_itself_does_not_lift_what_is_asked_for_programs(tmp_path: Path) -> None:
    own = ASKED + "  open_session: {transport: sandboxed_exec, approval: none}\n"
    async with agent(tmp_path, own) as call:
        assert (await call("open_session", setup=SETUP)).status == "approval_required"


async def test_without_code_nobody_is_asked(tmp_path: Path) -> None:
    async with agent(tmp_path, ASKED) as call:
        opened = await call("open_session")
        assert opened.ok
        session = opened.structured["session"]
        assert (await call("fork_session", session=session, count=1)).ok
        assert (await call("open_session", setup="")).ok
        assert (await call("send_input", session=session, process=1, eof=True)).reason_code == "unknown_process"


DENIED = {
    "by name": (RULE % ("deny", "execute_.*|run_.*", "priority: 1"), WAYS),
    "by any argument": (
        RULE % ("deny", "execute_.*|run_.*", "argument_patterns: {'*': 'say|id'}"),
        ("opening", "typing"),
    ),
    "by the program's own argument": (RULE % ("deny", "execute_.*", "argument_patterns: {code: say}"), ("opening",)),
    "by a condition": (RULE % ("deny", "run_shell", "when: 'args.command.contains(\"id\")'"), ("typing",)),
    "by mode": (RULE % ("deny", ".*", "when: 'contract.mode == \"high_risk\"'"), ("opening", "forking")),
    "by default": (
        "policy: {preset: none, rules: [{id: mine, action: allow,"
        " tool_patterns: [open_session, fork_session, send_input]}]}",
        WAYS,
    ),
}


@pytest.mark.parametrize(("case", "way"), [(case, way) for case, (_, found) in DENIED.items() for way in found])
async def test_code_that_no_program_may_run_is_not_run_otherwise(case: str, way: str, tmp_path: Path) -> None:
    async with agent(tmp_path, DENIED[case][0]) as call:
        session = await call.session(setup=SETUP)
        tool, arguments = ways(session)[way]
        before = call.boxes
        refused = await call(tool, **arguments)
        assert (refused.status, refused.reason_code, call.boxes) == ("denied", "policy", before), refused
    record = gateways.finished(tmp_path / "state")[-1]
    assert record["status"] == "denied" and "as " in record["decision"]["reason"]


async def test_a_condition_that_needs_code_which_the_call_does_not_show_denies(tmp_path: Path) -> None:
    rule = RULE % ("deny", "execute_python", "when: 'args.code.contains(\"x\")'")
    async with agent(tmp_path, rule) as call:
        session = await call.session(setup="say other")
        refused = await call("fork_session", session=session, count=1)
        assert (refused.status, refused.reason_code) == ("denied", "policy_error")
        assert (await call("open_session", setup="say other")).ok


async def test_where_programs_are_not_offered_code_does_not_come_otherwise(tmp_path: Path) -> None:
    text = "capabilities: {execute_python: {transport: sandboxed_exec, environments: [production]}}"
    async with agent(tmp_path, text) as call:
        refused = await call("open_session", setup=SETUP)
        assert (refused.status, refused.reason_code) == ("denied", "policy")
        assert "execute_python" in refused.message and "not offered" in refused.message
        assert (await call("open_session")).ok


async def test_what_is_asked_by_several_contracts_is_asked_all_together(tmp_path: Path) -> None:
    text = ASKED + "  py: {transport: sandboxed_exec, tool: execute_python, approval: second}\n"
    text += "approvals: {second: {roles: [boss]}}\npeople: {bob: {roles: [boss], os_user: nobody}}\n"
    async with agent(tmp_path, text) as call:
        asked = await call("open_session", setup=SETUP)
        assert asked.approval_id is not None
        row = approvals.find(call.runs.pipeline._store, asked.approval_id)
        assert ("always" in row.rule, "second" in row.rule, row.roles) == (True, True, ("boss",))


async def test_an_answer_is_void_once_the_programs_contract_changed(tmp_path: Path) -> None:
    async with agent(tmp_path, ASKED) as call:
        call.approve(await call("open_session", setup=SETUP))
    stricter = ASKED.replace("python: {", "python: {labels: [new], ")
    assert stricter != ASKED
    async with agent(tmp_path, stricter) as call:
        assert (await call("open_session", setup=SETUP)).status == "approval_required"
    async with agent(tmp_path, ASKED) as call:
        assert (await call("open_session", setup=SETUP)).ok, "it stands as long as nothing changed"


# ── Cells in other languages are commands ──

SHELL_ALONE = {
    "a person": ("capabilities: {run_shell: {transport: sandboxed_exec, approval: always}}", "approval_required"),
    "a rule": (RULE % ("deny", "run_.*", "priority: 1"), "policy"),
    "a rule about the line": (RULE % ("deny", "run_shell", "when: 'args.command.contains(\"mark\")'"), "policy"),
    "no offer": ("capabilities: {run_shell: {transport: sandboxed_exec, environments: [production]}}", "policy"),
    "named programs": ("capabilities: {run_shell: {transport: sandboxed_exec, commands: {allow: [ls]}}}", None),
}


@pytest.mark.parametrize("inside", [True, False], ids=["in a session", "in a fresh box"])
@pytest.mark.parametrize("language", ["bash", "javascript"])
@pytest.mark.parametrize("case", SHELL_ALONE)
async def test_what_is_demanded_of_the_shell_is_demanded_of_cells_that_it_could_run(
    case: str, language: str, inside: bool, tmp_path: Path
) -> None:
    text, reason = SHELL_ALONE[case]
    async with agent(tmp_path, text) as call:
        where = {"session": await call.session()} if inside else {}
        before = call.boxes
        refused = await call("execute_python", code="mark", language=language, **where)
        assert not refused.ok and call.boxes == before, refused
        assert reason in (None, refused.reason_code, str(refused.status)), refused
        assert (await call("execute_python", code="say mark", **where)).status == "success"


@pytest.mark.parametrize("language", ["bash", "javascript"])
async def test_a_cell_that_was_approved_runs_once(language: str, tmp_path: Path) -> None:
    async with agent(tmp_path, SHELL_ALONE["a person"][0]) as call:
        arguments = {"code": "mark", "language": language, "session": await call.session()}
        call.approve(await call("execute_python", **arguments))
        assert (await call("execute_python", **arguments)).ok
        assert (await call("execute_python", **arguments)).status == "approval_required"


# ── Forks ─────────────────────────────────────────────────────────────────────────────────────────

OPENING = "capabilities: {open_session: {transport: sandboxed_exec, %s}}"


async def test_a_fork_needs_the_approval_of_the_capability_that_opened_its_session(tmp_path: Path) -> None:
    async with agent(tmp_path, OPENING % "approval: always") as call:
        session = await call.session()
        before = call.boxes
        asked = await call("fork_session", session=session, count=2)
        assert (asked.status, call.boxes) == ("approval_required", before), asked
        call.approve(asked)
        assert (await call("fork_session", session=session, count=2)).ok
        assert call.boxes == before + 2
        assert (await call("fork_session", session=session, count=2)).status == "approval_required", "once"


async def test_a_fork_is_refused_where_a_rule_refuses_the_capability_that_opened_its_session(tmp_path: Path) -> None:
    async with agent(tmp_path, RULE % ("deny", "open_session", "")) as call:
        refused = await call("fork_session", session=await call.session(), count=1)
        assert (refused.status, refused.reason_code) == ("denied", "policy")


async def test_each_fork_spends_the_quota_of_the_capability_that_opened_its_session(tmp_path: Path) -> None:
    async with agent(tmp_path, OPENING % "rate: {per_day: 3}") as call:
        session = await call.session()
        assert (await call("fork_session", session=session, count=2)).ok
        before = call.boxes
        refused = await call("fork_session", session=session, count=2)
        assert (refused.status, refused.reason_code, call.boxes) == ("denied", "quota", before)
        assert (await call("fork_session", session=session, count=1)).ok, "what was refused spent nothing"
        assert (await call("open_session")).reason_code == "quota"


async def test_each_fork_takes_from_the_rate_of_the_capability_that_opened_its_session(tmp_path: Path) -> None:
    async with agent(tmp_path, OPENING % "rate: {per_minute: 1, burst: 3}") as call:
        session = await call.session()
        assert (await call("fork_session", session=session, count=2)).ok
        assert (await call("fork_session", session=session, count=2)).reason_code == "throttled"


async def test_what_a_program_opened_is_forked_as_before(tmp_path: Path) -> None:
    async with agent(tmp_path, OPENING % "rate: {per_day: 1}") as call:
        session = (await call("open_session")).structured["session"]
        assert (await call("fork_session", session=session, count=2)).ok
