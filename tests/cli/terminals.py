"""A person at a terminal, for tests: a command with a controlling terminal of its own, and somebody who types on it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import gateways

# The first terminal that a session leader opens becomes its controlling one. No fork of the test process is needed.
_ON_TERMINAL = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR)); os.execv(sys.argv[2], sys.argv[2:])"


@dataclass(slots=True)
class Terminal:
    """What the command shows on its terminal, and what is typed there. Its stdout and stderr go there too."""

    process: subprocess.Popen[bytes]
    master: int
    raw: bytes = b""
    shown: str = ""

    def expect(self, text: str, timeout: float = 120.0, times: int = 1) -> str:
        """Wait until the text was shown, so many times in all."""
        deadline = time.monotonic() + timeout
        while self.shown.count(text) < times:
            if time.monotonic() > deadline or not self._read(deadline):
                raise AssertionError(f"no {text!r} on the terminal:\n{self.shown}")
        return self.shown

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self, timeout: float = 120.0) -> int:
        """Read the rest and return the exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self.master, 65536) if ready else b""
        except OSError:  # the last holder of the other end is gone
            data = b""
        self.raw += data  # a character, or the end of a line, may come in two pieces
        self.shown = self.raw.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)


@contextmanager
def at_terminal(*arguments: str | Path, stdin: bytes = b"", cwd: Path | None = None) -> Iterator[Terminal]:
    """`ringfence …` on a new terminal; its stdin is a pipe with `stdin` in it, as it would be under an agent."""
    master, slave = os.openpty()
    name = os.ttyname(slave)
    reading, writing = os.pipe()
    os.write(writing, stdin)
    os.close(writing)
    command = [sys.executable, "-c", _ON_TERMINAL, name, *gateways.ringfence(*arguments)]
    try:
        process = subprocess.Popen(
            command, stdin=reading, stdout=slave, stderr=slave, start_new_session=True, cwd=cwd, env=dict(os.environ)
        )
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    finally:
        os.close(reading)
        os.close(master)
