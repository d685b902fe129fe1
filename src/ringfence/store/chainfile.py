"""The two files of a chain beside the database: the lock that says it is in use, and its signed checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ringfence import system
from ringfence.audit import slots
from ringfence.audit.chain import Checkpoint, Head, is_chain_name
from ringfence.audit.keys import Keys
from ringfence.audit.pruned import Pruned
from ringfence.errors import StoreError

# The file never changes its size, so its data is all that must reach the disk; macOS has only the other call.
_sync = getattr(os, "fdatasync", os.fsync)


def lock_path(folder: Path, chain: str) -> Path:
    return folder / "chains" / f"{_checked(chain)}.lock"


def checkpoint_path(folder: Path, chain: str) -> Path:
    return folder / "checkpoints" / _checked(chain)


def _checked(chain: str) -> str:
    if not is_chain_name(chain):
        raise StoreError(f"{chain!r} is not the name of a chain")
    return chain


class ChainLock:
    """Held as long as somebody writes the chain. The file stays; only the lock on it counts."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, folder: Path, chain: str) -> ChainLock | None:
        """The lock, or None while another holds it. Raises OSError."""
        descriptor = os.open(lock_path(folder, chain), os.O_RDWR | os.O_CREAT | system.PRIVATE, 0o600)
        try:
            taken = system.lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if not taken:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class CheckpointFile:
    """Signs a chain's head into the slot that does not hold the last good checkpoint."""

    def __init__(self, folder: Path, chain: str, keys: Keys) -> None:
        self.keys = keys
        self._chain = chain
        self._path = checkpoint_path(folder, chain)
        self._next = 0
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | system.PRIVATE, 0o600)

    @classmethod
    def create(cls, folder: Path, head: Head, keys: Keys) -> CheckpointFile:
        """A new file that holds `head`, on disk with its name. Raises OSError."""
        made = cls(folder, head.chain, keys)
        try:
            _write_all(made._descriptor, slots.EMPTY * slots.SLOTS, 0)
            made.write(head, synced=True)
            system.sync_folder(made._path.parent)
        except OSError:
            made.close()
            raise
        return made

    def read(self) -> slots.Slots:
        """What the file holds; the next write spares the newest."""
        found = slots.read(self._content(), self._chain, self.keys.public)
        self._next = 0 if found.index < 0 else 1 - found.index
        return found

    def write(self, head: Head, *, synced: bool = False) -> None:
        """Sign `head`. Raises OSError.

        A record is synced where it must outlive the machine; its checkpoint need not be: one that is older than the
        log is what a crash leaves anyway, and a slot is one sector, so it reaches the disk whole or not at all.
        """
        checkpoint = Checkpoint(head.chain, head.seq, head.hash, head.seq, time.time())
        slot = slots.pack(checkpoint.sign(self.keys.private))
        _write_all(self._descriptor, slot, self._next * slots.SLOT_BYTES)
        if synced:
            _sync(self._descriptor)
        # Only now is the other slot free to be overwritten: a failed write is tried again in the same place.
        self._next = 1 - self._next

    def read_pruned(self) -> Pruned | None:
        return slots.read_pruned(self._content(), self._chain, self.keys.public)[0]

    def write_pruned(self, pruned: Pruned) -> None:
        """Sign that the beginning of the chain goes, on disk before any of it does. Raises OSError."""
        _, index = slots.read_pruned(self._content(), self._chain, self.keys.public)
        slot = slots.pack(pruned.sign(self.keys.private), slots.PRUNED_BYTES)
        _write_all(self._descriptor, slot, slots.PRUNED_AT + (1 - max(index, 0)) * slots.PRUNED_BYTES)
        os.fsync(self._descriptor)  # the file may have grown

    def _content(self) -> bytes:
        return system.read_at(self._descriptor, slots.FILE_BYTES, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = system.write_at(descriptor, data, offset)
        data, offset = data[written:], offset + written
