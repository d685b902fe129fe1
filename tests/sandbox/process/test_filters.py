"""Every filter that there is, of both machines, against the policy: many calls, most of them made up."""

from __future__ import annotations

import errno
import itertools
import struct
from collections.abc import Iterator, Mapping
from random import Random
from types import MappingProxyType
from typing import get_type_hints

import pytest

from ringfence.sandbox.process.seccomp import filter
from ringfence.sandbox.process.seccomp.filter import Which, compile_filter, name_of, verdict
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS
from ringfence.sandbox.process.seccomp.verdicts import WORD, ArgRule, Ruling
from tests.sandbox.process.interpreter import ALLOW, ARCHITECTURES, ERRNO, KILL, NOTIFY, instructions_of, judge, refused

KEYWORDS = sorted(get_type_hints(Which))
VARIANTS: list[Which] = [
    Which(**dict(zip(KEYWORDS, chosen, strict=True)))  # type: ignore[typeddict-item]
    for chosen in itertools.product((True, False), repeat=len(KEYWORDS))
]
TIMES = 5
"""How often a call is made up for each case by which it may be judged."""
X32 = 0x40000000
STRANGE = (0x40000003, 0x40000028, 0x8000003E, 0xC0000015, 0xC00000F3, 0x3E, 0xB7, 0, WORD)
"""What i386 and 32-bit ARM say of themselves, and others that nobody should."""
Arguments = tuple[int, ...]


def label(which: Which) -> str:
    return " ".join(word if said else f"no-{word}" for word, said in sorted(which.items()))


every_filter = pytest.mark.parametrize(
    ("machine", "which"),
    [pytest.param(machine, which, id=f"{machine} {label(which)}") for machine in NUMBERS for which in VARIANTS],
)


def answer(wanted: Ruling, which: Which) -> int:
    if wanted.action == "notify" and which.get("notify", True):
        return NOTIFY
    return ALLOW if wanted.action == "allow" else ERRNO | wanted.errno


def rules(which: Which) -> dict[str, ArgRule]:
    return {name: rule for name, rule in filter._policy(which).items() if isinstance(rule, ArgRule)}


def made_up(chance: Random, given: Mapping[int, int] = MappingProxyType({})) -> Arguments:
    """Six arguments, of which these are given: the lower halves. Whatever may be in the upper ones."""
    lower = [given.get(n, chance.getrandbits(32) if chance.random() < 0.5 else chance.getrandbits(4)) for n in range(6)]
    upper = chance.choice((0, 0, 1, 1 << 31, WORD, chance.getrandbits(32)))
    return tuple(low | (upper if chance.random() < 0.5 else 0) << 32 for low in lower)


def near(chance: Random, rule: ArgRule) -> Iterator[Arguments]:
    """Every value that a rule knows with its neighbours; such as differ from one by a bit; and any."""
    yield (2**64 - 1,) * 6
    for case in rule.cases:
        exact = {arg.index: arg.among[0] for arg in case.when}
        yield from (tuple(exact.get(index, rest) for index in range(6)) for rest in (0, 2**64 - 1))
        for arg, off in itertools.product(case.when, (-1, 0, 1)):
            for value in arg.among:
                yield made_up(
                    chance, exact | {arg.index: (value + off) & WORD | chance.getrandbits(32) & ~arg.mask & WORD}
                )
        for arg in [arg for arg in case.when for _ in range(TIMES)]:
            yield made_up(chance, exact | {arg.index: chance.choice(arg.among) ^ 1 << chance.randrange(32)})
            yield made_up(chance)


def calls(machine: str, which: Which) -> Iterator[tuple[int, Arguments]]:
    """Of every known number, of the same in the x32 manner, and of others."""
    chance, judged = Random(f"{machine} {label(which)}"), rules(which)
    for name, number in NUMBERS[machine].items():
        yield from ((number, args) for args in (near(chance, judged[name]) if name in judged else [made_up(chance)]))
        yield X32 | number, made_up(chance)
    newest = max(NUMBERS[machine].values())
    for number in (*range(newest + 50), *(chance.getrandbits(32) for _ in range(100)), X32, 1 << 31, WORD - 1, WORD):
        yield number, made_up(chance)


