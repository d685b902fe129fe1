"""What a client asks of a keeper, and what it gets: the same as from the house itself, whoever else is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from ringfence.core.box import Captured, Input
from ringfence.core.brokering import SubstitutionReply
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, WorkProgress
from ringfence.core.model import Status
from ringfence.core.sessions import CellRequest, CommandRequest, ForkProblem, SessionInfo, SessionSpec, StaySpec
from ringfence.sandbox.keeper import server as keepers
from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.protocol import MAX_IN_SESSION, VERBS
from ringfence.sandbox.keeper.wire import SLACK, WINDOW
from ringfence.sandbox.sessions.manager import SessionManager
from ringfence.sandbox.sessions.service import SessionService
from tests import tooling
from tests.sandbox.fake_sessions import ME, fake_sessions
from tests.sandbox.keeper.parrot import ANN, BOB, CHUNK, Parrot, kept, linked, quiet, session

pytestmark = pytest.mark.anyio


until = tooling.until


# ── The verbs ─────────────────────────────────────────────────────────────────────────────────────


async def test_every_verb_answers_as_the_house_does() -> None:
    here, there = Parrot(), Parrot()
    async with linked(there) as keeper:
        for house in (here, keeper):
            keeping: SessionService = house
            made = await keeping.create(ANN, SessionSpec(StaySpec(inputs=(Input("a", b"\x00" * 200_000),))))
            assert made.id == "box-0"
        told: list[Any] = []

        def hear(*said: Any) -> None:
            told.append(said)

        asked: dict[str, tuple[Any, ...]] = {
            "info": (),
            "state_of": (),
            "pause": (),
            "hold_network": (),
            "resume": (),
            "extend": (60.0,),
            "run": (CellRequest("say 3"), hear, hear),
            "show": (8000,),
            "interrupt": (),
            "end_context": ("other", True),
            "command": (CommandRequest(("ls", "-l"), stdin=b"in"), hear),
            "start": (CommandRequest(("sleep", "1"), stdin=None, pty=(80, 24)),),
            "processes": (),
            "logs": (1, 1, 2),
            "follow": (1, (1, 2), hear),
            "wait": (1, 0.0),
            "signal": (1, 15),
            "send": (1, b"data", True),
            "resize": (1, 80, 24),
            "read": ("a", 0, 3_000_000),
            "write": ("a", b"x" * 3_000_000),
            "entries": ("/", 3),
            "stat": ("a",),
            "make_dir": ("d",),
            "rename": ("a", "b"),
            "copy": ("a", "box-0", "b"),
            "snapshot": (None,),
            "fork": (2,),
            "use_broker": ("somebody",),
            "view": (),
        }
        for verb, arguments in asked.items():
            answers = []
            for house in (here, keeper):
                told.clear()
                answer = await getattr(house, verb)(ANN, "box-0", *arguments)
                answers.append((list(answer) if isinstance(answer, tuple | list) else answer, list(told)))
            assert answers[0] == answers[1], verb
        others: dict[str, tuple[Any, ...]] = {
            "list": (),
            "past": (),
            "of_tenant": (),
            "answer_substitution": ("somebody", 7, SubstitutionReply(("a",), {"A": "x"}, (("name", "value"),))),
            "snapshots": (),
            "remove_snapshot": ("snap-0",),
            "create_volume": ("data", 1, "rw"),
            "volumes": (),
            "remove_volume": ("data",),
        }
        for verb, arguments in others.items():
            assert await getattr(here, verb)(ANN, *arguments) == await getattr(keeper, verb)(ANN, *arguments)
        assert {*asked, *others, "create", "end", "remove", "pack", "unpack", "watch", "substitution_requests"} == set(
            VERBS
        )
        assert [w async for w in keeper.substitution_requests(ANN, "me")] == [
            w async for w in here.substitution_requests(ANN, "me")
        ]
        assert (await keeper.end(ANN, "box-0")).why == "closed"
    assert here.done == there.done


async def test_output_and_values_come_in_order_before_the_report() -> None:
    parrot, told = Parrot(), []
    async with linked(parrot) as keeper:
        box = session(parrot)
        report = await keeper.run(ANN, box, CellRequest("say 4"), lambda *said: told.append(said), quiet)
        assert told == [
            ("stdout", b"line 0\n"),
            ("stderr", b"line 1\n"),
            ("stdout", b"line 2\n"),
            ("stderr", b"line 3\n"),
        ]
        shown: list[Any] = []
        report = await keeper.run(ANN, box, CellRequest("show 3"), quiet, shown.append)
    assert tuple(shown) == report.cell.results and len(shown) == 3
    assert report.cell.report.stdout == Captured(b"out", b"", 3)


async def test_options_of_a_write_go_along() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        assert (await keeper.write(ANN, session(parrot), "a", b"data", append=True, mode=0o600)).bytes == 4
        await keeper.write(ANN, "box-0", "a", b"")
    assert parrot.done == ["write {'append': True, 'mode': 384}", "write {}"]


async def test_errors_come_back_as_they_were() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        with pytest.raises(Refused, match="no session 'box-7'") as refused:
            await keeper.info(ANN, "box-7")
        assert (refused.value.status, refused.value.reason_code) == (Status.VALIDATION_FAILURE, "unknown_session")
        with pytest.raises(Unavailable) as unavailable:
            await keeper.create(ANN, SessionSpec(snapshot="full"))
        assert unavailable.value.reason_code == "capacity"
        with pytest.raises(Refused, match="is not there"):
            await keeper.remove(ANN, session(parrot), "a")
        forked = await keeper.fork(ANN, "box-0", 2)
        assert isinstance(forked[0], SessionInfo) and forked[1] == ForkProblem("capacity", "no room")


async def test_an_id_of_another_owner_is_one_that_does_not_exist() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box = session(parrot, ANN)
        with pytest.raises(Refused, match="there is no session 'box-0'"):
            await keeper.run(BOB, box, CellRequest("say 1"), quiet, quiet)
        assert await keeper.list(BOB) == []


async def test_a_defect_in_the_keeper_is_said_and_harms_no_other_request(caplog: pytest.LogCaptureFixture) -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box = session(parrot)
        other = asyncio.create_task(keeper.run(ANN, box, CellRequest("sleep 1"), quiet, quiet))
        with pytest.raises(OutcomeUnknown, match="RuntimeError: a defect"), caplog.at_level(logging.CRITICAL):
            await keeper.run(ANN, box, CellRequest("fail 1"), quiet, quiet)
        assert (await other).session == box


async def test_what_cannot_be_sent_is_refused_here() -> None:
    async with linked(Parrot()) as keeper:
        with pytest.raises(Refused, match="in smaller parts"):
            await keeper.write(ANN, "box-0", "a", bytes(200 * 1024 * 1024))
        with pytest.raises(Refused, match="cannot be sent"):
            await keeper.create(ANN, SessionSpec(lifetime_seconds=float("inf")))
        assert await keeper.list(ANN) == []


async def test_many_tasks_share_a_connection() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box = session(parrot)

        async def one(number: int) -> int:
            heard: list[bytes] = []
            source = CellRequest(f"say {number}")
            await keeper.run(ANN, box, source, lambda stream, data: heard.append(data), quiet)
            return len(heard)

        assert await asyncio.gather(*map(one, range(40))) == list(range(40))


async def test_work_beyond_what_a_session_may_have_under_way_waits_in_line_and_harms_no_other() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box, other = session(parrot), session(parrot)
        asked = [
            asyncio.create_task(keeper.run(ANN, box, CellRequest("sleep 600"), quiet, quiet))
            for _ in range(MAX_IN_SESSION + 200)
        ]
        await until(lambda: parrot.begun == MAX_IN_SESSION)
        assert (await keeper.info(ANN, box)).id == box, "what looks at sessions or ends their work is not kept waiting"
        await keeper.run(ANN, other, CellRequest("say 1"), quiet, quiet)
        assert parrot.begun == MAX_IN_SESSION + 1
        for task in asked[:30]:
            task.cancel()
        await until(lambda: parrot.begun == 2 * MAX_IN_SESSION + 1)
        for task in asked:
            task.cancel()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}, "none failed for being one too many"


async def test_too_many_requests_at_once_are_refused_and_no_other_suffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "MAX_REQUESTS", 3)
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box = session(parrot)
        parrot.hold = asyncio.Event()
        sleeping = [asyncio.create_task(keeper.wait(ANN, box, 1, 0.3)) for _ in range(3)]
        await until(lambda: parrot.begun == 3)
        with pytest.raises(Unavailable, match="3 requests under way"):
            await keeper.info(ANN, box)
        parrot.hold.set()
        await asyncio.gather(*sleeping)
        assert (await keeper.info(ANN, box)).id == box


# ── Stopping ──────────────────────────────────────────────────────────────────────────────────────


async def test_cancelling_stops_the_step_before_it_returns() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box = session(parrot)
        with anyio.CancelScope() as scope:
            stopping = asyncio.create_task(stop(parrot, scope))
            await keeper.run(ANN, box, CellRequest("sleep 600"), quiet, quiet)
        await stopping
        assert scope.cancelled_caught and parrot.done == ["sleep was cancelled"]
        task = asyncio.create_task(keeper.run(ANN, box, CellRequest("sleep 600"), quiet, quiet))
        await until(lambda: parrot.begun == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert parrot.done == ["sleep was cancelled"] * 2
        assert (await keeper.info(ANN, box)).id == box


async def stop(parrot: Parrot, scope: anyio.CancelScope) -> None:
    await until(lambda: parrot.begun == 1)
    scope.cancel()


async def test_a_request_timeout_stops_what_was_asked_for() -> None:
    for seconds in tooling.LONGER:
        parrot = Parrot()
        async with linked(parrot, request_timeout=seconds) as keeper:
            box, told = session(parrot), rf"run was not answered within {seconds:g} s \(request_timeout\)"
            with pytest.raises(OutcomeUnknown, match=told) as late:
                await keeper.run(ANN, box, CellRequest("sleep 600"), quiet, quiet)
            with pytest.raises(Unavailable, match="wait was not answered"):
                await keeper.wait(ANN, box, 1, 600.0)
        if parrot.begun == 2:  # otherwise it was too late before it came there
            break
    assert late.value.reason_code == "request_timeout" and parrot.done == ["sleep was cancelled"]


async def test_a_client_that_goes_away_takes_its_steps_with_it_and_leaves_its_sessions() -> None:
    parrot = Parrot()
    async with kept(parrot) as (_, there):
        async with KeeperClient.connect(there) as keeper:
            box = (await keeper.create(ANN, SessionSpec())).id
            task = asyncio.create_task(keeper.run(ANN, box, CellRequest("sleep 600"), quiet, quiet))
            await until(lambda: parrot.begun)
        with pytest.raises(OutcomeUnknown):
            await task
        await until(lambda: parrot.done == ["sleep was cancelled"])
        async with KeeperClient.connect(there) as keeper:
            assert [info.id for info in await keeper.list(ANN)] == [box]


async def test_a_callback_that_fails_stops_the_step_and_is_heard_of() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box = session(parrot)

        def fail(*told: Any) -> None:
            raise ZeroDivisionError("mine")

        for source in ("flood 100", "show 100"):
            with pytest.raises(ZeroDivisionError, match="mine"):
                await keeper.run(ANN, box, CellRequest(source), fail, fail)
        assert (await keeper.run(ANN, box, CellRequest("say 1"), quiet, quiet)).step == 1


# ── Streams ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_is_read_no_faster_than_it_is_taken() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        box, size = session(parrot), 0
        async for piece in keeper.pack(ANN, box, "1000"):
            if size == 0:
                await asyncio.sleep(0.2)
                assert parrot.poured <= WINDOW + 2 * CHUNK
                assert (await keeper.info(ANN, box)).id == box  # it holds up nobody
            size += len(piece)
        assert size == 1000 * CHUNK


async def test_a_stream_that_fails_says_so_after_what_came() -> None:
    parrot = Parrot()
    async with linked(parrot) as keeper:
        pieces = keeper.pack(ANN, session(parrot), "3")
        assert [len(await anext(pieces)) for _ in range(3)] == [CHUNK] * 3
        with pytest.raises(Refused, match="changed meanwhile"):
            await anext(pieces)


async def test_a_stream_that_nobody_wants_any_more_is_ended() -> None:
    parrot, heard = Parrot(), []
    async with linked(parrot) as keeper:
        changes = keeper.watch(ANN, session(parrot), "/workspace", True)
        async for change in changes:
            heard.append(change.path)
            if len(heard) == 2000:
                break
        await changes.aclose()  # type: ignore[attr-defined]
        await until(lambda: parrot.done == ["watch is over"])
    assert heard == [f"/workspace/{number}" for number in range(2000)]
    assert parrot.poured < 2000 + 2 * WINDOW // 50


async def test_an_upload_waits_for_the_house() -> None:
    parrot, given = Parrot(), 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(500):
            given += CHUNK
            yield bytes(CHUNK)

    async with linked(parrot) as keeper:
        facts = await keeper.unpack(ANN, session(parrot), "all", pieces())
        assert facts[0].bytes == given == 500 * CHUNK
        given = 0
        with pytest.raises(Refused, match="no archive"):
            await keeper.unpack(ANN, "box-0", "refuse", pieces())
        assert given < 100 * CHUNK


async def test_an_upload_whose_source_fails_is_given_up() -> None:
    parrot = Parrot()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        raise ZeroDivisionError("mine")

    async with linked(parrot) as keeper:
        with pytest.raises(ZeroDivisionError):
            await keeper.unpack(ANN, session(parrot), "all", pieces())
        assert await keeper.list(ANN)


async def test_output_waits_for_whoever_hears_it_and_is_all_there() -> None:
    parrot, size, gate = Parrot(), 0, asyncio.get_running_loop().create_future()

    def slow(stream: str, data: bytes) -> asyncio.Future[None]:
        nonlocal size
        size += len(data)
        return gate

    async with linked(parrot) as keeper:
        box = session(parrot)
        step = asyncio.create_task(keeper.run(ANN, box, CellRequest("flood 100"), slow, quiet))
        await until(lambda: parrot.told >= WINDOW)
        await asyncio.sleep(0.2)
        assert parrot.told <= WINDOW + 2 * CHUNK
        gate.set_result(None)
        assert (await step).session == box
    assert size == 100 * CHUNK


async def test_output_that_does_not_wait_is_cut_and_the_keeper_keeps_little() -> None:
    parrot, size = Parrot(), 0

    def hear(stream: str, data: bytes) -> None:
        nonlocal size
        size += len(data)

    async with linked(parrot) as keeper:
        box = session(parrot)
        report = await keeper.run(ANN, box, CellRequest("blind 300"), hear, quiet)
        assert report.cell.report.stdout.total == 3  # the report is whole, whatever was heard on the way
        assert WINDOW <= size <= WINDOW + SLACK + CHUNK
        assert parrot.told == 300 * CHUNK
        assert (await keeper.info(ANN, box)).id == box


# ── Calls that had to wait ────────────────────────────────────────────────────────────────────────


class Stays:
    """Sessions that the end of a keeper does not close."""

    def __init__(self, manager: SessionManager) -> None:
        self.manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    async def close(self) -> None:
        return None


class Rules:
    """Those that a call was granted by, which may be tightened."""

    def __init__(self) -> None:
        self.tightened = False
        self.asked = 0

    async def recheck(self) -> None:
        self.asked += 1
        if self.tightened:
            with WorkProgress():
                raise Refused(Status.DENIED, "rules_changed", "no")


async def test_a_step_whose_turn_comes_after_the_rules_were_tightened_does_not_begin(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path / "state") as here, kept(cast(Any, Stays(here.manager))) as (_, there):
        box = await here.create(ME)
        async with KeeperClient.connect(there) as keeper:
            rules = Rules()
            run = lambda client, source: client.run(ME, box, CellRequest(source), quiet, quiet)  # noqa: E731
            first = asyncio.ensure_future(run(keeper.granted(rules.recheck), "sleep inf"))
            await until(lambda: here.backend.boxes[0].begun == 1)
            late = [asyncio.ensure_future(run(keeper.granted(rules.recheck), "set x 1")) for _ in range(3)]
            await until(lambda: rules.asked == 4)
            await asyncio.sleep(2 * keepers._AT_ONCE_SECONDS)
            rules.tightened = True
            with pytest.raises(Refused):
                await keeper.granted(rules.recheck).command(ME, box, CommandRequest(("say", "hello")), quiet)
            await keeper.interrupt(ME, box)
            assert (await first).cell.error is not None, "what had begun goes on to its end"
            for step in late:
                with pytest.raises(Refused) as problem:
                    await step
                assert (problem.value.reason_code, problem.value.nothing_begun) == ("rules_changed", True)
            assert here.backend.boxes[0].begun == 1
            rules.tightened = False
            assert (await run(keeper.granted(rules.recheck), "set x 2")).step == 2, "its turn was given on"


async def test_a_step_that_waited_begins_where_the_rules_are_the_same(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path / "state") as here, kept(cast(Any, Stays(here.manager))) as (_, there):
        box = await here.create(ME)
        async with KeeperClient.connect(there) as keeper:
            rules = Rules()
            run = lambda client, source: client.run(ME, box, CellRequest(source), quiet, quiet)  # noqa: E731
            first = asyncio.ensure_future(run(keeper, "sleep inf"))
            await until(lambda: here.backend.boxes[0].begun == 1)
            late = asyncio.ensure_future(run(keeper.granted(rules.recheck), "set x 1"))
            await until(lambda: rules.asked == 1)
            await asyncio.sleep(2 * keepers._AT_ONCE_SECONDS)
            await keeper.interrupt(ME, box)
            await first
            assert (await late).step == 2
            assert rules.asked == 2, "when it was sent, and when its turn had come"


async def test_a_session_that_waited_for_room_is_not_opened_under_tightened_rules(tmp_path: Path) -> None:
    async with (
        fake_sessions(tmp_path / "state", max_sessions=1, queue_seconds=600.0) as here,
        kept(cast(Any, Stays(here.manager))) as (_, there),
    ):
        box = await here.create(ME)
        async with KeeperClient.connect(there) as keeper:
            rules = Rules()
            late = asyncio.ensure_future(keeper.granted(rules.recheck).create(ME, SessionSpec()))
            await until(lambda: rules.asked == 1)
            await asyncio.sleep(2 * keepers._AT_ONCE_SECONDS)
            rules.tightened = True
            await keeper.end(ME, box)
            with pytest.raises(Refused) as problem:
                await late
            assert problem.value.nothing_begun
            assert len(here.backend.boxes) == 1
            await here.manager.end(ME, await here.create(ME))  # the room is free again


async def test_what_a_call_has_begun_it_may_finish() -> None:
    parrot, rules = Parrot(), Rules()
    async with linked(parrot) as keeper:
        call = keeper.granted(rules.recheck)
        box = session(parrot)
        await call.run(ANN, box, CellRequest("say 1"), quiet, quiet)
        rules.tightened = True
        assert (await call.write(ANN, box, "a", b"x")).bytes == 1
        with pytest.raises(Refused):
            await keeper.granted(rules.recheck).write(ANN, box, "b", b"x")
    assert parrot.done.count("write {}") == 1
