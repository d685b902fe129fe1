"""An API is used with a secret that the program using it never holds."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import textwrap
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ringfence import config
from ringfence.audit.explain import explain
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.core import canonical
from ringfence.core.brokering import OutboundRequest
from ringfence.core.errors import Refused
from ringfence.core.model import Call, Outcome, SecretSpec
from ringfence.core.ports import Access
from ringfence.egress import names
from ringfence.egress.tls import Authority
from ringfence.governance.broker import VaultBroker
from ringfence.secrets.sources import SourceValue
from ringfence.secrets.vault import Vault, VaultEntry
from tests import gateways
from tests.egress.outside import serving

pytestmark = pytest.mark.anyio

MARK = "zq9Token"
SPELLINGS = ("//admin", "/./admin", "/x/../admin", "/%2e/admin", "/;/admin", "/%2561dmin", "/%E9")
OVERRIDES = ("X-Original-URL", "X-Rewrite-URL", "X_Original_URL", "X-Original-URI", "X-Rewrite-Uri", "X-Forwarded-Uri")
CONFIG = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
networks: {api: {allow: ["127.0.0.1:@PORT@", "127.0.0.1:@OTHER@"]}}
secrets:
  helpdesk: {from: env, name: HELPDESK_TOKEN, hosts: ["127.0.0.1:@PORT@"], header: Authorization@SECRET@}
capabilities:
  execute_python: {transport: sandboxed_exec, mode: read, network: api, secrets: helpdesk, timeout_seconds: 60}
policy: {preset: permissive, rules: @RULES@}
"""


@dataclass
class Api:
    """Echoes every header that it got, and remembers it."""

    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode().strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            method, path, _ = first.split(" ")
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.seen.append((method, path, headers, body))
            told = json.dumps({"method": method, "headers": headers}).encode() if method != "HEAD" else b""
            writer.write(b"HTTP/1.1 200 OK\r\nX-Echo: %b\r\n" % headers.get("authorization", "").encode())
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(told), told))


@dataclass
class Stage:
    api: Api
    other: Api
    app: App
    value: str

    async def run(self, code: str) -> Outcome:
        code = PRELUDE.replace("@PORT@", str(self.api.port)).replace("@OTHER@", str(self.other.port)) + textwrap.dedent(
            code
        )
        return await self.app.handle(
            Call(canonical.new_id("call"), self.app.agent, "execute_python", {"code": code}), UNATTENDED
        )

    def records(self) -> list[dict[str, Any]]:
        return [r.body for r in self.app.store.reader().records() if r.kind == "brokered"]


PRELUDE = """
import json, os, re, urllib.error, urllib.request
API, OTHER = "https://127.0.0.1:@PORT@", "https://127.0.0.1:@OTHER@"
held = os.environ["HELPDESK_TOKEN"]
def ask(url, method="GET", data=None, **headers):
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=25) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()
"""


@asynccontextmanager
async def outside(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> AsyncIterator[list[Api]]:
    """So many APIs over TLS, which the gateway trusts as it does those of the world."""
    authority = Authority()
    (folder / "outside.pem").write_bytes(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "outside.pem"))
    context = authority.context(names.host("127.0.0.1"))
    apis = [Api() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for api in apis:
            api.port = await stack.enter_async_context(serving(api.handle, context))
        yield apis


@asynccontextmanager
async def staged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, secret: str = "", rules: str = "[]"
) -> AsyncIterator[Stage]:
    value = MARK + secrets.token_hex(12)
    monkeypatch.setenv("HELPDESK_TOKEN", value)
    async with outside(folder, monkeypatch, 2) as (api, other):
        text = CONFIG.replace("@PORT@", str(api.port)).replace("@OTHER@", str(other.port))
        text = text.replace("@SECRET@", secret).replace("@RULES@", rules)
        async with App.open(config.load(gateways.write(folder, text))) as app:
            yield Stage(api, other, app, value)


HERE = """
import glob
def found(mark):
    pattern = re.compile(mark + b"Token[0-9a-f]{4}")
    places = []
    for line in open("/proc/self/maps"):
        where, access, *_ = line.split()
        if access[0] != "r" or line.rstrip().endswith(("[vvar]", "[vvar_vclock]", "[vsyscall]")):
            continue
        begin, end = (int(part, 16) for part in where.split("-"))
        with open("/proc/self/mem", "rb", 0) as memory:
            for at in range(begin, end, 1 << 20):
                try:
                    memory.seek(at)
                    if pattern.search(memory.read(min(end - at, (1 << 20) + 64))):
                        places.append(line)
                except (OSError, ValueError, OverflowError):
                    break
    for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline")]:
        try:
            if pattern.search(open(path, "rb").read()):
                places.append(path)
        except OSError:
            pass
    for top in ("/workspace", "/tmp", "/run", "/etc", "/dev/shm", "/home", "/root", "/var"):
        for folder, _, files in os.walk(top):
            for name in files:
                try:
                    if pattern.search(open(os.path.join(folder, name), "rb").read(10_000_000)):
                        places.append(name)
                except OSError:
                    pass
    return places
"""


