"""What a box changes in its folders is told as it happens."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ringfence.core.box_files import Changed
from ringfence.core.errors import Refused
from ringfence.sandbox.files import watch
from ringfence.sandbox.files.paths import acting_as
from ringfence.sandbox.files.watch import Watcher
from ringfence.sandbox.files.workspace import Workspace
from tests.sandbox.live_folder import live_folder

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def told(watcher: Watcher) -> AsyncIterator[list[Changed]]:
    """What is told until nothing more comes."""
    seen: list[Changed] = []
    with watcher:
        yield seen
        while True:
            coming = asyncio.ensure_future(anext(watcher))
            await asyncio.wait({coming}, timeout=0.2)
            for _ in range(5):  # what was there by then is heard, however late we look
                await asyncio.sleep(0)
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})
                return
            seen.append(coming.result())


def short(seen: list[Changed]) -> list[tuple[str, ...]]:
    return [(one.kind, one.path) if one.to is None else (one.kind, one.path, one.to) for one in seen]


async def test_changes_in_a_folder_are_told(space: Workspace, work: Path) -> None:
    (work / "d").mkdir()
    async with told(space.watch("d")) as seen:
        (work / "d" / "a").write_text("1")
        (work / "d" / "a").rename(work / "d" / "b")
        (work / "d" / "b").unlink()
        (work / "other").write_text("not told")
        (work / "d" / "e").mkdir()
        (work / "d" / "e" / "deep").write_text("not told")
    assert short(seen) == [
        ("created", "/workspace/d/a"),
        ("modified", "/workspace/d/a"),
        ("renamed", "/workspace/d/a", "/workspace/d/b"),
        ("removed", "/workspace/d/b"),
        ("created", "/workspace/d/e"),
    ]


async def test_folders_below_are_followed_as_they_come_and_move(space: Workspace, work: Path) -> None:
    (work / "a" / "b").mkdir(parents=True)
    async with told(space.watch(recursive=True)) as seen:
        (work / "a" / "b" / "one").write_bytes(b"")
        (work / "new" / "deep").mkdir(parents=True)
        (work / "new" / "deep" / "two").write_bytes(b"")
        (work / "a").rename(work / "z")
    assert ("created", "/workspace/a/b/one") in short(seen)
    assert {("created", f"/workspace/{name}") for name in ("new", "new/deep", "new/deep/two")} <= set(short(seen))
    assert short(seen)[-1] == ("renamed", "/workspace/a", "/workspace/z")


async def test_a_folder_that_moved_is_told_by_its_new_name(space: Workspace, work: Path) -> None:
    (work / "a" / "b").mkdir(parents=True)
    watcher = space.watch(recursive=True)
    (work / "a").rename(work / "z")
    assert (await anext(watcher)).to == "/workspace/z"
    async with told(watcher) as seen:
        (work / "z" / "b" / "file").write_bytes(b"")
        shutil.move(work / "z" / "b", work.parent / "away")
        (work.parent / "away" / "file2").write_bytes(b"")
    assert short(seen) == [("created", "/workspace/z/b/file"), ("removed", "/workspace/z/b")]


async def test_our_own_writing_is_told_as_one_change(space: Workspace) -> None:
    space.make_dir("d/e")
    async with told(space.watch(recursive=True)) as seen:
        space.write("d/file", b"1")
        space.write("d/e/file", b"2")
        space.unpack("d", list(space.pack("d/e")), max_bytes=100, max_files=10)
        space.unpack("in", list(space.pack("d/e")), max_bytes=100, max_files=10)
        space.remove("d")
    assert short(seen) == [
        ("created", "/workspace/d/file"),
        ("created", "/workspace/d/e/file"),
        ("created", "/workspace/d/file"),
        ("created", "/workspace/in"),
        ("created", "/workspace/in/file"),
        ("removed", "/workspace/d"),
    ]


async def test_links_are_not_followed(space: Workspace, work: Path) -> None:
    outside = work.parent / "outside"
    outside.mkdir()
    (work / "link").symlink_to(outside)
    async with told(space.watch(recursive=True)) as seen:
        (outside / "secret").write_bytes(b"")
    assert seen == []
    with pytest.raises(Refused):
        space.watch("link")


async def test_too_many_folders_are_refused_and_later_said(
    space: Workspace, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_FOLDERS", 5)
    for number in range(4):
        (work / f"{number}").mkdir()
    async with told(space.watch(recursive=True)) as seen:
        (work / "new").mkdir()
    assert short(seen) == [("created", "/workspace/new"), ("lost", "/workspace/new")]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match="more than 5 folders"):
        space.watch(recursive=True)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_what_the_kernel_could_not_keep_is_said_to_be_lost(space: Workspace, work: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 20_000:
        pytest.skip("the kernel keeps more than a test should make")
    async with told(space.watch()) as seen:
        for number in range(limit // 2 + 10):
            os.close(os.open(work / f"{number}", os.O_CREAT))
            os.unlink(work / f"{number}")
    assert short(seen)[-1] == ("lost", "/workspace")


async def test_a_large_folder_that_comes_and_goes_is_reported_piece_by_piece_and_once(
    space: Workspace, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_TOLD", 3000)
    files = 2000
    (work / "a").mkdir()
    (work / "away").mkdir()
    for number in range(files):
        (work / "away" / f"{number}").touch()
    turns = waiting = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(count_turns())
    with space.watch("a", recursive=True) as watcher:
        for _ in range(5):
            (work / "away").rename(work / "a" / "x")
            (work / "a" / "x").rename(work / "away")
        (work / "away").rename(work / "a" / "x")
        seen = [await anext(watcher)]
        while seen.count(Changed("created", "/workspace/a/x")) < 6 or seen[-1].kind != "lost":
            waiting = max(waiting, len(watcher._changes))
            seen.append(await anext(watcher))
    other.cancel()
    assert waiting <= 2 * watch._AT_ONCE, "what is found waits in the folder, not in our memory"
    assert turns >= files // watch._AT_ONCE, "others had their turn in between"
    assert sum(change.path.startswith("/workspace/a/x/") for change in seen) == files
    assert ("lost", "/workspace/a/x") in short(seen)


async def test_closing_in_the_middle_of_a_folder_leaves_nothing_open(space: Workspace, work: Path) -> None:
    (work / "away").mkdir()
    for number in range(3 * watch._AT_ONCE):
        (work / "away" / f"{number}").touch()
    (work / "a").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    watcher = space.watch("a", recursive=True)
    (work / "away").rename(work / "a" / "x")
    assert (await anext(watcher)).path == "/workspace/a/x"
    watcher.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_closing_ends_whoever_waits(space: Workspace) -> None:
    watcher = space.watch()
    waiting = asyncio.ensure_future(anext(watcher, None))
    await asyncio.sleep(0)
    watcher.close()
    assert await waiting is None
    assert await anext(watcher, None) is None


async def test_a_box_is_watched_from_outside() -> None:
    with live_folder() as live:
        if live is None:
            pytest.skip("this host makes no user and mount namespaces")
        space = Workspace(live.descriptor, live.owner)
        async with told(space.watch(recursive=True)) as seen:
            with acting_as(live.owner):
                os.close(os.open("output/made", os.O_CREAT, 0o644, dir_fd=live.descriptor))
        assert short(seen) == [("created", "/workspace/output/made")]
