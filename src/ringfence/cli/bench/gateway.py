"""A governed call against the same call made directly, both over Streamable HTTP, in one run.

Everything is on: 100 rules, JSON Schema, the audit chain with its signed checkpoints, facts. A `write` waits for two
fsyncs; a `read` for none. At last the same gateway with nothing to do: its share of a core, with all that it started.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import anyio
from mcp import Client

from ringfence.cli.bench import echo
from ringfence.cli.bench.measure import Row, below, cpu_seconds, fine_cpu_seconds, note, row
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.front.listen import open_socket

_CONFIG = """version: 1
gateway: {{listen: "127.0.0.1:{port}", state: {state}}}
servers:
  echo: {{url: "http://127.0.0.1:{echo}/mcp", pins: first_use}}
capabilities:
  echo_read:  {{transport: mcp, server: echo, tool: echo, mode: read}}
  echo_write: {{transport: mcp, server: echo, tool: echo, mode: write}}
policy:
  preset: standard
  rules:
"""
_RULE = '    - {{id: r{n}, action: audit, tool_patterns: ["tool_{n}_.*"], argument_patterns: {{path: "^/srv/{n}/"}}}}\n'
_LAST = '    - {id: r100, action: audit, tool_patterns: ["echo_.*"], when: \'args.text != "never"\'}\n'
_QUIET_SECONDS = 2.0
_IDLE_SECONDS = 0.5
_IDLE = 40
MODES = {"2025-11-25": "legacy", "2026-07-28": "2026-07-28"}


@dataclass(frozen=True, slots=True)
class Setup:
    direct: str
    through: str
    gateway_pid: int


def run(calls: int, rounds: int, concurrent: int) -> list[Row]:
    with _servers() as setup:
        return [*anyio.run(_measure, setup, calls, rounds, concurrent), anyio.run(_idle, setup)]


async def _measure(setup: Setup, calls: int, rounds: int, concurrent: int) -> list[Row]:
    rows: list[Row] = []
    for revision, mode in MODES.items():
        async with AsyncExitStack() as stack:
            direct = await stack.enter_async_context(Client(setup.direct, mode=mode, cache=None))
            through = await stack.enter_async_context(Client(setup.through, mode=mode, cache=None))
            cases = {"direct": (direct, "echo"), "read": (through, "echo_read"), "write": (through, "echo_write")}
            times: dict[str, list[float]] = {name: [] for name in cases}
            cpu = dict.fromkeys(cases, 0.0)
            for client, tool in cases.values():
                await _calls(client, tool, 20)
            for _ in range(rounds):
                for name, (client, tool) in cases.items():
                    before = cpu_seconds(setup.gateway_pid)
                    times[name] += await _calls(client, tool, calls // rounds)
                    cpu[name] += cpu_seconds(setup.gateway_pid) - before
            base = row(f"direct {revision}", times["direct"])
            base.per_second = await _at_once(direct, "echo", concurrent)
            rows.append(base)
            for name in ("read", "write"):
                case = row(f"{name} {revision}", times[name])
                case.ratio = round(case.p50_ms / base.p50_ms, 2)
                case.baseline = base.name
                case.cpu_ms = round(cpu[name] / case.n * 1000, 3)
                case.per_second = await _at_once(through, f"echo_{name}", concurrent)
                rows.append(case)
    return rows


async def _calls(client: Client, tool: str, count: int) -> list[float]:
    out: list[float] = []
    for n in range(count):
        began = time.perf_counter()
        result = await client.call_tool(tool, {"text": f"hello {n}"})
        out.append(time.perf_counter() - began)
        if getattr(result, "is_error", False):
            raise Unavailable("bench", f"{tool} failed: {result}")
    return out


async def _at_once(client: Client, tool: str, concurrent: int, each: int = 20) -> float:
    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(concurrent):
            group.start_soon(_calls, client, tool, each)
    return round(concurrent * each / (time.perf_counter() - began), 1)


async def _idle(setup: Setup) -> Row:
    """Processor time in each second without a call, after calls and, where there are boxes, a run; `ratio` is the share
    of one core over all of it."""
    note(f"gateway: idle for {_IDLE * _IDLE_SECONDS:.0f} s")
    async with Client(setup.through, mode=MODES["2025-11-25"], cache=None) as client:
        if any(tool.name == "execute_python" for tool in (await client.list_tools()).tools):
            await client.call_tool("execute_python", {"code": "pass"})
    await anyio.sleep(_QUIET_SECONDS)
    shares: list[float] = []
    first = began = time.perf_counter()
    start = before = _cpu_with_children(setup.gateway_pid)
    for _ in range(_IDLE):
        await anyio.sleep(_IDLE_SECONDS)
        now, used = time.perf_counter(), _cpu_with_children(setup.gateway_pid)
        shares.append((used - before) / (now - began))
        began, before = now, used
    made = row("idle gateway: processor time in a second", shares)
    made.ratio = round((before - start) / (began - first), 5)
    made.baseline = "one core"
    return made


def _cpu_with_children(pid: int) -> float:
    total = 0.0
    for each in (pid, *below(pid)):
        with suppress(OSError):  # it has just ended
            total += fine_cpu_seconds(each)
    return total


@contextmanager
def _servers() -> Iterator[Setup]:
    ports = [free_port(), free_port()]
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        path = Path(folder) / "ringfence.yaml"
        text = _CONFIG.format(port=ports[1], echo=ports[0], state=Path(folder) / "state")
        path.write_text(text + "".join(_RULE.format(n=n) for n in range(1, 100)) + _LAST, encoding="utf-8")
        baseline = subprocess.Popen([sys.executable, echo.__file__, str(ports[0])])
        try:
            wait_for(ports[0])
            command = [sys.executable, "-m", "ringfence.cli.main", "serve", "--config", str(path)]
            gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                wait_for(ports[1])
                yield Setup(f"http://127.0.0.1:{ports[0]}/mcp", f"http://127.0.0.1:{ports[1]}/mcp", gateway.pid)
            finally:
                gateway.terminate()
                gateway.wait(10)
        finally:
            baseline.terminate()
            baseline.wait(10)


def free_port() -> int:
    with open_socket("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise Unavailable("bench", f"nothing listens on port {port}")
