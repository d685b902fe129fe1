"""Becomes an ordinary user, as root, and runs a command: `python -m ringfence.cli.bench.ordinary UID GID FOLDER CMD…`.

With it, `bench` can measure boxes of users other than root. FOLDER becomes that user's home. If the interpreter or our
own code lies below a folder that only root may enter, it is bound there in a mount namespace of the child.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import ringfence
from ringfence.config.paths import caller_of_sudo
from ringfence.sandbox.process.zygote import kernel

_NOBODY = 65534


def ordinary_user() -> tuple[int, int]:
    """User and group: the caller of sudo, else the first user with subordinate ids, else `nobody`."""
    given = caller_of_sudo() or ""
    try:
        names = [line.partition(":")[0] for line in Path("/etc/subuid").read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        names = []
    for name in (given, *names):
        try:
            found = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        except KeyError:
            continue
        if found.pw_uid:
            return found.pw_uid, found.pw_gid
    return _NOBODY, _NOBODY


def _open_the_way(trees: set[str]) -> None:
    held = {tree: os.open(tree, os.O_PATH) for tree in trees if _closed(tree) is not None}
    for closed in {_closed(tree) for tree in held}:
        kernel.mount("way", str(closed), "tmpfs", 0, "mode=0755")
    for tree, descriptor in held.items():
        os.makedirs(tree, 0o755, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", tree, None, kernel.MS_BIND | kernel.MS_REC)


def _closed(path: str) -> str | None:
    """The first folder of a path that only its owner may enter."""
    folders = [*reversed(Path(path).parents), Path(path)]
    return next((str(folder) for folder in folders if not folder.stat().st_mode & 1), None)


def main() -> None:
    user, group, folder, *command = sys.argv[1:]
    kernel.unshare(kernel.NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    source = os.path.realpath(Path(ringfence.__file__).parent.parent)
    _open_the_way({os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), source, folder})
    os.chown(folder, int(user), int(group))
    os.chdir("/")
    os.setgroups([])
    os.setresgid(int(group), int(group), int(group))
    os.setresuid(int(user), int(user), int(user))
    # Nothing of root's own is for that user: not its environment, and not its terminal.
    environment = {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": source, "PATH": os.defpath, "LANG": "C.UTF-8"}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execve(command[0], command, environment)  # noqa: S606 - what `bench` has put together


if __name__ == "__main__":
    main()
