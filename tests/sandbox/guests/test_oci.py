"""Boxes that are containers: what they get, what comes out of them, and what is said of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, BoxReport, BoxSpec, Input, Limits, Mount, Program, Programs
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.sandbox.guests import oci
from ringfence.sandbox.guests.oci import OciEngine

pytestmark = pytest.mark.anyio
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BoxSpec, Program
async def main():
    backend = make_backend(SandboxSettings(backend="oci"), Path(sys.argv[1]))
    tell = lambda stream, data: print(data.decode(), end="", flush=True)
    program = Program("command", argv=("sh", "-c", "echo begun; exec sleep 1000"))
    await backend.run(BoxSpec(program), tell)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module", params=["runc", "crun"])
async def backend(state: Path, request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oci, "PROGRAMS", (request.param,))
        made = make_backend(SandboxSettings(backend="oci"), state)
        try:
            await made.run(BoxSpec(Program("command", argv=("true",))))
        except Unavailable as exc:
            await made.close()
            pytest.skip(str(exc))
        yield made
        await made.close()


async def run(backend: Backend, source: str, limits: Limits = Limits(), **more: Any) -> BoxReport:  # noqa: B008
    program = Program("python", source.encode(), **more.pop("program", {}))
    return await backend.run(BoxSpec(program, limits, **more))


async def command(backend: Backend, *argv: str, **more: Any) -> BoxReport:
    return await backend.run(BoxSpec(Program("command", argv=argv), **more))


# ── What runs ──


async def test_a_program_runs_and_its_end_is_told(backend: Backend) -> None:
    report = await run(backend, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (report.ended, report.exit_status, report.stdout.text, report.stderr.text) == ("exited", 3, "out\n", "err\n")
    assert report.usage.cpu_ms and report.usage.peak_memory_bytes and report.wall_ms > 0
    report = await command(backend, "sh", "-c", "kill -TERM $$")
    assert (report.ended, report.signal) == ("signalled", signal.SIGTERM)
    assert (await command(backend, "/nonexistent")).exit_status == 127


async def test_the_facts_say_what_protects_it_and_that_it_was_looked_at(backend: Backend) -> None:
    isolation = (await run(backend, "pass")).isolation
    assert (isolation["backend"], isolation["level"], isolation["memory_layout"]) == ("oci", "process", "fresh")
    off = [name for name, each in isolation["protections"].items() if not each["on"]]
    assert off == [] and len(isolation["protections"]) >= 12
    assert {each["by"] for each in isolation["limits"].values()} == {"cgroup"}
    assert isolation["engine"].partition(" ")[0] in ("runc", "crun")


async def test_a_program_begins_as_it_does_anywhere(backend: Backend) -> None:
    shown = await run(
        backend,
        "import sys, os; print(sys.argv, __name__, os.getcwd(), sys.path[0], os.getpid() > 1, __file__)",
        program={"name": "/workspace/program.py", "argv": ("a", "b")},
    )
    assert shown.stdout.text == (
        "['/workspace/program.py', 'a', 'b'] __main__ /workspace /workspace True /workspace/program.py\n"
    )
    names = ["HOME", "LANG", "LOGNAME", "MINE", "PATH", "TERM", "TMPDIR", "USER"]
    shown = await run(backend, "import os; print(sorted(os.environ), os.environ['MINE'])", env={"MINE": "ü=1"})
    assert shown.stdout.text == f"{names} ü=1\n"
    inside = await command(backend, "sh", "-c", "readlink /proc/self/fd/0; ls /proc/self/fd | wc -l; id -u; ls /")
    assert inside.stdout.text.split()[:3] == ["/dev/null", "4", "1000"]


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
async def test_standard_input_is_read_to_its_end(backend: Backend, size: int) -> None:
    program = {"stdin": b"x" * size}
    shown = await run(backend, "import sys; print(len(sys.stdin.buffer.read()))", program=program)
    assert shown.stdout.text == f"{size}\n"


async def test_standard_input_may_be_a_pipe(backend: Backend) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"from a pipe")
    os.close(writing)
    try:
        shown = await run(backend, "import sys; print(sys.stdin.read())", program={"stdin": reading})
    finally:
        os.close(reading)
    assert shown.stdout.text == "from a pipe\n"


async def test_a_cell_shows_its_values(backend: Backend) -> None:
    report = await run(backend, "display(1)\n40 + 2", program={"cell": True})
    assert [(each.data["text/plain"], each.main) for each in report.shown] == [("1", False), ("42", True)]


async def test_output_comes_as_it_is_written(backend: Backend) -> None:
    told: list[bytes] = []
    program = Program("python", b"import time\nprint('first', flush=True)\nwhile True: time.sleep(1)")
    running = asyncio.ensure_future(backend.run(BoxSpec(program), lambda stream, data: told.append(data)))
    while b"".join(told) != b"first\n":
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


# ── Files ──


async def test_inputs_are_there_and_cannot_be_changed(backend: Backend) -> None:
    source = "print(open('/workspace/input/a/b').read())\nopen('/workspace/input/a/b', 'w')"
    report = await run(backend, source, inputs=(Input("a/b", b"given"),))
    assert report.stdout.text == "given\n" and "Read-only file system" in report.stderr.text
    assert [(fact.path, fact.bytes) for fact in report.inputs] == [("/workspace/input/a/b", 5)]


async def test_output_files_come_out(backend: Backend, tmp_path: Path) -> None:
    source = """
