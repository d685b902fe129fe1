"""Facts about this host that need no trial: its settings, its security modules, the container we are in.

Nothing here decides whether a box can be made. It only names the cause where the kernel has refused something.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal

from ringfence.core.record import dataclass

Engine = Literal["docker", "podman", "kubernetes", "dev container", "lxc", "systemd-nspawn", "container"]

ALL_IDS = 2**32 - 1
"""The number of ids outside of any user namespace."""
_ENGINE_OF_CONTAINER: Mapping[str, Engine] = {
    "docker": "docker",
    "podman": "podman",
    "oci": "podman",
    "lxc": "lxc",
    "lxc-libvirt": "lxc",
    "systemd-nspawn": "systemd-nspawn",
}
"""By the variable `container`, which engines set for the first process."""
_DEV_CONTAINERS = ("REMOTE_CONTAINERS", "CODESPACES", "DEVCONTAINER")
_GROUPS: tuple[tuple[str, Engine], ...] = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("lxc.payload", "lxc"),
)
_SETTINGS = (
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
    "kernel.apparmor_restrict_unprivileged_unconfined",
    "user.max_user_namespaces",
    "user.max_mnt_namespaces",
    "user.max_pid_namespaces",
    "user.max_net_namespaces",
    "user.max_ipc_namespaces",
    "user.max_uts_namespaces",
    "user.max_cgroup_namespaces",
)

LAUNCHER = "/usr/local/libexec/ringfence/zygote"
"""Installed by `ringfence host --fix` where AppArmor allows user namespaces only to programs with a profile: Ubuntu."""


def with_launcher(command: Sequence[str]) -> list[str]:
    """The command of a zygote. AppArmor attaches the profile to the launcher, and what it executes keeps it."""
    return [LAUNCHER, *command] if os.geteuid() != 0 and os.access(LAUNCHER, os.X_OK) else [*command]


@dataclass(frozen=True, slots=True)
class HostInfo:
    """The settings of a host, read once. `read` takes another root folder for tests."""

    system: str = "linux"
    machine: str = "x86_64"
    release: str = "6.1.0"
    uid: int = 1000
    settings: Mapping[str, int] = field(default_factory=dict)
    """The sysctl settings that exist here."""
    modules: tuple[str, ...] = ()
    """Active security modules, where the kernel names them."""
    label: str = ""
    """Our label of AppArmor or SELinux."""
    selinux: bool = False
    """SELinux is enforcing."""
    filtered: bool = False
    """A seccomp filter that is not ours filters our system calls."""
    no_new_privileges: bool = False
    covered: tuple[str, ...] = ()
    """Paths below /proc that something else is mounted on, or that are read-only."""
    mapped_ids: int = ALL_IDS
    """How many user ids exist here; fewer than all in a user namespace."""
    engine: Engine | None = None
    """The engine of the container that we are in."""
    engine_sign: str = ""
    github: bool = False
    chrooted: bool = False
    systemd: bool = False
    unified: bool = False
    """All control groups are v2."""
    distribution: str = ""

    @property
    def root(self) -> bool:
        return self.uid == 0

    @property
    def kernel(self) -> tuple[int, int]:
        found = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @property
    def wsl(self) -> bool:
        return "microsoft" in self.release.lower()

    @classmethod
    def read(cls, root: Path = Path("/"), uid: int | None = None) -> HostInfo:
        text = _reader(root)
        status = text("proc/self/status")
        environment = _variables(text("proc/self/environ"))
        engine, sign = _engine(root, environment)
        mounts = text("proc/self/mountinfo")
        return cls(
            system=sys.platform,
            machine=os.uname().machine,
            release=os.uname().release,
            uid=os.geteuid() if uid is None else uid,
            settings={
                name: int(found)
                for name in _SETTINGS
                if (found := text(f"proc/sys/{name.replace('.', '/')}").strip()).isdecimal()
            },
            modules=tuple(filter(None, text("sys/kernel/security/lsm").strip().split(","))),
            label=text("proc/self/attr/current").strip().strip("\0"),
            selinux=text("sys/fs/selinux/enforce").strip() == "1",
            filtered=_field(status, "Seccomp") == "2",
            no_new_privileges=_field(status, "NoNewPrivs") == "1",
            covered=_covered(mounts),
            mapped_ids=sum(int(line.split()[2]) for line in text("proc/self/uid_map").splitlines()) or ALL_IDS,
            engine=engine,
            engine_sign=sign,
            github="GITHUB_ACTIONS" in environment,
            chrooted=bool(mounts) and not any(line.split()[4] == "/" for line in mounts.splitlines()),
            systemd=(root / "run/systemd/system").is_dir(),
            unified=(root / "sys/fs/cgroup/cgroup.controllers").is_file(),
            distribution=_distribution(text("etc/os-release")),
        )


def _reader(root: Path) -> Callable[[str], str]:
    def text(path: str) -> str:
        try:
            return (root / path).read_text("utf-8", "replace")
        except OSError:
            return ""

    return text


def _field(status: str, name: str) -> str:
    return f"\n{status}".partition(f"\n{name}:\t")[2].partition("\n")[0]


def _variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)


def _engine(root: Path, environment: Mapping[str, str]) -> tuple[Engine | None, str]:
    """The engine and the sign that it was recognised by. A pod is looked for first."""
    text = _reader(root)
    if "KUBERNETES_SERVICE_HOST" in environment or (root / "run/secrets/kubernetes.io").is_dir():
        return "kubernetes", "its service account, or KUBERNETES_SERVICE_HOST"
    for name in _DEV_CONTAINERS:
        if name in environment:
            return "dev container", name
    if (root / "run/.containerenv").exists():
        return "podman", "/run/.containerenv"
    if (root / ".dockerenv").exists():
        return "docker", "/.dockerenv"
    named = environment.get("container") or _variables(text("proc/1/environ")).get("container", "")
    named = named or text("run/systemd/container").strip()
    if named and named != "wsl":
        return _ENGINE_OF_CONTAINER.get(named, "container"), f"container={named}"
    groups = text("proc/self/cgroup")
    for word, engine in _GROUPS:
        if word in groups:
            return engine, "the path of its control group"
    return None, ""


def _covered(mounts: str) -> tuple[str, ...]:
    """Mounts that hide a part of /proc: the kernel allows a new one only to processes that see all of one already."""
    out = []
    for line in mounts.splitlines():
        words = line.split()
        # An empty folder may be mounted upon: nothing is hidden by it.
        if words[4].startswith("/proc/") and words[4] != "/proc/sys/fs/binfmt_misc":
            out.append(words[4])
    return tuple(dict.fromkeys(out))


def _distribution(text: str) -> str:
    named = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return named.get("PRETTY_NAME", "").strip('"')
