"""What the host's kernel says of a process of a container, which the container itself cannot change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ringfence.core.box import Limit
from ringfence.sandbox.process.box_usage import full


def number_inside(pid: int) -> int:
    """Its number in its own namespace; 0: it has none, or is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def uid(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])
    return -1


@cache
def _own_namespaces() -> Mapping[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "net", "ipc", "uts", "cgroup")}


def namespaces(pid: int) -> dict[str, bool]:
    """Which namespaces are its own, and not ours."""
    names = {"mnt": "mount"}
    found: dict[str, bool] = {}
    for name, own in _own_namespaces().items():
        with contextlib.suppress(OSError):
            found[names.get(name, name)] = pid > 0 and os.readlink(f"/proc/{pid}/ns/{name}") != own
    return found


def disk(pid: int, places: Sequence[str] = ("/workspace",)) -> tuple[int, Limit | None]:
    """What its files take, and whether that is all they may."""
    used = 0
    met: Limit | None = None
    for at in places:
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/{pid}/root{at}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                state = os.fstatvfs(descriptor)
                used += (state.f_blocks - state.f_bfree) * state.f_frsize
                met = met or full(descriptor)
            finally:
                os.close(descriptor)
    return used, met
