"""Interpreters of a session that are started by exec: as others are, with a layout and a set-up of their own."""

from __future__ import annotations

import ast
import asyncio
import socket
from pathlib import Path

import pytest

from ringfence.core.aio import PausableTimer
from ringfence.core.box import Limits, SetUp, Shown, Stream
from ringfence.core.errors import SetUpFailed, Unavailable
from ringfence.core.sessions import Cell, CellReport, Command, Failure, StaySpec
from ringfence.sandbox.process import interpreter as interpreters
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.interpreter import Interpreter
from ringfence.sandbox.process.live import LiveBox
from tests import tooling
from tests.sandbox import comparing

pytestmark = pytest.mark.anyio

_WHERE = "import sys\n(id(int), hash('ringfence'))"


@pytest.fixture
async def box(backend: ProcessBackend) -> LiveBox:
    return await backend.open(StaySpec(layout="fresh"))


def nothing(stream: Stream, data: bytes) -> None:
    """Whoever does not care what is written."""


async def run(interpreter: Interpreter, source: str, **limits: float) -> CellReport:
    cell = Cell(source.encode(), Limits(**limits))  # type: ignore[arg-type]
    return await interpreter.run(cell, nothing, lambda _: None)


def said(report: CellReport) -> str:
    assert report.error is None, report.error
    return report.results[-1].data["text/plain"]


async def test_variables_that_python_reads_at_its_start_have_their_effect_in_sessions(backend: ProcessBackend) -> None:
    env = {"PYTHONHASHSEED": "0", "PYTHONOPTIMIZE": "1", "PYTHONPATH": "/workspace/lib", "PYTHONWARNINGS": "error"}
    box = await backend.open(StaySpec(env=env))
    assert box.isolation["memory_layout"] == "fresh"
    interpreter = await box.interpreter()
    made = "import os, sys\nos.mkdir('lib')\nopen('lib/greeting.py', 'w').write('word = 1')"
    assert (await run(interpreter, made)).error is None
    seen = "import greeting\nsys.flags.hash_randomization, sys.flags.optimize, sys.warnoptions, greeting.__file__"
    assert said(await run(interpreter, seen)) == "(0, 1, ['error'], '/workspace/lib/greeting.py')"
    plain = await backend.open(StaySpec(env={"WHO": "me"}))
    assert plain.isolation["memory_layout"] == "shared"


async def test_interpreters_have_a_layout_of_their_own_and_facts_say_so(box: LiveBox, backend: ProcessBackend) -> None:
    one, two = await box.interpreter(), await box.interpreter()
    assert said(await run(one, _WHERE)) != said(await run(two, _WHERE))
    assert box.isolation["memory_layout"] == "fresh"
    assert (await run(one, "1")).report.isolation["memory_layout"] == "fresh"
    forked = await backend.open(StaySpec())
    assert forked.isolation["memory_layout"] == "shared"


async def test_a_python_program_has_one_too(box: LiveBox) -> None:
    async def once() -> str:
        command = Command((), source=b"print(id(int), hash('ringfence'))")
        return (await (await box.command(command, nothing)).over()).stdout.text

    one, two = await once(), await once()
    assert one and two and one != two


async def test_cells_are_the_same_as_in_a_fork(box: LiveBox, backend: ProcessBackend) -> None:
    fork = await (await backend.open(StaySpec())).interpreter()
    fresh = await box.interpreter()
    sources = (
        "import os, sys, json\nx = 20; os.chdir('/tmp')",
        "(x + 1, os.getcwd(), sys.argv, sys.path[0], __name__, sys.flags, sorted(os.environ))",
        "print('out'); print('err', file=sys.stderr); display({'a': 1}); _",
        "def f(n):\n    return 1 / n\nf(0)",
        "import asyncio\nawait asyncio.sleep(0, 'slept')",
        "input()",
        "sys.exit(3)",
        "sys.getrecursionlimit() - len(__import__('inspect').stack())",
        "sorted(name for name in sys.modules if 'ringfence' in name)",
        "def deep(n): return n and 1 + deep(n - 1)\ndeep(900)",
    )
    for source in sources:
        one, two = await run(fork, source), await run(fresh, source)
        assert two.error == one.error, source
        assert [each.data for each in two.results] == [each.data for each in one.results], source
        assert two.report.stdout.text == one.report.stdout.text, source
        assert two.report.stderr.text == one.report.stderr.text, source
        assert (two.report.ended, two.report.exit_status) == (one.report.ended, one.report.exit_status), source


