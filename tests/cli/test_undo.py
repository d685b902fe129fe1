"""`ringfence undo`: what it says first, in which order it goes back, and that each step is a governed call."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests import gateways

CONFIG = """version: 1
gateway: {{state: ./state, approval_wait_seconds: 0.2}}
servers: {{notes: {{command: {command}, pins: first_use, placement: unsafe_host, start_timeout_seconds: 200}}}}
capabilities:
  add_note: {{mode: write, record: full, effects: {{compensate: remove_note}}, timeout_seconds: 200}}
  add_for_good: {{mode: write, tool: add_note, timeout_seconds: 200}}
  remove_note: {{mode: write, timeout_seconds: 200}}
  lock_note: {{mode: read, timeout_seconds: 200}}
policy: {{preset: standard, rules: [{rules}]}}
"""
DENY = "{id: no, action: deny, tool_patterns: [remove_note], when: 'args.number == 10'}"


def ran(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command that needs the server; again while that is still starting, as a busy machine may let it."""
    for _ in range(20):
        ended = gateways.run(*words)
        if ended.returncode != 125 or "still starting" not in ended.stdout + ended.stderr:
            break
    assert "Traceback" not in ended.stderr
    return ended


def called(tool: str, arguments: dict[str, Any], *words: str | Path) -> str:
    ended = ran("call", tool, "--args", json.dumps(arguments), *words, "--json")
    assert ended.returncode == 0, ended.stderr
    return str(json.loads(ended.stdout)["facts"]["call_id"])


def made(path: Path, tool: str, number: int) -> str:
    return called(tool, {"title": "t", "number": number}, "--config", path)


def undone(path: Path, *words: str | Path) -> tuple[int, Any]:
    ended = ran("undo", *words, "--config", path, "--yes", "--json")
    return ended.returncode, json.loads(ended.stdout)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return gateways.write(tmp_path, CONFIG.format(command=gateways.server("notes_server.py"), rules=""))


def test_calls_are_undone_the_last_first_and_once(path: Path) -> None:
    first, second = made(path, "add_note", 1), made(path, "add_note", 2)
    code, steps = undone(path, first, second)
    assert code == 0
    assert [(step["call_id"], step["arguments"], step["status"]) for step in steps] == [
        (second, {"number": 20}, "success"),
        (first, {"number": 10}, "success"),
    ]
    again, steps = undone(path, first)
    assert (again, steps) == (0, [])
    told = gateways.run("undo", first, "--plan", "--config", path)
    removed = [body for body in gateways.finished(path.parent / "state") if body["call"]["tool"] == "remove_note"]
    assert [body["call"]["parent"] for body in removed] == [second, first]
    by = removed[1]["call"]["id"]
    assert f"nothing to undo: it was undone by {by}" in told.stdout
    assert f"undid it with {by}" in gateways.run("audit", "explain", first, "--config", path).stdout


def test_what_cannot_be_undone_is_said_before_anything_runs(path: Path) -> None:
    kept, lost = made(path, "add_note", 1), made(path, "add_for_good", 2)
    told = gateways.run("undo", kept, lost, "--plan", "--config", path)
    assert told.returncode == 1
    lines = told.stdout.splitlines()
    assert lines[0].startswith(f"{lost} (add_for_good by local, ")
    assert "): CANNOT BE UNDONE: its contract names nothing" in lines[0]
    assert lines[1].startswith(f"{kept} (add_note by local, ")
    assert lines[1].endswith('): remove_note {"number":10}')
    unasked = gateways.run("undo", kept, "--config", path)
    assert unasked.returncode != 0
    assert [body["call"]["tool"] for body in gateways.finished(path.parent / "state")] == ["add_note", "add_for_good"]


