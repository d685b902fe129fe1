"""What is kept of a stream, however it comes in."""

from __future__ import annotations

import hashlib
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import Captured
from ringfence.sandbox.process.capture import Capture

chunks = st.lists(st.binary(max_size=40), max_size=40)


def captured(pieces: list[bytes], limit: int) -> Captured:
    capture = Capture(limit)
    for piece in pieces:
        capture.feed(piece)
    return capture.done()


@given(chunks, st.integers(0, 300))
def test_all_is_counted_and_hashed(pieces: list[bytes], limit: int) -> None:
    found = captured(pieces, limit)
    assert found.total == len(b"".join(pieces))
    assert found.sha256 == hashlib.sha256(b"".join(pieces)).hexdigest()


@given(chunks, st.integers(0, 300))
def test_head_and_tail_are_the_exact_ends(pieces: list[bytes], limit: int) -> None:
    found, everything = captured(pieces, limit), b"".join(pieces)
    assert everything.startswith(found.head)
    assert everything.endswith(found.tail)
    assert len(found.head) + len(found.tail) == min(limit, len(everything))
    assert found.truncated == (len(everything) > limit)


@given(chunks, st.integers(0, 300))
def test_what_fits_is_kept_whole(pieces: list[bytes], limit: int) -> None:
    found, everything = captured(pieces, limit), b"".join(pieces)
    if len(everything) <= limit:
        assert (found.head, found.tail) == (everything, b"")
    else:
        assert len(found.head) - len(found.tail) in (0, 1)


@given(chunks, chunks, st.integers(0, 300))
def test_pieces_do_not_matter(pieces: list[bytes], others: list[bytes], limit: int) -> None:
    everything = b"".join(pieces + others)
    assert captured(pieces + others, limit) == captured([everything], limit)
    assert captured([bytes([byte]) for byte in everything], limit) == captured([everything], limit)


def test_nothing_said_is_nothing_captured() -> None:
    assert Capture(1000).done() == Captured()


def test_it_can_be_asked_before_the_end() -> None:
    capture = Capture(4)
    capture.feed(b"ab")
    assert (capture.total, capture.done().head) == (2, b"ab")
    capture.feed(memoryview(b"cdefgh"))
    assert capture.done() == Captured(b"ab", b"gh", 8, hashlib.sha256(b"abcdefgh").hexdigest())


def test_memory_stays_flat_over_a_flood() -> None:
    capture, piece = Capture(100_000), bytes(65_537)
    tracemalloc.start()
    try:
        for _ in range(4_000):
            capture.feed(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert capture.total == 4_000 * 65_537
    assert peak < 500_000
