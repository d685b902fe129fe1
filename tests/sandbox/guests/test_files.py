"""The files of guests beyond what the tests of `Workspace` ask of every box: whole folders, changes as they happen, and
what a host makes of guests that lie."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
import signal
import struct
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import MIB, Input, Limits, Mount
from ringfence.core.errors import Refused, Unavailable
from ringfence.sandbox.files.workspace import Workspace
from ringfence.sandbox.guests import backend, files_call, files_loop
from ringfence.sandbox.guests.files import GuestFiles, GuestPlaces
from ringfence.sandbox.guests.files_call import WayToFiles
from ringfence.sandbox.guests.files_loop import GuestWatcher
from ringfence.sandbox.guests.link import Link
from ringfence.sandbox.guests.microvm import lent
from ringfence.sandbox.guests.outputs import GuestOutputs
from ringfence.sandbox.process import mounting
from ringfence.sandbox.sessions.snapshots import Snapshots
from ringfence.sandbox.sessions.volumes import Volumes
from tests import tooling
from tests.sandbox.guests.agents import agent

pytestmark = pytest.mark.anyio
ME = ("t", "me")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What stands for the root of a guest."""
    for name in ("workspace/output", "workspace/tmp", "home/user"):
        (tmp_path / "root" / name).mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    async with agent() as served:
        await served.ready()
        yield served


def files_of(link: Link, root: Path, **more: Any) -> GuestFiles:
    way = WayToFiles(link, asyncio.get_running_loop(), str(root))
    return GuestFiles(way, GuestPlaces(Limits(disk_bytes=16 * MIB), stays=("/workspace/tmp",), **more))


@pytest.mark.parametrize("name", backend._SHIPPED)
def test_what_runs_in_a_guest_is_read_by_its_oldest_interpreter(name: str) -> None:
    place = Path(backend.__file__).parents[1].joinpath(*name.split(".")).with_suffix(".py")
    ast.parse(place.read_text(), feature_version=(3, 8))


# ── Whole folders ──


async def test_a_snapshot_has_all_that_a_guest_may_write_and_brings_it_back(
    link: Link, root: Path, tmp_path: Path
) -> None:
    files = files_of(link, root)
    snapshots = Snapshots(tmp_path / "state")
    (root / "workspace" / "a").mkdir(mode=0o700)
    (root / "workspace" / "a" / "large").write_bytes(os.urandom(9 * MIB))
    (root / "workspace" / "empty").write_bytes(b"")
    (root / "workspace" / "run").write_text("#!/bin/sh\n")
    (root / "workspace" / "run").chmod(0o755)
    (root / "workspace" / "link").symlink_to("a/large")
    (root / "workspace" / "tmp" / "scratch").write_text("scratch")
    large = (root / "workspace" / "a" / "large").read_bytes()
    os.mkfifo(root / "workspace" / "pipe")

    def take() -> Any:
        return snapshots.take(files, owner=ME, env={}, cwd="/workspace")

    taken = await asyncio.to_thread(take)
    os.unlink(root / "workspace" / "pipe")
    assert taken.tree_digest == await asyncio.to_thread(files.tree_hash)
    assert (taken.files, taken.whole, taken.has_input) == (4, True, False)
    (root / "workspace" / "a" / "large").write_bytes(b"other")
    (root / "workspace" / "new").write_text("new")
    inode = (root / "workspace" / "tmp").stat().st_ino
    await asyncio.to_thread(lambda: snapshots.restore(taken.id, files, owner=ME))
    assert await asyncio.to_thread(files.tree_hash) == taken.tree_digest
    assert (root / "workspace" / "a" / "large").read_bytes() == large
    assert sorted(os.listdir(root / "workspace")) == ["a", "empty", "link", "output", "run", "tmp"]
    assert (root / "workspace" / "a").stat().st_mode & 0o777 == 0o700
    assert (root / "workspace" / "run").stat().st_mode & 0o777 == 0o755
    assert (root / "workspace" / "tmp" / "scratch").read_text() == "scratch"
    assert (root / "workspace" / "tmp").stat().st_ino == inode, "it is mounted elsewhere, too"


