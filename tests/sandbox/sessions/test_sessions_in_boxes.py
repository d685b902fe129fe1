"""A manager of sessions in real boxes: what the fakes of other tests only say."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.aio import in_thread
from ringfence.core.box import MIB, Input, Limits, Mount, Stream
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.sessions import (
    CellReport,
    CellRequest,
    CommandRequest,
    SessionInfo,
    SessionSpec,
    StaySpec,
    StepReport,
    VolumeMount,
)
from ringfence.doctor.placement import StayingBackend
from ringfence.sandbox.files import workspace
from ringfence.sandbox.guests import interpreter as guest_interpreter
from ringfence.sandbox.process import interpreter
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host.diagnosis import diagnose_refusals
from ringfence.sandbox.process.live import LiveBox
from ringfence.sandbox.sessions.capacity import KeeperRules
from ringfence.sandbox.sessions.manager import SessionManager
from tests import tooling
from tests.sandbox.fake_sessions import ME, STRANGER, open_descriptors, unheard, unseen, until
from tests.sandbox.process import looking
from tests.sandbox.staying import NAMES, PROCESS_ALONE, staying_backend

pytestmark = pytest.mark.anyio


class Home:
    def __init__(self, manager: SessionManager, folder: Path) -> None:
        self.manager = manager
        self.folder = folder

    def exists(self, box: str, name: str) -> bool:
        with closing(self.manager.get(ME, box).files()) as files:
            return files.exists(name)

    async def create(self, **how: Any) -> str:
        return (await self.manager.create(ME, SessionSpec(**how))).id

    async def cell(self, box: str, source: str, **how: Any) -> StepReport:
        return await self.manager.run(ME, box, CellRequest(source, **how), unheard, unseen)

    async def value(self, box: str, source: str, **how: Any) -> str:
        report = (await self.cell(box, source, **how)).cell
        assert report.error is None, report.error
        return report.results[-1].data["text/plain"]

    async def shell(self, box: str, line: str, **how: Any) -> str:
        report = await self.manager.command(ME, box, CommandRequest(("/bin/sh", "-c", line), **how), unheard)
        return report.cell.report.stdout.text

    async def up(self, box: str, name: str = "up") -> None:
        """Until a program has made this file there."""
        async with asyncio.timeout(tooling.PATIENCE):
            while not await in_thread(lambda: self.exists(box, name)):
                await asyncio.sleep(0.02)

    def living(self, box: str) -> LiveBox:
        found = self.manager.get(ME, box).box
        assert isinstance(found, LiveBox)
        return found


@pytest.fixture(scope="module")
def _boxes() -> None:
    missing = diagnose_refusals().missing
    if missing:
        pytest.skip(f"no box can be made here: {missing}")


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
async def lasting(name: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StayingBackend | None]:
    """One backend for all tests, where it takes long to open."""
    made = None if name == "process" else await staying_backend(name, tmp_path_factory.mktemp("roots"))
    yield made
    if made is not None:
        await made.close()


@pytest.fixture
async def home(tmp_path: Path, _boxes: None, lasting: StayingBackend | None) -> AsyncIterator[Home]:
    backend = ProcessBackend(depth=0) if lasting is None else lasting
    before = open_descriptors()
    groups = looking.groups(os.getpid())
    manager = await SessionManager.open(backend, tmp_path / "state", KeeperRules())
    yield Home(manager, tmp_path / "state")
    await manager.close()
    if backend is not lasting:
        await backend.close()
    assert looking.groups(os.getpid()) <= groups
    assert {target for _, target in open_descriptors() - before if not target.startswith("pipe:")} == set()


async def test_a_session_is_lived_in(home: Home) -> None:
    box = await home.create(stay=StaySpec(env={"A": "1"}, inputs=(Input("in.txt", b"given"),)))
    assert (
        await home.value(box, "import os\nx = 20\nopen('/workspace/input/in.txt').read() + os.environ['A']")
        == "'given1'"
    )
    assert await home.value(box, "x + 1") == "21"
    assert await home.value(box, "'x' in globals()", context="other") == "False"
    assert await home.shell(box, "cat /workspace/input/in.txt; echo $A") == "given1\n"
    await home.manager.write(ME, box, "a.py", b"y = 5")
    assert await home.value(box, "import a\na.y") == "5"
    report = await home.cell(box, "import os; os.mkdir('output'); open('/workspace/output/o', 'w').write('out');")
    assert [fact.path for fact in report.cell.report.files] == ["/workspace/output/o"]
    assert report.step == 6
    await home.manager.end(ME, box)
    assert await home.manager.read(ME, box, "output/o", 0, None) == b"out"


async def test_a_dead_interpreter_is_replaced_and_its_box_stays(home: Home) -> None:
    box = await home.create()
    await home.cell(box, "x = 1")
    died = await home.cell(box, "import os\nos.kill(os.getpid(), 9)")
    assert (died.cell.alive, died.cell.report.ended, died.state) == (False, "signalled", "running")
    again = await home.cell(box, "x")
    assert again.fresh and again.cell.error is not None and again.cell.error.name == "NameError"


UP = "open('/workspace/up', 'w').close()\nimport time\ntime.sleep(600)"


async def test_an_interrupt_and_a_timeout_keep_the_variables(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (interpreter, guest_interpreter):  # a slow machine needs longer to be interrupted
        monkeypatch.setattr(each, "GRACE_SECONDS", tooling.PATIENCE)
    box = await home.create()
    await home.cell(box, "x = 1\nimport time")
    running = asyncio.create_task(home.cell(box, UP, limits=Limits(wall_seconds=600)))
    await home.up(box)
    assert await home.manager.interrupt(ME, box)
    report = (await running).cell
    assert report.error is not None and report.error.name == "KeyboardInterrupt"
    timed_out = await home.cell(box, "time.sleep(600)", limits=Limits(wall_seconds=0.2))
    assert (timed_out.cell.report.ended, timed_out.cell.alive) == ("timeout", True)
    assert await home.value(box, "x") == "1"


async def test_the_run_clock_stands_still_in_a_paused_box(home: Home) -> None:
    """For longer than the cell may run. A slow machine may need longer for the rest: then it is given longer."""
    box = await home.create()
    await home.cell(box, "import os, time")
    source = "open('up', 'w').close()\nn = 0\nwhile not os.path.exists('enough'):\n    n += 1; time.sleep(0.01)\nn > 0"

    async def paused(seconds: float) -> CellReport:
        running = asyncio.create_task(home.cell(box, source, limits=Limits(wall_seconds=seconds)))
        await home.up(box)
        await home.manager.pause(ME, box)
        await asyncio.sleep(0.3)  # freezing takes a moment itself
        cpu = home.manager.get(ME, box).box.cpu_ms()
        await asyncio.sleep(seconds + 0.1)
        assert home.manager.get(ME, box).box.cpu_ms() - cpu < 5
        await home.manager.resume(ME, box)
        await home.shell(box, "touch /workspace/enough")
        return (await running).cell

    for seconds in (1.5, 15.0, 60.0):
        report = await paused(seconds)
        if report.report.ended == "exited":
            break
        await home.shell(box, "rm /workspace/up /workspace/enough")
    assert (report.report.ended, report.results[-1].data["text/plain"]) == ("exited", "True")


async def test_fifty_pauses_keep_files_and_state(home: Home) -> None:
    box = await home.create()
    await home.cell(box, "kept = {}")
    for number in range(50):
        await home.manager.pause(ME, box)
        await home.cell(box, f"kept[{number}] = {number}; open('/workspace/f{number}', 'w').write('x');")
    assert await home.value(box, "kept == {n: n for n in range(50)}") == "True"
    assert len([e for e in await home.manager.entries(ME, box, ".", 1) if e.kind == "file"]) == 50


async def test_commands_in_the_background_talk_and_listen(home: Home) -> None:
    box = await home.create()
    heard: list[tuple[Stream, bytes]] = []
    line = "echo ready; while read word; do echo got $word; done; echo over >&2"
    info = await home.manager.start(ME, box, CommandRequest(("/bin/sh", "-c", line), stdin=None))
    following = asyncio.create_task(
        home.manager.follow(ME, box, info.process, (0, 0), lambda stream, data: heard.append((stream, data)))
    )
    await home.manager.send(ME, box, info.process, b"one\n")
    await until(lambda: b"got one" in b"".join(data for _, data in heard))
    await home.manager.send(ME, box, info.process, b"two\n" * 50_000, eof=True)
    over = await following
    assert over.report is not None and (over.report.ended, over.report.exit_status) == ("exited", 0)
    assert b"".join(data for stream, data in heard if stream == "stdout").count(b"got two") == 50_000
    logs = await home.manager.logs(ME, box, info.process, 0, 0)
    assert (logs.stdout[:14], logs.stderr, logs.running) == (b"ready\ngot one\n", b"over\n", False)
    size = "python3 -c 'import os; print(*reversed(os.get_terminal_size()))'"
    line = f"{size}; read x; {size}"
    terminal = await home.manager.start(ME, box, CommandRequest(("/bin/sh", "-c", line), pty=(80, 24)))
    async with asyncio.timeout(tooling.PATIENCE):
        while b"24 80" not in (await home.manager.logs(ME, box, terminal.process, 0, 0)).stdout:
            await asyncio.sleep(0.01)
    await home.manager.resize(ME, box, terminal.process, 100, 50)
    await home.manager.send(ME, box, terminal.process, b"\n")
    await home.manager.wait(ME, box, terminal.process, 120)
    said = (await home.manager.logs(ME, box, terminal.process, 0, 0)).stdout
    assert b"24 80" in said and b"50 100" in said
    killed = await home.manager.start(ME, box, CommandRequest(("/bin/sh", "-c", "sleep 1000 & wait")))
    await home.manager.signal(ME, box, killed.process, signal.SIGKILL)
    assert (await home.manager.wait(ME, box, killed.process, 120)).running is False


async def test_a_pause_and_a_snapshot_run_nothing_of_the_session(home: Home) -> None:
    box = await home.create()
    spying = "os.getcwd = lambda: open('/workspace/output/spied', 'w').name"
    await home.cell(
        box, f"import os\nos.mkdir('output')\nos.makedirs('/workspace/w')\nos.chdir('/workspace/w')\n{spying}"
    )
    await home.manager.pause(ME, box)
    await home.manager.resume(ME, box)
    assert (await home.manager.snapshot(ME, box)).cwd == "/workspace/w"
    await home.cell(box, "os.rmdir('/workspace/w')")
    assert (await home.manager.snapshot(ME, box)).cwd == "/workspace/w", "the last one that is known"
    assert await home.value(box, "os.listdir('/workspace/output')") == "[]"


async def test_a_fork_has_the_files_and_the_folder_and_nothing_else(home: Home) -> None:
    box = await home.create(stay=StaySpec(env={"A": "1"}, inputs=(Input("in.txt", b"given"),)))
    await home.cell(box, "import os, random\nsecret = 1\nos.makedirs('/workspace/w/x')\nos.chdir('/workspace/w/x')")
    await home.cell(box, "open('data', 'w').write('text'); os.symlink('data', 'link'); os.chmod('data', 0o700)")
    rolled = await home.value(box, "random.random()")
    made = await home.manager.fork(ME, box, 2)
    assert all(isinstance(one, SessionInfo) for one in made)
    seen = {rolled}
    for one in made:
        assert isinstance(one, SessionInfo)
        source = "import os, random\n(os.getcwd(), open('link').read(), os.access('data', os.X_OK), os.environ['A'])"
        assert await home.value(one.id, source) == "('/workspace/w/x', 'text', True, '1')"
        assert (
            await home.value(one.id, "open('/workspace/input/in.txt').read(), 'secret' in globals()")
            == "('given', False)"
        )
        seen.add(await home.value(one.id, "random.random()"))
        assert await home.shell(one.id, "echo more > /workspace/input/x; ls /workspace/input") == "in.txt\n"
    assert len(seen) == 3
    assert (await home.manager.state_of(ME, box))[1] == (await home.manager.state_of(ME, made[0].id))[1]  # type: ignore[union-attr]


async def test_what_a_step_left_running_is_seen(home: Home) -> None:
    box = await home.create()
    await home.cell(box, "import threading\nenough = threading.Event()")
    assert (await home.manager.state_of(ME, box))[2] is False
    await home.cell(box, "thread = threading.Thread(target=enough.wait); thread.start()")
    assert (await home.manager.state_of(ME, box))[2] is True
    await home.cell(box, "enough.set(); thread.join()")
    assert (await home.manager.state_of(ME, box))[2] is False


@PROCESS_ALONE
async def test_a_volume_has_its_own_size_and_outlives_its_box(home: Home) -> None:
    await home.manager.create_volume(ME, "data", 2 * MIB, "ro")
    box = await home.create(volumes=(VolumeMount("data", "/workspace/data"),))
    report = await home.cell(box, "open('/workspace/data/a', 'wb').write(bytes(10_000_000))")
    assert report.cell.error is not None and "No space" in report.cell.error.value
    await home.cell(box, "import os; os.remove('/workspace/data/a'); open('/workspace/data/b', 'w').write('kept')")
    snapshot = await home.manager.snapshot(ME, box)
    assert snapshot.files == 0
    (child,) = await home.manager.fork(ME, box, 1)
    assert isinstance(child, SessionInfo)
    assert await home.value(child.id, "open('/workspace/data/b').read()") == "'kept'"
    denied = await home.cell(child.id, "open('/workspace/data/c', 'w')")
    assert denied.cell.error is not None and "Read-only" in denied.cell.error.value
    await home.cell(box, "open('/workspace/data/b', 'a').write(' at its end')")
    await home.manager.end(ME, box)
    again = await home.create(volumes=(VolumeMount("data", "d"),))
    assert await home.shell(again, "cat /workspace/d/b") == "kept at its end"


@PROCESS_ALONE
async def test_the_death_of_a_box_is_written_down_and_its_outputs_are_kept(home: Home) -> None:
    box = await home.create()
    await home.cell(box, "import os; os.mkdir('output'); open('/workspace/output/o', 'w').write('out')")
    running = asyncio.create_task(home.cell(box, UP, limits=Limits(wall_seconds=600)))
    await home.up(box)
    os.kill(home.living(box).box.first, signal.SIGKILL)
    report = await running
    assert not report.cell.alive
    await until(lambda: '"box_died"' in (home.folder / "sessions.jsonl").read_text())
    assert (await home.manager.info(ME, box)).why == "box_died"
    assert await home.manager.read(ME, box, "output/o", 0, None) == b"out"
    with pytest.raises(Refused, match="its box died"):
        await home.cell(box, "1")


async def test_a_cell_under_which_the_session_ends_says_so(home: Home) -> None:
    box = await home.create()
    running = asyncio.create_task(home.cell(box, UP))
    line = CommandRequest(("/bin/sh", "-c", "touch /workspace/too; sleep 600"))
    command = asyncio.create_task(home.manager.command(ME, box, line, unheard))
    await home.up(box)
    await home.up(box, "too")
    await home.manager.end(ME, box)
    assert [(await step).cell.report.ended for step in (running, command)] == ["cancelled", "cancelled"]


async def test_what_a_box_does_to_its_folders_leads_nowhere(home: Home) -> None:
    box = await home.create()
    await home.cell(
        box, "import os; os.symlink('/etc', '/workspace/output'); os.symlink('/proc/self/root', '/workspace/up')"
    )
    assert b"box:/home/user" in await home.manager.read(ME, box, "output/passwd", 0, None), "that of the box"
    with pytest.raises(Refused) as problem:
        await home.manager.read(ME, box, "up/etc/passwd", 0, None)
    assert problem.value.reason_code in ("not_found", "link")
    await home.manager.end(ME, box)
    assert not (home.folder / "artifacts" / box).exists()


SESSIONS = 200 if os.environ.get("RINGFENCE_FULL") else 24


class Wild:
    """Somebody who makes sessions, uses them, and kills parts of them."""

    def __init__(self, home: Home, seed: int) -> None:
        self.home = home
        self.random = random.Random(seed)
        self.made: list[str] = []

    async def one(self) -> None:
        home, manager = self.home, self.home.manager
        try:
            box = await home.create(lifetime_seconds=self.random.choice([0.3, 60]), idle_seconds=0.2)
            self.made.append(box)
            await home.cell(box, "import os; os.mkdir('output'); x = 1; open('/workspace/output/o', 'w').write('out');")
            acts: list[Any] = [
                lambda: home.cell(box, "import time; time.sleep(0.05)"),
                lambda: home.shell(box, "sleep 0.05; echo x > /workspace/y"),
                lambda: manager.start(ME, box, CommandRequest(("sleep", "1"))),
                lambda: manager.pause(ME, box),
                lambda: manager.resume(ME, box),
                lambda: manager.snapshot(ME, box),
                lambda: self.fork(box),
                lambda: self.kill(box),
                lambda: manager.end(ME, box),
            ]
            for act in self.random.choices(acts, k=5):
                await act()
        except Unavailable:
            return  # it never ran
        except Refused as problem:
            if problem.reason_code != "session_stopped":
                raise

    async def fork(self, box: str) -> None:
        self.made += [each.id for each in await self.home.manager.fork(ME, box, 2) if isinstance(each, SessionInfo)]

    async def kill(self, box: str) -> None:
        """Its first process, one of those in it, or the zygote that it came from, with all others from there."""
        living = self.home.living(box)
        below = {process.pid for zygote in looking.zygotes() for process in looking.descendants(zygote)}
        pids = [pid for pid in (living.box.first, living.box.worker, *looking.zygotes()[:1]) if pid in below]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), signal.SIGKILL)


@PROCESS_ALONE
@pytest.mark.parametrize("seed", range(2))
async def test_whatever_is_killed_nothing_is_left_and_every_end_is_written_down(home: Home, seed: int) -> None:
    wild = Wild(home, seed)
    waiting = asyncio.Semaphore(6)

    async def one() -> None:
        async with waiting, asyncio.timeout(600):
            await wild.one()

    async with asyncio.TaskGroup() as group:
        for _ in range(SESSIONS):
            group.create_task(one())
    await home.manager.close()
    lines = [json.loads(line) for line in (home.folder / "sessions.jsonl").read_text().splitlines()]
    created = [line["session"] for line in lines if line["event"] == "created"]
    assert sorted(created) == sorted(line["session"] for line in lines if line["event"] == "ended")
    assert set(wild.made) <= set(created)
    await until(lambda: all(len(looking.descendants(zygote)) <= 2 for zygote in looking.zygotes()))


@PROCESS_ALONE
async def test_tenants_do_not_share_a_zygote(home: Home) -> None:
    mine = await home.create()
    theirs = (await home.manager.create(STRANGER, SessionSpec(StaySpec(tenant=ME.tenant)))).id
    other = home.manager.get(STRANGER, theirs).box
    assert isinstance(other, LiveBox)
    assert other._zygote is not home.living(mine)._zygote


# ── What an approval of a step is bound to ──


@pytest.mark.parametrize("mode", ["ro", "rw"])
@pytest.mark.parametrize("most", [1 << 30, 0], ids=["contents", "what the kernel notes"])
async def test_the_state_of_a_session_is_also_that_of_what_is_mounted_outside_of_its_workspace(
    home: Home, project: Path, mode: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_MAX_HASHED", most)
    script, single = project / "deep" / "deploy.sh", project / "single"
    script.parent.mkdir()
    script.write_text("echo one")
    single.write_text("one")
    box = await home.create(stay=StaySpec(mounts=(Mount(str(project), "/project", mode),)))
    alone = await home.create(stay=StaySpec(mounts=(Mount(str(single), "/opt/single", mode),)))

    async def states() -> tuple[str, str]:
        return (await home.manager.state_of(ME, box))[1], (await home.manager.state_of(ME, alone))[1]

    before = await states()
    assert await states() == before
    times = script.stat()
    script.write_text("echo two")
    os.utime(script, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = await states()
    assert changed[0] != before[0] and changed[1] == before[1]
    single.write_text("two")
    assert (await states())[1] != before[1]


# ── What is planted in a mount, whoever does it and whenever ──


@pytest.fixture
def project() -> Iterator[Path]:
    """A folder that the user of a box may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


