"""Code and commands in a session: state that stays, what was claimed told apart, what was cut found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import Attached, Limits
from ringfence.core.errors import Refused
from ringfence.core.model import Status
from ringfence.governance.contract import build, built_in
from ringfence.sandbox.tools.executor import Executor
from tests.sandbox.tools.calling import Caller, calling, words

pytestmark = pytest.mark.anyio


async def test_a_step_builds_on_the_last_and_says_which_it_was(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("execute_python", session=session, code="set x 41")
        answer = await call("execute_python", session=session, code="get x\nsay hello")
        assert answer.result is not None and answer.within is not None and answer.ran is not None
        told = answer.result["structuredContent"]
        assert (told["session"], told["step"], told["context"], told["state"]) == (session, 2, "default", "running")
        assert (told["stdout"], told["interpreter_alive"]) == ("hello", True)
        assert told["claimed"] == {"results": [{"data": {"text/plain": "41"}, "main": True}], "error": None}
        assert [block["text"] for block in answer.result["content"]] == ["hello", "41"]
        assert (answer.within.session, answer.within.step, answer.within.context) == (session, 2, "default")
        assert answer.within.report is not None and answer.within.report.cell.report is answer.ran.report


async def test_contexts_have_variables_of_their_own(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("execute_python", session=session, code="set x 1")
        told = await call.told("execute_python", session=session, code="get x", context="other")
        assert (told["claimed"]["results"][0]["data"], told["context"]) == ({"text/plain": "nothing"}, "other")


async def test_an_interpreter_that_dies_is_told_and_the_next_call_has_a_fresh_one(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        died = await call("execute_python", session=session, code="die")
        assert (died.status, died.reason_code) == (Status.FAILED, "signalled")
        assert died.result is not None
        assert died.result["structuredContent"]["interpreter_alive"] is False
        assert died.result["isError"] is True
        assert "the interpreter is gone, and its variables with it" in words(died)
        next_ = await call.told("execute_python", session=session, code="get x")
        assert (next_["interpreter_alive"], next_["fresh_interpreter"]) == (True, True)
        assert (await call.told("execute_python", session=session, code="get x"))["fresh_interpreter"] is False


async def test_a_step_has_the_time_of_its_contract_and_keeps_its_state(tmp_path: Path) -> None:
    quick = built_in("execute_python", 0.05)
    async with calling(tmp_path, quick) as call:
        session = await call.opened()
        late = await call("execute_python", session=session, code="set x 1\nsleep 5")
        assert (late.status, late.reason_code) == (Status.TIMEOUT, "timeout")
        assert late.ran is not None and late.ran.limits.wall_seconds == 0.05
        assert (await call.told("execute_python", session=session, code="get x"))["claimed"]["results"][0]["data"] == {
            "text/plain": "1"
        }


async def test_what_is_cut_lies_in_the_session(tmp_path: Path) -> None:
    small = build(
        "execute_python", {"transport": "sandboxed_exec", "mode": "high_risk", "result": {"max_bytes": 6000}}
    )[0]
    async with calling(tmp_path, small) as call:
        session = await call.opened()
        answer = await call("execute_python", session=session, code="say " + "x" * 5000)
        assert answer.result is not None
        told = answer.result["structuredContent"]
        assert "bytes left out" in told["stdout"]
        path = told["whole"]["stdout"]
        assert f"all of stdout, 5000 bytes, is in {path}" in words(answer)
        read = await call.told("read_file", session=session, path=path)
        assert read["text"] == "x" * 5000


async def test_what_a_model_is_not_given_to_read_lies_in_the_session(tmp_path: Path) -> None:
    given = {"transport": "sandboxed_exec", "mode": "high_risk", "result": {"max_chars": 1000}}
    async with calling(tmp_path, build("execute_python", given)[0]) as call:
        session = await call.opened()
        answer = await call("execute_python", session=session, code="say " + "x" * 5000)
        assert answer.result is not None
        told = answer.result["structuredContent"]
        assert told["truncated"] is True
        assert f"all of stdout, 5000 bytes, is in {told['whole']['stdout']}" in words(answer)
        read = await call.told("read_file", session=session, path=told["whole"]["stdout"])
        assert (read["text"], read["next_offset"]) == ("x" * 5000, None), "the contract of another tool"
        short = await call.told("execute_python", session=session, code="say hello")
        assert "truncated" not in short and "whole" not in short


async def test_somebody_in_this_process_hears_and_sees_as_it_comes_and_has_all_of_it(tmp_path: Path) -> None:
    heard: list[Any] = []
    attached = Attached(tell=lambda stream, data: heard.append((stream, data)), shown=heard.append)
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("execute_python", attached, session=session, code="set x 1\nsay hello\nget x")
        assert ("stdout", b"hello") in heard
        assert [each.data for each in heard if not isinstance(each, tuple)] == [{"text/plain": "1"}]
        heard.clear()
        redacting = build("execute_python", {"transport": "sandboxed_exec", "redact": ["hello"], "approval": "none"})[0]
        call.contracts["execute_python"] = redacting
        await call("execute_python", attached, session=session, code="say hello\nget x")
        assert heard == [], "what a contract has something removed from, nobody hears"


async def test_a_step_that_was_agreed_to_runs_only_where_nothing_came_between(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        given = {"session": session, "code": "say x"}
        before = call.granted("execute_python", given, after_step=0)
        stale = call.granted("execute_python", given, after_step=0)
        assert (await call.executor.run(before)).status is Status.SUCCESS
        with pytest.raises(Refused) as refused:
            await call.executor.run(stale)
        assert (refused.value.status, refused.value.reason_code) == (Status.VALIDATION_FAILURE, "session_changed")
        assert session in refused.value.message
        shell = call.granted("run_shell", {"session": session, "command": "x"}, after_step=0)
        with pytest.raises(Refused):
            await call.executor.run(shell)


async def test_a_contract_that_wants_a_fresh_layout_is_not_served_by_a_session_without(tmp_path: Path) -> None:
    fresh = build(
        "execute_python",
        {"transport": "sandboxed_exec", "mode": "high_risk", "approval": "none", "memory_layout": "fresh"},
    )[0]
    async with calling(tmp_path, fresh) as call:
        session = await call.opened()
        with pytest.raises(Refused) as refused:
            await call("execute_python", session=session, code="say x")
        assert refused.value.reason_code == "session_layout"


@pytest.mark.parametrize(
    "more", [{"inputs": []}, {"output": "/tmp"}, {"template": "data"}, {"memory_layout": "fresh"}, {"trees": []}]
)
async def test_what_is_the_boxs_is_no_steps(more: Any, tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        with pytest.raises(Refused) as refused:
            await call("execute_python", Attached(), session=session, code="say x", **more)
        assert refused.value.reason_code == "bad_arguments"


async def test_a_cancelled_step_ends_and_the_session_goes_on(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        running = asyncio.ensure_future(call("execute_python", session=session, code="sleep 60"))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await call.told("execute_python", session=session, code="say x"))["stdout"] == "x"


# ── somebody at the keys ──


async def typed(call: Caller, session: str, *keys: bytes | tuple[int, int]) -> tuple[Any, bytes]:
    heard: list[bytes] = []

    async def typing() -> AsyncIterator[bytes | tuple[int, int]]:
        for key in keys:
            yield key

    attached = Attached(tell=lambda stream, data: heard.append(data), keys=typing())
    answer = await call("run_shell", attached, session=session, argv=["cat"], stdin="stream", pty=[80, 24])
    return answer, b"".join(heard)


async def test_a_command_is_typed_into_while_it_runs(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        answer, heard = await typed(call, session, b"hello ", (100, 40), b"you")
        assert (answer.status, heard) == (Status.SUCCESS, b"hello you")
        assert answer.ran is not None and answer.within is not None and answer.within.step == 1


async def test_without_anybody_who_keeps_sessions_there_are_none(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        lonely = Executor(call.executor.backend, replace(call.executor.provision, lives=None))
        assert await lonely.state_of(call.granted("execute_python", {"code": "1", "session": session}).call) is None
        state = await call.executor.state_of(call.granted("execute_python", {"code": "1", "session": session}).call)
        assert state is not None and state[0] == 0 and len(state[1]) >= 64
        assert await call.executor.state_of(call.granted("execute_python", {"code": "1"}).call) is None
        assert call.executor.provision.limits == Limits()
