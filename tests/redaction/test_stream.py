"""A stream goes on, but for its last bytes, as many whatever they are; what is found in it goes, however it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.redaction import KNOWN, REPLACEMENT, Stream, Values
from ringfence.redaction.stream import MOST_HELD
from ringfence.secret import Secret

VALUE = "hunter2-Hunter2/+="
LETTERS = b"aB3dE5fG7hJ9kL2mN4pQ6rS8tU1vW0xY"


@pytest.fixture(scope="module")
def values() -> Values:
    return Values([Secret("one", VALUE)])


def fed(stream: Stream, chunks: Iterator[bytes]) -> bytes:
    return b"".join([*map(stream.feed, chunks), stream.finish()])


def test_what_no_secret_could_begin_in_goes_on_at_once(values: Values) -> None:
    stream = Stream(values)
    data = bytes(range(256)) * 64
    assert stream.feed(data) == data[: -(values.reach - 1)]
    assert stream.finish() == data[-(values.reach - 1) :]
    assert Stream(Values()).feed(b"nothing else waits. ") == b"nothing else waits. "


def test_as_much_waits_whether_or_not_it_begins_a_secret() -> None:
    """Otherwise whoever has a guess echoed learns from what comes at once whether it was right so far."""
    values = Values([Secret("one", VALUE)], shaped=False)
    filler = b"." * 3000

    def lengths(text: str) -> list[int]:
        stream = Stream(values)
        return [len(stream.feed(data)) for data in (filler, text.encode(), b"x", filler)]

    for length in range(1, len(VALUE)):
        for guess in (VALUE[:length], VALUE[-length:], VALUE[:length][::-1]):
            assert lengths(guess) == lengths("~" * length)


@given(st.binary(max_size=60), st.lists(st.integers(0, 400), max_size=6))
def test_how_much_waits_depends_on_lengths_alone(end: bytes, sizes: list[int]) -> None:
    values = _known()
    ours, other = Stream(values), Stream(values)
    for size in sizes:
        data = b"." * size + end
        assert len(ours.feed(data)) == len(other.feed(b"." * len(data)))
        assert len(ours.release()) == len(other.release())


def test_a_secret_that_is_complete_goes_on_without_it(values: Values) -> None:
    stream = Stream(values)
    out = stream.feed(f"it is {VALUE}\n> ".encode()) + stream.finish()
    assert out == f"it is {REPLACEMENT}\n> ".encode()
    assert (stream.rules, stream.secrets) == ({KNOWN: 1}, {"one": 1})


def test_what_was_released_in_the_middle_of_a_secret_takes_the_rest_with_it(values: Values) -> None:
    stream = Stream(values)
    assert stream.feed(b"it is hunter2-Hun") + stream.release() == b"it is hunter2-Hun"
    assert stream.feed(b"ter2/+= really") + stream.finish() == b"[redacted] really"
    assert stream.rules == {KNOWN: 1}


def test_what_was_released_is_told_once(values: Values) -> None:
    stream = Stream(values)
    assert stream.feed(VALUE.encode()) + stream.release() == b"[redacted]"
    assert stream.feed(b" and on") + stream.release() + stream.feed(b".") + stream.finish() == b" and on."
    assert stream.rules == {KNOWN: 1}


@given(st.lists(st.binary(max_size=40) | st.just(VALUE.encode()), max_size=8))
def test_releases_between_pieces_lose_nothing(parts: list[bytes]) -> None:
    stream = Stream(_known())
    out = b"".join(stream.feed(part) + stream.release() for part in parts) + stream.finish()
    assert VALUE.encode() not in out
    if VALUE.encode() not in b"".join(parts):
        assert out == _known().redacted(b"".join(parts)).data


def test_the_end_gives_what_was_only_a_beginning(values: Values) -> None:
    stream = Stream(values)
    stream.feed(b"hunter2-Hun")
    assert stream.finish() == b"hunter2-Hun"
    assert stream.rules == {}


def test_a_value_that_begins_another_takes_nothing_from_it() -> None:
    values = Values([Secret("short", "correct-horse"), Secret("long", "correct-horse-battery-staple")])
    stream = Stream(values)
    assert fed(stream, iter([b"a correct-horse", b"-battery", b"-staple b"])) == b"a [redacted] b"
    assert stream.rules == {KNOWN: 1}


def test_values_that_overlap_go_together() -> None:
    values = Values([Secret("one", "abcdefghijklmnop"), Secret("two", "mnopqrstuvwxyz12")])
    assert values.redact("<abcdefghijklmnopqrstuvwxyz12>") == ("<[redacted]>", {KNOWN: 1})


@pytest.mark.parametrize("size", [1000, 5000, 100_000])
def test_a_shape_without_end_is_gone_and_memory_stays(values: Values, size: int) -> None:
    stream = Stream(values)
    out = stream.feed(b"token ghp_")
    for _ in range(2_000_000 // size):
        out += stream.feed((LETTERS * (size // 32 + 1))[:size])
        assert stream.held <= MOST_HELD + size
    out += stream.feed(b" done\n") + stream.finish()
    assert out == b"token [redacted] done\n"
    assert stream.rules == {"github_token": 1}


def test_what_never_becomes_a_secret_is_not_held_for_ever(values: Values) -> None:
    stream = Stream(values)
    data = b"eyJ" + LETTERS * 4000
    assert stream.feed(data) != b""
    assert stream.held <= MOST_HELD


def test_a_long_value_goes_in_all_its_pieces() -> None:
    value = "".join(chr(33 + index * 7 % 90) for index in range(3000))
    values = Values([Secret("key", value)])
    redacted = values.redacted(f"a {value} b".encode())
    assert redacted.data == b"a [redacted] b"
    assert redacted.secrets == {"key": 1}
    assert values.redacted(f"a {value[500:900]} b".encode()).secrets == {"key": 1}


@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([VALUE.encode(), b"AKIAIOSFODNN7EXAMPLE", b"Bearer "]), max_size=8
    )
)
def test_pieces_and_the_whole_agree(parts: list[bytes]) -> None:
    values = _shared()
    stream = Stream(values)
    assert fed(stream, iter(parts)) == values.redacted(b"".join(parts)).data


@cache
def _shared() -> Values:
    return Values([Secret("one", VALUE)])


@cache
def _known() -> Values:
    return Values([Secret("one", VALUE)], shaped=False)
