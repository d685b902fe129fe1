"""How a process is confined, as one list of steps. Used inside the zygote.

The order matters, and each step says why it stands where it does. Each step adds the
system calls that it needs to a plan; the process that will run the program makes them all before it gets its order.
After the last step it has no privilege left to give away.
"""

from __future__ import annotations

import os
import resource
import struct

from ringfence.sandbox.process.zygote import kernel, landlock
from ringfence.sandbox.process.zygote.plan import HANDLE, SyscallPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Shape = dict[str, "Any"]
"""What boxes of one kind have in common: `disk_bytes inodes processes open_files file_bytes cpu_seconds data_bytes
cores`; 0 and an empty list mean no limit of this sort. `sends` is as `open_files`, until a box has sent its own.
`folders` are where, how large, whether read-only. `places`, of a box that stays: where it sees its folders for
temporary files and for its user, on one disk with its workspace; `input`: whether it has inputs. Where only named
programs may run: `executable` is what may be, and `noexec` that nothing written in the box may."""

INSIDE_ID = 1000
LOCKED_BYTES = 65536
SECURE_BITS = 0xEF
"""NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE, and all four of the first kernels that had them locked."""
TEMPLATE = b"/t"
"""Where the zygote built what all its boxes have in common; a box sees it as its root."""
WORKSPACE = TEMPLATE + b"/workspace"
PROC = TEMPLATE + b"/proc"
TERMINALS = 32
"""The most that the programs of a box can have at a time."""
MOUNTS = b"/m"
"""Where the zygote has what its boxes are to see elsewhere, each under its number."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY


# Plain classes: what the zygote loads, every box is a copy of, and `dataclasses` alone doubles the cost of a fork.


class BuildSite(SyscallPlan):
    """The plan of boxes of one kind: what was ordered, and the system calls for it."""

    def __init__(self, shape: dict[str, Any], spaces: int, entrances: int) -> None:
        super().__init__(entrances)
        self.open_files = 0
        """The limit to be set once it has sent its descriptors; 0: none."""
        self.shape = shape
        self.spaces = spaces
        """Namespaces of the first process that are to be entered."""
        self.own_id = False
        """No other box has its id on the host, nor has its zygote."""
        self.idmaps_workspace = False
        """An id-mapped mount shows its files as the supervisor's user's: that user could not reach another's."""
        self.filter: kernel.Filter | None = None
        self.landlock_version = 0
        self.last_capability = 0
        self.machine: list[tuple[bytes, bytes]] = []
        """Paths in a box, and the files and folders that are seen there."""
        self.covers: list[tuple[bytes, bytes]] | None = None
        """Names in /proc that are hidden one by one, and by what; None where the kernel hides them all at once."""


class ConfineStep:
    def __init__(
        self, name: str, why: str, act: Callable[[BuildSite], object], rests_on: str = "", *, once: bool = False
    ) -> None:
        self.name = name
        self.why = why
        self.act = act
        self.rests_on = rests_on
        """The step without which this one cannot be done."""
        self.once = once
        """Done once for the whole box, not by processes that enter it later."""


class Namespace:
    """A namespace that is made with the box's first process; every process of the box enters it."""

    def __init__(self, name: str, flag: int, why: str) -> None:
        self.name = name
        self.flag = flag
        self.why = why


NAMESPACES = (
    Namespace("user_namespace", kernel.NEWUSER, "capabilities and ids that mean nothing outside; owns all the others"),
    Namespace(
        "pid_namespace", kernel.NEWPID, "no process outside has a number here, and the last one out ends them all"
    ),
    Namespace("mount_namespace", kernel.NEWNS, "mounts of the box are the box's own"),
    Namespace("ipc_namespace", kernel.NEWIPC, "no shared memory, semaphores or queues of others"),
    Namespace("uts_namespace", kernel.NEWUTS, "a host name of its own"),
    Namespace("net_namespace", kernel.NEWNET, "no route to anywhere, no socket of the host, abstract ones included"),
)


def _mapping(site: BuildSite) -> None:
    site.write_text("setgroups", "deny")
    site.write_text("uid_map", "map")
    site.write_text("gid_map", "map")


