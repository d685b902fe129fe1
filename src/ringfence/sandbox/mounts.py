"""The volumes of one session: taken before its box is made, loaded before anything runs in it, saved, let go."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ringfence.errors import Refused
from ringfence.sandbox.beneath import beneath, explaining, full_path, made_folder, parts_of, refusal
from ringfence.sandbox.process.files import FOLDER
from ringfence.sandbox.volumes import OpenVolume, Volumes
from ringfence.sandbox.workspace import Workspace
from ringfence.sessions import Folder, Living, Owner, VolumeMount

_MOST = 16
_TAKEN = ("input", "output", "tmp")


@dataclass(slots=True)
class _Mount:
    wanted: VolumeMount
    parts: tuple[str, ...]
    volume: OpenVolume
    descriptor: int = -1
    """Of a file system of its own, where the box has one for it."""
    loaded: bool = False


@dataclass(slots=True)
class Mounts:
    """Methods want a thread, and may be called from several. They raise Refused, Unavailable and StoreError."""

    _mounts: list[_Mount] = field(default_factory=list)
    _workspace: Workspace | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def __bool__(self) -> bool:
        return bool(self._mounts)

    def take(self, volumes: Volumes, who: Owner, wanted: tuple[VolumeMount, ...]) -> tuple[Folder, ...]:
        """Have the volumes; the folders that the box is to have for them."""
        if len(wanted) > _MOST:
            raise refusal("too_many", f"a session can have {_MOST} volumes, not {len(wanted)}")
        try:
            return tuple(self._take_one(volumes, who, mount) for mount in wanted)
        except BaseException:
            self.close()
            raise

    def _take_one(self, volumes: Volumes, who: Owner, wanted: VolumeMount) -> Folder:
        parts = parts_of(wanted.at)
        if not parts or parts[0] in _TAKEN:
            text = f"a volume cannot be at {wanted.at!r}; use a folder of its own, such as /workspace/{wanted.name}"
            raise refusal("bad_path", text)
        for other in self._mounts:
            common = min(len(parts), len(other.parts))
            if parts[:common] == other.parts[:common]:
                raise refusal("bad_path", f"{wanted.at!r} and {other.wanted.at!r} are in each other; use two folders")
        max_bytes = volumes.get(wanted.name, who=who).max_bytes
        volume = volumes.open(wanted.name, who=who, mode=wanted.mode)
        self._mounts.append(_Mount(wanted, parts, volume))
        return Folder(full_path(parts), max_bytes, wanted.mode)

    def hold(self, box: Living) -> None:
        """Have descriptors of our own of where they are to be; those of the box go with it."""
        if self._mounts:
            self._workspace = Workspace(os.dup(box.workspace), box.host_id)
        for mount in self._mounts:
            own = box.folders.get(full_path(mount.parts))
            if own is not None:
                mount.descriptor = os.dup(own)

    def load(self) -> None:
        """Put what the volumes hold into a box in which nothing runs yet."""
        with self._turn:
            for mount in self._mounts:
                with self._folder(mount, make=True) as folder:
                    mount.volume.load(folder, self._held.owner)
                mount.loaded = True

    @contextmanager
    def _folder(self, mount: _Mount, *, make: bool) -> Iterator[int]:
        """Where it is: a file system of its own, else a folder of the workspace, as the box has it now."""
        root, at = self._held.descriptor, mount.wanted.at
        if mount.descriptor >= 0:
            yield mount.descriptor
        elif make:
            with explaining(root, at), made_folder(root, mount.parts, self._held.owner) as (folder, _):
                yield folder
        else:
            with explaining(root, at), beneath(root, mount.parts, FOLDER) as folder:
                yield folder

    @property
    def _held(self) -> Workspace:
        assert self._workspace is not None
        return self._workspace

    def save(self) -> None:
        """Keep what is in those that may be written. Each is saved, or is what it was; raises the first problem."""
        problem: Refused | None = None
        with self._turn:
            for mount in self._mounts:
                if mount.wanted.mode == "rw" and mount.loaded:  # else it would be saved as if it were empty
                    try:
                        with self._folder(mount, make=False) as folder:
                            mount.volume.save(folder)
                    except Refused as refused:
                        problem = problem or refused
        if problem is not None:
            raise problem

    def close(self) -> None:
        """What was not saved is gone."""
        with self._turn:
            for mount in self._mounts:
                mount.volume.close()
                if mount.descriptor >= 0:
                    os.close(mount.descriptor)
            self._mounts.clear()
            if self._workspace is not None:
                os.close(self._workspace.descriptor)
                self._workspace = None
