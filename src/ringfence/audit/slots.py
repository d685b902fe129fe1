"""The form of a chain's checkpoint file: two slots of fixed size, written in turn.

The one that is being written may be torn by a crash; the other then still holds the last good checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import Checkpoint

SLOT_BYTES = 512
SLOTS = 2
FILE_BYTES = SLOT_BYTES * SLOTS
EMPTY = b"".ljust(SLOT_BYTES - 1) + b"\n"


def pack(line: bytes) -> bytes:
    """A signed line, filled up to a slot that still reads as a line."""
    if len(line) >= SLOT_BYTES:
        raise ValueError(f"a checkpoint of {len(line)} bytes does not fit its slot")
    return line.ljust(SLOT_BYTES - 1) + b"\n"


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
