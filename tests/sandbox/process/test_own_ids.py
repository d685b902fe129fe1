"""Boxes of an ordinary user to whom subordinate ids were given: each is somebody else, and the files are the user's."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.core.box import MIB, BoxReport, BoxSpec, Input, Limits, Mount, Program
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import Command, Folder, StaySpec
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.process import ids
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.live import LiveBox
from tests import tooling
from tests.boxing import need_boxes
from tests.sandbox import comparing
from tests.sandbox.process import looking
from tests.tooling import ROOT

pytestmark = pytest.mark.anyio
RUNNER = Path(__file__).with_name("subordinate.py")


def why_not() -> str:
    """Why this user's boxes have no ids of their own; nothing where they have."""
    if os.geteuid() == 0:
        return "root; the last test here runs the others as an ordinary user"
    try:
        ids.found_subids()
    except Unavailable as exc:
        return exc.message
    return "" if ids._release() >= ids.LENDS_SINCE else "this kernel mounts no tmpfs with mapped ids"


ordinary = pytest.mark.skipif(bool(why_not()), reason=f"no subordinate ids here: {why_not()}")


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


async def run(backend: ProcessBackend, source: str, **more) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source.encode()), **more))


def owner(pid: int) -> tuple[int, int]:
    """Of a process: user and group, as the host has them."""
    found = os.stat(f"/proc/{pid}")
    return found.st_uid, found.st_gid


async def shell(box: LiveBox, line: str) -> BoxReport:
    command = Command(("/bin/sh", "-c", line), Limits())
    return await (await box.command(command, lambda *_: None)).over()


@ordinary
async def test_boxes_are_neither_each_other_nor_the_user(backend: ProcessBackend) -> None:
    boxes = [await backend.open(StaySpec()) for _ in range(3)]
    try:
        users, groups = zip(*(owner(box.box.worker) for box in boxes), strict=True)
        assert len({*users, os.getuid()}) == len({*groups, os.getgid()}) == 4
        ranges = ids.found_subids()
        assert all(any(user in span for span in ranges[0]) for user in users)
        assert all(any(group in span for span in ranges[1]) for group in groups)
        assert [box.isolation["host_id"] for box in boxes] == [{"whose": "own"}] * 3
        assert (await shell(boxes[0], "id -u; id -G")).stdout.text == "1000\n1000\n"
    finally:
        for box in boxes:
            await box.end()


@ordinary
async def test_what_a_program_closes_to_others_is_collected(backend: ProcessBackend, tmp_path: Path) -> None:
    source = """
import os
os.umask(0o077)
os.mkdir('/workspace/output/folder')
with open('/workspace/output/folder/file', 'w') as file:
    file.write('mine')
print(oct(os.stat('/workspace/output/folder/file').st_mode), os.stat('/workspace/output/folder/file').st_uid)
"""
    report = await run(backend, source, output=tmp_path / "out")
    assert report.stdout.text == "0o100600 1000\n"
    assert (tmp_path / "out/folder/file").read_text() == "mine"
    assert (tmp_path / "out/folder/file").stat().st_uid == os.getuid()
    assert not report.skipped


