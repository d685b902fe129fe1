"""The files of a live box, from the supervisor's side: /workspace by an open folder, while hostile code changes it.

Nothing outside can be reached, whatever the box does meanwhile: the kernel resolves each path beneath the folder in the
call that opens it. The supervisor never blocks on the box: only regular files are opened, without blocking. No
half-written file is ever visible: a file is written beside its place and moved there when it is complete.

/workspace/input can be read here but not written, as in the box itself: it is filled before the box starts, and by
`restore` of a snapshot, through a descriptor of its own. Later files go anywhere else in the workspace.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from ringfence.core.box import MIB, FileFact, within
from ringfence.core.errors import Refused
from ringfence.core.record import dataclass
from ringfence.core.system import write_all
from ringfence.sandbox.files.acted_upon import WHY, acts
from ringfence.sandbox.files.archive import pack_folder, unpack_into
from ringfence.sandbox.files.paths import (
    CREATE,
    LONGEST_PATH,
    PART,
    WORKSPACE,
    acting_as,
    beneath,
    explaining,
    from_source,
    full_path,
    made_folder,
    open_beneath,
    open_regular,
    parts_of,
    refusal,
    shown,
)
from ringfence.sandbox.files.tree import Kind, kind_of, read_tree, tree_digest
from ringfence.sandbox.files.walk import Walk, check_no_mount, remove_entry
from ringfence.sandbox.files.watch import Watcher

MOST_READ = 64 * MIB
"""For one `read`; longer files are streamed, or read in parts."""
MOST_LISTED = 100_000


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What is at a path; of a link, the link itself."""

    name: str
    """A name that cannot be shown as it is is escaped, and the entry cannot be addressed here."""
    path: str
    kind: Kind
    bytes: int
    modified: datetime
    mode: int
    target: str | None = None
    """The target of a link, as the box wrote it."""


Entries = list[EntryInfo]


