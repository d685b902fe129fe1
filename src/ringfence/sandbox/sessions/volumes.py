"""Volumes: named folders that outlive boxes, and the volumes that one session has mounted.

No folder of the host is ever visible to a box. A volume is loaded into a file system of the box's own, which the kernel
limits to the volume's size, and saved back when the caller says so: when the session pauses, at checkpoints, and at its
end. A save is atomic, and costs what changed. So a crash loses what was written since the last save, and nothing before
that; a box can neither outgrow its volume nor leave it half-written.

One session at a time may mount a volume for writing, and holds it until it or its keeper ends. Others may read
meanwhile; they see the volume as it was last saved when they mounted it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

from ringfence.core.box import MIB
from ringfence.core.box_files import BoxFiles, BoxTree, tree_digest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.core.sessions import Folder, StayingBox, VolumeMount, timestamp
from ringfence.sandbox.files.blobstore import (
    Owner,
    TreeStore,
    owner_folder,
    private_folder,
    storing,
    try_lock,
    write_whole,
)
from ringfence.sandbox.files.paths import WORKSPACE, full_path, outside, parts_of, refusal

GIB = 1024**3
Mode = Literal["ro", "rw"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RECORD = "volume.json"
_WRITER = "writer"
_WHAT = "volume"
_ALL_AGENTS = "*"
_MAX_MOUNTS = 16
_RESERVED = ("input", "output", "tmp")


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume, without its contents."""

    name: str
    owner: Owner
    max_bytes: int
    mode: Mode
    """What agents it is shared with may do; its owner may always write."""
    shared_with: tuple[str, ...]
    """Agents of the same tenant; `*` for all of them."""
    created_at: str
    saved_at: str | None = None
    bytes: int = 0
    files: int = 0
    tree_digest: str = tree_digest(())
    listing: tuple[str, ...] = ()
    """The pieces that hold the list of its files."""


VolumeList = list[Volume]


class Volumes:
    """All volumes of this installation. Methods raise Refused, Unavailable and StoreError; they block.

    Its owner refers to a volume by name, another agent that it is shared with by `OWNER/NAME`. For all others it does
    not exist.
    """

    def __init__(self, folder: Path, *, max_bytes: int = 64 * GIB, max_files: int = 65_536) -> None:
        """`max_bytes`: the sizes of all volumes of an owner together; `max_files`: how many files each may hold."""
        self._folder = folder
        self._max_bytes = max_bytes
        self.max_files = max_files

    def create(
        self, name: str, *, owner: Owner, max_bytes: int, mode: Mode = "ro", shared_with: tuple[str, ...] = ()
    ) -> Volume:
        """Create an empty volume."""
        if not _NAME.fullmatch(name):
            text = "use letters, digits, '.', '_' and '-', 64 at most"
            raise refusal("bad_name", f"{name!r} cannot be the name of a volume; {text}")
        if max_bytes < MIB:
            raise refusal("bad_size", f"a volume of {max_bytes} bytes is too small; {MIB} is the least")
        folder = owner_folder(self._folder, owner)
        with storing("the volumes"), self._alone(folder):
            there = self._of(owner)
            if any(volume.name == name for volume in there):
                raise refusal("exists", f"there is a volume {name!r} already; remove it first, or use another name")
            if sum(volume.max_bytes for volume in there) + max_bytes > self._max_bytes:
                text = f"the volumes of this agent would be larger than {self._max_bytes} bytes together; remove some"
                raise refusal("quota", text)
            volume = Volume(name, owner, max_bytes, mode, shared_with, timestamp())
            place = _place(folder, name)
            private_folder(place)
            _write(place, volume)
            return volume

    def get(self, reference: str, *, who: Owner) -> Volume:
        with storing("the volume"):
            return self._find(reference, who)[0]

    def list(self, who: Owner) -> VolumeList:
        """The owner's own volumes, by name."""
        with storing("the volumes"):
            return self._of(who)

    def remove(self, name: str, *, owner: Owner) -> None:
        """Delete a volume and its contents. Only its owner can, and only while no session may write to it."""
        folder = owner_folder(self._folder, owner)
        with storing("the volume"), self._alone(folder):
            if "/" in name:
                raise _unknown(name)
            volume, place = self._find(name, owner)
            held = _hold(place, volume)
            try:
                with TreeStore(place, _WHAT).alone():
                    (place / _RECORD).unlink()  # from here on it does not exist
                    shutil.rmtree(place)
            finally:
                os.close(held)

    def open(self, reference: str, *, who: Owner, mode: Mode) -> OpenVolume:
        """A volume for one session, until it is closed. Raises Refused where the agent has no access or another session
        writes."""
        with storing("the volume"):
            volume, place = self._find(reference, who)
            if mode == "rw" and who != volume.owner and volume.mode == "ro":
                text = f"volume {reference!r} is shared to be read; mount it 'ro', or ask its owner"
                raise refusal("read_only", text)
            held = _hold(place, volume) if mode == "rw" else None
            return OpenVolume(place, held, self.max_files)

    def _find(self, reference: str, who: Owner) -> tuple[Volume, Path]:
        tenant, agent = who
        named, slash, name = reference.rpartition("/")
        owner = (tenant, named) if slash else who
        place = _place(owner_folder(self._folder, owner), name)
        if not _NAME.fullmatch(name) or not (place / _RECORD).is_file():
            raise _unknown(reference)
        volume = _read(place)
        if volume.owner != who and not {agent, _ALL_AGENTS} & set(volume.shared_with):
            raise _unknown(reference)
        return volume, place

    def _of(self, owner: Owner) -> VolumeList:
        folder = owner_folder(self._folder, owner)
        places = sorted(folder.iterdir()) if folder.is_dir() else []
        return [_read(place) for place in places if (place / _RECORD).is_file()]

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        private_folder(self._folder)
        with TreeStore(folder, _WHAT).alone():
            yield


