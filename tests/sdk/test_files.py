"""The files of a sandbox, from the host."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringfence import AsyncSandbox, NotFound, Refused, Sandbox, Unavailable, run_code
from ringfence.core.box import Mount
from ringfence.sdk.infos import FileChange, Progress
from tests import tooling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]

LARGE = os.urandom(1 << 20) * 5 + b"end"


# ── one file ──


def test_what_is_written_is_read(sandbox: Sandbox) -> None:
    fact = sandbox.files.write("new/folder/a.txt", "grüße\n")
    assert (fact.path, fact.bytes) == ("/workspace/new/folder/a.txt", 8)
    assert sandbox.files.read("/workspace/new/folder/a.txt") == "grüße\n"
    assert sandbox.files.read("new/folder/a.txt", "bytes") == "grüße\n".encode()
    assert sandbox.files.read("new/folder/a.txt", "bytes", offset=2, length=3) == "grüße\n".encode()[2:5]
    assert sandbox.run_code("open('new/folder/a.txt').read()").text == repr("grüße\n")
    sandbox.files.write("new/folder/a.txt", b"more", append=True, mode=0o600)
    assert sandbox.files.read("new/folder/a.txt") == "grüße\nmore"


def test_bytes_of_files_are_never_altered_whatever_nobody_sees_in_them(sandbox: Sandbox) -> None:
    odd = "\ufeffa\u200b\u202e\U000e0041\x1b[2J\x00\ufe0f\u3164\n"
    sandbox.files.write("odd.txt", odd)
    assert sandbox.files.read("odd.txt") == odd
    assert sandbox.files.read("odd.txt", "bytes") == odd.encode()
    assert sandbox.run_code("len(open('odd.txt', newline='').read())").text == str(len(odd))
    with pytest.raises(Refused, match="cannot be seen"):
        sandbox.files.write("odd\u200b.txt", "x")


def test_what_is_no_text_says_how_to_read_it(sandbox: Sandbox) -> None:
    sandbox.files.write("binary", b"\xff\xfe")
    with pytest.raises(ValueError, match="read it with format='bytes'"):
        sandbox.files.read("binary")
    with pytest.raises(ValueError, match="format must be"):
        sandbox.files.read("binary", "txt")  # type: ignore[call-overload]


def pieces() -> Iterator[bytes]:
    for at in range(0, len(LARGE), 700_000):
        yield LARGE[at : at + 700_000]


@pytest.mark.parametrize("kind", ["bytes", "path", "file", "pieces", "empty"])
def test_large_files_go_in_and_out_by_pieces(kind: str, sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    data: Any = {
        "bytes": LARGE, "path": tmp_path / "large", "file": io.BytesIO(LARGE), "pieces": pieces(), "empty": iter(()),
    }[kind]  # fmt: skip
    fact = sandbox.files.write("large", data)
    expected = b"" if kind == "empty" else LARGE
    assert fact.bytes == len(expected)
    read = list(sandbox.files.read("large", "stream"))
    assert b"".join(read) == expected and (len(read) > 1 or not expected)


async def test_pieces_may_come_asynchronously_and_a_reader_may_go(state: Path) -> None:
    async def made() -> AsyncIterator[bytes]:
        for piece in pieces():
            await asyncio.sleep(0)
            yield piece

    async with AsyncSandbox() as box:
        await box.files.write("large", made())
        async for piece in await box.files.read("large", "stream"):
            assert piece == LARGE[: len(piece)]
            break
        assert await box.files.read("large", "bytes") == LARGE


def test_what_cannot_be_sent_is_told_before_anything_is(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        sandbox.files.write("a", tmp_path / "missing")
    with pytest.raises(TypeError, match="pieces of a file are bytes"):
        sandbox.files.write("a", ["text"])  # type: ignore[list-item]
    assert not sandbox.files.exists("a")


def test_several_at_once_and_copies(sandbox: Sandbox) -> None:
    files: dict[str, Any] = {"m/1": "a", "m/2": b"b"}
    sandbox.files.write_files(files)
    sandbox.files.write_files([{"path": "m/3", "data": "c"}])
    assert [sandbox.files.read(f"m/{n}") for n in (1, 2, 3)] == ["a", "b", "c"]
    assert sandbox.files.copy("m/1", "m/4").path == "/workspace/m/4"
    with Sandbox.create() as other:
        sandbox.files.copy("m/4", "from/elsewhere", to_sandbox=other.id)
        assert other.files.read("from/elsewhere") == "a"


# ── folders ──


def test_folders_are_listed_made_renamed_and_removed(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("f/g") is True and sandbox.files.make_dir("f/g") is False
    sandbox.files.write("f/g/h", "1234")
    sandbox.run_code("import os\nos.symlink('g/h', 'f/link')")
    assert [(each.name, each.kind) for each in sandbox.files.list("f")] == [("g", "dir"), ("link", "link")]
    assert [each.path for each in sandbox.files.list("f", depth=2)][1] == "/workspace/f/g/h"
    info = sandbox.files.get_info("f/g/h")
    assert (info.name, info.kind, info.bytes, stat.filemode(info.mode)) == ("h", "file", 4, "?rw-r--r--")
    assert sandbox.files.get_info("f/link").target == "g/h"
    sandbox.files.rename("f/g/h", "f/i")
    assert sandbox.files.exists("f/i") and not sandbox.files.exists("f/g/h")
    sandbox.files.remove("f")
    assert not sandbox.files.exists("f")
    for work in (sandbox.files.read, sandbox.files.get_info, sandbox.files.remove, sandbox.files.list):
        with pytest.raises(NotFound, match="f/i"):
            work("f/i")
    with pytest.raises(ValueError, match="depth must be 1"):
        sandbox.files.list(depth=0)


@pytest.mark.parametrize("path", ["/etc/shadow", "../../etc/shadow", "a/../../b", "leads_out", "a\0b", ""])
def test_nothing_outside_of_the_box_can_be_named(path: str, sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    sandbox.commands.run(f"ln -sf {tmp_path}/secret leads_out")
    with pytest.raises(Refused):
        sandbox.files.read(path)
    if path != "leads_out":  # which is replaced, and not written through
        with pytest.raises(Refused):
            sandbox.files.write(path, "x")


# ── from the host and to it ──


def test_a_folder_goes_in_and_comes_out(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "project"
    (source / "sub").mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (source / "sub" / "large").write_bytes(LARGE)
    (source / "inside").symlink_to("a.txt")
    (source / "outside").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    far: list[Progress] = []
    moved = sandbox.files.upload(source, "project", on_progress=far.append)
    assert moved.files == 2 and set(moved.left_out) == {"outside", "pipe"}
    assert far[-1].done == far[-1].total == moved.bytes
    assert sandbox.run_code("open('project/inside').read()").text == "'a'"

    back = sandbox.files.download("project", tmp_path / "back")
    assert (back.files, (tmp_path / "back/sub/large").read_bytes()) == (2, LARGE)
    assert os.readlink(tmp_path / "back/inside") == "a.txt"
    archive = sandbox.files.download("project", tmp_path / "deep/er/back.tar")
    with tarfile.open(tmp_path / "deep/er/back.tar") as opened:
        assert {"a.txt", "sub/large"} <= set(opened.getnames())
    assert archive.files == 2
    assert not list(tmp_path.rglob(".ringfence-*"))


def test_a_file_goes_in_and_comes_out(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(LARGE)
    assert sandbox.files.upload(tmp_path / "one", "put").files == 1
    far: list[Progress] = []
    assert sandbox.files.download("put", tmp_path / "two", on_progress=far.append).bytes == len(LARGE)
    assert (tmp_path / "two").read_bytes() == LARGE and far[-1].done == len(LARGE)
    with pytest.raises(NotFound):
        sandbox.files.download("nowhere", tmp_path / "three")
    with pytest.raises(Unavailable, match="No such file"):
        sandbox.files.upload(tmp_path / "nowhere", "x")
    with pytest.raises(Unavailable):
        sandbox.files.download("put", tmp_path / "one" / "below a file")
    assert not list(tmp_path.rglob(".ringfence-*")) and not (tmp_path / "three").exists()


def test_what_a_box_left_cannot_leave_the_folder_it_comes_to(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run_code("""
import os
os.makedirs('trap/sub')
os.symlink('/etc', 'trap/etc'); os.symlink('../../../..', 'trap/sub/up'); os.mkfifo('trap/fifo')
open('trap/fine', 'w').write('x')""")
    moved = sandbox.files.download("trap", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["fine", "sub"]
    assert len(moved.left_out) == 3


def test_what_the_host_acts_upon_does_not_come_along_with_a_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run_code("""
import os
for name in ('fine', '.git/hooks/pre-commit', 'sub/.ENVRC', 'repo/HEAD', 'repo/refs/x', 'repo/objects/x', 'head/fine'):
    os.makedirs(os.path.dirname('/workspace/plot/' + name), exist_ok=True)
    open('/workspace/plot/' + name, 'w').write('x')
