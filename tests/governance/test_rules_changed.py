"""What has not begun when the rules are tightened does not begin, whatever it waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from ringfence.core.errors import Unavailable
from ringfence.core.model import Action, Json, Outcome, Rule
from ringfence.core.ports import UpstreamRequest
from ringfence.governance import idempotency
from ringfence.governance.contract import Catalog, Schemas
from ringfence.store import KeyRow, Reader, sqlite
from tests import tooling
from tests.faking import OK, Said, Way, contract, governed, rulebook

pytestmark = pytest.mark.anyio

SAID = Said(contracts=(contract("echo", retry={"attempts": 1}), contract("other", tool="echo")))
LONG: Json = {"content": [{"type": "text", "text": "x" * (idempotency.MAX_KEPT + 1)}]}
"""More than is kept of a read, so that the next call under the same key is made."""


def denied(tool: str, action: Action = Action.DENY) -> Said:
    return replace(SAID, rules=(Rule(id="no", action=action, name="no", tool_patterns=(tool,)),))


OTHERS = {
    "denied": denied("echo"),
    "asked": denied("echo", Action.ASK),
    "slower": replace(SAID, contracts=(contract("echo", retry={"attempts": 1}, rate={"per_minute": 1}),)),
    "gone": replace(SAID, contracts=(contract("other", tool="echo"),)),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LOOK_SECONDS", 0.01)


def waiting(way: Way) -> int:
    return way.pipeline._keys._waiting.total()


@asynccontextmanager
async def one_key(way: Way, waiting_calls: int) -> AsyncIterator[list[Outcome]]:
    """One call that its server holds until the end of this, and others that wait for it under the same key."""
    way.servers.hold = anyio.Event()
    outcomes: list[Outcome] = []

    async def call() -> None:
        outcomes.append(await way.call("echo", {"a": 1}, idempotency_key="k"))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await tooling.until(lambda: way.servers.requests)
        for _ in range(waiting_calls):
            group.start_soon(call)
        await tooling.until(lambda: waiting(way) == waiting_calls)
        yield outcomes
        way.servers.hold.set()


@pytest.mark.parametrize("name", OTHERS)
async def test_a_call_that_waits_for_another_under_its_key_is_judged_again(name: str, tmp_path: Path) -> None:
    async with governed(tmp_path, SAID, [LONG]) as way:
        async with one_key(way, waiting_calls=2) as outcomes:
            way.pipeline.rules = rulebook(OTHERS[name], way.store)
        assert outcomes[0].ok, "what had begun goes on"
        assert [(each.status, each.reason_code) for each in outcomes[1:]] == [("denied", "rules_changed")] * 2
        assert len(way.servers.requests) == 1


async def test_a_call_whose_tool_is_there_no_more_after_it_waited_says_why(tmp_path: Path) -> None:
    """Nobody forbade it, and to make it again does not help."""
    async with governed(tmp_path, SAID, [LONG]) as way:
        async with one_key(way, waiting_calls=1) as outcomes:
            now = rulebook(SAID, way.store)
            missing = Catalog({one.name: one for one in SAID.contracts}, {}, schemas=Schemas())
            way.pipeline.rules = replace(now, catalog=missing)
        assert (outcomes[1].status, outcomes[1].reason_code) == ("unavailable", "not_pinned")
        assert len(way.servers.requests) == 1


async def test_a_reload_that_does_not_concern_a_call_does_not_stop_it(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID, [LONG]) as way:
        async with one_key(way, waiting_calls=1) as outcomes:
            now = way.pipeline.rules = rulebook(denied("other"), way.store)
        assert [each.ok for each in outcomes] == [True, True]
        records = [record.body for record in way.store.reader().records(kind="started")]
        assert len(way.servers.requests) == len(records) == 2
        begun_by = [record["decision"]["policy_digest"] for record in records]
        assert begun_by[1] == now.policy.digest != begun_by[0], "the record names the rules that it began by"


async def test_a_call_that_is_to_be_tried_again_is_judged_again(tmp_path: Path) -> None:
    async def reload(request: UpstreamRequest) -> Json:
        way.pipeline.rules = rulebook(OTHERS["denied"], way.store)
        raise Unavailable("server_down", "not there")

    async with governed(tmp_path, SAID, [reload, OK]) as way:
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == ("denied", "rules_changed")
        assert outcome.facts["effect"] == "none"
        assert len(way.servers.requests) == 1


async def test_what_waited_for_its_server_is_judged_before_it_is_sent(tmp_path: Path) -> None:
    async def start(request: UpstreamRequest) -> Json:
        way.pipeline.rules = rulebook(OTHERS["denied"], way.store)
        await request.recheck()
        return OK

    async with governed(tmp_path, SAID, [start]) as way:
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == ("denied", "rules_changed")


# ── waiting costs others nothing ──


async def test_one_look_serves_all_that_wait_under_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with governed(tmp_path, SAID) as way:
        way.servers.hold = anyio.Event()
        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(lambda: way.call("echo", {"a": 1}, idempotency_key="k"))
            await tooling.until(lambda: waiting(way) == 39)
            read: list[int] = []
            rows = Reader.key

            def counted(reader: Reader, scope: str, key: str) -> KeyRow | None:
                read.append(1)
                return rows(reader, scope, key)

            monkeypatch.setattr(Reader, "key", counted)
            for _ in range(3):
                assert (await way.call("none")).reason_code == "unknown_tool"  # so that something is written
                await anyio.sleep(3 * sqlite.LOOK_SECONDS)
            assert read == [], "nobody reads what is kept under the key before the call has ended"
            way.servers.hold.set()
        assert len(way.servers.requests) == 1


async def test_calls_that_wait_under_keys_have_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_MAX_WAITING", 4)
    async with governed(tmp_path, SAID) as way:
        way.servers.hold = anyio.Event()

        async def call(client: str) -> Outcome:
            return await way.call("echo", {"a": 1}, idempotency_key="k", session=client)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(call, "one")
            await tooling.until(lambda: waiting(way) == 2)
            refused = await call("one")
            assert (refused.status, refused.reason_code) == ("denied", "throttled")
            group.start_soon(call, "two")
            await tooling.until(lambda: waiting(way) == 3)
            way.servers.hold.set()
        assert waiting(way) == 0
        assert len(way.servers.requests) == 1
