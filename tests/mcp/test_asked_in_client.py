"""A person who is asked in their own client: with the SDK's client in both revisions, and over a restart."""

from __future__ import annotations

import base64
import os
import signal
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from ringfence import identity
from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, JSON, Gateway, RawHttp, about, text_of

pytestmark = pytest.mark.anyio
FORM: JSON = {"elicitation": {"form": {}}}
eras = pytest.mark.parametrize("mode", ERAS)


def configuration() -> JSON:
    servers = {
        "desk": {
            "command": tooling.fixture_command("hostile_server.py"),
            "pins": "first_use",
            "placement": "unsafe_host",
        }
    }
    capabilities = gateway.tools("desk", "echo", "counter")
    capabilities["echo"] |= {"mode": "write", "approval": "own"}
    return gateway.configuration(
        servers,
        capabilities,
        people={"alice": {"roles": ["writer"], "os_user": identity.os_user()}},
        approvals={"own": {"roles": ["writer"], "self": True, "in_client": True}},
    )


class Person:
    """Who sits at the client: what they were shown, and what they say."""

    def __init__(self, action: Any, answer: str = "approve") -> None:
        self.shown: list[str] = []
        self.said = types.ElicitResult(action=action, content={"answer": answer} if action == "accept" else None)

    async def elicit(self, context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.shown.append(params.message)
        return self.said


@eras
async def test_the_sdks_client_asks_its_person_and_the_call_runs_or_does_not(tmp_path: Path, mode: str) -> None:
    with gateway.serve(tmp_path, configuration()) as served:
        for who, ends in (
            (Person("accept"), "success"),
            (Person("accept", "deny"), "denied"),
            (Person("decline"), "approval_required"),
        ):
            async with served.client(mode, elicitation_callback=who.elicit) as client:
                result = await client.call_tool("echo", {"text": f"for {ends}"})
            assert about(result)["status"] == ends
            assert result.is_error is (ends != "success")
            (message,) = who.shown
            assert "echo on server desk (write)" in message and f'"for {ends}"' in message
        answers = [record.body for record in served.records(kind="approval_answered")]
        assert [(body["person"], body["login"]["way"], body["approve"]) for body in answers] == [
            ("alice", "client", True),
            ("alice", "client", False),
        ]


async def test_a_client_that_cannot_ask_is_told_to_have_it_answered_elsewhere(tmp_path: Path) -> None:
    with gateway.serve(tmp_path, configuration()) as served:
        async with served.client(gateway.MODERN) as client:
            result = await client.call_tool("echo", {"text": "x"})
        assert about(result)["status"] == "approval_required" and "A person must approve" in text_of(result)


# ── the state that a 2026-07-28 client holds ──────────────────────────────────────────────────────


def asked(raw: RawHttp, text: str = "x") -> JSON:
    answer: JSON = raw.modern(gateway.call("echo", {"text": text}), FORM).json()["result"]
    assert answer["resultType"] == "input_required"
    return answer


def going_on(raw: RawHttp, question: JSON, state: str | None = None, tool: str = "echo", text: str = "x") -> JSON:
    (key,) = question["inputRequests"]
    message = gateway.call(tool, {"text": text})
    message["params"]["inputResponses"] = {key: {"action": "accept", "content": {"answer": "approve"}}}
    message["params"]["requestState"] = question["requestState"] if state is None else state
    found: JSON = raw.modern(message, FORM).json()
    return found


def refused(served: Gateway, answer: JSON) -> None:
    assert answer["error"]["code"] == types.INVALID_PARAMS, answer
    assert "requestState" in answer["error"]["message"]


def status(answer: JSON) -> str:
    return str(answer["result"]["_meta"]["ringfence/outcome"]["status"])


def test_a_state_that_is_altered_foreign_or_was_used_answers_nothing_and_is_on_record(tmp_path: Path) -> None:
    with gateway.serve(tmp_path, configuration()) as served, RawHttp(served) as raw:
        question = asked(raw)
        state = question["requestState"]
        whole = base64.urlsafe_b64decode(state.removeprefix("rfs_") + "==")
        for place in (0, len(whole) // 2, len(whole) - 1):
            changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            altered = "rfs_" + base64.urlsafe_b64encode(changed).decode().rstrip("=")
            refused(served, going_on(raw, question, altered))
        refused(served, going_on(raw, question, "rfs_"))
        refused(served, going_on(raw, question, text="another"))  # for other arguments
        other = asked(raw, "other")
        refused(served, going_on(raw, question, other["requestState"]))  # that of another question
        assert status(going_on(raw, question)) == "success"
        refused(served, going_on(raw, question))
        spent = [record.body["why"] for record in served.records(kind="approval_answer_refused")]
        assert spent == ["replayed"]
        tooling.wait_until(lambda: sum(r.body["count"] for r in served.records(kind="request_refused")) == 7)


def test_a_question_outlives_a_restart_of_its_gateway_and_still_counts_once(tmp_path: Path) -> None:
    config = configuration()
    with gateway.serve(tmp_path, config) as served, RawHttp(served) as raw:
        question, left = asked(raw), asked(raw, "left to others")
        (key,) = left["inputRequests"]
        message = gateway.call("echo", {"text": "left to others"})
        message["params"] |= {"inputResponses": {key: {"action": "cancel"}}, "requestState": left["requestState"]}
        assert status(raw.modern(message, FORM).json()) == "approval_required"
        assert served.started is not None
        os.kill(served.started.pid, signal.SIGKILL)
    with gateway.serve(tmp_path, config) as served, RawHttp(served) as raw:
        refused(served, going_on(raw, question, text="another"))
        # What its person left to others cannot be answered with the same state, by nobody.
        refused(served, going_on(raw, left, text="left to others"))
        assert status(going_on(raw, question)) == "success"
        refused(served, going_on(raw, question))
        (record,) = [r.body for r in served.records(kind="approval_answered")]
        assert (record["person"], record["login"]["way"], record["approve"]) == ("alice", "client", True)
        assert len(served.records(kind="approval_asked")) == 2
        assert [r.body["why"] for r in served.records(kind="approval_answer_refused")] == ["replayed", "replayed"]