@ordinary
async def test_inputs_belong_to_the_box_which_cannot_change_them(backend: ProcessBackend, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("from the host")
    (tmp_path / "data").chmod(0o600)
    source = """
import os
print(open('/workspace/input/sub/data').read(), os.stat('/workspace/input/sub/data').st_uid)
try:
    open('/workspace/input/sub/data', 'w')
except OSError as exc:
    print(exc.strerror)
"""
    report = await run(backend, source, inputs=(Input("sub/data", tmp_path / "data"),))
    assert report.stdout.text == "from the host 1000\nRead-only file system\n"


@ordinary
async def test_the_files_of_a_session_can_be_used_from_both_sides(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec(folders=(Folder("/workspace/kept", 4 * MIB),)))
    workspace = Workspace(box.workspace, box.box.host_id)
    try:
        await shell(box, "umask 077; mkdir closed; echo inside > closed/file; echo there > kept/file")
        assert workspace.read("/workspace/closed/file") == b"inside\n"
        assert os.stat("file", dir_fd=box.box.descriptors["folder0"]).st_uid == os.getuid()
        workspace.write("/workspace/given/file", b"outside\n")
        report = await shell(box, "cat given/file; echo more >> given/file; touch given/other; stat -c %u given")
        assert report.stdout.text == "outside\n1000\n"
        assert workspace.read("/workspace/given/file") == b"outside\nmore\n"
    finally:
        await box.end()


@ordinary
async def test_a_command_has_a_terminal(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec())
    try:
        said: list[bytes] = []
        command = Command(("/bin/sh", "-c", "read line; echo $line; stty size"), Limits(), pty=(80, 24))
        running = await box.command(command, lambda _, data: said.append(data))
        running.send(b"in\n")
        assert (await running.over()).exit_status == 0
        assert b"".join(said).endswith(b"in\r\n24 80\r\n")
    finally:
        await box.end()


@ordinary
async def test_a_box_that_sees_folders_of_the_user_is_that_user(backend: ProcessBackend, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    report = await run(backend, "open('/data/made', 'w').write('x')", mounts=(Mount(str(tmp_path), "/data", "rw"),))
    assert report.ended == "exited" and report.exit_status == 0
    assert (tmp_path / "made").stat().st_uid == os.getuid()
    assert report.isolation["host_id"]["whose"] == "user" and "folders" in report.isolation["host_id"]["why"]


@ordinary
async def test_it_is_ended_with_all_that_it_started(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec())
    await shell(box, "setsid sleep 1000 > /dev/null 2>&1 & exit 0")
    processes = [each for pid in (box.box.first, *box.box.workers) for each in looking.descendants(pid)]
    assert {owner(each.pid)[0] for each in processes} != {os.getuid()}
    await box.end()
    tooling.wait_until(looking.all_gone(processes))
    report = await run(backend, "while True: pass", limits=Limits(wall_seconds=0.3))
    assert report.ended == "timeout"


@ordinary
async def test_it_may_have_just_as_many_processes_as_it_was_given(backend: ProcessBackend) -> None:
    source = """
import os, signal
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError:
    print(made + 1)
"""
    report = await run(backend, source, limits=Limits(processes=7))
    assert report.stdout.text == "7\n"


INFLIGHT = """
import array, resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
sent = 0
try:
    while sent < float(sys.argv[1]) * most:
        ours.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 50))])
        sent += 50
        ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        theirs = (theirs, other)
    print('sent', flush=True)
except OSError as exc:
    print(exc.strerror, flush=True)
sys.stdin.read()
"""


@ordinary
async def test_what_one_box_has_on_the_way_does_not_count_for_another(backend: ProcessBackend) -> None:
    """Open files that were sent and not yet received, which the kernel counts for a user."""
    reading, writing = os.pipe()
    said = asyncio.Event()
    limits = Limits(open_files=200)
    first = Program("python", INFLIGHT.encode(), argv=("9",), stdin=reading)
    running = asyncio.create_task(backend.run(BoxSpec(first, limits), lambda *_: said.set()))
    try:
        async with asyncio.timeout(tooling.PATIENCE):
            await said.wait()
        second = await backend.run(BoxSpec(Program("python", INFLIGHT.encode(), argv=("0.1",)), limits))
    finally:
        os.close(writing)
        os.close(reading)
    assert (await running).stdout.text == "Too many references: cannot splice\n"
    assert second.stdout.text == "sent\n"


def test_a_zygote_that_is_killed_while_it_tries_its_ids_leaves_nothing() -> None:
    need_boxes()
    script = (
        "import os; from ringfence.sandbox.process.zygote import main\n"
        "print(main._user_namespace()[0], flush=True); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == -9, ended.stderr
    tooling.wait_until_gone(int(ended.stdout))


@ordinary
async def test_a_zygote_that_is_gone_before_its_ids_are_mapped_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = ids.helper("group")
    once = tmp_path / "once"
    once.write_text(f'#!/bin/sh\n[ -e {tmp_path}/done ] && exec {helper} "$@"\n> {tmp_path}/done\nexit 1\n')
    once.chmod(0o755)
    monkeypatch.setattr(ids, "_refusals", [])
    monkeypatch.setattr(ids, "helper", lambda kind, real=ids.helper: str(once) if kind == "group" else real(kind))
    backend = ProcessBackend(depth=0)
    try:
        assert (await run(backend, "pass")).isolation["host_id"] == {"whose": "own"}
    finally:
        await backend.close()


@ordinary
@pytest.mark.parametrize("what", ["user", "group"])
async def test_where_ids_cannot_be_mapped_facts_say_so(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "refusing"
    refusing.write_text("#!/bin/sh\necho 'it does not want to' >&2\nexit 1\n")
    refusing.chmod(0o755)
    helper = ids.helper
    monkeypatch.setattr(ids, "helper", lambda kind: str(refusing) if kind == what else helper(kind))
    monkeypatch.setattr(ids, "_refusals", [])
    backend = ProcessBackend(depth=0)
    try:
        for _ in range(2):
            report = await run(backend, "print(open('/proc/self/uid_map').read().split())")
            assert report.stdout.text == "['1000', '0', '1']\n"
            assert report.isolation["host_id"] == {"whose": "user", "why": "it does not want to"}
    finally:
        await backend.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has run the other tests")
def test_an_ordinary_user_with_subordinate_ids(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        pytest.skip("newuidmap and newgidmap are not installed")
    if ids._release() < ids.LENDS_SINCE:
        pytest.skip("this kernel mounts no tmpfs with mapped ids")
    folder = tmp_path_factory.mktemp("ordinary")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-I", "-S", RUNNER, folder, *command],
        cwd=ROOT,
        # Nobody but us could write down what was covered.
        env={name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", "COVERED")},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "no subordinate ids here" not in done.stdout
