"""Folders of programs in which only those are that a box may run. Used inside the zygote."""

from __future__ import annotations

import os

from ringfence.sandbox.process import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MS_MOVE = 8192
_CLONE, _RECURSIVE, _EMPTY_PATH = 1, 0x8000, 4
_READ_ONLY = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV


def furnish(place: str, base: str, choice: dict[str, Any]) -> None:
    """In the template at `place`; `base` is ours to work in."""
    staging, absent = f"{base}/staging", f"{base}/absent"
    os.mkdir(staging, 0o755)
    os.close(os.open(absent, os.O_CREAT | os.O_CLOEXEC, 0))
    for path in choice["hidden"]:
        if os.path.isfile(f"{place}{path}"):
            kernel.bind(absent, f"{place}{path}", _READ_ONLY | kernel.ATTR_NOEXEC)
    for folder, entries in choice["folders"]:
        if os.path.isdir(f"{place}{folder}"):
            _fill(staging, f"{place}{folder}", entries)


def _fill(staging: str, folder: str, entries: list[list[str]]) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("programs", staging, "tmpfs", flags, "mode=0755,size=4m,nr_inodes=16k")
    for name, leads in entries:
        if leads:
            os.symlink(leads, f"{staging}/{name}")
        elif os.path.isfile(f"{folder}/{name}"):
            os.close(os.open(f"{staging}/{name}", os.O_CREAT | os.O_CLOEXEC, 0))
            kernel.bind(f"{folder}/{name}", f"{staging}/{name}", _READ_ONLY)
    kernel.set_mount(staging, _READ_ONLY)
    kernel.mount(staging, folder, None, _MS_MOVE)


def seal(place: str, choice: dict[str, Any]) -> None:
    """Let nothing be executed from trees in which any code may be, nor be mapped as code, which is the loader's way."""
    spared = [(path, _clone(f"{place}{path}")) for path in choice["spared"] if os.path.exists(f"{place}{path}")]
    for path in choice["sealed"]:
        kernel.bind(f"{place}{path}", f"{place}{path}", kernel.ATTR_NOEXEC)
    for path, clone in spared:
        kernel.call("move_mount", clone, b"", -100, f"{place}{path}".encode(), _EMPTY_PATH)
        os.close(clone)


def _clone(path: str) -> int:
    """As it is mounted now, and attached nowhere."""
    return kernel.call("open_tree", -100, path.encode(), _CLONE | _RECURSIVE | os.O_CLOEXEC)
