"""Becomes an ordinary user with subordinate ids, and runs a command: `python -I -S subordinate.py FOLDER CMD…`.

With `--groups=NAME` before FOLDER, it has control groups of that name in every hierarchy, as those of systemd are for
users: whoever started this removes them.

The user is made up: in a mount namespace of its own, this process sees other files in the place of /etc/passwd and
/etc/subuid, which the helpers that map ids go by. FOLDER, of which it becomes the owner, is for its files. Trees that
others than root cannot reach are shown where they are.
"""

from __future__ import annotations

import ctypes
import os
import sys

USER, NAME = 61_234, "ringfence-tests"
RANGES = {"subuid": (1_700_000_000, 65_536), "subgid": (1_700_100_000, 65_536)}
_NEWNS = 0x00020000
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mounting on {target}")


def _closed(path: str) -> str | None:
    """The first folder on the way that only its owner may enter."""
    parts = path.strip("/").split("/")
    folders = ("/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((folder for folder in folders if not os.stat(folder).st_mode & 1), None)


def _open_the_way(trees: list[str]) -> None:
    held = {tree: os.open(tree, os.O_PATH) for tree in trees if _closed(tree) is not None}
    for closed in {_closed(tree) for tree in held}:
        _mount("way", str(closed), "tmpfs", 0, "mode=0755")
    for tree, descriptor in held.items():
        os.makedirs(tree, 0o755, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", tree, "", _BIND | _REC)


def _make_up(folder: str) -> None:
    """The user, in files that only this process and what it starts see."""
    texts = {name: f"{NAME}:{start}:{count}\n" for name, (start, count) in RANGES.items()}
    for name in ("passwd", "group"):
        with open(f"/etc/{name}") as file:
            texts[name] = file.read()
    texts["passwd"] += f"{NAME}:x:{USER}:{USER}::{folder}:/bin/sh\n"
    texts["group"] += f"{NAME}:x:{USER}:\n"
    for name, text in texts.items():
        with open(f"{folder}/{name}", "w") as file:
            file.write(text)
        os.chmod(f"{folder}/{name}", 0o644)
        _mount(f"{folder}/{name}", f"/etc/{name}", "", _BIND)


def _groups(name: str) -> None:
    """Raises OSError where this process may make none."""
    with open("/proc/self/mounts") as mounts:
        places = [words[1] for words in map(str.split, mounts) if words[2] in ("cgroup", "cgroup2")]
    for place in places:
        made = f"{place}/{name}"
        os.mkdir(made)
        for each in ("cpuset.cpus", "cpuset.mems"):  # without any, nothing can enter
            if os.path.exists(f"{place}/{each}"):
                with open(f"{place}/{each}") as file, open(f"{made}/{each}", "w") as ours:
                    ours.write(file.read())
                with open(f"{made}/cgroup.clone_children", "w") as ours:
                    ours.write("1")
        for each in (made, *(f"{made}/{entry}" for entry in os.listdir(made))):
            os.chown(each, USER, USER)
        with open(f"{made}/cgroup.procs", "w") as procs:
            procs.write(str(os.getpid()))


def main() -> None:
    folder, *command = sys.argv[1:]
    if folder.startswith("--groups="):
        _groups(folder.partition("=")[2])
        folder, *command = command
    os.umask(0o022)
    _check(_libc.unshare(_NEWNS), "unshare")
    _mount("", "/", "", _REC | _PRIVATE)
    _make_up(folder)
    os.chown(folder, USER, USER)
    os.chmod(folder, 0o755)
    _open_the_way([os.path.realpath(sys.base_prefix), os.getcwd(), folder])
    os.chdir(os.getcwd())
    os.setgroups([USER, 61_235])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.environ |= {"HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
