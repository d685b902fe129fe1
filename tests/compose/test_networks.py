"""Networks all the way: a contract's, a caller's and a session's, through the gateway, the command line and the SDK."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ringfence import Sandbox, config, run_code
from ringfence.compose.runs import own_contracts, own_definitions, provision
from ringfence.core.box import NetworkRule
from ringfence.core.errors import ConfigError
from ringfence.core.model import NetworkSpec
from ringfence.sdk import engine
from tests import boxing, gateways, tooling

ASK = "import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1:{port}{path}').read().decode())"


class Outside(ThreadingHTTPServer):
    daemon_threads = True
    asked: list[str]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Outside)
        self.server.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def do_POST(self) -> None:
        """Takes what comes, and answers nothing."""
        with contextlib.suppress(OSError):
            self.rfile.read()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def outside() -> Iterator[Outside]:
    boxing.need_boxes()
    server = Outside(("127.0.0.1", 0), _Handler)
    server.asked = []
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def code(outside: Outside, path: str = "/") -> str:
    return ASK.format(port=outside.server_port, path=path)


# ── what a configuration means ──


def loaded(text: str) -> config.Config:
    return config.loads(text, file="f", base=Path("/etc/ringfence"))


def test_every_key_of_a_network_arrives() -> None:
    keys = "methods: [GET], paths: [/v1], addresses: [10.0.0.0/8], max_bytes_out: 1, max_bytes_in: 2, per_minute: 3"
    found = loaded(f"networks: {{n: {{allow: ['*.corp.example:443'], {keys}, inspect: true}}}}").networks["n"]
    assert found == NetworkSpec(
        "n", ("*.corp.example:443",), ("GET",), ("/v1",), ("10.0.0.0/8",), 1, 2, 3, inspect=True
    )


SANDBOX = "sandbox: {network_enabled: true, allowed_egress_domains: [api.example]}\n"


def test_a_network_of_the_sandbox_is_for_whatever_names_none() -> None:
    declared = "capabilities: {sh: {transport: sandboxed_exec, tool: run_shell}, py: {transport: sandboxed_exec,"
    settings = loaded(f"{SANDBOX}{declared} tool: execute_python, network: denied}}}}")
    assert settings.networks == {"sandbox": NetworkSpec("sandbox", ("api.example",))}
    contracts = own_contracts(settings)
    assert (contracts["sh"].network, contracts["py"].network) == ("sandbox", "denied")
    assert contracts["open_session"].network == "sandbox"
    assert {contracts[name].network for name in ("read_file", "close_session")} == {"denied"}
    assert {one.network for one in own_contracts(loaded("version: 1")).values()} == {"denied"}


def test_descriptions_state_the_network() -> None:
    text = "networks: {n: {allow: [api.example], methods: [GET], paths: [/v1]}}\n"
    settings = loaded(f"{text}capabilities: {{execute_python: {{transport: sandboxed_exec, network: n}}}}")
    told = own_definitions(own_contracts(settings), provision(settings.sandbox), settings.networks)
    said = told["execute_python"].body["description"]  # type: ignore[union-attr]
    assert "Network: api.example (GET; under /v1), over HTTP and HTTPS by the proxy" in said
    assert "Network: none." in told["run_shell"].body["description"]  # type: ignore[union-attr]
    assert told["execute_python"].body["annotations"]["openWorldHint"] is True  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("before", "after", "looser"),
    [
        ("allow: [a]", "allow: [a, b]", True),
        ("allow: [a, b]", "allow: [a]", False),
        ("allow: [a]", "allow: [a], methods: [GET]", False),
        ("allow: [a], methods: [GET]", "allow: [a]", True),
        ("allow: [a], paths: [/v1]", "allow: [a], paths: [/v1, /v2]", True),
        ("allow: [a], max_bytes_out: 1", "allow: [a], max_bytes_out: 2", True),
        ("allow: [a], per_minute: 2", "allow: [a], per_minute: 1", False),
        ("allow: [a]", "allow: [a], addresses: [10.0.0.1]", True),
        ("allow: [a], inspect: true", "allow: [a]", True),
        ("allow: [a]", "allow: [a], inspect: true", False),
    ],
)
def test_a_reload_that_widens_a_network_waits(before: str, after: str, looser: bool) -> None:
    old, new = (loaded(f"networks: {{n: {{{text}}}}}") for text in (before, after))
    assert bool(config.loosens(old, new)) is looser


def test_a_network_of_the_sandbox_without_domains_is_refused() -> None:
    with pytest.raises(ConfigError, match="would mean everywhere"):
        loaded("sandbox: {network_enabled: true}")


# ── the command line ──


def test_run_reaches_what_it_is_allowed_and_nothing_else(outside: Outside, tmp_path: Path) -> None:
    port, facts = outside.server_port, tmp_path / "facts.json"
    allowed = ("--allow", f"127.0.0.1:{port}", "--facts", str(facts))
    command = gateways.ringfence("run", "-c", code(outside), *allowed)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "hello\n"), ended.stderr
    told = json.loads(facts.read_text())
    assert told["network"]["allowed"][0] | {"bytes_in": 0, "bytes_out": 0} == {
        "host": "127.0.0.1",
        "port": port,
        "count": 1,
        "rule": "caller:allow",
        "inspected": True,
        "bytes_in": 0,
        "bytes_out": 0,
    }
    assert told["effect"] == "confirmed"
    other = gateways.ringfence("run", "-c", code(outside), "--allow", "127.0.0.1:1", "--facts", str(facts))
    ended = subprocess.run(other, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1 and "403" in ended.stderr
    told = json.loads(facts.read_text())
    denied = {"host": "127.0.0.1", "port": port, "count": 1, "rule": "denied", "reason": "host"}
    assert told["network"]["denied"] == [denied]
    assert told["effect"] == "none" and outside.asked == ["/"]


# ── the SDK ──


@pytest.fixture
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state of a home of its own."""
    engine.close()
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path / ".local/state/ringfence"
    engine.close()


