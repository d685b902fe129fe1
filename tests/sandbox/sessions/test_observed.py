"""What people are shown of a session: of a long life there are fewer moments, not more."""

from __future__ import annotations

from ringfence.core.box import BoxReport, Captured
from ringfence.sandbox.sessions.observed import FIRST_SECONDS, MAX_SAMPLES, Observed


def test_a_long_life_is_told_by_as_many_moments_as_a_short_one() -> None:
    seen = Observed()
    at = 0.0
    for number in range(10 * MAX_SAMPLES):
        seen.sample(at, float(number), number)
        at += seen.seconds
    assert MAX_SAMPLES / 2 <= len(seen.samples) < MAX_SAMPLES
    assert seen.seconds > FIRST_SECONDS
    times = [each.at for each in seen.samples]
    assert times == sorted(times) and times[0] == 0.0
    assert seen.samples[-1].memory_bytes == 10 * MAX_SAMPLES - 1


def test_processor_time_never_goes_back() -> None:
    seen = Observed()
    for counted in (10.0, 4.0, 12.0):  # processes that ended are not always counted any more
        seen.sample(0.0, counted, 0)
    assert [each.cpu_ms for each in seen.samples] == [10.0, 10.0, 12.0]


def test_of_what_a_step_wrote_the_end_is_kept() -> None:
    seen = Observed()
    long = Captured(b"head", b"t" * 9_000, 100_000)
    for number in range(40):
        seen.step(number, "default", BoxReport("exited", stdout=long, stderr=Captured(b"short", b"", 5)))
    assert [each.step for each in seen.steps][-1] == 39 and len(seen.steps) < 40
    assert seen.steps[-1].stdout == b"t" * 8_000 and seen.steps[-1].stderr == b"short"