class Workspace:
    """Paths are absolute beneath /workspace, or relative to it. All methods raise Refused and block."""

    def __init__(
        self,
        descriptor: int,
        owner: int | None,
        input_descriptor: int | None = None,
        on_host: tuple[str, ...] = (),
    ) -> None:
        """The caller closes the descriptors; `input_descriptor` is a writable one of /workspace/input.

        `owner`: the user that new files belong to on the host, where that is not ours. `on_host`: where the box sees
        folders of the host that it may write to. What programs of the host act upon by themselves is not changed there:
        the box may not, and we act for it.
        """
        self.descriptor = descriptor
        self.owner = owner
        self.input_descriptor = input_descriptor
        self.on_host = on_host

    # ── Reading ──

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file from `offset` on, up to `length` of them."""
        if offset < 0 or (length is not None and length < 0):
            raise refusal("bad_range", f"{path!r}: offset and length must not be negative")
        with self._reading(path) as (descriptor, size):
            wanted = max(0, size - offset) if length is None else length
            if min(wanted, max(0, size - offset)) > MOST_READ:
                text = f"{path!r} has {size} bytes, and one read gives {MOST_READ}; stream it, or read it in parts"
                raise refusal("too_large", text)
            return b"".join(_pieces(descriptor, offset, min(wanted, MOST_READ), MIB))

    def stream(self, path: str, chunk: int = MIB) -> Iterator[bytes]:
        """A file of any size, up to the size it had when it was opened, which is when the first bytes are asked for."""
        with self._reading(path) as (descriptor, size):
            yield from _pieces(descriptor, 0, size, chunk)

    def list(self, path: str = WORKSPACE, depth: int = 1) -> Entries:
        """The entries of a folder, sorted, and of the folders in it down to `depth`. No link is followed."""
        if depth < 1:
            raise refusal("bad_depth", f"the depth must be 1 or more, not {depth}")
        parts = parts_of(path)
        walk = Walk(depth=depth, most=MOST_LISTED, lenient=True)
        with explaining(self.descriptor, path), beneath(self.descriptor, parts) as folder:
            return [
                _entry((*parts, *found.parts), found.info, _target(found.name, found.folder, found.info))
                for found in walk.through(folder)
            ]

    def stat(self, path: str) -> EntryInfo:
        parts = parts_of(path)
        with explaining(self.descriptor, path):
            if not parts:
                return _entry((), os.fstat(self.descriptor), None)
            with beneath(self.descriptor, parts[:-1]) as folder:
                info = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
                return _entry(parts, info, _target(parts[-1], folder, info))

    def exists(self, path: str) -> bool:
        """Whether anything is there; a link counts, wherever it leads."""
        parts = parts_of(path)
        try:
            with explaining(self.descriptor, path), beneath(self.descriptor, parts[:-1]) as folder:
                os.stat(parts[-1] if parts else ".", dir_fd=folder, follow_symlinks=False)
        except Refused as refused:
            if refused.reason_code in ("not_found", "not_a_folder"):
                return False
            raise
        return True

    def tree_hash(self) -> str:
        """The digest of everything in the workspace, input and volumes included.

        All contents are read each time: a box can change a file that it has mapped without a trace in its times.
        """
        with explaining(self.descriptor, WORKSPACE), beneath(self.descriptor, ()) as root:
            return tree_digest(read_tree(root))

    # ── Writing ──

    def write(
        self, path: str, data: bytes | Iterable[bytes], *, append: bool = False, mode: int | None = None
    ) -> FileFact:
        """Write a file, with the folders above it. Returns what was written, which for `append` is the addition.

        The file is replaced atomically, and keeps its permissions. A link is replaced, never written through. `append`
        adds to the existing file, bytes as they come.
        """
        parts = _below_root(path)
        pieces = (data,) if isinstance(data, bytes) else from_source(data)
        self._check_path(parts)
        with explaining(self.descriptor, path), made_folder(self.descriptor, parts[:-1], self.owner) as (folder, _):
            self._check_entry(folder, parts[-1])
            if append:
                return self._append(folder, parts, pieces, mode)
            return self._replace(folder, parts, pieces, mode)

    def _replace(self, folder: int, parts: tuple[str, ...], pieces: Iterable[bytes], mode: int | None) -> FileFact:
        name = parts[-1]
        part = f"{PART}{secrets.token_hex(8)}.part"
        if mode is None:
            mode = _mode_of(folder, name)
        with acting_as(self.owner):
            written = os.open(part, CREATE, 0o600, dir_fd=folder)
        try:
            fact = _write(written, parts, pieces)
            os.fchmod(written, mode & 0o777)
            with acting_as(self.owner):
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):  # it is gone, or no longer ours
                os.unlink(part, dir_fd=folder)
            raise
        finally:
            os.close(written)
        return fact

    def _append(self, folder: int, parts: tuple[str, ...], pieces: Iterable[bytes], mode: int | None) -> FileFact:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        with acting_as(self.owner):
            written = open_beneath(folder, parts[-1:], flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(written).st_mode):
                raise OSError(errno.ENXIO, "not a regular file")
            if mode is not None:
                os.fchmod(written, mode & 0o777)
            return _write(written, parts, pieces)
        finally:
            os.close(written)

    def make_dir(self, path: str) -> bool:
        """Make a folder, with those above it. False where it is there already."""
        self._check_path(parts_of(path))
        with explaining(self.descriptor, path), made_folder(self.descriptor, parts_of(path), self.owner) as (_, made):
            return made

    def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. No link is followed."""
        parts = _below_root(path)
        with explaining(self.descriptor, path), beneath(self.descriptor, parts[:-1]) as folder:
            self._check_entry(folder, parts[-1])
            remove_entry(folder, parts[-1], self.owner)

    def rename(self, old: str, new: str) -> None:
        """Move a file, link or folder to a path whose folder exists; a file or link there is replaced."""
        source = _below_root(old)
        target = _below_root(new)
        with explaining(self.descriptor, old), beneath(self.descriptor, source[:-1]) as here:
            self._check_entry(here, source[-1])
            os.stat(source[-1], dir_fd=here, follow_symlinks=False)
            with explaining(self.descriptor, new), beneath(self.descriptor, target[:-1]) as there:
                self._check_entry(there, target[-1])
                if os.fstat(here).st_dev != os.fstat(there).st_dev:
                    raise refusal("other_disk", f"{old!r} and {new!r} are not on one disk; copy it instead")
                with acting_as(self.owner):
                    os.rename(source[-1], target[-1], src_dir_fd=here, dst_dir_fd=there)

    # ── Whole folders ──

    def pack(self, path: str = WORKSPACE, left_out: dict[str, str] | None = None) -> Iterator[bytes]:
        """A folder as an uncompressed tar stream, with names relative to it.

        Links that lead out of the folder, what is neither file, folder nor link, and names that cannot be shown go into
        `left_out` instead, with the reason. A file that is truncated while it is read ends the stream with Refused.
        """
        parts = parts_of(path)
        with explaining(self.descriptor, path), beneath(self.descriptor, parts) as folder:
            yield from pack_folder(folder, {} if left_out is None else left_out)

    def unpack(self, path: str, stream: Iterable[bytes], *, max_bytes: int, max_files: int) -> tuple[FileFact, ...]:
        """Put the files of an uncompressed tar stream into a folder, which is made where it is missing.

        Nothing of it is visible in its place before all of it was read and checked. Existing files are replaced.
        """
        parts = parts_of(path)
        self._check_path(parts)
        with explaining(self.descriptor, path), made_folder(self.descriptor, parts, self.owner) as (folder, _):
            place = _place_of(folder)
            self._refuse_what_acts(place)
            whole = from_source(stream)
            inside = any(within(place, at) for at in self.on_host)
            facts = unpack_into(folder, self.owner, whole, max_bytes=max_bytes, max_files=max_files, on_host=inside)
        return tuple(FileFact(full_path((*parts, fact.path)), fact.bytes, fact.sha256) for fact in facts)

    def watch(self, path: str = WORKSPACE, *, recursive: bool = False) -> Watcher:
        """Reports what changes in a folder from now on. The caller closes it."""
        parts = parts_of(path)
        with explaining(self.descriptor, path), beneath(self.descriptor, parts) as folder:
            return Watcher(folder, parts, recursive=recursive)

    # ── Helpers ──

    def _check_entry(self, folder: int, name: str) -> None:
        """Refuse to put, move or remove an entry in a way that the box itself could not. Raises OSError and Refused."""
        self._refuse_what_acts(f"{_place_of(folder)}/{name}" if self.on_host else "")
        check_no_mount(folder, name)

    def _check_path(self, parts: tuple[str, ...]) -> None:
        """The same before folders on the way are made, by what the caller wrote."""
        self._refuse_what_acts(full_path(parts))

    def _refuse_what_acts(self, place: str) -> None:
        for at in self.on_host:
            if within(place, at) and (named := acts([*filter(None, place.removeprefix(at).split("/"))])) is not None:
                raise refusal("read_only", f"{place!r} cannot be changed from a box: {WHY} ({named})")

    @contextmanager
    def _reading(self, path: str) -> Iterator[tuple[int, int]]:
        with explaining(self.descriptor, path):
            descriptor = open_regular(self.descriptor, _below_root(path), follow=True)
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)


