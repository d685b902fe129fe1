"""A box that stays: state is kept, processes are confined each by itself, and its end leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import MIB, BoxReport, Limits, SetUp, Shown, Stream
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import Cell, CellReport, Command, Failure, Folder, StaySpec
from ringfence.sandbox.files import collect as collecting
from ringfence.sandbox.process import interpreter as interpreters
from ringfence.sandbox.process import streams
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.cgroups.cgroup import Cgroups, Group
from ringfence.sandbox.process.interpreter import Interpreter
from ringfence.sandbox.process.live import LiveBox
from ringfence.sandbox.process.patience import MachinePace
from ringfence.sandbox.process.step import Step
from tests import tooling
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio


def nothing(stream: Stream, data: bytes) -> None:
    """Whoever does not care what is written."""


async def run(interpreter: Interpreter, source: str, **limits: float) -> CellReport:
    cell = Cell(source.encode(), Limits(**limits))  # type: ignore[arg-type]
    return await interpreter.run(cell, nothing, lambda _: None)


async def shell(box: LiveBox, line: str, **limits: float) -> BoxReport:
    command = Command(("/bin/sh", "-c", line), Limits(**limits))  # type: ignore[arg-type]
    return await (await box.command(command, nothing)).over()


def said(report: CellReport) -> str:
    return report.results[-1].data["text/plain"]


async def test_variables_imports_and_the_working_folder_stay(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    await run(interpreter, "import os, math; x = 20; os.chdir('/tmp')")
    report = await run(interpreter, "(x + 1, math.floor(2.5), os.getcwd())")
    assert said(report) == "(21, 2, '/tmp')"
    assert (report.report.ended, report.report.exit_status, report.alive) == ("exited", 0, True)


async def test_an_interpreter_does_not_say_where_we_are_installed(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    shown = "[*open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)), *sys.orig_argv[1:], *sys.argv]"
    assert said(await run(interpreter, f"import sys\n{shown}")) == "['python3', '']"


async def test_a_thread_that_prints_all_the_time_never_fails_for_it(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    talking = """
import threading
failed, quiet = [], threading.Event()
def talk():
    try:
        while not quiet.is_set():
            print('late', flush=True)
    except BaseException as exc:
        failed.append(repr(exc))
talker = threading.Thread(target=talk)
talker.start()
"""
    await run(interpreter, talking)
    for _ in range(40):
        assert (await run(interpreter, "1")).report.ended == "exited"
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert said(await run(interpreter, "quiet.set()\ntalker.join()\nfailed")) == "[]"


async def test_what_is_written_between_steps_comes_with_the_next_one_as_late(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    leaving = """
import asyncio, os, subprocess, threading
go = threading.Event()
def talk():
    go.wait()
    print('thread')
    display('shown')
    open('/workspace/talked', 'w').close()
threading.Thread(target=talk).start()
child = subprocess.Popen('while [ ! -e go ]; do sleep 0.01; done; echo child >&2; touch /workspace/said', shell=True)
async def tick():
    while not os.path.exists('go'):
        await asyncio.sleep(0.01)
    print('task')
    go.set()
