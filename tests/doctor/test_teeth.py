"""The suite has teeth: with any one step of confinement left out, a case that was kept is broken.

Layers lie over each other, so for some steps another one has to be out of the way before it shows; then the same case
must still be kept with only that other one left out. And some steps carry the rest: without them there is no box.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import anyio
import pytest

from ringfence.core.box import BoxReport, BoxSpec, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.doctor import CATALOGUE, Options, run
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.cgroups.cgroup import Cgroups
from ringfence.sandbox.process.host import capabilities, diagnosis
from tests import tooling

pytestmark = pytest.mark.anyio

BITES = {
    "trees_read_only": ("F20", "F24"),
    "own_devices": ("D01", "D02"),
    "user_namespace": ("S30", "K76"),
    "pid_namespace": ("S31", "P01"),
    "ipc_namespace": ("S33",),
    "uts_namespace": ("S34", "X05"),
    "net_namespace": ("S35",),
    "cgroup_namespace": ("S36", "X06"),
    "shares": ("G28",),
    "input_read_only": ("F30", "F31"),
    "proc": ("P01", "P40", "F40", "F41"),
    "read_only_root": ("F40",),
    "host_name": ("X05",),
    "session": ("P12",),
    "umask": ("X08",),
    "no_core_dump": ("G24",),
    "open_files": ("G22", "G23"),
    "file_size": ("G23", "G32"),
    "processes": ("G23",),
    "queues": ("G26",),
    "locked_memory": ("G25",),
    "counted": ("G01", "G04", "G20"),
    "bounding_set": ("K72",),
    "secure_bits": ("K75",),
    "capabilities": ("K70", "F44"),
    "no_new_privs": ("K73", "P11", "P04"),
    "landlock": ("K65", "F47"),
    "seccomp": ("P04", "P11", "F45"),
    "programs": ("P66",),
    "noexec": ("P65", "P67", "P70", "P71"),
    "execute": ("P68",),
}
"""Step by step, the cases of which at least one must break without it."""
CARRYING = ("mount_namespace", "mapping", "entrance", "identity", "own_root", "workspace", "pivot")
"""Without one of these nothing that follows can be done, so no box comes about."""
SEEN_IN_FACTS = ("keyring", "priority", "shares")
GIVING = (
    *("folder", "folders", "rooms", "mounts", "places", "whole", "loopback", "input", "cores", "memory", "cpu_time"),
    "terminals",
)
"""What these are good for is shown below, or by what does not work without them."""


def test_every_step_is_accounted_for() -> None:
    assert set(capabilities.STEPS) <= {*BITES, *CARRYING, *SEEN_IN_FACTS, *GIVING}
    assert {id for ids in BITES.values() for id in ids} <= {case.id for case in CATALOGUE}


async def broken(step: str, ids: tuple[str, ...]) -> set[str]:
    cases = tuple(case for case in CATALOGUE if case.id in ids)
    backend = ProcessBackend(without=(step,), depth=0)
    try:
        report = await run(backend, Options(cases=cases, controls=False))
    finally:
        await backend.close()
    return {result.case.id for result in report.results if result.kept is False}


@pytest.mark.parametrize("step", BITES)
async def test_a_case_breaks_without(step: str) -> None:
    needs_boxes()
    if step == "counted" and not Cgroups.detect().available:
        pytest.skip("no control group can be made here, so there is nothing to leave out")
    assert await broken(step, BITES[step])


async def test_names_in_proc_that_are_covered_one_by_one_hide_as_much() -> None:
    """As boxes are made where the kernel does not let a /proc that was whole become one of processes alone."""
    needs_boxes()
    about = tuple(case.id for case in CATALOGUE if case.id.startswith("P4") or case.id == "X17")
    assert "P49" in about
    assert await broken("subset", about) == set()


@pytest.mark.parametrize("step", CARRYING)
async def test_no_box_is_made_without(step: str) -> None:
    needs_boxes()
    backend = ProcessBackend(without=(step,), depth=0)
    said = ""
    try:
        await backend.run(BoxSpec(Program("python", source=b"pass")))
    except Unavailable as exc:
        said = exc.message
    finally:
        await backend.close()
    if step == "identity" and not said and os.geteuid() != 0:
        pytest.skip("whoever has no other id on the host has the box's as soon as it enters")
    assert "could not be made" in said


async def look(source: str, *, without: tuple[str, ...] = (), limits: Limits | None = None) -> BoxReport:
    needs_boxes()
    backend = ProcessBackend(without=without, depth=0)
    try:
        return await backend.run(BoxSpec(Program("python", source=source.encode()), limits=limits or Limits()))
    finally:
        await backend.close()


@pytest.mark.parametrize("step", SEEN_IN_FACTS)
async def test_the_facts_tell_of_a_step_that_is_missing(step: str) -> None:
    whole = await look("pass")
    lacking = await look("pass", without=(step,))
    assert whole.isolation["protections"][step]["on"] is True
    assert whole.isolation["protections"][step]["verified"] in ("run", "host")
    assert lacking.isolation["protections"][step]["on"] is False


async def test_a_box_dies_with_its_zygote() -> None:
    needs_boxes()
    backend = ProcessBackend(depth=0)
    async with anyio.create_task_group() as group:
        group.start_soon(until_it_fails, backend)
        program = await sleeping()
        zygote = int(Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(zygote, signal.SIGKILL)
        until = time.monotonic() + tooling.PATIENCE
        while tooling.alive(program) and time.monotonic() < until:
            await anyio.sleep(0.02)
        survived = tooling.alive(program)
        group.cancel_scope.cancel()
    await backend.close()
    assert not survived


async def until_it_fails(backend: ProcessBackend) -> None:
    try:
        await backend.run(BoxSpec(Program("command", argv=("sleep", "4242")), Limits(wall_seconds=3600)))
    except Unavailable:
        return


async def sleeping() -> int:
    """The program in the box, by its number here."""
    for _ in range(6000):
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cmdline").read_bytes() == b"sleep\x004242\x00":
                    return int(entry.name)
            except OSError:
                continue
        await anyio.sleep(0.02)
    raise AssertionError("the box did not start")


KEYRING = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
key = libc.syscall({keyctl}, 10, -3, b"user", b"ringfence-canary", 0)
print("found" if key > 0 else "not found")
"""


