"""Where control groups can be made: the hierarchies of this host, our own group in each, and whose a group is.

We make groups below the group that we were started in, so whatever bounds us bounds our boxes too. With v2 a group that
holds processes cannot hand most controllers on to groups below it; where it is not the root, and the operator has not
already handed them on, we move into a leaf of a group that is delegated to us.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ringfence.sandbox.process import delegation
from ringfence.sandbox.process.cgroupfs import read, write

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
MOST_FOLDERS = 20_000
"""A sweep looks at no more; cgroups of others can be many."""

_GROUP = re.compile(r"ringfence-(\d{1,10})-(\d{1,20})\.(\d{1,20})-([A-Za-z0-9_.-]{1,64})")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder in one hierarchy."""

    path: str
    v2: bool
    mount: str
    """Where the hierarchy is mounted."""

    def below(self, name: str) -> Folder:
        return Folder(f"{self.path}/{name}", self.v2, self.mount)


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, by what no later process has again: its number, when it started, and where that number counts."""

    pid: int
    start: int
    pid_namespace: int

    @classmethod
    def of_this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, _start(pid) or 0, os.stat("/proc/self/ns/pid").st_ino)

    def group(self, name: str) -> str:
        """How a group that this process makes is called."""
        called = f"ringfence-{self.pid}-{self.start}.{self.pid_namespace}-{name}"
        if _GROUP.fullmatch(called) is None:
            raise ValueError(f"{name!r} cannot be the name of a group")
        return called

    @classmethod
    def of_group(cls, called: str) -> Owner | None:
        """Who made the group with this name; None if it is not one of ours."""
        match = _GROUP.fullmatch(called)
        return cls(int(match[1]), int(match[2]), int(match[3])) if match else None

    def lives(self) -> bool:
        """False only where this is certain: numbers of another pid namespace say nothing here."""
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
        stat = read(f"/proc/{pid}/stat")
    except OSError:
        return None
    # The name stands in parentheses and may contain anything, parentheses too.
    after_name = stat[stat.rindex(")") + 2 :].split()
    return 0 if after_name[0] in "ZX" else int(after_name[19])


def find(proc: str, probe: str, manager: delegation.Manager | None = None) -> tuple[dict[str, Folder], dict[str, str]]:
    """Where each role can be had, and why the others cannot. A group named `probe` is made and removed on the way.

    This process may be moved, within what is delegated to it or by the `manager` of the groups; without one, never.
    """
    why = dict.fromkeys(("memory", "pids", "cpu", "freezer"), "this host has no such cgroup hierarchy")
    found: dict[str, Folder] = {}
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


def own_folders(cgroup: str, mountinfo: str) -> list[tuple[Folder, frozenset[str]]]:
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
            folders.append((Folder(mount.at + inside, mount.kind == "cgroup2", mount.at), served))
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
        fields, kind = before.split(" "), after.split(" ")
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
    own: Folder, probe: str, proc: str, manager: delegation.Manager | None
) -> tuple[Folder, set[str], dict[str, str]]:
    """Below our own group, or below one that is delegated to us; the folder is the one that groups are made in."""
    serves, why = _serves_v2(own, probe)
    if manager is None or {"memory", "pids"} <= serves or not _has_controllers(own):
        return own, serves, why
    try:
        base = _delegated(own, proc, manager)
    except delegation.Refused as refused:
        return own, serves, {**why, **{role: str(refused) for role in V2_CONTROLLERS if role not in serves}}
    return base, *_serves_v2(base, probe, is_own=False)


def _has_controllers(own: Folder) -> bool:
    """Whether any group of this hierarchy could have them; beside v1 there is an empty v2."""
    with suppress(OSError):
        return "memory" in read(own.mount + "/cgroup.controllers").split()
    return False


def _delegated(own: Folder, proc: str, manager: delegation.Manager) -> Folder:
    """Raises delegation.Refused."""
    given = delegation.delegated(own.path, own.mount)
    if given is not None:
        return Folder(given, True, own.mount)
    leaving = delegation.Leaving.of(own.path, own.mount, os.geteuid())
    if bound := delegation.bounded(leaving):
        raise delegation.Refused(
            f"our own group is bounded ({bound}) and holds processes, so the kernel hands no controller down from it",
            "add `Delegate=yes` to the unit that starts Ringfence",
        )

    def now() -> Folder | None:
        folders = own_folders(read(proc + "/self/cgroup"), read(proc + "/self/mountinfo"))
        return next((folder for folder, _ in folders if folder.v2), None)

    manager.move_to_scope(leaving, lambda: now() != own)
    moved = now()
    if moved is None or not moved.path.endswith(".scope"):
        raise delegation.Refused("systemd moved us to where we cannot see our group", f"see {delegation.PAGE}")
    delegation.settle(moved.path)
    return moved


def _serves(folder: Folder, roles: set[str], probe: str, *, is_own: bool = True) -> _Served:
    """Which of these roles a group below this one could have in this hierarchy, and why not the others."""
    path = folder.below(probe).path
    if not roles:
        return set(), {}
    try:
        if is_own and str(os.getpid()) not in read(folder.path + "/cgroup.procs").split():
            return set(), dict.fromkeys(roles, "our own group is not to be seen where its hierarchy is mounted")
        os.mkdir(path)
    except OSError as problem:
        return set(), dict.fromkeys(
            roles, f"no group can be made below our own: {problem.strerror}; see {delegation.PAGE}"
        )
    # Our own group may be the root, which lacks most files; a new group shows what there is.
    try:
        kind = read(path + "/cgroup.type").strip() if folder.v2 else "domain"
        if kind != "domain":
            return set(), dict.fromkeys(roles, f"a group below our own would be of the kind {kind!r}")
        serves = roles & roles_of(folder.below(probe))
        return serves, dict.fromkeys(roles - serves, "the kernel lacks it")
    finally:
        os.rmdir(path)


def roles_of(folder: Folder) -> set[str]:
    """What a group's folder can be used for, by the files that the kernel put there."""
    return {
        role for (v2, role), name in NEEDED_FILES.items() if v2 == folder.v2 and os.path.exists(f"{folder.path}/{name}")
    }


def _serves_v2(folder: Folder, probe: str, *, is_own: bool = True) -> _Served:
    """The same for v2, where the group has to hand its controllers on first."""
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
    """Hand the controllers of our own v2 group on to groups below it: those newly handed on, and why not the others."""
    there = read(path + "/cgroup.controllers").split()
    enabled = read(path + "/cgroup.subtree_control").split()
    handed_on, refused = [], {}
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
    """The groups of a hierarchy that were made by processes that live no more."""
    waiting, looked_at = [mount], 0
    while waiting and looked_at < MOST_FOLDERS:
        looked_at += 1
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        for name in below:
            owner = Owner.of_group(name)
            if owner is None:
                waiting.append(f"{folder}/{name}")
            elif not owner.lives():
                yield f"{folder}/{name}"
