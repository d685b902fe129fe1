"""What can be done about each cause: a command that an administrator runs once, or a page to read.

Inside a container the host cannot be changed: there the remedy is an option of the engine that starts it.

`ringfence host --fix` makes a list of changes, all shown before the first is made. Every change is one that an
administrator would make by hand: a file with its content, or a command. What is already as it should be is no change.
`root` is another root folder for tests, and `run` what starts commands.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.sandbox.process.host.info import ALL_IDS, LAUNCHER, HostInfo
from ringfence.sandbox.process.ids import ranges

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
SETTINGS = "etc/sysctl.d/60-ringfence.conf"
PROFILE = "etc/apparmor.d/ringfence"
DROP_IN = "etc/systemd/system/user@.service.d/ringfence.conf"
_DELEGATED = "[Service]\nDelegate=cpu cpuset io memory pids\n"
_FIRST_SUBID = 100_000
_SUBIDS = 65_536
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Remedy:
    """One remedy; where there are several, the first is the best."""

    text: str
    command: str = ""
    """For a shell: as root where it begins with sudo, else as the user."""
    page: str = ""
    mends: bool = False
    """`ringfence host --fix` does it."""
    option: str = ""
    """The option that the engine must start our container with."""

    def as_json(self) -> Json:
        fields = {"text": self.text, "command": self.command, "page": self.page}
        return {**fields, "mends": self.mends, "option": self.option}


@cache
def fix() -> str:
    """The command that fixes what can be fixed. By its path where sudo would not find it: in a virtual environment."""
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
"""Options of the engine that give back what it takes from its containers."""


def options(causes: Iterable[Cause], host: HostInfo) -> str:
    """All options that the container must be started with; none where we are in no container, or no option helps."""
    if host.engine is None:
        return ""
    known = _OPTIONS.get("docker" if host.engine == "dev container" else host.engine, {})
    found = list(dict.fromkeys(known[cause] for cause in causes if cause in known))
    if host.engine == "dev container" and found:
        words = ", ".join(f'"{word}"' for option in found for word in option.split(" "))
        return f'"runArgs": [{words}] in devcontainer.json'
    return ("; " if host.engine == "kubernetes" else " ").join(found)


def of(cause: Cause, host: HostInfo) -> tuple[Remedy, ...]:
    """The remedies of a cause; a page is always among them."""
    if host.engine is not None and (option := options((cause,), host)):
        page = _page("what else to know of boxes in such a container", _ANCHORS[host.engine])
        return (Remedy(f"start the container with {option}", option=option), page)
    found = [make(host) for make in _MAKERS[cause]]
    if host.engine is not None and cause in _OF_CONTAINERS:
        found.append(_page("boxes in such a container", _ANCHORS[host.engine]))
    return tuple(found)


_OF_CONTAINERS = ("container_apparmor", "container_seccomp", "groups", "kernel", "masked_proc", "selinux", "unknown")
"""Causes that a container may have."""
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


def _setting(name: str, value: int) -> Callable[[HostInfo], Remedy]:
    return lambda _: Remedy("set it, also for the next boot", f"sudo sysctl -w {name}={value}", mends=True)


def _max_namespaces(host: HostInfo) -> Remedy:
    low = too_low(host)
    if not low:
        return _page("as many as this user may have exist already: find out whose they are", "user-namespaces")
    pairs = " ".join(f"{name}={NAMESPACES}" for name in low)
    return Remedy("set it, also for the next boot", f"sudo sysctl -w {pairs}", mends=True)


def too_low(host: HostInfo) -> list[str]:
    """Limits that a few boxes would use up."""
    return [name for name, value in host.settings.items() if name.startswith("user.max_") and value < 1000]


def _profile(host: HostInfo) -> Remedy:
    if host.github:
        return Remedy(
            "a runner is thrown away after the job, so this is enough in a step of it",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    return Remedy("install Ringfence's AppArmor profile", fix(), mends=True)


def _install(host: HostInfo) -> Remedy:
    found = installer()
    if found is None:
        return Remedy("install newuidmap and newgidmap (package uidmap, or shadow)")
    return Remedy("install them", f"sudo {' '.join(found)}", mends=True)


def installer(root: Path = Path("/")) -> tuple[str, ...] | None:
    """The command that installs newuidmap here."""
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


def cause_of_groups(host: HostInfo, root: Path = Path("/")) -> Cause:
    """Why the kernel does not enforce limits, for a user of systemd; elsewhere there is only a page to read."""
    if not (host.systemd and host.unified) or host.root:
        return "groups"
    manager = root / f"sys/fs/cgroup/user.slice/user-{host.uid}.slice/user@{host.uid}.service"
    if not manager.is_dir():
        return "no_user_manager"
    if not (root / f"run/user/{host.uid}/bus").exists():
        return "no_user_bus"
    try:
        given = (manager / "cgroup.controllers").read_text("ascii").split()
    except OSError:
        return "groups"
    return "groups" if {"memory", "pids", "cpu"} <= set(given) else "delegation"


_READ: Mapping[Cause, tuple[str, str]] = {
    "chroot": ("user namespaces cannot be made in a chroot; use a container, or unshare with pivot_root", "chroot"),
    "container_apparmor": ("the profile that we are started in has to allow user namespaces and mounts", "apparmor"),
    "container_seccomp": ("what starts us filters system calls: a service's SystemCallFilter=, say", "seccomp"),
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


def _reading(text: str, anchor: str) -> Callable[[HostInfo], Remedy]:
    return lambda _: _page(text, anchor)


_MAKERS: Mapping[Cause, tuple[Callable[[HostInfo], Remedy], ...]] = {
    **{cause: (_reading(*words),) for cause, words in _READ.items()},
    "apparmor": (
        _profile,
        lambda host: _page("what is refused, and to whom", "github-actions" if host.github else "ubuntu"),
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


# ── Changes to the host, for `ringfence host --fix` ───────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WriteFile:
    """A whole file of the system."""

    path: str
    """Relative to the root."""
    text: str
    why: str
    mode: int = 0o644

    @property
    def shown(self) -> str:
        if self.path.startswith("proc/sys/"):
            return f"write {self.text.strip()} to /{self.path}"
        if not self.text:
            return f"make an empty /{self.path} (mode {self.mode:04o})"
        return "\n".join(
            [f"write /{self.path} (mode {self.mode:04o}):", *(f"    {line}" for line in self.text.split("\n"))]
        ).rstrip()


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A command to be run."""

    words: tuple[str, ...]
    why: str

    @property
    def shown(self) -> str:
        return f"run {shlex.join(self.words)}"


