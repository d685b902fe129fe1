"""`ringfence bench`: what is measured, and how it is told. No test asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringfence.cli.bench import audit, backends, batch, box, console, egress, gateway, measure, session, start
from ringfence.compose.runs import default_config, make_executor
from ringfence.core.errors import Unavailable
from tests import gateways, tooling

SPIN = "import time\nwhile time.process_time() < 0.3: pass"


def boxes_here() -> str | None:
    try:
        make_executor(default_config().sandbox)
    except Unavailable as exc:
        return exc.message
    return None


def test_a_ratio_is_between_the_medians_and_names_its_baseline() -> None:
    base = measure.row("bare", [0.020, 0.010, 0.030])
    case = measure.row("box", [0.004] * 99 + [1.0], base)
    assert (base.p50_ms, base.ratio, base.baseline) == (20.0, None, None)
    assert (case.n, case.p50_ms, case.p95_ms, case.p99_ms) == (100, 4.0, 4.0, 1000.0)
    assert (case.ratio, case.baseline) == (0.2, "bare")


def test_rows_as_json_always_have_the_same_first_keys() -> None:
    told = measure.as_json([measure.row("bare", [0.01]), measure.Row("box", 1, 1.0, 1.0, 1.0, memory_kb=7.0)])
    keys = ["name", "n", "p50_ms", "p95_ms", "p99_ms", "ratio", "baseline"]
    assert [list(row)[:7] for row in told] == [keys, keys]
    assert [row.get("memory_kb") for row in told] == [None, 7.0]


def test_a_table_has_no_column_that_nothing_is_in() -> None:
    head, line = measure.table([measure.row("bare", [0.01])]).splitlines()
    assert head.split() == ["name", "n", "p50_ms", "p95_ms", "p99_ms"]
    assert line.split() == ["bare", "1", "10.0", "10.0", "10.0"]


def test_what_could_not_be_measured_is_a_row_with_its_reason_and_no_time() -> None:
    told = measure.as_json([measure.row("bare", [0.01]), measure.absent("gvisor", "runsc is missing")])
    assert told[1] == {
        **{"name": "gvisor", "n": 0, "p50_ms": None, "p95_ms": None, "p99_ms": None, "ratio": None, "baseline": None},
        "why": "runsc is missing",
    }
    assert measure.table([measure.absent("gvisor", "runsc is missing")]).splitlines() == [
        "name    n  why",
        "gvisor  0  runsc is missing",
    ]


def test_processor_time_is_that_of_everything_below_us() -> None:
    before = measure.cpu_seconds_of_all()
    command = f"{sys.executable} -c '{SPIN}'; sleep 600 & wait"
    with subprocess.Popen(["/bin/sh", "-c", command]) as shell:
        try:
            until = time.monotonic() + tooling.PATIENCE
            while measure.cpu_seconds_of_all() - before < 0.25 and time.monotonic() < until:
                time.sleep(0.02)
            assert measure.cpu_seconds_of_all() - before >= 0.25  # of a grandchild
            assert shell.pid in measure.below(os.getpid())
        finally:
            for pid in [*measure.below(shell.pid), shell.pid]:
                os.kill(pid, 9)


def test_a_benchmark_that_does_not_exist_is_not_run() -> None:
    ran = gateways.run("bench", "boxes")
    assert ran.returncode == 2
    assert "there is no benchmark 'boxes'; there are: policy, gateway, box, session" in ran.stderr


def test_a_question_is_timed_up_to_the_event_of_an_open_page() -> None:
    (row,) = measure.as_json(console.run(3))
    assert (row["name"], row["n"]) == ("a question at an open page, after its call", 3)
    assert 0 < row["p50_ms"] <= row["p95_ms"]


def test_help_says_what_is_measured() -> None:
    told = " ".join(gateways.run("bench", "--help").stdout.split())
    assert "a program in a fresh box against the same program started bare" in told
    assert "ringfence bench box" in told


@pytest.mark.skipif(boxes_here() is not None, reason=str(boxes_here()))
def test_boxes_are_measured_beside_the_bare_interpreter(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, few in {"_AT_ONCE": (2,), "_BURST": 8, "_BURSTS": 1, "_LIVE": 2}.items():
        monkeypatch.setattr(box, name, few)
    monkeypatch.setenv("RINGFENCE_CONFIG", "/nowhere/at/all.yaml")
    rows = {row["name"]: row for row in json.loads(json.dumps(measure.as_json(box.run(10, rounds=2))))}
    bare = rows["bare python -c pass"]
    assert bare["ratio"] is None and bare["n"] == 10
    for name in ("run_code, the governed way", "the backend alone", "none kept ready", "fresh layout, by exec"):
        row = rows[f"box: {name}"]
        assert row["baseline"] == bare["name"]
        assert row["ratio"] == pytest.approx(row["p50_ms"] / bare["p50_ms"], abs=0.001)
        assert row["cpu_ms"] > 0
    assert rows["box: over MCP, execute_python"]["baseline"] == bare["name"]
    assert rows["run_code, 2 at once"]["baseline"] == "bare, 2 at once"
    assert rows["run_code, 2 at once"]["per_second"] > 0
    assert rows["burst of 8 fresh boxes"]["n"] == 8
    if os.geteuid() == 0:
        assert rows["live box, 2 of them: to its first output"]["memory_kb"] > 0
        of_a_user = [row for name, row in rows.items() if name.startswith("box: run_code, ordinary user, ")]
        assert [row["baseline"] for row in of_a_user] == ["bare python -c pass, ordinary user"]
    assert os.environ["RINGFENCE_CONFIG"] == "/nowhere/at/all.yaml"
    assert not list(own_home.rglob("ringfence.db")), "nothing was recorded among the user's own"
    assert "box: memory" in capsys.readouterr().err


@pytest.mark.skipif(boxes_here() is not None, reason=str(boxes_here()))
def test_a_batch_is_measured_beside_bare_programs(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "_BATCHES", 2)
    rows = measure.as_json(batch.run(20))
    assert [(row["name"], row["n"], row["baseline"]) for row in rows] == [
        ("bare, batch of 20 programs, 2 workers", 2, None),
        ("map_code, batch of 20 programs, 2 workers", 2, "bare, batch of 20 programs, 2 workers"),
        ("bare, batch of 20 programs, 8 workers", 2, None),
        ("map_code, batch of 20 programs, 8 workers", 2, "bare, batch of 20 programs, 8 workers"),
    ]
    for bare, boxed in (rows[:2], rows[2:]):
        assert boxed["ratio"] == pytest.approx(boxed["p50_ms"] / bare["p50_ms"], abs=0.001)
        assert boxed["per_second"] > 0 and boxed["cpu_ms"] > 0
    assert not list(own_home.rglob("ringfence.db")), "nothing was recorded among the user's own"
    assert "batch: 20 programs, 8 workers, 2 of 2" in capsys.readouterr().err


def test_an_idle_gateway_is_measured_after_calls(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, little in {"_QUIET_SECONDS": 0.1, "_IDLE_SECONDS": 0.1, "_IDLE": 3}.items():
        monkeypatch.setattr(gateway, name, little)
    *calls, idle = measure.as_json(gateway.run(10, 1, 2))
    kinds = ["direct", "read", "write", "read everything on", "write everything on"]
    for revision, part in (("2025-11-25", calls[:5]), ("2026-07-28", calls[5:])):
        assert [row["name"].replace(f" {revision}", "").replace(",", "") for row in part] == kinds
        assert [row["baseline"] for row in part] == [None] + [f"direct {revision}"] * 4
        assert ["cpu_ms" in row for row in part] == [False, True, True, True, True]
    assert (idle["name"], idle["n"], idle["baseline"]) == (
        "idle gateway: processor time in a second",
        3,
        "one core",
    )
    assert idle["ratio"] >= 0 and idle["p50_ms"] >= 0
    assert "gateway: idle for" in capsys.readouterr().err


def test_fine_processor_time_is_that_of_the_process() -> None:
    began = time.process_time()
    exec(SPIN)
    assert measure.fine_cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)
    assert measure.fine_cpu_seconds(os.getpid()) >= began


@pytest.mark.skipif(boxes_here() is not None, reason=str(boxes_here()))
def test_sessions_are_measured_beside_the_bare_interpreter(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "_LIVE", 2)
    monkeypatch.setattr(session, "_FILES", 3)
    rows = {row["name"]: row for row in json.loads(json.dumps(measure.as_json(session.run(10, rounds=2))))}
    for name in ("a step", "resumed, to the first result", "opened, to the first result"):
        row = rows[f"session: {name}"]
        assert (row["n"], row["baseline"]) == (10, "bare python -c pass")
        assert row["cpu_ms"] > 0
    assert rows["session: of a snapshot of 3 MiB, to the first result"]["n"] == 5
    if os.geteuid() == 0:
        assert isinstance(rows["idle session, 2 of them: to open one"]["memory_kb"], float)
        assert isinstance(rows["paused session, 2 of them: to pause one"]["memory_kb"], float)
    assert not list(own_home.rglob("ringfence.db")), "nothing was recorded among the user's own"
    assert "session: memory" in capsys.readouterr().err


def test_egress_is_measured_against_direct_requests() -> None:
    rows = {row.name: row for row in egress.run(30)}
    assert list(rows)[::2] == ["direct", "tunnelled", "TLS ends here", "brokered, on record"]
    for name, made in rows.items():
        base = "new connection, direct" if name.startswith("new") else "direct"
        assert (made.baseline, made.added_ms is None) == ((None, True) if name == base else (base, False))


def test_a_long_log_is_measured() -> None:
    rows = audit.run(2000)
    assert [row.name.split(",")[0] for row in rows] == ["audit verify", "audit list", "audit explain", "audit explain"]
    assert rows[0].per_second is not None


@pytest.mark.skipif(boxes_here() is not None, reason=str(boxes_here()))
def test_the_start_of_a_process_is_measured_beside_the_bare_interpreter(own_home: Path) -> None:
    bare, *others = start.run(2, rounds=1)
    assert (bare.name, bare.n, bare.ratio) == ("bare python -c pass", 2, None)
    names = ["ringfence --version", "ringfence --help", "ringfence run -c pass", "import ringfence; run_code('pass')"]
    assert [row.name for row in others] == names
    for row in others:
        assert row.baseline == bare.name and row.cpu_ms is not None
    assert not list(own_home.rglob("ringfence.db")), "nothing was recorded among the user's own"


@pytest.mark.skipif(boxes_here() is not None, reason=str(boxes_here()))
def test_backends_are_measured_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", {"process": "process", "chroot": "process"})
    monkeypatch.setattr("ringfence.cli.bench.backends.shutil.which", lambda name: None)
    bare, *others = backends.run(3, rounds=1)
    assert (bare.name, bare.ratio) == ("bare python -c pass", None)
    names = ["a program", "a step of a session", "paused, resumed, and a step"]
    names += [
        "a snapshot of files, and a box of it",
        "cold, to the end of a first program",
        "programs, 4 at once",
        "a box that stays, to open one",
    ]
    *measured, docker, chroot = others
    assert [row.name for row in measured] == [f"process: {name}" for name in names]
    assert all(row.baseline == bare.name and row.p50_ms > 0 for row in measured)
    assert measured[-2].per_second and measured[-1].memory_kb
    assert (docker.n, docker.why) == (0, "there is no docker here: apt install docker.io")
    assert chroot.n == 0 and chroot.why is not None and "chroot does not exist" in chroot.why
