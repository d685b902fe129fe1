"""A fake backend for boxes that stay, for clocks, ownership and leaks: it isolates nothing, and runs no code.

A box is a temporary folder. Its interpreters and commands understand a few words: see `FakeInterpreter` and
`FakeCommand`.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import BoxReport, Captured, Serve, Shown, Stream
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.sessions import (
    Cell,
    CellReport,
    CellRequest,
    Command,
    CommandRequest,
    Failure,
    Owner,
    SessionSpec,
    StaySpec,
    StepReport,
    Tell,
)
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.sessions.capacity import KeeperRules
from ringfence.sandbox.sessions.manager import SessionManager
from tests import tooling

ME, COLLEAGUE, STRANGER = Owner("t", "me"), Owner("t", "colleague"), Owner("other", "me")
TICK = 0.005


def captured(data: bytes = b"") -> Captured:
    return Captured(data, total=len(data), sha256=sha256(data).hexdigest())


def unheard(stream: Stream, data: bytes) -> None:
    return


def unseen(claim: Shown | Failure) -> None:
    return


class Stopped(Exception):
    """What runs in a fake box was ended."""


class FakeBox:
    def network_meter(self) -> Callable[[], dict[str, Any] | None]:
        return lambda: None

    async def connect(self, port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port))

    def __init__(self, spec: StaySpec) -> None:
        self.spec = spec
        set_up = {"template": {"setup": "user"}} if spec.setup is not None else {}
        self.isolation: Mapping[str, Any] = {"backend": "fake", **set_up}
        self.mounted: Mapping[str, tuple[bool, tuple[int, int]]] = {}
        self.whole = Path(tempfile.mkdtemp(prefix="fake-box-"))
        self.place = self.whole / "workspace"
        for name in ("workspace", "tmp", "home/user"):
            (self.whole / name).mkdir(parents=True)
        self.disk = os.open(self.whole, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.paused = False
        self.held = False
        """Nothing leaves it."""
        self.gives_back: int | None = None
        self.pauses = 0
        self.interpreters = 0
        self.begun = 0
        """Cells and commands that run, or did."""
        self.enough = asyncio.Event()
        """For which those wait that have nothing else to do."""
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def files(self, on_host: tuple[str, ...] = ()) -> Workspace:
        return Workspace(self.disk, None, None, on_host, ("/tmp", "/home/user")).again(to_fill=True)

    async def interpreter(self) -> FakeInterpreter:
        await self._enter()
        self.interpreters += 1
        return FakeInterpreter(self)

    async def command(self, command: Command, tell: Tell) -> FakeCommand:
        await self._enter()
        self.begun += 1
        return FakeCommand(self, command, tell)

    async def _enter(self) -> None:
        await asyncio.sleep(TICK)
        if self.paused:
            # Nothing may be started in a box that stands still, but for one that does so because it ends.
            async with asyncio.timeout(tooling.PATIENCE):
                await asyncio.shield(self.gone)
        if self.gone.done():
            raise Unavailable("no_process", "the fake box is gone")

    async def pause(self) -> None:
        self.paused = True
        self.pauses += 1

    async def resume(self) -> None:
        self.paused = False

    def hold_network(self) -> None:
        self.held = True

    def memory(self) -> int:
        return 1000

    def cpu_ms(self) -> float:
        return 10.0 * self.begun

    def give_back(self) -> int | None:
        assert self.paused
        return self.gives_back

    def runs_on(self) -> bool:
        return False

    def die(self, why: str = "it died") -> None:
        if not self.gone.done():
            self.gone.set_result(why)
            os.close(self.disk)

    async def end(self) -> None:
        await asyncio.sleep(TICK)
        self.die("ended")

    async def ended(self) -> str:
        return await asyncio.shield(self.gone)

    async def spend(self, seconds: float, limit: float, stopped: asyncio.Event) -> str:
        """Pass this time, of which the time does not count in which the box is paused."""
        spent = 0.0
        while spent < seconds:
            if self.gone.done():
                return "infra"
            if stopped.is_set() and not self.paused:
                return "stopped"
            if spent >= limit:
                return "timeout"
            if math.isinf(seconds) and self.enough.is_set() and not self.paused:
                return ""
            await asyncio.sleep(TICK)
            spent += 0.0 if self.paused else TICK
        return ""


@dataclass
class FakeInterpreter:
    """Knows `sleep 0.1`, `sleep inf`, which ends when there was enough, `set name value`, `get name`, `say text`,
    `put path text`, `die`; one in a line."""

    box: FakeBox
    names: dict[str, str] = field(default_factory=dict)
    folder: str = "/workspace"
    alive: bool = True
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    running: bool = False

    async def run(self, cell: Cell, tell: Tell, shown: Callable[[Shown | Failure], None]) -> CellReport:
        assert not self.running, "two cells at one time"
        if not self.alive:
            raise Unavailable("no_interpreter", "it is gone")
        self.running = True
        self.box.begun += 1
        self.interrupted.clear()
        said: list[bytes] = []
        results: list[Shown] = []
        try:
            for line in cell.source.decode().splitlines():
                ended = await self._line(line, cell, said, results)
                if ended == "stopped":
                    failure = Failure("KeyboardInterrupt", "")
                    return CellReport(BoxReport("exited", 1), tuple(results), failure)
                if ended:
                    self.alive = ended == "timeout"
                    return CellReport(BoxReport(ended), tuple(results), alive=self.alive)  # type: ignore[arg-type]
            for result in results:
                shown(result)
            for piece in said:
                tell("stdout", piece)
            return CellReport(BoxReport("exited", 0, stdout=captured(b"".join(said))), tuple(results))
        finally:
            self.running = False

    async def _line(self, line: str, cell: Cell, said: list[bytes], results: list[Shown]) -> str:
        if "getcwd" in line:
            said.append(self.folder.encode() + b"\n")
            return ""
        if found := re.search(r"chdir\('(.*)'\)", line):
            self.folder = found[1]
            return ""
        word, _, rest = line.partition(" ")
        if word == "sleep":
            return await self.box.spend(float(rest), cell.limits.wall_seconds, self.interrupted)
        await asyncio.sleep(0)
        if word == "die":
            return "signalled"
        if word == "set":
            name, _, value = rest.partition(" ")
            self.names[name] = value
        elif word == "get":
            results.append(Shown({"text/plain": self.names.get(rest, "nothing")}, main=True))
        elif word == "say":
            said.append(rest.encode())
        elif word == "put" and not self.box.gone.done():
            path, _, text = rest.partition(" ")
            (self.box.place / path).parent.mkdir(parents=True, exist_ok=True)
            (self.box.place / path).write_text(text)
        return ""

    def interrupt(self) -> bool:
        self.interrupted.set()
        return self.running

    async def end(self) -> None:
        self.alive = False


class FakeCommand:
    """Knows `sleep 0.1`, `sleep inf`, `say text` and `cat`, which says what it is sent."""

    def __init__(self, box: FakeBox, command: Command, tell: Tell) -> None:
        self.box = box
        self.command = command
        self.size: tuple[int, int] | None = None
        self._tell = tell
        self._said = b""
        self._stopped = asyncio.Event()
        self._input_over = asyncio.Event()
        self._over = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> BoxReport:
        word, rest = self.command.argv[0], " ".join(self.command.argv[1:])
        ended = ""
        if word == "sleep":
            ended = await self.box.spend(float(rest), self.command.limits.wall_seconds, self._stopped)
        elif word == "cat":
            while not ended and not self._input_over.is_set():
                ended = await self.box.spend(TICK, self.command.limits.wall_seconds, self._stopped)
        else:
            self._say(rest.encode())
        if ended == "stopped":
            return BoxReport("signalled", signal=9)
        return BoxReport(ended or "exited", None if ended else 0, stdout=self.logs[0])  # type: ignore[arg-type]

    def _say(self, data: bytes) -> None:
        self._said += data
        self._tell("stdout", data)

    @property
    def logs(self) -> tuple[Captured, Captured]:
        return captured(self._said), captured()

    async def over(self) -> BoxReport:
        return await asyncio.shield(self._over)

    def signal(self, number: int) -> None:
        self._stopped.set()

    def send(self, data: bytes) -> int:
        self._say(data[:3])
        return len(data[:3])

    def close_input(self) -> None:
        self._input_over.set()

    def resize(self, columns: int, rows: int) -> bool:
        self.size = (columns, rows)
        return True


class FakeBackend:
    """Keeps what it made, and refuses what it was told to refuse."""

    def __init__(self) -> None:
        self.boxes: list[FakeBox] = []
        self.problem: Exception | None = None
        self.held: asyncio.Event | None = None
        """For which whoever wants a box has to wait."""

    async def open(self, spec: StaySpec, network: Serve | None = None) -> FakeBox:
        if self.held is not None:
            await self.held.wait()
        if self.problem is not None:
            raise self.problem
        box = FakeBox(spec)
        self.boxes.append(box)
        return box

    @property
    def open_boxes(self) -> int:
        return sum(not box.gone.done() for box in self.boxes)


class FakeSessions:
    """A manager with fake boxes, and short ways to use it."""

    def __init__(self, manager: SessionManager, backend: FakeBackend, folder: Path) -> None:
        self.manager = manager
        self.backend = backend
        self.folder = folder

    async def create(self, owner: Owner = ME, **how: Any) -> str:
        return (await self.manager.create(owner, SessionSpec(**how))).id

    async def cell(self, id_: str, source: str, owner: Owner = ME, **how: Any) -> StepReport:
        return await self.manager.run(owner, id_, CellRequest(source, **how), unheard, unseen)

    async def got(self, id_: str, name: str, **how: Any) -> str:
        """The value of a variable."""
        return (await self.cell(id_, f"get {name}", **how)).cell.results[0].data["text/plain"]

    async def command(self, id_: str, *argv: str) -> StepReport:
        return await self.manager.command(ME, id_, CommandRequest(argv), unheard)

    async def start(self, id_: str, *argv: str, **how: Any) -> int:
        return (await self.manager.start(ME, id_, CommandRequest(argv, **how))).process

    async def state(self, id_: str) -> str:
        return (await self.manager.info(ME, id_)).state

    def idle(self, id_: str) -> None:
        """As if nobody had come for as long as it may be idle; then it is looked at."""
        session = self.manager.get(ME, id_)
        assert session.spec.idle_seconds is not None and session._idle is not None
        session.in_use.last -= session.spec.idle_seconds
        session._idle.cancel()
        session._check_idle()

    async def becomes(self, id_: str, state: str) -> None:
        """Wait until it is."""
        async with asyncio.timeout(tooling.PATIENCE):
            while await self.state(id_) != state:
                await asyncio.sleep(TICK)

    def journal(self) -> str:
        return (self.folder / "sessions.jsonl").read_text()


@asynccontextmanager
async def fake_sessions(folder: Path, **rules: Any) -> AsyncIterator[FakeSessions]:
    """Looks, at the end, that nothing is left: no box, no task, no descriptor."""
    tasks, descriptors = asyncio.all_tasks(), open_descriptors()
    backend = FakeBackend()
    manager = await SessionManager.open(backend, folder, KeeperRules(**rules))
    yield FakeSessions(manager, backend, folder)
    await manager.close()
    for box in backend.boxes:  # who has a real one open has its files, too, until then
        shutil.rmtree(box.whole)
    assert manager.live == 0
    assert backend.open_boxes == 0
    left = {task for task in asyncio.all_tasks() - tasks if "TestRunner" not in repr(task)}
    assert not left, left
    assert open_descriptors() - descriptors == set()


def open_descriptors() -> set[tuple[int, str]]:
    """With what they lead to; those of the event loop and of threads come and go."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue
    return {(number, target) for number, target in found if not target.startswith(("anon_inode", "socket:", "/proc/"))}


async def until(true: Callable[[], object], seconds: float = tooling.PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(TICK)


async def refused(awaited: Awaitable[object]) -> str:
    """The reason why."""
    with pytest.raises(Refused) as problem:
        await awaited
    return problem.value.reason_code


async def pieces(*given: bytes, then: float = 0.0) -> AsyncIterator[bytes]:
    """A stream that ends when that many seconds have gone by."""
    for piece in given:
        yield piece
    await asyncio.sleep(then)
