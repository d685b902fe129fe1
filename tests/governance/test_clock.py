"""A clock that is set back makes nothing young again: approvals that expired stay so, and the set-back is on record."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core import system
from ringfence.store import Expired, Store
from tests.faking import Way, governed
from tests.governance.test_approval_evidence import ASKING, BOSS, answer, ran_on, tamper, verified

pytestmark = pytest.mark.anyio

HOUR = 3600.0
LONG = replace(ASKING, approvals={"boss": replace(BOSS, expires_seconds=HOUR)})


@dataclass(slots=True)
class Clocks:
    """Both clocks of the machine: the one on the wall, which anybody with the right can set, and the one since boot."""

    wall: float
    uptime: float

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.uptime += seconds

    def set_back(self, seconds: float) -> None:
        self.wall -= seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks(time.time(), system.uptime())
    monkeypatch.setattr(time, "time", lambda: made.wall)
    monkeypatch.setattr(system, "uptime", lambda: made.uptime)
    return made


def kinds(way: Way) -> list[str]:
    told = ("clock_set_back", "approval_void")
    return [record.kind for record in way.store.reader().records() if record.kind in told]


async def test_an_expired_approval_gets_no_more_time_from_a_table(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path, LONG) as way:
        await answer(way, await way.call())
        clocks.passes(HOUR + 1)
        assert tamper(way, "UPDATE approvals SET expires_at = expires_at + 10000") == 1
        assert (await way.call()).reason_code == "approval_unproven"
        assert way.servers.requests == []


@pytest.mark.parametrize("back", [HOUR, 1.5 * HOUR, 30 * HOUR])
async def test_an_approval_that_expired_stays_so_when_the_clock_is_set_back(
    tmp_path: Path, clocks: Clocks, back: float
) -> None:
    async with governed(tmp_path, LONG) as way:
        given = await answer(way, await way.call())
        clocks.passes(HOUR + 60)
        clocks.set_back(back)
        late = await way.call()
        assert late.status == "approval_required" and late.approval_id != given
        assert way.servers.requests == []
        assert verified(way).ok


async def test_a_set_back_is_on_record_and_voids_what_is_open(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path, LONG) as way:
        given = await answer(way, await way.call(arguments={"n": 1}))
        waiting = await way.call(arguments={"n": 2})
        clocks.passes(60)
        clocks.set_back(600)
        refused = await way.call(arguments={"n": 1})
        assert refused.status == "approval_required" and refused.approval_id != given
        assert kinds(way) == ["clock_set_back", "approval_void", "approval_void"]
        (marked,) = [r.body for r in way.store.reader().records(kind="clock_set_back")]
        assert marked["void"] == 2 and 599 < marked["from"] - marked["to"] < 601
        with pytest.raises(Expired):
            await answer(way, waiting)
        assert verified(way).ok
        await answer(way, refused)
        assert (await way.call(arguments={"n": 1})).ok, "what is asked after it is as good as ever"
        assert len(kinds(way)) == 3, "once"


async def test_calls_that_need_nobody_go_on_across_a_set_back(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path) as way:
        assert (await way.call()).ok
        clocks.set_back(HOUR)
        assert (await way.call()).ok and (await way.call()).ok
        assert kinds(way) == ["clock_set_back"] and verified(way).ok


async def test_a_correction_of_the_clock_is_no_set_back(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path, LONG) as way:
        await answer(way, await way.call())
        clocks.passes(10)
        clocks.set_back(1)
        assert (await way.call()).ok and kinds(way) == []


async def test_small_steps_back_add_up_to_no_more_time(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path, replace(LONG, approvals={"boss": replace(BOSS, expires_seconds=60)})) as way:
        given = await answer(way, await way.call())
        for _ in range(61):
            clocks.passes(1)
            clocks.set_back(1)
            await way.store.write(lambda tx: tx.append("note", None, {}))
        assert kinds(way) == []
        late = await way.call()
        assert late.status == "approval_required" and late.approval_id != given, "time has passed all the same"


async def test_a_set_back_while_nobody_runs_is_found_by_the_next_start(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path, LONG) as way:
        given = await answer(way, await way.call())
    clocks.set_back(HOUR)
    clocks.uptime = 5.0  # another start of the machine
    async with governed(tmp_path, LONG) as way:
        assert kinds(way) == ["clock_set_back", "approval_void"]
        late = await way.call()
        assert late.status == "approval_required" and late.approval_id != given
        assert verified(way).ok


async def test_two_processes_put_one_set_back_on_record_once(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path, LONG) as way:
        await way.call()
        clocks.set_back(HOUR)
        other = Store.open(way.store.folder, load_or_create(tmp_path / "keys"))
        other.close()
        asked = await way.call()
        assert kinds(way).count("clock_set_back") == 1
        await answer(way, asked)
        assert (await way.call()).ok


async def test_a_clock_that_ran_ahead_for_a_while_spoils_nothing_that_is_asked_later(
    tmp_path: Path, clocks: Clocks
) -> None:
    async with governed(tmp_path, LONG) as way:
        clocks.wall += 1000 * HOUR
        await way.call(arguments={"n": 1})
        clocks.wall -= 1000 * HOUR
        await answer(way, await way.call(arguments={"n": 2}))
        assert (await way.call(arguments={"n": 2})).ok


async def test_verify_finds_a_call_that_used_an_approval_across_a_set_back(tmp_path: Path, clocks: Clocks) -> None:
    async with governed(tmp_path, LONG) as way:
        asked = await way.call()
        identity = await answer(way, asked)
        story = way.store.reader().approval_records(identity)
        places = [{"chain": r.chain, "seq": r.seq, "hash": r.hash} for r in story]
        clocks.passes(60)
        clocks.set_back(HOUR)
        await ran_on(way, {"id": identity, "rule": "boss", "asked": places[0], "by": [places[1]]})
        report = verified(way)
        assert not report.ok and "which was void (clock_set_back)" in str(report)
