"""A governed call against the same call made directly, both over Streamable HTTP, in one run.

Each call passes 100 rules, JSON Schema, the audit chain with its signed checkpoints, and facts. A `write` waits for two
fsyncs; a `read` for none. Beside it a gateway with everything on: its caller has a token, rates and budgets, what is
read has labels, calls are traced and logged. At last the first with nothing to do: its share of a core, with all that
it started.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from ringfence.cli.bench import echo, sink
from ringfence.cli.bench.measure import Row, below, fine_cpu_seconds, note, row
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
_FULL = """version: 1
gateway: {{listen: "127.0.0.1:{port}", state: {state}, log: json}}
servers:
  echo: {{url: "http://127.0.0.1:{echo}/mcp", pins: first_use}}
agents:
  bench:
    capabilities: ["echo_*"]
    tenant: acme
    quota: {{per_minute: 900000, concurrent: 1000}}
    budget: {{units: 1000000000}}
tenants: {{acme: {{budget: {{units: 1000000000}}}}}}
capabilities:
  echo_read: {{server: echo, tool: echo, mode: read, labels: [private, untrusted], rate: {{per_minute: 900000}}}}
  echo_write: {{server: echo, tool: echo, mode: write, labels: [external_sink], rate: {{per_minute: 900000}}}}
{telemetry}
policy:
  preset: standard
  rules:
"""
_TELEMETRY = 'telemetry: {{otlp: "http://127.0.0.1:{port}"}}'
_RULE = '    - {{id: r{n}, action: audit, tool_patterns: ["tool_{n}_.*"], argument_patterns: {{path: "^/srv/{n}/"}}}}\n'
_LAST = '    - {id: r100, action: audit, tool_patterns: ["echo_.*"], when: \'args.text != "never"\'}\n'
_QUIET_SECONDS = 2.0
_IDLE_SECONDS = 0.5
_IDLE = 40
_CLIENT_SECONDS = 30.0
MODES = {"2025-11-25": "legacy", "2026-07-28": "2026-07-28"}


@dataclass(frozen=True, slots=True)
class Setup:
    direct: str
    through: str
    gateway_pid: int
    full: str
    full_pid: int
    token: str
    """With which the second gateway is called."""


def run(calls: int, rounds: int, concurrent: int) -> list[Row]:
    with _servers() as setup:
        return [*anyio.run(_measure, setup, calls, rounds, concurrent), anyio.run(_idle, setup)]


async def _measure(setup: Setup, calls: int, rounds: int, concurrent: int) -> list[Row]:
    rows: list[Row] = []
    for revision, mode in MODES.items():
        async with AsyncExitStack() as stack:
            direct = await stack.enter_async_context(Client(setup.direct, mode=mode, cache=None))
            through = await stack.enter_async_context(Client(setup.through, mode=mode, cache=None))
            http = httpx2.AsyncClient(headers={"authorization": f"Bearer {setup.token}"}, timeout=_CLIENT_SECONDS)
            shown = streamable_http_client(setup.full, http_client=await stack.enter_async_context(http))
            full = await stack.enter_async_context(Client(shown, mode=mode, cache=None))
            cases = {
                f"direct {revision}": (direct, "echo", None),
                f"read {revision}": (through, "echo_read", setup.gateway_pid),
                f"write {revision}": (through, "echo_write", setup.gateway_pid),
                f"read {revision}, everything on": (full, "echo_read", setup.full_pid),
                f"write {revision}, everything on": (full, "echo_write", setup.full_pid),
            }
            times: dict[str, list[float]] = {name: [] for name in cases}
            cpu = dict.fromkeys(cases, 0.0)
            for client, tool, _ in cases.values():
                await _calls(client, tool, 20)
            for _ in range(rounds):
                for name, (client, tool, pid) in cases.items():
                    before = 0.0 if pid is None else fine_cpu_seconds(pid)
                    times[name] += await _calls(client, tool, calls // rounds)
                    cpu[name] += 0.0 if pid is None else fine_cpu_seconds(pid) - before
            base: Row | None = None
            for name, (client, tool, pid) in cases.items():
                case = row(name, times[name])
                case.per_second = await _at_once(client, tool, concurrent)
                if base is None:
                    base = case
                else:
                    case.ratio = round(case.p50_ms / base.p50_ms, 2)
                    case.baseline = base.name
                if pid is not None:
                    case.cpu_ms = round(cpu[name] / case.n * 1000, 3)
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
    baseline, plain, full, collector = (free_port() for _ in range(4))
    rules = "".join(_RULE.format(n=n) for n in range(1, 100)) + _LAST
    traced = importlib.util.find_spec("opentelemetry") is not None
    if not traced:
        note("gateway: without traces, which need the extra `telemetry`")
    telemetry = _TELEMETRY.format(port=collector) if traced else ""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfence-bench-")))
        paths = [folder / "plain.yaml", folder / "full.yaml"]
        for path, text, port in zip(paths, (_CONFIG, _FULL), (plain, full), strict=True):
            text = text.format(port=port, echo=baseline, state=folder / path.stem, telemetry=telemetry)
            path.write_text(text + rules, encoding="utf-8")
        stack.enter_context(_process(sys.executable, echo.__file__, str(baseline)))
        if traced:
            stack.enter_context(_process(sys.executable, sink.__file__, str(collector)))
        wait_for(baseline)
        # The one writes a line for each call.
        logs = (None, subprocess.DEVNULL)
        pids = [
            stack.enter_context(_process(*_OURS, "serve", "--config", str(path), stderr=log))
            for path, log in zip(paths, logs, strict=True)
        ]
        wait_for(plain)
        wait_for(full)
        made = [*_OURS, "token", "create", "--agent", "bench", "--json", "--config", str(paths[1])]
        told = subprocess.run(made, check=True, stdout=subprocess.PIPE)
        token = str(json.loads(told.stdout)["token"])
        direct, through, all_on = (f"http://127.0.0.1:{port}/mcp" for port in (baseline, plain, full))
        yield Setup(direct, through, pids[0], all_on, pids[1], token)


_OURS = (sys.executable, "-m", "ringfence.cli.main")


@contextmanager
def _process(*command: str, stderr: int | None = None) -> Iterator[int]:
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield started.pid
    finally:
        started.terminate()
        started.wait(10)


def free_port() -> int:
    with open_socket("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise Unavailable("bench", f"nothing listens on port {port}")
