from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise

import pytest

from ringfence.core.errors import Unavailable
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS, name_of, numbers_of
from ringfence.sandbox.process.zygote import kernel

KNOWN = {
    "x86_64": {
        "read": 0, "open": 2, "mmap": 9, "ioctl": 16, "socket": 41, "clone": 56, "fork": 57, "execve": 59,
        "ptrace": 101, "prctl": 157, "arch_prctl": 158, "mount": 165, "futex": 202, "exit_group": 231, "keyctl": 250,
        "openat": 257, "unshare": 272, "perf_event_open": 298, "setns": 308, "seccomp": 317, "memfd_create": 319,
        "bpf": 321, "rseq": 334, "uretprobe": 335,
    },
    "aarch64": {
        "io_setup": 0, "ioctl": 29, "mount": 40, "openat": 56, "read": 63, "exit_group": 94, "unshare": 97, "futex": 98,
        "ptrace": 117, "prctl": 167, "socket": 198, "keyctl": 219, "clone": 220, "execve": 221, "mmap": 222,
        "perf_event_open": 241, "wait4": 260, "setns": 268, "seccomp": 277, "memfd_create": 279, "bpf": 280,
        "rseq": 293, "kexec_file_load": 294,
    },
}  # fmt: skip
EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "clone3": 435, "landlock_restrict_self": 446, "cachestat": 451,
    "fchmodat2": 452, "statmount": 457, "listmount": 458, "lsm_list_modules": 461, "mseal": 462, "setxattrat": 463,
    "removexattrat": 466, "open_tree_attr": 467, "file_getattr": 468, "file_setattr": 469, "listns": 470,
}  # fmt: skip


@pytest.mark.parametrize("machine", NUMBERS)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    wanted = KNOWN[machine] | EVERYWHERE
    assert {name: numbers_of(machine).get(name) for name in wanted} == wanted


@pytest.mark.parametrize("machine", NUMBERS)
def test_every_number_has_one_name_and_there_are_no_unexplained_gaps(machine: str) -> None:
    numbers = sorted(numbers_of(machine).values())
    assert [number for number, times in Counter(numbers).items() if times > 1] == []
    gaps = {low + 1: high - 1 for low, high in pairwise(numbers) if high != low + 1}
    # Numbers below 424 are shared by nobody, and 64-bit machines have none for the calls with 64-bit times.
    assert gaps == {"x86_64": {337: 423}, "aarch64": {244: 259, 295: 423}}[machine]


def test_a_call_of_both_machines_is_spelled_alike() -> None:
    assert set(NUMBERS["aarch64"]) <= set(NUMBERS["x86_64"])


def test_the_zygote_uses_the_same_numbers() -> None:
    for machine, numbers in kernel._NUMBERS.items():
        assert numbers == {name: NUMBERS[machine][name] for name in numbers}


@pytest.mark.skipif(os.uname().machine not in NUMBERS, reason="not a machine that boxes run on")
def test_numbers_agree_with_the_headers_of_this_host() -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    command = [compiler, "-E", "-dM", "-x", "c", "-"]
    seen = subprocess.run(command, input="#include <asm/unistd.h>\n", capture_output=True, text=True, check=False)
    if seen.returncode:
        pytest.skip("no kernel headers")
    defined: dict[str, str] = dict(re.findall(r"#define (__NR\w*) (\w+)", seen.stdout))
    numbers = {}
    for macro, value in defined.items():
        if macro.startswith("__NR_") and macro not in ("__NR_syscalls", "__NR_arch_specific_syscall"):
            numbers[macro.removeprefix("__NR_")] = int(defined.get(value, value))
    ours = numbers_of(os.uname().machine)
    # Headers may be older or newer than our table.
    newest = max(ours.values())
    assert {name: ours.get(name) for name, number in numbers.items() if number <= newest} == {
        name: number for name, number in numbers.items() if number <= newest
    }


def test_facts_name_a_call_or_tell_its_number() -> None:
    assert name_of("x86_64", 425) == name_of("aarch64", 425) == "io_uring_setup"
    assert (name_of("x86_64", 101), name_of("aarch64", 117)) == ("ptrace", "ptrace")
    assert name_of("x86_64", 4000) == "syscall_4000"


def test_another_machine_is_refused_by_name() -> None:
    with pytest.raises(Unavailable, match="x86_64 and aarch64, not on riscv64"):
        numbers_of("riscv64")
