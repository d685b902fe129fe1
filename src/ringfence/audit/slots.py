"""The form of a chain's checkpoint file: two slots of fixed size, written in turn.

The one that is being written may be torn by a crash; the other then still holds the last good checkpoint. Behind them,
once the chain was pruned, stand two more, larger ones, for the signed word on that.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import Checkpoint
from ringfence.audit.pruned import Pruned

SLOT_BYTES = 512
SLOTS = 2
PRUNED_AT = SLOT_BYTES * SLOTS
PRUNED_BYTES = 1024
FILE_BYTES = PRUNED_AT + PRUNED_BYTES * SLOTS
EMPTY = b"".ljust(SLOT_BYTES - 1) + b"\n"


def pack(line: bytes, size: int = SLOT_BYTES) -> bytes:
    """A signed line, filled up to a slot that still reads as a line."""
    if len(line) >= size:
        raise ValueError(f"a statement of {len(line)} bytes does not fit its slot")
    return line.ljust(size - 1) + b"\n"


@dataclass(frozen=True, slots=True)
class Slots:
    """What a checkpoint file holds."""

    newest: Checkpoint | None
    """The last checkpoint of this chain that verifies."""
    index: int
    """The slot it stands in; -1 where there is none."""
    unreadable: int
    """Slots that hold something else than a checkpoint that verifies."""


def read(data: bytes, chain: str, public: Ed25519PublicKey) -> Slots:
    """Read a checkpoint file of `chain`, whatever it holds."""
    newest, index, unreadable = None, -1, 0
    for number in range(SLOTS):
        slot = data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
        if not slot.strip():
            continue
        found = Checkpoint.verify(public, slot)
        if found is None or found.chain != chain or found.period is not None:
            unreadable += 1
        elif newest is None or found.seq >= newest.seq:
            newest, index = found, number
    return Slots(newest, index, unreadable)


def read_pruned(data: bytes, chain: str, public: Ed25519PublicKey) -> tuple[Pruned | None, int]:
    """What a checkpoint file of `chain` says was pruned from it, and the slot that says so; -1 where none does."""
    newest, index = None, -1
    for number in range(SLOTS):
        start = PRUNED_AT + number * PRUNED_BYTES
        slot = data[start : start + PRUNED_BYTES].strip(b"\0 \n")
        found = Pruned.verify(public, slot) if slot else None
        if found is not None and found.chain == chain and (newest is None or found.seq > newest.seq):
            newest, index = found, number
    return newest, index
