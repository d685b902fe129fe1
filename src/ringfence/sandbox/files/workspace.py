"""The files of a live box, from the supervisor's side: its disk by an open folder, while hostile code changes it.

Nothing outside of the box can be reached, whatever it does meanwhile: the kernel resolves each path beneath the folder
in the call that opens it. We act as the box's user, so that permissions mean here what they mean to its programs. What
is not on its disk can be read by its root, and not be written. The supervisor never blocks on the box: only regular
files are opened, without blocking. No half-written file is ever visible: a file is written beside its place and moved
there when it is complete.

/workspace/input can be read here but not written, as in the box itself: it is filled before the box starts, and by
`restore` of a snapshot, through a descriptor of its own. Later files go anywhere else in the workspace.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime

from ringfence.core.box import MIB, FileFact, Input, within
from ringfence.core.box_files import Entries, EntryInfo, digest, tree_digest
from ringfence.core.errors import Refused, WorkProgress
from ringfence.core.record import dataclass
from ringfence.core.system import write_all
from ringfence.sandbox.files.acted_upon import WHY, acts
from ringfence.sandbox.files.archive import pack_folder, unpack_into
from ringfence.sandbox.files.inputs import put_inputs
from ringfence.sandbox.files.paths import (
    CREATE,
    FOLDER,
    LONGEST_PATH,
    PART,
    WORKSPACE,
    acting_as,
    beneath,
    explaining,
    from_source,
    full_path,
    looking_as,
    made_folder,
    open_beneath,
    open_regular,
    opened,
    outside,
    parts_of,
    refusal,
    shown,
    too_long,
)
from ringfence.sandbox.files.tree import kind_of, read_tree
from ringfence.sandbox.files.walk import ReadBudget, Walk, WalkEntry, check_no_mount, remove_entry
from ringfence.sandbox.files.watch import Watcher
from ringfence.sandbox.files.whole import OneFolder, WholeDisk

MAX_READ = 64 * MIB
"""For one `read`; longer files are streamed, or read in parts."""
MAX_LISTED = 100_000
_MAX_HASHED = 1024 * MIB
"""Of a mount, whenever a person is asked about a step."""
_MAX_NOTED = 2_000_000
_LOOK = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_TEMPORARY = (("tmp",), ("var", "tmp"), ("dev", "shm"))
"""What leads to a box's folder for temporary files, where that is another one."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a path is looked up: these names, beneath this descriptor."""

    root: int
    parts: tuple[str, ...]
    as_root: bool
    """The descriptor is of the root of the box, or of what stands for it."""
    on_disk: bool = True

    def open(self, parts: tuple[str, ...], flags: int) -> int:
        return open_beneath(self.root, parts, flags, as_root=self.as_root)


