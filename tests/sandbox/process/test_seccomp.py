from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.errors import Unavailable
from ringfence.sandbox.process.seccomp.filter import Ruling, Which, compile_filter, name_of, verdict
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS
from ringfence.sandbox.process.seccomp.verdicts import POLICY, ArgRule
from tests.sandbox.process.interpreter import ALLOW, ARCHITECTURES, ERRNO, KILL, NOTIFY, judge

MACHINES = sorted(NUMBERS)
HERE = os.uname().machine
NONE = (0,) * 6
X32 = 0x40000000


@cache
def compiled(machine: str, **which: Unpack[Which]) -> bytes:
    return compile_filter(machine, **which)


def returned(wanted: Ruling, notify: bool = True) -> int:
    if wanted.action == "notify" and not notify:
        return ERRNO | wanted.errno
    return {"allow": ALLOW, "notify": NOTIFY, "errno": ERRNO | wanted.errno}[wanted.action]


def says(machine: str, name: str, *args: int) -> str:
    """What a call gets, in a word: `allow`, `notify`, or the name of an error."""
    given = (*args, *NONE)[:6]
    answer = judge(compiled(machine), NUMBERS[machine][name], ARCHITECTURES[machine], given).value
    if answer & 0xFFFF0000 == ERRNO:
        return errno.errorcode.get(answer & 0xFFFF, "done")
    return {ALLOW: "allow", NOTIFY: "notify"}[answer]


def interesting_values() -> list[int]:
    """Every value that some rule knows, and its neighbours."""
    rules = [rule for rule in POLICY.values() if isinstance(rule, ArgRule)]
    args = [arg for rule in rules for case in rule.cases for arg in case.when]
    known = {value for arg in args for value in (*arg.among, arg.mask, ~arg.mask)}
    return sorted({(value + off) & 0xFFFFFFFF for value in known for off in (-1, 0, 1)})


WORDS = st.one_of(st.sampled_from(interesting_values()), st.integers(0, 2**32 - 1))
ARGUMENTS = st.tuples(
    *[st.builds(lambda low, high: high << 32 | low, WORDS, st.sampled_from([0, 0, 1, 2**32 - 1]))] * 6
)
CHECKED = sorted(name for name, judgement in POLICY.items() if isinstance(judgement, ArgRule))


# ── The filter says what the policy says ──


@given(st.sampled_from(MACHINES), st.sampled_from(CHECKED), ARGUMENTS, st.booleans(), st.booleans())
def test_arguments_are_judged_as_the_policy_says(
    machine: str, name: str, args: tuple[int, ...], memfd: bool, notify: bool
) -> None:
    if name not in NUMBERS[machine]:
        return
    answer = judge(compiled(machine, memfd=memfd, notify=notify), NUMBERS[machine][name], ARCHITECTURES[machine], args)
    assert answer.value == returned(verdict(machine, name, args, memfd=memfd), notify)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("args", [NONE, (2**64 - 1,) * 6])
def test_every_number_is_judged_as_the_policy_says(machine: str, args: tuple[int, ...]) -> None:
    for number in range(1000):
        wanted = returned(verdict(machine, name_of(machine, number), args))
        assert judge(compiled(machine), number, ARCHITECTURES[machine], args).value == wanted, name_of(machine, number)


@given(st.sampled_from(MACHINES), st.integers(472, 2**32 - 1), ARGUMENTS)
def test_an_unknown_number_does_not_exist(machine: str, number: int, args: tuple[int, ...]) -> None:
    answer = judge(compiled(machine), number, ARCHITECTURES[machine], args)
    assert answer.value == ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_x32_twin_of_a_call_does_not_exist(machine: str) -> None:
    answers = {judge(compiled(machine), X32 | number, ARCHITECTURES[machine], NONE).value for number in range(1000)}
    assert answers == {ERRNO | errno.ENOSYS}


