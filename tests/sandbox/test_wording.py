from __future__ import annotations

import pytest

from ringfence.box import MIB, Limits
from ringfence.sandbox.wording import limit_words, signal_words, span

LIMITS = Limits(wall_seconds=8, memory_bytes=64 * MIB, disk_bytes=1000, processes=7, inodes=9, open_files=5)


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
