"""The policy of system calls as a filter for the kernel.

Unknown and newer calls are answered ENOSYS, as an older kernel would, and so are the x32 twins of x86_64. A call in the
manner of another machine (32-bit code) ends the process. What is allowed whatever its arguments are is decided by the
number alone, so that the kernel remembers it and does not even run the filter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from ringfence.sandbox.process.seccomp.bpf import BpfProgram, Goal, Place
from ringfence.sandbox.process.seccomp.syscalls import name_of, numbers_of
from ringfence.sandbox.process.seccomp.verdicts import (
    ENOSYS,
    POLICY,
    SHARED_WITH_A_FILE,
    UNCOUNTED,
    UNMARKED,
    WATCHERS,
    WORD,
    Arg,
    ArgRule,
    Ruling,
)

__all__ = ["Ruling", "Which", "compile_filter", "name_of", "verdict"]

_IN_MEMORY = ("memfd_create", "shmget", "semget", "msgget")
"""Calls that make memory that belongs to no process."""


class Which(TypedDict, total=False):
    """How a filter may differ from the usual one."""

    memfd: bool
    """False: no memory that belongs to no process."""
    counted: bool
    """False: no control group counts the memory, so nothing is taken that would not show in a process's account."""
    marks: bool
    """False: no setuid files are made."""
    mappings: bool
    """True: the supervisor is told of memory that is shared with a file."""
    notify: bool
    """False: the filter itself refuses, instead of the supervisor."""


def _policy(which: Which) -> Mapping[str, Ruling | ArgRule]:
    policy = dict(POLICY)
    if not which.get("memfd", True):
        policy |= dict.fromkeys(_IN_MEMORY, ENOSYS)
    if not which.get("counted", True):
        policy |= UNCOUNTED
        if not which.get("notify", True):
            policy |= dict.fromkeys(
                WATCHERS, POLICY["epoll_create1"]
            )  # the supervisor is not asked, so none are counted
    if which.get("mappings", False) and which.get("notify", True):
        memory = policy["mmap"]
        assert isinstance(memory, ArgRule)
        policy["mmap"] = ArgRule((*memory.cases, SHARED_WITH_A_FILE), memory.otherwise)
    if not which.get("marks", True):
        policy |= UNMARKED
    return policy


def verdict(machine: str, name: str, args: Sequence[int], **which: Unpack[Which]) -> Ruling:
    """The verdict of such a filter for a call with these six arguments."""
    judgement = _policy(which)[name] if name in numbers_of(machine) else ENOSYS
    return judgement.judge(args) if isinstance(judgement, ArgRule) else judgement


_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_KILL_PROCESS = 0x80000000
_RET_ERRNO = 0x00050000
_USER_NOTIF = 0x7FC00000
_RET_ALLOW = 0x7FFF0000
# Within struct seccomp_data, on a little-endian machine: the number, the machine, and six arguments of 64 bits.
_NUMBER = 0
_ARCH = 4
_ARGS = 16


def compile_filter(machine: str, **which: Unpack[Which]) -> bytes:
    """The policy as `struct sock_filter[]`. Raises Unavailable for a machine that no box runs on."""
    policy = _policy(which)
    numbers = numbers_of(machine)
    judgements = {number: policy[name] for name, number in numbers.items()}
    edges = {number: judgements.get(number, ENOSYS) for number in range(max(judgements) + 2)}
    program = _Filter(which.get("notify", True))
    number = program.load(_NUMBER, program.choose(_spans(edges), program.judgement))
    # The same number is another call to another machine's code, so the machine is looked at first.
    program.load(_ARCH, program.among((_AUDIT_ARCH[machine],), number, program.give(_KILL_PROCESS)))
    return bytes(program)


def _spans(edges: Mapping[int, Goal]) -> list[tuple[int, Goal]]:
    """From goals in the order of their first values: neighbours with one goal become one."""
    spans: list[tuple[int, Goal]] = []
    for first, goal in edges.items():
        if not spans or (spans[-1][1] is not goal and spans[-1][1] != goal):
            spans.append((first, goal))
    return spans


class _Filter(BpfProgram):
    """Writes judgements."""

    def __init__(self, notify: bool) -> None:
        super().__init__()
        self._notify = notify

    def judgement(self, judgement: Ruling | ArgRule) -> Place:
        if isinstance(judgement, Ruling):
            return self._verdict(judgement)
        place = self._verdict(judgement.otherwise)
        for case in reversed(judgement.cases):
            holds = self._verdict(case.then)
            for arg in reversed(case.when):
                holds = self._arg(arg, holds, place)
            place = holds
        return place

    def among(self, values: Sequence[int], yes: Place, no: Place) -> Place:
        edges = {0: no}
        for value in sorted(values):
            edges[value] = yes
            edges[value + 1] = no
        edges.pop(WORD + 1, None)
        return self.choose(_spans(edges), lambda place: place)

    def _arg(self, arg: Arg, yes: Place, no: Place) -> Place:
        place = self.among(arg.among, yes, no)
        if arg.mask != WORD:
            place = self.keep(arg.mask, place)
        place = self.load(_ARGS + 8 * arg.index, place)
        if arg.wide:
            place = self.load(_ARGS + 8 * arg.index + 4, self.among((0,), place, no))
        return place

    def _verdict(self, verdict: Ruling) -> Place:
        if verdict.action == "allow":
            return self.give(_RET_ALLOW)
        if verdict.action == "notify" and self._notify:
            return self.give(_USER_NOTIF)
        return self.give(_RET_ERRNO | verdict.errno)