def own(first: int, outer: int) -> dict[str, bytes]:
    """The values of a box's plan that no other box has, from its first process and its id outside."""
    files = {name: b"/proc/%d/%s" % (first, name.encode()) for name in ("setgroups", "uid_map", "gid_map", "ns/user")}
    return {**files, "deny": b"deny", "map": b"%d %d 1" % (INSIDE_ID, outer)}


def _enter(site: BuildSite) -> None:
    # A file system that is made from outside of the box's user namespace can still be given an owner.
    site.call("setns", HANDLE, site.spaces & ~kernel.NEWUSER if site.idmaps_workspace else site.spaces)
    for name in ("setfsgid", "setfsuid") if site.idmaps_workspace else ():
        site.call(name, INSIDE_ID)


def _identity(site: BuildSite) -> None:
    if site.idmaps_workspace:
        _idmap_workspace(site)
        site.call("setns", HANDLE, kernel.NEWUSER)
    site.call("setresgid", INSIDE_ID, INSIDE_ID, INSIDE_ID)
    site.call("setresuid", INSIDE_ID, INSIDE_ID, INSIDE_ID)
    site.call("prctl", kernel.PR_SET_DUMPABLE, 1)  # or the program could not look at its own /proc/self


def _shares(site: BuildSite) -> None:
    # What the box uses of these counts for its user on the host too, and there each user has only so many.
    bounds = [
        (b"user/max_inotify_instances", b"8"),
        (b"user/max_inotify_watches", b"4096"),
        (b"user/max_user_namespaces", b"0"),
    ]
    if site.spaces & kernel.NEWNET:
        # TCP would enlarge its buffers by itself, to megabytes for each socket, which not every control group counts.
        bounds += [(b"net/ipv4/tcp_rmem", b"4096\t131072\t262144"), (b"net/ipv4/tcp_wmem", b"4096\t16384\t262144")]
    for name, most in bounds:
        descriptor = site.open(b"/proc/sys/" + name, os.O_RDWR)
        site.call("write", descriptor, most, len(most))
        site.reads(descriptor, most)
        site.close(descriptor)


def _root(site: BuildSite) -> None:
    site.call("mount", TEMPLATE, TEMPLATE, None, kernel.MS_BIND | kernel.MS_REC, None)


def _proc(site: BuildSite) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    site.call("mount", b"proc", PROC, b"proc", flags, b"hidepid=invisible")
    for at, source in site.machine:
        site.call("mount", source, TEMPLATE + at, None, kernel.MS_BIND, None)
    # The kernel has a link there, which is not followed: what it leads to goes by who asks, and all here see the same.
    link = site.open(PROC + b"/mounts", os.O_PATH | os.O_NOFOLLOW)
    site.call("mount", PROC + b"/1/mounts", b"/proc/self/fd/%d" % link, None, kernel.MS_BIND, None)
    site.close(link)
    if site.covers is None:
        # From now on there is nothing but processes, and the names that something was mounted at: those stay known.
        site.call("mount", b"proc", PROC, b"proc", flags | kernel.MS_REMOUNT, b"subset=pid,hidepid=invisible")
    for at, nothing in site.covers or ():
        site.call("mount", nothing, TEMPLATE + at, None, kernel.MS_BIND, None)


