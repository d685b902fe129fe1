"""What a box's process is going to do is put down beforehand, and the kernel's answers are looked at afterwards."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path

import pytest

from ringfence.sandbox.process.seccomp import syscalls
from ringfence.sandbox.process.zygote import confine, kernel, native
from ringfence.sandbox.process.zygote.plan import CHANNEL, SyscallPlan

pytestmark = pytest.mark.skipif(os.uname().machine not in native.CALLS, reason="there is no code for this machine")


def carried_out(plan: SyscallPlan, texts: dict[str, bytes]) -> list[str]:
    """In a process of its own: a plan closes every descriptor that it does not know."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            plan.prepare([theirs, theirs], texts)
            plan.carry_out()
            os.write(CHANNEL, b"done")
        except OSError as exc:
            os.write(CHANNEL, str(exc).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as said:
        words = said.read().decode()
    os.waitpid(pid, 0)
    return words.split(" ", 2)


def test_descriptors_have_the_numbers_that_were_foreseen(tmp_path: Path) -> None:
    plan = SyscallPlan(0)
    plan.step = "writing"
    first = plan.open(os.fsencode(tmp_path), os.O_RDONLY)
    second = plan.open(os.fsencode(tmp_path), os.O_RDONLY)
    plan.close(first)
    assert plan.open(os.fsencode(tmp_path), os.O_RDONLY) == first
    assert (first, second) == (3, 4)
    plan.write_text("path", "data")
    target = tmp_path / "written"
    target.touch()
    assert carried_out(plan, {"path": os.fsencode(target), "data": b"hello"}) == ["done"]
    assert target.read_bytes() == b"hello"


def test_a_step_that_fails_is_named() -> None:
    plan = SyscallPlan(0)
    plan.step = "nonsense"
    plan.open(b"/nonexistent", os.O_RDONLY)
    assert carried_out(plan, {})[2].startswith("nonsense: No such file")


def test_what_is_given_is_all_that_stays_open() -> None:
    plan = SyscallPlan(0)
    plan.step = "looking"
    plan.open(b"/dev/null", os.O_RDONLY)
    ours, theirs = os.pipe()
    with get_context("fork").Pool(1) as pool:  # whatever is open here is not open there
        listed = pool.apply(_descriptors, (plan, theirs))
    os.close(ours)
    os.close(theirs)
    assert listed == ["0", "1", "100", "101", "2", "3"]


def _descriptors(plan: SyscallPlan, given: int) -> list[str]:
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(tell, 1)
        plan.prepare([given, given], {})
        plan.carry_out()
        os.write(1, " ".join(sorted(name for name in os.listdir("/proc/self/fd") if name != "4")).encode())
        os._exit(0)
    os.close(tell)
    os.waitpid(pid, 0)
    return os.read(told, 4096).decode().split()


def test_every_call_that_is_put_down_has_its_number_on_both_machines() -> None:
    for machine, numbers in kernel._NUMBERS.items():
        assert {name: syscalls.NUMBERS[machine][name] for name in numbers} == numbers


def test_a_process_that_enters_a_box_goes_through_every_step_that_is_not_the_boxs() -> None:
    def named(*, fresh: bool) -> list[str]:
        shape = dict.fromkeys(("disk_bytes", "inodes", "processes", "open_files", "file_bytes"), 1)
        site = confine.BuildSite({**shape, "cpu_seconds": 1, "data_bytes": 1, "cores": [0]}, kernel.NEWNS, 1)
        site.filter, site.landlock_version = kernel.prepare_filter(bytes(8)), 5
        return list(dict.fromkeys(confine.plan(site, frozenset(), fresh=fresh)._steps))

    once = {step.name for step in confine.STEPS if step.once}
    assert [step for step in named(fresh=True) if step and step not in once] == named(fresh=False)[1:]
    assert {"identity", "capabilities", "no_new_privs", "landlock", "seccomp"} <= set(named(fresh=False))
