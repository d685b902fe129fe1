"""What a box may not change in a folder that it may write to: what other programs of this host go by or run.

An agent works on a project, and somebody else opens that project: an editor, Git, a shell, another agent. What these
read to know what to run is mounted read-only over itself. What is not there yet cannot be kept from being made: a box
that makes it is told of afterwards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from ringfence.box import Mount

PINNED = (".git",)
"""Stays where it is, so that no other can take its place; what is in it may be changed."""
NAMES = (
    ".git",
    ".git/hooks",
    ".git/config",
    ".git/config.worktree",
    ".git/commondir",
    ".git/modules",
    ".git/worktrees",
    ".gitconfig",
    ".gitmodules",
    ".husky",
    ".envrc",
    ".vscode",
    ".idea",
    ".devcontainer",
    ".mcp.json",
    ".claude",
    ".cursor",
    ".codex",
    ".gemini",
    ".npmrc",
    ".ripgreprc",
    ".profile",
    ".bashrc",
    ".bash_login",
    ".bash_logout",
    ".bash_profile",
    ".zshenv",
    ".zshrc",
    ".zlogin",
    ".zlogout",
    ".zprofile",
)
"""Beneath a writable mount, outer ones first."""

Seen = dict[str, tuple[int, ...] | None]
"""By where the box sees it: what it was; None where there was nothing."""


def names(mount: Mount) -> tuple[str, ...]:
    """What is looked after in it. Whoever says that a mount is unsafe wants none of it."""
    return NAMES if mount.mode == "rw" and not mount.unsafe else ()


def can_be_held(path: str) -> bool:
    """Whether it is there, and something that can be mounted over: a link is not."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def look(mounts: Sequence[Mount]) -> Seen:
    """What of it cannot be held, as it is now."""
    seen: Seen = {}
    for at, host in _every(mounts):
        if not can_be_held(host):
            seen[at] = _state(host)
    return seen


def planted(mounts: Sequence[Mount], before: Seen) -> tuple[str, ...]:
    """What has come to be, or has changed, since then; of what lies in another the outer alone."""
    if not before:
        return ()
    found: list[str] = []
    for at, host in _every(mounts):
        now = _state(host)
        if at in before and now is not None and now != before[at] and not any(at.startswith(f"{o}/") for o in found):
            found.append(at)
    return tuple(found)


def _every(mounts: Sequence[Mount]) -> Iterator[tuple[str, str]]:
    for mount in mounts:
        for name in names(mount):
            yield f"{mount.at}/{name}", f"{mount.host}/{name}"


def _state(path: str) -> tuple[int, ...] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_ctime_ns
