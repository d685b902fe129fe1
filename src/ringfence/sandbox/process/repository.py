"""What git takes for a repository, whatever the folder is called: one with a HEAD, and with `objects` and `refs` beside
that or in the folder that `commondir` names.

Git looks for `.git` in a folder, then at the folder itself, then above it. One that lacks something is passed over.
All this is asked about folders that a box may write to: no link is followed, and nothing waits.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from ringfence.sandbox.process import kernel

_HEAD = re.compile(rb"ref:[ \t\n\r]*refs/|[0-9a-fA-F]{40}")
_LONGEST = 4096


def is_one(folder: str) -> bool:
    """Or may soon be, with what the box can still do: `objects` are not needed here where the environment names others,
    and `commondir` may name any folder."""
    mode = _mode(f"{folder}/HEAD")
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        return False
    there = {name for name in ("commondir", "objects", "refs", "config") if _mode(f"{folder}/{name}")}
    return "commondir" in there or {"objects", "refs"} <= there or ("config" in there and has_head(folder))


def lacks(folder: str) -> Iterator[tuple[str, tuple[object, ...]]]:
    """What git misses in it, and how that is; of links alone how they are, since none is followed."""
    if not has_head(folder):
        yield "HEAD", ("no head",)
    if _mode(f"{folder}/commondir"):
        return
    for name in ("objects", "refs"):
        mode = _mode(f"{folder}/{name}")
        if stat.S_ISLNK(mode):
            found = os.lstat(f"{folder}/{name}")
            yield name, (found.st_dev, found.st_ino, found.st_ctime_ns)
        elif not mode & stat.S_IXUSR:
            yield name, ("not there",)


def has_head(folder: str) -> bool:
    path = f"{folder}/HEAD"
    mode = _mode(path)
    try:
        if stat.S_ISLNK(mode):
            return os.readlink(path).startswith("refs/")
        return bool(mode & stat.S_IRUSR and _HEAD.match(read(path) or b""))
    except OSError:
        return False


def common(path: str) -> str | None:
    """Which folder a file `commondir` names, from the repository or from the root."""
    try:
        said = (read(path) or b"").rstrip(b"\r\n")
    except OSError:
        return None
    return os.fsdecode(said) if said and b"\0" not in said else None


def read(path: str) -> bytes | None:
    """The beginning of a regular file. Raises OSError."""
    descriptor = kernel.open_path(path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file:
            return file.read(_LONGEST)
    finally:
        os.close(descriptor)


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0
