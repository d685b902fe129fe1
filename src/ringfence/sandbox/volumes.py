"""Volumes: named folders that outlive boxes. What must be kept goes there; nothing else is kept.

No folder of the host is ever shown to a box. A volume is loaded into a file system of the box's own, which the kernel
limits to the volume's size, and saved back when the caller says so: when the session pauses, at checkpoints, and at its
end. A save is whole or did not happen, and costs what changed. So a crash loses what was written since the last save,
and nothing before that; a box can neither outgrow its volume nor leave it half-written.

One session at a time may mount a volume to write, and holds it until it ends, or its keeper does. Others may read
meanwhile; they have the volume as it was saved last when they mounted it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ringfence.box import MIB
from ringfence.errors import Refused, Unavailable
from ringfence.sandbox.beneath import WORKSPACE, beneath, explaining, refusal
from ringfence.sandbox.keeping import Owner, TreeStore, owner_folder, private_folder, storing, taken, write_whole
from ringfence.sandbox.restoring import write_tree
from ringfence.sandbox.trees import read_tree, tree_digest
from ringfence.sandbox.walking import Room, Walk, empty, is_mount

GIB = 1024**3
Mode = Literal["ro", "rw"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RECORD, _WRITER = "volume.json", "writer"
_WHAT = "volume"
_EVERYBODY = "*"


@dataclass(frozen=True, slots=True)
class Volume:
    """One volume, without its contents."""

    name: str
    owner: Owner
    max_bytes: int
    mode: Mode
    """What those may do whom it is shared with; its owner may always write."""
    shared_with: tuple[str, ...]
    """Agents of the same tenant; `*` for all of them."""
    created_at: str
    saved_at: str | None = None
    bytes: int = 0
    files: int = 0
    tree_digest: str = tree_digest(())
    listing: tuple[str, ...] = ()
    """The pieces of the list of its files."""


VolumeList = list[Volume]


class Volumes:
    """All volumes of this installation. Methods raise Refused, Unavailable and StoreError; long ones want a thread.

    An owner names a volume by its name; another agent whom it is shared with by `OWNER/NAME`. For everybody else it
    does not exist.
    """

    def __init__(self, folder: Path, *, max_bytes: int = 64 * GIB, max_files: int = 65_536) -> None:
        """`max_bytes` is what all volumes of an owner may be made for; `max_files` what each may hold."""
        self._folder = folder
        self._max_bytes = max_bytes
        self.max_files = max_files

    def create(
        self, name: str, *, owner: Owner, max_bytes: int, mode: Mode = "ro", shared_with: tuple[str, ...] = ()
    ) -> Volume:
        """An empty volume."""
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
            volume = Volume(name, owner, max_bytes, mode, shared_with, _now())
            place = _place(folder, name)
            private_folder(place)
            _write(place, volume)
            return volume

    def get(self, reference: str, *, who: Owner) -> Volume:
        with storing("the volume"):
            return self._find(reference, who)[0]

    def list(self, who: Owner) -> VolumeList:
        """One's own, by name."""
        with storing("the volumes"):
            return self._of(who)

    def remove(self, name: str, *, owner: Owner) -> None:
        """A volume with all that is in it, for good. Only its owner can, and only while nobody has it to write."""
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
        """A volume for one session, until it is closed. Raises Refused for who may not, and where another writes."""
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
        if volume.owner != who and not {agent, _EVERYBODY} & set(volume.shared_with):
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
    """A volume that a session has: loaded once, saved as often as it is worth."""

    def __init__(self, place: Path, held: int | None, max_files: int) -> None:
        self._place = place
        self._held = held
        self._max_files = max_files
        self._store = TreeStore(place, _WHAT)
        self._swept = False
        """Whether what a process before us may have left is gone."""

    @property
    def volume(self) -> Volume:
        return _read(self._place)

    def load(self, descriptor: int, owner: int | None) -> Volume:
        """Put what was saved last into an open folder of a box in which nothing runs yet, in place of what is there.

        Where anything is missing or not what it was, the folder is left empty. The folder's file system is to have
        the volume's `max_bytes` for its size.
        """
        with storing("the volume"), self._store.using():
            volume = _read(self._place)
            with explaining(descriptor, WORKSPACE), beneath(descriptor, ()) as root:
                empty(root, owner, kept=lambda info: is_mount(root, info))
                try:
                    nodes = self._store.tree(volume.listing) if volume.listing else []
                    if tree_digest(nodes) != volume.tree_digest:
                        raise self._store.damaged("its files are not those that were saved")
                    write_tree(root, nodes, self._store.get, owner)
                except BaseException as problem:
                    empty(root, owner, kept=lambda info: is_mount(root, info))
                    if isinstance(problem, ValueError):
                        raise self._store.damaged(str(problem)) from None
                    raise
            return volume

    def save(self, descriptor: int) -> Volume:
        """Keep what is in the folder now. Until this returns, the volume is what it was before."""
        if self._held is None:
            raise refusal("read_only", f"volume {self.volume.name!r} was mounted to be read; mount it to write")
        with storing("the volume"):
            with self._store.using():
                volume = _read(self._place)
                # New pieces stand beside the old ones until the new record is there.
                with self._store.adding(volume.max_bytes + self._max_files * 1024) as adding:
                    with explaining(descriptor, WORKSPACE), beneath(descriptor, ()) as root:
                        walk = Walk(most=self._max_files)
                        found = read_tree(root, adding.keep, walk, Room(volume.max_bytes))
                    nodes = [node for node in found if node.kind != "other"]
                    saved = replace(
                        volume,
                        saved_at=_now(),
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
        """Let others have it. What was not saved is gone."""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _place(folder: Path, name: str) -> Path:
    return folder / f"{name}.volume"


def _hold(place: Path, volume: Volume) -> int:
    descriptor = taken(place / _WRITER)
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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _unknown(reference: str) -> Refused:
    return refusal("not_found", f"there is no volume {reference[:80]!r}; list the volumes to see which there are")
