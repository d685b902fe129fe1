"""Where control groups can be made: the hierarchies of this host, our own group in each, and the makers of groups.

We make groups below the group that we were started in, so its limits hold for our boxes too. With cgroup v2 a group
delegates memory, pids and cpu only while it holds no process itself, and the group that we are started in holds us.
Where it is not the root, and the operator has not already delegated them, the supervisor moves: into a leaf of a group
that was delegated to it, beside which the boxes have theirs. A service with `Delegate=` and a container have such a
group; otherwise we ask systemd for a scope of our own, as container engines do.

We leave no group that an operator has limited: limits for us must hold for our boxes too.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from ringfence.core.record import dataclass
from ringfence.core.system import process_fields
from ringfence.sandbox.process.cgroups.cgroupfs import read, write

LEAF = "ringfence-supervisor"
"""Where a supervisor sits in a delegated group. It is never swept: others of the same container may sit there too."""
PAGE = "docs/hosts.md#control-groups"

_BUSCTL = "/usr/bin/busctl"
_SYSTEMCTL = "/usr/bin/systemctl"
_LOOK_SECONDS = 0.002
_ASK_SECONDS = 1.0
"""If we were not moved by then, systemd is asked whether it still tries."""
_BOUND_FILES = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "cpuset.cpus", "io.max")
_ROUNDS = 8
"""Processes may fork while a group is emptied."""
V2_CONTROLLERS = ("memory", "pids", "cpu")
V1_ROLES = {"memory": "memory", "pids": "pids", "cpu": "cpu", "cpuacct": "time", "freezer": "freezer"}
NEEDED_FILES = {
    (False, "memory"): "memory.limit_in_bytes",
    (False, "pids"): "pids.max",
    (False, "cpu"): "cpu.cfs_quota_us",
    (False, "time"): "cpuacct.usage",
    (False, "freezer"): "freezer.state",
    (True, "memory"): "memory.max",
    (True, "pids"): "pids.max",
    (True, "cpu"): "cpu.max",
    (True, "time"): "cpu.stat",
    (True, "freezer"): "cgroup.freeze",
    (True, "kill"): "cgroup.kill",
}
MAX_FOLDERS = 20_000
"""A sweep looks at no more; other programs may have many cgroups."""

_GROUP = re.compile(r"ringfence-(\d{1,10})-(\d{1,20})\.(\d{1,20})-([A-Za-z0-9_.-]{1,64})")


class DelegationRefused(Exception):
    """No group was delegated: why, and what an administrator can do about it."""

    def __init__(self, why: str, remedy: str = f"see {PAGE}") -> None:
        super().__init__(f"{why}; {remedy}")


@dataclass(frozen=True, slots=True)
class Leaving:
    """The consequences of moving from our own group into a scope of the manager."""

    slice: str | None
    """The innermost slice that we stay in; None where the manager does not control it."""
    left: tuple[str, ...]
    """The groups that we would leave, and whose limits would not hold for us."""

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
            # The user's manager is in the user's slice, whatever started us.
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
    """The manager of this host's groups."""

    def move_to_scope(self, leaving: Leaving, moved: Callable[[], bool]) -> None:
        """Have this process moved from its group into a delegated one. Raises DelegationRefused."""
        ...


def delegated(own: str, mount: str) -> str | None:
    """The path of a group that was delegated to us already, prepared for groups below it; None where there is none.

    Raises DelegationRefused where there is one that cannot be prepared.
    """
    parent = os.path.dirname(own)
    if os.path.basename(own) == LEAF and own != mount and _may(parent) and (_marked(parent) or _hands_down(parent)):
        return parent  # another supervisor, or an earlier one of this process, has prepared it
    if not _may(own) or not (_marked(own) or _is_root_of_a_container(own, mount)):
        return None
    _empty(own)
    return own


