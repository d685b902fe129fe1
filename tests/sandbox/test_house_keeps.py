"""What outlives sessions: outputs, snapshots, volumes. The boxes are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.box import MIB, Input
from ringfence.errors import Refused, Unavailable
from ringfence.sessions import Owner, Problem, SessionInfo, SessionSpec, StaySpec, VolumeMount
from tests.sandbox.lodging import COLLEAGUE, ME, Lodging, lodging, refused, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Lodging]:
    async with lodging(tmp_path / "state") as made:
        yield made


# ── What is kept ──


async def test_outputs_are_kept_for_their_owner_for_a_time(tmp_path: Path) -> None:
    async with lodging(tmp_path, retain_seconds=600) as here:
        box, house = await here.create(), here.house
        await house.write(ME, box, "output/sub/report.txt", b"done")
        await house.write(ME, box, "other", b"gone")
        await house.end(ME, box)
        assert await house.read(ME, box, "/workspace/output/sub/report.txt", 0, None) == b"done"
        assert [entry.path for entry in await house.entries(ME, box, "output", 2)] == [
            "/workspace/output/sub",
            "/workspace/output/sub/report.txt",
        ]
        assert (await house.stat(ME, box, "output/sub/report.txt")).bytes == 4
        assert [piece async for piece in house.pack(ME, box, "output")]
        other = await here.create()
        await house.copy(ME, box, "output/sub/report.txt", other, "in.txt")
        assert await house.read(ME, other, "in.txt", 0, None) == b"done"
        assert await refused(house.read(ME, box, "other", 0, None)) == "session_stopped"
        assert await refused(house.write(ME, box, "output/x", b"")) == "session_stopped"
        assert await refused(house.read(COLLEAGUE, box, "output/sub/report.txt", 0, None)) == "unknown_session"
    await asyncio.sleep(0.1)
    async with lodging(tmp_path, retain_seconds=0.05) as here:
        await until(lambda: not (tmp_path / "artifacts" / box).exists())
        other, house = await here.create(), here.house
        await house.write(ME, other, "output/a", b"done")
        await house.end(ME, other)
        await asyncio.sleep(0.06)
        assert await refused(house.read(ME, other, "output/a", 0, None)) == "session_stopped"


async def test_outputs_of_a_box_that_died_are_kept(here: Lodging) -> None:
    box = await here.create()
    await here.house.write(ME, box, "output/a", b"kept")
    here.backend.boxes[0].die()
    await until(lambda: '"ended"' in here.journal())
    assert await here.house.read(ME, box, "output/a", 0, None) == b"kept"


async def left(here: Lodging, *sizes: int, owner: Owner = ME) -> str:
    """A session that has ended and left files of these sizes, all holes."""
    box = (await here.house.create(owner, SessionSpec())).id
    for number, size in enumerate(sizes):
        with open(here.backend.boxes[-1].place / f"output/{number}", "wb") as file:
            file.truncate(size)
    await here.house.end(owner, box)
    return box


def on_the_disk(here: Lodging) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (here.folder / "artifacts").rglob("*"))


def kept(here: Lodging) -> set[str]:
    return {path.name for path in (here.folder / "artifacts").iterdir()}


async def test_what_ended_sessions_left_has_a_bound_and_the_oldest_goes_first(tmp_path: Path) -> None:
    async with lodging(tmp_path, retain_bytes=10 * MIB) as here:
        boxes = [await left(here, 3 * MIB) for _ in range(6)]
        assert kept(here) == set(boxes[-3:]) and on_the_disk(here) <= 10 * MIB
        assert len(await here.house.read(ME, boxes[-1], "output/0", 0, None)) == 3 * MIB
        with pytest.raises(Refused, match="what it left was removed to make room"):
            await here.house.read(ME, boxes[0], "output/0", 0, None)
    # The next keeper counts what it finds, and may have to keep less.
    async with lodging(tmp_path, retain_bytes=5 * MIB) as here:
        last = await left(here, MIB)
        assert kept(here) == {boxes[-1], last}


async def test_nobody_pushes_out_what_another_left_by_leaving_more(tmp_path: Path) -> None:
    async with lodging(tmp_path, retain_bytes=10 * MIB) as here:
        theirs = await left(here, 2 * MIB, owner=COLLEAGUE)
        mine = [await left(here, 3 * MIB) for _ in range(4)]
        assert kept(here) == {theirs, *mine[-2:]}
        large = await left(here, *[3 * MIB] * 4, 11 * MIB)
        assert kept(here) == {theirs, large} and on_the_disk(here) <= 10 * MIB
        assert [entry.path[-1] for entry in await here.house.entries(ME, large, "output", 1)] == ["0", "1"]
        assert here.journal().count("no more than 10485760 bytes are kept (session_retain_mb)") == 3
        more = await left(here, 4 * MIB, owner=COLLEAGUE)
        assert kept(here) == {theirs, more}, "whoever has the most makes room"


async def test_many_names_of_nothing_have_a_bound_too(tmp_path: Path) -> None:
    async with lodging(tmp_path, retain_bytes=MIB) as here:
        boxes = [await left(here, *[0] * 200) for _ in range(3)]
        assert kept(here) == {boxes[-1]}


async def test_retain_none_leaves_nothing_on_the_disk(here: Lodging) -> None:
    box = await here.create(retain="none", metadata={"word": "unmistakable"})
    await here.house.write(ME, box, "output/unmistakable", b"unmistakable")
    assert await refused(here.house.snapshot(ME, box)) == "retain_none"
    assert await refused(here.house.fork(ME, box, 1)) == "retain_none"
    await here.house.end(ME, box)
    assert await refused(here.house.read(ME, box, "output/unmistakable", 0, None)) == "session_stopped"
    assert (await here.house.info(ME, box)).why == "closed"
    for path in here.folder.rglob("*"):
        assert "unmistakable" not in path.name
        assert path.is_dir() or b"unmistakable" not in path.read_bytes()


# ── Snapshots and forks ──


async def test_a_snapshot_brings_files_environment_and_folder(here: Lodging) -> None:
    one = await here.create(stay=StaySpec(env={"A": "1", "B": "2"}))
    await here.house.write(ME, one, "data/a", b"text")
    await here.cell(one, "set x 1\nchdir('/workspace/data')")
    snapshot = await here.house.snapshot(ME, one, "base")
    assert (snapshot.cwd, dict(snapshot.env), snapshot.name) == ("/workspace/data", {"A": "1", "B": "2"}, "base")
    assert [each.id for each in await here.house.snapshots(ME)] == [snapshot.id]
    made = await here.house.create(ME, SessionSpec(StaySpec(env={"B": "3"}), snapshot="base"))
    assert made.snapshot == snapshot.id
    assert here.backend.boxes[1].spec.env == {"A": "1", "B": "3"}
    assert await here.house.read(ME, made.id, "data/a", 0, None) == b"text"
    assert (await here.cell(made.id, "getcwd")).cell.report.stdout.head == b"/workspace/data\n"
    assert await here.got(made.id, "x") == "nothing"
    # The folder that it began in goes on to the next one, if nobody asked where it is.
    again = await here.house.snapshot(ME, (await here.house.create(ME, SessionSpec(snapshot="base"))).id)
    assert (again.cwd, dict(again.env)) == ("/workspace/data", {"A": "1", "B": "2"})
    await here.house.remove_snapshot(ME, "base")
    assert await refused(here.create(snapshot="base")) == "not_found"


async def test_a_snapshot_is_of_one_moment(here: Lodging) -> None:
    box = await here.create()
    running = asyncio.create_task(here.cell(box, "sleep 0.1\nput late text"))
    await asyncio.sleep(0.03)
    pauses = here.backend.boxes[0].pauses
    await here.house.snapshot(ME, box)
    assert here.backend.boxes[0].pauses == pauses + 1
    assert await here.state(box) == "running"
    assert (await running).cell.report.ended == "exited"
    await here.house.pause(ME, box)
    await here.house.snapshot(ME, box)
    assert here.backend.boxes[0].paused


async def test_inputs_come_after_what_is_restored(here: Lodging) -> None:
    one = await here.create()
    snapshot = await here.house.snapshot(ME, one)
    await here.create(stay=StaySpec(inputs=(Input("a", b"1"),)), snapshot=snapshot.id)
    assert here.backend.boxes[1].spec.inputs == ()


async def test_snapshots_are_their_owners(here: Lodging) -> None:
    snapshot = await here.house.snapshot(ME, await here.create(), "mine")
    for reference in ("mine", snapshot.id, "none"):
        assert await refused(here.create(COLLEAGUE, snapshot=reference)) == "not_found"
        assert await refused(here.house.remove_snapshot(COLLEAGUE, reference)) == "not_found"
    assert await here.house.snapshots(COLLEAGUE) == []
    assert len(here.backend.boxes) == 1
    assert await refused(here.house.snapshot(ME, (await here.house.list(ME))[0].id, "fork.mine")) == "bad_name"


async def test_a_damaged_snapshot_makes_no_session(here: Lodging) -> None:
    one = await here.create()
    await here.house.write(ME, one, "a", b"text")
    snapshot = await here.house.snapshot(ME, one)
    for piece in (here.folder / "snapshots").rglob("pieces/*/*"):
        piece.write_bytes(piece.read_bytes()[:-1] + b"X")
    with pytest.raises(Unavailable, match="damaged") as problem:
        await here.create(snapshot=snapshot.id)
    assert problem.value.reason_code == "damaged"
    assert [info.id for info in await here.house.list(ME)] == [one]
    assert here.backend.open_boxes == 1
    (here.folder / "snapshots").rglob("snapshots/*").__next__().write_bytes(b"{}")
    with pytest.raises(Unavailable, match="damaged"):
        await here.create(snapshot=snapshot.id)


async def test_forks_begin_as_their_parent_is(here: Lodging) -> None:
    parent = await here.create(stay=StaySpec(env={"A": "1"}), metadata={"for": "tests"})
    await here.house.write(ME, parent, "a", b"text")
    made = await here.house.fork(ME, parent, 3)
    infos = [one for one in made if isinstance(one, SessionInfo)]
    assert len({info.id for info in infos} | {parent}) == 4
    for info in infos:
        assert await here.house.read(ME, info.id, "a", 0, None) == b"text"
        assert (info.step, info.metadata) == (0, {"for": "tests"})
        await here.house.write(ME, info.id, "a", info.id.encode())
    assert await here.house.read(ME, parent, "a", 0, None) == b"text"
    assert await here.house.snapshots(ME) == []
    assert await refused(here.house.fork(ME, parent, 0)) == "bad_count"
    assert await refused(here.house.fork(ME, parent, 1000)) == "bad_count"


async def test_forks_fail_one_by_one(tmp_path: Path) -> None:
    async with lodging(tmp_path, max_sessions=3, queue_seconds=0.05) as here:
        made = await here.house.fork(ME, await here.create(), 4)
        assert sorted(type(one).__name__ for one in made) == ["Problem", "Problem", "SessionInfo", "SessionInfo"]
        assert {one.reason_code for one in made if isinstance(one, Problem)} == {"capacity"}


async def test_forks_that_nobody_waits_for_any_more_are_ended(here: Lodging) -> None:
    parent = await here.create()
    here.backend.held = asyncio.Event()
    forking = asyncio.create_task(here.house.fork(ME, parent, 3))
    await until(lambda: here.house.live > 1)
    forking.cancel()
    here.backend.held.set()
    await asyncio.gather(forking, return_exceptions=True)
    await until(lambda: here.journal().count('"ended"') == 3)
    assert [info.id for info in await here.house.list(ME)] == [parent]


async def test_what_a_fork_of_a_dead_keeper_left_is_removed(tmp_path: Path) -> None:
    async with lodging(tmp_path) as here:
        box = await here.create()
        session = here.house._rooms.own(ME, box)
        await here.house._snapshot(session, "fork.left")
        kept = await here.house.snapshot(ME, box, "kept")
        journal = here.journal()
    (tmp_path / "sessions.jsonl").write_text(journal)
    async with lodging(tmp_path) as here:
        assert [each.id for each in here.house._rooms.snapshots.list(ME)] == [kept.id]


# ── Volumes ──


async def test_volumes_outlive_sessions(here: Lodging) -> None:
    house = here.house
    made = await house.create_volume(ME, "data", 10 * MIB, "ro")
    assert [volume.name for volume in await house.volumes(ME)] == [made.name] == ["data"]
    mount = VolumeMount("data", "/workspace/data")
    box = await here.create(volumes=(mount,))
    await house.write(ME, box, "data/a", b"1")
    assert await refused(here.create(volumes=(mount,))) == "volume_busy"
    await house.pause(ME, box)
    reader = await here.create(volumes=(VolumeMount("data", "in", "ro"),))
    assert await house.read(ME, reader, "in/a", 0, None) == b"1"
    await house.write(ME, reader, "in/b", b"not saved")
    await house.write(ME, box, "data/c", b"3")
    await house.snapshot(ME, box)
    assert (await house.volumes(ME))[0].files == 2
    await house.write(ME, box, "data/d", b"4")
    await house.end(ME, box)
    again = await here.create(volumes=(mount,))
    assert {entry.name for entry in await house.entries(ME, again, "data", 1)} == {"a", "c", "d"}
    assert await refused(house.remove_volume(ME, "data")) == "volume_busy"
    await house.end(ME, again)
    await house.end(ME, reader)
    await house.remove_volume(ME, "data")
    assert await house.volumes(ME) == []


async def test_forks_read_the_volumes_that_their_parent_writes(here: Lodging) -> None:
    await here.house.create_volume(ME, "data", 10 * MIB, "ro")
    box = await here.create(volumes=(VolumeMount("data", "data"),))
    await here.house.write(ME, box, "data/a", b"1")
    (child,) = await here.house.fork(ME, box, 1)
    assert isinstance(child, SessionInfo)
    assert await here.house.read(ME, child.id, "data/a", 0, None) == b"1"


async def test_a_volume_that_cannot_be_saved_keeps_what_it_had(here: Lodging) -> None:
    await here.house.create_volume(ME, "data", MIB, "ro")
    box = await here.create(volumes=(VolumeMount("data", "data"),), idle_seconds=600)
    await here.house.write(ME, box, "data/a", b"1")
    await here.house.pause(ME, box)
    await here.house.write(ME, box, "data/b", bytes(2 * MIB))
    with pytest.raises(Refused):
        await here.house.pause(ME, box)
    assert await here.state(box) == "running"
    assert not here.backend.boxes[0].paused
    with pytest.raises(Refused):
        await here.house.snapshot(ME, box)
    here.idle(box)
    await until(lambda: here.backend.boxes[0].paused)  # by itself
    await here.house.end(ME, box)
    assert "volumes were not saved" in here.journal()
    again = await here.create(volumes=(VolumeMount("data", "data"),))
    assert [entry.name for entry in await here.house.entries(ME, again, "data", 1)] == ["a"]


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
async def test_volumes_that_cannot_be_had_are_refused(here: Lodging, mounts: list[tuple[str, str]], code: str) -> None:
    await here.house.create_volume(ME, "data", MIB, "ro")
    await here.house.create_volume(ME, "data2", MIB, "ro")
    volumes = tuple(VolumeMount(name, at) for name, at in mounts)
    assert await refused(here.create(volumes=volumes)) == code
    assert here.backend.boxes == []
    await here.create(volumes=(VolumeMount("data", "a"), VolumeMount("data2", "b")))


async def test_volumes_are_their_owners(here: Lodging) -> None:
    await here.house.create_volume(ME, "data", MIB, "ro")
    assert await refused(here.create(COLLEAGUE, volumes=(VolumeMount("data", "a"),))) == "not_found"
    assert await refused(here.create(COLLEAGUE, volumes=(VolumeMount("me/data", "a"),))) == "not_found"
    assert await refused(here.house.remove_volume(COLLEAGUE, "data")) == "not_found"
