"""One session: its steps, pauses and timers, its end, its files. The boxes are fakes."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import Limits
from ringfence.core.errors import Refused
from ringfence.core.sessions import CellRequest, CommandRequest
from ringfence.sandbox.files.paths import refusal
from ringfence.sandbox.sessions.contexts import MAX_CONTEXTS, MAX_WAITING
from tests import tooling
from tests.sandbox.fake_sessions import ME, TICK, FakeSessions, fake_sessions, pieces, refused, unheard, unseen, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[FakeSessions]:
    async with fake_sessions(tmp_path / "state") as made:
        yield made


# ── Steps ──


async def test_steps_are_numbered_and_keep_their_state(here: FakeSessions) -> None:
    box = await here.create()
    first = await here.cell(box, "set x 1")
    assert (first.session, first.step, first.context, first.fresh, first.state) == (box, 1, "default", True, "running")
    assert await here.got(box, "x") == "1"
    command = await here.command(box, "say", "hello")
    assert (command.step, command.context, command.cell.report.stdout.head) == (3, None, b"hello")
    info = await here.manager.info(ME, box)
    assert (info.step, info.contexts, info.state, info.memory_bytes) == (3, ("default",), "running", 1000)


async def test_contexts_have_variables_of_their_own(here: FakeSessions) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    await here.cell(box, "set x 2", context="other")
    assert (await here.got(box, "x"), await here.got(box, "x", context="other")) == ("1", "2")
    assert (await here.manager.info(ME, box)).contexts == ("default", "other")
    assert await refused(here.cell(box, "set x 1", context="../x")) == "bad_context"
    for number in range(MAX_CONTEXTS - 2):
        await here.cell(box, "set x 1", context=f"c{number}")
    assert await refused(here.cell(box, "set x 1", context="onemore")) == "too_many"


async def test_cells_of_a_context_come_one_after_another(here: FakeSessions) -> None:
    box = await here.create()
    order: list[int] = []

    async def one(number: int) -> None:
        report = await here.cell(box, f"sleep 0.01\nset last {number}")
        order.append(number)
        assert report.step == number + 1

    await asyncio.gather(*(one(number) for number in range(8)))
    assert order == list(range(8))
    assert await here.got(box, "last") == "7"


async def test_contexts_do_not_wait_for_each_other(here: FakeSessions) -> None:
    box = await here.create()
    long = asyncio.create_task(here.cell(box, "sleep inf"))
    await until(lambda: here.backend.boxes[0].begun)
    await here.cell(box, "set x 1", context="other")
    assert not long.done()
    await here.manager.end(ME, box)
    assert (await long).cell.report.ended == "cancelled"


async def test_too_many_cells_in_line_are_refused(here: FakeSessions) -> None:
    box = await here.create()
    waiting = [asyncio.create_task(here.cell(box, "sleep inf")) for _ in range(MAX_WAITING + 1)]
    contexts = here.manager.get(ME, box).contexts._contexts
    await until(lambda: "default" in contexts and contexts["default"].turn._inside == MAX_WAITING + 1)
    assert await refused(here.cell(box, "set x 1")) == "busy"
    await here.cell(box, "set x 1", context="other")
    await here.manager.end(ME, box)
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [end.reason_code for end in ends if isinstance(end, Refused)] == ["session_stopped"] * MAX_WAITING


async def test_a_step_runs_only_after_the_step_that_it_was_meant_for(here: FakeSessions) -> None:
    box = await here.create()
    await here.cell(box, "set x 1", after_step=0)
    assert await refused(here.cell(box, "set x 2", after_step=0)) == "session_changed"
    assert await refused(here.manager.command(ME, box, CommandRequest(("say",), after_step=0), unheard)) == (
        "session_changed"
    )
    # What is in line before it counts: the turn decides, not the moment of asking.
    first, second = here.cell(box, "sleep 0.02", after_step=1), here.cell(box, "set x 3", after_step=1)
    ends = await asyncio.gather(first, second, return_exceptions=True)
    assert [isinstance(end, Refused) for end in ends] == [False, True]
    assert await here.got(box, "x") == "1"


async def test_an_interrupt_keeps_the_state(here: FakeSessions) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    assert await here.manager.interrupt(ME, box) is False
    running = asyncio.create_task(here.cell(box, "sleep inf"))
    while not await here.manager.interrupt(ME, box):
        await asyncio.sleep(TICK)
    report = (await running).cell
    assert report.error is not None and report.error.name == "KeyboardInterrupt" and report.alive
    assert await here.got(box, "x") == "1"
    assert await here.manager.interrupt(ME, box, "never") is False


async def test_a_dead_interpreter_is_told_and_replaced(here: FakeSessions) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    died = await here.cell(box, "die")
    assert (died.cell.alive, died.cell.report.ended, died.state) == (False, "signalled", "running")
    again = await here.cell(box, "get x")
    assert (again.cell.alive, again.fresh, again.cell.results[0].data["text/plain"]) == (True, True, "nothing")


async def test_a_run_timeout_stops_the_work_and_not_the_session(here: FakeSessions) -> None:
    box = await here.create()
    report = await here.cell(box, "sleep inf", limits=Limits(wall_seconds=0.05))
    assert (report.cell.report.ended, report.state) == ("timeout", "running")


async def test_source_that_is_no_text_is_refused(here: FakeSessions) -> None:
    box = await here.create()
    assert await refused(here.cell(box, "set x \ud800")) == "bad_source"
    assert await refused(here.command(box)) == "bad_command"
    assert (await here.manager.info(ME, box)).step == 0


async def test_a_command_whose_caller_is_gone_is_killed(here: FakeSessions) -> None:
    box = await here.create()
    running = asyncio.create_task(here.command(box, "sleep", "inf"))
    await until(lambda: here.backend.boxes[0].begun)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await here.command(box, "say", "on")).step == 2


# ── The end ──


async def test_a_session_ends_once(here: FakeSessions) -> None:
    box = await here.create()
    ends = await asyncio.gather(*(here.manager.end(ME, box) for _ in range(5)))
    assert len({(info.ended_at, info.why) for info in ends}) == 1
    assert await here.manager.end(ME, box) == await here.manager.info(ME, box)
    assert here.journal().count('"ended"') == 1
    assert await refused(here.manager.pause(ME, box)) == "session_stopped"
    assert await refused(here.manager.resume(ME, box)) == "session_stopped"
    assert await refused(here.manager.extend(ME, box, 1.0)) == "session_stopped"


async def test_the_death_of_a_box_is_noticed(here: FakeSessions) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep inf"))
    await until(lambda: here.backend.boxes[0].begun)
    here.backend.boxes[0].die("the zygote died")
    report = await running
    assert (report.cell.report.ended, report.cell.alive) == ("infra", False)
    await until(lambda: "the zygote died" in here.journal())
    info = await here.manager.info(ME, box)
    assert (info.state, info.why) == ("stopped", "box_died")


async def test_the_end_comes_before_what_waits_for_a_turn(here: FakeSessions) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep inf"))
    waiting = asyncio.create_task(here.manager.run(ME, box, CellRequest("set x 1"), unheard, unseen))
    await until(lambda: here.backend.boxes[0].begun)
    await here.manager.end(ME, box)
    assert (await running).state == "stopped"
    assert await refused(waiting) == "session_stopped"


@pytest.mark.parametrize("what", ["a cell", "a command", "a command in the background"])
async def test_what_waited_for_a_snapshot_is_looked_at_again_before_it_begins(here: FakeSessions, what: str) -> None:
    box = await here.create()
    session, asked = here.manager._sessions[box], list[bool]()
    allowed = True

    async def recheck() -> None:
        asked.append(allowed)
        if not allowed:
            raise refusal("rules_changed", "not any more")

    begins: dict[str, Coroutine[Any, Any, object]] = {
        "a cell": session.run(CellRequest("set x 1"), unheard, unseen, recheck),
        "a command": session.command(CommandRequest(("say", "x")), unheard, recheck),
        "a command in the background": session.start(CommandRequest(("say", "x")), recheck),
    }
    chosen = begins.pop(what)
    for other in begins.values():
        other.close()
    async with session._lock.exclusive():
        work = asyncio.create_task(chosen)
        await until(lambda: asked)
        allowed = False
    assert await refused(work) == "rules_changed"
    assert asked == [True, False] and not here.backend.boxes[0].begun


# ── Pausing ──


async def test_a_paused_session_stands_still_and_goes_on_where_it_was(here: FakeSessions) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep inf\nset x 1"))
    await until(lambda: here.backend.boxes[0].begun)
    info = await here.manager.pause(ME, box)
    assert (info.state, info.expires_at is None) == ("paused", False)
    here.backend.boxes[0].enough.set()
    await asyncio.sleep(0.3)
    assert not running.done()
    assert (await here.manager.pause(ME, box)).state == "paused"
    assert (await here.manager.resume(ME, box)).expires_at is not None
    assert (await running).cell.report.ended == "exited"
    assert await here.got(box, "x") == "1"
    assert (await here.manager.resume(ME, box)).state == "running"


async def test_what_must_run_resumes_a_paused_session_and_what_looks_does_not(here: FakeSessions) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    process = await here.start(box, "say", "hello")
    await here.manager.wait(ME, box, process, None)
    await here.manager.write(ME, box, "a", b"text")
    await here.manager.pause(ME, box)
    assert await here.manager.read(ME, box, "a", 0, None) == b"text"
    assert (await here.manager.stat(ME, box, "a")).bytes == 4
    assert "/workspace/a" in {entry.path for entry in await here.manager.entries(ME, box, "/workspace", 1)}
    assert (await here.manager.logs(ME, box, process, 0, 0)).stdout == b"hello"
    assert len(await here.manager.processes(ME, box)) == 1
    assert (await here.manager.state_of(ME, box))[0] == 2
    assert (await here.manager.wait(ME, box, process, 0)).running is False
    assert await here.manager.interrupt(ME, box) is False
    assert [piece async for piece in here.manager.pack(ME, box, ".")]
    await here.manager.snapshot(ME, box)
    assert await here.state(box) == "paused"
    for use in (
        lambda: here.cell(box, "get x"),
        lambda: here.command(box, "say"),
        lambda: here.start(box, "say"),
        lambda: here.manager.write(ME, box, "b", b""),
        lambda: here.manager.copy(ME, box, "a", box, "c"),
        lambda: here.manager.remove(ME, box, "b"),
        lambda: here.manager.rename(ME, box, "a", "d"),
        lambda: here.manager.make_dir(ME, box, "e"),
    ):
        await here.manager.pause(ME, box)
        await use()
        assert await here.state(box) == "running"
    assert await here.got(box, "x") == "1"


async def test_a_session_that_is_not_to_resume_by_itself_refuses_until_it_is_resumed(here: FakeSessions) -> None:
    box = await here.create(auto_resume=False)
    process = await here.start(box, "cat", stdin=None)
    await here.manager.pause(ME, box)
    assert await refused(here.cell(box, "set x 1")) == "session_paused"
    assert await refused(here.command(box, "say")) == "session_paused"
    assert await refused(here.manager.write(ME, box, "a", b"")) == "session_paused"
    assert await refused(here.manager.send(ME, box, process, b"")) == "session_paused"
    assert await refused(here.manager.signal(ME, box, process, 9)) == "session_paused"
    assert await refused(here.manager.unpack(ME, box, ".", pieces())) == "session_paused"
    await here.manager.resume(ME, box)
    await here.cell(box, "set x 1")


async def test_fifty_pauses_lose_nothing(here: FakeSessions) -> None:
    box = await here.create()
    for number in range(50):
        await here.cell(box, f"set v{number} {number}")
        await here.manager.write(ME, box, f"f{number}", str(number).encode())
        await here.manager.pause(ME, box)
    for number in range(50):
        assert await here.got(box, f"v{number}") == str(number)
        assert await here.manager.read(ME, box, f"f{number}", 0, None) == str(number).encode()
    await here.manager.end(ME, box)
    assert (here.journal().count('"paused"'), here.journal().count('"resumed"')) == (50, 50)


async def test_two_who_pause_at_once_pause_once(here: FakeSessions) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    pauses = [here.manager.pause(ME, box) for _ in range(5)]
    assert {info.state for info in await asyncio.gather(*pauses)} == {"paused"}
    await here.manager.resume(ME, box)
    await until(lambda: '"resumed"' in here.journal())
    assert here.journal().count('"paused"') == 1
    assert await here.state(box) == "running"


async def test_a_caller_who_gives_up_leaves_no_half_pause(here: FakeSessions) -> None:
    box = await here.create()
    await here.cell(box, "set x 1")
    pausing = asyncio.create_task(here.manager.pause(ME, box))
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.gather(pausing, return_exceptions=True)
    await until(lambda: here.backend.boxes[0].paused)
    assert await here.got(box, "x") == "1"


# ── Timers ──


async def test_an_idle_session_is_paused_and_a_busy_one_is_not(here: FakeSessions) -> None:
    idle = await here.create(idle_seconds=0.1)
    busy = await here.create(idle_seconds=0.1)
    working = await here.create(idle_seconds=0.1)
    never = await here.create(idle_seconds=None)
    process = await here.start(working, "sleep", "inf")
    cell = asyncio.create_task(here.cell(busy, "sleep inf"))
    await here.becomes(idle, "paused")
    await asyncio.sleep(0.3)
    # The others may have been idle at first; from now on they are at work.
    for box in (busy, working):
        await here.manager.resume(ME, box)
    await asyncio.sleep(0.3)
    assert [await here.state(box) for box in (idle, busy, working, never)] == [
        "paused",
        "running",
        "running",
        "running",
    ]
    for each in here.backend.boxes:
        each.enough.set()
    await cell
    await here.manager.wait(ME, working, process, None)
    for box in (busy, working):
        await here.becomes(box, "paused")
    assert await here.state(never) == "running"
    resumed = here.journal().count('"resumed"')
    await here.cell(idle, "set x 1")
    await until(lambda: here.journal().count('"resumed"') > resumed)
    await here.becomes(idle, "paused")


async def test_use_puts_the_idle_clock_back(here: FakeSessions) -> None:
    box = await here.create(idle_seconds=60)
    session = here.manager.get(ME, box)
    for use in (True, True, False):
        session.in_use.last -= 60  # as if nobody had come for so long
        if use:
            await here.manager.entries(ME, box, ".", 1)
        assert session._idle is not None
        session._idle.cancel()
        session._check_idle()  # as when its time is up
        assert (session._idle is not None) == use, "it is looked at again later, or paused"
    await here.becomes(box, "paused")


async def test_a_session_ends_when_its_lifetime_is_over(here: FakeSessions) -> None:
    for seconds in tooling.LONGER:  # one that was over before the cell began has refused it
        box = await here.create(lifetime_seconds=seconds, idle_seconds=None)
        running = asyncio.create_task(here.cell(box, "sleep inf"))
        await asyncio.wait({running})
        if running.exception() is None:
            break
    assert (await running).cell.report.ended == "cancelled"
    await here.becomes(box, "stopped")
    info = await here.manager.info(ME, box)
    assert (info.state, info.why, info.expires_at) == ("stopped", "lifetime", None)
    assert info.ended_at is not None
    with pytest.raises(Refused, match=f"session {box} was stopped at .*: its lifetime was over"):
        await here.cell(box, "set x 1")


async def test_the_lifetime_stands_still_while_it_is_paused(here: FakeSessions) -> None:
    for seconds in tooling.LONGER:
        box = await here.create(lifetime_seconds=seconds)
        with suppress(Refused):  # it was over before it was paused
            await here.manager.pause(ME, box)
            break
    await asyncio.sleep(2 * seconds)
    assert await here.state(box) == "paused"
    assert (await here.manager.resume(ME, box)).state == "running"
    await here.becomes(box, "stopped")


async def test_a_session_that_nobody_resumes_is_closed(tmp_path: Path) -> None:
    for number, seconds in enumerate(tooling.LONGER):
        async with fake_sessions(tmp_path / f"state{number}", paused_seconds=seconds) as here:
            box, other = await here.create(), await here.create()
            await here.manager.pause(ME, other)
            with suppress(Refused):  # it was resumed too late
                await here.manager.resume(ME, other)
                await here.manager.pause(ME, box)
                await here.becomes(box, "stopped")
                await asyncio.sleep(seconds)
                assert (await here.manager.info(ME, box)).why == "lifetime"
                assert await here.state(other) == "running"
                return
    pytest.fail("it was closed at once")


async def test_a_lifetime_can_be_given_anew(here: FakeSessions) -> None:
    for seconds in tooling.LONGER:
        box = await here.create(lifetime_seconds=seconds)
        before = (await here.manager.info(ME, box)).expires_at
        with suppress(Refused):  # it was over before
            after = (await here.manager.extend(ME, box, 600.0)).expires_at
            break
    assert before is not None and after is not None and after > before
    await asyncio.sleep(2 * seconds)
    assert await here.state(box) == "running"
    assert await refused(here.manager.extend(ME, box, 0)) == "bad_spec"
    await here.manager.extend(ME, box, 0.05)
    await here.becomes(box, "stopped")


# ── Files ──


def _tar(**files: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


async def test_files_go_in_and_come_out(here: FakeSessions) -> None:
    box, manager = await here.create(), here.manager
    fact = await manager.write(ME, box, "a/b.txt", b"one", mode=0o600)
    assert (fact.path, fact.bytes) == ("/workspace/a/b.txt", 3)
    await manager.write(ME, box, "a/b.txt", b" two", append=True)
    assert await manager.read(ME, box, "/workspace/a/b.txt", 2, 3) == b"e t"
    assert (await manager.stat(ME, box, "a/b.txt")).mode == 0o600
    assert await manager.make_dir(ME, box, "a") is False
    await manager.rename(ME, box, "a/b.txt", "a/c.txt")
    await manager.remove(ME, box, "a")
    assert await refused(manager.read(ME, box, "a/c.txt", 0, None)) == "not_found"
    assert await refused(manager.read(ME, box, "../etc/passwd", 0, None)) == "outside"
    assert await refused(manager.write(ME, box, "/etc/passwd", b"")) == "outside"


async def test_folders_go_in_and_come_out_as_archives(here: FakeSessions) -> None:
    box = await here.create()
    archive = _tar(one=b"1" * 100_000, two=b"2")
    parts = [archive[at : at + 1000] for at in range(0, len(archive), 1000)]
    facts = await here.manager.unpack(ME, box, "in", pieces(*parts))
    assert [(fact.path, fact.bytes) for fact in facts] == [("/workspace/in/one", 100_000), ("/workspace/in/two", 1)]
    packed = b"".join([piece async for piece in here.manager.pack(ME, box, "in")])
    with tarfile.open(fileobj=io.BytesIO(packed)) as found:
        assert sorted(found.getnames()) == ["one", "two"]
    assert await refused(here.manager.unpack(ME, box, "in", pieces(b"no archive"))) == "bad_archive"


async def test_an_upload_that_stops_leaves_nothing(here: FakeSessions) -> None:
    box = await here.create()
    sending = asyncio.create_task(here.manager.unpack(ME, box, "in", pieces(_tar(one=b"1" * 5000)[:2000], then=600)))
    await until((here.backend.boxes[0].place / "in").exists)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert await here.manager.entries(ME, box, "in", 1) == []

    async def breaking() -> AsyncIterator[bytes]:
        yield _tar(one=b"1")[:600]
        raise ConnectionResetError("the client is gone")

    with pytest.raises(ConnectionResetError):
        await here.manager.unpack(ME, box, "in", breaking())
    assert await here.manager.entries(ME, box, "in", 1) == []


async def test_a_download_that_stops_leaves_nothing_open(here: FakeSessions) -> None:
    box = await here.create()
    await here.manager.write(ME, box, "large", bytes(5_000_000))
    packed = here.manager.pack(ME, box, ".")
    assert await anext(packed)
    await packed.aclose()
    await here.manager.pack(ME, box, ".").aclose()


async def test_files_are_copied_from_session_to_session(here: FakeSessions) -> None:
    one, two = await here.create(), await here.create()
    await here.manager.write(ME, one, "a", b"text")
    fact = await here.manager.copy(ME, one, "a", two, "b/c")
    assert (fact.path, await here.manager.read(ME, two, "b/c", 0, None)) == ("/workspace/b/c", b"text")
    assert await refused(here.manager.copy(ME, one, "none", two, "d")) == "not_found"
    assert await refused(here.manager.copy(ME, one, "a", "box_none", "d")) == "unknown_session"


async def test_changes_are_told_until_the_session_ends(here: FakeSessions) -> None:
    box = await here.create()
    changes = here.manager.watch(ME, box, ".", False)
    assert (await anext(changes)).kind == "begun"
    await here.manager.write(ME, box, "a", b"text")
    assert (await anext(changes)).path == "/workspace/a"
    rest = asyncio.ensure_future(anext(changes, None))
    await asyncio.sleep(0.02)
    await here.manager.end(ME, box)
    while (await rest) is not None:
        rest = asyncio.ensure_future(anext(changes, None))
    assert await refused(anext(here.manager.watch(ME, box, ".", False))) == "session_stopped"


async def test_a_session_that_is_only_watched_is_idle(here: FakeSessions) -> None:
    box = await here.create(idle_seconds=0.1)
    changes = here.manager.watch(ME, box, ".", True)
    assert (await anext(changes)).kind == "begun"
    waiting = asyncio.ensure_future(anext(changes, None))
    await here.becomes(box, "paused")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await changes.aclose()


async def test_memory_of_a_session_that_stays_paused_is_given_back(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, reclaim_seconds=0.0) as here:
        box = await here.create()
        here.backend.boxes[-1].gives_back = 700
        assert (await here.manager.info(ME, box)).given_back_bytes is None
        await here.manager.pause(ME, box)

        async def given_back() -> bool:
            return (await here.manager.info(ME, box)).given_back_bytes == 700

        async with asyncio.timeout(tooling.PATIENCE):
            while not await given_back():
                await asyncio.sleep(0.01)
        await here.manager.resume(ME, box)
        assert (await here.manager.info(ME, box)).given_back_bytes is None


async def test_nothing_of_a_session_that_leaves_nothing_goes_to_the_disk(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, reclaim_seconds=0.0) as here:
        box = await here.create(retain="none")
        here.backend.boxes[-1].gives_back = 700
        await here.manager.pause(ME, box)
        await asyncio.sleep(0.05)
        assert (await here.manager.info(ME, box)).given_back_bytes is None
