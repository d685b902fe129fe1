"""One key, one effect: joined, replayed, in conflict, or unknown; never a second run that nobody asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, UpstreamFailed
from ringfence.core.model import GuardedText, Json, Outcome, Principal, Status
from ringfence.core.shares import level
from ringfence.governance import idempotency
from ringfence.governance.idempotency import IdempotencyKey
from ringfence.store import KeyRow, sqlite
from tests import tooling
from tests.faking import OK, Said, Way, contract, governed, rulebook

pytestmark = pytest.mark.anyio

WRITE = Said(contracts=(contract("echo", mode="write"), contract("other", tool="echo", mode="write")))
DERIVED = Said(contracts=(contract("echo", mode="write", idempotent={"key": "args.title"}, retry={"attempts": 0}),))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(sqlite, "LOOK_SECONDS", 0.01)


async def test_a_repeated_call_is_answered_and_not_run(tmp_path: Path) -> None:
    async with governed(tmp_path, WRITE, [{**OK, "structuredContent": {"n": 1}, "x": 2}]) as way:
        first = await way.call("echo", {"a": 1}, idempotency_key="k")
        again = await way.call("echo", {"a": 1}, idempotency_key="k")
        assert len(way.servers.requests) == 1
        assert (again.status, again.result, again.trust) == (first.status, first.result, first.trust)
        record = way.finished(again.facts["call_id"])[0]
        assert record["replayed_from"] == first.facts["call_id"]
        assert record["started_seq"] is None
        assert "earlier call" in again.facts["explanation"]


@pytest.mark.parametrize(
    ("tightened", "result", "trust"),
    [
        ({"redact": ["CUST-[0-9]+"]}, {"content": [{"type": "text", "text": "of [redacted]"}]}, "partial"),
        ({"result": {"fields": ["n"]}}, {"structuredContent": {"n": 1}, "content": []}, "partial"),
        ({"result": {"trust": "untrusted"}}, {"content": [{"type": "text", "text": "of CUST-1"}]}, "untrusted"),
    ],
)
async def test_what_the_contract_has_withdrawn_is_not_replayed(
    tightened: Json, result: Json, trust: str, tmp_path: Path
) -> None:
    kept = {"content": [{"type": "text", "text": "of CUST-1"}], "structuredContent": {"n": 1, "more": "x"}}
    async with governed(tmp_path, WRITE, [kept]) as way:
        assert (await way.call("echo", {"a": 1}, idempotency_key="k")).result == kept
        tight = Said(contracts=(contract("echo", mode="write", **tightened),))
        way.pipeline.rules = rulebook(tight, way.store)
        again = await way.call("echo", {"a": 1}, idempotency_key="k")
        assert len(way.servers.requests) == 1
        assert again.ok and again.trust == trust
        assert again.result == {**kept, **result}


async def test_what_is_too_large_by_now_is_not_replayed(tmp_path: Path) -> None:
    async with governed(tmp_path, WRITE, [{"content": [{"type": "text", "text": "x" * 5000}]}]) as way:
        assert (await way.call("echo", {"a": 1}, idempotency_key="k")).ok
        tight = Said(contracts=(contract("echo", mode="write", result={"max_bytes": 1000}),))
        way.pipeline.rules = rulebook(tight, way.store)
        again = await way.call("echo", {"a": 1}, idempotency_key="k")
        assert (again.status, again.reason_code, again.result) == (Status.FAILED, "result_too_large", None)


async def test_a_failure_is_replayed_as_the_failure_it_was(tmp_path: Path) -> None:
    failure = UpstreamFailed("upstream_error", -32602, "no", {"why": 1})
    async with governed(tmp_path, WRITE, [failure, OK]) as way:
        for _ in range(2):
            outcome = await way.call("echo", idempotency_key="k")
            assert (outcome.status, outcome.reason_code) == (Status.FAILED, "upstream_error")
            assert outcome.error == {"code": -32602, "message": "no", "data": {"why": 1}}
            assert outcome.facts["effect"] == "unknown", "the same for the replay: nothing more is known of it"
        assert "an earlier call's failure" in outcome.facts["explanation"]
        assert len(way.servers.requests) == 1


async def test_the_same_key_for_another_request_conflicts(tmp_path: Path) -> None:
    async with governed(tmp_path, WRITE) as way:
        await way.call("echo", {"a": 1}, idempotency_key="k")
        other = await way.call("echo", {"a": 2}, idempotency_key="k")
        assert (other.status, other.reason_code) == (Status.VALIDATION_FAILURE, "key_conflict")
        assert len(way.servers.requests) == 1


@pytest.mark.parametrize(
    "elsewhere",
    [
        replace(WRITE, environment="production"),
        replace(WRITE, server=replace(WRITE.server, url="http://127.0.0.1:9/mcp")),
        replace(WRITE, contracts=(contract("echo", tool="other", mode="write"),)),
    ],
    ids=["environment", "server", "tool"],
)
async def test_a_key_belongs_to_the_place_that_the_call_goes_to(tmp_path: Path, elsewhere: Said) -> None:
    """Several configurations may have one state: what one of them called is no answer for another."""
    async with governed(tmp_path, WRITE) as way:
        assert (await way.call("echo", {"a": 1}, idempotency_key="k")).ok
        way.pipeline.rules = rulebook(elsewhere, way.store)
        again = await way.call("echo", {"a": 1}, idempotency_key="k")
        assert way.finished(again.facts["call_id"])[0]["replayed_from"] is None


@pytest.mark.parametrize(
    "change",
    [{"tool": "other"}, {"principal": Principal("somebody")}, {"idempotency_key": "l"}, {"idempotency_key": None}],
    ids=str,
)
async def test_a_key_belongs_to_one_caller_and_one_capability(tmp_path: Path, change: dict[str, Any]) -> None:
    async with governed(tmp_path, WRITE) as way:
        asked: dict[str, Any] = {"tool": "echo", "idempotency_key": "k"}
        await way.call(**asked)
        assert (await way.call(**{**asked, **change})).ok
        assert len(way.servers.requests) == 2


@pytest.mark.parametrize("lost", [OutcomeUnknown("answer_lost", "x"), Refused(Status.TIMEOUT, "timeout", "x")], ids=str)
async def test_an_unknown_outcome_stays_unknown(tmp_path: Path, lost: Exception) -> None:
    async with governed(tmp_path, WRITE, [lost, OK]) as way:
        await way.call(idempotency_key="k")
        again = await way.call(idempotency_key="k")
        assert (again.status, again.reason_code) == (Status.UNKNOWN, "key_unknown")
        assert again.facts["effect"] == "unknown"
        assert len(way.servers.requests) == 1, "it may have run, so it is not run again"


async def test_a_call_that_never_ran_leaves_the_key_free(tmp_path: Path) -> None:
    async with governed(tmp_path, WRITE, [Unavailable("server_down", "x"), OK]) as way:
        assert (await way.call(idempotency_key="k")).status is Status.UNAVAILABLE
        assert (await way.call(idempotency_key="k")).ok


async def test_calls_at_the_same_time_join_the_one_that_runs(tmp_path: Path) -> None:
    async with governed(tmp_path, WRITE) as way:
        way.servers.hold = anyio.Event()
        outcomes: list[Outcome] = []

        async def call() -> None:
            outcomes.append(await way.call("echo", {"a": 1}, idempotency_key="k"))

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(call)
            await anyio.sleep(0.1)
            way.servers.hold.set()
        assert [outcome.status for outcome in outcomes] == [Status.SUCCESS] * 20
        assert len(way.servers.requests) == 1


async def test_whoever_waits_too_long_for_another_is_told(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", mode="write", timeout_seconds=0.1),))
    async with governed(tmp_path, said) as way:
        way.servers.hold = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: way.call(idempotency_key="k"))
            await tooling.until(lambda: way.servers.requests)
            outcome = await way.call(idempotency_key="k")
            assert (outcome.status, outcome.reason_code) == (Status.UNAVAILABLE, "key_busy")
            way.servers.hold.set()


async def test_a_contract_derives_the_key(tmp_path: Path) -> None:
    async with governed(tmp_path, DERIVED) as way:
        for title in ("a", "a", "b"):
            assert (await way.call("echo", {"title": title})).ok
        assert len(way.servers.requests) == 2
        assert (await way.call("echo", {"title": "a", "more": 1})).reason_code == "key_conflict"
        for arguments in ({}, {"title": ""}, {"title": None}, {"title": True}, {"title": ["a"]}):
            assert (await way.call("echo", arguments)).reason_code == "no_key"


async def test_a_caller_cannot_replace_the_derived_key(tmp_path: Path) -> None:
    async with governed(tmp_path, DERIVED) as way:
        for key in ("1", "2", None):
            assert (await way.call("echo", {"title": "a"}, idempotency_key=key)).ok
        assert len(way.servers.requests) == 1
        assert (await way.call("echo", {"title": "a", "more": 1}, idempotency_key="3")).reason_code == "key_conflict"
        assert (await way.call("echo", {}, idempotency_key="4")).reason_code == "no_key"


async def test_a_key_is_kept_as_a_digest(tmp_path: Path) -> None:
    async with governed(tmp_path, DERIVED) as way:
        await way.call("echo", {"title": "a-telling-title"})
        await way.call("echo", {"title": "a-telling-title", "more": 1})
    everything = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert b"telling" not in everything


def test_a_row_without_its_outcome_is_unknown() -> None:
    key = IdempotencyKey("s", "k", "d")
    row = KeyRow("s", "k", "d", "call_1", "done", None, 0.0)  # its values were erased
    with pytest.raises(Refused) as refused:
        idempotency.judge(row, key)
    assert refused.value.status is Status.UNKNOWN


def test_an_outcome_survives_keeping() -> None:
    outcome = Outcome(
        Status.FAILED, "tool_error", GuardedText("m"), result={"isError": True, "x": [1]}, trust="untrusted"
    )
    assert idempotency.unpack(idempotency.pack(outcome), GuardedText) == outcome


@pytest.mark.parametrize(("mode", "times"), [("read", 2), ("write", 1)])
async def test_a_long_result_is_kept_where_the_call_may_have_changed_something(
    mode: str, times: int, tmp_path: Path
) -> None:
    long = {"content": [{"type": "text", "text": "x" * (idempotency.MAX_KEPT + 1)}]}
    async with governed(tmp_path, Said(contracts=(contract("echo", mode=mode),)), [long, long]) as way:
        for _ in range(2):
            assert (await way.call("echo", {"a": 1}, idempotency_key="k")).result == long
        assert len(way.servers.requests) == times


@pytest.mark.parametrize(("mode", "times"), [("read", 4), ("write", 3)])
async def test_a_bounded_number_of_results_is_kept_for_calls_that_changed_nothing(
    mode: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_RESULTS", 2)
    async with governed(tmp_path, Said(contracts=(contract("echo", mode=mode),)), [OK] * 5) as way:
        for key in ("a", "b", "c", "a", "c"):
            assert (await way.call("echo", {"a": 1}, idempotency_key=key)).ok
        assert len(way.servers.requests) == times
        bob = Principal("bob")
        for _ in range(2):
            assert (await way.call("echo", {"a": 1}, idempotency_key="e", principal=bob)).ok
        assert len(way.servers.requests) == times + 1, "another's are no matter"


async def test_processes_that_keep_one_result_each_are_held_within_the_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_OF_ONE", 300_000)
    long = {"content": [{"type": "text", "text": "x" * 50_000}]}
    for n in range(9):
        async with governed(tmp_path, WRITE, [long]) as way:
            assert (await way.call("echo", {"n": n}, idempotency_key=f"{n}")).ok
            sizes = way.store.reader()._connection.execute("SELECT sum(bytes) FROM keys").fetchone()
    assert sizes[0] <= 300_000


async def test_the_oldest_kept_results_of_a_caller_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"content": [{"type": "text", "text": "x" * 50_000}]}
    for name, most in (("MAX_OF_ONE", 300_000), ("MAX_OF_ALL", 500_000), ("_LOOK_BYTES", 1)):
        monkeypatch.setattr(idempotency, name, most)

    def kept(way: Way, principal: str = "local/") -> list[str]:
        rows = way.store.reader()._connection.execute(
            "SELECT call_id FROM keys WHERE outcome IS NOT NULL AND instr(scope, ?) = 1 ORDER BY at", (principal,)
        )
        return [row[0] for row in rows]

    async with governed(tmp_path, WRITE, [long]) as way:
        ids = [(await way.call("echo", {"n": n}, idempotency_key=f"{n}")).facts["call_id"] for n in range(12)]
        assert 0 < len(kept(way)) <= 5 and kept(way) == ids[-len(kept(way)) :], "the oldest went"
        made = len(way.servers.requests)
        again = await way.call("echo", {"n": 0}, idempotency_key="0")
        assert (again.status, again.reason_code) == (Status.UNKNOWN, "result_not_kept")
        assert ids[0] in str(again.message) and len(way.servers.requests) == made, "what has run is not made again"
        assert (await way.call("echo", {"n": 11}, idempotency_key="11")).ok
        for n in range(12):
            other = Principal(f"other{n % 3}")
            assert (await way.call("echo", {"n": n}, idempotency_key=f"{n}", principal=other)).ok
        assert len(kept(way)) <= 9, "and so do those of all callers together"
        assert (await way.call("echo", {"n": 11}, idempotency_key="11", principal=Principal("other2"))).ok
        assert len(way.servers.requests) == made + 12


async def test_one_agent_or_tenant_cannot_take_the_room_for_results_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"content": [{"type": "text", "text": "x" * 50_000}]}
    for name, most in (("MAX_OF_ONE", 10**9), ("MAX_OF_ALL", 500_000), ("_LOOK_BYTES", 1)):
        monkeypatch.setattr(idempotency, name, most)
    quiet, neighbour = Principal("quiet"), Principal("neighbour", tenant="acme")
    greedy = [Principal(f"greedy{n}", tenant="acme") for n in range(2)]
    async with governed(tmp_path, WRITE, [long]) as way:
        for who in (quiet, neighbour):
            assert (await way.call("echo", {"n": 0}, idempotency_key="first", principal=who)).ok
        for n in range(15):
            for who in greedy:
                assert (await way.call("echo", {"n": n}, idempotency_key=f"{n}", principal=who)).ok
        made = len(way.servers.requests)
        for who in (quiet, neighbour):
            assert (await way.call("echo", {"n": 0}, idempotency_key="first", principal=who)).ok, (
                "kept, though the oldest"
            )
        for who in greedy:
            assert (
                await way.call("echo", {"n": 0}, idempotency_key="0", principal=who)
            ).reason_code == "result_not_kept"
        assert len(way.servers.requests) == made
        assert sum(way.store.write_sync(lambda tx: tx.kept_bytes()).values()) <= 500_000 + 60_000


@pytest.mark.parametrize(
    ("held", "most", "each"),
    [
        ({}, 9, 0),
        ({"a": 5}, 9, 5),
        ({"a": 5, "b": 1}, 4, 3),
        ({"a": 9, "b": 9, "c": 1}, 11, 5),
        ({"a": 9, "b": 9}, 0, 0),
    ],
)
def test_a_share_is_as_much_as_each_can_keep(held: dict[str, int], most: int, each: int) -> None:
    assert level(held, most) == each
    assert sum(min(size, each) for size in held.values()) <= max(most, 0)
