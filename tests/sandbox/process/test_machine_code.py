"""The machine code of both machines, carried out instruction by instruction, whichever of them this is."""

from __future__ import annotations

import errno
import os
import struct
import textwrap
import types
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from ringfence.doctor.cases.kernel import CASES
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS, name_of
from ringfence.sandbox.process.zygote import confine, kernel, native
from ringfence.sandbox.process.zygote.plan import CHANNEL
from tests.sandbox.process.emulator import CODE, DATA, STACK, TOP, Call, Machine

machines = pytest.mark.parametrize("machine", NUMBERS)
SIGCHLD, WNOHANG = 17, 1
EVERY_DESCRIPTOR = (0, 0xFFFFFFFF, 0)
ANYONE = 2**64 - 1
ERRORS = (errno.EINTR, errno.EAGAIN, errno.ECHILD, errno.EINVAL, errno.ENOSYS, errno.EFAULT, 4095)


def code_of(program: dict[str, str], machine: str) -> bytes:
    return bytes.fromhex(program[machine])


# ── The first process of a box ──


def first_process(machine: str, kernel: Callable[[str], int | None], chance: Random) -> tuple[Machine, list[str]]:
    """What it did until it was killed; the names of its calls, whose arguments are looked at here."""
    code, names = code_of(native.FIRST, machine), list[str]()
    emulated: Machine

    def answer(call: Call) -> int | None:
        name, arguments = name_of(machine, call[0]), call[1:]
        names.append(name)
        match name:
            case "close_range":
                assert arguments[:3] == EVERY_DESCRIPTOR
            case "rt_sigtimedwait":
                assert emulated.memory(arguments[0], 8) == struct.pack("<Q", 1 << SIGCHLD - 1)
                assert CODE <= arguments[0] <= CODE + len(code) - 8 and arguments[1:4] == (0, 0, 8)
            case "wait4":
                assert arguments[:4] == (ANYONE, 0, WNOHANG, 0)
            case _:
                raise AssertionError(name)
        return kernel(name)

    emulated = Machine(machine, code, answer, chance)
    emulated.run()
    # It shares its memory, its stack even, with others: it must not write a byte of it.
    assert emulated.writes == []
    assert {CODE <= step < CODE + len(code) - 8 for step in emulated.steps} == {True}
    return emulated, names


def told(*answers: int) -> Callable[[str], int | None]:
    """These answers, and then the end."""
    left = iter(answers)
    return lambda _: next(left, None)


@machines
def test_it_waits_for_children_and_reaps_all_that_there_are(machine: str) -> None:
    answers = (0, SIGCHLD, 7, 8, 0, SIGCHLD, 9, -errno.ECHILD)
    _, names = first_process(machine, told(*answers), Random(1))
    reaped, wait = "wait4", "rt_sigtimedwait"
    assert names == ["close_range", wait, reaped, reaped, reaped, wait, reaped, reaped, wait]


@machines
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_ends_nothing_and_is_not_tried_over_and_over(machine: str, error: int) -> None:
    _, names = first_process(machine, told(-error, -error, -error, -error, -error), Random(2))
    # Whatever is told, it reaps and then sleeps again: no call is repeated without the other.
    assert names == ["close_range", "rt_sigtimedwait", "wait4", "rt_sigtimedwait", "wait4", "rt_sigtimedwait"]


@machines
@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_kernel_answers_only_these_calls_are_made_in_this_order(machine: str, seed: int) -> None:
    chance = Random(seed)
    answers = [chance.choice((0, 1, SIGCHLD, 2**22, 2**31, 2**62, *(-error for error in ERRORS))) for _ in range(60)]
    _, names = first_process(machine, told(*answers), chance)
    assert names[:2] == ["close_range", "rt_sigtimedwait"]
    for before, answer, after in zip(names[1:], answers[1:], names[2:], strict=False):
        assert after == ("rt_sigtimedwait" if before == "wait4" and answer <= 0 else "wait4")
    assert len(names) == len(answers) + 1


# ── Calls that were put down ──


