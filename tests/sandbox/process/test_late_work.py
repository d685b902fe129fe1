"""Each step is told of by itself: that it is done is a claim, and what it leaves running is charged to no other."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from ringfence.core.box import BoxReport, Limits, Ran, Stream
from ringfence.core.model import Outcome, Status
from ringfence.core.sessions import Cell, CellReport, Command, StaySpec
from ringfence.governance.facts import _in_a_box, _of_box
from ringfence.sandbox.process import interpreter as interpreters
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.interpreter import Interpreter, MainThread
from ringfence.sandbox.process.late_work import LateWork
from ringfence.sandbox.process.live import LiveBox
from ringfence.sandbox.tools.results import judge
from tests.boxing import need_boxes
from tests.forging import CHANNEL

pytestmark = pytest.mark.anyio

FORGE = f"""{CHANNEL}
def forge(cell):
    channel.send(b'{{"t":"done","id":%d,"ok":true,"left_out":0}}' % cell)
"""
SPIN = """
import threading, time
used, stop = [0.0], threading.Event()
def spin():
    while not stop.is_set():
        for _ in range(20_000): pass
        used[0] = time.thread_time()
threading.Thread(target=spin, daemon=True).start()
"""
REFUSED = """
import ctypes, threading
def be_refused(): ctypes.CDLL(None).syscall(425, 0, 0)  # io_uring_setup
"""


@pytest.fixture(autouse=True)
def boxes() -> None:
    need_boxes()


def nothing(stream: Stream, data: bytes) -> None:
    """Whoever does not care what is written."""


async def run(interpreter: Interpreter, source: str, seconds: float = 60.0) -> CellReport:
    return await interpreter.run(Cell(source.encode(), Limits(wall_seconds=seconds)), nothing, lambda _: None)


def cpu_ms(report: BoxReport) -> float:
    assert report.usage.cpu_ms is not None
    return report.usage.cpu_ms


# ── A main thread that goes on ──


@pytest.mark.parametrize(
    "goes_on", ["while True: pass", "import time; time.sleep(600)", "import threading; threading.Event().wait()"]
)
async def test_a_main_thread_that_goes_on_after_its_done_is_killed_at_its_limit_and_told_as_forged(
    box: LiveBox, goes_on: str
) -> None:
    interpreter = await box.interpreter()
    done = await run(interpreter, f"{FORGE}\nforge(1)\n{goes_on}", seconds=0.5)
    report = done.report
    assert (report.ended, report.limit, report.exit_status, report.forged) == ("policy", "wall", None, True)
    assert report.wall_ms >= 500 and not done.alive
    assert judge(report) == ("killed", "forged")
    facts = _of_box(report)
    assert facts["forged"] is True
    after = await run(await box.interpreter(), "1 + 1")
    assert (after.report.ended, after.report.exit_status, after.report.forged) == ("exited", 0, False)
    assert after.report.signal is None and "forged" not in _of_box(after.report)


async def test_what_a_forger_does_is_charged_to_it(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    source = f"""{FORGE}{REFUSED}
forge(1)
be_refused()
import os
os.makedirs('/workspace/output', exist_ok=True)
open('/workspace/output/mine', 'w').write('x')
import time
while time.thread_time() < 0.3: pass
"""
    first = (await run(interpreter, source)).report
    assert (first.ended, first.exit_status) == ("exited", 0), "it came back by itself, within its time"
    assert cpu_ms(first) >= 250
    assert first.denials == {"io_uring_setup": 1}
    assert [each.path for each in first.files] == ["/workspace/output/mine"]
    second = (await run(interpreter, "1")).report
    assert cpu_ms(second) < 100
    assert (second.denials, second.files, second.late) == ({}, (), None)


async def test_a_forger_who_ends_its_process_is_told_by_how_that_ended(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    done = await run(interpreter, f"{FORGE}\nforge(1)\nimport os\nos._exit(7)")
    assert (done.report.ended, done.report.exit_status, done.alive) == ("exited", 7, False)


async def test_a_thread_that_says_done_for_another_step_ends_nothing(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    source = f"""{FORGE}
import threading, time
begun = threading.Event()
def lie():
    begun.wait()
    forge(2)
