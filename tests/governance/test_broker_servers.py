"""Servers and secrets: a value in one's environment, a placeholder in another's, a header of our own requests."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence import config
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.core import canonical
from ringfence.core.model import Call, Outcome
from ringfence.egress import names
from ringfence.egress.tls import Authority
from tests import gateways
from tests.egress.outside import serving
from tests.governance.test_broker import Api


class Remote(Api):
    """A server behind a URL: one tool, one answer."""

    def answer(self, message: dict[str, Any]) -> bytes:
        method = message.get("method")
        result: dict[str, Any] = {"content": [{"type": "text", "text": json.dumps(self.seen[-1][2])}]}
        if method == "initialize":
            about = {"name": "remote", "version": "1"}
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about}
        elif method == "tools/list":
            result = {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]}
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message.get("id")}
        if method == "server/discover":
            return json.dumps({**reply, "error": {"code": -32601, "message": "no such method"}}).encode()
        return json.dumps({**reply, "result": result}).encode()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.seen.append((first.split(" ")[0], "", headers, body))
            told = self.answer(json.loads(body)) if body else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(told), told))


pytestmark = pytest.mark.anyio

SERVER = gateways.server("secret_server.py")
CONFIG = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
networks: {api: {allow: ["127.0.0.1:@PORT@"]}}
secrets:
  inside: {from: file, path: token, env: GIVEN_TOKEN, servers: [holder]}
  outside: {from: env, name: API_TOKEN, hosts: ["127.0.0.1:@PORT@"]}
servers:
  holder: {command: @SERVER@, pins: first_use, secrets: inside}
  asker: {command: @SERVER@, pins: first_use, network: api, secrets: outside}
  other: {command: @SERVER@, pins: first_use}
capabilities:
  holder_given: {server: holder, tool: given, mode: read, secrets: inside}
  asker_given: {server: asker, tool: given, mode: read}
  asker_fetch: {server: asker, tool: fetch, mode: read, network: api, secrets: [outside]}
  other_given: {server: other, tool: given, mode: read}
  holder_told: {server: holder, tool: told, mode: read}
  other_told: {server: other, tool: told, mode: read}
  other_needs: {server: other, tool: given, mode: read, secrets: outside}
policy: {preset: permissive}
"""


async def call(app: App, tool: str, **arguments: Any) -> Outcome:
    return await app.handle(Call(canonical.new_id("call"), app.agent, tool, arguments), UNATTENDED)


@asynccontextmanager
async def staged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[App, Api, str, str]]:
    authority, inside, outside = Authority(), secrets.token_hex(16), secrets.token_hex(16)
    (folder / "outside.pem").write_bytes(authority.pem)
    (folder / "token").write_text(inside + "\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "outside.pem"))
    monkeypatch.setenv("API_TOKEN", outside)
    api = Api()
    async with serving(api.handle, authority.context(names.host("127.0.0.1"))) as api.port:
        text = CONFIG.replace("@PORT@", str(api.port)).replace("@SERVER@", SERVER)
        async with App.open(config.load(gateways.write(folder, text))) as app:
            yield app, api, inside, outside


async def test_a_value_is_in_the_environment_of_its_own_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, monkeypatch) as (app, _, inside, _):
        outcome = await call(app, "holder_given", name="GIVEN_TOKEN")
        assert (outcome.status, outcome.text) == ("success", "[redacted]")
        assert outcome.facts["redactions"] == {"known_secret": 1}
        for tool in ("asker_given", "other_given"):
            assert (await call(app, tool, name="GIVEN_TOKEN")).text == "nothing"
        assert inside not in json.dumps(outcome.facts)
        told = {tool["name"]: tool["description"] for tool in app.front.listing.tools()}
        assert told["other_told"] == "with nothing" and "holder_told" not in told, "a definition that says it is none"


async def test_a_server_uses_a_token_that_it_never_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(tmp_path, monkeypatch) as (app, api, _, outside):
        assert (await call(app, "asker_given", name="API_TOKEN")).text.startswith("ringfence_")
        url = f"https://127.0.0.1:{api.port}/tickets"
        outcome = await call(app, "asker_fetch", url=url, name="API_TOKEN")
        assert outcome.text.startswith("200 ") and outside not in outcome.text and "Bearer [redacted]" in outcome.text
        assert api.seen[-1][2]["authorization"] == f"Bearer {outside}"
        refused = await call(app, "asker_fetch", url=url, name="API_TOKEN", method="DELETE")
        assert refused.text == "403 secret_method"
        records = [r.body for r in app.store.reader().records() if r.kind == "brokered"]
        assert [(r["call"]["server"], r["method"], r["allowed"]) for r in records] == [
            ("asker", "GET", True),
            ("asker", "DELETE", False),
        ]


async def test_what_a_server_is_not_given_no_call_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(tmp_path, monkeypatch) as (app, _, _, _):
        outcome = await call(app, "other_needs", name="API_TOKEN")
        assert (outcome.status, outcome.reason_code) == ("unavailable", "no_secret")
        assert "servers: other: secrets" in outcome.message


REMOTE = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
secrets:
  always: {from: env, name: ALWAYS_TOKEN, hosts: ["127.0.0.1:@PORT@"], header: X-Api-Key}
  once: {from: env, name: ONCE_TOKEN, hosts: ["127.0.0.1:@PORT@"]@ONCE@}
  elsewhere: {from: env, name: ONCE_TOKEN, hosts: [api.corp.example]}
servers: {remote: {url: "http://127.0.0.1:@PORT@/mcp", pins: first_use, secrets: always}}
capabilities:
  plain: {tool: ask, mode: read}
  with_token: {tool: ask, mode: read, secrets: once}
  with_another: {tool: ask, mode: read, secrets: elsewhere}
policy: {preset: permissive}
"""


async def test_requests_to_a_remote_server_carry_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always, once = secrets.token_hex(16), secrets.token_hex(16)
    monkeypatch.setenv("ALWAYS_TOKEN", always)
    monkeypatch.setenv("ONCE_TOKEN", once)
    remote = Remote()
    async with serving(remote.handle) as remote.port:
        text = REMOTE.replace("@PORT@", str(remote.port)).replace("@ONCE@", ", agents: [local]")
        async with App.open(config.load(gateways.write(tmp_path, text))) as app:
            for tool, token in (("plain", None), ("with_token", f"Bearer {once}")):
                outcome = await call(app, tool)
                assert outcome.ok and always not in outcome.text and once not in outcome.text
                assert remote.seen[-1][2].get("authorization") == token
            assert {headers["x-api-key"] for _, _, headers, _ in remote.seen} == {always}
            refused = await call(app, "with_another")
            assert (refused.status, refused.reason_code) == ("unavailable", "no_secret")
            # Rotated at its source: the next request has the new one.
            monkeypatch.setenv("ALWAYS_TOKEN", always[::-1])
            await call(app, "plain")
            assert remote.seen[-1][2]["x-api-key"] == always[::-1]
