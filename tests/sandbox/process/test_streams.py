"""What cells print and read: into whose pipes it goes, and that nobody answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tooling
from tests.sandbox.process.celling import Interpreter

REFUSAL = "a session has no standard input; pass data as a file or a variable"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Interpreter]:
    with Interpreter(tmp_path) as interpreter:
        yield interpreter


# ── Output ────────────────────────────────────────────────────────────────────────────────────────


def test_each_cell_has_its_own_output(run: Interpreter) -> None:
    first = run("import sys\nprint('one')\nprint('oops', file=sys.stderr)")
    second = run("print('two', end='')")
    assert (first.stdout, first.stderr) == ("one\n", "oops\n")
    assert (second.stdout, second.stderr) == ("two", "")


def test_all_ways_of_writing_are_captured(run: Interpreter) -> None:
    cell = """
import ctypes, os, subprocess, sys
print('a')
sys.stdout.buffer.write(b'b\\n')
sys.__stdout__.write('c\\n')
sys.stdout.flush()
os.write(1, b'd\\n')
subprocess.run(['sh', '-c', 'echo e'])
ctypes.CDLL(None).printf(b'f\\n')
"""
    assert sorted(run(cell).stdout.split()) == list("abcdef")
    assert run("1").stdout == ""


def test_lines_are_seen_while_the_cell_runs(run: Interpreter, tmp_path: Path) -> None:
    def seen(said: str) -> None:
        if said == "first\n":
            (tmp_path / "seen").touch()

    wait = "import os, time\nwhile not os.path.exists('seen'): time.sleep(0.01)"
    assert run(f"print('first')\n{wait}\nprint('second')", seen).stdout == "first\nsecond\n"


def test_much_output_is_whole(run: Interpreter) -> None:
    assert run("for n in range(50_000): print(n)").stdout == "".join(f"{n}\n" for n in range(50_000))


def test_what_utf8_cannot_say_is_shown(run: Interpreter) -> None:
    outcome = run("import sys\nprint('\\ud800 é')\nprint('\\udcff', file=sys.stderr)")
    assert (outcome.stdout, outcome.stderr) == ("\\ud800 é\n", "\\udcff\n")
    assert outcome.ok


def test_what_is_printed_between_cells_goes_nowhere(run: Interpreter) -> None:
    cell = """
import sys, threading, time
failures, said = [], 0
def talk():
    global said
    try:
        while not quiet:
            print('late')
            print('late', file=sys.stderr, end='')
            said += 1
            time.sleep(0.001)
    except BaseException as exc:
        failures.append(exc)
quiet = False
thread = threading.Thread(target=talk)
thread.start()
"""
    run(cell)
    time.sleep(0.1)
    during = run("before = said\nwhile said < before + 2: time.sleep(0.001)")
    assert "late\n" in during.stdout
    assert run("quiet = True\nthread.join()\nfailures").text == "[]"
    time.sleep(0.05)
    outcome = run("print('mine')")
    assert (outcome.stdout, outcome.stderr) == ("mine\n", "")


def test_what_was_left_in_a_buffer_belongs_to_its_cell(run: Interpreter, tmp_path: Path) -> None:
    cell = """
import os, sys, threading, time
def write():
    while not os.path.exists('over'): time.sleep(0.01)
    sys.stdout.write('half a line')
    os.mkdir('written')
threading.Thread(target=write).start()
"""
    assert run(cell).ok
    (tmp_path / "over").touch()
    tooling.wait_until((tmp_path / "written").exists)
    assert run("print('whole')").stdout == "whole\n"


def test_a_process_that_is_left_behind_does_not_hold_up_the_cell(run: Interpreter) -> None:
    # For longer than the test waits for the cell.
    assert run("import subprocess\nchild = subprocess.Popen(['sleep', '600'])").ok
    assert run("child.kill()\nchild.wait()").text == "-9"


@pytest.mark.parametrize(
    "close", ["sys.stdout.close()", "os.close(1)", "sys.stdout.detach()", "sys.__stdout__.close()"]
)
def test_a_stream_that_was_closed_is_open_in_the_next_cell(run: Interpreter, close: str) -> None:
    run(f"import os, sys\n{close}")
    assert run("print('heard')").stdout == "heard\n"


def test_a_stream_of_the_users_own_stays(run: Interpreter) -> None:
    run("import io, sys\nsys.stdout = io.StringIO()")
    assert run("print('kept')").stdout == ""
    assert run("sys.stdout.getvalue()").text == "'kept\\n'"


def test_a_stream_that_fails_does_no_harm(run: Interpreter) -> None:
    run("import sys\nclass Broken:\n    write = closed = None\n    def flush(self): raise SystemError")
    run("sys.stdout = Broken()")
    assert run("1").text == "1"


# ── Input ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "asking",
    [
        "input('name? ')",
        "import sys\nsys.stdin.readline()",
        "import sys\nsys.stdin.read(5)",
        "import sys\nfor line in sys.stdin: pass",
        "import sys\nsys.stdin.readlines()",
        "import sys\nsys.stdin.buffer.read()",
        "import sys\nsys.__stdin__.read()",
        "breakpoint()",
    ],
)
def test_a_question_is_refused(run: Interpreter, asking: str) -> None:
    error = run(asking).error
    assert (error.name, error.value) == ("RuntimeError", REFUSAL)
    assert "streams.py" not in error.traceback
    assert run("1").text == "1"


def test_programs_find_an_empty_input(run: Interpreter) -> None:
    assert run("import subprocess\nsubprocess.run(['cat'], capture_output=True).stdout").text == "b''"
    assert run("import os\nos.read(0, 10)").text == "b''"


def test_the_refusal_outlives_an_exit(run: Interpreter) -> None:
    assert run("exit()").error.name == "SystemExit"
    assert run("input()").error.value == REFUSAL


def test_input_of_the_users_own_is_read(run: Interpreter) -> None:
    assert run("import io, sys\nsys.stdin = io.StringIO('Ada\\n')\ninput()").text == "'Ada'"
