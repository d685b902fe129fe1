"""How a box is closed, as one list of steps. Runs inside the zygote's child; imports nothing else of ours.

The order matters, and each step says why it stands where it does. All of them are done before the box is told what to
run: from the last step on there is no privilege left in it to give away.
"""

from __future__ import annotations

import os
import resource

from ringfence.sandbox.process import kernel, landlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Shape = dict[str, "int | list[int]"]
"""What boxes of one kind have in common: `disk_bytes inodes processes open_files file_bytes cpu_seconds data_bytes
cores`; 0 and an empty list mean no limit of this sort."""

TEMPLATE = "/t"
"""Where the zygote built what all its boxes have in common; a box sees it as its root."""
INSIDE_ID = 1000
HOST_NAME = "box"
_RLIMIT_SIGPENDING = 11  # which Python has no name for


# Plain classes: what the zygote loads, every box is a copy of, and `dataclasses` alone doubles the cost of a fork.


class Site:
    """One box in the making: what was ordered, and what the steps leave for the supervisor."""

    def __init__(self, shape: dict[str, Any], outer_id: int, lifeline: int) -> None:
        self.shape = shape
        self.outer_id = outer_id
        """Who the box is in the zygote's user namespace."""
        self.lifeline = lifeline
        """Readable as soon as the zygote is gone."""
        self.filter: kernel.Filter | None = None
        self.landlock_version = 0
        self.entrances: list[int] = []
        """Of the box's control group."""
        self.descriptors: dict[str, int] = {}
        """For the supervisor: `workspace`, `input`, `denials`."""
        self.seen: list[str] = []
        """Steps that were read back, where nobody but the box's first process can."""


class Step:
    def __init__(self, name: str, why: str, act: Callable[[Site], None], rests_on: str = "") -> None:
        self.name = name
        self.why = why
        self.act = act
        self.rests_on = rests_on
        """Without that one this one cannot be done either."""


class Namespace:
    """Made with the box's first process itself, all at once."""

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


def _lifeline(site: Site) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)
    os.set_blocking(site.lifeline, False)
    try:
        os.read(site.lifeline, 1)
    except BlockingIOError:
        if kernel.parent_death_signal() == 9:
            site.seen.append("lifeline")
        return
    os._exit(1)  # the zygote died before the kernel was told to watch it


def _identity(site: Site) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_ID} {site.outer_id} 1"),
        ("gid_map", f"{INSIDE_ID} {site.outer_id} 1"),
    ):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
        os.write(descriptor, text.encode())
        os.close(descriptor)
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)


def _shares(site: Site) -> None:
    # What the box uses of these counts for its user on the host too, and there each user has only so many.
    for name, most in (("inotify_instances", b"32"), ("inotify_watches", b"16384"), ("user_namespaces", b"0")):
        descriptor = os.open(f"/proc/sys/user/max_{name}", os.O_RDWR | os.O_CLOEXEC)
        os.write(descriptor, most)
        kept = os.pread(descriptor, 16, 0).strip()
        os.close(descriptor)
    if kept == most:
        site.seen.append("shares")


def _root(site: Site) -> None:
    kernel.mount(TEMPLATE, TEMPLATE, None, kernel.MS_BIND | kernel.MS_REC)


