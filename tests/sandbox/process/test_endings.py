"""How a run ended, and for which limit, is exact."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from ringfence.core.box import MIB, BoxReport, BoxSpec, Limits, Program
from ringfence.core.sessions import Cell, Command, StaySpec
from ringfence.sandbox.process import box_usage, limit_watch
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.cgroups.cgroup import GroupPool
from tests.sandbox import comparing

pytestmark = pytest.mark.anyio

FILL = """
with open("/workspace/tmp/large", "wb", 0) as file:
    try:
        for _ in range(600): file.write(b"a" * 1_000_000)
    except OSError as exc: print(exc.errno, flush=True)
"""
ALLOCATE = """
much = bytearray(300_000_000)
for place in range(0, len(much), 4096): much[place] = 1
import time; time.sleep(60)
print("never", flush=True)
"""


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


async def run(backend: ProcessBackend, source: str, limits: Limits = Limits(), **more) -> BoxReport:  # noqa: B008
    return await backend.run(BoxSpec(Program("python", source.encode()), limits, **more))


async def command(backend: ProcessBackend, *argv: str, limits: Limits = Limits()) -> BoxReport:  # noqa: B008 - frozen
    return await backend.run(BoxSpec(Program("command", argv=argv), limits))


def ending(report: BoxReport) -> tuple[str, int | None, int | None, str | None]:
    return report.ended, report.exit_status, report.signal, report.limit


# ── By itself ──


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", ("exited", 0, None, None)),
        ("raise SystemExit(7)", ("exited", 7, None, None)),
        ("1/0", ("exited", 1, None, None)),
        ("def f(:", ("exited", 1, None, None)),
        ("import os; os._exit(255)", ("exited", 255, None, None)),
        ("import os; os.kill(os.getpid(), 15)", ("signalled", None, 15, None)),
        ("import os; os.kill(os.getpid(), 9)", ("signalled", None, 9, None)),
        ("import os; os.abort()", ("signalled", None, 6, None)),
        ("import ctypes; ctypes.string_at(0)", ("signalled", None, 11, None)),
        ("raise KeyboardInterrupt", ("signalled", None, 2, None)),
    ],
)
async def test_a_program_ends_itself(backend: ProcessBackend, source: str, expected) -> None:
    assert ending(await run(backend, source)) == expected


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("true",), ("exited", 0, None, None)),
        (("sh", "-c", "exit 3"), ("exited", 3, None, None)),
        (("sh", "-c", "kill -TERM $$"), ("signalled", None, 15, None)),
        (("no-such-program",), ("exited", 127, None, None)),
        (("/etc/passwd",), ("exited", 126, None, None)),
    ],
)
async def test_a_command_ends_itself(backend: ProcessBackend, argv, expected) -> None:
    assert ending(await command(backend, *argv)) == expected


async def test_a_program_cannot_end_the_box_by_its_first_process(backend: ProcessBackend) -> None:
    source = (
        "import contextlib, os, time\nfor n in (1, 2, 3, 9, 11, 15, 19):\n"
        "    with contextlib.suppress(PermissionError): os.kill(1, n)\ntime.sleep(0.1)\nprint('still here')"
    )
    report = await run(backend, source)
    assert (ending(report), report.stdout.text) == (("exited", 0, None, None), "still here\n")


async def test_orphans_are_reaped_so_that_they_do_not_fill_the_box(backend: ProcessBackend) -> None:
    source = "import os\nfor n in range(200):\n    pid = os.fork()\n    if not pid: os.fork(); os._exit(0)\n"
    report = await run(backend, source + "    os.waitpid(pid, 0)\nprint('all')")
    assert (ending(report), report.stdout.text) == (("exited", 0, None, None), "all\n")


async def test_stragglers_are_ended_with_the_program(backend: ProcessBackend) -> None:
    source = "import os, subprocess, time\nsubprocess.Popen(['sleep', '600'])\nif not os.fork():\n    os.setsid()\n"
    report = await run(backend, source + "    time.sleep(600)\nprint('done')")
    # Whoever waited for them would have met the wall clock.
    assert (ending(report), report.stdout.text) == (("exited", 0, None, None), "done\n")


# ── By a limit ──


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "import signal, time\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)",
        "import os\nfor _ in range(4): os.fork()\nwhile True: pass",
    ],
)
async def test_the_wall_clock(backend: ProcessBackend, source: str) -> None:
    report = await run(backend, source, Limits(wall_seconds=0.5))
    assert ending(report) == ("timeout", None, 9, "wall")
    assert 499 <= report.wall_ms < 300_000  # a timer may go off as much too early as the clock is coarse


ORPHANS = """
import os, time
if os.fork():
    time.sleep(600)  # the program itself does nothing
