"""When boxes are looked at. The timers are the test's own: nothing here depends on how fast the machine is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from ringfence.sandbox.process.limits import pulse
from ringfence.sandbox.process.limits.pulse import BUSY_SECONDS, FIRST_SECONDS, IDLE_SECONDS, Pulse, Rhythm, worked_ms


class Timers:
    """In place of the loop and the clock: calls happen when the test says that time has passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spent = 0.0
        self.waiting: list[tuple[float, Callable[[], None], Timers.Handle]] = []
        self.fired = 0

    class Handle:
        gone = False

        def cancel(self) -> None:
            self.gone = True

    def call_later(self, seconds: float, call: Callable[[], None]) -> Handle:
        handle = Timers.Handle()
        self.waiting.append((self.now + seconds, call, handle))
        return handle

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.spent

    def pass_(self, seconds: float, work: Callable[[float], None] = lambda _: None) -> None:
        until = self.now + seconds
        while True:
            self.waiting = [each for each in self.waiting if not each[2].gone]
            due = min(self.waiting, key=lambda each: each[0], default=None)
            if due is None or due[0] > until:
                work(until - self.now)
                self.now = until
                return
            work(due[0] - self.now)
            self.now = due[0]
            self.waiting.remove(due)
            self.fired += 1
            due[1]()


class Box:
    def __init__(self, timers: Timers) -> None:
        self.timers = timers
        self.worked = 0.0
        self.looks: list[float] = []
        self.unknown = False

    def worked_ms(self) -> float | None:
        return None if self.unknown else self.worked

    def look(self) -> None:
        self.unknown = False
        self.looks.append(self.timers.now)

    def work(self, share: float) -> Callable[[float], None]:
        def work(seconds: float) -> None:
            self.worked += seconds * 1000 * share

        return work


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: timers)
    monkeypatch.setattr(pulse, "time", timers)
    return timers


def rhythm(timers: Timers, shared: Pulse | None = None) -> tuple[Box, Rhythm]:
    box = Box(timers)
    return box, Rhythm(shared or Pulse(), box.worked_ms, box.look)


def test_what_works_is_looked_at_often(timers: Timers) -> None:
    box, each = rhythm(timers)
    each.start()
    timers.pass_(1.0, box.work(0.5))
    assert box.looks[0] == FIRST_SECONDS
    gaps = [b - a for a, b in zip(box.looks, box.looks[1:], strict=False)]
    assert max(gaps) == pytest.approx(BUSY_SECONDS)


def test_a_box_that_takes_long_to_look_at_leaves_most_of_the_time_to_others(timers: Timers) -> None:
    box = Box(timers)

    def look() -> None:
        box.look()
        timers.now += 0.5
        timers.spent += 0.5

    each = Rhythm(Pulse(), box.worked_ms, look)
    each.start()
    timers.pass_(60.0, box.work(0.5))
    assert 20 <= len(box.looks) <= 45


def test_a_look_that_others_hold_up_is_not_put_off_the_longer(timers: Timers) -> None:
    box = Box(timers)

    def look() -> None:
        box.look()
        timers.now += 0.5  # another process had the processor meanwhile

    each = Rhythm(Pulse(), box.worked_ms, look)
    each.start()
    timers.pass_(60.0, box.work(0.5))
    assert len(box.looks) >= 100


def test_what_is_done_during_a_look_is_looked_at_again(timers: Timers) -> None:
    box = Box(timers)

    def look() -> None:
        box.look()
        if len(box.looks) == 1:
            box.worked += 50.0

    each = Rhythm(Pulse(), box.worked_ms, look)
    each.rest()
    timers.pass_(IDLE_SECONDS, box.work(0.01))
    assert len(box.looks) == 1
    timers.pass_(IDLE_SECONDS)
    assert len(box.looks) >= 2


def test_idle_boxes_share_one_slow_timer_and_are_not_looked_at(timers: Timers) -> None:
    shared = Pulse()
    boxes = [rhythm(timers, shared) for _ in range(50)]
    for box, each in boxes:
        box.worked = 500.0
        each.start()
    timers.pass_(5.0)
    fired, looks = timers.fired, [len(box.looks) for box, _ in boxes]
    timers.pass_(60.0)
    assert timers.fired - fired <= 60.0 / IDLE_SECONDS + 1
    assert [len(box.looks) for box, _ in boxes] == looks


def test_an_idle_box_that_begins_to_work_is_looked_at_often_again(timers: Timers) -> None:
    box, each = rhythm(timers)
    each.start()
    timers.pass_(5.0)
    began, before = timers.now, len(box.looks)
    timers.pass_(2.0, box.work(1.0))
    after = box.looks[before:]
    assert after[0] - began <= IDLE_SECONDS + BUSY_SECONDS
    assert len(after) > 1.0 / BUSY_SECONDS


def test_a_little_work_adds_up_to_a_look(timers: Timers) -> None:
    box, each = rhythm(timers)
    each.start()
    timers.pass_(5.0)
    before = len(box.looks)
    timers.pass_(60.0, box.work(0.0005))
    assert len(box.looks) - before >= 10
    assert timers.fired < 5.0 / BUSY_SECONDS + 60.0 / IDLE_SECONDS


def test_a_process_that_has_ended_is_worth_a_look(timers: Timers) -> None:
    box, each = rhythm(timers)
    each.rest()
    timers.pass_(2.0)
    assert box.looks == []
    box.unknown = True
    timers.pass_(IDLE_SECONDS)
    assert box.looks and not box.unknown


def test_what_is_stopped_is_not_looked_at_and_leaves_no_timer(timers: Timers) -> None:
    box, each = rhythm(timers)
    each.start()
    timers.pass_(1.0, box.work(1.0))
    looks = len(box.looks)
    each.stop()
    timers.pass_(5.0, box.work(1.0))
    assert len(box.looks) == looks
    assert [each for each in timers.waiting if not each[2].gone] == []


def test_the_clock_of_another_process_is_read_and_its_end_is_told() -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    both, ours = worked_ms({child.pid, os.getpid()}), worked_ms({os.getpid()})
    assert both is not None and ours is not None and both > 0
    child.communicate()
    assert worked_ms({child.pid}) is None
    assert worked_ms(()) == 0.0
