"""Snapshots: the files of a box, with its environment and working directory, to start other boxes from.

Contents are stored once for all snapshots of an owner, by digest; a snapshot's id is the digest of its record, which
names everything else by digest in turn. Template and packages are named, not kept. A snapshot holds no
policy, secrets or memory. Named pipes and sockets are left
out, and of a mounted volume only the mount point is kept: volumes exist by themselves.

An owner is an agent of a tenant. One owner's folder gives no access to another's: another owner's snapshot is answered
like one that does not exist, and timing reveals nothing about what others keep.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ringfence.core.box_files import BoxFiles, TreeNode, digest, tree_digest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.core.sessions import timestamp
from ringfence.sandbox.files.blobstore import Owner, TreeStore, owner_folder, private_folder, storing, write_whole
from ringfence.sandbox.files.paths import refusal

GIB = 1024**3
FORK_PREFIX = "fork."
"""Names of snapshots that exist only for a fork begin with this."""
_PREFIX = "snap-"
_ID = re.compile(r"snap-[0-9a-f]{64}")
_NAME = re.compile(r"(?!snap-)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RECORDS = "snapshots"
_WHAT = "snapshot"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot, without its contents."""

    id: str
    name: str | None
    tree_digest: str
    """The box's `tree_hash`, where it had no volumes, pipes or sockets."""
    bytes: int
    files: int
    created_at: str
    cwd: str
    env: Mapping[str, str]
    listing: tuple[str, ...]
    """The pieces that hold the list of its files."""
    has_input: bool = False
    """Whether the box had a folder for inputs, which is read-only."""
    whole: bool = False
    """Its paths begin at the root of the box; those of older ones at /workspace."""
    template: str | None = None
    packages: tuple[str, ...] = ()
    """Names of packages that were installed for the box, and are for one that is made from this."""
    for_agents: bool = False
    """It was taken of a session that an agent had: what programs keep of their own sessions is for programs alone."""


Ids = list[str]
SnapshotList = list[Snapshot]


