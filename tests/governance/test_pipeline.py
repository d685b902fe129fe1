"""The way of a call: every ending of the table, with its effect, and exactly one record of it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.core.box import Mount
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, UpstreamFailed
from ringfence.core.model import (
    SYSTEM,
    ApprovalRule,
    Call,
    Effect,
    Json,
    Mode,
    NetworkSpec,
    Person,
    Principal,
    ServerSpec,
    Status,
)
from ringfence.governance import approvals, guard
from ringfence.governance.guard import ONLY_FIELDS
from ringfence.governance.rulebook import implicit_contract
from ringfence.sandbox.tools.toolkit import SERVER
from ringfence.secrets.redaction import TenantRedactor
from ringfence.store.sqlite import Store
from ringfence.store.transaction import Transaction
from tests import tooling
from tests.faking import DESK, OK, SHUT_IN, Client, Reply, Said, broken, contract, definition, governed, make_call
from tests.making import rule

pytestmark = pytest.mark.anyio

READ, WRITE = contract("echo"), contract("echo", mode="write")
FAILED = {"content": [{"type": "text", "text": "no"}], "isError": True}
TYPED = definition("echo", outputSchema={"type": "object", "required": ["n"]})
TIMEOUT = Refused(Status.TIMEOUT, "timeout", "no answer in time")
LOST = OutcomeUnknown("answer_lost", "the answer was lost")
DOWN = Unavailable("server_down", "the server is down")

# What came back, the contract's mode, and how it ends: DESIGN's table, line by line.
ENDINGS: dict[str, tuple[Reply, Mode, Status, str, Effect]] = {
    "success of a read": (OK, Mode.READ, Status.SUCCESS, "ok", Effect.NONE),
    "success of a write": (OK, Mode.WRITE, Status.SUCCESS, "ok", Effect.CONFIRMED),
    "failure of a read": (FAILED, Mode.READ, Status.FAILED, "tool_error", Effect.NONE),
    "failure of a write": (FAILED, Mode.WRITE, Status.FAILED, "tool_error", Effect.UNKNOWN),
    "error of a read": (UpstreamFailed("upstream_error", -32602, "no"), Mode.READ, Status.FAILED, "upstream_error",
                        Effect.NONE),
    "error of a write": (UpstreamFailed("upstream_error", -32602, "no"), Mode.WRITE, Status.FAILED, "upstream_error",
                         Effect.UNKNOWN),
    "timeout of a read": (TIMEOUT, Mode.READ, Status.TIMEOUT, "timeout", Effect.NONE),
    "timeout of a write": (TIMEOUT, Mode.WRITE, Status.TIMEOUT, "timeout", Effect.UNKNOWN),
    "lost answer of a read": (LOST, Mode.READ, Status.UNKNOWN, "answer_lost", Effect.NONE),
    "lost answer of a write": (LOST, Mode.WRITE, Status.UNKNOWN, "answer_lost", Effect.UNKNOWN),
    "unavailable": (DOWN, Mode.WRITE, Status.UNAVAILABLE, "server_down", Effect.NONE),
    "a fault of ours": (RuntimeError("boom"), Mode.WRITE, Status.UNKNOWN, "internal", Effect.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDINGS)
async def test_every_ending_has_its_status_effect_and_one_record(case: str, tmp_path: Path) -> None:
    reply, mode, status, code, effect = ENDINGS[case]
    said = Said(contracts=(contract("echo", mode=str(mode), retry={"attempts": 0}),), server=SHUT_IN)
    async with governed(tmp_path, said, [reply]) as way:
        outcome = await way.call("echo", {"text": "x"})
        assert (outcome.status, outcome.reason_code, outcome.facts["effect"]) == (status, code, effect)
        assert way.kinds(outcome.facts["call_id"]) == ["started", "finished"]
        record = way.finished()[0]
        assert (record["status"], record["reason_code"], record["effect"]) == (status, code, effect)
        assert outcome.receipt is not None
        assert (outcome.receipt.chain, outcome.receipt.seq) == (record["chain"], record["seq"])
        assert way.store.reader().running() == []


@pytest.mark.parametrize("case", [case for case, ending in ENDINGS.items() if ending[1] is Mode.READ])
@pytest.mark.parametrize(
    "place",
    [{"network": "inside"}, {"mounts": (Mount("/a", "/b", "rw"),)}, {"placement": "unsafe_host"}, {"url": DESK.url}],
    ids=["network", "mount", "host", "remote"],
)
async def test_the_record_of_a_read_of_a_server_that_can_do_more_says_that_its_effect_is_only_declared(
    case: str, place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, _, status, code, _ = ENDINGS[case]
    synced = durable_writes(monkeypatch)
    said = Said(contracts=(contract("echo", retry={"attempts": 0}),), server=replace(SHUT_IN, **place))
    async with governed(tmp_path, said, [reply]) as way:
        outcome = await way.call("echo", {"text": "x"})
        assert (outcome.status, outcome.reason_code, outcome.facts["effect"]) == (status, code, Effect.NONE)
        assert outcome.facts["effect_basis"] == "declared" and "no side effect" not in outcome.facts["explanation"]
        assert "it is declared a read" in outcome.facts["explanation"]
        started, finished = way.store.reader().records(call_id=outcome.facts["call_id"])
        assert (started.body["effect_possible"], finished.body["effect"]) == (True, Effect.NONE)
        assert finished.body["facts"]["effect_basis"] == "declared"
        assert started.body["durable"] is False and not any(synced), "a read that is declared one waits for no disk"


@pytest.mark.parametrize(
    ("kind", "asked", "more"),
    [
        ("resource", "doc:1", {"arguments": {"uri": "doc:1"}, "method": "resources/read"}),
        ("listing", "desk", {"method": "resources/list"}),
    ],
)
async def test_what_a_server_lists_is_read_from_it_like_anything_else(
    kind: Any, asked: str, more: dict[str, Any], tmp_path: Path
) -> None:
    for server, basis in ((SHUT_IN, None), (DESK, "declared")):
        async with governed(tmp_path / server.placement / str(server.url is None), Said(server=server)) as way:
            made = Call("call_1", Principal("analyst"), asked, **{"arguments": {}, **more}, kind=kind, server="desk")
            outcome = await way.pipeline.handle(made, Client())
            assert (outcome.status, outcome.facts["effect"]) == (Status.SUCCESS, Effect.NONE)
            assert outcome.facts.get("effect_basis") == basis


@pytest.mark.parametrize(("mode", "effect"), [("read", Effect.NONE), ("write", Effect.UNKNOWN)])
async def test_a_result_that_cannot_be_searched_in_time_is_withheld(
    mode: str, effect: Effect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_INSPECTION_SECONDS", 0.1)
    long = {"content": [{"type": "text", "text": "x" * 100_000}]}
    said = Said(contracts=(contract("echo", mode=mode, timeout_seconds=1),), server=SHUT_IN)
    go = threading.Event()
    async with governed(tmp_path, said, [long]) as way, anyio.create_task_group() as group:
        group.start_soon(way.pipeline._guard.threads.do, "desk", go.wait)  # something else of the same server
        try:
            turns = way.pipeline._guard.threads._turns
            await tooling.until(lambda: "desk" in turns and turns["desk"].locked())
            outcome = await way.call("echo", {"text": "x"})
        finally:
            go.set()
        assert (outcome.status, outcome.reason_code, outcome.facts["effect"]) == (Status.TIMEOUT, "timeout", effect)
        assert outcome.result is None and "could not be searched" in str(outcome.message)
        assert way.kinds(outcome.facts["call_id"]) == ["started", "finished"]
        assert (await way.call("echo", {"text": "x"})).status is Status.SUCCESS


def durable_writes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each write to the store from now on: whether it waits for the disk."""
    waited: list[bool] = []
    write = Store.write

    async def watched(self: Store, work: Any, *, durable: bool = False, **how: Any) -> Any:
        waited.append(durable)
        return await write(self, work, durable=durable, **how)

    monkeypatch.setattr(Store, "write", watched)
    return waited