Change = WriteFile | RunCommand
Runner = Callable[[Sequence[str]], str]
"""Runs a command. Returns what went wrong, or nothing."""


@dataclass(frozen=True, slots=True)
class User:
    """The user that a change is made for."""

    uid: int
    name: str

    @classmethod
    def named(cls, text: str) -> User:
        """Find a user by name or number. Raises LookupError."""
        found = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
        return cls(found.pw_uid, found.pw_name)


def plan(causes: Collection[Cause], host: HostInfo, user: User | None, root: Path = Path("/")) -> list[Change]:
    """The changes that would help, in their order; none for causes without a remedy on the host itself."""
    changes: list[Change] = [*_settings(causes, host, root)]
    if "apparmor" in causes:
        changes += _profile_changes(root)
    if "no_newuidmap" in causes and (words := installer(root)) is not None:
        changes.append(RunCommand(words, "newuidmap and newgidmap give each box a user id of its own"))
    # Where only some ids exist, in a container, there are none to give.
    if user is not None and user.uid and {"no_subids", "no_newuidmap"} & set(causes) and host.mapped_ids == ALL_IDS:
        changes += _ids(user, root)
    if "delegation" in causes:
        changes += _delegation(root)
    if user is not None and {"no_user_manager", "no_user_bus"} & set(causes):
        changes += _manager(user, root, running="no_user_bus" in causes)
    return changes


def _settings(causes: Collection[Cause], host: HostInfo, root: Path) -> Iterator[WriteFile]:
    wanted: dict[str, int] = {}
    if "userns_clone" in causes:
        wanted["kernel.unprivileged_userns_clone"] = 1
    if "max_namespaces" in causes:
        wanted |= dict.fromkeys(too_low(host), NAMESPACES)
    if not wanted:
        return
    before = _text(root / SETTINGS)
    kept = [line for line in before.splitlines() if line.partition("=")[0].strip() not in wanted]
    text = "\n".join([*(kept or [_HEAD]), *(f"{name} = {value}" for name, value in wanted.items())]) + "\n"
    if text != before:
        yield WriteFile(SETTINGS, text, "for the next boot")
    for name, value in wanted.items():
        yield WriteFile(f"proc/sys/{name.replace('.', '/')}", f"{value}\n", "for now")


