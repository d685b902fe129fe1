"""What processes have of memory that they share. The clock is the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.sandbox.process.box_usage import has_shared
from ringfence.sandbox.process.limits import shared_pages
from ringfence.sandbox.process.limits.shared_pages import Parts

MB = 1 << 20


class Kernel:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds
        self.asked: list[int] = []
        self.parts: dict[int, shared_pages.Memory | None] = {}
        monkeypatch.setattr(shared_pages, "_part", self._part)

    def clock(self) -> float:
        return self.now

    def _part(self, pid: int) -> shared_pages.Memory | None:
        self.now += self._seconds
        self.asked.append(pid)
        return self.parts.get(pid, (MB, 0))


def test_quick_answers_are_asked_for_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 0.0)
    each = Parts(kernel.clock, kernel.clock)
    for _ in range(3):
        assert each.added_up({1: (9 * MB, 0), 2: (9 * MB, 0)}) == (2 * MB, 0)
    assert len(kernel.asked) == 6
    kernel.parts[2] = None
    assert each.added_up({1: (9 * MB, 0), 2: (9 * MB, MB)}) == (10 * MB, MB)
    assert each.added_up({1: (9 * MB, 0)}) == (MB, 0)


def test_a_box_that_makes_looking_slow_does_not_keep_us_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 0.2)
    each = Parts(kernel.clock, kernel.clock)
    resident = dict.fromkeys(range(50), (9 * MB, 0))
    while kernel.now < 1000.0:
        each.added_up(resident)
        kernel.now += 0.02
    assert len(kernel.asked) * 0.2 < 60.0
    assert set(kernel.asked) == set(resident)


def test_what_is_taken_while_nobody_asks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 0.2)
    each = Parts(kernel.clock, kernel.clock)
    resident = dict.fromkeys(range(3), (9 * MB, 0))
    assert each.added_up(resident) == (MB, 0)
    assert each.added_up({**resident, 0: (14 * MB, 0), 2: (29 * MB, MB)}) == (26 * MB, MB)
    assert len(kernel.asked) == 1


def test_looks_that_others_hold_up_are_no_reason_to_know_less(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, 1.0)
    each = Parts(kernel.clock, lambda: 0.0)  # another process had the processor all the while
    assert each.added_up(dict.fromkeys(range(8), (9 * MB, 0))) == (8 * MB, 0)


def test_memory_that_is_shared_is_found_and_a_list_too_long_for_its_time_counts_as_such(tmp_path: Path) -> None:
    maps, never, at_once = tmp_path / "maps", float("inf"), float("-inf")
    mine = "aaaae0000000-aaaae0001000 r--p 00000000 fe:00 12 /usr/bin/true\nffff8000-ffff9000 rw-p 00000000 00:00 0\n"
    maps.write_text(mine + "ffffa000-ffffb000 rw-s 00000000 00:1c 5 /workspace/named\n")
    assert (has_shared(maps, never), has_shared(maps, at_once)) == (False, True)
    maps.write_text(mine * 300 + "ffffa000-ffffb000 rw-s 00000000 00:01 7 /dev/zero (deleted)\n")
    assert has_shared(maps, never)
    with pytest.raises(OSError):
        has_shared(tmp_path / "none", never)
