"""`ringfence doctor`: a table for people, JSON for programs, and an exit code that says whether promises are kept."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence import config
from ringfence.cli import doctor
from ringfence.cli.main import command_line
from ringfence.compose.runs import make_executor
from ringfence.core.box import BACKENDS
from ringfence.core.errors import Unavailable
from ringfence.doctor import CATALOGUE, CLASSES, Case, CaseResult, SuiteReport
from ringfence.doctor.control import ControlBackend, ControlLauncher
from tests.gateways import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes are made on Linux")

FIRST = CATALOGUE[0]


@pytest.fixture
def boxes() -> None:
    try:
        make_executor(config.SandboxSettings())
    except Unavailable as exc:
        pytest.skip(f"no box can be made here: {exc}")


@pytest.mark.usefixtures("boxes")
def test_a_case_is_tried_and_told_to_a_program() -> None:
    shown = run("doctor", "--case", FIRST.id, "--json")
    told = json.loads(shown.stdout)
    assert (shown.returncode, told["backend"], told["kept"], told["broken"]) == (0, "process", 1, 0)
    assert set(told) == {"backend", "host", "cases", "kept", "broken", "not_counted"}
    assert told["cases"][0]["control"] == "succeeded: it read the canary"
    assert shown.stderr == ""


@pytest.mark.usefixtures("boxes")
def test_nothing_is_left_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    shown = run("doctor", "--case", "F01", "--case", "F50", "--case", "A06")
    assert shown.returncode == 0, shown.stderr
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("boxes")
def test_a_table_is_for_people() -> None:
    shown = run("doctor", "--class", "d", "--no-control")
    lines = shown.stdout.splitlines()
    assert shown.returncode == 0 and lines[0].startswith("process on Linux ")
    assert "D  devices" in lines and any(line.startswith("D01   kept ") for line in lines)
    assert "protections" in lines and any("seccomp" in line and " on " in line for line in lines)
    assert lines[-1].endswith(" kept, 0 broken")


@pytest.mark.usefixtures("boxes")
def test_every_backend_that_is_there_is_a_list() -> None:
    shown = run("doctor", "--all", "--case", FIRST.id, "--no-control", "--json")
    told = {report["backend"]: report for report in json.loads(shown.stdout)}
    assert set(told) == set(BACKENDS) and told["process"]["kept"] == 1 and shown.returncode == 0
    for name, report in told.items():
        if "cases" not in report:
            assert report == {"backend": name, "level": BACKENDS[name], "missing": report["missing"]}
            assert report["missing"] and f"{name}: {report['missing']}" in shown.stderr


def test_all_backends_are_one_table() -> None:
    second = next(case for case in CATALOGUE if case.kind != FIRST.kind)
    kept = SuiteReport("process", HOST, (CaseResult(FIRST, "ENOENT", "succeeded", True), result(second, None)))
    broken = SuiteReport("oci", HOST, (result(FIRST, False), result(second, True)))
    shown = doctor.compared([kept, broken], [("gvisor", "runsc is missing: apt install \x1brunsc")])
    lines = shown.splitlines()
    assert lines[0] == "on Linux 6.0 x86_64, as root"
    assert [line.split() for line in lines[2:6]] == [
        ["backend", "level", FIRST.kind, second.kind, "all"],
        ["process", "process", "1", "0/0/1", "1/0/1"],
        ["oci", "process", "0/1!/0", "1", "1/1!/0"],
        ["gvisor", "gvisor", "-", "-", "not", "here"],
    ]
    assert f"{FIRST.kind} {CLASSES[FIRST.kind]}" in lines[7]
    assert f"BROKEN {FIRST.id}: {FIRST.tried}" in lines and f"  {second.id}: the host has none" in lines
    assert lines[-1].startswith("  gvisor: runsc is missing: apt install") and "\x1b" not in shown


def result(case: Case, kept: bool | None) -> CaseResult:
    return CaseResult(case, "x", "x", kept, "the host has none" if kept is None else "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--class", "Q"), 2, "there is no class or case Q"),
        (("--case", "F999"), 2, "there is no class or case F999"),
        (("--all", "--backend", "process"), 2, "exclude each other"),
        (("--backend", "microvm"), 125, "microvm"),
        (("--backend", "nonsense"), 125, "does not exist"),
        (("--session", "--backend", "wasm"), 125, "boxes of backend wasm do not stay; those of process"),
        (("--server", "--backend", "gvisor"), 125, "boxes of backend gvisor do not stay; those of process"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(words: tuple[str, ...], code: int, said: str) -> None:
    shown = run("doctor", *words)
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (code, "", 1)
    assert said in shown.stderr


def test_a_broken_promise_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = ControlLauncher()
    monkeypatch.setattr(doctor, "make_backend", lambda settings, state: ControlBackend(launcher))
    words = ["doctor", "--case", FIRST.id, "--no-control"]
    with pytest.raises(SystemExit) as ended:
        command_line(words)(words)
    launcher.close()
    shown = capsys.readouterr()
    if ended.value.code == 125:
        pytest.skip(f"no control can be run here: {shown.err}")
    assert ended.value.code == 1
    assert f"BROKEN {FIRST.id}: {FIRST.tried}" in shown.out and f"  expected  {FIRST.expected}" in shown.out
    assert shown.out.endswith("0 kept, 1 broken\n")


def test_what_a_program_said_cannot_steer_the_terminal() -> None:
    case = replace(FIRST, tried="x")
    hostile = "\x1b[2J\x07\nF99   kept"
    shown = doctor.text(SuiteReport("process\x1b[1m", HOST, (CaseResult(case, hostile, hostile, False),)))
    assert "\x1b" not in shown and "\x07" not in shown
    assert not any(line.startswith("F99") for line in shown.splitlines())


def test_what_is_not_counted_is_said() -> None:
    second = CATALOGUE[1]
    results = (CaseResult(case, "ENOENT", "failed: ENOENT", None, "the host has none") for case in (FIRST, second))
    shown = doctor.text(SuiteReport("process", HOST, tuple(results)))
    assert shown.splitlines()[-1] == "0 kept, 0 broken, 2 not counted"
    assert f"{FIRST.id}   n/a " in shown
    assert f"\nnot counted\n  {FIRST.id} {second.id}: the host has none\n" in shown


def test_progress_is_told_now_and_then_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with doctor._progress(120) as progress:
        for number in range(120):
            progress(CaseResult(FIRST, "x", "x", {0: False, 1: None}.get(number, True), "why"))
    assert capsys.readouterr().err.splitlines() == [
        f"50/120  48 kept, 1 not counted, broken: {FIRST.id}",
        f"100/120  98 kept, 1 not counted, broken: {FIRST.id}",
    ]


HOST = {"system": "Linux", "kernel": "6.0", "machine": "x86_64", "user": "root"}
