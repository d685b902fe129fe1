"""Boxes that are containers of a Docker engine, with a dockerd of the tests' own; and what is said where there is none.

What every container must do is in `test_oci`, and is done here again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, BoxReport, BoxSpec, Input, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.core.sessions import Cell, StaySpec, discard_output, discard_value
from ringfence.sandbox.guests import docker as docker_guests
from ringfence.sandbox.guests import docker_profile
from ringfence.sandbox.guests.backend import GuestBackend
from ringfence.sandbox.guests.docker_api import DockerRefused
from ringfence.sandbox.guests.docker_host import ContainerOwner
from tests.sandbox.guests import test_oci
from tests.sandbox.guests.engines import Dockerd, dockerd

pytestmark = pytest.mark.anyio
slow = pytest.mark.slow
SUPERVISOR = test_oci.SUPERVISOR.replace('backend="oci"', 'backend="docker", docker_host=sys.argv[2], docker_ready=1')
_ITS_OWN = {
    "test_the_facts_say_what_protects_it_and_that_it_was_looked_at",
    "test_what_it_writes_to_a_folder_of_the_host_is_its_owners",
    "test_what_is_planted_in_a_folder_of_the_host_is_told",
    "test_a_folder_of_the_host_may_lie_where_programs_else_write",
    "test_a_mount_where_none_can_be_is_refused",
    "test_what_it_cannot_give_is_refused",
    "test_an_engine_that_is_not_there_is_named_with_the_remedy",
    "test_nothing_is_left_of_a_supervisor_that_was_killed",
}
"""Cases about what is oci's alone."""


def here(case: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(case)
    async def test(*given: Any, **named: Any) -> None:
        await case(*given, **named)

    marked: Callable[..., Awaitable[None]] = slow(test)
    return marked


for _name, _case in list(vars(test_oci).items()):
    if _name.startswith("test_") and _name not in _ITS_OWN:
        globals()[_name] = here(_case)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dockerd]:
    with dockerd(tmp_path_factory.mktemp("dockerd")) as running:
        if isinstance(running, str):
            pytest.skip(running)
        yield running


def of(engine: Dockerd, state: Path, **more: Any) -> GuestBackend:
    made = make_backend(SandboxSettings(backend="docker", docker_host=engine.address, **more), state)
    assert isinstance(made, GuestBackend)
    return made


@pytest.fixture(scope="module")
async def backend(engine: Dockerd, state: Path) -> AsyncIterator[Backend]:
    made = of(engine, state)
    yield made
    await made.close()


async def command(backend: Backend, *argv: str, **more: Any) -> BoxReport:
    return await backend.run(BoxSpec(Program("command", argv=argv), **more))


async def containers(engine: Dockerd) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await engine.api.ask("GET", "/containers/json", all=1)
    return found


# ── What protects it ──


@slow
async def test_the_facts_are_read_back_from_the_kernel(backend: Backend) -> None:
    isolation = (await command(backend, "true")).isolation
    assert (isolation["backend"], isolation["level"], isolation["memory_layout"]) == ("docker", "process", "fresh")
    assert {name: each for name, each in isolation["protections"].items() if not each["on"]} == {}
    assert len(isolation["protections"]) >= 11
    assert {each["verified"] for each in isolation["protections"].values()} == {"run"}
    assert isolation["engine"].startswith("docker ")


@slow
async def test_an_engine_elsewhere_is_believed_and_the_facts_say_so(
    engine: Dockerd, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_guests, "look_at", lambda pid, container: None)
    backend = of(engine, state, docker_ready=0)
    try:
        isolation = (await command(backend, "true")).isolation
        assert {each["verified"] for each in isolation["protections"].values()} == {"engine"}
        assert all(each["on"] for each in isolation["protections"].values())
        limits = Limits(memory_bytes=64 * MIB, disk_bytes=512 * MIB, wall_seconds=600)
        source = b"x = bytearray(128 << 20)\nwhile True: pass"
        report = await backend.run(BoxSpec(Program("python", source), limits))
        assert (report.ended, report.limit) == ("oom", "memory")
        with pytest.raises(Unavailable, match="is not on this host and sees no folder of it: use oci") as refused:
            await command(backend, "true", inputs=(Input("a", b"1"),))
        assert refused.value.reason_code == "not_supported"
    finally:
        await backend.close()


