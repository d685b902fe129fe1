"""Guests that stay: interpreters, commands and terminals in a container, and what the reports of their steps say."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BoxReport, Input, Limits
from ringfence.core.errors import SetUpFailed, Unavailable
from ringfence.core.sessions import Cell, CellReport, Command, Failure, StaySpec, discard_output, discard_value
from ringfence.sandbox.guests import interpreter as guest_interpreter
from ringfence.sandbox.guests import oci, step
from ringfence.sandbox.guests.backend import GuestBackend
from ringfence.sandbox.guests.interpreter import GuestInterpreter
from ringfence.sandbox.guests.link import GuestOrder
from ringfence.sandbox.guests.staying import StayingGuest
from ringfence.sandbox.process.host.capabilities import read_back
from tests import tooling

pytestmark = pytest.mark.anyio
act = GuestOrder.act


@pytest.fixture(scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestBackend]:
    made = make_backend(SandboxSettings(backend="oci"), tmp_path_factory.mktemp("state"))
    assert isinstance(made, GuestBackend)
    try:
        await (await made.open(StaySpec())).end()
    except Unavailable as exc:
        await made.close()
        pytest.skip(str(exc))
    yield made
    await made.close()


@pytest.fixture
async def box(backend: GuestBackend) -> AsyncIterator[StayingGuest]:
    made = await backend.open(StaySpec(env={"A": "1"}))
    yield made
    await made.end()


async def cell(interpreter: GuestInterpreter, source: str, **how: Any) -> CellReport:
    return await interpreter.run(Cell(source.encode(), **how), discard_output, discard_value)


async def value(interpreter: GuestInterpreter, source: str, **how: Any) -> str:
    report = await cell(interpreter, source, **how)
    assert report.error is None, report.error
    return report.results[-1].data["text/plain"]


async def command(box: StayingGuest, *argv: str, **how: Any) -> BoxReport:
    return await (await box.command(Command(argv, **how), discard_output)).over()


async def shell(box: StayingGuest, line: str, **how: Any) -> BoxReport:
    return await command(box, "sh", "-c", line, **how)


# ── Interpreters ──


async def test_an_interpreter_keeps_its_state_and_each_cell_has_its_own_output(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    first = await cell(interpreter, "import sys\nx = 20\nprint('one')\nprint('two', file=sys.stderr)\nx")
    assert (first.report.ended, first.report.exit_status) == ("exited", 0)
    assert (first.report.stdout.text, first.report.stderr.text) == ("one\n", "two\n")
    assert [shown.data["text/plain"] for shown in first.results] == ["20"]
    second = await cell(interpreter, "x + 1")
    assert (second.results[-1].data["text/plain"], second.report.stdout.text) == ("21", "")
    assert second.report.usage.peak_memory_bytes and second.report.late is None
    assert await value(interpreter, "import asyncio\nawait asyncio.sleep(0, 7)") == "7"
    assert await value(interpreter, f"#{'-' * 100_000}\nlen('long')") == "4"
    other = await box.interpreter()
    assert await value(other, "'x' in globals()") == "False"


async def test_an_error_is_told_and_nothing_of_ours_is_in_its_traceback(box: StayingGuest) -> None:
    report = await cell(await box.interpreter(), "def f(): return 1 / 0\nf()")
    assert isinstance(report.error, Failure) and report.error.name == "ZeroDivisionError"
    assert '"<cell 1>", line 1, in f' in report.error.traceback and "repl" not in report.error.traceback
    assert (report.report.ended, report.report.exit_status, report.alive) == ("exited", 1, True)


async def test_values_and_output_come_while_the_cell_runs(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    heard: list[object] = []
    come = asyncio.Event()

    def tell(stream: str, data: bytes) -> None:
        heard.append(data)
        come.set()

    source = (
        "import os, time\nprint('here')\nwhile not os.path.exists('/workspace/go'): time.sleep(0.01)\ndisplay('there')"
    )
    running = asyncio.ensure_future(interpreter.run(Cell(source.encode()), tell, heard.append))
    await come.wait()
    assert heard == [b"here\n"] and not running.done()
    await shell(box, "touch /workspace/go")
    await running
    assert len(heard) == 2


async def test_a_cell_that_takes_too_long_is_interrupted_and_variables_stay(
    box: StayingGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_interpreter, "GRACE_SECONDS", tooling.PATIENCE)
    interpreter = await box.interpreter()
    await cell(interpreter, "x = 5\nimport time")
    report = await cell(interpreter, "time.sleep(1000)", limits=Limits(wall_seconds=0.3))
    assert (report.report.ended, report.report.limit, report.alive) == ("timeout", "wall", True)
    running = asyncio.ensure_future(cell(interpreter, "open('/workspace/up', 'w').close(); time.sleep(1000)"))
    assert (await shell(box, "until [ -e /workspace/up ]; do sleep 0.02; done")).exit_status == 0
    assert interpreter.interrupt()
    error = (await running).error
    assert error is not None and error.name == "KeyboardInterrupt"
    assert await value(interpreter, "x") == "5" and not interpreter.interrupt()


async def test_a_cell_that_does_not_let_go_loses_its_interpreter_and_the_box_stays(
    box: StayingGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_interpreter, "GRACE_SECONDS", 0.1)
    interpreter = await box.interpreter()
    source = "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass"
    report = await cell(interpreter, source, limits=Limits(wall_seconds=0.3))
    assert (report.report.ended, report.alive, report.report.signal) == ("timeout", False, signal.SIGKILL)
    with pytest.raises(Unavailable, match="the interpreter is gone"):
        await cell(interpreter, "1")
    assert await value(await box.interpreter(), "1 + 1") == "2"


@pytest.mark.parametrize("what", ["cell", "command"])
async def test_a_box_whose_agent_ends_nothing_is_ended(
    box: StayingGuest, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    interpreter = await box.interpreter()
    monkeypatch.setattr(guest_interpreter, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(step, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(GuestOrder, "kill", lambda order: None)
    monkeypatch.setattr(GuestOrder, "act", lambda order, told: act(order, told) if "cell" in told else None)
    limits = Limits(wall_seconds=0.3)
    if what == "cell":
        report = (await cell(interpreter, "import time\ntime.sleep(1000)", limits=limits)).report
    else:
        report = await command(box, "sleep", "1000", limits=limits)
    assert (report.ended, report.limit) == ("timeout", "wall")
    await box.ended()


async def test_a_box_whose_agent_does_not_let_it_go_on_is_ended(
    box: StayingGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.pause()

    async def ordered(what: str) -> None:
        raise Unavailable("guest_failed", "no answer")

    monkeypatch.setattr(box, "_ordered", ordered)
    with pytest.raises(Unavailable, match="no answer"):
        await box.resume()
    await box.ended()


async def test_a_box_without_a_filter_runs_nothing(backend: GuestBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "read_back", lambda pid: {**read_back(pid), "seccomp": False})
    with pytest.raises(Unavailable, match="its protection seccomp is not on"):
        await backend.open(StaySpec())


async def test_an_interpreter_that_dies_is_told_of(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    report = await cell(interpreter, "print('last words', flush=True)\nimport os\nos.kill(os.getpid(), 15)")
    assert (report.report.ended, report.report.signal, report.alive) == ("signalled", signal.SIGTERM, False)
    assert report.report.stdout.text == "last words\n"


async def test_claims_that_are_none_end_the_interpreter(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    source = """
import os, socket
for number in range(3, 64):
    try: channel = socket.socket(fileno=os.dup(number))
    except OSError: continue
    channel.send(b"nonsense")
