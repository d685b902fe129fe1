"""Folders as archives: good ones go there and back, bad ones leave nothing behind."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.core.errors import Refused
from ringfence.sandbox.files.archive import TarReader, leads_out
from ringfence.sandbox.files.workspace import Workspace
from tests import tooling

MIB = 1024 * 1024


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every way to the files of a box behaves the same."""
    if "space" in metafunc.fixturenames:
        metafunc.parametrize("space", ["descriptor", "guest"], indirect=True)


def member(name: str, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes], format_: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=mode)


def unpack(space: Workspace, data: bytes, path: str = "in", max_bytes: int = MIB, max_files: int = 100) -> list[str]:
    pieces = (data[at : at + 700] for at in range(0, len(data), 700))
    return [fact.path for fact in space.unpack(path, pieces, max_bytes=max_bytes, max_files=max_files)]


# ── Out ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_is_packed_as_any_tar_reads_it(space: Workspace, work: Path, tmp_path: Path) -> None:
    (work / "a" / "b").mkdir(parents=True)
    (work / "a" / "run").write_text("#!/bin/sh\n")
    (work / "a" / "run").chmod(0o755)
    (work / "a" / "b" / ("long " * 40 + "ü")).write_bytes(bytes(1000))
    (work / "a" / "link").symlink_to("b")
    (work / "a" / "none").write_bytes(b"")
    data = b"".join(space.pack("a"))
    assert data == b"".join(space.pack("a"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["b", f"b/{'long ' * 40}ü", "link", "none", "run"]
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4, and without it later ones complain
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(tmp_path / "out")
    assert (tmp_path / "out" / "run").stat().st_mode & 0o100
    assert (tmp_path / "out" / "link" / ("long " * 40 + "ü")).read_bytes() == bytes(1000)


def test_what_leads_out_or_is_no_file_is_left_out_and_said(space: Workspace, work: Path) -> None:
    (work / "d").mkdir()
    for name, target in (("absolute", "/etc/passwd"), ("up", ".."), ("d/inside", "../x"), ("d/trick", "a/../../..")):
        (work / name).symlink_to(target)
    os.mkfifo(work / "pipe")
    (work / "a\nb").write_text("")
    left_out: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(b"".join(space.pack(left_out=left_out)))) as tar:
        assert tar.getnames() == ["d", "d/inside"]
    assert set(left_out) == {"absolute", "up", "d/trick", "pipe", "a\\nb"}
    assert left_out["pipe"] == "it is a named pipe"


def test_a_file_that_grows_is_packed_as_long_as_it_was(space: Workspace, work: Path) -> None:
    (work / "log").write_bytes(b"a" * 3 * MIB)
    pieces = space.pack()
    got = [next(pieces), next(pieces)]
    with (work / "log").open("ab") as file:
        file.write(b"more")
    with tarfile.open(fileobj=io.BytesIO(b"".join([*got, *pieces]))) as tar:
        assert tar.getmember("log").size == 3 * MIB


def test_a_file_that_is_cut_short_ends_the_stream(space: Workspace, work: Path) -> None:
    (work / "log").write_bytes(b"a" * 3 * MIB)
    pieces = space.pack()
    next(pieces), next(pieces)
    os.truncate(work / "log", 10)
    with pytest.raises(Refused, match="changes"):
        list(pieces)


def test_only_folders_are_packed(space: Workspace) -> None:
    space.write("file", b"")
    for path in ("file", "missing"):
        with pytest.raises(Refused):
            list(space.pack(path))


# ── In ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("format_", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_an_archive_of_any_format_is_unpacked(space: Workspace, work: Path, format_: int) -> None:
    long = "l" * 90 if format_ == tarfile.USTAR_FORMAT else "l" * 200
    data = archive(
        folder("./d/"),
        member(f"d/{long}/file", b"1" * 1000, mtime=1_700_000_000),
        member("run", b"2", mode=0o6777),
        link("d/link", f"{long}/file"),
        hard_link("again", "run"),
        format_=format_,
    )
    assert unpack(space, data) == [f"/workspace/in/{name}" for name in (f"d/{long}/file", "run", "again")]
    inside = work / "in"
    assert (inside / "d" / "link").read_bytes() == b"1" * 1000
    assert (inside / "d" / long / "file").stat().st_mtime == 1_700_000_000
    assert stat.S_IMODE((inside / "run").stat().st_mode) == 0o755
    assert (inside / "again").read_bytes() == b"2"
    assert list(work.rglob(".ringfence*")) == []


def test_what_is_packed_is_unpacked(space: Workspace, work: Path) -> None:
    space.write("a/b/c", b"x" * 3 * MIB)
    space.write("a/run", b"", mode=0o755)
    (work / "a" / "b" / "up").symlink_to("../run")
    unpack(space, b"".join(space.pack("a")), "copy", max_bytes=4 * MIB)
    for made in work.rglob("*"):  # folders and links are as old as themselves, and a second may have passed
        os.utime(made, (1, 1), follow_symlinks=False)
    assert b"".join(space.pack("copy")) == b"".join(space.pack("a"))


def test_it_is_merged_with_what_is_there(space: Workspace, work: Path) -> None:
    space.write("in/d/old", b"old")
    space.write("in/d/file", b"old")
    unpack(space, archive(folder("d"), member("d/file", b"new"), member("d/new", b"new"), folder("d/e")))
    merged = work / "in" / "d"
    assert {path.name: path.read_text() for path in merged.iterdir() if path.is_file()} == {
        "old": "old",
        "file": "new",
        "new": "new",
    }
    assert (merged / "e").is_dir()


def test_the_last_of_two_members_of_a_name_counts(space: Workspace, work: Path) -> None:
    assert unpack(space, archive(member("a", b"1"), link("a", "b"), member("a", b"22"))) == ["/workspace/in/a"]
    assert (work / "in" / "a").read_text() == "22"


def sized(name: str, size: int) -> tuple[tarfile.TarInfo, bytes]:
    info, _ = member(name)
    info.pax_headers = {"size": str(size)}
    return info, b""


BAD: dict[str, Callable[[], bytes]] = {
    "absolute": lambda: archive(member("/etc/x")),
    "upwards": lambda: archive(member("a/../../x")),
    "inner_upwards": lambda: archive(folder("a"), member("a/../x")),
    "device": lambda: archive(member("dev", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "pipe": lambda: archive(member("pipe", type=tarfile.FIFOTYPE)),
    "sparse": lambda: archive(member("sparse", type=tarfile.GNUTYPE_SPARSE)),
    "unknown": lambda: archive(member("x", type=b"Z")),
    "link_out": lambda: archive(link("out", "../x")),
    "absolute_link": lambda: archive(link("out", "/etc/passwd")),
    "link_by_link": lambda: archive(folder("p"), link("p/one", ".."), link("two", "p/one/../..")),
    "through_link": lambda: archive(folder("d"), link("l", "d"), member("l/x", b"1")),
    "folder_through_link": lambda: archive(folder("d"), link("l", "d"), folder("l/x")),
    "hard_link_out": lambda: archive(hard_link("h", "../../secret")),
    "hard_link_absolute": lambda: archive(hard_link("h", "/etc/passwd")),
    "hard_link_to_link": lambda: archive(link("l", "x"), hard_link("h", "l")),
    "hard_link_to_nothing": lambda: archive(hard_link("h", "no")),
    "file_and_folder": lambda: archive(folder("d"), member("d", b"1")),
    "folder_and_file": lambda: archive(member("d", b"1"), member("d/x", b"1")),
    "control_characters": lambda: archive(member("a\nb")),
    "not_utf8": lambda: archive(member("a\udcff"), format_=tarfile.GNU_FORMAT),
    "long_name": lambda: archive(member("n" * 256)),
    "deep": lambda: archive(member("d/" * 70 + "x")),
    "long_record": lambda: archive(member("x", pax_headers={"path": "y" * 70_000})),
    "folder_with_content": lambda: archive(member("d", b"1" * 600, type=tarfile.DIRTYPE)),
    "size_beyond_end": lambda: archive(sized("x", 10**6)),
    "size_no_number": lambda: archive(member("x", pax_headers={"size": "-1"})),
    "gnu_sparse": lambda: archive(member("x", pax_headers={"GNU.sparse.major": "1"})),
    "cut": lambda: archive(member("a", b"1" * 600))[:1000],
    "cut_between": lambda: archive(member("a", b"1" * 600))[:1536],
    "nothing": lambda: b"",
    "no_archive": lambda: b"PK\x03\x04" + bytes(1020),
    "gzip": lambda: b"\x1f\x8b" + bytes(range(256)) * 4,
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_archive_is_refused_and_leaves_nothing(space: Workspace, work: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (work / "in").mkdir()
    (work / "in" / "kept").write_text("kept")
    good = member("good", b"good")
    data = BAD[name]()
    data = archive(good)[:1024] + data
    with pytest.raises(Refused) as refused:
        unpack(space, data, max_bytes=2 * MIB)
    assert refused.value.reason_code in ("bad_archive", "bad_path")
    assert [path.name for path in (work / "in").iterdir()] == ["kept"]
    assert (tmp_path / "secret").stat().st_nlink == 1


def test_more_than_is_allowed_is_refused(space: Workspace, work: Path) -> None:
    many = archive(*(member(str(number)) for number in range(11)))
    with pytest.raises(Refused, match="more than 10 files"):
        unpack(space, many, max_files=10)
    with pytest.raises(Refused, match="more than 999 bytes"):
        unpack(space, archive(member("a", bytes(600)), member("b", bytes(400))), max_bytes=999)
    records = tarfile.TarInfo.create_pax_global_header({"comment": "x"}) * 999
    with pytest.raises(Refused, match="more than 100 files"):
        unpack(space, records + archive(member("x")))
    assert [*(work / "in").glob("*")] == []


def test_files_and_folders_in_each_others_place_are_found_before_anything_moves(space: Workspace, work: Path) -> None:
    space.write("in/a", b"file")
    space.make_dir("in/z")
    for data in (archive(member("0", b"new"), member("z", b"")), archive(member("0", b"new"), folder("a"))):
        with pytest.raises(Refused) as refused:
            unpack(space, data)
        assert refused.value.reason_code == "exists"
        assert sorted(os.listdir(work / "in")) == ["a", "z"]


def test_a_link_in_the_place_of_a_folder_is_not_followed(space: Workspace, work: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (work / "in").mkdir()
    (work / "in" / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(Refused):
        unpack(space, archive(member("d/file", b"x")))
    assert os.listdir(tmp_path / "outside") == []


def test_a_source_that_fails_is_heard_and_leaves_nothing(space: Workspace, work: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield archive(member("a", b"1"))[:700]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        space.unpack("in", pieces(), max_bytes=MIB, max_files=10)
    assert [*(work / "in").glob("*")] == []


NAMES = st.sampled_from(["a", "b", "a/b", "a/b/c", "./a", "../x", "/x", "a/../b", "b/c/d", ".", ""])
TARGETS = st.sampled_from(["a", "b", "..", "../..", "a/..", "/etc", "b/../../..", "a/b", "."])
MEMBERS = st.one_of(
    st.builds(member, NAMES, st.binary(max_size=600), mode=st.integers(0, 0o7777)),
    st.builds(folder, NAMES, st.integers(0, 0o7777)),
    st.builds(link, NAMES, TARGETS),
    st.builds(hard_link, NAMES, TARGETS),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=tooling.examples(1.5))
@given(st.lists(MEMBERS, max_size=8), st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
def test_no_archive_reaches_out(tmp_path_factory: pytest.TempPathFactory, members: list, format_: int) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "work").mkdir()
    (base / "secret").write_text("secret")
    descriptor = os.open(base / "work", os.O_RDONLY)
    space = Workspace(descriptor, None)
    try:
        unpack(space, archive(*members, format_=format_))
    except Refused:
        assert os.listdir(base / "work" / "in") == []
    finally:
        os.close(descriptor)
    assert sorted(os.listdir(base)) == ["secret", "work"]
    assert (base / "secret").stat().st_nlink == 1
    inside = (base / "work" / "in").resolve()
    for path in inside.rglob("*"):
        assert path.is_symlink() or not path.stat().st_mode & 0o7022
        assert os.path.realpath(path) == str(inside) or os.path.realpath(path).startswith(f"{inside}/")


@given(st.binary(max_size=2000), st.integers(0, 3000), st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tail: bytes, at: int, patch: bytes) -> None:
    whole = archive(folder("d"), member("d/" + "n" * 150, b"1" * 700), link("l", "d"))
    for data in (tail, whole + tail, whole[:at] + patch + whole[at + len(patch) :]):
        reader = TarReader([data], max_bytes=10_000, max_files=20)
        try:
            for found in reader.members():
                assert sum(map(len, reader.content())) == found.size
        except Refused:
            continue


@pytest.mark.parametrize(
    ("target", "depth", "out"),
    [("a", 0, False), ("../a", 1, False), ("../a", 0, True), ("a/../b", 5, True), ("/a", 5, True), ("", 0, True)],
)
def test_links_are_judged_by_what_they_can_lead_to(target: str, depth: int, out: bool) -> None:
    assert leads_out(target, depth) is out
