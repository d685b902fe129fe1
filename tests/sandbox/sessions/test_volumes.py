"""Volumes: what outlives a box, whole, for those who may have it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.core.errors import Refused, Unavailable
from ringfence.sandbox.files import blobstore
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.sessions.volumes import OpenVolume, Volumes
from tests.sandbox.live_folder import live_folder

ME, COLLEAGUE, STRANGER = ("t", "me"), ("t", "colleague"), ("other", "me")
MIB = 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "work").mkdir()
    descriptor = os.open(tmp_path / "work", os.O_RDONLY | os.O_DIRECTORY)
    yield Workspace(descriptor, None)
    os.close(descriptor)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "state" / "volumes"


@pytest.fixture
def volumes(store: Path) -> Volumes:
    return Volumes(store)


def reason(refused: pytest.ExceptionInfo[Refused]) -> str:
    return refused.value.reason_code


def clear(folder: Workspace) -> None:
    for entry in folder.list():
        folder.remove(entry.path)


def test_a_volume_keeps_what_was_saved(volumes: Volumes, folder: Workspace) -> None:
    made = volumes.create("data", owner=ME, max_bytes=10 * MIB)
    assert (made.bytes, made.files, made.saved_at) == (0, 0, None)
    volume = volumes.open("data", who=ME, mode="rw")
    assert volume.load(folder.folder("/workspace")) == made
    folder.write("a/file", b"one")
    folder.write("a/run", b"", mode=0o755)
    saved = volume.save(folder.folder("/workspace"))
    assert (saved.bytes, saved.files) == (3, 2)
    assert saved.tree_digest == folder.tree_hash()
    folder.write("lost", b"not saved")
    volume.close()
    clear(folder)
    again = volumes.open("data", who=ME, mode="ro")
    assert again.load(folder.folder("/workspace")) == saved == volumes.get("data", who=ME)
    assert folder.read("a/file") == b"one"
    assert not folder.exists("lost")


def test_saving_costs_what_changed(volumes: Volumes, folder: Workspace, store: Path) -> None:
    volumes.create("data", owner=ME, max_bytes=20 * MIB)
    volume = volumes.open("data", who=ME, mode="rw")
    folder.write("large", os.urandom(8 * MIB))
    volume.save(folder.folder("/workspace"))
    before = {path: path.stat().st_ino for path in store.rglob("pieces/*/*")}
    folder.write("small", b"x")
    volume.save(folder.folder("/workspace"))
    after = {path: path.stat().st_ino for path in store.rglob("pieces/*/*")}
    assert len(before) == 3
    assert len(after) == 4  # two pieces of the large one, the small one, and the list
    assert len(before.items() & after.items()) == 2
    folder.remove("large")
    volume.save(folder.folder("/workspace"))
    assert sum(path.stat().st_size for path in store.rglob("pieces/*/*")) < 1000
    volume.close()


def test_one_writes_while_others_read(volumes: Volumes, folder: Workspace) -> None:
    volumes.create("data", owner=ME, max_bytes=MIB)
    writer = volumes.open("data", who=ME, mode="rw")
    with pytest.raises(Refused, match="another session") as refused:
        volumes.open("data", who=ME, mode="rw")
    assert reason(refused) == "volume_busy"
    with pytest.raises(Refused):
        volumes.remove("data", owner=ME)
    reader = volumes.open("data", who=ME, mode="ro")
    reader.load(folder.folder("/workspace"))
    with pytest.raises(Refused) as refused:
        reader.save(folder.folder("/workspace"))
    assert reason(refused) == "read_only"
    writer.close()
    volumes.open("data", who=ME, mode="rw").close()


def _hold_for_ever(store: Path, ready: object) -> None:
    held = Volumes(store).open("data", who=ME, mode="rw")
    ready.set()  # type: ignore[attr-defined]
    multiprocessing.get_context("spawn").Event().wait()
    held.close()


def test_a_process_that_dies_lets_go(volumes: Volumes, store: Path) -> None:
    volumes.create("data", owner=ME, max_bytes=MIB)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold_for_ever, args=(store, ready))
    process.start()
    assert ready.wait(120)
    with pytest.raises(Refused):
        volumes.open("data", who=ME, mode="rw")
    process.kill()
    process.join()
    volumes.open("data", who=ME, mode="rw").close()


def test_a_volume_is_its_owners_and_theirs_whom_it_is_shared_with(volumes: Volumes) -> None:
    volumes.create("private", owner=ME, max_bytes=MIB)
    volumes.create("read", owner=ME, max_bytes=MIB, shared_with=("colleague",))
    volumes.create("write", owner=ME, max_bytes=MIB, mode="rw", shared_with=("*",))
    assert [volume.name for volume in volumes.list(ME)] == ["private", "read", "write"]
    assert volumes.list(COLLEAGUE) == volumes.list(STRANGER) == []
    assert volumes.get("me/read", who=COLLEAGUE).name == "read"
    volumes.open("me/read", who=COLLEAGUE, mode="ro").close()
    volumes.open("me/write", who=COLLEAGUE, mode="rw").close()
    volumes.open("me/read", who=ME, mode="rw").close()
    with pytest.raises(Refused) as refused:
        volumes.open("me/read", who=COLLEAGUE, mode="rw")
    assert reason(refused) == "read_only"
    for who, reference in (
        (COLLEAGUE, "me/private"),
        (COLLEAGUE, "private"),
        (COLLEAGUE, "read"),
        (STRANGER, "me/write"),
        (STRANGER, "write"),
        (ME, "missing"),
        (ME, "../private"),
        (ME, ""),
        (ME, "me/../me/private"),
    ):
        with pytest.raises(Refused) as refused:
            volumes.get(reference, who=who)
        assert str(refused.value) == f"there is no volume {reference!r}; list the volumes to see which there are"
    for name in ("me/read", "me/write", "read"):
        with pytest.raises(Refused) as refused:
            volumes.remove(name, owner=COLLEAGUE)
        assert reason(refused) == "not_found"


def test_bad_names_sizes_and_too_much_are_refused(store: Path) -> None:
    volumes = Volumes(store, max_bytes=5 * MIB)
    for name in ("", "a/b", "..", ".hidden", "x" * 65, "a b", "lock\n"):
        with pytest.raises(Refused) as refused:
            volumes.create(name, owner=ME, max_bytes=MIB)
        assert reason(refused) == "bad_name"
    with pytest.raises(Refused) as refused:
        volumes.create("small", owner=ME, max_bytes=1)
    assert reason(refused) == "bad_size"
    volumes.create("lock", owner=ME, max_bytes=4 * MIB)
    for name, code in (("lock", "exists"), ("more", "quota")):
        with pytest.raises(Refused) as refused:
            volumes.create(name, owner=ME, max_bytes=2 * MIB)
        assert reason(refused) == code


def test_what_is_removed_is_gone(volumes: Volumes, folder: Workspace, store: Path) -> None:
    volumes.create("data", owner=ME, max_bytes=MIB)
    volume = volumes.open("data", who=ME, mode="rw")
    folder.write("file", b"x")
    volume.save(folder.folder("/workspace"))
    volume.close()
    volumes.remove("data", owner=ME)
    assert volumes.list(ME) == []
    assert not list(store.rglob("*.volume"))
    volumes.create("data", owner=ME, max_bytes=MIB)


def test_more_than_its_size_is_not_saved(store: Path, folder: Workspace, tmp_path: Path) -> None:
    volumes = Volumes(store, max_files=10)
    volumes.create("data", owner=ME, max_bytes=MIB)
    volume = volumes.open("data", who=ME, mode="rw")
    folder.write("good", b"good")
    good = volume.save(folder.folder("/workspace"))
    os.truncate(os.open(tmp_path / "work" / "hole", os.O_WRONLY | os.O_CREAT), 2 * MIB)
    with pytest.raises(Refused) as refused:
        volume.save(folder.folder("/workspace"))
    assert reason(refused) == "too_large"
    folder.remove("hole")
    for number in range(10):
        folder.write(f"{number}", b"")
    with pytest.raises(Refused) as refused:
        volume.save(folder.folder("/workspace"))
    assert reason(refused) == "too_many"
    assert volume.volume == good
    volume.close()


@pytest.mark.parametrize("harm", ["piece", "missing", "record"])
def test_a_damaged_volume_is_refused_and_leaves_the_folder_empty(
    volumes: Volumes, folder: Workspace, store: Path, harm: str
) -> None:
    volumes.create("data", owner=ME, max_bytes=MIB)
    volume = volumes.open("data", who=ME, mode="rw")
    folder.write("a", b"first")
    folder.write("b", b"x" * 1000)
    volume.save(folder.folder("/workspace"))
    largest = max(store.rglob("pieces/*/*"), key=lambda path: path.stat().st_size)
    if harm == "piece":
        largest.write_bytes(b"y" * 1000)
    elif harm == "missing":
        largest.unlink()
    else:
        next(store.rglob("volume.json")).write_text("{")
    with pytest.raises(Unavailable):
        volume.load(folder.folder("/workspace"))
    if harm != "record":
        assert folder.list() == []
    volume.close()


def _save_for_ever(store: Path, work: Path, ready: object) -> None:
    work.mkdir(exist_ok=True)
    folder = Workspace(os.open(work, os.O_RDONLY), None)
    volume = Volumes(store).open("data", who=ME, mode="rw")
    for number in range(10**9):
        for name in ("a", "b"):
            folder.write(name, f"{number}".encode() * 100_000)
        volume.save(folder.folder("/workspace"))
        ready.set()  # type: ignore[attr-defined]


def test_a_save_that_is_cut_off_leaves_what_was_saved_before(
    volumes: Volumes, folder: Workspace, store: Path, tmp_path: Path
) -> None:
    volumes.create("data", owner=ME, max_bytes=4 * MIB)
    context = multiprocessing.get_context("spawn")
    for delay in (0.01, 0.013, 0.017, 0.021):
        ready = context.Event()
        process = context.Process(target=_save_for_ever, args=(store, tmp_path / f"box{delay}", ready))
        process.start()
        assert ready.wait(120)
        process.join(delay)
        process.kill()
        process.join()
        volume = volumes.open("data", who=ME, mode="rw")
        assert volume.load(folder.folder("/workspace")).files == 2
        assert folder.read("a") == folder.read("b")
        volume.save(folder.folder("/workspace"))
        volume.close()
    assert len(list(store.rglob("pieces/*/*"))) <= 2


def test_a_volume_in_a_box_is_limited_by_the_kernel(volumes: Volumes) -> None:
    made = volumes.create("data", owner=ME, max_bytes=4 * MIB)
    with live_folder(size=made.max_bytes) as live:
        if live is None:
            pytest.skip("this host makes no user and mount namespaces")
        volume = volumes.open("data", who=ME, mode="rw")
        inside = Workspace(live.descriptor, live.owner)
        whole = inside.folder("/workspace")
        volume.load(whole)
        inside.write("file", b"x")
        with pytest.raises(Refused, match="4 MiB"):
            inside.write("big", bytes(5 * MIB))
        volume.save(whole)
        inside.remove("file")
        volume.load(whole)
        assert inside.read("file") == b"x"
        assert os.stat(f"{live.path}/file").st_uid == (os.getuid() if live.owner is None else live.owner)
        volume.close()


def test_nothing_is_readable_for_others(volumes: Volumes, folder: Workspace, store: Path) -> None:
    volumes.create("data", owner=ME, max_bytes=MIB)
    volume: OpenVolume = volumes.open("data", who=ME, mode="rw")
    volume.save(folder.folder("/workspace"))
    volume.close()
    assert blobstore.owner_folder(store, ME).is_dir()
    for path in (store, *store.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0
