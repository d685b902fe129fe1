"""A program in a fresh box against the same program started bare, in one run.

Every protection is on, and the clock stops when the box is reaped and removed. Cases alternate: in each round some runs
of every case, back to back, then a pause in which the pool of ready boxes is filled again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, replace

from mcp import Client

from ringfence import run_code, run_code_async
from ringfence.cli.bench import ordinary
from ringfence.cli.bench.gateway import free_port, wait_for
from ringfence.cli.bench.measure import (
    BenchCase,
    Row,
    below,
    cpu_seconds_of_all,
    interleaved,
    note,
    own_record,
    private_kb,
    repeated,
    row,
)
from ringfence.core.box import BoxSpec, Layout, Program
from ringfence.core.errors import Unavailable
from ringfence.core.system import interpreter
from ringfence.sandbox.process.backend import ProcessBackend

_SOURCE = "pass"
_DATA = ("numpy", "pandas")
_AT_ONCE = (1, 2, 8)
_BURST = 100
_BURSTS = 3
_LIVE = 20
_HERE = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"


def run(runs: int, rounds: int = 10) -> list[Row]:
    """`runs` of the cases that matter, fewer of what is slow. Raises Unavailable where there are no boxes here."""
    with _gateway() as url:
        rows = asyncio.run(_measure(url, runs, rounds))
    return rows if os.geteuid() else [*rows, *_of_an_ordinary_user(runs, rounds)]


async def _measure(url: str, runs: int, rounds: int) -> list[Row]:
    async with AsyncExitStack() as stack:
        backends = ProcessBackend(), ProcessBackend(depth=0)
        for backend in backends:
            stack.push_async_callback(backend.close)
        client = await stack.enter_async_context(Client(url, cache=None))
        rows = await interleaved(_cases(backends, client, runs), rounds, "box")
    bare = rows[0]
    for many in _AT_ONCE:
        rows += await asyncio.to_thread(_at_once, many, runs // 3)
    rows.append(await _burst())
    rows += await _memory(bare)
    return rows


# ── One after the other ───────────────────────────────────────────────────────────────────────────


def _cases(backends: tuple[ProcessBackend, ProcessBackend], client: Client, runs: int) -> list[BenchCase]:
    kept, drained = backends
    python = str(interpreter())
    few = max(10, runs // 5)
    bare = BenchCase("bare python -c pass", _bare(python, "-c", _SOURCE), few)
    cases = [
        bare,
        BenchCase("box: run_code, the governed way", _governed("python"), runs, bare.name),
        BenchCase("box: the backend alone", _alone(kept), runs, bare.name),
        BenchCase("box: none kept ready", _alone(drained), few, bare.name),
        BenchCase("box: fresh layout, by exec", _alone(kept, "fresh"), few, bare.name),
        BenchCase("box: over MCP, execute_python", _over_mcp(client), few, bare.name),
    ]
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        note("bubblewrap is not installed, so it is not measured beside us")
    else:
        words = (bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
        cases.append(BenchCase("bubblewrap python -c pass", _bare(*words, python, "-c", _SOURCE), few, bare.name))
    if all(importlib.util.find_spec(name) for name in _DATA):
        # The packages may be those of a virtual environment, which the interpreter's real path does not know.
        importing = _bare(sys.executable, "-c", f"import {', '.join(_DATA)}")
        slow = BenchCase("bare python importing numpy, pandas", importing, max(5, runs // 50))
        cases += [slow, BenchCase("box: template data, run_code", _governed("data"), max(20, runs // 2), slow.name)]
    else:
        note(
            "numpy and pandas are not installed here, so boxes that have them loaded are not measured"
            " (pip install numpy pandas)"
        )
    return cases


def _bare(*command: str) -> Callable[[], Awaitable[None]]:
    async def once() -> None:
        _start(command)

    return once


def _start(command: tuple[str, ...]) -> None:
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    if started.wait() != 0:
        raise Unavailable("bench", f"{command[0]} ended with {started.returncode}")


def _governed(template: str) -> Callable[[], Awaitable[None]]:
    async def once() -> None:
        # In this thread, which has nothing else to do: boxes are served by another.
        _checked(run_code(_SOURCE, template=template).facts["ended"])

    return once


def _alone(backend: ProcessBackend, layout: Layout = "shared") -> Callable[[], Awaitable[None]]:
    spec = BoxSpec(Program("python", source=_SOURCE.encode()), layout=layout)

    async def once() -> None:
        _checked((await backend.run(spec)).ended)

    return once


def _over_mcp(client: Client) -> Callable[[], Awaitable[None]]:
    async def once() -> None:
        result = await client.call_tool("execute_python", {"code": _SOURCE})
        _checked("failed" if getattr(result, "is_error", True) else "exited")

    return once


def _checked(ended: str) -> None:
    if ended != "exited":
        raise Unavailable("bench", f"a run that only says `pass` ended as {ended}")


# ── As another user ───────────────────────────────────────────────────────────────────────────────


def _of_an_ordinary_user(runs: int, rounds: int) -> list[Row]:
    """The first cases, as root for an ordinary user. Other users measure themselves anyway."""
    user, group = ordinary.ordinary_user()
    note(f"box: as an ordinary user ({user})")
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        become = (sys.executable, "-m", "ringfence.cli.bench.ordinary", str(user), str(group), folder)
        words = (sys.executable, "-m", "ringfence.cli.bench.box", str(runs), str(rounds))
        done = subprocess.run((*become, *words), capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        note(f"boxes of an ordinary user are not measured: {said[0]}")
        return []
    return [Row(**each) for each in json.loads(done.stdout)]


async def _as_ourselves(runs: int, rounds: int) -> list[Row]:
    backend = ProcessBackend()
    try:
        report = await backend.run(BoxSpec(Program("python", source=_SOURCE.encode())))
        who = "an id of its own" if report.isolation["host_id"]["whose"] == "own" else "the user's id"
        bare = BenchCase(
            "bare python -c pass, ordinary user", _bare(str(interpreter()), "-c", _SOURCE), max(10, runs // 5)
        )
        cases = [
            bare,
            BenchCase("box: run_code, ordinary user", _governed("python"), runs, bare.name),
            BenchCase("box: the backend alone, ordinary user", _alone(backend), runs, bare.name),
        ]
        rows = await interleaved(cases, rounds, "box")
    finally:
        await backend.close()
    return [rows[0], *(replace(each, name=f"{each.name}, {who}") for each in rows[1:])]


# ── Many at once ──────────────────────────────────────────────────────────────────────────────────


def _at_once(many: int, count: int) -> list[Row]:
    """The same by so many threads, each with its runs back to back: bare, and the governed way."""
    note(f"box: {many} at once")
    command = (str(interpreter()), "-c", _SOURCE)
    bare = _by_threads(f"bare, {many} at once", lambda: _start(command), many, max(10, count // 4))
    boxed = _by_threads(f"run_code, {many} at once", lambda: _checked(run_code(_SOURCE).facts["ended"]), many, count)
    boxed.ratio = round(boxed.p50_ms / bare.p50_ms, 3)
    boxed.baseline = bare.name
    return [bare, boxed]


def _by_threads(name: str, once: Callable[[], None], many: int, count: int) -> Row:
    def timed(_: int) -> float:
        began = time.perf_counter()
        once()
        return time.perf_counter() - began

    with ThreadPoolExecutor(many) as threads:
        list(threads.map(timed, range(many)))
        cpu = cpu_seconds_of_all()
        began = time.perf_counter()
        times = list(threads.map(timed, range(count)))
        took = time.perf_counter() - began
    made = row(name, times)
    made.per_second = round(count / took, 1)
    made.cpu_ms = round((cpu_seconds_of_all() - cpu) / count * 1000, 2)
    return made


async def _burst() -> Row:
    """All asked for in the same moment; each is timed from there to its end."""
    times: list[float] = []
    for _ in range(_BURSTS):
        note(f"box: {_BURST} in the same moment")
        await asyncio.sleep(1.0)  # what was made before is taken apart by then
        began = time.perf_counter()

        async def once(began: float = began) -> None:
            _checked((await run_code_async(_SOURCE)).facts["ended"])
            times.append(time.perf_counter() - began)

        await asyncio.gather(*(once() for _ in range(_BURST)))
    return row(f"burst of {_BURST} fresh boxes", times)


# ── What a box needs while it lives ───────────────────────────────────────────────────────────────


async def _memory(bare: Row) -> list[Row]:
    note("box: memory")
    others = set(below(os.getpid()))
    backend = ProcessBackend(depth=0)
    spec = BoxSpec(Program("python", source=_HERE.encode()))
    running: list[asyncio.Task[object]] = []

    async def make() -> None:
        await backend.warm(spec)

    async def begin() -> None:
        said = asyncio.Event()
        running.append(asyncio.create_task(backend.run(spec, lambda *_: said.set())))
        await said.wait()

    try:
        await repeated(BenchCase("alone", _alone(backend), 1), _LIVE)
        others |= set(below(os.getpid()))
        ready = row(f"ready box, {_LIVE} of them: to make one", await repeated(BenchCase("make", make, 1), _LIVE), bare)
        ready.memory_kb = _each(others)
        live = row(
            f"live box, {_LIVE} of them: to its first output", await repeated(BenchCase("begin", begin, 1), _LIVE), bare
        )
        live.memory_kb = _each(others)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    finally:
        await backend.close()
    return [ready, live]


def _each(others: set[int]) -> float | None:
    """The memory of each live box in KiB: of its first process, and of the one that its program runs in."""
    try:
        return round(sum(private_kb(pid) for pid in below(os.getpid()) if pid not in others) / _LIVE, 1)
    except OSError:
        note("memory is not shown: only root may look into boxes")
        return None


# ── Set-up ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _gateway() -> Iterator[str]:
    """The address of a gateway with a record of its own."""
    port = free_port()
    with own_record(f"127.0.0.1:{port}") as path:
        command = [sys.executable, "-m", "ringfence.cli.main", "serve", "--config", str(path)]
        gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            gateway.terminate()
            gateway.wait(10)


if __name__ == "__main__":
    with own_record():
        print(json.dumps([asdict(each) for each in asyncio.run(_as_ourselves(int(sys.argv[1]), int(sys.argv[2])))]))
