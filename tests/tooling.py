"""Programs that tests start: where they are, how they are started and ended, and what to do when one is missing.

`scripts/setup --tests` puts the tools of others under `.tools`. A test that needs one which is not there is skipped
with the way to get it; with `CI=true` it fails instead, since a check that never ran must not look like a passed one.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from tests import warm

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
NODE_MODULES = ROOT / ".tools" / "npm" / "node_modules"
PYTHON_TOOLS = ROOT / ".tools" / "py"
KERNEL = ROOT / ".tools" / "kernel"
"""A kernel for virtual machines; the host's own is used where none was fetched."""
REGISTRY = ROOT / ".tools" / "registry" / "usr" / "bin"
CONFORMANCE = NODE_MODULES / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"


def missing(tool: str, how: str) -> NoReturn:
    """Skip the running test, or fail it where everything has to be there."""
    reason = f"{tool} is missing: {how}"
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _present(path: Path, tool: str) -> Path:
    return path if path.exists() else missing(tool, "run scripts/setup --tests (needs pip, and npm for Node tools)")


def need(tool: str) -> Path:
    """The path of a tool by its name: `node`, a program from npm, a Python server, `client1x`, or a system program."""
    if tool == "node":
        return node()
    if tool == "conformance":
        return _present(CONFORMANCE, "the MCP conformance suite")
    if tool == "client1x":
        return client1x()
    if (NODE_MODULES / ".bin" / tool).exists():
        return npm_bin(tool)
    if (PYTHON_TOOLS / tool).exists():
        return python_server(tool)
    found = shutil.which(tool) or shutil.which(tool, path=str(REGISTRY))
    return Path(found) if found else missing(tool, f"run scripts/setup --tests, or install {tool} on your system")


def node() -> Path:
    """Node 22, whatever Node the machine has itself."""
    return _present(NODE_MODULES / "node" / "bin" / "node", "Node 22")


def npm_bin(name: str) -> Path:
    """The script of a program from npm; start it with `node()` as in `npm_command`."""
    return _present(NODE_MODULES / ".bin" / name, name).resolve()


def npm_command(name: str, *arguments: str) -> list[str]:
    """The command of a program from npm on Node 22, such as `mcp-server-everything` or `mcp-inspector`."""
    return [str(node()), str(npm_bin(name)), *arguments]


def conformance_command(*arguments: str) -> list[str]:
    return [str(node()), str(need("conformance")), *arguments]


def python_server(name: str) -> Path:
    """The program of a Python server that has an environment of its own, such as `mcp-server-time`."""
    return _present(PYTHON_TOOLS / name / "bin" / name, name)


def client1x() -> Path:
    """A Python that has the 1.x line of the SDK."""
    return _present(PYTHON_TOOLS / "client1x" / "bin" / "python", "the 1.x SDK")


def oidc_provider() -> Path:
    """The module of a certified OpenID provider for Node."""
    return _present(NODE_MODULES / "oidc-provider" / "lib" / "index.js", "an OpenID provider")


def charts() -> Path:
    """The folder with matplotlib, for programs in boxes; tests of this Python's version can load it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _present(PYTHON_TOOLS / "charts" / "lib" / version / "site-packages" / "matplotlib", "matplotlib").parent


def browser() -> Path:
    """The folder with Playwright, which drives the system's chromium; tests of this Python's version can load it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _present(PYTHON_TOOLS / "browser" / "lib" / version / "site-packages" / "playwright", "Playwright").parent


def agents() -> Path:
    """A Python that has the MCP clients of agent frameworks."""
    return _present(PYTHON_TOOLS / "agents" / "bin" / "python", "agent frameworks")


def suites() -> Path:
    """A Python that has Ringfence, and the suites that agent frameworks have for providers of sandboxes."""
    return _present(PYTHON_TOOLS / "suites" / "bin" / "python", "the suites of agent frameworks")


def fixture_command(script: str, *arguments: str) -> list[str]:
    """The command of a server under tests/fixtures, on this Python."""
    return [sys.executable, str(FIXTURES / script), *arguments]


def examples(times: float) -> int:
    """So many times as many examples as other tests have, by the profile in force."""
    return round(times * settings().max_examples)


_dice = random.SystemRandom()
PATIENCE = 120.0
"""Seconds that a test waits for what has to happen: only what never happens fails, however slow the machine is."""
LONGER = (0.5, 5.0, 50.0)
"""Time limits for a program that has to get somewhere before it is ended, to be tried until one was enough."""


