"""`ringfence audit replay`: real runs, on record in full, run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import boxing, gateways

CONFIG = """
version: 1
gateway: {state: ./state}
policy: {preset: permissive}
capabilities:
  execute_python: {transport: sandboxed_exec, mode: high_risk, approval: none, record: full}
  run_shell: {transport: sandboxed_exec, mode: high_risk, approval: none, record: full}
  brief: {transport: sandboxed_exec, tool: run_shell, mode: high_risk, approval: none}
  lent: {transport: sandboxed_exec, tool: run_shell, mode: high_risk, approval: none, record: full,
         filesystem: {mounts: [{host: ./lent, at: /data, mode: rw}]}}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    boxing.need_boxes()
    folder = tmp_path_factory.mktemp("replay")
    (folder / "lent").mkdir()
    gateways.write(folder, CONFIG)
    return folder


def made(here: Path, tool: str, **arguments: str) -> str:
    done = gateways.run("call", tool, "--args", json.dumps(arguments), "--config", here / "ringfence.yaml", "--json")
    found = gateways.finished(here / "state")[-1]
    assert found["call"]["tool"] == tool, done.stdout + done.stderr
    return str(found["call_id"])


def again(here: Path, call: str, *more: str) -> Any:
    return gateways.run("audit", "replay", call, "--config", here / "ringfence.yaml", *more)


def told(here: Path, tool: str, **arguments: str) -> dict[str, Any]:
    done = again(here, made(here, tool, **arguments), "--json")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["same"] is (done.returncode == 0)
    return found


def kinds(found: dict[str, Any]) -> dict[str, list[str]]:
    return {each["what"]: each["kinds"] for each in found["differences"]}


def test_a_program_that_always_does_the_same_is_the_same(here: Path) -> None:
    code = "import os\nprint(sum(range(10)))\nopen('output/a.txt', 'w').write('x')\n6 * 7"
    found = told(here, "execute_python", code=code)
    assert (found["same"], found["runs"], found["differences"], found["environment"]) == (True, 1, [], [])


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("import time\nprint(time.time())", {"stdout": ["clock"]}),
        ("from datetime import datetime\nprint(repr(datetime.now()))", {"stdout": ["clock"]}),
        ("import uuid, secrets\nprint(uuid.uuid4(), secrets.token_hex())", {"stdout": ["randomness"]}),
        ("print(hash('a text'))", {"stdout": ["randomness"]}),
        ("import os, time\nprint(time.time_ns(), os.urandom(8))", {"stdout": ["clock", "randomness"]}),
        (
            "import random, time\nopen('output/x', 'w').write(str(random.random()))\nprint(time.time())",
            {"stdout": ["clock"], "/workspace/output/x": ["randomness"]},
        ),
    ],
)
def test_what_differs_is_told_by_its_cause(here: Path, code: str, wanted: dict[str, list[str]]) -> None:
    assert kinds(told(here, "execute_python", code=code)) == wanted


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("date +%s.%N", {"stdout": ["clock"]}),
        ("python3 -c 'import uuid; print(uuid.uuid4())'", {"stdout": ["randomness"]}),
        ("head -c 9 /dev/urandom > output/x", {"/workspace/output/x": ["files"]}),
    ],
)
def test_of_a_command_it_is_told_by_what_it_looks_like(here: Path, command: str, wanted: dict[str, list[str]]) -> None:
    assert kinds(told(here, "run_shell", command=command)) == wanted


def test_the_value_of_the_last_line_is_compared_too(here: Path) -> None:
    """Over HTTP it is shown; at a command line it is not."""
    with gateways.serve(here / "ringfence.yaml") as served:
        args = json.dumps({"code": "import random\nrandom.random()"})
        assert gateways.run("call", "execute_python", "--args", args, "--url", served.url).returncode == 0
        call = str(gateways.finished(here / "state")[-1]["call_id"])
        brief = gateways.run("call", "brief", "--args", '{"command": "echo x"}', "--url", served.url)
        assert brief.returncode == 0
        other = str(gateways.finished(here / "state")[-1]["call_id"])
        opened = gateways.run("call", "open_session", "--args", "{}", "--url", served.url, "--json")
        session = json.loads(opened.stdout)["structured"]["session"]
        step = json.dumps({"code": "1", "session": session})
        assert gateways.run("call", "execute_python", "--args", step, "--url", served.url).returncode == 0
        stepped = str(gateways.finished(here / "state")[-1]["call_id"])
        gateways.run("call", "close_session", "--args", json.dumps({"session": session}), "--url", served.url)
    done = again(here, call, "--json")
    assert kinds(json.loads(done.stdout)) == {"value": ["randomness"]}
    assert "its program was not kept" in again(here, other).stderr
    refused = again(here, stepped)
    assert refused.returncode == 2
    assert f"it was step 1 of session {session}, and went by what was in there" in refused.stderr
    assert f"ringfence audit show {stepped}" in refused.stderr


def test_without_the_key_the_log_verifies_and_says_what_it_did_not_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxing.need_boxes()
    monkeypatch.setenv("RINGFENCE_KEYS", str(tmp_path / "keys"))
    (tmp_path / "lent").mkdir()
    gateways.write(tmp_path, CONFIG)
    call = made(tmp_path, "run_shell", command="echo z")
    (tmp_path / "keys" / "payloads.key").unlink()
    verified = gateways.run("audit", "verify", "--config", tmp_path / "ringfence.yaml")
    assert (verified.returncode, "3 payloads that are kept in full could not be checked" in verified.stdout) == (
        0,
        True,
    )
    refused = again(tmp_path, call)
    assert refused.returncode != 0
    assert "was sealed with payloads.key, which is not in" in refused.stderr


def test_a_replay_writes_nothing_outside(here: Path) -> None:
    call = made(here, "lent", command="echo one >> /data/log; cat /data/log")
    assert (here / "lent" / "log").read_text() == "one\n"
    done = again(here, call)
    assert done.returncode == 1
    assert (here / "lent" / "log").read_text() == "one\n"
    assert "ran again 2 times, in fresh boxes without a network; each run is on record" in done.stdout


def test_each_run_is_on_record_under_the_call_that_it_repeats(here: Path) -> None:
    call = made(here, "run_shell", command="echo here")
    assert again(here, call).returncode == 0
    last = gateways.finished(here / "state")[-1]
    assert (last["call"]["parent"], last["status"]) == (call, "success")
    assert gateways.verified(here / "state").ok


def test_nothing_of_the_program_stands_in_the_state_in_clear(here: Path) -> None:
    made(here, "execute_python", code="print('a-marker-of-' 'the-program')  # another-marker")
    assert gateways.holding(here / "state", ["another-marker", "a-marker-of-the-program"]) == []


def test_what_cannot_be_run_again_says_why(here: Path) -> None:
    brief = again(here, made(here, "brief", command="echo x"))
    assert brief.returncode == 2
    assert "its program was not kept; write `record: full` under its capability" in brief.stderr
    secret = again(here, made(here, "run_shell", command="echo ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2))
    assert secret.returncode == 2
    assert "its arguments contained a secret, or text that looks like one" in secret.stderr
    gone = made(here, "run_shell", command="echo y")
    assert gateways.run("audit", "erase", gone, "--config", here / "ringfence.yaml").returncode == 0
    erased = again(here, gone)
    assert erased.returncode == 2
    assert "the kept program was erased" in erased.stderr
    assert gateways.run("audit", "verify", "--config", here / "ringfence.yaml").returncode == 0
