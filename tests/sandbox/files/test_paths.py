"""Paths beneath a workspace, whoever wrote them and whatever lies there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.errors import Refused
from ringfence.sandbox.files import paths
from ringfence.sandbox.files.paths import DEEPEST, LONGEST_NAME, LONGEST_PATH, open_beneath, open_regular, parts_of
from tests.sandbox.swapping import swapping


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "work" / "a" / "b").mkdir(parents=True)
    (tmp_path / "work" / "a" / "file").write_text("inside")
    (tmp_path / "secret").write_text("secret")
    descriptor = os.open(tmp_path / "work", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(params=["openat2", "step by step"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to resolve a path; the second is that of a kernel without the call."""
    if request.param == "step by step":
        monkeypatch.setattr(paths, "has_openat2", lambda: False)
    elif not paths.has_openat2():
        pytest.skip("this kernel has no openat2")
    return str(request.param)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("a", ("workspace", "a")),
        ("/workspace/a", ("workspace", "a")),
        ("/workspace", ("workspace",)),
        ("/workspace/", ("workspace",)),
        (".", ("workspace",)),
        ("./a//b/", ("workspace", "a", "b")),
        ("a/../b", ("workspace", "b")),
        ("workspace/a", ("workspace", "workspace", "a")),
        ("ü 1/…", ("workspace", "ü 1", "…")),
        ("...", ("workspace", "...")),
        ("~", ("workspace", "~")),
        ("/tmp/x", ("tmp", "x")),
        ("/etc/passwd", ("etc", "passwd")),
        ("../tmp/x", ("tmp", "x")),
        ("a/../../../..", ()),
        ("/../..", ()),
        ("//workspace", ("workspace",)),
    ],
)
def test_paths_are_those_of_the_box_or_relative_to_its_workspace(path: str, parts: tuple[str, ...]) -> None:
    assert parts_of(path) == parts


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        *[(path, "bad_path") for path in ("", "a\0b", "a\nb", "\udc80", "\u202eb")],
        *[("a" * (LONGEST_NAME + 1), "bad_path"), ("a/" * (DEEPEST + 1), "bad_path")],
        *[("ü" * 128, "bad_path"), ("a/" * LONGEST_PATH, "bad_path"), ("é" * 100 + "/" + "é" * 2500, "bad_path")],
    ],
)
def test_other_paths_are_refused_in_a_sentence_that_names_them(path: str, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        parts_of(path)
    assert refused.value.reason_code == reason
    assert (repr(path)[1:20] if len(path) <= 80 else f"({len(path)} characters)") in str(refused.value)
    assert len(str(refused.value)) < 300 or len(path) > 80
    assert ";" in str(refused.value) or ":" in str(refused.value)


@given(st.text(alphabet=st.sampled_from("ab./\0\nü~"), max_size=30) | st.text(max_size=30))
def test_no_path_leads_up_from_the_root(path: str) -> None:
    for text in (path, f"/workspace/{path}"):
        try:
            parts = parts_of(text)
        except Refused:
            continue
        assert all(part not in ("", ".", "..") and "/" not in part and "\0" not in part for part in parts)
        assert parts_of("/" + "/".join(parts)) == parts
        assert os.path.normpath(os.path.join("/workspace", text)).lstrip("/") == "/".join(parts)


def test_files_beneath_are_opened(root: int, way: str) -> None:
    descriptor = open_regular(root, ("a", "file"), follow=True)
    assert os.read(descriptor, 10) == b"inside"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_links_out_are_not_followed(root: int, way: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name, target in (("absolute", str(tmp_path / "secret")), ("up", "../secret"), ("twice", "up")):
        (work / name).symlink_to(target)
    (work / "folder").symlink_to("..")
    (work / "self").symlink_to("/proc/self/cwd")
    for parts in (("absolute",), ("up",), ("twice",), ("folder", "secret"), ("self", "x"), ("a", "..", "up")):
        with pytest.raises(OSError):
            open_beneath(root, parts, os.O_RDONLY)


def test_beneath_the_root_of_a_box_links_lead_where_they_lead_in_the_box(root: int, tmp_path: Path) -> None:
    if not paths.has_openat2():
        pytest.skip("this kernel has no openat2")
    work = tmp_path / "work"
    for name, target in (("absolute", "/a/file"), ("up", "../../../a/file"), ("out", str(tmp_path / "secret"))):
        (work / name).symlink_to(target)
    for name in ("absolute", "up"):
        descriptor = open_regular(root, (name,), follow=True, as_root=True)
        assert os.read(descriptor, 10) == b"inside"
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        open_regular(root, ("out",), follow=True, as_root=True)


def test_links_that_stay_beneath_are_followed_where_the_kernel_can(root: int, way: str, tmp_path: Path) -> None:
    (tmp_path / "work" / "a" / "b" / "link").symlink_to("../file")
    (tmp_path / "work" / "short").symlink_to("a/b")
    if way == "openat2":
        os.close(open_regular(root, ("short", "link"), follow=True))
    with pytest.raises(OSError):
        open_regular(root, ("a", "b", "link"), follow=False)


def test_nothing_but_regular_files_is_opened_and_nothing_waits(root: int, way: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "work" / "pipe")
    for parts in (("pipe",), ("a",), ()):
        with pytest.raises(OSError):
            open_regular(root, parts, follow=True)


def test_a_folder_swapped_for_a_link_never_leads_out(root: int, way: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("secret")
    (tmp_path / "work" / "link").symlink_to(outside)
    seen = set()
    with swapping(tmp_path / "work" / "a", tmp_path / "work" / "link"):
        for _ in range(3000):
            try:
                descriptor = open_regular(root, ("a", "file"), follow=True)
            except OSError:
                seen.add(b"")
                continue
            seen.add(os.read(descriptor, 10))
            os.close(descriptor)
    assert seen and seen <= {b"", b"inside"}


def test_missing_folders_are_made(root: int, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with paths.made_folder(root, ("a", "n", "m"), None) as (folder, made):
            assert made
            assert stat.S_IMODE(os.fstat(folder).st_mode) == 0o755
    finally:
        os.umask(before)
    with paths.made_folder(root, ("a", "n", "m"), None) as (_, made):
        assert not made
    (tmp_path / "work" / "dangling").symlink_to("../made")
    with pytest.raises(OSError), paths.made_folder(root, ("dangling", "x"), None):
        pass
    assert not (tmp_path / "made").exists()
