"""The line to a guest, with the guest's end of it in this process."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import machine
from hosts.inside import agent
from hosts.places import Trouble
from hosts.project import as_whom, quoted


class Guest:
    """What a line knows of the guest that it leads to."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "console.log"
        self.alive = True


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[machine.Line, socket.socket, Guest]]:
    ours, theirs = socket.socketpair()
    inner: Any = agent.Line.__new__(agent.Line)
    inner.fd, inner.pending = theirs.fileno(), b""

    def serve() -> None:
        while True:
            try:
                agent.serve(inner)
            except (EOFError, ConnectionError):
                return
            except Exception as problem:  # as in the guest
                inner.answer(problem=str(problem))

    thread = threading.Thread(target=serve)
    thread.start()
    guest = Guest(tmp_path)
    yield machine.Line(ours, guest), theirs, guest  # type: ignore[arg-type]
    ours.close()
    thread.join()
    theirs.close()


def test_a_command_says_what_it_says_in_a_terminal(ends: tuple[machine.Line, socket.socket, Guest]) -> None:
    line, *_ = ends
    shown: list[tuple[str, bytes]] = []
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    ended = line.call([sys.executable, "-c", code], show=lambda stream, data: shown.append((stream, data)))
    assert (ended.code, ended.out, ended.err) == (3, "out\n", "err\n")
    assert b"".join(data for stream, data in shown if stream == "out") == b"out\n"


def test_a_file_arrives_whole(ends: tuple[machine.Line, socket.socket, Guest], tmp_path: Path) -> None:
    line, *_ = ends
    content = bytes(range(256)) * 3000
    line.put(str(tmp_path / "file"), content)
    assert (tmp_path / "file").read_bytes() == content
    line.put(str(tmp_path / "file"), b"")
    assert (tmp_path / "file").read_bytes() == b""


def test_what_an_order_ran_into_is_told(ends: tuple[machine.Line, socket.socket, Guest]) -> None:
    line, *_ = ends
    with pytest.raises(Trouble, match="no-such-program"):
        line.call(["no-such-program"])


def test_what_was_left_over_from_somebody_else_is_passed_over(
    ends: tuple[machine.Line, socket.socket, Guest],
) -> None:
    line, theirs, _ = ends
    theirs.sendall(b'A=="}\n{"exit": 9}\n')
    line.greet()
    assert line.call(["true"]).code == 0


def test_a_guest_that_is_gone_is_a_trouble(ends: tuple[machine.Line, socket.socket, Guest]) -> None:
    line, theirs, guest = ends
    guest.alive = False
    theirs.sendall(b"\n")
    with pytest.raises(Trouble, match="gone"):
        line.greet()


def test_a_guest_that_does_not_work_is_given_up(
    ends: tuple[machine.Line, socket.socket, Guest], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, *_ = ends
    monkeypatch.setattr(machine, "SILENCE", 0.0)
    monkeypatch.setattr(line, "_send", lambda **_: None)
    with pytest.raises(Trouble, match="no sign of work"):
        line.call(["true"])


def test_somebody_is_logged_in_or_not() -> None:
    assert as_whom("user", "id")[:3] == ["su", "-l", "ada"]
    assert "--reuid=1000" in as_whom("plain", "id")
    assert quoted(["echo a; echo b"]) == "echo a; echo b"
    assert quoted(["echo", "a b"]) == "echo 'a b'"