def _below_root(path: str) -> tuple[str, ...]:
    parts = parts_of(path)
    if not parts:
        raise refusal("bad_path", f"{path!r} is the workspace itself; name something in it")
    return parts


def _pieces(descriptor: int, at: int, length: int, chunk: int) -> Iterator[bytes]:
    while length > 0 and (data := os.pread(descriptor, min(chunk, length), at)):
        at += len(data)
        length -= len(data)
        yield data


def _write(descriptor: int, parts: tuple[str, ...], pieces: Iterable[bytes]) -> FileFact:
    size = 0
    digest = hashlib.sha256()
    for piece in pieces:
        size += len(piece)
        digest.update(piece)
        write_all(descriptor, piece)
    return FileFact(full_path(parts), size, digest.hexdigest())


def _mode_of(folder: int, name: str) -> int:
    with suppress(FileNotFoundError):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            return stat.S_IMODE(info.st_mode)
    return 0o644


def _place_of(folder: int) -> str:
    """Where the box sees an open folder: by whatever links it was reached."""
    return os.readlink(f"/proc/self/fd/{folder}")


def _target(name: str, folder: int, info: os.stat_result) -> str | None:
    if not stat.S_ISLNK(info.st_mode):
        return None
    try:
        return shown(os.readlink(name, dir_fd=folder)[:LONGEST_PATH])
    except OSError:  # it is no link any more
        return None


def _entry(parts: tuple[str, ...], info: os.stat_result, target: str | None) -> EntryInfo:
    names = tuple(map(shown, parts))
    kind = kind_of(info)
    return EntryInfo(
        name=names[-1] if names else WORKSPACE.strip("/"),
        path=full_path(names),
        kind=kind,
        bytes=info.st_size if kind == "file" else 0,
        modified=_time(info.st_mtime_ns),
        mode=stat.S_IMODE(info.st_mode),
        target=target,
    )


def _time(nanoseconds: int) -> datetime:
    """A box can set any time, even one that no calendar has."""
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)
