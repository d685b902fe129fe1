"""Folders and files of the host for a box: opened once, and never by name again.

A path is walked without following a single link, so that a user who may write to a folder on the way cannot lead us
elsewhere. As root, we clone each as a mount of its own, id-mapped so that the owner of the folder and the box are one
user: what the box writes belongs to that owner. As an ordinary user the box is that user.
"""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ringfence.core.box import Mount, within
from ringfence.core.errors import Unavailable
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.sandbox.files import guarded
from ringfence.sandbox.process.zygote import kernel

MAX_MOUNTS = 32
_MAX_IN_ALL = 384
"""Including what is held in them: more than there are names, so that one folder cannot have too many."""
_SYSTEM = ("proc", "sys", "dev", "etc", "usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "run")
_OURS = ("/workspace", "/workspace/output", "/workspace/tmp")
_NEW_NAMESPACE = (
    "import ctypes, os; ctypes.CDLL(None).unshare(0x10000000); os.write(1, b'x'); os.read(0, 1)"  # CLONE_NEWUSER
)


@dataclass(frozen=True, slots=True)
class Placed:
    """A mount that was checked, with device and inode, so that another file in its place is noticed."""

    host: str
    at: str
    writable: bool
    folder: bool
    identity: tuple[int, int, int, int]
    """Device, inode, owner and group."""
    owner: tuple[int, int] = (0, 0)
    """The owner that is mapped to the box: of the mounted folder, also for what is held in it."""

    @property
    def shape(self) -> list[str | bool]:
        return [self.at, self.writable, self.folder]

    @property
    def words(self) -> list[str | bool | int]:
        """As the zygote gets it."""
        return [self.host, *self.shape, *self.identity[:2]]


def check(mounts: Sequence[Mount], trees: Iterable[str]) -> None:
    """Raises ValueError, with a sentence for a person, for mounts that are not possible."""
    if len(mounts) > MAX_MOUNTS:
        raise ValueError(f"a box can have {MAX_MOUNTS} mounts, not {len(mounts)}")
    trees = list(trees)
    for number, mount in enumerate(mounts):
        _check_place(mount.at)
        if (name := guarded.is_itself(mount)) is not None:
            raise ValueError(
                f"{mount.host} is, or belongs to, something that programs on this host act on ({name}), so a box may"
                " not write to it; mount it ro, or give a reason (unsafe: REASON)"
            )
        for other in (*mounts[:number], *mounts[number + 1 :]):
            if within(mount.at, other.at):
                _check_within(mount, other)
        for tree in trees:
            if within(mount.at, tree):
                _check_within(mount, Mount(tree, tree))
            if within(tree, mount.at) and os.path.realpath(mount.host) != mount.at:
                raise ValueError(f"a mount at {mount.at} would hide {tree}, which the box needs")


def _check_within(mount: Mount, outer: Mount) -> None:
    """Check a mount inside another: the box must not be able to move its mount point, which must exist."""
    if mount.at == outer.at:
        raise ValueError(f"two things cannot both be mounted at {mount.at}")
    if outer.mode == "rw":
        raise ValueError(f"a mount at {mount.at} lies in {outer.at}, which the box may write to; use two folders")
    there = outer.host + mount.at.removeprefix(outer.at)
    if os.path.islink(there) or os.path.isdir(there) != os.path.isdir(mount.host) or not os.path.exists(there):
        raise ValueError(f"a mount at {mount.at} lies in {outer.at}, which is read-only and has no such place")


def _check_place(at: str) -> None:
    if not at.startswith("/") or at == "/" or os.path.normpath(at) != at or at.startswith("//") or "\0" in at:
        raise ValueError(f"a mount is at an absolute path without '.', '..' and double slashes, not {quoted(at, 200)}")
    if at.split("/")[1] in _SYSTEM:
        raise ValueError(f"a mount cannot be at {at}: that part of a box is the system's")
    if at == _OURS[0] or any(within(at, ours) for ours in _OURS[1:]):
        raise ValueError(f"a mount cannot be at {at}; use a folder of its own, such as /workspace/data")


def place(mounts: Sequence[Mount]) -> tuple[Placed, ...]:
    """The mounts as they are now, outermost first. Raises ValueError."""
    placed = {mount.at: _placed(mount) for mount in mounts}
    for hold in guarded.holds(mounts):
        if len(placed) == _MAX_IN_ALL:
            break  # what is not held is checked when the box is over
        try:
            held = _placed(Mount(hold.host, hold.at, "rw" if hold.writable else "ro"))
        except ValueError:
            continue  # it was there a moment ago
        placed[hold.at] = replace(held, owner=placed[hold.mount.at].owner)
    return tuple(sorted(placed.values(), key=lambda each: each.at))  # an outer one goes first


def held(mounts: Iterable[Placed]) -> guarded.Held:
    return {each.at: (each.writable, each.identity[:2]) for each in mounts}


def _placed(mount: Mount) -> Placed:
    descriptor = _opened(mount.host)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    folder = stat.S_ISDIR(found.st_mode)
    if not folder and not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{mount.host} is neither a folder nor a file, so it cannot be mounted")
    identity = (found.st_dev, found.st_ino, found.st_uid, found.st_gid)
    return Placed(mount.host, mount.at, mount.mode == "rw", folder, identity, (found.st_uid, found.st_gid))


def _opened(path: str) -> int:
    try:
        return kernel.open_path(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist, so it cannot be mounted") from None
    except OSError as exc:
        hint = "; a link stands in it: name the folder that it leads to" if exc.errno == 40 else ""
        raise ValueError(f"{path} cannot be mounted: {exc.strerror}{hint}") from None


def clone(mounts: Sequence[Placed], box_id: int, image: Placed | None = None) -> list[int]:
    """Clone each mount, detached; the caller closes them; the image comes last. For root. Raises Unavailable."""
    clones: list[int] = []
    spaces: dict[tuple[int, int], int] = {}
    try:
        for mount in mounts:
            owner = mount.owner
            if owner not in spaces:
                spaces[owner] = _user_namespace(f"{owner[0]} {box_id} 1", f"{owner[1]} {box_id} 1")
            clones.append(_clone(mount, spaces[owner]))
        if image is not None:
            clones.append(_clone(image, None))
    except BaseException:
        for descriptor in clones:
            os.close(descriptor)
        raise
    finally:
        for descriptor in spaces.values():
            os.close(descriptor)
    return clones


def _clone(mount: Placed, space: int | None) -> int:
    """`space`: the user namespace that maps its owner to the box; None: only what all users may read can be read."""
    try:
        found = kernel.open_path(mount.host)
    except OSError as exc:
        raise Unavailable("no_mount", f"{mount.host} cannot be mounted: {exc.strerror}") from None
    try:
        seen = os.fstat(found)
        if (seen.st_dev, seen.st_ino, seen.st_uid, seen.st_gid) != mount.identity:
            raise Unavailable("no_mount", f"{mount.host} is no longer what it was a moment ago")
        flags = kernel.OPEN_TREE_CLONE | os.O_CLOEXEC | kernel.AT_EMPTY_PATH
        flags |= kernel.AT_RECURSIVE if mount.folder else 0
        descriptor = kernel.call("open_tree", found, b"", flags)
    except OSError as exc:
        raise Unavailable("no_mount", f"{mount.host} cannot be mounted: {exc.strerror}") from None
    finally:
        os.close(found)
    try:
        attributes = kernel.ATTR_NOSUID | kernel.ATTR_NODEV | (0 if mount.writable else kernel.ATTR_RDONLY)
        _set(descriptor, attributes)
        if space is not None:
            _set_owner(descriptor, mount, space)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _set(descriptor: int, attributes: int, space: int = 0) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, space)
    kernel.call("mount_setattr", descriptor, b"", kernel.AT_EMPTY_PATH | kernel.AT_RECURSIVE, wanted, len(wanted))


def _set_owner(descriptor: int, mount: Placed, space: int) -> None:
    """Map its owner to the box. Where the file system cannot, only what all users may read can be read."""
    try:
        _set(descriptor, kernel.ATTR_IDMAP, space)
    except OSError as exc:
        if mount.writable:
            raise Unavailable(
                "maps_no_ids",
                f"{mount.host} cannot be mounted writable: its file system maps no ids ({exc.strerror});"
                " start Ringfence as the owner of the folder instead of root, or mount it ro",
            ) from None


@cache
def maps_ids(folder: Path) -> bool:
    """Whether a folder on this file system can be mounted with its owner mapped to a box. For root."""
    try:
        clones = clone(place([Mount(str(folder), "/srv/folder", "rw")]), os.getuid() + 1)
    except (ValueError, Unavailable, OSError):
        return False
    for descriptor in clones:
        os.close(descriptor)
    return True


def _user_namespace(users: str, groups: str) -> int:
    """An empty user namespace that only defines the mapping. Made by another program, since we have threads and cannot
    fork."""
    # Not a shell's `unshare`: the interpreter is there on every host that has boxes.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _NEW_NAMESPACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as maker:
        assert maker.stdin is not None and maker.stdout is not None
        try:
            maker.stdout.read(1)
            for name, text in (("uid_map", users), ("gid_map", groups)):
                Path(f"/proc/{maker.pid}/{name}").write_text(text, encoding="ascii")
            return os.open(f"/proc/{maker.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise Unavailable("no_mount", f"ids cannot be mapped on this host: {exc.strerror}") from None