task = asyncio.create_task(tick())
print('now')
await asyncio.sleep(0)
"""
    first = (await run(interpreter, leaving)).report
    assert (first.stdout.text, first.late_stdout.total) == ("now\n", 0)
    both = "touch go; while [ ! -e said ] || [ ! -e talked ]; do sleep 0.01; done"
    background = Command(("/bin/sh", "-c", both), reported=False)
    report = await (await box.command(background, nothing)).over()
    assert report.late_stdout.total == 0, "nobody waits for the report of a command in the background"
    seen = await run(interpreter, "print('mine')\ntask.done()")
    assert (said(seen), seen.report.stdout.text) == ("True", "mine\n")
    assert (seen.report.late_stdout.text, seen.report.late_stderr.text) == ("task\nthread\n'shown'\n", "child\n")
    late = seen.report.late
    assert late is not None and (late["stdout_bytes"], late["stderr_bytes"]) == (20, 6)
    again = (await run(interpreter, "threading.active_count()")).report
    assert (again.late_stdout.total, again.late_stderr.total) == (0, 0), "each piece is reported once"


async def test_what_a_command_left_writes_comes_with_the_next_step(box: LiveBox) -> None:
    left = await shell(box, "(while [ ! -e go ]; do sleep 0.01; done; echo left; touch said) & echo first")
    assert left.stdout.text == "first\n"
    seen = await shell(box, "touch go; while [ ! -e said ]; do sleep 0.01; done; echo second")
    assert (seen.stdout.text, seen.late_stdout.text) == ("second\n", "left\n")


async def test_a_limit_that_leftovers_met_between_two_steps_is_theirs_and_not_the_next_steps(
    box: LiveBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = await box.interpreter()
    assert (await run(interpreter, "1")).report.limit is None
    box.box.account.refused = True  # as the supervisor notes it when there was no memory for one of them
    seen = (await run(interpreter, "1")).report
    assert (seen.limit, (seen.late or {}).get("limit")) == (None, "memory")
    monkeypatch.setattr(LiveBox, "out_of_memory", lambda box, killed=[True]: killed and killed.pop())
    seen = (await run(interpreter, "1")).report
    assert (seen.limit, (seen.late or {}).get("limit")) == (None, "memory")
    seen = (await run(interpreter, "1")).report
    assert (seen.limit, seen.late) == (None, None), "it is told once"


async def test_late_output_is_kept_in_bounded_memory_and_pipes(box: LiveBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MAX_LATE", 4)
    for _ in range(4):
        await shell(box, "sleep 600 & echo first")
    assert len(box.late_output._open) == 4
    much = "(while [ ! -e go ]; do sleep 0.01; done; head -c 300000 /dev/zero; touch said) & true"
    await shell(box, much)
    seen = await shell(box, "touch go; while [ ! -e said ]; do sleep 0.01; done", wall_seconds=60)
    assert (seen.late_stdout.total, seen.late_stdout.truncated) == (300_000, True)
    assert len(seen.late_stdout.head) + len(seen.late_stdout.tail) == 64 * 1024


async def test_threads_that_compute_and_print_outlive_the_cells(box: LiveBox) -> None:
    """Each of them keeps the interpreter from what it does at the end of a cell for as long as it may."""
    interpreter = await box.interpreter()
    working = """
import threading
stop = False
def work():
    while not stop:
        for _ in range(200_000): pass
        print('alive', flush=True)
