"""What all boxes of a zygote see: a root of their own, with the interpreter and system libraries read-only in it, or
the tree of a container image. Built once, in the zygote's mount namespace.
"""

from __future__ import annotations

import os
import resource

from ringfence.sandbox.process.zygote import kernel
from ringfence.sandbox.process.zygote.confine import INSIDE_ID, MOUNTS, TEMPLATE, at_most
from ringfence.sandbox.process.zygote.machine import CPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

STEPS = {
    "keyring": "the session keyring is inherited and may hold credentials; this one is empty, and keyctl is refused",
    "host_name": "the host's name would identify it; a box's own namespace starts as a copy of the zygote's",
    "umask": "whatever the supervisor's was",
    "no_core_dump": "memory must not end up on disk, nor with a program of the host that collects dumps",
    "queues": "message queues and pending signals are not seen as the box's memory everywhere",
    "priority": "no box goes before others, whatever the supervisor may do",
    "trees_read_only": "nothing of the host's is writable, whatever its owner; no setuid file in it counts, no device",
    "own_devices": "six harmless device nodes; the host's /dev has disks, terminals and doors to the kernel",
}
"""Done once for all boxes of a zygote, which inherit it; the rest is `confine.STEPS`."""
HOST_NAME = "box"
CERTIFICATES = "/run/ringfence/ca.pem"
"""Where a box finds the certificate authorities that it is to trust for TLS."""
BASE = "/tmp"  # noqa: S108 - only a place to mount on, in a mount namespace of our own
_NO_DEVICES = kernel.MS_NOSUID | kernel.MS_NODEV
_NO_PRIVILEGES = kernel.ATTR_NOSUID | kernel.ATTR_NODEV
_READ_ONLY = kernel.ATTR_RDONLY | _NO_PRIVILEGES
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ETC = (
    "alternatives",
    "chromium.d",
    "fonts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "os-release",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)
_CREDENTIALS = ("pip.conf", "etc/npmrc", "local/etc/npmrc")
"""In the folder of an interpreter or of the system: where pip and npm keep the passwords of their indexes."""
_MS_MOVE = 8192
_LIMITS = {
    # The kernel gives a dump to a program of the host whatever the limit is, 0 as well, unless it is 1 (core(5)).
    "no_core_dump": ((resource.RLIMIT_CORE, 1),),
    "queues": (
        # None: the kernel counts them for the supervisor's user as well, and Landlock lets no box open one.
        (resource.RLIMIT_MSGQUEUE, 0),
        (11, 4096),  # RLIMIT_SIGPENDING, which Python has no name for
    ),
    "priority": ((resource.RLIMIT_RTPRIO, 0), (resource.RLIMIT_NICE, 0)),
}
_OURS = f"{BASE}/ours"
_IMAGE = f"{BASE}/image"
_IMAGE_FOLDERS = ("etc", "dev", "proc", "workspace", "run", "home", "var", "sys")
# Attributes in which a layer describes itself are ignored.
_OVERLAY_OPTIONS = f"lowerdir={_OURS}:{_IMAGE},redirect_dir=nofollow,metacopy=off,index=off,xino=off"
_LARGEST_FILE = 4 * 1024 * 1024
NODE_FILE = "node-in-a-box.js"
OWN_PROGRAMS = "/etc/programs"
"""In a box: names of programs that the host has under another name."""
WRITTEN = {
    "passwd": f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\nbox:x:{INSIDE_ID}:{INSIDE_ID}:box:/home/user:/bin/sh\n",
    "group": f"root:x:0:\nbox:x:{INSIDE_ID}:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "hostname": "box\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
    # The sockets that list interfaces are refused, and Node takes that for an error. A box has one interface.
    NODE_FILE: """\
const os = require("os")
const listed = os.networkInterfaces
const own = {address: "127.0.0.1", netmask: "255.0.0.0", family: "IPv4", mac: "00:00:00:00:00:00", internal: true}
os.networkInterfaces = function networkInterfaces() {
  try { return listed() } catch (_) { return {lo: [{...own, cidr: "127.0.0.1/8"}]} }
}
const synchronise = require("module").syncBuiltinESMExports
if (synchronise) synchronise()
""",
}
"""Files of /etc in every box, whatever its root is."""
_FOR_PIP = {
    # Otherwise pip would look for its index for a minute, and then report that there is no network.
    "pip.conf": "[global]\nno-index = true\nfind-links ="
    " /nothing_is_installed_from_within_a_box/unless_sandbox.install_inside_is_set_and_sandbox.allow_packages_has_it\n"
    # Some interpreters are marked as their system's own, and pip would complain about that instead.
    "break-system-packages = true\n",
}


def inherit(without: frozenset[str]) -> list[str]:
    """Set what a process passes on to all that it forks. Returns what was read back, where only we can."""
    seen: list[str] = []
    if "keyring" not in without:
        before = kernel.session_keyring()
        kernel.new_session_keyring()
        if kernel.session_keyring() != before:
            seen.append("keyring")
    if "host_name" not in without:
        kernel.set_host_name(HOST_NAME)
    if "umask" not in without:
        os.umask(0o022)
    if "priority" not in without:
        _drop_priority()
    if "shares" not in without:
        _limit_inotify()
    for step, limits in _LIMITS.items():
        if step not in without:
            for number, most in limits:
                least = at_most(number, most)
                resource.setrlimit(number, (least, least))
    return seen


def _drop_priority() -> None:
    """Have the priority of every other process: boxes do not inherit a higher one of the supervisor."""
    if os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_IDLE):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _limit_inotify() -> None:
    """Limit what counts for the supervisor's user: the boxes of a zygote get a quarter of what that user has."""
    for name in ("instances", "watches"):
        with open(f"/proc/sys/fs/inotify/max_user_{name}", encoding="ascii") as most:
            share = max(int(most.read()) // 4, 1)
        with open(f"/proc/sys/user/max_inotify_{name}", "w", encoding="ascii") as file:
            file.write(str(share))


def give_up(text: str) -> NoReturn:
    """Report a problem at once: an interpreter that exits may close the supervisor's socket before it reports it."""
    os.write(2, f"{text}\n".encode())
    raise SystemExit(1)


class HeldTree:
    """A tree of the host, opened while we could still see it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = kernel.open_path(f"{path}/.")  # a folder, or it fails


class Mounted:
    """A folder or file of the host that boxes see somewhere, perhaps to write to."""

    def __init__(self, words: list[Any], clone: int | None) -> None:
        self.host, self.at, self.writable, self.folder = words[:4]
        self._identity = tuple(words[4:6])
        self._clone = clone
        """A detached mount, where the supervisor may make one."""
        self._descriptor = -1

    def hold(self) -> None:
        """Open it while it is in sight; it must be what the supervisor looked at."""
        if self._clone is None:
            self._descriptor = kernel.open_path(self.host)
            found = os.fstat(self._descriptor)
            if (found.st_dev, found.st_ino) != self._identity:
                give_up(f"{self.host} is no longer what it was a moment ago")

    def attach(self, target: str) -> None:
        if self.folder:
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o644))
        if self._clone is not None:
            kernel.call(
                "move_mount", self._clone, b"", kernel.AT_FDCWD, target.encode(), kernel.MOVE_MOUNT_F_EMPTY_PATH
            )
            os.close(self._clone)
        else:
            kernel.bind(f"/proc/self/fd/{self._descriptor}", target, _NO_PRIVILEGES if self.writable else _READ_ONLY)
            os.close(self._descriptor)

    def make_room(self, place: str, places: list[str]) -> None:
        """Make its mount point in the template; those on a box's own disk are made in each box."""
        if any(f"{self.at}/".startswith(f"{own}/") for own in ("/workspace", *places)):
            return
        target = f"{place}{self.at}"
        os.makedirs(target if self.folder else os.path.dirname(target), 0o755, exist_ok=True)
        if not self.folder:
            os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o644))


