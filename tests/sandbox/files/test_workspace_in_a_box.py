"""Files of a box in its own file system, which has an owner, limits and mounts."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.core.errors import Refused
from ringfence.core.model import Status
from ringfence.sandbox.files.paths import acting_as
from ringfence.sandbox.files.workspace import Workspace
from tests.sandbox.live_folder import LiveFolder, live_folder

MIB = 1024 * 1024


@pytest.fixture
def live() -> Iterator[LiveFolder]:
    with live_folder(size=8 * MIB, inodes=200) as folder:
        if folder is None:
            pytest.skip("this host makes no user and mount namespaces")
        yield folder


@pytest.fixture
def boxed(live: LiveFolder) -> Workspace:
    return Workspace(live.descriptor, live.owner, live.input_descriptor)


def reason(refused: pytest.ExceptionInfo[Refused]) -> str:
    return refused.value.reason_code


def test_files_belong_to_the_box(boxed: Workspace, live: LiveFolder) -> None:
    boxed.write("a/file", b"x")
    boxed.write("log", b"x", append=True)
    boxed.make_dir("made")
    boxed.unpack("unpacked", boxed.pack("a"), max_bytes=1000, max_files=10)
    boxed.rename("log", "renamed")
    owners = {os.stat(f"{live.path}/{name}").st_uid for name in ("a", "a/file", "made", "renamed", "unpacked/file")}
    assert owners == {os.getuid() if live.owner is None else live.owner}


def test_input_is_read_and_not_written(boxed: Workspace, live: LiveFolder) -> None:
    with acting_as(live.owner):
        os.close(os.open("data", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=live.input_descriptor))
    assert boxed.read("input/data") == b""
    for action in (
        lambda: boxed.write("input/new", b""),
        lambda: boxed.write("input/data", b"", append=True),
        lambda: boxed.remove("input/data"),
        lambda: boxed.make_dir("input/folder"),
        lambda: boxed.rename("input/data", "input/other"),
        lambda: boxed.unpack("input", boxed.pack("output"), max_bytes=1, max_files=1),
    ):
        with pytest.raises(Refused) as refused:
            action()
        assert reason(refused) == "read_only"


def test_mounts_stay_where_they_are(boxed: Workspace, live: LiveFolder) -> None:
    """From outside the kernel would let us take them away from the box."""
    boxed.write("other/x", b"")
    boxed.unpack(".", list(boxed.pack(".")), max_bytes=100, max_files=10)
    with acting_as(live.owner):
        os.mkdir("data", dir_fd=live.input_descriptor)
    for action in (
        lambda: boxed.remove("input"),
        lambda: boxed.rename("input", "moved"),
        lambda: boxed.rename("other", "input"),
        lambda: boxed.unpack(".", list(boxed.pack(".")), max_bytes=100, max_files=10),
    ):
        with pytest.raises(Refused) as refused:
            action()
        assert reason(refused) == "mounted"
    mounts = Path(f"/proc/{live.pid}/mountinfo").read_text()
    assert mounts.count("/tmp/input") == 2
    with pytest.raises(Refused) as refused:
        boxed.rename("other", "input/other")
    assert reason(refused) == "other_disk"


def test_a_full_disk_is_named_with_its_limit_and_leaves_nothing(boxed: Workspace) -> None:
    with pytest.raises(Refused, match="disk limit of 8 MiB") as refused:
        boxed.write("big", (bytes(MIB) for _ in range(9)))
    assert (reason(refused), refused.value.status) == ("disk", Status.FAILED)
    assert not boxed.exists("big")
    names = (f"many/{number}" for number in range(201))
    with pytest.raises(Refused, match="limit of 200 files"):
        all(boxed.write(name, b"") for name in names)
    boxed.remove("many")
    assert [entry.name for entry in boxed.list()] == ["input", "output", "tmp"]
    boxed.write("fits", bytes(7 * MIB))


def test_a_change_through_a_mapping_changes_the_hash(boxed: Workspace, live: LiveFolder) -> None:
    """The kernel leaves no trace of it in the file's times."""
    boxed.write("script.py", b"print(1)" * 1000)
    with acting_as(live.owner):
        descriptor = os.open(f"{live.path}/script.py", os.O_RDWR)
    with mmap.mmap(descriptor, 0) as mapped:
        mapped[6] = ord("2")
        time.sleep(0.02)
        before, times = boxed.tree_hash(), os.stat(f"{live.path}/script.py")
        mapped[6] = ord("3")
        assert os.stat(f"{live.path}/script.py").st_mtime_ns == times.st_mtime_ns
        assert boxed.tree_hash() != before
    os.close(descriptor)
