"""Facts: the object's shape, what is unknown stays unknown, and one good sentence for every ending."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from ringfence.core import canonical
from ringfence.core.box import MIB, BoxReport, Captured, FileFact, Limits, Ran, Usage
from ringfence.core.model import Answer, Contract, Decision, Effect, Mode, Outcome, Status, Transport
from ringfence.core.sessions import CellReport, StepReport, Within
from ringfence.governance.disclosure import FACTS
from ringfence.governance.effects import NO_EFFECTS, PossibleEffects, possible_effects
from ringfence.governance.facts import FinishedCall, build, effect, explanation
from ringfence.governance.journal import CallState
from ringfence.sandbox.tools.results import judge
from tests.boxing import report
from tests.faking import SHUT_IN
from tests.making import READ, WRITE, call
from tests.tooling import ROOT

KEYS = [
    "call_id", "decision_id", "rules", "contract_digest", "started_at", "wall_ms", "ended", "exit_status", "signal",
    "timed_out", "limit", "effect", "usage", "isolation", "network", "inputs", "files", "output", "redactions",
    "denials", "explanation",
]  # fmt: skip
BOX = Contract(name="run_shell", transport=Transport.SANDBOXED_EXEC, mode=Mode.HIGH_RISK)
DECISION = Decision(id="dec_1", allowed=True, reason="allowed by ok", rules=("ok", "too"))
NEVER_RAN = (Status.VALIDATION_FAILURE, Status.DENIED, Status.APPROVAL_REQUIRED, Status.UNAVAILABLE)
STOPPED = (Status.FAILED, Status.TIMEOUT, Status.KILLED)


def of(contract: Contract | None) -> PossibleEffects:
    """What a call may change whose server, if it has one, is in a box that reaches nothing."""
    return NO_EFFECTS if contract is None else possible_effects(call(), contract, server=SHUT_IN)


def ending(
    status: Status = Status.SUCCESS,
    code: str = "ok",
    *,
    ran: Ran | None = None,
    within: Within | None = None,
    result: dict[str, Any] | None = None,
    **more: Any,
) -> FinishedCall:
    given = {"contract": replace(WRITE, digest="sha256:c"), "decision": DECISION, "dispatched": True, **more}
    given.setdefault("possible", of(given["contract"]))
    began = datetime(2026, 11, 15, 1, 2, 3, 456789, UTC)
    state = CallState(call(), "development", began_at=began, answer=Answer(None, ran=ran, within=within), **given)
    return FinishedCall(state, Outcome(status, code, result=result), 8003.12345)


def but(given: FinishedCall, *, ran: Ran | None = None, **more: Any) -> FinishedCall:
    """The same ending of a call that is another in this."""
    answer = given.state.answer if ran is None else Answer(None, ran=ran, within=given.state.within)
    return replace(given, state=replace(given.state, answer=answer, **more))


def test_the_facts_of_a_call_to_a_server() -> None:
    result: dict[str, Any] = {"content": []}
    facts = build(ending(isolation={"backend": "none", "level": "none"}, result=result, redactions={"token": 2}))
    assert list(facts) == KEYS
    assert facts["call_id"] == "call_1"
    assert (facts["decision_id"], facts["rules"], facts["contract_digest"]) == ("dec_1", ["ok", "too"], "sha256:c")
    assert (facts["started_at"], facts["wall_ms"]) == ("2026-11-15T01:02:03.456Z", 8003.123)
    assert (facts["ended"], facts["timed_out"], facts["limit"], facts["effect"]) == ("exited", False, None, "confirmed")
    assert facts["isolation"] == {"backend": "none", "level": "none"}
    assert facts["redactions"] == {"token": 2}
    assert "sha256:" + facts["output"]["sha256"] == canonical.digest(result)
    canonical.dumps(facts)


def test_what_was_not_seen_is_null_and_never_zero() -> None:
    facts = build(ending(isolation={"backend": "none"}))
    assert set(facts["usage"].values()) == {None}
    assert set(facts["network"].values()) == {None}
    assert (facts["exit_status"], facts["signal"], facts["denials"]) == (None, None, None)
    assert (facts["output"]["stdout_bytes"], facts["output"]["sha256"]) == (None, None)


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (None, ""),
        ("enforced", "only the programs that its contract names could be run; "),
        ("advisory", "only the programs that its contract names were there, and one of them runs code of its own; "),
    ],
)
def test_named_programs_are_told_of(commands: Any, words: str) -> None:
    ran = Ran(Limits(), replace(report(), commands=commands))
    facts = build(ending(contract=BOX, ran=ran))
    assert facts.get("commands") == commands
    assert f"; {words}network was denied" in facts["explanation"]


@pytest.mark.parametrize("known", [{}, {"contract": None, "decision": None}])
def test_a_refusal_has_the_same_shape_and_says_that_nothing_ran(known: dict[str, Any]) -> None:
    facts = build(ending(Status.VALIDATION_FAILURE, "unknown_tool", dispatched=False, **known))
    assert list(facts) == KEYS
    assert (facts["ended"], facts["effect"]) == (None, "none")
    assert (facts["isolation"], facts["network"], facts["denials"]) == (None, None, {})
    assert facts["explanation"].endswith("nothing was run")


def test_times_are_told_in_utc() -> None:
    moment = datetime(2026, 1, 1, 2, 0, 0, tzinfo=timezone(timedelta(hours=2)))
    assert build(but(ending(), began_at=moment))["started_at"] == "2026-01-01T00:00:00.000Z"


@pytest.mark.parametrize(
    ("status", "code", "ended"),
    [
        (Status.SUCCESS, "ok", "exited"),
        (Status.FAILED, "tool_error", "exited"),
        (Status.VALIDATION_FAILURE, "bad_arguments", None),
        (Status.DENIED, "policy", "policy"),
        (Status.APPROVAL_REQUIRED, "approval", "policy"),
        (Status.TIMEOUT, "timeout", "timeout"),
        (Status.KILLED, "cancelled", "cancelled"),
        (Status.KILLED, "limit", "policy"),
        (Status.UNAVAILABLE, "not_pinned", "infra"),
        (Status.UNKNOWN, "lost", "infra"),
    ],
)
def test_how_it_ended(status: Status, code: str, ended: str | None) -> None:
    facts = build(ending(status, code))
    assert facts["ended"] == ended
    assert facts["timed_out"] is (status is Status.TIMEOUT)
    assert facts["limit"] == ("wall" if status is Status.TIMEOUT else None)


# ── Boxes ─────────────────────────────────────────────────────────────────────────────────────────


def boxed(seen: BoxReport, limits: Limits = Limits(), **more: Any) -> FinishedCall:  # noqa: B008
    status, code = judge(seen)
    return ending(status, code, contract=BOX, ran=Ran(limits, seen), isolation=seen.isolation, **more)


def test_the_facts_of_a_box_are_its_supervisors() -> None:
    seen = report(
        "timeout", b"out", b"err", signal=9, limit="wall", wall_ms=8003.1234,
        usage=Usage(7990.21234, 18350080, 0, 1), denials={"io_uring_setup": 1},
        inputs=(FileFact("/workspace/input/a", 1, "ab"),), files=(FileFact("/workspace/output/r", 2, "cd"),),
        skipped={"link": "a link"}, trouble=("its group stayed",),
    )  # fmt: skip
    facts = build(replace(boxed(seen), wall_ms=40_000.0))
    assert set(KEYS) <= set(facts)
    assert (facts["ended"], facts["exit_status"], facts["signal"], facts["limit"]) == ("timeout", None, 9, "wall")
    assert (facts["timed_out"], facts["effect"], facts["wall_ms"]) == (True, "none", 8003.123)
    assert facts["usage"] == {"cpu_ms": 7990.212, "peak_memory_bytes": 18350080, "io_bytes": 0, "processes": 1}
    assert facts["isolation"] == seen.isolation
    assert facts["network"] == {"allowed": [], "denied": [], "bytes_in": 0, "bytes_out": 0}
    assert facts["inputs"] == [{"path": "/workspace/input/a", "bytes": 1, "sha256": "ab"}]
    assert facts["files"] == [{"path": "/workspace/output/r", "bytes": 2, "sha256": "cd"}]
    assert (facts["denials"], facts["skipped"], facts["trouble"]) == (
        {"io_uring_setup": 1}, {"link": "a link"}, ["its group stayed"],
    )  # fmt: skip
    assert facts["explanation"] == (
        "terminated by timeout after 8.0 s; refused system calls: io_uring_setup (1); "
        "network was denied; no side effect was possible"
    )
    canonical.dumps(facts)


@pytest.mark.parametrize(("stdout", "stderr"), [(b"a", b""), (b"", b"b"), (b"", b"")])
def test_the_digest_of_one_stream_is_the_digest_of_all_output(stdout: bytes, stderr: bytes) -> None:
    output = build(boxed(report(stdout=stdout, stderr=stderr)))["output"]
    assert output["sha256"] == hashlib.sha256(stdout + stderr).hexdigest()
    assert (output["stdout_bytes"], output["stderr_bytes"], output["truncated"]) == (len(stdout), len(stderr), False)


def test_the_digest_of_two_streams_tells_them_apart() -> None:
    one, other = (build(boxed(report(stdout=a, stderr=b)))["output"] for a, b in ((b"ab", b"c"), (b"a", b"bc")))
    assert one["sha256"] != other["sha256"]
    assert one["stdout_sha256"] == hashlib.sha256(b"ab").hexdigest()
    cut = replace(report(), stdout=Captured(b"a", b"z", 100, "ab"))
    assert build(boxed(cut))["output"]["truncated"] is True


def test_many_files_are_counted() -> None:
    files = tuple(FileFact(f"/workspace/output/{n}", 1, "ab") for n in range(1200))
    facts = build(boxed(report(files=files)))
    assert (len(facts["files"]), facts["files_left_out"]) == (1000, 200)


SMALL = Limits(wall_seconds=2, cpu_cores=0.5, memory_bytes=64 * MIB, processes=5, file_bytes=100)


MORE_MEMORY = "; more is given by `--memory`, `limits=` or `max_memory_mb`"
MORE_PIDS = "; more is given by `--pids`, `limits=` or `max_processes`"
MORE_DISK = "; more is given by `--disk`, `limits=` or `max_disk_mb`"


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (report(), "exited with status 0 after 12 ms"),
        (report(exit_status=1), "exited with status 1 after 12 ms"),
        (report(limit="disk"), "exited with status 0 after 12 ms, having met its limit of 512 MiB of disk" + MORE_DISK),
        (report(limit="pids"), "exited with status 0 after 12 ms, having met its limit of 5 processes" + MORE_PIDS),
        (report(limit="inodes"), "exited with status 0 after 12 ms, having met its limit of 65536 files on its disk"),
        (report(limit="files"), "exited with status 0 after 12 ms, having met its limit of 1024 open files"),
        (report("signalled", signal=11), "ended by signal 11 (SIGSEGV) after 12 ms"),
        (report("signalled", signal=99), "ended by signal 99 after 12 ms"),
        (report("timeout", limit="wall", wall_ms=2003), "terminated by timeout after 2.0 s"),
        (report("timeout", limit="cpu"), "terminated after 12 ms for using more than 1 s of processor time"),
        (report("oom", limit="memory"), "killed for using more than 64 MiB of memory after 12 ms" + MORE_MEMORY),
        (report("pids", limit="pids"), "killed for using more than 5 processes after 12 ms" + MORE_PIDS),
        (report("disk", limit="disk"), "killed for using more than 512 MiB of disk after 12 ms" + MORE_DISK),
        (report("disk", limit="file_size"), "killed for using more than 100 bytes in one file after 12 ms"),
        (report("output", limit="output"), "killed for using more than 64 MiB of output after 12 ms"),
        (report("policy"), "killed for breaking the rules of its box after 12 ms"),
        (report("cancelled"), "cancelled after 12 ms"),
        (report("infra"), "the box itself failed after 12 ms (box_failed)"),
        (
            report(denials={"bpf": 2, "ptrace": 1}),
            "exited with status 0 after 12 ms; refused system calls: bpf (2), ptrace (1)",
        ),
    ],
)  # fmt: skip
def test_each_ending_of_a_box_has_its_sentence(seen: BoxReport, sentence: str) -> None:
    assert explanation(boxed(seen, SMALL)) == f"{sentence}; network was denied; no side effect was possible"


def test_a_long_list_of_refusals_is_cut() -> None:
    said = explanation(boxed(report(denials={f"call{n}": 1 for n in range(9)})))
    assert "call4 (1), 4 more;" in said


def test_output_that_was_withheld_is_told() -> None:
    told = replace(boxed(report()), outcome=Outcome(Status.FAILED, "bad_output"))
    assert "exited with status 0 after 12 ms, but its output was withheld (bad_output)" in explanation(told)


# ── Effects ───────────────────────────────────────────────────────────────────────────────────────


ACTS, SENDS, WRITES = PossibleEffects(acts=True), PossibleEffects(sends=True), PossibleEffects(writes=True)
COPIES = PossibleEffects(copies=True)


@pytest.mark.parametrize(("status", "dispatched"), list(itertools.product(Status, [True, False])))
def test_what_can_change_nothing_and_what_never_ran_have_no_effect(status: Status, dispatched: bool) -> None:
    assert effect(status, NO_EFFECTS, dispatched) is Effect.NONE
    assert effect(status, SENDS, dispatched, sent=False) is Effect.NONE
    assert effect(status, COPIES, dispatched, copied=False) is Effect.NONE
    if status in NEVER_RAN:  # of which the status alone is no proof
        assert effect(status, ACTS, dispatched) is (Effect.UNKNOWN if dispatched else Effect.NONE)


@pytest.mark.parametrize("way", [ACTS, SENDS, WRITES, COPIES, PossibleEffects(sends=True, writes=True)])
def test_effects_of_what_can_change_something(way: PossibleEffects) -> None:
    assert effect(Status.SUCCESS, way, True) is Effect.CONFIRMED
    assert effect(Status.SUCCESS, way, False) is Effect.CONFIRMED  # replayed: it did happen, once
    for status in STOPPED:
        assert effect(status, way, True) is Effect.UNKNOWN
        assert effect(status, way, False) is Effect.NONE
    for dispatched in (True, False):
        assert effect(Status.UNKNOWN, way, dispatched) is Effect.UNKNOWN


def test_what_was_seen_of_the_network_says_nothing_of_a_folder() -> None:
    assert effect(Status.TIMEOUT, PossibleEffects(sends=True, writes=True), True, sent=False) is Effect.UNKNOWN


def test_a_run_that_nobody_saw_to_its_end_may_have_used_its_way_out() -> None:
    cancelled = ending(Status.KILLED, "cancelled", contract=BOX, possible=SENDS)
    facts = build(cancelled)
    assert facts["effect"] == "unknown"
    assert facts["explanation"] == "cancelled after 8.0 s; whether it took effect is unknown"
    seen = build(but(cancelled, ran=Ran(Limits(), report("cancelled", planted=("/p/.envrc",)))))
    assert (seen["effect"], seen["planted"]) == ("unknown", ["/p/.envrc"])
    shut = build(ending(Status.KILLED, "cancelled", contract=BOX))
    assert shut["explanation"] == "cancelled after 8.0 s; network was denied; no side effect was possible"


NETWORK: dict[str, Any] = {"allowed": [], "denied": [], "failed": [], "bytes_in": 0, "bytes_out": 0}
GOT: dict[str, Any] = {"host": "api.example", "port": 443, "count": 2, "rule": "n"}


def networked(**network: Any) -> FinishedCall:
    seen = replace(report(), network={**NETWORK, **network})
    return but(boxed(seen), contract=replace(BOX, network="n"), possible=SENDS)


def test_what_a_box_sent_decides_its_effect_and_is_told() -> None:
    facts = build(networked(allowed=[GOT], denied=[{**GOT, "host": "no.example", "port": 80}]))
    assert facts["network"]["allowed"] == [GOT]
    assert facts["effect"] == "confirmed"
    said = "network: reached api.example:443 (2); denied no.example:80 (2); its effect is confirmed"
    assert facts["explanation"].endswith(said)
    quiet = build(networked(denied=[GOT]))
    assert quiet["effect"] == "none"
    assert quiet["explanation"].endswith("nothing was sent to the network; no side effect was possible")
    assert build(networked(failed=[GOT]))["effect"] == "confirmed"
    assert build(networked(denied=[GOT], bytes_out=1))["effect"] == "confirmed"
    lost = replace(networked(allowed=[GOT]), outcome=Outcome(Status.TIMEOUT, "ok"))
    assert build(lost)["effect"] == "unknown"


@pytest.mark.parametrize(
    ("host", "reason", "effect"),
    [
        ("stolen-data.example", "address_loopback", "confirmed"),
        ("stolen-data.example", "own_port", "confirmed"),
        ("*", "address_private", "confirmed"),
        ("127.0.0.1", "address_loopback", "none"),
        ("::1", "own_port", "none"),
        ("stolen-data.example", "no_rule", "none"),
    ],
)
def test_a_name_that_was_looked_up_was_sent_though_its_address_was_denied(host: str, reason: str, effect: str) -> None:
    assert build(networked(denied=[{**GOT, "host": host, "reason": reason}]))["effect"] == effect


def test_what_was_begun_in_a_session_with_a_way_out_may_use_it() -> None:
    begun = but(ending(contract=BOX), possible=SENDS)
    assert build(begun)["effect"] == "confirmed"
    assert build(but(begun, possible=NO_EFFECTS))["effect"] == "none"


# ── Explanations ──────────────────────────────────────────────────────────────────────────────────

DENIED = Decision(id="dec_2", allowed=False, reason="denied by no-net (No network)", rules=("no-net",))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (ending(), "the tool answered after 8.0 s; its effect is confirmed"),
        (
            ending(contract=READ),
            "the tool answered after 8.0 s; it only reads, so nothing was changed",
        ),
        (ending(dispatched=False), "answered with an earlier call's result; its effect is confirmed"),
        (
            ending(contract=READ, dispatched=False),
            "answered with an earlier call's result; nothing was run again",
        ),
        (ending(Status.FAILED, "tool_error"), "the tool failed after 8.0 s; whether it took effect is unknown"),
        (
            ending(Status.FAILED, "bad_output"),
            "the tool answered after 8.0 s, but its answer was withheld (bad_output); "
            "whether it took effect is unknown",
        ),
        (
            ending(Status.DENIED, "policy", decision=DENIED, dispatched=False),
            "refused by policy (denied by no-net (No network)); nothing was run",
        ),
        (ending(Status.DENIED, "throttled", dispatched=False), "refused (throttled); nothing was run"),
        (
            ending(Status.VALIDATION_FAILURE, "bad_arguments", dispatched=False),
            "the request was refused as invalid (bad_arguments); nothing was run",
        ),
        (
            ending(Status.APPROVAL_REQUIRED, "approval_required", dispatched=False),
            "a person must approve it before it can run; nothing was run",
        ),
        (
            ending(Status.TIMEOUT, "timeout", contract=BOX),
            "terminated by timeout after 8.0 s; network was denied; no side effect was possible",
        ),
        (ending(Status.KILLED, "cancelled"), "cancelled after 8.0 s; whether it took effect is unknown"),
        (ending(Status.KILLED, "limit"), "stopped after 8.0 s (limit); whether it took effect is unknown"),
        (
            ending(Status.UNAVAILABLE, "not_pinned", dispatched=False),
            "something it needs was not available (not_pinned); nothing was run",
        ),
        (
            ending(Status.UNKNOWN, "connection_lost"),
            "the answer was lost after 8.0 s (connection_lost); whether it took effect is unknown",
        ),
    ],
)
def test_each_ending_has_its_sentence(given: FinishedCall, sentence: str) -> None:
    assert explanation(given) == sentence


def test_short_times_are_told_in_milliseconds() -> None:
    assert explanation(replace(ending(), wall_ms=12.4)).startswith("the tool answered after 12 ms")


@pytest.mark.parametrize(
    ("status", "contract", "dispatched"), list(itertools.product(Status, [None, READ, WRITE, BOX], [True, False]))
)
def test_no_sentence_contradicts_the_effect(status: Status, contract: Contract | None, dispatched: bool) -> None:
    given = ending(status, "code", contract=contract, dispatched=dispatched)
    said, had = explanation(given), effect(status, of(contract), dispatched)
    assert ("unknown" in said) is (had is Effect.UNKNOWN)
    assert ("confirmed" in said) is (had is Effect.CONFIRMED)
    assert "\n" not in said


# ── sessions ──


def test_a_step_says_of_which_session_it_was_one() -> None:
    within = Within("box_1", 3, "default", "running")
    facts = build(boxed(report(), within=within))
    assert facts["session"] == {"id": "box_1", "step": 3, "context": "default", "state": "running"}
    assert list(facts) == [*KEYS, "session"]
    assert facts["explanation"] == (
        "step 3 of session box_1: exited with status 0 after 12 ms; network was denied;"
        " nothing outside of the session was changed"
    )
    assert "session" not in build(boxed(report()))


def test_what_was_put_into_a_session_is_told_by_digest() -> None:
    given = (FileFact("/workspace/a.csv", 3, "ab"),)
    facts = build(ending(contract=replace(BOX, mode=Mode.WRITE), within=Within("box_1", given=given)))
    assert facts["inputs"] == [{"path": "/workspace/a.csv", "bytes": 3, "sha256": "ab"}]
    assert facts["effect"] == "none"
    reading = ending(contract=replace(BOX, mode=Mode.READ), within=Within("box_1"))
    assert explanation(reading).endswith("it only reads, so nothing was changed")
    sent = Ran(Limits(), report(network={**NETWORK, "allowed": [GOT]}))
    waited = explanation(but(reading, ran=sent))
    assert waited.endswith("this call only waited; what the command did is the effect of the call that started it")
    planted = Ran(Limits(), report(planted=("/srv/.envrc",)))
    assert "the effect of the call that started it" in explanation(but(reading, ran=planted))


LATE: dict[str, Any] = {"network": {**NETWORK, "allowed": [GOT], "bytes_out": 9}}


@pytest.mark.parametrize(
    ("seen", "possible", "expected"),
    [
        ({"late": LATE}, SENDS, "unknown"),
        ({"late": {"network": {**NETWORK, "denied": [GOT]}}}, SENDS, "none"),
        ({"late": {"network": {**NETWORK, "allowed": [{**GOT, "count": 0}], "bytes_in": 9}}}, SENDS, "none"),
        ({"late": {"cpu_ms": 3.0}}, SENDS, "none"),
        ({"left": True}, SENDS, "unknown"),
        ({"left": True}, NO_EFFECTS, "none"),
        ({}, SENDS, "none"),
    ],
)
def test_what_a_step_left_behind_may_have_an_effect(
    seen: dict[str, Any], possible: PossibleEffects, expected: str
) -> None:
    ran = Ran(Limits(), report(network=NETWORK, **seen))
    facts = build(ending(contract=BOX, ran=ran, possible=possible, within=Within("s_1", 2, "main")))
    assert facts["effect"] == expected
    assert ("nothing was sent" in facts["explanation"]) == (expected == "none")


def test_what_was_planted_after_the_last_step_is_in_the_facts_of_closing_a_session() -> None:
    closed = ending(contract=replace(BOX, mode=Mode.WRITE), within=Within("s_1", 2, planted=("/srv/.envrc",)))
    assert build(closed)["planted"] == ["/srv/.envrc"]


def test_the_page_of_facts_names_every_fact() -> None:
    full = report(
        files=tuple(FileFact(f"/workspace/output/{number}", 1, "0" * 64) for number in range(1001)),
        packages=({"name": "six", "version": "1"},),
        commands="enforced",
        forged=True,
        late={"cpu_ms": 1.0},
        left=True,
        planted=("/srv/.envrc",),
        skipped={"output/pipe": "it is a pipe"},
        trouble=("the box took long to end",),
        isolation={"backend": "process"},
    )
    cell = CellReport(report("exited"))
    within = Within("s_1", 2, "main", report=StepReport("s_1", 2, cell, "main"))
    facts = build(ending(contract=BOX, ran=Ran(Limits(), full), within=within))
    page = (ROOT / "docs/facts.md").read_text()
    assert [name for name in facts if f"`{name}`" not in page] == []
    assert set(facts) <= set(FACTS)
    assert set(facts) > {*KEYS, "session", "claimed", "late", "packages", "planted", "commands", "forged", "skipped"}
