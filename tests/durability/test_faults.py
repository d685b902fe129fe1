"""A disk that fails under a serving gateway: no call runs without its record, and none is answered without it."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ringfence.store.writer import LOG_BYTES
from tests import tooling
from tests.durability.stage import Caller, Running, Said, Stage, client
from tests.durability.tracing import failing

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WRITES = 27
"""System calls that write for one call of `append`, and some: 11 of *started* and 13 of *finished*, as pages go."""
SYNCS = 3
"""One of *started* and one of *finished*, and one more that nothing needs."""


@dataclass(slots=True)
class Trial:
    """Calls of a gateway whose disk fails, each judged by what really happened."""

    stage: Stage
    gateway: Running
    caller: Caller
    told: list[Said] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        """Everything that the gateway's own writer writes."""
        chain = self.stage.records(newest_first=True, limit=1)[0].chain
        state = self.stage.state
        return [*(state / f"ringfence.db{end}" for end in ("", "-wal", "-shm")), state / "checkpoints" / chain]

    async def append(self, text: str, key: str | None = None) -> Said:
        before = self.stage.done()[text]
        said = await self.caller.call("append", self.stage.line(text), key=key)
        effect = self.stage.done()[text] - before
        match said.status, said.reason_code:
            case "success", "ok":
                assert effect == 1
                assert said.receipt is not None
            case "unavailable", "store":
                assert effect == 0, "it ran, though its record could not be written"
                assert said.facts["effect"] == "none"
            case "unknown", "store":
                assert said.receipt is None, "it has a finished record, and its answer was withheld"
                assert said.facts["effect"] == "unknown"
            case other:
                pytest.fail(f"an answer that no failing disk should lead to: {other}")
        self.told.append(said)
        return said

    async def echo(self) -> Said:
        said = await self.caller.call("echo", {"text": "hello"})
        assert (said.status, said.reason_code) in {("success", "ok"), ("unavailable", "store"), ("unknown", "store")}
        assert (said.text == "hello") == (said.status == "success"), "the result is withheld with the record"
        self.told.append(said)
        return said

    def counted(self) -> Counter[str]:
        return Counter(said.status for said in self.told)


@contextmanager
def judged(stage: Stage) -> Iterator[None]:
    """At the end, with the gateway gone: the log is whole, and says of every effect that it was begun."""
    yield
    for gateway in stage.running:
        assert tooling.alive(gateway.pid), gateway.output()
        gateway.stop()
    stage.assert_verifies()
    stage.assert_each_call_closed_once()
    stage.assert_each_effect_was_started()


async def works_again(trial: Trial, text: str) -> None:
    assert (await trial.append(text)).status == "success"
    assert (await trial.echo()).status == "success"


# ── one call of the system fails ──


@pytest.mark.parametrize(
    ("call", "error", "times"),
    [
        ("pwrite64", "EIO", WRITES),
        ("pwrite64", "ENOSPC", WRITES),
        ("fdatasync", "EIO", SYNCS),
        ("fdatasync", "ENOSPC", SYNCS),
    ],
)
async def test_a_failure_at_each_write_and_sync_of_a_call(stage: Stage, call: str, error: str, times: int) -> None:
    tooling.need("strace")
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            for when in range(1, times + 1):
                with failing(gateway.pid, trial.files, f"{call}:error={error}:when={when}"):
                    await trial.append(f"{call} {when}")
                with failing(gateway.pid, trial.files, f"{call}:error={error}:when={when}"):
                    await trial.echo()
            failed = trial.counted()
            await works_again(trial, "and on")
    assert failed["unavailable"] >= times // 3, "before the call ran"
    assert failed["unknown"] >= times // 3, "and after it"


STAYING = [
    *(f"pwrite64:error=EIO:when={n}+" for n in (1, 2, 11, 12, 18, 24)),
    *(f"pwrite64:error=ENOSPC:when={n}+" for n in (1, 11, 17)),
    *(f"fdatasync:error=EIO:when={n}+" for n in (1, 2)),
    "pwrite64:error=EROFS:when=1+",
    "fsync,fdatasync,pwrite64,write,ftruncate:error=EIO:when=1+",
]


