"""What a call may change outside: one answer, and the record, the disk, the facts and the explanation go by it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.audit.explain import explain
from ringfence.audit.keys import load_or_create
from ringfence.compose.runs import Runs
from ringfence.core.box import NO_OUTSIDE, Attached, Mount, Outside
from ringfence.core.errors import (
    OutcomeUnknown,
    Refused,
    RingfenceError,
    StoreError,
    Unavailable,
    WorkProgress,
    beginning,
)
from ringfence.core.model import Contract, Json, Mode, Outcome, Person, ServerSpec, ServerVolume, Status, Transport
from ringfence.governance import approvals, journal
from ringfence.governance.effects import NO_EFFECTS, PossibleEffects, effects_of_start, possible_effects
from ringfence.governance.facts import FinishedCall, build
from ringfence.governance.journal import CallState
from ringfence.sandbox.tools.definition import Changes, Tool
from ringfence.sandbox.tools.toolkit import KIT, PROGRAMS
from ringfence.store import Store
from tests import gateways
from tests.boxing import faked
from tests.faking import Client, Said, contract, governed, make_call
from tests.making import READ, WRITE, call
from tests.store.test_recovery import crash
from tests.tooling import until

BOX = Contract(name="run", tool="execute_python", transport=Transport.SANDBOXED_EXEC, mode=Mode.HIGH_RISK)
RW: Json = {"host": "/srv", "at": "/workspace/srv", "mode": "rw"}
RO: Json = {**RW, "mode": "ro"}
FULL = Outside(sends=True, writes=True)


def asked(arguments: Json, contract: Contract = BOX, session: Outside = NO_OUTSIDE) -> PossibleEffects:
    return possible_effects(call(contract.name, arguments), contract, session)


@pytest.mark.parametrize(
    ("given", "contract", "expected"),
    [
        ({}, {}, NO_EFFECTS),
        ({"network": ["a.example"]}, {}, PossibleEffects(sends=True)),
        ({"network": "inside"}, {}, PossibleEffects(sends=True)),
        ({"network": []}, {}, NO_EFFECTS),
        ({"network": "denied"}, {"network": "inside"}, NO_EFFECTS),
        ({}, {"network": "inside"}, PossibleEffects(sends=True)),
        ({}, {"secrets": ("token",)}, PossibleEffects(sends=True)),
        ({"secrets": ["token"]}, {}, PossibleEffects(sends=True)),
        ({"mounts": [RW]}, {}, PossibleEffects(writes=True)),
        ({"mounts": [RO]}, {}, NO_EFFECTS),
        ({}, {"mounts": (Mount("/a", "/b", "rw"),)}, PossibleEffects(writes=True)),
        ({}, {"mounts": (Mount("/a", "/b"),)}, NO_EFFECTS),
        ({"mounts": [RW], "network": ["a.example"]}, {}, PossibleEffects(sends=True, writes=True)),
        ({"allow_packages": ["six"], "packages": ["six"]}, {}, NO_EFFECTS),
        ({"output": "/srv/out"}, {}, PossibleEffects(copies=True)),
        ({"output": "/srv/out", "mounts": [RW]}, {}, PossibleEffects(writes=True, copies=True)),
    ],
)
def test_a_box_may_change_what_call_and_contract_open(given: Json, contract: Json, expected: PossibleEffects) -> None:
    assert asked(given, replace(BOX, **contract)) == expected


def test_code_in_a_box_is_whatever_the_caller_sent_so_that_its_contract_only_reads_says_nothing() -> None:
    assert asked({"network": ["a.example"]}, replace(BOX, mode=Mode.READ)) == PossibleEffects(sends=True)


CLOSED = ServerSpec("s", command=("x",))


def test_an_operation_that_is_no_read_may_do_anything() -> None:
    assert possible_effects(call(), WRITE, server=CLOSED) == PossibleEffects(acts=True)
    assert possible_effects(call(), WRITE, server=CLOSED).intended


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ({}, NO_EFFECTS),
        ({"mounts": (Mount("/a", "/b"),)}, NO_EFFECTS),
        ({"mounts": (Mount("/a", "/b", "rw"),)}, PossibleEffects(writes=True, declared_read=True)),
        ({"volumes": (ServerVolume("v", "/data"),)}, PossibleEffects(writes=True, declared_read=True)),
        ({"network": "inside"}, PossibleEffects(sends=True, declared_read=True)),
        ({"secrets": ("token",)}, PossibleEffects(sends=True, declared_read=True)),
        ({"placement": "unsafe_host"}, PossibleEffects(acts=True, declared_read=True)),
        ({"placement": "session"}, PossibleEffects(sends=True, writes=True, declared_read=True)),
        ({"url": "http://a.example/mcp"}, PossibleEffects(acts=True, declared_read=True)),
    ],
)
def test_a_declared_read_may_change_what_the_place_of_its_server_lets_that_server_change(
    place: dict[str, Any], expected: PossibleEffects
) -> None:
    found = possible_effects(call(), READ, server=replace(CLOSED, **place))
    assert found == expected and not found.intended


def test_a_declared_read_of_a_server_that_shares_a_box_may_change_what_the_box_can() -> None:
    spec = replace(CLOSED, placement="both")
    beside = ServerSpec("b", command=("y",), placement="both", network="inside")
    assert possible_effects(call(), READ, server=spec, others=[spec, beside]).sends


def test_nothing_is_known_of_a_read_whose_server_is_not_known() -> None:
    assert possible_effects(call(), READ) == PossibleEffects(acts=True, declared_read=True)


@pytest.mark.parametrize("tool", [*PROGRAMS, "send_input"])
def test_what_runs_in_a_session_has_what_its_box_has(tool: str) -> None:
    contract = replace(BOX, tool=tool)
    for sends, writes in itertools.product((False, True), repeat=2):
        had = asked({"session": "box_1"}, contract, Outside(sends, writes))
        assert had == PossibleEffects(sends=sends, writes=writes)


def test_a_signal_that_a_program_can_handle_has_what_its_box_has() -> None:
    contract = replace(BOX, tool="stop_process")
    for signal in ("TERM", "USR1", 15):
        had = asked({"session": "box_1", "process": 1, "signal": signal}, contract, FULL)
        assert had == PossibleEffects(sends=True, writes=True)
    for given in ({}, {"signal": "KILL"}, {"signal": 9}, {"signal": "STOP"}):
        assert asked({"session": "box_1", "process": 1, **given}, contract, FULL) == NO_EFFECTS


@pytest.mark.parametrize("tool", ["create_volume", "remove_volume", "snapshot_session", "remove_snapshot"])
def test_what_outlives_every_session_is_outside_of_it(tool: str) -> None:
    assert asked({"name": "data"}, replace(BOX, tool=tool)) == PossibleEffects(writes=True)


def test_a_session_that_is_opened_or_forked_runs_only_set_up_code() -> None:
    opening, forking = replace(BOX, tool="open_session"), replace(BOX, tool="fork_session")
    assert asked({"network": ["a.example"], "mounts": [RW]}, opening) == NO_EFFECTS
    both = PossibleEffects(sends=True, writes=True)
    assert asked({"network": ["a.example"], "mounts": [RW], "setup": "x = 1"}, opening) == both
    assert asked({"session": "box_1", "count": 1}, forking, FULL) == NO_EFFECTS
    assert asked({"session": "box_1", "count": 1}, forking, replace(FULL, sets_up=True)) == both
    volume = {"name": "books", "at": "/workspace/books"}
    assert asked({"volumes": [volume], "setup": "x = 1"}, opening) == PossibleEffects(writes=True)
    assert asked({"volumes": [{**volume, "mode": "ro"}], "setup": "x = 1"}, opening) == NO_EFFECTS


CHANGES = {
    Changes.SESSION: {"close_session", "pause_session", "resume_session", "extend_session", "expose_port"}
    | {"interrupt_session", "restart_context", "remove_context"},
    Changes.FILES: {"write_file", "remove_file", "make_folder", "copy_file", "rename_file", "write_folder"},
    Changes.SIGNAL: {"stop_process"},
    Changes.SET_UP: {"open_session", "fork_session"},
    Changes.CODE: {"execute_python", "run_shell", "send_input"},
    Changes.LASTING: {"create_volume", "remove_volume", "snapshot_session", "remove_snapshot"},
}


def test_what_every_tool_that_writes_may_change_is_on_this_list() -> None:
    declared = {kind: {name for name, tool in KIT.items() if tool.changes is kind} for kind in Changes}
    assert declared.pop(Changes.NOTHING) == {name for name, tool in KIT.items() if tool.mode is Mode.READ}
    assert declared == CHANGES


@pytest.mark.parametrize("kind", Changes)
def test_of_all_that_a_tool_can_change_only_its_own_session_is_no_effect(kind: Changes) -> None:
    tool = next(name for name, tool in KIT.items() if tool.changes is kind and not tool.makes_box)
    given = asked({"session": "box_1", "signal": "TERM"}, replace(BOX, tool=tool), replace(FULL, sets_up=True))
    assert bool(given) is (kind not in (Changes.NOTHING, Changes.SESSION))


def test_a_tool_does_not_exist_without_a_word_on_what_it_changes() -> None:
    async def tool(_: Any) -> Any: ...

    with pytest.raises(TypeError, match="changes"):
        Tool(Mode.WRITE, text="Forget everything.", takes={})  # type: ignore[call-arg]
    for mode, changes in ((Mode.WRITE, Changes.NOTHING), (Mode.READ, Changes.SESSION)):
        with pytest.raises(TypeError, match="what changes nothing is a read"):
            Tool(mode, changes, "Forget everything.", {})(tool)


@pytest.mark.parametrize("tool", [name for name, tool in KIT.items() if tool.mode is Mode.READ])
def test_looking_into_a_session_changes_nothing(tool: str) -> None:
    assert asked({"session": "box_1"}, replace(BOX, tool=tool), FULL) == NO_EFFECTS


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"url": "http://a.example/mcp"}, NO_EFFECTS),
        ({"command": ("x",)}, NO_EFFECTS),
        ({"command": ("x",), "mounts": (Mount("/a", "/b"),)}, NO_EFFECTS),
        ({"command": ("x",), "placement": "unsafe_host"}, PossibleEffects(acts=True)),
        ({"command": ("x",), "network": "inside"}, PossibleEffects(sends=True)),
        ({"command": ("x",), "secrets": ("token",)}, PossibleEffects(sends=True)),
        ({"command": ("x",), "mounts": (Mount("/a", "/b", "rw"),)}, PossibleEffects(writes=True)),
    ],
)
def test_the_start_of_a_server_may_change_what_its_place_lets_it(
    spec: dict[str, Any], expected: PossibleEffects
) -> None:
    assert effects_of_start(ServerSpec("s", **spec)) == expected


@pytest.mark.parametrize(
    ("placement", "expected"),
    [("both", PossibleEffects(sends=True, writes=True)), ("own", NO_EFFECTS), ("other", NO_EFFECTS)],
)
def test_servers_of_one_box_may_change_what_any_of_them_may(placement: str, expected: PossibleEffects) -> None:
    spec = ServerSpec("a", command=("x",), placement=placement)
    beside = ServerSpec("b", command=("y",), placement="both", network="inside", mounts=(Mount("/a", "/b", "rw"),))
    alone = ServerSpec("c", command=("z",), placement="own", network="inside")
    assert effects_of_start(spec, [spec, beside, alone]) == expected


def test_a_server_in_a_session_may_change_what_the_session_may() -> None:
    spec = ServerSpec("a", command=("x",), placement="session")
    assert effects_of_start(spec) == PossibleEffects(sends=True, writes=True)


def test_places_beside_its_network_are_a_way_out_for_a_server_that_starts() -> None:
    assert effects_of_start(CLOSED, places=("a.example:443",)) == PossibleEffects(sends=True)


# ── The whole way ─────────────────────────────────────────────────────────────────────────────────


async def cancelled(folder: Path, arguments: Json, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Json], list[bool]]:
    """What is on record of a run that its caller gave up, and what waited for the disk."""
    waited: list[bool] = []
    write = Store.write

    async def watched(self: Store, work: Any, *, durable: bool = False, **how: Any) -> Any:
        waited.append(durable)
        return await write(self, work, durable=durable, **how)

    monkeypatch.setattr(Store, "write", watched)
    async with faked(folder) as (runs, backend):
        backend.hold = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(_run, runs, {"code": "…", **arguments})
            while not backend.specs:
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
    return gateways.records(folder / "state"), waited


async def _run(runs: Runs, arguments: Json) -> None:
    await runs.call("execute_python", arguments, Attached(), origin="sdk")


@pytest.mark.anyio
@pytest.mark.parametrize("given", [{"network": ["198.51.100.7:443"]}, {"mounts": [RW]}], ids=["network", "mount"])
async def test_a_cancelled_run_with_a_way_out_is_on_record_as_one_that_may_have_used_it(
    given: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, waited = await cancelled(tmp_path, given, monkeypatch)
    started, finished = (next(r for r in records if r["kind"] == kind) for kind in ("started", "finished"))
    assert (started["effect_possible"], started["durable"], waited) == (True, True, [True, True])
    assert (finished["status"], finished["effect"], finished["facts"]["effect"]) == ("killed", "unknown", "unknown")
    assert finished["facts"]["explanation"].endswith("; whether it took effect is unknown")
    told = explain(records)
    assert "before anything was sent, and synced to disk; an effect outside was possible" in told
    assert told.count("whether it changed anything outside is unknown") == 1
    assert "nothing outside was changed" not in told


@pytest.mark.parametrize("ways", list(itertools.product((False, True), repeat=5)))
def test_a_crash_leaves_the_effect_that_a_lost_answer_has(ways: tuple[bool, ...], tmp_path: Path) -> None:
    state = CallState(call(), "development", possible=PossibleEffects(*ways))
    keys, folder = load_or_create(tmp_path), tmp_path / "state"
    store = Store.open(folder, keys)
    store.write_sync(lambda tx: tx.append("started", state.call.id, journal.started(state)))
    crash(store)
    with Store.open(folder, keys) as second:
        (closed,) = second.reader().records(call_id=state.call.id, kind="finished")
    ran = replace(state, contract=READ, dispatched=True)
    lost = build(FinishedCall(ran, Outcome(Status.UNKNOWN, "answer_lost"), 1.0))
    assert closed.body["effect"] == lost["effect"]
    basis = lost.get("effect_basis") if state.possible else None
    assert closed.body["facts"].get("effect_basis") == basis


@pytest.mark.anyio
async def test_a_cancelled_run_in_a_shut_off_box_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, waited = await cancelled(tmp_path, {}, monkeypatch)
    started, finished = (next(r for r in records if r["kind"] == kind) for kind in ("started", "finished"))
    assert (started["effect_possible"], started["durable"], any(waited)) == (False, False, False)
    assert (finished["effect"], finished["facts"]["effect"]) == ("none", "none")
    assert finished["facts"]["explanation"].endswith("network was denied; no side effect was possible")
    assert "nothing outside was changed" in explain(records)


# ── What provably never ran ───────────────────────────────────────────────────────────────────────


@pytest.mark.anyio
async def test_a_call_whose_approval_another_call_used_first_never_ran(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", mode="write", approval="always"),), wait=600)
    async with governed(tmp_path, said) as way:
        outcomes: list[Outcome] = []
        clients = [Client(), Client()]

        async def one(client: Client) -> None:
            outcomes.append(await way.pipeline.handle(make_call(), client))

        async with anyio.create_task_group() as group:
            for client in clients:  # the second finds the question of the first, and waits for the same answer
                group.start_soon(one, client)
                await until(lambda: client.told)  # noqa: B023 - it is over before there is another
            (waiting,) = way.store.reader().approvals(("pending",))
            approvals.answer(way.store, waiting.id, Person("bob"), approve=True)
        ended = sorted((str(each.status), each.facts["effect"]) for each in outcomes)
        assert ended == [("approval_required", "none"), ("success", "confirmed")]
        assert len(way.servers.requests) == 1


@pytest.mark.anyio
async def test_a_store_that_fails_after_dispatch_says_nothing_of_whether_it_ran(tmp_path: Path) -> None:
    said = Said(contracts=(contract("echo", mode="write"),))
    async with governed(tmp_path, said, [StoreError("the state of sessions could not be written")]) as way:
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code, outcome.facts["effect"]) == ("unknown", "store", "unknown")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("problem", "stated", "status", "effect"),
    [
        (Refused(Status.VALIDATION_FAILURE, "not_found", "no"), True, "validation_failure", "none"),
        (Refused(Status.VALIDATION_FAILURE, "no_permission", "no"), False, "failed", "unknown"),
        (Refused(Status.DENIED, "rules_changed", "no"), False, "failed", "unknown"),
        (Refused(Status.DENIED, "network", "no"), True, "denied", "none"),
    ],
)
async def test_what_is_refused_on_the_way_never_ran_only_where_that_is_stated(
    problem: Refused, stated: bool, status: str, effect: str, tmp_path: Path
) -> None:
    problem.nothing_begun = stated
    async with governed(tmp_path, Said(contracts=(contract("echo", mode="write"),)), [problem]) as way:
        outcome = await way.call()
        assert (outcome.status, outcome.reason_code) == (status, problem.reason_code)
        assert outcome.facts["effect"] == effect
        assert ("nothing was run" in outcome.facts["explanation"]) is stated
        told = explain([record.body | {"kind": record.kind} for record in way.store.reader().records()])
        assert ("whether it changed anything outside is unknown" in told) is not stated


@pytest.mark.anyio
async def test_of_a_read_that_its_server_turned_away_the_effect_is_only_declared(tmp_path: Path) -> None:
    away = OutcomeUnknown("server_refused", "HTTP 503", answered=503)
    down = Unavailable("server_down", "it is down")
    said = Said(contracts=(contract("echo", retry={"attempts": 1}),))
    async with governed(tmp_path, said, [away, down]) as way:
        outcome = await way.call(idempotency_key="k")
        assert (outcome.status, outcome.reason_code) == ("unavailable", "server_refused")
        assert (outcome.facts["effect"], outcome.facts["effect_basis"]) == ("none", "declared")
        assert len(way.servers.requests) == 2
        await way.call(idempotency_key="k")
        assert len(way.servers.requests) > 2, "the key is free: it was a read"
    async with governed(tmp_path / "down", said, [down]) as way:
        outcome = await way.call()
        assert (outcome.status, outcome.facts["effect"]) == ("unavailable", "none"), "nothing was ever sent"


def test_errors_state_that_nothing_was_begun_up_to_that_point_and_no_further() -> None:
    for begun in (False, True):
        with pytest.raises(Unavailable) as raised, WorkProgress(begun=begun), WorkProgress():
            raise Unavailable("busy", "a part of it")
        assert raised.value.nothing_begun is not begun
    assert not Unavailable("busy", "nobody states anything").nothing_begun


@pytest.mark.parametrize(
    ("problem", "begun", "expected"),
    [
        (OSError(24, "Too many open files"), False, Unavailable),
        (RuntimeError("boom"), False, Unavailable),
        (ValueError("no such box"), False, ValueError),
        (Unavailable("no_zygote", "no"), False, Unavailable),
        (OSError(5, "no"), True, OutcomeUnknown),
        (ValueError("a number"), True, OutcomeUnknown),
        (Unavailable("x", "y"), True, Unavailable),
    ],
)
def test_what_fails_before_it_has_begun_never_ran(problem: Exception, begun: bool, expected: type[Exception]) -> None:
    with pytest.raises(expected) as raised, beginning("the box", lambda: begun):
        raise problem
    if isinstance(raised.value, RingfenceError):
        assert raised.value.nothing_begun is not begun
