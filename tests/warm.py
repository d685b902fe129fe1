"""Starts our command line and the servers of tests/fixtures quickly: as forks of a process that has them imported.

What runs is a real process of the real program, with its own arguments, environment, folder and files; only the second
or two of imports are saved. A few tests still start Python anew, as a user does (tests/cli/test_main.py).

Run as a program, this is the process that is forked. It takes orders from the socket on its stdin, one message each:
the order as JSON with four descriptors (stdin, stdout, stderr, and a pipe for the process id and the exit code).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

COMMAND_LINE = ("-m", "ringfence.cli.main")
FIXTURES = str(Path(__file__).parent / "fixtures")
OTHER_SYSTEM = str(Path(__file__).parent / "othersystem.py")
"""It loads anew what is ours, and saves the time that the modules of others take."""
_MAX_BYTES = 4 << 20
_IMPORTED = (
    *(f"ringfence.cli.{verb}" for verb in ("run", "serve", "check", "call", "approvals", "audit", "wrap", "host")),
    "ringfence.cli.init.command",
    "ringfence.cli.box.lifecycle",
    "ringfence.cli.box.execute",
    "ringfence.cli.box.files",
    "ringfence.compose.gateway",
    "ringfence.compose.runs",
    "ringfence.sandbox.servers.launcher",
    "ringfence.sandbox.keeper.client",
    "ringfence.upstream.host_process",
    "ringfence.governance.route",
    "mcp.server",
    "mcp.server.mcpserver",
    "uvicorn",
    "httpx2",
)


def can_start(command: Sequence[str | Path]) -> bool:
    """Whether this command is one of those that are imported."""
    words = [str(word) for word in command]
    return words[:1] == [sys.executable] and (
        tuple(words[1:3]) == COMMAND_LINE
        or words[1:2] == [OTHER_SYSTEM]
        or (words[1:2] != [] and words[1].startswith(f"{FIXTURES}/"))
    )


# ── The side of the tests ─────────────────────────────────────────────────────────────────────────


class WarmProcess:
    """A process that was forked for a test: what the tests use of `subprocess.Popen`."""

    def __init__(self, report: int) -> None:
        self._report = os.fdopen(report, "rb", buffering=0)
        self._said = b""
        self.returncode: int | None = None
        while b"\n" not in self._said:
            self._read()
        self.pid = int(self._said.split(b"\n")[0])

    def poll(self) -> int | None:
        while self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._report], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._read()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self) -> None:
        data = self._report.read(100)
        if not data:
            raise AssertionError("the process that is forked for tests is gone")
        self._said += data
        words = self._said.split(b"\n")
        if len(words) == 3:  # the process id, the code, and nothing after the last line
            self.returncode = int(words[1])
            self._report.close()


_lock = threading.Lock()
_forked: dict[int, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
"""The process that is forked and the socket for its orders, by the process that started it: one for each worker."""


def start(
    command: Sequence[str | Path],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    env: Mapping[str, str],
    cwd: Path | None,
    new_session: bool,
) -> WarmProcess:
    """Start a command that `can_start` is true of, with these descriptors."""
    order = {
        "words": [str(word) for word in command[1:]],
        "env": dict(env),
        "cwd": str(cwd or Path.cwd()),
        "new_session": new_session,
    }
    reads, writes = os.pipe()
    try:
        with _lock:
            socket.send_fds(_socket(), [json.dumps(order).encode()], [stdin, stdout, stderr, writes])
    finally:
        os.close(writes)
    return WarmProcess(reads)


def run(
    command: Sequence[str | Path], *, cwd: Path | None = None, timeout: float = 300.0, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with both outputs captured as text."""
    with _memory() as given, _memory() as out, _memory() as err:
        given.write(stdin)
        given.seek(0)
        process = start(
            command,
            stdin=given.fileno(),
            stdout=out.fileno(),
            stderr=err.fileno(),
            env=os.environ,
            cwd=cwd,
            new_session=False,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([str(word) for word in command], code, *texts)


def _memory() -> IO[bytes]:
    """A file that never blocks its writer and is nowhere on disk."""
    return os.fdopen(os.memfd_create("output"), "w+b")


def _socket() -> socket.socket:
    if os.getpid() not in _forked:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
        # What goes wrong in the process itself is printed where the tests print.
        process = subprocess.Popen([sys.executable, "-P", __file__], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        theirs.close()
        _forked[os.getpid()] = ours, process
        atexit.register(_close, os.getpid())
    return _forked[os.getpid()][0]


def _close(starter: int) -> None:
    """The process ends with its socket."""
    if starter == os.getpid():
        orders, process = _forked.pop(starter)
        orders.close()
        process.wait()


# ── The process that is forked ────────────────────────────────────────────────────────────────────


def _be(order: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """In the fork: run that command and nothing else."""
    code = 1
    try:
        if order["new_session"]:
            os.setsid()
        for target, source in enumerate(descriptors[:3]):
            os.dup2(source, target)
        for source in descriptors:
            os.close(source)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        words = order["words"]
        if tuple(words[:2]) == COMMAND_LINE:
            from ringfence.cli import main

            sys.argv = [main.__file__, *words[2:]]
            main.main()
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as exc:
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                code = code or 120
        os._exit(code)


def _serve(orders: socket.socket) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    reports: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([orders.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 1000)
            _bury(reports)
        if orders.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(orders, _MAX_BYTES, 4)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (woken, wake, orders.fileno(), *reports.values()):
                    if descriptor > 2:
                        os.close(descriptor)
                _be(json.loads(message), descriptors)
            reports[pid] = descriptors[3]
            os.write(descriptors[3], b"%d\n" % pid)
            for descriptor in descriptors[:3]:
                os.close(descriptor)


def _bury(reports: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        report = reports.pop(pid)
        with suppress(BrokenPipeError):  # the test does not wait for it any more
            os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(report)


if __name__ == "__main__":
    _serve(socket.socket(fileno=os.dup(0)))