@pytest.mark.parametrize("fault", STAYING)
async def test_a_disk_that_stays_broken_until_it_is_mended(stage: Stage, fault: str) -> None:
    tooling.need("strace")
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            with failing(gateway.pid, trial.files, fault):
                for number in range(4):
                    await trial.append(f"broken {number}")
                    await trial.echo()
                late = await trial.append("late")
            assert late.status == "unavailable", "nothing runs any more"
            assert trial.counted()["unavailable"] >= (3 if "fdatasync" in fault else 6), "a read waits for no sync"
            await works_again(trial, "mended")


async def test_a_database_that_cannot_be_opened_again(stage: Stage) -> None:
    """The writer gives up a connection that failed; without another one nothing may run."""
    tooling.need("strace")
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            with failing(gateway.pid, trial.files, "pwrite64:error=EIO:when=1", "openat:error=EMFILE:when=1+"):
                told = [await trial.append(f"closed {number}") for number in range(3)]
            assert [said.status for said in told] == ["unavailable"] * 3
            await works_again(trial, "opened")


async def test_a_log_that_cannot_be_moved_into_the_database(stage: Stage) -> None:
    """Every so many bytes the writer moves them there; it fails, and the records stay where they are safe."""
    tooling.need("strace")
    with judged(stage):
        kept = {"echo": {"server": "tools", "mode": "read", "record": "full"}}
        gateway = stage.start(stage.configure(capabilities=kept))
        database, log = stage.state / "ringfence.db", stage.state / "ringfence.db-wal"
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            before = database.stat().st_size
            with failing(gateway.pid, [database], "pwrite64:error=EIO:when=1+", "fdatasync:error=EIO:when=1+"):
                while log.stat().st_size < 4 * LOG_BYTES:
                    assert (await caller.call("echo", {"text": "x" * 900_000})).status == "success"
                assert (await trial.append("not moved")).status == "success"
                assert database.stat().st_size == before
            await works_again(trial, "moved")
            assert database.stat().st_size > before


async def test_a_key_is_free_again_after_a_call_that_never_ran(stage: Stage) -> None:
    """The checkpoint fails after the commit: the key was taken, and nothing ran under it."""
    tooling.need("strace")
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            with failing(gateway.pid, trial.files[-1:], "pwrite64:error=EIO:when=1"):
                assert (await trial.append("paid", key="order-1")).status == "unavailable"
            assert (await trial.append("paid", key="order-1")).status == "success"


# ── a disk that is really full, or not to be written ──


async def test_no_file_may_grow(stage: Stage) -> None:
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            await works_again(trial, "before")
            _, hard = resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE)
            for limit in (0, (stage.state / "ringfence.db-wal").stat().st_size + 3000):
                resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (limit, hard))
                for number in range(3):
                    assert (await trial.append(f"limit {limit} {number}")).status == "unavailable"
                    assert (await trial.echo()).status == "unavailable"
                resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (hard, hard))
                await works_again(trial, f"after {limit}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
async def test_a_full_disk(stage: Stage) -> None:
    stage.state.mkdir(mode=0o700)
    gateway = stage.start(stage.configure(), tmpfs={"path": str(stage.state), "size": 8 << 20})
    disk = Path(f"/proc/{gateway.pid}/root{stage.state}")
    async with client(gateway) as caller:
        trial = Trial(stage, gateway, caller)
        await works_again(trial, "before")
        for free in (0, 1, 5):
            fill(disk / "filler", leave=free * 4096)
            told = [await trial.append(f"full {free} {number}") for number in range(4)]
            assert told[-1].status == "unavailable"
            (disk / "filler").unlink()
            await works_again(trial, f"room after {free}")
        # SQLite does not find its way through /proc, so what lies there is looked at elsewhere.
        shutil.copytree(disk, stage.folder / "seen" / "state", ignore=shutil.ignore_patterns("*-shm", "chains"))
        seen = replace(stage, disk=stage.folder / "seen" / "state")
        seen.assert_verifies()
        seen.assert_kept([said.receipt for said in trial.told if said.receipt is not None])
        seen.assert_each_effect_was_started()


def fill(path: Path, leave: int) -> None:
    """Take all room but a little."""
    disk = os.statvfs(path.parent)
    with path.open("wb") as file:
        file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - leave)))