@pytest.mark.parametrize(("without", "found"), [(("seccomp",), "not found"), (("seccomp", "keyring"), "found")])
async def test_the_keyring_is_the_second_layer_beneath_seccomp(without: tuple[str, ...], found: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
    libc.syscall(numbers[1], 1, None)  # a session keyring of our own, so that nobody else's is touched
    if libc.syscall(numbers[0], b"user", b"ringfence-canary", b"x", 1, -3) < 0:
        pytest.skip("this kernel gives us no keyring")
    report = await look(KEYRING.format(keyctl=numbers[1]), without=without)
    assert report.stdout.text.strip() == found


NAMESPACE = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
print("made" if libc.unshare(0x10000000) == 0 else errno.errorcode[ctypes.get_errno()])
"""


@pytest.mark.parametrize(("without", "found"), [(("seccomp",), "ENOSPC"), (("seccomp", "shares"), "made")])
async def test_a_quota_of_no_user_namespaces_is_the_second_layer_beneath_seccomp(
    without: tuple[str, ...], found: str
) -> None:
    report = await look(NAMESPACE, without=without)
    assert report.stdout.text.strip() == found


async def test_processor_time_has_a_limit_of_its_own() -> None:
    spin = "while True: pass"
    report = await look(spin, limits=Limits(cpu_seconds=1, wall_seconds=600))
    assert (report.ended, report.limit) == ("timeout", "cpu")


def needs_boxes() -> None:
    missing = diagnosis.diagnose_refusals().missing
    if missing:
        pytest.skip(f"no box can be made here: {missing}")
