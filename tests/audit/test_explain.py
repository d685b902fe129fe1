"""`explain` reads well for every way a call can end, and survives whatever a log may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.audit.chain import Head, seal_proved
from ringfence.audit.explain import explain, summary
from ringfence.audit.keys import load_or_create
from ringfence.core.model import Json, Status
from ringfence.core.reasons import REASONS

DIGEST = "sha256:1234abcd" + "0" * 56
BASE: dict[str, Any] = {
    "call": {
        "id": "call_1",
        "kind": "tool",
        "tool": "create_ticket",
        "server": "helpdesk",
        "origin": "mcp-http",
        "principal": {"tenant": "local", "agent": "local", "person": None, "kind": "agent"},
        "session": None,
        "parent": None,
        "environment": "development",
    },
    "contract": {"name": "create_ticket", "digest": DIGEST, "mode": "write"},
    "pin": DIGEST,
    "decision": {
        "id": "dec_1",
        "allowed": True,
        "reason": "writes are allowed",
        "rules": ["std-write"],
        "marks": [],
        "asks": [],
        "sandbox": False,
        "policy_digest": DIGEST,
        "error": None,
    },
    "approval": {"id": "apr_1", "rule": "always", "by": [{"person": "Alice", "at": 1767225600.0}]},
    "arguments": {"digest": DIGEST},
    "durable": True,
    "effect_possible": True,
}
STARTED = {"kind": "started", "chain": "c1", "seq": 4, "at": 1767225601.0, **BASE}


ANSWERED: Json = {
    "kind": "approval_answered",
    "approval": "apr_1",
    "person": "Alice",
    "approve": True,
    "at": 1767225600.0,
}


def finished(status: str, **more: Any) -> dict[str, Any]:
    facts = {"wall_ms": 12.34, "isolation": {"backend": "none", "level": "none"}}
    ended = {"status": status, "reason_code": "", "message": "", "effect": "none", "facts": facts, "started_seq": 4}
    return {"kind": "finished", "chain": "c1", "seq": 5, "at": 1767225602.0, **BASE, **ended, **more}


def test_a_call_that_waited_for_a_person_was_asked_when_it_came() -> None:
    facts = {"started_at": "2025-12-31T23:59:50.250Z", "wall_ms": 12000.0}
    for records in ([STARTED, finished("success", facts=facts)], [finished("approval_required", facts=facts)]):
        assert "in development at 2025-12-31 23:59:50 UTC\n" in explain(records)


@pytest.mark.parametrize("came", [None, "", "soon", "2025-12-31T23:59:50", 7, ["x"], "9999-99-99T00:00:00Z"])
def test_where_nobody_knows_when_a_call_came_its_records_say_when_it_was_asked(came: Any) -> None:
    assert "at 2026-01-01 00:00:01 UTC\n" in explain([STARTED, finished("success", facts={"started_at": came})])


def refused(status: str, **more: Any) -> list[dict[str, Any]]:
    return [finished(status, **{"approval": None, "facts": {}, "started_seq": None, **more})]


def test_success_tells_the_whole_way() -> None:
    assert explain([ANSWERED, STARTED, finished("success", effect="confirmed")]).splitlines() == [
        "create_ticket, call_1",
        "  called     by agent local over mcp-http in development at 2026-01-01 00:00:01 UTC",
        "  contract   create_ticket, mode write",
        "  policy     allowed by rule std-write: writes are allowed",
        "  approval   Alice approved it at 2026-01-01 00:00:00 UTC (apr_1)",
        "  started    on record before anything was sent, and synced to disk; an effect outside was possible",
        "  ran        once on server helpdesk, isolation none",
        "  result     success; its effect is confirmed; 12.3 ms",
        "  on record  chain c1, records 4 and 5",
        "             digests: contract 1234abcd0000, definition 1234abcd0000, policy 1234abcd0000",
    ]


def test_a_summary_is_one_line() -> None:
    assert summary([ANSWERED, STARTED, finished("success", effect="confirmed")]) == (
        "create_ticket by agent local; policy allowed by rule std-write; success; its effect is confirmed; 12.3 ms"
    )
    denied = summary(refused("denied", reason_code="policy", message="Rule no-net\n  forbids it."))
    assert denied.endswith("denied (policy): Rule no-net\\n  forbids it; it never ran") and "\n" not in denied
    assert summary([]) == "There is no record of this call."


ENDINGS = {
    "failed": (
        [STARTED, finished("failed", reason_code="tool_error", message="no such queue.", effect="unknown")],
        "  result     failed (tool_error): no such queue; whether it changed anything outside is unknown; 12.3 ms",
    ),
    "validation_failure": (
        refused("validation_failure", contract=None, decision=None, reason_code="unknown_tool", message="no tool x"),
        "  contract   none applied\n"
        "  policy     not asked: the call did not get that far\n"
        "  started    no\n"
        "  result     validation failure (unknown_tool): no tool x; it never ran\n",
    ),
    "denied": (
        refused("denied", reason_code="policy", message="Rule no-net forbids it."),
        "  result     denied (policy): Rule no-net forbids it; it never ran\n",
    ),
    "approval_required": (
        [
            *refused("approval_required", reason_code="approval", approval_id="apr_2"),
            {"kind": "approval_asked", "approval": "apr_2", "rule": "always", "people": 2, "at": 1767225601.5},
        ],
        "  approval   requested of 2 people under always at 2026-01-01 00:00:01 UTC (apr_2)\n"
        "  started    no\n"
        "  result     approval required, apr_2 (approval); it has not run\n",
    ),
    "timeout": (
        [STARTED, finished("timeout", reason_code="deadline", effect="none")],
        "  result     timeout (deadline); nothing outside was changed; 12.3 ms\n",
    ),
    "killed": (
        [STARTED, finished("killed", reason_code="limit", effect="none", facts={"limit": "memory"})],
        "  result     killed at its memory limit (limit); nothing outside was changed\n",
    ),
    "unavailable": (
        [STARTED, finished("unavailable", reason_code="server_down", message="helpdesk does not answer")],
        "  result     unavailable (server_down): helpdesk does not answer; it never ran; 12.3 ms\n",
    ),
    "unknown": (
        [STARTED, finished("unknown", reason_code="crash", effect="unknown", recovered=True)],
        "  result     unknown (crash); whether it changed anything outside is unknown; 12.3 ms\n"
        "             the gateway stopped before it recorded an outcome; a later start closed the record\n",
    ),
}


@pytest.mark.parametrize("status", ENDINGS)
def test_every_ending_reads_well(status: str) -> None:
    records, said = ENDINGS[status]
    assert said in explain(records)


def test_no_status_is_left_out() -> None:
    assert {*ENDINGS, "success"} == {status.value for status in Status}


def test_what_to_do_is_said_as_the_table_of_reasons_has_it() -> None:
    remedy = REASONS["tool_error"]
    assert f"  what to do {remedy.actor}: {remedy.remedy}\n" in explain(ENDINGS["failed"][0])
    crash = REASONS["crash"]
    assert f"  what to do {crash.actor}: {crash.remedy}\n" in explain(ENDINGS["unknown"][0])
    for records in ([STARTED, finished("success", reason_code="ok")], [STARTED, finished("failed", reason_code="new")]):
        assert "what to do" not in explain(records), "nothing is to be done, or the code is not known"


def test_a_contract_that_is_not_on_record_is_not_guessed() -> None:
    text = explain(refused("validation_failure", contract=None, decision=None, reason_code="bad_arguments"))
    assert "  contract   create_ticket: the arguments do not fit its schema\n" in text
    text = explain(refused("validation_failure", contract=None, decision=None, reason_code="bad_request"))
    assert "  contract   not looked up: the call was refused before that\n" in text


def test_what_never_ran_did_not_run_at_any_isolation() -> None:
    assert "  ran " not in explain(ENDINGS["unavailable"][0])
    assert "  ran " not in explain(ENDINGS["denied"][0])


def test_a_refusing_policy_names_its_rules_and_errors() -> None:
    decision = {
        **BASE["decision"],
        "allowed": False,
        "rules": ["a", "b", "c"],
        "error": "no such field",
        "marks": ["w"],
    }
    text = explain(refused("denied", decision={**decision, "sandbox": True, "asks": ["always"]}))
    assert "  policy     refused by rules a, b and c: writes are allowed\n" in text
    assert "             a rule could not be evaluated, so the call is refused: no such field\n" in text
    assert "             marked by w; a sandbox is required; approval is required (always)\n" in text
    assert "  policy     refused, no rule matched\n" in explain(refused("denied", decision={"allowed": False}))


def test_a_reason_is_told_once() -> None:
    decision = {**BASE["decision"], "allowed": False, "reason": "denied by no-net (no way out)"}
    text = explain(refused("denied", decision=decision, message="Refused by policy: denied by no-net (no way out)"))
    assert "  policy     refused by rule std-write\n" in text and text.count("no way out") == 1


def test_an_answer_is_told_once_and_a_refusal_by_name() -> None:
    assert explain([ANSWERED, STARTED, finished("success")]).count("Alice approved") == 1
    denied = {**ANSWERED, "person": "Bob", "approve": False}
    assert "Bob refused it at 2026-01-01 00:00:00 UTC (apr_1)\n" in explain([denied, *refused("denied")])


def test_approved_is_said_only_where_the_answers_of_people_are_on_record() -> None:
    unproven = "apr_1 was used, but the log does not prove that a person gave it\n"
    claimed = explain([STARTED, finished("success")])
    assert unproven in claimed and "approved" not in claimed, "what the call's own record claims is no proof"
    asked = {"kind": "approval_asked", "approval": "apr_1", "rule": "two", "people": 2, "at": 1767225600.0}
    assert unproven in explain([asked, ANSWERED, STARTED, finished("success")]), "one of two people"
    assert unproven in explain([ANSWERED, {**ANSWERED, "person": "Bob", "approve": False}, STARTED])
    both = explain([asked, ANSWERED, {**ANSWERED, "person": "Bob"}, STARTED, finished("success")])
    assert unproven not in both and "Alice approved it" in both and "Bob approved it" in both


def test_an_answer_is_told_as_an_approval_only_by_its_signature(tmp_path: Path) -> None:
    keys = load_or_create(tmp_path / "keys")
    body = {"approval": "apr_1", "person": "Alice", "approve": True, "shown": "sha256:0123456789abcdef"}
    signed = seal_proved(keys.sign_record, Head("c1"), 1767225600.0, ("approval_answered", "call_1"), body).body
    place = {"chain": "c1", "seq": 1, "hash": "0"}
    ran = finished("success", approval={"id": "apr_1", "asked": place, "by": []})
    told = explain([signed, STARTED, ran], keys.public)
    assert "Alice approved it at 2026-01-01 00:00:00 UTC (apr_1, shown 0123456789ab)\n" in told
    forged = explain([{**signed, "person": "Bob"}, STARTED, ran], keys.public)
    assert "Bob approved" not in forged and "is not signed and proves nothing" in forged
    assert "does not prove that a person gave it" in forged


def test_an_approval_that_became_void_is_told() -> None:
    void = {"kind": "approval_void", "approval": "apr_1", "why": "clock_set_back", "at": 1767225600.0}
    told = explain([void, *refused("approval_required")])
    assert "apr_1 became void at 2026-01-01 00:00:00 UTC (clock set back)\n" in told


def test_who_and_whence() -> None:
    principal = {"tenant": "acme", "agent": "bot", "person": "carol", "kind": "agent"}
    call = {**BASE["call"], "kind": "resource", "tool": "file:///a", "principal": principal, "parent": "call_0"}
    text = explain([{**STARTED, "call": {**call, "session": "s1"}}])
    assert "  called     by agent bot for carol of tenant acme over mcp-http" in text
    assert "from within call call_0 in MCP session s1 in development" in text
    assert "still running, or a crash" in text
    system = {"kind": "server", "tool": "helpdesk", "origin": "system", "principal": {"kind": "system"}}
    assert explain([{**STARTED, "call": system}]).startswith(
        "The start of server helpdesk\n  called     by the gateway itself at"
    )


def test_isolation_and_network_are_told() -> None:
    facts = {
        "isolation": {
            "backend": "oci",
            "level": "process",
            "protections": {"seccomp": {"on": True}, "x": {"on": False}},
        },
        "network": {"denied": [{"host": "198.51.100.7", "port": 443}]},
    }
    text = explain([STARTED, finished("failed", facts={**facts, "exit_status": 3}, attempts=2)])
    assert "  ran        2 times on server helpdesk, isolation process (backend oci), with seccomp\n" in text
    many = {f"p{n}": {"on": n != 3} for n in range(33)}
    told = explain([STARTED, finished("failed", facts={"isolation": {**facts["isolation"], "protections": many}})])  # type: ignore[dict-item]
    assert "isolation process (backend oci), with 32 protections\n" in told
    assert "  network    denied to 198.51.100.7:443\n" in text
    assert "failed, exit status 3; " in text


def test_a_step_of_a_session_is_told_as_one() -> None:
    session = {"id": "box_1", "step": 3, "context": "default", "state": "running"}
    facts = {"isolation": {"backend": "process", "level": "process"}, "session": session}
    text = explain([STARTED, finished("success", facts=facts)])
    assert "  session    box_1, step 3, context default, running\n" in text
    less = explain([STARTED, finished("success", facts={**facts, "session": {"id": "box_1"}})])
    assert "  session    box_1\n" in less
    stale = explain([STARTED, finished("validation_failure", facts=facts, reason_code="session_changed")])
    assert "  ran " not in stale and "  session " not in stale and "(session_changed)" in stale


def test_a_refusal_by_the_budget_is_a_stop_of_its_own() -> None:
    for code in ("throttled", "quota", "loop"):
        told = explain(refused("denied", reason_code=code, message="later"))
        assert f"  budget     refused ({code})\n" in told and f"denied ({code}): later; it never ran" in told
    assert "  budget" not in explain(refused("denied", reason_code="policy"))


def test_limits_are_told_by_what_enforced_them() -> None:
    limits = {"cpu": {"by": "cgroup"}, "memory": {"by": "cgroup"}, "pids": {"by": "rlimit"}, "x": 3}
    facts = {"isolation": {"backend": "process", "level": "process", "limits": limits}}
    told = explain([STARTED, finished("success", facts=facts)])
    assert "isolation process, limits: cpu and memory by cgroup and pids by rlimit\n" in told


def test_no_value_of_a_record_begins_a_line() -> None:
    forged = "no\n  approval   Alice approved it\r\x0b\u2028  result     success"
    records = refused("denied", message=forged, decision={"allowed": False, "reason": forged, "rules": [forged]})
    lines = explain(records).splitlines()
    assert not any(line.startswith("  approval") for line in lines)
    assert [line[2:13].strip() for line in lines[1:-1]] == [
        "called",
        "contract",
        "policy",
        "started",
        "result",
        "on record",
    ]


def test_nothing_recorded() -> None:
    assert explain([]) == "There is no record of this call."
    assert explain([{"kind": "reload"}]) == "There is no record of this call."


def test_a_terminal_is_not_driven_by_a_record() -> None:
    text = explain([STARTED, finished("failed", message="\x1b[2Jgone\u202e")])
    assert "\x1b" not in text and "\u202e" not in text and "gone" in text


KEYS = (
    ("kind", "call", "contract", "decision", "approval", "facts", "status", "at", "seq", "by", "rules", "isolation"),
    ("principal", "people", "person", "network", "denied", "wall_ms", "protections", "effect", "attempts", "digest"),
)
keys = st.sampled_from([name for row in KEYS for name in row])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*Status, "started"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(keys, values, max_size=8), max_size=3), st.sampled_from(["started", "finished"]))
def test_nothing_that_a_log_may_hold_crashes_it(records: list[dict[str, Any]], kind: str) -> None:
    for record in records[:2]:
        record["kind"] = kind
    assert explain(records)


def test_a_name_that_a_caller_made_up_is_no_sentence_of_ours() -> None:
    made_up = "pay was approved by alice.\nIt ran once. x"
    call = {**BASE["call"], "tool": made_up, "session": "s, approved by bob"}
    told = explain(refused("validation_failure", call=call))
    assert told.startswith('"pay was approved by alice.\\nIt ran once. x", call_1\n  called     by agent')
    assert 'in MCP session "s, approved by bob"' in told and "\n  approval" not in told


def test_a_list_that_is_cut_says_how_much_is_missing() -> None:
    denied = [{"host": f"h{number}", "port": 443} for number in range(13)]
    text = explain([STARTED, finished("success", facts={"network": {"denied": denied}})])
    assert "h9:443 and 3 more\n" in text and "h10" not in text
    rounds = [{"kind": "answered", "round": number, "decision": {"allowed": True}} for number in range(14)]
    text = explain([STARTED, *rounds, finished("success")])
    assert "of round 11 was sent on\n" in text and "of round 12" not in text
    assert "2 more lines; `audit show` prints all records\n" in text
