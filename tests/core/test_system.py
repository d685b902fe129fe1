"""Who can change what is at a path."""

from __future__ import annotations

import grp
import os
import pwd
import sys
from pathlib import Path

import pytest

from ringfence.core import system

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows says so by access lists")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of ours two folders deep, whose groups are some that others are in, unless a test says otherwise."""
    path = tmp_path / "above" / "folder" / "file"
    path.parent.mkdir(parents=True)
    path.touch()
    for each in (path.parent.parent, path.parent, path):
        each.chmod(0o755)
    group(monkeypatch, "team", ["somebody"])
    return path


def group(monkeypatch: pytest.MonkeyPatch, name: str, members: list[str]) -> None:
    own = pwd.getpwuid(os.geteuid()).pw_gid
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((name, "x", own, members)))


def test_what_only_we_can_change(file: Path) -> None:
    assert system.open_place(file) is None


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["the file", "its folder", "a folder above"])
@pytest.mark.parametrize("bit", [0o020, 0o002], ids=["a group", "everybody"])
def test_others_may_write_on_the_way(file: Path, depth: int, bit: int) -> None:
    place = (file, *file.parents)[depth]
    place.chmod(0o755 | bit)
    found = system.open_place(file)
    assert found is not None and found[0] == place
    assert found[1].startswith("can be written by " + ("every user" if bit == 0o002 else "the group team"))
    place.chmod(0o1755 | bit)
    assert (system.open_place(file) is None) == (depth > 0), "in a sticky folder nobody replaces what is ours"


def test_the_group_that_is_a_users_own_is_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    file.parent.chmod(0o775)
    for members, alone in (([], True), ([me], True), ([me, "somebody"], False)):
        group(monkeypatch, me, members)
        assert (system.open_place(file) is None) == alone
    group(monkeypatch, me, [])
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.posix_acl_access"])
    assert (system.open_place(file) is None) == (sys.platform != "linux"), "whom an access list names is not looked at"


def test_links_on_the_way_are_followed_step_by_step(file: Path, tmp_path: Path) -> None:
    between, start = tmp_path / "between", tmp_path / "start"
    between.mkdir()
    start.mkdir()
    (between / "link").symlink_to("../above/folder")
    (start / "link").symlink_to(between / "link")
    assert system.open_place(start / "link" / "file") is None
    for place in (between, file.parent):
        place.chmod(0o775)
        found = system.open_place(start / "link" / "file")
        assert found is not None and found[0] == place
        place.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give away what is its own")
def test_another_user_on_the_way(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    for place, asked in ((file, file), (file.parent.parent, file), (tmp_path / "link", tmp_path / "link")):
        os.chown(place, 65534, -1, follow_symlinks=False)
        assert system.open_place(asked) == (place, "belongs to another user (uid 65534)")
        assert system.open_place(asked, {65534}) is None
        os.chown(place, 0, -1, follow_symlinks=False)
