"""Where our own group is, and whose a group is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.sandbox.process.hierarchy import Folder, Owner, find, left_behind, own_folders

V1 = """\
25 30 0:23 / /sys rw,nosuid shared:7 - sysfs sysfs rw
34 33 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
37 33 0:34 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
42 33 0:39 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
43 33 0:40 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def paths(cgroup: str, mountinfo: str) -> dict[str, set[str]]:
    return {folder.path: set(controllers) for folder, controllers in own_folders(cgroup, mountinfo)}


def test_each_hierarchy_has_a_path_of_its_own() -> None:
    cgroup = "9:name=systemd:/a\n4:memory:/user/some one:x\n1:cpu,cpuacct:/\n0::/app\n"
    assert paths(cgroup, V1) == {
        "/sys/fs/cgroup/cpu,cpuacct": {"cpu", "cpuacct"},
        "/sys/fs/cgroup/memory/user/some one:x": {"memory"},
        "/sys/fs/cgroup/systemd/a": {"name=systemd"},
        "/sys/fs/cgroup/unified/app": set(),
    }
    assert [folder for folder, _ in own_folders(cgroup, V1) if folder.v2] == [
        Folder("/sys/fs/cgroup/unified/app", True, "/sys/fs/cgroup/unified")
    ]


def test_a_container_sees_its_own_part_of_a_hierarchy() -> None:
    mounted = "37 33 0:34 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert paths("4:memory:/docker/abc\n", mounted) == {"/sys/fs/cgroup/memory": {"memory"}}
    assert paths("4:memory:/docker/abc/d\n", mounted) == {"/sys/fs/cgroup/memory/d": {"memory"}}


@pytest.mark.parametrize("path", ["/docker/other", "/docker/abcd", "/", "/../x", "/docker/abc/../.."])
def test_a_group_that_the_mount_does_not_show_is_not_found(path: str) -> None:
    mounted = "37 33 0:34 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert paths(f"4:memory:{path}\n", mounted) == {}


def test_mount_points_are_unescaped_and_the_first_that_shows_us_counts() -> None:
    mounted = (
        "1 1 0:1 /x /hidden rw - cgroup2 cgroup2 rw\n"
        "1 1 0:1 / /a\\040b rw opt:1 opt:2 - cgroup2 cgroup2 rw\n"
        "1 1 0:1 / /second rw - cgroup2 cgroup2 rw\n"
    )
    assert paths("0::/\n", mounted) == {"/a b": set()}


@given(st.text(alphabet=" /-\\0147abcgroup2,=\n"))
def test_any_list_of_mounts_can_be_read(mountinfo: str) -> None:
    own_folders("0::/\n1:memory:/a\n", mountinfo)


def test_a_host_without_cgroups_says_so(tmp_path: Path) -> None:
    found, why = find(str(tmp_path), Owner.of_this_process().group("probe"))
    assert found == {}
    assert set(why) == {"memory", "pids", "cpu", "freezer"}
    assert "cannot be read" in why["memory"]
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").touch()
    (tmp_path / "self" / "mountinfo").touch()
    assert find(str(tmp_path), "probe") == ({}, dict.fromkeys(why, "this host has no such cgroup hierarchy"))


def test_the_name_of_a_group_tells_who_made_it() -> None:
    owner = Owner.of_this_process()
    assert owner.group("box-7").startswith(f"ringfence-{os.getpid()}-")
    assert Owner.of_group(owner.group("box-7")) == owner
    assert owner.lives()


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65, "ä", "a\n"])
def test_a_group_needs_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a group"):
        Owner.of_this_process().group(name)


@given(st.text())
def test_other_names_are_not_ours(name: str) -> None:
    assert Owner.of_group(name) is None
    assert Owner.of_group(f"ringfence-{name}") is None


def test_a_process_that_ended_does_not_live_and_neither_does_its_number() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    us = Owner.of_this_process()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    # Not reaped yet: its number is taken, and nothing runs.
    assert not Owner(ended.pid, us.start, us.pid_namespace).lives()
    ended.wait()
    assert not Owner(ended.pid, us.start, us.pid_namespace).lives()
    assert not Owner(us.pid, us.start - 1, us.pid_namespace).lives()
    assert not Owner(2**40, us.start, us.pid_namespace).lives()


def test_nothing_is_said_of_processes_elsewhere() -> None:
    us = Owner.of_this_process()
    assert Owner(2**22 + 1, us.start, us.pid_namespace + 1).lives()


def test_only_groups_of_dead_makers_are_left_behind(tmp_path: Path) -> None:
    us = Owner.of_this_process()
    dead = Owner(us.pid, us.start - 1, us.pid_namespace)
    for name in (us.group("box"), dead.group("box"), f"other/deep/{dead.group('box')}", "ringfence-1-2-x", "ringfence"):
        (tmp_path / name).mkdir(parents=True)
    found = {os.path.relpath(path, tmp_path) for path in left_behind(str(tmp_path))}
    assert found == {dead.group("box"), f"other/deep/{dead.group('box')}"}
