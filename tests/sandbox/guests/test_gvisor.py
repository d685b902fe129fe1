"""Boxes that are sandboxes of runsc: the cases of containers, as far as they are the same, and what differs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, BoxSpec, Input, Limits, Mount, Program, Programs
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.sandbox.guests.gvisor import GvisorEngine
from tests.sandbox.guests import test_oci as containers
from tests.sandbox.guests.test_oci import SUPERVISOR, command, run

pytestmark = pytest.mark.anyio
OTHERWISE = (
    "test_the_facts_say_what_protects_it_and_that_it_was_looked_at",
    "test_inputs_are_there_and_cannot_be_changed",
    "test_what_it_writes_to_a_folder_of_the_host_is_its_owners",
    "test_what_is_planted_in_a_folder_of_the_host_is_told",
    "test_a_folder_of_the_host_may_lie_where_programs_else_write",
    "test_a_mount_where_none_can_be_is_refused",
    "test_no_more_processes_than_allowed",
    "test_refused_calls_are_counted",
    "test_what_it_cannot_give_is_refused",
    "test_an_engine_that_is_not_there_is_named_with_the_remedy",
    "test_nothing_is_left_of_one_that_was_cancelled",
    "test_nothing_is_left_of_a_supervisor_that_was_killed",
)
"""Cases of containers that are other ones here, or are about folders of the host that programs write to."""
for name, case in vars(containers).items():
    if name.startswith("test_") and name not in OTHERWISE:
        globals()[name] = case


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
async def backend(state: Path) -> AsyncIterator[Backend]:
    made = make_backend(SandboxSettings(backend="gvisor"), state)
    try:
        await made.run(BoxSpec(Program("command", argv=("true",))))
    except Unavailable as exc:
        await made.close()
        pytest.skip(str(exc))
    yield made
    await made.close()


async def test_the_facts_say_what_was_read_back_of_the_sandbox(backend: Backend) -> None:
    isolation = (await run(backend, "pass")).isolation
    assert (isolation["backend"], isolation["level"], isolation["memory_layout"]) == ("gvisor", "gvisor", "fresh")
    assert isolation["engine"].startswith("runsc ") and isolation["platform"] == "systrap"
    off = [name for name, each in isolation["protections"].items() if not each["on"]]
    assert off == [] and len(isolation["protections"]) >= 10
    assert {name: each["by"] for name, each in isolation["limits"].items()} == {
        "memory": "cgroup",
        "cpu": "cgroup",
        "pids": "rlimit",
    }


async def test_its_kernel_is_not_the_hosts_and_gives_programs_no_rights(backend: Backend) -> None:
    shown = await command(backend, "sh", "-c", "uname -r; id -u; cat /proc/self/status; touch /x; kill -9 1; echo no")
    words = shown.stdout.text.splitlines()
    assert words[0] != os.uname().release and words[1] == "1000" and words[-1] == "no"
    assert {line for line in words if line.startswith("Cap")} == {
        f"Cap{each}:\t0000000000000000" for each in ("Inh", "Prm", "Eff", "Bnd")
    }
    assert "Seccomp:\t2" in words
    assert "Permission denied" in shown.stderr.text and "not permitted" in shown.stderr.text


async def test_inputs_are_there_and_cannot_be_changed(backend: Backend) -> None:
    source = "print(open('/workspace/input/a/b').read())\nopen('/workspace/input/a/b', 'w')"
    report = await run(backend, source, inputs=(Input("a/b", b"given"),))
    assert report.stdout.text == "given\n" and "Permission denied" in report.stderr.text
    assert [(fact.path, fact.bytes) for fact in report.inputs] == [("/workspace/input/a/b", 5)]


async def test_no_more_processes_than_allowed(backend: Backend) -> None:
    source = """
import os
made = 1
while True:
    try:
        if os.fork() == 0:
            import signal; signal.pause()
    except BlockingIOError:
        break
    made += 1
