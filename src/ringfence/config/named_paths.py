"""Paths of the host that a person or a program of theirs names to read from or to write to.

A folder that was cloned, unpacked, or written by an agent or a box may hold links, and who names a path in it does not
see where they lead. So a link on such a path is not followed, unless nobody but the person or the system can have made
it: the message says where it leads, and the person can name that.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ringfence.config import paths

_MAX_LINKS = 40


class UntrustedLink(ValueError):
    """A path leads over a link that another may have made; the text says where."""


def real(given: Path) -> Path:
    """Where a path leads, which need not exist. From then on no link on the path needs to be followed. Raises
    UntrustedLink."""
    found = "" if given.is_absolute() else os.getcwd()
    rest = [part for part in str(given).split("/") if part not in ("", ".")]
    links = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            found = os.path.dirname(found)
            continue
        step = f"{found.rstrip('/')}/{part}"
        try:
            target = os.readlink(step)
        except (OSError, ValueError):  # no link, or nothing at all
            found = step
            continue
        links += 1
        if links > _MAX_LINKS or not _is_trusted(step):
            why = f"{step} is a link, which is not followed: what can write that folder chooses where it leads"
            raise UntrustedLink(f"{why}. If you mean {os.path.realpath(step)}, name that")
        found = "" if target.startswith("/") else found
        rest = [*(each for each in target.split("/") if each not in ("", ".")), *rest]
    return Path(found or "/")


def _is_trusted(link: str) -> bool:
    """Whether only the system or the person can have made a link: no archive and no repository has its links right in
    the home folder, nor in folders that only root writes to. Root's own projects are such folders too, so for root that
    counts at the top alone."""
    folder = os.path.dirname(link)
    if folder == os.path.realpath(paths.home()):
        return True
    owners = (os.stat(folder), os.lstat(link))
    if any(each.st_uid for each in owners) or owners[0].st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return False
    return os.geteuid() != 0 or folder.count("/") == 1
