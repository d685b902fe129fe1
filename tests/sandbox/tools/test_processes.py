"""Commands in the background by tools: started, listened to, typed into, waited for and stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import Attached
from ringfence.core.errors import Refused
from ringfence.governance.contract import build
from tests.sandbox.tools.calling import Caller, calling, named, words

pytestmark = pytest.mark.anyio

WIDE = Attached()


async def started(call: Caller, session: str, *argv: str) -> int:
    told = await call.told("run_shell", WIDE, session=session, argv=list(argv), background=True)
    return int(told["process"])


async def test_an_agent_starts_one_and_is_told_how_to_go_on(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        answer = await call("run_shell", session=session, command="make", background=True)
        assert answer.result is not None
        told = answer.result["structuredContent"]
        assert (told["process"], told["running"], told["ended"], told["exit_code"]) == (1, True, "running", None)
        assert f"process_output(session='{session}', process=1)" in words(answer)
        assert answer.ran is None and answer.within is not None


async def test_output_is_told_from_where_was_asked_on(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        number = await started(call, session, "say", "hello")
        await call("wait_process", session=session, process=number)
        told = await call.told("process_output", session=session, process=number)
        assert (told["stdout"], told["stdout_at"], told["running"]) == ("hello", 5, False)
        rest = await call.told("process_output", session=session, process=number, stdout_at=3)
        assert rest["stdout"] == "lo"
        heard: list[Any] = []
        tell = Attached(tell=lambda stream, data: heard.append((stream, data)))
        poured = await call.told("process_output", tell, session=session, process=number)
        assert ("stdout", b"hello") in heard and "stdout" not in poured


async def test_more_output_than_fits_comes_with_the_next_call(tmp_path: Path) -> None:
    small = build("process_output", {"transport": "sandboxed_exec", "mode": "read", "result": {"max_bytes": 8000}})[0]
    async with calling(tmp_path, small) as call:
        session = await call.opened()
        number = await started(call, session, "say", "x" * 1000)
        await call("wait_process", session=session, process=number)
        got, at = "", 0
        for _ in range(20):
            answer = await call("process_output", session=session, process=number, stdout_at=at)
            assert answer.result is not None
            told = answer.result["structuredContent"]
            got, at = got + told["stdout"], told["stdout_at"]
            if len(got) == 1000:
                break
            assert "bytes more" in words(answer)
        assert got == "x" * 1000


async def test_waiting_ends_with_the_command_or_the_callers_time(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        number = await started(call, session, "sleep", "30")
        told = await call.told("wait_process", session=session, process=number, seconds=0.05)
        assert (told["running"], told["ended"]) == (True, None)
        told = await call.told("stop_process", session=session, process=number)
        assert (told["running"], told["ended"], told["signal"]) == (False, "signalled", 9)
        answer = await call("wait_process", session=session, process=number)
        assert answer.ran is not None and answer.ran.report.ended == "signalled"


async def test_somebody_in_this_process_hears_it_as_it_comes(tmp_path: Path) -> None:
    heard: list[bytes] = []
    async with calling(tmp_path) as call:
        session = await call.opened()
        number = await started(call, session, "cat")
        data = b"typed"
        await call("send_input", Attached(data=data), session=session, process=number, data=named(data))
        await call("send_input", session=session, process=number, eof=True)
        told = await call.told(
            "wait_process", Attached(tell=lambda stream, piece: heard.append(piece)), session=session, process=number
        )
        assert (told["running"], told["exit_code"], b"".join(heard)) == (False, 0, b"typed")


async def test_an_agent_types(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        number = await started(call, session, "cat")
        assert (await call.told("send_input", session=session, process=number, text="hé", eof=True))["bytes"] == 3
        await call("wait_process", session=session, process=number)
        assert (await call.told("process_output", session=session, process=number))["stdout"] == "hé"
        listed = await call("list_processes", session=session)
        assert "process 1 is over (exited with status 0): cat" in words(listed)


@pytest.mark.parametrize(
    ("tool", "more", "code"),
    [
        ("send_input", {"process": 1}, "bad_arguments"),
        ("send_input", {"process": 9, "text": "x"}, "unknown_process"),
        ("process_output", {"process": 9}, "unknown_process"),
        ("wait_process", {"process": 9}, "unknown_process"),
        ("stop_process", {"process": 9, "signal": "TERM"}, "unknown_process"),
    ],
)
async def test_what_is_not_there_is_refused(tool: str, more: Any, code: str, tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await started(call, session, "sleep", "30")
        with pytest.raises(Refused) as refused:
            await call(tool, session=session, **more)
        assert refused.value.reason_code == code
