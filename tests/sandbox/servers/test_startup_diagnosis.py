"""What a server said before it ended, read for what it may have lacked."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import BoxReport
from ringfence.sandbox.servers import startup_diagnosis
from ringfence.sandbox.servers.startup_diagnosis import diagnose, explain, explain_to_callers

ENDED = BoxReport("exited", 1)
SAID = [
    "FileNotFoundError: [Errno 2] No such file or directory: '{path}'",
    "Error: ENOENT: no such file or directory, open '{path}'",
    "Error: Cannot find module '{path}'",
    "cat: {path}: No such file or directory",
    "python: can't open file '{path}': [Errno 2] No such file or directory",
]
REFUSED = [
    "OSError: [Errno 30] Read-only file system: '{path}'",
    "PermissionError: [Errno 13] Permission denied: '{path}'",
    "Error: EROFS: read-only file system, open '{path}'",
    "touch: cannot touch '{path}': Read-only file system",
]


@pytest.mark.parametrize("text", SAID)
def test_a_path_that_is_there_outside(text: str, tmp_path: Path) -> None:
    there = tmp_path / "data.csv"
    there.touch()
    (want,) = diagnose(ENDED, "Traceback\n" + text.format(path=there))
    assert want.what == f"to see {there}"
    assert want.line == f"mounts: [{{host: {there}, at: {there}, mode: ro}}]"
    assert want.option == f"--mount {there}:{there}:ro"
    assert diagnose(ENDED, text.format(path=tmp_path / "absent")) == (), "what is nowhere cannot be granted"


@pytest.mark.parametrize("text", REFUSED)
def test_a_folder_to_write_to(text: str, tmp_path: Path) -> None:
    (want,) = diagnose(ENDED, text.format(path=tmp_path / "new.db"))
    assert (want.what, want.option) == (f"to write to {tmp_path}", f"--mount {tmp_path}:{tmp_path}:rw")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("Error: getaddrinfo ENOTFOUND api.example.com", "api.example.com:443"),
        ("HTTPSConnectionPool(host='api.example.com', port=443): Temporary failure in name resolution", "api.example"),
        ("curl: (6) Could not resolve host: pypi.example.org", "pypi.example.org:443"),
        ("connect ECONNREFUSED", "HOST"),
    ],
)
def test_a_network(text: str, hosts: str) -> None:
    (want,) = diagnose(ENDED, text)
    assert want.kind == "network" and hosts in want.line and hosts.split(":")[0] in want.option


def test_limits_and_calls() -> None:
    assert diagnose(BoxReport("oom", limit="memory"), "")[0].option == "--memory 1024"
    assert diagnose(BoxReport("exited", 1, limit="pids"), "")[0].line == "limits: {processes: 512}"
    assert diagnose(BoxReport("exited", 1, limit="disk"), "")[0].kind == "disk"
    denied = {"io_uring_setup": 1}
    assert diagnose(BoxReport("exited", 1, denials=denied), "") == (), "honest programs try, and do without"
    assert diagnose(BoxReport("signalled", signal=31, denials={"ptrace": 1}), "")[0].what == "the system call ptrace"


def test_in_a_sentence() -> None:
    found = diagnose(BoxReport("oom", limit="memory"), "")
    assert explain("desk", found) == "it wanted more memory (servers.desk: limits: {memory_mb: 1024})"
    assert explain("desk", ()) == ""


@given(st.text())
def test_whatever_it_says(text: str) -> None:
    assert len(diagnose(ENDED, text)) <= 5


@pytest.mark.parametrize(
    "words", ["[Errno 2] No such file or directory: '{}'", "{}: Permission denied", "Cannot find module '{}'"]
)
def test_callers_are_not_told_which_files_of_the_host_there_are(words: str, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    said = [
        explain_to_callers("desk", BoxReport("exited", 1), words.format(tmp_path / name))
        for name in ("there", "absent", "absent/deep")
    ]
    assert len(set(said)) == 1 and said[0].startswith("it wanted files that its box does not have")
    assert str(tmp_path) not in said[0]


def test_callers_are_told_of_limits_and_networks() -> None:
    assert "more memory" in explain_to_callers("desk", BoxReport("oom"), "")
    assert "api.example.org" in explain_to_callers(
        "desk", BoxReport("exited", 1), "getaddrinfo ENOTFOUND api.example.org"
    )
    assert explain_to_callers("desk", BoxReport("exited", 1), "Traceback") == ""


@pytest.mark.parametrize("row", ["/", "(/", "/a", "https://", "ENOTFOUND "])
def test_a_long_row_costs_no_more_than_its_length(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_diagnosis, "_READ_CHARACTERS", 1_000_000)  # by the square of it, this takes days
    text = row * (500_000 // len(row))
    diagnose(ENDED, text)
    assert explain_to_callers("s", ENDED, f"{text}\ncat: /nowhere: No such file or directory") != ""
