"""Labels of what outlives a call in boxes: volumes, artifacts, snapshots and forks, with real boxes and a real keeper.

An agent's own memory of labels ends at once here. So what a call finds is what sticks to where it reads.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.runs import Runs
from ringfence.core.box import MIB, Attached
from ringfence.core.model import Outcome
from tests import boxing, tooling

pytestmark = pytest.mark.anyio

UNLABELLED = """
sandbox: {default_timeout_seconds: 60, max_memory_mb: 128, session_lifetime_seconds: 3600}
policy: {label_seconds: 1.0e-6}
"""
CONFIG = f"""{UNLABELLED}
capabilities:
  execute_python: {{transport: sandboxed_exec, mode: high_risk, approval: none}}
  payroll: {{transport: sandboxed_exec, tool: execute_python, mode: high_risk, approval: none,
            labels: [private, payroll]}}
"""
BOTH = ["payroll", "private"]


@pytest.fixture(autouse=True)
def _boxes() -> None:
    boxing.need_boxes()


class Agent:
    """One agent's calls by the gateway that runs now."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def outcome(self, tool: str, **arguments: Any) -> Outcome:
        return await self._runs.call(tool, arguments, Attached(), origin="sdk")

    async def __call__(self, tool: str, **arguments: Any) -> Outcome:
        outcome = await self.outcome(tool, **arguments)
        assert outcome.ok, outcome
        return outcome

    async def opened(self, **arguments: Any) -> str:
        return str((await self("open_session", **arguments)).structured["session"])

    async def with_volume(self, name: str, mode: str = "rw") -> str:
        return await self.opened(volumes=[{"name": name, "at": "/workspace/books", "mode": mode}])

    async def labels(self, session: str) -> Any:
        """What a call has that does no more than read in this session."""
        return labels_of(await self("list_processes", session=session))


def labels_of(outcome: Outcome) -> Any:
    return outcome.facts.get("labels", {}).get("result", [])


@asynccontextmanager
async def gateway(folder: Path, *more: str, agent: str = "local") -> AsyncIterator[Agent]:
    """A gateway over the state in `folder`, of which nothing but that state is left afterwards."""
    async with Runs.open(boxing.settings(folder, CONFIG + "\n".join(more))) as runs:
        runs._agent = replace(runs._agent, agent=agent)
        yield Agent(runs)


def end_keeper(folder: Path) -> None:
    process = int(json.loads((folder / "state/keeper/address").read_text())["process"])
    os.kill(process, signal.SIGTERM)
    tooling.wait_until_gone(process)


async def test_who_mounts_a_volume_has_the_labels_of_what_was_written_to_it(tmp_path: Path) -> None:
    async with gateway(tmp_path) as call:
        for name in ("books", "clean"):
            await call("create_volume", name=name, max_bytes=8 * MIB)
        writer = await call.with_volume("books")
        assert await call.labels(writer) == []
        await call("payroll", session=writer, code="open('books/x', 'w').write('4711')")
        await call("close_session", session=writer)
        await call("close_session", session=await call.with_volume("clean"))
    end_keeper(tmp_path)
    async with gateway(tmp_path) as call:
        opened = await call("open_session", volumes=[{"name": "books", "at": "/workspace/books", "mode": "ro"}])
        assert labels_of(opened) == BOTH
        reader = opened.structured["session"]
        read = await call("execute_python", session=reader, code="print(open('books/x').read())")
        assert (read.structured["stdout"], labels_of(read)) == ("4711\n", BOTH)
        # Neither a session without it nor one with another volume is concerned.
        assert await call.labels(await call.opened()) == []
        assert await call.labels(await call.with_volume("clean")) == []
    async with gateway(tmp_path, agent="other") as other:
        await other("create_volume", name="books", max_bytes=8 * MIB)
        assert await other.labels(await other.with_volume("books")) == []


async def test_a_volume_has_its_labels_by_whichever_name_it_is_mounted(tmp_path: Path) -> None:
    async with gateway(tmp_path) as call:
        await call("create_volume", name="books", max_bytes=8 * MIB)
        writer = await call.with_volume("local/books")
        await call("payroll", session=writer, code="open('books/x', 'w').write('4711')")
        await call("close_session", session=writer)
        assert await call.labels(await call.with_volume("books", "ro")) == BOTH


