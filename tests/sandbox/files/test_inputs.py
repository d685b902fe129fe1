"""What goes into a box, and what is refused before anything runs."""

from __future__ import annotations

import hashlib
import os
import resource
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import FileFact, Input
from ringfence.sandbox.files import paths
from ringfence.sandbox.files.inputs import INPUT, check_inputs, put_inputs
from tests.sandbox.swapping import swapping

not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


@pytest.fixture
def box(tmp_path: Path) -> Path:
    folder = tmp_path / "box"
    folder.mkdir()
    return folder


def put(box: Path, *inputs: Input) -> tuple[FileFact, ...]:
    root = os.open(box, os.O_PATH | os.O_DIRECTORY)
    try:
        return put_inputs(root, inputs)
    finally:
        os.close(root)


def fact(name: str, data: bytes) -> FileFact:
    return FileFact(f"{INPUT}/{name}", len(data), hashlib.sha256(data).hexdigest())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_bytes_files_and_folders_are_put_there(box: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "tool").write_text("#!")
    (source / "deep" / "tool").chmod(0o4700)
    (source / "data").write_bytes(bytes(600_000))
    (source / "data").chmod(0o600)
    before = os.umask(0o077)
    try:
        inputs = (Input("a/b.txt", b"b"), Input("one", source / "data"), Input("all", source))
        check_inputs(inputs, None)
        facts = put(box, *inputs)
    finally:
        os.umask(before)
    big = bytes(600_000)
    assert facts == (fact("a/b.txt", b"b"), fact("all/data", big), fact("all/deep/tool", b"#!"), fact("one", big))
    assert (box / "all" / "data").read_bytes() == big
    # The box runs as somebody else and must be able to read.
    assert {mode(box / name) for name in ("a", "all", "all/deep", "all/deep/empty")} == {0o755}
    assert {mode(box / name) for name in ("a/b.txt", "all/data", "one")} == {0o644}
    assert mode(box / "all/deep/tool") == 0o755


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "..", "a/../../b", "a//b", "a/", "./a", ".", "a\0b", "a\nb", "\udcff", "x" * 256]
)
def test_names_must_stay_inside(box: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"^input name .* (must be|cannot be|is too)"):
        check_inputs((Input(name, b""),), None)
    with pytest.raises(ValueError):
        put(box, Input(name, b""))
    assert list(box.iterdir()) == []


@given(st.text(max_size=30))
def test_any_name_is_either_refused_or_lies_below(name: str) -> None:
    try:
        check_inputs((Input(name, b""),), None)
    except ValueError:
        return
    assert os.path.normpath(os.path.join(INPUT, name)).startswith(INPUT + "/")


def test_too_deep_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="too many folders"):
        check_inputs((Input("a/" * 40 + "b", b""),), None)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b/c", "a/b")])
def test_names_must_differ(box: Path, names: tuple[str, ...]) -> None:
    inputs = tuple(Input(name, b"x") for name in names)
    with pytest.raises(ValueError, match="same name"):
        check_inputs(inputs, None)
    with pytest.raises(ValueError):
        put(box, *inputs)


def test_what_is_not_there_is_named(box: Path, tmp_path: Path) -> None:
    missing = Input("a", tmp_path / "missing")
    with pytest.raises(ValueError, match=r"input '.*/missing' does not exist"):
        check_inputs((missing,), None)
    with pytest.raises(ValueError, match="does not exist"):
        put(box, missing)
    with pytest.raises(ValueError, match="NUL"):
        check_inputs((Input("a", Path("a\0b")),), None)


@not_as_root
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").touch(0o000)
    with pytest.raises(ValueError, match=r"/locked' cannot be read: Permission denied"):
        check_inputs((Input("a", tmp_path / "locked"),), None)


