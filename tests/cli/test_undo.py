"""`ringfence undo`: what it says first, in which order it goes back, and that each step is a governed call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import gateways

CONFIG = """version: 1
gateway: {{state: ./state, approval_wait_seconds: 0.2}}
servers: {{notes: {{command: {command}, pins: first_use}}}}
capabilities:
  add_note: {{mode: write, record: full, effects: {{compensate: remove_note}}}}
  add_for_good: {{mode: write, tool: add_note}}
  remove_note: {{mode: write}}
policy: {{preset: standard, rules: [{rules}]}}
"""
DENY = "{id: no, action: deny, tool_patterns: [remove_note], when: 'args.number == 10'}"


def made(path: Path, tool: str, number: int) -> str:
    arguments = json.dumps({"title": "t", "number": number})
    ended = gateways.run("call", tool, "--args", arguments, "--config", path, "--json")
    assert ended.returncode == 0, ended.stderr
    return str(json.loads(ended.stdout)["facts"]["call_id"])


def undone(path: Path, *words: str) -> tuple[int, Any]:
    ended = gateways.run("undo", *words, "--config", path, "--yes", "--json")
    assert "Traceback" not in ended.stderr
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
    removed = [body for body in gateways.finished(path.parent / "state") if body["call"]["tool"] == "remove_note"]
    assert again == 0
    assert [body["call"]["parent"] for body in removed] == [second, first, first]
    assert [body["replayed_from"] is not None for body in removed] == [False, False, True]


def test_what_cannot_be_undone_is_said_before_anything_runs(path: Path) -> None:
    kept, lost = made(path, "add_note", 1), made(path, "add_for_good", 2)
    told = gateways.run("undo", kept, lost, "--plan", "--config", path)
    assert told.returncode == 1
    assert f"{lost} (add_for_good): CANNOT BE UNDONE: its contract names nothing" in told.stdout
    assert f'{kept} (add_note): remove_note {{"number":10}}' in told.stdout
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
    made(path, "add_note", 1)
    assert gateways.run("undo", "call_zzz", "--plan", "--config", path).returncode == 2
