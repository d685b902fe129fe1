"""`ringfence serve`: what it refuses to start with, what it tells, how it ends, and how it reads its file again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from ringfence.cli import serve
from tests import gateways, tooling
from tests.gateways import Body, Served, ringfence, run

CONFIG = """version: 1
gateway: {state: ./state}
servers: {hostile: {command: COMMAND, pins: first_use}}
capabilities:
  echo: {mode: read}
  environ: {mode: read}
policy:
  preset: standard
  rules:
    - {id: harmless, action: audit}
"""


def configured(folder: Path) -> Path:
    return gateways.write(folder, CONFIG.replace("COMMAND", gateways.server("hostile_server.py")))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with gateways.serve(configured(tmp_path_factory.mktemp("serve"))) as served:
        yield served


@pytest.mark.anyio
async def test_a_terminal_that_is_gone_or_stands_still_ends_no_gateway(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as terminal:
        with anyio.move_on_after(0.2) as given_up:
            await serve._tell("x" * 1_000_000, terminal)
        os.close(reader)
        assert given_up.cancelled_caught, "the loop went on"
        await serve._tell("a call waits", terminal)
    assert "a call waits" in caplog.text


# ── Starting ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::"])
def test_only_loopback_is_listened_on(tmp_path: Path, host: str) -> None:
    shown = run("serve", "--config", configured(tmp_path), "--host", host)
    assert shown.returncode == 2
    assert f"refusing to listen on {host}" in shown.stderr and "Traceback" not in shown.stderr
    assert not (tmp_path / "state").exists()


def test_a_taken_port_is_one_clear_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = run("serve", "--config", configured(tmp_path), "--port", str(port))
    assert shown.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; another gateway" in shown.stderr
    assert "--port" in shown.stderr
    assert "Traceback" not in shown.stderr and "Ringfence serves" not in shown.stdout


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_is_none_is_one_clear_sentence(port: str) -> None:
    shown = run("serve", "--demo", "--port", port)
    assert shown.returncode == 2
    assert "Invalid value for '--port'" in shown.stderr and "Traceback" not in shown.stderr


def test_a_broken_file_starts_nothing(tmp_path: Path) -> None:
    path = gateways.write(tmp_path, "version: 1\nserver: {}\npolicy: {preset: lax}\n")
    shown = run("serve", "--config", path)
    assert shown.returncode == 1
    assert [line.split(": ")[0] for line in shown.stderr.splitlines()] == [f"{path}:2:1", f"{path}:3:18"]
    (tmp_path / "empty").mkdir()
    missing = run("serve", cwd=tmp_path / "empty")
    assert missing.returncode == 2 and "There is no ringfence.yaml here" in missing.stderr
    assert "try without: ringfence serve --demo" in missing.stderr
    client = run("serve", "--stdio", cwd=tmp_path / "empty")
    assert client.returncode == 2 and "There is no ringfence.yaml here" in client.stderr
    assert "ringfence serve --stdio --config /" in client.stderr and "serve --stdio --demo" in client.stderr


def test_what_a_person_sees(served: Served) -> None:
    shown = served.started.output()
    tools = ["echo", "environ", *gateways.own_tools()]
    assert f"Ringfence serves {len(tools)} tools at {served.url}: {', '.join(tools)}" in shown
    assert str(served.state) in shown
    snippet = re.search(r'^\s*(\{"mcpServers".*\})$', shown, re.MULTILINE)
    assert snippet is not None
    assert json.loads(snippet[1])["mcpServers"]["ringfence"] == {"type": "http", "url": served.url}
    assert f"{served.url.removesuffix('/mcp')}/console/login#rft_" in served.started.wait_for("/console/login#")
    assert "without a box" not in shown


def test_no_link_to_the_console_goes_into_a_journal(tmp_path: Path) -> None:
    path = configured(tmp_path)
    ours, journal = socket.socketpair()
    with (
        ours,
        subprocess.Popen(
            gateways.ringfence("serve", "--config", path, "--port", "0"),
            stdout=journal.fileno(),
            stderr=subprocess.DEVNULL,
        ) as service,
    ):
        journal.close()
        ours.settimeout(tooling.PATIENCE)
        shown = b""
        while b"/console" not in shown and (data := ours.recv(65536)):
            shown += data
        service.terminate()
        while data := ours.recv(65536):
            shown += data
    assert b"ringfence console prints a link on your terminal" in shown and b"rft_" not in shown


def test_a_server_without_a_box_is_told_of_at_each_start(tmp_path: Path) -> None:
    path = configured(tmp_path)
    path.write_text(path.read_text().replace("pins: first_use", "pins: first_use, placement: unsafe_host"))
    with gateways.serve(path) as served:
        assert "without a box (isolation: none)" in served.started.output()


# ── Ending ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_its_servers(tmp_path: Path, number: signal.Signals) -> None:
    with gateways.serve(configured(tmp_path)) as served:
        asked = run("call", "environ", "--url", served.url)
        assert json.loads(asked.stdout)["pid"]  # in its box; outside it has another number
        (server,) = tooling.descendants(served.pid, "hostile_server.py")
        os.kill(served.pid, number)
        assert served.started.process.wait(60) == 0
        assert "Traceback" not in served.started.output()
        tooling.wait_until_gone(server)
        assert gateways.records(served.state)[-1]["kind"] == "chain_closed"
        assert gateways.verified(served.state).ok


# ── Reading the file again ────────────────────────────────────────────────────────────────────────


class Changing:
    """A gateway whose file is edited while it runs."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.text = served.config.read_text()
        self._before = len(self._all())

    def write(self, text: str) -> None:
        """Replace the file as editors do, at once."""
        fresh = self.served.config.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.served.config)

    def hang_up(self) -> None:
        os.kill(self.served.pid, signal.SIGHUP)

    def _all(self) -> list[Body]:
        return [body for body in gateways.records(self.served.state) if body["kind"].startswith("reload")]

    def expect(self, *kinds: str) -> Body:
        """Wait until exactly these were recorded since the test began, and return the last of them."""
        deadline = time.monotonic() + tooling.PATIENCE
        while True:
            found = self._all()[self._before :]
            if [body["kind"] for body in found] == list(kinds):
                return found[-1]
            assert time.monotonic() < deadline, f"{found}\n{self.served.started.output()}"
            time.sleep(0.05)

    def call(self, tool: str) -> tuple[int, list[str]]:
        ended = run("call", tool, "--url", self.served.url, "--json")
        return ended.returncode, json.loads(ended.stdout)["facts"]["rules"]


