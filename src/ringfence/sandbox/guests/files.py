"""The files of a guest that stays, behind the same port as those of every box: the guest's own agent is asked for them.

A program in the guest can do all that the agent does with files, so nothing rests on what it says: what comes is
checked, counted and limited here. Refusals are those of `Workspace`, for the same reasons.
"""

from __future__ import annotations

import builtins
import hashlib
import os
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from typing import Any

from ringfence.core.box import MIB, FileFact, Input, Limits, within
from ringfence.core.box_files import Entries, EntryInfo, digest, tree_digest
from ringfence.core.errors import Refused, Unavailable, WorkProgress
from ringfence.core.record import plain
from ringfence.sandbox.files import inputs as input_files
from ringfence.sandbox.files import workspace
from ringfence.sandbox.files.acted_upon import WHY, acts
from ringfence.sandbox.files.archive import unpack_into
from ringfence.sandbox.files.paths import (
    DEEPEST,
    FOLDER,
    LONGEST_PATH,
    WORKSPACE,
    full_path,
    outside,
    parts_of,
    refusal,
    shown,
)
from ringfence.sandbox.files.walk import MAX_ENTRIES
from ringfence.sandbox.files.watch import MAX_FOLDERS, MAX_TOLD
from ringfence.sandbox.guests.files_call import (
    GuestCall,
    WayToFiles,
    decoded,
    leaving,
    malformed_unless,
    opened,
)
from ringfence.sandbox.guests.files_here import LentFolder
from ringfence.sandbox.guests.files_loop import GuestSpool, GuestWatcher
from ringfence.sandbox.guests.files_tree import (
    GuestTree,
    contents_of,
    is_name,
    of_folder,
    packed,
    send_node,
    sliced,
    walked,
)

_MAX_NOTED = 2_000_000
_MAX_HASHED = 1024 * MIB
_OUTPUT = f"{WORKSPACE}/output"


@plain
class GuestPlaces:
    """Where a guest may have files of its own."""

    limits: Limits
    places: tuple[str, ...] = ("/tmp", "/home/user")  # noqa: S108 - in the guest
    """Folders that programs may write to, besides /workspace."""
    kept: tuple[str, ...] = (WORKSPACE,)
    """Those that a snapshot has: all that are no other names for a part of these."""
    stays: tuple[str, ...] = ()
    """Folders in these that the guest always has."""
    temporary: str = "/workspace/tmp"
    on_host: tuple[str, ...] = ()
    """Where it sees folders of the host that it may write to."""
    input: int | None = None
    """A descriptor of the folder of this host that it sees as /workspace/input, which the caller closes."""
    has_input: bool = False
    lent: Mapping[str, int] = field(default_factory=dict)
    """Descriptors of folders of this host that it sees, and cannot write to, by path."""


