"""What a box is seen to be before the first program is let into one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.config import loads
from ringfence.core.box import BoxReport, BoxSpec, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.sandbox.process import backend as backends
from ringfence.sandbox.process import selftest
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host import capabilities
from ringfence.sandbox.process.zygote.template import DEVICES

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(*, accepting: Sequence[str] = (), without: Sequence[str] = ()) -> AsyncIterator[ProcessBackend]:
    if missing := capabilities.HostCapabilities.detect().missing:
        pytest.skip(f"no box can be made here: {dict(missing)}")
    backend = ProcessBackend(accept_missing=accepting, without=without, depth=0)
    try:
        yield backend
    finally:
        await backend.close()


async def ran(backend: ProcessBackend, source: bytes) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source=source)))


@pytest.mark.parametrize("without", [(), ("landlock",)], ids=["whole", "without"])
async def test_landlock_is_told_from_all_else_that_refuses(without: tuple[str, ...]) -> None:
    """What is asked for is refused by Landlock alone, on every kernel: newer ones let anybody make empty devices."""
    async with opened(without=without) as backend:
        report = await ran(backend, selftest.PROGRAM)
    found = selftest.judge(report.stdout.head, Limits())
    assert [name for name, look in found.items() if not look.on] == list(without)
    assert found["landlock"].seen == ("success" if without else "EACCES")


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose Landlock is there, and holds nothing."""
    asked = selftest.PROGRAM.replace(b"/proc/self/comm", b"/dev/null")
    monkeypatch.setattr(selftest, "PROGRAM", asked)


@pytest.mark.usefixtures("unguarded")
class TestMissing:
    async def test_names_the_probe_what_was_expected_and_what_was_seen(self) -> None:
        async with opened() as backend:
            with pytest.raises(Unavailable) as refused:
                await ran(backend, b"pass")
        assert refused.value.message.startswith("a box on this host lacks landlock (opening /proc/self/comm for")
        assert "expected EACCES, saw success" in refused.value.message
        assert "list it under sandbox.accept_missing" in refused.value.message

    async def test_can_be_accepted_and_the_facts_tell(self) -> None:
        async with opened(accepting=["landlock"]) as backend:
            report = await ran(backend, b"print('runs')")
        assert report.stdout.text == "runs\n"
        assert report.isolation["protections"]["landlock"] == {"on": False, "verified": "host"}
        assert report.isolation["protections"]["proc"]["on"] is True

    async def test_a_configuration_can_accept_it(self, tmp_path: Path) -> None:
        if missing := capabilities.HostCapabilities.detect().missing:
            pytest.skip(f"no box can be made here: {dict(missing)}")
        for words, runs in (("accept_missing: [landlock]", True), ("accept_missing: []", False)):
            backend = make_backend(loads(f"sandbox: {{{words}}}", file="a.yaml", base=tmp_path).sandbox)
            assert isinstance(backend, ProcessBackend)
            try:
                said = (await ran(backend, b"print('runs')")).stdout.text
            except Unavailable as exc:
                said = exc.message
            finally:
                await backend.close()
            assert said.startswith("runs" if runs else "a box on this host lacks landlock")

    async def test_what_no_box_can_do_without_is_not_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        changed = selftest.LOOKS["host_name"]._replace(holds=lambda seen: seen == "another")
        monkeypatch.setitem(selftest.LOOKS, "host_name", changed)
        async with opened(accepting=["landlock", "host_name"]) as backend:
            with pytest.raises(Unavailable, match=r"lacks host_name \(the host name: expected box, saw box"):
                await ran(backend, b"pass")


