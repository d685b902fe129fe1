"""Trees of files on disk: pieces by their SHA-256, each stored once, each checked whenever it is read.

Nothing is put in place before it is on the disk: pieces are written beside it, synced and renamed, and what refers to
them comes last. Several processes may use one store: adding and reading take a shared lock, removing an exclusive one.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

from ringfence.core.box_files import PIECE, TreeNode, digest
from ringfence.core.errors import StoreError, Unavailable
from ringfence.core.record import dataclass
from ringfence.core.system import write_all
from ringfence.sandbox.files.paths import refusal

Owner = tuple[str, str]
"""Tenant and agent."""

_LOCK = "lock"
_NEW = "new"
_LOOK_SECONDS = 0.01
_MAX_SINGLE_SYNCS = 32
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Errors of the host's disk become StoreError."""
    try:
        yield
    except OSError as problem:
        raise StoreError(f"{what} cannot be read or written: {problem.strerror or problem}") from problem


def owner_folder(folder: Path, owner: Owner) -> Path:
    """Each owner has a folder: nothing tells another owner's data from data that does not exist."""
    return folder / digest(json.dumps(owner).encode())[:32]


def private_folder(folder: Path) -> None:
    """Make a folder that only this user can enter. Raises StoreError for one that others can."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise StoreError(f"{folder} must belong to this user and be closed to others; run: chmod 700 {folder}")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, synced to the disk."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        _write(part, data, sync=True)
        part.rename(path)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise
    _sync(path.parent)


def try_lock(path: Path, until: float = 0.0) -> int | None:
    """Lock a file, as long as the descriptor is open; None where the lock was not free in time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                return None
            time.sleep(_LOOK_SECONDS)
        else:
            return descriptor


class TreeStore:
    """The pieces of one owner's trees."""

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder
        self._pieces = str(folder / "pieces")  # building a Path for each piece would cost more
        self._what = what
        """What the store holds, for messages."""

    @contextmanager
    def using(self) -> Iterator[None]:
        """Shared: meanwhile nothing is removed."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclusive: meanwhile no other process adds, reads or removes."""
        with self._locked(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        private_folder(self._folder)
        descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def adding(self, max_bytes: int) -> Iterator[PieceWriter]:
        """Add pieces, up to this many bytes; they stay if they are committed before the end. Within `using`."""
        new = self._folder / _NEW
        new.mkdir(mode=0o700, exist_ok=True)
        adding = PieceWriter(self._pieces, str(new), max_bytes)
        try:
            yield adding
        finally:
            adding.drop()

    def get(self, name: str) -> bytes:
        """A piece. Raises Unavailable where it is missing or damaged."""
        try:
            data = _read(_place(self._pieces, name))
        except FileNotFoundError:
            raise self.damaged(f"piece {name[:16]} is missing") from None
        except OSError as problem:
            raise StoreError(f"the {self._what} cannot be read: {problem.strerror}") from problem
        if digest(data) != name:
            raise self.damaged(f"piece {name[:16]} is not what was kept")
        return data

    def tree(self, listing: Iterable[str]) -> list[TreeNode]:
        """The tree that `Adding.tree` stored."""
        try:
            rows = json.loads(b"".join(map(self.get, listing)))
            return [
                TreeNode(path, kind, mode, modified, size, tuple(pieces), target)
                for path, kind, mode, modified, size, pieces, target in rows
            ]
        except (ValueError, TypeError):
            raise self.damaged("its list of files cannot be read") from None

    def damaged(self, problem: str) -> Unavailable:
        text = f"the {self._what} is damaged and is not used: {problem}; use another, or restore the state from a copy"
        return Unavailable("damaged", text)

    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(entry.stat().st_size for entry in self._every_piece())

    def sweep(self, listings: Iterable[Iterable[str]]) -> None:
        """Remove all pieces except those of these trees, and unfinished ones. Within `alone`."""
        needed: set[str] = set()
        for listing in listings:
            needed.update(listing)
            for node in self.tree(listing):
                needed.update(node.pieces)
        for entry in self._every_piece():
            if entry.name not in needed:
                os.unlink(entry.path)
        with suppress(FileNotFoundError):
            for left in (self._folder / _NEW).iterdir():
                left.unlink()

    def _every_piece(self) -> Iterator[os.DirEntry[str]]:
        with suppress(FileNotFoundError):
            for group in sorted(os.listdir(self._pieces)):
                with os.scandir(f"{self._pieces}/{group}") as entries:
                    yield from entries


@dataclass(slots=True)
class PieceWriter:
    """Pieces on their way into the store."""

    pieces: str
    new: str
    max_bytes: int
    size: int = 0
    _waiting: dict[str, str] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, data: bytes) -> str:
        """Store a piece. Thread-safe. Raises Refused beyond the limit."""
        name = digest(data)
        place = _place(self.pieces, name)
        with self._turn:
            if name in self._waiting:
                return name
            with suppress(FileNotFoundError):
                if os.stat(place).st_size == len(data):
                    return name
            self.size += len(data)
            if self.size > self.max_bytes:
                text = "there is no room for more; remove snapshots or volumes that are no longer needed"
                raise refusal("quota", text)
            part = self._waiting[name] = f"{self.new}/{name}.{secrets.token_hex(6)}"
        with storing("what is kept"):
            _write(part, data, sync=False)
        return name

    def tree(self, nodes: Iterable[TreeNode]) -> list[str]:
        """Store the list of a tree's nodes. Returns the pieces of the list."""
        rows = [(n.path, n.kind, n.mode, n.modified_ns, n.size, n.pieces, n.target) for n in nodes]
        data = json.dumps(rows, separators=(",", ":")).encode()
        return [self.keep(data[at : at + PIECE]) for at in range(0, len(data), PIECE)]

    def commit(self) -> None:
        """Sync all pieces and move them into place. Raises OSError."""
        if len(self._waiting) > _MAX_SINGLE_SYNCS:
            _sync_all(self.new)
        else:
            for part in self._waiting.values():
                _sync(part)
        folders = {os.path.dirname(_place(self.pieces, name)) for name in self._waiting}
        for folder in (self.pieces, *folders):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        for name, part in self._waiting.items():
            os.rename(part, _place(self.pieces, name))
        self._waiting.clear()
        for folder in (*folders, self.pieces, os.path.dirname(self.pieces)) if folders else ():
            _sync(folder)

    def drop(self) -> None:
        for part in self._waiting.values():
            with suppress(FileNotFoundError):
                os.unlink(part)


def _place(pieces: str, name: str) -> str:
    return f"{pieces}/{name[:2]}/{name}"


def _write(path: Path | str, data: bytes, *, sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.read(descriptor, min(os.fstat(descriptor).st_size, PIECE) + 1)
    finally:
        os.close(descriptor)


def _sync(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_all(path: str) -> None:
    """The whole file system at once, instead of each file by itself."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)
