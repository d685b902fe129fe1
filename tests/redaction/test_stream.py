"""A stream goes on at once, but for what may be the beginning of a secret, and that is bounded."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_what_begins_no_secret_is_not_held(values: Values) -> None:
    stream = Stream(values)
    for text in (b"Continue? [y/N] ", b">>> ", b"line\n", b"50 % done\r", bytes(range(256)) + b"\n"):
        assert stream.feed(text) == text
        assert stream.held == 0


def test_a_beginning_waits_and_goes_on_when_it_turns_out_to_be_none(values: Values) -> None:
    stream = Stream(values)
    assert stream.feed(b"say hun") == b"say "
    assert stream.feed(b"dred\n") == b"hundred\n"


def test_a_secret_that_is_complete_holds_nothing_back(values: Values) -> None:
    stream = Stream(values)
    assert stream.feed(f"it is {VALUE}\n> ".encode()) == f"it is {REPLACEMENT}\n> ".encode()
    assert (stream.rules, stream.secrets) == ({KNOWN: 1}, {"one": 1})


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


_made: list[Values] = []


def _shared() -> Values:
    if not _made:
        _made.append(Values([Secret("one", VALUE)]))
    return _made[0]
