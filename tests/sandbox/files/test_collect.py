"""What comes out of a box whose program was hostile, and where it may land."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import FileFact
from ringfence.sandbox.files import acted_upon
from ringfence.sandbox.files import collect as module
from ringfence.sandbox.files.collect import DEEPEST, OUTPUT, Copy, LeftOut, collect
from ringfence.sandbox.files.paths import FOLDER, READ, shown

MIB = 1024 * 1024
Collected = tuple[dict[str, FileFact], dict[str, str]]
not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
only_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this")


@pytest.fixture
def box(tmp_path: Path) -> Path:
    folder = tmp_path / "box"
    folder.mkdir()
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file of the host that must neither be read nor change."""
    path = tmp_path / "secret"
    path.write_text("secret")
    yield path
    assert path.read_text() == "secret"


def collected(box: Path, output: Path | None = None, *, max_bytes: int = MIB, max_files: int = 1000) -> Collected:
    root = os.open(box, os.O_PATH | os.O_DIRECTORY)
    try:
        files, skipped = collect(root, output, max_bytes=max_bytes, max_files=max_files)
    finally:
        os.close(root)
    inside = len(OUTPUT) + 1
    assert [fact.path for fact in files] == sorted(fact.path for fact in files)
    return {fact.path[inside:]: fact for fact in files}, {path[inside:]: why for path, why in skipped.items()}


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_files_are_listed_with_size_and_digest_and_copied(box: Path, output: Path) -> None:
    (box / "b" / "c").mkdir(parents=True)
    (box / "empty").mkdir()
    contents = {"a.txt": b"a", "b/c/d.bin": bytes(3 * 256 * 1024 + 1), "b/ü 1.txt": "ü".encode(), "none": b""}
    for name, data in contents.items():
        (box / name).write_bytes(data)
    files, skipped = collected(box, output)
    assert skipped == {}
    assert files == {
        name: FileFact(f"{OUTPUT}/{name}", len(data), hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    }
    assert {name: (output / name).read_bytes() for name in tree(output)} == contents


def test_without_a_folder_on_the_host_files_are_only_listed(box: Path) -> None:
    (box / "a").write_text("a")
    files, skipped = collected(box)
    assert (list(files), skipped) == (["a"], {})


def test_the_folder_on_the_host_is_made_when_needed(box: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "new" / "folder"
    assert collected(box, wanted) == ({}, {})
    assert not wanted.exists()
    (box / "a").write_text("a")
    collected(box, wanted)
    assert tree(wanted) == {"a"}


def test_special_files_are_neither_followed_nor_opened(box: Path, output: Path, secret: Path) -> None:
    (box / "file").symlink_to(secret)
    (box / "folder").symlink_to(secret.parent)
    (box / "dangling").symlink_to("/nowhere")
    (box / "loop").symlink_to("loop")
    os.mkfifo(box / "pipe")
    here = os.open(box, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/socket")
    os.close(here)
    files, skipped = collected(box, output)
    assert files == {}
    assert skipped == {
        "dangling": "it is a symbolic link",
        "file": "it is a symbolic link",
        "folder": "it is a symbolic link",
        "loop": "it is a symbolic link",
        "pipe": "it is a named pipe",
        "socket": "it is a socket",
    }
    assert tree(output) == set()


@only_as_root
def test_devices_are_left_out(box: Path, output: Path) -> None:
    try:
        os.mknod(box / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this host lets not even root make devices")
    assert collected(box, output) == ({}, {"null": "it is a device"})


def test_hard_links_are_files_and_count_each_time(box: Path, output: Path) -> None:
    (box / "a").write_bytes(bytes(600))
    os.link(box / "a", box / "b")
    files, skipped = collected(box, output, max_bytes=1000)
    assert list(files) == ["a"]
    assert skipped == {"b": "it has 600 bytes, and 400 more may be collected"}
    assert (output / "a").stat().st_nlink == 1


def test_a_sparse_file_costs_no_time(box: Path, output: Path) -> None:
    with open(box / "sparse", "wb") as file:
        for size in (2**50, 2**43, 2**40):
            try:
                file.truncate(size)
            except OSError:
                continue
            break
    (box / "small").write_text("x")
    files, skipped = collected(box, output)
    assert (list(files), list(skipped)) == (["small"], ["sparse"])
    assert "bytes, and 1048575 more may be collected" in skipped["sparse"]


def test_holes_count_as_what_is_read(box: Path, output: Path) -> None:
    with open(box / "sparse", "wb") as file:
        file.truncate(700)
    (box / "tail").write_bytes(bytes(400))
    files, skipped = collected(box, output, max_bytes=1000)
    assert (list(files), list(skipped)) == (["sparse"], ["tail"])
    assert files["sparse"].sha256 == hashlib.sha256(bytes(700)).hexdigest()


def test_a_file_that_grows_while_it_is_read_is_left_out() -> None:
    # A pipe stands for a file that has more each time it is read.
    reading, writing = os.pipe()
    try:
        os.write(writing, bytes(500))
        copy = Copy(reading, 499)
        with pytest.raises(LeftOut, match="grew"):
            copy.run(None)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_growing_file_leaves_no_part_on_the_host(box: Path, output: Path) -> None:
    growing, stop = box / "growing", threading.Event()
    growing.touch()

    def grow() -> None:
        with open(growing, "ab", buffering=0) as file:
            while not stop.is_set() and file.tell() < 64 * MIB:
                file.write(bytes(4096))

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        for _ in range(20):
            files, skipped = collected(box, output, max_bytes=2 * MIB)
            assert all(fact.bytes <= 2 * MIB for fact in files.values())
            assert len(files) + len(skipped) == 1
            assert tree(output) <= {"growing"}
    finally:
        stop.set()
        writer.join()


def test_too_many_files_are_left_out_by_name_order(box: Path, output: Path) -> None:
    for number in range(5):
        (box / f"{number}").touch()
    files, skipped = collected(box, output, max_files=3)
    assert list(files) == ["0", "1", "2"]
    assert skipped == {"3": "there are more than 3 files", "4": "there are more than 3 files"}


def test_very_many_reasons_are_counted(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REASONS", 10)
    for number in range(25):
        (box / f"{number}").symlink_to("x")
    _, skipped = collected(box)
    assert len(skipped) == 11
    assert skipped[""] == "15 more were left out"


def test_very_many_entries_are_not_looked_at(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 10)
    for folder, many in (("a", 5), ("b", 12), ("c", 2)):
        (box / folder).mkdir()
        for number in range(many):
            (box / folder / f"{number}").touch()
    files, skipped = collected(box)
    assert sorted({name.split("/")[0] for name in files}) == ["a", "c"]
    assert skipped == {"b": "there are more than 10 entries to look at"}


def test_what_is_too_deep_is_left_out(box: Path, output: Path) -> None:
    folder = os.open(box, os.O_RDONLY)
    for _ in range(DEEPEST + 100):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    (box / Path(*["d"] * DEEPEST) / "file").touch()
    files, skipped = collected(box, output)
    assert list(files) == ["d/" * DEEPEST + "file"]
    assert skipped == {"d/" * DEEPEST + "d": f"it is deeper than {DEEPEST} folders"}


def test_what_has_a_very_long_path_is_left_out(box: Path, output: Path) -> None:
    (box / Path(*["x" * 250] * 4)).mkdir(parents=True)
    (box / Path(*["x" * 250] * 4) / ("y" * 100)).touch()
    files, skipped = collected(box, output)
    assert (files, list(skipped.values())) == ({}, ["its path is longer than 1024 bytes"])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (b"\xff\xfe", "\\u{dcff}\\u{dcfe}"),
        (b"new\nline", "new\\nline"),
        (b"\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07"),
        ("gpj.\u202eexe".encode(), "gpj.\\u{202e}exe"),
        ("line\u2028break".encode(), "line\\u{2028}break"),
        ("re\u200bport".encode(), "re\\u{200b}port"),
        ("report\ufe01".encode(), "report\\u{fe01}"),
        (b"\x7f", "\\x7f"),
    ],
)
def test_names_that_deceive_are_left_out_and_shown_harmlessly(box: Path, output: Path, name: bytes, key: str) -> None:
    (box / os.fsdecode(name)).write_text("x")
    (box / "fine").write_text("x")
    files, skipped = collected(box, output)
    assert list(files) == ["fine"]
    assert list(skipped) == [key]
    assert shown(key).isprintable()
    assert tree(output) == {"fine"}


@pytest.mark.parametrize("name", ["-rf", "a\\b", "$(id)", "..a", "日本", "👩\u200d🚀", " ", "%2e%2e", "CON", "~"])
def test_odd_names_that_harm_nobody_are_kept(box: Path, output: Path, name: str) -> None:
    (box / name).write_text("x")
    assert collected(box, output)[1] == {}
    assert tree(output) == {name}


@pytest.mark.parametrize("name", [".git/hooks/post-checkout", ".bashrc", "sub/.GIT/config", ".mcp.json", ".ssh/rc"])
def test_names_that_the_host_acts_upon_are_left_out(box: Path, output: Path, name: str) -> None:
    (box / name).parent.mkdir(parents=True, exist_ok=True)
    (box / name).write_text("x")
    files, skipped = collected(box, output)
    assert files == {}
    assert set(skipped.values()) == {"tools on the host act upon a file of this name by themselves"}
    assert tree(output) == set()


def test_a_folder_that_git_would_take_for_a_repository_does_not_come_out_as_one(box: Path, output: Path) -> None:
    for name in (
        "repo/objects/x",
        "repo/refs/x",
        "repo/config",
        "repo/HEAD",
        "own/head",
        "head/fine",
        "split/commondir",
    ):
        (box / name).parent.mkdir(parents=True, exist_ok=True)
        (box / name).write_text("ref: refs/heads/x")
    (box / "split/HEAD").symlink_to("refs/heads/x")
    _, skipped = collected(box, output)
    assert len(skipped) == 3 and all(path.lower().endswith("/head") for path in skipped)
    assert tree(output) == {"repo/objects/x", "repo/refs/x", "repo/config", "head/fine", "split/commondir"}


def test_no_name_of_the_list_comes_out_at_any_depth(box: Path, output: Path) -> None:
    tops = sorted({name.partition("/")[0] for name in acted_upon.NAMES})
    assert {".local", ".mise", ".ipython", ".julia", ".agents", ".fleet", ".perldb", "bunfig.toml"} <= set(tops)
    assert {".vimrc", ".exrc", ".nvim.lua", ".gdbinit", ".githooks", ".gemini", ".cargo", ".yarnrc.yml"} <= set(tops)
    for folder in (box, box / "a/b"):
        for number, name in enumerate(tops):
            place = folder / (name if number % 2 else name.upper()) / "inside"
            place.parent.mkdir(parents=True)
            place.write_text("x")
    (box / "a/fine").write_text("x")
    files, skipped = collected(box, output)
    assert (list(files), len(skipped)) == (["a/fine"], 2 * len(tops))
    assert tree(output) == {"a/fine"}


@not_as_root
def test_what_may_not_be_read_is_left_out(box: Path, output: Path) -> None:
    (box / "file").touch(0o000)
    (box / "folder").mkdir(0o000)
    assert collected(box, output) == ({}, dict.fromkeys(("file", "folder"), "it cannot be read: Permission denied"))
    (box / "folder").chmod(0o700)
    box.chmod(0o000)
    try:
        assert collected(box, output) == ({}, {"": "it cannot be read: Permission denied"})
    finally:
        box.chmod(0o700)


def test_only_the_right_to_execute_is_kept(box: Path, output: Path) -> None:
    modes = {"plain": 0o600, "tool": 0o700, "setuid": 0o6777, "others": 0o677}
    for name, mode in modes.items():
        (box / name).touch()
        (box / name).chmod(mode)
    before = os.umask(0o022)
    try:
        collected(box, output)
    finally:
        os.umask(before)
    found = {name: stat.S_IMODE((output / name).stat().st_mode) for name in modes}
    assert found == {"plain": 0o644, "tool": 0o755, "setuid": 0o755, "others": 0o644}


def test_regular_files_on_the_host_are_replaced_and_their_other_names_kept(box: Path, output: Path) -> None:
    (output / "report").write_text("old")
    os.link(output / "report", output / "kept")
    (box / "report").write_text("new")
    assert collected(box, output)[1] == {}
    assert {name: (output / name).read_text() for name in tree(output)} == {"report": "new", "kept": "old"}


def test_links_on_the_host_are_never_written_through(box: Path, output: Path, secret: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (output / "file").symlink_to(secret)
    (output / "dangling").symlink_to(elsewhere / "made")
    (output / "folder").symlink_to(elsewhere)
    (output / "sub").mkdir()
    (output / "sub" / "up").symlink_to("../..")
    for name in ("file", "dangling", "folder/x", "sub/up/x", "sub/fine"):
        (box / name).parent.mkdir(parents=True, exist_ok=True)
        (box / name).write_text("planted")
    files, skipped = collected(box, output)
    assert list(files) == ["sub/fine"]
    in_place = "on the host something that is not a regular file is in its place"
    in_folder = "on the host something that is not a folder is in the place of its folder"
    assert skipped == {"file": in_place, "dangling": in_place, "folder/x": in_folder, "sub/up/x": in_folder}
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "x").exists()


def test_folders_and_special_files_on_the_host_stay(box: Path, output: Path) -> None:
    (output / "folder").mkdir()
    os.mkfifo(output / "pipe")
    (output / "file").touch()
    (box / "folder").touch()
    (box / "pipe").touch()
    (box / "file").mkdir()
    (box / "file" / "below").touch()
    files, skipped = collected(box, output)
    assert files == {}
    assert sorted(skipped) == ["file/below", "folder", "pipe"]
    assert tree(output) == {"file", "pipe"}


def test_what_cannot_be_written_is_said_file_by_file(box: Path, tmp_path: Path) -> None:
    (box / "a").touch()
    (tmp_path / "taken").touch()
    files, skipped = collected(box, tmp_path / "taken" / "folder")
    assert (files, list(skipped)) == ({}, ["a"])
    assert "cannot be had" in collected(box, Path("/proc/ringfence"))[1]["a"]


def test_no_descriptor_is_left_open(box: Path, output: Path) -> None:
    (box / "a" / "b").mkdir(parents=True)
    (box / "a" / "b" / "c").touch()
    (box / "a" / "link").symlink_to("x")
    (output / "a").touch()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        collected(box, output)
    assert len(os.listdir("/proc/self/fd")) == before


# ── What changes while it is collected ──


def swapped_after_a_look(monkeypatch: pytest.MonkeyPatch, name: str, to: Path) -> None:
    """Somebody puts a link in place of an entry, just after the collector has seen what it is."""
    look = os.stat

    def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        found = look(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        if path == name and dir_fd is not None:
            os.rename(name, name + ".before", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.symlink(to, name, dir_fd=dir_fd)
        return found

    monkeypatch.setattr(os, "stat", stat)


@pytest.mark.parametrize("follows", [False, True])
def test_a_file_that_becomes_a_link_is_left_out(
    box: Path, output: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """And it is O_NOFOLLOW that does it: without, the secret comes out."""
    (box / "result").write_text("mine")
    swapped_after_a_look(monkeypatch, "result", secret)
    if follows:
        monkeypatch.setattr(module, "READ", READ & ~os.O_NOFOLLOW)
    files, skipped = collected(box, output)
    assert ("result" in skipped) is not follows
    assert ("result" in files) is follows
    assert any(secret.read_bytes() in (output / name).read_bytes() for name in tree(output)) is follows


@pytest.mark.parametrize("follows", [False, True])
def test_a_folder_that_becomes_a_link_is_left_out(
    box: Path, output: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    (box / "folder").mkdir()
    elsewhere = secret.parent / "elsewhere"
    elsewhere.mkdir()
    os.link(secret, elsewhere / secret.name)
    swapped_after_a_look(monkeypatch, "folder", elsewhere)
    if follows:
        monkeypatch.setattr(module, "FOLDER", FOLDER & ~os.O_NOFOLLOW)
    files, _ = collected(box, output, max_files=3)
    assert (f"folder/{secret.name}" in files) is follows


@pytest.mark.parametrize(
    "name",
    [
        *(".git", ".Renviron", "lefthook-local.yml", ".lefthook.toml", "opencode.jsonc", ".tool-versions"),
        *("rust-toolchain", "rust-toolchain.toml", ".htaccess", ".user.ini", ".bazelversion", "prek.toml"),
        *("jupyter_server_config.py", "matplotlibrc", "sitecustomize.py", ".asdfrc", ".pam_environment"),
        *(".bashrc.d", ".emacs.el", ".lesskey", "latexmkrc", ".ropeproject", ".k5login"),
    ],
)
def test_what_tools_act_upon_by_themselves_has_such_a_name(name: str) -> None:
    assert acted_upon.is_acted_upon(name) and acted_upon.is_acted_upon(name.upper(), folder=True)


@pytest.mark.parametrize(
    "name", ["Makefile", "tox.ini", "package.json", ".nvmrc", ".python-version", "babel.config.js"]
)
def test_what_an_agent_is_meant_to_write_has_no_such_name(name: str) -> None:
    assert not acted_upon.is_acted_upon(name)


def test_an_output_folder_that_became_a_link_after_it_was_named_is_not_followed(box: Path, tmp_path: Path) -> None:
    (box / "a").write_text("a")
    (tmp_path / "private").mkdir()
    (tmp_path / "out").symlink_to("private")
    (tmp_path / "above").symlink_to(".")
    for place in (tmp_path / "out", tmp_path / "above/other", tmp_path / "out/deep/deeper"):
        files, skipped = collected(box, place)
        assert not files and "something that is not a folder is in the place of its folder" in skipped["a"]
    assert not list((tmp_path / "private").iterdir()) and not (tmp_path / "other").exists()
