"""A session uses an API with a secret that its box never holds: step by step, paused and resumed, forked, restored."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import pytest

from ringfence import Sandbox, config
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.core import canonical
from ringfence.core.model import Call, Outcome
from ringfence.sdk import engine
from tests import boxing, gateways, tooling
from tests.governance.test_broker import HERE, MARK, PRELUDE, Api, outside

pytestmark = pytest.mark.anyio

CONFIG = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
networks: {api: {allow: ["127.0.0.1:@PORT@", "127.0.0.1:@OTHER@"]}}
secrets:
  helpdesk: {from: env, name: HELPDESK_TOKEN, hosts: ["127.0.0.1:@PORT@"], header: Authorization, methods: [GET, POST]}
capabilities:
  open_session: {transport: sandboxed_exec, mode: read, network: api, secrets: helpdesk, timeout_seconds: 60}
  execute_python: {transport: sandboxed_exec, mode: read, timeout_seconds: 60}
policy: {preset: permissive, rules: @RULES@}
"""
SEARCH = """
print("control", bool(found(b"zq8")), "found", found(b"zq9"), held.startswith("ringfence_"))
"""
PLANT = 'planted = "zq8" + "Token" + "00" * 4\n'
GET = 'print(ask(API + "/tickets", Authorization="Bearer " + held)[::2])\n'


LATER = """
import subprocess, sys
open("later.py", "w").write('''
import os, time, urllib.error, urllib.request
for _ in range(1000):
    time.sleep(0.1)
    try:
        status = urllib.request.urlopen(os.environ["API"], timeout=60).status
    except urllib.error.HTTPError as error:
        status = error.headers["X-Ringfence-Reason"]
    open("said", "a").write(f"{status}\\\\n")
''')
process = subprocess.Popen([sys.executable, "later.py"], env={**os.environ, "API": API})
"""


@dataclass
class Stage:
    api: Api
    other: Api
    app: App
    value: str
    file: Path

    async def call(self, tool: str, about: Mapping[str, Any] = MappingProxyType({}), **arguments: Any) -> Outcome:
        call = Call(canonical.new_id("call"), self.app.agent, tool, arguments, **about)
        return await self.app.handle(call, UNATTENDED)

    async def done(self, tool: str, **arguments: Any) -> dict[str, Any]:
        outcome = await self.call(tool, **arguments)
        assert outcome.ok and outcome.result is not None, (outcome.status, outcome.message, outcome.text)
        assert self.value not in json.dumps(outcome.result) + json.dumps(outcome.facts)
        told: dict[str, Any] = outcome.result["structuredContent"]
        return told

    async def open(self, **arguments: Any) -> str:
        return str((await self.done("open_session", **arguments))["session"])

    async def run(self, session: str, code: str) -> str:
        return str((await self.done("execute_python", session=session, code=code))["stdout"])

    @property
    def prelude(self) -> str:
        return PRELUDE.replace("@PORT@", str(self.api.port)).replace("@OTHER@", str(self.other.port))

    def records(self) -> list[dict[str, Any]]:
        return [r.body for r in self.app.store.reader().records() if r.kind == "brokered"]


@asynccontextmanager
async def staged(folder: Path, monkeypatch: pytest.MonkeyPatch, rules: str = "[]") -> AsyncIterator[Stage]:
    boxing.need_boxes()
    value = MARK + secrets.token_hex(12)
    monkeypatch.setenv("HELPDESK_TOKEN", value)
    async with outside(folder, monkeypatch, 2) as (api, other):
        text = CONFIG.replace("@PORT@", str(api.port)).replace("@OTHER@", str(other.port)).replace("@RULES@", rules)
        async with App.open(config.load(gateways.write(folder, text))) as app:
            yield Stage(api, other, app, value, app.config.path)


