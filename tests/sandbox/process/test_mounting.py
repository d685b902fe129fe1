"""Folders of the host in a box: seen where they were declared, written to only where that was said."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Input, Limits, Mount, Program
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import Command, StaySpec
from ringfence.sandbox.process import mounting, pool
from ringfence.sandbox.process.backend import ProcessBackend
from tests import tooling

pytestmark = pytest.mark.anyio

TRY = """
import os
def tried(name, do):
    try:
        print(name, repr(do()))
    except OSError as exc:
        print(name, exc.strerror)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that nobody but its owner may look into."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    (folder / "note.txt").write_text("noted")
    (folder / "note.txt").chmod(0o600)
    return folder


async def run(backend: ProcessBackend, source: str, *mounts: Mount, **more: object) -> BoxReport:
    report = await backend.run(BoxSpec(Program("python", (TRY + source).encode()), mounts=mounts, **more))  # type: ignore[arg-type]
    assert report.ended == "exited" and not report.stderr.total, report.stderr.text
    return report


def said(report: BoxReport) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in report.stdout.text.splitlines())


async def test_what_is_read_only_can_be_read_by_the_box_alone_and_not_changed(
    backend: ProcessBackend, folder: Path
) -> None:
    source = """
for at in ("/data", "/workspace/data/deep", "/workspace/input/data"):
    tried(at + ":read", lambda: open(at + "/note.txt").read())
    tried(at + ":write", lambda: open(at + "/new", "w"))
    tried(at + ":append", lambda: open(at + "/note.txt", "a"))
    tried(at + ":chmod", lambda: os.chmod(at + "/note.txt", 0o777))
    tried(at + ":remove", lambda: os.remove(at + "/note.txt"))
    tried(at + ":rename", lambda: os.rename(at, "/workspace/gone"))
tried("above", lambda: sorted(os.listdir("/data/..")) == sorted(os.listdir("/")))
"""
    places = ("/data", "/workspace/data/deep", "/workspace/input/data")
    report = await run(backend, source, *(Mount(str(folder), at) for at in places))
    told = said(report)
    for at in places:
        assert told[f"{at}:read"] == "'noted'"
        assert {told[f"{at}:{what}"] for what in ("write", "append", "chmod", "remove")} == {"Read-only file system"}
        assert told[f"{at}:rename"] in ("Device or resource busy", "Read-only file system", "Invalid cross-device link")
    assert told["above"] == "True"
    assert report.isolation["mounts"] == [{"at": at, "mode": "ro"} for at in places]
    assert [entry.name for entry in folder.iterdir()] == ["note.txt"]


async def test_what_the_box_writes_belongs_to_the_owner_of_the_folder(backend: ProcessBackend, folder: Path) -> None:
    source = """
os.mkdir("/data/deep")
open("/data/deep/new", "w").write("mine")
open("/data/note.txt", "a").write(" more")
tried("owner", lambda: os.stat("/data/deep/new").st_uid == os.getuid())
tried("beside", lambda: os.mkdir("/beside"))
tried("device", lambda: os.mknod("/data/device", 0o600 | 0o020000, os.makedev(1, 3)))
"""
    told = said(await run(backend, source, Mount(str(folder), "/data", "rw")))
    assert told["owner"] == "True"
    assert told["beside"] == "Read-only file system"
    assert told["device"] != "None"
    new = folder / "deep" / "new"
    assert (new.read_text(), new.stat().st_uid) == ("mine", folder.stat().st_uid)
    assert (folder / "note.txt").read_text() == "noted more"
    assert not (folder / "device").exists()


async def test_no_file_that_gives_rights_away_can_be_left(backend: ProcessBackend, folder: Path) -> None:
    source = """
open("/data/tool", "w").write("#!/bin/sh\\n")
tried("chmod", lambda: os.chmod("/data/tool", 0o4755))
tried("group", lambda: os.chmod("/data/tool", 0o2755))
descriptor = os.open("/data/tool", os.O_RDONLY)
tried("fchmod", lambda: os.fchmod(descriptor, 0o6755))
tried("open", lambda: os.open("/data/other", os.O_CREAT | os.O_WRONLY, 0o4755))
tried("tmpfile", lambda: os.open("/data", os.O_TMPFILE | os.O_WRONLY, 0o4755))
tried("mknod", lambda: os.mknod("/data/third", 0o4755 | 0o100000))
tried("plain", lambda: os.chmod("/data/tool", 0o755))
"""
    report = await run(backend, source, Mount(str(folder), "/data", "rw"))
    told = said(report)
    assert told.pop("plain") == "None"
    assert set(told.values()) == {"Operation not permitted"}
    assert report.denials
    assert not any(entry.stat().st_mode & (stat.S_ISUID | stat.S_ISGID) for entry in folder.iterdir())


async def test_one_in_another(backend: ProcessBackend, folder: Path, tmp_path: Path) -> None:
    """A folder read-only, and one in it to write to; also in the workspace. A link in the way stops the box."""
    for name in ("out", "swapped"):
        (folder / name).mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    source = """
for at in ("/data", "/workspace/data"):
    tried(at + ":write", lambda: open(at + "/x", "w"))
    tried(at + ":inner", lambda: open(at + "/out/x", "w").write("x"))
"""
    outer = [Mount(str(folder), at) for at in ("/data", "/workspace/data")]
    inner = [Mount(str(elsewhere), f"{each.at}/out", "rw") for each in outer]
    told = said(await run(backend, source, *inner, *outer))
    assert [told[f"{each.at}:write"] for each in outer] == ["Read-only file system"] * 2
    assert [told[f"{each.at}:inner"] for each in outer] == ["1"] * 2
    assert (elsewhere / "x").exists() and not (folder / "out" / "x").exists()

    placed = (outer[0], Mount(str(elsewhere), "/data/swapped", "rw"))
    await run(backend, "", *placed)
    (folder / "swapped").rmdir()
    (folder / "swapped").symlink_to("/proc")
    with pytest.raises(ValueError, match="no such place"):
        await run(backend, "", *placed)
    monkey = mounting.check
    try:
        mounting.check = lambda mounts, trees: None  # it changed after it was looked at
        with pytest.raises(Unavailable, match="symbolic links"):
            await run(backend, "", *placed)
    finally:
        mounting.check = monkey