@every_filter
def test_a_filter_is_one_that_the_kernel_takes(machine: str, which: Which) -> None:
    program = compile_filter(machine, **which)
    assert refused(program) == []
    answers = {operand for code, _, _, operand in instructions_of(program) if code == 0x06}
    assert {ALLOW, KILL} <= answers
    assert (NOTIFY in answers) == which["notify"]
    assert all(value & 0xFFFF0000 == ERRNO and value & 0xFFFF < 4096 for value in answers - {ALLOW, KILL, NOTIFY})


@every_filter
def test_made_up_calls_are_judged_as_the_policy_says(
    monkeypatch: pytest.MonkeyPatch, machine: str, which: Which
) -> None:
    program, arch, judged = compile_filter(machine, **which), ARCHITECTURES[machine], rules(which)
    policy = filter._policy(which)
    monkeypatch.setattr(filter, "_policy", lambda same: policy)  # made once, for the sake of time
    known, seen = set(NUMBERS[machine].values()), dict[str, set[Ruling]]()
    for number, args in calls(machine, which):
        name = name_of(machine, number)
        wanted = verdict(machine, name, args, **which)
        assert judge(program, number, arch, args).value == answer(wanted, which), (name, [hex(arg) for arg in args])
        assert number in known or wanted == Ruling("errno", errno.ENOSYS)
        seen.setdefault(name, set()).add(wanted)
    # They were such that every answer of every rule was given.
    for name in judged.keys() & NUMBERS[machine].keys():
        assert seen[name] == {judged[name].otherwise, *(case.then for case in judged[name].cases)}, name


@every_filter
def test_a_call_from_the_code_of_another_machine_is_killed(machine: str, which: Which) -> None:
    program, chance, arch = compile_filter(machine, **which), Random(7), ARCHITECTURES[machine]
    others = {*STRANGE, *ARCHITECTURES.values(), *(arch ^ 1 << bit for bit in range(32))} - {arch}
    for other, number in itertools.product(others, (1, X32 | 1, chance.getrandbits(9), chance.getrandbits(32))):
        assert judge(program, number, other, made_up(chance)).value == KILL


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_upper_half_counts_where_the_kernel_reads_it_and_nowhere_else(machine: str) -> None:
    which = Which(marks=False)
    program, chance = compile_filter(machine, **which), Random(11)
    wide = {("prlimit64", 2), ("prlimit64", 3), ("ioctl", 2)}
    assert wide == {
        (name, arg.index) for name, rule in rules(which).items() for case in rule.cases for arg in case.when if arg.wide
    }
    for name, rule in rules(which).items():
        if name not in NUMBERS[machine]:
            continue
        for args in near(chance, rule):
            plain = tuple(arg & WORD for arg in args)
            upper = [0 if (name, index) in wide else chance.getrandbits(32) for index in range(6)]
            dressed = tuple(low | high << 32 for low, high in zip(plain, upper, strict=True))
            said = {
                judge(program, NUMBERS[machine][name], ARCHITECTURES[machine], args).value for args in (plain, dressed)
            }
            assert len(said) == 1, name


@pytest.mark.parametrize("machine", NUMBERS)
def test_a_jump_the_wrong_way_is_noticed_by_some_of_these_calls(machine: str) -> None:
    which = Which(**dict.fromkeys(KEYWORDS, True))  # type: ignore[typeddict-item]
    program, tried = compile_filter(machine, **which), list(calls(machine, which))
    right = [judge(program, number, ARCHITECTURES[machine], args).value for number, args in tried]
    jumps = [(place, each) for place, each in enumerate(instructions_of(program)) if each[0] in (0x15, 0x35)]
    for place, (code, yes, no, operand) in jumps[::4]:
        turned = struct.pack("=HBBI", code, no, yes, operand)
        other = program[: 8 * place] + turned + program[8 * place + 8 :]
        said = (judge(other, number, ARCHITECTURES[machine], args).value for number, args in tried)
        assert any(now != before for now, before in zip(said, right, strict=True)), place