async def test_a_session_uses_a_token_that_its_box_never_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(tmp_path, monkeypatch) as stage:
        session = await stage.open()
        await stage.run(session, stage.prelude + HERE + PLANT)
        for _ in range(2):
            told = await stage.run(session, GET + SEARCH)
            assert "(200, " in told and '"authorization": "Bearer [redacted]"' in told
            assert "control True found [] True" in told
        assert [headers["authorization"] for _, _, headers, _ in stage.api.seen] == [f"Bearer {stage.value}"] * 2
        # What is written in the box and read from outside is searched as well.
        half = len(stage.value) // 2
        wrote = f"open('output/a.txt', 'w').write({stage.value[:half]!r} + {stage.value[half:]!r})"
        await stage.run(session, f"import os; os.mkdir('output'); {wrote}")
        read = await stage.call("read_file", session=session, path="output/a.txt")
        assert read.ok and stage.value not in json.dumps(read.result)
        begun = await stage.done("run_shell", session=session, command="cat output/a.txt; sleep 60", background=True)
        said = ""
        async with asyncio.timeout(tooling.PATIENCE):
            while "[redacted]" not in said:
                said += json.dumps(await stage.done("process_output", session=session, process=begun["process"]))
        (artifact,) = [
            each["uri"] for each in await stage.app.front.listing.resources(stage.app.agent, templates=False)
        ]
        about: dict[str, Any] = {"kind": "resource", "server": "ringfence", "method": "resources/read"}
        found = await stage.call(artifact, **{"uri": artifact}, about=about)
        assert found.ok and stage.value not in json.dumps(found.result), found.message
        assert [(r["allowed"], r["session"], r["capability"]) for r in stage.records()] == [
            (True, session, "open_session")
        ] * 2
        await stage.done("close_session", session=session)
        state = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()]
        kept = tmp_path / "state" / "sessions" / "artifacts"
        assert sum(stage.value.encode() in data for data in state) == sum(1 for _ in kept.rglob("a.txt"))


async def test_paused_resumed_forked_and_restored_it_is_decided_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, monkeypatch) as stage:
        session = await stage.open()
        first = await stage.run(session, stage.prelude + "print(held)")
        await stage.done("pause_session", session=session)
        await stage.done("resume_session", session=session)
        assert "(200, " in await stage.run(session, GET)
        (fork,) = [each["session"] for each in (await stage.done("fork_session", session=session, count=1))["sessions"]]
        kept = (await stage.done("snapshot_session", session=session))["snapshot"]
        other = await stage.open(snapshot=kept)
        for each in (fork, other):
            # Each has what stands for the secret in its own box alone: that of another is a word like any other.
            told = await stage.run(each, stage.prelude + HERE + PLANT + GET + SEARCH + "print(held)")
            assert "(200, " in told and "control True found [] True" in told
            assert told.split()[-1] != first.split()[-1]
        assert {headers["authorization"] for _, _, headers, _ in stage.api.seen} == {f"Bearer {stage.value}"}
        state = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
        assert stage.value.encode() not in state and first.split()[-1].encode() not in state
        # Where it cannot be had any more, nothing runs there, and nothing is made from it.
        seen = len(stage.api.seen)
        monkeypatch.delenv("HELPDESK_TOKEN")
        await stage.done("pause_session", session=session)
        for tool, more in (
            ("execute_python", {"session": session, "code": "open('ran', 'w')"}),
            ("resume_session", {"session": session}),
            ("fork_session", {"session": session, "count": 1}),
            ("open_session", {}),
        ):
            outcome = await stage.call(tool, **more)
            assert (outcome.status, outcome.reason_code) == ("unavailable", "no_secret"), (tool, outcome.message)
        # It may rotate meanwhile.
        monkeypatch.setenv("HELPDESK_TOKEN", stage.value[::-1])
        told = await stage.run(session, "import os; print(os.path.exists('ran'))\n" + GET)
        assert told.startswith("False\n(200, ") and stage.api.seen[seen][2]["authorization"].endswith(stage.value[::-1])


async def test_what_is_declared_otherwise_meanwhile_holds_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, monkeypatch) as stage:
        session = await stage.open()
        assert "(200, " in await stage.run(session, stage.prelude + GET)
        written = stage.file.read_text()
        rule = '[{id: none, action: deny, tool_patterns: ["secret:.*"]}]'
        await stage.app.apply(config.load(gateways.write(tmp_path, written.replace("rules: []", f"rules: {rule}"))), "")
        assert "(403, " in await stage.run(session, GET) and stage.records()[-1]["reason_code"] == "policy"
        narrower = written.replace("header: Authorization", "header: Authorization, capabilities: [other]")
        await stage.app.apply(config.load(gateways.write(tmp_path, narrower)), "")
        outcome = await stage.call("execute_python", session=session, code="print(1)")
        assert (outcome.status, outcome.reason_code) == ("denied", "secret_scope")
        without = written.replace("secrets: helpdesk, ", "").replace("  helpdesk: {from: env", "  other: {from: env")
        await stage.app.apply(config.load(gateways.write(tmp_path, without)), "")
        outcome = await stage.call("execute_python", session=session, code="print(1)")
        assert (outcome.status, outcome.reason_code) == ("unavailable", "no_secret")
        assert len(stage.api.seen) == 1


