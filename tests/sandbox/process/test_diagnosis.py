"""What a host refuses is tried, its cause named, and a remedy given."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from ringfence.core.errors import Unavailable
from ringfence.sandbox.process.host import diagnosis, remedies
from ringfence.sandbox.process.host.diagnosis import Diagnosis, StepResult, judge
from ringfence.sandbox.process.host.info import Engine, HostInfo
from ringfence.sandbox.process.host.remedies import Cause
from tests.sandbox.process import refusing
from tests.tooling import ROOT

HOST = HostInfo()
UBUNTU = replace(HOST, settings={"kernel.apparmor_restrict_unprivileged_userns": 1}, label="unconfined")
DOCKER = replace(
    HOST, engine="docker", filtered=True, covered=("/proc/kcore", "/proc/keys"), label="docker-default (enforce)"
)
ALL = {step: StepResult(0) for step in diagnosis.NAMES}


def refused(step: str, number: int) -> dict[str, StepResult]:
    """Everything up to a step that failed."""
    names = list(diagnosis.NAMES)
    return {
        **{name: StepResult(0) for name in names[: names.index(step)]},
        step: StepResult(number, os.strerror(number)),
    }


def test_where_everything_was_tried_and_went_well_nothing_is_missing() -> None:
    assert [finding.state for finding in judge(ALL, HOST)] == ["ok"] * 7


@pytest.mark.parametrize(
    ("step", "number", "host", "cause", "says"),
    [
        (
            "user_namespace",
            errno.EPERM,
            replace(HOST, settings={"kernel.unprivileged_userns_clone": 0}),
            "userns_clone",
            "kernel.unprivileged_userns_clone is 0",
        ),
        (
            "user_namespace",
            errno.ENOSPC,
            replace(HOST, settings={"user.max_user_namespaces": 0}),
            "max_namespaces",
            "user.max_user_namespaces is 0",
        ),
        (
            "namespaces",
            errno.ENOSPC,
            replace(HOST, settings={"user.max_net_namespaces": 3}),
            "max_namespaces",
            "user.max_net_namespaces is 3",
        ),
        ("user_namespace", errno.EINVAL, HOST, "kernel", "does not have it"),
        ("user_namespace", errno.EPERM, replace(HOST, chrooted=True), "chroot", "chroot"),
        ("user_namespace", errno.EPERM, replace(HOST, filtered=True), "container_seccomp", "seccomp filter"),
        ("user_namespace", errno.EACCES, UBUNTU, "apparmor", "apparmor_restrict_unprivileged_userns is 1"),
        ("mapping", errno.EPERM, UBUNTU, "apparmor", "apparmor_restrict_unprivileged_userns is 1"),
        ("mounts", errno.EACCES, UBUNTU, "apparmor", "apparmor_restrict_unprivileged_userns is 1"),
        (
            "user_namespace",
            errno.EACCES,
            replace(HOST, label="strict (enforce)"),
            "container_apparmor",
            "strict forbids it",
        ),
        ("mounts", errno.EACCES, DOCKER, "container_apparmor", "docker-default"),
        ("mounts", errno.EACCES, replace(HOST, selinux=True), "selinux", "SELinux"),
        ("mounts", errno.ENOSYS, replace(HOST, release="5.10.0"), "kernel", "5.10.0"),
        ("proc", errno.EPERM, replace(HOST, covered=("/proc/kcore",)), "masked_proc", "/proc/kcore is covered"),
        ("pivot", errno.EINVAL, HOST, "rootfs", "initial ramdisk"),
        ("host_name", errno.EPERM, replace(HOST, filtered=True), "container_seccomp", "seccomp filter"),
        ("mapping", errno.EPERM, replace(HOST, uid=0, mapped_ids=65536), "root_of_few", "only 65536 user ids"),
        ("mapping", errno.EPERM, replace(HOST, uid=0), "no_setuid", "CAP_SETUID"),
        ("landlock", errno.EOPNOTSUPP, HOST, "landlock", "not among its active security modules"),
        ("landlock", errno.ENOSYS, replace(HOST, release="5.12.1"), "landlock", "5.13 is the first"),
        ("keyring", errno.EDQUOT, HOST, "unknown", "making one"),
    ],
)
def test_a_refusal_is_explained(step: str, number: int, host: HostInfo, cause: Cause, says: str) -> None:
    [finding] = [each for each in judge(refused(step, number), host) if each.cause == cause]
    assert finding.state == "missing" and says in finding.seen and finding.follows
    assert any(remedy.command or remedy.page or remedy.option for remedy in finding.remedies)


def test_a_setting_without_a_refusal_is_nothing() -> None:
    # An administrator's own profile allows it: the sysctl is as it is, and everything works.
    assert all(finding.state == "ok" for finding in judge(ALL, UBUNTU))


def test_root_is_not_told_of_what_holds_for_others() -> None:
    root = replace(UBUNTU, uid=0, settings={**UBUNTU.settings, "kernel.unprivileged_userns_clone": 0})
    [finding] = [each for each in judge(refused("user_namespace", errno.EPERM), root) if each.state == "missing"]
    assert finding.cause == "unknown"


def test_root_too_is_refused_a_user_namespace_within_another() -> None:
    root = replace(HOST, uid=0, settings={"kernel.unprivileged_userns_clone": 0})
    [finding] = [each for each in judge(refused("box_namespaces", errno.EPERM), root) if each.state == "missing"]
    assert finding.cause == "userns_clone"
    assert any(remedy.mends for remedy in finding.remedies)


def test_in_a_container_every_option_is_named_at_once() -> None:
    found = Diagnosis(DOCKER, tuple(judge(refused("user_namespace", errno.EPERM), DOCKER)))
    for option in ("seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"):
        assert f"--security-opt {option}" in found.sentence()


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("docker", "--security-opt systempaths=unconfined"),
        ("podman", "--security-opt 'unmask=/proc/*'"),
        ("kubernetes", "procMount: Unmasked"),
        ("dev container", '"runArgs": ["--security-opt", "systempaths=unconfined"]'),
    ],
)
def test_options_are_the_engine_s_own(engine: Engine, says: str) -> None:
    assert says in remedies.options(("masked_proc",), replace(HOST, engine=engine))


@pytest.mark.parametrize("engine", [None, *get_args(Engine)])
def test_every_cause_has_a_page_that_exists(engine: Engine | None) -> None:
    headings = [line.lstrip("#").strip() for line in (ROOT / remedies.PAGE).read_text().splitlines() if line[:1] == "#"]
    known = {"".join(c for c in head.lower() if c.isalnum() or c in " -").replace(" ", "-") for head in headings}
    for cause in get_args(Cause):
        found = remedies.of(cause, replace(HOST, engine=engine))
        assert all(remedy.text for remedy in found)
        pages = [remedy.page.removeprefix(f"{remedies.PAGE}#") for remedy in found if remedy.page]
        assert pages and set(pages) <= known, (cause, pages)


def test_an_error_ends_with_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(HOST, settings={"kernel.unprivileged_userns_clone": 0})
    found = Diagnosis(host, tuple(judge(refused("user_namespace", errno.EPERM), host)))
    monkeypatch.setattr(diagnosis, "diagnose_refusals", lambda: found)
    told = diagnosis.explained(Unavailable("no_zygote", "no box can be made on this host: PermissionError"))
    assert told.reason_code == "missing_protection"
    assert "kernel.unprivileged_userns_clone is 0" in told.message
    assert told.message.endswith(f"Run `ringfence host` to see what is missing, `{remedies.fix()}` to fix it")
    monkeypatch.setattr(diagnosis, "diagnose_refusals", lambda: Diagnosis(HOST, tuple(judge(ALL, HOST))))
    told = diagnosis.explained(Unavailable("no_zygote", "it died"))
    assert (told.reason_code, told.message[:7]) == ("no_zygote", "it died") and "ringfence host" in told.message


# ── What is known of a host ──


def write(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_host_is_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
            "proc/sys/user/max_user_namespaces": "63000\n",
            "proc/self/status": "Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\n",
            "proc/self/attr/current": "unconfined\n",
            "proc/self/uid_map": "         0     100000      65536\n",
            "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:5 / /proc rw - proc proc rw\n"
            "3 2 0:6 /null /proc/kcore rw - tmpfs tmpfs rw\n4 2 0:7 / /proc/sys/fs/binfmt_misc rw - autofs a rw\n",
            "sys/kernel/security/lsm": "lockdown,capability,landlock,apparmor\n",
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04 LTS"\n',
        },
    )
    found = HostInfo.read(tmp_path, uid=1000)
    assert found.settings == {"kernel.apparmor_restrict_unprivileged_userns": 1, "user.max_user_namespaces": 63000}
    assert found.filtered and found.no_new_privileges and not found.chrooted and not found.selinux
    assert (found.label, found.mapped_ids, found.covered) == ("unconfined", 65536, ("/proc/kcore",))
    assert found.modules[2] == "landlock" and found.distribution == "Ubuntu 24.04 LTS" and found.engine is None


@pytest.mark.parametrize(
    ("files", "engine"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({".dockerenv": "", "proc/self/environ": "KUBERNETES_SERVICE_HOST=10.0.0.1\0"}, "kubernetes"),
        ({".dockerenv": "", "proc/self/environ": "A=b\0REMOTE_CONTAINERS=true\0"}, "dev container"),
        ({"proc/1/environ": "container=lxc\0"}, "lxc"),
        ({"run/systemd/container": "systemd-nspawn\n"}, "systemd-nspawn"),
        ({"proc/1/environ": "container=strange\0"}, "container"),
        ({"proc/self/cgroup": "0::/kubepods/besteffort/pod1/2\n"}, "kubernetes"),
        ({"proc/self/cgroup": "0::/user.slice/user-1000.slice/session-1.scope\n"}, None),
        ({"proc/self/environ": "GITHUB_ACTIONS=true\0"}, None),
    ],
)
def test_a_container_is_recognised(tmp_path: Path, files: dict[str, str], engine: Engine | None) -> None:
    assert HostInfo.read(write(tmp_path, **files)).engine == engine


def test_a_runner_of_github_is_told_to_set_the_setting() -> None:
    host = replace(UBUNTU, github=True)
    found = Diagnosis(host, tuple(judge(refused("mapping", errno.EPERM), host)))
    assert "Run `sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`" in found.sentence()


def test_what_only_a_page_helps_names_it() -> None:
    found = Diagnosis(HOST, tuple(judge(refused("keyring", errno.EDQUOT), HOST)))
    assert found.sentence().endswith("What to do: `ringfence host`, docs/hosts.md#what-boxes-need")


def test_the_command_is_one_that_sudo_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ringfence").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(remedies, "_SEARCHED_BY_SUDO", "/nothing")
    remedies.fix.cache_clear()
    try:
        assert remedies.fix() == f"sudo {tmp_path}/ringfence host --fix"
    finally:
        remedies.fix.cache_clear()


@pytest.mark.parametrize(("release", "state"), [("6.1.0-50-amd64", "weaker"), ("6.3.0", "ok"), ("6.12.1", "ok")])
def test_ids_of_their_own_take_a_kernel_that_lends_them(
    monkeypatch: pytest.MonkeyPatch, release: str, state: str
) -> None:
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: f"/usr/bin/{name}")  # type: ignore[attr-defined]
    monkeypatch.setattr(diagnosis, "range_of", lambda path, uid: range(100_000, 165_536))
    monkeypatch.setattr(diagnosis, "mapped_by_helper", lambda users, groups: "")
    found = diagnosis._ids(replace(HOST, release=release))
    assert found.state == state
    assert found.cause == ("kernel" if state == "weaker" else None)


# ── On this host ──


def test_this_host_is_tried() -> None:
    found = diagnosis.try_steps()
    assert list(found) == [step for step in diagnosis.NAMES if step in found]
    if any(how.number for how in found.values()):
        pytest.skip(f"this host refuses something: {found}")
    assert set(found) == set(diagnosis.NAMES)


@pytest.mark.parametrize(
    ("what", "cause", "says"),
    [
        ("namespaces", "max_namespaces", "user.max_user_namespaces is 0"),
        ("proc", "masked_proc", "/proc/version is covered"),
        ("call", "container_seccomp", "a seccomp filter from outside refuses it"),
    ],
)
def test_a_real_refusal_is_explained(what: str, cause: Cause, says: str) -> None:
    if what == "proc" and os.getuid() == 0:
        pytest.skip("root would be refused its ids first; an ordinary user runs this")
    if any(how.number for how in diagnosis.try_steps().values()):
        pytest.skip("this host refuses something else")
    code = (
        "from ringfence.sandbox.process.host import diagnosis\n"
        "for each in diagnosis.diagnose_refusals().missing: print(each.cause, each.seen, sep='\\t')"
    )
    command = [sys.executable, "-I", "-S", refusing.__file__, what, sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")})
    found = dict(line.split("\t") for line in ran.stdout.splitlines())
    assert says in found.get(cause, ""), ran.stdout + ran.stderr
