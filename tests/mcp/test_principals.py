"""Two principals on one gateway share no connection to a server, no session, no question and no notification."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from starlette.types import Scope

from ringfence import config
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.core import canonical
from ringfence.core.model import Call, Principal
from ringfence.front.http import HttpFront
from ringfence.front.listen import LOOPBACK, GatewayApp, Listener, open_socket
from ringfence.upstream import pool
from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import ACCEPT, ERAS, JSON, about, text_of

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:.*removed as of 2026-07-28.*")]
eras = pytest.mark.parametrize("mode", ERAS)
ANN, BOB = Principal("ann"), Principal("bob")
WATCHED = "test://watched-resource"


@dataclass(frozen=True, slots=True)
class Shared:
    """A gateway in this process that believes a header, so that one test can be two principals."""

    app: App
    url: str

    @asynccontextmanager
    async def client(self, who: Principal, mode: str, **options: Any) -> AsyncIterator[Client]:
        async with httpx2.AsyncClient(headers={"x-agent": who.agent}, timeout=120) as http:
            transport = streamable_http_client(self.url, http_client=http)
            async with Client(transport, mode=mode, cache=None, **options) as client:
                yield client


def by_header(scope: Scope) -> Principal | None:
    named = dict(scope["headers"]).get(b"x-agent", b"").decode()
    return Principal(named) if named else None


@asynccontextmanager
async def shared(folder: Path, whole: JSON) -> AsyncIterator[Shared]:
    files = gateway.write(folder, whole)
    async with App.open(config.load(files.config)) as app, anyio.create_task_group() as group:
        socket = open_socket("127.0.0.1", 0)
        port = socket.getsockname()[1]
        app.http = HttpFront(app.front, by_header, LOOPBACK, port)
        listener = Listener(GatewayApp(app.http))
        group.start_soon(listener.run_on, [socket])
        while not listener.started:
            await anyio.sleep(0.01)
        yield Shared(app, f"http://127.0.0.1:{port}/mcp")
        await app.http.sessions.close()
        listener.stop()


def hostile(command: list[str]) -> JSON:
    server = {"command": command, "pins": "first_use"}
    return gateway.configuration({"hostile": server}, gateway.tools("hostile", "counter", "environ", "ask"))


async def test_each_principal_has_its_own_process(tmp_path: Path, hostile_command: list[str]) -> None:
    files = gateway.write(tmp_path, hostile(hostile_command))
    async with App.open(config.load(files.config)) as app:

        async def count(who: Principal) -> str:
            outcome = await app.handle(Call(canonical.new_id("call"), who, "counter", {}), UNATTENDED)
            return outcome.text

        assert [await count(ANN), await count(ANN), await count(BOB), await count(ANN)] == ["1", "2", "1", "3"]
    starts = [r.body for r in files.records(kind="finished") if r.body["call"]["method"] == "server/start"]
    assert len(starts) == 3, "one to look at the definitions, and one for each principal"


@eras
async def test_clients_of_two_principals_meet_nowhere(tmp_path: Path, hostile_command: list[str], mode: str) -> None:
    async def elicit(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="decline")

    async with shared(tmp_path, hostile(hostile_command)) as both:
        seen: dict[str, set[str]] = {}
        for who in (ANN, BOB):
            for options in ({}, {"elicitation_callback": elicit}):
                async with both.client(who, mode, **options) as client:
                    told = json.loads(text_of(await client.call_tool("environ", {})))
                seen.setdefault(who.agent, set()).add(told["identity"])
        assert seen["ann"] & seen["bob"] == set()
        assert len(seen["ann"]) == 2, "a client that can be asked does not share with one that cannot"


async def test_process_of_a_session_ends_with_it(tmp_path: Path, hostile_command: list[str]) -> None:
    async def elicit(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="decline")

    async with shared(tmp_path, hostile(hostile_command)) as both:
        async with both.client(ANN, "legacy", elicitation_callback=elicit) as client:
            before = set(tooling.descendants(os.getpid(), "hostile_server.py"))
            one = json.loads(text_of(await client.call_tool("environ", {})))["identity"]
            again = json.loads(text_of(await client.call_tool("environ", {})))["identity"]
            (pid,) = set(tooling.descendants(os.getpid(), "hostile_server.py")) - before
            assert one == again and tooling.alive(pid)
        with anyio.fail_after(tooling.PATIENCE):
            while tooling.alive(pid):
                await anyio.sleep(0.05)


async def test_session_of_another_principal_does_not_exist(tmp_path: Path, hostile_command: list[str]) -> None:
    async with shared(tmp_path, hostile(hostile_command)) as both, httpx2.AsyncClient(timeout=120) as http:
        headers = {**ACCEPT, "x-agent": "ann"}
        opened = await http.post(both.url, json=gateway.initialize(), headers=headers)
        session = {"mcp-session-id": opened.headers["mcp-session-id"]}
        mine = await http.post(both.url, json=gateway.call("counter"), headers={**headers, **session})
        assert about(gateway.read_answer(mine)["result"])["status"] == "success"
        stolen = {**ACCEPT, "x-agent": "bob", **session}
        for method in ("POST", "GET", "DELETE"):
            body = {"json": gateway.call("counter")} if method == "POST" else {}
            answer = await http.request(method, both.url, headers=stolen, **body)  # type: ignore[arg-type]
            assert answer.status_code == 404, method
        again = await http.post(both.url, json=gateway.call("counter"), headers={**headers, **session})
        assert again.status_code == 200, "what bob tried did not end ann's session"


async def test_question_of_another_principal_cannot_be_answered(tmp_path: Path, hostile_command: list[str]) -> None:
    async with shared(tmp_path, hostile(hostile_command)) as both, httpx2.AsyncClient(timeout=120) as http:

        async def send(who: str, message: JSON) -> JSON:
            whole = gateway.modern(message, {"elicitation": {}})
            headers = {**gateway.modern_headers(whole), "x-agent": who}
            return gateway.read_answer(await http.post(both.url, json=whole, headers=headers))

        message = gateway.call("ask", {"message": "Well?"})
        asked = (await send("ann", message))["result"]
        key = next(iter(asked["inputRequests"]))
        message["params"] |= {
            "requestState": asked["requestState"],
            "inputResponses": {key: {"action": "accept", "content": {"answer": "mine"}}},
        }
        assert (await send("bob", message))["error"]["code"] == types.INVALID_PARAMS
        assert "mine" in text_of((await send("ann", message))["result"])


async def test_calls_that_wait_for_one_principal_keep_no_other_from_the_server(
    tmp_path: Path, hostile_command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MAX_PER_SERVER", 2)
    whole = hostile(hostile_command)
    whole["capabilities"]["ask"]["mode"] = "write"
    async with shared(tmp_path, whole) as both, httpx2.AsyncClient(timeout=120) as http:

        async def send(who: str, message: JSON) -> JSON:
            sent = gateway.modern(message, {"elicitation": {}})
            headers = {**gateway.modern_headers(sent), "x-agent": who}
            return gateway.read_answer(await http.post(both.url, json=sent, headers=headers))["result"]

        messages = [gateway.call("ask", {"message": text}) for text in ("One?", "Two?")]
        for message in messages:
            asked = await send("ann", message)
            accepted = {"action": "accept", "content": {"answer": "mine"}}
            message["params"] |= {
                "requestState": asked["requestState"],
                "inputResponses": dict.fromkeys(asked["inputRequests"], accepted),
            }
        assert about(await send("bob", gateway.call("counter")))["status"] == "success"
        ends = [about(await send("ann", message)) for message in messages]
    assert [(end["status"], end["reason_code"]) for end in ends] == [("unknown", "gave_way"), ("success", "ok")]
    records = gateway.Gateway(tmp_path / "ringfence.yaml")
    found = [records.finished(end["call_id"]) for end in ends]
    assert [(end["status"], end["effect"]) for end in found] == [("unknown", "unknown"), ("success", "confirmed")]


async def test_notifications_reach_only_their_owner(tmp_path: Path) -> None:
    with tooling.serve_fixture("everything_server.py", "--era", "handshake") as url:
        server = {"url": url, "pins": "first_use", "resources": ["test://*"]}
        whole = gateway.configuration({"open": server}, gateway.tools("open", "test_trigger_resource_update"))
        heard: list[str] = []

        def hears(who: str) -> JSON:
            async def message(received: Any) -> None:
                if isinstance(received, types.ResourceUpdatedNotification):
                    heard.append(who)

            return {"message_handler": message}

        async with (
            shared(tmp_path, whole) as both,
            both.client(ANN, "legacy", **hears("ann")) as ann,
            both.client(BOB, "legacy", **hears("bob")) as bob,
        ):
            for client in (ann, bob):
                await client.subscribe_resource(WATCHED)
            await anyio.sleep(0.3)
            await ann.call_tool("test_trigger_resource_update", {})
            with anyio.fail_after(tooling.PATIENCE):
                while not heard:
                    await anyio.sleep(0.02)
            await anyio.sleep(0.2)
        assert heard == ["ann"]


async def test_servers_of_others_speak_both_revisions(tmp_path: Path) -> None:
    """Which revision each connection has agreed on; clients never see it."""
    servers = {
        "memory": {"command": tooling.npm_command("mcp-server-memory"), "pins": "first_use"},
        "time": {"command": [str(tooling.python_server("mcp-server-time"))], "pins": "first_use"},
    }
    contracts = {**gateway.tools("memory", "read_graph"), **gateway.tools("time", "get_current_time")}
    files = gateway.write(tmp_path, gateway.configuration(servers, contracts))
    async with App.open(config.load(files.config)) as app:
        spoken = {held.key[0]: held.connection.version for held in app.pool._held.values()}
    assert spoken == {"memory": gateway.HANDSHAKE, "time": gateway.MODERN}


@eras
async def test_answer_against_its_own_schema_is_withheld(tmp_path: Path, hostile_command: list[str], mode: str) -> None:
    contracts = gateway.tools("hostile", "bad_output", mode="write")
    server = {"command": hostile_command, "pins": "first_use"}
    async with (
        shared(tmp_path, gateway.configuration({"hostile": server}, contracts)) as both,
        both.client(ANN, mode) as client,
    ):
        result = await client.session.call_tool("bad_output", {})
        assert result.is_error and (about(result)["status"], about(result)["reason_code"]) == ("failed", "bad_output")
        assert "three" not in text_of(result)
        assert gateway.facts(result)["effect"] == "unknown"
        finished = gateway.Gateway(tmp_path / "ringfence.yaml").finished(about(result)["call_id"])
        assert (finished["reason_code"], finished["effect"]) == ("bad_output", "unknown")
