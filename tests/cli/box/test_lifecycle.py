"""`ringfence box create|list|pause|resume|snapshot|fork|rm|volume`, as a person types them."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests import tooling
from tests.gateways import finished, run, write


def told(*words: str) -> Any:
    ended = run("box", *words, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_box_is_made_as_it_was_asked_for(box: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    made = told(
        "create", "--memory", "0.125G", "--pids", "20", "--timeout", "5", "--lifetime", "600", "--idle", "0",
        "--env", "A=b", "--metadata", "job=7", "--input", str(tmp_path / "in.txt"), "--retain", "none",
    )  # fmt: skip
    assert (made["state"], made["metadata"]) == ("running", {"job": "7"})
    limits = made["limits"]
    assert (limits["memory_bytes"], limits["processes"], limits["wall_seconds"]) == (128 << 20, 20, 5)
    assert limits["disk_bytes"] == 512 << 20, "what was not said is as configured"
    shown = run("box", "exec", made["id"], "--shell", "cat input/in.txt; echo $A")
    assert shown.stdout == "xb\n"
    assert run("box", "rm", made["id"]).stdout == f"{made['id']}\n"
    assert made["id"] not in [each["id"] for each in told("list")]
    assert ("stopped", "closed") in [(each["state"], each["why"]) for each in told("list", "--all")]


def test_boxes_are_listed_with_their_states(box: str) -> None:
    assert run("box", "pause", box).stdout == f"{box} paused\n"
    line = next(line for line in run("box", "list").stdout.splitlines() if line.startswith(box))
    assert "paused" in line and "of=tests" in line
    assert told("resume", box)["state"] == "running"
    assert [each["state"] for each in told("list") if each["id"] == box] == ["running"]


def test_a_port_is_shown_on_loopback() -> None:
    box = told("create", "--port", "web=8000")["id"]
    server = "mkdir site && cd site && echo hello > x && exec python3 -m http.server 8000 --bind 127.0.0.1"
    assert run("box", "exec", box, "--background", "--shell", server).returncode == 0
    shown = told("expose", box, "8000")
    assert (shown["box"], shown["port"]) == (box, 8000)
    assert told("expose", box, "web")["at"] == shown["at"]
    assert run("box", "expose", box, "8001").returncode != 0
    assert run("box", "expose", box, "8000").stdout == f"{shown['at']}\n", "it stays when the command ends"
    until = time.monotonic() + tooling.PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"http://{shown['at']}/x", timeout=60) as answer:
                assert answer.read() == b"hello\n"
            return
        except OSError:
            assert time.monotonic() < until, "nobody answers"
            time.sleep(0.1)


def test_a_box_may_reach_whom_it_was_made_for() -> None:
    made = told("create", "--allow", "api.example:443", "--allow", "10.0.0.1")
    shown = run("box", "exec", made["id"], "--shell", "echo $https_proxy")
    assert shown.stdout == "http://127.0.0.1:3128\n"
    assert run("box", "create", "--allow", "a b").returncode == 2
    run("box", "rm", made["id"])


def test_what_a_box_has_is_kept_and_given_to_others() -> None:
    box = told("create")["id"]
    run("box", "exec", box, "--shell", "echo kept > file")
    taken = told("snapshot", box, "--name", "ready")
    assert taken["name"] == "ready" and taken["files"] == 1
    assert "ready" in run("box", "list", "--snapshots").stdout
    forks = run("box", "fork", box, "2")
    assert forks.returncode == 0, forks.stderr
    made = [*forks.stdout.split(), run("box", "create", "--snapshot", "ready").stdout.strip()]
    assert len(set(made)) == 3
    assert {run("box", "files", "get", each, "file", "-").stdout for each in made} == {"kept\n"}
    removed = told("rm", box, *made, "--snapshot", "ready")["removed"]
    assert removed == [box, *made, "ready"]
    gone = run("box", "create", "--snapshot", "ready")
    assert gone.returncode == 2 and "'ready'" in gone.stderr


def test_a_volume_is_made_mounted_and_removed(box: str) -> None:
    assert told("volume", "books", "--size", "8M")["max_bytes"] == 8 << 20
    made = run("box", "create", "--volume", "books:/workspace/books").stdout.strip()
    assert run("box", "exec", made, "--shell", "echo x > books/one").returncode == 0
    run("box", "rm", made)
    assert "books" in run("box", "list", "--volumes").stdout
    other = run("box", "create", "--volume", "books:/workspace/read:ro").stdout.strip()
    assert run("box", "exec", other, "--shell", "cat read/one; echo y > read/two").returncode != 0
    run("box", "rm", other, "--volume", "books")
    assert told("list", "--volumes") == []


WRONG = {
    "no such box": (("pause", "box_nowhere"), 2, "box_nowhere"),
    "a backend that is not there": (("create", "--backend", "microsandbox"), 125, "microsandbox is not built yet"),
    "a template that is not there": (("create", "--template", "dta"), 2, "there is no template"),
    "a volume as it is not written": (("create", "--volume", "x"), 2, "NAME:AT"),
    "words as they are not written": (("create", "--metadata", "x"), 2, "--metadata x: write it as NAME=VALUE"),
    "nothing to remove": (("rm",), 2, "nothing to remove"),
    "what cannot be kept": (("create", "--retain", "all"), 2, "--retain"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_sentence(case: str, box: str) -> None:
    words, code, text = WRONG[case]
    ended = run("box", *words)
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1), ended.stderr
    assert text in ended.stderr


def test_policy_and_record_are_those_of_the_configuration(box: str, tmp_path: Path) -> None:
    rules = "[{id: none-here, action: deny, tool_patterns: [open_session]}]"
    path = write(tmp_path, f"gateway: {{state: ./state}}\npolicy: {{rules: {rules}}}\n")
    ended = run("box", "create", "--config", path)
    assert (ended.returncode, ended.stdout) == (126, "") and "none-here" in ended.stderr
    (record,) = finished(tmp_path / "state")
    assert (record["call"]["tool"], record["call"]["origin"], record["status"]) == ("open_session", "cli", "denied")
