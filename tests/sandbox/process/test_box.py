"""The supervisor's end of a box: its descriptors, its processes' channels, and that it can always be ended."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from ringfence.core.box import BoxSpec, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import Cell, CellReport, StaySpec
from ringfence.sandbox.process import box as boxes
from ringfence.sandbox.process import patience
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box import Box, BoxMember, Hub, receive
from ringfence.sandbox.process.patience import MachinePace
from ringfence.sandbox.process.zygote import kernel
from ringfence.sandbox.process.zygote_handle import ZygoteHandle
from tests import tooling
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    made = Hub()
    yield made
    made.close()


async def test_whoever_asked_is_called_for_bytes_and_for_the_end(hub: Hub) -> None:
    read, write = os.pipe()
    heard: list[bytes] = []
    over = asyncio.Event()

    def hear() -> None:
        heard.append(os.read(read, 100))
        if not heard[-1]:
            hub.remove(read)
            over.set()

    hub.add(read, hear)
    os.write(write, b"one")
    await tooling.until(lambda: heard)
    os.close(write)
    await asyncio.wait_for(over.wait(), tooling.PATIENCE)
    assert heard == [b"one", b""]
    os.close(read)


async def test_one_that_was_removed_is_left_alone(hub: Hub) -> None:
    pipes = [os.pipe() for _ in range(2)]
    called: list[int] = []

    def call(index: int) -> None:
        """The first to be called takes both away: neither may be called again, though both had something to read."""
        called.append(index)
        for read, _ in pipes:
            hub.remove(read)

    for index, (read, write) in enumerate(pipes):
        hub.add(read, partial(call, index))
        os.write(write, b"x")
    await tooling.until(lambda: called)
    await asyncio.sleep(0.05)
    assert len(called) == 1
    for pair in pipes:
        for descriptor in pair:
            os.close(descriptor)


async def test_a_closed_hub_calls_nobody(hub: Hub) -> None:
    read, write = os.pipe()
    called: list[None] = []
    hub.add(read, lambda: called.append(None))
    hub.close()
    hub.close()
    os.write(write, b"x")
    await asyncio.sleep(0.05)
    assert not called
    os.close(read)
    os.close(write)


# ── The channel of a process in a box that stays ──


_SENDING = """
import array, os, socket, stat
def channel():
    for number in range(3, 200):
        try:
            found = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        if found.type == socket.SOCK_SEQPACKET:
            return found
