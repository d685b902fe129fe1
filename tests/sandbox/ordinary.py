"""Becomes an ordinary user who is called 1000, as in a box, and runs a command: `python -I -S ordinary.py COMMAND…`.

Programs behave otherwise for root than for others, so one that is compared with a box must not run as root, and what
it tries must not succeed for root's sake. Where the tests run as root it becomes `nobody`, who owns nothing; a
folder on the way to the interpreter that is closed to others is opened in a mount namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys

NOBODY = 65534
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mounting on {target}")


def _closed_to_others(path: str) -> str | None:
    """The first folder on the way that only its owner may enter."""
    parts = path.strip("/").split("/")
    folders = ("/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((folder for folder in folders if not os.stat(folder).st_mode & 1), None)


def _open_the_way(tree: str) -> None:
    _check(_libc.unshare(_NEWNS), "unshare")
    _mount("", "/", "", _REC | _PRIVATE, "")
    closed = _closed_to_others(tree)
    if closed is not None:
        held = os.open(tree, os.O_PATH)
        _mount("way", closed, "tmpfs", 0, "mode=0755")
        os.makedirs(tree, 0o755, exist_ok=True)
        _mount(f"/proc/self/fd/{held}", tree, "", _BIND | _REC, "")


def main() -> None:
    if os.getuid() == 0:
        _open_the_way(os.path.realpath(sys.base_prefix))
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _check(_libc.prctl(4, 1, 0, 0, 0), "prctl")
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    os.umask(0o022)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
