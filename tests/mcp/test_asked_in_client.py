"""A person who is asked in their own client: with the SDK's client in both revisions, and over a restart."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import mcp_types as types
import pytest

from ringfence import config, identity
from ringfence.cli.serve_http import serve_http
from ringfence.compose.gateway import App
from ringfence.front.inbound import WAIT_SECONDS
from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, JSON, Gateway, RawHttp, about, text_of

pytestmark = pytest.mark.anyio
FORM: JSON = {"elicitation": {"form": {}}}
FASTMCP = Path(__file__).with_name("fastmcp_person.py")
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


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "revision"), [("legacy", gateway.HANDSHAKE), ("auto", gateway.MODERN)])
def test_fastmcps_client_asks_its_person_and_the_call_runs_or_does_not(
    tmp_path: Path, mode: str, revision: str
) -> None:
    python = str(tooling.agents())
    with gateway.serve(tmp_path, configuration()) as served:
        for answer, ends in (("approve", "success"), ("deny", "denied"), ("decline", "approval_required")):
            words = [python, str(FASTMCP), served.url, mode, answer, f"for {ends}"]
            ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
            assert ended.returncode == 0, ended.stderr
            seen = json.loads(ended.stdout.splitlines()[-1])
            assert (seen["revision"], seen["outcome"]["status"]) == (revision, ends)
            (message,) = seen["shown"]
            assert "echo on server desk (write)" in message and f'"for {ends}"' in message
            assert (f"for {ends}" in seen["read"]) is (ends == "success")
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


@asynccontextmanager
async def serving_here(path: Path) -> AsyncIterator[Gateway]:
    """The same gateway in this process, whose clock a test can move."""
    settings = config.load(path)
    port = tooling.free_port()
    at = replace(settings.gateway, port=port)
    async with App.open(settings) as app, anyio.create_task_group() as group:
        group.start_soon(serve_http, app, at, False)
        here = Gateway(path, url=f"http://127.0.0.1:{port}/mcp")
        await tooling.until(lambda: app.http is not None)
        yield here
        group.cancel_scope.cancel()


async def test_a_state_is_good_for_a_while_and_then_the_call_asks_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateway.serve(tmp_path, configuration()) as served:
        with RawHttp(served) as raw:
            question, soon = [await anyio.to_thread.run_sync(asked, raw, text) for text in ("x", "soon")]
        assert served.started is not None
        os.kill(served.started.pid, signal.SIGKILL)
    now = time.time
    async with serving_here(served.config) as here:
        with RawHttp(here) as raw:
            in_time = partial(going_on, raw, soon, text="soon")
            assert status(await anyio.to_thread.run_sync(in_time)) == "success"
            before = len(here.records(kind="approval_answered")), len(here.records(kind="approval_state_used"))
            assert before == (1, 1)
            monkeypatch.setattr(time, "time", lambda: now() + WAIT_SECONDS + 1)
            refused(here, await anyio.to_thread.run_sync(going_on, raw, question))
            # Nothing was answered by it, and nothing ran. That it came is on record, counted.
            await tooling.until(lambda: here.records(kind="request_refused"))
            (record,) = [each.body for each in here.records(kind="request_refused")]
            assert (record["reason_code"], record["count"]) == ("invalid_params", 1)
            after = len(here.records(kind="approval_answered")), len(here.records(kind="approval_state_used"))
            assert after == before
            assert here.records(kind="approval_answer_refused") == []
            # The question itself still waits: its call, made again, asks it with a state that is good.
            again = await anyio.to_thread.run_sync(asked, raw)
            assert again["requestState"] != question["requestState"]
            assert status(await anyio.to_thread.run_sync(going_on, raw, again)) == "success"
            assert len(here.records(kind="approval_asked")) == 2
            assert len(here.records(kind="approval_state_used")) == 2
