"""Bearer tokens over HTTP: who has none is not served, who has one is one agent, and no agent meets another's."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import pytest

from ringfence import config, identity
from ringfence.cli.serve_http import identify
from ringfence.compose.gateway import App
from ringfence.core.model import IssuedToken
from ringfence.front.http import HttpFront
from ringfence.front.listen import LOOPBACK, GatewayApp, Listener, open_socket
from ringfence.governance.approvals import answer
from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import ACCEPT, JSON, about

pytestmark = pytest.mark.anyio

AGENTS: dict[str, JSON] = {
    "ann": {"capabilities": ["echo", "environ"], "tenant": "acme"},
    "bob": {"capabilities": ["counter"]},
}


@dataclass(frozen=True, slots=True)
class Place:
    app: App
    url: str
    http: httpx2.AsyncClient

    def token(self, name: str, seconds: float = 600, **more: Any) -> str:
        ident, text, digest = identity.new_token()
        tenant = self.app.config.agents[name].tenant if name in self.app.config.agents else "local"
        now = time.time()
        given = {"kind": "agent", "tenant": tenant, **more}
        made = IssuedToken(ident, digest, name=name, made_by="t", made_at=now, expires_at=now + seconds, **given)
        self.app.store.write_sync(lambda tx: tx.put_token(made))
        return text

    def revoke(self, text: str) -> None:
        self.app.store.write_sync(lambda tx: tx.revoke_token(f"tok_{text[4:24]}", "t", time.time()))

    async def ask(self, message: JSON, token: str | None, **headers: str) -> httpx2.Response:
        whole = gateway.modern(message)
        shown = {} if token is None else {"authorization": f"Bearer {token}"}
        return await self.http.post(self.url, json=whole, headers={**gateway.modern_headers(whole), **shown, **headers})

    async def tools(self, token: str) -> list[str]:
        answer = await self.ask({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}, token)
        return [tool["name"] for tool in gateway.read_answer(answer)["result"]["tools"]]

    async def refused(self) -> list[JSON]:
        await self.app.front.refusals.flush()
        return [record.body for record in self.app.store.reader().records(kind="request_refused")]


@asynccontextmanager
async def served(folder: Path, command: list[str], **more: Any) -> AsyncIterator[Place]:
    whole = gateway.configuration(
        {"hostile": {"command": command, "pins": "first_use", "placement": "unsafe_host"}},
        gateway.tools("hostile", "echo", "counter", "environ"),
    )
    files = gateway.write(folder, {**whole, "agents": AGENTS, "policy": {"preset": "permissive"}, **more})
    async with App.open(config.load(files.config)) as app, anyio.create_task_group() as group:
        socket = open_socket("127.0.0.1", 0)
        port = socket.getsockname()[1]
        app.http = HttpFront(app.front, identify(app), LOOPBACK, port)
        listener = Listener(GatewayApp(app.http, lambda: {}), tokens=True)
        group.start_soon(listener.run_on, [socket])
        group.start_soon(app.http.shut_out)
        while not listener.started:
            await anyio.sleep(0.01)
        async with httpx2.AsyncClient(timeout=120) as http:
            yield Place(app, f"http://127.0.0.1:{port}/mcp", http)
        await app.http.sessions.close()
        listener.stop()
        group.cancel_scope.cancel()


async def test_who_shows_no_token_that_is_good_is_told_where_to_learn_more(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    async with served(tmp_path, hostile_command) as place:
        good = place.token("ann")
        expired = place.token("ann", -1)
        revoked = place.token("ann")
        place.revoke(revoked)
        person = place.token("alice", kind="person")
        gone = place.token("zoe")
        at = place.url.removesuffix("/mcp") + "/.well-known/oauth-protected-resource"
        cases = [
            (None, 401, "no_token"), (good + "x", 401, "bad_token"), (expired, 401, "token_expired"),
            (revoked, 401, "token_revoked"), (person, 403, "person_token"), (gone, 403, "unknown_agent"),
        ]  # fmt: skip
        for token, status, _ in cases:
            answer = await place.ask(gateway.call("counter"), token)
            told = answer.headers["www-authenticate"]
            assert answer.status_code == status and f'resource_metadata="{at}/mcp"' in told
            assert ('error="invalid_token"' in told) is (status == 401 and token is not None)
            assert token is None or token not in answer.text + told
        for path in (at, f"{at}/mcp"):
            published = (await place.http.get(path)).json()
            assert published["resource"] == place.url and published["bearer_methods_supported"] == ["header"]
        counted = {body["reason_code"]: body["count"] for body in await place.refused()}
        assert counted == {code: 1 for _, _, code in cases}
        twice = await place.http.post(place.url, headers=[*ACCEPT.items(), *[("authorization", f"Bearer {good}")] * 2])
        basic = await place.http.post(place.url, headers={**ACCEPT, "authorization": f"Basic {good}"})
        assert (twice.status_code, basic.status_code) == (401, 401)
        assert place.app.store.reader().running() == []


async def test_no_way_in_goes_without_a_token(tmp_path: Path, hostile_command: list[str]) -> None:
    """Both revisions, every method and every message: a check that one endpoint lacks is worth nothing."""
    async with served(tmp_path, hostile_command) as place:
        modern = gateway.modern(gateway.call("counter"))
        ways: list[tuple[str, JSON | None, dict[str, str]]] = [
            ("POST", gateway.initialize(), ACCEPT),
            ("POST", gateway.call("counter"), {**ACCEPT, "mcp-session-id": "0" * 32}),
            ("POST", {"jsonrpc": "2.0", "method": "notifications/initialized"}, ACCEPT),
            ("POST", modern, gateway.modern_headers(modern)),
            ("GET", None, {"accept": "text/event-stream", "mcp-session-id": "0" * 32}),
            ("DELETE", None, {"mcp-session-id": "0" * 32}),
            ("PUT", None, {}),
        ]
        for method, message, headers in ways:
            body = {} if message is None else {"json": message}
            answer = await place.http.request(method, place.url, headers=headers, **body)  # type: ignore[arg-type]
            assert answer.status_code == 401, (method, message)
        assert [(body["reason_code"], body["count"]) for body in await place.refused()] == [("no_token", len(ways))]
        kinds = {record.body["call"]["kind"] for record in place.app.store.reader().records(kind="finished")}
        assert kinds <= {"server"}, "nothing was called"


async def test_a_token_in_an_address_is_refused_and_none_is_on_record(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    async with served(tmp_path, hostile_command) as place:
        token = place.token("ann")
        for query in (f"access_token={token}", f"x={token}"):
            answer = await place.http.post(
                f"{place.url}?{query}", headers={**ACCEPT, "authorization": f"Bearer {token}"}, json={}
            )
            assert (answer.status_code, token in answer.text) == (400, False)
        assert [body["reason_code"] for body in await place.refused()] == ["token_in_address"] * 2
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert token[25:].encode() not in everything, "its secret is nowhere in the state"


async def test_each_token_is_one_agent_and_lists_and_calls_are_its_own(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    async with served(tmp_path, hostile_command) as place:
        ann, bob = place.token("ann"), place.token("bob")
        shown = {name: await place.tools(token) for name, token in (("ann", ann), ("bob", bob))}
        assert (set(shown["ann"]), shown["bob"]) == ({"echo", "environ"}, ["counter"])
        mine = gateway.read_answer(await place.ask(gateway.call("counter"), bob))
        theirs = gateway.read_answer(await place.ask(gateway.call("counter"), ann))
        assert about(mine["result"])["status"] == "success"
        assert (about(theirs["result"])["status"], about(theirs["result"])["reason_code"]) == (
            "denied",
            "not_for_agent",
        )
        told = await place.ask(gateway.call("environ"), ann)
        assert ann not in told.text and "rft_" not in told.text, "no server is told a token"
        calls = [record.body for record in place.app.store.reader().records(kind="finished")]
        asked = [body["call"]["principal"] for body in calls if body["call"]["kind"] == "tool"]
        assert [(each["tenant"], each["agent"]) for each in asked] == [
            ("local", "bob"),
            ("acme", "ann"),
            ("acme", "ann"),
        ]


async def test_an_mcp_session_is_its_principals_whichever_token_it_shows(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    async with served(tmp_path, hostile_command) as place:
        one, two, bob = place.token("bob"), place.token("bob"), place.token("ann")
        bearer = [{**ACCEPT, "authorization": f"Bearer {token}"} for token in (one, two, bob)]
        opened = await place.http.post(place.url, json=gateway.initialize(), headers=bearer[0])
        session = {"mcp-session-id": opened.headers["mcp-session-id"]}
        seen = []
        for headers in (*bearer, dict(ACCEPT)):
            answer = await place.http.post(place.url, json=gateway.call("counter"), headers={**headers, **session})
            seen.append(answer.status_code)
        assert seen == [200, 200, 404, 401]


async def test_revoking_ends_streams_and_waiting_calls_within_a_second(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    async with served(tmp_path, hostile_command) as place:
        token, other = place.token("bob"), place.token("bob")
        headers = {**ACCEPT, "authorization": f"Bearer {token}"}
        opened = await place.http.post(place.url, json=gateway.initialize(), headers=headers)
        headers["mcp-session-id"] = opened.headers["mcp-session-id"]
        async with place.http.stream("GET", place.url, headers=headers) as stream:
            parts = stream.aiter_bytes()
            assert b"open" in await anext(parts)
            place.revoke(token)
            since = time.monotonic()
            with anyio.fail_after(tooling.PATIENCE):
                async for _ in parts:
                    pass
        assert (await place.ask(gateway.call("counter"), token)).status_code == 401
        assert time.monotonic() - since < tooling.PATIENCE
        assert (
            about(gateway.read_answer(await place.ask(gateway.call("counter"), other))["result"])["status"] == "success"
        )


async def test_the_account_of_a_connection_says_which_agent_it_is_where_that_is_declared(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    mine = {**AGENTS, "bob": {**AGENTS["bob"], "os_user": identity.os_user()}}
    async with served(tmp_path, hostile_command, agents=mine) as place:
        answer = gateway.read_answer(await place.ask(gateway.call("counter"), None))
        assert about(answer["result"])["status"] == "success"
        assert set(await place.tools(place.token("ann"))) == {"echo", "environ"}, "a token says more"
        assert (await place.ask(gateway.call("counter"), "wrong")).status_code == 401, (
            "and a wrong one is no absent one"
        )


async def test_a_reload_that_drops_an_agent_shuts_it_out(tmp_path: Path, hostile_command: list[str]) -> None:
    async with served(tmp_path, hostile_command) as place:
        ann = place.token("ann")
        assert (await place.ask(gateway.call("echo", {"text": "x"}), ann)).status_code == 200
        file = place.app.config.path
        file.write_text(file.read_text().replace('"ann"', '"eve"').replace("ann:", "eve:"))
        await place.app.reload(asked=True)
        assert "eve" in place.app.config.agents
        assert (await place.ask(gateway.call("echo", {"text": "x"}), ann)).status_code == 403


AS_ANOTHER = """
import encodings.idna, http.client, json, os, sys
port, body, headers = json.loads(sys.argv[1])
os.setuid(65534)
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
connection.request("POST", "/mcp", body, headers)
print(connection.getresponse().status)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_account_of_this_machine_is_heard_with_a_token_and_not_without(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    async with served(tmp_path, hostile_command) as place:
        whole = gateway.modern(gateway.call("counter"))
        port = int(place.url.removesuffix("/mcp").rpartition(":")[2])
        seen = []
        for more in ({}, {"authorization": f"Bearer {place.token('bob')}"}):
            given = json.dumps([port, json.dumps(whole), {**gateway.modern_headers(whole), **more}])
            ran = await anyio.run_process([sys.executable, "-c", AS_ANOTHER, given])
            seen.append(ran.stdout.decode().strip())
        assert seen == ["401", "200"]


TWINS: dict[str, JSON] = {
    "ann": {"capabilities": ["*"], "tenant": "acme"},
    "amy": {"capabilities": ["*"], "tenant": "acme"},
    "bob": {"capabilities": ["*"]},
}


async def test_no_agent_joins_or_replays_what_another_did_under_the_same_key(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    async with served(tmp_path, hostile_command, agents=TWINS) as place:
        tokens = {name: place.token(name) for name in TWINS}
        seen: dict[str, list[str]] = {}
        for _ in range(2):
            for name, token in tokens.items():
                message = gateway.call("environ")
                message["params"]["_meta"] = {"ringfence/idempotency_key": "the-same"}
                result = gateway.read_answer(await place.ask(message, token))["result"]
                seen.setdefault(name, []).append(json.loads(gateway.text_of(result))["identity"])
        assert all(first == again for first, again in seen.values())
        assert len({first for first, _ in seen.values()}) == 3, "each has a server of its own, too"


async def test_no_agent_runs_on_what_a_person_allowed_another(tmp_path: Path, hostile_command: list[str]) -> None:
    asks = {"preset": "permissive", "rules": [{"id": "ask", "action": "ask", "tool_patterns": ["counter"]}]}
    async with served(tmp_path, hostile_command, agents=TWINS, policy=asks) as place:
        tokens = {name: place.token(name) for name in TWINS}

        async def call(name: str) -> JSON:
            answer = gateway.read_answer(await place.ask(gateway.call("counter"), tokens[name]))
            return about(answer["result"])

        asked = {name: (await call(name))["approval_id"] for name in TWINS}
        assert len(set(asked.values())) == 3
        person = identity.person_of({}, "op")
        assert person is not None
        approve = lambda: answer(place.app.store, asked["ann"], person, approve=True)  # noqa: E731
        await anyio.to_thread.run_sync(approve)
        assert [(await call(name))["status"] for name in ("bob", "amy", "ann", "ann")] == [
            *("approval_required", "approval_required", "success"), "approval_required"
        ]  # fmt: skip


async def test_a_secret_of_one_tenant_is_taken_out_of_what_every_tenant_reads(
    tmp_path: Path, hostile_command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "canary-of-acme-0123456789"
    monkeypatch.setenv("ACME_TOKEN", value)
    secrets = {"acme": {"from": "env", "name": "ACME_TOKEN", "hosts": ["a.example"], "tenants": ["acme"]}}
    async with served(tmp_path, hostile_command, agents=TWINS, secrets=secrets) as place:
        for name in TWINS:
            told = await place.ask(gateway.call("echo", {"text": f"it is {value}"}), place.token(name))
            assert told.status_code == 200 and value not in told.text, name