ANSWERS: dict[str, Any] = {
    "spaces": dict.fromkeys(("user", "pid", "mnt", "ipc", "uts", "net", "cgroup"), "x:[1]"),
    "mounts": """\
31 1 0:40 / / ro,nosuid,nodev - tmpfs template rw
32 31 8:1 /usr /usr ro,nosuid,nodev - ext4 /dev/vda rw
33 31 0:41 / /workspace rw,nosuid,nodev - tmpfs workspace rw
34 31 0:42 / /proc rw,nosuid,nodev,noexec - proc proc rw
35 34 0:43 /meminfo-1 /proc/meminfo ro,nosuid,nodev,noexec - tmpfs zygote rw
37 34 0:42 /1/mounts /proc/mounts rw,nosuid,nodev,noexec - proc proc rw
38 31 0:44 / /dev/pts rw,nosuid,noexec - devpts devpts rw
""",
    "root": 1,
    "input": 1,
    "size": Limits().disk_bytes,
    "inodes": Limits().inodes,
    "dev": [*DEVICES, "fd", "ptmx", "pts", "shm", "stderr", "stdin", "stdout"],
    "proc": ["1", "2"],
    "name": "box",
    "session": True,
    "tty": 2,
    "limits": {
        "CORE": 0,
        "NOFILE": Limits().open_files,
        "FSIZE": Limits().disk_bytes,
        "NPROC": Limits().processes,
        "MEMLOCK": 65536,
        "MSGQUEUE": 0,
        "RTPRIO": 0,
        "NICE": 0,
    },
    "umask": 0o022,
    "nice": 0,
    "may": True,
    "open": 13,
    "bits": 0xEF,
    "ids": [1000] * 6,
    "maps": [["1000", "100001", "1"]] * 2,
}


def lacking(**other: Any) -> list[str]:
    found = selftest.judge(json.dumps({**ANSWERS, **other}).encode(), Limits())
    return sorted(name for name, look in found.items() if not look.on)


def test_every_look_has_something_to_tell() -> None:
    for name, look in selftest.judge(json.dumps(ANSWERS).encode(), Limits()).items():
        assert look.on, name
        assert look.probe and look.expected and look.seen
        assert name in capabilities.PROTECTIONS


class TestAnotherKernel:
    """What kernels answer differently, and means the same."""

    def test_mounts_come_in_another_order(self) -> None:
        assert lacking(mounts="\n".join(reversed(ANSWERS["mounts"].splitlines()))) == []

    def test_there_are_more_secure_bits(self) -> None:
        assert lacking(bits=0xFEF) == []
        assert lacking(bits=0x2F) == ["secure_bits"]

    def test_processes_have_large_numbers(self) -> None:
        assert lacking(proc=["4711", "4712"]) == []
        assert lacking(proc=["1", "kcore"]) == ["proc"]

    @pytest.mark.parametrize(("may", "number"), [(True, 0), (True, 1), (False, 13), (True, 30)])
    def test_only_landlock_answers_as_landlock_does(self, may: bool, number: int) -> None:
        assert lacking(may=may, open=number) == ["landlock"]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"mounts": ANSWERS["mounts"].replace("/usr ro,", "/usr rw,")}, "trees_read_only"),
        ({"mounts": ANSWERS["mounts"] + "35 33 0:43 / /x ro,nosuid - proc proc rw\n"}, "pivot"),
        ({"mounts": ANSWERS["mounts"].replace("tmpfs template", "ext4 /dev/vda")}, "own_root"),
        ({"mounts": ""}, "own_root"),
        ({"ids": [1000] * 5 + [0]}, "identity"),
        ({"maps": [["0", "0", "4294967295"]] * 2}, "mapping"),
        ({"root": 0}, "read_only_root"),
        ({"input": 0}, "input_read_only"),
        ({"dev": ["kmsg"]}, "own_devices"),
        ({"tty": 0}, "session"),
        ({"umask": 0}, "umask"),
        ({"size": 1}, "workspace"),
        ({"nice": -1}, "priority"),
    ],
)
def test_what_is_missing_is_seen(other: dict[str, Any], name: str) -> None:
    assert name in lacking(**other)


async def test_a_machine_that_is_too_slow_for_the_self_test_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_TEST_SECONDS", (0.001, 600.0))
    async with opened() as backend:
        assert (await ran(backend, b"print(1)")).stdout.text == "1\n"