threading.Thread(target=lie).start()
"""
    await run(interpreter, source)
    second = (await run(interpreter, "begun.set()\nwhile time.thread_time() < 0.3: pass")).report
    assert (second.ended, second.exit_status) == ("exited", 0)
    assert cpu_ms(second) >= 200, "its main thread was waited for"


async def test_a_child_with_the_channel_says_nothing_for_its_parent(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    source = f"""{FORGE}
import os, time
held = os.dup(channel.fileno())
if os.fork() == 0:
    _socket.socket(fileno=held).send(b'nonsense')
    os._exit(0)
os.wait()
'honest'
"""
    done = await run(interpreter, source)
    assert (done.report.ended, done.broken, done.results[0].data["text/plain"]) == ("exited", "", "'honest'")


async def test_a_main_thread_that_runs_is_not_at_rest() -> None:
    class Running(MainThread):
        def _read(self, name: str) -> bytes:
            return b"running"

    assert not Running(1).waits()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"syscall": interpreters._RECVFROM + b" 0x64 0xff 0x1 0x22 0x0 0x0 0xff 0xff\n"}, True),
        ({"syscall": interpreters._RECVFROM + b" 0x64 0xff 0x1000 0x0 0x0 0x0 0xff 0xff\n"}, False),
        ({"syscall": b"115 0x0 0x0 0x1 0x22 0x0 0x0 0xff 0xff\n"}, False),
        ({"wchan": b"__skb_wait_for_more_packets"}, True),
        ({"wchan": b"hrtimer_nanosleep"}, False),
        ({"wchan": b"0", "stat": b"7 (a) b) S 1"}, True),
        ({"wchan": b"0", "stat": b"7 (a) b) R 1"}, False),
    ],
)
async def test_whether_it_rests_is_known_by_what_the_kernel_tells_us(told: dict[str, bytes], expected: bool) -> None:
    class Told(MainThread):
        def _read(self, name: str) -> bytes:
            if name not in told:
                raise PermissionError(13, "Permission denied")
            return told[name]

    assert Told(1).waits() is expected


# ── What is left ──


async def test_a_thread_that_goes_on_is_charged_to_no_later_step(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    await run(interpreter, SPIN)
    waits = "begun = used[0]\nwhile used[0] < begun + 0.3: time.sleep(0.01)"
    beside = (await run(interpreter, waits)).report
    assert beside.late is not None and beside.late["tasks"] == 1
    assert beside.late["cpu_ms"] >= 250 > cpu_ms(beside)
    await run(interpreter, "stop.set()")


async def test_a_child_that_goes_on_is_charged_to_no_later_step(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    left = """
import subprocess, sys, time, os
child = subprocess.Popen(['/bin/sh', '-c', 'while :; do :; done'])
def used(): return sum(map(int, open(f'/proc/{child.pid}/stat').read().rpartition(')')[2].split()[11:13]))
"""
    await run(interpreter, left)
    beside = (await run(interpreter, "begun = used()\nwhile used() < begun + 40: time.sleep(0.02)")).report
    assert beside.late is not None and beside.late["tasks"] >= 1
    assert beside.late["cpu_ms"] >= 250 > cpu_ms(beside)
    own = "import time\nwhile time.process_time() < 0.4: pass"
    mine = (await run(interpreter, f"subprocess.run(['python3', '-c', {own!r}])")).report
    assert cpu_ms(mine) >= 350, "what a step starts itself is its own"
    await run(interpreter, "child.kill()\nchild.wait()")
    assert (await run(interpreter, "1")).report.late is None


async def test_what_is_refused_to_a_thread_that_was_left_is_no_refusal_of_a_later_step(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    left = """
go, went = threading.Event(), threading.Event()
def later():
    go.wait(); be_refused(); went.set()
