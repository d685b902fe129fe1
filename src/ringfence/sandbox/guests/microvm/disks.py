"""Roots of guests as disks, each made once and kept by the digest of what is in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ringfence.core.errors import Unavailable
from ringfence.sandbox.guests.microvm.locks import made_once

_SEARCH = "/usr/sbin:/sbin:/usr/bin:/bin"
_PROGRAM = "mke2fs"
_MIB = 1024 * 1024
_BLOCK = 4096
_MOST_LINKS = 8
# Nothing is ever written to it, so it needs neither a journal nor sums of its own.
_FEATURES = "^has_journal,^metadata_csum,^resize_inode"


def disk(folder: Path, digest: str, kept: Path) -> Path:
    """A disk with a file system that has this folder. Raises Unavailable."""
    return made_once(kept / f"{digest.rpartition(':')[2]}.ext4", lambda at: _make(folder, at))


def empty(kept: Path) -> Path:
    return made_once(kept / "empty.ext4", lambda at: _run("-b", str(_BLOCK), str(at), "4m"))


def python_of(disk: Path, places: Sequence[str]) -> tuple[str, tuple[int, int]]:
    """The first of these interpreters that a disk has, and its version. Raises Unavailable."""
    for place in places:
        found = place
        for _ in range(_MOST_LINKS):
            said = _debugfs(disk, f"stat {found}")
            if (link := re.search(r'link dest: "([^"]+)"', said)) is None:
                break
            found = os.path.normpath(os.path.join(os.path.dirname(found), link[1]))
        if re.search(r"Type: regular", said) and (version := re.search(r"python(\d+)\.(\d+)$", found)):
            return found, (int(version[1]), int(version[2]))
    raise Unavailable("no_backend", f"{disk} has no Python at {' or '.join(places)}, or is no ext4 file system")


def _debugfs(disk: Path, order: str) -> str:
    program = shutil.which("debugfs", path=_SEARCH)
    if program is None:
        raise Unavailable("no_backend", "disks of machines are looked into with debugfs: apt install e2fsprogs")
    done = subprocess.run(
        [program, "-R", order, str(disk)], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
    )
    return done.stdout


def _make(folder: Path, at: Path) -> None:
    blocks, files = 0, 0
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            blocks += -(-os.lstat(os.path.join(place, name)).st_size // _BLOCK) + 1
            files += 1
    inodes = files + files // 8 + 128
    megabytes = (blocks * _BLOCK + inodes * 256) // _MIB * 21 // 20 + 16
    _run("-b", str(_BLOCK), "-N", str(inodes), "-d", str(folder), str(at), f"{megabytes}m")


def _run(*words: str) -> None:
    program = shutil.which(_PROGRAM, path=_SEARCH)
    if program is None:
        raise Unavailable("no_backend", f"disks of machines are made with {_PROGRAM}: apt install e2fsprogs")
    fixed = ("-q", "-F", "-t", "ext4", "-O", _FEATURES, "-m", "0", "-E", "lazy_itable_init=0,root_owner=0:0")
    try:
        subprocess.run([program, *fixed, *words], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as problem:
        said = problem.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise Unavailable("no_backend", f"a disk for machines could not be made: {said}") from None