print(made)
"""
    report = await run(backend, source, Limits(processes=20))
    assert int(report.stdout.text) <= 20 and report.ended == "exited"


async def test_files_and_memory_have_limits_of_their_own(backend: Backend) -> None:
    source = (
        "f = open('a', 'wb'); [f.write(bytes(1 << 20)) for _ in range(150)]; x = bytearray(20 << 20); print(len(x))"
    )
    limits = Limits(memory_bytes=96 * MIB, disk_bytes=200 * MIB)
    report = await run(backend, source, limits)
    assert (report.ended, report.stdout.text) == ("exited", f"{20 << 20}\n")


@pytest.mark.parametrize("asked", [{"programs": Programs(allow=("sh",))}, {"mounts": (Mount("/tmp", "/srv/x", "rw"),)}])
async def test_what_it_cannot_give_is_refused(backend: Backend, asked: dict[str, Any]) -> None:
    with pytest.raises(Unavailable) as refused:
        await run(backend, "pass", **asked)
    assert refused.value.reason_code == "not_supported"


async def test_a_program_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(Unavailable, match="backend gvisor needs nosuchengine: install runsc"):
        await GvisorEngine(("nosuchengine",)).open()


async def test_what_it_sends_out_goes_over_the_stream(backend: Backend) -> None:
    """The sandbox has no network but its loopback."""
    asked: list[bytes] = []

    class Route:
        authority = b"-----BEGIN CERTIFICATE-----\n"
        unproxied = ()
        env: dict[str, str] = {}  # noqa: RUF012

        def __init__(self, server: asyncio.Server) -> None:
            self.server = server

        def facts(self) -> dict[str, Any]:
            return {"allowed": []}

        def hold(self) -> None: ...

        def go_on(self) -> None: ...

        async def close(self) -> dict[str, Any]:
            self.server.close()
            return self.facts()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        writer.close()

    async def serve(listener: socket.socket) -> Route:
        return Route(await asyncio.start_server(answer, sock=listener))

    source = """
import os, urllib.request
print(len(urllib.request.urlopen("http://example.test/a").read()))
print("BEGIN" in open(os.environ["SSL_CERT_FILE"]).read())
"""
    report = await run(backend, source, network=serve)
    assert report.stdout.text == "1000000\nTrue\n" and asked[0].startswith(b"GET http://example.test/a ")
    assert report.network == {"allowed": []}


async def test_nothing_is_left_of_one_that_was_cancelled(backend: Backend) -> None:
    begun = asyncio.Event()
    program = Program("command", argv=("sh", "-c", "echo begun; sleep 4321"))
    running = asyncio.ensure_future(backend.run(BoxSpec(program), lambda stream, data: begun.set()))
    await begun.wait()
    assert children()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not children()


async def test_nothing_is_left_of_a_supervisor_that_was_killed(backend: Backend, state: Path) -> None:
    kept = set(Path(tempfile.gettempdir()).glob("ringfence-gvisor-*"))
    source = SUPERVISOR.replace('backend="oci"', 'backend="gvisor"')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", source, str(state)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    folders = {each for each in set(Path(tempfile.gettempdir()).glob("ringfence-gvisor-*")) - kept if sandboxes(each)}
    assert folders
    process.kill()
    await process.wait()
    while any(each.exists() or sandboxes(each) for each in folders):
        await asyncio.sleep(0.02)


def children() -> list[str]:
    """Programs of sandboxes that this process has started."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = each.read_text().partition(" (")[2].rpartition(") ")
            if "runsc" in name and int(rest.split()[1]) == os.getpid():
                found.append(name)
    return found


def sandboxes(folder: Path) -> list[str]:
    """Processes of sandboxes whose state is kept there."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_text()
            if "runsc" in words.partition("\0")[0] and str(folder) in words:
                found.append(each.parent.name)
    return found
