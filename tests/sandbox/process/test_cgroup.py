"""Control groups on this host, with real processes in them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.core.box import Limits
from ringfence.sandbox.process.cgroups.cgroup import Cgroups, Group, GroupPool, sweep
from ringfence.sandbox.process.cgroups.hierarchy import CgroupFolder

MIB = 1024 * 1024
HERE = Cgroups.detect()
EAT = "hold = bytearray(b'x') * ({mb} << 20)\nprint('eaten', flush=True)\ninput()\n"
EAT_MEMFD = """
import os
file = os.memfd_create("x")
for _ in range({mb}):
    os.write(file, bytes(1 << 20))
"""
FORK = """
import os, signal
try:
    while True:
        if not os.fork():
            signal.pause()
except BlockingIOError:
    print("refused", flush=True)
input()
"""
SPIN = "while True: pass"
SLEEP = "import time; print('here', flush=True); time.sleep(600)"


def needs(*controllers: str) -> pytest.MarkDecorator:
    missing = [f"{name}: {HERE.why[name]}" for name in controllers if name not in HERE.available]
    return pytest.mark.skipif(bool(missing), reason="; ".join(missing))


@pytest.fixture
def group() -> Iterator[Group]:
    made = HERE.make("test")
    try:
        yield made
    finally:
        made.kill()
        made.remove(patience=60)
        assert not any(os.path.exists(path) for path in made.paths)


def limit(group: Group, **other: float) -> None:
    values = {"memory_bytes": 32 * MIB, "hard_bytes": 64 * MIB, "processes": 20, "cpu_cores": 64.0, **other}
    group.limit(
        memory_bytes=int(values["memory_bytes"]),
        hard_bytes=int(values["hard_bytes"]),
        processes=int(values["processes"]),
        cpu_cores=values["cpu_cores"],
    )


@contextmanager
def running(group: Group, source: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that starts once it is in the group."""
    program = [sys.executable, "-I", "-c", "input()\n" + source]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        try:
            group.add(child.pid)
            child.stdin.write(b"\n")
            child.stdin.flush()
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def ended(pid: str) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_is_missing_has_a_reason() -> None:
    assert HERE.available | HERE.why.keys() == {"memory", "pids", "cpu", "freezer"}
    assert all(HERE.why.values())


def test_detecting_leaves_nothing_and_moves_nobody() -> None:
    with open("/proc/self/cgroup") as file:
        before = file.read()
    found = Cgroups.detect()
    with open("/proc/self/cgroup") as file:
        assert file.read() == before
    probe = found._owner.group("probe")
    assert not any(os.path.exists(folder.below(probe).path) for folder in found._folders.values())


@needs("memory")
def test_a_memory_eater_is_ended_and_counted(group: Group) -> None:
    limit(group)
    with running(group, EAT.format(mb=200)) as child:
        assert child.wait(60) == -signal.SIGKILL
    assert group.oom_kills() == 1


@needs("memory")
def test_memory_files_count_too(group: Group) -> None:
    limit(group)
    with running(group, EAT_MEMFD.format(mb=200)) as child:
        assert child.wait(60) == -signal.SIGKILL
    assert group.oom_kills() == 1


@needs("memory")
def test_usage_is_what_processes_hold_without_file_cache(group: Group, tmp_path: Path) -> None:
    limit(group, hard_bytes=256 * MIB)
    write = f"open({str(tmp_path / 'cache')!r}, 'wb').write(bytes(100 << 20))\n"
    with running(group, write + EAT.format(mb=40)) as child:
        assert said(child) == b"eaten"
        usage = group.usage()
        assert usage is not None and 40 * MIB <= usage < 90 * MIB


@needs("pids")
def test_a_fork_bomb_meets_the_limit_and_is_counted(group: Group) -> None:
    limit(group, processes=12)
    with running(group, FORK) as child:
        assert said(child) == b"refused"
        assert len(group.processes()) == 12
        denied = group.pids_denied()
        assert denied is not None and denied >= 1
        assert group.pids_peak() in (12, None)
        group.kill()
        child.wait(60)
    until(lambda: not group.processes())


@needs("cpu")
def test_the_share_of_the_processor_is_honoured(group: Group) -> None:
    # So small a share that even a busy host would give more.
    limit(group, cpu_cores=0.05)
    with running(group, SPIN):
        until(lambda: (group.cpu_ms() or 0.0) > 20)
        # The longer time first and last: whoever stands still in between only gives it more to use.
        began, used = time.monotonic(), group.cpu_ms()
        time.sleep(1.0)
        used_later, wall_ms = group.cpu_ms(), (time.monotonic() - began) * 1000
    assert used is not None and used_later is not None
    assert used_later - used < 0.2 * wall_ms


def test_processor_time_is_counted(group: Group) -> None:
    if group.cpu_ms() is None:
        pytest.skip("no hierarchy of this host counts processor time for us")
    with running(group, "import time\nwhile time.process_time() < 0.1: pass"):
        until(lambda: (group.cpu_ms() or 0) >= 80)