while True:
    end = time.process_time() + 0.05
    while time.process_time() < end: pass
    if os.fork(): os._exit(0)
"""
WAITED_FOR_BY_NOBODY = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if not os.fork():
        end = time.process_time() + 0.1
        while time.process_time() < end: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""


@pytest.mark.parametrize("source", [ORPHANS, WAITED_FOR_BY_NOBODY], ids=["orphans", "waited for by nobody"])
async def test_processor_time_of_children_that_have_ended_counts_without_control_groups(
    backend: ProcessBackend, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupPool, "take", lambda self, limits, **more: None)
    report = await run(backend, source, Limits(cpu_seconds=1, wall_seconds=120))
    assert (report.ended, report.limit) == ("timeout", "cpu")


@pytest.mark.parametrize("source", ["while True: pass", "import os\nos.fork()\nwhile True: pass"])
async def test_processor_time(backend: ProcessBackend, source: str) -> None:
    report = await run(backend, source, Limits(cpu_seconds=0.5, wall_seconds=600))
    assert (report.ended, report.limit) == ("timeout", "cpu")
    assert (report.usage.cpu_ms or 0) >= 400


@pytest.mark.parametrize(
    "source",
    [
        ALLOCATE,
        "much = []\nwhile True: much.append(bytes(bytearray(1_000_000)) + b'x')",
        "import mmap\nmuch = mmap.mmap(-1, 300_000_000)\nfor n in range(0, len(much), 4096): much[n] = 1\n"
        "import time; time.sleep(60)",
        f"import os\nif not os.fork(): exec({ALLOCATE!r})\nos.wait()\nimport time; time.sleep(60)",
        "import os, time\nfor _ in range(4):\n    if not os.fork():\n        much = bytearray(100_000_000)\n"
        "        for n in range(0, len(much), 4096): much[n] = 1\n        time.sleep(60)\ntime.sleep(60)",
    ],
    ids=["at once", "bit by bit", "shared", "by a child", "by children together"],
)
async def test_memory(backend: ProcessBackend, source: str) -> None:
    report = await run(backend, source)
    assert report.limit == "memory"
    assert "never" not in report.stdout.text
    if "mmap" in source and report.isolation["limits"]["memory"]["by"] != "cgroup":
        assert b"Cannot allocate memory" in report.stderr.head  # what nobody could count is not given
        return
    assert report.ended == "oom"
    assert (report.usage.peak_memory_bytes or 0) > 240 * MIB


ARM = os.uname().machine == "aarch64"
_HOLD = "much = bytearray(80_000_000)\nfor n in range(0, len(much), 4096): much[n] = 1\n"


@pytest.mark.parametrize(
    "source",
    [
        f"import os, time\ntime.sleep(2)\nif not os.fork():\n    if not os.fork():\n        exec({_HOLD!r})\n"
        "        while True: pass\n    time.sleep(60)\ntime.sleep(60)",
        f"import os, subprocess, sys, time\nexec({_HOLD!r})\ntime.sleep(60)",
        f"import ctypes, os, time\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\nos.fork()\nexec({_HOLD!r})\ntime.sleep(60)",
        "import mmap, time\nmuch = []\nwhile True:\n    each = mmap.mmap(-1, 1)\n    each[0] = 1\n"
        "    each.madvise(mmap.MADV_DONTNEED)\n    much.append(each)",
        f"import ctypes, threading, time\n"
        f"def hold():\n    time.sleep(1)\n    exec({_HOLD!r}, globals())\n    time.sleep(60)\n"
        f"threading.Thread(target=hold).start()\nctypes.CDLL(None).syscall(93 if {ARM} else 60, 0)",
    ],
    ids=["by a child of an idle program", "at once", "behind closed maps", "in many small mappings", "by a thread"],
)
async def test_memory_that_is_hard_to_see(backend: ProcessBackend, source: str) -> None:
    report = await run(backend, source, Limits(memory_bytes=48 * MIB))
    assert report.limit == "memory" or (report.limit, report.ended) == (None, "exited"), ending(report)
    if report.ended == "exited":  # it was told that there is no more
        assert b"Cannot allocate memory" in report.stderr.head
    else:
        assert report.ended == "oom"


async def test_what_was_shared_and_is_no_more_may_be_shared_again(backend: ProcessBackend) -> None:
    source = "import mmap\nfor _ in range(200):\n    m = mmap.mmap(-1, 1 << 20)\n    m[0] = 1\n    m.close()\nprint(1)"
    report = await run(backend, source, Limits(memory_bytes=64 * MIB))
    assert report.stdout.text == "1\n"


def test_memory_that_changed_between_two_looks_counts_once() -> None:
    asked = threading.Event()
    thread = threading.Thread(target=asked.wait)
    thread.start()
    try:
        assert thread.native_id is not None  # it has the memory of this process, as a child before its exec has
        found = box_usage._each_once({os.getpid(): (80 * MIB, 0, 9000), thread.native_id: (80 * MIB - 4096, 0, 9000)})
        assert list(found) == [os.getpid()]
        apart = box_usage._each_once({os.getpid(): (80 * MIB, 0, 9000), os.getppid(): (80 * MIB, 0, 9000)})
        assert len(apart) == 2, "alike, and of two processes"
    finally:
        asked.set()
        thread.join()


async def test_memory_between_vfork_and_exec_counts_once(backend: ProcessBackend) -> None:
    source = (
        "import subprocess\nmuch = bytearray(80_000_000)\nfor n in range(0, len(much), 4096): much[n] = 1\n"
        "for _ in range(40): subprocess.run(['/bin/true'], check=True)\nprint(1)"
    )
    report = await run(backend, source, Limits(memory_bytes=128 * MIB))
    assert (report.ended, report.stdout.text) == ("exited", "1\n")


async def test_memory_behind_a_descriptor(backend: ProcessBackend) -> None:
    source = "import os\nfd = os.memfd_create('x')\nfor _ in range(400): os.write(fd, b'a' * 1_000_000)\nprint('never')"
    report = await run(backend, source)
    assert report.stdout.text == ""
    if report.isolation["limits"]["memory"]["by"] == "cgroup":
        assert (report.ended, report.limit) == ("oom", "memory")
    else:  # where nothing counts it there is none
        assert b"OSError: [Errno 38]" in report.stderr.head


async def test_the_disk(backend: ProcessBackend) -> None:
    report = await run(backend, FILL)
    assert (ending(report), report.stdout.text) == (("exited", 0, None, "disk"), "28\n")


async def test_a_disk_that_ends_within_a_page(backend: ProcessBackend) -> None:
    report = await run(backend, FILL, Limits(disk_bytes=300_001))
    assert (ending(report), report.stdout.text) == (("exited", 0, None, "disk"), "28\n")


@pytest.mark.parametrize("page", [4096, 16384, 65536])
async def test_a_file_may_be_as_long_as_the_disk_whatever_the_size_of_a_page(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """Kernels of arm64 may have pages of 64 KiB, and the kernel gives a disk whole pages."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": page}.__getitem__)
    for size in (300_000, 300_001, 5 * page - 1, 5 * page, 5 * page + 1):
        given = math.ceil(size / page) * page
        assert given <= backend._shape(Limits(disk_bytes=size))["file_bytes"] <= size + page


