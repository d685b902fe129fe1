"""Limits of boxes: what they may be, and how they are said in words."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from ringfence.core.box import MIB, Limits
from ringfence.sandbox.tools.limits import CALLER_LIMITS, limit_words, limits_problem, signal_words, size, span

LIMITS = Limits(wall_seconds=8, memory_bytes=64 * MIB, disk_bytes=1000, processes=7, inodes=9, open_files=5)


def test_every_limit_has_bounds_and_the_defaults_are_within() -> None:
    assert set(CALLER_LIMITS) == {field.name for field in fields(Limits)}
    assert limits_problem(Limits()) is None


@pytest.mark.parametrize("name", CALLER_LIMITS)
@pytest.mark.parametrize("value", [-1, 2**60, float("nan"), float("inf"), "5", True, b""], ids=repr)
def test_absurd_limits_are_told(name: str, value: Any) -> None:
    problem = limits_problem(replace(Limits(), **{name: value}))
    assert problem is not None and problem.startswith(f"{name} must be")


def test_a_limit_that_may_be_left_open_may_be() -> None:
    assert limits_problem(Limits(cpu_seconds=None, file_bytes=None)) is None
    assert limits_problem(replace(Limits(), memory_bytes=None)) is not None  # type: ignore[arg-type]
    assert limits_problem(replace(Limits(), processes=1.5)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (512, "512 bytes"),
        (4096, "4 KiB"),
        (MIB, "1 MiB"),
        (3 << 30, "3 GiB"),
        (1_000_000, "1 MB"),
        (1_500_000, "1.5 MB"),
    ],
)
def test_sizes_are_said_as_people_say_them(number: int, said: str) -> None:
    assert size(number) == said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory", "64 MiB of memory"),
        ("disk", "1000 bytes of disk"),
        ("file_size", "1000 bytes in one file"),
        ("pids", "7 processes"),
        ("inodes", "9 files on its disk"),
        ("files", "5 open files"),
        ("cpu", "8 s of processor time"),
        ("wall", "8 s"),
    ],
)
def test_a_limit_in_words(name: str, words: str) -> None:
    assert limit_words(name, LIMITS) == words


def test_signals_and_spans() -> None:
    assert (signal_words(9), signal_words(200), signal_words(None)) == (
        "signal 9 (SIGKILL)",
        "signal 200",
        "signal None",
    )
    assert (span(12.4), span(1499)) == ("12 ms", "1.5 s")