async def test_what_a_session_left_has_its_labels_once_it_is_over(tmp_path: Path) -> None:
    leave = "import os; os.makedirs('output', exist_ok=True); open('output/x', 'w').write('4711')"
    async with gateway(tmp_path) as call:
        left, clean = await call.opened(), await call.opened()
        await call("payroll", session=left, code=leave)
        await call("execute_python", session=clean, code=leave)
        for session in (left, clean):
            await call("close_session", session=session)
    end_keeper(tmp_path)
    async with gateway(tmp_path) as call:
        assert labels_of(await call("read_file", session=clean, path="output/x")) == []
        assert labels_of(await call("read_file", session=left, path="output/x")) == BOTH
        # A copy of it is labelled as it is, and what lies beside the copy with it.
        target, beside = await call.opened(), await call.opened()
        copied = await call("copy_file", session=left, path="output/x", to_session=target, to_path="y")
        assert labels_of(copied) == BOTH
        assert await call.labels(target) == BOTH
        assert await call.labels(beside) == []
        await call("copy_file", session=clean, path="output/x", to_session=beside, to_path="y")
        assert await call.labels(beside) == []
    async with gateway(tmp_path, agent="other") as other:
        taken = await other.outcome("read_file", session=left, path="output/x")
        assert (taken.reason_code, labels_of(taken)) == ("unknown_session", [])
        assert await other.labels(await other.opened()) == []


async def test_snapshots_and_forks_have_the_labels_of_their_session(tmp_path: Path) -> None:
    async with gateway(tmp_path) as call:
        session = await call.opened()
        await call("snapshot_session", session=session, name="before")
        await call("payroll", session=session, code="open('x', 'w').write('4711')")
        await call("snapshot_session", session=session, name="after")
        (fork,) = (await call("fork_session", session=session, count=1)).structured["sessions"]
    async with gateway(tmp_path) as call:
        assert await call.labels(fork["session"]) == BOTH
        (twice,) = (await call("fork_session", session=fork["session"], count=1)).structured["sessions"]
        assert await call.labels(twice["session"]) == BOTH
    end_keeper(tmp_path)
    async with gateway(tmp_path) as call:
        assert await call.labels(await call.opened(snapshot="before")) == []
        assert await call.labels(await call.opened(snapshot="after")) == BOTH


async def test_a_fork_of_a_fork_has_the_labels_that_its_volume_has_by_then(tmp_path: Path) -> None:
    async with gateway(tmp_path) as call:
        await call("create_volume", name="books", max_bytes=8 * MIB)
        writer = await call.with_volume("books")
        (fork,) = (await call("fork_session", session=writer, count=1)).structured["sessions"]
        await call("payroll", session=writer, code="open('books/x', 'w').write('4711')")
        await call("pause_session", session=writer)  # with it the volume is saved
        (twice,) = (await call("fork_session", session=fork["session"], count=1)).structured["sessions"]
        read = await call("execute_python", session=twice["session"], code="print(open('books/x').read())")
        assert (read.structured["stdout"], labels_of(read)) == ("4711\n", BOTH)


async def test_what_a_contract_takes_out_of_results_takes_away_no_label(tmp_path: Path) -> None:
    cut = "transport: sandboxed_exec, mode: write, result: {fields: [bytes]}"
    hidden = (
        "  open_session: {transport: sandboxed_exec, mode: write, redact: ['[0-9]{16}']}",
        f"  snapshot_session: {{{cut}}}",
        f"  fork_session: {{{cut}}}",
    )
    async with gateway(tmp_path, *hidden) as call:
        await call("create_volume", name="books", max_bytes=8 * MIB)
        writer = await call.with_volume("books")
        await call("payroll", session=writer, code="open('books/x', 'w').write('4711')")
        kept = await call("snapshot_session", session=writer, name="kept")
        assert list(kept.structured) == ["bytes"]
        await call("fork_session", session=writer, count=1)
        every = (await call("list_sessions")).structured["sessions"]
        (fork,) = {each["session"] for each in every} - {writer}
        assert await call.labels(fork) == BOTH
        assert await call.labels(await call.opened(snapshot="kept")) == BOTH
        await call("close_session", session=writer)
        assert await call.labels(await call.with_volume("books", "ro")) == BOTH


async def test_a_program_whose_configuration_has_no_labels_takes_none_away(tmp_path: Path) -> None:
    async with gateway(tmp_path) as call:
        session = await call.opened()
        await call("payroll", session=session, code="open('x', 'w').write('4711')")
    async with Runs.open(boxing.settings(tmp_path, UNLABELLED)) as runs:
        call = Agent(runs)
        await call("snapshot_session", session=session, name="kept")
        (fork,) = (await call("fork_session", session=session, count=1)).structured["sessions"]
        clean = await call.opened()
        assert await call.labels(clean) == []
    async with gateway(tmp_path) as call:
        assert await call.labels(fork["session"]) == BOTH
        assert await call.labels(await call.opened(snapshot="kept")) == BOTH
        assert await call.labels(clean) == []
