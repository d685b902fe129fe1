"""The file of a chain that is ahead of the database: records of calls that have only begun.

To commit to the database takes ten times as long as to run many a call. That a call has begun needs to be known only
if its process dies, and a file that was written outlives that, too; the next commit takes such records along. Whoever
closes the chain of a process that is gone reads here what it had not committed yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from ringfence import system
from ringfence.audit.chain import ChainVerifier, Findings, Head, Record, is_chain_name
from ringfence.errors import StoreError
from ringfence.model import Json

log = logging.getLogger(__name__)

MAX_BYTES = 1024 * 1024
"""More than so much is not written ahead: the database has to take it."""
_LATEST = 2.0**40
Noted = tuple[Record, bytes | None]
"""A record, and the salt that opens the digests in it."""


def ahead_path(folder: Path, chain: str) -> Path:
    if not is_chain_name(chain):
        raise StoreError(f"{chain!r} is not the name of a chain")
    return folder / "chains" / f"{chain}.ahead"


class AheadFile:
    """Written from its beginning again after every commit, which leaves nothing of what it held."""

    def __init__(self, folder: Path, chain: str) -> None:
        """Raises OSError."""
        self._path = ahead_path(folder, chain)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | system.PRIVATE, 0o600)
        self._end = 0

    def append(self, record: Record, salt: bytes | None) -> bool:
        """False where it holds too much already. Raises OSError."""
        entry = _packed(record, salt)
        if self._end + len(entry) > MAX_BYTES:
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
        """With the chain at its end."""
        remove(self._path)

    def close(self) -> None:
        os.close(self._descriptor)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # what it holds follows nothing any more, and so is never read
        path.unlink()


def read(folder: Path, head: Head) -> list[Noted]:
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
    """Whatever somebody put there: no link is followed, and nobody is waited for."""
    with open(os.open(path, os.O_RDONLY | system.PRIVATE | system.UNHURRIED), "rb") as file:
        return file.read(MAX_BYTES)


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
    verifier.seq, verifier.hash, verifier.first = head.seq, head.hash, 1
    body = verifier.feed(text, digest)
    if body is None or found.faults or not _has_begun(body):
        return None
    return Record(head.chain, verifier.seq, body["at"], body["kind"], body.get("call_id"), text, digest)


def _has_begun(body: Json) -> bool:
    """Whether it says what is ever written here: anybody can make a hash, and no other kind gets in this way."""
    at = body["at"]
    named = isinstance(body.get("call_id"), str) and body["kind"] == "started"
    return named and not isinstance(at, bool) and 0 <= at < _LATEST