@given(st.sampled_from(MACHINES), st.integers(0, 600), st.integers(0, 2**32 - 1), ARGUMENTS)
def test_the_code_of_another_machine_is_killed(machine: str, number: int, arch: int, args: tuple[int, ...]) -> None:
    i386, arm = 0x40000003, 0x40000028
    others = {arch, i386, arm, *ARCHITECTURES.values()} - {ARCHITECTURES[machine]}
    assert {judge(compiled(machine), number, other, args).value for other in others} == {KILL}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_always_allowed_is_decided_by_its_number_in_few_steps(machine: str) -> None:
    always = [name for name in NUMBERS[machine] if POLICY[name] == Ruling("allow")]
    answers = [judge(compiled(machine), NUMBERS[machine][name], ARCHITECTURES[machine], NONE) for name in always]
    # The kernel remembers such answers and does not run the filter: it may look at the number and the machine alone.
    assert {answer.looked_at for answer in answers} == {frozenset({0, 4})}
    assert max(answer.steps for answer in answers) <= 14


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_is_small(machine: str) -> None:
    for memfd, notify in itertools.product((True, False), repeat=2):
        assert len(compiled(machine, memfd=memfd, notify=notify)) // 8 < 500


def test_there_is_no_filter_for_another_machine() -> None:
    with pytest.raises(Unavailable, match="riscv64"):
        compile_filter("riscv64")


# ── What that means for single calls ──

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_ALG, AF_VSOCK = 1, 2, 10, 16, 17, 38, 40
STREAM, DGRAM, RAW, SEQPACKET, NONBLOCK, CLOEXEC = 1, 2, 3, 5, 0x800, 0x80000
NEW_NAMESPACES = [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]
GARBAGE = 0xDEAD << 32
"""What a register may hold above an int; the kernel does not look at it."""