class Snapshots:
    """All snapshots of this installation. Methods raise Refused, Unavailable and StoreError; they block."""

    def __init__(self, folder: Path, *, max_bytes: int = 16 * GIB, max_count: int = 1000) -> None:
        """`max_bytes` and `max_count` are what each owner may keep."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_count = max_count

    def take(
        self,
        files: BoxFiles,
        *,
        owner: Owner,
        env: Mapping[str, str],
        cwd: str,
        name: str | None = None,
        template: str | None = None,
        packages: tuple[str, ...] = (),
        for_agents: bool = False,
    ) -> Snapshot:
        """Store the files as they are. What a running program changes meanwhile may be in it or not: pause the box."""
        if name is not None and not _NAME.fullmatch(name):
            text = "letters, digits, '.', '_' and '-', 64 at most, and not 'snap-' first"
            raise refusal("bad_name", f"{quoted(name, 80)} cannot be the name of a snapshot; use {text}")
        folder, store = self._of(owner)
        with storing("the snapshot"), store.using():
            if len(self._ids(folder)) >= self._max_count:
                raise refusal("quota", f"there are {self._max_count} snapshots already; remove some")
            with store.adding(self._max_bytes - store.size()) as adding:
                taken = files.whole().take(adding.keep)
                nodes = taken.nodes
                snapshot = Snapshot(
                    id="",
                    name=name,
                    tree_digest=tree_digest(nodes),
                    bytes=sum(node.size for node in nodes),
                    files=sum(node.kind == "file" for node in nodes),
                    created_at=timestamp(),
                    cwd=cwd,
                    env=dict(env),
                    listing=tuple(adding.tree(nodes)),
                    has_input=taken.has_input,
                    whole=files.from_root,
                    template=template,
                    packages=packages,
                    for_agents=for_agents,
                )
                adding.commit()
            data = json.dumps(asdict(snapshot) | {"owner": owner, "salt": secrets.token_hex(16)}).encode()
            snapshot = replace(snapshot, id=f"{_PREFIX}{digest(data)}")
            (folder / _RECORDS).mkdir(mode=0o700, exist_ok=True)
            write_whole(folder / _RECORDS / snapshot.id, data)
        return snapshot

    def restore(self, reference: str, files: BoxFiles, *, owner: Owner) -> Snapshot:
        """Put a snapshot into a box in which nothing runs yet, replacing everything there.

        Where any part of it is missing or damaged, the box is left empty.
        """
        folder, store = self._of(owner)
        with storing("the snapshot"), store.using():
            snapshot = self._find(folder, store, reference)
            whole = files.whole()
            whole.clear()
            try:
                nodes = store.tree(snapshot.listing)
                if tree_digest(nodes) != snapshot.tree_digest:
                    raise store.damaged("its files are not those that were kept")
                if files.from_root and not snapshot.whole:
                    nodes = [TreeNode("workspace", "dir", 0o755), *(_below_workspace(node) for node in nodes)]
                whole.put(nodes, store.get)
            except BaseException as problem:
                whole.clear()
                if isinstance(problem, ValueError):
                    raise store.damaged(str(problem)) from None
                raise
        return snapshot

    def get(self, reference: str, *, owner: Owner) -> Snapshot:
        """By its id, or the newest of that name."""
        folder, store = self._of(owner)
        with storing("the snapshot"), store.using():
            return self._find(folder, store, reference)

    def list(self, owner: Owner) -> SnapshotList:
        """Newest first; a damaged one is not in it."""
        folder, store = self._of(owner)
        with storing("the snapshots"), store.using():
            return self._all(folder, store)

    def remove(self, reference: str, *, owner: Owner) -> None:
        """Remove a snapshot, and the contents that no other snapshot has."""
        folder, store = self._of(owner)
        with storing("the snapshot"), store.alone():
            snapshot = self._find(folder, store, reference)
            (folder / _RECORDS / snapshot.id).unlink()
            self._sweep(folder, store)

    def sweep(self, owner: Owner) -> None:
        """Remove what a process left behind that died while it took a snapshot."""
        folder, store = self._of(owner)
        with storing("the snapshots"), store.alone():
            self._sweep(folder, store)

    def _sweep(self, folder: Path, store: TreeStore) -> None:
        # What an unreadable record needs is unknown: then nothing is removed.
        with suppress(Unavailable):
            store.sweep([self._read(folder, store, id_).listing for id_ in self._ids(folder)])

    def _of(self, owner: Owner) -> tuple[Path, TreeStore]:
        folder = owner_folder(self._folder, owner)
        with storing("the snapshots"):
            private_folder(self._folder)
        return folder, TreeStore(folder, _WHAT)

    def _find(self, folder: Path, store: TreeStore, reference: str) -> Snapshot:
        if _ID.fullmatch(reference):
            if reference not in self._ids(folder):
                raise unknown_snapshot(reference)
            return self._read(folder, store, reference)
        found = next((one for one in self._all(folder, store) if one.name == reference), None)
        if found is None:
            raise unknown_snapshot(reference)
        return found

    def _all(self, folder: Path, store: TreeStore) -> SnapshotList:
        found = []
        for id_ in self._ids(folder):
            with suppress(Unavailable):
                found.append(self._read(folder, store, id_))
        return sorted(found, key=lambda one: (one.created_at, one.id), reverse=True)

    def _ids(self, folder: Path) -> Ids:
        try:
            return [name for name in sorted(os.listdir(folder / _RECORDS)) if _ID.fullmatch(name)]
        except FileNotFoundError:
            return []

    def _read(self, folder: Path, store: TreeStore, id_: str) -> Snapshot:
        data = (folder / _RECORDS / id_).read_bytes()
        if f"{_PREFIX}{digest(data)}" != id_:
            raise store.damaged("its record is not what was kept")
        record: dict[str, Any] = json.loads(data)
        del record["owner"], record["salt"]
        lists = {name: tuple(record.get(name, ())) for name in ("listing", "packages")}
        return Snapshot(**record | {"id": id_, **lists})


def _below_workspace(node: TreeNode) -> TreeNode:
    return replace(node, path=f"workspace/{node.path}")


def unknown_snapshot(reference: str) -> Refused:
    """The answer for a snapshot that does not exist, and for one that the caller has no access to."""
    return refusal("not_found", f"there is no snapshot {quoted(reference)}; list the snapshots to see which there are")
