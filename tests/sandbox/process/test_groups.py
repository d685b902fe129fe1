"""Control groups that serve one box after the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ringfence.box import Limits
from ringfence.sandbox.process.cgroup import Cgroups, Group
from ringfence.sandbox.process.groups import Groups

HERE = Cgroups.detect()
LIMITS = Limits(processes=5)
needed = pytest.mark.skipif("memory" not in HERE.available, reason="no control group counts memory here")


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups(HERE)
    yield made
    made.close()


def taken(groups: Groups, limits: Limits = LIMITS) -> Group:
    group = groups.take(limits)
    assert group is not None
    return group


def live_in(group: Group, children: int = 0) -> None:
    """One process that enters by itself, as a box does, with so many below it at the same time."""
    entrances = group.entrances()
    pid = os.fork()
    if pid == 0:
        for entrance in entrances:
            os.write(entrance, b"0")
        started = []
        for _ in range(children):
            started.append(os.fork())
            if started[-1] == 0:
                signal.pause()
        for child in started:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os._exit(0)
    for entrance in entrances:
        os.close(entrance)
    assert os.waitpid(pid, 0)[1] == 0


@needed
@pytest.mark.skipif(not os.path.exists("/sys/fs/cgroup/memory/tasks"), reason="memory is counted by v2 here")
def test_a_box_for_one_run_enters_without_stopping_the_host(groups: Groups) -> None:
    """Of v1 there are files for a single thread; v2 has none, and so is left out where it would only count."""
    group = taken(groups)
    entrances = group.entrances()
    names = {os.path.basename(os.readlink(f"/proc/self/fd/{entrance}")) for entrance in entrances}
    group.entered(entrances)
    live_in(group, 1)
    assert names == {"tasks"} and (group.count().cpu_ms or 0) > 0
    groups.give_back(group, LIMITS, reaped=True)


@needed
def test_a_group_in_which_something_lives_is_not_used_again(groups: Groups) -> None:
    group = taken(groups)
    group.keep_files_open()
    group.reset()  # which looks, and sees nobody
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        group.add(pid)
        with pytest.raises(OSError):
            group.reset()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        group.remove(patience=5)


@needed
@pytest.mark.parametrize("children", [0, 3])
def test_a_group_is_used_again_and_has_counted_nothing(groups: Groups, children: int) -> None:
    group = taken(groups)
    live_in(group, children)
    counted = group.count()
    assert (counted.cpu_ms or 1) > 0 and (counted.pids_peak or children + 1) == children + 1
    groups.give_back(group, LIMITS, reaped=True)
    again = taken(groups)
    assert again is group or children  # whose memory may take a moment to go
    assert (again.count().cpu_ms or 0.0) < 1
    assert not again.count().oom_kills and not again.count().pids_denied
    assert (again.count().pids_peak or 0) <= 2  # as many as any box has
    groups.give_back(again, LIMITS, reaped=True)


@needed
def test_other_limits_mean_another_group(groups: Groups) -> None:
    group = taken(groups)
    groups.give_back(group, LIMITS, reaped=True)
    other = taken(groups, replace(LIMITS, processes=7))
    assert other is not group
    groups.give_back(other, LIMITS, reaped=False)


@needed
def test_a_group_that_nobody_can_vouch_for_is_removed(groups: Groups) -> None:
    group = taken(groups)
    groups.give_back(group, LIMITS, reaped=False)
    assert not any(os.path.exists(path) for path in group.paths)
    assert taken(groups) is not group


@needed
def test_nothing_is_left_when_they_are_closed(groups: Groups) -> None:
    kept, in_use = taken(groups), taken(groups)
    groups.give_back(kept, LIMITS, reaped=True)
    groups.close()
    groups.give_back(in_use, LIMITS, reaped=True)
    assert not any(os.path.exists(path) for path in (*kept.paths, *in_use.paths))


def test_where_there_are_no_control_groups_there_is_none() -> None:
    nowhere = Cgroups({}, dict.fromkeys(("memory", "pids", "cpu", "freezer"), "none here"), HERE._owner)
    assert Groups(nowhere).take(LIMITS) is None
