"""Ports of a session: its owner gets in, nobody else does, and nothing of it outlives the session."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Refused, Sandbox
from ringfence.compose.runs import default_config, own_contracts
from ringfence.core import own_ports
from ringfence.core.box import Listening
from ringfence.core.errors import Unavailable
from ringfence.sandbox.sessions import forwarding
from ringfence.sandbox.sessions.concurrency import UseCounter
from ringfence.sandbox.sessions.forwarding import PortForwards
from ringfence.sandbox.tools.toolkit import all_tools
from ringfence.sdk import engine
from tests import boxing, gateways, tooling

PYTHON = "/usr/bin/python3"
SERVER = "mkdir site && cd site && echo hello > x && exec python3 -m http.server 8000 --bind 127.0.0.1"
REACHED = """
import time, urllib.request
def reached():
    while True:
        try:
            return urllib.request.urlopen("http://localhost:8000/x").read()
        except OSError:
            time.sleep(0.02)  # until the step is over
reached()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    boxing.need_boxes()
    engine.close()
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path
    engine.close()


def fetched(place: str) -> bytes:
    """From a server that may still be starting."""
    until = time.monotonic() + tooling.PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"http://{place}/x", timeout=60) as answer:
                return bytes(answer.read())
        except OSError:
            assert time.monotonic() < until, "nobody answers"
            time.sleep(0.1)


def test_what_listens_in_a_sandbox_is_shown_to_its_owner_until_it_ends(home: Path) -> None:
    with Sandbox.create(listen=True) as box:
        box.commands.run(SERVER, background=True)
        place = box.get_host(8000)
        assert place == box.get_host(8000) and place.startswith("127.0.0.1:")
        assert fetched(place) == b"hello\n"
        nobody = box.get_host(8001)
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(f"http://{nobody}/", timeout=60)
        with pytest.raises(Refused):
            box.get_host(0)
        asked = gateways.finished(home / ".local/state/ringfence")
        assert [record["status"] for record in asked if record["call"]["tool"] == "expose_port"][:2] == ["success"] * 2
    assert knocked(place) == b""


def knocked(place: str) -> bytes:
    """What is heard at a door; nothing where there is none."""
    host, _, port = place.partition(":")
    try:
        with socket.create_connection((host, int(port)), 60) as way:
            way.sendall(b"GET /x HTTP/1.0\r\n\r\n")
            return way.recv(100)
    except OSError:
        return b""


def test_another_user_does_not_get_in(home: Path) -> None:
    if os.geteuid() != 0 or not os.path.exists(PYTHON):
        pytest.skip("only root can be somebody else, with an interpreter that everybody may run")
    with Sandbox.create(listen=True) as box:
        box.commands.run(SERVER, background=True)
        place = box.get_host(8000)
        fetched(place)
        code = f"import socket\n{inspect.getsource(knocked)}\nprint(knocked({place!r}))"
        other = {"user": 1_900_000_017, "group": 1_900_000_017, "extra_groups": (), "cwd": "/"}
        done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=120, check=False, **other)  # type: ignore[call-overload]
    assert done.stdout == "b''\n", done


LISTENER = """python3 -u -c '
import socket
with socket.create_server(("127.0.0.1", 8000)) as listener:
    while True:
        with listener.accept()[0] as one:
            data = one.recv(100)
            with open("/workspace/heard", "ab") as heard:
                heard.write(data)
            one.sendall(data)
'
"""


def test_another_user_who_speaks_and_leaves_is_not_heard(home: Path) -> None:
    if os.geteuid() != 0 or not os.path.exists(PYTHON):
        pytest.skip("only root can be somebody else, with an interpreter that everybody may run")
    with Sandbox.create(listen=True) as box:
        box.commands.run(LISTENER, background=True)
        host, _, port = box.get_host(8000).partition(":")
        code = (
            "import socket\nfor _ in range(200):\n"
            f"    with socket.create_connection(({host!r}, {port})) as one: one.sendall(b'stranger ')"
        )
        other = {"user": 1_900_000_017, "group": 1_900_000_017, "extra_groups": (), "cwd": "/"}
        subprocess.run([PYTHON, "-c", code], timeout=120, check=True, **other)  # type: ignore[call-overload]
        # Who comes after all of them is served after all of them.
        for _ in range(600):
            try:
                with socket.create_connection((host, int(port)), 30) as one:
                    one.sendall(b"owner")
                    if one.recv(100) == b"owner":
                        break
            except OSError:
                pass
            time.sleep(0.1)
        heard = box.files.read("/workspace/heard")
        assert "owner" in heard and "stranger" not in heard
        log = (home / ".local/state/ringfence/keeper/log").read_text()
        assert "connections to port 8000 of session" in log and len(log.splitlines()) < 100
        # And the signed record of the next step has their number.
        facts = box.run_code("pass").facts
        assert facts["late"]["refused_connections"] == 200
        assert "200 connections of other users to its ports were refused" in facts["explanation"]
        (step,) = (r for r in gateways.finished(home / ".local/state/ringfence") if r["facts"].get("late"))
        assert step["facts"]["late"] == facts["late"] and step["call"]["tool"] == "execute_python"