class GuestFiles:
    """Paths are those that programs in the guest see, absolute or relative to /workspace. Methods are for threads: they
    raise Refused and Unavailable and block."""

    def __init__(self, way: WayToFiles, places: GuestPlaces) -> None:
        self._way = way
        self._places = places

    def again(self) -> GuestFiles:
        return self

    def close(self) -> None:
        """There is nothing to close: the link is the guest's."""

    @property
    def temporary(self) -> str:
        return self._places.temporary

    @property
    def from_root(self) -> bool:
        return not self._way.beneath

    # ── Reading ──

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise refusal("bad_range", f"{path!r}: offset and length must not be negative")
        most = workspace.MAX_READ
        return b"".join(_contents(self._call("read", path, offset=offset, length=length, most=most), most))

    def stream(self, path: str, chunk: int = MIB) -> Generator[bytes, None, None]:
        call = self._call("read", path, offset=0, length=None, most=None)
        held = bytearray()
        for data in _contents(call, None):
            held += data
            while len(held) >= chunk:
                yield bytes(held[:chunk])
                del held[:chunk]
        if held:
            yield bytes(held)

    def list(self, path: str = WORKSPACE, depth: int = 1) -> Entries:
        if depth < 1:
            raise refusal("bad_depth", f"the depth must be 1 or more, not {depth}")
        parts = parts_of(path)
        most = workspace.MAX_LISTED
        call = self._call("entries", path, most=most, depth=min(depth, DEEPEST))
        found: Entries = []
        with leaving(call) as records:
            for _, data in records:
                found.append(_entry(parts, decoded(data)))
                malformed_unless(len(found) <= most)
        return found

    def stat(self, path: str) -> EntryInfo:
        top = [] if self._way.beneath else [WORKSPACE[1:]]
        with leaving(self._call("stat", path, top=top)) as records:
            told = [decoded(data) for _, data in records]
        malformed_unless(len(told) == 1)
        return _entry(parts_of(path), told[0])

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except Refused as problem:
            if problem.reason_code in ("not_found", "not_a_folder"):
                return False
            raise
        return True

    def tree_hash(self, mounted: Iterable[str] = ()) -> str:
        tree = self._whole()
        call = tree.tree(contents=False, most=MAX_ENTRIES)
        own = tree_digest(node for node, _ in tree.nodes(call, MAX_ENTRIES))
        others = {at: self._mount_hash(at) for at in mounted if not self._is_own(at)}
        return own if not others else digest("\0".join((own, *map(str, sorted(others.items())))).encode())

    def _mount_hash(self, path: str) -> str:
        """Of its contents, or, where those are too many to be read while a person waits or cannot be read, of what the
        kernel notes when they change."""
        parts = parts_of(path)
        try:
            if self.stat(path).kind == "dir":
                with suppress(Refused):
                    tree = GuestTree(self._way, (parts,), self._places.limits.disk_bytes)
                    call = tree.tree(contents=False, most=MAX_ENTRIES, max_bytes=_MAX_HASHED)
                    return tree_digest(node for node, _ in tree.nodes(call, MAX_ENTRIES))
            told = self._call("noted", path, most=_MAX_NOTED, bytes=_MAX_HASHED).done()
        except Refused as problem:
            return f"not seen: {problem}"
        return shown(str(told.get("digest"))[:64])

    # ── Writing ──

    def write(
        self, path: str, data: bytes | Iterable[bytes], *, append: bool = False, mode: int | None = None
    ) -> FileFact:
        with WorkProgress() as progress:
            self._check_entry(path)
            size = 0
            whole = hashlib.sha256()
            call = self._call("write", path, append=append, mode=mode)
            try:
                for piece in (data,) if isinstance(data, bytes) else data:
                    if not all(call.send(b"D", part) for part in sliced(piece)):
                        break
                    size += len(piece)
                    whole.update(piece)
            except BaseException:
                self._give_up(call, progress)
                raise
            call.finish()
            self._end(call, progress)
        return FileFact(full_path(parts_of(path)), size, whole.hexdigest())

    def _give_up(self, call: GuestCall, progress: WorkProgress) -> None:
        """The source of bytes failed: the guest is to undo what it can."""
        call.finish(whole=False)
        with suppress(Refused, Unavailable):
            self._end(call, progress)

    def _end(self, call: GuestCall, progress: WorkProgress) -> dict[str, Any]:
        try:
            return call.done()
        finally:
            if call.begun is not False:
                progress.begin()

    def spool(self, folder: str, name: str) -> GuestSpool:
        self._check_place(folder)
        order = self._way.order("spool", path=[*self._parts(folder), name])
        return GuestSpool(opened(self._way.link, order))

    def make_dir(self, path: str) -> bool:
        with WorkProgress() as progress:
            self._check_place(path)
            return self._end(self._call("make_dir", path), progress).get("made") is True

    def remove(self, path: str) -> None:
        with WorkProgress() as progress:
            self._check_entry(path)
            self._end(self._call("remove", path), progress)

    def rename(self, old: str, new: str) -> None:
        with WorkProgress():
            self._check_entry(old)
            self._check_entry(new)
            call = self._call("rename", old, to=self._parts(new), target=new)
            try:
                call.done()
            except Refused as problem:
                if problem.reason_code == "other_disk":
                    text = f"{old!r} and {new!r} are not on one disk; copy it instead"
                    raise refusal("other_disk", text) from None
                raise

    # ── Whole folders ──

    def pack(self, path: str = WORKSPACE, left_out: dict[str, str] | None = None) -> Iterator[bytes]:
        found: dict[str, str] = {} if left_out is None else left_out
        nodes = walked(self._tree_call(path, lenient=False), MAX_ENTRIES)
        yield from packed(nodes, found.__setitem__)

    def _tree_call(self, path: str, *, lenient: bool, most: int | None = None) -> GuestCall:
        return GuestCall(
            self._way, "tree", path, places=[self._parts(path)], contents=True, most=MAX_ENTRIES, bytes=most,
            links=not lenient, one_disk=False, named=False, input=None, piece=0, lenient=lenient,
        )  # fmt: skip

    def unpack(self, path: str, stream: Iterable[bytes], *, max_bytes: int, max_files: int) -> tuple[FileFact, ...]:
        with WorkProgress() as progress:
            parts = parts_of(path)
            self._check_place(path)
            inside = any(within(full_path(parts), at) for at in self._places.on_host)
            with _folder_here() as here:
                facts = unpack_into(here, None, stream, max_bytes=max_bytes, max_files=max_files, on_host=inside)
                call = self._call("unpack", path)
                for node, file in of_folder(here):
                    if not send_node(call, node, contents_of(file) if file >= 0 else ()):
                        break
                call.finish()
                self._end(call, progress)
        return tuple(FileFact(full_path((*parts, fact.path)), fact.bytes, fact.sha256) for fact in facts)

    def watch(self, path: str = WORKSPACE, *, recursive: bool = False) -> GuestWatcher:
        order = self._way.order("watch", path=self._parts(path), recursive=recursive, most=MAX_FOLDERS, told=MAX_TOLD)
        return self._way.wait_for(GuestWatcher.begun(self._way, order, path))

    def whole(self) -> GuestTree:
        return self._whole()

    def _whole(self) -> GuestTree:
        places = self._places
        if self._way.beneath:
            return GuestTree(self._way, ((),), places.limits.disk_bytes, whole=True)
        return GuestTree(
            self._way,
            tuple(parts_of(at) for at in places.kept),
            places.limits.disk_bytes,
            whole=True,
            named=True,
            stays=tuple(parts_of(at) for at in places.stays),
            input_parts=parts_of(input_files.INPUT) if places.has_input else None,
            input_descriptor=places.input,
        )

    def folder(self, at: str) -> GuestTree | LentFolder:
        lent = self._places.lent.get(full_path(parts_of(at)))
        if lent is not None:
            return LentFolder(lent)
        return GuestTree(self._way, (tuple(self._parts(at)),), self._places.limits.disk_bytes)

    @contextmanager
    def output(self, max_bytes: int, left_out: dict[str, str]) -> Iterator[int]:
        def left(path: str, why: str) -> None:
            left_out[f"{_OUTPUT}/{path}"] = why

        with _folder_here() as here:
            try:
                nodes = walked(self._tree_call(_OUTPUT, lenient=True, most=max_bytes), MAX_ENTRIES, left)
                unpack_into(here, None, packed(nodes, left), max_bytes=max_bytes, max_files=MAX_ENTRIES)
            except Refused as problem:
                if problem.reason_code in ("not_found", "not_a_folder", "link"):
                    raise FileNotFoundError(_OUTPUT) from None
                raise
            yield here

    def add_inputs(self, inputs: tuple[Input, ...]) -> None:
        if self._places.input is not None:
            input_files.put_inputs(self._places.input, inputs)
            return
        with _folder_here() as here:
            input_files.put_inputs(here, inputs)
            call = self._call("put", input_files.INPUT)
            for node, file in of_folder(here):
                if not send_node(call, node, contents_of(file) if file >= 0 else ()):
                    break
            call.finish()
            call.done()

    # ── Where a path leads ──

    def _parts(self, path: str) -> builtins.list[str]:
        parts = parts_of(path)
        if not self._way.beneath:
            return [*parts]
        if parts[:1] != (WORKSPACE[1:],):
            raise outside(path)
        return [*parts[1:]]

    def _call(self, what: str, path: str, **order: Any) -> GuestCall:
        return GuestCall(self._way, what, path, path=self._parts(path), **order)

    def _is_own(self, path: str) -> bool:
        return any(within(path, place) for place in (WORKSPACE, *self._places.places))

    def _check_place(self, path: str) -> None:
        """Raises Refused where programs could change nothing."""
        at = full_path(parts_of(path))
        self._parts(path)
        if not self._is_own(at) and not any(within(at, place) for place in self._places.on_host):
            own = ", ".join((WORKSPACE, *self._places.places))
            raise refusal("read_only", f"{path!r} is read-only in the box; it may write to {own}")
        for place in self._places.on_host:
            named = acts([*filter(None, at.removeprefix(place).split("/"))]) if within(at, place) else None
            if named is not None:
                raise refusal("read_only", f"{at!r} cannot be changed from a box: {WHY} ({named})")

    def _check_entry(self, path: str) -> None:
        self._check_place(path)
        if full_path(parts_of(path)) in ("/", WORKSPACE, *self._places.places, *self._places.stays):
            raise refusal("bad_path", f"{path!r} is a folder that the box always has; name something in it")