def test_special_files_are_refused_without_waiting(box: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source, what in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/null"), "a device")):
        with pytest.raises(ValueError, match=f"is {what}, neither a file nor a folder"):
            check_inputs((Input("a", source),), None)
        with pytest.raises(ValueError, match=what):
            put(box, Input("a", source))


@pytest.mark.parametrize("openat2", [True, False])
def test_an_input_that_became_a_link_after_it_was_named_is_not_followed(
    box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openat2: bool
) -> None:
    monkeypatch.setattr(paths, "has_openat2", lambda: openat2)
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "data").write_text("harmless")
    given = Input("a", source / "deep" / "data")
    check_inputs((given,), None)
    assert put(box, given) == (fact("a", b"harmless"),)
    private = tmp_path / "private"
    private.mkdir()
    (private / "data").write_text("private")
    (source / "deep" / "data").unlink()
    (source / "deep" / "data").symlink_to(private / "data")
    for look in (lambda: check_inputs((given,), None), lambda: put(box, replace(given, name="b"))):
        with pytest.raises(ValueError, match="is a symbolic link, neither a file nor a folder"):
            look()
    (source / "deep" / "data").unlink()
    (source / "deep").rmdir()
    (source / "deep").symlink_to(private)
    for look in (lambda: check_inputs((given,), None), lambda: put(box, replace(given, name="c"))):
        with pytest.raises(ValueError, match=r"link by now, which is not followed|cannot be read: Not a directory"):
            look()
    assert not [path for path in box.rglob("*") if path.is_file() and "private" in path.read_text()]


def test_no_file_behind_a_link_is_put_in_while_another_program_swaps_it_with_the_input(
    box: Path, tmp_path: Path
) -> None:
    (tmp_path / "private").write_text("private")
    (tmp_path / "data").write_text("harmless")
    (tmp_path / "link").symlink_to(tmp_path / "private")
    seen = set()
    with swapping(tmp_path / "data", tmp_path / "link"):
        for number in range(300):
            with suppress(ValueError):
                seen.add(put(box, Input(f"a{number}", tmp_path / "data"))[0].sha256)
    assert seen <= {fact("a", b"harmless").sha256}


def test_a_link_that_the_operator_names_is_followed_but_none_inside_a_folder(box: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "data").write_text("x")
    (tmp_path / "link").symlink_to(source)
    assert put(box, Input("a", tmp_path / "link", links=True)) == (fact("a/data", b"x"),)
    (source / "sneaky").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="input 'b': b/sneaky: it is a symbolic link, which cannot be an input"):
        put(box, Input("b", source))


def test_a_folder_with_a_name_that_deceives_is_refused(box: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "new\nline").touch()
    with pytest.raises(ValueError, match=r"input 'a': a/new\\nline: its name has control characters"):
        put(box, Input("a", source))


def test_an_output_folder_may_be_there_or_yet_be_made(tmp_path: Path) -> None:
    check_inputs((), tmp_path)
    check_inputs((), tmp_path / "yet" / "to be made")
    check_inputs((), None)


def test_an_output_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for output in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        with pytest.raises(ValueError, match=r"output folder .* cannot be used: .* is not a folder"):
            check_inputs((), output)
    with pytest.raises(ValueError, match="NUL"):
        check_inputs((), Path("a\0b"))


@not_as_root
def test_an_output_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(0o500)
    for output in (tmp_path / "locked", tmp_path / "locked" / "below"):
        with pytest.raises(ValueError, match="cannot be written"):
            check_inputs((), output)


READ_ONLY = """
import ctypes, os, pathlib, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(flags):
    if libc.mount(b"none", sys.argv[1].encode(), b"tmpfs", flags, None):
        sys.exit(77)
if libc.unshare(0x10000000 | 0x00020000):
    sys.exit(77)
mount(1)
from ringfence.sandbox.files.inputs import check_inputs
try:
    check_inputs((), pathlib.Path(sys.argv[1]))
except ValueError as problem:
    sys.exit(0 if "cannot be written" in str(problem) else 1)
sys.exit(2)
"""


def test_an_output_folder_on_a_read_only_file_system_is_refused_even_for_root(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", READ_ONLY, str(tmp_path)], check=False)
    if run.returncode == 77:
        pytest.skip("this host gives no private mounts")
    assert run.returncode == 0


def test_inputs_that_do_not_fit_are_refused(box: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(10_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, hard))
    try:
        for big in (Input("a", bytes(10_000)), Input("b", tmp_path / "big")):
            with pytest.raises(ValueError, match="cannot be put into the box: File too large"):
                put(box, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