def settle(group: str) -> None:
    """Move this process into the leaf of a group that is ours alone. Raises DelegationRefused."""
    try:
        leaf = _leaf(group)
        write(leaf + "/cgroup.procs", str(os.getpid()))
    except OSError as problem:
        raise DelegationRefused(
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
    """Whether it was delegated to this user: to make groups below it, and to move processes."""
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
    """Move every process of a group into its leaf: all of them are one service, or one container."""
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
        raise DelegationRefused(f"our group cannot be emptied into a leaf: {problem.strerror}") from None
    raise DelegationRefused("our group holds processes that we cannot move into a leaf")


def bounded(leaving: Leaving) -> str | None:
    """A limit that an operator has set on a group that we would leave."""
    for group in leaving.left:
        for name in _BOUND_FILES:
            with suppress(OSError):
                value = read(f"{group}/{name}").split()
                if value and value[0] != "max":
                    return f"{name} of {os.path.basename(group)} is {' '.join(value)}"
    return None


def _most_tasks(leaving: Leaving) -> int | None:
    """Lowest limit of processes of the groups that we leave: systemd limits most of them by itself, as do we."""
    found = []
    for group in leaving.left:
        with suppress(OSError, ValueError):
            found.append(int(read(f"{group}/pids.max")))
    return min(found, default=None)


class Systemd:
    """Asks systemd: the manager of the user, or of the system where we are root."""

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
        # The limits of the slice that we were in must still hold.
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
                    raise DelegationRefused(f"systemd did not move us into {unit} (its state is {state})")
                asked = time.monotonic()

    def _bus(self) -> tuple[dict[str, str], str]:
        """What a client of the bus needs in its environment, and which bus it is."""
        if not os.path.isdir(f"{self._runtime}/systemd/system"):
            raise DelegationRefused("this host does not run systemd, and our own group holds processes")
        if not os.path.exists(self._busctl):
            raise DelegationRefused(
                f"{self._busctl} is missing, so systemd cannot be asked for a group", "install systemd's tools"
            )
        user = os.geteuid()
        if user == 0:
            if not os.path.exists(f"{self._runtime}/dbus/system_bus_socket"):
                raise DelegationRefused("no system bus runs, so systemd cannot be asked for a group", "install dbus")
            return {}, "--system"
        folder = f"{self._runtime}/user/{user}"
        if not os.path.exists(f"{folder}/bus"):
            raise DelegationRefused(
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
            raise DelegationRefused(f"{words[0]} cannot be started: {problem.strerror}") from None
        if done.returncode:
            errors = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise DelegationRefused(f"systemd gave us no group of our own: {errors[0]}")


# ── The hierarchies of this host ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CgroupFolder:
    """A folder in one hierarchy."""

    path: str
    v2: bool
    mount: str
    """Where the hierarchy is mounted."""

    def below(self, name: str) -> CgroupFolder:
        return CgroupFolder(f"{self.path}/{name}", self.v2, self.mount)


@dataclass(frozen=True, slots=True)
class GroupOwner:
    """A process, identified by what no later process has: its number, its start time, and its pid namespace."""

    pid: int
    start: int
    pid_namespace: int

    @classmethod
    def of_this_process(cls) -> GroupOwner:
        pid = os.getpid()
        return cls(pid, _start(pid) or 0, os.stat("/proc/self/ns/pid").st_ino)

    def group(self, name: str) -> str:
        """The name of a group that this process makes."""
        called = f"ringfence-{self.pid}-{self.start}.{self.pid_namespace}-{name}"
        if _GROUP.fullmatch(called) is None:
            raise ValueError(f"{name!r} cannot be the name of a group")
        return called

    @classmethod
    def of_group(cls, called: str) -> GroupOwner | None:
        """The maker of the group with this name; None if it is not one of ours."""
        match = _GROUP.fullmatch(called)
        return cls(int(match[1]), int(match[2]), int(match[3])) if match else None

    def lives(self) -> bool:
        """False only where it is certain: numbers of another pid namespace mean nothing here."""
        if self.pid_namespace != os.stat("/proc/self/ns/pid").st_ino:
            return True
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        # A process that we may not look at is taken to be alive.
        start = _start(self.pid)
        return start is None or start == self.start


def _start(pid: int) -> int | None:
    """When the process started, in ticks since boot; 0 for one that has ended and was not reaped yet."""
    try:
        fields = process_fields(pid)
    except OSError:
        return None
    return 0 if fields[0] in "ZX" else int(fields[19])


def find(proc: str, probe: str, manager: Manager | None = None) -> tuple[dict[str, CgroupFolder], dict[str, str]]:
    """Where each role is available, and why the others are not. A group named `probe` is made and removed on the way.

    This process may be moved, within what is delegated to it or by the `manager` of the groups; without one, never.
    """
    why = dict.fromkeys(("memory", "pids", "cpu", "freezer"), "this host has no such cgroup hierarchy")
    found: dict[str, CgroupFolder] = {}
    try:
        ours = own_folders(read(proc + "/self/cgroup"), read(proc + "/self/mountinfo"))
    except OSError as problem:
        return {}, dict.fromkeys(why, f"the cgroups of this host cannot be read: {problem.strerror}")
    # v2 first: where it can stop and end, one folder does what would take two of v1. Where it limits nothing, v1 counts
    # for less: a process gets into its folders without stopping all others.
    for folder, controllers in sorted(ours, key=lambda own: not own[0].v2):
        taken = found.keys() if "memory" in found and found["memory"].v2 else found.keys() - {"time"}
        roles = {role for name, role in V1_ROLES.items() if name in controllers} - taken
        if folder.v2:
            folder, serves, refused = _served_by_v2(folder, probe, proc, manager)
        else:
            serves, refused = _serves(folder, roles, probe)
        found.update(dict.fromkeys(sorted(serves), folder))
        why.update(refused)
    return found, {role: reason for role, reason in why.items() if role not in found}


def own_folders(cgroup: str, mountinfo: str) -> list[tuple[CgroupFolder, frozenset[str]]]:
    """Our own group in each mounted hierarchy, with its controllers (none for v2), from the two files of procfs."""
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if number != "0" else ("",):
            paths[controller] = path
    seen: set[frozenset[str]] = set()
    folders = []
    for mount in _mounts(mountinfo):
        served = frozenset(paths.keys() & set(mount.options)) if mount.kind == "cgroup" else frozenset()
        own = next((paths[name] for name in served), None) if mount.kind == "cgroup" else paths.get("")
        inside = None if own is None else _relative(own, mount.root)
        if inside is not None and served not in seen:
            seen.add(served)
            folders.append((CgroupFolder(mount.at + inside, mount.kind == "cgroup2", mount.at), served))
    return folders


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    at: str
    kind: str
    options: tuple[str, ...]


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        kind = after.split(" ")
        if kind[0] in ("cgroup", "cgroup2") and len(fields) > 4 and len(kind) > 2:
            yield _Mount(_unescaped(fields[3]), _unescaped(fields[4]), kind[0], tuple(kind[2].split(",")))


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _relative(path: str, root: str) -> str | None:
    """Where a group is below the root of a mount; None if the mount does not show it."""
    if "/.." in path or "/.." in root:
        return None
    if root == "/":
        return path.rstrip("/")
    return path[len(root) :] if path == root or path.startswith(root + "/") else None


_Served = tuple[set[str], dict[str, str]]
"""Roles that a group below some other could have, and why not the others."""


def _served_by_v2(
    own: CgroupFolder, probe: str, proc: str, manager: Manager | None
) -> tuple[CgroupFolder, set[str], dict[str, str]]:
    """Below our own group, or below one that is delegated to us; the folder is where groups are made."""
    serves, why = _serves_v2(own, probe)
    if manager is None or {"memory", "pids"} <= serves or not _has_controllers(own):
        return own, serves, why
    try:
        base = _delegated(own, proc, manager)
    except DelegationRefused as refused:
        return own, serves, {**why, **{role: str(refused) for role in V2_CONTROLLERS if role not in serves}}
    return base, *_serves_v2(base, probe, is_own=False)


def _has_controllers(own: CgroupFolder) -> bool:
    """Whether any group of this hierarchy could have them; beside v1 there is an empty v2."""
    with suppress(OSError):
        return "memory" in read(own.mount + "/cgroup.controllers").split()
    return False


def _delegated(own: CgroupFolder, proc: str, manager: Manager) -> CgroupFolder:
    """Raises delegation.Refused."""
    given = delegated(own.path, own.mount)
    if given is not None:
        return CgroupFolder(given, True, own.mount)
    leaving = Leaving.of(own.path, own.mount, os.geteuid())
    if bound := bounded(leaving):
        raise DelegationRefused(
            f"our own group is bounded ({bound}) and holds processes, so the kernel hands no controller down from it",
            "add `Delegate=yes` to the unit that starts Ringfence",
        )

    def now() -> CgroupFolder | None:
        folders = own_folders(read(proc + "/self/cgroup"), read(proc + "/self/mountinfo"))
        return next((folder for folder, _ in folders if folder.v2), None)

    manager.move_to_scope(leaving, lambda: now() != own)
    moved = now()
    if moved is None or not moved.path.endswith(".scope"):
        raise DelegationRefused("systemd moved us to where we cannot see our group", f"see {PAGE}")
    settle(moved.path)
    return moved


def _serves(folder: CgroupFolder, roles: set[str], probe: str, *, is_own: bool = True) -> _Served:
    """Which of these roles a group below this one could have in this hierarchy, and why not the others."""
    path = folder.below(probe).path
    if not roles:
        return set(), {}
    try:
        if is_own and str(os.getpid()) not in read(folder.path + "/cgroup.procs").split():
            return set(), dict.fromkeys(roles, "our own group is not to be seen where its hierarchy is mounted")
        os.mkdir(path)
    except OSError as problem:
        return set(), dict.fromkeys(roles, f"no group can be made below our own: {problem.strerror}; see {PAGE}")
    # Our own group may be the root, which lacks most files; a new group shows what there is.
    try:
        kind = read(path + "/cgroup.type").strip() if folder.v2 else "domain"
        if kind != "domain":
            return set(), dict.fromkeys(roles, f"a group below our own would be of the kind {kind!r}")
        serves = roles & roles_of(folder.below(probe))
        return serves, dict.fromkeys(roles - serves, "the kernel lacks it")
    finally:
        os.rmdir(path)


def roles_of(folder: CgroupFolder) -> set[str]:
    """The roles that a group's folder can have, by the files that the kernel put there."""
    return {
        role for (v2, role), name in NEEDED_FILES.items() if v2 == folder.v2 and os.path.exists(f"{folder.path}/{name}")
    }


def _serves_v2(folder: CgroupFolder, probe: str, *, is_own: bool = True) -> _Served:
    """The same for v2, where the group has to delegate its controllers first."""
    serves, why = _serves(folder, {"time", "freezer", "kill"}, probe, is_own=is_own)
    if not serves:
        return serves, {**why, **dict.fromkeys(V2_CONTROLLERS, why.get("freezer", ""))}
    handed_on, refused = _hand_on(folder.path)
    wanted = {"time", "freezer", "kill", *V2_CONTROLLERS} - refused.keys()
    more, lacking = _serves(folder, wanted, probe, is_own=is_own)
    if not more:
        # Handing on has made a group below ours useless, so it is taken back.
        for controller in handed_on:
            with suppress(OSError):
                write(folder.path + "/cgroup.subtree_control", f"-{controller}")
        return serves, {**refused, **lacking}
    return more, {**refused, **lacking}


def _hand_on(path: str) -> tuple[list[str], dict[str, str]]:
    """Delegate the controllers of our own v2 group to groups below it. Returns those newly delegated, and why not the
    others."""
    there = read(path + "/cgroup.controllers").split()
    enabled = read(path + "/cgroup.subtree_control").split()
    handed_on = []
    refused = {}
    for controller in V2_CONTROLLERS:
        if controller in enabled:
            continue
        if controller not in there:
            refused[controller] = "it is not delegated to our own group"
            continue
        try:
            write(path + "/cgroup.subtree_control", f"+{controller}")
            handed_on.append(controller)
        except OSError as problem:
            busy = problem.errno in (errno.EBUSY, errno.EOPNOTSUPP)
            refused[controller] = (
                "our own group holds processes, so the kernel hands no controller on to groups below it"
                if busy
                else f"it cannot be handed on to groups below our own: {problem.strerror}"
            )
    return handed_on, refused


def left_behind(mount: str) -> Iterator[str]:
    """The groups of a hierarchy whose makers have died."""
    waiting = [mount]
    looked_at = 0
    alive: dict[GroupOwner, bool] = {}  # a keeper of many sessions has made many groups, and is looked at once
    while waiting and looked_at < MAX_FOLDERS:
        looked_at += 1
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for name in below:
            owner = GroupOwner.of_group(name)
            if owner is None:
                waiting.append(f"{folder}/{name}")
                continue
            if owner not in alive:
                alive[owner] = owner.lives()
            if not alive[owner]:
                yield f"{folder}/{name}"
