"""`ringfence box exec`: steps from a shell, their output, and their exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.gateways import ringfence, run


def test_variables_stay_and_values_are_shown(box: str) -> None:
    assert run("box", "exec", box, "-c", "x = 6\nprint('out')").stdout == "out\n"
    assert run("box", "exec", box, "-c", "x * 7").stdout == "42\n"
    missing = run("box", "exec", box, "-c", "x", "--context", "other")
    assert missing.returncode == 1 and "NameError" in missing.stderr and missing.stdout == ""


def test_source_comes_from_a_file_or_from_stdin(box: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from_file = 'é'\nprint(from_file)")
    assert run("box", "exec", box, tmp_path / "a.py").stdout == "é\n"
    piped = subprocess.run(
        ringfence("box", "exec", box, "-"), input="from_file * 2", capture_output=True, text=True, check=False
    )
    assert piped.stdout == "'éé'\n"


CODES = {
    "an exception": (("-c", "1/0"), 1),
    "a status of its own": (("-c", "raise SystemExit(5)"), 5),
    "no status of its own": (("-c", "exit()"), 0),
    "a last word": (("-c", "import sys; sys.exit('bye')"), 1),
    "the clock": (("-c", "while True: pass", "--timeout", "0.5"), 124),
    "a shell command": (("--shell", "exit 4"), 4),
    "a signal": (("--shell", "kill -9 $$"), 137),
    "no such box": (("-c", "1"), 2),
    "two programs": (("-c", "1", "--shell", "ls"), 2),
    "none": ((), 2),
    "a context of a shell": (("--shell", "ls", "--context", "x"), 2),
    "Python in the background": (("-c", "1", "--background"), 2),
}


@pytest.mark.parametrize("case", CODES)
def test_the_exit_code_tells_how_it_ended(case: str, box: str) -> None:
    words, code = CODES[case]
    ended = run("box", "exec", "box_nowhere" if case == "no such box" else box, *words)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr or case == "an exception"


def test_a_command_gets_our_stdin_our_variables_and_a_folder(box: str) -> None:
    command = ringfence("box", "exec", box, "--shell", "cat; echo $A; pwd", "--env", "A=b", "--cwd", "/tmp")
    ended = subprocess.run(command, input="typed\n", capture_output=True, text=True, check=False)
    assert ended.stdout == "typed\nb\n/tmp\n", ended.stderr


def test_what_earlier_steps_wrote_since_is_printed_on_stderr(box: str) -> None:
    # The thread waits for a file that the second step makes, and has written when that is over.
    waiting = """
import os, threading, time
def write():
    while not os.path.exists("/tmp/go"):
        time.sleep(0.01)
    print("from before")
    open("/tmp/gone", "w").close()
threading.Thread(target=write).start()
"""
    assert run("box", "exec", box, "-c", waiting).returncode == 0
    seen = run("box", "exec", box, "--shell", "touch /tmp/go; until [ -e /tmp/gone ]; do sleep 0.05; done; echo now")
    assert seen.stdout == "now\n"
    after = run("box", "exec", box, "-c", "'value'")
    assert after.stdout == "'value'\n"
    assert "stdout of what earlier steps left running:\nfrom before\n" in seen.stderr + after.stderr


def test_a_command_in_the_background_is_started_and_left(box: str) -> None:
    started = json.loads(run("box", "exec", box, "--shell", "sleep 600", "--background", "--json").stdout)
    assert started["running"] is True
    assert run("box", "exec", box, "--shell", f"ps -e | grep -c sleep || true; kill {started['process']} || true")


def test_all_of_it_as_json(box: str) -> None:
    shown = json.loads(run("box", "exec", box, "-c", "print(1)\n[2]", "--json").stdout)
    assert (shown["text"], shown["logs"]["stdout"], shown["status"]) == ("[2]", ["1\n"], "success")
    assert (
        shown["results"][0]["data"] == {"text/plain": "[2]", "application/json": "[2]"}
        and shown["facts"]["ended"] == "exited"
    )
    command = json.loads(run("box", "exec", box, "--shell", "echo x; exit 3", "--json").stdout)
    assert (command["stdout"], command["exit_code"]) == ("x\n", 3)


def test_an_interrupt_stops_the_step_and_the_variables_stay(box: str) -> None:
    run("box", "exec", box, "-c", "kept = 1")
    command = ringfence("box", "exec", box, "-c", "print('up', flush=True)\nimport time; time.sleep(600)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as step:
        assert step.stdout is not None and step.stdout.readline() == "up\n"
        step.send_signal(signal.SIGTERM)
        assert step.wait(60) == 143
    assert run("box", "exec", box, "-c", "kept").stdout == "1\n"
