"""The zygote's memory: pages that are copied at the fork, and objects that are never freed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import ringfence
from ringfence.core.box import BoxReport, BoxSpec, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.zygote import kernel, memory
from ringfence.sandbox.process.zygote_handle import ZygoteHandle
from tests import tooling
from tests.sandbox import comparing
from tests.sandbox.process import looking

SOURCE = str(Path(ringfence.__file__).parent.parent)
ENOUGH = 20
"""Boxes, after which a zygote has found out which pages those are."""
FAULTS = "import resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)"
WITNESSED = """
import errno, json, mmap, os, resource, time
from ringfence.sandbox.process.zygote import memory as pins

full = 0

def pin(pages, real=pins._pin):
    global full
    try:
        real(pages)
    except OSError as exc:
        full += exc.errno == errno.ENOMEM
        raise

pins._pin = pin
PAGE = resource.getpagesize()
memory = mmap.mmap(-1, 1000 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)  # what is in huge pages is not looked at
for at in range(0, len(memory), PAGE):
    memory[at] = 1
for _ in range(2):
    pins._pages(os.getpid())  # whatever it needs itself is there from now on

def touch(first, last):
    for page in range(first, last):
        memory[page * PAGE + PAGE // 2] = 2

def faults(first, last):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        touch(800, 801)  # what it needs besides
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        touch(first, last)
        os.write(theirs, b"%d" % (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))
        os._exit(0)
    os.wait()
    return int(os.read(ours, 100))

before = faults(300, 600)
held = pins.Pins()
held.call_witness(lambda: touch(200, 700))
looked = [held.look()]
until = time.monotonic() + 300
while not looked[-1] and time.monotonic() < until:
    time.sleep(0.3)
    looked.append(held.look())
    if full and not held._witness and not looked[-1]:  # other zygotes of this user hold what it may lock
        if full > 20:
            print("null")
            raise SystemExit
        held.call_witness(lambda: touch(200, 700))
looked.append(held.look())
left = open("/proc/self/task/%d/children" % os.getpid()).read().split()
print(json.dumps([looked[0], looked[-2], looked[-1], before, faults(300, 600), faults(720, 800), left]))
"""

ROOM = """
import ctypes, mmap
from ringfence.sandbox.process.zygote import memory as pins

memory = mmap.mmap(-1, 2**21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
try:
    pins._pin(list(range(first, first + len(memory), pins._PAGE)))
    print("true")
except OSError:
    print("false")
"""
IN_USE = "the memory that this user may lock (ulimit -l) is in use"


def pins_are_possible() -> bool:
    parameters = ctypes.create_string_buffer(memory._PARAMETERS)
    try:
        os.close(kernel.call("io_uring_setup", 1, ctypes.addressof(parameters)))
    except (OSError, KeyError):
        return False
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return most == resource.RLIM_INFINITY or most >= 2**23


needs_pins = pytest.mark.skipif(
    not pins_are_possible(),
    reason="this host allows no io_uring (kernel.io_uring_disabled), or less than 8 MiB of locked memory (ulimit -l)",
)


async def run(backend: ProcessBackend, source: str, **given: object) -> BoxReport:
    report = await backend.run(BoxSpec(Program("python", source.encode()), Limits(wall_seconds=120), **given))  # type: ignore[arg-type]
    assert (report.exit_status, report.stderr.text) == (0, "")
    return report


def python(source: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", source], cwd=SOURCE, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def zygotes(backend: ProcessBackend) -> list[ZygoteHandle]:
    assert backend._pool is not None
    return [zygote for zygotes in backend._pool._zygotes.values() for zygote in zygotes]


def pinned(zygote: ZygoteHandle) -> int:
    """Kilobytes."""
    status = Path(f"/proc/{zygote.pid}/status").read_text()
    return int(status.partition("VmPin:")[2].split()[0])


@pytest.fixture
async def one(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessBackend]:
    """Where all boxes come from one zygote."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    made = ProcessBackend(depth=0)
    yield made
    await made.close()


async def witness(backend: ProcessBackend) -> int:
    """Of its zygote, which makes boxes until there is one that is ready."""
    for _ in range(20 * ENOUGH):  # a slow machine takes longer to stop it
        await run(backend, "pass")
        for _ in range(20):
            await asyncio.sleep(0.01)
            for found in looking.witnesses(zygotes(backend)[0].pid):
                return found
    raise AssertionError("there was none")


@needs_pins
def test_what_the_witness_wrote_is_copied_by_the_fork() -> None:
    said = json.loads(python(WITNESSED))
    if said is None:
        pytest.skip(IN_USE)
    first, last, again, before, after, others, left = said
    assert (first, last, again) == (False, True, False), "not before the second box, and once"
    assert before >= 300, "each page is copied when it is written"
    assert after < 30
    assert others >= 80, "what nobody wrote is shared as ever"
    assert left == [], "the witness is gone"


@needs_pins
@pytest.mark.anyio
async def test_boxes_of_a_zygote_that_knows_write_few_shared_pages(one: ProcessBackend) -> None:
    first = int((await run(one, FAULTS)).stdout.text)
    assert [pinned(zygote) for zygote in zygotes(one)] == [0]
    await witness(one)
    for _ in range(ENOUGH):
        await run(one, "pass")
    if pinned(zygotes(one)[0]) == 0 and not json.loads(python(ROOM)):
        pytest.skip(IN_USE)
    assert int((await run(one, FAULTS)).stdout.text) < first / 2
    assert 100 < pinned(zygotes(one)[0]) < memory._MAX_PAGES * 4


@pytest.mark.anyio
async def test_what_a_box_writes_no_other_box_sees(one: ProcessBackend) -> None:
    for _ in range(ENOUGH):
        await run(one, "pass")
    vandal = """
import builtins, os, sys
sys.path.append("/mine"); os.environ["MINE"] = "1"; builtins.mine = 1
sys.setrecursionlimit(4321)
"""
    look = """
import builtins, os, sys
print(hasattr(builtins, "mine"), "MINE" in os.environ, "/mine" in sys.path, sys.getrecursionlimit() == 4321)
print([os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 3])
"""
    for _ in range(3):
        await run(one, vandal)
        assert (await run(one, look)).stdout.text == "False False False False\n[]\n"


def test_boxes_do_without_where_no_memory_may_be_locked() -> None:
    """Also where the host's own limit is lower than a box's would be."""
    program = f"""
import asyncio, resource
from pathlib import Path
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
from ringfence.core.box import BoxSpec, Program
from ringfence.sandbox.process.backend import ProcessBackend

async def main():
    backend = ProcessBackend(depth=0)
    for _ in range({ENOUGH}):
        report = await backend.run(BoxSpec(Program("python", b"print('ran')")))
        assert report.stdout.text == "ran\\n", report
    pids = [zygote.pid for zygotes in backend._pool._zygotes.values() for zygote in zygotes]
    assert pids and all("VmPin:\\t       0 kB" in Path(f"/proc/{{pid}}/status").read_text() for pid in pids)
    await backend.close()
    print(report.isolation["protections"]["locked_memory"])

asyncio.run(main())
"""
    assert python(program) == "{'on': True, 'verified': 'host'}\n"


# ── A witness that is no help ──


@pytest.mark.anyio
async def test_a_witness_that_dies_is_only_a_witness(one: ProcessBackend) -> None:
    os.kill(await witness(one), signal.SIGKILL)
    zygote, before = zygotes(one)[0], looking.descriptors(zygotes(one)[0].pid)
    for _ in range(6):
        await run(one, "pass")
    assert zygotes(one) == [zygote] and zygote.alive
    assert looking.descriptors(zygote.pid) <= before


@pytest.mark.parametrize(
    ("source", "seconds", "ended"),
    [
        ("import atexit, time\natexit.register(time.sleep, 600)", 0.5, ("timeout", None)),
        ("import atexit\natexit.register(print, 'bye')\nprint('hello')", 30, ("exited", 0)),
        ("import atexit, os\natexit.register(os._exit, 7)", 30, ("exited", 7)),
        ("import threading, time\nthreading._register_atexit(time.sleep, 600)", 0.5, ("timeout", None)),
        ("import mmap, os\nfile = os.open(__file__, 0)\nheld = mmap.mmap(file, 0, prot=1)", 30, ("exited", 0)),
    ],
    ids=["hangs", "speaks", "leaves", "threads", "oddly_named"],
)
@pytest.mark.anyio
async def test_what_was_preloaded_does_not_end_in_the_zygote(
    source: str, seconds: float, ended: tuple[str, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to run at the end of a program, in a box; there it does."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    folder = tmp_path / "odd\rname: 1 (deleted)"
    folder.mkdir()
    (folder / "preloaded.py").write_text(source)
    tmp_path.chmod(0o755)
    backend = ProcessBackend(depth=0, templates={"python": (), "mine": ("preloaded",)})
    spec = BoxSpec(Program("python", b"pass"), Limits(wall_seconds=seconds), template="mine", packages=(folder,))
    try:
        for _ in range(6):
            report = await backend.run(spec)
            assert (report.ended, report.exit_status) == ended, "in each box the same"
        (zygote,) = (each for each in zygotes(backend) if each.baseline.preload)
        assert zygote.alive and zygote.made >= 6
        await tooling.until(lambda: not looking.boxed(zygote.pid))  # nothing runs on there
    finally:
        async with asyncio.timeout(tooling.PATIENCE):
            await backend.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a zygote whose processes are counted apart")
@pytest.mark.anyio
async def test_a_zygote_that_can_start_nothing_more_keeps_its_boxes(one: ProcessBackend) -> None:
    for _ in range(6):  # the next one is the last before it calls a witness
        await run(one, "pass")
    reading, writing = os.pipe()
    source = b"import sys\nprint('up', flush=True)\nsys.stdin.read()\nprint('still')"
    heard: list[bytes] = []
    program = BoxSpec(Program("python", source, stdin=reading), Limits(wall_seconds=600))
    long = asyncio.create_task(one.run(program, lambda _, chunk: heard.append(chunk)))
    await tooling.until(lambda: heard)
    zygote = zygotes(one)[0]
    before = resource.prlimit(zygote.pid, resource.RLIMIT_NPROC)
    resource.prlimit(zygote.pid, resource.RLIMIT_NPROC, (1, before[1]))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await run(one, "pass")
    os.close(writing)
    os.close(reading)
    assert (await long).stdout.text == "up\nstill\n"
    resource.prlimit(zygote.pid, resource.RLIMIT_NPROC, before)
    await run(one, "pass")
    assert zygotes(one) == [zygote]


# ── An interpreter whose objects were made immortal goes on as before ──


LASTING = sys.version_info >= (3, 12)
PROGRAM = """
import collections, gc, json, re, sys
from ringfence.sandbox.process.zygote import memory

class Kept:
    pass

class Dies:
    def __del__(self):
        said.append("gone")

said, kept = [], Kept()
before = sys.getrefcount(kept)
count = memory.make_everything_immortal()
more = [kept] * 100
assert (sys.getrefcount(kept) == before + 100) is (count == 0), "nobody counts any more"
kept.itself = kept
del kept, more
Dies()
loop = Dies()
loop.itself = loop
del loop
gc.collect()
assert said == ["gone"] * 2, "what is made later is freed as ever"
gc.freeze()
gc.unfreeze()
gc.collect()
for _ in range(200):
    made = type("Made", (Kept,), {"field": []})()
    made.field.append(collections.OrderedDict(a=made))
    assert json.loads(json.dumps(re.findall("[0-9]+", "1 22"))) == ["1", "22"]
    try:
        raise ValueError(made)
    except ValueError:
        pass
gc.collect()
print(count)
"""
MANY = """
import collections, concurrent.futures, decimal, gc, sqlite3, tempfile
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert sum(pool.map(len, ["a"] * 100)) == 100
for module in (collections, decimal, tempfile, sqlite3):
    vars(module).clear()
gc.unfreeze()
gc.collect()
print("well")
"""


def test_programs_run_on_and_what_they_make_is_still_freed() -> None:
    source = str(Path(ringfence.__file__).parent.parent)
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (int(ran.stdout) > 1000) is LASTING


@pytest.mark.anyio
async def test_boxes_of_a_zygote_that_has_settled_are_like_the_first() -> None:
    async for backend in comparing.opened():
        assert isinstance(backend, ProcessBackend)
        said = [await backend.run(BoxSpec(Program("python", MANY.encode()))) for _ in range(16)]
        assert [(report.exit_status, report.stdout.text, report.stderr.text) for report in said] == [
            (0, "well\n", "")
        ] * len(said)