@pytest.mark.parametrize("machine", MACHINES)
class TestSingleCalls:
    def test_waiting_for_connections_needs_no_permission(self, machine: str) -> None:
        number, arch = NUMBERS[machine]["listen"], ARCHITECTURES[machine]
        assert says(machine, "listen", 3, 128) == "allow"
        assert judge(compiled(machine, notify=False), number, arch, NONE).value == ALLOW

    def test_clone_makes_processes_and_threads_but_no_namespaces(self, machine: str) -> None:
        fork, thread, vfork = 0x1200011, 0x3D0F00, 0x4111
        assert {says(machine, "clone", flags) for flags in (fork, thread, vfork, thread | GARBAGE)} == {"allow"}
        assert {says(machine, "clone", fork | flag) for flag in NEW_NAMESPACES} == {"notify"}
        assert says(machine, "clone", 1 << 28 | GARBAGE) == "notify"
        assert says(machine, "clone3") == "ENOSYS"

    def test_sockets_of_the_box_and_its_loopback_can_be_made(self, machine: str) -> None:
        for kind in (STREAM, DGRAM, SEQPACKET | CLOEXEC | NONBLOCK):
            assert says(machine, "socket", AF_UNIX, kind, 0) == says(machine, "socketpair", AF_UNIX, kind, 0) == "allow"
        for family, (kind, protocol) in itertools.product((AF_INET, AF_INET6), ((STREAM, 0), (STREAM, 6), (DGRAM, 17))):
            assert says(machine, "socket", family | GARBAGE, kind | CLOEXEC, protocol) == "allow"

    @pytest.mark.parametrize(
        ("family", "kind", "protocol"),
        [
            (AF_INET, RAW, 1), (AF_INET, DGRAM, 1), (AF_INET6, DGRAM, 58), (AF_INET, STREAM, 132),
            (AF_INET, SEQPACKET, 0), (AF_PACKET, RAW, 0), (AF_NETLINK, RAW, 12), (AF_NETLINK, RAW, 6),
            (AF_VSOCK, STREAM, 0), (AF_ALG, SEQPACKET, 0), (15, RAW, 2), (30, STREAM, 0), (31, RAW, 0), (44, RAW, 0),
            (29, RAW, 1), (21, SEQPACKET, 0), (0, 0, 0),
        ],
    )  # fmt: skip
    def test_other_sockets_are_refused(self, machine: str, family: int, kind: int, protocol: int) -> None:
        assert says(machine, "socket", family, kind, protocol) == "notify"
        assert says(machine, "socketpair", family, kind, protocol) == "notify"

    def test_what_libraries_ask_for_in_passing_is_not_there(self, machine: str) -> None:
        assert says(machine, "socket", AF_NETLINK, RAW | CLOEXEC, 0) == "EAFNOSUPPORT"
        assert says(machine, "socket", AF_INET, STREAM, 262) == "EPROTONOSUPPORT"

    def test_options_of_sockets(self, machine: str) -> None:
        usual = [(1, 2), (1, 9), (0, 10), (41, 26), (6, 1), (6, 4), (6, 13), (6, 30), (17, 103)]
        assert {says(machine, "setsockopt", 3, *option) for option in usual} == {"allow"}
        assert {says(machine, "setsockopt", 3, 1, name) for name in (26, 50, 51, 52)} == {"notify"}
        strange = [(6, 31), (6, 19), (6, 38), (17, 100), (0, 64), (41, 64), (282, 1), (279, 1), (270, 1)]
        assert {says(machine, "setsockopt", 3, *option) for option in strange} == {"ENOPROTOOPT"}

    def test_ioctl_answers_for_a_box_without_other_devices(self, machine: str) -> None:
        usual = (0x5401, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450 | GARBAGE)
        assert {says(machine, "ioctl", 0, request) for request in usual} == {"allow"}
        assert {says(machine, "ioctl", 0, request) for request in (0x5412, 0x541C, 0x5423, 0x5412 | GARBAGE)} == {
            "notify"
        }
        assert {says(machine, "ioctl", 0, request) for request in (0xAE01, 0x40049409, 0x8914)} == {"ENOTTY"}

    def test_terminals_are_made_and_used(self, machine: str) -> None:
        used = (0x5401, 0x5402, 0x5404, 0x540B, 0x540E, 0x5410, 0x5414, 0x5429, 0x402C542D)
        made = (0x80045430, 0x40045431, 0x5441, 0x5420)
        assert {says(machine, "ioctl", 0, request) for request in (*used, *made)} == {"allow"}
        assert {says(machine, "ioctl", 0, request) for request in (0x5412, 0x541C, 0x541D, 0x5423)} == {"notify"}
        assert {says(machine, "ioctl", 0, 0x540E, argument) for argument in (1, 1 << 32)} == {"ENOTTY"}, "nobody else's"

    def test_prctl_sets_what_concerns_only_oneself(self, machine: str) -> None:
        assert {says(machine, "prctl", option) for option in (1, 4, 15, 16, 22, 23, 36, 38, 0x53564D41)} == {"allow"}
        assert {says(machine, "prctl", option) for option in (35, 62, 0x59616D61)} == {"notify"}
        assert {says(machine, "prctl", option) for option in (24, 28, 53, 57, 67, 999)} == {"EINVAL"}

    def test_a_nested_filter_may_not_listen(self, machine: str) -> None:
        assert {says(machine, "seccomp", op, flags) for op, flags in ((0, 0), (2, 0))} == {"allow"}
        assert {says(machine, "seccomp", 1, flags) for flags in (0, 1)} == {"notify"}, "it is counted"
        assert (says(machine, "prctl", 22, 2), says(machine, "prctl", 22, 1)) == ("notify", "allow")
        assert {says(machine, "seccomp", 1, flags) for flags in (2, 4, 8, 9, 32)} == {"EINVAL"}

    def test_personality_is_asked_for_or_plain(self, machine: str) -> None:
        assert says(machine, "personality", 0xFFFFFFFF) == says(machine, "personality", 0) == "allow"
        assert {says(machine, "personality", persona) for persona in (0x40000, 0x400000, 8)} == {"notify"}

    def test_files_of_all_kinds_but_devices(self, machine: str) -> None:
        kinds = {0o010644: "allow", 0o100644: "allow", 0o644: "allow", 0o140755: "allow"}
        kinds |= {0o060600: "notify", 0o020600: "notify", 0o020000: "notify"}
        for mode, wanted in kinds.items():
            assert says(machine, "mknodat", 0, 0, mode) == wanted
            if "mknod" in NUMBERS[machine]:
                assert says(machine, "mknod", 0, mode) == wanted

    def test_memory_that_no_limit_counts(self, machine: str) -> None:
        assert says(machine, "mmap", 0, 4096, 3, 0x22) == "allow"
        assert says(machine, "mmap", 0, 2 << 20, 3, 0x40022) == "ENOMEM"
        assert says(machine, "memfd_create", 0, 1) == says(machine, "memfd_create", 0, 0x1B) == "allow"
        assert says(machine, "memfd_create", 0, 4) == "EINVAL"
        assert says(machine, "shmget", 0, 4096, 0o1600) == "allow"
        assert says(machine, "shmget", 0, 2 << 20, 0o5600) == "ENOMEM"
        for name in ("memfd_create", "shmget", "semget", "msgget"):
            answer = judge(compiled(machine, memfd=False), NUMBERS[machine][name], ARCHITECTURES[machine], NONE)
            assert answer.value == ERRNO | errno.ENOSYS

    def test_nobody_gets_ahead_of_the_host(self, machine: str) -> None:
        assert {says(machine, "sched_setscheduler", 0, policy) for policy in (0, 3, 5, 0x40000000)} == {"allow"}
        assert {says(machine, "sched_setscheduler", 0, policy) for policy in (1, 2, 6, 7, 0x40000001)} == {"EPERM"}
        assert says(machine, "sched_setaffinity") == says(machine, "sched_setattr") == "EPERM"
        assert says(machine, "sync") == says(machine, "syncfs") == "done"

    def test_the_limits_of_the_first_process_are_not_the_programs(self, machine: str) -> None:
        somewhere_high = 0x7F00 << 32
        assert says(machine, "prlimit64", 1, 0, somewhere_high) == says(machine, "prlimit64", 1, 0, 8) == "notify"
        assert says(machine, "prlimit64", 1, 0, 0) == says(machine, "prlimit64", 0, 0, somewhere_high) == "allow"

    def test_no_lease_on_a_file_of_the_host(self, machine: str) -> None:
        assert says(machine, "fcntl", 3, 1024, 0) == says(machine, "fcntl", 3, 1040, 0) == "EACCES"
        assert {says(machine, "fcntl", 3, command) for command in (0, 1, 2, 3, 4, 6, 1030, 1033)} == {"allow"}
        assert says(machine, "fcntl", 3, 1026, 1) == "EINVAL"
        assert says(machine, "fcntl", 3, 1026, 0x8000_0020) == "EINVAL"
        assert says(machine, "fcntl", 3, 1026, 0x8000_0000) == "allow"  # no event: it ends a watch
        assert says(machine, "madvise", 0, 4096, 4) == "allow"
        assert says(machine, "madvise", 0, 4096, 12) == "EINVAL"