def mounts(wanted: list[list[Any]], clones: list[int]) -> list[Mounted]:
    return [Mounted(words, clones[number] if clones else None) for number, words in enumerate(wanted)]


def hold(paths: list[str]) -> list[HeldTree]:
    """Open every tree while its path can be reached: it may lie below a folder that only its owner may enter."""
    system = [f"/{name}" for name in _SYSTEM if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]
    wanted: list[str] = []
    for path in sorted({*system, *paths}):
        if not any(path == known or path.startswith(f"{known}/") for known in wanted):
            wanted.append(path)
    return [HeldTree(path) for path in wanted]


class Places:
    """Where boxes see their folders for temporary files and for their user, and what has another name than there."""

    def __init__(self, own: list[str], home: str, python: str = "") -> None:
        self.own = own
        """Mount points, of boxes that stay; other boxes have links to a folder of their workspace."""
        self.home = home
        self.python = python
        """What `python` is, where the host has nothing of that name."""


def build(
    held: list[HeldTree],
    mounted: list[Mounted],
    without: frozenset[str],
    places: Places,
    choice: dict[str, Any] | None = None,
) -> None:
    """Make the template and hide everything else; `choice`: also all programs but these."""
    place = make_place()
    kernel.mount("template", place, "tmpfs", _NO_DEVICES, "mode=0755,size=64m,nr_inodes=16k")
    _skeleton(place, [*(tree.path for tree in held), *(mount.at for mount in mounted)], places)
    for tree in held:
        target = f"{place}{tree.path}"
        os.makedirs(target, 0o755, exist_ok=True)
        kernel.bind(f"/proc/self/fd/{tree.descriptor}", target, 0 if "trees_read_only" in without else _READ_ONLY)
        os.close(tree.descriptor)
        _hide_credentials(target)
    if choice is not None and "programs" not in without:
        _show_named_programs(place, choice)
    _make_mount_points(place, mounted, [tree.path for tree in held], places)
    _finish(place, mounted, without, noexec=choice is not None and "noexec" not in without)