@slow
async def test_defect_9_a_container_is_hardened_in_every_way_that_there_is(backend: Backend, engine: Dockerd) -> None:
    begun = asyncio.Event()
    program = Program("command", argv=("sh", "-c", "echo begun; exec sleep 1000"))
    limits = Limits(memory_bytes=64 * MIB, disk_bytes=32 * MIB, processes=20)
    running = asyncio.ensure_future(backend.run(BoxSpec(program, limits), lambda stream, data: begun.set()))
    await begun.wait()
    try:
        told = []
        for each in await containers(engine):
            with contextlib.suppress(DockerRefused):  # one that is just being removed
                told.append(await engine.api.ask("GET", f"/containers/{each['Id']}/json"))
        assert told
        for each in told:
            given = each["HostConfig"]
            assert given["CapDrop"] == ["ALL"] and not given["CapAdd"] and given["Privileged"] is False
            assert "no-new-privileges" in given["SecurityOpt"] and given["ReadonlyRootfs"] is True
            assert given["NetworkMode"] == "none" and not given["Binds"] and not given.get("Mounts")
            assert given["Memory"] == given["MemorySwap"] > 0 and given["PidsLimit"] > 0 and given["NanoCpus"] > 0
            assert each["Config"]["User"] == "1000:1000" and not each["HostConfig"]["Devices"]
            (profile,) = [text for text in given["SecurityOpt"] if text.startswith("seccomp=")]
            assert json.loads(profile.partition("=")[2])["defaultAction"] == "SCMP_ACT_ERRNO"
        ours = [each["HostConfig"] for each in told if each["HostConfig"]["PidsLimit"] == 22]
        assert ours and {each["Memory"] for each in ours} == {96 * MIB}
        assert all(f"size={32 * MIB}," in each["Tmpfs"]["/workspace"] for each in ours)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    source = """
import os
print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNewPrivs', 'Seccomp:'))])
print(os.getuid(), os.path.exists('/var/run/docker.sock'), os.listdir('/sys/devices'))
print(len(open('/proc/net/dev').readlines()))
"""
    shown = await backend.run(BoxSpec(Program("python", source.encode())))
    none = "0000000000000000"
    assert shown.stdout.text.splitlines() == [str([none] * 5 + ["1", "2"]), "1000 False ['system']", "3"]


def test_the_engines_filter_knows_every_call_and_refuses_what_no_box_may_do() -> None:
    rules = json.loads(docker_profile.seccomp_profile("arm64"))["syscalls"]
    refused = {name for rule in rules if rule["action"] == "SCMP_ACT_ERRNO" for name in rule["names"]}
    assert {"bpf", "kexec_load", "init_module", "ptrace", "setns", "io_uring_setup", "clone3"} <= refused
    with pytest.raises(Unavailable, match="riscv64"):
        docker_profile.seccomp_profile("riscv64")


@slow
async def test_an_image_is_made_once_and_none_is_pulled(backend: Backend, engine: Dockerd, state: Path) -> None:
    await command(backend, "true")
    before = await engine.api.ask("GET", "/images/json")
    again = of(engine, state, docker_ready=0)
    try:
        assert (await command(again, "echo", "a")).stdout.text == "a\n"
    finally:
        await again.close()
    assert await engine.api.ask("GET", "/images/json") == before
    assert all(tag.startswith("ringfence/root:") for image in before for tag in image["RepoTags"])


# ── That it stays ──


@slow
async def test_one_that_stays_is_paused_and_goes_on(engine: Dockerd, state: Path) -> None:
    backend = of(engine, state, docker_ready=0)
    box = await backend.open(StaySpec())
    try:
        interpreter = await box.interpreter()
        await interpreter.run(Cell(b"x = 41"), discard_output, discard_value)
        await box.pause()
        assert [each["State"] for each in await containers(engine) if each["State"] == "paused"] == ["paused"]
        await box.resume()
        report = await interpreter.run(Cell(b"x + 1"), discard_output, discard_value)
        assert report.results[-1].data["text/plain"] == "42"
    finally:
        await box.end()
        await backend.close()


# ── Its end ──


@slow
async def test_nothing_is_left_of_a_supervisor_that_was_killed(engine: Dockerd, state: Path, backend: Backend) -> None:
    await backend.close()
    words = (sys.executable, "-c", SUPERVISOR.replace("1000", "8766"), str(state), engine.address)
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.kill()
    await process.wait()
    while test_oci.sleeping("8766") or await containers(engine):
        await asyncio.sleep(0.02)


