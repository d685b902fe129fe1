"""The channel of a process in a box that stays: what a program sends there is nothing that anybody keeps."""

from __future__ import annotations

import signal
import socket

import pytest

from ringfence.box import BoxSpec, Program
from ringfence.sandbox.process import kernel
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.member import receive
from ringfence.sessions import Cell, CellReport, StaySpec
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio

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