async def test_a_program_uses_a_token_that_it_never_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(tmp_path, monkeypatch) as stage:
        outcome = await stage.run(
            HERE
            + """
planted = "zq8" + "Token" + "00" * 4
status, headers, body = ask(API + "/tickets?page=1", Authorization="Bearer " + held)
print(status, headers["X-Echo"], body)
print(ask(API + "/tickets", "POST", b"{}", Authorization="Bearer " + held)[::2])
print(ask(API + "/tickets", "HEAD")[0])
print("control", len(found(b"zq8")), "found", found(b"zq9"), held.startswith("ringfence_"))
"""
        )
        assert outcome.ok, outcome.facts["explanation"]
        told = outcome.text
        # The API has it, on both requests, and nobody else: not in the program's memory, environment, files, output.
        assert [(m, p) for m, p, _, _ in stage.api.seen] == [("GET", "/tickets?page=1"), ("HEAD", "/tickets")]
        assert all(headers["authorization"] == f"Bearer {stage.value}" for _, _, headers, _ in stage.api.seen)
        assert re.search(r"control [1-9][0-9]* found \[\] True", told), told
        assert stage.value not in json.dumps(outcome.result) + json.dumps(outcome.facts)
        # The echo came back without it, the method that is not declared was refused, and all of that is told.
        assert '200 Bearer [redacted] {"method": "GET"' in told and '(403, "ringfence: refused: secret_method' in told
        assert outcome.facts["network"]["redacted"] == 3
        assert [(r["method"], r["allowed"], r["reason_code"]) for r in stage.records()] == [
            ("GET", True, "ok"),
            ("POST", False, "secret_method"),
            ("HEAD", True, "ok"),
        ]
        assert all(r["call_id"] == outcome.facts["call_id"] and r["secret"] == "helpdesk" for r in stage.records())
        told = explain([r.body for r in stage.app.store.reader().records(call_id=outcome.facts["call_id"])])
        assert f"helpdesk put once into GET to 127.0.0.1:{stage.api.port}" in told
        assert f"helpdesk refused once (secret_method) for POST to 127.0.0.1:{stage.api.port}" in told
        state = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
        assert stage.value.encode() not in state


async def test_a_placeholder_anywhere_else_is_refused_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, monkeypatch, secret=", methods: [GET, POST]") as stage:
        outcome = await stage.run(
            """
            import base64
            basic = "Basic " + base64.b64encode(b"me:" + held.encode()).decode()
            told = [
                ask(OTHER + "/", Authorization="Bearer " + held),
                ask(OTHER + "/", Authorization=basic),
                ask(OTHER + "/?q=" + held),
                ask(API + "/" + held),
                ask(API + "/", **{"X-Copy": held}),
                ask(API + "/", **{"X-" + held: "1"}),
                ask(API + "/" + "".join(f"%25{byte:02x}" for byte in held.encode())),
                ask(API + "/", "POST", b"x" * 70000 + held.encode() + b"y"),
                ask(OTHER + "/", "POST", b'{"token": "' + held.encode() + b'"}'),
            ]
            for status, headers, body in told:
                print(status, headers["X-Ringfence-Reason"])
            print(ask(OTHER + "/", Authorization="Bearer my-own")[0], ask(API + "/", Authorization="Bearer my-own")[0])
            print(ask(API + "/", Authorization=basic)[0])
            """
        )
        lines = outcome.text.split("\n")
        assert lines[:9] == ["403 placeholder"] * 9
        assert lines[9:11] == ["200 200", "200"]
        # A header of the caller's own never reaches the host that the secret is for; elsewhere it is theirs.
        assert [headers["authorization"] for _, _, headers, _ in stage.other.seen] == ["Bearer my-own"]
        assert {headers["authorization"] for _, _, headers, _ in stage.api.seen} == {f"Bearer {stage.value}"}
        refused = [(r["port"], r["reason_code"]) for r in stage.records() if not r["allowed"]]
        assert refused == [
            *[(stage.other.port, "placeholder")] * 3,
            *[(stage.api.port, "placeholder")] * 5,
            (stage.other.port, "placeholder"),
        ]
        body = [r for r in stage.records() if r["method"] == "POST" and not r["allowed"]]
        assert [(r["secret"], r["allowed"], r["decision"]) for r in body] == [("helpdesk", False, None)] * 2


async def test_each_request_is_decided_by_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = """[{id: no-admin, action: deny, tool_patterns: ["secret:.*"], when: 'args.path.startsWith("/admin")'},
                {id: ask-post, action: ask, tool_patterns: ["secret:helpdesk"], when: 'args.method == "POST"'}]"""
    async with staged(tmp_path, monkeypatch, secret=", methods: [GET, POST]", rules=rules) as stage:
        outcome = await stage.run(
            """
            for path, method in (("/tickets", "GET"), ("/admin/x", "GET"), ("/tickets", "POST")):
                status, headers, _ = ask(API + path, method, b"" if method == "POST" else None, Authorization=held)
                print(status, headers["X-Ringfence-Reason"])
            """
        )
        assert outcome.text.split("\n")[:3] == ["200 None", "403 policy", "403 approval"]
        told = [(r["allowed"], r["decision"]["rules"][0]) for r in stage.records()]
        assert told == [(True, "perm-read"), (False, "no-admin"), (False, "ask-post")]


