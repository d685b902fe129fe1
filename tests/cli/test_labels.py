"""Labels from the command line: they stick to sessions and what is made of them, and can be tried beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import boxing, gateways

CONFIG = """version: 1
gateway: {{state: ./state, approval_wait_seconds: 0.2}}
servers: {{notes: {{command: {command}, pins: first_use}}}}
capabilities:
  show_note: {{mode: read, labels: [private, untrusted]}}
  add_note:
    mode: write
    labels: [{{label: external_sink, when: 'args.title.startsWith("out:")'}}]
policy:
  preset: standard
  label_seconds: {seconds}
  rules:
    - {{id: flow, action: ask, taint_labels: [private], conditions: {{contract.labels: external_sink}}}}
  cases:
    - {{name: out, tool: add_note, args: {{title: "out:x", number: 1}}, taint: [private], expect: ask, rules: [flow]}}
    - {{name: before, tool: add_note, args: {{title: "out:x", number: 1}}, expect: allow}}
    - {{name: inside, tool: add_note, args: {{title: x, number: 1}}, taint: [private], expect: allow}}
"""


def written(folder: Path, seconds: float) -> Path:
    return gateways.write(folder, CONFIG.format(command=gateways.server("notes_server.py"), seconds=seconds))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path, 86_400)


def called(configured: Path, tool: str, **arguments: Any) -> Any:
    ended = gateways.run("call", tool, "--args", json.dumps(arguments), "--config", configured, "--json")
    return json.loads(ended.stdout)


def test_cases_have_labels(path: Path) -> None:
    tried = gateways.run("policy", "test", path)
    assert tried.returncode == 0, tried.stdout + tried.stderr


def test_what_would_happen_under_labels_can_be_asked(path: Path) -> None:
    called(path, "add_note", title="in", number=1)  # from here on its definition is accepted
    words = ("can", "local", "add_note", "--config", path, "--args", '{"title": "out:x", "number": 1}')
    held = gateways.run(*words, "--labels", "private")
    assert held.returncode == 126
    assert "  labels     external_sink; in force: private" in held.stdout.splitlines()
    assert gateways.run(*words).returncode == 0
    unknown = gateways.run("can", "local", "add_note", "--config", path, "--labels", "private")
    assert unknown.returncode == 1
    assert "perhaps external_sink" in unknown.stdout


def test_labels_stick_to_a_session_its_snapshots_and_forks(path: Path) -> None:
    boxing.need_boxes()
    session = called(path, "open_session")["structured"]["session"]
    clean = called(path, "list_processes", session=session)
    assert "labels" not in clean["facts"]
    assert called(path, "show_note", title="x")["facts"]["labels"]["result"] == ["private", "untrusted"]
    called(path, "write_file", session=session, path="/workspace/a", text="x")
    snapshot = called(path, "snapshot_session", session=session)["structured"]["snapshot"]
    (fork,) = called(path, "fork_session", session=session, count=1)["structured"]["sessions"]
    written(path.parent, 0.001)  # what the agent read is too long ago by now; what lies in boxes is not
    both = ["private", "untrusted"]
    forgotten = called(path, "add_note", title="in", number=1)
    assert "labels" not in forgotten["facts"]
    assert called(path, "list_processes", session=session)["facts"]["labels"]["result"] == both
    assert called(path, "list_processes", session=fork["session"])["facts"]["labels"]["result"] == both
    assert called(path, "open_session", snapshot=snapshot)["facts"]["labels"]["result"] == both
