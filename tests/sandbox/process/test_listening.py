"""Waiting for connections: what a program is told, and what a box lets it do."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Listening, Mount, Program
from ringfence.core.sessions import Command, StaySpec
from ringfence.sandbox.process import ids
from ringfence.sandbox.process import run as runs
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.seccomp.notifications import listen
from ringfence.sandbox.process.zygote import kernel
from tests import tooling
from tests.sandbox import comparing
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio


_PEERGROUPS = 59


def peer(client: socket.socket) -> tuple[int, int]:
    """Who listens at the other end, as the kernel says: user and group."""
    _, uid, gid = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid, gid


def ours() -> list[str]:
    """Who this thread is, what it may do, and whether others may look at it."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    told = [line for line in lines if line.startswith(("Uid", "Gid", "Groups", "Cap"))]
    return [*told, f"dumpable {kernel.prctl(kernel.PR_GET_DUMPABLE)}"]


def told(descriptor: int, backlog: int = 1, *, asks: bool = True) -> int:
    return listen(threading.get_native_id(), (descriptor, backlog, 0, 0, 0, 0), lambda: asks)


# ── What the supervisor does ──


@pytest.mark.parametrize("backlog", [0, 1, 0xFFFFFFFF, 2**63])
def test_a_unix_socket_listens(tmp_path: Path, backlog: int) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        assert told(server.fileno(), backlog) == 0
        client.connect(str(tmp_path / "s"))
        server.accept()[0].close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_tcp_socket_does_not(family: int) -> None:
    with socket.socket(family) as server:
        assert told(server.fileno()) == errno.EACCES
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0


def test_what_the_kernel_would_say_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unbound, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        assert told(unbound.fileno()) == errno.EINVAL
        assert told(datagrams.fileno()) == errno.EOPNOTSUPP
    (tmp_path / "file").write_text("")
    with open(tmp_path / "file") as file:
        assert told(file.fileno()) == errno.ENOTSOCK
    assert told(0xFFFFFFFF) == told(9999) == errno.EBADF


def test_who_asks_no_more_is_not_looked_at(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        assert told(server.fileno(), asks=False) == errno.EACCES
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may listen as another")
def test_clients_are_told_whose_socket_it_is_and_we_stay_who_we_are(tmp_path: Path) -> None:
    owner, threads = 2_000_200_123, threading.active_count()
    before = ours()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        arguments = (server.fileno(), 1, 0, 0, 0, 0)
        assert listen(threading.get_native_id(), arguments, lambda: True, owner) == 0
        client.connect(str(tmp_path / "s"))
        assert peer(client) == (owner, owner)
        assert client.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, 64) == b""
        assert listen(threading.get_native_id(), (9999, 1, 0, 0, 0, 0), lambda: True, owner) == errno.EBADF
    with socket.socket(socket.AF_UNIX) as unbound:
        arguments = (unbound.fileno(), 1, 0, 0, 0, 0)
        assert listen(threading.get_native_id(), arguments, lambda: True, owner) == errno.EINVAL
    assert (ours(), threading.active_count()) == (before, threads)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket() as server:
        for _ in range(20):
            told(server.fileno())
            told(0)
            told(9999)
    assert len(os.listdir("/proc/self/fd")) == before


# ── In boxes ──


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


async def run(backend: ProcessBackend, source: str, *, listens: bool = False) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source.encode()), listening=Listening(listens)))


SERVERS = """
import errno, socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::", 0)), (socket.AF_INET, None)):
    with socket.socket(family) as server:
        try:
            if address: server.bind(address)
            server.listen()
            print("listens")
        except OSError as exc:
            print(errno.errorcode[exc.errno])
"""


async def test_tcp_is_refused_and_counted_unless_it_is_allowed(backend: ProcessBackend) -> None:
    report = await run(backend, SERVERS)
    assert (report.stdout.text, dict(report.denials)) == ("EACCES\n" * 3, {"listen": 3})
    assert "listen" not in report.isolation
    report = await run(backend, SERVERS, listens=True)
    assert (report.stdout.text, dict(report.denials)) == ("listens\n" * 3, {})
    assert report.isolation["listen"] == "allowed"


