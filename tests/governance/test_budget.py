"""Budgets: rates, places, loops, and that neither of them remembers without end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.errors import Refused
from ringfence.core.model import AgentSpec, Contract, Person, Principal, Rate, Status
from ringfence.governance import approvals
from ringfence.governance import budget as budgets
from ringfence.governance.budget import LOOP_FAILURES, Budget, day_scope
from tests.faking import Said, Way, contract, governed
from tests.making import WRITE, call


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budget(clock: Clock) -> Budget:
    return Budget(clock=clock)


def rated(**rate: int) -> Contract:
    return replace(WRITE, rate=Rate(**rate))


def refused(budget: Budget, contract: Contract, digest: str = "d", agent: str = "analyst") -> Refused | None:
    try:
        budget.admit(call(principal=Principal(agent=agent)), contract, digest).release(Status.SUCCESS)
    except Refused as exc:
        return exc
    return None


def test_a_contract_without_a_rate_is_never_throttled(budget: Budget) -> None:
    assert not any(refused(budget, WRITE) for _ in range(1000))


def test_a_rate_lets_a_burst_through_and_then_says_how_long_to_wait(budget: Budget, clock: Clock) -> None:
    contract = rated(per_minute=6)
    assert not any(refused(budget, contract) for _ in range(6))  # the burst is a minute's worth
    exc = refused(budget, contract)
    assert exc is not None
    assert (exc.status, exc.reason_code) == (Status.DENIED, "throttled")
    assert "6 calls a minute; try again in 10.0 s" in exc.message
    clock.now += 9.9
    assert refused(budget, contract) is not None
    clock.now += 0.2
    assert refused(budget, contract) is None
    assert refused(budget, contract) is not None


def test_a_burst_of_its_own_size(budget: Budget, clock: Clock) -> None:
    contract = rated(per_minute=60, burst=2)
    assert [refused(budget, contract) is None for _ in range(3)] == [True, True, False]
    clock.now += 3600  # a long pause saves up no more than the burst
    assert [refused(budget, contract) is None for _ in range(3)] == [True, True, False]


def test_a_rate_of_zero_lets_nothing_through(budget: Budget) -> None:
    exc = refused(budget, rated(per_minute=0))
    assert exc is not None
    assert exc.message.endswith("limited to 0 calls a minute")


def test_principals_and_capabilities_do_not_share(budget: Budget) -> None:
    contract = rated(per_minute=1)
    assert refused(budget, contract) is None
    assert refused(budget, contract) is not None
    assert refused(budget, contract, agent="other") is None
    assert refused(budget, replace(contract, name="other")) is None


def test_concurrent_places_are_given_back(budget: Budget) -> None:
    contract = rated(concurrent=2)
    first, second = (budget.admit(call(), contract, "d") for _ in range(2))
    exc = refused(budget, contract)
    assert exc is not None
    assert (exc.reason_code, "2 at a time" in exc.message) == ("throttled", True)
    first.release(Status.SUCCESS)
    first.release(Status.SUCCESS)  # twice is harmless: no place is given back that was not taken
    third = budget.admit(call(), contract, "d")
    assert refused(budget, contract) is not None
    second.release(Status.FAILED)
    third.release(Status.KILLED)
    assert refused(budget, contract) is None


def test_a_ticket_gives_its_place_back_whatever_happens(budget: Budget) -> None:
    contract = rated(concurrent=1)
    with pytest.raises(RuntimeError), budget.admit(call(), contract, "d"):
        raise RuntimeError
    assert refused(budget, contract) is None


def test_being_refused_costs_no_token(budget: Budget) -> None:
    contract = rated(per_minute=2, concurrent=1)
    ticket = budget.admit(call(), contract, "d")
    for _ in range(5):
        assert refused(budget, contract) is not None
    ticket.release(Status.SUCCESS)
    assert refused(budget, contract) is None


def test_a_clock_that_goes_back_gives_nothing(budget: Budget, clock: Clock) -> None:
    contract = rated(per_minute=1)
    assert refused(budget, contract) is None
    clock.now -= 3600
    assert refused(budget, contract) is not None


# ── Loops ─────────────────────────────────────────────────────────────────────────────────────────


def fail(budget: Budget, times: int, digest: str = "d", status: Status = Status.FAILED) -> None:
    for _ in range(times):
        budget.admit(call(), WRITE, digest).release(status)


@pytest.mark.parametrize("status", [Status.FAILED, Status.VALIDATION_FAILURE])
def test_the_same_call_failing_again_and_again_is_a_loop(budget: Budget, clock: Clock, status: Status) -> None:
    fail(budget, LOOP_FAILURES, status=status)
    exc = refused(budget, WRITE)
    assert exc is not None
    assert (exc.status, exc.reason_code) == (Status.DENIED, "loop")
    assert "200 times in a row" in exc.message
    assert refused(budget, WRITE, digest="other") is None
    assert refused(budget, WRITE, agent="other") is None
    clock.now += 60.1
    assert refused(budget, WRITE) is None


def test_a_success_breaks_the_row(budget: Budget) -> None:
    fail(budget, LOOP_FAILURES - 1)
    budget.admit(call(), WRITE, "d").release(Status.SUCCESS)
    fail(budget, LOOP_FAILURES - 1)
    assert refused(budget, WRITE) is None


def test_slow_failures_are_no_loop(budget: Budget, clock: Clock) -> None:
    for _ in range(LOOP_FAILURES * 2):
        fail(budget, 1)
        clock.now += 0.5
    assert refused(budget, WRITE) is None


def test_only_failures_count(budget: Budget) -> None:
    fail(budget, LOOP_FAILURES * 2, status=Status.TIMEOUT)
    assert refused(budget, WRITE) is None


def test_a_call_that_never_got_a_ticket_can_be_noted(budget: Budget) -> None:
    for _ in range(LOOP_FAILURES):
        budget.check_loop(call("invented"), "d")
        budget.note(call("invented"), "d", Status.VALIDATION_FAILURE)
    with pytest.raises(Refused, match="in a row"):
        budget.check_loop(call("invented"), "d")


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────


def test_defect_20_what_is_remembered_is_bounded(clock: Clock) -> None:
    budget = Budget(clock=clock, kept=50)
    contract = rated(per_minute=100)
    for number in range(500):
        asked = call(principal=Principal(agent=f"agent{number}"))
        budget.admit(asked, contract, f"digest{number}").release(Status.FAILED)
    assert len(budget._buckets) <= 50
    assert len(budget._streaks) <= 50


class Name(str):
    """A name that can be watched."""


def test_how_long_the_name_is_that_a_caller_gives_costs_no_memory(budget: Budget) -> None:
    asked = call(Name("invented"))
    seen = weakref.ref(asked.tool)
    budget.note(asked, "d", Status.VALIDATION_FAILURE)
    del asked
    gc.collect()
    assert len(budget._streaks) == 1 and seen() is None


def test_a_place_that_is_taken_is_not_forgotten(clock: Clock) -> None:
    budget = Budget(clock=clock, kept=4)
    contract = rated(concurrent=1)
    held = budget.admit(call(), contract, "d")
    for number in range(100):
        assert refused(budget, contract, agent=f"agent{number}") is None
    assert refused(budget, contract) is not None
    held.release(Status.SUCCESS)
    assert refused(budget, contract) is None
    assert len(budget._buckets) <= 5


def test_the_quota_of_a_day_is_one_principals_of_one_capability() -> None:
    scopes = {
        day_scope(call(), WRITE),
        day_scope(call(principal=Principal(agent="other")), WRITE),
        day_scope(call(principal=Principal(agent="analyst", tenant="other")), WRITE),
        day_scope(call(), replace(WRITE, name="other")),
    }
    assert len(scopes) == 4
    assert day_scope(call(), WRITE) == day_scope(call(arguments={"a": 1}), WRITE)


# ── Whatever comes ────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 20), st.integers(1, 20), st.lists(st.floats(0, 30), max_size=60))
def test_no_more_get_through_than_burst_and_rate_allow(per_minute: int, burst: int, pauses: list[float]) -> None:
    clock = Clock()
    budget = Budget(clock=clock)
    contract = rated(per_minute=per_minute, burst=burst)
    admitted = 0
    for pause in pauses:
        clock.now += pause
        admitted += refused(budget, contract) is None
    assert admitted <= burst + sum(pauses) * per_minute / 60 + 1e-6


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_never_more_at_once_than_there_are_places(places: int, steps: list[bool]) -> None:
    budget = Budget()
    contract = rated(concurrent=places)
    held = []
    for take in steps:
        if take:
            try:
                held.append(budget.admit(call(), contract, "d"))
            except Refused:
                assert len(held) == places
        elif held:
            held.pop().release(Status.SUCCESS)
        assert len(held) <= places


def test_loops_are_guarded_only_where_a_model_may_be_in_one() -> None:
    budget = Budget(guard_loops=False)
    for _ in range(LOOP_FAILURES + 1):
        budget.admit(call(), WRITE, "d").release(Status.FAILED)


def test_a_call_that_waits_for_a_person_leaves_its_place_to_others(budget: Budget) -> None:
    contract = rated(concurrent=1)
    with budget.admit(call(), contract, "a") as waiting:
        with waiting.set_aside(contract), budget.admit(call(), contract, "b"):
            pass
        with pytest.raises(Refused, match="at a time"):
            budget.admit(call(), contract, "c")
        with pytest.raises(Refused, match="at a time"), waiting.set_aside(contract):
            other = budget.admit(call(), contract, "d")
    other.release(Status.SUCCESS)
    budget.admit(call(), contract, "e").release(Status.SUCCESS)


@pytest.mark.anyio
async def test_a_server_that_asks_twice_at_a_time_costs_one_place(budget: Budget) -> None:
    contract = rated(concurrent=1)
    slot = budget.admit(call(), contract, "a")
    first, second = asyncio.Event(), asyncio.Event()

    async def ask(answered: asyncio.Event) -> None:
        async with slot.left_to_others():
            await answered.wait()

    asking = [asyncio.ensure_future(ask(first))]
    await asyncio.sleep(0)
    other = budget.admit(call(), contract, "b")
    first.set()
    await asyncio.sleep(0)  # its answer is there, and waits for a place
    asking.append(asyncio.ensure_future(ask(second)))
    await asyncio.sleep(0)
    second.set()
    await asyncio.sleep(0)
    other.release(Status.SUCCESS)
    await asyncio.wait_for(asyncio.gather(*asking), 60)
    assert refused(budget, contract) is not None, "it has its place again"
    slot.release(Status.SUCCESS)
    assert refused(budget, contract) is None, "and gave it back, once"


@pytest.mark.parametrize("how", ["ends", "is cancelled"])
@pytest.mark.anyio
async def test_a_call_that_waits_to_come_back_takes_no_place_after_its_end(budget: Budget, how: str) -> None:
    contract = rated(concurrent=1)
    slot = budget.admit(call(), contract, "a")

    async def ask() -> None:
        async with slot.left_to_others():
            await asyncio.sleep(0)

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    other = budget.admit(call(), contract, "b")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asking.done(), "there is no place"
    if how == "ends":
        slot.release(Status.UNKNOWN)
    else:
        asking.cancel()
    await asyncio.wait_for(asyncio.gather(asking, return_exceptions=True), 60)
    slot.release(Status.UNKNOWN)
    other.release(Status.SUCCESS)
    assert refused(budget, contract) is None


# ── Several gateways, one state ──


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The wall clock of budgets."""
    clock = Clock()
    monkeypatch.setattr(budgets, "time", SimpleNamespace(time=clock, monotonic=clock))
    return clock


