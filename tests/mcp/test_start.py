"""A gateway on a client's own pipe answers at once, however long its servers take; `call` starts only what it needs."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import JSON, text_of
from tests.mcp.test_bad_stdio import Pipe

LIST: JSON = {"jsonrpc": "2.0", "method": "tools/list"}


def gated(command: list[str], gate: Path) -> JSON:
    """A server that starts once the gate is there."""
    line = f"while [ ! -e {shlex.quote(str(gate))} ]; do sleep 0.02; done; exec {shlex.join(command)}"
    return {"command": ["sh", "-c", line], "placement": "unsafe_host", "pins": "first_use"}


def opened(pipe: Pipe) -> None:
    assert pipe.ask(gateway.initialize())["result"]["protocolVersion"] == gateway.HANDSHAKE
    pipe.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')


def names(answer: JSON) -> list[str]:
    return [tool["name"] for tool in answer["result"]["tools"]]


def test_a_client_is_answered_before_the_servers_are_up(tmp_path: Path, hostile_command: list[str]) -> None:
    gate = tmp_path / "gate"
    contracts = gateway.tools("slow", "echo", timeout_seconds=120)
    files = gateway.write(tmp_path, gateway.configuration({"slow": gated(hostile_command, gate)}, contracts))
    pipe = Pipe(files)
    opened(pipe)
    pipe.write(json.dumps({**LIST, "id": "first"}).encode())
    gate.touch()
    assert "echo" in names(pipe.answer("first")), "nothing is known of the server, so the list waits for it"
    assert pipe.close() == 0
    gate.unlink()
    pipe = Pipe(files)
    opened(pipe)
    assert "echo" in names(pipe.ask(LIST)), "as it was accepted before"
    pipe.write(json.dumps({**gateway.call("echo", {"text": "well"}), "id": "call"}).encode())
    gate.touch()
    assert text_of(pipe.answer("call")["result"]) == "well"
    assert pipe.close() == 0


def test_tools_that_come_later_are_told_of(tmp_path: Path, hostile_command: list[str]) -> None:
    gate, other = tmp_path / "gate", tmp_path / "other"
    other.touch()
    servers = {"slow": gated(hostile_command, gate)}
    files = gateway.write(tmp_path, gateway.configuration(servers, gateway.tools("slow", "echo")))
    gate.touch()
    pipe = Pipe(files)
    opened(pipe)
    assert "slow" not in names(pipe.ask(LIST))
    assert pipe.close() == 0
    gate.unlink()
    contracts = {**gateway.tools("slow", "echo"), **gateway.tools("late", "slow")}
    gateway.write(tmp_path, gateway.configuration({**servers, "late": gated(hostile_command, other)}, contracts))
    pipe = Pipe(files)
    opened(pipe)
    assert "slow" in names(pipe.ask(LIST)), "the new server is up, the known one is not"
    gate.touch()
    assert pipe.close() == 0


def test_a_call_starts_only_the_server_that_it_needs(tmp_path: Path, hostile_command: list[str]) -> None:
    there = tmp_path / "there"
    there.touch()
    servers = {"near": gated(hostile_command, there), "never": gated(hostile_command, tmp_path / "never")}
    contracts = {**gateway.tools("near", "echo"), **gateway.tools("never", "slow")}
    files = gateway.write(tmp_path, gateway.configuration(servers, contracts))
    words = gateway.command("call", "echo", "--args", '{"text": "well"}', "--config", files.config)
    ended = subprocess.run(words, capture_output=True, text=True, timeout=tooling.PATIENCE, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "well"), ended.stderr