class Workspace:
    """Paths are those that programs in the box see, absolute or relative to /workspace. All methods raise Refused and
    block."""

    def __init__(
        self,
        descriptor: int,
        owner: int | None,
        input_descriptor: int | None = None,
        on_host: tuple[str, ...] = (),
        places: tuple[str, ...] | None = None,
        root: int | None = None,
        *,
        is_foreign_user: bool = False,
        folders: Mapping[str, int] | None = None,
    ) -> None:
        """The caller closes the descriptors; `input_descriptor` is a writable one of /workspace/input.

        `owner`: the user that new files belong to on the host, where that is not ours. `on_host`: where the box sees
        folders of the host that it may write to. What programs of the host act upon by themselves is not changed there:
        the box may not, and we act for it.

        `places`: the folders of the box besides /workspace that are on its disk; the descriptor is then that of the
        disk, on which all of them lie by their paths. None: it is that of /workspace, and there is nothing else.
        `root`: the box's root, by which the rest of what it may read is read. `is_foreign_user`: of that rest, only
        what all users may read. `folders`: writable descriptors of the file systems of its own, by path.
        """
        self.descriptor = descriptor
        self.owner = owner
        self.input_descriptor = input_descriptor
        self.on_host = on_host
        self.places = places
        self.root = root
        self.is_foreign_user = is_foreign_user
        self.folders = dict(folders or {})

    def again(self, *, to_fill: bool = False) -> Workspace:
        """The same by new descriptors; `to_fill`: also those of its input and of file systems of its own."""
        made: list[int] = []

        def again(descriptor: int) -> int:
            made.append(os.dup(descriptor))
            return made[-1]

        try:
            return Workspace(
                again(self.descriptor),
                self.owner,
                again(self.input_descriptor) if to_fill and self.input_descriptor is not None else None,
                self.on_host,
                self.places,
                None if self.root is None else again(self.root),
                is_foreign_user=self.is_foreign_user,
                folders={at: again(each) for at, each in self.folders.items()} if to_fill else None,
            )
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise

    def close(self) -> None:
        """Close its descriptors."""
        for descriptor in (self.descriptor, self.root, self.input_descriptor, *self.folders.values()):
            if descriptor is not None:
                os.close(descriptor)
        self.root = self.input_descriptor = None
        self.folders = {}

    @property
    def from_root(self) -> bool:
        return self.places is not None

    @property
    def temporary(self) -> str:
        """Its folder for files that nobody keeps."""
        return self.places[0] if self.places else f"{WORKSPACE}/tmp"  # noqa: S108 - in the box

    @property
    def kept(self) -> tuple[str, ...]:
        """The folders of its disk, beneath the descriptor."""
        return ("",) if self.places is None else tuple(place[1:] for place in (WORKSPACE, *self.places))

    @property
    def input_parts(self) -> tuple[str, ...]:
        """Its folder for inputs, beneath the descriptor."""
        return tuple(filter(None, (self.kept[0], "input")))

    # ── Reading ──

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file from `offset` on, up to `length` of them."""
        if offset < 0 or (length is not None and length < 0):
            raise refusal("bad_range", f"{path!r}: offset and length must not be negative")
        with self._reading(path) as (descriptor, size):
            wanted = max(0, size - offset) if length is None else length
            if min(wanted, max(0, size - offset)) > MAX_READ:
                raise too_long(path, size, MAX_READ)
            return b"".join(_pieces(descriptor, offset, min(wanted, MAX_READ), MIB))

    def stream(self, path: str, chunk: int = MIB) -> Generator[bytes, None, None]:
        """A file of any size, up to the size it had when it was opened, which is when the first bytes are asked for."""
        with self._reading(path) as (descriptor, size):
            yield from _pieces(descriptor, 0, size, chunk)

    def list(self, path: str = WORKSPACE, depth: int = 1) -> Entries:
        """The entries of a folder, sorted, and of the folders in it down to `depth`. No link is followed."""
        if depth < 1:
            raise refusal("bad_depth", f"the depth must be 1 or more, not {depth}")
        parts = parts_of(path)
        with explaining(self.descriptor, path), self._folder(path) as folder, looking_as(self.owner):
            walk = Walk(depth=depth, most=MAX_LISTED, lenient=True, enters=self._enters)
            return [
                _entry((*parts, *found.parts), found.info, _target(found.name, found.folder, found.info))
                for found in walk.through(folder)
            ]

    def stat(self, path: str) -> EntryInfo:
        parts = parts_of(path)
        with explaining(self.descriptor, path):
            if parts in ((), (WORKSPACE[1:],)):
                with self._folder(path) as folder:
                    return _entry(parts, os.fstat(folder), None)
            with self._folder(full_path(parts[:-1])) as folder:
                info = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
                return _entry(parts, info, _target(parts[-1], folder, info))

    def exists(self, path: str) -> bool:
        """Whether anything is there; a link counts, wherever it leads."""
        try:
            self.stat(path)
        except Refused as refused:
            if refused.reason_code in ("not_found", "not_a_folder"):
                return False
            raise
        return True

    def tree_hash(self, mounted: Iterable[str] = ()) -> str:
        """The digest of everything on the box's disk, its input and volumes included, and of what it sees `mounted`
        elsewhere.

        All contents are read each time: a box can change a file that it has mapped without a trace in its times.
        """
        with explaining(self.descriptor, WORKSPACE), beneath(self.descriptor, ()) as root:
            own = tree_digest(read_tree(root))
        others = {at: self._mount_hash(at) for at in mounted if not self._on_disk(at)}
        return own if not others else digest("\0".join((own, *map(str, sorted(others.items())))).encode())

    def _on_disk(self, path: str) -> bool:
        return any(within(path, place) for place in (WORKSPACE, *(self.places or ())))

    def _mount_hash(self, path: str) -> str:
        """The digest of a folder or file of the host: of its contents, or, where those are too many to be read while a
        person waits or cannot be read, of what the kernel notes when they change."""
        try:
            descriptor = self._opened(path, lambda place: place.open(place.parts, _LOOK))
        except (OSError, Refused) as problem:
            return f"not seen: {problem}"
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                return _noted((), os.fstat(descriptor)) + _whole_digest(descriptor)
            with suppress(Refused):
                return tree_digest(read_tree(descriptor, budget=ReadBudget(_MAX_HASHED)))
            found = Walk(most=_MAX_NOTED, lenient=True).through(descriptor)
            return digest("\0".join(_noted(each.parts, each.info) for each in found).encode("utf-8", "surrogateescape"))
        finally:
            os.close(descriptor)

    # ── Writing ──

    def write(
        self, path: str, data: bytes | Iterable[bytes], *, append: bool = False, mode: int | None = None
    ) -> FileFact:
        """Write a file, with the folders above it. Returns what was written, which for `append` is the addition.

        The file is replaced atomically, and keeps its permissions. A link is replaced, never written through. `append`
        adds to the existing file, bytes as they come.
        """
        pieces = (data,) if isinstance(data, bytes) else from_source(data)
        with WorkProgress() as progress, explaining(self.descriptor, path):
            place = self._entry_to_change(path)
            parts = parts_of(path)
            self._check_path(parts)
            with self._made(place, place.parts[:-1], progress) as (folder, _):
                self._check_entry(place, folder, parts[-1])
                if append:
                    return self._append(folder, parts, pieces, mode, progress)
                return self._replace(folder, parts, pieces, mode, progress)

    def spool(self, folder: str, name: str) -> SpooledFile:
        place = self._to_change(folder)
        with self._made(place, place.parts) as (made, _), acting_as(self.owner):
            return SpooledFile(os.open(name, CREATE, 0o644, dir_fd=made))

    def _replace(
        self, folder: int, parts: tuple[str, ...], pieces: Iterable[bytes], mode: int | None, progress: WorkProgress
    ) -> FileFact:
        name = parts[-1]
        part = f"{PART}{secrets.token_hex(8)}.part"
        if mode is None:
            mode = _mode_of(folder, name)
        with acting_as(self.owner):
            _check_writable(folder, name)
            written = os.open(part, CREATE, 0o600, dir_fd=folder)
        before = progress.begun
        progress.begin()
        try:
            fact = _write(written, parts, pieces)
            os.fchmod(written, mode & 0o777)
            with acting_as(self.owner):
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):  # it is gone, or no longer ours
                os.unlink(part, dir_fd=folder)
                progress.begun = before
            raise
        finally:
            os.close(written)
        return fact

    def _append(
        self, folder: int, parts: tuple[str, ...], pieces: Iterable[bytes], mode: int | None, progress: WorkProgress
    ) -> FileFact:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        with acting_as(self.owner):
            written = open_beneath(folder, parts[-1:], flags, 0o644)
        progress.begin()
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
        with WorkProgress() as progress, explaining(self.descriptor, path):
            self._check_path(parts_of(path))
            place = self._to_change(path)
            with self._made(place, place.parts, progress) as (_, made):
                return made

    def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. No link is followed."""
        with WorkProgress() as progress, explaining(self.descriptor, path):
            place = self._entry_to_change(path)
            with self._around(place) as folder:
                self._check_entry(place, folder, place.parts[-1])
                remove_entry(folder, place.parts[-1], self.owner, progress)

    def rename(self, old: str, new: str) -> None:
        """Move a file, link or folder to a path whose folder exists; a file or link there is replaced."""
        # It is one call of the kernel, and what fails has changed nothing.
        with WorkProgress(), explaining(self.descriptor, old):
            source = self._entry_to_change(old)
            target = self._entry_to_change(new)
            self._rename(source, target, old, new)

    def _rename(self, source: _Place, target: _Place, old: str, new: str) -> None:
        with self._around(source) as here:
            self._check_entry(source, here, source.parts[-1])
            os.stat(source.parts[-1], dir_fd=here, follow_symlinks=False)
            with explaining(self.descriptor, new), self._around(target) as there:
                self._check_entry(target, there, target.parts[-1])
                if os.fstat(here).st_dev != os.fstat(there).st_dev:
                    raise refusal("other_disk", f"{old!r} and {new!r} are not on one disk; copy it instead")
                with acting_as(self.owner):
                    os.rename(source.parts[-1], target.parts[-1], src_dir_fd=here, dst_dir_fd=there)

    # ── Whole folders ──

    def pack(self, path: str = WORKSPACE, left_out: dict[str, str] | None = None) -> Iterator[bytes]:
        """A folder as an uncompressed tar stream, with names relative to it.

        Links that lead out of the folder, what is neither file, folder nor link, and names that cannot be shown go into
        `left_out` instead, with the reason. A file that is truncated while it is read ends the stream with Refused.
        """
        with explaining(self.descriptor, path), self._folder(path) as folder:
            yield from pack_folder(folder, {} if left_out is None else left_out, self.owner)

    def unpack(self, path: str, stream: Iterable[bytes], *, max_bytes: int, max_files: int) -> tuple[FileFact, ...]:
        """Put the files of an uncompressed tar stream into a folder, which is made where it is missing.

        Nothing of it is visible in its place before all of it was read and checked. Existing files are replaced.
        """
        with WorkProgress() as progress, explaining(self.descriptor, path):
            parts = parts_of(path)
            self._check_path(parts)
            place = self._to_change(path)
            with self._made(place, place.parts, progress) as (folder, _):
                seen_at = self._seen_at(place, folder)
                self._refuse_what_acts(seen_at)
                whole = from_source(stream)
                inside = any(within(seen_at, at) for at in self.on_host)
                progress.begin()
                facts = unpack_into(folder, self.owner, whole, max_bytes=max_bytes, max_files=max_files, on_host=inside)
        return tuple(FileFact(full_path((*parts, fact.path)), fact.bytes, fact.sha256) for fact in facts)

    def watch(self, path: str = WORKSPACE, *, recursive: bool = False) -> Watcher:
        """Reports what changes in a folder from now on. The caller closes it."""
        with explaining(self.descriptor, path), self._folder(path) as folder:
            return Watcher(folder, parts_of(path), recursive=recursive)

    def whole(self) -> WholeDisk:
        return WholeDisk(self.descriptor, self.owner, self.kept, self.input_parts, self.input_descriptor)

    def folder(self, at: str) -> OneFolder:
        parts = parts_of(at)
        own = self.folders.get(full_path(parts))
        if own is not None:
            return OneFolder(own, (), self.owner)
        return OneFolder(self.descriptor, parts if self.places is not None else parts[1:], self.owner)

    @contextmanager
    def output(self, max_bytes: int, left_out: dict[str, str]) -> Iterator[int]:
        # No link is followed: the box could have put one in its place.
        with opened(self.kept[0] or ".", FOLDER, self.descriptor) as folder, opened("output", FOLDER, folder) as output:
            yield output

    def add_inputs(self, inputs: tuple[Input, ...]) -> None:
        if self.input_descriptor is not None:
            put_inputs(self.input_descriptor, inputs, self.owner)

    # ── Where a path leads ──

    def _place(self, parts: tuple[str, ...], path: str) -> _Place:
        if self.places is None:
            if parts[:1] != (WORKSPACE[1:],):
                raise outside(path)
            return _Place(self.descriptor, parts[1:], as_root=False)
        for alias in _TEMPORARY:  # links, in each box that stays
            if parts[: len(alias)] == alias and full_path(alias) not in self.places:
                parts = (*parts_of(self.places[0]), *parts[len(alias) :])
        if any(within(full_path(parts), place) for place in (WORKSPACE, *self.places)):
            return _Place(self.descriptor, parts, as_root=True)
        return self._elsewhere(parts, path)

    def _elsewhere(self, parts: tuple[str, ...], path: str) -> _Place:
        if self.root is None:
            raise outside(path)
        return _Place(self.root, parts, as_root=True, on_disk=False)

    def _to_change(self, path: str) -> _Place:
        """Raises Refused where the box itself could change nothing."""
        parts = parts_of(path)
        place = self._place(parts, path)
        if not place.on_disk and not any(within(full_path(parts), at) for at in self.on_host):
            own = ", ".join((WORKSPACE, *(self.places or ())))
            raise refusal("read_only", f"{path!r} is read-only in the box; it may write to {own}")
        return place

    def _entry_to_change(self, path: str) -> _Place:
        place = self._to_change(path)
        if not place.parts or full_path(place.parts) in (self.places or ()) or parts_of(path) == (WORKSPACE[1:],):
            raise refusal("bad_path", f"{path!r} is a folder that the box always has; name something in it")
        return place

    def _opened(self, path: str, opening: Callable[[_Place], int]) -> int:
        """What a path leads to, as far as the box itself may look at it. Raises OSError, Refused."""
        parts = parts_of(path)
        place = self._place(parts, path)
        with looking_as(self.owner):
            try:
                descriptor = opening(place)
            except FileNotFoundError:
                if not (place.on_disk and place.as_root) or self.root is None:
                    raise
                place = self._elsewhere(parts, path)  # a link on the disk may lead there
                descriptor = opening(place)
            try:
                if not place.on_disk:
                    self._check_elsewhere(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

    def _check_elsewhere(self, descriptor: int) -> None:
        """Raises OSError for what shows each process something else, and for what the box's user may not read."""
        assert self.root is not None
        if os.fstat(descriptor).st_dev == self._of_processes:
            raise OSError(errno.ENXIO, "what is there depends on who looks")
        if self.is_foreign_user:
            names = [*filter(None, os.readlink(f"/proc/self/fd/{descriptor}").split("/"))]
            for depth in range(len(names) + 1):
                mode = os.stat("/".join(names[:depth]) or ".", dir_fd=self.root, follow_symlinks=False).st_mode
                needed = 0o001 if depth < len(names) else 0o005 if stat.S_ISDIR(mode) else 0o004
                if mode & needed != needed:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    @property
    def _of_processes(self) -> int:
        """The device of the box's /proc: what a process sees there depends on which it is."""
        try:
            return os.stat("proc", dir_fd=self.root, follow_symlinks=False).st_dev
        except OSError:
            return -1

    def _enters(self, found: WalkEntry) -> bool:
        return self.root is None or found.info.st_dev != self._of_processes

    @contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """A folder to look at."""
        descriptor = self._opened(path, lambda place: place.open(place.parts, FOLDER & ~os.O_NOFOLLOW))
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _around(self, place: _Place) -> Iterator[int]:
        """The folder of an entry that is to be changed."""
        with acting_as(self.owner):
            descriptor = place.open(place.parts[:-1], FOLDER & ~os.O_NOFOLLOW)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _made(
        self, place: _Place, parts: tuple[str, ...], progress: WorkProgress | None = None
    ) -> AbstractContextManager[tuple[int, bool]]:
        return made_folder(place.root, parts, self.owner, as_root=place.as_root, progress=progress)

    # ── Helpers ──

    def _check_entry(self, place: _Place, folder: int, name: str) -> None:
        """Refuse to put, move or remove an entry in a way that the box itself could not. Raises OSError and Refused."""
        self._refuse_what_acts(f"{self._seen_at(place, folder)}/{name}" if self.on_host else "")
        check_no_mount(folder, name)

    def _check_path(self, parts: tuple[str, ...]) -> None:
        """The same before folders on the way are made, by what the caller wrote."""
        self._refuse_what_acts(full_path(parts))

    def _refuse_what_acts(self, place: str) -> None:
        for at in self.on_host:
            if within(place, at) and (named := acts([*filter(None, place.removeprefix(at).split("/"))])) is not None:
                raise refusal("read_only", f"{place!r} cannot be changed from a box: {WHY} ({named})")

    def _seen_at(self, place: _Place, folder: int) -> str:
        """Where the box sees an open folder: by whatever links it was reached. Its disk is mounted at /workspace, and
        covered there by the folder of that name on it."""
        found = os.readlink(f"/proc/self/fd/{folder}")
        return found.removeprefix(WORKSPACE) if place.as_root and place.on_disk else found

    @contextmanager
    def _reading(self, path: str) -> Iterator[tuple[int, int]]:
        with explaining(self.descriptor, path):
            descriptor = self._opened(
                path, lambda place: open_regular(place.root, place.parts, follow=True, as_root=place.as_root)
            )
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)