@pytest.fixture
def changing(served: Served) -> Iterator[Changing]:
    changing = Changing(served)
    yield changing
    changing.write(changing.text)
    changing.hang_up()
    deadline = time.monotonic() + tooling.PATIENCE
    while changing.call("echo") != (0, ["harmless", "std-read"]):
        assert time.monotonic() < deadline


def test_a_broken_file_changes_nothing_and_is_recorded(changing: Changing) -> None:
    changing.write(changing.text.replace("preset: standard", "preset: standrad"))
    refused = changing.expect("reload_refused")
    assert any("did you mean 'standard'" in problem for problem in refused["problems"])
    assert "the old one stays in force" in changing.served.started.output()
    assert changing.call("echo") == (0, ["harmless", "std-read"])
    changing.hang_up()
    changing.expect("reload_refused", "reload_refused")
    assert changing.served.started.process.poll() is None


def test_a_tightening_applies_by_itself_and_a_loosening_waits_for_sighup(changing: Changing) -> None:
    changing.write(changing.text + "    - {id: closed, action: deny, tool_patterns: [echo], priority: 500}\n")
    applied = changing.expect("reload")
    assert applied["cause"] == "file changed" and applied["digest"] != applied["before"]
    assert changing.call("echo") == (126, ["closed", "harmless", "std-read"])
    assert changing.call("environ")[0] == 0
    changing.write(changing.text)
    waiting = changing.expect("reload", "reload_waiting")
    assert any("'closed'" in loosened for loosened in waiting["loosens"])
    assert changing.call("echo")[0] == 126
    changing.hang_up()
    applied = changing.expect("reload", "reload_waiting", "reload")
    assert applied["cause"] == "SIGHUP" and applied["digest"] == waiting["digest"]
    assert changing.call("echo") == (0, ["harmless", "std-read"])  # a removed rule is gone


def test_a_definition_that_somebody_accepts_is_offered(tmp_path: Path) -> None:
    path = configured(tmp_path)
    path.write_text(path.read_text().replace(", pins: first_use", ""))
    with gateways.serve(path) as served:
        assert f"serves {len(gateways.own_tools())} tools" in served.started.output()
        assert run("call", "echo", "--url", served.url).returncode == 125
        assert run("check", path, "--accept", "--yes").returncode == 0
        deadline = time.monotonic() + tooling.PATIENCE
        while run("call", "echo", "--url", served.url).returncode != 0:
            assert time.monotonic() < deadline


def test_the_demo_has_no_file_to_read_again() -> None:
    with tooling.start_process(ringfence("serve", "--demo", "--port", "0")) as started:
        url = re.findall(r"at (http://\S+/mcp)", started.wait_for("Stop with Ctrl-C"))[0]
        os.kill(started.pid, signal.SIGHUP)
        shown = run("call", "search_docs", "--args", '{"query": "refunds"}', "--url", url)
        assert shown.returncode == 0, shown.stderr
        assert started.process.poll() is None