import os
os.makedirs('output/deep')
open('output/deep/a.txt', 'w').write('hello')
os.symlink('/etc/passwd', 'output/link')
os.mkfifo('output/pipe')
"""
    report = await run(backend, source, output=tmp_path)
    assert report.stderr.text == ""
    assert [fact.path for fact in report.files] == ["/workspace/output/deep/a.txt"]
    assert (tmp_path / "deep" / "a.txt").read_text() == "hello" and not (tmp_path / "link").exists()
    assert "/workspace/output/link" in report.skipped


async def test_a_folder_of_the_host_is_seen_and_cannot_be_changed(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the host's")
    tmp_path.chmod(0o755)
    source = "print(open('/srv/lent/a.txt').read()); open('/srv/lent/b', 'w')"
    report = await run(backend, source, mounts=(Mount(str(tmp_path), "/srv/lent"),))
    assert report.stdout.text == "the host's\n" and "Read-only file system" in report.stderr.text
    assert report.isolation["mounts"] == [{"at": "/srv/lent", "mode": "ro"}]


@pytest.mark.parametrize("at", ["/tmp/deep/lent", "/home/user/lent"])
async def test_a_folder_of_the_host_may_lie_where_programs_else_write(
    backend: Backend, tmp_path: Path, at: str
) -> None:
    (tmp_path / "a.txt").write_text("the host's")
    source = f"print(open('{at}/a.txt').read(), open('{at}/b', 'w').write('x')); open('{at}/../c', 'w')"
    report = await run(backend, source, mounts=(Mount(str(tmp_path), at, "rw"),))
    assert report.stdout.text == "the host's 1\n" and "Read-only file system" in report.stderr.text
    assert (tmp_path / "b").read_text() == "x"


@pytest.mark.parametrize("owner", [0, 4321] if os.geteuid() == 0 else [os.geteuid()])
async def test_what_it_writes_to_a_folder_of_the_host_is_its_owners(
    backend: Backend, tmp_path: Path, owner: int
) -> None:
    work = tmp_path / "work"
    (work / ".git" / "hooks").mkdir(parents=True)
    (work / "a.txt").write_text("old")
    (work / "a.txt").chmod(0o600)
    for each in (work, *work.rglob("*")):
        os.chown(each, owner, owner)
    source = """
