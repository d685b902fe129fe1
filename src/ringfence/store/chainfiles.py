"""The files of a chain beside the database: its lock, its signed checkpoint, and the records that are ahead of the
database; and how a process that starts takes a chain.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path

from ringfence.audit.chain import (
    CLOSED,
    EMPTY_SLOT,
    FILE_BYTES,
    PRUNED_AT,
    PRUNED_BYTES,
    SLOT_BYTES,
    SLOTS,
    ChainVerifier,
    Findings,
    Head,
    Pruned,
    Record,
    Since,
    Slots,
    is_chain_name,
    pack_slot,
    read_pruned,
    read_slots,
)
from ringfence.audit.signer import Signer
from ringfence.core import system
from ringfence.core.errors import StoreError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.store.schema import check_owner, check_plain

log = logging.getLogger(__name__)

MAX_AHEAD_BYTES = 1024 * 1024
"""More than so much is not written ahead: the database has to take it."""
_LATEST = 2.0**40
MAX_ENDED = 8
"""Chains that may stand ended before one of them is taken up again."""
_TRIES = 4
_LAST = "SELECT seq, hash, kind FROM records WHERE chain = ? ORDER BY seq DESC LIMIT 1"

Noted = tuple[Record, bytes | None]
"""A record, and the salt that opens the digests in it."""

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


def _opened(path: Path) -> int:
    """A descriptor of a plain file that is ours: no link is followed, and no pipe is waited for. Raises OSError,
    StoreError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | system.PRIVATE | system.UNHURRIED, 0o600)
    try:
        check_plain(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class ChainLock:
    """Held as long as a process writes the chain. The file stays; only the lock on it counts."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, folder: Path, chain: str) -> ChainLock | None:
        """The lock, or None while another holds it. Raises OSError, StoreError."""
        descriptor = _opened(lock_path(folder, chain))
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

    def __init__(self, folder: Path, chain: str, signer: Signer) -> None:
        self.signer = signer
        self._chain = chain
        self._path = checkpoint_path(folder, chain)
        self._next = 0
        self._descriptor = _opened(self._path)

    @classmethod
    def create(cls, folder: Path, head: Head, signer: Signer) -> CheckpointFile:
        """A new file that holds `head`, on disk with its name. Raises OSError."""
        made = cls(folder, head.chain, signer)
        try:
            _write_all(made._descriptor, EMPTY_SLOT * SLOTS, 0)
            made.write(head, synced=True)
            system.sync_folder(made._path.parent)
        except OSError:
            made.close()
            raise
        return made

    def read(self) -> Slots:
        """What the file holds; the next write spares the newest."""
        found = read_slots(self._content(), self._chain, self.signer.public)
        self._next = 0 if found.index < 0 else 1 - found.index
        return found

    def newest_line(self) -> bytes:
        """The newest checkpoint as it was signed; empty where there is none."""
        index = read_slots(self._content(), self._chain, self.signer.public).index
        return b"" if index < 0 else self._content()[index * SLOT_BYTES : (index + 1) * SLOT_BYTES].strip()

    def write(self, head: Head, since: Since | None = None, *, synced: bool = False) -> None:
        """Sign `head`, to which the records `since` the last one lead. Raises OSError, StoreError.

        A record is synced where it must outlive the machine; its checkpoint need not be: one that is older than the
        log is what a crash leaves anyway, and a slot is one sector, so it reaches the disk whole or not at all.
        """
        slot = pack_slot(self.signer.checkpoint(head, time.time(), since))
        _write_all(self._descriptor, slot, self._next * SLOT_BYTES)
        if synced:
            _sync(self._descriptor)
        # Only now is the other slot free to be overwritten: a failed write is tried again in the same place.
        self._next = 1 - self._next

    def read_pruned(self) -> Pruned | None:
        return read_pruned(self._content(), self._chain, self.signer.public)[0]

    def write_pruned(self, pruned: bytes) -> None:
        """Put down the signed word that the beginning of the chain goes, on disk before any of it does. Raises
        OSError."""
        _, index = read_pruned(self._content(), self._chain, self.signer.public)
        slot = pack_slot(pruned, PRUNED_BYTES)
        _write_all(self._descriptor, slot, PRUNED_AT + (1 - max(index, 0)) * PRUNED_BYTES)
        os.fsync(self._descriptor)  # the file may have grown

    def _content(self) -> bytes:
        return system.read_at(self._descriptor, FILE_BYTES, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def texts_to(connection: sqlite3.Connection, head: Head) -> Since:
    """The texts of a chain up to its head, after a place, for whoever signs for it."""
    text = "SELECT text FROM records WHERE chain = ? AND seq > ? AND seq <= ? ORDER BY seq"
    return lambda seq: (row[0] for row in connection.execute(text, (head.chain, seq, head.seq)))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = system.write_at(descriptor, data, offset)
        data, offset = data[written:], offset + written


# ── Records ahead of the database ─────────────────────────────────────────────────────────────────
#
# To commit to the database takes ten times as long as to run many a call. That a call has begun needs to be known only
# if its process dies, and a file that was written outlives that, too; the next commit takes such records along. The
# process that closes the chain of a dead one reads here what that had not committed yet.


def ahead_path(folder: Path, chain: str) -> Path:
    if not is_chain_name(chain):
        raise StoreError(f"{chain!r} is not the name of a chain")
    return folder / "chains" / f"{chain}.ahead"


class AheadFile:
    """Written from its beginning again after every commit, which leaves nothing of what it held."""

    def __init__(self, folder: Path, chain: str) -> None:
        """Raises OSError."""
        self._path = ahead_path(folder, chain)
        self._descriptor = _opened(self._path)
        self._end = 0

    def append(self, record: Record, salt: bytes | None) -> bool:
        """False where it holds too much already. Raises OSError."""
        entry = _packed(record, salt)
        if self._end + len(entry) > MAX_AHEAD_BYTES:
            return False
        if system.write_at(self._descriptor, entry, self._end) != len(entry):
            return False  # the disk is full: what follows from nothing is not read
        self._end += len(entry)
        return True

    def begin_anew(self) -> None:
        """All that it holds is in the database now, and nowhere else: who erases it there may be another process."""
        try:
            system.write_at(self._descriptor, bytes(self._end), 0)
        except OSError as exc:
            log.debug("%s: %s", self._path, exc)  # it follows nothing any more
        self._end = 0

    def remove(self) -> None:
        """Remove the file, when the chain is closed."""
        _remove_file(self._path)

    def close(self) -> None:
        os.close(self._descriptor)


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):  # what it holds follows nothing any more, and so is never read
        path.unlink()


def read_ahead(folder: Path, head: Head) -> list[Noted]:
    """What follows `head` in the file of its chain, as far as it does. Raises OSError."""
    try:
        data = _content(ahead_path(folder, head.chain))
    except FileNotFoundError:
        return []
    found: list[Noted] = []
    while (entry := _unpacked(data)) is not None:
        text, digest, salt, data = entry
        record = _following(head, text, digest)
        if record is None:
            break
        found.append((record, salt))
        head = record.head
    return found


def _content(path: Path) -> bytes:
    """Whatever was put there: no link is followed, and no pipe is waited for."""
    with open(os.open(path, os.O_RDONLY | system.PRIVATE | system.UNHURRIED), "rb") as file:
        check_owner(path, os.fstat(file.fileno()))
        return file.read(MAX_AHEAD_BYTES)


def _packed(record: Record, salt: bytes | None) -> bytes:
    text = record.text.encode()
    return b"%s %s %d\n%s\n" % (record.hash.encode(), salt.hex().encode() if salt else b"-", len(text), text)


def _unpacked(data: bytes) -> tuple[str, str, bytes | None, bytes] | None:
    """The first entry and what comes after it; None where there is none that is whole."""
    line, _, rest = data.partition(b"\n")
    try:
        digest, salt, size = line.decode().split(" ")
        end = int(size)
        text = rest[:end].decode()
        opening = None if salt == "-" else bytes.fromhex(salt)
    except ValueError:
        return None
    return (text, digest, opening, rest[end + 1 :]) if rest[end : end + 1] == b"\n" else None


def _following(head: Head, text: str, digest: str) -> Record | None:
    """The record, if it is one that was written after `head`."""
    found = Findings()
    verifier = ChainVerifier(head.chain, found)
    verifier.seq = head.seq
    verifier.hash = head.hash
    verifier.first = 1
    body = verifier.feed(text, digest)
    if body is None or found.faults or not _has_begun(body):
        return None
    return Record(head.chain, verifier.seq, body["at"], body["kind"], body.get("call_id"), text, digest)


def _has_begun(body: Json) -> bool:
    """Whether it says what is ever written here: any program can make a hash, and no other kind gets in this way."""
    at = body["at"]
    named = isinstance(body.get("call_id"), str) and body["kind"] == "started"
    return named and not isinstance(at, bool) and 0 <= at < _LATEST


# ── The chain of a process that starts ────────────────────────────────────────────────────────────
#
# It is a new one, or one that an ended process left. A chain has files of its own, and a verifier reads them all. So
# once enough chains have ended, the next process continues one of them where it was closed, and a thousand short
# processes leave no more chains than a few long ones.
#
# Never the one whose end no other chain has named yet: its opening record names the ends of other chains only, so a
# chain that one process after the other goes on with would be named by none, and could be cut back unseen.


@dataclass(frozen=True, slots=True)
class OpenChain:
    """A chain that is ours to write, and its end so far."""

    lock: ChainLock
    checkpoints: CheckpointFile
    head: Head

    def take(self, connection: sqlite3.Connection) -> None:
        """Say, in the transaction that writes its next record, that the chain is in use. Raises StoreError."""
        if self.head.seq == 0:
            connection.execute("INSERT INTO chains (chain) VALUES (?)", (self.head.chain,))
            return
        taken = connection.execute(
            "UPDATE chains SET settled = 0, named = ifnull(named, ?) WHERE chain = ? AND settled = 1",
            (self.head.seq, self.head.chain),
        )
        if taken.rowcount != 1 or connection.execute(_LAST, (self.head.chain,)).fetchone()[1] != self.head.hash:
            raise StoreError(f"chain {self.head.chain} was changed by another program while it was taken up")

    def close(self) -> None:
        self.checkpoints.close()
        self.lock.release()


def begin_chain(folder: Path, signer: Signer) -> OpenChain:
    """A new chain. Raises OSError, StoreError."""
    chain = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(5).hex()}"
    # The lock first, then a signed word that the chain exists, and only then the chain itself: a process that
    # sees the chain finds it in use, and no chain is ever without its checkpoint.
    lock = ChainLock.take(folder, chain)
    if lock is None:
        raise StoreError(f"chain {chain} is in use")
    try:
        return OpenChain(lock, CheckpointFile.create(folder, Head(chain), signer), Head(chain))
    except BaseException:
        lock.release()
        raise


def continue_chain(connection: sqlite3.Connection, folder: Path, signer: Signer) -> OpenChain | None:
    """A chain that was closed in order and whose end is named, where many were closed. Raises OSError, StoreError."""
    try:
        rows = connection.execute(
            "SELECT chain, named FROM chains WHERE settled = 1 ORDER BY chain DESC LIMIT ?", (MAX_ENDED,)
        ).fetchall()
        # Whatever the table of chains says: nothing can have named the record that was written last.
        last = connection.execute("SELECT chain FROM records ORDER BY id DESC LIMIT 1").fetchone()
    except sqlite3.Error as exc:
        raise StoreError(f"the chains could not be read: {exc}") from exc
    if len(rows) < MAX_ENDED:
        return None
    free = [name for name, named in rows if named is None and (name,) != last]
    for name in free[:_TRIES]:
        found = _taken(connection, folder, name, signer) if is_chain_name(name) else None
        if found is not None:
            return found
    return None


def _taken(connection: sqlite3.Connection, folder: Path, name: str, signer: Signer) -> OpenChain | None:
    """The chain, locked. None where another process has it, or where it does not end at its checkpoint: evidence."""
    if not checkpoint_path(folder, name).exists():
        return None
    lock = ChainLock.take(folder, name)
    if lock is None:
        return None
    checkpoints = None
    try:
        checkpoints = CheckpointFile(folder, name, signer)
        held = checkpoints.read().newest
        row = connection.execute(_LAST, (name,)).fetchone()
        settled = connection.execute("SELECT settled FROM chains WHERE chain = ?", (name,)).fetchone() == (1,)
        if held is not None and not signer.state.may_have_signed(held.state):
            held = None
        known = signer.last(name)
        if held is not None and known is not None and (known.seq, known.hash) != (held.seq, held.head):
            held = None
        if settled and held is not None and row == (held.seq, held.head, CLOSED):
            return OpenChain(lock, checkpoints, Head(name, held.seq, held.head))
    except BaseException:
        _release(lock, checkpoints)
        raise
    _release(lock, checkpoints)
    return None


def _release(lock: ChainLock, checkpoints: CheckpointFile | None) -> None:
    if checkpoints is not None:
        checkpoints.close()
    lock.release()
