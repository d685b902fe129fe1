"""Roots for boxes as an image would bring them: a shell, some commands and a Python, all of this host's own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PYTHON = "/usr/bin/python3"
_COMMANDS = (
    "sh",
    "cat",
    "chmod",
    "cp",
    "env",
    "id",
    "ls",
    "mkdir",
    "pwd",
    "rm",
    "sleep",
    "stat",
    "touch",
    "true",
    "unshare",
)
_TOPS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LEFT_OUT = shutil.ignore_patterns("test", "tests", "dist-packages", "idlelib", "ensurepip", "config-*")


def system_root(folder: Path) -> Path:
    """In `folder`. Skips where the system's own Python and commands cannot be had."""
    ldd, python = shutil.which("ldd"), os.path.realpath(PYTHON)
    library = Path("/usr/lib", os.path.basename(python))
    if ldd is None or not library.joinpath("os.py").is_file():
        pytest.skip(f"this system has no {PYTHON} with a library below /usr/lib, or no ldd, to make a root of")
    folder.mkdir(mode=0o755, parents=True)
    for top in _TOPS:
        if os.path.islink(f"/{top}"):
            (folder / top).symlink_to(os.readlink(f"/{top}"))
    _copy_tree(library, folder / str(library).lstrip("/"))
    programs = [path for name in _COMMANDS if (path := shutil.which(name, path="/usr/bin:/bin")) is not None]
    for path in (*programs, PYTHON):
        _put(folder, path)
    modules = [str(path) for path in library.glob("lib-dynload/*.so")]
    told = subprocess.run([ldd, *programs, python, *modules], capture_output=True, text=True, check=True).stdout
    for path in sorted(set(re.findall(r"(/\S+) \(0x", told))):
        _put(folder, path)
    return folder


def variant(root: Path, folder: Path) -> Path:
    """The same once more, to be changed: files are shared, so only replace them."""
    shutil.copytree(root, folder, symlinks=True, copy_function=os.link)
    return folder


def _put(folder: Path, path: str) -> None:
    """A file, with the links that lead to it."""
    parent = os.path.realpath(os.path.dirname(path))
    here = os.path.join(parent, os.path.basename(path))
    target = folder / here.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(here):
        if not target.is_symlink():
            target.symlink_to(os.readlink(here))
        _put(folder, os.path.join(parent, os.readlink(here)))
    elif not target.exists():
        shutil.copyfile(here, target)
        target.chmod(0o755)


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True, ignore=_LEFT_OUT, ignore_dangling_symlinks=True)
