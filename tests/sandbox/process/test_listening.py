"""Waiting for connections: programs of a box may, and who connects sees whose socket it is."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Limits, Mount, Program
from ringfence.core.sessions import Command, StaySpec
from ringfence.sandbox.process import ids
from ringfence.sandbox.process import run as runs
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.box import Box
from tests import tooling
from tests.sandbox import comparing
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio


_PEERGROUPS = 59


def peer(client: socket.socket) -> tuple[int, int]:
    """Who listens at the other end, as the kernel says: user and group."""
    _, uid, gid = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid, gid


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


async def run(backend: ProcessBackend, source: str) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source.encode())))


SERVERS = """
import asyncio, http.server, socket, threading, urllib.request
for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::", 0)), (socket.AF_INET, None)):
    with socket.socket(family) as server:
        if address: server.bind(address)
        server.listen()
        print("listens")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
server.RequestHandlerClass.log_message = lambda *args: None
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://localhost:{server.server_port}/").status)
async def main():
    async def hello(reader, writer):
        writer.write(b"hello"); writer.close()
    server = await asyncio.start_server(hello, "localhost", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    print(await reader.read()); writer.close(); server.close()
asyncio.run(main())
"""


async def test_programs_of_a_box_listen_without_having_to_ask(backend: ProcessBackend) -> None:
    report = await run(backend, SERVERS)
    assert report.stdout.text == "listens\n" * 3 + "200\nb'hello'\n", report.stderr.text
    assert (dict(report.denials), "listen" in report.isolation) == ({}, False)


async def test_a_server_of_node_listens(backend: ProcessBackend) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    source = """
    const server = require("http").createServer((_, answer) => answer.end("hello"))
    server.listen(0, () => require("http").get({port: server.address().port}, answer =>
        answer.on("data", data => { console.log(String(data)); process.exit() })))
    """
    program = Program("command", argv=("node", "-e", source))
    limits = Limits(memory_bytes=1 << 30)
    home = Path(node).resolve().parents[1]
    report = await backend.run(BoxSpec(program, limits, trees=() if home == Path("/usr") else (home,)))
    assert report.stdout.text == "hello\n", report.stderr.text


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
    report = await run(backend, "import ctypes\nwhile 1: ctypes.CDLL(None).unshare(0x10000000)")
    assert report.ended == "policy"


AFTERWARDS = """
import ctypes, os, sys, time
if os.fork(): sys.exit()
os.setsid(); os.close(0); os.close(1); os.close(2)
time.sleep(0.3)
libc = ctypes.CDLL(None, use_errno=True)
with open("/workspace/unsaid", "w") as file: file.write(f"{libc.unshare(0x10000000)} {ctypes.get_errno()}")
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
            assert file.read() == f"-1 {errno.EPERM}"
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
