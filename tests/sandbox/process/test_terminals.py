"""Commands with a terminal: it is theirs, with jobs in front and behind, and leads to nobody else's."""

from __future__ import annotations

import ast
import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from ringfence.core.box import BoxSpec, Program, Stream
from ringfence.core.sessions import Command
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box_usage import descendants
from ringfence.sandbox.process.command import RunningCommand
from ringfence.sandbox.process.live import LiveBox
from ringfence.sandbox.process.zygote import confine
from tests import tooling

pytestmark = pytest.mark.anyio

_PATIENCE = 120.0
_ASK = """
import errno, fcntl, os, termios
def ask(request, argument=0):
    try:
        fcntl.ioctl(0, request, argument)
        return "done"
    except OSError as exc:
        return errno.errorcode[exc.errno]
terminal = int(open("/proc/self/stat").read().rpartition(")")[2].split()[4])
"""


class Screen:
    def __init__(self) -> None:
        self.shown = ""
        self._seen = 0
        self.running: RunningCommand

    def tell(self, stream: Stream, data: bytes) -> None:
        self.shown += data.decode()

    async def expect(self, text: str) -> str:
        """Of what was not looked at yet, all until this has been shown."""
        async with asyncio.timeout(_PATIENCE):
            while text not in self.shown[self._seen :]:
                await asyncio.sleep(0.01)
        at = self.shown.index(text, self._seen) + len(text)
        found, self._seen = self.shown[self._seen : at], at
        return found

    async def answer(self, keys: str) -> str:
        """All that is shown until it is our turn again."""
        self.type(keys)
        return await self.expect("box> ")

    def type(self, keys: str) -> None:
        assert self.running.send(keys.encode()) == len(keys)


@asynccontextmanager
async def sitting_at(box: LiveBox, *argv: str) -> AsyncIterator[Screen]:
    screen = Screen()
    screen.running = await box.command(Command(argv, env={"PS1": "box> "}, pty=(80, 24)), screen.tell)
    try:
        yield screen
    finally:
        screen.running.signal(9)
        await screen.running.over()


@pytest.mark.parametrize("shell", ["dash -i", "bash --norc -i"])
async def test_a_shell_has_jobs(box: LiveBox, shell: str) -> None:
    words = shell.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    async with sitting_at(box, *words) as screen:
        begun = await screen.expect("box> ")
        assert "job control" not in begun and "can't access tty" not in begun
        screen.type("sleep 60\r")
        await in_front(box, "sleep 60")
        assert "sleep 60" in await screen.answer("\x03")
        assert "still 42" in await screen.answer("echo still $((40 + 2))\r")
        screen.type("sleep 60.5\r")
        await in_front(box, "sleep 60.5")
        await screen.answer("\x1a")
        assert "Stopped" in await screen.answer("jobs\r")
        await screen.answer("bg\r")
        assert "Running" in await screen.answer("jobs\r")
        screen.type("fg\r")
        await in_front(box, "sleep 60.5")
        await screen.answer("\x03")
        assert "sleep 60.5" not in await screen.answer("jobs\r")
        screen.type("exit 7\r")
        assert (await screen.running.over()).exit_status == 7


async def test_who_kills_a_shell_kills_its_jobs(box: LiveBox) -> None:
    async with sitting_at(box, "sh", "-i") as screen:
        await screen.expect("box> ")
        await screen.answer("trap '' HUP; sleep 63 &\r")
        await screen.answer("sleep 64 &\r")
        assert {"sleep 63", "sleep 64"} <= running_in(box)
        screen.running.signal(9)
        await screen.running.over()
    await tooling.until(lambda: not {"sleep 63", "sleep 64"} & running_in(box))


async def in_front(box: LiveBox, command: str) -> None:
    """Until this is what the keys of the terminal go to; a shell that is just starting it could not be stopped."""

    def is_it() -> bool:
        for pid in descendants(box.box.first, *box.box.workers):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if words == command and state[0] == "S" and state[2] == state[5]:
                    return True
        return False

    await tooling.until(is_it)