class OpenVolume:
    """A volume that a session has mounted: loaded once, saved as often as needed."""

    def __init__(self, place: Path, held: int | None, max_files: int) -> None:
        self._place = place
        self._held = held
        self._max_files = max_files
        self._store = TreeStore(place, _WHAT)
        self._swept = False
        """Whether leftovers of an earlier process were removed."""

    @property
    def volume(self) -> Volume:
        return _read(self._place)

    def load(self, folder: BoxTree) -> Volume:
        """Put what was last saved into a folder of a box in which nothing runs yet, replacing what is there.

        Where any part is missing or damaged, the folder is left empty. The size of the folder's file system must be
        the volume's `max_bytes`.
        """
        with storing("the volume"), self._store.using():
            volume = _read(self._place)
            folder.clear()
            try:
                nodes = self._store.tree(volume.listing) if volume.listing else []
                if tree_digest(nodes) != volume.tree_digest:
                    raise self._store.damaged("its files are not those that were saved")
                folder.put(nodes, self._store.get)
            except BaseException as problem:
                folder.clear()
                if isinstance(problem, ValueError):
                    raise self._store.damaged(str(problem)) from None
                raise
            return volume

    def save(self, folder: BoxTree) -> Volume:
        """Save what is in the folder now. Until this returns, the volume is what it was before."""
        if self._held is None:
            raise refusal("read_only", f"volume {self.volume.name!r} was mounted to be read; mount it to write")
        with storing("the volume"):
            with self._store.using():
                volume = _read(self._place)
                # New pieces stand beside the old ones until the new record is there.
                with self._store.adding(volume.max_bytes + self._max_files * 1024) as adding:
                    nodes = folder.take(adding.keep, max_files=self._max_files, max_bytes=volume.max_bytes).nodes
                    saved = replace(
                        volume,
                        saved_at=timestamp(),
                        bytes=sum(node.size for node in nodes),
                        files=sum(node.kind == "file" for node in nodes),
                        tree_digest=tree_digest(nodes),
                        listing=tuple(adding.tree(nodes)),
                    )
                    adding.commit()
                    _write(self._place, saved)
            if saved.listing != volume.listing or not self._swept:
                with self._store.alone():
                    self._store.sweep([saved.listing])
                self._swept = True
            return saved

    def close(self) -> None:
        """Release it. What was not saved is lost."""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _place(folder: Path, name: str) -> Path:
    return folder / f"{name}.volume"