import os
print(open('/srv/work/a.txt').read(), os.stat('/srv/work/a.txt').st_uid, flush=True)
open('/srv/work/a.txt', 'w').write('new')
os.mkdir('/srv/work/deep')
open('/srv/work/deep/b', 'w').write('made')
open('/srv/work/run', 'w').write('#!/bin/sh\\necho ran')
os.chmod('/srv/work/run', 0o755)
os.system('/srv/work/run')
open('/srv/work/.git/hooks/pre-commit', 'w')
"""
    report = await run(backend, source, mounts=(Mount(str(work), "/srv/work", "rw"),))
    assert report.stdout.text == "old 1000\nran\n", report.stderr.text
    assert report.isolation["host_id"]["whose"] == ("box" if os.geteuid() == 0 else "user")
    assert "Read-only file system: '/srv/work/.git/hooks/pre-commit'" in report.stderr.text
    assert (work / "a.txt").read_text() == "new"
    assert {each.stat().st_uid for each in work.rglob("*")} == {owner}
    assert report.isolation["mounts"] == [{"at": "/srv/work", "mode": "rw"}] and report.planted == ()


async def test_what_is_planted_in_a_folder_of_the_host_is_told(backend: Backend, tmp_path: Path) -> None:
    source = "import os; os.mkdir('/srv/work/.vscode'); open('/srv/work/.vscode/tasks.json', 'w').write('{}')"
    report = await run(backend, source, mounts=(Mount(str(tmp_path), "/srv/work", "rw"),))
    assert report.planted == ("/srv/work/.vscode",), report.stderr.text


async def test_a_mount_where_none_can_be_is_refused(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="that part of a box is the system's"):
        await run(backend, "pass", mounts=(Mount(str(tmp_path), "/etc/x", "rw"),))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="a link stands in it"):
        await run(backend, "pass", mounts=(Mount(str(tmp_path / "link"), "/srv/x", "rw"),))


# ── Limits ──


async def test_the_clock_ends_it(backend: Backend) -> None:
    report = await run(backend, "while True: pass", Limits(wall_seconds=0.5))
    assert (report.ended, report.limit, report.signal) == ("timeout", "wall", signal.SIGKILL)


async def test_processor_time_ends_it(backend: Backend) -> None:
    report = await run(backend, "while True: pass", Limits(cpu_seconds=0.2, wall_seconds=600))
    assert (report.ended, report.limit) == ("timeout", "cpu")


@pytest.mark.parametrize("how", ["bytearray(400 << 20)", "[bytearray(4 << 20) for _ in range(200)]"])
async def test_memory_ends_it(backend: Backend, how: str) -> None:
    report = await run(backend, f"x = {how}", Limits(memory_bytes=64 * MIB, disk_bytes=16 * MIB, wall_seconds=600))
    assert (report.ended, report.limit) == ("oom", "memory")


async def test_a_full_disk_is_told(backend: Backend) -> None:
    report = await run(backend, "open('big', 'wb').write(bytes(20 << 20))", Limits(disk_bytes=4 * MIB))
    assert "No space left" in report.stderr.text and (report.ended, report.limit) == ("exited", "disk")


async def test_no_more_processes_than_allowed(backend: Backend) -> None:
    source = """
import os
made = 0
while True:
    try:
        if os.fork() == 0:
            import signal; signal.pause()
    except BlockingIOError:
        break
    made += 1
print(made)
"""
    report = await run(backend, source, Limits(processes=20))
    assert report.limit == "pids" and int(report.stdout.text) <= 26


async def test_too_much_output_ends_it(backend: Backend) -> None:
    report = await run(backend, "while True: print('x' * 1000)", Limits(output_bytes=MIB, capture_bytes=1000))
    assert (report.ended, report.limit) == ("output", "output") and report.stdout.truncated


async def test_refused_calls_are_counted(backend: Backend) -> None:
    report = await command(
        backend, "python3", "-c", "import os\ntry: os.unshare(1 << 28)\nexcept OSError as e: print(e.errno)"
    )
    if sys.version_info >= (3, 12):
        assert report.stdout.text == "1\n" and report.denials == {"unshare": 1}


# ── What it cannot give ──


@pytest.mark.parametrize(
    "asked",
    [
        {"programs": Programs(allow=("sh",))},
        {"installs": True},
    ],
)
async def test_what_it_cannot_give_is_refused(backend: Backend, asked: dict[str, Any]) -> None:
    with pytest.raises(Unavailable) as refused:
        await run(backend, "pass", **asked)
    assert refused.value.reason_code == "not_supported" and "backend process can" in str(refused.value)


async def test_an_engine_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(Unavailable, match="needs nosuchengine: apt install nosuchengine"):
        await OciEngine(("nosuchengine",)).open()


# ── Its end ──


async def test_eight_at_once(backend: Backend) -> None:
    reports = await asyncio.gather(*(run(backend, f"print({n})") for n in range(8)))
    assert [report.stdout.text for report in reports] == [f"{n}\n" for n in range(8)]


async def test_nothing_is_left_of_one_that_was_cancelled(backend: Backend) -> None:
    begun = asyncio.Event()
    program = Program("command", argv=("sh", "-c", "echo begun; sleep 4321"))
    running = asyncio.ensure_future(backend.run(BoxSpec(program), lambda stream, data: begun.set()))
    await begun.wait()
    while not sleeping("4321"):
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not sleeping("4321")


async def test_nothing_is_left_of_a_supervisor_that_was_killed(backend: Backend, state: Path) -> None:
    own = Path(tempfile.mkdtemp(prefix="ringfence-killed-"))  # not the one of tests that run beside this one
    own.chmod(0o711)
    words = (sys.executable, "-c", SUPERVISOR.replace("1000", "8765"), str(state))
    env = {**os.environ, "TMPDIR": str(own)}
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    folders = set(own.glob("ringfence-oci-*"))
    assert len(folders) == 1
    process.kill()
    await process.wait()
    while sleeping("8765") or any(each.exists() for each in folders):
        await asyncio.sleep(0.02)
    shutil.rmtree(own, ignore_errors=True)


def sleeping(seconds: str) -> list[int]:
    """Processes that sleep so long."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", seconds.encode()]:
            found.append(int(each.parent.name))
    return found