async def test_the_disk_first_and_then_memory(backend: ProcessBackend) -> None:
    report = await run(backend, FILL + ALLOCATE)
    assert (report.ended, report.limit, report.stdout.text) == ("oom", "memory", "28\n")


async def test_memory_first_and_then_the_disk(backend: ProcessBackend) -> None:
    source = "much = bytearray(200_000_000)\nfor n in range(0, len(much), 4096): much[n] = 1\n" + FILL + "print('end')"
    report = await run(backend, source)
    assert (ending(report), report.stdout.text) == (("exited", 0, None, "disk"), "28\nend\n")
    report = await run(
        backend, FILL.replace("600", "300") + "import os; os.remove('/workspace/tmp/large')\n" + ALLOCATE
    )
    assert (report.ended, report.limit) == ("oom", "memory")


@pytest.mark.parametrize(
    "start",
    ["if not os.fork(): time.sleep(60)", "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"],
)
async def test_processes_and_threads(backend: ProcessBackend, start: str) -> None:
    source = f"import os, threading, time\nmade = 1\ntry:\n  while True:\n    {start}\n    made += 1\n"
    source += "except (OSError, RuntimeError): print(made, flush=True)\ntime.sleep(0.5)"
    report = await run(backend, source, Limits(processes=10))
    assert (ending(report), report.stdout.text) == (("exited", 0, None, "pids"), "10\n")


async def test_the_number_of_files(backend: ProcessBackend) -> None:
    source = "made = 0\ntry:\n  while True: open(f'/workspace/tmp/{made}', 'w').close(); made += 1\n"
    report = await run(backend, source + "except OSError as exc: print(made, exc.errno)", Limits(inodes=100))
    made, number = map(int, report.stdout.text.split())
    assert (ending(report), number) == (("exited", 0, None, "inodes"), 28)
    assert 90 <= made <= 100