def test_one_run_of_the_sdk(outside: Outside, sdk: Path) -> None:
    ran = run_code(code(outside), network=[f"127.0.0.1:{outside.server_port}"])
    assert ran.text == "hello\n" and ran.facts["network"]["allowed"][0]["count"] == 1
    assert run_code(code(outside)).error is not None
    started = gateways.records(sdk, kind="started")
    assert [record["effect_possible"] for record in started] == [True, False]


def test_a_sandbox_keeps_its_network_from_step_to_step(outside: Outside, sdk: Path) -> None:
    place = f"127.0.0.1:{outside.server_port}"
    with Sandbox.create(network=[place]) as box:
        first, quiet = box.run_code(code(outside)), box.run_code("1 + 1")
        by_command = box.commands.run(f'{box_python()} -c "{code(outside, "/c").replace(chr(10), ";")}"')
        (fork,) = box.fork()
        assert not isinstance(fork, Exception)
        forked = fork.run_code(code(outside, "/fork"))
        fork.kill()
    assert first.logs.stdout == ["hello\n"], first.error
    assert (first.facts["effect"], quiet.facts["effect"]) == ("confirmed", "none")
    assert quiet.facts["network"]["allowed"] == []
    assert by_command.stdout == "hello\n" and by_command.facts["network"]["allowed"][0]["port"] == outside.server_port
    assert forked.logs.stdout == ["hello\n"]
    started = gateways.records(sdk, kind="started")
    assert {record["effect_possible"] for record in started if record["call"]["tool"] == "execute_python"} == {True}