def _hide_credentials(tree: str) -> None:
    """Package managers keep passwords of their indexes beside the interpreter; boxes see empty files there."""
    empty = f"{BASE}/empty"
    for name in _CREDENTIALS:
        if os.path.isfile(f"{tree}/{name}") and not os.path.islink(f"{tree}/{name}"):
            os.close(os.open(empty, os.O_CREAT | os.O_CLOEXEC, 0o644))
            kernel.bind(empty, f"{tree}/{name}", _READ_ONLY)


def build_from_image(image: Mounted, mounted: list[Mounted], without: frozenset[str], places: Places) -> None:
    """Likewise, with the tree of a container image as the root, and nothing of the host's system in it.

    The image lies beneath a few folders and files of ours, both read-only, as layers of one file system: an entry of
    the image with one of our names (a file, a link that leads elsewhere) is hidden, and no link of it is followed.
    """
    place = make_place()
    os.mkdir(_OURS, 0o755)
    kernel.mount("ours", _OURS, "tmpfs", _NO_DEVICES, "mode=0755,size=1m,nr_inodes=4k")
    for name in _IMAGE_FOLDERS:
        os.mkdir(f"{_OURS}/{name}", 0o755)
    _link(_OURS, [mount.at for mount in mounted], places)
    _write(_OURS, WRITTEN)
    for name in DEVICES:
        os.close(os.open(f"{_OURS}/dev/{name}", os.O_CREAT | os.O_CLOEXEC, 0o644))
    _make_mount_points(_OURS, mounted, [], places)
    image.attach(_IMAGE)
    try:
        kernel.mount("image", place, "overlay", _NO_DEVICES, _OVERLAY_OPTIONS)
    except OSError as exc:
        give_up(f"an image cannot be the root of a box here: the kernel makes no overlay of it ({exc.strerror})")
    kernel.set_mount(place, _READ_ONLY)
    kernel.bind(f"{_OURS}/dev", f"{place}/dev", _READ_ONLY | kernel.ATTR_NOEXEC)  # and nothing that the image has there
    for layer in (_OURS, _IMAGE):
        kernel.call("umount2", layer.encode(), kernel.MNT_DETACH)
    _finish(place, mounted, without)