# ── On the kernel of this host ──

live = pytest.mark.skipif(HERE not in NUMBERS or sys.platform != "linux", reason="the filter is not for this machine")


def under_filter(folder: Path, *command: str) -> str:
    """What a command prints under the filter, which answers by itself."""
    program = folder / "filter"
    program.write_bytes(compiled(HERE, notify=False))
    launcher = str(Path(__file__).with_name("under_filter.py"))
    run = subprocess.run(
        [sys.executable, "-I", launcher, str(program), *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


ATTEMPTS = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, args))
    return ctypes.get_errno() if result < 0 else 0
print(json.dumps([attempt(*call) for call in json.load(open(sys.argv[1]))]))
"""


def attempts(folder: Path, calls: list[tuple[int, ...]]) -> list[int]:
    """The error numbers that calls end with; only for calls that are refused, or harmless."""
    (folder / "calls").write_text(json.dumps(calls))
    return json.loads(under_filter(folder, sys.executable, "-I", "-c", ATTEMPTS, "calls"))


@live
def test_whatever_is_not_allowed_is_refused_by_the_kernel(tmp_path: Path) -> None:
    refused = {}
    for number in [*range(1000), *(X32 | number for number in range(600))]:
        wanted = verdict(HERE, name_of(HERE, number), NONE)
        if wanted.action != "allow":
            refused[number] = wanted.errno
    got = attempts(tmp_path, [(number, *NONE) for number in refused])
    assert dict(zip(refused, got, strict=True)) == refused


@live
def test_arguments_are_refused_by_the_kernel(tmp_path: Path) -> None:
    numbers = NUMBERS[HERE]
    calls = {
        (numbers["unshare"], 1 << 28): errno.EPERM,
        (numbers["clone"], 1 << 28 | 17, 0, 0, 0, 0): errno.EPERM,
        (numbers["clone3"], 0, 0): errno.ENOSYS,
        (numbers["socket"], AF_VSOCK, STREAM, 0): errno.EPERM,
        (numbers["socket"], AF_INET, RAW, 1): errno.EPERM,
        (numbers["socket"], AF_NETLINK, RAW, 0): errno.EAFNOSUPPORT,
        (numbers["socket"], AF_UNIX, STREAM, 0): 0,
        (numbers["personality"], 0x40000): errno.EPERM,
        (numbers["personality"], 0xFFFFFFFF): 0,
        (numbers["prctl"], 35): errno.EPERM,
        (numbers["ioctl"], 0, 0x5412, 0): errno.EPERM,
        (numbers["mmap"], 0, 2 << 20, 3, 0x40022, 2**64 - 1, 0): errno.ENOMEM,
        (numbers["sync"],): 0,
    }
    assert dict(zip(calls, attempts(tmp_path, list(calls)), strict=True)) == calls


HONEST = """
import asyncio, mmap, multiprocessing, os, sqlite3, subprocess, tempfile, threading
from multiprocessing import shared_memory