async def until(reached: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until it is so, while everything else goes on."""
    async with asyncio.timeout(seconds):
        while not reached():
            await asyncio.sleep(0.01)


def wait_until(reached: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until it is so, and let nothing else of this process go on meanwhile."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.01)


def free_port() -> int:
    """A port of the loopback address that nobody listens on just now.

    None of those that the kernel gives to whoever connects somewhere: it might before the caller has come to use it.
    """
    while True:
        port = _dice.randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True, slots=True)
class Started:
    """A process started by a test, with everything that it wrote."""

    process: subprocess.Popen[bytes] | warm.WarmProcess
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout: float = PATIENCE) -> str:
        """Wait until the output contains the text, and return the whole output."""
        deadline = time.monotonic() + timeout
        while text not in (written := self.output()):
            if self.process.poll() is not None and text not in self.output():
                raise AssertionError(f"process ended with {self.process.returncode} before {text!r}:\n{written}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} within {timeout} s:\n{written}")
            time.sleep(0.02)
        return written

    def wait_for_port(self, port: int, timeout: float = PATIENCE) -> None:
        """Wait until the process listens on the port."""
        deadline = time.monotonic() + timeout
        while not listening(port):
            if self.process.poll() is not None:
                raise AssertionError(f"process ended with {self.process.returncode}:\n{self.output()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing listens on port {port} after {timeout} s:\n{self.output()}")
            time.sleep(0.02)

    def stop(self, grace: float = 60.0) -> int:
        """End the process politely, then by force, and whatever is left of its group with it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait(PATIENCE)


def alive(pid: int) -> bool:
    """Whether the process still runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def descendants(pid: int, word: str) -> list[int]:
    """The processes that a process started, and those that they started, with this word in their command."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        waiting += children.get(each, [])
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return found


def wait_until_none(word: str, timeout: float = PATIENCE) -> None:
    """Until no process on this host, but ourselves, has this word in its command."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in _commanded(word) if pid != os.getpid()]:
        if time.monotonic() > deadline:
            raise AssertionError(f"processes {left} still run after {timeout} s")
        time.sleep(0.02)


def _commanded(word: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and word.encode() in (entry / "cmdline").read_bytes():
                yield int(entry.name)


def wait_until_gone(pid: int, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while alive(pid):
        if time.monotonic() > deadline:
            raise AssertionError(f"process {pid} still runs after {timeout} s")
        time.sleep(0.01)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(10.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for_port(port: int, timeout: float = PATIENCE) -> None:
    """Wait until anybody listens on the port; `Started.wait_for_port` also notices that the process has ended."""
    deadline = time.monotonic() + timeout
    while not listening(port):
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing listens on port {port} after {timeout} s")
        time.sleep(0.02)


def _start(
    command: Sequence[str | Path], log: int, env: Mapping[str, str], cwd: Path | None
) -> subprocess.Popen[bytes] | warm.WarmProcess:
    if not warm.can_start(command):
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        return warm.start(command, stdin=nothing, stdout=log, stderr=log, env=env, cwd=cwd, new_session=True)
    finally:
        os.close(nothing)


@contextmanager
def start_process(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Started]:
    """Run a command in a process group of its own while the block lasts; both its outputs go to one log.

    `env` is added to the environment of the tests.
    """
    with tempfile.NamedTemporaryFile(prefix="ringfence-test-", suffix=".log") as log:
        process = _start(command, log.fileno(), {**os.environ, **(env or {})}, cwd)
        started = Started(process, Path(log.name))
        try:
            yield started
        finally:
            started.stop(grace=5.0)  # nobody asks any more how it ends


@contextmanager
def serve(command: Sequence[str | Path], port: int, *, env: Mapping[str, str] | None = None) -> Iterator[Started]:
    """Run a command and wait until it listens on the port."""
    with start_process(command, env=env) as started:
        started.wait_for_port(port)
        yield started


@contextmanager
def serve_fixture(script: str, *arguments: str) -> Iterator[str]:
    """Serve an HTTP server of tests/fixtures on a free port while the block lasts; gives its MCP endpoint."""
    port = free_port()
    with serve(fixture_command(script, "--port", str(port), *arguments), port):
        yield f"http://127.0.0.1:{port}/mcp"
