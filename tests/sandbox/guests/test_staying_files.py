"""Sessions in guests: their files, volumes, snapshots and what is kept of them, in real containers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, Input, Limits
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.sessions import (
    CommandRequest,
    SessionInfo,
    SessionSpec,
    StaySpec,
    StepReport,
    VolumeMount,
)
from ringfence.sandbox.guests.backend import GuestBackend
from ringfence.sandbox.sessions.capacity import KeeperRules
from ringfence.sandbox.sessions.manager import SessionManager
from tests import tooling
from tests.sandbox.fake_sessions import ME, unheard

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestBackend]:
    made = make_backend(SandboxSettings(backend="oci"), tmp_path_factory.mktemp("state"))
    assert isinstance(made, GuestBackend)
    try:
        await (await made.open(StaySpec())).end()
    except Unavailable as exc:
        await made.close()
        pytest.skip(str(exc))
    yield made
    await made.close()


@pytest.fixture
async def manager(backend: GuestBackend, tmp_path: Path) -> AsyncIterator[SessionManager]:
    made = await SessionManager.open(backend, tmp_path / "state", KeeperRules())
    yield made
    await made.close()


async def create(manager: SessionManager, stay: StaySpec = StaySpec(), **how: Any) -> str:  # noqa: B008
    return (await manager.create(ME, SessionSpec(stay=stay, **how))).id


async def report(manager: SessionManager, box: str, line: str, **how: Any) -> StepReport:
    return await manager.command(ME, box, CommandRequest(("/bin/sh", "-c", line), **how), unheard)


async def shell(manager: SessionManager, box: str, line: str, **how: Any) -> str:
    captured = (await report(manager, box, line, **how)).cell.report
    return captured.stdout.text + captured.stderr.text


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def test_files_go_in_and_out(manager: SessionManager) -> None:
    box = await create(manager, StaySpec(inputs=(Input("in.txt", b"given"),)))
    fact = await manager.write(ME, box, "a/b.txt", b"hello")
    assert (fact.path, fact.bytes) == ("/workspace/a/b.txt", 5)
    assert await shell(manager, box, "cat a/b.txt input/in.txt; stat -c %u a/b.txt") == "hellogiven1000\n"
    await shell(manager, box, "echo there > /tmp/scratch; echo here > ~/kept; mkdir output; echo out > output/o")
    assert await manager.read(ME, box, "/tmp/scratch", 0, None) == b"there\n"
    assert await manager.read(ME, box, "/home/user/kept", 0, None) == b"here\n"
    names = [entry.path for entry in await manager.entries(ME, box, "/workspace", 1)]
    assert names == ["/workspace/a", "/workspace/input", "/workspace/output"]
    assert (await manager.stat(ME, box, "/usr/bin/env")).kind in ("file", "link")
    for path in ("/usr/new", "/workspace/input/new"):
        with pytest.raises(Refused) as refused:
            await manager.write(ME, box, path, b"x")
        assert refused.value.reason_code == "read_only", path
    with pytest.raises(Refused) as refused:
        await manager.read(ME, box, "/proc/self/status", 0, None)
    assert refused.value.reason_code == "not_a_file"
    packed = b"".join([piece async for piece in manager.pack(ME, box, "a")])
    facts = await manager.unpack(ME, box, "copy", pieces(packed))
    assert [(each.path, each.bytes) for each in facts] == [("/workspace/copy/b.txt", 5)]
    await manager.rename(ME, box, "copy/b.txt", "c.txt")
    await manager.remove(ME, box, "copy")
    assert await shell(manager, box, "cat c.txt; ls") == "helloa\nc.txt\ninput\noutput\n"
    other = await create(manager)
    await manager.copy(ME, box, "c.txt", other, "from-another")
    assert await manager.read(ME, other, "from-another", 0, None) == b"hello"
    await manager.end(ME, box)
    assert await manager.read(ME, box, "output/o", 0, None) == b"out\n"
    with pytest.raises(Refused) as refused:
        await manager.read(ME, box, "c.txt", 0, None)
    assert refused.value.reason_code == "session_stopped"


async def test_a_full_disk_is_said_in_the_same_words(manager: SessionManager) -> None:
    box = await create(manager, StaySpec(limits=Limits(disk_bytes=4 * MIB)))
    with pytest.raises(Refused, match="disk limit of 4 MiB") as refused:
        await manager.write(ME, box, "large", bytes(5 * MIB))
    assert refused.value.reason_code == "disk"
    assert [entry.name for entry in await manager.entries(ME, box, "/workspace", 1)] == []


async def test_files_are_there_while_the_session_is_paused(manager: SessionManager) -> None:
    box = await create(manager)
    await manager.start(ME, box, CommandRequest(("/bin/sh", "-c", "while true; do echo x >> log; sleep 0.01; done")))
    async with asyncio.timeout(tooling.PATIENCE):
        while not (await shell(manager, box, "cat log 2>/dev/null")).strip():
            await asyncio.sleep(0.01)
    await manager.pause(ME, box)
    first = await manager.read(ME, box, "log", 0, None)
    assert await manager.state_of(ME, box) == await manager.state_of(ME, box)
    assert first and await manager.read(ME, box, "log", 0, None) == first
    assert (await manager.list(ME))[0].state == "paused"
    await manager.resume(ME, box)
    async with asyncio.timeout(tooling.PATIENCE):
        while len(await manager.read(ME, box, "log", 0, None)) == len(first):
            await asyncio.sleep(0.01)


async def test_snapshots_and_forks_have_the_files(manager: SessionManager) -> None:
    box = await create(manager, StaySpec(inputs=(Input("in.txt", b"given"),), env={"A": "1"}))
    await shell(
        manager, box, "mkdir -p deep/er; echo one > deep/er/file; ln -s deep link; echo t > /tmp/t; echo h > ~/h"
    )
    taken = await manager.snapshot(ME, box, "first")
    assert taken.has_input and taken.whole
    hashed = (await manager.state_of(ME, box))[1]
    assert taken.tree_digest == hashed
    await shell(manager, box, "echo two > deep/er/file")
    assert (await manager.state_of(ME, box))[1] != hashed
    look = "cat deep/er/file link/er/file /tmp/t ~/h input/in.txt; echo $A; echo x > input/in.txt"
    again = await create(manager, snapshot="first")
    seen = await shell(manager, again, look)
    assert seen.startswith("one\none\nt\nh\ngiven1\n") and "Read-only" in seen
    forks = await manager.fork(ME, box, 2)
    for fork in forks:
        assert isinstance(fork, SessionInfo), fork
        assert (await shell(manager, fork.id, look)).startswith("two\ntwo\nt\nh\ngiven1\n")


async def test_volumes_outlive_sessions_and_have_their_size(manager: SessionManager) -> None:
    await manager.create_volume(ME, "data", 4 * MIB, "ro")
    mounted = (VolumeMount("data", "/workspace/data"),)
    box = await create(manager, volumes=mounted)
    said = await shell(
        manager, box, "umask 077; echo kept > data/file; head -c 5000000 /dev/zero > data/large; rm data/large"
    )
    assert "No space left" in said
    taken = await manager.snapshot(ME, box)
    assert taken.files == 0, "a volume is no part of it"
    await manager.end(ME, box)
    reading = (VolumeMount("data", "/workspace/data", "ro"),)
    readers = [await create(manager, volumes=reading) for _ in range(2)]
    for reader in readers:
        said = await shell(manager, reader, "cat data/file; touch data/new")
        assert said.startswith("kept\n") and "Read-only" in said
        ended = await manager.end(ME, reader)
        assert ended.not_kept == ()
    box = await create(manager, volumes=mounted)
    assert await shell(manager, box, "cat data/file; ls data") == "kept\nfile\n"


async def test_what_cannot_be_kept_is_said(manager: SessionManager) -> None:
    box = await create(manager)
    await shell(manager, box, "mkdir output; ln -s /etc/passwd output/link; echo x > output/good")
    ended = await manager.end(ME, box)
    assert ended.not_kept == ("/workspace/output/link was not kept: it is a link that leads out of the folder",)
    assert await manager.read(ME, box, "output/good", 0, None) == b"x\n"


async def test_changes_are_told(manager: SessionManager) -> None:
    box = await create(manager)
    changes = manager.watch(ME, box, "/workspace", True)
    async with asyncio.timeout(tooling.PATIENCE):
        assert (await anext(changes)).kind == "begun"
        await shell(manager, box, "echo x > new.txt")
        change = await anext(changes)
        assert (change.kind, change.path) == ("created", "/workspace/new.txt")
        await manager.end(ME, box)
        async for _ in changes:
            pass


async def test_all_of_a_long_output_is_in_a_file(manager: SessionManager) -> None:
    box = await create(manager, StaySpec(limits=Limits(capture_bytes=1000)))
    said = await report(manager, box, "seq 100000", keep_whole=True)
    assert said.cell.report.stdout.truncated
    whole = await manager.read(ME, box, said.whole["stdout"], 0, None)
    assert whole == b"".join(b"%d\n" % number for number in range(1, 100_001))


async def test_a_program_that_ends_the_work_on_files_ends_that_alone(manager: SessionManager) -> None:
    box = await create(manager)
    await manager.write(ME, box, "file", b"x")
    await manager.start(ME, box, CommandRequest(("/bin/sh", "-c", "while true; do kill -9 -1; done")))
    done = set()
    async with asyncio.timeout(tooling.PATIENCE):
        while b"x" not in done:
            try:
                done.add(await manager.read(ME, box, "file", 0, None))
            except Unavailable as problem:
                done.add(problem.reason_code.encode())
    assert done <= {b"x", b"guest_failed"}