"""
    report = await cell(interpreter, source)
    assert report.broken and (report.report.ended, report.alive) == ("policy", False)


async def test_set_up_code_runs_in_each_interpreter_and_its_failure_is_told(backend: GuestBackend) -> None:
    box = await backend.open(StaySpec(setup="x = 6"))
    assert await value(await box.interpreter(), "x") == "6"
    assert box.isolation["template"] == {"setup": "user", "started": "exec"}
    await box.end()
    box = await backend.open(StaySpec(setup="1 / 0"))
    with pytest.raises(SetUpFailed, match="ZeroDivisionError"):
        await box.interpreter()
    await box.end()


# ── Commands ──


async def test_commands_end_as_they_do_and_have_the_environment(box: StayingGuest) -> None:
    report = await shell(box, "echo $A $B; pwd; exit 3", env={"B": "2"}, cwd="/tmp")
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 3, "1 2\n/tmp\n")
    assert (await command(box, "cat", stdin=b"given")).stdout.text == "given"
    assert (await command(box, "/nonexistent")).exit_status == 127
    report = await shell(box, "kill -TERM $$")
    assert (report.ended, report.signal) == ("signalled", signal.SIGTERM)
    report = await command(box, "a", source=b"import sys; print(sys.argv)")
    assert report.stdout.text == "['-c', 'a']\n"
    report = await shell(box, "sleep 1000", limits=Limits(wall_seconds=0.3))
    assert (report.ended, report.limit) == ("timeout", "wall")


async def test_input_can_be_sent_until_it_is_closed(box: StayingGuest) -> None:
    running = await box.command(Command(("cat",), stdin=None), discard_output)
    assert running.send(b"one\n") == 4
    running.close_input()
    report = await running.over()
    assert (report.exit_status, report.stdout.text) == (0, "one\n")
    with pytest.raises(Unavailable, match="takes no input"):
        running.send(b"more")


async def test_a_terminal_has_a_size_that_can_change_and_its_jobs_end_with_it(box: StayingGuest) -> None:
    source = b"""