def make_place() -> str:
    """Make the place for the template, in a file system that is ours alone."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("zygote", BASE, "tmpfs", _NO_DEVICES, "mode=0755,size=1m,nr_inodes=512")
    os.mkdir(f"{BASE}/proc", 0o755)
    place = f"{BASE}{TEMPLATE.decode()}"
    os.mkdir(place, 0o755)
    return place


def _make_mount_points(place: str, mounted: list[Mounted], trees: list[str], places: Places) -> None:
    """Make mount points for mounts that lie in no other one and in no tree: those contain the mount point already."""
    covered = list(trees)
    for mount in mounted:
        if not any(mount.at.startswith(f"{outer}/") for outer in covered):
            mount.make_room(place, places.own)
        covered.append(mount.at)


def _finish(place: str, mounted: list[Mounted], without: frozenset[str], *, noexec: bool = False) -> None:
    """Prepare what boxes mount by themselves, and unmount all the rest."""
    os.mkdir(f"{BASE}{MOUNTS.decode()}", 0o755)
    for number, mount in enumerate(mounted):
        mount.attach(f"{BASE}{MOUNTS.decode()}/{number}")
        if noexec:
            kernel.set_mount(f"{BASE}{MOUNTS.decode()}/{number}", kernel.ATTR_NOEXEC, recursive=True)
    if "own_devices" in without:
        kernel.mount("/dev", f"{place}/dev", None, kernel.MS_BIND | kernel.MS_REC)
    else:
        _devices(place)
    # A box can only mount a /proc of its own while a whole one is in sight; this one stays outside of the template, and
    # shows no process but the zygote and its boxes.
    kernel.mount("proc", f"{BASE}/proc", "proc", _NO_DEVICES | kernel.MS_NOEXEC)
    kernel.pivot(BASE)


def _skeleton(place: str, paths: list[str], places: Places) -> None:
    for name in ("etc", "dev", "proc", "workspace", "sys", "run", "home", "var", "opt"):
        os.mkdir(f"{place}/{name}", 0o755)
    _link(place, paths, places)
    if places.python:
        os.mkdir(f"{place}{OWN_PROGRAMS}", 0o755)
        os.symlink(places.python, f"{place}{OWN_PROGRAMS}/python")
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{place}/{name}")
    for name in _ETC:
        _copy(f"/etc/{name}", f"{place}/etc/{name}")
    for entry in os.listdir("/etc"):
        if entry.startswith("python3"):
            _copy(f"/etc/{entry}", f"{place}/etc/{entry}")
    _write(place, {**WRITTEN, **_FOR_PIP})


def _link(place: str, paths: list[str], places: Places) -> None:
    """Link the places that programs write to by default, and their own streams; `paths` are what boxes see. Each box
    has terminals, and a size, of its own."""
    for at in (*places.own, "/tmp", "/dev/shm", "/var/tmp", places.home):  # noqa: S108 - as they are called in a box
        if at in places.own or any(f"{path}/".startswith(f"{at}/") for path in paths):
            # A mount point, or it holds something of the host, so programs cannot write there.
            os.makedirs(f"{place}{at}", 0o755, exist_ok=True)
        else:
            os.symlink(places.own[0] if places.own else "/workspace/tmp", f"{place}{at}")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{place}/dev/{name}")
    os.makedirs(f"{place}{CPU}", 0o755)
    os.mkdir(f"{place}/dev/pts", 0o755)
    os.symlink("pts/ptmx", f"{place}/dev/ptmx")


def _write(place: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        with open(f"{place}/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def _copy(source: str, target: str) -> None:
    """Copy small public files: a mount for each would have to be made again for every box."""
    try:
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        if os.path.isdir(source) and not os.path.islink(source):
            _copy_folder(source, target)
        elif os.path.lexists(source):
            _copy_one(source, target, link=os.path.islink(source))
    except OSError:
        return  # missing, or not readable by all users: then not by boxes either


def _copy_folder(source: str, target: str) -> None:
    """There are hundreds of certificates and alternatives, nearly all of them links."""
    os.makedirs(target, 0o755, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            try:
                inside = f"{target}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    _copy_folder(entry.path, inside)
                else:
                    _copy_one(entry.path, inside, link=entry.is_symlink())
            except OSError:
                continue  # as above


def _copy_one(source: str, target: str, *, link: bool) -> None:
    if link:
        os.symlink(os.readlink(source), target)
    elif os.path.isfile(source) and os.path.getsize(source) <= _LARGEST_FILE:
        with open(source, "rb") as old, open(target, "wb") as new:
            new.write(old.read())


def _devices(place: str) -> None:
    for name in DEVICES:
        target = f"{place}/dev/{name}"
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o644))
        kernel.bind(f"/dev/{name}", target, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC)


# ── Where only named programs may run ─────────────────────────────────────────────────────────────


def _show_named_programs(place: str, choice: dict[str, Any]) -> None:
    """Leave only these in the folders of programs of the template."""
    staging = f"{BASE}/staging"
    absent = f"{BASE}/absent"
    os.mkdir(staging, 0o755)
    os.close(os.open(absent, os.O_CREAT | os.O_CLOEXEC, 0))
    for path in choice["hidden"]:
        if os.path.isfile(f"{place}{path}"):
            kernel.bind(absent, f"{place}{path}", _READ_ONLY | kernel.ATTR_NOEXEC)
    for folder, entries in choice["folders"]:
        if os.path.isdir(f"{place}{folder}"):
            _fill_programs(staging, f"{place}{folder}", entries)


def _fill_programs(staging: str, folder: str, entries: list[list[str]]) -> None:
    kernel.mount("programs", staging, "tmpfs", _NO_DEVICES, "mode=0755,size=4m,nr_inodes=16k")
    for name, leads in entries:
        if leads:
            os.symlink(leads, f"{staging}/{name}")
        elif os.path.isfile(f"{folder}/{name}"):
            os.close(os.open(f"{staging}/{name}", os.O_CREAT | os.O_CLOEXEC, 0))
            kernel.bind(f"{folder}/{name}", f"{staging}/{name}", _READ_ONLY)
    kernel.set_mount(staging, _READ_ONLY)
    kernel.mount(staging, folder, None, _MS_MOVE)


def seal(choice: dict[str, Any], without: frozenset[str]) -> None:
    """Once the zygote has loaded all that it needs: nothing is executed any more from trees that may hold any code, nor
    mapped as code, as the loader would."""
    if not choice["sealed"] or "noexec" in without:
        return
    place = TEMPLATE.decode()
    spared = [(path, _clone_mount(f"{place}{path}")) for path in choice["spared"] if os.path.exists(f"{place}{path}")]
    for path in choice["sealed"]:
        kernel.bind(f"{place}{path}", f"{place}{path}", kernel.ATTR_NOEXEC)
    for path, clone in spared:
        kernel.call(
            "move_mount", clone, b"", kernel.AT_FDCWD, f"{place}{path}".encode(), kernel.MOVE_MOUNT_F_EMPTY_PATH
        )
        os.close(clone)


def _clone_mount(path: str) -> int:
    """A detached copy of the mount as it is now."""
    return kernel.call(
        "open_tree", kernel.AT_FDCWD, path.encode(), kernel.OPEN_TREE_CLONE | kernel.AT_RECURSIVE | os.O_CLOEXEC
    )


# ── Paths as in a box ─────────────────────────────────────────────────────────────────────────────


class Inside:
    """Within this, paths mean what they mean in a box: imports find the interpreter's own files."""

    def __enter__(self) -> None:
        self._outside = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.chroot(TEMPLATE)
        os.chdir("/")

    def __exit__(self, *_: object) -> None:
        os.fchdir(self._outside)
        os.chroot(".")
        os.chdir("/")
        os.close(self._outside)