def running_in(box: LiveBox) -> set[str]:
    """The commands of all its processes, as the host sees them."""
    found = set()
    for pid in descendants(box.box.first, *box.box.workers):
        with suppress(OSError):
            found.add(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
    return found


async def test_who_has_a_terminal_sets_how_it_takes_keys(box: LiveBox) -> None:
    source = "import os, tty\ntty.setraw(0)\nprint('ready', flush=True)\nprint(os.read(0, 1) + os.read(0, 1))"
    async with sitting_at(box, "python3", "-c", source) as screen:
        await screen.expect("ready")
        screen.type("\x03")
        screen.type("q")
        await screen.expect(r"b'\x03q'")


async def test_a_new_size_is_told(box: LiveBox) -> None:
    source = (
        # Not in the handler: it may be called in the midst of the first `print`.
        "import os, signal, time\n"
        "told = []\n"
        "signal.signal(signal.SIGWINCH, lambda *_: told.append(1))\n"
        "print('ready', flush=True)\n"
        "while not told: time.sleep(0.02)\n"
        "print(os.get_terminal_size(), flush=True)\n"
        "time.sleep(60)"
    )
    async with sitting_at(box, "python3", "-c", source) as screen:
        await screen.expect("ready")
        screen.running.resize(101, 31)
        await screen.expect("columns=101, lines=31")


async def test_nothing_is_typed_into_it_from_within_and_tricks_are_refused(box: LiveBox) -> None:
    source = f"{_ASK}\nprint([ask(each, b'x') for each in (0x5412, 0x541C, 0x541D, 0x5423)], terminal != 0)"
    running = await box.command(Command(("python3", "-c", source), pty=(80, 24)), lambda *_: None)
    report = await running.over()
    assert report.stdout.text.strip() == "['EPERM', 'EPERM', 'EPERM', 'EPERM'] True"
    assert report.denials["ioctl"] == 4


async def test_one_that_controls_another_is_not_to_be_taken(box: LiveBox) -> None:
    source = f"{_ASK}\nprint(ask(termios.TIOCSCTTY, 1), os.getsid(0) == os.tcgetpgrp(0) == os.getpid(), flush=True)\n"
    # A session of its own within the box: the terminal stays whose it is.
    source += "if not os.fork():\n    os.setsid()\n    print(ask(termios.TIOCSCTTY), ask(0x5429))\nelse:\n    os.wait()"
    running = await box.command(Command(("python3", "-c", source), pty=(80, 24)), lambda *_: None)
    assert (await running.over()).stdout.text.split() == ["ENOTTY", "True", "EPERM", "ENOTTY"]


async def test_who_was_given_none_has_none(box: LiveBox, backend: ProcessBackend) -> None:
    source = f"{_ASK}\ntry: os.open('/dev/tty', os.O_RDWR)\nexcept OSError as exc: print([terminal, exc.errno])"
    inside = await (await box.command(Command(("python3", "-c", source)), lambda *_: None)).over()
    assert ast.literal_eval(inside.stdout.text) == [0, errno.ENXIO]
    alone = await backend.run(BoxSpec(Program("command", argv=("python3", "-c", source))))
    assert ast.literal_eval(alone.stdout.text) == [0, errno.ENXIO]


_OWN = """
import os, pty, sys, termios
pid, ours = pty.fork()
if pid == 0:
    os.write(os.open("/dev/tty", os.O_RDWR), f"{os.ttyname(0)} {os.environ['TERM']}".encode())
    os._exit(0)
print(os.read(ours, 100).decode(), os.waitpid(pid, 0)[1], sorted(os.listdir("/dev/pts")))
master, slave = os.openpty()
termios.tcsetwinsize(slave, (30, 100))
os.write(master, b"typed\\n")
print(os.read(slave, 10), termios.tcgetwinsize(master), os.get_terminal_size(slave).columns, os.isatty(0))
held = []
try:
    while True: held.append(os.openpty())
except OSError as exc:
    print(exc.strerror, 2 + len(held))
"""


@pytest.mark.parametrize("where", ["a run", "a session", "a new interpreter"])
async def test_programs_make_terminals_of_their_own(box: LiveBox, backend: ProcessBackend, where: str) -> None:
    if where == "a run":
        report = await backend.run(BoxSpec(Program("python", _OWN.encode())))
    else:
        command = (
            Command(("python3", "-c", _OWN)) if where == "a new interpreter" else Command((), source=_OWN.encode())
        )
        report = await (await box.command(command, lambda *_: None)).over()
    assert report.stdout.text.splitlines() == [
        "/dev/pts/0 xterm-256color 0 ['0', 'ptmx']",
        "b'typed\\n' (30, 100) 100 False",
        f"No space left on device {confine.TERMINALS}",
    ], report.stderr.text
    assert not report.denials


async def test_one_box_sees_no_terminal_of_another(box: LiveBox, backend: ProcessBackend) -> None:
    holding = "import os, time; print(os.ttyname(os.openpty()[1]), flush=True); time.sleep(600)"
    screen = Screen()
    running = await box.command(Command(("python3", "-c", holding)), screen.tell)
    await screen.expect("/dev/pts/0")
    report = await backend.run(BoxSpec(Program("command", argv=("ls", "/dev/pts"))))
    assert report.stdout.text == "ptmx\n"
    running.signal(9)
    await running.over()


async def test_script_records_what_runs_in_a_terminal(backend: ProcessBackend) -> None:
    if shutil.which("script") is None:
        pytest.skip("there is no script")
    report = await backend.run(BoxSpec(Program("command", argv=("script", "-qc", "tty; tput cols", "/dev/null"))))
    assert report.stdout.text.split()[0] == "/dev/pts/0", report.stderr.text


async def test_pexpect_talks_to_a_program_through_a_terminal(backend: ProcessBackend) -> None:
    pexpect = pytest.importorskip("pexpect")
    source = """
import pexpect
child = pexpect.spawn("/bin/sh", ["-i"], env={"PS1": "ready> "}, dimensions=(30, 100), encoding="utf-8")
child.expect("ready> ")
child.sendline("stty size; echo $((6 * 7))")
child.expect("30 100\\r\\n42\\r\\n")
child.setwinsize(10, 20)
child.sendline("stty size; exit 3")
child.expect("10 20")
child.expect(pexpect.EOF)
child.close()
print(child.exitstatus)
"""
    packages = (Path(pexpect.__file__).parents[1],)
    report = await backend.run(BoxSpec(Program("python", source.encode()), packages=packages))
    assert report.stdout.text == "3\n", report.stderr.text
