"""What reaches a person's terminal from a shell in a box, however the box cuts it into pieces."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli.box.screen import Screen

STRINGS = ["\x1b]0;title\x07", "\x1b]52;c;bHM=\x1b\\", "\x1bP$qm\x1b\\", "\x1b_x\x07", "\x1b^x\x07", "\x1bXx\x1b\\"]
FORBIDDEN = re.compile(r"\x1b[\x00-\x1f\x7f]*[\]PX^_]|[\x80-\x9f]")


def through(*pieces: bytes) -> str:
    screen = Screen()
    return b"".join(map(screen.shown, pieces)).decode()


def test_what_is_shown_coloured_and_moved_passes() -> None:
    text = "\x1b[31mrot\x1b[0m é\r\n\x1b[2J\x1b[3;4H\x1b7\x1b8\x1b[?25l"
    assert through(text.encode()) == text
    assert through(*(bytes([byte]) for byte in text.encode())) == text


@pytest.mark.parametrize("string", STRINGS)
def test_strings_for_the_terminal_itself_are_removed(string: str) -> None:
    assert through(f"a{string}b".encode()) == "ab"
    assert through(*(bytes([byte]) for byte in f"a{string}b".encode())) == "ab"


def test_controls_of_eight_bits_mean_nothing() -> None:
    assert through("a\x9d0;title\x07b".encode()) == "a0;title\x07b"


def test_a_string_that_never_ends_is_never_shown_and_never_kept() -> None:
    screen = Screen()
    assert screen.shown(b"a\x1b]52;c;") == b"a"
    for _ in range(100):
        assert screen.shown(b"x" * 1000) == b""
    assert screen.shown(b"y\x07z") == b"z"


@pytest.mark.parametrize(
    "text", ["\x1b\x1b]]0;t\x07x", "\x1b\n]0;t\x07x", "\x1b\x1b]a\x07]0;t\x07x", "\x1b\x7f]0;t\x07x"]
)
def test_no_string_is_made_of_what_is_left(text: str) -> None:
    assert FORBIDDEN.search(through(text.encode())) is None


@given(
    st.lists(
        st.binary()
        | st.sampled_from([s.encode() for s in STRINGS])
        | st.sampled_from([b"\x1b", b"]", b"\\", b"\n", b"\x7f"])
    )
)
def test_nothing_lasting_gets_through(pieces: list[bytes]) -> None:
    assert FORBIDDEN.search(through(*pieces)) is None