HALF = """
import socket
way = socket.create_connection(("127.0.0.1", 3128))
way.sendall(b"POST http://127.0.0.1:{port}/half HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\nExpect: 100-continue\\r\\n"
            b"Transfer-Encoding: chunked\\r\\n\\r\\n")
print(way.recv(25))
"""
BREAK = """
way.sendall(b"-0\\r\\n\\r\\n")
print(b"".join(iter(lambda: way.recv(4096), b"")))
"""


def test_a_request_whose_head_was_sent_is_never_told_as_not_sent(outside: Outside, sdk: Path) -> None:
    half, place = HALF.format(port=outside.server_port), f"127.0.0.1:{outside.server_port}"
    with Sandbox.create(network=[place]) as box:
        told = [box.run_code(half + BREAK).facts]
        begun, broken = box.run_code(half).facts, box.run_code(BREAK).facts
    told.append(run_code(half + BREAK, network=[place]).facts)
    for facts in told:
        assert [entry["reason"] for entry in facts["network"]["denied"]] == ["chunk_syntax"]
        (sent,) = facts["network"]["allowed"]
        assert sent["bytes_out"] == facts["network"]["bytes_out"] > 0
        assert facts["effect"] == "confirmed" and "nothing" not in facts["explanation"]
        assert f"reached {place} (1); denied {place} (1)" in facts["explanation"]
    assert begun["effect"] == "confirmed" and begun["network"]["denied"] == []
    # Nothing more of it went out then, and the step before has it on record.
    assert broken["network"]["allowed"] == [] and broken["network"]["bytes_out"] == 0
    assert [entry["count"] for entry in broken["network"]["denied"]] == [1] and broken["effect"] == "none"


def box_python() -> str:
    return "python3"


# ── the gateway ──

GATEWAY = """
gateway: {{state: ./state}}
networks: {{near: {{allow: ["127.0.0.1:{port}"], methods: [GET], paths: [/ok], max_bytes_in: 100000}}}}
capabilities:
  execute_python: {{transport: sandboxed_exec, mode: high_risk, network: near, approval: none}}
"""


def test_a_contract_gives_its_network(outside: Outside, tmp_path: Path) -> None:
    path = gateways.write(tmp_path, GATEWAY.format(port=outside.server_port))
    for wanted, expected in (("/ok", "hello\n"), ("/other", "")):
        arguments = json.dumps({"code": code(outside, wanted)})
        words = ("call", "execute_python", "--args", arguments, "--config", path, "--json")
        answer = json.loads(gateways.run(*words, cwd=tmp_path).stdout)
        assert answer["structured"]["stdout"] == expected, answer
        verdict = "allowed" if expected else "denied"
        assert [entry["rule"] for entry in answer["facts"]["network"][verdict]] == ["near"]
    shell = json.dumps({"command": "env | grep -i _proxy; true"})
    answer = json.loads(gateways.run("call", "run_shell", "--args", shell, "--config", path, "--json").stdout)
    assert answer["structured"]["stdout"] == ""


SESSIONS = """
gateway: {{state: ./state}}
networks: {{near: {{allow: ["127.0.0.1:{port}"], paths: {paths}}}, far: {{allow: [example.com]}}}}
capabilities:
  open_session: {{transport: sandboxed_exec, mode: write, network: {network}, approval: none}}
"""


