"""Where there can be no boxes: what works all the same, and what is said where it cannot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from ringfence import identity
from ringfence.cli.main import VERBS
from ringfence.core.errors import StoreError
from tests import gateways, tooling, warm

PROGRAM = tooling.ROOT / "tests" / "othersystem.py"
CONFIG = """version: 1
gateway: {state: ./state}
servers:
  desk: {url: URL, pins: first_use}
  local: {command: COMMAND, pins: first_use}
capabilities:
  search_docs: {transport: mcp, server: desk, mode: read}
  echo: {transport: mcp, server: local, mode: read}
policy: {preset: standard}
"""
HELP = f"""
import contextlib, io, typer
from ringfence.cli.main import command_line
for verb in {sorted(VERBS)!r}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        command_line([verb, "--help"])([verb, "--help"], standalone_mode=False)
    assert "Usage" in said.getvalue(), verb
    print(verb, "needs Linux" in " ".join(said.getvalue().split()))
"""
SDK = """
import asyncio, ringfence
from ringfence import AsyncSandbox, Gateway, Sandbox, Unavailable, map_code, run_code

many = lambda: map_code(["1"])
for act in (lambda: run_code("1"), many, lambda: Sandbox.create(), lambda: asyncio.run(AsyncSandbox.create())):
    try:
        act()
    except Unavailable as exc:
        print(exc.reason_code, "needs Linux" in str(exc))