files = [os.open("/workspace", os.O_RDONLY) for _ in range(30)]
try:
    channel().sendmsg([%r], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
except PermissionError:
    pass
os._exit(0)
"""


@pytest.mark.parametrize("said", [b"", b"begun", b"closed x\ny", b"{"])
async def test_descriptors_that_a_program_sends_are_not_kept(backend: ProcessBackend, said: bytes) -> None:
    box = await backend.open(StaySpec())

    async def cell(source: str) -> CellReport:
        interpreter = await box.interpreter()
        return await interpreter.run(Cell(source.encode()), lambda *_: None, lambda _: None)

    await cell("1")
    before = looking.descriptors()
    for _ in range(3):
        await cell(_SENDING % said)
    assert looking.descriptors() < before + 30


def test_what_is_received_is_not_inherited() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket() as given:
        socket.send_fds(theirs, [b"x"], [given.fileno()])
        data, (taken,), _ = receive(ours)
        with socket.socket(fileno=taken) as received:
            assert data == b"x" and not received.get_inheritable()


async def test_nobody_can_give_the_zygote_a_child(backend: ProcessBackend) -> None:
    """It would reap what it does not know, and with it end every box that it made."""
    source = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
made = libc.syscall({kernel.NUMBERS.get("clone", 0)}, {0x8000 | signal.SIGCHLD}, 0, 0, 0, 0)
if made == 0:
    os._exit(0)
print(made, ctypes.get_errno())
"""
    report = await backend.run(BoxSpec(Program("python", source=source.encode())))
    assert report.stdout.text == "-1 1\n" and report.denials == {"clone": 1}


# ── The box ──


def spec(source: str, **limits: float) -> BoxSpec:
    return BoxSpec(Program("python", source.encode()), Limits(**limits))  # type: ignore[arg-type]


async def zygote_of(backend: ProcessBackend) -> ZygoteHandle:
    await backend.run(spec("pass"))
    assert backend._pool is not None
    return next(zygote for zygotes in backend._pool._zygotes.values() for zygote in zygotes)


@pytest.mark.parametrize("room", [0, 1, 2])
async def test_a_box_whose_descriptors_got_lost_is_not_used(
    room: int, backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops what a process has no place for. A box that cannot be ended is none."""
    zygote = await zygote_of(backend)
    receive = Box._receive

    def crowded(self: Box) -> None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(map(int, os.listdir("/proc/self/fd"))) + 1
        held: list[int] = []
        while (descriptor := os.dup(0)) < top:
            held.append(descriptor)
        os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + room, before[1]))
        try:
            receive(self)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in held:
                os.close(descriptor)

    monkeypatch.setattr(Box, "_receive", crowded)
    with pytest.raises(Unavailable, match="descriptors were lost"):
        await zygote.spawn(Limits(), backend._shape(Limits()))
    monkeypatch.setattr(Box, "_receive", receive)
    await tooling.until(lambda: not looking.boxed(zygote.pid) and zygote.live == 0)
    report = await backend.run(spec("import time\ntime.sleep(600)", wall_seconds=0.3))
    assert (report.ended, zygote.alive) == ("timeout", True)


async def test_a_box_that_is_late_is_ended(backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it never said how: its zygote knows."""
    zygote = await zygote_of(backend)
    free = len(zygote._free)
    monkeypatch.setattr(boxes, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(Box, "_receive", lambda self: None)
    shape = backend._shape(Limits())
    for _ in range(3):
        with pytest.raises(Unavailable, match="not ready in time"):
            await zygote.spawn(Limits(), shape)
    await tooling.until(lambda: not looking.boxed(zygote.pid) and len(zygote._free) == free)


async def test_a_box_is_waited_for_as_long_as_those_who_make_it_work(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is a hundred times as slow as others its time is over long before it is ready."""
    zygote = await zygote_of(backend)
    monkeypatch.setattr(boxes, "CLOSE_SECONDS", 0.06)
    receive, looks = Box._receive, 0

    def late(self: Box) -> None:
        if looks >= 20:
            receive(self)

    class Looks(patience.Patience):
        def is_over(self) -> bool:
            nonlocal looks
            looks += 1
            return super().is_over()

    monkeypatch.setattr(Box, "_receive", late)
    monkeypatch.setattr(boxes, "Patience", Looks)
    with subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) as busy:
        try:
            monkeypatch.setattr(ZygoteHandle, "_making", lambda _: iter([busy.pid]))
            box = await zygote.spawn(Limits(), backend._shape(Limits()))
            assert box.first and looks >= 20
        finally:
            busy.kill()
    box.kill()
    await box.ended
    box.remove()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped, where there is little time to wait for one."""
    monkeypatch.setattr(boxes, "CLOSE_SECONDS", 0.05)
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


async def test_a_process_that_is_stopped_before_it_is_confined_is_killed(
    hub: Hub, stopped: subprocess.Popen[bytes]
) -> None:
    """A program of its session may do that, where the kernel's Landlock does not keep signals apart."""
    member = BoxMember(2, hub)
    member.born(os.pidfd_open(stopped.pid))
    with pytest.raises(Unavailable, match="not ready in time"):
        await member.closed_in_time(MachinePace())
    await tooling.until(lambda: stopped.poll() == -signal.SIGKILL)
    member.left(None)


async def test_a_process_that_nobody_waits_for_any_more_is_killed_all_the_same(
    hub: Hub, stopped: subprocess.Popen[bytes]
) -> None:
    member = BoxMember(2, hub)
    waiting = asyncio.ensure_future(member.closed_in_time(MachinePace()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    member.born(os.pidfd_open(stopped.pid))
    await tooling.until(lambda: stopped.poll() == -signal.SIGKILL)
    member.left(None)


async def test_a_box_that_nobody_waits_for_any_more_is_ended(backend: ProcessBackend) -> None:
    zygote = await zygote_of(backend)
    free, shape = len(zygote._free), backend._shape(Limits())
    for moment in (0.0, 0.0005, 0.001, 0.002, 0.004) * 4:
        making = asyncio.create_task(zygote.spawn(Limits(), shape))
        await asyncio.sleep(moment)
        making.cancel()
        try:
            box = await making
        except asyncio.CancelledError:
            continue
        box.kill()
        await box.ended
        box.remove()
    await tooling.until(lambda: not looking.boxed(zygote.pid) and len(zygote._free) == free)


async def test_a_command_line_does_not_say_where_we_are_installed(backend: ProcessBackend) -> None:
    source = "import sys; print(open('/proc/self/cmdline').read().rstrip(chr(0)), sys.orig_argv[1:], sys.argv)"
    report = await backend.run(spec(source))
    assert report.stdout.text == f"python3 {['-c', source]!r} ['-c']\n"
    children = "import os; os.fork() or print(open('/proc/self/cmdline').read().rstrip(chr(0))); os._exit(0)"
    assert (await backend.run(spec(children))).stdout.text in ("python3\n", "")
