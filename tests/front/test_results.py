"""Outcomes on the wire: a refusal is a readable result, and each revision gets what it wants around it."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from ringfence.core.model import GuardedText, Json, Outcome, Receipt, Status
from ringfence.core.sessions import Within
from ringfence.front import results
from tests.faking import OK, make_call

CALL = make_call("echo", id="call_1")
FACTS: Json = {"call_id": "call_1", "effect": "none"}
OLD, NEW = "2025-11-25", "2026-07-28"


def refused(status: Status, code: str = "policy", **more: Any) -> Outcome:
    return Outcome(status, code, GuardedText("Refused by policy: no"), facts=FACTS, **more)


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.SUCCESS])
def test_a_refusal_is_a_result_that_says_why_and_which(status: Status) -> None:
    result = results.tool_result(refused(status, approval_id="apr_1", receipt=Receipt("c", 7, "h")), CALL)
    assert result["isError"] is True
    (block,) = result["content"]
    assert block == {"type": "text", "text": f"Refused by policy: no [{status}/policy, call call_1]"}
    assert result["_meta"]["ringfence/outcome"] == {
        "status": status, "reason_code": "policy", "call_id": "call_1", "trust": "trusted", "approval_id": "apr_1",
    }  # fmt: skip
    assert result["_meta"]["ringfence/facts"] == FACTS
    assert result["_meta"]["ringfence/receipt"] == {"chain": "c", "seq": 7, "head": "h"}


def test_a_result_keeps_everything_and_gains_our_words() -> None:
    own = {**OK, "structuredContent": {"n": 1}, "isError": True, "x": [None], "_meta": {"vendor/x": 1}}
    result = results.tool_result(Outcome(Status.FAILED, "tool_error", result=own, trust="partial", facts=FACTS), CALL)
    assert {name: value for name, value in result.items() if name != "_meta"} == {
        name: value for name, value in own.items() if name != "_meta"
    }
    assert result["_meta"]["vendor/x"] == 1
    assert result["_meta"]["ringfence/outcome"]["trust"] == "partial"
    assert "ringfence/receipt" not in result["_meta"]
    assert own["_meta"] == {"vendor/x": 1}, "the result itself is not touched"


def test_a_server_cannot_speak_in_our_name() -> None:
    forged = {**OK, "_meta": {"ringfence/outcome": {"status": "success"}, "ringfence/facts": {"effect": "none"}}}
    result = results.tool_result(Outcome(Status.FAILED, "tool_error", result=forged, facts=FACTS), CALL)
    assert result["_meta"]["ringfence/outcome"]["status"] == "failed"
    assert result["_meta"]["ringfence/facts"] == FACTS


@pytest.mark.parametrize("code", [-32021, -32042])
def test_errors_that_a_client_acts_upon_are_passed_on(code: int) -> None:
    error = {"code": code, "message": "go there first", "data": {"url": "https://x"}}
    with pytest.raises(MCPError) as raised:
        results.tool_result(refused(Status.FAILED, "upstream_error", error=error), CALL)
    told = raised.value.error.data
    assert (raised.value.code, told["url"], told["call_id"]) == (code, "https://x", "call_1")


def test_a_client_of_before_is_told_of_a_file_in_words() -> None:
    link = {"type": "resource_link", "uri": "ringfence://session/s/output/a.png", "name": "a.png", "size": 3}
    own = Outcome(Status.SUCCESS, "ok", result={"content": [{"type": "text", "text": "x"}, link]}, within=Within("s"))
    assert results.tool_result(own, CALL, "2025-11-25")["content"][1] == link
    assert results.tool_result(own, CALL, "2025-03-26")["content"] == [
        {"type": "text", "text": "x"},
        {"type": "text", "text": "[a.png: ringfence://session/s/output/a.png]"},
    ]
    theirs = Outcome(Status.SUCCESS, "ok", result={"content": [link]})
    assert results.tool_result(theirs, CALL, "2025-03-26")["content"] == [link], "a server's own result stays as it is"


def test_any_other_error_of_a_server_is_a_result() -> None:
    error = {"code": -32602, "message": "no"}
    assert results.tool_result(refused(Status.FAILED, "upstream_error", error=error), CALL)["isError"]


@pytest.mark.parametrize(
    ("outcome", "version", "code"),
    [
        (refused(Status.VALIDATION_FAILURE, "unknown_resource"), OLD, -32002),
        (refused(Status.VALIDATION_FAILURE, "unknown_resource"), NEW, -32602),
        (refused(Status.VALIDATION_FAILURE, "unknown_prompt"), OLD, -32602),
        (refused(Status.DENIED), OLD, -32603),
        (refused(Status.UNAVAILABLE, "server_down"), NEW, -32603),
        (refused(Status.FAILED, "upstream_error", error={"code": -32002, "message": "gone"}), OLD, -32002),
        (refused(Status.FAILED, "upstream_error", error={"code": -32002, "message": "gone"}), NEW, -32602),
        (refused(Status.FAILED, "upstream_error", error={"code": 7, "message": "x"}), NEW, 7),
    ],
)
def test_what_has_no_result_that_says_no_is_an_error(outcome: Outcome, version: str, code: int) -> None:
    error = results.item_error(outcome, CALL, version)
    assert error.code == code
    assert error.error.data["call_id"] == "call_1"
    assert error.error.data["reason_code"] == outcome.reason_code


def test_a_servers_own_data_is_kept_beside_ours() -> None:
    for own, expected in (({"a": 1}, {"a": 1}), ([1], {"data": [1]}), ("text", {"data": "text"}), (None, {})):
        error = {"code": 7, "message": "x", "data": own}
        data = results.item_error(refused(Status.FAILED, error=error), CALL, NEW).error.data
        assert {**expected, "call_id": "call_1"}.items() <= data.items()


def test_only_what_is_nobodys_own_goes_on_to_a_server() -> None:
    meta: Json = {
        "vendor/x": 1, "progressToken": 5, "ringfence/idempotency_key": "k", "ringfence/session": "s",
        "traceparent": "t",
        "io.modelcontextprotocol/clientInfo": {}, "io.modelcontextprotocol/logLevel": "info",
    }  # fmt: skip
    assert results.forwardable(meta) == {"vendor/x": 1, "traceparent": "t"}


def test_each_revision_gets_its_own_envelope() -> None:
    info = {"name": "ringfence"}
    stamped = results.stamp({"tools": []}, "tools/list", info)
    assert (stamped["resultType"], stamped["ttlMs"], stamped["cacheScope"]) == ("complete", 0, "private")
    assert stamped["_meta"] == {"io.modelcontextprotocol/serverInfo": info}
    called = results.stamp({"content": [], "_meta": {"a": 1}}, "tools/call", info)
    assert set(called) == {"content", "resultType", "_meta"}
    assert called["_meta"]["a"] == 1
    waiting = results.stamp({"resultType": "input_required", "requestState": "s"}, "resources/read", info)
    assert "ttlMs" not in waiting
    assert results.stamp({"cacheScope": "public", "ttlMs": 5}, "tools/list", info)["cacheScope"] == "private"
    assert results.unstamp({"resultType": "complete", "ttlMs": 1, "cacheScope": "public", "x": 1}) == {"x": 1}


@pytest.mark.parametrize("params", [None, {}, {"_meta": None}, {"_meta": [1]}, {"_meta": "text"}])
def test_absent_or_odd_meta_is_none(params: Any) -> None:
    assert results.meta_of(params) == {}


def test_a_fault_makes_another_call_of_it() -> None:
    assert results.with_fault(CALL, "duplicate key").fault == "duplicate key"
    assert CALL.fault is None
