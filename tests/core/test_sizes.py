"""Sizes: what people write for them, and what they are told."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import MIB
from ringfence.core.sizes import parse_size, short_size, short_time

UNITS = {"": 2**20, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
NUMBERS = st.from_regex(r"\A[0-9]{1,20}(\.[0-9]{1,20})?\Z").filter(str.isascii)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("512", 512 * MIB),
        ("512M", 512 * MIB),
        ("2G", 2048 * MIB),
        ("1.5G", 1536 * MIB),
        ("2GiB", 2048 * MIB),
        ("2gib", 2048 * MIB),
        ("800MB", 800 * MIB),
        ("64K", 65_536),
        ("64 kB", 65_536),
        ("1T", 2**40),
        ("0.5", MIB // 2),
        ("0", 0),
        ("1.1G", 1_181_116_006),
        ("0.3K", 307),
    ],
)
def test_what_people_write(text: str, number: int) -> None:
    assert parse_size(text) == number


@given(NUMBERS, st.sampled_from(sorted(UNITS)), st.sampled_from(["", "b", "ib"]), st.booleans(), st.booleans())
def test_every_spelling_means_the_same_whole_bytes(number: str, unit: str, tail: str, capital: bool, gap: bool) -> None:
    ending = unit + tail if unit else ""
    text = f"{number}{' ' if gap and ending else ''}{ending.upper() if capital else ending}"
    exact = Fraction(number) * UNITS[unit]
    assert parse_size(text) <= exact < parse_size(text) + 1


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "G", "M512", "-1", "+1", "1,5G", "1.G", ".5G", "1e3", "1_000", "0x10", "nan", "inf", "1 2", "1GG"),
        *("512B", "5iB", "1P", "1Gi", "1 G B", " 1G", "1G\n", "1  G", "٣G", "1" * 21, "1\u212a", "1\u00a0G"),
    ],
)
def test_what_is_no_size_is_told_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size: .*as in 512M or 1\.5G$"):
        parse_size(text)


@given(st.text())
def test_any_text_is_a_size_or_told_briefly(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except ValueError as exc:
        assert "is not a size" in str(exc) and len(str(exc)) < 1100  # noqa: PT017 - either is right


@given(st.integers(0, 2**60))
def test_a_short_size_is_near_what_it_stands_for(number: int) -> None:
    shown = short_size(number)
    value, unit = shown.split(" ")
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(Fraction(value) * factor - number) <= Fraction(factor, 20) + Fraction(factor, 10**6)
    assert unit == "B" or number >= factor


@pytest.mark.parametrize(
    ("seconds", "one", "two"),
    [(-1, "0 s", "0 s"), (59.9, "59 s", "59 s"), (60, "1 min", "1 min"), (3661, "1 h", "1 h 1 min"),
     (3601, "1 h", "1 h"), (90_000, "1 d", "1 d 1 h"), (86_461, "1 d", "1 d")],
)  # fmt: skip
def test_a_time_is_said_in_its_largest_units(seconds: float, one: str, two: str) -> None:
    assert (short_time(seconds), short_time(seconds, units=2)) == (one, two)
