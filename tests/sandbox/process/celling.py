"""A session's interpreter as a plain process of this host, without a box, and a supervisor for it."""

from __future__ import annotations

import marshal
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Self

import pytest

from ringfence.core.box import Shown
from ringfence.core.sessions import Failure
from ringfence.sandbox.process.untrusted_reply import Claims
from tests.tooling import ROOT

_DRIVER = """
import sys, _socket
sys.path.insert(0, sys.argv[2])
from ringfence.sandbox.process.guest import repl, runner
runner.forget_ourselves()
sys.path.remove(sys.argv[2])
repl.serve(_socket.socket(fileno=int(sys.argv[1])))
"""
_PATIENCE = 120.0


@dataclass
class Outcome:
    claims: Claims
    stdout: str = ""
    stderr: str = ""
    messages: list[int] = field(default_factory=list)
    """How long they were."""
    gone: bool = False
    """The interpreter ended before it said that the cell has."""

    @property
    def results(self) -> list[Shown]:
        return self.claims.results

    @property
    def text(self) -> str | None:
        """Of the last expression."""
        return next((result.data.get("text/plain") for result in self.results if result.main), None)

    @property
    def error(self) -> Failure:
        assert self.claims.error is not None, self
        return self.claims.error

    @property
    def ok(self) -> bool:
        return self.claims.done and self.claims.error is None


class Interpreter:
    def __init__(self, folder: os.PathLike[str] | str | None = None, **env: str) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _DRIVER, str(theirs.fileno()), str(ROOT / "src")],
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **env},
                pass_fds=[theirs.fileno()],
            )
        self._cells = 0
        self._readers: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> int:
        """As a supervisor ends it."""
        self._channel.close()
        self._let_go()
        try:
            return self.process.wait(_PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_when_it_speaks(self) -> Callable[[str], None]:
        waiting = [self.interrupt]

        def seen(said: str) -> None:
            if said and waiting:
                waiting.pop()()

        return seen

    def __call__(self, source: str | bytes, seen: Callable[[str], None] | None = None, **order: Any) -> Outcome:
        """Run a cell. `seen` is told of stdout as it grows."""
        self._cells += 1
        before = self._readers
        source = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        wanted = {"kind": "cell", "id": self._cells, "name": f"<cell {self._cells}>", "source": source, **order}
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        given = list(writers)
        if len(source) > 50_000:
            del wanted["source"]
            given.append(os.memfd_create("source"))
            os.write(given[2], source)
        socket.send_fds(self._channel, [marshal.dumps(wanted)], given)
        for descriptor in given:
            os.close(descriptor)
        self._readers = list(readers)
        try:
            return self._follow(*readers, seen)
        finally:
            # Not as soon as a cell has ended: what it left writes into its pipes until the next one.
            for descriptor in before:
                os.close(descriptor)

    def _let_go(self) -> None:
        """Of the last cell's pipes."""
        for descriptor in self._readers:
            os.close(descriptor)
        self._readers = []

    def _follow(self, stdout: int, stderr: int, seen: Callable[[str], None] | None) -> Outcome:
        outcome, said = Outcome(Claims(self._cells)), {stdout: b"", stderr: b""}
        until = time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as selector:
            for descriptor in said:
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ)
            while not (outcome.claims.done or outcome.claims.broken or outcome.gone):
                assert time.monotonic() < until, f"the cell did not end: {said}"
                for key, _ in selector.select(1.0):
                    if key.fileobj is not self._channel:
                        if not _drain(key.fd, said):
                            selector.unregister(key.fd)
                    elif message := self._receive():
                        outcome.claims.feed(message)
                        outcome.messages.append(len(message))
                    else:
                        outcome.gone = True
                if seen is not None:
                    seen(said[stdout].decode())
            for descriptor in said:
                _drain(descriptor, said)
        outcome.stdout, outcome.stderr = said[stdout].decode(), said[stderr].decode()
        assert outcome.claims.broken is None, outcome.claims.broken
        return outcome

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(100_000)
        except ConnectionResetError:
            return b""


def _drain(descriptor: int, said: dict[int, bytes]) -> bool:
    """False at the end."""
    try:
        while piece := os.read(descriptor, 65_536):
            said[descriptor] += piece
    except BlockingIOError:
        return True
    return False


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