async def test_a_single_file(backend: ProcessBackend, folder: Path) -> None:
    (folder / "private").write_text("not shown")
    source = """
tried("read", lambda: open("/etcetera/note").read())
tried("write", lambda: open("/etcetera/note", "w").write("other"))
tried("read-only", lambda: open("/workspace/note", "a"))
tried("beside", lambda: os.listdir("/etcetera"))
"""
    note = str(folder / "note.txt")
    told = said(await run(backend, source, Mount(note, "/etcetera/note", "rw"), Mount(note, "/workspace/note")))
    assert told == {"read": "'noted'", "write": "5", "read-only": "Read-only file system", "beside": "['note']"}
    assert (folder / "note.txt").read_text() == "other"


async def test_a_box_that_stays_has_them_in_every_process(backend: ProcessBackend, folder: Path) -> None:
    live = await backend.open(StaySpec(mounts=(Mount(str(folder), "/data", "rw"), Mount(str(folder), "/workspace/d"))))
    try:
        for number in range(3):
            script = f"echo {number} > /data/{number}; cat /workspace/d/{number}; echo x > /workspace/d/x; true"
            running = await live.command(Command(("/bin/sh", "-c", script), Limits()), lambda stream, data: None)
            report = await running.over()
            assert report.stdout.text == f"{number}\n", report.stderr.text
            assert "Read-only file system" in report.stderr.text
    finally:
        await live.end()
    assert sorted(entry.name for entry in folder.iterdir()) == ["0", "1", "2", "note.txt"]


async def test_boxes_with_mounts_see_their_own_and_no_others(backend: ProcessBackend, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    source = "tried('name', lambda: open('/data/name').read()); tried('all', lambda: os.listdir('/data'))"
    for name in ("one", "two", "one"):
        report = await run(backend, source, Mount(str(tmp_path / name), "/data"))
        assert said(report) == {"name": repr(name), "all": "['name']"}
    # Another folder under the same name is another folder.
    (tmp_path / "one").rename(tmp_path / "old")
    (tmp_path / "one").mkdir()
    assert said(await run(backend, source, Mount(str(tmp_path / "one"), "/data")))["all"] == "[]"
    assert said(await run(backend, "tried('gone', lambda: os.listdir('/data'))"))["gone"] == "No such file or directory"


async def test_a_zygote_with_mounts_is_let_go_when_nobody_uses_it(
    backend: ProcessBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "HOST_MOUNTS_SECONDS", 0.2)
    await run(backend, "", Mount(str(folder), "/data"))
    assert backend._pool is not None
    assert any(baseline.mounts for baseline in backend._pool._zygotes)
    pool_ = backend._pool
    await tooling.until(lambda: not any(baseline.mounts for baseline in pool_._zygotes))


BAD_PLACES = {
    "/": "absolute path",
    "data": "absolute path",
    "/a/../b": "absolute path",
    "/a//b": "absolute path",
    "/proc/x": "the system's",
    "/etc/x": "the system's",
    "/usr/share/x": "the system's",
    "/workspace": "a folder of its own",
    "/workspace/output": "a folder of its own",
    "/workspace/tmp/x": "a folder of its own",
}


@pytest.mark.parametrize(("at", "why"), BAD_PLACES.items())
def test_where_nothing_can_be_mounted(at: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mounting.check([Mount("/srv", at)], ())


def test_mounts_do_not_hide_each_other_nor_what_the_box_needs() -> None:
    with pytest.raises(ValueError, match="may write to"):
        mounting.check([Mount("/srv", "/a/b"), Mount("/srv", "/a", "rw")], ())
    with pytest.raises(ValueError, match="both"):
        mounting.check([Mount("/srv", "/a"), Mount("/opt", "/a")], ())
    with pytest.raises(ValueError, match="no such place"):
        mounting.check([Mount("/srv", "/opt/python/x")], ["/opt/python"])
    with pytest.raises(ValueError, match="would hide"):
        mounting.check([Mount("/srv", "/opt")], ["/opt/python"])
    mounting.check([Mount("/opt", "/opt"), Mount("/srv", "/optics")], ["/opt/python"])
    with pytest.raises(ValueError, match="32 mounts"):
        mounting.check([Mount("/srv", f"/a{number}") for number in range(33)], ())


def test_no_link_is_followed_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "inner").mkdir()
    os.mkfifo(tmp_path / "fifo")
    assert mounting.place([Mount(str(tmp_path / "real"), "/a")])[0].folder
    for path, why in (("link", "a link stands in it"), ("link/inner", "a link stands in it"), ("none", "not exist")):
        with pytest.raises(ValueError, match=why):
            mounting.place([Mount(str(tmp_path / path), "/a")])
    with pytest.raises(ValueError, match="neither a folder nor a file"):
        mounting.place([Mount(str(tmp_path / "fifo"), "/a")])


async def test_inputs_and_mounts_go_together(backend: ProcessBackend, folder: Path) -> None:
    source = "tried('in', lambda: open('/workspace/input/a').read() + open('/workspace/input/data/note.txt').read())"
    inputs = (Input("a", b"given "),)
    report = await run(backend, source, Mount(str(folder), "/workspace/input/data"), inputs=inputs)
    assert said(report) == {"in": "'given noted'"}
