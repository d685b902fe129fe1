"""What can be done about each cause: a command that somebody runs once, or a page to read.

Inside a container the host cannot be changed: there the remedy is an option of the engine that starts it.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ringfence.model import Json
from ringfence.sandbox.process.surroundings import Surroundings

Cause = Literal[
    "apparmor",
    "chroot",
    "container_apparmor",
    "container_seccomp",
    "delegation",
    "groups",
    "kernel",
    "landlock",
    "machine",
    "masked_proc",
    "max_namespaces",
    "newuidmap_refused",
    "no_newuidmap",
    "no_setuid",
    "no_subids",
    "no_user_bus",
    "no_user_manager",
    "not_linux",
    "root_of_few",
    "rootfs",
    "selinux",
    "unknown",
    "userns_clone",
]

PAGE = "docs/hosts.md"
_SEARCHED_BY_SUDO = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = 15000
"""What `user.max_user_namespaces` is set to where it is lower: one for each box and each zygote, and some to spare."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way out; where there are several, the first is the best."""

    text: str
    command: str = ""
    """For a shell: of root where it begins with sudo, else of the user."""
    page: str = ""
    mends: bool = False
    """`ringfence host --fix` does it."""
    option: str = ""
    """What the container that we are in is to be started with."""

    def as_json(self) -> Json:
        said = {"text": self.text, "command": self.command, "page": self.page}
        return {**said, "mends": self.mends, "option": self.option}


@cache
def fix() -> str:
    """The command that mends what can be mended. By its path where sudo would not find it: in a virtual environment."""
    beside = Path(sys.executable).with_name("ringfence")
    if shutil.which("ringfence", path=_SEARCHED_BY_SUDO) is not None or not beside.exists():
        return "sudo ringfence host --fix"
    return f"sudo {shlex.quote(str(beside))} host --fix"


_OPTIONS: Mapping[str, Mapping[Cause, str]] = {
    "docker": {
        "container_seccomp": "--security-opt seccomp=unconfined",
        "container_apparmor": "--security-opt apparmor=unconfined",
        "apparmor": "--security-opt apparmor=ringfence",
        "masked_proc": "--security-opt systempaths=unconfined",
        "selinux": "--security-opt label=disable",
        "no_setuid": "--user 1000",
        "root_of_few": "--user 1000",
    },
    "podman": {
        "container_seccomp": "--security-opt seccomp=unconfined",
        "container_apparmor": "--security-opt apparmor=unconfined",
        "apparmor": "--security-opt apparmor=ringfence",
        "masked_proc": "--security-opt 'unmask=/proc/*'",
        "selinux": "--security-opt label=disable",
        "no_setuid": "--user 1000",
        "root_of_few": "--user 1000",
    },
    "kubernetes": {
        "container_seccomp": "securityContext.seccompProfile.type: Unconfined",
        "container_apparmor": "securityContext.appArmorProfile.type: Unconfined",
        "apparmor": "securityContext.appArmorProfile: {type: Localhost, localhostProfile: ringfence}",
        "masked_proc": "securityContext.procMount: Unmasked, with hostUsers: false for the pod",
        "selinux": "securityContext.seLinuxOptions.type: spc_t",
        "no_setuid": "securityContext.runAsUser: 1000",
        "root_of_few": "securityContext.runAsUser: 1000",
    },
    "lxc": dict.fromkeys(("container_apparmor", "apparmor", "masked_proc"), "security.nesting=true"),
}
"""Of the engine, for what it takes from the containers that it starts."""


def options(causes: Iterable[Cause], around: Surroundings) -> str:
    """All that a container has to be started with; nothing where we are in none, or no option helps."""
    if around.engine is None:
        return ""
    known = _OPTIONS.get("docker" if around.engine == "dev container" else around.engine, {})
    found = list(dict.fromkeys(known[cause] for cause in causes if cause in known))
    if around.engine == "dev container" and found:
        words = ", ".join(f'"{word}"' for option in found for word in option.split(" "))
        return f'"runArgs": [{words}] in devcontainer.json'
    return ("; " if around.engine == "kubernetes" else " ").join(found)


def of(cause: Cause, around: Surroundings) -> tuple[Remedy, ...]:
    """The page is always among them."""
    if around.engine is not None and (option := options((cause,), around)):
        page = _page("what else to know of boxes in such a container", _ANCHORS[around.engine])
        return (Remedy(f"start the container with {option}", option=option), page)
    found = [make(around) for make in _MAKERS[cause]]
    if around.engine is not None and cause in _OF_CONTAINERS:
        found.append(_page("boxes in such a container", _ANCHORS[around.engine]))
    return tuple(found)


_OF_CONTAINERS = ("container_apparmor", "container_seccomp", "groups", "kernel", "masked_proc", "selinux", "unknown")
"""What a container may be the reason for."""
_ANCHORS = {
    "docker": "docker",
    "podman": "podman",
    "kubernetes": "kubernetes",
    "dev container": "dev-containers",
    "lxc": "other-containers",
    "systemd-nspawn": "other-containers",
    "container": "other-containers",
}


def _page(text: str, anchor: str) -> Remedy:
    return Remedy(text, page=f"{PAGE}#{anchor}" if anchor else PAGE)


def _setting(name: str, value: int) -> Callable[[Surroundings], Remedy]:
    return lambda _: Remedy("set it, also for the next boot", f"sudo sysctl -w {name}={value}", mends=True)


