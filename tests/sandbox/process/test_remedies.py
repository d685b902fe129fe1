"""What `ringfence host --fix` would change, in a folder that stands for the root; nothing of this host is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.core.box import BoxSpec, Program
from ringfence.sandbox.process.host import info, remedies
from ringfence.sandbox.process.host.info import HostInfo
from ringfence.sandbox.process.host.remedies import (
    Cause,
    Change,
    RunCommand,
    User,
    WriteFile,
    cause_of_groups,
    make,
    plan,
)
from tests.sandbox import comparing

pytestmark = pytest.mark.anyio

ALICE = User(1000, "alice")
HOST = HostInfo(settings={"user.max_user_namespaces": 0, "user.max_net_namespaces": 60_000})


class Recorder:
    """Runs nothing."""

    def __init__(self, problem: str = "") -> None:
        self.commands: list[str] = []
        self._problem = problem

    def __call__(self, words: Sequence[str]) -> str:
        self.commands.append(" ".join(words))
        return self._problem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("proc/sys/kernel", "proc/sys/user", "usr/bin", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def mend(root: Path, *causes: Cause, user: User | None = ALICE, host: HostInfo = HOST) -> list[str]:
    """What was run."""
    runner = Recorder()
    for change in plan(causes, host, user, root):
        assert make(change, root, runner) == ""
    return runner.commands


def test_settings_hold_now_and_after_a_boot(root: Path) -> None:
    assert mend(root, "userns_clone") == []
    assert (root / "proc/sys/kernel/unprivileged_userns_clone").read_text() == "1\n"
    assert mend(root, "max_namespaces") == []
    assert (root / "proc/sys/user/max_user_namespaces").read_text() == "15000\n"
    assert not (root / "proc/sys/user/max_net_namespaces").exists(), "that one is high enough"
    lines = (root / remedies.SETTINGS).read_text().splitlines()
    assert lines[1:] == ["kernel.unprivileged_userns_clone = 1", "user.max_user_namespaces = 15000"]
    assert lines[0].startswith("#")


def test_what_is_done_is_not_done_again(root: Path) -> None:
    causes: tuple[Cause, ...] = ("userns_clone", "apparmor", "delegation")
    mend(root, *causes)
    left = plan(causes, HOST, ALICE, root)
    assert [change.path for change in left if isinstance(change, WriteFile)] == [
        "proc/sys/kernel/unprivileged_userns_clone"
    ]


def test_the_profile_and_its_launcher_are_installed_and_loaded(root: Path) -> None:
    assert mend(root, "apparmor") == ["apparmor_parser --replace /etc/apparmor.d/ringfence"]
    profile = (root / remedies.PROFILE).read_text()
    assert f"profile ringfence {info.LAUNCHER} flags=(unconfined) {{\n  userns," in profile
    launcher = root / info.LAUNCHER.lstrip("/")
    assert launcher.stat().st_mode & 0o7777 == 0o755
    assert (root / remedies.PROFILE).stat().st_mode & 0o7777 == 0o644


def test_the_launcher_executes_what_it_is_given_with_nothing_added(root: Path) -> None:
    mend(root, "apparmor")
    command = [str(root / info.LAUNCHER.lstrip("/")), "/usr/bin/env"]
    shown = subprocess.run(command, env={"LANG": "C.UTF-8"}, capture_output=True, text=True, check=True)
    assert shown.stdout == "LANG=C.UTF-8\n"


def test_zygotes_of_ordinary_users_are_started_through_the_launcher(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = str(root / info.LAUNCHER.lstrip("/"))
    monkeypatch.setattr(info, "LAUNCHER", launcher)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert info.with_launcher(["python"]) == ["python"], "there is none"
    os.makedirs(os.path.dirname(launcher))
    shutil.copy(Path(info.__file__).with_name("launcher.sh"), launcher)
    os.chmod(launcher, 0o755)
    assert info.with_launcher(["python"]) == [launcher, "python"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert info.with_launcher(["python"]) == ["python"], "root needs none"


async def test_a_box_is_made_through_the_launcher(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        pytest.skip("zygotes of root are not started through it; an ordinary user runs this")
    launcher = root / "launcher"
    told = root / "told"
    script = Path(info.__file__).with_name("launcher.sh").read_text()
    launcher.write_text(script.replace("exec ", f"echo $# > {told}\nexec "))
    launcher.chmod(0o755)
    monkeypatch.setattr(info, "LAUNCHER", str(launcher))
    async for backend in comparing.opened():
        report = await backend.run(BoxSpec(Program("python", b"import os; print(sorted(os.environ))")))
        assert told.read_text() == "5\n", "interpreter, option, program, source root, descriptor"
        assert report.ended == "exited"
        assert b"SHLVL" not in report.stdout.head and b"OLDPWD" not in report.stdout.head


def test_the_profile_is_one_to_apparmor() -> None:
    parser = shutil.which("apparmor_parser", path="/usr/sbin:/sbin:/usr/bin")
    if parser is None or not Path("/etc/apparmor.d/abi/4.0").exists():
        pytest.skip("AppArmor 4 is not installed here")
    profile = str(Path(remedies.__file__).with_name("apparmor.profile"))
    ran = subprocess.run([parser, "-Q", "-K", "--names", profile], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "ringfence"), ran.stderr


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("apt-get", "apt-get install -y uidmap"),
        ("dnf", "dnf install -y shadow-utils"),
        ("apk", "apk add shadow-uidmap"),
        (None, None),
    ],
)
def test_newuidmap_is_installed_by_what_the_host_has(root: Path, program: str | None, command: str | None) -> None:
    if program is not None:
        (root / "usr/bin" / program).touch()
    (root / "etc/subuid").write_text("alice:100000:65536\n")
    (root / "etc/subgid").write_text("1000:100000:65536\n")
    assert mend(root, "no_newuidmap") == ([command] if command is not None else [])


def test_a_range_of_ids_is_nobody_else_s(root: Path) -> None:
    (root / "etc/subuid").write_text("bob:100000:65536\ncarol:231072:65536\n")
    (root / "etc/subgid").write_text("bob:100000:65536\nbroken\n")
    span = "296608-362143"
    assert mend(root, "no_subids") == [f"usermod --add-subuids {span} --add-subgids {span} alice"]
    assert mend(root, "no_subids", user=None) == [], "root needs none"


def test_the_files_of_ranges_are_made_where_there_are_none(root: Path) -> None:
    assert mend(root, "no_subids") == ["usermod --add-subuids 100000-165535 --add-subgids 100000-165535 alice"]
    assert (root / "etc/subuid").read_text() == (root / "etc/subgid").read_text() == ""


def test_systemd_delegates(root: Path) -> None:
    assert mend(root, "delegation") == ["systemctl daemon-reload"]
    assert "Delegate=cpu cpuset io memory pids" in (root / remedies.DROP_IN).read_text()
    assert mend(root, "no_user_manager") == ["loginctl enable-linger alice"]
    assert mend(root, "no_user_bus") == ["systemctl --user --machine=alice@ start dbus.socket"]
    (root / "usr/bin/apt-get").touch()
    installs = "apt-get install -y dbus-user-session"
    assert mend(root, "no_user_manager") == [installs, "loginctl enable-linger alice"]
    (root / "usr/lib/systemd/user").mkdir(parents=True)
    (root / "usr/lib/systemd/user/dbus.socket").touch()
    assert mend(root, "no_user_manager") == ["loginctl enable-linger alice"]


def test_why_limits_are_not_the_kernel_s(root: Path) -> None:
    host = replace(HOST, systemd=True, unified=True)
    manager = root / "sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service"
    assert cause_of_groups(host, root) == "no_user_manager"
    manager.mkdir(parents=True)
    assert cause_of_groups(host, root) == "no_user_bus"
    (root / "run/user/1000").mkdir(parents=True)
    (root / "run/user/1000/bus").touch()
    (manager / "cgroup.controllers").write_text("memory pids\n")
    assert cause_of_groups(host, root) == "delegation"
    (manager / "cgroup.controllers").write_text("cpu memory pids\n")
    assert cause_of_groups(host, root) == "groups"
    assert cause_of_groups(replace(host, unified=False), root) == "groups"
    assert cause_of_groups(replace(host, uid=0), root) == "groups"


def test_what_has_no_cure_here_changes_nothing(root: Path) -> None:
    causes: tuple[Cause, ...] = ("kernel", "container_seccomp", "masked_proc", "landlock", "groups")
    assert plan(causes, HOST, ALICE, root) == []


def test_every_change_is_shown_whole(root: Path) -> None:
    changes: list[Change] = plan(("userns_clone", "apparmor", "no_subids"), HOST, ALICE, root)
    shown = "\n".join(change.shown for change in changes)
    for part in (
        "write /etc/sysctl.d/60-ringfence.conf",
        "userns,",
        "write 1 to /proc/sys/kernel",
        "run usermod",
        "env -u PWD",
    ):
        assert part in shown
    assert all(change.why for change in changes)


def test_what_goes_wrong_is_told(root: Path) -> None:
    assert make(RunCommand(("x",), ""), root, Recorder("no such user")) == "no such user"
    (root / "etc/apparmor.d").write_text("a file")
    assert "apparmor.d" in make(WriteFile(remedies.PROFILE, "x", ""), root)
    assert "nothing-of-this-name" in remedies.run(["nothing-of-this-name"])


def test_a_file_is_not_written_through_a_link(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (root / "etc/apparmor.d").mkdir()
    (root / remedies.PROFILE).symlink_to(victim)
    assert make(WriteFile(remedies.PROFILE, "new", ""), root) == ""
    assert (victim.read_text(), (root / remedies.PROFILE).read_text()) == ("as it was", "new")
    assert not (root / remedies.PROFILE).is_symlink()


def test_users_are_found_by_name_and_by_number() -> None:
    assert User.named("root") == User.named("0") == User(0, "root")
    with pytest.raises(LookupError):
        User.named("nobody-of-this-name")


def test_limits_that_are_high_enough_are_left_alone(root: Path) -> None:
    host = replace(HOST, settings={"user.max_user_namespaces": 60_000})
    causes: tuple[Cause, ...] = ("max_namespaces",)
    assert plan(causes, host, ALICE, root) == []
