"""A witness: a file, a system log or a service in other hands, which gets the signed checkpoints of each chain.

It need not be trusted, only kept: an attacker who cuts back the database and its checkpoints together cannot take back
the lines that the witness has. A verification compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import (
    SLOT_BYTES,
    Checkpoint,
    Head,
    KnownHead,
    StateIdentity,
    is_chain_name,
    read_slots,
)
from ringfence.core.errors import StoreError

_BEGINS = b'{"signature":'
_MAX_LINE = 4096
"""Bytes of a line that is looked at: a checkpoint has far less, and what a system log puts before it is short."""


def signed_heads(checkpoints: Mapping[str, bytes], public: Ed25519PublicKey) -> Iterator[tuple[Head, bytes]]:
    """The last head of each chain, with the signed line of its checkpoint."""
    for chain, data in sorted(checkpoints.items()):
        if not is_chain_name(chain):
            continue
        found = read_slots(data, chain, public)
        if found.newest is not None and found.newest.seq:
            line = data[found.index * SLOT_BYTES : (found.index + 1) * SLOT_BYTES].strip()
            yield Head(chain, found.newest.seq, found.newest.head), line


def witnessed(path: Path, public: Ed25519PublicKey, state: StateIdentity | None) -> list[KnownHead]:
    """The heads of one state in a witness's file, which may have any other lines, too. Raises StoreError."""
    by = f"the witness {path}"
    found: dict[tuple[str, int, str], KnownHead] = {}
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                head = _checkpoint(line, public)
                if head is not None and head.seq and (state is None or state.may_have_signed(head.state)):
                    place = (head.chain, head.seq, head.head)
                    found.setdefault(place, KnownHead(Head(*place), by, head.at))
    except OSError as exc:
        raise StoreError(f"the witness {path} cannot be read: {exc.strerror or exc}") from exc
    return list(found.values())


def _lines(file: Iterable[bytes]) -> Iterator[bytes]:
    for line in file:
        # What a crash cut off may stand before a whole one; and a system log puts the time before each.
        begin = line.rfind(_BEGINS)
        if begin >= 0 and len(line) - begin <= _MAX_LINE:
            yield line[begin:].strip()


def _checkpoint(line: bytes, public: Ed25519PublicKey) -> Checkpoint | None:
    found = Checkpoint.verify(public, line)
    return found if found is not None and found.period is None and is_chain_name(found.chain) else None
