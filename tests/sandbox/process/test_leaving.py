"""A program that is through is not waited for until the kernel has taken it apart; unless something else still runs."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.box import BoxReport, BoxSpec, Limits, Program
from ringfence.sandbox.process import kernel
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.cgroup import Group
from ringfence.sandbox.process.run import Run
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio

LEAVE = f"import ctypes; ctypes.CDLL(None).syscall({kernel.NUMBERS.get('exit_group', 0)}, %d, {kernel.LEAVING})"


@pytest.fixture
async def backend() -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend(depth=0)
    yield made
    await made.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each run was."""
    seen: list[bool] = []
    to_the_end = Run.to_the_end

    async def run(self: Run) -> BoxReport:
        report = await to_the_end(self)
        seen.append(self.held)
        return report

    monkeypatch.setattr(Run, "to_the_end", run)
    return seen


async def run(backend: ProcessBackend, source: str, output: Path | None = None) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source=source.encode()), output=output))


async def test_all_that_is_to_be_known_is_known(backend: ProcessBackend, held: list[bool], tmp_path: Path) -> None:
    source = """
import os, sys
print("x" * 200_000)
print("bad", file=sys.stderr)
open("/workspace/output/made", "w").write("all")
sum(range(3_000_000))
sys.exit(7)
"""
    report = await run(backend, source, tmp_path)
    assert held[-1]
    assert (report.ended, report.exit_status, report.signal, report.limit) == ("exited", 7, None, None)
    assert report.stdout.total == 200_001 and report.stderr.text == "bad\n"
    assert [file.path for file in report.files] == ["/workspace/output/made"]
    assert (tmp_path / "made").read_text() == "all"
    assert (report.usage.cpu_ms or 0) > 5 and (report.usage.peak_memory_bytes or 0) > 5_000_000
    assert report.trouble == ()


async def test_without_a_group_that_counts_the_same_is_known(
    backend: ProcessBackend, held: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "tasks", lambda self: None)
    monkeypatch.setattr(Group, "cpu_ms", lambda self: None)
    report = await run(backend, "sum(range(3_000_000))")
    assert held[-1] and report.exit_status == 0 and (report.usage.cpu_ms or 0) > 5
    await run(backend, "import os; os.fork() or os._exit(0); os.wait()")
    assert not held[-1], "what its child used only the reaper knows"
    await run(backend, "import os, time\nif os.fork() == 0: time.sleep(60)")
    assert not held[-1], "it has a child"
    orphaned = "import os, time\nif os.fork() == 0:\n if os.fork() == 0: time.sleep(60)\n os._exit(0)\nos.wait()"
    await run(backend, orphaned)
    assert not held[-1], "it had one, and that has one still"
    await run(backend, "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    assert not held[-1], "it has another thread"


@pytest.mark.parametrize(
    "source",
    [
        "import os, time\nif os.fork() == 0: time.sleep(60)",
        "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ],
)
async def test_where_something_else_still_runs_its_end_is_awaited(
    backend: ProcessBackend, held: list[bool], source: str
) -> None:
    report = await run(backend, source + "\nprint('through')")
    assert not held[-1]
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 0, "through\n")


async def test_who_says_so_itself_is_through(backend: ProcessBackend, held: list[bool]) -> None:
    report = await run(backend, f"print('said', flush=True)\n{LEAVE % 5}\nprint('never')")
    assert held[-1]
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 5, "said\n")


async def test_a_child_that_says_so_is_no_program(backend: ProcessBackend, held: list[bool]) -> None:
    source = f"""
import os
pid = os.fork()
if pid == 0:
    {LEAVE % 3}
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    report = await run(backend, source)
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 0, "3\n")


async def test_a_thread_that_says_so_ends_the_program(backend: ProcessBackend, held: list[bool]) -> None:
    source = f"""
import threading, time
def leave():
    {LEAVE % 4}
threading.Thread(target=leave).start()
time.sleep(60)
"""
    report = await run(backend, source)
    assert not held[-1]
    assert (report.ended, report.exit_status) == ("exited", 4)


async def test_no_handler_runs_once_a_program_is_through(backend: ProcessBackend, tmp_path: Path) -> None:
    """A timer goes off a thousand times a second; what its handler would write would be found."""
    source = f"""
import signal, os, ctypes
ctypes.CDLL(None)
at = os.open("/workspace/output/written", os.O_CREAT | os.O_WRONLY)
signal.signal(signal.SIGALRM, lambda *_: os.write(at, b"x"))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
{LEAVE % 0}
"""
    for _ in range(10):
        report = await run(backend, source, tmp_path)
        assert report.ended == "exited"
        assert [file.bytes for file in report.files] == [(tmp_path / "written").stat().st_size]


async def test_too_much_output_is_no_end_of_its_own(backend: ProcessBackend) -> None:
    report = await backend.run(BoxSpec(Program("python", source=b"print('x' * 9000)"), Limits(output_bytes=1000)))
    assert (report.ended, report.limit) == ("output", "output")


async def test_its_box_is_gone_a_moment_later(backend: ProcessBackend, held: list[bool]) -> None:
    spec = BoxSpec(Program("python", source=b"pass"))
    for _ in range(5):
        await backend.answer(spec)
        left = [pid for zygote in looking.zygotes() for pid in looking.descendants(zygote)[1:]]
        assert held[-1]
        await backend.settled()
        assert looking.all_gone(left)()
    await backend.run(spec)
    assert not [pid for zygote in looking.zygotes() for pid in looking.descendants(zygote)[1:]]


async def test_nobody_can_give_the_zygote_a_child(backend: ProcessBackend) -> None:
    """It would reap what it does not know, and with it end every box that it made."""
    number = kernel.NUMBERS.get("clone", 0)
    source = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
made = libc.syscall({number}, {0x8000 | signal.SIGCHLD}, 0, 0, 0, 0)
if made == 0:
    os._exit(0)
print(made, ctypes.get_errno())
"""
    report = await run(backend, source)
    assert report.stdout.text == "-1 1\n" and report.denials == {"clone": 1}


async def test_children_that_say_so_on_and_on_are_stopped(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs the supervisor a moment."""
    monkeypatch.setattr("ringfence.sandbox.process.run.MAX_DENIALS", 20)
    source = f"""
import os
for _ in range(60):
    if os.fork() == 0:
        {LEAVE % 0}
    os.wait()
"""
    report = await run(backend, source)
    assert report.ended == "policy"
    honest = await run(backend, "import os\nfor _ in range(60):\n if os.fork() == 0: break\n os.wait()\n")
    assert (honest.ended, honest.exit_status) == ("exited", 0)