def planting(project: Path) -> StaySpec:
    return StaySpec(mounts=(Mount(str(project), "/project", "rw"),))


async def test_what_a_background_command_plants_is_in_its_report_and_in_the_next_steps(
    home: Home, project: Path
) -> None:
    box = await home.create(stay=planting(project))
    plant = ("/bin/sh", "-c", "echo x > /project/.vimrc")
    process = (await home.manager.start(ME, box, CommandRequest(plant))).process
    over = await home.manager.wait(ME, box, process, None)
    assert over.report is not None and over.report.planted == ("/project/.vimrc",)
    assert (await home.cell(box, "1")).cell.report.planted == ("/project/.vimrc",)
    assert (await home.cell(box, "1")).cell.report.planted == ()


async def test_what_an_earlier_step_left_plants_between_steps_is_in_the_next_report(home: Home, project: Path) -> None:
    box = await home.create(stay=planting(project))
    leaves = "import os, time\nif os.fork() == 0:\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    leaves += "    open('/project/.envrc', 'w').write('x'); os._exit(0)"
    assert (await home.cell(box, leaves)).cell.report.planted == ()
    await home.manager.write(ME, box, "go", b"")
    await until(lambda: (project / ".envrc").exists())
    assert (await home.cell(box, "1")).cell.report.planted == ("/project/.envrc",)


async def test_what_is_planted_after_the_last_step_is_told_when_a_session_is_closed(home: Home, project: Path) -> None:
    box = await home.create(stay=planting(project))
    leaves = "import os, time\nif os.fork() == 0:\n    while not os.path.exists('go'): time.sleep(0.01)\n"
    await home.cell(box, leaves + "    open('/project/.envrc', 'w').write('x'); os._exit(0)")
    await home.manager.write(ME, box, "go", b"")
    await until(lambda: (project / ".envrc").exists())
    assert (await home.manager.end(ME, box)).planted == ("/project/.envrc",)
    lines = (home.folder / "sessions.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["planted"] == ["/project/.envrc"]


async def test_what_was_there_before_a_session_is_not_planted(home: Home, project: Path) -> None:
    (project / ".envrc").write_text("x")
    box = await home.create(stay=planting(project))
    assert (await home.cell(box, "1")).cell.report.planted == ()
    assert (await home.manager.end(ME, box)).planted == ()
