"""What provably never ran is unavailable, and never an unknown outcome; a kill of ours is told as what it was for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from ringfence.core.box import BoxSpec, Limits, Program, Stream
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.core.model import Status
from ringfence.core.sessions import Cell, Command, StaySpec
from ringfence.sandbox.process import run as running
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box import BoxMember
from ringfence.sandbox.process.live import LiveBox
from ringfence.sandbox.process.zygote_handle import ZygoteHandle
from tests.boxing import need_boxes
from tests.forging import CHANNEL

pytestmark = pytest.mark.anyio
NOTHING = BoxSpec(Program("python", b"pass"))


@pytest.fixture(autouse=True)
def boxes() -> None:
    need_boxes()


def nothing(stream: Stream, data: bytes) -> None:
    """Whoever does not care what is written."""


def failing(problem: Exception) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise problem

    return fail


@pytest.mark.parametrize("place", ["_start", "_configure"])
async def test_a_zygote_that_cannot_be_started_ran_nothing(
    place: str, backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ZygoteHandle, place, failing(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(Unavailable, match="Too many open files"):
            await backend.run(NOTHING)
        with pytest.raises(Unavailable, match="Too many open files"):
            await backend.open(StaySpec())
    assert (await backend.run(NOTHING)).exit_status == 0, "and the next one runs"


async def test_a_program_that_may_not_begin_any_more_when_its_box_is_there_does_not(backend: ProcessBackend) -> None:
    told: list[bytes] = []

    async def tightened() -> None:
        raise Refused(Status.DENIED, "rules_changed", "no")

    with pytest.raises(Refused) as problem:
        await backend.run(BoxSpec(Program("python", b"print(1)")), lambda _, data: told.append(data), tightened)
    assert problem.value.nothing_begun and told == []
    assert (await backend.run(NOTHING)).exit_status == 0


async def test_a_run_that_fails_in_our_hands_after_its_order_may_have_run(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.run(NOTHING)
    monkeypatch.setattr(running.ProgramRun, "_files", failing(ValueError("no number")))
    with pytest.raises(OutcomeUnknown):
        await backend.run(NOTHING)


async def test_an_interpreter_that_cannot_be_started_ran_nothing(box: LiveBox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BoxMember, "order", failing(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(Unavailable):
            await box.interpreter()
        with pytest.raises(Unavailable):
            await box.command(Command(("true",)), nothing)


async def test_a_command_whose_process_ends_before_it_began_ran_nothing(
    box: LiveBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(self: BoxMember, message: dict[str, Any], descriptors: list[int]) -> None:
        """It never gets there."""
        self.kill()

    monkeypatch.setattr(BoxMember, "order", order)
    command = await box.command(Command(("true",)), nothing)
    with pytest.raises(Unavailable, match="before the command had begun"):
        await command.over()


# ── Kills of ours ──

NONSENSE = f"{CHANNEL}channel.send(b'nonsense')\n"


@pytest.mark.parametrize("then", ["while True: pass", "import time; time.sleep(60)", "import os; os._exit(3)"])
async def test_an_interpreter_that_is_killed_for_what_it_said_broke_the_rules_and_died_of_no_signal_of_its_own(
    box: LiveBox, then: str
) -> None:
    interpreter = await box.interpreter()
    cell = Cell(f"{NONSENSE}{then}".encode(), Limits(wall_seconds=30))
    done = await interpreter.run(cell, nothing, lambda _: None)
    assert (done.report.ended, done.report.exit_status, done.report.limit) == ("policy", None, None)
    assert done.broken and not done.alive


async def test_an_interpreter_that_kills_itself_is_told_as_that(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    done = await interpreter.run(Cell(b"import os; os.kill(os.getpid(), 9)"), nothing, lambda _: None)
    assert (done.report.ended, done.report.signal, done.alive) == ("signalled", 9, False)


async def test_an_interpreter_that_ignores_its_limit_is_killed_for_that(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    deaf = b"import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass"
    done = await interpreter.run(Cell(deaf, Limits(wall_seconds=0.2)), nothing, lambda _: None)
    assert (done.report.ended, done.report.limit, done.report.signal) == ("timeout", "wall", 9)