"""


def command(system: str, *words: str | Path) -> list[str]:
    return [sys.executable, str(PROGRAM), system, *map(str, words)]


def ran(system: str, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return warm.run(command(system, *words), cwd=cwd)


@pytest.fixture(scope="module", params=["darwin", "win32"])
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, system: str) -> Iterator[Path]:
    path = tmp_path_factory.mktemp(f"home-{system}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(path))
        patch.setenv("COLUMNS", "200")
        yield path


def test_every_verb_has_its_help(system: str) -> None:
    shown = ran(system, "-c", HELP)
    assert shown.returncode == 0, shown.stderr
    said = dict(line.split() for line in shown.stdout.splitlines())
    assert {verb for verb, needs in said.items() if needs == "True"} == {
        "run",
        "box",
        "host",
        "doctor",
        "wrap",
        "bench",
        "image",
    }
    assert set(said) == set(VERBS)


def test_importing_costs_nothing_and_a_box_is_refused_in_words(system: str) -> None:
    shown = ran(system, "-c", SDK)
    assert (shown.returncode, shown.stdout.splitlines()) == (0, ["no_backend True"] * 4), shown.stderr


@pytest.mark.parametrize(
    "words",
    [("run", "-c", "1"), ("box", "list"), ("wrap", "--", "ls"), ("host",), ("init", "--from", "x")],
    ids=" ".join,
)
def test_what_needs_a_box_says_so(system: str, words: tuple[str, ...], tmp_path: Path) -> None:
    shown = ran(system, *("ringfence", *words), cwd=tmp_path)
    assert shown.returncode == 125
    (line,) = shown.stderr.splitlines()
    assert "needs Linux" in line and "docs/other-systems.md" in line
    assert ("WSL 2" if system == "win32" else "virtual machine") in line


@dataclass(frozen=True, slots=True)
class Elsewhere:
    url: str
    path: Path
    headers: dict[str, str]
    said: str


@pytest.fixture(scope="module")
def served(system: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    folder, port = tmp_path_factory.mktemp(system), tooling.free_port()
    with tooling.serve_fixture("helpdesk_server.py") as url:
        text = CONFIG.replace("URL", json.dumps(url)).replace("COMMAND", gateways.server("echo_server.py"))
        path = gateways.write(folder, text)
        words = command(system, "ringfence", "serve", "--config", path, "--port", str(port))
        with tooling.start_process(words, cwd=folder) as started:
            started.wait_for("Paste into .mcp.json")
            started.wait_for_port(port)
            said = started.output()
            snippet = re.search(r'^\s*(\{"mcpServers".*\})$', said, re.MULTILINE)
            assert snippet is not None, said
            headers = json.loads(snippet[1])["mcpServers"]["ringfence"]["headers"]
            yield Elsewhere(f"http://127.0.0.1:{port}/mcp", path, headers, said)


def test_remote_servers_are_served_and_what_needs_a_box_is_unavailable(system: str, served: Elsewhere) -> None:
    assert "server local is not available" in served.said and "needs Linux" in served.said
    assert "search_docs" in served.said and "execute_python" not in served.said.partition("Paste")[0].splitlines()[-1]
    shown = ran(system, "ringfence", "call", "search_docs", "--args", '{"query": "x"}', "--url", served.url, "--json")
    assert json.loads(shown.stdout)["status"] == "success", shown.stderr
    refused = ran(
        system, "ringfence", "call", "execute_python", "--args", '{"code": "1"}', "--url", served.url, "--json"
    )
    assert (refused.returncode, json.loads(refused.stdout)["reason_code"]) == (125, "no_backend"), refused.stderr
    assert "needs Linux" in refused.stdout
    boxed = ran(system, "ringfence", "call", "echo", "--args", '{"text": "x"}', "--url", served.url, "--json")
    assert json.loads(boxed.stdout)["status"] in ("unavailable", "validation_failure"), boxed.stderr


def asked(url: str, headers: dict[str, str]) -> int:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode()
    plain = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    try:
        with urlopen(Request(url, body, {**plain, **headers}), timeout=60) as answer:
            return int(answer.status)
    except HTTPError as exc:
        exc.close()
        return exc.code


def test_who_cannot_be_known_by_uid_shows_a_token(served: Elsewhere, own_home: Path) -> None:
    token = served.headers["Authorization"].removeprefix("Bearer ")
    kept = own_home / ".config/ringfence/keys" / identity.TOKEN
    assert kept.read_text() == token and kept.stat().st_mode & 0o777 == 0o600
    assert asked(served.url, served.headers) != 403
    for wrong in ({}, {"Authorization": "Bearer "}, {"Authorization": token}, {"Authorization": f"Bearer {token}x"}):
        assert asked(served.url, wrong) == 403


def test_the_log_is_written_read_and_verified(system: str, served: Elsewhere) -> None:
    listed = ran(system, "ringfence", "audit", "list", "--config", served.path)
    assert listed.returncode == 0, listed.stderr
    exported = ran(system, "ringfence", "audit", "export", "log.jsonl", "--config", served.path, cwd=served.path.parent)
    assert exported.returncode == 0, exported.stderr
    assert gateways.verified(served.path.parent / "state").ok
    checked = ran(system, "ringfence", "check", served.path)
    assert checked.returncode == 0, checked.stderr


def test_the_state_is_shown_and_pruned(system: str, served: Elsewhere) -> None:
    shown = ran(system, "ringfence", "state", "--config", served.path, "--json")
    assert shown.returncode == 0, shown.stderr
    places = {each["name"]: each for each in json.loads(shown.stdout)["places"]}
    assert places["log"]["bytes"] > 0 and places["keys"]["files"] > 0 and not places["packages"]["there"]
    pruned = ran(system, "ringfence", "state", "prune", "--config", served.path, "--yes")
    assert (pruned.returncode, pruned.stdout) == (0, "There is nothing to remove.\n"), pruned.stderr


def test_a_token_that_others_can_reach_or_that_is_none_is_refused(tmp_path: Path) -> None:
    token = identity.local_token(tmp_path)
    assert identity.local_token(tmp_path) == identity.known_token(tmp_path) == token and len(token) > 40
    (tmp_path / identity.TOKEN).chmod(0o644)
    with pytest.raises(StoreError, match="others can reach"):
        identity.local_token(tmp_path)
    (tmp_path / identity.TOKEN).chmod(0o600)
    (tmp_path / identity.TOKEN).write_text("x")
    with pytest.raises(StoreError, match="holds no token"):
        identity.local_token(tmp_path)