def test_a_session_whose_network_was_tightened_runs_nothing_more(outside: Outside, tmp_path: Path) -> None:
    def called(tool: str, network: str = "near", paths: str = "null", **arguments: Any) -> Any:
        text = SESSIONS.format(port=outside.server_port, network=network, paths=paths)
        path = gateways.write(tmp_path, text)
        words = ("call", tool, "--args", json.dumps(arguments), "--config", path, "--json")
        return json.loads(gateways.run(*words, cwd=tmp_path).stdout)

    session = called("open_session")["structured"]["session"]
    step = {"session": session, "code": code(outside)}
    try:
        assert called("execute_python", **step)["structured"]["stdout"] == "hello\n"
        for changed in ({"paths": "[/ok]"}, {"network": "far"}, {"network": "denied"}):
            for tool, given in (("execute_python", step), ("fork_session", {"session": session, "count": 1})):
                answer = called(tool, **changed, **given)
                assert (answer["status"], answer["reason_code"]) == ("denied", "session_network"), changed
        loop = f"import time\nwhile True:\n    time.sleep(0.01)\n    {code(outside, '/loop').replace(chr(10), '; ')}"
        started = called("run_shell", session=session, background=True, command=f'{box_python()} -c "{loop}"')
        assert started["status"] == "success", started
        until = time.monotonic() + tooling.PATIENCE
        while "/loop" not in outside.asked and time.monotonic() < until:
            time.sleep(0.01)
        assert called("execute_python", paths="[/ok]", **step)["reason_code"] == "session_network"
        asked = len(outside.asked)
        time.sleep(0.5)
        assert len(outside.asked) <= asked + 1, "what runs already sends no more than was under way"
        process = started["structured"]["process"]
        assert called("stop_process", session=session, process=process)["status"] == "success"
        assert called("execute_python", **step)["structured"]["stdout"] == "hello\n", "the file is as it was"
    finally:
        assert called("close_session", network="denied", session=session)["status"] == "success"
    assert [path for path in outside.asked if path != "/loop"] == ["/", "/"]


SERVER = """
import json, sys, urllib.request
SCHEMA = {"type": "object", "properties": {"url": {"type": "string"}}}
ABOUT = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "f", "version": "1"}}

def answer(method, params):
    if method == "initialize":
        return {"result": ABOUT}
    if method == "tools/list":
        return {"result": {"tools": [{"name": "fetch", "inputSchema": SCHEMA}]}}
    if method != "tools/call":
        return {"error": {"code": -32601, "message": "no"}}
    try:
        text = urllib.request.urlopen(params["arguments"]["url"]).read().decode()
    except OSError as exc:
        text = str(exc)
    return {"result": {"content": [{"type": "text", "text": text}]}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        told = {"jsonrpc": "2.0", "id": asked["id"], **answer(asked["method"], asked.get("params"))}
        print(json.dumps(told), flush=True)
"""
BOXED = """
gateway: {{state: ./state}}
networks: {{near: {{allow: ["127.0.0.1:{port}"]}}}}
servers:
  web: {{command: [python3, server.py], network: near, pins: first_use}}
  shut: {{command: [python3, server.py], pins: first_use}}
capabilities:
  fetch: {{server: web, tool: fetch, mode: write, network: near}}
  shut: {{server: shut, tool: fetch, mode: write}}
policy: {{preset: permissive}}
"""


def test_what_a_boxed_server_asks_for_is_in_the_facts_of_the_call(outside: Outside, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    path = gateways.write(tmp_path, BOXED.format(port=outside.server_port))

    def called(tool: str, port: int) -> dict[str, Any]:
        arguments = json.dumps({"url": f"http://127.0.0.1:{port}/served"})
        words = ("call", tool, "--args", arguments, "--config", path, "--json")
        answer: dict[str, Any] = json.loads(gateways.run(*words, cwd=tmp_path).stdout)
        return answer

    reached, denied, shut = (
        called("fetch", outside.server_port),
        called("fetch", 1),
        called("shut", outside.server_port),
    )
    assert reached["content"][0]["text"] == "hello", reached
    assert [entry["rule"] for entry in reached["facts"]["network"]["allowed"]] == ["near"]
    assert "403" in denied["content"][0]["text"]
    assert [entry["port"] for entry in denied["facts"]["network"]["denied"]] == [1]
    assert "refused" in shut["content"][0]["text"] and shut["facts"]["network"]["allowed"] == []
    assert outside.asked == ["/served"]


def test_rules_are_plain_data() -> None:
    rule = NetworkRule("n", ("a.example",))
    assert not rule.inspects and NetworkRule("n", (), terminate=True).inspects
