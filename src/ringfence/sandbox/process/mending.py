"""What `ringfence host --fix` does about a diagnosis: a list of changes, all shown before the first is made.

Every change is one that an administrator would make by hand: a file with its content, or a command. What is already as
it should be is no change. `root` is another root folder for tests, and `run` what starts commands.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfence.sandbox.process.host import LAUNCHER
from ringfence.sandbox.process.remedies import NAMESPACES, Cause, installer, too_low
from ringfence.sandbox.process.surroundings import ALL_IDS, Surroundings
from ringfence.sandbox.process.uids import ranges

SETTINGS = "etc/sysctl.d/60-ringfence.conf"
PROFILE = "etc/apparmor.d/ringfence"
DROP_IN = "etc/systemd/system/user@.service.d/ringfence.conf"
_DELEGATED = "[Service]\nDelegate=cpu cpuset io memory pids\n"
_FIRST_SUBID, _SUBIDS = 100_000, 65_536
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Write:
    """A file of the system's, whole."""

    path: str
    """From the root on, without it."""
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
class Run:
    """A command."""

    words: tuple[str, ...]
    why: str

    @property
    def shown(self) -> str:
        return f"run {shlex.join(self.words)}"


Change = Write | Run
Runner = Callable[[Sequence[str]], str]
"""Runs a command; what went wrong, or nothing."""


@dataclass(frozen=True, slots=True)
class User:
    """Whom it is done for."""

    uid: int
    name: str

    @classmethod
    def named(cls, text: str) -> User:
        """By name or number. Raises LookupError."""
        found = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
        return cls(found.pw_uid, found.pw_name)


def plan(causes: Collection[Cause], around: Surroundings, user: User | None, root: Path = Path("/")) -> list[Change]:
    """What would help, in the order in which it is done; nothing for what has no cure on the host itself."""
    changes: list[Change] = [*_settings(causes, around, root)]
    if "apparmor" in causes:
        changes += _profile(root)
    if "no_newuidmap" in causes and (words := installer(root)) is not None:
        changes.append(Run(words, "newuidmap and newgidmap give each box a user id of its own"))
    # Where only some ids exist, in a container, there are none to give.
    if user is not None and user.uid and {"no_subids", "no_newuidmap"} & set(causes) and around.mapped_ids == ALL_IDS:
        changes += _ids(user, root)
    if "delegation" in causes:
        changes += _delegation(root)
    if user is not None and {"no_user_manager", "no_user_bus"} & set(causes):
        changes += _manager(user, root, running="no_user_bus" in causes)
    return changes


def _settings(causes: Collection[Cause], around: Surroundings, root: Path) -> Iterator[Write]:
    wanted: dict[str, int] = {}
    if "userns_clone" in causes:
        wanted["kernel.unprivileged_userns_clone"] = 1
    if "max_namespaces" in causes:
        wanted |= dict.fromkeys(too_low(around), NAMESPACES)
    if not wanted:
        return
    before = _text(root / SETTINGS)
    kept = [line for line in before.splitlines() if line.partition("=")[0].strip() not in wanted]
    text = "\n".join([*(kept or [_HEAD]), *(f"{name} = {value}" for name, value in wanted.items())]) + "\n"
    if text != before:
        yield Write(SETTINGS, text, "for the next boot")
    for name, value in wanted.items():
        yield Write(f"proc/sys/{name.replace('.', '/')}", f"{value}\n", "for now")


_HEAD = "# Ringfence's boxes are made of user namespaces. Written by `ringfence host --fix`."


def _profile(root: Path) -> Iterator[Change]:
    profile, launcher = ((_HERE / name).read_text("utf-8") for name in ("apparmor.profile", "launcher.sh"))
    path = LAUNCHER.lstrip("/")
    if _text(root / path) != launcher or not os.access(root / path, os.X_OK):
        yield Write(path, launcher, "zygotes are started through it", 0o755)
    if _text(root / PROFILE) != profile:
        yield Write(PROFILE, profile, "allows what is started through it to make user namespaces")
    yield Run(("apparmor_parser", "--replace", f"/{PROFILE}"), "loads the profile; at boot AppArmor does it")


def _ids(user: User, root: Path) -> Iterator[Change]:
    files = [_text(root / "etc/subuid"), _text(root / "etc/subgid")]
    mine = {user.name, str(user.uid)}
    if all(any(line.partition(":")[0] in mine for line in text.splitlines()) for text in files):
        return
    taken = [span.stop for span in ranges(files) if span.stop < 2**31]
    first = max([_FIRST_SUBID, *taken])
    for name in ("subuid", "subgid"):
        if not (root / "etc" / name).exists():
            yield Write(f"etc/{name}", "", "ranges are kept in it, and there is none yet")
    span = f"{first}-{first + _SUBIDS - 1}"
    words = ("usermod", "--add-subuids", span, "--add-subgids", span, user.name)
    yield Run(words, f"{_SUBIDS} ids that nobody else has, for the boxes of {user.name}")


def _delegation(root: Path) -> Iterator[Change]:
    if _text(root / DROP_IN) != _DELEGATED:
        yield Write(DROP_IN, _DELEGATED, "systemd hands these controllers to its users' managers")
    yield Run(("systemctl", "daemon-reload"), "has systemd read it; it holds from the user's next login on")


def _manager(user: User, root: Path, *, running: bool) -> Iterator[Run]:
    """One of the user's own, and a bus to ask it on."""
    if (root / "usr/bin/apt-get").exists() and not (root / "usr/lib/systemd/user/dbus.socket").exists():
        yield Run(("apt-get", "install", "-y", "dbus-user-session"), "the user's manager is asked over a bus")
    if running:
        words = ("systemctl", "--user", f"--machine={user.name}@", "start", "dbus.socket")
        yield Run(words, "starts the bus of the manager that runs already")
    else:
        why = f"a manager of {user.name}'s own hands out control groups, also when nobody is logged in"
        yield Run(("loginctl", "enable-linger", user.name), why)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


# ── Doing it ──


def run(words: Sequence[str]) -> str:
    try:
        ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as exc:
        return f"{words[0]}: {exc.strerror}"
    said = (ran.stderr.strip() or ran.stdout.strip()).splitlines()
    return "" if ran.returncode == 0 else (said[-1] if said else f"{words[0]} ended with {ran.returncode}")


def make(change: Change, root: Path = Path("/"), run: Runner = run) -> str:
    """Do it. What went wrong, or nothing."""
    if isinstance(change, Run):
        return run(change.words)
    path = root / change.path
    try:
        if change.path.startswith("proc/"):
            path.write_text(change.text, "ascii")
            return ""
        for folder in reversed([each for each in path.parents if not each.exists()]):
            folder.mkdir()
            folder.chmod(0o755)  # whatever our own mask says: others are to find what is in it
        # Whole or not at all, and never through a link that lies there.
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