class SpooledFile:
    """A file of a box that is written as its contents come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        write_all(self._descriptor, data)

    def drop(self) -> None:
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    async def close(self) -> bool:
        os.close(self._descriptor)
        return True


def _noted(parts: tuple[str, ...], info: os.stat_result) -> str:
    """What changes with a file: no program can set the last of these times."""
    return f"{'/'.join(parts)} {info.st_mode} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"


def _whole_digest(descriptor: int) -> str:
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_HASHED:
        return ""
    whole = hashlib.sha256()
    for piece in _pieces(descriptor, 0, info.st_size, MIB):
        whole.update(piece)
    return whole.hexdigest()


def _check_writable(folder: int, name: str) -> None:
    """Raise PermissionError for a file that the box may not write to, though it could replace it."""
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder))
    except PermissionError:
        raise
    except OSError:
        return  # it is not there, or no file: that shows when it is replaced


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
        name=names[-1] if names else "/",
        path=full_path(names),
        kind=kind,
        bytes=info.st_size if kind == "file" else 0,
        modified=moment(info.st_mtime_ns),
        mode=stat.S_IMODE(info.st_mode),
        target=target,
    )


def moment(nanoseconds: int) -> datetime:
    """A box can set any time, even one that no calendar has."""
    try:
        return datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)
