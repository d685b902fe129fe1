"""Runs of one's own: the same governed way, whatever they come to, on record; and which boxes a configuration gives."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.compose import runs
from ringfence.compose.run_request import RunRequest
from ringfence.compose.runs import (
    UNATTENDED,
    NoServers,
    Runs,
    make_executor,
    own_contracts,
    own_definitions,
    own_lists,
    provision,
)
from ringfence.config import SandboxSettings
from ringfence.core.box import MIB, BoxReport, FileFact, Input
from ringfence.core.errors import Refused, StoreError, Unavailable
from ringfence.core.model import Definition, Person, Principal
from ringfence.governance import approvals
from ringfence.sandbox.tools.request import SessionLifetimes
from ringfence.sandbox.tools.toolkit import PROGRAMS, all_tools, offered_tools
from ringfence.store import Reader
from tests import gateways
from tests.boxing import fake, faked, report, settings

pytestmark = pytest.mark.anyio

DENY = "policy: {rules: [{id: no-code, action: deny, tool_patterns: ['execute_.*']}]}"


def finished(folder: Path) -> list[dict[str, Any]]:
    return gateways.finished(folder / "state")


# ── the way ──

ENDINGS: dict[str, tuple[BoxReport | Exception, str, str, str | None]] = {
    "well": (report(), "success", "ok", "exited"),
    "badly": (report(exit_status=2), "failed", "exit_status", "exited"),
    "by the clock": (report("timeout", signal=9, limit="wall"), "timeout", "timeout", "timeout"),
    "by a limit": (report("oom", signal=9, limit="memory"), "killed", "memory", "oom"),
    "by itself": (report("infra"), "unknown", "box_failed", "infra"),
    "not at all": (Unavailable("no_box", "no zygote"), "unavailable", "no_box", "infra"),
    "senselessly": (ValueError("no such box"), "validation_failure", "bad_arguments", None),
}


@pytest.mark.parametrize("case", ENDINGS)
async def test_every_run_is_a_call_on_record(case: str, tmp_path: Path) -> None:
    reply, status, code, ended = ENDINGS[case]
    async with faked(tmp_path, reply) as (own, _):
        outcome = await own.run(RunRequest(code="1"), origin="cli")
    assert (outcome.status, outcome.reason_code) == (status, code)
    assert (outcome.facts["ended"], outcome.facts["effect"]) == (ended, "none")
    (record,) = finished(tmp_path)
    assert (record["status"], record["reason_code"], record["call"]["tool"]) == (status, code, "execute_python")
    assert (record["call"]["origin"], record["call"]["principal"]["kind"]) == ("cli", "agent")
    assert record["decision"]["rules"] == ["std-high-risk"]
    started = gateways.records(tmp_path / "state", kind="started")
    assert [(body["durable"], body["effect_possible"]) for body in started] == [(False, False)], "a shut-off box"
    assert gateways.verified(tmp_path / "state").ok


async def test_a_result_has_the_facts_and_a_failure_its_sentence(tmp_path: Path) -> None:
    async with faked(tmp_path, report(stdout=b"out"), report(exit_status=1)) as (own, _):
        fine, failed = [await own.run(RunRequest(command="x"), origin="sdk") for _ in range(2)]
    assert "facts" not in fine.structured and fine.facts["ended"] == "exited"
    assert (fine.structured["stdout"], len(fine.content)) == ("out", 1)
    assert failed.result is not None and failed.result["isError"] is True
    assert failed.content[-1]["text"] == f"[{failed.facts['explanation']}]"
    assert fine.ran is not None and fine.ran.report.stdout.head == b"out"
    assert {body["call"]["tool"] for body in finished(tmp_path)} == {"run_shell"}


async def test_policy_is_asked_and_what_it_refuses_runs_nothing(tmp_path: Path) -> None:
    async with faked(tmp_path, text=DENY) as (own, backend):
        refused = await own.run(RunRequest(code="1"), origin="cli")
        allowed = await own.run(RunRequest(command="ls"), origin="cli")
    assert (refused.status, refused.reason_code, allowed.status) == ("denied", "policy", "success")
    assert len(backend.specs) == 1


async def test_a_rule_that_wants_a_sandbox_is_satisfied(tmp_path: Path) -> None:
    rules = "policy: {preset: none, rules: [{id: box-it, action: sandbox, tool_patterns: ['execute_.*', 'run_.*']}]}"
    async with faked(tmp_path, text=rules) as (own, _):
        assert (await own.run(RunRequest(code="1"), origin="cli")).ok


async def test_limits_inputs_and_all_else_are_arguments_that_policy_sees(tmp_path: Path) -> None:
    rules = (
        "policy: {rules: [{id: small, action: deny, when: 'has(args.limits) && args.limits.memory_bytes > 1000000'}]}"
    )
    async with faked(tmp_path, text=rules) as (own, backend):
        assert (await own.run(RunRequest(code="1", limits={"memory_bytes": 64 * MIB}), origin="cli")).status == "denied"
        assert (await own.run(RunRequest(code="1"), origin="cli")).ok
    assert len(backend.specs) == 1


async def test_a_declared_contract_serves_in_place_of_the_built_in_one(tmp_path: Path) -> None:
    text = "capabilities: {py: {transport: sandboxed_exec, tool: execute_python, mode: high_risk, timeout_seconds: 7}}"
    async with faked(tmp_path, text=text) as (own, backend):
        asked = await own.run(RunRequest(code="1"), origin="cli")
        assert (asked.status, backend.specs) == ("approval_required", []), "high_risk asks unless it says otherwise"
        assert asked.approval_id is not None
        store = own.pipeline._store
        approvals.answer(store, asked.approval_id, Person("bob"), approve=True)
        other = await own.run(RunRequest(code="1", limits={"processes": 3}), origin="cli")
        assert other.status == "approval_required", "an approval is for these limits"
        assert (await own.run(RunRequest(code="1"), origin="cli")).ok
        assert (await own.run(RunRequest(command="ls"), origin="cli")).ok, "the other one is still built in"
    assert [spec.limits.wall_seconds for spec in backend.specs] == [7, 30]
    assert [body["contract"]["name"] for body in finished(tmp_path)][-2:] == ["py", "run_shell"]


async def test_what_a_contract_redacts_comes_back_redacted_and_in_no_other_way(tmp_path: Path) -> None:
    text = "capabilities: {execute_python: {transport: sandboxed_exec, approval: none, redact: ['s3cret']}}"
    heard: list[Any] = []
    async with faked(tmp_path, report(stdout=b"a s3cret b"), text=text) as (own, _):
        outcome = await own.run(RunRequest(code="1"), origin="sdk", tell=lambda *said: heard.append(said))
    assert (outcome.structured["stdout"], outcome.ran, heard) == ("a [redacted] b", None, [])
    assert outcome.facts["redactions"] == {"redact[0]": 2}


async def test_a_cancelled_run_is_closed_on_record(tmp_path: Path) -> None:
    async with faked(tmp_path) as (own, backend):
        backend.hold = anyio.Event()
        with anyio.move_on_after(0.1):
            await own.run(RunRequest(code="1"), origin="sdk")
    (record,) = finished(tmp_path)
    assert (record["status"], record["reason_code"], record["facts"]["ended"]) == ("killed", "cancelled", "cancelled")
    assert (record["effect"], backend.closed) == ("none", True)


async def test_without_a_record_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(StoreError):
        async with faked(tmp_path):
            pass


# ── what is wanted ──


def test_arguments_say_what_was_said() -> None:
    assert RunRequest(code="").arguments() == {"code": ""}
    assert RunRequest(command="").arguments() == {"command": ""}
    assert RunRequest(argv=("ls",)).arguments() == {"argv": ["ls"]}
    assert (RunRequest(code="1").tool, RunRequest(command="ls").tool, RunRequest(argv=("ls",)).tool) == (
        "execute_python", "run_shell", "run_shell",
    )  # fmt: skip


def test_bytes_are_named_by_size_and_digest(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"abc")
    digest = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    wanted = RunRequest(code="1", inputs=(Input("a", b"abc"), Input("b", file)), stdin=b"abc", trees=(Path("/t"),))
    said = wanted.arguments()
    assert (said["inputs"], said["stdin"]) == ([{"name": "a", **digest}, {"name": "b", **digest}], digest)
    assert said["trees"] == ["/t"]
    assert RunRequest(code="1", stdin=5).arguments()["stdin"] == "stream"
    with pytest.raises(Unavailable, match="No such file"):
        RunRequest(code="1", inputs=(Input("b", tmp_path / "missing"),)).arguments()


async def test_an_input_that_changed_fails_the_run(tmp_path: Path) -> None:
    other = report(inputs=(FileFact("/workspace/input/a", 3, "00"),))
    async with faked(tmp_path, other) as (own, _):
        outcome = await own.run(RunRequest(code="1", inputs=(Input("a", b"abc"),)), origin="sdk")
    assert (outcome.status, outcome.reason_code, outcome.result) == ("failed", "input_changed", None)


# ── what a configuration gives ──


def test_the_sandbox_settings_are_the_limits_of_boxes() -> None:
    given = SandboxSettings(
        default_timeout_seconds=5, max_cpu_cores=2, max_memory_mb=100, max_disk_mb=200, max_processes=9,
        max_output_mb=3, capture_bytes=50, templates={"ml": ("torch",)},
    )  # fmt: skip
    made = provision(given)
    limits = made.limits
    assert (limits.wall_seconds, limits.cpu_cores, limits.processes, limits.capture_bytes) == (5, 2, 9, 50)
    assert (limits.memory_bytes, limits.disk_bytes, limits.output_bytes) == (100 * MIB, 200 * MIB, 3 * MIB)
    assert dict(made.templates) == {"python": (), "data": ("numpy", "pandas", "matplotlib"), "ml": ("torch",)}


@pytest.mark.parametrize(
    ("backend", "text"), [("microsandbox", "is not built yet"), ("dokcer", "does not exist; there are")]
)
def test_another_backend_is_never_replaced_by_this_one(backend: str, text: str) -> None:
    with pytest.raises(Unavailable, match=text):
        make_executor(SandboxSettings(backend=backend))


def test_elsewhere_than_on_linux_there_is_no_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unavailable, match="needs Linux, and this is macOS"):
        make_executor(SandboxSettings())


def test_which_contracts_serve(tmp_path: Path) -> None:
    def names(text: str) -> list[str]:
        return list(own_contracts(settings(tmp_path, text)))

    python, shell, *more = offered_tools()
    assert (python, shell) == PROGRAMS
    assert names("") == list(offered_tools())
    assert names("sandbox: {max_sessions: 0}") == [python, shell]
    assert names("capabilities: {run_shell: {transport: sandboxed_exec}}") == [shell, python, *more]
    assert names("capabilities: {sh: {transport: sandboxed_exec, tool: run_shell}}") == ["sh", python, *more]
    server = "servers: {s: {command: [x]}}\n"
    assert names(server + "capabilities: {run_shell: {mode: read}}") == [python, *more], "the name is taken"
    assert set(own_contracts(settings(tmp_path), tools=all_tools())) == set(all_tools())
    assert list(own_contracts(replace(settings(tmp_path), own_tools=False))) == []
    built = own_contracts(settings(tmp_path, "sandbox: {default_timeout_seconds: 4}"))
    assert {contract.timeout_seconds for contract in built.values()} == {4}
    declared = own_contracts(
        settings(
            tmp_path, "sandbox: {default_timeout_seconds: 4}\ncapabilities: {run_shell: {transport: sandboxed_exec}}"
        )
    )
    assert declared["run_shell"].timeout_seconds == 4


def test_where_no_box_can_be_made_a_tool_says_why(tmp_path: Path) -> None:
    contracts = own_contracts(settings(tmp_path))
    given = replace(fake()[0].provision, lives=SessionLifetimes())
    assert all(isinstance(one, Definition) for one in own_definitions(contracts, given, {}).values())
    for refused in own_definitions(contracts, given, {}, missing="landlock: no such thing").values():
        assert isinstance(refused, Refused)
        assert (refused.status, refused.reason_code) == ("unavailable", "no_backend")
        assert "landlock: no such thing" in refused.message


def test_where_there_are_no_sessions_their_tools_say_so(tmp_path: Path) -> None:
    said = own_definitions(own_contracts(settings(tmp_path)), fake()[0].provision, {})
    assert {name for name, one in said.items() if isinstance(one, Definition)} == set(PROGRAMS)
    refused = said["open_session"]
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason_code) == ("unavailable", "no_session")


def test_what_a_declared_contract_hides_the_tools_of_sessions_hide_too(tmp_path: Path) -> None:
    text = "capabilities: {sh: {transport: sandboxed_exec, tool: run_shell, mode: high_risk, redact: ['s3cret']}}"
    contracts = own_contracts(settings(tmp_path, text))
    beside = {name: one for name, one in contracts.items() if name not in ("sh", "execute_python")}
    assert {one.redact for one in beside.values()} == {("s3cret",)}
    assert contracts["execute_python"].redact == ()
    assert own_lists(settings(tmp_path, text)).redact == ("s3cret",)
    assert len({one.digest for one in contracts.values()}) == len(contracts)


async def test_nobody_is_asked_and_there_are_no_servers() -> None:
    assert (await UNATTENDED.ask({"a": {}}), UNATTENDED.capabilities, NoServers().isolation("x")) == ({}, {}, {})
    await UNATTENDED.notify("notifications/x", {})
    assert await NoServers().definitions("x", Principal("a")) == []
    with pytest.raises(Unavailable):
        await NoServers().request(None)  # type: ignore[arg-type]


async def test_the_state_is_the_users_own_unless_said_otherwise(home: Path) -> None:
    async with Runs.open(runs.default_config(), fake()[0]) as own:
        await own.run(RunRequest(code="1"), origin="sdk")
    reader = Reader.open(home / ".local/state/ringfence")
    assert [record.kind for record in reader.records()][-1] == "chain_closed"
    reader.close()
