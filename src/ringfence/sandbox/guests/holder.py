"""Holds what containers of one supervisor need on the host, and ends them when it has died. A process of its own.

It has a mount namespace of its own, in which roots lie where every user can reach them, and from which containers are
started. Its orders come as lines of JSON on its standard input, each with one line as the answer:

    {"root": NAME, "folder": PATH, "points": [[PATH, "file" or "folder"], ...]}
                                         show a folder as NAME, read-only, with such places to mount something at
    {"lend": NAME, "path": PATH}         show a file or folder as NAME, read-only; with "same": [DEVICE, INODE], only
                                         if it is that one, and with "writable": BOOLEAN
    {"attach": NAME, "process": NUMBER, "descriptor": NUMBER, "folder": BOOLEAN}
                                         show the mount that this process has cloned and not attached yet as NAME
    {"hide": [NAME, ...]}                these are no longer needed
    {"owe": NAME, "words": [...]}        run this command if the supervisor dies
    {"settled": NAME}                    that is no longer needed

That of an ordinary user also has a user namespace of its own, in which that user is root: it answers once when it is in
it, reads a line when the ids of that are mapped, and goes on from there.

Imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NEW_MOUNTS = 0x20000
_NEW_USERS = 0x10000000
_RECURSIVE = 0x4000
_KEPT = {8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of a mount that only its owner may take away, as statvfs has them and as mount wants them: noexec, noatime,
nodiratime, relatime."""
_PRIVATE = 0x44000
_BIND = 0x1000
_READ_ONLY = 0x1 | 0x2 | 0x4
"""MS_RDONLY, MS_NOSUID, MS_NODEV."""
_SAFE = 0x2 | 0x4
_REMOUNT = 0x20
_DETACH = 2
_MOVE_MOUNT = 429
"""On every machine."""
_HERE = -100
_EMPTY_PATH = 0x4
"""AT_FDCWD, MOVE_MOUNT_F_EMPTY_PATH."""
_SECONDS = 20

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    given = [each.encode() if isinstance(each, str) else each for each in arguments]
    if getattr(_libc, name)(*given) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main(folder: str, ordinary: str = "") -> None:
    view = f"{folder}/view"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ordinary:
        _call("unshare", _NEW_USERS)
        _answer({})
        if not sys.stdin.readline():
            return
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    _call("unshare", _NEW_MOUNTS)
    _call("mount", None, "/", None, ctypes.c_ulong(_PRIVATE), None)
    _call("mount", "ringfence", view, "tmpfs", ctypes.c_ulong(0), "mode=711,size=16m")
    _hide_empty_hierarchy()
    _answer({})
    owed = {}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "root" in order:
                _show(view, order["root"], order["folder"], order["points"])
            elif "lend" in order:
                _lend(view, order)
            elif "attach" in order:
                _attach(view, order)
            elif "hide" in order:
                _hide(view, order["hide"])
            elif "owe" in order:
                owed[order["owe"]] = order["words"]
            else:
                owed.pop(order["settled"], None)
            _answer({})
        except OSError as problem:
            _answer({"failed": str(problem)})
    for words in owed.values():
        _settle(words)
    if _libc.umount2(view.encode(), _DETACH) == 0:  # or what is shown there would be removed
        for name in ("bundles", "run"):
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        _remove_empty(view, folder)


def _answer(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _show(view: str, name: str, folder: str, points: list[list[str]]) -> None:
    place, below = f"{view}/{name}", f"{view}/below-{name}"
    for each in (place, below, f"{below}/points", f"{below}/root"):
        os.mkdir(each, 0o755)
    for path, kind in points:
        at = f"{below}/points/{path.strip('/')}"
        os.makedirs(at if kind == "folder" else os.path.dirname(at), 0o755, exist_ok=True)
        if kind == "file":
            os.close(os.open(at, os.O_CREAT | os.O_WRONLY, 0o644))
    _bind(folder, f"{below}/root", _READ_ONLY)
    # Not the host's file system itself: without a layer to write to, this one is read-only.
    layers = f"lowerdir={below}/points:{below}/root"
    _call("mount", "ringfence", place, "overlay", ctypes.c_ulong(_READ_ONLY), layers)


def _lend(view: str, order: dict[str, Any]) -> None:
    path, flags = order["path"], _SAFE if order.get("writable") else _READ_ONLY
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        seen = os.fstat(found)
        if [seen.st_dev, seen.st_ino] != order.get("same", [seen.st_dev, seen.st_ino]):
            raise OSError(0, f"{path} is no longer what it was a moment ago")
        _bind(f"/proc/self/fd/{found}", _place(f"{view}/{order['lend']}", os.path.isdir(path)), flags)
    finally:
        os.close(found)


def _bind(path: str, place: str, flags: int) -> None:
    _call("mount", path, place, None, ctypes.c_ulong(_BIND | _RECURSIVE), None)
    kept = os.statvfs(place).f_flag
    flags |= sum(wanted for seen, wanted in _KEPT.items() if kept & seen)
    _call("mount", None, place, None, ctypes.c_ulong(_BIND | _REMOUNT | flags), None)


def _attach(view: str, order: dict[str, Any]) -> None:
    place = _place(f"{view}/{order['attach']}", order["folder"])
    mount = os.open(f"/proc/{order['process']}/fd/{order['descriptor']}", os.O_PATH | os.O_CLOEXEC)
    try:
        _call("syscall", ctypes.c_long(_MOVE_MOUNT), mount, "", _HERE, place, _EMPTY_PATH)
    finally:
        os.close(mount)


def _place(place: str, folder: bool) -> str:
    if folder:
        os.mkdir(place, 0o755)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    return place


def _hide(view: str, names: list[str]) -> None:
    for name in names:
        place, below = f"{view}/{name}", f"{view}/below-{name}"
        for each in (place, f"{below}/root"):
            _libc.umount2(each.encode(), _DETACH)
        # Only what is empty goes, and places that were made here: never through a mount that stayed.
        if os.path.isdir(below):
            shutil.rmtree(f"{below}/points", ignore_errors=True)
            _remove_empty(f"{below}/root", below)
        if os.path.isdir(place):
            _remove_empty(place)
        elif os.path.exists(place):
            os.unlink(place)


def _remove_empty(*places: str) -> None:
    for place in places:
        try:
            os.rmdir(place)
        except OSError:
            return


def _hide_empty_hierarchy() -> None:
    """A v2 hierarchy beside those of v1 has no controllers, but crun refuses to start where it sees one."""
    try:
        with open("/proc/self/mountinfo") as mounts:
            places = [line.split()[4] for line in mounts if line.partition(" - ")[2].startswith("cgroup2 ")]
    except OSError:
        return
    for place in places:
        if os.path.dirname(place) == "/sys/fs/cgroup":
            _libc.mount(b"ringfence", place.encode(), b"tmpfs", ctypes.c_ulong(_SAFE), b"mode=755,size=1m")


def _settle(words: list[str]) -> None:
    try:
        subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return


main(*sys.argv[1:])
