"""Killed at any moment, or on a disk that fails at any call: what was acknowledged is there and is signed for."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.audit.chain import read_slots
from ringfence.audit.keys import Keys
from ringfence.store import Reader, Store
from tests.store.conftest import Drive

Ack = tuple[str, int, str]
STRACE = shutil.which("strace")


def can_inject() -> bool:
    """Whether strace is here and may trace, which a container can forbid."""
    if STRACE is None:
        return False
    tried = subprocess.run([STRACE, "-qq", "-e", "trace=none", "true"], capture_output=True, check=False)
    return tried.returncode == 0


def acknowledged(out: str) -> list[Ack]:
    """Every whole `acked` line; the kill may have cut the last."""
    lines = [line.split() for line in out.splitlines(keepends=True) if line.endswith("\n")]
    return [(words[1], int(words[2]), words[3]) for words in lines if words and words[0] == "acked"]


def assert_kept(folder: Path, keys: Keys, acks: list[Ack]) -> None:
    """As the files lie, before any start has recovered them."""
    reader = Reader.open(folder)
    try:
        held = reader.checkpoints()
        there = {(r.chain, r.seq): r.hash for r in reader.records()}
    finally:
        reader.close()
    assert [ack for ack in acks if there.get(ack[:2]) != ack[2]] == []
    for chain in {ack[0] for ack in acks}:
        newest = read_slots(held[chain], chain, keys.public).newest
        assert newest is not None
        assert newest.seq >= max(seq for name, seq, _ in acks if name == chain)
        assert there[chain, newest.seq] == newest.head


def kill_under_load(rounds: int, drive: Drive, folder: Path, keys: Keys) -> list[Ack]:
    """Kill a writing process `rounds` times at random moments; what it had acknowledged must be there each time."""
    dice, acks = random.Random(7), list[Ack]()
    for _ in range(rounds):
        process = drive("load")
        assert process.stdout is not None
        assert process.stdout.readline().startswith("opened")
        try:
            process.wait(dice.uniform(0.02, 0.25))
        except subprocess.TimeoutExpired:
            process.kill()
        out, err = process.communicate()
        assert process.returncode == -9, err
        acks += acknowledged(out)
        assert_kept(folder, keys, acks)
    return acks


def test_nothing_acknowledged_is_lost_to_a_kill(
    drive: Drive, folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    acks = kill_under_load(5, drive, folder, keys)
    assert len(acks) > 5
    with Store.open(folder, keys) as store:
        assert store.reader().running() == []
        lost = [row for call in store.recovered.calls if (row := store.reader().key("load", call)) is not None]
        assert {row.state for row in lost} <= {"unknown"}
    verified()


# ── A disk that fails ──

AT_START = [
    *(f"pwrite64:error={'EIO' if n % 2 else 'ENOSPC'}:when={n}" for n in range(1, 13)),
    *(f"{call}:error=EIO:when={n}" for call in ("fdatasync", "fsync") for n in range(1, 5)),
    "pwrite64:error=EROFS:when=1+",
    "fdatasync:error=EIO:when=3+",
]
"""Each strikes the start at one call, or at every call from there on."""

WRITING = [
    *(f"pwrite64:error={error}:when={first}..60+7" for first in range(1, 8) for error in ("EIO", "ENOSPC")),
    *(f"fdatasync:error=EIO:when={first}..12+3" for first in range(1, 4)),
    "pwrite64:error=ENOSPC:when=30+",
    "fdatasync:error=EIO:when=5+",
]
"""Together these strike the writer at each of its first sixty writes and twelve syncs, then at all of them."""

traced = pytest.mark.skipif(not can_inject(), reason="strace is missing or may not trace here")


def trace(process: subprocess.Popen[str], arguments: list[str]) -> str:
    """Attach to a driver that waits, let it go on, and return what it says."""
    with subprocess.Popen([*arguments, "-p", str(process.pid)], stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        attached = tracer.stderr.readline()
        while attached and "attached" not in attached:
            attached = tracer.stderr.readline()
        if not attached:
            process.kill()
            pytest.skip("strace may not attach to a process here")
        out, err = process.communicate("go\n", timeout=300)
        tracer.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def injection(fault: str) -> list[str]:
    return [str(STRACE), "-f", "-o", "/dev/null", "-e", f"trace={fault.partition(':')[0]}", "-e", f"inject={fault}"]


def check_after(fault: str, out: str, folder: Path, keys: Keys) -> None:
    acks = acknowledged(out)
    if acks:
        assert_kept(folder, keys, acks)
    if not fault.endswith("+"):
        assert acks, out  # the disk recovered, and so must the store
    with Store.open(folder, keys) as store:
        assert store.reader().running() == []


@traced
@pytest.mark.parametrize("fault", AT_START)
def test_a_disk_that_fails_at_the_start_acknowledges_nothing_that_is_not_kept(
    fault: str, drive: Drive, folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    process = drive("write", "2", wrapper=tuple(injection(fault)))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    check_after(fault, out, folder, keys)
    verified()


@traced
@pytest.mark.parametrize("fault", WRITING)
def test_a_disk_that_fails_under_the_writer_acknowledges_nothing_that_is_not_kept(
    fault: str, drive: Drive, folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    process = drive("write", "12", "wait")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("opened")
    out = trace(process, injection(fault))
    assert "failed" in out
    check_after(fault, out, folder, keys)
    verified()


@traced
def test_without_its_checkpoint_nothing_is_acknowledged(
    drive: Drive, folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    """Each write signs once, so failing from the third on leaves two."""
    process = drive("write", "4", "wait")
    assert process.stdout is not None
    chain = process.stdout.readline().split()[1]
    arguments = [*injection("pwrite64:error=EIO:when=3+"), "-P", str(folder / "checkpoints" / chain)]
    out = trace(process, arguments)
    assert len(acknowledged(out)) == 2
    assert out.count("checkpoint could not be written") == 7
    check_after("+", out, folder, keys)
    verified()