@needs("memory")
def test_a_group_used_again_is_as_good_as_new(group: Group) -> None:
    limit(group, processes=12, cpu_cores=0.5)
    for _ in range(2):
        assert (group.oom_kills(), group.pids_denied()) == (0, 0 if "pids" in HERE.available else None)
        assert (group.pids_peak() or 0, group.cpu_ms() or 0.0) == (0, 0.0)
        with running(group, FORK.replace("input()", "") + EAT.format(mb=200)) as child:
            assert child.wait(60) == -signal.SIGKILL
        assert (group.oom_kills() or 0) >= 1
        group.kill()
        until(lambda: not group.processes())
        group.reset()


@needs("memory")
def test_a_group_that_is_not_empty_is_not_used_again(group: Group) -> None:
    with running(group, SLEEP) as child:
        assert said(child) == b"here"
        with pytest.raises(OSError, match=r"busy|still in the group"):
            group.reset()


@needs("freezer")
def test_killing_ends_all_even_what_is_frozen_or_deaf(group: Group) -> None:
    deaf = "import os, signal\nos.fork()\nos.setsid()\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    with running(group, deaf.replace("os.setsid()", "os.getpid() == os.getsid(0) or os.setsid()")) as child:
        until(lambda: len(group.processes()) == 2)
        group.freeze()
        until(lambda: group.frozen())
        group.kill()
        assert child.wait(60) == -signal.SIGKILL
    until(lambda: not group.processes())


@needs("freezer")
def test_a_frozen_group_stands_still_until_it_is_thawed(group: Group) -> None:
    with running(group, "while True: print('x', flush=True)") as child:
        assert said(child) == b"x"
        group.freeze()
        until(lambda: group.frozen())
        before = group.cpu_ms()
        time.sleep(0.05)
        assert group.cpu_ms() == before
        group.thaw()
        until(lambda: not group.frozen())
        assert child.stdout is not None and readable(child.stdout.fileno(), 60)


@needs("pids")
def test_without_help_of_the_kernel_killing_ends_all_the_same(group: Group) -> None:
    limit(group)
    bare = Group(group.name, {role: folder for role, folder in group._folders.items() if role != "kill"})
    with running(group, FORK) as child:
        assert said(child) == b"refused"
        bare.kill()
        assert child.wait(60) == -signal.SIGKILL
    until(lambda: not group.processes())


@pytest.mark.skipif(not os.path.exists("/sys/fs/cgroup/freezer/cgroup.procs"), reason="no freezer of v1 is mounted")
def test_the_v1_freezer_stops_and_lets_go_of_what_is_killed() -> None:
    top = "/sys/fs/cgroup/freezer"
    with open("/proc/self/cgroup") as file:
        own = next(line.strip().split(":", 2)[2] for line in file if ":freezer:" in line)
    path = f"{top}{own.rstrip('/')}/{HERE._owner.group('v1')}"
    try:
        os.mkdir(path)
    except OSError as problem:
        pytest.skip(f"no group can be made there: {problem.strerror}")
    group = Group("v1", {"freezer": CgroupFolder(path, False, top)})
    try:
        with running(group, SLEEP) as child:
            assert said(child) == b"here"
            group.freeze()
            until(lambda: group.frozen())
            group.kill()
            assert child.wait(60) == -signal.SIGKILL
    finally:
        group.remove(patience=60)


def test_a_process_that_is_gone_cannot_be_added(group: Group) -> None:
    if not group.paths:
        pytest.skip("no group can be made on this host")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError):
        group.add(child.pid)


@needs("pids")
def test_a_group_with_something_in_it_is_not_removed(group: Group) -> None:
    with running(group, SLEEP) as child:
        assert said(child) == b"here"
        with pytest.raises(OSError, match="busy"):
            group.remove(patience=0.05)
        assert child.poll() is None


@needs("pids", "freezer")
def test_half_a_group_is_not_left_where_making_one_fails() -> None:
    first, *others = HERE.make("half").paths
    os.rmdir(first)
    try:
        with pytest.raises(FileExistsError):
            HERE.make("half")
        assert not os.path.exists(first)
    finally:
        for path in others:
            os.rmdir(path)


LEAVE = """
import subprocess, sys, time
from ringfence.sandbox.process.cgroups.cgroup import Cgroups
group = Cgroups.detect().make("left")
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
group.add(child.pid)
if "freezer" in sys.argv:
    group.freeze()
print(child.pid, *group.paths, flush=True)
time.sleep(600)
"""