def _max_namespaces(around: Surroundings) -> Remedy:
    low = too_low(around)
    if not low:
        return _page("as many as this user may have exist already: find out whose they are", "user-namespaces")
    pairs = " ".join(f"{name}={NAMESPACES}" for name in low)
    return Remedy("set it, also for the next boot", f"sudo sysctl -w {pairs}", mends=True)


def too_low(around: Surroundings) -> list[str]:
    """Limits that a few boxes use up."""
    return [name for name, value in around.settings.items() if name.startswith("user.max_") and value < 1000]


def _profile(around: Surroundings) -> Remedy:
    if around.github:
        return Remedy(
            "a runner is thrown away after the job, so this is enough in a step of it",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    return Remedy("install Ringfence's AppArmor profile", fix(), mends=True)


def _install(around: Surroundings) -> Remedy:
    found = installer()
    if found is None:
        return Remedy("install newuidmap and newgidmap (package uidmap, or shadow)")
    return Remedy("install them", f"sudo {' '.join(found)}", mends=True)


def installer(root: Path = Path("/")) -> tuple[str, ...] | None:
    """What installs newuidmap here."""
    for program, words in _INSTALLERS.items():
        if any((root / folder / program).exists() for folder in ("usr/bin", "bin", "sbin", "usr/sbin")):
            return (program, *words)
    return None


_INSTALLERS = {
    "apt-get": ("install", "-y", "uidmap"),
    "dnf": ("install", "-y", "shadow-utils"),
    "zypper": ("--non-interactive", "install", "shadow"),
    "pacman": ("-S", "--noconfirm", "shadow"),
    "apk": ("add", "shadow-uidmap"),
}


def cause_of_groups(around: Surroundings, root: Path = Path("/")) -> Cause:
    """Why limits are not the kernel's, for a user of systemd; elsewhere there is only a page to read."""
    if not (around.systemd and around.unified) or around.root:
        return "groups"
    manager = root / f"sys/fs/cgroup/user.slice/user-{around.uid}.slice/user@{around.uid}.service"
    if not manager.is_dir():
        return "no_user_manager"
    if not (root / f"run/user/{around.uid}/bus").exists():
        return "no_user_bus"
    try:
        given = (manager / "cgroup.controllers").read_text("ascii").split()
    except OSError:
        return "groups"
    return "groups" if {"memory", "pids", "cpu"} <= set(given) else "delegation"


_READ: Mapping[Cause, tuple[str, str]] = {
    "chroot": ("user namespaces cannot be made in a chroot; use a container, or unshare with pivot_root", "chroot"),
    "container_apparmor": ("the profile that we are started in has to allow user namespaces and mounts", "apparmor"),
    "container_seccomp": ("whoever starts us filters system calls: a service's SystemCallFilter=, say", "seccomp"),
    "groups": ("how limits are held on such a host, and what gives them to the kernel", "control-groups"),
    "kernel": ("a newer kernel", "kernels"),
    "landlock": ("add landlock to the kernel parameter lsm=, or accept that it is missing", "landlock"),
    "machine": ("boxes run on x86_64 and aarch64", "kernels"),
    "masked_proc": ("something is mounted over parts of /proc, and has to go", "proc"),
    "newuidmap_refused": ("newuidmap must be setuid, on a file system that honours it", "user-ids"),
    "no_setuid": ("start Ringfence as an ordinary user, or root with CAP_SETUID and CAP_SETGID", "user-ids"),
    "not_linux": ("what works without boxes, and where to run boxes", "other-systems"),
    "root_of_few": ("start Ringfence as an ordinary user of the container", "user-ids"),
    "rootfs": ("start the system with a root file system of its own", "kernels"),
    "selinux": ("allow it: ausearch -m avc -ts recent shows what was refused", "selinux"),
    "unknown": ("what boxes need of a host; the kernel's log may say who refused it", "what-boxes-need"),
}


def _reading(text: str, anchor: str) -> Callable[[Surroundings], Remedy]:
    return lambda _: _page(text, anchor)


_MAKERS: Mapping[Cause, tuple[Callable[[Surroundings], Remedy], ...]] = {
    **{cause: (_reading(*words),) for cause, words in _READ.items()},
    "apparmor": (
        _profile,
        lambda around: _page("what is refused, and to whom", "github-actions" if around.github else "ubuntu"),
    ),
    "userns_clone": (
        _setting("kernel.unprivileged_userns_clone", 1),
        _reading("what this setting is for", "user-namespaces"),
    ),
    "max_namespaces": (_max_namespaces, _reading("what this setting is for", "user-namespaces")),
    "no_newuidmap": (_install, _reading("what they are for", "user-ids")),
    "no_subids": (
        lambda _: Remedy("give the user a range of ids", fix(), mends=True),
        _reading("what the range is for", "user-ids"),
    ),
    "delegation": (
        lambda _: Remedy("have systemd hand the controllers on", fix(), mends=True),
        _reading("how limits are held", "control-groups"),
    ),
    "no_user_bus": (
        lambda _: Remedy("install what the user's bus needs (on Debian dbus-user-session)", fix(), mends=True),
        _reading("how limits are held", "control-groups"),
    ),
    "no_user_manager": (
        lambda _: Remedy("keep a manager for the user running", fix(), mends=True),
        _reading("how limits are held", "control-groups"),
    ),
}
