"""The places of a box: its workspace, its inputs, and what it sees of the host besides. Used inside the zygote."""

from __future__ import annotations

import os
import struct

from ringfence.sandbox.process import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.sandbox.process.confine import Site

TEMPLATE = b"/t"
"""Where the zygote built what all its boxes have in common; a box sees it as its root."""
WORKSPACE = TEMPLATE + b"/workspace"
INPUT = WORKSPACE + b"/input"
MOUNTS = b"/m"
"""Where the zygote has what its boxes are to see elsewhere, each under its number."""
_MS_NOEXEC = 8
_HERE = -100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_EMPTY_PATH, _RECURSIVE, _CLONE = 0x1000, 0x8000, 1


def _flags(site: Site) -> int:
    """Where only named programs may run, nothing that was written in the box is one."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    return flags | _MS_NOEXEC if site.shape.get("noexec") else flags


def workspace(site: Site) -> None:
    limits = b"mode=0755,size=%d,nr_inodes=%d" % (site.shape["disk_bytes"], site.shape["inodes"])
    site.call("mount", b"workspace", WORKSPACE, b"tmpfs", _flags(site), limits)
    for name in (b"/input", b"/output", b"/tmp"):
        site.call("mkdirat", _HERE, WORKSPACE + name, 0o755)
    site.descriptors["workspace"] = site.open(WORKSPACE, _FOLDER)


def input(site: Site) -> None:
    site.call("mount", b"input", INPUT, b"tmpfs", _flags(site), b"mode=0755")
    site.descriptors["input"] = site.open(INPUT, _FOLDER)


def rooms(site: Site) -> None:
    """For what is mounted in the workspace, which is empty but for what we put into it."""
    made = {WORKSPACE, *(WORKSPACE + name for name in (b"/input", b"/output", b"/tmp"))}
    covered: list[bytes] = []
    for at, _, folder in site.shape.get("mounts", ()):
        path = TEMPLATE + at.encode()
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
                site.call("mkdirat", _HERE, each, 0o755)
            else:
                site.close(site.open(each, os.O_CREAT | os.O_WRONLY))


def mounts(site: Site) -> None:
    for number, (at, _, _) in enumerate(site.shape.get("mounts", ())):
        # Where it goes may lie in a folder of the host's: no link that somebody put there is followed.
        how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0x04)  # RESOLVE_NO_SYMLINKS
        target = site.taken(site.call("openat2", _HERE, TEMPLATE + at.encode(), how, len(how)))
        source, place = MOUNTS + b"/%d" % number, b"/proc/self/fd/%d" % target
        site.call("mount", source, place, None, kernel.MS_BIND | kernel.MS_REC, None)
        site.close(target)


def input_read_only(site: Site) -> None:
    site.call("mount", INPUT, INPUT, None, kernel.MS_BIND, None)
    set_mount(site, INPUT, kernel.ATTR_RDONLY)


def folders(site: Site) -> None:
    made: set[bytes] = set()
    for number, (at, size, read_only) in enumerate(site.shape.get("folders", ())):
        parts = at.encode().strip(b"/").split(b"/")[1:]
        for depth in range(1, len(parts) + 1):
            path = b"/".join((WORKSPACE, *parts[:depth]))
            if path not in made:
                site.call("mkdirat", _HERE, path, 0o755)
                made.add(path)
        limits = b"mode=0755,size=%d,nr_inodes=%d" % (size, site.shape["inodes"])
        site.call("mount", b"volume", path, b"tmpfs", _flags(site), limits)
        site.descriptors[f"folder{number}"] = site.open(path, _FOLDER)
        if read_only:
            site.call("mount", path, path, None, kernel.MS_BIND, None)
            set_mount(site, path, kernel.ATTR_RDONLY)


def lend(site: Site) -> None:
    """Show the workspace once more, over itself, so that whoever owns it outside and the box are one user.

    The supervisor's descriptors lead to what is underneath: there the same files belong to its own user.
    """
    space = site.open_text("ns/user", os.O_RDONLY)
    flags = _CLONE | os.O_CLOEXEC | _RECURSIVE
    copy = site.taken(site.call("open_tree", _HERE, WORKSPACE, flags))
    wanted = struct.pack("QQQQ", kernel.ATTR_IDMAP, 0, 0, space)
    site.call("mount_setattr", copy, b"", _EMPTY_PATH | _RECURSIVE, wanted, len(wanted))
    site.call("move_mount", copy, b"", _HERE, WORKSPACE, 4)  # MOVE_MOUNT_F_EMPTY_PATH
    site.close(copy)
    site.close(space)


def set_mount(site: Site, path: bytes, attributes: int) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    site.call("mount_setattr", _HERE, path, 0, wanted, len(wanted))
