"""What outlives sessions: outputs, snapshots, volumes. The boxes are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.core.box import MIB, Input
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.sessions import ForkProblem, Owner, SessionInfo, SessionSpec, StaySpec, VolumeMount
from tests.sandbox.fake_sessions import COLLEAGUE, ME, FakeSessions, fake_sessions, refused, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[FakeSessions]:
    async with fake_sessions(tmp_path / "state") as made:
        yield made


# ── What is kept ──


async def test_outputs_are_kept_for_their_owner_for_a_time(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, retain_seconds=600) as here:
        box, manager = await here.create(), here.manager
        await manager.write(ME, box, "output/sub/report.txt", b"done")
        await manager.write(ME, box, "other", b"gone")
        await manager.end(ME, box)
        assert await manager.read(ME, box, "/workspace/output/sub/report.txt", 0, None) == b"done"
        assert [entry.path for entry in await manager.entries(ME, box, "output", 2)] == [
            "/workspace/output/sub",
            "/workspace/output/sub/report.txt",
        ]
        assert (await manager.stat(ME, box, "output/sub/report.txt")).bytes == 4
        assert [piece async for piece in manager.pack(ME, box, "output")]
        other = await here.create()
        await manager.copy(ME, box, "output/sub/report.txt", other, "in.txt")
        assert await manager.read(ME, other, "in.txt", 0, None) == b"done"
        assert await refused(manager.read(ME, box, "other", 0, None)) == "session_stopped"
        assert await refused(manager.write(ME, box, "output/x", b"")) == "session_stopped"
        assert await refused(manager.read(COLLEAGUE, box, "output/sub/report.txt", 0, None)) == "unknown_session"
    await asyncio.sleep(0.1)
    async with fake_sessions(tmp_path, retain_seconds=0.05) as here:
        await until(lambda: not (tmp_path / "artifacts" / box).exists())
        other, manager = await here.create(), here.manager
        await manager.write(ME, other, "output/a", b"done")
        await manager.end(ME, other)
        await asyncio.sleep(0.06)
        assert await refused(manager.read(ME, other, "output/a", 0, None)) == "session_stopped"


async def test_outputs_of_a_box_that_died_are_kept(here: FakeSessions) -> None:
    box = await here.create()
    await here.manager.write(ME, box, "output/a", b"kept")
    here.backend.boxes[0].die()
    await until(lambda: '"ended"' in here.journal())
    assert await here.manager.read(ME, box, "output/a", 0, None) == b"kept"


async def left(here: FakeSessions, *sizes: int, owner: Owner = ME) -> str:
    """A session that has ended and left files of these sizes, all holes."""
    box = (await here.manager.create(owner, SessionSpec())).id
    for number, size in enumerate(sizes):
        (here.backend.boxes[-1].place / "output").mkdir(exist_ok=True)
        with open(here.backend.boxes[-1].place / f"output/{number}", "wb") as file:
            file.truncate(size)
    await here.manager.end(owner, box)
    return box


def on_the_disk(here: FakeSessions) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (here.folder / "artifacts").rglob("*"))


def kept(here: FakeSessions) -> set[str]:
    return {path.name for path in (here.folder / "artifacts").iterdir()}


async def test_what_ended_sessions_left_has_a_bound_and_the_oldest_goes_first(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, retain_bytes=10 * MIB) as here:
        boxes = [await left(here, 3 * MIB) for _ in range(6)]
        assert kept(here) == set(boxes[-3:]) and on_the_disk(here) <= 10 * MIB
        assert len(await here.manager.read(ME, boxes[-1], "output/0", 0, None)) == 3 * MIB
        with pytest.raises(Refused, match="its output was removed to make room"):
            await here.manager.read(ME, boxes[0], "output/0", 0, None)
    # The next keeper counts what it finds, and may have to keep less.
    async with fake_sessions(tmp_path, retain_bytes=5 * MIB) as here:
        last = await left(here, MIB)
        assert kept(here) == {boxes[-1], last}


async def test_nobody_pushes_out_what_another_left_by_leaving_more(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, retain_bytes=10 * MIB) as here:
        theirs = await left(here, 2 * MIB, owner=COLLEAGUE)
        mine = [await left(here, 3 * MIB) for _ in range(4)]
        assert kept(here) == {theirs, *mine[-2:]}
        large = await left(here, *[3 * MIB] * 4, 11 * MIB)
        assert kept(here) == {theirs, large} and on_the_disk(here) <= 10 * MIB
        assert [entry.path[-1] for entry in await here.manager.entries(ME, large, "output", 1)] == ["0", "1"]
        assert here.journal().count("no more than 10485760 bytes are kept (session_retain_mb)") == 3
        more = await left(here, 4 * MIB, owner=COLLEAGUE)
        assert kept(here) == {theirs, more}, "whoever has the most makes room"


async def test_many_names_of_nothing_have_a_bound_too(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, retain_bytes=MIB) as here:
        boxes = [await left(here, *[0] * 200) for _ in range(3)]
        assert kept(here) == {boxes[-1]}


async def test_retain_none_leaves_nothing_on_the_disk(here: FakeSessions) -> None:
    box = await here.create(retain="none", metadata={"word": "unmistakable"})
    await here.manager.write(ME, box, "output/unmistakable", b"unmistakable")
    assert await refused(here.manager.snapshot(ME, box)) == "retain_none"
    assert await refused(here.manager.fork(ME, box, 1)) == "retain_none"
    await here.manager.end(ME, box)
    assert await refused(here.manager.read(ME, box, "output/unmistakable", 0, None)) == "session_stopped"
    assert (await here.manager.info(ME, box)).why == "closed"
    for path in here.folder.rglob("*"):
        assert "unmistakable" not in path.name
        assert path.is_dir() or b"unmistakable" not in path.read_bytes()


# ── Snapshots and forks ──


async def test_a_snapshot_brings_files_environment_and_folder(here: FakeSessions) -> None:
    one = await here.create(stay=StaySpec(env={"A": "1", "B": "2"}))
    await here.manager.write(ME, one, "data/a", b"text")
    await here.cell(one, "set x 1\nchdir('/workspace/data')")
    snapshot = await here.manager.snapshot(ME, one, "base")
    assert (snapshot.cwd, dict(snapshot.env), snapshot.name) == ("/workspace/data", {"A": "1", "B": "2"}, "base")
    assert [each.id for each in await here.manager.snapshots(ME)] == [snapshot.id]
    made = await here.manager.create(ME, SessionSpec(StaySpec(env={"B": "3"}), snapshot="base"))
    assert made.snapshot == snapshot.id
    assert here.backend.boxes[1].spec.env == {"A": "1", "B": "3"}
    assert await here.manager.read(ME, made.id, "data/a", 0, None) == b"text"
    assert (await here.cell(made.id, "getcwd")).cell.report.stdout.head == b"/workspace/data\n"
    assert await here.got(made.id, "x") == "nothing"
    # The folder that it began in goes on to the next one, if nobody asked where it is.
    again = await here.manager.snapshot(ME, (await here.manager.create(ME, SessionSpec(snapshot="base"))).id)
    assert (again.cwd, dict(again.env)) == ("/workspace/data", {"A": "1", "B": "2"})
    await here.manager.remove_snapshot(ME, "base")
    assert await refused(here.create(snapshot="base")) == "not_found"


async def test_a_snapshot_is_of_one_moment(here: FakeSessions) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep 0.1\nput late text"))
    await asyncio.sleep(0.03)
    pauses = here.backend.boxes[0].pauses
    await here.manager.snapshot(ME, box)
    assert here.backend.boxes[0].pauses == pauses + 1
    assert await here.state(box) == "running"
    assert (await running).cell.report.ended == "exited"
    await here.manager.pause(ME, box)
    await here.manager.snapshot(ME, box)
    assert here.backend.boxes[0].paused


async def test_inputs_come_after_what_is_restored(here: FakeSessions) -> None:
    one = await here.create()
    snapshot = await here.manager.snapshot(ME, one)
    await here.create(stay=StaySpec(inputs=(Input("a", b"1"),)), snapshot=snapshot.id)
    assert here.backend.boxes[1].spec.inputs == ()


async def test_snapshots_are_their_owners(here: FakeSessions) -> None:
    snapshot = await here.manager.snapshot(ME, await here.create(), "mine")
    for reference in ("mine", snapshot.id, "none"):
        assert await refused(here.create(COLLEAGUE, snapshot=reference)) == "not_found"
        assert await refused(here.manager.remove_snapshot(COLLEAGUE, reference)) == "not_found"
    assert await here.manager.snapshots(COLLEAGUE) == []
    assert len(here.backend.boxes) == 1
    assert await refused(here.manager.snapshot(ME, (await here.manager.list(ME))[0].id, "fork.mine")) == "bad_name"


async def test_a_damaged_snapshot_makes_no_session(here: FakeSessions) -> None:
    one = await here.create()
    await here.manager.write(ME, one, "a", b"text")
    snapshot = await here.manager.snapshot(ME, one)
    for piece in (here.folder / "snapshots").rglob("pieces/*/*"):
        piece.write_bytes(piece.read_bytes()[:-1] + b"X")
    with pytest.raises(Unavailable, match="damaged") as problem:
        await here.create(snapshot=snapshot.id)
    assert problem.value.reason_code == "damaged"
    assert [info.id for info in await here.manager.list(ME)] == [one]
    assert here.backend.open_boxes == 1
    (here.folder / "snapshots").rglob("snapshots/*").__next__().write_bytes(b"{}")
    with pytest.raises(Unavailable, match="damaged"):
        await here.create(snapshot=snapshot.id)


async def test_forks_begin_as_their_parent_is(here: FakeSessions) -> None:
    parent = await here.create(stay=StaySpec(env={"A": "1"}), metadata={"for": "tests"})
    await here.manager.write(ME, parent, "a", b"text")
    made = await here.manager.fork(ME, parent, 3)
    infos = [one for one in made if isinstance(one, SessionInfo)]
    assert len({info.id for info in infos} | {parent}) == 4
    for info in infos:
        assert await here.manager.read(ME, info.id, "a", 0, None) == b"text"
        assert (info.step, info.metadata) == (0, {"for": "tests"})
        await here.manager.write(ME, info.id, "a", info.id.encode())
    assert await here.manager.read(ME, parent, "a", 0, None) == b"text"
    assert await here.manager.snapshots(ME) == []
    assert await refused(here.manager.fork(ME, parent, 0)) == "bad_count"
    assert await refused(here.manager.fork(ME, parent, 1000)) == "bad_count"


async def test_forks_fail_one_by_one(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path, max_sessions=3, queue_seconds=0.05) as here:
        made = await here.manager.fork(ME, await here.create(), 4)
        assert sorted(type(one).__name__ for one in made) == ["ForkProblem"] * 2 + ["SessionInfo"] * 2
        assert {one.reason_code for one in made if isinstance(one, ForkProblem)} == {"capacity"}


async def test_forks_that_nobody_waits_for_any_more_are_ended(here: FakeSessions) -> None:
    parent = await here.create()
    here.backend.held = asyncio.Event()
    forking = asyncio.create_task(here.manager.fork(ME, parent, 3))
    await until(lambda: here.manager.live > 1)
    forking.cancel()
    here.backend.held.set()
    await asyncio.gather(forking, return_exceptions=True)
    await until(lambda: here.journal().count('"ended"') == 3)
    assert [info.id for info in await here.manager.list(ME)] == [parent]


async def test_what_a_fork_of_a_dead_keeper_left_is_removed(tmp_path: Path) -> None:
    async with fake_sessions(tmp_path) as here:
        box = await here.create()
        await here.manager.get(ME, box).take_snapshot("fork.left")
        kept = await here.manager.snapshot(ME, box, "kept")
        journal = here.journal()
    (tmp_path / "sessions.jsonl").write_text(journal)
    async with fake_sessions(tmp_path) as here:
        assert [each.id for each in here.manager._snapshots.list(ME)] == [kept.id]


# ── Volumes ──


async def test_volumes_outlive_sessions(here: FakeSessions) -> None:
    manager = here.manager
    made = await manager.create_volume(ME, "data", 10 * MIB, "ro")
    assert [volume.name for volume in await manager.volumes(ME)] == [made.name] == ["data"]
    mount = VolumeMount("data", "/workspace/data")
    box = await here.create(volumes=(mount,))
    await manager.write(ME, box, "data/a", b"1")
    assert await refused(here.create(volumes=(mount,))) == "volume_busy"
    await manager.pause(ME, box)
    reader = await here.create(volumes=(VolumeMount("data", "in", "ro"),))
    assert await manager.read(ME, reader, "in/a", 0, None) == b"1"
    await manager.write(ME, reader, "in/b", b"not saved")
    await manager.write(ME, box, "data/c", b"3")
    await manager.snapshot(ME, box)
    assert (await manager.volumes(ME))[0].files == 2
    await manager.write(ME, box, "data/d", b"4")
    await manager.end(ME, box)
    again = await here.create(volumes=(mount,))
    assert {entry.name for entry in await manager.entries(ME, again, "data", 1)} == {"a", "c", "d"}
    assert await refused(manager.remove_volume(ME, "data")) == "volume_busy"
    await manager.end(ME, again)
    await manager.end(ME, reader)
    await manager.remove_volume(ME, "data")
    assert await manager.volumes(ME) == []


async def test_forks_read_the_volumes_that_their_parent_writes(here: FakeSessions) -> None:
    await here.manager.create_volume(ME, "data", 10 * MIB, "ro")
    box = await here.create(volumes=(VolumeMount("data", "data"),))
    await here.manager.write(ME, box, "data/a", b"1")
    (child,) = await here.manager.fork(ME, box, 1)
    assert isinstance(child, SessionInfo)
    assert await here.manager.read(ME, child.id, "data/a", 0, None) == b"1"


async def test_a_volume_that_cannot_be_saved_keeps_what_it_had(here: FakeSessions) -> None:
    await here.manager.create_volume(ME, "data", MIB, "ro")
    box = await here.create(volumes=(VolumeMount("data", "data"),), idle_seconds=600)
    await here.manager.write(ME, box, "data/a", b"1")
    await here.manager.pause(ME, box)
    await here.manager.write(ME, box, "data/b", bytes(2 * MIB))
    with pytest.raises(Refused):
        await here.manager.pause(ME, box)
    assert await here.state(box) == "running"
    assert not here.backend.boxes[0].paused
    with pytest.raises(Refused):
        await here.manager.snapshot(ME, box)
    here.idle(box)
    await until(lambda: here.backend.boxes[0].paused)  # by itself
    await here.manager.end(ME, box)
    assert "volumes were not saved" in here.journal()
    again = await here.create(volumes=(VolumeMount("data", "data"),))
    assert [entry.name for entry in await here.manager.entries(ME, again, "data", 1)] == ["a"]


@pytest.mark.parametrize(
    ("mounts", "code"),
    [
        ([("data", "/workspace")], "bad_path"),
        ([("data", "/etc")], "outside"),
        ([("data", "input/data")], "bad_path"),
        ([("data", "a"), ("data2", "a/b")], "bad_path"),
        ([("none", "a")], "not_found"),
        ([("data", f"a{number}") for number in range(20)], "too_many"),
    ],
)
async def test_volumes_that_cannot_be_had_are_refused(
    here: FakeSessions, mounts: list[tuple[str, str]], code: str
) -> None:
    await here.manager.create_volume(ME, "data", MIB, "ro")
    await here.manager.create_volume(ME, "data2", MIB, "ro")
    volumes = tuple(VolumeMount(name, at) for name, at in mounts)
    assert await refused(here.create(volumes=volumes)) == code
    assert here.backend.boxes == []
    await here.create(volumes=(VolumeMount("data", "a"), VolumeMount("data2", "b")))


async def test_volumes_are_their_owners(here: FakeSessions) -> None:
    await here.manager.create_volume(ME, "data", MIB, "ro")
    assert await refused(here.create(COLLEAGUE, volumes=(VolumeMount("data", "a"),))) == "not_found"
    assert await refused(here.create(COLLEAGUE, volumes=(VolumeMount("me/data", "a"),))) == "not_found"
    assert await refused(here.manager.remove_volume(COLLEAGUE, "data")) == "not_found"