@needs("pids")
@pytest.mark.parametrize("frozen", ["", "freezer"])
def test_a_sweep_takes_what_dead_makers_left_and_nothing_else(group: Group, frozen: str) -> None:
    maker = [subprocess.Popen([sys.executable, "-c", LEAVE, frozen], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        told = [said(one).decode().split(" ") for one in maker]
        (pid, *left), (_, *kept) = told
        assert not {*left, *kept} & set(sweep(HERE))
        maker[0].kill()
        maker[0].wait()
        with running(group, SLEEP) as child:
            assert said(child) == b"here"
            swept = sweep(HERE)
            assert child.poll() is None
        # Another supervisor that starts on this host just now may have been faster.
        assert not any(os.path.exists(path) for path in (*left, *swept))
        assert all(os.path.exists(path) for path in (*kept, *group.paths))
        until(lambda: ended(pid))
    finally:
        for one in maker:
            one.kill()
            one.communicate()
        sweep(HERE)


# ── Groups that serve one box after the other ──


LIMITS = Limits(processes=5)
needed = pytest.mark.skipif("memory" not in HERE.available, reason="no control group counts memory here")


@pytest.fixture
def groups() -> Iterator[GroupPool]:
    made = GroupPool(HERE)
    yield made
    made.close()


def taken(groups: GroupPool, limits: Limits = LIMITS) -> Group:
    group = groups.take(limits)
    assert group is not None
    return group


def nothing() -> None:
    """Nobody waits for the group to be gone."""


@contextmanager
def process_in(group: Group) -> Iterator[None]:
    """A process that waits in the group while the block lasts."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        group.add(pid)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


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
def test_a_box_for_one_run_enters_without_stopping_the_host(groups: GroupPool) -> None:
    """Of v1 there are files for a single thread; v2 has none, and so is left out where it would only count."""
    group = taken(groups)
    entrances = group.entrances()
    names = {os.path.basename(os.readlink(f"/proc/self/fd/{entrance}")) for entrance in entrances}
    group.entered(entrances)
    live_in(group, 1)
    assert names == {"tasks"} and (group.count().cpu_ms or 0) > 0
    groups.give_back(group, LIMITS, reaped=True, removed=nothing)


@needed
def test_a_group_in_which_something_lives_is_not_used_again(groups: GroupPool) -> None:
    group = taken(groups)
    group.keep_files_open()
    group.reset()  # which looks, and sees no process
    with process_in(group), pytest.raises(OSError):
        group.reset()
    group.remove(patience=5)


@needed
@pytest.mark.parametrize("children", [0, 3])
def test_a_group_is_used_again_and_has_counted_nothing(groups: GroupPool, children: int) -> None:
    group = taken(groups)
    live_in(group, children)
    counted = group.count()
    assert (counted.cpu_ms or 1) > 0 and (counted.pids_peak or children + 1) == children + 1
    groups.give_back(group, LIMITS, reaped=True, removed=nothing)
    again = taken(groups)
    assert again is group or children  # whose memory may take a moment to go
    assert (again.count().cpu_ms or 0.0) < 1
    assert not again.count().oom_kills and not again.count().pids_denied
    assert (again.count().pids_peak or 0) <= 2  # as many as any box has
    groups.give_back(again, LIMITS, reaped=True, removed=nothing)


@needed
def test_other_limits_mean_another_group(groups: GroupPool) -> None:
    group = taken(groups)
    groups.give_back(group, LIMITS, reaped=True, removed=nothing)
    other = taken(groups, replace(LIMITS, processes=7))
    assert other is not group
    groups.give_back(other, LIMITS, reaped=False, removed=nothing)


@needed
def test_a_group_that_nobody_can_vouch_for_is_removed(groups: GroupPool) -> None:
    group = taken(groups)
    groups.give_back(group, LIMITS, reaped=False, removed=nothing)
    assert not any(os.path.exists(path) for path in group.paths)
    assert taken(groups) is not group


@needed
def test_nothing_is_left_when_they_are_closed(groups: GroupPool) -> None:
    kept, in_use = taken(groups), taken(groups)
    groups.give_back(kept, LIMITS, reaped=True, removed=nothing)
    groups.close()
    groups.give_back(in_use, LIMITS, reaped=True, removed=nothing)
    assert not any(os.path.exists(path) for path in (*kept.paths, *in_use.paths))


@needed
def test_a_group_that_is_not_empty_yet_is_removed_later(groups: GroupPool) -> None:
    group = taken(groups)
    events: list[str] = []
    with process_in(group):
        with pytest.raises(OSError):
            groups.give_back(group, LIMITS, reaped=False, removed=lambda: events.append("removed"))
        assert not groups.remove_leaving() and events == []

    def gone() -> bool:
        other = taken(groups)
        groups.give_back(other, LIMITS, reaped=True, removed=nothing)
        return not any(os.path.exists(path) for path in group.paths)

    until(gone)
    assert events == ["removed"] and groups.remove_leaving()


def test_where_there_are_no_control_groups_there_is_none() -> None:
    nowhere = Cgroups({}, dict.fromkeys(("memory", "pids", "cpu", "freezer"), "none here"), HERE._owner)
    assert GroupPool(nowhere).take(LIMITS) is None