threading.Thread(target=later).start()
"""
    first = (await run(interpreter, REFUSED + left + "be_refused()")).report
    assert (first.denials, first.late) == ({"io_uring_setup": 1}, None)
    second = (await run(interpreter, "go.set(); went.wait()")).report
    assert second.denials == {}
    assert second.late is not None and second.late["denials"] == {"io_uring_setup": 1}
    third = (await run(interpreter, "be_refused()")).report
    assert third.denials == {"io_uring_setup": 1} and "denials" not in (third.late or {}), "told once"


async def test_what_is_done_between_two_steps_is_told_apart(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    left = """
import os, signal, time
os.mkdir('/workspace/output')
def later():
    signal.sigwait({signal.SIGUSR1})
    be_refused()
    while time.thread_time() < 0.2: pass
    open('/workspace/output/late', 'w').write('x')
    open('/workspace/went', 'w')
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
threading.Thread(target=later).start()
"""
    await run(interpreter, REFUSED + left)
    interpreter._member.signal(signal.SIGUSR1)
    while "went" not in os.listdir(box.workspace):
        await asyncio.sleep(0.01)
    after = (await run(interpreter, "open('/workspace/output/mine', 'w').write('y')")).report
    assert (after.denials, [each.path for each in after.files]) == ({}, ["/workspace/output/mine"])
    assert after.late is not None and after.late["cpu_ms"] >= 150
    assert after.late["denials"] == {"io_uring_setup": 1}
    assert [each["path"] for each in after.late["files"]] == ["/workspace/output/late"]


async def test_commands_in_the_background_are_steps_of_their_own_and_not_late(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    spins = (
        "import time\nwhile time.process_time() < 0.4: pass\nopen('/workspace/went', 'w')\nwhile True: time.sleep(1)"
    )
    running = await box.command(Command(("python3", "-c", spins), Limits(wall_seconds=600)), nothing)
    waits = "import os, time\nwhile not os.path.exists('/workspace/went'): time.sleep(0.01)"
    beside = (await run(interpreter, waits)).report
    assert beside.late is None and cpu_ms(beside) < 300
    running.signal(9)
    assert cpu_ms(await running.over()) >= 350


async def test_an_honest_step_has_nothing_late(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    for source in ("1", "import subprocess; subprocess.run(['true'])", "import threading", "2"):
        done = await run(interpreter, source)
        assert (done.report.ended, done.report.late, done.report.forged) == ("exited", None, False)
    for _ in range(3):
        command = await box.command(Command(("/bin/sh", "-c", "exit 0")), nothing)
        assert (await command.over()).late is None
        assert (await run(await box.interpreter(), "1")).report.late is None, "what it takes to start one is not late"


# ── How it is told ──


def test_what_is_late_stands_in_the_facts_apart() -> None:
    account: dict[str, Any] | None = LateWork(812.0, {"io_uring_setup": 2}, tasks=1).fact()
    assert account == {"cpu_ms": 812.0, "denials": {"io_uring_setup": 2}, "tasks": 1}
    assert LateWork(0.2).fact() is None
    assert _of_box(BoxReport("exited", 0, late=account))["late"] == account


def test_a_forged_end_has_its_sentence() -> None:
    forged = BoxReport("policy", signal=9, limit="wall", forged=True, wall_ms=1500.0)

    class Ended:
        took_ms, outcome = 1500.0, Outcome(Status.KILLED, "forged")

    said = _in_a_box(Ended, Ran(Limits(), forged))  # type: ignore[arg-type]
    assert said == "killed after 1.5 s: its interpreter said that it was done and went on (forged)"


async def test_without_control_groups_a_thread_that_goes_on_is_charged_to_no_later_step(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await backend.open(StaySpec())
    interpreter = await box.interpreter()
    group, box.box.group = box.box.group, None
    try:
        await run(interpreter, SPIN)
        beside = (await run(interpreter, "begun = used[0]\nwhile used[0] < begun + 0.3: time.sleep(0.01)")).report
        assert beside.late is not None and beside.late["tasks"] == 1
        assert beside.late["cpu_ms"] >= 250 > cpu_ms(beside)
    finally:
        box.box.group = group
