"""Files of a live box, read and written from outside, while hostile code may do anything to them."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ringfence.core.box import FileFact
from ringfence.core.errors import Refused
from ringfence.core.model import Status
from ringfence.sandbox.files import walk
from ringfence.sandbox.files import workspace as module
from ringfence.sandbox.files.workspace import Workspace
from tests.sandbox.swapping import swapping

MIB = 1024 * 1024


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every way to the files of a box behaves the same."""
    if "space" in metafunc.fixturenames:
        metafunc.parametrize("space", ["descriptor", "guest"], indirect=True)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of the host that must neither be read nor change."""
    folder = tmp_path / "outside"
    (folder / "b").mkdir(parents=True)
    (folder / "file").write_text("secret")
    (folder / "b" / "file").write_text("secret")
    before = sorted(map(str, folder.rglob("*")))
    yield folder
    assert sorted(map(str, folder.rglob("*"))) == before
    assert (folder / "file").read_text() == (folder / "b" / "file").read_text() == "secret"


def reason(refused: pytest.ExceptionInfo[Refused]) -> str:
    return refused.value.reason_code


# ── Reading and writing ───────────────────────────────────────────────────────────────────────────


def test_what_is_written_is_read(space: Workspace, work: Path) -> None:
    fact = space.write("/workspace/a/b.txt", b"hello")
    assert fact == FileFact("/workspace/a/b.txt", 5, hashlib.sha256(b"hello").hexdigest())
    assert space.read("a/b.txt") == b"hello"
    assert space.read("a/b.txt", 1) == b"ello"
    assert space.read("a/b.txt", 1, 3) == b"ell"
    assert space.read("a/b.txt", 4, 100) == b"o"
    assert space.read("a/b.txt", 9) == b""
    assert b"".join(space.stream("a/b.txt", chunk=2)) == b"hello"
    assert os.listdir(work / "a") == ["b.txt"]


def test_large_files_go_by_pieces(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READ", 1000)
    assert space.write("big", (bytes([number]) * 300 for number in range(5))).bytes == 1500
    with pytest.raises(Refused, match="1500 bytes") as refused:
        space.read("big")
    assert reason(refused) == "too_large"
    assert space.read("big", 600) == bytes([2]) * 300 + bytes([3]) * 300 + bytes([4]) * 300
    assert [len(piece) for piece in space.stream("big", chunk=700)] == [700, 700, 100]


@pytest.mark.parametrize(("offset", "length"), [(-1, None), (0, -1)])
def test_negative_ranges_are_refused(space: Workspace, offset: int, length: int | None) -> None:
    with pytest.raises(Refused, match="negative"):
        space.read("a", offset, length)


def test_appending_adds_to_what_is_there(space: Workspace, work: Path) -> None:
    assert space.write("log", b"one\n", append=True).bytes == 4
    assert space.write("log", iter([b"two\n"]), append=True).bytes == 4
    assert (work / "log").read_text() == "one\ntwo\n"
    os.mkfifo(work / "pipe")
    (work / "link").symlink_to("log")
    for name in ("pipe", "link"):
        with pytest.raises(Refused):
            space.write(name, b"x", append=True)


def test_permissions_are_kept_or_as_asked_without_those_that_give_power(space: Workspace, work: Path) -> None:
    space.write("plain", b"")
    space.write("script", b"", mode=0o4755)
    assert stat.S_IMODE((work / "plain").stat().st_mode) == 0o644
    assert stat.S_IMODE((work / "script").stat().st_mode) == 0o755
    space.write("script", b"again")
    assert stat.S_IMODE((work / "script").stat().st_mode) == 0o755


def test_a_file_is_never_seen_half_written(space: Workspace, work: Path) -> None:
    (work / "file").write_bytes(b"a" * 1000)
    seen: set[bytes] = set()

    def pieces() -> Iterator[bytes]:
        for _ in range(10):
            seen.add((work / "file").read_bytes())
            yield b"b" * 100

    space.write("file", pieces())
    assert seen == {b"a" * 1000}
    assert (work / "file").read_bytes() == b"b" * 1000


class Cut(Exception):
    pass


@pytest.mark.parametrize("error", [Cut, ConnectionResetError])
def test_a_source_that_fails_leaves_nothing_and_is_heard(space: Workspace, work: Path, error: type[Exception]) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise error

    (work / "file").write_text("old")
    with pytest.raises(error):
        space.write("file", pieces())
    assert os.listdir(work) == ["file"]
    assert (work / "file").read_text() == "old"


def test_a_link_is_replaced_and_never_written_through(space: Workspace, work: Path, outside: Path) -> None:
    (work / "link").symlink_to(outside / "file")
    (work / "folder").symlink_to(outside)
    space.write("link", b"mine")
    assert not (work / "link").is_symlink()
    with pytest.raises(Refused) as refused:
        space.write("folder/file", b"mine")
    assert reason(refused) == "link"


def test_what_is_not_a_regular_file_is_refused_at_once(space: Workspace, work: Path, outside: Path) -> None:
    os.mkfifo(work / "pipe")
    (work / "folder").mkdir()
    (work / "absolute").symlink_to(outside / "file")
    (work / "up").symlink_to("../outside/file")
    for name in ("pipe", "folder", "absolute", "up", "missing", "folder/missing", "/workspace"):
        with pytest.raises(Refused) as refused:
            space.read(name)
        assert name in str(refused.value)
    with pytest.raises(Refused, match="is a folder"):
        space.write("folder", b"")
    assert list(work.glob("**/.ringfence*")) == []


# ── Folders ───────────────────────────────────────────────────────────────────────────────────────


def test_folders_are_listed(space: Workspace, work: Path) -> None:
    (work / "a" / "b").mkdir(parents=True)
    (work / "a" / "b" / "deep").write_text("deep")
    (work / "file").write_text("four")
    os.utime(work / "file", (1_700_000_000, 1_700_000_000))
    (work / "link").symlink_to("/etc/passwd")
    os.mkfifo(work / "pipe")
    entries = {entry.path: entry for entry in space.list()}
    assert list(entries) == [f"/workspace/{name}" for name in ("a", "file", "link", "pipe")]
    file = entries["/workspace/file"]
    assert (file.name, file.kind, file.bytes, file.mode & 0o600) == ("file", "file", 4, 0o600)
    assert file.modified == datetime.fromtimestamp(1_700_000_000, UTC)
    assert (entries["/workspace/link"].kind, entries["/workspace/link"].target) == ("link", "/etc/passwd")
    assert entries["/workspace/pipe"].kind == "other"
    assert entries["/workspace/a"].kind == "dir"
    deep = [entry.path for entry in space.list("a", depth=5)]
    assert deep == ["/workspace/a/b", "/workspace/a/b/deep"]
    assert space.stat("file") == file
    assert space.stat("/workspace").kind == "dir"
    with pytest.raises(Refused):
        space.list("file")
    with pytest.raises(Refused):
        space.list(depth=0)


def test_names_and_times_that_cannot_be_shown_are_shown_all_the_same(space: Workspace, work: Path) -> None:
    (work / "a\nb").write_text("")
    (Path(os.fsdecode(os.fsencode(work) + b"/\xff"))).write_text("")
    with suppress(OSError, OverflowError):
        os.utime(work / "a\nb", (2**40, 2**40))
    names = {entry.name for entry in space.list()}
    assert names == {"a\\nb", "\\u{dcff}"}


def test_whether_something_is_there(space: Workspace, work: Path) -> None:
    (work / "dangling").symlink_to("nowhere")
    (work / "file").write_text("")
    found = {name: space.exists(name) for name in ("dangling", "file", "no", "file/x", "no/x", "/workspace")}
    assert found == {"dangling": True, "file": True, "no": False, "file/x": False, "no/x": False, "/workspace": True}


def test_folders_are_made_once(space: Workspace, work: Path) -> None:
    assert space.make_dir("a/b")
    assert not space.make_dir("a/b")
    (work / "file").write_text("")
    with pytest.raises(Refused):
        space.make_dir("file")


def test_removing_and_renaming(space: Workspace, work: Path) -> None:
    space.write("a/b/c", b"1")
    space.rename("a/b", "d")
    assert space.read("d/c") == b"1"
    space.write("e", b"2")
    space.rename("d/c", "e")
    assert space.read("e") == b"1"
    space.remove("d")
    space.remove("a")
    space.remove("e")
    assert os.listdir(work) == []
    for action in (lambda: space.remove("e"), lambda: space.rename("e", "f"), lambda: space.remove("/workspace")):
        with pytest.raises(Refused):
            action()


# ── The whole tree ────────────────────────────────────────────────────────────────────────────────


def test_the_hash_is_that_of_the_whole_tree(space: Workspace, work: Path) -> None:
    hashes = [space.tree_hash()]

    def changed() -> None:
        hashes.append(space.tree_hash())

    space.write("a", b"1")
    changed()
    space.write("a", b"2")
    changed()
    space.write("a", b"2", mode=0o755)
    changed()
    space.rename("a", "b")
    changed()
    (work / "link").symlink_to("b")
    changed()
    space.make_dir("c")
    changed()
    space.write("c/large", b"x" * (9 * MIB))
    changed()
    space.write("c/large", b"x" * (9 * MIB - 1) + b"y")
    changed()
    os.mkfifo(work / "pipe")
    changed()
    assert len(set(hashes)) == len(hashes)
    os.utime(work / "b", (1, 1))
    assert space.tree_hash() == hashes[-1]


# ── While the box does its worst ──────────────────────────────────────────────────────────────────


def test_nothing_outside_is_touched_while_a_folder_is_swapped_for_a_link(
    space: Workspace, work: Path, outside: Path
) -> None:
    (work / "a" / "b").mkdir(parents=True)
    (work / "a" / "b" / "file").write_text("inside")
    (work / "a" / "file").write_text("inside")
    (work / "link").symlink_to(outside)
    done = 0
    rounds = 200 if isinstance(space, Workspace) else 15
    with swapping(work / "a", work / "link"):
        for number in range(rounds):
            for action in (
                lambda: space.read("a/b/file"),
                lambda: space.write("a/b/file", b"inside"),
                lambda number=number: space.write(f"a/n{number}/new", b"inside"),
                lambda: space.write("a/file", b"inside", append=True),
                lambda: space.list("a", depth=3),
                lambda: b"".join(space.pack("a")),
                space.tree_hash,
                lambda number=number: space.remove(f"a/n{number}"),
                lambda: space.remove("a/b"),
                lambda: space.make_dir("a/b"),
                lambda: space.rename("a/file", "a/b/file"),
                lambda: space.unpack("a", space.pack("a/b"), max_bytes=MIB, max_files=100),
            ):
                with suppress(Refused):
                    result = action()
                    assert b"secret" not in (result if isinstance(result, bytes) else b"")
                    done += 1
    assert done > rounds


def test_a_file_that_changes_all_the_time_is_read_without_harm(space: Workspace, work: Path) -> None:
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            for size in (0, 100_000, 10):
                with (work / "file").open("wb") as file:
                    file.write(bytes(size))

    changer = threading.Thread(target=change)
    (work / "file").write_bytes(b"")
    changer.start()
    try:
        for _ in range(100):
            assert not space.read("file").strip(b"\0")
            with suppress(Refused):
                assert len(b"".join(space.pack())) % 512 == 0
            with suppress(Refused):
                space.tree_hash()
    finally:
        done.set()
        changer.join()


# ── Whether anything was begun ────────────────────────────────────────────────────────────────────


def stated(work: Callable[[], object]) -> tuple[str, bool]:
    """Why it was refused, and whether that states that nothing was begun."""
    with pytest.raises(Refused) as refused:
        work()
    return reason(refused), refused.value.nothing_begun


def test_what_is_refused_before_a_file_was_touched_states_that_nothing_was_begun(space: Workspace, work: Path) -> None:
    (work / "folder").mkdir()
    (work / "file").write_text("x")
    assert stated(lambda: space.remove("missing")) == ("not_found", True)
    assert stated(lambda: space.remove("/etc/passwd")) == ("outside", True)
    assert stated(lambda: space.rename("missing", "new")) == ("not_found", True)
    assert stated(lambda: space.rename("file", "missing/new")) == ("not_found", True)
    assert stated(lambda: space.write("file/below", b"x")) == ("not_a_folder", True)
    assert stated(lambda: space.write("folder", b"x")) == ("not_a_file", True), "what was written beside it is gone"
    assert stated(lambda: space.make_dir("file")) == ("not_a_folder", True)
    assert sorted(os.listdir(work)) == ["file", "folder"]


def test_a_folder_that_is_removed_by_halves_states_nothing(
    space: Workspace, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(space, Workspace):
        pytest.skip("in a guest this takes an error in another process")

    def stops(descriptor: int) -> None:
        raise PermissionError(13, "one entry cannot be removed")

    (work / "folder" / "one").mkdir(parents=True)
    monkeypatch.setattr(walk, "_flatten", stops)
    assert stated(lambda: space.remove("folder")) == ("no_permission", False)
    assert not (work / "folder").exists(), "it is no longer there"


def test_folders_that_were_made_for_what_failed_are_a_change(space: Workspace, work: Path) -> None:
    def gone() -> Iterator[bytes]:
        raise Refused(Status.VALIDATION_FAILURE, "not_found", "the source is gone")
        yield b""

    (work / "file").write_text("x")
    assert stated(lambda: space.write("new/folder/name", gone())) == ("not_found", False)
    assert (work / "new" / "folder").is_dir()
    assert stated(lambda: space.write("other/" + "x" * 250 + "/" + "y" * 300, b"x"))[1] is not (work / "other").exists()