async def test_output_comes_while_the_cell_runs(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    heard: list[tuple[str, bytes]] = []
    shown: list[Shown | Failure] = []
    came = asyncio.Event()

    def tell(stream: Stream, data: bytes) -> None:
        heard.append((stream, data))
        came.set()

    source = "import time\ndisplay(1)\nprint('early', flush=True)\ntime.sleep(60)"
    running = asyncio.create_task(interpreter.run(Cell(source.encode()), tell, shown.append))
    async with asyncio.timeout(tooling.PATIENCE):
        await came.wait()
    assert heard == [("stdout", b"early\n")]
    assert interpreter.interrupt()
    report = await running
    assert report.error is not None and report.error.name == "KeyboardInterrupt" and report.alive
    assert [type(each) for each in shown] == [Shown, Failure]


async def test_limits_hold(box: LiveBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "GRACE_SECONDS", tooling.PATIENCE)  # a slow machine needs longer
    interpreter = await box.interpreter()
    await run(interpreter, "x = 5")
    report = await run(interpreter, "import time; time.sleep(600)", wall_seconds=0.2)
    assert (report.report.ended, report.report.limit, report.alive) == ("timeout", "wall", True)
    assert said(await run(interpreter, "x")) == "5"
    report = await run(interpreter, "x = [bytearray(10 << 20) for _ in range(60)]")
    assert (report.report.ended, report.report.limit, report.alive) == ("oom", "memory", False)


async def test_it_is_confined_as_every_process_is(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    source = "open('/proc/self/status').read().split('Seccomp:\\t')[1][0], __import__('os').listdir('/proc/self/fd')"
    seccomp, descriptors = ast.literal_eval(said(await run(interpreter, source)))
    assert seccomp == "2"
    assert len(descriptors) <= 10
    report = await run(interpreter, "import ctypes\nctypes.CDLL(None).unshare(0x10000000)")
    assert said(report) == "-1" and report.report.denials["unshare"] == 1


async def test_modules_in_the_working_folder_do_not_come_in_between(box: LiveBox) -> None:
    first = await box.interpreter()
    for name in ("marshal", "ctypes", "io", "_json", "time"):
        await run(first, f"open('/workspace/{name}.py', 'w').write('raise SystemExit')")
    assert said(await run(await box.interpreter(), "1 + 1")) == "2"


async def test_a_template_is_what_such_sessions_begin_with_too(tmp_path: Path) -> None:
    setup = SetUp("import math\nrates = {'x': math.pi}", {"REGION": "north"})
    backend = ProcessBackend(depth=0, templates={"python": (), "rates": ()}, setups={"rates": setup})
    try:
        box = await backend.open(StaySpec(template="rates", layout="fresh"))
        report = await run(await box.interpreter(), "import os\n(round(rates['x'], 2), os.environ['REGION'])")
        assert said(report) == "(3.14, 'north')"
    finally:
        await backend.close()


# ── Set-up code of the user's ──


async def test_set_up_code_runs_in_every_interpreter_before_its_first_cell(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec(setup="import math\nready = [math.pi]\nprint('heard by nobody')"))
    one = await box.interpreter()
    report = await run(one, "ready.append(1)\nlen(ready)")
    assert said(report) == "2" and report.report.stdout.text == ""
    assert said(await run(await box.interpreter(), "len(ready)")) == "1"
    assert box.isolation["memory_layout"] == "fresh"
    assert box.isolation["template"] == {"setup": "user", "started": "exec"}
    failed = await run(one, "1/0")
    assert failed.error is not None and '"<cell 2>"' in failed.error.traceback


async def test_it_sees_what_the_box_was_given(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec(env={"WHO": "me"}, setup="import os; who = os.environ['WHO']; open('made', 'w')"))
    assert said(await run(await box.interpreter(), "who, os.path.exists('/workspace/made')")) == "('me', True)"


async def test_set_up_code_that_fails_is_told_with_its_traceback(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec(setup="def f():\n    return missing\nf()"))
    with pytest.raises(SetUpFailed) as problem:
        await box.interpreter()
    assert "NameError: name 'missing' is not defined" in problem.value.traceback
    assert 'File "<setup>", line 2, in f' in problem.value.traceback
    assert problem.value.reason_code == "setup_failed" and problem.value.traceback in problem.value.message


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import time; time.sleep(60)", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "its interpreter ended"),
        ("x = [bytearray(10 << 20) for _ in range(60)]", "memory"),
        ("def f(:", "SyntaxError"),
    ],
)
async def test_however_it_fails_it_is_told(backend: ProcessBackend, source: str, why: str) -> None:
    # Only what never ends is to meet the clock: a slow machine needs its time for the rest.
    limits = Limits(wall_seconds=0.5) if "sleep" in source else Limits()
    box = await backend.open(StaySpec(limits, setup=source))
    with pytest.raises(SetUpFailed, match=why):
        await box.interpreter()