_HEAD = "# Ringfence's boxes are made of user namespaces. Written by `ringfence host --fix`."


def _profile_changes(root: Path) -> Iterator[Change]:
    profile, launcher = ((_HERE / name).read_text("utf-8") for name in ("apparmor.profile", "launcher.sh"))
    path = LAUNCHER.lstrip("/")
    if _text(root / path) != launcher or not os.access(root / path, os.X_OK):
        yield WriteFile(path, launcher, "zygotes are started through it", 0o755)
    if _text(root / PROFILE) != profile:
        yield WriteFile(PROFILE, profile, "allows what is started through it to make user namespaces")
    yield RunCommand(("apparmor_parser", "--replace", f"/{PROFILE}"), "loads the profile; at boot AppArmor does it")


def _ids(user: User, root: Path) -> Iterator[Change]:
    files = [_text(root / "etc/subuid"), _text(root / "etc/subgid")]
    mine = {user.name, str(user.uid)}
    if all(any(line.partition(":")[0] in mine for line in text.splitlines()) for text in files):
        return
    taken = [span.stop for span in ranges(files) if span.stop < 2**31]
    first = max([_FIRST_SUBID, *taken])
    for name in ("subuid", "subgid"):
        if not (root / "etc" / name).exists():
            yield WriteFile(f"etc/{name}", "", "ranges are kept in it, and there is none yet")
    span = f"{first}-{first + _SUBIDS - 1}"
    words = ("usermod", "--add-subuids", span, "--add-subgids", span, user.name)
    yield RunCommand(words, f"{_SUBIDS} ids that no other user has, for the boxes of {user.name}")


def _delegation(root: Path) -> Iterator[Change]:
    if _text(root / DROP_IN) != _DELEGATED:
        yield WriteFile(DROP_IN, _DELEGATED, "systemd hands these controllers to its users' managers")
    yield RunCommand(("systemctl", "daemon-reload"), "has systemd read it; it holds from the user's next login on")


def _manager(user: User, root: Path, *, running: bool) -> Iterator[RunCommand]:
    """Start a manager of the user's own, with a bus to reach it."""
    if (root / "usr/bin/apt-get").exists() and not (root / "usr/lib/systemd/user/dbus.socket").exists():
        yield RunCommand(("apt-get", "install", "-y", "dbus-user-session"), "the user's manager is asked over a bus")
    if running:
        words = ("systemctl", "--user", f"--machine={user.name}@", "start", "dbus.socket")
        yield RunCommand(words, "starts the bus of the manager that runs already")
    else:
        why = f"a manager of {user.name}'s own hands out control groups, also when that user is not logged in"
        yield RunCommand(("loginctl", "enable-linger", user.name), why)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


# ── Making changes ────────────────────────────────────────────────────────────────────────────────


def run(words: Sequence[str]) -> str:
    try:
        ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as exc:
        return f"{words[0]}: {exc.strerror}"
    lines = (ran.stderr.strip() or ran.stdout.strip()).splitlines()
    return "" if ran.returncode == 0 else (lines[-1] if lines else f"{words[0]} ended with {ran.returncode}")


def make(change: Change, root: Path = Path("/"), run: Runner = run) -> str:
    """Make the change. Returns what went wrong, or nothing."""
    if isinstance(change, RunCommand):
        return run(change.words)
    path = root / change.path
    try:
        if change.path.startswith("proc/"):
            path.write_text(change.text, "ascii")
            return ""
        for folder in reversed([each for each in path.parents if not each.exists()]):
            folder.mkdir()
            folder.chmod(0o755)  # whatever our own umask is: other users must be able to read it
        # Atomically, and never through a link in its place.
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, change.mode)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, change.mode)
                file.write(change.text)
                file.flush()
                os.fsync(descriptor)
            new.rename(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    except OSError as exc:
        return f"/{change.path}: {exc.strerror}"
    return ""
