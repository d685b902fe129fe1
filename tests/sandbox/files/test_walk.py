"""Going through folders that hostile code has made, and taking them away."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ringfence.core.errors import Refused
from ringfence.sandbox.files import walk as walking
from ringfence.sandbox.files.walk import ReadBudget, Walk, WalkEntry, remove_entry
from tests.sandbox.swapping import swapping

not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


@pytest.fixture
def root(work: Path) -> Iterator[int]:
    with entered(work) as descriptor:
        yield descriptor


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def entered(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def nest(folder: Path, depth: int) -> None:
    """Folders deeper than any path is long."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.close(here)


def test_everything_is_seen_in_order_and_links_are_not_followed(work: Path, root: int) -> None:
    (work / "b" / "c").mkdir(parents=True)
    for name in ("b/c/z", "a", "b/a", "c"):
        (work / name).write_text(name)
    (work / "link").symlink_to("b")
    before = open_descriptors()
    seen = ["/".join(found.parts) for found in Walk().through(root)]
    assert seen == ["a", "b", "b/a", "b/c", "b/c/z", "c", "link"]
    assert open_descriptors() == before


def test_a_walk_that_is_left_early_closes_its_folders(work: Path, root: int) -> None:
    (work / "a" / "b").mkdir(parents=True)
    before = open_descriptors()
    walk = Walk().through(root)
    next(walk), next(walk)
    walk.close()  # type: ignore[attr-defined]
    assert open_descriptors() == before


def test_too_many_too_deep_and_closed_folders_are_refused_and_passed_over_where_lenient(work: Path, root: int) -> None:
    nest(work, 5)
    with pytest.raises(Refused, match="more than 3"):
        list(Walk(most=3).through(root))
    with pytest.raises(Refused, match="deeper than 3"):
        list(Walk(depth=3).through(root))
    assert len(list(Walk(depth=3, lenient=True).through(root))) == 3


@not_as_root
def test_a_closed_folder_is_named(work: Path, root: int) -> None:
    (work / "closed").mkdir(mode=0)
    with pytest.raises(Refused, match="closed") as refused:
        list(Walk().through(root))
    assert refused.value.reason_code == "no_permission"
    assert [found.name for found in Walk(lenient=True).through(root)] == ["closed"]


def test_a_folder_that_becomes_a_link_in_the_worst_moment_is_not_entered(work: Path, root: int, tmp_path: Path) -> None:
    (tmp_path / "outside" / "secret").mkdir(parents=True)
    (work / "a").mkdir()

    def swap(found: WalkEntry) -> bool:
        (work / "a").rmdir()
        (work / "a").symlink_to("../outside")
        return True

    (found,) = Walk(enters=swap).through(root)
    assert not found.is_folder


def test_a_walk_never_leaves_the_folder(work: Path, root: int, tmp_path: Path) -> None:
    (work / "a" / "inside").mkdir(parents=True)
    (tmp_path / "outside" / "secret").mkdir(parents=True)
    (work / "link").symlink_to("../outside")
    seen: set[str] = set()
    with swapping(work / "a", work / "link"):
        for _ in range(1000):
            with suppress(Refused):
                seen.update(found.name for found in Walk().through(root))
    assert seen == {"a", "link", "inside"}


def test_files_with_holes_do_not_make_a_tree_endless(work: Path, root: int) -> None:
    room = ReadBudget(1000)
    (work / "a").write_bytes(bytes(600))
    room.take(root, os.stat(work / "a"))
    with pytest.raises(Refused, match="holes"):
        room.take(root, os.stat(work / "a"))
    with (work / "sparse").open("wb") as file:
        file.truncate(2**43)
    disk = os.fstatvfs(root)
    with pytest.raises(Refused, match="holes"):
        _take_often(ReadBudget(), root, work / "sparse", disk.f_blocks * disk.f_frsize // 2**43 + 1)


def _take_often(room: ReadBudget, root: int, path: Path, times: int) -> None:
    for _ in range(times):
        room.take(root, os.stat(path))


def test_files_links_and_folders_are_removed_and_nothing_else(work: Path, root: int, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    (work / "a" / "b" / "c").mkdir(parents=True)
    (work / "a" / "link").symlink_to("../../outside")
    (work / "a" / "b" / "link").symlink_to("../../../outside/kept")
    (work / "a" / "b" / "c" / "file").write_text("x")
    (work / "link").symlink_to("../outside")
    (work / "file").write_text("x")
    for name in ("a", "link", "file"):
        remove_entry(root, name, None)
    assert os.listdir(work) == []
    assert (tmp_path / "outside" / "kept").read_text() == "kept"
    with pytest.raises(FileNotFoundError):
        remove_entry(root, "a", None)


def test_a_tree_deeper_than_any_path_is_removed_with_few_descriptors(work: Path, root: int) -> None:
    nest(work, 3000)
    before = open_descriptors()
    remove_entry(root, "d" * 200, None)
    assert os.listdir(work) == []
    assert open_descriptors() == before


def test_closed_folders_are_removed(work: Path, root: int) -> None:
    (work / "a" / "b" / "c").mkdir(parents=True)
    (work / "a" / "b" / "c" / "file").write_text("x")
    for name in ("a/b/c", "a/b", "a"):
        (work / name).chmod(0)
    remove_entry(root, "a", None)
    assert os.listdir(work) == []


def test_removing_ends_though_the_folder_is_filled_again(
    work: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walking, "_MAX_STEPS", 500)
    (work / "a" / "b").mkdir(parents=True)
    here = os.open(work / "a", os.O_RDONLY)
    done = threading.Event()

    def fill() -> None:
        for number in range(5000):
            if done.is_set():
                return
            with suppress(OSError):
                os.mkdir(f"{number}", dir_fd=here)

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        with suppress(Refused, OSError):
            remove_entry(root, "a", None)
    finally:
        done.set()
        filler.join()
        os.close(here)
    assert not (work / "a").exists()


def test_a_folder_that_becomes_a_link_in_the_worst_moment_is_not_emptied(
    work: Path, root: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (work / "a" / "b" / "c").mkdir(parents=True)
    drop = walking._drop

    def drop_and_swap(folder: int, name: str) -> bool:
        if drop(folder, name):
            return True
        if name != "a":
            os.rename(name, "aside", src_dir_fd=folder, dst_dir_fd=root)
            os.symlink(outside, name, dir_fd=folder)
            monkeypatch.undo()
        return False

    monkeypatch.setattr(walking, "_drop", drop_and_swap)
    with suppress(NotADirectoryError):
        remove_entry(root, "a", None)
    assert os.listdir(outside) == ["kept"]
    assert stat.S_IMODE(outside.stat().st_mode) != 0o700


def test_removing_never_leaves_the_folder(work: Path, root: int, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    (outside / "b" / "kept").write_text("kept")
    (work / "x" / "link").parent.mkdir()
    for _ in range(25):
        (work / "x" / "a" / "b").mkdir(parents=True)
        (work / "x" / "a" / "b" / "file").write_text("x")
        (work / "x" / "link").symlink_to(outside)
        with swapping(work / "x" / "a", work / "x" / "link"):
            for name in ("a", "link"):
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError), entered(work / "x") as inner:
                    remove_entry(inner, name, None)
        remove_entry(root, "x", None)
        (work / "x").mkdir()
    assert (outside / "b" / "kept").read_text() == "kept"
