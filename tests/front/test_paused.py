"""Calls that wait between two requests: the handle is good once, for one caller, one request, and a while."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from ringfence.core.model import Call, Outcome, Principal, Status
from ringfence.front import inbound
from ringfence.front.inbound import PausableChannel, PausedCalls
from tests import tooling
from tests.faking import make_call

pytestmark = pytest.mark.anyio

FORM = {"method": "elicitation/create", "params": {}}
CALL = make_call("echo", {"text": "x"})
Handle = Callable[[Call, PausableChannel], Awaitable[Outcome]]


class Way:
    """A pipeline that asks as often as it is told to; remembers how each call ended."""

    def __init__(self, questions: int) -> None:
        self.questions = questions
        self.ended: list[str] = []
        self.answers: list[Any] = []

    async def handle(self, call: Call, channel: PausableChannel) -> Outcome:
        try:
            for number in range(self.questions):
                self.answers.append(await channel.ask({f"q{number}": FORM}))
        except anyio.get_cancelled_exc_class():
            self.ended.append("cancelled")
            raise
        self.ended.append("finished")
        return Outcome(Status.SUCCESS, "ok")


@asynccontextmanager
async def pausing(questions: int = 1) -> AsyncIterator[tuple[PausedCalls, Way]]:
    way = Way(questions)
    async with anyio.create_task_group() as group:
        yield PausedCalls(way, group), way  # type: ignore[arg-type]
        group.cancel_scope.cancel()


def channel() -> PausableChannel:
    return PausableChannel({"elicitation": {}})


def answering(call: Call = CALL, **answers: Any) -> Call:
    return replace(call, id="call_again", inputs=answers)


async def begun(waiting: PausedCalls, call: Call = CALL) -> str:
    answer = await waiting.begin(call, channel())
    assert isinstance(answer, dict)
    assert answer["resultType"] == "input_required"
    return str(answer["requestState"])


def handles(waiting: PausedCalls, *states: str, call: Call = CALL) -> list[str]:
    """What of the calls is in what their client holds."""
    read = (waiting.states.read(inbound._binding(call), state) for state in states)
    return [held.handle for held in read if held is not None]


async def test_a_call_that_fails_inside_the_gateway_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pausing(1) as (waiting, way):
        handle = await begun(waiting)

        async def broken(call: Call, channel: PausableChannel) -> Outcome:
            raise RuntimeError("a fault of ours")

        with monkeypatch.context() as patch:
            patch.setattr(way, "handle", broken)
            with pytest.raises(MCPError, match="the gateway itself failed"):
                await waiting.begin(CALL, channel())
        outcome = await waiting.resume(handle, answering(q0={}), channel())
        assert isinstance(outcome, Outcome) and outcome.ok


async def test_a_call_without_questions_just_ends() -> None:
    async with pausing(0) as (waiting, way):
        outcome = await waiting.begin(CALL, channel())
        assert isinstance(outcome, Outcome) and outcome.ok
        assert (way.ended, waiting._waiting) == (["finished"], {})


async def test_a_call_goes_on_with_each_answer() -> None:
    async with pausing(2) as (waiting, way):
        first = await waiting.begin(CALL, channel())
        assert isinstance(first, dict)
        assert first["inputRequests"] == {"q0": FORM}
        second = await waiting.resume(first["requestState"], answering(q0={"a": 1}), channel())
        assert isinstance(second, dict)
        assert (second["inputRequests"], second["requestState"] != first["requestState"]) == ({"q1": FORM}, True)
        last = await waiting.resume(second["requestState"], answering(q1={"b": 2}), channel())
        assert isinstance(last, Outcome) and last.ok
        assert way.answers == [{"q0": {"a": 1}}, {"q1": {"b": 2}}]
        assert waiting._waiting == {}


@pytest.mark.parametrize(
    "other",
    [
        replace(CALL, principal=Principal("somebody")),
        replace(CALL, arguments={"text": "y"}),
        replace(CALL, tool="other"),
        replace(CALL, method="prompts/get"),
    ],
    ids=["caller", "arguments", "tool", "method"],
)
async def test_a_handle_is_good_for_its_own_request_alone(other: Call) -> None:
    async with pausing() as (waiting, way):
        handle = await begun(waiting)
        with pytest.raises(MCPError, match="belongs to another request"):
            await waiting.resume(handle, answering(other), channel())
        assert way.ended == []
        assert isinstance(await waiting.resume(handle, answering(), channel()), Outcome), "it is still good for its own"


async def test_a_handle_is_good_once_and_cannot_be_guessed() -> None:
    async with pausing() as (waiting, _):
        handle = await begun(waiting)
        assert len(handle) > 30
        await waiting.resume(handle, answering(), channel())
        for wrong in (handle, "", "rfs_x"):
            with pytest.raises(MCPError, match="unknown"):
                await waiting.resume(wrong, answering(), channel())


async def test_answers_must_be_an_object() -> None:
    async with pausing() as (waiting, _):
        handle = await begun(waiting)
        with pytest.raises(MCPError, match="inputResponses"):
            await waiting.resume(handle, replace(CALL, inputs=None), channel())
        assert isinstance(await waiting.resume(handle, answering(), channel()), Outcome)


async def test_a_call_that_nobody_comes_back_for_ends_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "WAIT_SECONDS", 0.05)
    async with pausing() as (waiting, way):
        handle = await begun(waiting)
        await tooling.until(lambda: way.ended and not waiting._waiting)
        assert way.ended == ["cancelled"]
        with anyio.fail_after(60), pytest.raises(MCPError, match="expired"):
            await waiting.resume(handle, answering(), channel())


async def test_time_counts_only_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.2, 2.0, 20.0):
        monkeypatch.setattr(inbound, "WAIT_SECONDS", seconds)
        async with pausing(2) as (waiting, way):
            handle = await begun(waiting)
            with suppress(MCPError):  # where the rest alone took too long
                await anyio.sleep(0.5 * seconds)
                answer = await waiting.resume(handle, answering(), channel())
                await anyio.sleep(0.75 * seconds)
                assert isinstance(answer, dict)
                assert isinstance(await waiting.resume(answer["requestState"], answering(), channel()), Outcome)
                assert way.ended == ["finished"]
                return
    pytest.fail("its time was over")


async def test_so_many_may_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "MAX_WAITING", 3)
    async with pausing() as (waiting, way):
        for _ in range(3):
            await begun(waiting)
        with pytest.raises(MCPError, match="too many"):
            await begun(waiting)
        await tooling.until(lambda: way.ended)
        assert way.ended == ["cancelled"]
        assert len(waiting._waiting) == 3


async def test_what_waits_keeps_so_much_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    heavy = replace(CALL, inputs={"early": ["x"] * 1000})
    monkeypatch.setattr(inbound, "MAX_WEIGHT", 150_000)
    async with pausing() as (waiting, _):
        await begun(waiting, heavy)
        handle = await begun(waiting, heavy)
        with pytest.raises(MCPError, match="too many"):
            await begun(waiting, heavy)
        assert isinstance(await waiting.resume(handle, answering(q0={}), channel()), Outcome)
        await begun(waiting, heavy)


async def test_one_principals_calls_keep_no_other_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "MAX_WAITING", 4)
    other = replace(CALL, principal=Principal("other"))
    async with pausing() as (waiting, way):
        first, *later = [await begun(waiting) for _ in range(4)]
        theirs = [await begun(waiting, other) for _ in range(2)]
        await tooling.until(lambda: len(way.ended) == 2)
        with pytest.raises(MCPError, match="too many"):
            await begun(waiting, other)  # each has an even share
        with pytest.raises(MCPError, match="unknown"):
            await waiting.resume(first, answering(q0={}), channel())
        assert list(waiting._waiting) == [*handles(waiting, *later[1:]), *handles(waiting, *theirs, call=other)]
        assert isinstance(await waiting.resume(later[-1], answering(q0={}), channel()), Outcome)


class GivenUp(Way):
    """A pipeline whose call is given up while it waits for its client."""

    def __init__(self) -> None:
        super().__init__(1)
        self.needed = anyio.Event()
        self.outcome = Outcome(Status.UNKNOWN, "gave_way")

    async def handle(self, call: Call, channel: PausableChannel) -> Outcome:
        async with anyio.create_task_group() as group:
            group.start_soon(channel.ask, {"q0": FORM})
            await self.needed.wait()
            group.cancel_scope.cancel()
        self.ended.append("given up")
        return self.outcome


@asynccontextmanager
async def given_up() -> AsyncIterator[tuple[PausedCalls, GivenUp, str]]:
    """A call that ended while its client was away, and the handle that the client has."""
    way = GivenUp()
    async with anyio.create_task_group() as group:
        waiting = PausedCalls(way, group)  # type: ignore[arg-type]
        handle = await begun(waiting)
        way.needed.set()
        await tooling.until(lambda: way.ended)
        yield waiting, way, handle
        group.cancel_scope.cancel()


async def test_a_client_hears_of_the_end_of_its_call_when_it_answers() -> None:
    async with given_up() as (waiting, way, handle):
        with pytest.raises(MCPError, match="belongs to another request"):
            await waiting.resume(handle, answering(replace(CALL, principal=Principal("somebody"))), channel())
        with anyio.fail_after(60):
            assert await waiting.resume(handle, answering(q0={}), channel()) is way.outcome
        with pytest.raises(MCPError, match="unknown"):
            await waiting.resume(handle, answering(q0={}), channel())
        assert (way.ended, waiting._waiting) == (["given up"], {})


async def test_the_end_of_a_call_is_kept_for_as_long_as_the_call_would_have_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbound, "WAIT_SECONDS", 0.05)
    async with given_up() as (waiting, _, _):
        await tooling.until(lambda: not waiting._waiting)


async def test_a_call_that_is_over_keeps_no_other_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "MAX_WAITING", 1)
    async with given_up() as (waiting, way, first):
        way.needed = anyio.Event()
        second = await begun(waiting)
        assert list(waiting._waiting) == handles(waiting, second)
        with pytest.raises(MCPError, match="unknown"):
            await waiting.resume(first, answering(q0={}), channel())


async def test_a_client_that_closes_its_request_cancels_the_call() -> None:
    class Slow(Way):
        async def handle(self, call: Call, channel: PausableChannel) -> Outcome:
            try:
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                self.ended.append("cancelled")
            raise AssertionError

    way = Slow(0)
    async with anyio.create_task_group() as group:
        waiting = PausedCalls(way, group)  # type: ignore[arg-type]
        with anyio.CancelScope() as scope:
            await waiting.begin(CALL, channel())
        await tooling.until(lambda: way.ended)
        assert way.ended == ["cancelled"]
        group.cancel_scope.cancel()
