"""Boxes that are virtual machines: what they get, what comes out of them, and what is said of it. Emulated where the
host has no KVM that boots a guest."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, BoxReport, BoxSpec, Input, Limits, Mount, Program
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.core.sessions import Cell, Command, StaySpec, discard_output, discard_value
from ringfence.sandbox.guests.backend import GuestBackend
from ringfence.sandbox.guests.microvm.memory import Memory
from tests.tooling import KERNEL

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SETTINGS = SandboxSettings(backend="microvm", microvm_kernel=str(KERNEL) if KERNEL.is_dir() else None)
LONG = Limits(wall_seconds=300.0)
"""Emulation takes its time, and more on a busy host."""
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BoxSpec, Limits, Program
async def main():
    settings = SandboxSettings(backend="microvm", microvm_kernel=sys.argv[2] or None)
    backend = make_backend(settings, Path(sys.argv[1]))
    tell = lambda stream, data: print(data.decode(), end="", flush=True)
    program = Program("command", argv=("sh", "-c", "echo begun; exec sleep 1000"))
    await backend.run(BoxSpec(program, Limits(wall_seconds=300.0)), tell)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
async def backend(state: Path) -> AsyncIterator[Backend]:
    made = make_backend(SETTINGS, state)
    try:
        await made.run(BoxSpec(Program("command", argv=("true",)), LONG))
    except Unavailable as exc:
        await made.close()
        if exc.reason_code != "no_backend":
            raise
        pytest.skip(str(exc))
    yield made
    await made.close()


async def run(backend: Backend, source: str, limits: Limits = LONG, **more: Any) -> BoxReport:
    program = Program("python", source.encode(), **more.pop("program", {}))
    return await backend.run(BoxSpec(program, limits, **more))


async def command(backend: Backend, *argv: str, limits: Limits = LONG, **more: Any) -> BoxReport:
    return await backend.run(BoxSpec(Program("command", argv=argv), limits, **more))


# ── What runs ──


async def test_a_program_runs_and_its_end_is_told(backend: Backend) -> None:
    report = await run(backend, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (report.ended, report.exit_status, report.stdout.text, report.stderr.text) == ("exited", 3, "out\n", "err\n")
    assert report.usage.cpu_ms and report.usage.peak_memory_bytes and report.wall_ms > 0
    report = await command(backend, "sh", "-c", "kill -TERM $$")
    assert (report.ended, report.signal) == ("signalled", signal.SIGTERM)


async def test_the_kernel_is_another_and_the_facts_say_how_it_runs(backend: Backend) -> None:
    report = await run(backend, "import os; print(os.uname().release)")
    isolation = report.isolation
    assert report.stdout.text.strip() == isolation["guest_kernel"] != os.uname().release
    assert (isolation["backend"], isolation["level"]) == ("microvm", "microvm")
    assert isolation["accelerator"] == "kvm" or isolation["not_accelerated"]["kvm"]
    off = [name for name, each in isolation["protections"].items() if not each["on"]]
    assert off == [] and len(isolation["protections"]) >= 5


async def test_standard_input_files_and_output_go_both_ways(backend: Backend, tmp_path: Path) -> None:
    source = """
import pathlib, sys
data = pathlib.Path("input/deep/a.txt").read_bytes()
pathlib.Path("output/b").mkdir()
pathlib.Path("output/b/c.bin").write_bytes(data[::-1])
pathlib.Path("output/d.txt").write_text(str(len(sys.stdin.buffer.read())))
for path in ("input/deep/a.txt", "input/new"):
    try:
        open(path, "w")
    except OSError as refused:
        print(refused.strerror)
"""
    given = tuple(Input(f"deep/{name}.txt", name.encode() * 100_000) for name in "ab")
    program = {"stdin": b"x" * 3_000_000}
    report = await run(backend, source, program=program, inputs=given, output=tmp_path)
    assert (tmp_path / "b" / "c.bin").read_bytes() == b"a" * 100_000 and (tmp_path / "d.txt").read_text() == "3000000"
    assert {each.path for each in report.files} == {"/workspace/output/b/c.bin", "/workspace/output/d.txt"}
    assert report.stdout.text.splitlines() == ["Read-only file system"] * 2


async def test_a_folder_of_the_host_is_seen_as_a_copy(backend: Backend, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data.txt").write_text("lent")
    (tmp_path / "link").symlink_to("data.txt")
    at = "/srv/lent"
    report = await command(backend, "sh", "-c", f"cat {at}/link; touch {at}/new", mounts=(Mount(str(tmp_path), at),))
    assert report.stdout.text == "lent" and "Read-only" in report.stderr.text
    with pytest.raises(Unavailable, match="folders of the host to write to"):
        await command(backend, "true", mounts=(Mount(str(tmp_path), at, "rw"),))
    with (tmp_path / "big").open("wb") as file:
        file.truncate(65 * MIB)
    with pytest.raises(Unavailable, match="64 MB"):
        await command(backend, "true", mounts=(Mount(str(tmp_path), at),))


# ── What it cannot do ──


async def test_a_program_has_no_device_no_network_and_no_rights(backend: Backend) -> None:
    source = """
import os
print(sorted(os.listdir("/sys")), [path for path in ("/proc/sys", "/dev/vda", "/dev/vport0p1") if os.path.exists(path)])
told = ("CapEff", "CapBnd", "Seccomp:", "NoNewPrivs")
print([line.split() for line in open("/proc/self/status") if line.startswith(told)])
print([line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line])
for path in ("/etc/new", "/usr/new", "/dev/new"):
    try:
        open(path, "w")
    except OSError as refused:
        print(refused.strerror)
try:
    os.kill(1, 9)
except OSError as refused:
    print(refused.strerror)