# ── What comes ────────────────────────────────────────────────────────────────────────────────────


def _contents(call: GuestCall, most: int | None) -> Iterator[bytes]:
    """Of a file, up to the size that the guest said first."""
    left = -1
    with leaving(call) as records:
        for kind, data in records:
            if kind == b"J":
                told = decoded(data)
                malformed_unless(left < 0 and isinstance(told, dict) and isinstance(told.get("size"), int))
                left = told["size"]
                malformed_unless(left >= 0 and (most is None or left <= most))
                continue
            left -= len(data)
            malformed_unless(left >= 0)
            yield data


def _entry(above: tuple[str, ...], told: Any) -> EntryInfo:
    malformed_unless(isinstance(told, list) and len(told) == 6)
    names, kind, size, modified, mode, target = told
    malformed_unless(isinstance(names, list) and len(names) <= DEEPEST and all(map(is_name, names)))
    malformed_unless(kind in ("file", "dir", "link", "other") and isinstance(mode, int))
    malformed_unless(isinstance(size, int) and size >= 0 and isinstance(modified, int))
    malformed_unless(target is None or (isinstance(target, str) and len(target) <= LONGEST_PATH))
    parts = (*above, *map(shown, names))
    return EntryInfo(
        name=parts[-1] if parts else "/",
        path=full_path(parts),
        kind=kind,
        bytes=size if kind == "file" else 0,
        modified=workspace.moment(modified),
        mode=mode & 0o7777,
        target=None if target is None else shown(target),
    )


@contextmanager
def _folder_here() -> Iterator[int]:
    """A folder of this host that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ringfence-files-") as place:
        folder = os.open(place, FOLDER)
        try:
            yield folder
        finally:
            os.close(folder)
