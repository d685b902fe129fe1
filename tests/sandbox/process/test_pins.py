"""Pages that boxes write are copied when they are forked, and are still each box's own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import ringfence
from ringfence.box import BoxReport, BoxSpec, Program
from ringfence.sandbox.process.backend import ProcessBackend

SOURCE = str(Path(ringfence.__file__).parent.parent)
ENOUGH = 14
"""Boxes, after which a zygote has found out which pages those are."""
FAULTS = "import resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)"
WITNESSED = """
import ctypes, json, os, resource
from ringfence.sandbox.process import pins

PAGE = resource.getpagesize()
memory = bytearray(1000 * PAGE)
for at in range(0, len(memory), PAGE):
    memory[at] = 1
for _ in range(2):
    pins._pages(os.getpid(), 0)  # whatever it needs itself is there from now on

def touch(first, last, step=1):
    for page in range(first, last, step):
        memory[page * PAGE + PAGE // 2] = 2

def faults_of(act):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        act()  # what it needs besides
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        touch(*PART)
        os.write(theirs, b"%d" % (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))
        os._exit(0)
    os.wait()
    return int(os.read(ours, 100))

def witness(done, waits):
    touch(200, 700)
    os.write(done, b".")
    os.read(waits, 1)

PART = (300, 600)
before = faults_of(lambda: touch(800, 801))
held = pins.Pins()
held.call_witness(witness)
first = held.look()
touch(900, 950, 2)
second = held.look()
third = held.look()
after = faults_of(lambda: touch(800, 801))
PART = (720, 800)
others = faults_of(lambda: touch(800, 801))
left = open("/proc/self/task/%d/children" % os.getpid()).read().split()
print(json.dumps([first, second, third, before, after, others, left]))
"""


def pins_are_possible() -> bool:
    disabled = Path("/proc/sys/kernel/io_uring_disabled")
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = not disabled.exists() or disabled.read_text().strip() == "0"
    return allowed and (most == resource.RLIM_INFINITY or most >= 2**23)


needs_pins = pytest.mark.skipif(
    not pins_are_possible(),
    reason="this host allows no io_uring (kernel.io_uring_disabled), or less than 8 MiB of locked memory (ulimit -l)",
)


async def run(backend: ProcessBackend, source: str) -> BoxReport:
    report = await backend.run(BoxSpec(Program("python", source.encode())))
    assert (report.exit_status, report.stderr.text) == (0, "")
    return report


def python(source: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", source], cwd=SOURCE, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@needs_pins
def test_what_the_witness_wrote_is_copied_by_the_fork() -> None:
    first, second, third, before, after, others, left = json.loads(python(WITNESSED))
    assert (first, second, third) == (False, True, False), "when the second box is made, once"
    assert before >= 300, "each page is copied when it is written"
    assert after < 30
    assert others >= 80, "what nobody wrote is shared as ever"
    assert left == [], "the witness is gone"


@needs_pins
@pytest.mark.anyio
async def test_boxes_of_a_zygote_that_knows_write_few_shared_pages(backend: ProcessBackend) -> None:
    first = int((await run(backend, FAULTS)).stdout.text)
    for _ in range(ENOUGH):
        await run(backend, "pass")
    last = int((await run(backend, FAULTS)).stdout.text)
    assert last < first / 2


@pytest.mark.anyio
async def test_what_a_box_writes_no_other_box_sees(backend: ProcessBackend) -> None:
    for _ in range(ENOUGH):
        await run(backend, "pass")
    vandal = """
import builtins, os, sys
sys.path.append("/mine"); os.environ["MINE"] = "1"; builtins.mine = 1
sys.setrecursionlimit(4321)
"""
    look = """
import builtins, os, sys
print(hasattr(builtins, "mine"), "MINE" in os.environ, "/mine" in sys.path, sys.getrecursionlimit() == 4321)
"""
    for _ in range(3):
        await run(backend, vandal)
        assert (await run(backend, look)).stdout.text == "False False False False\n"


@pytest.mark.anyio
async def test_boxes_do_without_where_no_memory_may_be_locked() -> None:
    """Also where the host's own limit is lower than a box's would be."""
    program = f"""
import asyncio, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
from ringfence.box import BoxSpec, Program
from ringfence.sandbox.process.backend import ProcessBackend

async def main():
    backend = ProcessBackend(depth=0)
    for _ in range({ENOUGH}):
        report = await backend.run(BoxSpec(Program("python", b"print('ran')")))
        assert report.stdout.text == "ran\\n", report
    await backend.close()
    print(report.isolation["protections"]["locked_memory"])

asyncio.run(main())
"""
    assert python(program) == "{'on': True, 'verified': 'host'}\n"
