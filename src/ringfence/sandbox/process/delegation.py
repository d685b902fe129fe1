"""A control group that hands controllers down, on hosts where somebody else manages the groups.

With cgroup v2 a group hands memory, pids and cpu down only while it holds no process itself, and the group that we are
started in holds us. So the supervisor moves: into a leaf of a group that was delegated to it, beside which the boxes
have theirs. A service with `Delegate=` and a container have such a group; otherwise we ask systemd for a scope of our
own, as container engines do.

We move out of no group that an operator has bounded: what bounds us is to bound our boxes too.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ringfence.sandbox.process.cgroupfs import read, write

LEAF = "ringfence-supervisor"
"""Where a supervisor sits in a delegated group. It is never swept: others of the same container may sit there too."""
PAGE = "docs/hosts.md#control-groups"

_BUSCTL = "/usr/bin/busctl"
_SYSTEMCTL = "/usr/bin/systemctl"
_LOOK_SECONDS = 0.002
_ASK_SECONDS = 1.0
"""After so long without having been moved, systemd is asked whether it still tries."""
_BOUNDS = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "cpuset.cpus", "io.max")
_ROUNDS = 8
"""Processes may be born while a group is emptied."""


class Refused(Exception):
    """No group was delegated: why, and what somebody can do about it."""

    def __init__(self, why: str, remedy: str = f"see {PAGE}") -> None:
        super().__init__(f"{why}; {remedy}")


@dataclass(frozen=True, slots=True)
class Leaving:
    """What it means to move out of our own group into a scope of the manager's."""

    slice: str | None
    """The innermost slice that we stay in; None where the manager has no say in it."""
    left: tuple[str, ...]
    """The groups that we would not be in any more, and whose bounds would not hold for us."""

    @classmethod
    def of(cls, own: str, mount: str, user: int) -> Leaving:
        parts = [part for part in own.removeprefix(mount).split("/") if part]
        ours = f"user@{user}.service"
        if user == 0:
            # A manager of a user has slices, too, which that of the system knows nothing of.
            stays = next((depth for depth, part in enumerate(parts) if not part.endswith(".slice")), len(parts))
        elif ours in parts:
            start = parts.index(ours) + 1
            stays = start + _last_slice(parts[start:])
        else:
            # The user's manager sits in the user's slice, whatever we were started by.
            home = ["user.slice", f"user-{user}.slice"]
            stays = len(home) if parts[: len(home)] == home else 0
        inner = parts[stays - 1] if stays else ""
        named = inner if inner.endswith(".slice") and (user == 0 or ours in parts[:stays]) else None
        left = tuple(f"{mount}/{'/'.join(parts[: depth + 1])}" for depth in range(stays, len(parts)))
        return cls(named, left)


def _last_slice(parts: list[str]) -> int:
    """How many parts lead to the innermost slice."""
    return max((depth + 1 for depth, part in enumerate(parts) if part.endswith(".slice")), default=0)


class Manager(Protocol):
    """Whoever manages the groups of this host."""

    def move_to_scope(self, leaving: Leaving, moved: Callable[[], bool]) -> None:
        """Have this process moved from its group into a delegated one. Raises Refused."""
        ...


def delegated(own: str, mount: str) -> str | None:
    """The path of a group that was given to us already, prepared for groups below it; None where there is none.

    Raises Refused where there is one that cannot be prepared.
    """
    parent = os.path.dirname(own)
    if os.path.basename(own) == LEAF and own != mount and _may(parent) and (_marked(parent) or _hands_down(parent)):
        return parent  # another supervisor, or an earlier one of this process, has prepared it
    if not _may(own) or not (_marked(own) or _is_root_of_a_container(own, mount)):
        return None
    _empty(own)
    return own


def settle(group: str) -> None:
    """Move this process into the leaf of a group that is ours alone. Raises Refused."""
    try:
        leaf = _leaf(group)
        write(leaf + "/cgroup.procs", str(os.getpid()))
    except OSError as problem:
        raise Refused(
            f"the supervisor cannot move into a leaf of its group: {problem.strerror}", f"see {PAGE}"
        ) from None


def _marked(group: str) -> bool:
    """systemd marks what it delegated."""
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _may(group: str) -> bool:
    """Whether it was delegated to this very user: to make groups below it, and to move processes."""
    try:
        return os.stat(group).st_uid == os.geteuid() and os.access(group + "/cgroup.procs", os.W_OK)
    except OSError:
        return False


def _hands_down(group: str) -> bool:
    with suppress(OSError):
        return "memory" in read(group + "/cgroup.subtree_control").split()
    return False