# What is refused before anything is sent: the contract, the rest of the configuration, the call.
def asks(text: str = "x", **more: Any) -> dict[str, Any]:
    return {"arguments": {"text": text}, **more}


WITH_SCHEMA = definition("echo", inputSchema={"type": "object", "properties": {"text": {"type": "string"}}})
REFUSALS: dict[str, tuple[Said, dict[str, Any], Status, str]] = {
    "unknown tool": (Said(), {"tool": "ecko"}, Status.VALIDATION_FAILURE, "unknown_tool"),
    "unreadable": (Said(), asks(fault="duplicate key 'a'"), Status.VALIDATION_FAILURE, "bad_request"),
    "not JSON": (Said(), {"arguments": {"x": float("nan")}}, Status.VALIDATION_FAILURE, "bad_request"),
    "bad arguments": (
        Said(definitions=(WITH_SCHEMA,)), {"arguments": {"text": 5}}, Status.VALIDATION_FAILURE, "bad_arguments",
    ),
    "environment": (
        Said(contracts=(contract("echo", environments=["production"]),)), asks(), Status.VALIDATION_FAILURE,
        "wrong_environment",
    ),
    "policy": (Said(rules=(rule("deny"),)), asks(), Status.DENIED, "policy"),
    "no rule": (Said(preset="none"), asks(), Status.DENIED, "policy"),
    "policy that fails": (Said(rules=(rule("allow", when="args.x == 1"),)), asks(), Status.DENIED, "policy_error"),
    "sandbox elsewhere": (Said(rules=(rule("sandbox"),)), asks(), Status.DENIED, "sandbox_impossible"),
    "sandbox here": (
        Said(rules=(rule("sandbox"),), server=ServerSpec("desk", command=("x",))), asks(), Status.UNAVAILABLE,
        "no_backend",
    ),
    "sandboxed transport": (
        Said(contracts=(contract("echo", transport="sandboxed_exec", approval="none"),)), asks(), Status.UNAVAILABLE,
        "no_backend",
    ),
    "secrets": (Said(contracts=(contract("echo", secrets="token"),)), asks(), Status.UNAVAILABLE, "no_secret"),
    "network of a command": (
        Said(contracts=(contract("echo", network="inside"),), server=ServerSpec("desk", command=("x",)),
             networks={"inside": NetworkSpec("inside", ("*.corp.example",))}),
        asks(), Status.DENIED, "network",
    ),
    "network": (
        Said(contracts=(contract("echo", network="inside"),),
             networks={"inside": NetworkSpec("inside", ("*.corp.example",))}),
        asks(), Status.DENIED, "network",
    ),
    "approval": (Said(contracts=(contract("echo", approval="always"),)), asks(), Status.APPROVAL_REQUIRED,
                 "approval_required"),
    "no key": (
        Said(contracts=(contract("echo", idempotent={"key": "args.missing"}),)), asks(), Status.VALIDATION_FAILURE,
        "no_key",
    ),
    "unlisted resource": (Said(), {"tool": "file:///etc", "kind": "resource", "server": "desk"},
                          Status.VALIDATION_FAILURE, "unknown_resource"),
    "unlisted prompt": (Said(), {"tool": "p", "kind": "prompt", "server": "desk", "arguments": {"name": "p"}},
                        Status.VALIDATION_FAILURE, "unknown_prompt"),
    "prompt that was not accepted": (
        Said(), {"tool": "greet", "kind": "prompt", "server": "desk", "arguments": {"name": "greet"}},
        Status.UNAVAILABLE, "not_pinned",
    ),
    "nobody's resource": (Said(), {"tool": "doc:1", "kind": "resource"}, Status.VALIDATION_FAILURE, "unknown_resource"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_refusal_reaches_no_server_and_is_recorded_once(case: str, tmp_path: Path) -> None:
    said, asked, status, code = REFUSALS[case]
    async with governed(tmp_path, said) as way:
        outcome = await way.call(**asked)
        assert (outcome.status, outcome.reason_code) == (status, code)
        assert outcome.facts["effect"] == Effect.NONE
        assert outcome.message
        assert way.servers.requests == []
        assert [(r["status"], r["reason_code"], r["started_seq"]) for r in way.finished()] == [(status, code, None)]
        assert "started" not in way.kinds(outcome.facts["call_id"])


async def test_network_that_has_the_server_lets_the_call_pass(tmp_path: Path) -> None:
    inside = {"inside": NetworkSpec("inside", ("127.0.0.1:9101",))}
    async with governed(tmp_path, Said(contracts=(contract("echo", network="inside"),), networks=inside)) as way:
        assert (await way.call()).ok


async def test_what_was_validated_is_what_is_sent(tmp_path: Path) -> None:
    arguments = {"b": [1, {"ü": None}], "a": 2**70}
    said = Said(contracts=(contract("talk", tool="echo", meta=["vendor/x"]),))
    async with governed(tmp_path, said) as way:
        await way.call("talk", arguments, meta={"vendor/x": 1}, inputs={"q": {}}, session="s", method="tools/call")
        (sent,) = way.servers.requests
    # An answer to a question that nobody asked is kept until somebody does.
    assert sent.params == {"name": "echo", "arguments": arguments, "_meta": {"vendor/x": 1}}
    assert (sent.server, sent.method, sent.session) == ("desk", "tools/call", "s")
    assert sent.definition == definition("echo")


async def test_a_listed_resource_and_an_accepted_prompt_go_the_same_way(tmp_path: Path) -> None:
    greet = replace(definition("greet"), kind="prompt")
    replies: list[Reply] = [{"contents": []}, {"messages": []}, {"completion": {}}]
    async with governed(tmp_path, Said(prompts=(greet,)), replies) as way:
        ended = [
            await way.call("doc:1", {"uri": "doc:1"}, kind="resource", server="desk", method="resources/read"),
            await way.call("greet", {"name": "greet"}, kind="prompt", server="desk", method="prompts/get"),
            await way.call(
                "greet", {"ref": {"type": "ref/prompt", "name": "greet"}, "argument": {"name": "who", "value": "A"}},
                kind="completion", server="desk", method="completion/complete",
            ),
        ]  # fmt: skip
        assert [outcome.status for outcome in ended] == [Status.SUCCESS] * 3
        assert [(r.method, r.definition) for r in way.servers.requests] == [
            ("resources/read", None), ("prompts/get", greet), ("completion/complete", None),
        ]  # fmt: skip
        assert [record["contract"]["name"] for record in way.finished()] == ["desk:lists"] * 3


@pytest.mark.parametrize("name", ["secret.txt", "%73ecret.txt", "./secret.txt", "%2e/secret.txt", "/secret.txt"])
async def test_a_rule_on_a_file_of_a_session_holds_however_it_is_written(tmp_path: Path, name: str) -> None:
    """Rules and the record have the one form that all of these are read as."""
    place = "ringfence://session/box_1/output/"
    uri = place + name
    async with governed(tmp_path, Said(rules=(rule("deny", tool_patterns=(f"{place}secret.txt",)),))) as way:
        own = implicit_contract(ServerSpec(SERVER, url="http://127.0.0.1:9101/mcp"))
        way.pipeline.rules = replace(way.pipeline.rules, implicit={SERVER: own})
        ended = await way.call(uri, {"uri": uri}, kind="resource", server=SERVER, method="resources/read")
        assert ended.status is Status.DENIED
        assert way.servers.requests == []
        (record,) = way.finished()
        assert record["call"]["tool"] == f"{place}secret.txt"


async def test_what_is_no_file_of_a_session_is_not_offered(tmp_path: Path) -> None:
    uri = "ringfence://session/box_1/output/d/../secret.txt"
    async with governed(tmp_path) as way:
        own = implicit_contract(ServerSpec(SERVER, url="http://127.0.0.1:9101/mcp"))
        way.pipeline.rules = replace(way.pipeline.rules, implicit={SERVER: own})
        ended = await way.call(uri, {"uri": uri}, kind="resource", server=SERVER, method="resources/read")
        assert (ended.status, ended.reason_code) == (Status.VALIDATION_FAILURE, "unknown_resource")


# ── Guard ──


@pytest.mark.parametrize(
    ("result", "more", "code"),
    [
        ({"content": [{"type": "text", "text": "x" * 200}]}, {"result": {"max_bytes": 100}}, "result_too_large"),
        ({"content": [], "structuredContent": {"m": 1}}, {}, "bad_output"),
    ],
)
async def test_a_withheld_result_is_a_failure_whose_effect_is_unknown(
    tmp_path: Path, result: Any, more: Any, code: str
) -> None:
    said = Said(contracts=(contract("echo", mode="write", **more),), definitions=(TYPED,))
    async with governed(tmp_path, said, [result]) as way:
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code, outcome.result) == (Status.FAILED, code, None)
        assert outcome.facts["effect"] == Effect.UNKNOWN
        assert way.finished()[0]["result"] is None


# ── Cancelling ──


@contextmanager
def cancelled_once(
    reached: Callable[[], object], then: Callable[[], None] = lambda: None
) -> Iterator[anyio.CancelScope]:
    """Whatever is in the block is cancelled as soon as this is so, however long that takes."""
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            await tooling.until(reached)
            scope.cancel()
            asyncio.get_running_loop().call_later(0.05, then)

        cancelling = asyncio.get_running_loop().create_task(cancel())
        yield scope
    assert cancelling.done()


@pytest.mark.parametrize(("mode", "effect"), [("read", Effect.NONE), ("write", Effect.UNKNOWN)])
async def test_a_cancelled_call_is_killed_on_record(tmp_path: Path, mode: str, effect: Effect) -> None:
    said = Said(contracts=(contract("echo", mode=mode, rate={"concurrent": 1}),), server=SHUT_IN)
    async with governed(tmp_path, said) as way:
        way.servers.hold = anyio.Event()
        with cancelled_once(lambda: way.servers.requests) as scope:
            await way.call()
        assert scope.cancelled_caught
        (record,) = way.finished()
        assert (record["status"], record["reason_code"], record["effect"]) == ("killed", "cancelled", effect)
        assert record["facts"]["ended"] == "cancelled"
        way.servers.hold = None
        assert (await way.call()).ok, "its place is free again"


async def test_a_call_that_is_cancelled_while_its_grant_is_written_is_closed_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with governed(tmp_path, Said(contracts=(contract("echo", mode="write"),))) as way:
        writer = way.store._writer
        take = writer._take
        taken, go_on = threading.Event(), threading.Event()

        def slow() -> Any:
            """Between what is taken from the queue and the turn to commit it, others may commit."""
            group = take()
            taken.set()
            go_on.wait()
            return group

        monkeypatch.setattr(writer, "_take", slow)
        await way.store.write(lambda tx: None, durable=True)  # the thread takes it by the old way, and goes on by ours
        call = make_call("echo", {"a": 1}, idempotency_key="k")
        with cancelled_once(taken.is_set, go_on.set) as scope:
            await way.pipeline.handle(call, way.client)
        assert scope.cancelled_caught
        assert way.kinds(call.id) == ["started", "finished"]
        (record,) = way.finished(call.id)
        assert (record["status"], record["effect"], record["facts"]["isolation"]) == ("killed", "none", None)
        (started,) = way.store.reader().records(kind="started", call_id=call.id)
        assert record["started_seq"] == started.seq
        assert way.servers.requests == []
        assert (await way.call("echo", {"a": 1}, idempotency_key="k")).ok, "its key is free again"


async def test_a_call_that_ends_with_the_gateway_was_cancelled_by_no_caller(tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        way.servers.hold = anyio.Event()
        with cancelled_once(lambda: way.servers.requests):
            way.pipeline.stopping = True
            await way.call()
        (record,) = way.finished()
        assert (record["status"], record["reason_code"], record["facts"]["ended"]) == (
            "killed",
            "stopping",
            "cancelled",
        )
        assert "caller" not in record["message"] and "the gateway was stopped" in record["message"]


async def test_a_call_cancelled_while_it_waits_for_a_person_has_no_effect(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", mode="write", approval="always"),), wait=600)
    async with governed(tmp_path, said) as way:
        with cancelled_once(lambda: way.client.told):
            await way.call()
        (record,) = way.finished()
        assert (record["status"], record["effect"], record["started_seq"]) == ("killed", Effect.NONE, None)
        assert way.client.told[0][0] == "notifications/progress"


async def test_a_call_cancelled_while_its_start_is_written_still_closes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release, asked = threading.Event(), threading.Event(), list[str]()
    write = Store.write

    def block(tx: Transaction) -> None:
        begun.set()
        release.wait(60)

    async def written(self: Store, *job: Any, **how: Any) -> Any:
        asked.append("asked")
        return await write(self, *job, **how)

    said = Said(contracts=(contract("echo", mode="write"),))
    async with governed(tmp_path, said) as way:
        async with anyio.create_task_group() as group:
            group.start_soon(way.store.write, block)
            await tooling.until(begun.is_set)
            monkeypatch.setattr(Store, "write", written)
            # It closes on record all the same, for which the writer has to be free again.
            with cancelled_once(lambda: asked, then=release.set):
                await way.call(idempotency_key="k", id="call_cut")
        assert way.kinds("call_cut")[-1:] == ["finished"]
        assert way.kinds("call_cut").count("finished") == 1
        assert way.store.reader().running() == []
        assert way.servers.requests == []
        again = await way.call(idempotency_key="k")
        assert again.ok, "a call that never ran leaves its key free"


# ── The store fails ──


async def test_without_a_record_nothing_is_sent(tmp_path: Path) -> None:
    async with governed(tmp_path, Said(contracts=(WRITE,))) as way:
        await broken(way, "started")
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == (Status.UNAVAILABLE, "store")
        assert outcome.facts["effect"] == Effect.NONE
        assert way.servers.requests == []
        assert [record["reason_code"] for record in way.finished()] == ["store"]


@pytest.mark.parametrize(("one", "status", "effect"), [
    (READ, Status.UNKNOWN, Effect.NONE), (WRITE, Status.UNKNOWN, Effect.UNKNOWN),
])  # fmt: skip
async def test_without_a_record_no_result_is_given(tmp_path: Path, one: Any, status: Status, effect: Effect) -> None:
    async with governed(tmp_path, Said(contracts=(one,), server=SHUT_IN)) as way:
        await broken(way, "finished")
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code, outcome.result) == (status, "store", None)
        assert outcome.facts["effect"] == effect
        assert outcome.receipt is None
        assert "done" not in outcome.text
        assert len(way.servers.requests) == 1
        refused = await way.call("nobody")
        assert (refused.status, refused.reason_code) == (Status.UNAVAILABLE, "store")
        with sqlite3.connect(way.store.folder / "ringfence.db") as database:
            database.execute("DROP INDEX broken")
        database.close()
        assert (await way.call()).ok, "and when the disk is well again, so is the gateway"
        assert way.store.reader().running() == []
        assert [record["reason_code"] for record in way.finished()] == ["store", "ok"], "the end that was owed, first"


async def test_a_closed_store_refuses_and_does_not_raise(tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        await way.store.aclose()
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == (Status.UNAVAILABLE, "store")


# ── Budget, quota ──


@pytest.mark.parametrize("reply", [OK, FAILED, DOWN, LOST, TIMEOUT, RuntimeError("boom")], ids=str)
async def test_a_place_is_given_back_however_the_call_ends(tmp_path: Path, reply: Reply) -> None:
    said = Said(contracts=(contract("echo", rate={"concurrent": 1}, retry={"attempts": 0}),))
    async with governed(tmp_path, said, [reply]) as way:
        for _ in range(3):
            assert (await way.call()).reason_code != "throttled"


async def test_a_quota_lasts_and_burns_no_approval(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", rate={"per_day": 1}, approval="always"), contract("free", tool="echo")))
    async with governed(tmp_path, said) as way:
        for expected in ("ok", "quota"):
            asked = await way.call()
            assert asked.approval_id is not None
            approvals.answer(way.store, asked.approval_id, Person("bob"), approve=True)
            outcome = await way.call()
            assert outcome.reason_code == expected
        assert [left.id for left in way.store.reader().approvals(("approved",))] == [asked.approval_id]
        assert way.finished()[-1]["approval"] is None, "what was not used is not on record as used"
        assert (await way.call(principal=Principal("other"))).reason_code == "approval_required"


async def test_an_approval_is_used_once_and_named(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", mode="write", approval="boss"),), approvals={"boss": ApprovalRule("boss")})
    async with governed(tmp_path, said) as way:
        asked = await way.call("echo", {"text": "x"})
        assert asked.approval_id is not None
        approvals.answer(way.store, asked.approval_id, Person("bob"), approve=True)
        other = await way.call("echo", {"text": "y"})
        used = await way.call("echo", {"text": "x"})
        again = await way.call("echo", {"text": "x"})
        assert [o.status for o in (other, used, again)] == ["approval_required", "success", "approval_required"]
        assert len({asked.approval_id, other.approval_id, again.approval_id}) == 3
        record = way.finished(used.facts["call_id"])[0]["approval"]
        assert (record["id"], [by["person"] for by in record["by"]]) == (asked.approval_id, ["bob"])


# ── Servers ──


async def test_the_start_of_a_server_is_a_call_by_system(tmp_path: Path) -> None:
    spec = ServerSpec("desk", command=("python", "--token=hidden"))
    async with governed(tmp_path) as way:
        seen: list[list[str]] = []

        async def start() -> None:
            seen.append([record.kind for record in way.store.reader().records(kind="started")])

        async def fail() -> None:
            raise Unavailable("server_start", "no such program")

        await way.pipeline.server_start(spec, Principal("analyst"), start)
        with pytest.raises(Unavailable):
            await way.pipeline.server_start(spec, Principal("analyst"), fail)
        assert seen == [["started"]], "on record before it happens"
        ended = way.finished()
        assert [(r["status"], r["call"]["kind"], r["call"]["principal"]["kind"]) for r in ended] == [
            ("success", "server", SYSTEM.kind), ("unavailable", "server", SYSTEM.kind),
        ]  # fmt: skip
        assert [r["effect"] for r in ended] == ["none", "none"], "its box reaches nothing"
        await broken(way, "started")
        with pytest.raises(Unavailable) as refused:
            await way.pipeline.server_start(spec, Principal("analyst"), start)
        assert (refused.value.reason_code, len(seen)) == ("store", 1)


async def test_the_start_of_a_server_names_the_secrets_that_it_is_given(tmp_path: Path) -> None:
    spec = ServerSpec("desk", command=("python",), secrets=("token",))
    async with governed(tmp_path) as way:

        async def start() -> None:
            pass

        await way.pipeline.server_start(spec, Principal("analyst"), start)
        started, finished = (
            next(way.store.reader().records(kind=kind)).body["contract"] for kind in ("started", "finished")
        )
        assert started["secrets"] == finished["secrets"] == ["token"], "`audit exposure` finds its calls by that"


@pytest.mark.parametrize("placement", ["own", "unsafe_host"])
async def test_a_server_that_ran_and_did_not_come_up_may_have_done_something(placement: Any, tmp_path: Path) -> None:
    spec = ServerSpec("desk", command=("python", "server.py"), placement=placement)
    async with governed(tmp_path) as way:

        async def fail() -> None:
            raise OutcomeUnknown("server_start", "it ended while starting")

        with pytest.raises(OutcomeUnknown):
            await way.pipeline.server_start(spec, Principal("analyst"), fail)
        (record,) = way.finished()
        assert (record["status"], record["reason_code"]) == ("failed", "server_start")
        assert record["effect"] == ("unknown" if placement == "unsafe_host" else "none")
        assert "did not come up" in record["facts"]["explanation"]


TOKEN = "ghp_" + "aB3dE5fG7hJ9kL2mN4pQ6rS8tU1vW0xYzAbC"


@pytest.mark.parametrize("log", ["digest", "names"])
@pytest.mark.parametrize("pad", [0, 30, 60, 150, 190, 3_900, 3_990])
async def test_names_that_others_chose_reach_neither_caller_nor_record_as_they_are(
    tmp_path: Path, pad: int, log: str
) -> None:
    """Names of a result's and of the arguments' properties, with a secret and escape codes, wherever it is cut."""
    name = "x" * pad + f" {TOKEN} \x1b[2J\u202e\u200b"
    strict = {"type": "object", "additionalProperties": False}
    nested = {"type": "object", "patternProperties": {"x": {"type": "object", "required": ["n"]}}}
    bad = {"content": [], "structuredContent": {name: {}}}
    for schema, part in ((strict, "outputSchema"), (nested, "outputSchema"), (strict, "inputSchema")):
        own = contract("echo", log={"arguments": log, "result": log})
        said = Said(contracts=(own,), definitions=(definition("echo", **{part: schema}),))
        folder = tmp_path / f"{part}{len(schema)}"
        folder.mkdir(exist_ok=True)
        async with governed(folder, said, [bad]) as way:
            way.pipeline._guard.redactor = TenantRedactor(lambda: ())
            outcome = await way.call("echo", {name: 1} if part == "inputSchema" else {})
            if pad or part == "inputSchema" or schema is strict:
                assert outcome.status in (Status.FAILED, Status.VALIDATION_FAILURE)
            shown = json.dumps([outcome.message, outcome.facts, outcome.error, way.finished()[0]], ensure_ascii=False)
            assert not any(TOKEN[at : at + 8] in shown for at in range(0, 28, 4))
            assert not set("\x1b\u202e\u200b") & set(shown) and "\\u001b" not in shown


async def test_names_of_sessions_and_traces_are_guarded_on_record(tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        way.pipeline._guard.redactor = TenantRedactor(lambda: ())
        odd = "x" * 990 + f" {TOKEN} \x1b[2J"
        await way.call("echo", {"text": "x"}, session=odd, trace=odd)
        record = json.dumps(way.finished()[0])
    assert TOKEN[:12] not in record and "\\u001b" not in record


# ── Servers in sessions ──

IN_SESSIONS = ServerSpec("desk", command=("x",), placement="session", resources=("doc:*",))


def of_session(name: str, **more: Any) -> dict[str, Any]:
    return {"arguments": {"text": "x"}, "box": name, **more}


async def test_an_approval_is_for_the_session_that_the_call_named_and_says_so(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", approval="always"),), server=IN_SESSIONS)
    async with governed(tmp_path, said) as way:
        asked = await way.call(**of_session("ses_a"))
        assert asked.approval_id is not None
        approvals.answer(way.store, asked.approval_id, Person("bob"), approve=True)
        assert approvals.find(way.store, asked.approval_id).summary["session"] == {"id": "ses_a"}
        other = await way.call(**of_session("ses_b"))
        assert other.status == "approval_required" and other.approval_id != asked.approval_id
        assert (await way.call(**of_session("ses_a"))).ok
        assert [request.box for request in way.servers.requests] == ["ses_a"]


async def test_one_key_in_two_sessions_is_a_conflict(tmp_path: Path) -> None:
    async with governed(tmp_path, Said(server=IN_SESSIONS)) as way:
        assert (await way.call(**of_session("ses_a", idempotency_key="k"))).ok
        assert (await way.call(**of_session("ses_b", idempotency_key="k"))).reason_code == "key_conflict"
        assert (await way.call(**of_session("ses_a", idempotency_key="k"))).ok
        assert len(way.servers.requests) == 1


@pytest.mark.parametrize(
    "condition",
    [
        {"argument_patterns": {"session": "^ses_b$"}},
        {"argument_patterns": {"*": "ses_b"}},
        {"when": 'call.box == "ses_b"'},
    ],
)
async def test_rules_see_the_session_of_a_call(condition: Any, tmp_path: Path) -> None:
    async with governed(tmp_path, Said(server=IN_SESSIONS, rules=(rule("deny", **condition),))) as way:
        assert (await way.call(**of_session("ses_a"))).ok
        assert (await way.call(**of_session("ses_b"))).reason_code == "policy"
        read = of_session("ses_b", kind="resource", server="desk", method="resources/read")
        assert (await way.call("doc:1", **read)).reason_code == "policy"


async def test_no_argument_allows_what_the_session_does_not(tmp_path: Path) -> None:
    only = rule("allow", argument_patterns={"session": "^ses_a$"})
    async with governed(tmp_path, Said(server=IN_SESSIONS, preset="none", rules=(only,))) as way:
        assert (await way.call(box="ses_a")).reason_code == "policy", "a pattern allows arguments alone"
    only = rule("allow", when='call.box == "ses_a"')
    async with governed(tmp_path / "condition", Said(server=IN_SESSIONS, preset="none", rules=(only,))) as way:
        assert (await way.call(box="ses_a")).ok
        assert (await way.call("echo", {"session": "ses_a"}, box="ses_b")).reason_code == "policy"


async def test_the_session_of_a_call_is_on_record(tmp_path: Path) -> None:
    async with governed(tmp_path, Said(server=IN_SESSIONS)) as way:
        assert (await way.call(**of_session("ses_a"))).ok
        assert way.finished()[0]["call"]["box"] == "ses_a"


async def test_a_session_says_nothing_where_the_server_lives_elsewhere(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", approval="always"),))
    async with governed(tmp_path, said) as way:
        asked = await way.call(**of_session("ses_a"))
        assert asked.approval_id is not None
        approvals.answer(way.store, asked.approval_id, Person("bob"), approve=True)
        assert (await way.call(**of_session("ses_b"))).ok
        assert "box" not in way.finished()[-1]["call"]


@pytest.mark.parametrize(
    "kind", [{}, {"tool": "doc:1", "kind": "resource", "server": "desk"}], ids=["tool", "resource"]
)
async def test_an_empty_name_is_no_session(kind: Any, tmp_path: Path) -> None:
    async with governed(tmp_path, Said(server=IN_SESSIONS)) as way:
        assert (await way.call(**kind, box="")).reason_code == "no_session"
        assert way.servers.requests == []


async def test_where_fields_are_declared_an_error_of_the_server_says_no_more_than_its_code(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", result={"fields": ["id"]}),))
    failed = UpstreamFailed("upstream_error", -32000, "ssn 123-45-6789", {"ssn": "123-45-6789"})
    async with governed(tmp_path, said, [failed]) as way:
        outcome = await way.call()
        assert outcome.error == {"code": -32000, "message": ONLY_FIELDS}
        assert "123-45" not in str(outcome)


# ── whatever happens, one record ──


async def test_a_call_whose_arguments_lie_too_deep_is_refused_on_record(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    async with governed(tmp_path) as way:
        call = make_call("echo", {"a": ["a name of its own", deep]})
        outcome = await way.pipeline.handle(call, way.client)
        # Python 3.11 meets its limit earlier on the way than later versions do.
        assert outcome.status == "validation_failure" and outcome.reason_code in ("bad_arguments", "bad_request")
        assert way.kinds(call.id) == ["finished"]


async def test_a_fault_of_ours_while_the_end_is_stated_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with governed(tmp_path) as way:
        stated = way.pipeline._guard.facts
        faults = [RecursionError("too deep")]

        def faulty(facts: Json) -> Json:
            if faults:
                raise faults.pop()
            return stated(facts)

        monkeypatch.setattr(way.pipeline._guard, "facts", faulty)
        call = make_call("echo", {"a": 1}, idempotency_key="k")
        outcome = await way.pipeline.handle(call, way.client)
        assert (outcome.status, outcome.reason_code, outcome.result) == ("unknown", "internal", None)
        assert way.kinds(call.id) == ["started", "finished"]
        assert (await way.call("echo", {"a": 1}, idempotency_key="k")).reason_code == "key_unknown"


async def test_that_a_server_is_left_alone_is_on_record(tmp_path: Path) -> None:
    async with governed(tmp_path) as way:
        await way.pipeline.server_circuit("desk", Principal("analyst"), {"state": "open", "failures": 5})
        (record,) = way.store.reader().records(kind="server_circuit")
        assert (record.body["server"], record.body["for"], record.body["state"]) == ("desk", "local/analyst", "open")


async def test_a_server_that_is_left_alone_is_not_asked_again_by_a_retry(tmp_path: Path) -> None:
    alone = Unavailable("circuit_open", "left alone")
    said = Said(contracts=(contract("echo", retry={"attempts": 3}),))
    async with governed(tmp_path, said, [alone]) as way:
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == (Status.UNAVAILABLE, "circuit_open")
        assert len(way.servers.requests) == 1
