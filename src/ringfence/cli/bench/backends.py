"""Every backend that makes boxes here: to its first box, a program in a warm one, a step, pause and resume, snapshot
and restore, what a box needs, and how many programs a second; against `docker run` of the same program, where an engine
answers.

All alternate in one run, and all run the same program in the same root. What cannot be measured is a row with the
reason. Machines that are emulated are labelled in each of their rows: such figures say nothing of real ones.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from ringfence.cli.bench.measure import BenchCase, Row, absent, interleaved, note, repeated, row
from ringfence.compose.backends import ROWS, make_backend
from ringfence.compose.guests import kernel_folder
from ringfence.compose.probes import Probed, probe
from ringfence.config.settings import Config, SandboxSettings
from ringfence.core.box import BACKENDS, MIB, BoxSpec, Limits, Program
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.ports import Backend
from ringfence.core.record import dataclass
from ringfence.core.sessions import (
    BoxInterpreter,
    Cell,
    Owner,
    SessionBackend,
    SessionSpec,
    StayingBox,
    StaySpec,
    discard_output,
    discard_value,
)
from ringfence.core.system import interpreter
from ringfence.sandbox.sessions.capacity import KeeperRules
from ringfence.sandbox.sessions.manager import SessionManager

_BUDGET_SECONDS = 20.0
"""What the runs of one case may take together: slow backends are measured less often."""
_COLD = 3
_AT_ONCE = 4
_PROGRAM = BoxSpec(Program("python", b"pass"))
_IMAGE = "ringfence-bench:1"
_DOCKER = "docker run of the same program"
_BARE = "bare python -c pass"
_RESTORED = "a snapshot of files, and a box of it"
_ME = Owner("local", "bench")


def run(runs: int, rounds: int = 5, settings: Config | None = None) -> list[Row]:
    """At most `runs` of each case. Of the state, only the kernel is used that was fetched into it."""
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as folder:
        state = Path(folder)
        if settings is not None and (fetched := kernel_folder(settings.gateway.state.absolute())).is_dir():
            kernel_folder(state).parent.mkdir()
            kernel_folder(state).symlink_to(fetched)
        sandbox = SandboxSettings() if settings is None else settings.sandbox
        return asyncio.run(_measure(sandbox, state, runs, rounds))


@dataclass(slots=True)
class _Measured:
    """A backend that makes boxes here."""

    name: str
    backend: Backend
    found: Probed
    live: StayingBox | None = None
    interpreter: BoxInterpreter | None = None
    opened: float = 0.0
    """How long it took to open that."""
    without: str = ""
    """Why it has no box that stays."""
    sessions: SessionManager | None = None
    session: str = ""
    unsaved: str = ""
    """Why there are no snapshots of that."""

    @property
    def label(self) -> str:
        return f"{self.name} (emulated)" if self.found.emulated else self.name

    def count(self, runs: int) -> int:
        return max(3, min(runs, int(_BUDGET_SECONDS * 1000 / max(self.found.start_ms, 1.0))))


async def _measure(settings: SandboxSettings, state: Path, runs: int, rounds: int) -> list[Row]:
    there: list[_Measured] = []
    rows: list[Row] = []
    missing: list[Row] = []
    docker = await asyncio.to_thread(_docker, state)
    try:
        for name, level in BACKENDS.items():
            note(f"backends: is {name} here?")
            found, backend = await _tried(replace(settings, backend=name), state)
            if backend is None:
                missing.append(absent(f"{name} ({level})", found.missing or ""))
                continue
            there.append(_Measured(name, backend, found))
            await _open(there[-1], state)
        base = BenchCase(_DOCKER, docker, max(3, runs // 20)) if callable(docker) else BenchCase(_BARE, _bare, runs)
        cases = [base, *(case for each in there for case in _cases(each, runs, base.name))]
        rows += await interleaved(cases, rounds, "backends")
        if not callable(docker):
            missing.insert(0, absent(_DOCKER, docker))
        for each in there:
            rows += await _beside(each, settings, state, rows[0])
    finally:
        for each in there:
            if each.live is not None:
                await each.live.end()
            if each.sessions is not None:
                await each.sessions.close()
            await each.backend.close()
        if callable(docker):
            await asyncio.to_thread(_forget)
    return rows + missing


async def _tried(settings: SandboxSettings, state: Path) -> tuple[Probed, Backend | None]:
    try:
        backend = make_backend(settings, state)
    except Unavailable as exc:
        return Probed(exc.message), None
    found = await probe(backend, ROWS[settings.backend].probe_seconds)
    if found.missing is None:
        return found, backend
    await backend.close()
    return found, None


async def _open(each: _Measured, state: Path) -> None:
    """A box that stays, with an interpreter, and a session, where it has such boxes."""
    if not isinstance(each.backend, SessionBackend) or not ROWS[each.name].stays:
        each.without = "its boxes do not stay"
        return
    try:
        await (await each.backend.open(StaySpec())).end()
        began = time.perf_counter()
        each.live = await each.backend.open(StaySpec())
        each.opened = time.perf_counter() - began
        each.interpreter = await each.live.interpreter()
        await _step(each)
    except Unavailable as exc:
        each.without = exc.message
        return
    try:
        each.sessions = await SessionManager.open(each.backend, state / "sessions" / each.name, KeeperRules())
        each.session = (await each.sessions.create(_ME, SessionSpec(idle_seconds=None))).id
        await _restored(each)
    except (Refused, Unavailable) as exc:
        each.unsaved = exc.message


# ── One after the other ───────────────────────────────────────────────────────────────────────────


def _cases(each: _Measured, runs: int, base: str) -> list[BenchCase]:
    many = each.count(runs)

    async def program() -> None:
        await _ran(each.backend)

    async def step() -> None:
        await _step(each)

    async def paused() -> None:
        assert each.live is not None
        await _awaited(each.live.pause())
        await _awaited(each.live.resume())
        await _step(each)

    async def restored() -> None:
        await _restored(each)

    cases = [BenchCase(f"{each.label}: a program", program, many, base)]
    if each.interpreter is not None:
        cases.append(BenchCase(f"{each.label}: a step of a session", step, many, base))
        cases.append(BenchCase(f"{each.label}: paused, resumed, and a step", paused, many, base))
    if each.session and not each.unsaved:
        cases.append(BenchCase(f"{each.label}: {_RESTORED}", restored, max(3, many // 10), base))
    return cases


async def _ran(backend: Backend) -> None:
    report = await backend.run(_PROGRAM)
    if (report.ended, report.exit_status) != ("exited", 0):
        raise Unavailable("bench", f"a program of backend {backend.name} ended by {report.ended}")


async def _step(each: _Measured) -> None:
    assert each.interpreter is not None
    done = await each.interpreter.run(Cell(b"pass", Limits(wall_seconds=60)), discard_output, discard_value)
    if done.report.ended != "exited":
        raise Unavailable("bench", f"a step of backend {each.name} ended by {done.report.ended}")


async def _restored(each: _Measured) -> None:
    assert each.sessions is not None
    taken = await each.sessions.snapshot(_ME, each.session)
    again = await each.sessions.create(_ME, SessionSpec(snapshot=taken.id))
    await each.sessions.end(_ME, again.id)
    await each.sessions.remove_snapshot(_ME, taken.id)


async def _awaited(done: object) -> None:
    if isinstance(done, Awaitable):
        await done


async def _bare() -> None:
    _start()


def _start() -> None:
    started = subprocess.Popen((str(interpreter()), "-c", "pass"), stdin=subprocess.DEVNULL)
    if started.wait() != 0:
        raise Unavailable("bench", f"the interpreter ended with {started.returncode}")


# ── What cannot alternate ─────────────────────────────────────────────────────────────────────────


async def _beside(each: _Measured, settings: SandboxSettings, state: Path, base: Row) -> list[Row]:
    note(f"backends: {each.label}, cold, many at once, and memory")

    async def cold() -> None:
        backend = make_backend(replace(settings, backend=each.name), state, keep_ready=0)
        try:
            await _ran(backend)
        finally:
            await backend.close()

    first = await repeated(BenchCase("", cold, 1), _COLD)
    rows = [row(f"{each.label}: cold, to the end of a first program", first, base)]
    many = each.count(20 * _AT_ONCE)
    times: list[float] = []

    async def worker(count: int) -> None:
        times.extend(await repeated(BenchCase("", lambda: _ran(each.backend), 1), count))

    began = time.perf_counter()
    await asyncio.gather(*(worker(max(1, many // _AT_ONCE)) for _ in range(_AT_ONCE)))
    at_once = row(f"{each.label}: programs, {_AT_ONCE} at once", times, base)
    at_once.per_second = round(len(times) / (time.perf_counter() - began), 1)
    rows.append(at_once)
    if each.live is None:
        rows.append(absent(f"{each.label}: steps, pause, snapshots, memory of a box", each.without))
    else:
        held = row(f"{each.label}: a box that stays, to open one", [each.opened], base)
        held.memory_kb = round(each.live.memory() / 1024, 1)
        rows.append(held)
        if each.unsaved:
            rows.append(absent(f"{each.label}: {_RESTORED}", each.unsaved))
    return rows


# ── Against an engine of containers ───────────────────────────────────────────────────────────────


def _docker(state: Path) -> Callable[[], Awaitable[None]] | str:
    """What runs the program in a container of `docker run`; or why that cannot be measured."""
    if shutil.which("docker") is None:
        return "there is no docker here: apt install docker.io"
    asked = subprocess.run(["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, check=False)
    if asked.returncode != 0:
        return "no Docker engine answers: start one, or name it in DOCKER_HOST"
    from ringfence.packages.cache import PackageCache  # noqa: PLC0415 - where there is no engine, nothing is packed
    from ringfence.packages.images import build  # noqa: PLC0415 - as above

    cache = PackageCache(state / "packages")
    tree = build.build(cache, build.BuildRequest(()), lambda steps: None, lambda done: None).tree
    python = tree.about["python"]
    packed = subprocess.Popen(["tar", "-C", str(tree.folder), "-c", "."], stdout=subprocess.PIPE)
    loaded = subprocess.run(["docker", "import", "-", _IMAGE], stdin=packed.stdout, capture_output=True, check=False)
    if packed.wait() or loaded.returncode != 0:
        return f"its image could not be made: {loaded.stderr.decode('utf-8', 'replace').strip()[:200]}"
    words = ["docker", "run", "--rm", "--network", "none", "--memory", str(256 * MIB), _IMAGE, python, "-c", "pass"]

    async def once() -> None:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        _, said = await process.communicate()
        if process.returncode != 0:
            raise Unavailable("bench", f"docker run: {said.decode('utf-8', 'replace').strip()[:200]}")

    return once


def _forget() -> None:
    subprocess.run(["docker", "rmi", "--force", _IMAGE], capture_output=True, check=False)
