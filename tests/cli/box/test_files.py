"""`ringfence box files`: in, out, listed, removed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cli.terminals import at_terminal
from tests.gateways import ringfence, run


def test_files_go_in_are_listed_and_come_out(box: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a").write_bytes(b"\xff" * 100_000)
    (source / "out").symlink_to("/etc/passwd")
    put = run("box", "files", "put", box, source, "data")
    assert put.returncode == 0 and put.stderr.startswith("1 file, "), put.stderr
    assert "left out: out: it is a link that leads out of the folder" in put.stderr
    listed = run("box", "files", "ls", box, "data", "--depth", "2").stdout.splitlines()
    assert [line.split()[-1] for line in listed[1:]] == ["/workspace/data/sub", "/workspace/data/sub/a"]
    shown = json.loads(run("box", "files", "ls", box, "data/sub", "--json").stdout)
    assert [(each["name"], each["bytes"], each["kind"]) for each in shown] == [("a", 100_000, "file")]

    assert run("box", "files", "get", box, "data", tmp_path / "back").returncode == 0
    assert (tmp_path / "back/sub/a").read_bytes() == b"\xff" * 100_000
    assert run("box", "files", "get", box, "data/sub/a", cwd=tmp_path).returncode == 0
    assert (tmp_path / "a").stat().st_size == 100_000
    moved = json.loads(run("box", "files", "get", box, "data", tmp_path / "x.tar", "--json").stdout)
    assert moved["files"] == 1 and (tmp_path / "x.tar").stat().st_size == moved["bytes"]

    assert run("box", "files", "rm", box, "data").returncode == 0
    gone = run("box", "files", "get", box, "data", "-")
    assert gone.returncode == 2 and "data" in gone.stderr and gone.stderr.count("\n") == 1


def test_a_file_comes_from_stdin_and_goes_to_stdout(box: str) -> None:
    data = b"\0\xff" * 1_000_000
    put = subprocess.run(ringfence("box", "files", "put", box, "-", "d/piped"), input=data, check=False)
    got = subprocess.run(ringfence("box", "files", "get", box, "d/piped", "-"), capture_output=True, check=False)
    assert (put.returncode, got.stdout == data) == (0, True), got.stderr


def test_a_terminal_gets_nothing_of_a_file_that_it_would_act_upon(box: str) -> None:
    title = b"a\x1b]0;owned\x07\x1b[c\xc3"
    subprocess.run(ringfence("box", "files", "put", box, "-", "steering"), input=title + b"\xa9\n", check=True)
    with at_terminal("box", "files", "get", box, "steering", "-") as terminal:
        assert terminal.end() == 0
    assert "\x1b" not in terminal.shown and "\x07" not in terminal.shown
    assert "owned" in terminal.shown and "é" in terminal.shown, terminal.shown


def test_nothing_outside_of_the_box_can_be_named(box: str, tmp_path: Path) -> None:
    assert "box:/home/user" in run("box", "files", "get", box, "/etc/passwd", "-").stdout
    for path in ("/etc/shadow", f"../..{__file__}"):
        ended = run("box", "files", "get", box, path, tmp_path / "x")
        assert ended.returncode == 2 and not (tmp_path / "x").exists()
    missing = run("box", "files", "put", box, tmp_path / "missing", "x")
    assert missing.returncode == 125 and "No such file" in missing.stderr
