"""What a box with an image as its root can be asked for, and what is looked at before it is used."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import BoxSpec, Mount, Program, Programs
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import StaySpec
from ringfence.sandbox.process import image_root, mounting
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.zygote.template import DEVICES
from tests.boxing import need_boxes

SPEC = BoxSpec(image_root.COMMANDS)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"trees": (Path("/usr"),)}, "trees of the host"),
        ({"packages": (Path("/usr"),)}, "packages"),
        ({"installs": True}, "packages"),
        ({"programs": Programs(("ls",))}, "named programs"),
        ({"template": "data"}, "the template data"),
        ({"layout": "fresh"}, "an interpreter of ours"),
        ({"program": Program("python")}, "an interpreter of ours"),
    ],
)
def test_what_is_the_hosts_cannot_be_had_as_well(asked: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"cannot have {word}"):
        image_root.check(replace(SPEC, **asked), tmp_path)
    image_root.check(SPEC, tmp_path)


@pytest.mark.anyio
async def test_so_it_is_for_a_box_that_stays(backend: ProcessBackend, tmp_path: Path) -> None:
    need_boxes()
    with pytest.raises(ValueError, match="an interpreter of ours"):
        await backend.open(StaySpec(root=tmp_path, setup="x = 1"))
    with pytest.raises(ValueError, match="does not exist"):
        await backend.open(StaySpec(root=tmp_path / "missing"))


def test_a_mount_needs_a_way_without_links(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").symlink_to("/")
    for at in ("/a", "/a/b", "/a/b/new", "/new/one"):
        image_root.check(replace(SPEC, mounts=(Mount("/usr", at),)), tmp_path)
    for at in ("/a/b/c", "/a/b/c/usr"):
        with pytest.raises(ValueError, match="/a/b/c is a link to '/'"):
            image_root.check(replace(SPEC, mounts=(Mount("/usr", at),)), tmp_path)


def test_a_root_is_a_folder_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o755)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("root")
    placed = image_root.place(tmp_path / "root")
    assert (placed.host, placed.at, placed.writable) == (str(tmp_path / "root"), "/", False)
    for name, problem in (("file", "not a folder"), ("link", "a link stands in it"), ("missing", "does not exist")):
        with pytest.raises(ValueError, match=problem):
            image_root.place(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="a box of an ordinary user is that user to files")
def test_what_only_its_owner_may_see_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o700)
    with pytest.raises(ValueError, match="only its owner may read it"):
        image_root.place(tmp_path / "root")


def line(at: str, how: str = "ro,nosuid,nodev", kind: str = "tmpfs") -> str:
    return f"60 59 0:47 / {at} {how} - {kind} none rw"


GOOD = [
    line("/", kind="overlay"),
    line("/dev"),
    *(line(f"/dev/{name}", "ro,nosuid,noexec") for name in DEVICES),
    line("/workspace", "rw,nosuid"),
    line("/workspace/input"),
    line(r"/my\040data", "rw,nosuid"),
    line(r"/my\040data/below", "rw,nosuid"),
    line("/proc/mounts", "rw,nosuid", "proc"),
    line("/proc/meminfo"),
    line("/dev/pts", "rw,nosuid", "devpts"),
    line("/sys/devices/system/cpu"),
    line("/proc", "rw,nosuid", "proc"),
]


def test_a_box_is_only_used_as_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "rw").mkdir()
    placed = mounting.place([Mount(str(tmp_path), "/lent"), Mount(str(tmp_path / "rw"), "/my data", "rw")])

    def found(*lines: str) -> set[str]:
        """What is lacking, where the kernel says this."""
        return {name for name, look in image_root.judge("\n".join(lines).encode(), placed).items() if not look.on}

    assert found(*GOOD) == set()
    assert found(*GOOD, line("/usr", kind="ext4")) == {"trees_read_only"}
    assert found(line("/"), *GOOD[1:]) == {"own_root"}
    assert found(line("/", "rw,nosuid", "overlay"), *GOOD[1:]) == {"read_only_root", "trees_read_only"}
    assert found(*GOOD, line("/", kind="ext4")) == {"own_root"}
    assert found(GOOD[0], line("/dev", "rw,nosuid"), *GOOD[2:]) == {"trees_read_only"}
    assert found(GOOD[0], *GOOD[2:]) == {"own_devices"}
    assert found(*GOOD, line("/dev/sda", kind="devtmpfs")) == {"trees_read_only"}
    assert found(*GOOD, line("/lent"), line("/lent/below")) == set()
    assert found(*GOOD, line("/lent", "rw,nosuid")) == {"trees_read_only"}
    assert found(*GOOD, line("/lent"), line("/lent/below", "ro")) == {"trees_read_only"}
    assert found(*GOOD[:-1]) == {"proc"}
    assert found(*GOOD, line("/workspace/proc", kind="proc")) == {"proc"}
    assert found() >= {"own_root", "read_only_root", "own_devices", "proc"}


def test_one_that_is_gone_cannot_be_looked_at() -> None:
    with pytest.raises(Unavailable, match="could not be looked at"):
        image_root.look(2**30, [])
