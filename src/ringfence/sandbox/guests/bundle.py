"""The configuration of a container, in the words of the OCI runtime specification."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from typing import Literal

from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.core.sessions import Folder
from ringfence.sandbox.guests.engine import BOOT, USER, GuestShape
from ringfence.sandbox.guests.holding import Lent

RIGHTS = ("CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_NET_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
"""In its own user namespace, for the agent alone, which gives them up before any program: see `harden`."""
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/home/user")  # noqa: S108 - in the container
_NAMESPACES = ("pid", "ipc", "uts", "mount", "network", "user", "cgroup")


@plain
class ContainerIds:
    """The ids of one container: of its root, which no program is, and of its programs; as who starts it sees them."""

    root: int
    user: int
    outside: int
    """That of its programs as this process sees it."""
    whose: Literal["box", "user"] = "box"


def configuration(shape: GuestShape, root: str, lent: Sequence[Lent], ids: ContainerIds, place: str) -> Json:
    limits = shape.limits
    own = f"uid={USER},gid={USER}"
    mounts: list[Json] = [
        _mount("/proc", "proc", "noexec"),
        _mount("/dev", "tmpfs", "strictatime", "mode=755", "size=64k", devices=True),
        _mount("/dev/pts", "devpts", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", devices=True),
        _mount("/workspace", "tmpfs", "mode=755", *own.split(","), f"size={limits.disk_bytes}", _inodes(shape)),
    ]
    if shape.input is not None:
        mounts.append(_bind(str(shape.input), "/workspace/input", "ro"))
    mounts += (_folder(each) for each in shape.folders)
    mounts += (_bind(each.place, each.at, each.mode) for each in lent)
    mapped = [
        {"containerID": 0, "hostID": ids.root, "size": 1},
        {"containerID": USER, "hostID": ids.user, "size": 1},
    ]
    files = min(limits.open_files + 256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return {
        "ociVersion": "1.0.2",
        "hostname": "box",
        "root": {"path": root, "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [*shape.root.agent, "-I", "-S", "-c", BOOT],
            "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": {
                **{key: list(RIGHTS) for key in ("bounding", "effective", "permitted")},
                **{key: [] for key in ("inheritable", "ambient")},
            },
            "noNewPrivileges": True,
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "hard": files, "soft": files},
                {"type": "RLIMIT_CORE", "hard": 0, "soft": 0},
            ],
        },
        "mounts": mounts,
        "linux": {
            "cgroupsPath": place,
            "namespaces": [{"type": each} for each in _NAMESPACES],
            "uidMappings": mapped,
            "gidMappings": mapped,
            "maskedPaths": [],
            "readonlyPaths": [],
        },
    }


def writable(shape: GuestShape) -> Iterator[str]:
    """What programs may write to, besides what every box has."""
    yield from (each.at for each in shape.placed if each.writable)
    yield from (folder.at for folder in shape.folders if folder.mode == "rw")


def _folder(folder: Folder) -> Json:
    return _mount(folder.at, "tmpfs", "mode=755", f"uid={USER}", f"gid={USER}", f"size={folder.max_bytes}")


def _inodes(shape: GuestShape) -> str:
    return f"nr_inodes={shape.limits.inodes}"


def _mount(at: str, kind: str, *options: str, devices: bool = False) -> Json:
    safe = ["nosuid"] if devices else ["nosuid", "nodev"]
    return {"destination": at, "type": kind, "source": kind, "options": [*safe, *options]}


def _bind(host: str, at: str, mode: str) -> Json:
    options = ["bind", "nosuid", "nodev", "private", mode]
    return {"destination": at, "type": "bind", "source": host, "options": options}
