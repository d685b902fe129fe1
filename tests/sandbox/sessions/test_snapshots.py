"""Snapshots: kept once, given back exactly, and to nobody else."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringfence.core.box_files import PIECE, digest, tree_digest
from ringfence.core.errors import Refused, StoreError, Unavailable
from ringfence.sandbox.files import blobstore
from ringfence.sandbox.files.paths import acting_as
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.sessions.snapshots import Snapshot, Snapshots
from tests.sandbox.live_folder import live_folder

ME, COLLEAGUE, STRANGER = ("t", "me"), ("t", "colleague"), ("other", "me")
MIB = 1024 * 1024
SAYS = "there is no snapshot '{}'; list the snapshots to see which there are"


@contextmanager
def workspace(folder: Path) -> Iterator[Workspace]:
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Workspace(descriptor, None)
    finally:
        os.close(descriptor)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Workspace]:
    with workspace(tmp_path / "work") as made:
        yield made


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Workspace]:
    with workspace(tmp_path / "other") as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "state" / "snapshots"


@pytest.fixture
def snapshots(store: Path) -> Snapshots:
    return Snapshots(store)


def take(snapshots: Snapshots, space: Workspace, owner: tuple[str, str] = ME, name: str | None = None) -> Snapshot:
    return snapshots.take(space, owner=owner, env={"A": "b"}, cwd="/workspace/d", name=name)


def pieces(store: Path) -> list[Path]:
    return [path for path in store.rglob("pieces/*/*") if path.is_file()]


def fill(space: Workspace, work: Path) -> None:
    space.write("d/run", b"#!/bin/sh\n", mode=0o755)
    space.write("d/e/empty", b"")
    space.write("large", (bytes([number]) * MIB for number in range(9)))
    space.write("middle", b"m" * 300_000)
    space.write("exactly", b"e" * PIECE)
    space.make_dir("closed/inside")
    (work / "d" / "link").symlink_to("/anywhere/else")
    (work / "ü\n").write_text("odd name")
    (Path(os.fsdecode(os.fsencode(work) + b"/\xff"))).write_text("no text")
    os.utime(work / "d" / "run", ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    (work / "closed").chmod(0o555)


def test_a_workspace_comes_back_as_it_was(
    snapshots: Snapshots, space: Workspace, other: Workspace, tmp_path: Path
) -> None:
    work, copy = tmp_path / "work", tmp_path / "other"
    fill(space, work)
    before = space.tree_hash()
    taken = take(snapshots, space)
    assert (taken.tree_digest, taken.files, taken.env, taken.cwd) == (before, 7, {"A": "b"}, "/workspace/d")
    assert taken.bytes == 9 * MIB + PIECE + 300_000 + len("#!/bin/sh\nodd nameno text")
    other.write("was/there", b"before")
    assert snapshots.restore(taken.id, other, owner=ME) == taken
    assert other.tree_hash() == before
    assert not other.exists("was")
    assert (copy / "d" / "run").stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert (copy / "closed").stat().st_mode & 0o777 == 0o555
    assert os.readlink(copy / "d" / "link") == "/anywhere/else"
    (work / "closed").chmod(0o755)
    (copy / "closed").chmod(0o755)


def test_the_same_contents_are_kept_once(snapshots: Snapshots, space: Workspace, store: Path) -> None:
    space.write("a", b"x" * 2 * MIB)
    space.write("b", b"x" * 2 * MIB)
    first = take(snapshots, space)
    kept = len(pieces(store))
    assert kept == 2  # the contents, and the list of files
    second = take(snapshots, space)
    assert (len(pieces(store)), second.tree_digest) == (kept, first.tree_digest)
    assert second.id != first.id


def test_everything_is_its_owners_alone(snapshots: Snapshots, space: Workspace, store: Path) -> None:
    before = os.umask(0)
    try:
        space.write("a", b"x")
        take(snapshots, space)
    finally:
        os.umask(before)
    for path in (store, *store.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0


def test_what_is_another_owners_does_not_exist(snapshots: Snapshots, space: Workspace, other: Workspace) -> None:
    space.write("a", b"secret")
    taken = take(snapshots, space, name="mine")
    missing = f"snap-{'0' * 64}"
    for owner in (COLLEAGUE, STRANGER):
        assert snapshots.list(owner) == []
        for reference in (taken.id, "mine", missing, "../../x", "", "snap-x"):
            for action in (
                lambda reference=reference, owner=owner: snapshots.get(reference, owner=owner),
                lambda reference=reference, owner=owner: snapshots.restore(reference, other, owner=owner),
                lambda reference=reference, owner=owner: snapshots.remove(reference, owner=owner),
            ):
                with pytest.raises(Refused) as refused:
                    action()
                assert refused.value.reason_code == "not_found"
                assert str(refused.value) == SAYS.format(reference)
    assert snapshots.get("mine", owner=ME) == taken


def test_contents_are_not_shared_between_owners(snapshots: Snapshots, space: Workspace, store: Path) -> None:
    """Or the time that it takes would tell one what another keeps."""
    space.write("a", b"x" * MIB)
    take(snapshots, space)
    kept = len(pieces(store))
    take(snapshots, space, COLLEAGUE)
    assert len(pieces(store)) == 2 * kept


def test_they_are_listed_newest_first_and_found_by_name(snapshots: Snapshots, space: Workspace) -> None:
    taken = [take(snapshots, space, name=name) for name in ("one", "two", "one")]
    assert snapshots.list(ME) == sorted(taken, key=lambda one: (one.created_at, one.id), reverse=True)
    assert snapshots.get("two", owner=ME) == taken[1]
    assert snapshots.get("one", owner=ME).id in (taken[0].id, taken[2].id)
    for name in ("", "a/b", "snap-x", "x" * 65, "ü"):
        with pytest.raises(Refused) as refused:
            take(snapshots, space, name=name)
        assert refused.value.reason_code == "bad_name"


def test_removing_one_keeps_what_others_need(
    snapshots: Snapshots, space: Workspace, other: Workspace, store: Path
) -> None:
    space.write("both", b"both")
    first = take(snapshots, space)
    space.write("second", b"second")
    second = take(snapshots, space)
    snapshots.remove(second.id, owner=ME)
    assert snapshots.list(ME) == [first]
    snapshots.restore(first.id, other, owner=ME)
    assert other.read("both") == b"both"
    snapshots.remove(first.id, owner=ME)
    assert pieces(store) == []


def test_what_a_dead_process_left_is_swept(snapshots: Snapshots, space: Workspace, store: Path) -> None:
    space.write("a", b"kept")
    taken = take(snapshots, space)
    own = blobstore.owner_folder(store, ME)
    (own / "new" / "half").write_text("half")
    stray = own / "pieces" / "ab" / ("ab" + "0" * 62)
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("never referred to")
    snapshots.sweep(ME)
    assert not stray.exists()
    assert os.listdir(own / "new") == []
    assert snapshots.list(ME) == [taken]


@pytest.mark.parametrize("harm", ["changed", "shorter", "missing", "listing", "record"])
def test_a_damaged_snapshot_is_refused_and_leaves_the_workspace_empty(
    snapshots: Snapshots, space: Workspace, other: Workspace, store: Path, harm: str
) -> None:
    space.write("a/good", b"good")
    space.write("b/large", bytes(6 * MIB))
    taken = take(snapshots, space)
    largest = max(pieces(store), key=lambda path: path.stat().st_size)
    if harm == "changed":
        with largest.open("r+b") as file:
            file.seek(100)
            file.write(b"x")
    elif harm == "shorter":
        os.truncate(largest, 10)
    elif harm == "missing":
        largest.unlink()
    elif harm == "listing":
        (largest.parent.parent / taken.listing[0][:2] / taken.listing[0]).write_text("[]")
    else:
        record = next(store.rglob("snapshots/*"))
        record.write_text(record.read_text().replace("large", "other").replace("workspace/d", "workspace/e"))
    with pytest.raises(Unavailable, match="damaged"):
        snapshots.restore(taken.id, other, owner=ME)
    assert other.list() == []
    if harm != "record":
        assert snapshots.list(ME) == [taken]


def test_a_list_of_files_that_leads_out_is_not_followed(
    snapshots: Snapshots, other: Workspace, store: Path, tmp_path: Path
) -> None:
    with workspace(tmp_path / "work") as space:
        taken = take(snapshots, space)
    own = blobstore.owner_folder(store, ME)
    rows = json.dumps([["../out", "file", 0o644, 0, 0, [digest(b"")], ""]]).encode()
    tree_store = blobstore.TreeStore(own, "snapshot")
    with tree_store.using(), tree_store.adding(MIB) as adding:
        listing = [adding.keep(rows)]
        adding.keep(b"")
        adding.commit()
    record = json.loads((own / "snapshots" / taken.id).read_text()) | {"listing": listing}
    record["tree_digest"] = tree_digest(tree_store.tree(listing))
    data = json.dumps(record).encode()
    forged = f"snap-{digest(data)}"
    (own / "snapshots" / forged).write_bytes(data)
    with pytest.raises(Unavailable, match="no path"):
        snapshots.restore(forged, other, owner=ME)
    assert not (tmp_path / "out").exists()


def test_each_owner_may_keep_so_much(store: Path, space: Workspace) -> None:
    few = Snapshots(store, max_count=1)
    take(few, space)
    with pytest.raises(Refused, match="1 snapshots already") as refused:
        take(few, space)
    assert refused.value.reason_code == "quota"
    space.write("a", os.urandom(MIB))
    small = Snapshots(store, max_bytes=MIB)
    with pytest.raises(Refused, match="no room") as refused:
        take(small, space)
    assert refused.value.reason_code == "quota"
    assert len(small.list(ME)) == 1
    assert not list(store.rglob("new/*"))


def test_a_store_that_others_can_write_is_not_used(store: Path, snapshots: Snapshots, space: Workspace) -> None:
    store.mkdir(parents=True)
    store.chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        take(snapshots, space)


def test_pipes_and_sockets_are_left_out(
    snapshots: Snapshots, space: Workspace, other: Workspace, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "work" / "pipe")
    space.write("file", b"")
    snapshots.restore(take(snapshots, space).id, other, owner=ME)
    assert [entry.name for entry in other.list()] == ["file"]


def test_files_with_holes_are_not_kept_beyond_the_disk(snapshots: Snapshots, space: Workspace, tmp_path: Path) -> None:
    with live_folder(size=4 * MIB) as live:
        if live is None:
            pytest.skip("this host makes no user and mount namespaces")
        with acting_as(live.owner):
            descriptor = os.open("hole", os.O_WRONLY | os.O_CREAT, dir_fd=live.descriptor)
        os.truncate(descriptor, 2**40)
        os.close(descriptor)
        with pytest.raises(Refused) as refused:
            take(snapshots, Workspace(live.descriptor, live.owner))
        assert refused.value.reason_code == "too_large"


def test_a_box_is_restored_with_its_inputs(snapshots: Snapshots) -> None:
    with live_folder() as first, live_folder() as second:
        if first is None or second is None:
            pytest.skip("this host makes no user and mount namespaces")
        space = Workspace(first.descriptor, first.owner, first.input_descriptor)
        Workspace(first.input_descriptor, first.owner).write("folder/data.csv", b"1,2")
        space.write("output/result", b"3")
        space.remove("tmp")
        taken = take(snapshots, space)
        assert taken.tree_digest == space.tree_hash()
        copy = Workspace(second.descriptor, second.owner, second.input_descriptor)
        for _ in range(2):
            snapshots.restore(taken.id, copy, owner=ME)
            assert copy.read("input/folder/data.csv") == b"1,2"
            assert copy.tree_hash() == taken.tree_digest
        Workspace(second.input_descriptor, second.owner).remove("folder")
        with pytest.raises(Refused, match="read-only"):
            snapshots.restore(taken.id, Workspace(second.descriptor, second.owner), owner=ME)


def test_a_snapshot_that_does_not_fit_is_refused(snapshots: Snapshots, space: Workspace) -> None:
    space.write("a", bytes(3 * MIB))
    space.write("b", os.urandom(3 * MIB))
    taken = take(snapshots, space)
    with live_folder(size=4 * MIB) as live:
        if live is None:
            pytest.skip("this host makes no user and mount namespaces")
        small = Workspace(live.descriptor, live.owner, live.input_descriptor)
        with pytest.raises(Refused, match="4 MiB") as refused:
            snapshots.restore(taken.id, small, owner=ME)
        assert refused.value.reason_code == "disk"
        assert [entry.name for entry in small.list()] == ["input"]


def _come_and_go(store: Path, work: Path, number: int) -> None:
    snapshots = Snapshots(store)
    with workspace(work / f"{number}") as space, workspace(work / f"{number}-copy") as copy:
        for round_ in range(15):
            space.write("file", f"{number} {round_ % 3}".encode())
            space.write("same", b"same")
            taken = snapshots.take(space, owner=ME, env={}, cwd="/workspace")
            assert snapshots.restore(taken.id, copy, owner=ME) == taken
            assert copy.tree_hash() == space.tree_hash()
            if round_ % 2:
                snapshots.remove(taken.id, owner=ME)


def test_several_processes_use_one_store(store: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_come_and_go, args=(store, tmp_path, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    snapshots = Snapshots(store)
    left = snapshots.list(ME)
    assert len(left) == 3 * 8
    for snapshot in left:
        snapshots.remove(snapshot.id, owner=ME)
    assert pieces(store) == []


def test_a_process_that_is_killed_while_it_takes_one_harms_nothing(
    store: Path, space: Workspace, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    snapshots = Snapshots(store)
    space.write("a", b"good")
    good = take(snapshots, space)
    for delay in (0.01, 0.02, 0.03, 0.04):
        ready = context.Event()
        process = context.Process(target=_take_for_ever, args=(store, tmp_path / "more", ready))
        process.start()
        assert ready.wait(120)
        process.join(delay)
        process.kill()
        process.join()
        shutil.rmtree(tmp_path / "more", ignore_errors=True)
    snapshots.sweep(ME)
    with workspace(tmp_path / "copy") as copy:
        for snapshot in snapshots.list(ME):
            snapshots.restore(snapshot.id, copy, owner=ME)
    assert good in snapshots.list(ME)
    assert not list(store.rglob("new/*"))


def _take_for_ever(store: Path, work: Path, ready: object) -> None:
    with workspace(work) as space:
        while True:
            space.write("data", os.urandom(5 * MIB))
            ready.set()  # type: ignore[attr-defined]
            Snapshots(store).take(space, owner=ME, env={}, cwd="/workspace")