async def test_programs_of_one_box_talk_by_files(backend: ProcessBackend) -> None:
    source = """
import multiprocessing, socket, threading
from multiprocessing.managers import SyncManager
with SyncManager(ctx=multiprocessing.get_context("fork")) as manager:
    print(list(manager.list([1, 2])))
def serve():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\\0here"); server.listen(); ready.set()
        server.accept()[0].sendall(b"hello")
ready = threading.Event()
threading.Thread(target=serve).start()
ready.wait()
with socket.socket(socket.AF_UNIX) as client:
    client.connect("\\0here"); print(client.recv(10))
"""
    report = await run(backend, source)
    assert report.stdout.text == "[1, 2]\nb'hello'\n", report.stderr.text
    assert not report.denials


async def test_who_asks_without_end_is_ended(backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_DENIALS", 500)  # a slow machine would not get to the end of more in time
    report = await run(backend, "import socket\ns = socket.socket()\nwhile 1:\n try: s.listen()\n except OSError: pass")
    assert report.ended == "policy"


AFTERWARDS = """
import os, socket, sys, time
if os.fork(): sys.exit()
os.setsid(); os.close(0); os.close(1); os.close(2)
time.sleep(0.3)
said = []
for family, address in ((socket.AF_UNIX, "/tmp/s"), (socket.AF_INET, ("127.0.0.1", 0))):
    server = socket.socket(family); server.bind(address)
    try: server.listen(); said.append("listens")
    except OSError as exc: said.append(str(exc.errno))
with open("/workspace/unsaid", "w") as file: file.write(" ".join(said))
os.rename("/workspace/unsaid", "/workspace/said")
"""


async def test_what_a_command_of_a_session_left_running_is_heard(backend: ProcessBackend) -> None:
    await tooling.until(lambda: looking.at_rest(backend))
    before = len(os.listdir("/proc/self/fd"))
    box = await backend.open(StaySpec())
    try:
        running = await box.command(Command((), source=AFTERWARDS.encode()), lambda stream, data: None)
        assert (await running.over()).exit_status == 0
        await tooling.until(lambda: os.access("said", os.R_OK, dir_fd=box.workspace))
        with open(os.open("said", os.O_RDONLY, dir_fd=box.workspace)) as file:
            assert file.read() == f"listens {errno.EACCES}"
    finally:
        await box.end()
    await tooling.until(lambda: looking.at_rest(backend))
    await backend.drain()
    # A zygote more, and nothing of the box.
    await tooling.until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4)


WAITS = """
import os, socket
server = socket.socket(socket.AF_UNIX); server.bind("/data/s"); os.chmod("/data/s", 0o777); server.listen()
connection = server.accept()[0]
connection.recv(1)
"""


@pytest.mark.parametrize("stays", [False, True], ids=["one run", "a session"])
async def test_a_client_outside_sees_whose_socket_in_a_mount_it_is(
    backend: ProcessBackend, tmp_path: Path, stays: bool
) -> None:
    mounts = (Mount(str(tmp_path), "/data", "rw"),)
    made: list[Box] = []

    def connected() -> bool:
        try:
            client.connect(str(tmp_path / "s"))
        except (FileNotFoundError, ConnectionRefusedError, PermissionError):
            return False
        return True

    async def once() -> None:
        await backend.run(BoxSpec(Program("python", WAITS.encode()), mounts=mounts))

    async def in_a_session() -> None:
        box = await backend.open(StaySpec(mounts=mounts))
        try:
            made.append(box.box)
            await (await box.command(Command((), source=WAITS.encode()), lambda stream, data: None)).over()
        finally:
            await box.end()

    with socket.socket(socket.AF_UNIX) as client:
        running = asyncio.create_task(in_a_session() if stays else once())
        await tooling.until(lambda: running.done() or connected())
        assert not running.done()
        uid, gid = peer(client)
        client.sendall(b"x")
        await running
    if os.geteuid() != 0:
        assert (uid, gid) == (os.geteuid(), os.getegid())
        return
    assert ids.FIRST <= uid == gid <= ids.LAST
    assert [box.host_id for box in made] == [uid] * len(made)
