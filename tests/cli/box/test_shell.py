"""`ringfence box shell`: a person at a terminal in a box."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli.box.shell import TerminalFilter
from tests import tooling
from tests.cli.terminals import Terminal
from tests.gateways import finished, ringfence, run

# The first terminal that a session leader opens becomes its controlling one.
_ON_TERMINAL = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR)); os.execv(sys.argv[2], sys.argv[2:])"


def resize(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def sitting_at(*words: str) -> Iterator[tuple[Terminal, int]]:
    """Somebody whose stdin is the terminal, too; with the end of it that the command has."""
    master, slave = os.openpty()
    resize(master, 90, 20)
    command = [sys.executable, "-c", _ON_TERMINAL, os.ttyname(slave), *ringfence(*words)]
    env = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=env)
    try:
        yield Terminal(process, master), slave
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


def wait_for_command(*words: str) -> None:
    """Until it runs: a shell that is just starting something cannot be stopped, on any terminal."""
    wanted = "".join(f"{word}\0" for word in words).encode()

    def runs() -> bool:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if entry.read_bytes() == wanted:
                    return True
        return False

    tooling.wait_until(runs)


def test_a_person_works_in_a_box_and_has_their_terminal_back(box: str) -> None:
    with sitting_at("box", "shell", box, "--command", "PS1='box> ' exec sh -i") as (terminal, slave):
        before = termios.tcgetattr(slave)
        terminal.expect("box> ")
        assert termios.tcgetattr(slave) != before, "every key goes to the box"
        terminal.type("stty size; echo here > made\r")
        terminal.expect("20 90")
        resize(terminal.master, 111, 33)
        terminal.type("until [ \"$(stty size)\" = '33 1''11' ]; do sleep 0.1; done; stty size\r")
        terminal.expect("33 111")
        assert "job control" not in terminal.shown
        terminal.type("sh -c 'echo run''ning; exec sleep 606.1'\r")
        terminal.expect("running")
        wait_for_command("sleep", "606.1")
        terminal.type("\x03")
        terminal.type("echo inter''rupted\r")
        terminal.expect("interrupted")
        terminal.type("sh -c 'echo be''gun; sleep 606.2'\r")
        terminal.expect("begun")
        wait_for_command("sleep", "606.2")
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.type("kill %1; fg; echo go''ne\r")
        terminal.expect("gone")
        terminal.type("printf '\\033]0;title\\007shown\\n'\r")
        assert "\x1b]0" not in terminal.expect("shown\n")
        terminal.type("exit 7\r")
        assert terminal.process.wait(60) == 7
        assert termios.tcgetattr(slave) == before
    assert run("box", "files", "get", box, "made", "-").stdout == "here\n"


def test_it_is_one_step_on_record(box: str, own_home: Path) -> None:
    state = own_home / ".local/state/ringfence"
    before = len(finished(state))
    with sitting_at("box", "shell", box, "--command", "echo done") as (terminal, _):
        terminal.expect("done")
        assert terminal.process.wait(60) == 0
    assert [record["call"]["tool"] for record in finished(state)[before:]] == ["list_sessions", "run_shell"]


def test_without_a_terminal_or_a_box_nothing_is_touched(box: str) -> None:
    piped = run("box", "shell", box)
    assert piped.returncode == 2 and "needs a terminal" in piped.stderr
    with sitting_at("box", "shell", "box_nowhere") as (terminal, slave):
        before = termios.tcgetattr(slave)
        terminal.expect("box_nowhere")
        assert terminal.process.wait(60) == 2
        assert termios.tcgetattr(slave) == before


# ── What the terminal gets ────────────────────────────────────────────────────────────────────────


STRINGS = ["\x1b]0;title\x07", "\x1b]52;c;bHM=\x1b\\", "\x1bP$qm\x1b\\", "\x1b_x\x07", "\x1b^x\x07", "\x1bXx\x1b\\"]
STRINGS += ["\x1bktitle\x1b\\"]
FORBIDDEN = re.compile(
    r"\x1b[\x00-\x1f\x7f]*[\]PX^_Zk]|[\x80-\x9f\x05]|\x1b\[[\x00-\x3f\x7f]*[cntxiyw|z{]|\x1b\[[\x00-\x3f\x7f]*[><=$'][\x00-\x3f]*."
)


def through(*pieces: bytes) -> str:
    screen = TerminalFilter()
    return b"".join(map(screen.shown, pieces)).decode()


def test_what_is_shown_coloured_and_moved_passes() -> None:
    text = "\x1b[31mrot\x1b[0m é\r\n\x1b[2J\x1b[3;4H\x1b7\x1b8\x1b[?25l"
    assert through(text.encode()) == text
    assert through(*(bytes([byte]) for byte in text.encode())) == text


@pytest.mark.parametrize("string", STRINGS)
def test_strings_for_the_terminal_itself_are_removed(string: str) -> None:
    assert through(f"a{string}b".encode()) == "ab"
    assert through(*(bytes([byte]) for byte in f"a{string}b".encode())) == "ab"


QUESTIONS = [
    *("\x1b[c", "\x1b[0c", "\x1b[>c", "\x1b[=c", "\x1bZ", "\x1b[5n", "\x1b[6n", "\x1b[?6n", "\x1b[?996n", "\x1b[x"),
    *("\x1b[18t", "\x1b[21t", "\x1b[22;0t", "\x1b[>q", "\x1b[>0q", "\x1b[?25$p", "\x1b[4$p", "\x1b[1$w", "\x1b[?u"),
    *("\x1b[>1u", "\x1b[<u", "\x1b[=1u", "\x1b[>4;2m", "\x1b[?4m", "\x1b[?1;1;0S", "\x1b[1;1;1;1;1;1*y", "\x1b[5i"),
    *(
        "\x1b[1'|",
        "\x1b[1;2'z",
        "\x1b[#R",
        "\x1b G",
        "\x1b%@",
        "\x05",
        "\x1b[2h",
        "\x1b[?3h",
        "\x1b[?1001h",
        "\x1b[?25r",
    ),
    *("\x1b[?2048h", "\x1b[" + "1;" * 100 + "m"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=ascii)
def test_what_a_terminal_would_answer_is_removed(question: str) -> None:
    assert through(f"a{question}b".encode()) == "ab"
    assert through(*(bytes([byte]) for byte in f"a{question}b".encode())) == "ab"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[6\x1b[31mn", "\x1b[31mn"),
        ("\x1b[\n6n", "\n"),
        ("\x1b[6\x18n", "\x18n"),
        ("\x1b[\x7f6n", ""),
        ("\x1b[?25;3;1049h", "\x1b[?25;1049h"),
        ("\x1b[6\x05n", ""),
        ("\x1b[é6n", "6n"),
    ],
)
def test_no_question_is_made_of_what_is_left(text: str, left: str) -> None:
    assert through(text.encode()) == left


@pytest.mark.parametrize(
    "text", ["\x1b(0qqq\x1b(B", "\x1b[1;5H\x1b[2 q\x1b[!p", "\x1b[4h\x1b[4l\x1b=\x1b>\x1bM\x1bc\x1b#8"]
)
def test_what_full_screen_programs_need_passes(text: str) -> None:
    assert through(text.encode()) == text


def test_modes_that_a_program_leaves_behind_are_taken_back() -> None:
    screen = TerminalFilter()
    plain = screen.afterwards().decode()
    for mode in (1, 5, 1000, 1002, 1003, 1004, 1006, 2004):
        assert f"\x1b[?{mode}l" in plain
    assert "\x1b[?25h" in plain and "\x1b[0m" in plain and "\x1b(B" in plain
    assert "\x1b[?1049l" not in plain and "\x1b[r" not in plain, "that would move the cursor"
    screen.shown(b"\x1b[?1049;2004h\x1b[2;5r")
    assert screen.afterwards().decode().startswith("\x1b[?1049l\x1b[?6l\x1b[r")
    screen.shown(b"\x1b[?1049l")
    assert "\x1b[?1049l" not in screen.afterwards().decode()


def test_controls_of_eight_bits_mean_nothing() -> None:
    assert through("a\x9d0;title\x07b".encode()) == "a0;title\x07b"


def test_a_string_that_never_ends_is_never_shown_and_never_kept() -> None:
    screen = TerminalFilter()
    assert screen.shown(b"a\x1b]52;c;") == b"a"
    for _ in range(100):
        assert screen.shown(b"x" * 1000) == b""
    assert screen.shown(b"y\x07z") == b"z"


@pytest.mark.parametrize(
    "text", ["\x1b\x1b]]0;t\x07x", "\x1b\n]0;t\x07x", "\x1b\x1b]a\x07]0;t\x07x", "\x1b\x7f]0;t\x07x"]
)
def test_no_string_is_made_of_what_is_left(text: str) -> None:
    assert FORBIDDEN.search(through(text.encode())) is None


@given(
    st.lists(
        st.binary()
        | st.sampled_from([s.encode() for s in STRINGS])
        | st.sampled_from([s.encode() for s in QUESTIONS])
        | st.sampled_from([b"\x1b", b"]", b"[", b"?", b"6", b"n", b"c", b">", b" ", b"\\", b"\n", b"\x7f", b"\x05"])
    )
)
def test_nothing_lasting_gets_through(pieces: list[bytes]) -> None:
    assert FORBIDDEN.search(through(*pieces)) is None
