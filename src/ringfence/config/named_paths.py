"""Paths of the host that a user, or a program of theirs, names to read from or to write to.

A folder that was cloned, unpacked, or written by an agent or a box may contain links, and a user who names a path in it
does not see where they lead. So a link on such a path is not followed unless only the user or the system can have made
it. The error says where the link leads, so that the user can name that path instead.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ringfence.config import paths

_MAX_LINKS = 40


class UntrustedLink(ValueError):
    """A path has a link that another user or a program may have made; the text says where it leads."""


def resolve(path: Path) -> Path:
    """The path without links, `.` and `..`. It need not exist. Raises UntrustedLink.

    No link on the result has to be followed: one that is found there later was put there by another.
    """
    resolved = "" if path.is_absolute() else os.getcwd()
    rest = _parts(str(path))
    links = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            resolved = os.path.dirname(resolved)
            continue
        step = f"{resolved.rstrip('/')}/{part}"
        try:
            target = os.readlink(step)
        except (OSError, ValueError):  # it is no link, or does not exist
            resolved = step
            continue
        links += 1
        if links > _MAX_LINKS or not _is_trusted(step):
            why = f"{step} is a link, which is not followed: programs that can write to that folder choose its target"
            raise UntrustedLink(f"{why}. If you mean {os.path.realpath(step)}, name that")
        if target.startswith("/"):
            resolved = ""
        rest = [*_parts(target), *rest]
    return Path(resolved or "/")


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _is_trusted(link: str) -> bool:
    """Whether only the system or the user can have made a link. No archive and no repository puts links directly into
    the home folder, nor into folders that only root writes to. Root's own projects are such folders, too, so for root
    only links in the top folders count."""
    folder = os.path.dirname(link)
    if folder == os.path.realpath(paths.home()):
        return True
    owners = (os.stat(folder), os.lstat(link))
    if any(each.st_uid for each in owners) or owners[0].st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return os.geteuid() != 0 or folder.count("/") == 1