def _terminals(site: BuildSite) -> None:
    # The kernel has so many for all of the host, and some memory for each.
    options = b"newinstance,ptmxmode=0666,mode=0600,max=%d" % TERMINALS
    site.call("mount", b"devpts", TEMPLATE + b"/dev/pts", b"devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)


def _pivot(site: BuildSite) -> None:
    site.call("chdir", TEMPLATE)
    site.call("pivot_root", b".", b".")
    site.call("umount2", b".", kernel.MNT_DETACH)


def _read_only(site: BuildSite) -> None:
    _set_mount(site, b"/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)


def _loopback(site: BuildSite) -> None:
    descriptor = site.taken(site.call("socket", 2, 2 | 0o2000000, 0))
    site.call("ioctl", descriptor, 0x8914, struct.pack("16sh22x", b"lo", 0x1 | 0x40))
    site.close(descriptor)


def _folder(site: BuildSite) -> None:
    site.call("chdir", b"/workspace")


def _session(site: BuildSite) -> None:
    site.call("setsid")


def _cores(site: BuildSite) -> None:
    cores = site.shape["cores"]
    if cores:
        mask = sum(1 << core for core in cores).to_bytes(1024, "little")
        site.call("sched_setaffinity", 0, len(mask), mask)


def _limit(site: BuildSite, number: int, most: int, hard: int | None = None) -> None:
    site.call("prlimit64", 0, number, struct.pack("QQ", most, most if hard is None else hard), None)


def at_most(number: int, most: int) -> int:
    """Where the host sets a lower limit, a higher one cannot be set."""
    hard = resource.getrlimit(number)[1]
    return most if hard == resource.RLIM_INFINITY else min(most, hard)


def _locked_memory(site: BuildSite) -> None:
    _limit(site, resource.RLIMIT_MEMLOCK, at_most(resource.RLIMIT_MEMLOCK, LOCKED_BYTES))


def _open_files(site: BuildSite) -> None:
    most = site.shape["open_files"]
    # Where a user's boxes share a quota of descriptors on their way to another process, the box must still be able to
    # send its own to the supervisor, whatever another one did.
    sends = site.shape.get("sends", most)
    _limit(site, resource.RLIMIT_NOFILE, sends)
    site.open_files = most if sends != most else 0


def _file_size(site: BuildSite) -> None:
    _limit(site, resource.RLIMIT_FSIZE, site.shape["file_bytes"])


def _processes(site: BuildSite) -> None:
    # Our own first process counts where it has the id of the box.
    _limit(site, resource.RLIMIT_NPROC, site.shape["processes"] + (not site.own_id))


def _memory(site: BuildSite) -> None:
    if site.shape["data_bytes"]:
        _limit(site, resource.RLIMIT_DATA, site.shape["data_bytes"])


def _cpu_time(site: BuildSite) -> None:
    if site.shape["cpu_seconds"]:
        _limit(site, resource.RLIMIT_CPU, site.shape["cpu_seconds"], site.shape["cpu_seconds"] + 1)


def _counted(site: BuildSite) -> None:
    for descriptor in site.entrances:
        site.call("write", descriptor, b"0", 1)
        site.call("close", descriptor)
    site.done_is_seen()


def _cgroup_namespace(site: BuildSite) -> None:
    site.call("unshare", kernel.NEWCGROUP)


def _bounding_set(site: BuildSite) -> None:
    for number in range(site.last_capability + 1):
        site.call("prctl", kernel.PR_CAPBSET_DROP, number)


def _secure_bits(site: BuildSite) -> None:
    site.call("prctl", kernel.PR_SET_SECUREBITS, SECURE_BITS)


def _capabilities(site: BuildSite) -> None:
    site.call("prctl", kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    site.call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def _no_new_privileges(site: BuildSite) -> None:
    site.call("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _landlock(site: BuildSite) -> None:
    version = site.landlock_version
    attributes = landlock.attributes(version)
    rules = site.taken(site.call("landlock_create_ruleset", attributes, len(attributes), 0))
    written = [
        (at.encode(), landlock.WORK if folder else landlock.CHANGE)
        for at, writable, folder in site.shape.get("mounts", ())
        if writable
    ]
    devices = [(b"/dev", landlock.DEVICE)]
    if site.shape["data_bytes"]:
        # No control group counts memory: a program that can write to /dev/zero could share memory unseen.
        writable = (b"/dev/null", b"/dev/full", b"/dev/random", b"/dev/urandom")
        devices = [(b"/dev", landlock.DEVICE & ~landlock.WRITE_FILE)]
        devices += [(path, landlock.READ_FILE | landlock.WRITE_FILE) for path in writable]
    devices += [(b"/dev/tty", landlock.TERMINAL), (b"/dev/pts", landlock.TERMINAL | landlock.READ_DIR)]
    places = [(place.encode(), landlock.WORK) for place in site.shape.get("places", ())]
    rights_of = [(b"/", landlock.READ), *devices, (b"/workspace", landlock.WORK), *places, *written]
    executable = site.shape.get("executable")
    if executable is not None:
        rights_of = [(path, rights & ~landlock.EXECUTE) for path, rights in rights_of]
        rights_of += [(path.encode(), landlock.EXECUTE) for path in executable]
    for path, rights in rights_of:
        descriptor = site.open(path, os.O_PATH)
        site.call("landlock_add_rule", rules, landlock.PATH_BENEATH, landlock.rule(version, rights, descriptor), 0)
        site.close(descriptor)
    site.call("landlock_restrict_self", rules, landlock.restriction(version))
    site.close(rules)


def _seccomp(site: BuildSite) -> None:
    assert site.filter is not None
    site.descriptors["denials"] = site.taken(site.call("seccomp", 1, 8, kernel.address(site.filter)))


# ── The places of a box: its workspace, its inputs, and what it sees of the host besides ──────────


def _workspace_flags(site: BuildSite) -> int:
    """noexec where only named programs may run: nothing that was written in the box is one."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    return flags | kernel.MS_NOEXEC if site.shape.get("noexec") else flags


def _below(site: BuildSite, at: bytes) -> bytes:
    """Where something that a box sees at this path is made. A box that stays has one disk for all that it may write:
    its folders lie there by their paths until `places` puts each where it belongs, with all that is mounted in it."""
    places = site.shape.get("places")
    if not places:
        return TEMPLATE + at
    inside = any(at == place or at.startswith(place + b"/") for place in (b"/workspace", *map(str.encode, places)))
    return (WORKSPACE if inside else TEMPLATE) + at


def _workspace(site: BuildSite) -> None:
    limits = b"mode=0755,size=%d,nr_inodes=%d" % (site.shape["disk_bytes"], site.shape["inodes"])
    site.call("mount", b"workspace", WORKSPACE, b"tmpfs", _workspace_flags(site), limits)
    places = site.shape.get("places")
    for name in _folders_of(places) if places else (b"/input", b"/output", b"/tmp"):
        site.call("mkdirat", kernel.AT_FDCWD, WORKSPACE + name, 0o755)
    if places:
        site.descriptors["disk"] = site.open(WORKSPACE, _OPEN_FOLDER)
    site.descriptors["workspace"] = site.open(_below(site, b"/workspace"), _OPEN_FOLDER)


def _folders_of(places: list[str]) -> list[bytes]:
    """The folders of a disk, outermost first."""
    made = [b"/workspace"]
    for place in places:
        parts = place.encode().split(b"/")
        made += [b"/".join(parts[:depth]) for depth in range(2, len(parts) + 1)]
    return made


def _input(site: BuildSite) -> None:
    if not site.shape.get("input", True):
        return
    path = _below(site, b"/workspace/input")
    if site.shape.get("places"):
        site.call("mkdirat", kernel.AT_FDCWD, path, 0o755)
    site.call("mount", b"input", path, b"tmpfs", _workspace_flags(site), b"mode=0755")
    site.descriptors["input"] = site.open(path, _OPEN_FOLDER)


def _mount_points(site: BuildSite) -> None:
    """Make the folders and files that mounts in the workspace go to."""
    places = site.shape.get("places")
    made = {WORKSPACE, *(WORKSPACE + name for name in (_folders_of(places) if places else ()))}
    if not places or site.shape.get("input"):
        made.add(_below(site, b"/workspace/input"))
    if not places:
        made |= {WORKSPACE + b"/output", WORKSPACE + b"/tmp"}
    covered: list[bytes] = []
    for at, _, folder in site.shape.get("mounts", ()):
        path = _below(site, at.encode())
        if not path.startswith(WORKSPACE + b"/") or any(path.startswith(outer + b"/") for outer in covered):
            continue
        covered.append(path)
        parts = path.split(b"/")
        for depth in range(4, len(parts) + 1):
            each = b"/".join(parts[:depth])
            if each in made:
                continue
            made.add(each)
            if depth < len(parts) or folder:
                site.call("mkdirat", kernel.AT_FDCWD, each, 0o755)
            else:
                site.close(site.open(each, os.O_CREAT | os.O_WRONLY))


def _mounts(site: BuildSite) -> None:
    for number, (at, _, _) in enumerate(site.shape.get("mounts", ())):
        # Its target may lie in a folder of the host: no link there is followed.
        how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0x04)  # RESOLVE_NO_SYMLINKS
        target = site.taken(site.call("openat2", kernel.AT_FDCWD, _below(site, at.encode()), how, len(how)))
        source = MOUNTS + b"/%d" % number
        place = b"/proc/self/fd/%d" % target
        site.call("mount", source, place, None, kernel.MS_BIND | kernel.MS_REC, None)
        site.close(target)


def _input_read_only(site: BuildSite) -> None:
    if site.shape.get("input", True):
        path = _below(site, b"/workspace/input")
        site.call("mount", path, path, None, kernel.MS_BIND, None)
        _set_mount(site, path, kernel.ATTR_RDONLY)


def _folders(site: BuildSite) -> None:
    made: set[bytes] = set()
    for number, (at, size, read_only) in enumerate(site.shape.get("folders", ())):
        parts = at.encode().strip(b"/").split(b"/")[1:]
        for depth in range(1, len(parts) + 1):
            path = b"/".join((_below(site, b"/workspace"), *parts[:depth]))
            if path not in made:
                site.call("mkdirat", kernel.AT_FDCWD, path, 0o755)
                made.add(path)
        limits = b"mode=0755,size=%d,nr_inodes=%d" % (size, site.shape["inodes"])
        site.call("mount", b"volume", path, b"tmpfs", _workspace_flags(site), limits)
        site.descriptors[f"folder{number}"] = site.open(path, _OPEN_FOLDER)
        if read_only:
            site.call("mount", path, path, None, kernel.MS_BIND, None)
            _set_mount(site, path, kernel.ATTR_RDONLY)


def _places(site: BuildSite) -> None:
    """Put the folders of the disk where a box that stays sees them; the workspace last, which covers the disk."""
    places = [place.encode() for place in site.shape.get("places", ())]
    for place in (*places, b"/workspace") if places else ():
        site.call("mount", WORKSPACE + place, TEMPLATE + place, None, kernel.MS_BIND | kernel.MS_REC, None)


def _whole(site: BuildSite) -> None:
    """For the supervisor, which reads what the program may read, by the paths that the program sees."""
    if site.shape.get("places"):
        site.descriptors["root"] = site.open(b"/", os.O_PATH | os.O_DIRECTORY)


def _idmap_workspace(site: BuildSite) -> None:
    """Mount the workspace once more, over itself, so that its owner outside and the box are one user.

    The supervisor's descriptors lead to what is underneath: there the same files belong to its own user.
    """
    space = site.open_text("ns/user", os.O_RDONLY)
    flags = kernel.OPEN_TREE_CLONE | os.O_CLOEXEC | kernel.AT_RECURSIVE
    copy = site.taken(site.call("open_tree", kernel.AT_FDCWD, WORKSPACE, flags))
    wanted = struct.pack("QQQQ", kernel.ATTR_IDMAP, 0, 0, space)
    site.call("mount_setattr", copy, b"", kernel.AT_EMPTY_PATH | kernel.AT_RECURSIVE, wanted, len(wanted))
    site.call("move_mount", copy, b"", kernel.AT_FDCWD, WORKSPACE, kernel.MOVE_MOUNT_F_EMPTY_PATH)
    site.close(copy)
    site.close(space)


def _set_mount(site: BuildSite, path: bytes, attributes: int) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    site.call("mount_setattr", kernel.AT_FDCWD, path, 0, wanted, len(wanted))


# ── The list ──────────────────────────────────────────────────────────────────────────────────────


STEPS = (
    ConfineStep(
        "mapping",
        "from outside: inside, no process has the right yet; one id, and it is not the host's root",
        _mapping,
        rests_on="user_namespace",
        once=True,
    ),
    ConfineStep(
        "entrance", "into the namespaces of the first process; the rest is done with what counts in them alone", _enter
    ),
    ConfineStep(
        "identity",
        "before any mount, so that what is made belongs to the box's own id, never to the host's root",
        _identity,
        rests_on="user_namespace",
    ),
    ConfineStep(
        "shares",
        "while the outer /proc is there: no user namespace within this one, and file watchers left for others",
        _shares,
        rests_on="user_namespace",
        once=True,
    ),
    ConfineStep(
        "own_root", "the shared template, read-only; the mounts that follow go into this copy alone", _root, once=True
    ),
    ConfineStep(
        "workspace",
        "the only place to write, with its size and number of files limited by the kernel",
        _workspace,
        once=True,
    ),
    ConfineStep(
        "input",
        "a file system of its own, so that inputs do not count as the program's disk use",
        _input,
        once=True,
    ),
    ConfineStep(
        "rooms", "for mounts, while all of the workspace can be written", _mount_points, rests_on="workspace", once=True
    ),
    ConfineStep(
        "input_read_only",
        "after the supervisor's descriptor was opened, which stays writable",
        _input_read_only,
        rests_on="input",
        once=True,
    ),
    ConfineStep(
        "folders",
        "file systems of their own for what outlives the box, so that each is only so large",
        _folders,
        rests_on="workspace",
        once=True,
    ),
    ConfineStep(
        "mounts",
        "what was declared and no more, over all that was made until now; read-only or not, it is so already",
        _mounts,
        rests_on="rooms",
        once=True,
    ),
    ConfineStep(
        "places",
        "with all that is mounted in them, so after the last of these",
        _places,
        rests_on="workspace",
        once=True,
    ),
    ConfineStep(
        "proc",
        "needs the new pid namespace, and the outer /proc still in sight; shows processes, and how large the box is",
        _proc,
        rests_on="pid_namespace",
        once=True,
    ),
    ConfineStep(
        "terminals", "its own, which no other box and not the host can see; theirs are not here", _terminals, once=True
    ),
    ConfineStep(
        "pivot",
        "after the last mount that needs the outside: now the old root and the outer /proc are gone",
        _pivot,
        once=True,
    ),
    ConfineStep("read_only_root", "after pivot, when nothing has to be made in it any more", _read_only, once=True),
    ConfineStep("whole", "of the box as its programs see it, when it is complete", _whole, once=True),
    ConfineStep(
        "loopback",
        "likewise; programs of one box may talk to each other",
        _loopback,
        rests_on="net_namespace",
        once=True,
    ),
    ConfineStep("folder", "where a program begins", _folder),
    ConfineStep("session", "no controlling terminal, so nothing can be typed into it", _session),
    ConfineStep("cores", "where no control group limits processor time, fewer cores do", _cores),
    ConfineStep("open_files", "descriptors are kernel memory", _open_files),
    ConfineStep("file_size", "no sparse file larger than the disk", _file_size),
    ConfineStep("processes", "in a user namespace of its own, so that boxes do not share the count", _processes),
    ConfineStep(
        "locked_memory", "it can never be taken back; not before, since the zygote locks what it shares", _locked_memory
    ),
    ConfineStep("memory", "a backstop where no control group counts memory", _memory),
    ConfineStep("cpu_time", "where a limit of processor time was asked for", _cpu_time),
    ConfineStep("counted", "after what is not the program's to pay for", _counted),
    ConfineStep("cgroup_namespace", "after it is in its own group, which then is all it can name", _cgroup_namespace),
    ConfineStep("bounding_set", "while there is still the capability to do it", _bounding_set),
    ConfineStep("secure_bits", "likewise; no id gives capabilities, for good", _secure_bits),
    ConfineStep("capabilities", "after the last step that needs any", _capabilities),
    ConfineStep("no_new_privs", "no setuid file gives any back; Landlock and seccomp require it", _no_new_privileges),
    ConfineStep(
        "landlock",
        "after the mounts, whose folders it names, and before seccomp, which forbids nothing it needs",
        _landlock,
        rests_on="no_new_privs",
    ),
    ConfineStep("seccomp", "last: it forbids most of what was done above", _seccomp, rests_on="no_new_privs"),
)


def names() -> list[str]:
    """Every step that can be left out, for the test that each one is needed."""
    return [item.name for item in (*NAMESPACES, *STEPS)]


def flags(without: frozenset[str]) -> int:
    return sum(space.flag for space in NAMESPACES if space.name not in without)


def _steps_with_idmap() -> list[ConfineStep]:
    """The steps, but the user namespace is entered only after the file systems were made for another owner."""
    steps = {step.name: step for step in STEPS}
    late = [steps.pop("identity"), steps.pop("shares")]
    after = list(steps).index("folders") + 1
    return [*list(steps.values())[:after], *late, *list(steps.values())[after:]]


def plan(site: BuildSite, without: frozenset[str], *, fresh: bool) -> BuildSite:
    """Plan every step in turn; in a box that is not fresh, only the steps of a process."""
    for step in _steps_with_idmap() if site.idmaps_workspace else STEPS:
        if step.name in without or step.rests_on in without or (step.once and not fresh):
            continue
        site.step = step.name
        step.act(site)
    if fresh:
        site.descriptors["first"] = HANDLE  # with which all of the box can be ended
    else:
        site.call("close", HANDLE)
    return site