def _hold(place: Path, volume: Volume) -> int:
    descriptor = try_lock(place / _WRITER)
    if descriptor is None:
        text = f"volume {volume.name!r} is mounted by another session that writes to it; mount it 'ro', or wait"
        raise refusal("volume_busy", text)
    return descriptor


def _write(place: Path, volume: Volume) -> None:
    write_whole(place / _RECORD, json.dumps(asdict(volume)).encode())


def _read(place: Path) -> Volume:
    try:
        record: dict[str, Any] = json.loads((place / _RECORD).read_bytes())
        lists = {name: tuple(record[name]) for name in ("owner", "shared_with", "listing")}
        return Volume(**record | lists)
    except (ValueError, TypeError, KeyError):
        raise Unavailable("damaged", f"the volume's record {place / _RECORD} cannot be read; restore it") from None


def _unknown(reference: str) -> Refused:
    return refusal("not_found", f"there is no volume {quoted(reference)}; list the volumes to see which there are")


# ── The volumes of one session: taken before its box is made, loaded before anything runs in it, saved, released ──


@dataclass(slots=True)
class _Mount:
    wanted: VolumeMount
    parts: tuple[str, ...]
    volume: OpenVolume
    loaded: bool = False


@dataclass(slots=True)
class VolumeMounts:
    """Methods block, and may be called from several threads. They raise Refused, Unavailable and StoreError."""

    _mounts: list[_Mount] = field(default_factory=list)
    _files: BoxFiles | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def __bool__(self) -> bool:
        return bool(self._mounts)

    def take(self, volumes: Volumes, who: Owner, wanted: tuple[VolumeMount, ...]) -> tuple[Folder, ...]:
        """Open the volumes; returns the folders that the box needs for them."""
        if len(wanted) > _MAX_MOUNTS:
            raise refusal("too_many", f"a session can have {_MAX_MOUNTS} volumes, not {len(wanted)}")
        try:
            return tuple(self._take_one(volumes, who, mount) for mount in wanted)
        except BaseException:
            self.close()
            raise

    def _take_one(self, volumes: Volumes, who: Owner, wanted: VolumeMount) -> Folder:
        parts = parts_of(wanted.at)
        if parts[:1] != (WORKSPACE[1:],):
            raise outside(wanted.at)
        if len(parts) == 1 or parts[1] in _RESERVED:
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

    def hold(self, box: StayingBox) -> None:
        """Take what is needed to reach their folders. Raises OSError and KeyError where the box is gone."""
        if self._mounts:
            self._files = box.files()

    def load(self) -> None:
        """Put the volumes' contents into a box in which nothing runs yet."""
        with self._turn:
            for mount in self._mounts:
                mount.volume.load(self._folder(mount))
                mount.loaded = True

    def _folder(self, mount: _Mount) -> BoxTree:
        assert self._files is not None
        return self._files.folder(full_path(mount.parts))

    def save(self) -> None:
        """Save those that are mounted for writing. Each is saved or stays as it was; raises the first problem."""
        problem: Refused | None = None
        with self._turn:
            for mount in self._mounts:
                if mount.wanted.mode == "rw" and mount.loaded:  # else it would be saved as if it were empty
                    try:
                        mount.volume.save(self._folder(mount))
                    except Refused as refused:
                        problem = problem or refused
        if problem is not None:
            raise problem

    def close(self) -> None:
        """What was not saved is lost."""
        with self._turn:
            for mount in self._mounts:
                mount.volume.close()
            self._mounts.clear()
            if self._files is not None:
                self._files.close()
                self._files = None