def refused_start(stage: Stage, *before: str) -> str:
    """What `ringfence serve` says when it will not start; it must end by itself, with no server left."""
    command = [*before, sys.executable, "-m", "ringfence.cli.main", "serve", "--config", str(stage.configure())]
    ended = subprocess.run(
        command, env={**os.environ, **stage.env}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert stage.servers() == []
    return ended.stderr


async def test_a_state_folder_that_may_not_be_written_starts_nothing(stage: Stage) -> None:
    with stage.serving(stage.configure()) as gateway:
        async with client(gateway) as caller:
            await Trial(stage, gateway, caller).append("before")
    if os.geteuid() == 0:  # root writes where it likes, unless the mount says no
        script = f'mount --bind {stage.state} {stage.state} && mount -o remount,bind,ro {stage.state} && exec "$@"'
        said = refused_start(stage, str(tooling.need("unshare")), "-m", "sh", "-c", script, "sh")
    else:
        for path in (*stage.state.rglob("*"), stage.state):
            path.chmod(0o500 if path.is_dir() else 0o400)
        said = refused_start(stage)
        for path in (stage.state, *stage.state.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
    assert str(stage.state) in said
    stage.assert_verifies()


# ── a database that is no longer ours ──


@pytest.mark.parametrize("other", ["garbage", "empty", "another program's"])
async def test_a_database_replaced_while_it_is_served(stage: Stage, other: str) -> None:
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            await works_again(trial, "before")
            database, aside = stage.state / "ringfence.db", stage.folder / "aside.db"
            put(stage.folder / "other.db", other)
            database.rename(aside)
            (stage.folder / "other.db").rename(database)
            told = [await trial.append(f"replaced {number}") for number in range(3)]
            assert [said.status for said in told] == ["unavailable"] * 3
            assert (await trial.echo()).status == "unavailable"
            aside.replace(database)
            await works_again(trial, "after")


async def test_a_write_ahead_log_removed_while_it_is_served(stage: Stage) -> None:
    """What it held is still in the hands of the gateway, which writes it into the database when it stops."""
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            trial = Trial(stage, gateway, caller)
            await works_again(trial, "before")
            (stage.state / "ringfence.db-wal").unlink()
            told = [await trial.append(f"removed {number}") for number in range(3)]
            assert [said.status for said in told] == ["unavailable"] * 3
    stage.assert_kept([said.receipt for said in trial.told if said.receipt is not None])


@pytest.mark.parametrize("other", ["garbage", "another program's"])
async def test_a_database_replaced_between_two_starts(stage: Stage, other: str) -> None:
    with stage.serving(stage.configure()) as gateway:
        async with client(gateway) as caller:
            await Trial(stage, gateway, caller).append("before")
    database = stage.state / "ringfence.db"
    shutil.copy(database, stage.folder / "aside.db")
    put(database, other)
    data = database.read_bytes()
    said = refused_start(stage)
    assert str(database) in said
    assert database.read_bytes() == data, "what is not ours is not written"
    shutil.copy(stage.folder / "aside.db", database)
    with judged(stage):
        gateway = stage.start(stage.configure())
        async with client(gateway) as caller:
            await works_again(Trial(stage, gateway, caller), "after")
        stage.running[:] = [gateway]


def put(path: Path, what: str) -> None:
    if what == "another program's":
        path.write_bytes(b"")
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE theirs (a)")
    else:
        path.write_bytes(os.urandom(65536) if what == "garbage" else b"")
    path.chmod(0o600)