@slow
async def test_what_a_dead_supervisor_never_started_is_swept_and_nobody_elses(
    engine: Dockerd, state: Path, backend: Backend
) -> None:
    await command(backend, "true")
    (image,) = await engine.api.ask("GET", "/images/json")
    owner = ContainerOwner.of_this_process()
    gone = str(owner).replace(f"/{os.getpid()}.", "/4194303.")
    for name, labels in {
        "dead": {"dev.ringfence.host": owner.host, "dev.ringfence.owner": gone},
        "elsewhere": {"dev.ringfence.host": "other", "dev.ringfence.owner": gone},
        "alive": {"dev.ringfence.host": owner.host, "dev.ringfence.owner": str(owner)},
        "others": {},
    }.items():
        await engine.api.ask(
            "POST", "/containers/create", {"Image": image["Id"], "Cmd": ["x"], "Labels": labels}, name=name
        )
    again = of(engine, state, docker_ready=0)
    await command(again, "true")
    await again.close()
    names = {name for each in await containers(engine) for name in each["Names"]}
    assert {"/elsewhere", "/alive", "/others"} <= names and "/dead" not in names
    for name in ("elsewhere", "alive", "others"):
        await engine.api.ask("DELETE", f"/containers/{name}", force=1)


@slow
async def test_an_engine_that_dies_is_no_end_of_the_programs(tmp_path: Path, state: Path) -> None:
    with dockerd(tmp_path) as running:
        if isinstance(running, str):
            pytest.skip(running)
        backend = of(running, state, docker_ready=0)
        begun = asyncio.Event()
        program = Program("command", argv=("sh", "-c", "echo begun; exec sleep 8767"))
        going = asyncio.ensure_future(
            backend.run(BoxSpec(program, Limits(wall_seconds=600)), lambda stream, data: begun.set())
        )
        await begun.wait()
        running.kill()
        assert (await going).ended == "infra"
        while test_oci.sleeping("8767"):
            await asyncio.sleep(0.02)
        with pytest.raises(Unavailable, match="found no engine"):
            await command(backend, "true")
        await backend.close()


# ── What is missing ──


async def test_without_an_engine_the_remedy_is_named(tmp_path: Path) -> None:
    backend = make_backend(SandboxSettings(backend="docker", docker_host=f"unix://{tmp_path}/none.sock"), tmp_path)
    with pytest.raises(Unavailable, match=r"No such file or directory.*; start dockerd .*sandbox.docker_host"):
        await command(backend, "true")
    await backend.close()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://192.0.2.1:2375", "whoever listens there.*ssh -L"),
        ("ssh://host", "only unix://PATH and tcp://127.0.0.1:PORT.*ssh -L"),
        ("npipe:////./pipe/docker", "only unix://PATH"),
    ],
)
async def test_an_engine_that_others_could_listen_to_is_not_used(tmp_path: Path, address: str, why: str) -> None:
    backend = make_backend(SandboxSettings(backend="docker", docker_host=address), tmp_path)
    with pytest.raises(Unavailable, match=why):
        await command(backend, "true")
    await backend.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-x\r\n\r\n", "it answers with no answer of HTTP"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n" + b'{"ApiVersion": "1.24"}',
            "version 1.24 of the Docker API; 1.40",
        ),
        (b"HTTP/1.1 403 No\r\nContent-Length: 19\r\n\r\n" + b'{"message": "go"}  ', "it refuses: go"),
        (b"", "the connection broke"),
    ],
)
async def test_what_is_no_such_engine_is_told(tmp_path: Path, answer: bytes, why: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, str(tmp_path / "s")):
        backend = make_backend(SandboxSettings(backend="docker", docker_host=f"unix://{tmp_path}/s"), tmp_path)
        with pytest.raises(Unavailable, match=why):
            await command(backend, "true")
        await backend.close()


@slow
async def test_a_runtime_that_the_engine_lacks_is_named(engine: Dockerd, state: Path) -> None:
    backend = of(engine, state, docker_runtime="nosuch")
    with pytest.raises(Unavailable, match=r"has no runtime 'nosuch' .*; it has: .*runc"):
        await command(backend, "true")
    await backend.close()