async def begun(interpreter: Interpreter, source: str) -> tuple[asyncio.Task[CellReport], asyncio.Queue[bytes]]:
    """A cell that has said so, and what it says after that."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    cell = Cell(source.encode(), Limits(wall_seconds=600))
    running = asyncio.create_task(interpreter.run(cell, lambda _, data: heard.put_nowait(data), lambda _: None))
    assert await heard.get() == b"begun\n"
    return running, heard


async def test_a_cell_keeps_its_turn_until_it_is_over_however_often_it_is_cancelled(
    box: LiveBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "GRACE_SECONDS", 600.0)
    interpreter = await box.interpreter()
    assert (await run(interpreter, "x = 41")).error is None
    slow = """
import os, time
try:
    print("begun", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
"""
    running, heard = await begun(interpreter, slow)
    running.cancel()
    assert await heard.get() == b"interrupted\n"
    running.cancel()
    following = asyncio.create_task(run(interpreter, "x + 1"))
    await asyncio.sleep(0.05)
    assert not running.done() and not following.done()
    await (await box.command(Command(("/usr/bin/touch", "/workspace/go")), nothing)).over()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert said(await following) == "42"


async def test_a_cell_that_is_cancelled_in_a_pause_can_react_after_it(
    box: LiveBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "GRACE_SECONDS", 0.05)
    interpreter = await box.interpreter()
    assert (await run(interpreter, "x = 41")).error is None
    running, _ = await begun(interpreter, "import time\nprint('begun', flush=True)\ntime.sleep(600)")
    await box.pause()
    running.cancel()
    await asyncio.sleep(0.2)
    assert not running.done(), "it stands still, and so does its time"
    monkeypatch.setattr(PausableTimer, "start", lambda self: None)  # a slow machine does not end it either
    await box.resume()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert said(await run(interpreter, "x + 1")) == "42"


async def test_a_cell_whose_interpreter_is_ended_from_outside_was_cancelled(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    running, _ = await begun(interpreter, "import time\nprint('begun', flush=True)\ntime.sleep(600)")
    await interpreter.end()
    assert (await running).report.ended == "cancelled"


async def test_an_interpreter_that_takes_no_more_orders_is_gone() -> None:
    """A box's filter refuses what makes its channel take none; if it did not, each later step would fail like the
    next."""
    pass_rights = 83
    probe, other = socket.socketpair()
    with probe, other:
        try:
            probe.setsockopt(socket.SOL_SOCKET, pass_rights, 0)
        except OSError as exc:
            pytest.skip(f"the kernel has no SO_PASSRIGHTS (Linux 6.16): {exc.strerror}")
    deaf = f"""
import os, socket
for number in range(3, 1024):
    try:
        os.fstat(number)
        socket.socket(fileno=os.dup(number)).setsockopt(socket.SOL_SOCKET, {pass_rights}, 0)
    except OSError:
        pass
"""
    async for backend in comparing.opened(without=("seccomp",)):
        box = await backend.open(StaySpec())
        interpreter = await box.interpreter()
        await run(interpreter, deaf)
        with pytest.raises(Unavailable):
            await run(interpreter, "1")
        assert not interpreter.alive, "its context gets another one"