import os, signal
signal.signal(signal.SIGWINCH, lambda *_: print(*os.get_terminal_size(), flush=True))
print(*os.get_terminal_size(), flush=True)
signal.pause()
"""
    come: asyncio.Queue[bytes] = asyncio.Queue()

    def tell(stream: str, data: bytes) -> None:
        come.put_nowait(data)

    running = await box.command(Command((), source=source, pty=(100, 30)), tell)
    assert (await come.get()).strip() == b"100 30"
    assert running.resize(132, 43)
    assert (await come.get()).strip() == b"132 43"
    await running.over()


async def test_a_command_goes_on_beside_cells_and_can_be_signalled(box: StayingGuest) -> None:
    running = await box.command(Command(("sleep", "1000")), discard_output)
    assert await value(await box.interpreter(), "1") == "1"
    running.signal(signal.SIGTERM)
    assert (await running.over()).signal == signal.SIGTERM


# ── What reports say ──


async def test_files_that_are_new_or_changed_are_named_once(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    report = await cell(
        interpreter,
        "import os\nos.mkdir('output')\nopen('output/a', 'w').write('one')\nos.symlink('a', 'output/l')",
    )
    assert [(fact.path, fact.bytes) for fact in report.report.files] == [("/workspace/output/a", 3)]
    assert report.report.skipped == {"/workspace/output/l": "it is a symbolic link"}
    assert (await cell(interpreter, "1")).report.files == ()
    changed = await shell(
        box, "echo two > /workspace/output/a; mkdir /workspace/output/d; echo > /workspace/output/d/b"
    )
    assert [fact.path for fact in changed.files] == ["/workspace/output/a", "/workspace/output/d/b"]


async def test_a_file_that_is_changed_through_memory_is_named(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    source = """
import mmap, os
os.mkdir("output")
f = open("output/m", "w+b")
f.truncate(4096)
m = mmap.mmap(f.fileno(), 4096)
"""
    assert len((await cell(interpreter, source)).report.files) == 1
    assert len((await cell(interpreter, "m[0] = 7")).report.files) == 1
    assert (await cell(interpreter, "1")).report.files == ()


async def test_what_is_left_running_is_late_work(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    line = "until [ -e /workspace/go ]; do sleep 0.02; done; echo late; touch /workspace/went; sleep 1000"
    await cell(interpreter, f"import subprocess\nleft = subprocess.Popen(['sh', '-c', {line!r}])")
    assert box.runs_on()
    report = await shell(box, "touch /workspace/go; until [ -e /workspace/went ]; do sleep 0.02; done")
    assert report.late is not None and report.late["tasks"] >= 1
    report = await shell(box, "true") if report.late_stdout.text == "" else report
    assert report.late_stdout.text == "late\n"


async def test_too_much_memory_and_too_much_output_end_the_step_and_not_the_box(backend: GuestBackend) -> None:
    box = await backend.open(StaySpec(Limits(memory_bytes=100_000_000)))
    report = await cell(await box.interpreter(), "x = bytearray(300_000_000)")
    assert (report.report.ended, report.report.limit, report.alive) == ("oom", "memory", False)
    report = await cell(await box.interpreter(), "while True: print('x' * 10_000)", limits=Limits(output_bytes=100_000))
    assert (report.report.ended, report.report.limit) == ("output", "output")
    assert (await shell(box, "echo still here")).stdout.text == "still here\n"
    await box.end()


async def test_refused_calls_are_those_of_the_step_that_made_them(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    source = "import ctypes\nctypes.CDLL(None).unshare(0x10000000)"
    assert (await cell(interpreter, source)).report.denials == {"unshare": 1}
    assert (await cell(interpreter, "1")).report.denials == {}


# ── A pause, ports, and the end ──


async def test_nothing_runs_in_a_pause_and_the_clock_stands_still(box: StayingGuest) -> None:
    interpreter = await box.interpreter()
    source = """
