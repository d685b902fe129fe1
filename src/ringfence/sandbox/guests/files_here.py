"""Folders of this host that a guest sees and cannot write to: volumes that it may only read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import field, replace
from pathlib import Path

from ringfence.core.box import Mount
from ringfence.core.box_files import Get, Keep, TakenTree, TreeNode
from ringfence.core.record import dataclass
from ringfence.sandbox.files.paths import FOLDER
from ringfence.sandbox.files.whole import OneFolder

_OWNERS = 0o700


@dataclass(frozen=True, slots=True)
class LentFolder:
    """One of them, which is filled from here. Its files belong to another user than programs run as, who may read what
    its owner may."""

    descriptor: int

    def take(self, keep: Keep, *, max_files: int | None = None, max_bytes: int | None = None) -> TakenTree:
        return self._here.take(keep, max_files=max_files, max_bytes=max_bytes)

    def clear(self) -> None:
        self._here.clear()

    def put(self, nodes: Iterable[TreeNode], get: Get) -> None:
        self._here.put((replace(node, mode=_for_all(node.mode)) for node in nodes), get)

    @property
    def _here(self) -> OneFolder:
        return OneFolder(self.descriptor, (), None)


def _for_all(mode: int) -> int:
    owners = mode & _OWNERS
    return mode | owners >> 3 | owners >> 6


@dataclass(slots=True)
class LentFolders:
    """Those of one guest."""

    descriptors: dict[str, int] = field(default_factory=dict)
    """By the path at which the guest sees each."""
    _places: list[Path] = field(default_factory=list)

    def make(self, paths: Iterable[str]) -> tuple[Mount, ...]:
        """An empty folder for each of these paths. Returns what the guest is to see. Raises OSError."""
        mounts = []
        for at in paths:
            place = Path(tempfile.mkdtemp(prefix="ringfence-volume-"))
            self._places.append(place)
            place.chmod(0o755)
            self.descriptors[at] = os.open(place, FOLDER)
            mounts.append(Mount(str(place), at))
        return tuple(mounts)

    def remove(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)
        self._places.clear()
