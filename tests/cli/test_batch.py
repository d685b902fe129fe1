"""`ringfence run --batch`: a line of JSON for each program, in their order; what is refused, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import boxing, gateways, tooling
from tests.cli.terminals import at_terminal

SLEEPS = "import time; time.sleep(600)"


@pytest.fixture(scope="module", autouse=True)
def _boxes() -> None:
    boxing.need_boxes()


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    return tmp_path / "programs.jsonl"


def write(path: Path, *programs: Any) -> Path:
    path.write_text("".join(json.dumps(program) + "\n" for program in programs), encoding="utf-8")
    return path


def run(*words: str | Path, stdin: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    command = gateways.ringfence("run", *words)
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False, **more)


def told(ended: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ended.stdout.split("\n")[:-1]]


def test_a_line_for_each_in_their_order_each_on_record(batch: Path, own_home: Path) -> None:
    write(batch, *(f"print({number})" for number in range(100)))
    ended = run("--batch", batch, "--workers", "4")
    lines = told(ended)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [(line["id"], line["stdout"]) for line in lines] == [(n + 1, f"{n}\n") for n in range(100)]
    assert list(lines[0]) == ["id", "status", "exit_status", "stdout", "stderr", "error", "ended", "facts"]
    plain = {(line["status"], line["exit_status"], line["stderr"], line["error"], line["ended"]) for line in lines}
    assert plain == {("success", 0, "", None, "exited")}
    on_record = {record["call"]["id"]: record for record in gateways.finished(own_home / ".local/state/ringfence")}
    assert {on_record[line["facts"]["call_id"]]["call"]["origin"] for line in lines} == {"cli"}


def test_options_hold_for_all_and_a_line_has_its_own(tmp_path: Path, batch: Path) -> None:
    (tmp_path / "data").write_text("1 2")
    code = "import os; print(os.environ['A'], os.environ['B'], open('input/data').read())"
    write(batch, code, {"code": code, "id": "its own", "env": {"A": "own"}}, {"code": SLEEPS, "id": 7, "timeout": 0.2})
    text = batch.read_text().replace("\n", "\r\n\n  \n", 1)  # blank lines, and ends of lines as others write them
    words = ("--env", "A=all", "--env", "B=b", "--input", tmp_path / "data", "--timeout", "3600")
    ended = run("--batch", "-", *words, stdin=text)
    assert [(line["id"], line["stdout"]) for line in told(ended)] == [
        *((1, "all b 1 2\n"), ("its own", "own b 1 2\n"), (7, "")),
    ]
    slow = told(ended)[2]
    assert (slow["status"], slow["exit_status"], slow["ended"], slow["error"]["name"]) == (
        *("timeout", None, "timeout", "timeout"),
    )
    assert ended.returncode == 1


def test_one_that_fails_harms_no_other(tmp_path: Path, batch: Path) -> None:
    rule = "{id: no-evil, action: deny, tool_patterns: [execute_python], argument_patterns: {code: evil}}"
    config = gateways.write(tmp_path, f"gateway: {{state: ./state}}\npolicy: {{preset: standard, rules: [{rule}]}}\n")
    write(batch, "print('é\\x1b')", "raise SystemExit(3)", "import json; json.loads('{')", "'evil'", "print('last')")
    ended = run("--batch", batch, "--config", config)
    lines = told(ended)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert [line["status"] for line in lines] == ["success", "failed", "failed", "denied", "success"]
    assert [line["exit_status"] for line in lines] == [0, 3, 1, None, 0]
    assert [line["error"]["name"] if line["error"] else None for line in lines] == [
        *(None, "SystemExit", "JSONDecodeError", "policy", None),
    ]
    assert lines[0]["stdout"] == "é\x1b\n" and "\x1b" not in ended.stdout
    assert "no-evil" in lines[3]["error"]["value"] and lines[3]["facts"]["ended"] == "policy"
    assert "Traceback" in lines[2]["stderr"]


def test_a_line_is_printed_as_soon_as_all_before_it_are(batch: Path) -> None:
    write(batch, "print(1)", "print(2)", SLEEPS, "print(4)")
    with tooling.start_process(gateways.ringfence("run", "--batch", batch, "--workers", "1")) as started:
        started.wait_for('"id": 2')
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(60) == 143
        assert '"id": 3' not in started.output()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_boxes_and_closes_their_calls(tmp_path: Path, batch: Path, number: int, code: int) -> None:
    config = gateways.write(tmp_path, "gateway: {state: ./state}\n")
    write(batch, "print(1)", SLEEPS, SLEEPS, SLEEPS)
    command = gateways.ringfence("run", "--batch", batch, "--workers", "2", "--config", config)
    with tooling.start_process(command) as started:
        started.wait_for('"id": 1')
        tooling.wait_until(lambda: len(gateways.records(tmp_path / "state", kind="started")) == 3)
        started.process.send_signal(number)
        assert started.process.wait(60) == code
    reasons = [record["reason_code"] for record in gateways.finished(tmp_path / "state")]
    assert reasons == ["ok", "cancelled", "cancelled"]


def test_output_that_cannot_be_written_is_told(batch: Path) -> None:
    write(batch, "print(1)", "print(2)")
    with open("/dev/full", "wb") as full:
        words = gateways.ringfence("run", "--batch", batch)
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 74
    assert "the output could not be written, and some of it is lost: No space left on device" in ended.stderr


def test_nobody_reads_any_more(batch: Path) -> None:
    write(batch, *(["print('x' * 100_000)"] * 20), SLEEPS)
    with subprocess.Popen(gateways.ringfence("run", "--batch", batch), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('"print(1)', "not JSON: Unterminated string starting at (column 1)"),
        ("5", "a program is a string, or an object with code"),
        ("[]", "a program is a string, or an object with code"),
        ("{}", "code is missing"),
        ('{"code": 5}', "code is not a string"),
        ('{"code": "1", "timeot": 1}', "there is no key timeot; there are code, id, timeout, env"),
        ('{"code": "1", "timeout": -1}', "timeout must be a number from 0.001 to 86400"),
        ('{"code": "1", "timeout": "5"}', "timeout must be a number of seconds"),
        ('{"code": "1", "env": {"A": 1}}', "env is not an object with string values"),
        ('{"code": "1", "id": []}', "id is neither a string nor an integer"),
        ('{"code": "1", "code": "2"}', "duplicate key 'code'"),
        ('{"code": "a\\u0000b"}', "a NUL byte at offset 1"),
        ('"\\ud800"', "a lone surrogate is not text"),
    ],
)
def test_a_line_that_is_wrong_is_named_before_anything_runs(
    batch: Path, own_home: Path, line: str, problem: str
) -> None:
    batch.write_text(f'"print(1)"\n\n{line}\n')
    ended = gateways.run("run", "--batch", batch)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"{batch}:3: {problem}"), ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("FILE.py",), 2, "--batch and FILE: give one of them"),
        (("-c", ""), 2, "--batch and -c: give one of them"),
        (("--shell", "ls"), 2, "--batch and --shell: give one of them"),
        (("--facts", "-"), 2, "--batch and --facts: give one of them; with --batch, the facts are in each line"),
        (("--workers", "0"), 2, "Invalid value for '--workers'"),
        (("--backend", "microsandbox"), 125, "ringfence: sandbox backend microsandbox is not built yet"),
    ],
)
def test_options_that_make_no_sense_are_refused(batch: Path, words: tuple[str, ...], code: int, problem: str) -> None:
    ended = gateways.run("run", "--batch", write(batch, "print(1)"), *words)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert problem in ended.stderr and "Traceback" not in ended.stderr


def test_a_batch_that_is_not_there_and_workers_without_one(tmp_path: Path) -> None:
    missing = run("--batch", tmp_path / "missing")
    assert missing.returncode == 2 and missing.stderr == f"{tmp_path}/missing: No such file or directory\n"
    assert run("-c", "1", "--workers", "2").returncode == 2
    assert run("--batch", "-", stdin="5\n").stderr == "-:1: a program is a string, or an object with code\n"
    empty = run("--batch", "-", stdin="\n\n")
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "")


def test_where_no_program_got_a_box_the_exit_code_says_so(batch: Path, tmp_path: Path) -> None:
    config = gateways.write(tmp_path, "gateway: {state: ./state}\nsecrets: {}\n")
    ended = run("--batch", write(batch, "1", "2"), "--config", config, "--secret", "other")
    assert ended.returncode == 125
    assert [line["status"] for line in told(ended)] == ["unavailable"] * 2
    assert ended.stderr.startswith("ringfence: ") and ended.stderr.endswith("; nothing was run\n")


def test_each_program_has_a_folder_for_its_output(tmp_path: Path, batch: Path) -> None:
    code = "open('output/made', 'w').write('{}')"
    write(batch, {"code": code.format("a"), "id": "a.1"}, code.format("2"))
    assert run("--batch", batch, "--output", tmp_path / "out").returncode == 0
    assert {str(path.relative_to(tmp_path / "out")): path.read_text() for path in (tmp_path / "out").rglob("made")} == {
        "a.1/made": "a",
        "2/made": "2",
    }
    for name, problem in (
        ("../up", "not a name"),
        (".git", "not a name"),
        ("_darcs", "not a name"),
        ("a/b", "not a name"),
        ("2", "line 2 has it"),
    ):
        write(batch, "1", "2", {"code": "3", "id": name})
        refused = run("--batch", batch, "--output", tmp_path / "other")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"{batch}:3: id {name}: ") and problem in refused.stderr, refused.stderr
        assert os.listdir(tmp_path / "other") == []
    (tmp_path / "other" / "linked").symlink_to(tmp_path)
    linked = run("--batch", write(batch, {"code": "3", "id": "linked"}), "--output", tmp_path / "other")
    assert linked.returncode == 2 and "is a link, which is not followed" in linked.stderr


def test_a_terminal_shows_how_far_it_is(batch: Path) -> None:
    write(batch, "print('\\x1b[2J')", "1 / 0", "print(3)")
    with at_terminal("run", "--batch", batch, "--workers", "1") as terminal:
        assert terminal.end() == 1
    shown = terminal.shown
    assert all(f"\r\x1b[K{far}" in shown for far in ("0/3 done, 0 failed", "1/3 done, 0 failed", "2/3 done, 1 failed"))
    assert "\x1b[2J" not in shown
    lines = [line.rpartition("\x1b[K")[2] for line in shown.split("\n")[:-1]]
    assert [json.loads(line)["id"] for line in lines[:3]] == [1, 2, 3]
    assert lines[3].startswith("ringfence: 3/3 done, 1 failed, ") and len(lines) == 4


def test_output_that_is_not_whole_says_so(batch: Path) -> None:
    write(batch, "print('x' * 3_000_000)", "print(1)")
    lines = told(run("--batch", batch))
    assert [line.get("truncated") for line in lines] == [True, None]
    assert "bytes left out" in lines[0]["stdout"]