async def test_a_placeholder_elsewhere_is_refused_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = """[{id: no-admin, action: deny, tool_patterns: ["secret:.*"], when: 'args.path.startsWith("/admin")'}]"""
    async with staged(tmp_path, monkeypatch, rules) as stage:
        session = await stage.open()
        told = await stage.run(
            session,
            stage.prelude
            + """
for asked in (
    ask(OTHER + "/", Authorization="Bearer " + held),
    ask(API + "/?q=" + held),
    ask(API + "/", "POST", b"x" * 70000 + held.encode()),
    ask(OTHER + "/", "POST", b'{"token": "' + held.encode() + b'"}'),
    ask(API + "/admin", Authorization=held),
    ask(API + "/", "DELETE", Authorization=held),
):
    print(asked[0], asked[1]["X-Ringfence-Reason"])
""",
        )
        wrong = ["403 placeholder"] * 4
        assert told.split("\n")[:6] == [*wrong, "403 policy", "403 secret_method"]
        assert not any(stage.value in headers.get("authorization", "") for _, _, headers, _ in stage.api.seen[1:])
        assert [(r["port"], r["method"], r["reason_code"]) for r in stage.records() if not r["allowed"]] == [
            (stage.other.port, "GET", "placeholder"),
            (stage.api.port, "GET", "placeholder"),
            (stage.api.port, "POST", "placeholder"),
            (stage.other.port, "POST", "placeholder"),
            (stage.api.port, "GET", "policy"),
            (stage.api.port, "DELETE", "secret_method"),
        ]
        assert {r["secret"] for r in stage.records()} == {"helpdesk"}


async def test_without_anybody_who_has_the_secret_a_request_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, monkeypatch) as before:
        async with App.open(config.load(before.file)) as app:
            stage = replace(before, app=app)
            session = await stage.open()
            await stage.run(session, stage.prelude + LATER)
        # That gateway is gone; what runs in the session goes on, without a secret, until somebody comes who has it.
        said: list[str] = []
        async with asyncio.timeout(tooling.PATIENCE):
            while "no_secret" not in said:
                await asyncio.sleep(0.1)
                said = (await before.call("read_file", session=session, path="said")).text.split()
        assert await before.run(session, "print(ask(API)[0])") == "200\n"
        async with asyncio.timeout(tooling.PATIENCE):
            while said[-1] != "200":
                await asyncio.sleep(0.1)
                said = (await before.call("read_file", session=session, path="said")).text.split()


async def test_a_sandbox_of_the_sdk_has_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxing.need_boxes()
    value = MARK + secrets.token_hex(12)
    monkeypatch.setenv("HELPDESK_TOKEN", value)
    async with outside(tmp_path, monkeypatch, 2) as (api, other):
        text = CONFIG.replace("@PORT@", str(api.port)).replace("@OTHER@", str(other.port)).replace("@RULES@", "[]")
        text = text.replace("secrets: helpdesk, ", "").replace("network: api, ", "")
        monkeypatch.setenv("RINGFENCE_CONFIG", str(gateways.write(tmp_path, text)))
        prelude = PRELUDE.replace("@PORT@", str(api.port)).replace("@OTHER@", str(other.port))

        def use() -> str:
            with Sandbox.create(network="api", secrets=["helpdesk"]) as sandbox:
                sandbox.run_code(prelude)
                assert sandbox.run_code("os.environ['HELPDESK_TOKEN'][:10]").text == "'ringfence_'"
                return "".join(sandbox.run_code("print(ask(API, Authorization=held)[::2])").logs.stdout)

        engine.close()
        try:
            told = await anyio.to_thread.run_sync(use)
        finally:
            engine.close()
        assert "(200, " in told and value not in told
        assert api.seen[-1][2]["authorization"] == f"Bearer {value}"
