"""What a gateway knows outlives it: a clean stop, and a kill."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.core.model import Person
from ringfence.governance import approvals
from tests.durability.stage import SERVER, Json, Running, Said, Stage, client

pytestmark = pytest.mark.anyio

End = Callable[[Running], None]
ME = Person(pwd.getpwuid(os.getuid()).pw_name, frozenset({"*"}))


@pytest.fixture(params=[Running.stop, Running.kill], ids=["stopped", "killed"])
def end(request: pytest.FixtureRequest) -> End:
    """How the first gateway goes."""
    way: End = request.param
    return way


async def ask(gateway: Running, tool: str, arguments: Json, *, key: str | None = None) -> Said:
    async with client(gateway) as caller:
        return await caller.call(tool, arguments, key=key)


def answer(stage: Stage, said: Said) -> None:
    assert said.approval_id is not None
    with stage.opened() as store:
        approvals.answer(store, said.approval_id, ME, approve=True)


def contract(**more: object) -> Json:
    return {"capabilities": {"append": {"server": "tools", "mode": "write", "log": {"arguments": "redacted"}, **more}}}


async def test_accepted_definitions(stage: Stage, end: End) -> None:
    """Pinned on first use, they are what counts from then on; where people accept, once one of them has."""
    gateway = stage.start(stage.configure())
    assert (await ask(gateway, "append", stage.line("pinned"))).status == "success"
    end(gateway)
    with stage.serving(stage.configure()) as gateway:
        assert (await ask(gateway, "append", stage.line("still pinned"))).status == "success"
    bare = {"placement": "unsafe_host", "env": {"STAGE": str(stage.folder)}}
    strict = stage.configure(servers={"tools": {"command": SERVER, "pins": "accepted", **bare}})
    gateway = stage.start(strict)
    said = await ask(gateway, "append", stage.line("not accepted"))
    assert (said.status, said.reason_code) == ("unavailable", "not_pinned")
    code, told = stage.run("check", strict, "--accept", "--yes")
    assert code == 0, told
    end(gateway)
    with stage.serving(strict) as gateway:
        assert (await ask(gateway, "append", stage.line("accepted"))).status == "success"
    other = stage.folder / "other_server.py"
    other.write_text(Path(SERVER[1]).read_text().replace('"Appends a line to a file"', '"Removes a file"'))
    changed = {"tools": {"command": [SERVER[0], str(other)], "pins": "first_use", **bare}}
    for _ in range(2):  # seen once or twice, nobody has accepted it
        with stage.serving(stage.configure(servers=changed)) as gateway:
            said = await ask(gateway, "append", stage.line("changed"))
        assert (said.status, said.reason_code) == ("unavailable", "pin_changed")
    assert stage.done() == {"pinned": 1, "still pinned": 1, "accepted": 1}
    assert len([r for r in stage.records(kind="pin_changed") if r.body["name"] == "append"]) >= 1


async def test_a_question_and_its_answer(stage: Stage, end: End) -> None:
    config = stage.configure(**contract(approval="always"))
    gateway = stage.start(config)
    asked = await ask(gateway, "append", stage.line("paid"))
    end(gateway)
    with stage.serving(config) as gateway:
        again = await ask(gateway, "append", stage.line("paid"))
        assert (again.status, again.approval_id) == ("approval_required", asked.approval_id)
    answer(stage, asked)  # while no gateway runs
    gateway = stage.start(config)
    assert (await ask(gateway, "append", stage.line("paid"))).status == "success"
    end(gateway)
    with stage.serving(config) as gateway:
        once_more = await ask(gateway, "append", stage.line("paid"))
    assert (once_more.status, stage.done()) == ("approval_required", {"paid": 1})
    assert once_more.approval_id != asked.approval_id
    stage.assert_verifies()
    stage.assert_each_call_closed_once()


async def test_the_outcome_under_a_key(stage: Stage, end: End) -> None:
    config = stage.configure()
    gateway = stage.start(config)
    first = await ask(gateway, "append", stage.line("paid"), key="order-1")
    end(gateway)
    with stage.serving(config) as gateway:
        again = await ask(gateway, "append", stage.line("paid"), key="order-1")
        other = await ask(gateway, "append", stage.line("more"), key="order-1")
    assert (again.status, again.text) == (first.status, first.text) == ("success", "appended")
    assert (other.status, other.reason_code) == ("validation_failure", "key_conflict")
    assert stage.done() == {"paid": 1}
    replayed = next(r.body for r in stage.records(call_id=again.call_id))
    assert replayed["replayed_from"] == first.call_id


async def test_the_quota_of_a_day(stage: Stage, end: End) -> None:
    config = stage.configure(**contract(rate={"per_day": 3}))
    day = time.strftime("%F", time.gmtime())
    gateway = stage.start(config)
    told = [await ask(gateway, "append", stage.line("one")) for _ in range(2)]
    end(gateway)
    with stage.serving(config) as gateway:
        told += [await ask(gateway, "append", stage.line("one")) for _ in range(2)]
    if time.strftime("%F", time.gmtime()) != day:
        pytest.skip("a new day began meanwhile, and with it a new quota")
    assert [(s.status, s.reason_code) for s in told] == [("success", "ok")] * 3 + [("denied", "quota")]
    assert stage.done() == {"one": 3}


async def test_a_clean_stop_leaves_one_file_and_nothing_to_recover(stage: Stage) -> None:
    with stage.serving(stage.configure()) as gateway:
        assert (await ask(gateway, "append", stage.line("paid"))).status == "success"
    there = sorted(path.name for path in stage.state.iterdir() if path.name != "selftest.json")
    assert there == ["chains", "checkpoints", "ringfence.db"]
    assert stage.records()[-1].body["recovered"] is False
    with stage.opened() as store:
        assert (store.recovered.chains, store.recovered.calls) == ((), ())


async def test_a_second_store_in_one_process_does_not_cost_the_first_its_log(stage: Stage) -> None:
    """The locks of a process on a file go with the first descriptor that it closes; then another process, the last as
    it thinks, would throw away the write-ahead log that this one goes on writing to."""
    with stage.opened() as store:
        with stage.opened():
            pass
        with stage.serving(stage.configure()):
            pass
        receipt = store.write_sync(lambda tx: tx.append("reload", None, {"cause": "test"}))
        code, said = stage.run("audit", "list", "--all", "--json", "--config", stage.configure())
        assert code == 0, said
        assert '"reload"' in said
    stage.assert_kept([{"chain": receipt.chain, "seq": receipt.seq, "head": receipt.head}])
    stage.assert_verifies()
