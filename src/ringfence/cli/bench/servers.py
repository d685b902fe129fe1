"""What a box adds to a call of a stdio server, and to its start: the same server with and without a box."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio

from ringfence.cli.bench.measure import Row, row
from ringfence.compose.backends import make_staying_backend
from ringfence.compose.runs import provision
from ringfence.compose.servers import launch_settings
from ringfence.config.paths import process_environment
from ringfence.config.settings import SandboxSettings
from ringfence.core.model import Json, Principal, ServerSpec
from ringfence.core.ports import Launcher
from ringfence.sandbox.servers.launcher import BoxLauncher
from ringfence.upstream.host_process import HostLauncher
from ringfence.upstream.link import InFlight
from ringfence.upstream.stdio import StdioLink

_SERVER = str(Path(__file__).with_name("lines.py"))
_INTERPRETER = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
_ROUNDS = 6
_STARTS = 20


def run(calls: int) -> list[Row]:
    return asyncio.run(_run(calls))


async def _run(calls: int) -> list[Row]:
    settings = SandboxSettings()
    backend = make_staying_backend(settings)
    boxes = BoxLauncher(backend, launch_settings(provision(settings).limits, {}, None))
    launchers: dict[str, Launcher] = {"bare": HostLauncher(process_environment()), "boxed": boxes}
    try:
        return [*await _calls(launchers, calls), *await _starts(launchers, min(_STARTS, calls))]
    finally:
        await backend.close()


async def _calls(launchers: dict[str, Launcher], calls: int) -> list[Row]:
    times: dict[str, list[float]] = {name: [] for name in launchers}
    async with _link(launchers["bare"]) as bare, _link(launchers["boxed"]) as boxed:
        links = {"bare": bare, "boxed": boxed}
        for link in links.values():
            for _ in range(20):
                await _call(link)
        for _ in range(_ROUNDS):
            for name, link in links.items():
                times[name] += [await _call(link) for _ in range(max(1, calls // _ROUNDS))]
    return _rows("call of a stdio server", times)


async def _starts(launchers: dict[str, Launcher], starts: int) -> list[Row]:
    """Measure starts up to the first answer. The first of each is left out: it makes what all others share."""
    times: dict[str, list[float]] = {name: [] for name in launchers}
    for _ in range(starts + 1):
        for name, launcher in launchers.items():
            began = time.perf_counter()
            async with _link(launcher) as link:
                await _call(link)
                times[name].append(time.perf_counter() - began)
    return _rows("start of a stdio server, to its first answer", {name: each[1:] for name, each in times.items()})


def _rows(what: str, times: dict[str, list[float]]) -> list[Row]:
    bare = row(f"{what}, bare", times["bare"])
    boxed = row(f"{what}, boxed", times["boxed"], bare)
    boxed.added_ms = round(boxed.p50_ms - bare.p50_ms, 4)
    return [bare, boxed]


async def _call(link: StdioLink) -> float:
    began = time.perf_counter()
    await link.request("tools/call", {"name": "echo", "arguments": {"text": "hello"}}, InFlight(_unasked, _ignored))
    return time.perf_counter() - began


@asynccontextmanager
async def _link(launcher: Launcher) -> AsyncIterator[StdioLink]:
    spec = ServerSpec("echo", (_INTERPRETER, "-I", "-S", _SERVER))
    link = StdioLink(spec, partial(launcher.launch, spec, Principal("bench")))
    ready = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(link.run, ready.set, _ignored)
        await ready.wait()
        yield link
        group.cancel_scope.cancel()


async def _unasked(method: str, params: Json) -> Json:
    return {}


async def _ignored(method: str, params: Json) -> None:
    return None
