"""A person's answer is for the call as it was when they were asked; in a session, for this step and no later one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.compose.runs import Runs
from ringfence.core.box import Attached, Mount
from ringfence.core.errors import Refused
from ringfence.core.model import Outcome, Person, ServerSpec
from ringfence.governance import approvals
from ringfence.governance.dispatch import Dispatcher, DispatchTargets
from ringfence.sandbox.tools.executor import Executor
from tests import tooling
from tests.boxing import settings
from tests.faking import ECHO, SHUT_IN, Said, Servers, contract, governed, make_call, rulebook
from tests.sandbox.fake_sessions import FakeBox
from tests.sandbox.tools.calling import calling

pytestmark = pytest.mark.anyio

ASKING = "capabilities: {execute_python: {transport: sandboxed_exec, mode: high_risk}}"


@dataclass(slots=True)
class Asked:
    """One agent, one session, and a person who answers."""

    runs: Runs
    executor: Executor
    session: str = ""

    async def call(self, tool: str, **arguments: object) -> Outcome:
        return await self.runs.call(tool, {"session": self.session, **arguments}, Attached(), origin="sdk")

    async def python(self, code: str = "say x") -> Outcome:
        return await self.call("execute_python", code=code)

    def approve(self, asked: Outcome) -> str:
        assert asked.status == "approval_required" and asked.approval_id is not None, asked
        approvals.answer(self.runs.pipeline._store, asked.approval_id, Person("bob"), approve=True)
        return asked.approval_id


@asynccontextmanager
async def asking(folder: Path, wait: float = 0) -> AsyncIterator[Asked]:
    said = settings(folder, ASKING)
    said = replace(said, gateway=replace(said.gateway, approval_wait_seconds=wait))
    async with calling(folder / "house") as call, Runs.open(said, call.executor) as runs:
        asked = Asked(runs, call.executor)
        opened = await runs.call("open_session", {}, Attached(), origin="sdk")
        asked.session = opened.structured["session"]
        yield asked


async def test_an_answer_is_good_for_the_step_that_it_was_asked_for(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        first = asked.approve(await asked.python())
        ran = await asked.python()
        assert ran.ok and ran.facts["session"]["step"] == 1
        again = await asked.python()
        assert again.status == "approval_required" and again.approval_id != first, "once"


async def test_another_step_in_between_makes_it_void(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        waiting = await asked.python()
        given = asked.approve(waiting)
        assert (await asked.call("run_shell", argv=["say", "x"])).ok
        anew = await asked.python()
        assert anew.status == "approval_required" and anew.approval_id != given
        assert (await asked.call("list_sessions")).structured["sessions"][0]["step"] == 1, "nothing ran"
        asked.approve(anew)
        assert (await asked.python()).ok


async def test_another_file_makes_it_void(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        given = asked.approve(await asked.python())
        assert (await asked.call("write_file", path="a", text="x")).ok
        anew = await asked.python()
        assert anew.status == "approval_required" and anew.approval_id != given
        assert (await asked.call("remove_file", path="a")).ok
        assert (await asked.python()).ok, "everything is as it was"


async def test_what_earlier_steps_left_running_is_shown_and_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asking(tmp_path) as asked:
        given = asked.approve(await asked.python())
        monkeypatch.setattr(FakeBox, "runs_on", lambda box: True)
        anew = await asked.python()
        assert anew.status == "approval_required" and anew.approval_id not in (None, given)
        shown = approvals.find(asked.runs.pipeline._store, anew.approval_id or "").summary
        assert "can change these files at any time" in shown["session"]["runs_on"]


async def test_looking_makes_nothing_void(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        asked.approve(await asked.python())
        for tool in ("list_files", "list_processes", "list_sessions"):
            assert (await asked.call(tool)).ok
        assert (await asked.python()).ok


async def test_an_answer_for_one_session_is_none_for_another(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        given = asked.approve(await asked.python())
        asked.session = (await asked.runs.call("open_session", {}, Attached(), origin="sdk")).structured["session"]
        other = await asked.python()
        assert other.status == "approval_required" and other.approval_id != given


async def test_a_step_while_they_are_asked_has_them_asked_anew(tmp_path: Path) -> None:
    async with asking(tmp_path, wait=600) as asked:
        outcomes: list[Outcome] = []
        store = asked.runs.pipeline._store

        async def run() -> None:
            outcomes.append(await asked.python())

        async def pending() -> list[str]:
            with anyio.fail_after(tooling.PATIENCE):
                while not (found := [each.id for each in store.reader().approvals(("pending",))]):
                    await anyio.sleep(0.01)
            return found

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            (first,) = await pending()
            assert (await asked.call("run_shell", argv=["say", "x"])).ok
            approvals.answer(store, first, Person("bob"), approve=True)
            (second,) = await pending()
            assert second != first and not outcomes
            shown = approvals.find(store, second).summary
            assert shown["session"]["after_step"] == 1
            approvals.answer(store, second, Person("bob"), approve=True)
        assert outcomes[0].ok and outcomes[0].facts["session"]["step"] == 2


async def test_nobody_is_asked_about_a_session_that_is_not_there(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        asked.session = "box_0"
        refused = await asked.python()
        assert (refused.status, refused.reason_code) == ("validation_failure", "unknown_session")
        assert list(asked.runs.pipeline._store.reader().approvals(("pending",))) == []


async def test_a_call_of_a_server_in_a_session_is_bound_to_what_the_session_is_then(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        spec = ServerSpec("desk", command=("x",), placement="session")
        desk = Dispatcher(Servers(), DispatchTargets({"desk": spec}, {}), asked.executor)
        call = make_call(principal=asked.runs._agent, box=asked.session)
        asked.executor.handed_over |= {asked.session}  # it was opened by a program, as all are that this test opens
        before = await desk.state(call, ECHO)
        assert before is not None and await desk.state(call, ECHO) == before
        assert (await asked.call("write_file", path="a", text="x")).ok
        assert await desk.state(call, ECHO) != before
        assert await desk.state(replace(call, box=None), ECHO) is None
        with pytest.raises(Refused) as refused:
            await desk.state(replace(call, box="ses_none"), ECHO)
        assert refused.value.reason_code == "unknown_session"


# ── What else an answer is for ────────────────────────────────────────────────────────────────────


async def test_an_answer_is_for_the_contents_of_a_snapshot_and_not_for_its_name(tmp_path: Path) -> None:
    said = settings(tmp_path, "capabilities: {open_session: {transport: sandboxed_exec, approval: always}}")
    async with calling(tmp_path / "house") as call, Runs.open(said, call.executor) as runs:
        asked = Asked(runs, call.executor, (await call.opened()))
        call.principal = runs._agent
        asked.session = await call.opened()
        kept = [(await call.told("snapshot_session", session=asked.session, name="base"))["snapshot"]]

        async def opening() -> Outcome:
            return await runs.call("open_session", {"snapshot": "base"}, Attached(), origin="sdk")

        first = asked.approve(await opening())
        await call("write_file", session=asked.session, path="evil", text="x")
        kept.append((await call.told("snapshot_session", session=asked.session, name="base"))["snapshot"])
        again = await opening()
        assert again.status == "approval_required" and again.approval_id not in (None, first)
        shown = [approvals.find(runs.pipeline._store, id_ or "").summary for id_ in (first, again.approval_id)]
        assert [each["snapshot"] for each in shown] == kept
        asked.approve(again)
        assert (await opening()).ok
        # And what runs is what was agreed to, whatever the name means by then.
        grant = call.granted("open_session", {"snapshot": "base"}, principal=runs._agent, snapshot=kept[0])
        opened = (await call.executor.run(grant)).result
        assert opened is not None
        found = await call.told("list_files", session=opened["structuredContent"]["session"])
        assert found["entries"] == []


@pytest.mark.parametrize(
    "changed",
    [
        {"command": ("y",)},
        {"mounts": (Mount("/a", "/b", "rw"),)},
        {"placement": "unsafe_host"},
        {"env": {"A": "1"}},
        {"network": "inside"},
    ],
    ids=lambda changed: next(iter(changed)),
)
async def test_an_answer_is_for_the_server_as_it_was_then(changed: dict[str, Any], tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", mode="write", approval="always"),), server=SHUT_IN)
    async with governed(tmp_path, said) as way:
        asked = await way.call()
        approvals.answer(way.store, asked.approval_id or "", Person("bob"), approve=True)
        as_it_was = way.pipeline.rules
        way.pipeline.rules = rulebook(replace(said, server=replace(SHUT_IN, **changed)), way.store)
        anew = await way.call()
        assert anew.status == "approval_required" and anew.approval_id != asked.approval_id
        way.pipeline.rules = as_it_was
        assert (await way.call()).ok, "everything is as it was"