async def echo():
    async def answer(reader, writer):
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()
    server = await asyncio.start_server(answer, "localhost", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    writer.write(b"line\\n")
    assert await reader.readline() == b"line\\n"
    writer.close()
    server.close()
    shell = await asyncio.create_subprocess_shell("exit 3")
    assert await shell.wait() == 3

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with sqlite3.connect(f"{folder}/db") as db:
            db.execute("pragma journal_mode=wal")
            db.execute("create table t (x)")
        os.mkfifo(f"{folder}/fifo")
        os.sync()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
    shared = shared_memory.SharedMemory(create=True, size=4096)
    shared.close()
    shared.unlink()
    assert subprocess.run(["sh", "-c", "echo $((6 * 7)) | cat"], capture_output=True).stdout == b"42\\n"
    assert len(mmap.mmap(-1, 1 << 20)) == 1 << 20
    if hasattr(os, "memfd_create"):
        os.close(os.memfd_create("some"))
    asyncio.run(echo())
    print("fine")
"""


@live
def test_an_honest_python_program_notices_nothing(tmp_path: Path) -> None:
    (tmp_path / "honest.py").write_text(HONEST)
    assert under_filter(tmp_path, sys.executable, "-I", "honest.py") == "fine\n"


REPOSITORY = """
set -e
git init -q . && git config user.email a@b.example && git config user.name a
echo one > file && cp file copy && mkdir -p deep/er && ln -s file link && git add . && git commit -qm one
git gc -q && git clone -q . ../clone 2>/dev/null && git log --format=%s | sort | uniq -c | tr -d ' '
"""


@live
def test_a_shell_and_git_notice_nothing(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    assert under_filter(tmp_path, "sh", "-c", f"mkdir here && cd here {REPOSITORY}") == "1one\n"


SERVER = """
const http = require("http");
const {Worker} = require("worker_threads");
new Worker("require('child_process').execSync('true')", {eval: true}).on("exit", () => {
  const server = http.createServer((_, answer) => answer.end("fine")).listen(0, "127.0.0.1", () => {
    http.get({port: server.address().port, host: "127.0.0.1"}, (answer) => {
      answer.on("data", (data) => { console.log(String(data)); process.exit(); });
    });
  });
});
"""


@live
def test_node_notices_nothing(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node")
    assert under_filter(tmp_path, node, "-e", SERVER) == "fine\n"
