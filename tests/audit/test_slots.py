"""A torn write never loses the last good checkpoint."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from ringfence.audit import slots
from ringfence.audit.chain import Checkpoint, Period

CHAIN = "c" * 64
KEY = Ed25519PrivateKey.generate()


def slot(seq: int, chain: str = CHAIN) -> bytes:
    return slots.pack(Checkpoint(chain, seq, "f" * 64, seq, 1893456000.123456).sign(KEY))


def test_the_largest_checkpoint_fits() -> None:
    assert len(slot(2**63 - 1)) == slots.SLOT_BYTES
    with pytest.raises(ValueError, match="fit"):
        slots.pack(b"x" * slots.SLOT_BYTES)


def test_the_newest_of_two_counts() -> None:
    found = slots.read(slot(5) + slot(4), CHAIN, KEY.public_key())
    assert (found.newest and found.newest.seq, found.index, found.unreadable) == (5, 0, 0)
    found = slots.read(slot(5) + slot(6), CHAIN, KEY.public_key())
    assert (found.newest and found.newest.seq, found.index) == (6, 1)


@given(st.integers(1, slots.SLOT_BYTES - 1))
def test_a_torn_slot_leaves_the_other(cut: int) -> None:
    old, new = slot(4), slot(6)
    torn = new[:cut] + old[cut:]
    found = slots.read(torn + slot(5), CHAIN, KEY.public_key())
    assert found.newest is not None
    assert found.newest.seq in (5, 6)
    assert found.newest.seq == 6 or found.unreadable in (0, 1)


def test_empty_and_foreign_slots() -> None:
    assert slots.read(b"", CHAIN, KEY.public_key()).newest is None
    assert slots.read(slots.EMPTY * 2, CHAIN, KEY.public_key()).unreadable == 0
    foreign = slots.read(slot(9, "another") + slots.EMPTY, CHAIN, KEY.public_key())
    assert (foreign.newest, foreign.unreadable) == (None, 1)
    closing = slots.pack(Checkpoint(CHAIN, 9, "f" * 64, 9, 1.0, Period()).sign(KEY))
    assert slots.read(closing, CHAIN, KEY.public_key()).newest is None
