"""`ringfence top`: what it shows of calls, questions, sessions and servers that are there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli.top import lines
from tests import boxing, gateways
from tests.cli.terminals import at_terminal
from tests.tooling import start_process, wait_until

CONFIG = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
people: {ann: {roles: [manager], os_user: nobody-of-this-name}}
servers: {desk: {command: @COMMAND@, pins: first_use, placement: unsafe_host}}
capabilities:
  echo: {mode: read}
  slow: {mode: read, timeout_seconds: 600}
  asked: {tool: counter, mode: write, approval: always}
policy: {preset: permissive}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateways.Served]:
    folder = tmp_path_factory.mktemp("top")
    path = gateways.write(folder, CONFIG.replace("@COMMAND@", gateways.server("hostile_server.py")))
    with gateways.serve(path) as found:
        yield found


def look(served: gateways.Served) -> dict[str, Any]:
    done = gateways.run("top", "--once", "--json", "--config", served.config)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def call(served: gateways.Served, tool: str, arguments: str) -> subprocess.CompletedProcess[str]:
    return gateways.run("call", tool, "--args", arguments, "--url", served.url, "--json")


def test_calls_questions_servers_and_rates_are_told(served: gateways.Served) -> None:
    assert call(served, "echo", '{"text": "refunds"}').returncode == 0
    call(served, "asked", "{}")
    command = gateways.ringfence("call", "slow", "--args", '{"seconds": 600}', "--url", served.url)
    with start_process(command):
        wait_until(lambda: look(served)["calls"])
        found = look(served)
    (running,) = found["calls"]
    assert (running["tool"], running["agent"], running["server"]) == ("slow", "local", "desk")
    (asked,) = found["approvals"]
    assert (asked["tool"], asked["rule"]) == ("asked", "always")
    assert asked["seconds"] >= 0 and asked["expires_in"] > 0
    (desk,) = found["servers"]
    assert (desk["name"], desk["failed"]) == ("desk", 0)
    assert found["rates"]["calls"] == sum(found["rates"]["by_status"].values()) >= 2
    assert found["sessions"] == []
    assert "refunds" not in json.dumps(found)


def test_in_a_pipe_it_is_plain_text_look_by_look(served: gateways.Served) -> None:
    once = gateways.run("top", "--once", "--config", served.config)
    assert once.stdout.startswith("ringfence top, ")
    assert "\x1b" not in once.stdout and "SERVERS: 1" in once.stdout
    command = gateways.ringfence("top", "--every", "0.1", "--config", served.config)
    with start_process(command) as started:
        wait_until(lambda: started.output().count("ringfence top, ") >= 3)
    command = gateways.ringfence("top", "--every", "0.1", "--json", "--config", served.config)
    with start_process(command) as started:
        wait_until(lambda: started.output().count("\n") >= 2)
        assert json.loads(started.output().splitlines()[0])["servers"][0]["name"] == "desk"


def test_on_a_terminal_it_is_a_screen_that_goes_away_again(served: gateways.Served) -> None:
    with at_terminal("top", "--every", "0.1", "--config", served.config) as person:
        person.expect("SERVERS: 1", times=3)
        person.type("\x03")
        assert person.end() == 0
    assert person.shown.startswith("\x1b[?1049h") and "\x1b[?1049l" in person.shown


def test_sessions_are_told_with_what_they_use(tmp_path: Path) -> None:
    boxing.need_boxes()
    path = gateways.write(tmp_path, "version: 1\ngateway: {state: ./state}\npolicy: {preset: permissive}\n")
    with gateways.serve(path) as served:
        opened = json.loads(call(served, "open_session", "{}").stdout)
        ident = opened["structured"]["session"]
        arguments = json.dumps({"code": "x = bytearray(30_000_000); sum(range(10**6))", "session": ident})
        assert call(served, "execute_python", arguments).returncode == 0
        wait_until(lambda: any((each["memory_bytes"] or 0) > 10_000_000 for each in look(served)["sessions"]))
        (found,) = look(served)["sessions"]
        assert (found["id"], found["agent"], found["state"], found["step"]) == (ident, "local", "running", 1)
        assert found["cpu_ms"] > 0
        assert f"  {ident}" in gateways.run("top", "--once", "--config", path).stdout
        call(served, "close_session", json.dumps({"session": ident}))


def test_a_name_that_others_chose_is_no_order_to_the_terminal() -> None:
    bad = "a\x1b[2J\nb"
    each = {"seconds": 1.0, "tool": bad, "agent": bad, "server": None, "session": None, "call_id": "call_1"}
    rates = {"seconds": 60.0, "calls": 0, "per_second": 0, "by_status": {}, "p50_ms": None, "p95_ms": None}
    found = {"at": 0.0, "state": "/s", "rates": rates, "calls": [each] * 20, "approvals": [], "sessions": None}
    shown = lines({**found, "servers": []})
    assert all("\x1b" not in line and "\n" not in line for line in shown)
    assert "… 8 more" in shown
    assert "SESSIONS: the keeper does not answer" in shown
