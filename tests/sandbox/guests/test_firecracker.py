"""Machines of Firecracker: what it is asked, against its published description; and all of our side, against a stand-in
for Firecracker and its jailer that emulates its machines (`standin/`). No machine of Firecracker itself is booted here:
it needs KVM, and there is no package of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ringfence.compose import guests
from ringfence.compose.backends import make_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, TEMPLATES, BoxSpec, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.core.schema import Schema
from ringfence.packages.cache import PackageCache
from ringfence.sandbox.guests.backend import GuestBackend, agent_code
from ringfence.sandbox.guests.microvm import disks, firecracker, kernel, saved
from ringfence.sandbox.guests.microvm.engine import MicrovmEngine
from ringfence.sandbox.guests.microvm.firecracker import Firecracker, Request
from ringfence.sandbox.guests.microvm.machine import MachineShape, Saved
from tests import tooling

pytestmark = pytest.mark.anyio
DESCRIPTION = tooling.ROOT.parent / "shared" / "data" / "firecracker-api.yaml"
STANDIN = Path(__file__).with_name("standin")
SHAPE = MachineShape(Path("/k"), Path("/i"), Path("/d"), 300 * MIB, 3)
ASKED: list[Request] = [
    *firecracker.booting(SHAPE),
    *firecracker.loading(),
    ("PATCH", "/vm", {"state": "Paused"}),
    ("PUT", "/snapshot/create", {"snapshot_type": "Full", "snapshot_path": "/s", "mem_file_path": "/m"}),
]


# ── Requests ──


@pytest.mark.parametrize("request_", ASKED, ids=lambda each: f"{each[0]} {each[1]}")
def test_what_is_asked_is_what_the_published_description_has(request_: Request) -> None:
    if not DESCRIPTION.exists():
        pytest.skip(f"the published description is not here: {DESCRIPTION.name}")
    method, path, body = request_
    description = YAML(typ="safe").load(DESCRIPTION.read_text())
    path = path.replace("/drives/root", "/drives/{drive_id}")
    operation = description["paths"][path][method.lower()]
    (schema,) = (each["schema"] for each in operation["parameters"] if each["in"] == "body")
    whole = {**schema, "definitions": description["definitions"]}
    assert Schema(json.loads(json.dumps(whole))).problem(body, "the request") is None
    named = description["definitions"][schema["$ref"].rpartition("/")[2]]
    assert body.keys() <= named["properties"].keys()
    assert "204" in map(str, operation["responses"])


def test_a_machine_is_configured_before_it_is_started_and_loaded_before_anything() -> None:
    booting = [path for _, path, _ in firecracker.booting(SHAPE)]
    assert booting[-1] == "/actions" and len(set(booting)) == len(booting)
    assert [path for _, path, _ in firecracker.loading()] == ["/snapshot/load", "/vm"]


@pytest.mark.parametrize(("wanted", "given"), [(0, 1), (1, 1), (2, 2), (3, 4), (31, 32), (64, 32)])
def test_processors_are_one_or_an_even_number(wanted: int, given: int) -> None:
    assert firecracker.processors(wanted) == given


def test_a_machine_has_no_network_and_writes_to_no_disk() -> None:
    bodies = {path: body for _, path, body in firecracker.booting(SHAPE)}
    assert bodies["/drives/root"]["is_read_only"] is True
    assert not any("network" in path or "mmds" in path for path in bodies)


# ── What is missing ──


async def refused(**settings: Any) -> str:
    backend = make_backend(SandboxSettings(backend="firecracker", **settings))
    try:
        with pytest.raises(Unavailable) as caught:
            await backend.run(BoxSpec(Program("python", b"pass")))
    finally:
        await backend.close()
    assert "\n" not in caught.value.message
    return caught.value.message


async def test_what_is_missing_is_said_with_its_remedy(tmp_path: Path) -> None:
    assert "sandbox.firecracker_kernel_path" in await refused()
    assert "No such file" in await refused(firecracker_kernel_path=str(tmp_path / "none"))
    wrong = tmp_path / "text"
    wrong.write_text("no kernel")
    assert "is no kernel that Firecracker boots" in await refused(firecracker_kernel_path=str(wrong))
    if shutil.which("firecracker", path="/usr/local/bin:/usr/bin:/bin:/opt/firecracker") is None:
        wrong.write_bytes(b"\x7fELF" + bytes(100))
        said = await refused(firecracker_kernel_path=str(wrong))
        assert "KVM" in said or "firecracker and jailer" in said


async def test_that_an_accelerator_does_not_serve_is_believed_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        version = "x"
        tries = 0

        async def open(self) -> None: ...

        async def start(self, *given: Any) -> Any:
            self.tries += 1
            raise Unavailable("no_box", "it is busy")

    async def initrd(machines: object) -> Path:
        return Path("/i")

    monkeypatch.setattr(saved, "_hopeless", lambda accelerator: None)
    monkeypatch.setattr(saved.SavedMachines, "initrd", initrd)
    monkeypatch.setattr(disks, "empty", lambda kept: Path("/d"))
    (tmp_path / "vmlinuz").touch()
    machines = saved.SavedMachines(tmp_path, kernel.GuestKernel("6.0", tmp_path / "vmlinuz", tmp_path))
    made: Any = Refusing()
    for _ in range(2):
        assert await machines.accelerated(made, "kvm") == "a machine does not boot with it: it is busy"
    assert made.tries == 1
    (kept,) = (tmp_path / "probed").glob("*.json")
    os.utime(kept, (0, 0))
    await machines.accelerated(made, "kvm")
    assert made.tries == 2


async def test_a_disk_of_the_operators_is_looked_at(tmp_path: Path) -> None:
    if shutil.which("debugfs", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("debugfs is not installed: apt install e2fsprogs")
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3.9").write_text("")
    (root / "usr/bin/python3").symlink_to("python3.9")
    disk = disks.disk(root, "sha256:1", tmp_path / "disks")
    assert disks.python_of(disk, ("/opt/python3", "/usr/bin/python3")) == ("/usr/bin/python3.9", (3, 9))
    with pytest.raises(Unavailable, match="has no Python"):
        disks.python_of(disk, ("/opt/python3",))
    with pytest.raises(Unavailable, match=r"has Python 3\.9"):
        await guests._disk_root(disk, "python", None)
    with pytest.raises(Unavailable, match="there is no file"):
        await guests._disk_root(tmp_path / "none", "python", None)


# ── Against the stand-in ──


@pytest.fixture(scope="module")
async def standing_in(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestBackend]:
    if os.geteuid() != 0:
        pytest.skip("the jailer needs root")
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("the stand-in needs /usr/bin/python3")
    folder = tmp_path_factory.mktemp("firecracker")
    kept = tooling.ROOT / ".tools" / "kernel"
    try:
        found = kernel.find(None, kept)
    except Unavailable as exc:
        pytest.skip(exc.message)
    if shutil.which("qemu-system-x86_64") is None and shutil.which("qemu-system-aarch64") is None:
        pytest.skip("the stand-in needs QEMU: apt install qemu-system-x86 or qemu-system-arm")
    program = Firecracker(folder / "machines", search=str(STANDIN))
    engine = MicrovmEngine("firecracker", (program,), folder, lambda: found, agent_code)  # without a look at KVM
    backend = GuestBackend(engine, partial(guests._root, PackageCache(folder / "packages"), TEMPLATES), TEMPLATES)
    try:
        yield backend
    finally:
        await backend.close()
        assert not list((folder / "machines").glob("*/*")), "a machine left its root"


@pytest.mark.slow
async def test_programs_run_in_machines_that_go_on_from_a_saved_one(standing_in: GuestBackend) -> None:
    async def run(source: str, **more: Any) -> Any:
        return await standing_in.run(BoxSpec(Program("python", source.encode()), **more))

    report = await run("import os; print(os.getpid() > 1, os.uname().nodename, os.getuid())")
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 0, "True box 1000\n")
    isolation = report.isolation
    assert (isolation["backend"], isolation["level"], isolation["accelerator"]) == ("firecracker", "microvm", "kvm")
    assert "stand-in" in isolation["engine"]
    numbers = "import os, random; print(os.urandom(8).hex(), random.random())"
    first, second = await asyncio.gather(run(numbers), run(numbers))
    assert first.stdout.text != second.stdout.text
    failed = await run("raise SystemExit(3)")
    assert failed.exit_status == 3
    ended = await run("while True: pass", limits=Limits(wall_seconds=3))
    assert (ended.ended, ended.limit) == ("timeout", "wall")


@pytest.mark.slow
async def test_a_machine_is_paused_and_goes_on_and_leaves_nothing(standing_in: GuestBackend, tmp_path: Path) -> None:
    del standing_in  # it has made the kernel's first file system and the disk
    program = Firecracker(tmp_path / "machines", search=str(STANDIN))
    kept = kernel.find(None, tooling.ROOT / ".tools" / "kernel")
    initrd = tmp_path / "initrd"
    initrd.write_bytes(kernel.initial(kept))
    shape = MachineShape(kept.image, initrd, disks.empty(tmp_path / "disks"), 256 * MIB, 1)
    machine = await program.start(shape)
    try:
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(machine.stream, 1) == b"."
        await machine.pause()
        await machine.resume()
        saved = tmp_path / "saved"
        saved.mkdir()
        await machine.save(saved)
        assert {each.name for each in saved.iterdir()} == {"memory", "state"}
    finally:
        assert await machine.remove() == []
    again = await program.start(shape, Saved(saved))
    assert await again.remove() == []
    no_kernel = MachineShape(Path(os.devnull), initrd, shape.disk, 256 * MIB, 1)
    with pytest.raises(Unavailable, match="Firecracker"):
        await program.start(no_kernel)
    await program.close()
    assert not list((tmp_path / "machines" / "firecracker").iterdir())