async def test_what_another_backend_kept_is_put_into_a_guest(link: Link, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("workspace/data", "tmp", "home/user"):
        (other / name).mkdir(parents=True)
    (other / "workspace/data/file").write_text("file")
    (other / "tmp/scratch").write_text("scratch")
    descriptor = os.open(other, os.O_RDONLY | os.O_DIRECTORY)
    box = Workspace(descriptor, None, places=("/tmp", "/home/user"))
    (root / "tmp").symlink_to("workspace/tmp")
    snapshots = Snapshots(tmp_path / "state")
    taken = snapshots.take(box, owner=ME, env={}, cwd="/workspace")
    os.close(descriptor)
    files = files_of(link, root)
    (root / "tmp").unlink()
    (root / "tmp").mkdir()
    await asyncio.to_thread(lambda: snapshots.restore(taken.id, files, owner=ME))
    assert (root / "workspace/data/file").read_text() == "file"
    assert (root / "tmp/scratch").read_text() == "scratch"


async def test_inputs_are_in_snapshots_and_put_where_programs_cannot_write(
    link: Link, root: Path, tmp_path: Path
) -> None:
    given = root / "workspace" / "input"
    given.mkdir()
    descriptor = os.open(given, os.O_RDONLY | os.O_DIRECTORY)
    files = files_of(link, root, input=descriptor, has_input=True)
    snapshots = Snapshots(tmp_path / "state")
    files.add_inputs((Input("sub/a.csv", b"1,2"),))
    taken = await asyncio.to_thread(lambda: snapshots.take(files, owner=ME, env={}, cwd="/workspace"))
    assert taken.has_input
    (given / "sub" / "a.csv").write_bytes(b"other")
    await asyncio.to_thread(lambda: snapshots.restore(taken.id, files, owner=ME))
    assert (given / "sub" / "a.csv").read_bytes() == b"1,2"
    os.close(descriptor)


async def test_a_volume_is_put_into_a_folder_and_no_more_than_its_size_is_kept(
    link: Link, root: Path, tmp_path: Path
) -> None:
    files = files_of(link, root)
    volumes = Volumes(tmp_path / "state")
    volumes.create("data", owner=ME, max_bytes=MIB)
    volume = volumes.open("data", who=ME, mode="rw")
    folder = files.folder("/workspace/data")
    await asyncio.to_thread(lambda: volume.load(folder))
    (root / "workspace/data/kept").write_text("kept")
    saved = await asyncio.to_thread(lambda: volume.save(folder))
    assert (saved.files, saved.bytes) == (1, 4)
    (root / "workspace/data/large").write_bytes(bytes(2 * MIB))
    with pytest.raises(Refused) as refused:
        await asyncio.to_thread(lambda: volume.save(folder))
    assert refused.value.reason_code == "too_large"
    await asyncio.to_thread(lambda: volume.load(folder))
    assert os.listdir(root / "workspace/data") == ["kept"]
    volume.close()


async def test_output_is_copied_without_what_cannot_be_had(link: Link, root: Path) -> None:
    files = files_of(link, root)
    output = root / "workspace" / "output"
    (output / "sub").mkdir()
    (output / "sub" / "report").write_text("report")
    (output / "link").symlink_to("/etc/passwd")
    (output / "large").write_bytes(bytes(3 * MIB))
    os.mkfifo(output / "pipe")
    left: dict[str, str] = {}

    def copied() -> list[str]:
        with files.output(MIB, left) as folder:
            return sorted(os.listdir(folder))

    assert await asyncio.to_thread(copied) == ["sub"]
    assert left.keys() == {f"/workspace/output/{name}" for name in ("link", "large", "pipe")}
    os.rename(output, root / "workspace" / "gone")
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(copied)


# ── In the loop ──


async def test_changes_are_told_as_they_happen(link: Link, root: Path) -> None:
    files = files_of(link, root)
    (root / "workspace/a").mkdir()
    watcher = await asyncio.to_thread(lambda: files.watch(recursive=True))

    async def told(*wanted: str | None) -> None:
        async with asyncio.timeout(tooling.PATIENCE):
            async for change in watcher:
                if (change.kind, change.path, change.to) == wanted:
                    return

    await asyncio.to_thread(lambda: files.write("a/b", b"1"))
    await told("created", "/workspace/a/b", None)
    os.rename(root / "workspace/a/b", root / "workspace/a/c")
    await told("renamed", "/workspace/a/b", "/workspace/a/c")
    (root / "workspace/a/c").unlink()
    await told("removed", "/workspace/a/c", None)
    (root / "workspace/new").mkdir()
    await told("created", "/workspace/new", None)
    (root / "workspace/new/file").write_text("x")
    await told("created", "/workspace/new/file", None)
    waiting = asyncio.ensure_future(told("no such change"))
    await asyncio.sleep(0)
    watcher.close()
    await waiting
    with pytest.raises(Refused) as refused:
        await asyncio.to_thread(lambda: files.watch("nowhere"))
    assert refused.value.reason_code == "not_found"


async def test_output_is_spooled_whole_or_not_at_all(link: Link, root: Path) -> None:
    files = files_of(link, root)
    whole, part = files.spool("/workspace/tmp", "whole.txt"), files.spool("/workspace/tmp", "part.txt")
    for piece in (b"a" * MIB, b"b", b"c"):
        whole.write(piece)
        await part.write(piece)
    part.drop()
    assert await whole.close()
    assert (root / "workspace/tmp/whole.txt").read_bytes() == b"a" * MIB + b"bc"
    async with asyncio.timeout(tooling.PATIENCE):
        while (root / "workspace/tmp/part.txt").stat().st_size:
            await asyncio.sleep(0.01)
    with pytest.raises(Refused):
        files.spool("/usr", "x")
    nowhere = files.spool("/workspace/tmp/whole.txt", "x")
    assert not await nowhere.close()


async def test_whoever_reads_no_further_holds_nobody_up(link: Link, root: Path) -> None:
    files = files_of(link, root)
    (root / "workspace" / "large").write_bytes(bytes(8 * MIB))

    def begin() -> bytes:
        stream = files.stream("large")
        first = next(stream)
        stream.close()
        return first

    for _ in range(3):
        assert await asyncio.to_thread(begin) == bytes(MIB)
    assert await asyncio.to_thread(lambda: files.read("large", 0, 1)) == b"\0"
    pid = (await link.ready())["pid"]
    async with asyncio.timeout(tooling.PATIENCE):
        while Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            await asyncio.sleep(0.01)


async def test_work_that_a_program_ends_is_unavailable_and_the_next_is_done(link: Link, root: Path) -> None:
    files = files_of(link, root)
    (root / "workspace" / "large").write_bytes(bytes(8 * MIB))
    pid = (await link.ready())["pid"]

    def cut() -> None:
        stream = files.stream("large")
        next(stream)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        for _ in stream:
            pass

    with pytest.raises(Unavailable) as failed:
        await asyncio.to_thread(cut)
    assert failed.value.reason_code == "guest_failed"
    assert len(await asyncio.to_thread(lambda: files.read("large"))) == 8 * MIB
    link.close()
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as failed:
        await asyncio.to_thread(lambda: files.read("large"))
    assert failed.value.reason_code == "no_box"


# ── Guests that lie ──


class Liar:
    """A link to a guest that answers every order with the same."""

    def __init__(self, *records: tuple[bytes, bytes]) -> None:
        self._said = b"".join(struct.pack(">cI", kind, len(data)) + data for kind, data in records)
        self.taken = 0

    def open(self, order: Any, data: bytes = b"") -> LiarsOrder:
        return LiarsOrder(self._said)


class LiarsOrder:
    def __init__(self, said: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.result: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.on_output: Callable[[bytes, bytes], Any] = lambda kind, data: None
        loop.call_soon(self._say, said)

    def _say(self, said: bytes) -> None:
        for at in range(0, len(said), 65536):
            self.on_output(b"1", said[at : at + 65536])
        self.result.set_result({"status": 0})

    async def write(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def kill(self) -> None: ...


def entry(*names: Any, kind: Any = "file", size: Any = 1, mode: Any = 0o644, target: Any = None) -> tuple[bytes, bytes]:
    return b"J", json.dumps([list(names), kind, size, 0, mode, target]).encode()


def node(path: Any, **more: Any) -> tuple[bytes, bytes]:
    return b"J", json.dumps({"path": path, "kind": "file", "mode": 0o644, "modified": 0, "size": 0, **more}).encode()


DONE = (b".", b"{}")
LIES: dict[str, tuple[str, tuple[tuple[bytes, bytes], ...]]] = {
    "a name that leads up": ("list", (entry(".."), DONE)),
    "a name with a slash": ("list", (entry("a/b"), DONE)),
    "no name": ("list", (entry(7), DONE)),
    "a kind of its own": ("list", (entry("a", kind="magic"), DONE)),
    "a size below nothing": ("list", (entry("a", size=-1), DONE)),
    "a record of the wrong shape": ("list", ((b"J", b"{}"), DONE)),
    "no record": ("list", ((b"J", b"\xff"), DONE)),
    "a record that is nested without end": ("list", ((b"J", b"[" * 200_000), DONE)),
    "an unknown kind of record": ("list", ((b"Z", b""), DONE)),
    "no end": ("list", (entry("a"),)),
    "more than was asked for": ("read", ((b"J", b'{"size": 1}'), (b"D", b"xx"), DONE)),
    "a file without a size": ("read", ((b"D", b"xx"), DONE)),
    "a file that is larger than may be read": ("read", ((b"J", b'{"size": 99999999999}'), DONE)),
    "a tree that leads up": ("take", (node("../../etc/passwd"), DONE)),
    "a tree from the root": ("take", (node("/etc/passwd"), DONE)),
    "a tree with an entry twice": ("take", (node("a"), node("a"), DONE)),
    "a tree of too many": ("take", (*(node(str(number)) for number in range(11)), DONE)),
    "a file that is shorter than it said": ("take", (node("a", size=5), (b"D", b"xx"), DONE)),
    "a file that is longer than it said": ("take", (node("a", size=1), (b"D", b"xx"), DONE)),
    "digests that are none": ("hash", (node("a", pieces=["../../x"]), DONE)),
    "an error that there is not": ("list", ((b"E", b'{"refused": "because"}'),)),
    "an error of another shape": ("list", ((b"E", b'{"refused": ["x"], "errno": {}}'),)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_an_agent_never_says_is_not_believed(lie: str) -> None:
    what, records = LIES[lie]
    way = WayToFiles(Liar(*records), asyncio.get_running_loop(), beneath=True)  # type: ignore[arg-type]
    files = GuestFiles(way, GuestPlaces(Limits()))
    ask: dict[str, Callable[[], object]] = {
        "list": files.list,
        "read": lambda: files.read("a"),
        "take": lambda: files.whole().take(lambda data: "0" * 64, max_files=10),
        "hash": files.tree_hash,
    }
    with pytest.raises(Unavailable) as failed:
        await asyncio.to_thread(ask[what])
    assert failed.value.reason_code == "guest_failed"


async def test_more_than_a_box_may_have_is_not_taken_from_it(tmp_path: Path) -> None:
    records = (node("a", size=10**15), *((b"D", bytes(65536)) for _ in range(10)), DONE)
    way = WayToFiles(Liar(*records), asyncio.get_running_loop(), beneath=True)  # type: ignore[arg-type]
    files = GuestFiles(way, GuestPlaces(Limits(disk_bytes=MIB)))
    with pytest.raises(Refused) as refused:
        await asyncio.to_thread(lambda: files.whole().take(lambda data: "0" * 64))
    assert refused.value.reason_code == "too_large"


async def test_a_watcher_of_a_guest_that_lies_is_over() -> None:
    said = [(b"J", b'["begun"]'), (b"J", json.dumps(["created", ["..", "x"], None]).encode())]
    way = WayToFiles(Liar(*said), asyncio.get_running_loop())  # type: ignore[arg-type]
    files = GuestFiles(way, GuestPlaces(Limits()))
    watcher: GuestWatcher = await asyncio.to_thread(files.watch)
    with pytest.raises(Unavailable):
        await anext(watcher)
    watcher.close()


async def test_a_guest_that_takes_nothing_more_holds_no_spool_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_loop, "_END_SECONDS", 0.05)
    link = Link()  # nobody is at its other end
    channel = link.open({"do": "files"})
    killed: list[bytes] = []
    monkeypatch.setattr(link, "send", lambda kind, number, *parts: killed.append(kind))
    spool = files_loop.GuestSpool(channel)
    written = spool.write(bytes(MIB))
    assert not await spool.close()
    assert killed[-1] == b"X"
    with pytest.raises(asyncio.CancelledError):
        await written


async def test_a_guest_that_goes_on_with_work_that_is_ended_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_call, "_KILL_SECONDS", 0.05)
    link = Link()  # nobody is at its other end
    over = asyncio.Event()
    way = WayToFiles(link, asyncio.get_running_loop(), end=over.set)
    call = await asyncio.to_thread(files_call.GuestCall, way, "read", "a")
    call.leave()
    await over.wait()


OUTPUTS = {
    "a list": b"[1, 2]",
    "nothing": b"null",
    "a list that is nested without end": b"[" * 200_000,
    "more files than there may be": json.dumps({"files": [["a", 1, "0"]] * 10_001}).encode(),
    "more that was left out": json.dumps({"skipped": dict.fromkeys(map(str, range(10_001)), "x")}).encode(),
    "more than is read": b" " * 5 * MIB,
}


@pytest.mark.parametrize("said", OUTPUTS)
async def test_output_files_that_are_no_list_are_none(said: str) -> None:
    outputs = GuestOutputs(SaysPlainly(OUTPUTS[said]), MIB, lambda: 0, nullcontext)  # type: ignore[arg-type]
    files, skipped = await outputs.changed()
    assert (files, list(skipped)) == ((), [] if said == "nothing" else ["/workspace/output"])


class SaysPlainly(Liar):
    def __init__(self, said: bytes) -> None:
        super().__init__()
        self._said = said


# ── Folders of the host for machines ──


def unpacked(archive: bytes) -> dict[str, tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        files = {each.name: found.extractfile(each) if each.isreg() else None for each in found}
        return {
            name: (found.getmember(name).linkname, file.read() if file is not None else b"")
            for name, file in files.items()
        }


def test_a_folder_is_copied_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lent/deep").mkdir(parents=True)
    (tmp_path / "lent/deep/file").write_text("file")
    (tmp_path / "lent/link").symlink_to("/etc/passwd")
    (tmp_path / "lent/folder").symlink_to("/etc")
    (tmp_path / "one").write_text("one")
    os.mkfifo(tmp_path / "lent/pipe")
    mounts = [Mount(str(tmp_path / "lent"), "/srv/lent"), Mount(str(tmp_path / "one"), "/srv/one")]
    names, archive = lent.packed(tmp_path / "lent/deep", mounts, mounting.place(mounts))
    assert names == [["0", "/workspace/input"], ["1", "/srv/lent"], ["2", "/srv/one"]]
    nothing = ("", b"")
    assert unpacked(archive) == {
        "0": nothing,
        "0/file": ("", b"file"),
        "1": nothing,
        "1/deep": nothing,
        "1/deep/file": ("", b"file"),
        "1/folder": ("/etc", b""),
        "1/link": ("/etc/passwd", b""),
        "2": ("", b"one"),
    }


def test_another_folder_in_its_place_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "lent").mkdir()
    mounts = [Mount(str(tmp_path / "lent"), "/srv/lent")]
    placed = mounting.place(mounts)
    (tmp_path / "lent").rename(tmp_path / "before")
    (tmp_path / "lent").symlink_to("/etc")
    with pytest.raises(Unavailable, match="cannot be copied"):
        lent.packed(None, mounts, placed)
    (tmp_path / "lent").unlink()
    (tmp_path / "lent").mkdir()
    with pytest.raises(Unavailable, match="no longer what it was"):
        lent.packed(None, mounts, placed)


def test_a_link_that_takes_the_place_of_a_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lent").mkdir()
    (tmp_path / "lent/file").write_text("file")
    (tmp_path / "secret").write_text("secret")
    look = os.stat

    def swaps(path: Any, **how: Any) -> os.stat_result:
        seen = look(path, **how)
        if path == "file":
            (tmp_path / "lent/file").unlink()
            (tmp_path / "lent/file").symlink_to(tmp_path / "secret")
        return seen

    monkeypatch.setattr(os, "stat", swaps)
    with pytest.raises(Unavailable, match="cannot be copied"):
        lent.packed(None, [Mount(str(tmp_path / "lent"), "/srv/lent")])