os.link('plot/sub/.ENVRC', 'plot/sub/same'); os.symlink('repo', 'plot/.vscode')""")
    moved = sandbox.files.download("plot", tmp_path / "out")
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert there - {"sub/same"} == {"fine", "repo/refs/x", "repo/objects/x", "head/fine"}
    left_out = {path.removeprefix("/workspace/plot/") for path in moved.left_out} - {"sub/same"}
    assert left_out == {".git", ".vscode", "sub/.ENVRC", "repo/HEAD"}
    sandbox.files.download("plot", tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar") as archive:
        assert ".git/hooks/pre-commit" in archive.getnames()


def test_names_that_cannot_be_shown_do_not_come_along_and_are_named(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run_code(r"""
import os
os.makedirs('odd/sub\ndir/deep'); os.makedirs('odd/fine')
good = ['plain', 'sp ace', 'nai\u0308ve', '\U0001F469\u200d\U0001F4BB', 'fine/x', 'a\\u{ad}b']
bad = ['\x1b[2Jx', 'a\nb', '\u202eevil', 'a\u00adb', 'tab\there', '\ufeffbom', 'fine/\x7f', 'sub\ndir/deep/x']
for name in good + bad:
    open('odd/' + name, 'w').write('x')
open(b'odd/latin\xe9', 'w').write('x')""")
    for target in (tmp_path / "out", tmp_path / "out.tar"):
        moved = sandbox.files.download("odd", target)
        assert moved.files == 6
        assert len(moved.left_out) == 9, moved.left_out  # of what lies in a folder of such a name, the folder
        assert all("cannot be shown" in why for why in moved.left_out.values())
        assert all(path.isprintable() for path in moved.left_out)


def test_a_folder_is_copied_out_under_our_umask(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run_code(
        "import os; os.makedirs('open/sub'); open('open/sub/run', 'w').close(); os.chmod('open/sub/run', 0o755)"
    )
    before = os.umask(0o027)
    try:
        sandbox.files.download("open", tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*")}
    assert modes == {"sub": 0o750, "run": 0o750}


# ── as it happens ──


def test_changes_are_told(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("watched")
    with sandbox.files.watch("watched") as watch:
        sandbox.run_code("open('watched/a', 'w').close()\nimport os\nos.rename('watched/a', 'watched/b')")
        found = []
        for change in watch:
            found.append(change)
            if change.kind == "renamed":
                break
        assert found[0] == FileChange("created", "/workspace/watched/a")
        assert found[-1] == FileChange("renamed", "/workspace/watched/a", "/workspace/watched/b")
        sandbox.files.remove("watched/b")
        told: list[FileChange] = []
        until = time.monotonic() + tooling.PATIENCE
        while time.monotonic() < until:
            told += watch.new()
            if told:
                break
            sandbox.run_code("import time; time.sleep(0.02)")
        assert FileChange("removed", "/workspace/watched/b") in told
    assert list(watch) == []
    with pytest.raises(NotFound):
        sandbox.files.watch("nowhere")


async def test_changes_are_told_to_a_callback(state: Path) -> None:
    async with AsyncSandbox() as box:
        heard: asyncio.Queue[FileChange] = asyncio.Queue()
        watch = await box.files.watch("/workspace", heard.put, recursive=True)
        await box.files.make_dir("new")
        assert (await asyncio.wait_for(heard.get(), tooling.PATIENCE)).path == "/workspace/new"
        await watch.stop()
        await box.files.write("new/file", "x")
        await asyncio.sleep(0.1)
        assert heard.empty()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[tuple[Path, Sandbox]]:
    """A sandbox that may write to a folder of the host, in which it has put links."""
    (tmp_path / "project").mkdir()
    (tmp_path / "private").mkdir()
    (tmp_path / "private/kept").write_text("private")
    with Sandbox.create(mounts=[Mount(str(tmp_path / "project"), "/project", "rw")]) as box:
        box.files.write_files({"made/kept": "planted", "made/new": "planted"})
        box.commands.run("ln -s ../private /project/results && ln -s ../private/kept /project/file")
        yield tmp_path, box


@pytest.mark.parametrize("target", ["results", "results/below", "results/all.tar"])
def test_a_download_follows_no_link_that_the_sandbox_made(project: tuple[Path, Sandbox], target: str) -> None:
    place, box = project
    with pytest.raises(Unavailable, match="is a link, which is not followed"):
        box.files.download("made", place / "project" / target)
    assert os.listdir(place / "private") == ["kept"] and (place / "private/kept").read_text() == "private"


@pytest.mark.parametrize("path", ["made", "made/new"])
def test_nor_one_that_it_makes_meanwhile(project: tuple[Path, Sandbox], path: str) -> None:
    place, box = project
    target = place / "project/here" / ("" if path == "made" else "new")

    def swap(_: Progress) -> None:
        if not (place / "project/here").is_symlink():
            box.commands.run("mv /project/here /project/there; ln -s ../private /project/here")

    (place / "project/here").mkdir()
    with suppress(Unavailable):
        box.files.download(path, target, on_progress=swap)
    assert (place / "project/here").is_symlink()
    assert os.listdir(place / "private") == ["kept"] and (place / "private/kept").read_text() == "private"


def test_nothing_is_read_over_a_link_that_it_made(project: tuple[Path, Sandbox]) -> None:
    place, box = project
    for reading in (
        lambda: box.files.write("got", place / "project/file"),
        lambda: box.files.upload(place / "project/file", "got"),
        lambda: box.files.upload(place / "project/results", "got"),
        lambda: run_code("pass", inputs={"got": place / "project/file"}),
        lambda: run_code("pass", output=place / "project/results"),
    ):
        with pytest.raises(Unavailable, match="is a link, which is not followed"):
            reading()
    assert not box.files.exists("got")
    for mode in ("ro", "rw"):
        with pytest.raises(ValueError, match="is a link, which is not followed"):
            run_code("pass", mounts=[Mount(str(place / "project/results"), "/seen", mode)])
