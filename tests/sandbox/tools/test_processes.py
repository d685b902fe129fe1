"""Commands in the background by tools: started, listened to, typed into, waited for and stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import Attached, Captured
from ringfence.core.errors import Refused
from ringfence.core.model import Contract
from ringfence.core.secret import Secret
from ringfence.core.sessions import ProcessLogs
from ringfence.governance.contract import build
from ringfence.sandbox.sessions.background import _since
from ringfence.sandbox.tools.processes import shown_words
from ringfence.sandbox.tools.screening import OutputScreen
from ringfence.secrets.redaction import TenantRedactor
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


# ── A secret across the border of a page ──────────────────────────────────────────────────────────

SECRET = "correct-horse-battery-staple"
_KNOWN = (Secret("horse", SECRET),)
WHOLE = f"before {SECRET} behind"


def screen() -> OutputScreen:
    made = OutputScreen(TenantRedactor(lambda: _KNOWN), TenantRedactor(lambda: _KNOWN, shaped=False))
    made.patience_seconds = 0
    return made


def paged(chars: int) -> Contract:
    given = {"transport": "sandboxed_exec", "mode": "read", "result": {"max_chars": chars}}
    return build("process_output", given)[0]


@pytest.mark.parametrize("length", [1, 12, 20])
async def test_pages_of_output_show_no_piece_of_a_secret_wherever_they_end(length: int, tmp_path: Path) -> None:
    async with calling(tmp_path, paged(length)) as call:
        call.executor.screens = screen
        session = await call.opened()
        number = await started(call, session, "say", WHOLE)
        await call("wait_process", session=session, process=number)
        for offset in range(len(WHOLE) + 1):
            told = await call.told("process_output", session=session, process=number, stdout_at=offset)
            stop = told["stdout_at"]
            kept = [c for at, c in enumerate(WHOLE) if offset <= at < stop and not 7 <= at < 7 + len(SECRET)]
            assert told["stdout"].replace("[redacted]", "") == "".join(kept)
            assert not 7 < stop < 7 + len(SECRET) or offset == stop, "no page ends inside of it"


async def test_somebody_in_this_process_reads_on_without_a_piece_of_a_secret(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        call.executor.screens = screen
        session = await call.opened()
        number = await started(call, session, "say", WHOLE)
        await call("wait_process", session=session, process=number)
        for tool in ("process_output", "wait_process"):
            heard: list[bytes] = []
            hearing = Attached(tell=lambda stream, piece, heard=heard: heard.append(piece))  # type: ignore[misc]
            await call(tool, hearing, session=session, process=number, stdout_at=12)
            assert b"".join(heard).replace(b"[redacted]", b"") == b" behind", tool


class Growing:
    """A command whose streams are longer each time that somebody looks."""

    def __init__(self, *looks: Captured) -> None:
        self._looks = list(looks)

    async def logs(self, owner: Any, id: str, process: int, stdout_from: int, stderr_from: int) -> ProcessLogs:
        now = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        data, at = _since(now, stdout_from)
        return ProcessLogs(data, b"", at, 0, running=True)


def written(head: str, tail: str = "", dropped: int = 0) -> Captured:
    return Captured(head.encode(), tail.encode(), len(head) + len(tail) + dropped, "")


async def looked(call: Caller, monkeypatch: pytest.MonkeyPatch, at: int, *looks: Captured) -> Any:
    monkeypatch.setattr(call.place.manager, "logs", Growing(*looks).logs)
    return await call.told("process_output", session=await call.opened(), process=1, stdout_at=at)


async def test_the_last_bytes_of_a_command_that_runs_wait_for_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with calling(tmp_path) as call:
        call.executor.screens = screen
        told = await looked(call, monkeypatch, 0, written(f"before {SECRET[:9]}"), written(WHOLE))
        assert (told["stdout"], told["stdout_at"]) == ("before [redacted]", 7 + len(SECRET))
        told = await looked(call, monkeypatch, 0, written("before corr"))
        assert (told["stdout"], told["stdout_at"]) == ("before corr", 11), "nothing follows, so it is shown"
        told = await looked(call, monkeypatch, 11, written(WHOLE))
        assert told["stdout"] == "[redacted] behind", "what began in what was shown"


async def test_beside_dropped_output_as_much_goes_as_could_be_half_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = written("x" * 2000 + SECRET[:14], SECRET[14:] + "y" * 2000, dropped=5000)
    async with calling(tmp_path) as call:
        call.executor.screens = screen
        told = await looked(call, monkeypatch, 0, cut)
        assert set(told["stdout"]) == {"x"} and told["stdout_at"] == 2014
        told = await looked(call, monkeypatch, 2014, cut)
        assert set(told["stdout"]) == {"y"} and told["stdout_at"] == cut.total
        inside = cut.total - 1990  # so near to the gap that what stands before it was dropped
        told = await looked(call, monkeypatch, inside - 20, cut)
        assert set(told["stdout"]) == {"y"}


def test_no_word_of_a_command_is_cut() -> None:
    assert shown_words(("curl", "-H", "token")) == "curl -H token"
    assert shown_words(("curl", "s" * 190, "secret-value")) == f"curl {'s' * 190} …"
    assert shown_words(("x" * 201,)) == "…"