def test_what_listens_is_reached_in_its_box_and_shown_only_where_that_was_said(home: Path) -> None:
    with Sandbox.create() as box:
        box.commands.run(SERVER, background=True)
        done = box.run_code(REACHED)
        assert done.text == "b'hello\\n'", done.error
        assert done.facts["denials"] == {}
        with pytest.raises(Refused, match="listen: allowed"):
            box.get_host(8000)


def test_only_named_ports_are_shown_where_they_have_names(home: Path) -> None:
    with Sandbox.create(listen={"web": 8000, "other": 8002}) as box:
        box.commands.run(SERVER, background=True)
        place = box.get_host("web")
        assert box.get_host(8000) == place
        assert fetched(place) == b"hello\n"
        for wrong in (8001, "wbe"):
            with pytest.raises(Refused, match=r"other \(8002\), web \(8000\)"):
                box.get_host(wrong)


@pytest.mark.parametrize("wrong", [{"a": 0}, {"a": True}, {"a": 65_536}, {1: 80}, "allowed", {}])
def test_what_is_no_port_is_refused_before_anything_is_made(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Sandbox(listen=wrong)


def test_a_contract_shows_the_ports_it_names_when_a_session_is_opened(tmp_path: Path) -> None:
    boxing.need_boxes()
    path = gateways.write(
        tmp_path,
        "gateway: {state: ./state}\n"
        "capabilities: {open_session: {transport: sandboxed_exec, approval: none, listen: {web: 8000}}}\n",
    )
    answer = json.loads(gateways.run("call", "open_session", "--config", path, "--json").stdout)
    assert answer["status"] == "success", answer
    session, place = answer["structured"]["session"], answer["structured"]["ports"]["web"]
    arguments = json.dumps({"session": session, "command": SERVER, "background": True})
    gateways.run("call", "run_shell", "--args", arguments, "--config", path, "--json")
    assert fetched(place) == b"hello\n"
    gateways.run("call", "close_session", "--args", json.dumps({"session": session}), "--config", path)
    assert knocked(place) == b""


def test_an_agent_has_it_only_where_a_contract_is_for_it(tmp_path: Path) -> None:
    assert "expose_port" not in own_contracts(default_config())
    assert "expose_port" in own_contracts(default_config(), tools=all_tools())
    boxing.need_boxes()
    path = gateways.write(
        tmp_path, "gateway: {state: ./state}\ncapabilities: {expose_port: {transport: sandboxed_exec}}\n"
    )
    arguments = json.dumps({"session": "box_nowhere", "port": 8000})
    answer = json.loads(gateways.run("call", "expose_port", "--args", arguments, "--config", path, "--json").stdout)
    assert answer["reason_code"] == "unknown_session"


@pytest.mark.anyio
async def test_a_port_that_boxes_could_not_be_kept_from_does_not_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    announce, failing, tried = own_ports.announce, 1, list[int]()

    def held_by_others(address: str, port: int) -> socket.socket | None:
        tried.append(port)
        if len(tried) <= failing:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.bind(own_ports._mark(address, port))
                return announce(address, port)
        return announce(address, port)

    async def no_way(port: int) -> socket.socket:
        raise OSError

    monkeypatch.setattr(own_ports, "announce", held_by_others)
    ports = PortForwards("s", Listening(True), UseCounter(), no_way, lambda _: None)
    try:
        first = await ports.open(8000)
        assert first == tried[-1] and len(tried) == 2 and not listens(tried[0])
        failing = 1000
        with pytest.raises(Unavailable, match="another user of this machine has taken the name that marks it"):
            await ports.open(8001)
        assert not any(listens(port) for port in tried if port != first)
        failing = 0
        assert listens(await ports.open(8001))
    finally:
        ports.close()


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("answers", [True, False])
async def test_a_client_that_is_gone_gives_its_place_back_though_the_box_holds_on(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(forwarding, "_SILENCE_SECONDS", tooling.PATIENCE if answers else 0.01)
    over = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # the client has said all
        if answers:
            writer.write(b"late")
        else:
            await over.wait()
        writer.close()

    async def way(port: int) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", port))
        made.setblocking(False)
        return made

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as box:
        port = box.sockets[0].getsockname()[1]
        ports = PortForwards("s", Listening(True), UseCounter(), way, lambda _: os.getuid())
        shown = await ports.open(port)
        reader, writer = await asyncio.open_connection("127.0.0.1", shown)
        writer.write_eof()
        assert await reader.read() == (b"late" if answers else b"")
        await tooling.until(lambda: not ports._open[port]._connections)
        writer.close()
        over.set()
        ports.close()