async def test_no_other_spelling_of_a_path_takes_a_secret_past_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = """[{id: no-admin, action: deny, tool_patterns: ["secret:.*"], when: 'args.path.startsWith("/admin")'}]"""
    async with staged(tmp_path, monkeypatch, rules=rules) as stage:
        outcome = await stage.run(
            """
            def why(path, **headers):
                return ask(API + path, **headers)[1]["X-Ringfence-Reason"]
            for path in ("/%61dmin", *@SPELLINGS@):
                print(path, why(path, Authorization=held), why(path))
            for name in @OVERRIDES@:
                override = {name: "/admin"}
                print(name, why("/fine", Authorization=held, **override), why("/fine", **override))
            print(ask(API + "/t%69ckets/100%25?at=//x;y", Authorization=held)[0])
            """.replace("@OVERRIDES@", repr(OVERRIDES)).replace("@SPELLINGS@", repr(SPELLINGS))
        )
        assert outcome.text.split("\n")[:15] == [
            "/%61dmin policy policy",
            *(f"{path} ambiguous_path None" for path in SPELLINGS),
            *(f"{name} path_override None" for name in OVERRIDES),
            "200",
        ]
        # What goes all the same goes without the value, but for the last, which means one path alone.
        carried = [path for _, path, headers, _ in stage.api.seen if "authorization" in headers]
        assert carried == ["/t%69ckets/100%25?at=//x;y"] and len(stage.api.seen) == 14
        refused = [r["reason_code"] for r in stage.records() if not r["allowed"]]
        assert refused == ["policy"] * 2 + ["ambiguous_path"] * 7 + ["path_override"] * len(OVERRIDES)


async def test_what_cannot_be_had_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, monkeypatch) as stage:
        monkeypatch.delenv("HELPDESK_TOKEN")
        outcome = await stage.run("print(1)")
        assert (outcome.status, outcome.reason_code) == ("unavailable", "no_secret")
        monkeypatch.setenv("HELPDESK_TOKEN", stage.value[::-1])
        assert (await stage.run("print(ask(API)[2])")).ok
        assert stage.api.seen[-1][2]["authorization"] == f"Bearer {stage.value[::-1]}"
    async with staged(tmp_path, monkeypatch, secret=", capabilities: [other]") as stage:
        outcome = await stage.run("print(1)")
        assert (outcome.status, outcome.reason_code) == ("denied", "secret_scope")


async def test_a_request_under_way_when_the_secrets_are_revoked_goes_without() -> None:
    going, go = asyncio.Event(), asyncio.Event()

    async def judge(*about: Any) -> None:
        going.set()
        await go.wait()

    async def read(spec: SecretSpec, before: SourceValue | None) -> SourceValue:
        return SourceValue(f"{MARK}-{MARK}-{MARK}")

    spec = SecretSpec("k", "env", {"name": "K"}, hosts=("api.example",), header="Authorization")
    broker = VaultBroker(Vault([VaultEntry(spec)], {"env": read}), "development", judge)
    given = await broker.issue(Access(network="api", secrets=("k",), tenant="local", capability="execute_python"))
    assert given.broker is not None
    asked = OutboundRequest("https", "api.example", 443, "GET", "/", (), "rule")
    asking = asyncio.create_task(given.broker(asked))
    await going.wait()
    given.revoke()
    go.set()
    with pytest.raises(Refused, match="revoked"):
        await asking


async def test_the_header_is_written_as_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(tmp_path, monkeypatch, secret=', format: "token {value}"') as stage:
        assert (await stage.run("print(ask(API)[0])")).text == "200\n"
        assert stage.api.seen[-1][2]["authorization"] == f"token {stage.value}"


async def test_values_are_removed_from_what_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(tmp_path, monkeypatch) as stage:
        half = len(stage.value) // 2
        outcome = await stage.run(
            f"""
            import base64, sys
            value = {stage.value[:half]!r} + {stage.value[half:]!r}
            encoded = base64.b64encode(b"--" + value.encode()).decode()
            print("plain", value, "base64", encoded, "hex", value.encode().hex())
            print("AKIA" + "ABCDEFGHIJKLMNOP", file=sys.stderr)
            raise ValueError(value[::-1])
            """
        )
        assert stage.value not in json.dumps(outcome.result)
        assert outcome.result is not None and "plain [redacted] base64 " in outcome.text
        assert outcome.facts["redactions"] == {"known_secret": 4, "aws_access_key": 1}
        (finished,) = [
            r
            for r in stage.app.store.reader().records()
            if r.kind == "finished" and r.call_id == outcome.facts["call_id"]
        ]
        assert finished.body["secrets"] == {"helpdesk": 4} and "secrets" not in outcome.facts
