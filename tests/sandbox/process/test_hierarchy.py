"""Where our own group is, and whose a group is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.sandbox.process.cgroups import hierarchy
from ringfence.sandbox.process.cgroups.cgroup import Cgroups
from ringfence.sandbox.process.cgroups.cgroupfs import write
from ringfence.sandbox.process.cgroups.hierarchy import (
    LEAF,
    CgroupFolder,
    DelegationRefused,
    GroupOwner,
    Leaving,
    Systemd,
    find,
    left_behind,
    own_folders,
)
from tests.sandbox.process.test_cgroup_v2 import FILES, Kernel

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
        CgroupFolder("/sys/fs/cgroup/unified/app", True, "/sys/fs/cgroup/unified")
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
    found, why = find(str(tmp_path), GroupOwner.of_this_process().group("probe"))
    assert found == {}
    assert set(why) == {"memory", "pids", "cpu", "freezer"}
    assert "cannot be read" in why["memory"]
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").touch()
    (tmp_path / "self" / "mountinfo").touch()
    assert find(str(tmp_path), "probe") == ({}, dict.fromkeys(why, "this host has no such cgroup hierarchy"))


def test_the_name_of_a_group_tells_who_made_it() -> None:
    owner = GroupOwner.of_this_process()
    assert owner.group("box-7").startswith(f"ringfence-{os.getpid()}-")
    assert GroupOwner.of_group(owner.group("box-7")) == owner
    assert owner.lives()


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 65, "ä", "a\n"])
def test_a_group_needs_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a group"):
        GroupOwner.of_this_process().group(name)


@given(st.text())
def test_other_names_are_not_ours(name: str) -> None:
    assert GroupOwner.of_group(name) is None
    assert GroupOwner.of_group(f"ringfence-{name}") is None


def test_a_process_that_ended_does_not_live_and_neither_does_its_number() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    us = GroupOwner.of_this_process()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    # Not reaped yet: its number is taken, and nothing runs.
    assert not GroupOwner(ended.pid, us.start, us.pid_namespace).lives()
    ended.wait()
    assert not GroupOwner(ended.pid, us.start, us.pid_namespace).lives()
    assert not GroupOwner(us.pid, us.start - 1, us.pid_namespace).lives()
    assert not GroupOwner(2**40, us.start, us.pid_namespace).lives()


def test_nothing_is_said_of_processes_elsewhere() -> None:
    us = GroupOwner.of_this_process()
    assert GroupOwner(2**22 + 1, us.start, us.pid_namespace + 1).lives()


def test_only_groups_of_dead_makers_are_left_behind(tmp_path: Path) -> None:
    us = GroupOwner.of_this_process()
    dead = GroupOwner(us.pid, us.start - 1, us.pid_namespace)
    for name in (us.group("box"), dead.group("box"), f"other/deep/{dead.group('box')}", "ringfence-1-2-x", "ringfence"):
        (tmp_path / name).mkdir(parents=True)
    found = {os.path.relpath(path, tmp_path) for path in left_behind(str(tmp_path))}
    assert found == {dead.group("box"), f"other/deep/{dead.group('box')}"}


# ── Groups that are delegated to us: by a service, a container, or a manager that is asked ──


CONTROLLERS = "cpuset cpu io memory pids\n"


class Host(Kernel):
    """One whose groups hand controllers down only while they hold no process."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path, patch)
        (self.top / "cgroup.controllers").write_text(CONTROLLERS)
        (self.own / "cgroup.procs").write_text(f"{os.getpid()}\n")
        patch.setattr(hierarchy, "write", self.write)

    def group(self, path: Path, processes: str = "") -> Path:
        path.mkdir()
        for name, text in (*FILES[""].items(), ("cgroup.controllers", CONTROLLERS), ("cgroup.subtree_control", "")):
            (path / name).write_text(text)
        (path / "cgroup.procs").write_text(processes)
        return path

    def sit_in(self, path: Path) -> None:
        self.own = path
        inside = path.relative_to(self.top)
        (self.proc / "self" / "cgroup").write_text(f"0::/{'' if inside == Path() else inside}\n")

    def mkdir(self, path: str, *rest: object) -> None:
        made = Path(path)
        self.really_mkdir(path)
        if (made.parent / "cgroup.subtree_control").exists():
            handed = (made.parent / "cgroup.subtree_control").read_text().split()
            for controller in ("", "any", *handed):
                for name, text in FILES[controller].items():
                    (made / name).write_text(text)
            (made / "cgroup.controllers").write_text(" ".join(handed))
            (made / "cgroup.subtree_control").write_text("")

    def rmdir(self, path: str) -> None:
        for file in Path(path).iterdir():
            file.unlink()
        self.really_rmdir(path)

    def write(self, path: str, text: str) -> None:
        group, name = Path(path).parent, Path(path).name
        if name == "cgroup.procs":
            for other in self.top.rglob("cgroup.procs"):
                left = [pid for pid in other.read_text().split() if pid != text]
                other.write_text("".join(f"{pid}\n" for pid in left))
            with open(path, "a") as file:
                file.write(f"{text}\n")
            if text == str(os.getpid()):
                self.sit_in(group)
            return
        assert name == "cgroup.subtree_control"
        if text[0] == "+" and (group / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        enabled = {*(group / name).read_text().split(), text[1:]} - ({text[1:]} if text[0] == "-" else set())
        write(path, " ".join(sorted(enabled)))


class Manager:
    """Moves us into a scope, or says why not."""

    def __init__(self, host: Host, refusal: str = "") -> None:
        self.host = host
        self.refusal = refusal
        self.asked: list[str] = []

    def move_to_scope(self, leaving: Leaving, moved: Callable[[], bool]) -> None:
        self.asked.append(leaving.left[-1])
        if self.refusal:
            raise DelegationRefused(self.refusal, "run this")
        scope = self.host.group(self.host.top / "ringfence-1.scope")
        assert not moved()
        self.host.write(f"{scope}/cgroup.procs", str(os.getpid()))
        assert moved()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def detect(host: Host, manager: Manager) -> Cgroups:
    return Cgroups.detect(str(host.proc), manager)


def processes(group: Path) -> list[str]:
    return (group / "cgroup.procs").read_text().split()


def mark(path: Path) -> None:
    try:
        os.setxattr(path, "user.delegate", b"1")
    except OSError:
        pytest.skip("the file system of temporary files keeps no extended attributes")


def test_a_manager_gives_us_a_scope_in_a_leaf_of_which_we_sit(host: Host) -> None:
    manager = Manager(host)
    found = detect(host, manager)
    scope = host.top / "ringfence-1.scope"
    assert found.available == {"memory", "pids", "cpu", "freezer"} and found.why == {}
    assert manager.asked == [str(host.top / "app")]
    assert processes(scope / LEAF) == [str(os.getpid())] and processes(scope) == []
    assert found.make("box").paths == (str(scope / found._owner.group("box")),)


def test_who_sits_in_such_a_leaf_asks_nobody(host: Host) -> None:
    detect(host, Manager(host))
    again = Manager(host)
    found = detect(host, again)
    assert found.available == {"memory", "pids", "cpu", "freezer"}
    assert again.asked == []


def test_a_leaf_of_somebody_else_is_not_taken_for_ours(host: Host) -> None:
    other = host.group(host.top / "other")
    host.sit_in(host.group(other / LEAF, f"{os.getpid()}\n"))
    manager = Manager(host)
    assert "memory" in detect(host, manager).available
    assert manager.asked == [str(other / LEAF)]


def test_a_delegated_group_is_emptied_into_a_leaf(host: Host) -> None:
    mark(host.own)
    (host.own / "cgroup.procs").write_text(f"77\n{os.getpid()}\n")
    app, manager = host.own, Manager(host)
    found = detect(host, manager)
    assert found.available == {"memory", "pids", "cpu", "freezer"}
    assert manager.asked == []
    assert processes(app / LEAF) == ["77", str(os.getpid())]


def test_the_first_group_of_a_container_is_emptied_into_a_leaf(host: Host) -> None:
    (host.top / "cgroup.type").write_text("domain\n")
    (host.top / "cgroup.subtree_control").write_text("")
    (host.own / "cgroup.procs").write_text("")
    (host.top / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    host.sit_in(host.top)
    found = detect(host, Manager(host))
    assert found.available == {"memory", "pids", "cpu", "freezer"}
    assert processes(host.top / LEAF) == ["1", str(os.getpid())]


def test_processes_that_cannot_be_moved_are_said(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(host.own)

    def refuse(path: str, text: str) -> None:
        if path.endswith(f"/{LEAF}/cgroup.procs"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        host.write(path, text)

    monkeypatch.setattr(hierarchy, "write", refuse)
    why = detect(host, Manager(host)).why
    assert why["memory"].startswith(
        "our group cannot be emptied into a leaf: Operation not permitted; see docs/hosts.md"
    )


def test_we_leave_no_group_that_somebody_has_bounded(host: Host) -> None:
    (host.own / "memory.max").write_text("1073741824\n")
    manager = Manager(host)
    found = detect(host, manager)
    assert "memory" not in found.available and manager.asked == []
    assert "memory.max of app is 1073741824" in found.why["memory"]
    assert "add `Delegate=yes`" in found.why["memory"]


def test_what_the_manager_says_is_the_reason(host: Host) -> None:
    found = detect(host, Manager(host, "there is no bus"))
    assert found.why["memory"] == "there is no bus; run this"
    assert found.available == {"freezer"}


def test_nobody_is_asked_for_controllers_that_the_hierarchy_does_not_have(host: Host) -> None:
    (host.top / "cgroup.controllers").write_text("\n")
    (host.own / "cgroup.controllers").write_text("\n")
    manager = Manager(host)
    assert detect(host, manager).available == {"freezer"}
    assert manager.asked == []


@pytest.mark.parametrize(
    ("own", "user", "slice_", "left"),
    [
        ("user.slice/user-7.slice/session-3.scope", 7, None, ["session-3.scope"]),
        ("user.slice/user-7.slice/user@7.service/app.slice/a.scope", 7, "app.slice", ["a.scope"]),
        ("user.slice/user-7.slice/user@7.service/b.slice/b-c.slice/d.service/e", 7, "b-c.slice", ["d.service", "e"]),
        ("agents.slice/run.service", 7, None, ["agents.slice", "run.service"]),
        ("user.slice/user-8.slice/session-3.scope", 7, None, ["user.slice", "user-8.slice", "session-3.scope"]),
        ("system.slice/run.service", 0, "system.slice", ["run.service"]),
        ("user.slice/user-0.slice/session-1.scope", 0, "user-0.slice", ["session-1.scope"]),
        ("init.scope", 0, None, ["init.scope"]),
    ],
)
def test_what_is_left_is_known_before_anybody_moves(own: str, user: int, slice_: str | None, left: list[str]) -> None:
    leaving = Leaving.of(f"/cg/{own}", "/cg", user)
    assert leaving.slice == slice_
    assert [path.rpartition("/")[2] for path in leaving.left] == left
    assert leaving.left[-1] == f"/cg/{own}"


def test_the_bounds_of_a_slice_that_would_be_left_count_too(host: Host) -> None:
    agents = host.group(host.top / "agents.slice")
    (agents / "memory.high").write_text("4096\n")
    host.sit_in(host.group(agents / "run.service", f"{os.getpid()}\n"))
    manager = Manager(host)
    found = detect(host, manager)
    if os.geteuid() == 0:  # its scope stays in the slice
        assert "memory" in found.available
    else:
        assert manager.asked == []
        assert "memory.high of agents.slice is 4096" in found.why["memory"]


# ── systemd ───────────────────────────────────────────────────────────────────────────────────────

NOWHERE = Leaving(None, ())
_BUSCTL = """#!/bin/sh
printf '%s\\n' "XDG_RUNTIME_DIR=$XDG_RUNTIME_DIR" "$@" > {folder}/said
{then}
"""


def systemd(folder: Path, then: str = "", state: str = "active") -> Systemd:
    (folder / "systemd" / "system").mkdir(parents=True)
    (folder / "dbus").mkdir()
    (folder / "dbus" / "system_bus_socket").touch()
    (folder / "user" / str(os.geteuid())).mkdir(parents=True)
    (folder / "user" / str(os.geteuid()) / "bus").touch()
    for name, text in (("busctl", _BUSCTL.format(folder=folder, then=then)), ("systemctl", f"#!/bin/sh\necho {state}")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return Systemd(str(folder), (str(folder / "busctl"), str(folder / "systemctl")))


def test_systemd_is_asked_for_a_delegated_scope_with_us_in_it(tmp_path: Path) -> None:
    manager = systemd(tmp_path)
    own = tmp_path / "a.slice" / "b.slice" / "c.service"
    own.mkdir(parents=True)
    (own / "pids.max").write_text("4711\n")
    manager.move_to_scope(Leaving.of(str(own), str(tmp_path), os.geteuid()), lambda: True)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[said.index("TasksMax") + 2] == "4711"
    assert "StartTransientUnit" in said and "org.freedesktop.systemd1.Manager" in said
    at = said.index("Delegate")
    assert said[at : at + 3] == ["Delegate", "b", "true"]
    at = said.index("PIDs")
    assert said[at : at + 4] == ["PIDs", "au", "1", str(os.getpid())]
    if os.geteuid() == 0:
        assert "--system" in said
        assert said[said.index("Slice") + 2] == "b.slice"
    else:
        assert "--user" in said and "Slice" not in said
        assert said[0] == f"XDG_RUNTIME_DIR={tmp_path}/user/{os.geteuid()}"


def test_what_systemd_says_no_with_is_said(tmp_path: Path) -> None:
    manager = systemd(tmp_path, "echo 'Call failed: Access denied' >&2; exit 1")
    with pytest.raises(DelegationRefused, match="no group of our own: Call failed: Access denied"):
        manager.move_to_scope(NOWHERE, lambda: False)


def test_who_is_never_moved_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "_ASK_SECONDS", 0.0)
    with pytest.raises(DelegationRefused, match="its state is failed"):
        systemd(tmp_path, state="failed").move_to_scope(NOWHERE, lambda: False)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("systemd/system", "does not run systemd"),
        ("busctl", "is missing"),
        ("bus", "no system bus runs" if os.geteuid() == 0 else "loginctl enable-linger"),
    ],
)
def test_a_host_without_a_manager_says_what_is_missing(tmp_path: Path, gone: str, says: str) -> None:
    manager = systemd(tmp_path)
    bus = "dbus/system_bus_socket" if os.geteuid() == 0 else f"user/{os.geteuid()}/bus"
    path = tmp_path / (bus if gone == "bus" else gone)
    path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(DelegationRefused, match=says):
        manager.move_to_scope(NOWHERE, lambda: True)