import os
open("/workspace/up", "w").close()
n = 0
while not os.path.exists("/workspace/enough"): n += 1
"done"
"""
    running = asyncio.ensure_future(cell(interpreter, source, limits=Limits(wall_seconds=tooling.PATIENCE)))
    await shell(box, "until [ -e /workspace/up ]; do sleep 0.02; done")
    await box.pause()
    before = box.cpu_ms()
    await asyncio.sleep(0.3)
    assert box.cpu_ms() - before < 5
    async with box.awake():  # its agent answers, and the program stands still all the same
        assert (await box.link.open({"do": "write", "path": "/workspace/enough"}).result) == {"status": 0}
    assert not running.done()
    await box.resume()
    assert (await running).results[-1].data["text/plain"] == "'done'"


async def test_what_was_stopped_before_a_pause_is_stopped_after_it(box: StayingGuest) -> None:
    running = await box.command(Command(("sh", "-c", "kill -STOP $$; echo on")), discard_output)
    assert (await shell(box, "until grep -q ') T' /proc/[0-9]*/stat; do sleep 0.02; done")).exit_status == 0
    await box.pause()
    await box.resume()
    assert (await shell(box, "grep -l ') T' /proc/[0-9]*/stat")).exit_status == 0
    running.signal(signal.SIGCONT)
    assert (await running.over()).stdout.text == "on\n"


async def test_a_port_of_the_box_can_be_connected_to(box: StayingGuest) -> None:
    server = """
import socket
listening = socket.create_server(("127.0.0.1", 8000))
print("up", flush=True)
taken, _ = listening.accept()
data = b""
while piece := taken.recv(65536): data += piece
taken.sendall(data[::-1])
"""
    up = asyncio.Event()
    running = await box.command(Command((), source=server.encode()), lambda stream, data: up.set())
    with pytest.raises(ConnectionRefusedError):
        await box.connect(8001)
    await up.wait()
    reader, writer = await asyncio.open_connection(sock=await box.connect(8000))
    writer.write(b"ab" * 500_000)
    writer.write_eof()
    assert await reader.read() == b"ba" * 500_000
    writer.close()
    assert (await running.over()).exit_status == 0


async def test_inputs_are_there_and_read_only(backend: GuestBackend, tmp_path: Path) -> None:
    box = await backend.open(StaySpec(inputs=(Input("in.txt", b"given"),)))
    assert (await shell(box, "cat input/in.txt; echo > input/in.txt")).stdout.text == "given"
    assert (await shell(box, "echo > input/new")).exit_status != 0
    await box.end()


async def test_a_box_that_dies_says_so_and_its_steps_are_over(box: StayingGuest) -> None:
    running = await box.command(Command(("sleep", "1000")), discard_output)
    box.guest.kill()
    assert (await running.over()).ended == "infra"
    await box.ended()
    with pytest.raises(Unavailable):
        await box.interpreter()