workers = [threading.Thread(target=work) for _ in range(6)]
for each in workers: each.start()
"""
    await run(interpreter, working, wall_seconds=60)
    for _ in range(6):
        assert said(await run(interpreter, "sum(each.is_alive() for each in workers)", wall_seconds=60)) == "6"
        await asyncio.sleep(0.1)
    assert (
        said(await run(interpreter, "stop = True\nfor each in workers: each.join()\n'over'", wall_seconds=60))
        == "'over'"
    )


async def test_pipes_of_steps_that_are_over_are_let_go_of(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    await run(interpreter, "1")
    await tooling.until(lambda: not box.late_output._open)  # pipes of cells are kept until all have let go of them
    before = looking.descriptors()
    for _ in range(30):
        await run(interpreter, "import os; kept = os.dup(1)")
    await tooling.until(lambda: looking.descriptors() <= before + streams._MAX_LATE)
    assert len(box.late_output._open) <= streams._MAX_LATE
    await interpreter.end()
    await tooling.until(lambda: not box.late_output._open)


async def test_steps_that_are_over_are_not_kept(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    for _ in range(2):
        await run(interpreter, "1")
    gc.collect()
    before = sum(isinstance(each, asyncio.Event | Step) for each in gc.get_objects())
    for _ in range(20):
        await run(interpreter, "1")
    gc.collect()
    assert sum(isinstance(each, asyncio.Event | Step) for each in gc.get_objects()) <= before + 1


async def test_output_results_and_errors_come_apart(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    heard: list[tuple[str, bytes]] = []
    shown: list[Shown | Failure] = []
    source = "import sys\nprint('out'); print('err', file=sys.stderr)\ndisplay(1)\n1/0"
    report = await interpreter.run(Cell(source.encode()), lambda s, d: heard.append((s, d)), shown.append)
    assert sorted(heard) == [("stderr", b"err\n"), ("stdout", b"out\n")]
    assert report.report.stdout.text == "out\n"
    assert report.error is not None and report.error.name == "ZeroDivisionError"
    assert [type(each) for each in shown] == [Shown, Failure]
    assert report.report.exit_status == 1


async def test_interpreters_of_one_box_share_files_and_nothing_else(box: LiveBox) -> None:
    one, two = await box.interpreter(), await box.interpreter()
    await run(one, "x = 1; open('/workspace/shared', 'w').write('hello')")
    report = await run(two, "x")
    assert report.error is not None and report.error.name == "NameError"
    assert said(await run(two, "open('/workspace/shared').read()")) == "'hello'"


async def test_a_cell_that_takes_too_long_is_interrupted_and_its_state_stays(
    box: LiveBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "GRACE_SECONDS", tooling.PATIENCE)  # a slow machine needs longer for it
    interpreter = await box.interpreter()
    await run(interpreter, "x = 5")
    report = await run(interpreter, "import time; time.sleep(600)", wall_seconds=0.2)
    assert (report.report.ended, report.report.limit, report.alive) == ("timeout", "wall", True)
    assert said(await run(interpreter, "x")) == "5"


async def test_on_a_slow_machine_a_cell_has_longer_to_be_interrupted(
    box: LiveBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "GRACE_SECONDS", tooling.PATIENCE / 1e6)  # by itself far too short
    interpreter = await box.interpreter()
    await run(interpreter, "x = 5")
    monkeypatch.setattr(MachinePace, "allow", lambda pace, seconds: seconds * 1e6)
    source = "import time\ntry:\n    time.sleep(600)\nfinally:\n    time.sleep(0.2)"
    report = await run(interpreter, source, wall_seconds=0.2)
    assert (report.report.ended, report.alive) == ("timeout", True)
    assert said(await run(interpreter, "x")) == "5"


async def test_a_cell_that_does_not_listen_loses_its_interpreter(box: LiveBox) -> None:
    source = "import signal\nwhile True:\n    try:\n        signal.pause()\n    except KeyboardInterrupt: pass"
    for seconds in tooling.LONGER:  # one that was not yet deaf keeps its interpreter
        interpreter = await box.interpreter()
        report = await run(interpreter, source, wall_seconds=seconds)
        if not report.alive:
            break
    assert (report.report.ended, report.alive) == ("timeout", False)
    with pytest.raises(Unavailable, match="fresh one"):
        await run(interpreter, "1")
    assert said(await run(await box.interpreter(), "1")) == "1"


async def test_an_interrupt_ends_the_cell_alone(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    began = asyncio.Event()
    cell = Cell(b"y = 1\nimport time\nprint(y, flush=True)\ntime.sleep(600)", Limits(wall_seconds=600))
    running = asyncio.create_task(interpreter.run(cell, lambda *_: began.set(), lambda _: None))
    await began.wait()
    assert interpreter.interrupt()
    report = await running
    assert report.error is not None and report.error.name == "KeyboardInterrupt"
    assert said(await run(interpreter, "y")) == "1"
    assert not interpreter.interrupt()


async def test_an_interpreter_that_kills_itself_is_told_of(box: LiveBox) -> None:
    report = await run(await box.interpreter(), "import os; print('bye', flush=True); os._exit(7)")
    assert (report.report.ended, report.report.exit_status, report.alive) == ("exited", 7, False)
    assert report.report.stdout.text == "bye\n"


async def test_memory_is_the_boxs_and_its_files_survive(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    await run(interpreter, "open('/workspace/kept', 'w').write('kept')")
    report = await run(interpreter, "x = [bytearray(10 << 20) for _ in range(60)]")
    assert (report.report.ended, report.report.limit, report.alive) == ("oom", "memory", False)
    assert (await shell(box, "cat /workspace/kept")).stdout.text == "kept"


async def test_files_in_a_volume_are_disk_and_no_memory(backend: ProcessBackend) -> None:
    limits = Limits(memory_bytes=64 * MIB, disk_bytes=32 * MIB)
    box = await backend.open(StaySpec(limits, folders=(Folder("/workspace/v", 256 * MIB),)))
    interpreter = await box.interpreter()
    fills = "for n in range(4):\n    with open(f'/workspace/v/{n}', 'wb') as file: file.write(bytes(30 << 20))"
    for source in (fills, "import time; time.sleep(0.05)"):
        report = (await run(interpreter, source)).report
        assert (report.ended, report.exit_status, report.limit) == ("exited", 0, None)
    much = (await run(interpreter, "x = [bytearray(10 << 20) for _ in range(20)]")).report
    assert (much.ended, much.limit) == ("oom", "memory"), "what is in the volume makes no room for memory"
    assert (await shell(box, "ls /workspace/v")).stdout.text == "0\n1\n2\n3\n"


async def test_a_peak_that_was_given_back_is_counted_for_its_cell(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    peak = (await run(interpreter, "x = b'x' * (100 << 20)\ndel x")).report.usage.peak_memory_bytes
    assert peak is not None and peak >= 100 * MIB
    later = (await run(interpreter, "import time; time.sleep(0.05)")).report.usage.peak_memory_bytes
    assert later is None or later < 100 * MIB


async def test_a_template_is_what_sessions_begin_with(tmp_path: Path) -> None:
    given = tmp_path / "rates.csv"
    given.write_text("a,b")
    setup = SetUp("import math\nrates = {'x': math.pi}", {"REGION": "north"}, {"rates.csv": str(given)})
    backend = ProcessBackend(depth=0, templates={"python": (), "rates": ()}, setups={"rates": setup})
    try:
        box = await backend.open(StaySpec(template="rates"))
        source = "import os\n(round(rates['x'], 2), os.environ['REGION'], open('/workspace/input/rates.csv').read())"
        assert said(await run(await box.interpreter(), source)) == "(3.14, 'north', 'a,b')"
        other = await backend.open(StaySpec(template="rates"))
        await run(await box.interpreter(), "rates['x'] = 0")
        assert said(await run(await other.interpreter(), "round(rates['x'], 2)")) == "3.14"
        plain = await run(await (await backend.open(StaySpec())).interpreter(), "rates")
        assert plain.error is not None and plain.error.name == "NameError"
    finally:
        await backend.close()


async def test_a_template_whose_set_up_fails_makes_no_box() -> None:
    backend = ProcessBackend(depth=0, templates={"python": (), "bad": ()}, setups={"bad": SetUp("1/0")})
    try:
        with pytest.raises(Unavailable, match="ZeroDivisionError"):
            await backend.open(StaySpec(template="bad"))
    finally:
        await backend.close()


async def test_every_later_process_is_confined_like_the_first(box: LiveBox) -> None:
    look = (
        "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status; id -u; readlink /proc/self/ns/user /proc/self/ns/net"
    )
    first, later = await shell(box, look), await shell(box, look)
    assert first.stdout.text == later.stdout.text
    assert "Seccomp:\t2" in later.stdout.text and "NoNewPrivs:\t1" in later.stdout.text
    assert later.stdout.text.count("0000000000000000") == 5
    assert os.readlink("/proc/self/ns/user") not in later.stdout.text
    assert (await shell(box, "mount -t tmpfs x /tmp")).exit_status != 0


async def test_refused_calls_are_counted_for_the_step_that_made_them(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    source = "import ctypes\nctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0)"
    assert (await run(interpreter, source)).report.denials == {"ptrace": 1}
    assert (await run(interpreter, "1")).report.denials == {}


async def test_new_files_of_a_step_are_its_facts(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    first = await run(interpreter, "import os; os.mkdir('output'); open('/workspace/output/a', 'w').write('1')")
    second = await run(interpreter, "open('/workspace/output/b', 'w').write('2')")
    third = await run(interpreter, "1")
    assert [[fact.path for fact in each.report.files] for each in (first, second, third)] == [
        ["/workspace/output/a"],
        ["/workspace/output/b"],
        [],
    ]


async def test_large_files_of_a_step_are_read_beside_the_event_loop_however_little_of_them_is_on_disk(
    box: LiveBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def watched(*given: Any, **more: Any) -> Any:
        readers.append(threading.current_thread())
        return collect(*given, **more)

    collect = collecting.collect
    monkeypatch.setattr(collecting, "collect", watched)
    interpreter = await box.interpreter()
    source = "import os\nos.makedirs('output', exist_ok=True)\n"
    source += "os.truncate(os.open('/workspace/output/{}', os.O_CREAT | os.O_WRONLY), 5_000_000)"
    first = await run(interpreter, source.format("x"))
    second = await shell(box, f'python3 -c "{source.format("y")}"')
    third = await run(interpreter, "pass")
    assert [[file.path[-1] for file in each] for each in (first.report.files, second.files)] == [["x"], ["y"]]
    assert third.report.files == () and readers and threading.main_thread() not in readers


async def test_what_is_paused_stands_still_and_its_clock_too(box: LiveBox) -> None:
    """For longer than it might run. What it does besides takes a slow machine long: then it may run for longer."""
    interpreter = await box.interpreter()
    source = "import os, time\nwhile not os.path.exists('enough'):\n"
    source += "    open('/workspace/beat', 'a').write('.'); time.sleep(0.05)\n'done'"

    def beats() -> int:
        return os.stat("beat", dir_fd=box.workspace).st_size if os.access("beat", os.F_OK, dir_fd=box.workspace) else 0

    async def paused(seconds: float) -> CellReport:
        before, running = beats(), asyncio.create_task(run(interpreter, source, wall_seconds=seconds))
        await tooling.until(lambda: beats() > before or running.done())
        await box.pause()
        await asyncio.sleep(0.3)
        seen = beats()
        await asyncio.sleep(seconds + 0.2)
        assert beats() == seen
        await box.resume()
        await shell(box, "touch /workspace/enough")
        return await running

    for seconds in (2.0, 20.0, 60.0):
        report = await paused(seconds)
        if report.report.ended == "exited":
            break
        await shell(box, "rm /workspace/enough")
    assert (report.report.ended, said(report)) == ("exited", "'done'")


async def test_files_that_we_put_into_a_workspace_make_no_room_for_memory(box: LiveBox) -> None:
    if box.box.group is None or box.box.group.usage() is None:
        pytest.skip("no control group counts memory here")
    interpreter = await box.interpreter()
    await run(interpreter, "held = bytes(60_000_000); held = bytearray(held)")
    held = box.memory()
    assert held > 60_000_000
    await shell(box, "touch /workspace/ours; chmod 666 /workspace/ours")
    file = os.open("ours", os.O_WRONLY, dir_fd=box.workspace)
    try:
        os.write(file, bytes(80_000_000))
        assert box.memory() > 60_000_000
    finally:
        os.close(file)


async def test_a_file_that_is_changed_through_a_mapping_is_seen(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    source = "import mmap, os\nos.mkdir('output')\n"
    source += "file = open('/workspace/output/a', 'w+b'); file.write(b'harmless'); file.flush()\n"
    first = await run(interpreter, source + "view = mmap.mmap(file.fileno(), 8); view[:8] = b'harmless'")
    second = await run(interpreter, "view[:8] = b'HARMFUL!'")
    third = await run(interpreter, "pass")
    assert [len(report.report.files) for report in (first, second, third)] == [1, 1, 0]
    assert first.report.files[0].sha256 != second.report.files[0].sha256


CONTINUED_BY_A_TIMER = """
import ctypes, signal
libc = ctypes.CDLL(None)
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int),
                ("rest", ctypes.c_char * 48)]