def made(
    machine: str, calls: list[Call], results: list[int], chance: Random | None = None
) -> tuple[int, list[Call], list[int]]:
    """How many were said to be made, those that were, and the results that were written down."""
    left = iter(results)
    emulated = Machine(machine, code_of(native.CALLS, machine), lambda _: next(left), chance or Random(4))
    emulated.put(b"".join(struct.pack("<7Qq", *call, -12345) for call in calls))
    count = emulated.function(DATA, len(calls))
    asked = {(DATA + 64 * index + 56, 8) for index in range(len(emulated.calls))}
    # Beside the results it writes on the stack alone, and on the right side of where that ends.
    assert {(at, size) for at, size in emulated.writes if not STACK <= at < TOP} == asked
    written = struct.unpack(f"<{8 * len(calls)}q", emulated.memory(DATA, 64 * len(calls)))[7::8]
    given = struct.unpack(f"<{8 * len(calls)}Q", emulated.memory(DATA, 64 * len(calls)))
    assert [given[8 * index : 8 * index + 7] for index in range(len(calls))] == calls
    return count, emulated.calls, list(written)


def some(chance: Random, count: int) -> list[Call]:
    return [tuple(chance.choice((0, ANYONE, chance.getrandbits(64))) for _ in range(7)) for _ in range(count)]


@machines
def test_calls_are_made_in_order_with_all_their_arguments(machine: str) -> None:
    chance = Random(5)
    for count in (0, 1, 2, 3, 17, 400):
        calls = some(chance, count)
        results = [chance.choice((0, 1, 2**31, 2**32, 2**63 - 1, chance.getrandbits(62))) for _ in calls]
        assert made(machine, calls, results, chance) == (count, calls, results)


@machines
@pytest.mark.parametrize("error", [*ERRORS, 1, 2**31, 2**63])
def test_the_first_that_fails_is_the_last(machine: str, error: int) -> None:
    chance = Random(error)
    for fails in (0, 1, 5, 9):
        calls = some(chance, 10)
        results = [*range(fails), -error]
        untouched = [-12345] * (9 - fails)
        assert made(machine, calls, results, chance) == (fails, calls[: fails + 1], results + untouched)


# ── All that a box does before its program ──


def plan_of(machine: str, monkeypatch: pytest.MonkeyPatch, *, fresh: bool) -> confine.BuildSite:
    monkeypatch.setattr(kernel, "NUMBERS", kernel._NUMBERS[machine])
    shape = dict.fromkeys(("disk_bytes", "inodes", "processes", "open_files", "file_bytes"), 1)
    site = confine.BuildSite({**shape, "cpu_seconds": 1, "data_bytes": 1, "cores": [0]}, kernel.NEWNS, 1)
    site.filter, site.landlock_version = kernel.prepare_filter(bytes(8)), 5
    return confine.plan(site, frozenset(), fresh=fresh)


@pytest.mark.skipif(os.uname().machine not in native.CALLS, reason="there is no code for this machine")
@pytest.mark.parametrize("fresh", [True, False])
def test_a_box_is_made_by_the_same_calls_on_both_machines(monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
    seen: dict[str, list[str]] = {}
    for machine in NUMBERS:
        plan = plan_of(machine, monkeypatch, fresh=fresh)
        calls = [tuple(word & 2**64 - 1 for word in (*call, *[0] * 6)[:7]) for call in plan._calls]
        results = [plan._foreseen.get(index, 0) for index in range(len(calls))]
        assert made(machine, calls, results) == (len(calls), calls, results)
        seen[machine] = [name_of(machine, call[0]) for call in calls]
    assert seen["x86_64"] == seen["aarch64"]
    assert {"dup3", "close_range", "prctl", "capset", "seccomp"} <= set(seen["x86_64"])
    assert CHANNEL in [call[2] for call in calls]


# ── What a hostile program brings along ──


@machines
def test_the_hostile_program_makes_the_call_that_it_says(machine: str) -> None:
    (source,) = (case.program for case in CASES if case.id == "K61")
    lines = textwrap.dedent(source).partition("page = ")[0]
    system = types.SimpleNamespace(uname=lambda: types.SimpleNamespace(machine=machine))
    names: dict[str, Any] = {"os": system, "struct": struct, "number": NUMBERS[machine].__getitem__}
    exec(lines, names)
    emulated = Machine(machine, names["code"], lambda _: -errno.EPERM, Random(6))
    assert emulated.function(0x10000000) == 2**64 - errno.EPERM
    assert [call[:2] for call in emulated.calls] == [(NUMBERS[machine]["unshare"], 0x10000000)]