async def test_open_files(backend: ProcessBackend) -> None:
    source = "files = []\ntry:\n  while True: files.append(open('/dev/null'))\nexcept OSError as exc: print(exc.errno)"
    assert (await run(backend, source, Limits(open_files=64))).stdout.text == "24\n"


async def test_the_length_of_a_file(backend: ProcessBackend) -> None:
    report = await run(backend, "open('/workspace/tmp/x', 'wb').write(b'a' * 2_000_000)", Limits(file_bytes=1_000_000))
    assert report.exit_status == 1
    assert report.stderr.text.endswith("OSError: [Errno 27] File too large\n")
    writing = ("dd", "if=/dev/zero", "of=/workspace/tmp/x", "bs=100000", "count=20")
    report = await command(backend, *writing, limits=Limits(file_bytes=1_000_000))
    assert ending(report) == ("disk", None, 25, "file_size")


async def test_a_signal_that_a_program_sends_itself_names_no_limit(backend: ProcessBackend) -> None:
    itself = "import os, signal; signal.signal(25, signal.SIG_DFL); os.kill(os.getpid(), 25)"
    assert ending(await run(backend, itself, Limits(file_bytes=1_000_000))) == ("signalled", None, 25, None)
    box = await backend.open(StaySpec(Limits(file_bytes=1_000_000)))
    cell = await (await box.interpreter()).run(Cell(itself.encode()), lambda *_: None, lambda _: None)
    assert ending(cell.report) == ("signalled", None, 25, None)
    started = await box.command(Command(("/bin/sh", "-c", "kill -XFSZ $$")), lambda *_: None)
    assert ending(await started.over()) == ("signalled", None, 25, None)
    await box.end()


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGKILL])
@pytest.mark.parametrize(("used", "ended"), [(1990.0, "signalled"), (2000.0, "timeout")])
def test_processor_time_is_used_up_when_all_of_it_is_used(number: int, used: float, ended: str) -> None:
    limits = Limits(cpu_seconds=2)
    out_of_time = partial(limit_watch.spent, used, limits)
    assert limit_watch.killed_by(number, lambda: False, out_of_time, lambda: None, lambda: False)[0] == ended
    # The kernel counts in ticks: what it kills has used all that was allowed, even if a fifth of these were too many.
    assert limit_watch.kernel_cpu_seconds(limits) * 0.8 > 2


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output(backend: ProcessBackend, stream: str) -> None:
    limits = Limits(output_bytes=1_000_000, capture_bytes=1000)
    report = await run(backend, f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", limits)
    assert ending(report) == ("output", None, 9, "output")
    captured = getattr(report, stream)
    assert captured.total > 1_000_000
    assert len(captured.head) + len(captured.tail) == 1000


async def test_refused_calls_without_end(backend: ProcessBackend) -> None:
    report = await run(backend, "import ctypes\nlibc = ctypes.CDLL(None)\nwhile True: libc.unshare(0)")
    assert ending(report) == ("policy", None, 9, None)


async def test_processor_cores(backend: ProcessBackend) -> None:
    work = """
        import hashlib, threading, time
        began, worked = time.monotonic(), time.process_time()
        end = began + 1
        def work():
            while time.monotonic() < end: hashlib.sha256(b"x" * 1_000_000)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print((time.process_time() - worked) / (time.monotonic() - began))
        """
    program = comparing.Honest("work", work)
    report = await run(backend, program.code.decode(), Limits(cpu_cores=0.5))
    share = float(report.stdout.text)  # its own, without what it took to make the box
    if report.isolation["limits"]["cpu"]["by"] == "cgroup":
        assert share < 0.7
    else:
        assert share < 1.2  # whole cores are all that can be taken away
    report = await run(backend, program.code.decode(), Limits(cpu_cores=float(os.cpu_count() or 1)))
    assert report.ended == "exited"


async def test_tcp_holds_no_more_for_a_box_than_a_little_for_each_socket(backend: ProcessBackend) -> None:
    source = (
        "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.connect(s.getsockname())\n"
        "s.setblocking(False)\nheld = idle = 0\n"
        "for _ in range(60):\n"  # whoever reads fast is given a larger window
        "    try: held += s.send(bytes(1 << 20))\n    except BlockingIOError: pass\n"
        "    try:\n        while True: held -= len(s.recv(1 << 20))\n    except BlockingIOError: pass\n"
        "while idle < 100:\n"
        "    try: held += s.send(bytes(1 << 20))\n    except BlockingIOError: idle += 1\n"
        "print(held < 1_000_000)"
    )
    assert (await run(backend, source)).stdout.text == "True\n"