def _workspace(site: Site) -> None:
    place = f"{TEMPLATE}/workspace"
    size, inodes = site.shape["disk_bytes"], site.shape["inodes"]
    limits = f"mode=0755,size={size},nr_inodes={inodes}"
    kernel.mount("workspace", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, limits)
    for name in ("input", "output", "tmp"):
        os.mkdir(f"{place}/{name}", 0o755)
    site.descriptors["workspace"] = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _input(site: Site) -> None:
    place = f"{TEMPLATE}/workspace/input"
    kernel.mount("input", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
    site.descriptors["input"] = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _input_read_only(site: Site) -> None:
    place = f"{TEMPLATE}/workspace/input"
    kernel.mount(place, place, None, kernel.MS_BIND)
    kernel.set_mount(place, kernel.ATTR_RDONLY)


def _proc(site: Site) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | 8
    kernel.mount("proc", f"{TEMPLATE}/proc", "proc", flags, "subset=pid,hidepid=invisible")


def _pivot(site: Site) -> None:
    kernel.pivot(TEMPLATE)


def _read_only(site: Site) -> None:
    kernel.set_mount("/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)


def _host_name(site: Site) -> None:
    kernel.set_host_name(HOST_NAME)


def _loopback(site: Site) -> None:
    kernel.bring_up_loopback()


def _session(site: Site) -> None:
    os.setsid()


def _keyring(site: Site) -> None:
    before = kernel.session_keyring()
    kernel.new_session_keyring()
    if kernel.session_keyring() != before:
        site.seen.append("keyring")


def _umask(site: Site) -> None:
    os.umask(0o022)


def _cores(site: Site) -> None:
    if site.shape["cores"]:
        os.sched_setaffinity(0, site.shape["cores"])


def _no_core_dump(site: Site) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _open_files(site: Site) -> None:
    most = site.shape["open_files"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _file_size(site: Site) -> None:
    most = site.shape["file_bytes"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _processes(site: Site) -> None:
    most = site.shape["processes"]
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _locked_memory(site: Site) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (819_200, 819_200))
    resource.setrlimit(_RLIMIT_SIGPENDING, (4096, 4096))


def _priority(site: Site) -> None:
    resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))


def _memory(site: Site) -> None:
    if site.shape["data_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (site.shape["data_bytes"], site.shape["data_bytes"]))


def _cpu_time(site: Site) -> None:
    if site.shape["cpu_seconds"]:
        resource.setrlimit(resource.RLIMIT_CPU, (site.shape["cpu_seconds"], site.shape["cpu_seconds"] + 1))


def _counted(site: Site) -> None:
    for descriptor in site.entrances:
        os.write(descriptor, b"0")
        os.close(descriptor)
    site.seen.append("counted")


def _cgroup_namespace(site: Site) -> None:
    kernel.unshare(kernel.NEWCGROUP)


def _bounding_set(site: Site) -> None:
    kernel.drop_bounding_set()


def _secure_bits(site: Site) -> None:
    kernel.prctl(kernel.PR_SET_SECUREBITS, 0xEF)


def _capabilities(site: Site) -> None:
    kernel.drop_capabilities()


def _no_new_privileges(site: Site) -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _landlock(site: Site) -> None:
    rules = landlock.Rules(site.landlock_version)
    for path, rights in (("/", landlock.READ), ("/dev", landlock.DEVICE), ("/workspace", landlock.WORK)):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rules.allow(descriptor, rights)
        os.close(descriptor)
    rules.enforce()


def _not_dumpable(site: Site) -> None:
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def _seccomp(site: Site) -> None:
    assert site.filter is not None
    site.descriptors["denials"] = kernel.install_filter(site.filter, listener=True)


STEPS = (
    Step("lifeline", "first: whatever happens later, a box never outlives its zygote", _lifeline),
    Step(
        "identity",
        "before any mount, so that what is made belongs to the box's own id, never to the host's root",
        _identity,
        rests_on="user_namespace",
    ),
    Step(
        "shares",
        "while the outer /proc is there: no user namespace within this one, and file watchers left for others",
        _shares,
        rests_on="user_namespace",
    ),
    Step("own_root", "the shared template, read-only; the mounts that follow go into this copy alone", _root),
    Step("workspace", "the only place to write, with its size and number of files limited by the kernel", _workspace),
    Step("input", "a file system of its own, so that inputs do not count as the program's disk use", _input),
    Step(
        "input_read_only",
        "after the supervisor's descriptor was opened, which stays writable",
        _input_read_only,
        rests_on="input",
    ),
    Step(
        "proc",
        "needs the new pid namespace, and the outer /proc still in sight; shows processes and nothing else",
        _proc,
        rests_on="pid_namespace",
    ),
    Step("pivot", "after the last mount that needs the outside: now the old root and the outer /proc are gone", _pivot),
    Step("read_only_root", "after pivot, when nothing has to be made in it any more", _read_only),
    Step(
        "host_name",
        "needs the capability that is dropped below; the host's own name says who it is",
        _host_name,
        rests_on="uts_namespace",
    ),
    Step("loopback", "likewise; programs of one box may talk to each other", _loopback, rests_on="net_namespace"),
    Step("session", "no controlling terminal, so nothing can be typed into it", _session),
    Step("keyring", "the session keyring is inherited and may hold credentials", _keyring),
    Step("umask", "whatever the supervisor's was", _umask),
    Step("cores", "where no control group limits processor time, fewer cores do", _cores),
    Step("no_core_dump", "memory must not end up on disk", _no_core_dump),
    Step("open_files", "descriptors are kernel memory", _open_files),
    Step("file_size", "no sparse file larger than the disk", _file_size),
    Step("processes", "in a user namespace of its own, so that boxes do not share the count", _processes),
    Step(
        "locked_memory", "locked pages and message queues are not seen as the box's memory everywhere", _locked_memory
    ),
    Step("priority", "no box goes before others, whatever the supervisor may do", _priority),
    Step("memory", "a backstop where no control group counts memory", _memory),
    Step("cpu_time", "where a limit of processor time was asked for", _cpu_time),
    Step("counted", "after what is not the program's to pay for, before its first process is there", _counted),
    Step("cgroup_namespace", "after it is in its own group, which then is all it can name", _cgroup_namespace),
    Step("bounding_set", "while there is still the capability to do it", _bounding_set),
    Step("secure_bits", "likewise; no id gives capabilities, for good", _secure_bits),
    Step("capabilities", "after the last step that needs any", _capabilities),
    Step("no_new_privs", "no setuid file gives any back; Landlock and seccomp require it", _no_new_privileges),
    Step(
        "landlock",
        "after the mounts, whose folders it names, and before seccomp, which forbids nothing it needs",
        _landlock,
        rests_on="no_new_privs",
    ),
    Step("not_dumpable", "our first process: what runs beside it must not look into it", _not_dumpable),
    Step("seccomp", "last: it forbids most of what was done above", _seccomp, rests_on="no_new_privs"),
)


def names() -> list[str]:
    """Every step that can be left out, for the test that each one is needed."""
    return [item.name for item in (*NAMESPACES, *STEPS)]


def flags(without: frozenset[str]) -> int:
    return sum(space.flag for space in NAMESPACES if space.name not in without)


def close(site: Site, without: frozenset[str]) -> None:
    """Every step in turn. Raises OSError, with the step's name, where one cannot be done: then there is no box."""
    for step in STEPS:
        if step.name in without or step.rests_on in without:
            continue
        try:
            step.act(site)
        except OSError as exc:
            raise OSError(exc.errno, f"{step.name}: {exc.strerror}") from exc