def test_it_stops_at_the_first_step_that_is_refused(tmp_path: Path) -> None:
    path = gateways.write(tmp_path, CONFIG.format(command=gateways.server("notes_server.py"), rules=DENY))
    first, second = made(path, "add_note", 2), made(path, "add_note", 1)
    code, steps = undone(path, first, second)
    assert (code, [(step["call_id"], step["status"]) for step in steps]) == (126, [(second, "denied")])


def test_calls_have_to_be_named(path: Path) -> None:
    assert gateways.run("undo", "--config", path).returncode == 2
    assert gateways.run("undo", "--until", "2026-03-01", "--config", path).returncode == 2
    both = gateways.run("undo", "call_1", "--agent", "local", "--config", path)
    assert both.returncode == 2 and "--as NAME" in both.stderr
    made(path, "add_note", 1)
    assert gateways.run("undo", "call_zzz", "--plan", "--config", path).returncode == 2


AGENTS = """agents:
  ann: {capabilities: ["*"]}
  bob: {capabilities: ["*"]}
"""


def test_a_group_is_of_an_agent_and_of_a_time_and_leaves_out_what_undid_others(tmp_path: Path) -> None:
    text = CONFIG.format(command=gateways.server("notes_server.py"), rules="") + AGENTS
    path = gateways.write(tmp_path, text)

    def add(agent: str, number: int) -> str:
        return called("add_note", {"title": "t", "number": number}, "--agent", agent, "--config", path)

    early = add("ann", 1)
    (ended,) = gateways.finished(path.parent / "state")
    after = datetime.fromtimestamp(ended["at"] + 0.001, UTC).isoformat()
    others, late = add("bob", 2), add("ann", 3)
    code, steps = undone(path, "--agent", "ann", "--since", after, "--as", "bob")
    assert (code, [step["call_id"] for step in steps]) == (0, [late])
    code, steps = undone(path, "--agent", "ann", "--until", after, "--as", "bob")
    assert (code, [step["call_id"] for step in steps]) == (0, [early])
    # Bob removed ann's two notes, and that is nothing of his to take back.
    code, steps = undone(path, "--agent", "bob", "--as", "bob")
    assert (code, [step["call_id"] for step in steps]) == (0, [others])
    nobody = gateways.run("undo", "--agent", "eve", "--config", path)
    assert nobody.returncode == 1 and "no call on record is one of these" in nobody.stderr


def test_what_a_servers_memory_has_only_its_own_gateway_undoes(tmp_path: Path) -> None:
    path = gateways.write(tmp_path, CONFIG.format(command=gateways.server("notes_server.py", "--remember"), rules=""))
    with gateways.serve(path) as served:
        through = ("--url", served.url)
        first = called("add_note", {"title": "t", "number": 1}, *through)
        second = called("add_note", {"title": "t", "number": 2}, *through)
        code, steps = undone(path, second)
        assert (code, [step["status"] for step in steps]) == (1, ["failed"])
        called("lock_note", {"number": 10, "locks": True}, *through)
        code, steps = undone(path, first, second, *through)
        assert (code, [step["status"] for step in steps]) == (1, ["success", "failed"])
        # What failed is tried anew, once it can be done, and what was undone is not.
        called("lock_note", {"number": 10, "locks": False}, *through)
        code, steps = undone(path, first, second, *through)
        assert (code, [(step["call_id"], step["status"]) for step in steps]) == (0, [(first, "success")])
        story = gateways.records(served.state, call_id=first, kind="undo_tried")
        assert [body["status"] for body in story] == ["failed", "success"]


def test_who_undoes_through_a_gateway_is_said_by_a_token(path: Path) -> None:
    wrong = gateways.run("undo", "call_1", "--url", "http://127.0.0.1:1/mcp", "--as", "ann", "--config", path)
    assert wrong.returncode == 2 and "a token says which agent it is" in wrong.stderr
    stray = gateways.run("undo", "call_1", "--token-file", path, "--config", path)
    assert stray.returncode == 2 and "--token-file is for --url" in stray.stderr