async def code(way: Way, n: int, tool: str = "echo") -> str:
    return (await way.call(tool, {"n": n})).reason_code


@pytest.mark.anyio
async def test_gateways_with_one_state_and_one_that_is_started_again_share_the_calls_of_a_minute(
    tmp_path: Path, minute: Clock
) -> None:
    said = Said(contracts=(contract("echo", rate={"per_minute": 2, "burst": 1}), contract("free")))
    async with governed(tmp_path, said) as one, governed(tmp_path, said) as other:
        assert [await code(one, 1), await code(other, 2)] == ["ok", "ok"]
        assert "try again in" in (await one.call("echo")).text, "its own burst"
    async with governed(tmp_path, said) as again:
        assert await code(again, 3) == "ok"
    for _ in range(2):
        async with governed(tmp_path, said) as again:
            refused = await again.call("echo", {"n": 4})
            assert (refused.status, refused.reason_code) == (Status.DENIED, "throttled")
            assert "2 calls a minute, and other gateways with this state" in refused.text
            assert again.servers.requests == [] and await code(again, 5, "free") == "ok"
    minute.now += 60
    async with governed(tmp_path, said) as later:
        assert await code(later, 6) == "ok"


@pytest.mark.anyio
async def test_the_calls_of_a_minute_of_an_agent_are_shared_too_and_those_of_another_are_its_own(
    tmp_path: Path, minute: Clock
) -> None:
    every = {name: AgentSpec(name, quota=Rate(per_minute=1, burst=1), capabilities=("*",)) for name in ("a", "b")}
    said = Said(contracts=(contract("echo"), contract("free")), agents=every)
    codes = []
    for tool in ("echo", "free", "echo"):
        async with governed(tmp_path, said) as way:
            codes.append((await way.call(tool, principal=Principal("a"))).reason_code)
    assert codes == ["ok", "ok", "throttled"]
    async with governed(tmp_path, said) as way:
        assert (await way.call("echo", principal=Principal("b"))).ok


@pytest.mark.anyio
async def test_a_call_that_other_gateways_leave_no_room_for_keeps_its_approval(tmp_path: Path, minute: Clock) -> None:
    said = Said(contracts=(contract("echo", approval="always", rate={"per_minute": 1, "burst": 1}),))
    for n in range(2):
        async with governed(tmp_path, said) as way:
            asked = await way.call("echo", {"n": n})
            assert asked.approval_id is not None
            approvals.answer(way.store, asked.approval_id, Person("bob"), approve=True)
        async with governed(tmp_path, said) as way:
            assert await code(way, n) == "ok"
    async with governed(tmp_path, said) as way:
        asked = await way.call("echo", {"n": 2})
        assert asked.approval_id is not None
        approvals.answer(way.store, asked.approval_id, Person("bob"), approve=True)
    async with governed(tmp_path, said) as way:
        assert await code(way, 2) == "throttled"
    minute.now += 60
    async with governed(tmp_path, said) as way:
        assert await code(way, 2) == "ok", "the answer was not used up"