signal.signal(signal.SIGCONT, lambda *_: None)
failed = 0
for number in range(20):  # one whose signal waits at the moment of the stop does not come again
    timer, event = ctypes.c_void_p(), Event(None, signal.SIGCONT, 0)
    failed += libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer))
    nanoseconds = 20_000_000 + number * 3_000_000
    failed += libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, nanoseconds, 0, nanoseconds), None)
failed
"""


async def test_without_a_freezer_a_box_that_goes_on_in_a_pause_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Cgroups({}, dict.fromkeys(("memory", "pids", "cpu", "freezer"), "none here"), Cgroups.detect()._owner)
    monkeypatch.setattr(Cgroups, "detect", lambda **_: nowhere)
    backend = ProcessBackend(depth=0)
    try:
        still = await backend.open(StaySpec())
        going = await backend.open(StaySpec())
        await run(
            await still.interpreter(), "import threading; threading.Thread(target=threading.Event().wait).start()"
        )
        assert said(await run(await going.interpreter(), CONTINUED_BY_A_TIMER)) == "0"
        await still.pause()
        await going.pause()
        async with asyncio.timeout(tooling.PATIENCE):
            assert "went on while it was paused" in await going.ended()
        await still.resume()
        assert said(await run(await still.interpreter(), "1 + 1")) == "2"
    finally:
        await backend.close()


async def test_a_session_paused_and_resumed_fifty_times_has_all_it_had(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    await run(interpreter, "x = []")
    for number in range(50):
        await box.pause()
        await box.resume()
        await run(interpreter, f"x.append({number}); open('/workspace/n{number}', 'w').close()")
    assert said(await run(interpreter, "import glob\n(sum(x), len(glob.glob('/workspace/n*')))")) == "(1225, 50)"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (Command(("echo", *["x" * 100_000] * 21)), "longer than 2097152 bytes together"),
        (Command(("env",), env={f"A{n}": "x" * 100_000 for n in range(21)}), "longer than 2097152 bytes together"),
        (Command(("echo", "a\0b")), "contains a NUL character"),
        (Command(("env",), env={"A=B": "x"}), "empty or contains ="),
    ],
)
async def test_words_that_no_program_can_be_started_with(box: LiveBox, command: Command, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        await box.command(command, nothing)
    assert (await shell(box, "echo on")).stdout.text == "on\n"


async def test_time_of_children_counts_though_no_look_saw_it(box: LiveBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "cpu_ms", lambda _: None)
    monkeypatch.setattr(LiveBox, "cpu_ms", lambda _: 0.0)
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    report = await shell(box, f'python3 -c "{burn}"')
    assert report.usage.cpu_ms is not None and report.usage.cpu_ms > 250


async def test_many_long_words_reach_a_command(box: LiveBox) -> None:
    script = "for word; do n=$((n + ${#word})); done; echo $# $n ${#A} ${#B}; cat"
    words = ["x" * 100_000] * 18
    command = Command(("/bin/sh", "-c", script, "sh", *words), env={"A": "a" * 100_000, "B": "b" * 20_000}, stdin=b"in")
    report = await (await box.command(command, nothing)).over()
    assert report.stdout.text == "18 1800000 100000 20000\nin", report.stderr.text


async def test_a_session_has_nothing_to_read_and_can_open_it_by_name(box: LiveBox) -> None:
    report = await run(await box.interpreter(), "open('/dev/stdin').read(), open('/dev/fd/0', 'rb').read()")
    assert said(report) == "('', b'')"
    assert (await shell(box, "cat /dev/stdin && echo read")).stdout.text == "read\n"


async def test_a_command_takes_input_as_it_comes(box: LiveBox) -> None:
    heard: list[bytes] = []
    running = await box.command(Command(("cat",), stdin=None), lambda _, data: heard.append(data))
    running.send(b"one\n")
    await tooling.until(lambda: b"".join(heard) == b"one\n")
    running.send(b"two\n")
    running.close_input()
    report = await running.over()
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 0, "one\ntwo\n")


async def test_a_command_can_have_a_terminal(box: LiveBox) -> None:
    running = await box.command(Command(("/bin/sh", "-c", "test -t 0 && stty size"), pty=(91, 33)), nothing)
    assert (await running.over()).stdout.text.strip() == "33 91"


async def test_the_keys_of_a_terminal_reach_what_runs_in_it(box: LiveBox) -> None:
    began = asyncio.Event()
    command = Command(("/bin/sh", "-c", "echo up; sleep 600; echo on"), pty=(80, 24))
    running = await box.command(command, lambda *_: began.set())
    await began.wait()
    over = asyncio.ensure_future(running.over())
    while not over.done():  # one that comes while the shell is just starting `sleep` is lost in the shell
        with contextlib.suppress(Unavailable):
            running.send(b"\x03")
        await asyncio.wait({over}, timeout=0.5)
    report = over.result()
    assert (report.ended, report.signal) == ("signalled", 2)
    assert "on" not in report.stdout.text


async def test_a_command_is_stopped_by_its_clock_with_what_it_started(box: LiveBox) -> None:
    report = await shell(box, "sleep 600 & sleep 600", wall_seconds=0.2)
    assert (report.ended, report.limit) == ("timeout", "wall")
    async with asyncio.timeout(tooling.PATIENCE):
        while (await shell(box, "ps ax | grep -c '[s]leep 600' || true")).stdout.text.strip() not in ("0", ""):
            await asyncio.sleep(0.1)


async def test_a_guest_that_lies_harms_nobody_else(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    report = await run(
        interpreter, "import os\nfor fd in range(3, 200):\n    try: os.write(fd, b'garbage')\n    except OSError: pass"
    )
    assert report.report.ended in ("policy", "exited", "signalled") and (report.broken or report.alive)
    assert said(await run(await box.interpreter(), "1 + 1")) == "2"


@pytest.mark.parametrize("above", range(96, 106))
async def test_how_many_descriptors_the_supervisor_has_is_nothing_to_a_box(above: int) -> None:
    """A zygote is given its descriptors with numbers that are free here, and moves some to fixed places."""
    filled: list[int] = []
    while not filled or filled[-1] < above:
        filled.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    backend = ProcessBackend(depth=0)
    try:
        box = await backend.open(StaySpec())
        assert said(await run(await box.interpreter(), "1 + 1")) == "2"
    finally:
        await backend.close()
        for descriptor in filled:
            os.close(descriptor)


async def test_how_many_boxes_a_zygote_holds_is_nothing_to_the_next(backend: ProcessBackend) -> None:
    """It keeps a descriptor for each, so that those of the next have numbers that grow."""
    limits = Limits(memory_bytes=64 * MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip(f"240 boxes need more than {hard} descriptors (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as whoever keeps sessions does
    boxes: list[LiveBox] = []
    try:
        for _ in range(240):
            boxes.append(await backend.open(StaySpec(limits)))
        for box in boxes[70::10]:
            assert said(await run(await box.interpreter(), "1 + 1")) == "2"
    finally:
        await asyncio.gather(*(box.end() for box in boxes))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_the_end_of_a_box_ends_everything_in_it(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec(Limits(memory_bytes=64 * MIB)))
    await box.interpreter()
    running = await box.command(Command(("sleep", "600"), Limits(wall_seconds=600)), nothing)
    inside = [each for zygote in looking.zygotes() for each in looking.descendants(zygote)[1:]]
    assert len(inside) >= 3
    before = looking.descriptors()
    await box.end()
    tooling.wait_until(looking.all_gone(inside))
    assert (await running.over()).ended == "cancelled"
    await tooling.until(lambda: looking.descriptors() < before)


async def test_boxes_that_stay_leak_nothing() -> None:
    before = looking.groups(os.getpid())
    backend = ProcessBackend(depth=0)

    @asynccontextmanager
    async def stay() -> AsyncIterator[LiveBox]:
        box = await backend.open(StaySpec())
        yield box
        await box.end()

    try:
        for round_ in range(12):
            async with stay() as box:
                interpreter = await box.interpreter()
                await run(interpreter, "1")
                await shell(box, "true")
                await run(await box.interpreter(), "import os; os._exit(1)")
            await asyncio.sleep(0.1)  # pipes of cells are kept for a moment
            if round_ == 3:
                counted = looking.descriptors(), len(looking.groups(os.getpid()))
        await tooling.until(lambda: looking.descriptors() <= counted[0])
        await tooling.until(lambda: len(looking.groups(os.getpid())) <= counted[1])
    finally:
        await backend.close()
    assert looking.groups(os.getpid()) <= before  # what ends too slowly is swept at the next start


# ── Could it act before its next step? ──

_LATER = {
    "a timer": "import signal\nsignal.signal(signal.SIGALRM, print)\nsignal.setitimer(signal.ITIMER_REAL, 6000)",
    "a timer that interrupts": """
import ctypes
event = (ctypes.c_int * 16)()
event[2] = 2  # SIGINT, in a sigevent after its value
made = ctypes.c_void_p()
assert ctypes.CDLL(None).timer_create(0, event, ctypes.byref(made)) == 0
""",
    "a deadline for its orders": """
import os, socket, struct
for name in os.listdir('/proc/self/fd'):
    try:
        found = socket.socket(fileno=os.dup(int(name)))
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 6000, 0))
    except OSError:
        pass
""",
    "a file that signals": """
import fcntl, os, socket
one, other = socket.socketpair()
fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC)
""",
}


@pytest.mark.parametrize("source", _LATER.values(), ids=_LATER)
async def test_an_interpreter_that_can_act_without_an_order_runs_on(box: LiveBox, source: str) -> None:
    assert not box.runs_on()
    interpreter = await box.interpreter()
    await run(interpreter, "x = 1")
    assert not box.runs_on()
    main = interpreters.MainThread(interpreter._member.pid)
    try:
        main._read("syscall")
    except PermissionError:
        if "setitimer" not in source:
            pytest.skip("the kernel shows us nothing but its signals")
    finally:
        main.close()
    report = await run(interpreter, source)
    assert report.error is None, report.error
    assert box.runs_on()