def _is_root_of_a_container(own: str, mount: str) -> bool:
    """The first group of a cgroup namespace; that of the host has no type."""
    return own == mount and os.path.exists(own + "/cgroup.type")


def _leaf(group: str) -> str:
    leaf = f"{group}/{LEAF}"
    with suppress(FileExistsError):
        os.mkdir(leaf)
    return leaf


def _empty(group: str) -> None:
    """Move everything that sits in a group into its leaf: all of it is one service, or one container."""
    try:
        leaf = _leaf(group)
        for _ in range(_ROUNDS):
            pids = read(group + "/cgroup.procs").split()
            if not pids:
                return
            for pid in pids:
                with suppress(ProcessLookupError):
                    write(leaf + "/cgroup.procs", pid)
    except OSError as problem:
        raise Refused(f"our group cannot be emptied into a leaf: {problem.strerror}") from None
    raise Refused("our group holds processes that we cannot move into a leaf")


def bounded(leaving: Leaving) -> str | None:
    """Which bound an operator has set on a group that we would leave."""
    for group in leaving.left:
        for name in _BOUNDS:
            with suppress(OSError):
                value = read(f"{group}/{name}").split()
                if value and value[0] != "max":
                    return f"{name} of {os.path.basename(group)} is {' '.join(value)}"
    return None


def _most_tasks(leaving: Leaving) -> int | None:
    """The tightest number of processes of the groups that we leave: systemd bounds most by itself, and so do we."""
    found = []
    for group in leaving.left:
        with suppress(OSError, ValueError):
            found.append(int(read(f"{group}/pids.max")))
    return min(found, default=None)


class Systemd:
    """The manager of the user, or of the system where we are root."""

    def __init__(self, runtime: str = "/run", commands: tuple[str, str] = (_BUSCTL, _SYSTEMCTL)) -> None:
        self._runtime = runtime
        self._busctl, self._systemctl = commands

    def move_to_scope(self, leaving: Leaving, moved: Callable[[], bool]) -> None:
        environment, which = self._bus()
        unit = f"ringfence-{os.getpid()}-{time.monotonic_ns()}.scope"
        properties = [
            *("Description", "s", "Boxes of Ringfence"),
            *("Delegate", "b", "true"),
            *("PIDs", "au", "1", str(os.getpid())),
            *("CollectMode", "s", "inactive-or-failed"),
        ]
        count = 4
        tasks = _most_tasks(leaving)
        # The limits of the slice that we were in are to hold on.
        for name, kind, value in (("Slice", "s", leaving.slice), ("TasksMax", "t", tasks)):
            if value is not None:
                properties += [name, kind, str(value)]
                count += 1
        self._call(
            environment,
            *(self._busctl, which, "--quiet", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"),
            *("org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail"),
            *(str(count), *properties, "0"),
        )
        asked = time.monotonic()
        while not moved():
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() - asked > _ASK_SECONDS:
                state = self._state(environment, which, unit)
                if state not in ("activating", "active", "reloading") or (state == "active" and not moved()):
                    raise Refused(f"systemd did not move us into {unit} (its state is {state})")
                asked = time.monotonic()

    def _bus(self) -> tuple[dict[str, str], str]:
        """What a client of the bus needs in its environment, and which bus it is."""
        if not os.path.isdir(f"{self._runtime}/systemd/system"):
            raise Refused("this host does not run systemd, and our own group holds processes")
        if not os.path.exists(self._busctl):
            raise Refused(
                f"{self._busctl} is missing, so systemd cannot be asked for a group", "install systemd's tools"
            )
        user = os.geteuid()
        if user == 0:
            if not os.path.exists(f"{self._runtime}/dbus/system_bus_socket"):
                raise Refused("no system bus runs, so systemd cannot be asked for a group", "install dbus")
            return {}, "--system"
        folder = f"{self._runtime}/user/{user}"
        if not os.path.exists(f"{folder}/bus"):
            raise Refused(
                "this user has no bus, so no user manager can be asked for a group",
                f"run `loginctl enable-linger {user}` as root once (and install dbus-user-session)",
            )
        return {"XDG_RUNTIME_DIR": folder}, "--user"

    def _state(self, environment: dict[str, str], which: str, unit: str) -> str:
        done = subprocess.run(
            [self._systemctl, which, "is-active", unit],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        return done.stdout.decode("utf-8", "replace").strip() or "unknown"

    def _call(self, environment: dict[str, str], *words: str) -> None:
        try:
            done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except OSError as problem:
            raise Refused(f"{words[0]} cannot be started: {problem.strerror}") from None
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise Refused(f"systemd gave us no group of our own: {said[0]}")