"""
    lines = (await run(backend, source)).stdout.text.splitlines()
    assert lines[0] == "['devices'] []"
    nothing = "0000000000000000"
    assert lines[1] == (
        f"[['CapEff:', '{nothing}'], ['CapBnd:', '{nothing}'], ['NoNewPrivs:', '1'], ['Seccomp:', '2']]"
    )
    assert lines[2] == "['lo']"
    assert set(lines[3:6]) <= {"Read-only file system", "Permission denied"}


async def test_limits_end_a_program_and_are_named(backend: Backend) -> None:
    looped = await run(backend, "while True: pass", Limits(wall_seconds=2.0))
    assert (looped.ended, looped.limit) == ("timeout", "wall")
    small = Limits(wall_seconds=300.0, memory_bytes=64 * MIB)
    grown = await run(backend, "x = []\nwhile True: x.append(bytearray(1 << 20))", small)
    assert grown.limit == "memory" and grown.exit_status != 0
    few = Limits(wall_seconds=300.0, processes=16)
    source = "import os, signal\nfor _ in range(40):\n    if not os.fork(): signal.pause()"
    forked = await run(backend, source, few)
    assert forked.limit == "pids"
    full = await command(
        backend,
        "sh",
        "-c",
        "head -c 80M /dev/zero > x",
        limits=Limits(wall_seconds=300.0, memory_bytes=512 * MIB, disk_bytes=64 * MIB),
    )
    assert full.limit == "disk"


# ── One that stays ──


async def test_a_machine_that_stays_keeps_its_state_also_while_it_is_paused(backend: Backend) -> None:
    assert isinstance(backend, GuestBackend)
    box = await backend.open(StaySpec(LONG))
    try:
        interpreter = await box.interpreter()

        async def value(source: str) -> str:
            report = await interpreter.run(Cell(source.encode()), discard_output, discard_value)
            assert report.error is None, report.error
            return str(report.results[-1].data["text/plain"])

        assert await value("x = 20\nopen('kept', 'w').write('a')") == "1"
        await box.pause()
        (pid,) = machines(os.getpid())
        before = worked(pid)
        await asyncio.sleep(0.5)
        assert worked(pid) - before <= 5, "its processors stand still, in hundredths of a second"
        await box.resume()
        assert await value("x + len(open('kept').read())") == "21"
        shown = await (await box.command(Command(("cat", "kept")), discard_output)).over()
        assert (shown.exit_status, shown.stdout.text) == (0, "a")
    finally:
        await box.end()
    assert machines(os.getpid()) == []


def worked(pid: int) -> int:
    """The processor time of a program, in ticks of the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# ── Machines that go on from one place ──


async def test_machines_that_go_on_from_one_place_draw_different_numbers(backend: Backend) -> None:
    source = """
import os, random, sys, time, uuid
print(os.urandom(16).hex(), uuid.uuid4(), random.random(), hash("a"), id(sys) ^ 0)
print(time.time())
"""
    shown = [(await run(backend, source)).stdout.text.splitlines() for _ in range(3)]
    for column in zip(*(each[0].split() for each in shown), strict=True):
        assert len(set(column)) == 3
    times = [float(each[1]) for each in shown]
    assert times == sorted(times) and abs(times[-1] - times[0]) < 3600


async def test_what_machines_go_on_from_cannot_be_written_to(tmp_path: Path) -> None:
    made = Memory.new(1 << 20)
    os.pwrite(made.descriptor, b"saved", 4096)
    made.save(tmp_path / "memory")
    made.close()
    loaded = Memory.loaded(tmp_path / "memory")
    try:
        assert os.pread(loaded.descriptor, 5, 4096) == b"saved"
        again = os.open(f"/proc/self/fd/{loaded.descriptor}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        os.close(again)
    finally:
        loaded.close()


async def test_several_run_side_by_side(backend: Backend) -> None:
    reports = await asyncio.gather(*(run(backend, f"print({number})") for number in range(3)))
    assert [each.stdout.text for each in reports] == ["0\n", "1\n", "2\n"]


# ── Their end ──


async def test_a_machine_that_dies_is_a_failure_of_the_box(backend: Backend) -> None:
    begun = asyncio.Event()
    program = Program("command", argv=("sh", "-c", "echo begun; exec sleep 1000"))
    running = asyncio.ensure_future(backend.run(BoxSpec(program, LONG), lambda *_: begun.set()))
    await begun.wait()
    (pid,) = machines(os.getpid())
    os.kill(pid, signal.SIGKILL)
    report = await running
    assert (report.ended, report.exit_status) == ("infra", None)
    assert machines(os.getpid()) == []


async def test_nothing_is_left_of_a_supervisor_that_is_killed(backend: Backend, state: Path) -> None:
    words = ("-c", SUPERVISOR, str(state), SETTINGS.microvm_kernel or "")
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    (pid,) = machines(process.pid)
    gone = os.pidfd_open(pid)
    process.kill()
    await process.wait()
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(gone, ended.set)
    try:
        async with asyncio.timeout(60):
            await ended.wait()
    finally:
        loop.remove_reader(gone)
        os.close(gone)


async def test_a_kernel_that_is_not_there_is_missed(tmp_path: Path) -> None:
    backend = make_backend(SandboxSettings(backend="microvm", microvm_kernel=str(tmp_path / "none")), tmp_path)
    with pytest.raises(Unavailable, match="no kernel with modules") as refused:
        await command(backend, "true")
    assert refused.value.reason_code == "no_backend"
    await backend.close()


def machines(supervisor: int) -> list[int]:
    """The programs that run machines of this supervisor, by their numbers."""
    wardens = [pid for pid in children(supervisor) if b"warden.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [pid for warden in wardens for pid in children(warden)]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
