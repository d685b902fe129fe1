"""The store keeps what it acknowledges, isolates what fails, and stays off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.audit.chain import MAX_RECORD_BYTES
from ringfence.audit.keys import Keys, load_or_create
from ringfence.core.errors import StoreError
from ringfence.store import Conflict, Reader, Store, Transaction, writer
from tests import tooling

pytestmark = pytest.mark.anyio


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def add(call_id: str = "c", kind: str = "note", **body: Any) -> Callable[[Transaction], int]:
    return lambda tx: tx.append(kind, call_id, body).seq


# ── Opening ──


def test_everything_is_ours_alone(folder: Path, store: Store) -> None:
    store.write_sync(add())
    assert [mode(path) for path in (folder, folder / "chains", folder / "checkpoints")] == [0o700] * 3
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name.partition("-")[0] for path in files} >= {"ringfence.db"}
    assert (folder / "checkpoints" / store.chain) in files
    assert (folder / "chains" / f"{store.chain}.lock") in files
    assert {mode(path) for path in files} == {0o600}


def test_an_open_empty_folder_is_tightened_and_a_used_one_refused(folder: Path, keys: Keys) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    Store.open(folder, keys).close()
    assert mode(folder) == 0o700
    folder.chmod(0o750)
    with pytest.raises(StoreError, match="chmod 700"):
        Store.open(folder, keys)


def test_a_state_in_the_folder_of_another_may_come_first(folder: Path, keys: Keys) -> None:
    Store.open(folder / "demo", keys).close()
    Store.open(folder, keys).close()
    assert mode(folder) == mode(folder / "demo") == 0o700


def test_the_key_must_lie_outside(folder: Path) -> None:
    inside = load_or_create(folder / "keys")
    with pytest.raises(StoreError, match="must lie outside the state folder"):
        Store.open(folder, inside)


def test_somebody_elses_folder_is_refused(folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreError, match="belongs to another user"):
        Store.open(folder, keys)


another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@another_user
@pytest.mark.parametrize("name", ["ringfence.db", "ringfence.db-wal", "ringfence.db-shm", "ringfence.db-journal"])
def test_a_file_of_another_user_in_the_state_is_refused(folder: Path, keys: Keys, name: str) -> None:
    """Its owner may hold it open since the folder was open, and would read and change what we write."""
    Store.open(folder, keys).close()
    (folder / name).touch(0o600)
    os.chown(folder / name, 65534, -1)
    with pytest.raises(StoreError, match=rf"{name} belongs to another user \(uid 65534\).*move it away"):
        Store.open(folder, keys)
    os.chown(folder / name, os.geteuid(), -1)
    Store.open(folder, keys).close()


@another_user
@pytest.mark.parametrize("name", ["chains", "checkpoints"])
def test_a_folder_of_another_user_in_the_state_is_refused(folder: Path, keys: Keys, name: str) -> None:
    folder.mkdir(mode=0o700)
    (folder / name).mkdir(mode=0o700)
    os.chown(folder / name, 65534, -1)
    with pytest.raises(StoreError, match=rf"{name} belongs to another user \(uid 65534\).*move it away"):
        Store.open(folder, keys)


@pytest.mark.parametrize("name", ["chains", "checkpoints"])
def test_a_folder_in_the_state_that_is_open_to_others_is_refused(folder: Path, keys: Keys, name: str) -> None:
    Store.open(folder, keys).close()
    (folder / name).chmod(0o777)
    with pytest.raises(StoreError, match=rf"run: chmod 700 .*{name}"):
        Store.open(folder, keys)
    (folder / name).chmod(0o700)
    Store.open(folder, keys).close()


def test_a_link_in_the_place_of_a_folder_is_refused(folder: Path, keys: Keys, tmp_path: Path) -> None:
    folder.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="checkpoints is not a folder of its own"):
        Store.open(folder, keys)


def test_a_read_only_folder_is_a_readable_error(keys: Keys) -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made) / "state"
        folder.mkdir()
        if root:  # root writes anywhere, so become somebody whom the mode binds
            os.chown(made, 65534, -1)
            os.chown(folder, 65534, -1)
        folder.chmod(0o500)
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(StoreError, match=r"state folder .* cannot be used: Permission denied"):
                Store.open(folder, keys)
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o700)


def test_what_is_no_database_of_ours_is_refused(folder: Path, keys: Keys) -> None:
    folder.mkdir(mode=0o700)
    path = folder / "ringfence.db"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store.open(folder, keys)
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE theirs (x)")
    foreign.close()
    with pytest.raises(StoreError, match="another program"):
        Store.open(folder, keys)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError):
        Store.open(folder, keys)


def test_a_newer_schema_is_refused(folder: Path, keys: Keys) -> None:
    Store.open(folder, keys).close()
    connection = sqlite3.connect(folder / "ringfence.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="newer version"):
        Store.open(folder, keys)
    with pytest.raises(StoreError, match="newer version"):
        Reader.open(folder)


TRIGGER = "CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM keys; END"


def test_a_database_with_a_trigger_is_not_written_to(folder: Path, keys: Keys) -> None:
    Store.open(folder, keys).close()
    with contextlib.closing(sqlite3.connect(folder / "ringfence.db")) as connection:
        connection.execute(TRIGGER)
    with pytest.raises(StoreError, match="has the trigger 't'"):
        Store.open(folder, keys)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python cannot tell SQLite to run no triggers")
def test_a_trigger_that_is_made_while_a_process_runs_does_nothing_there(folder: Path, store: Store) -> None:
    store.write_sync(lambda tx: tx.take_key("scope", "key", "sha256:x", "call_1"))
    with contextlib.closing(sqlite3.connect(folder / "ringfence.db")) as connection:
        connection.execute(TRIGGER)
        store.write_sync(add("after"))
        assert store.reader().key("scope", "key") is not None
        connection.execute("DROP TRIGGER t")


def test_starts_at_once_make_one_database(folder: Path, keys: Keys, verified: Callable[[], None]) -> None:
    opened: list[Store] = []
    failures: list[BaseException] = []

    def start() -> None:
        try:
            opened.append(Store.open(folder, keys))
        except BaseException as exc:  # a thread's failure must reach the test
            failures.append(exc)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in opened:
        each.write_sync(add(each.chain))
        each.close()
    assert (failures, len({each.chain for each in opened})) == ([], 8)
    verified()


def test_a_reader_needs_a_database(folder: Path) -> None:
    with pytest.raises(StoreError, match="no database"):
        Reader.open(folder)


# ── Writing ──


async def test_two_hundred_writes_at_once_get_consecutive_places(store: Store, verified: Callable[[], None]) -> None:
    seqs = await asyncio.gather(*(store.write(add(f"c{n}"), durable=n % 7 == 0) for n in range(200)))
    assert sorted(seqs) == list(range(2, 202))
    verified()


async def test_a_failing_job_takes_only_itself_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(tx: Transaction) -> None:
        tx.append("note", "spoiled", {})
        tx.take_key("s", "spoiled", "d", "spoiled")
        raise LookupError("mine")

    gate = threading.Event()
    blocker = asyncio.ensure_future(store.write(lambda tx: gate.wait(60)))
    await asyncio.sleep(0.05)  # so that the rest wait together and make one group
    waiting = [
        store.write(add("a")),
        store.write(spoiled),
        store.write(add("b")),
        store.write(add("x", nan=float("nan"))),
    ]
    tasks = [asyncio.ensure_future(work) for work in waiting]
    await asyncio.sleep(0)
    gate.set()
    await blocker
    first, second, third, fourth = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, third) == (2, 3)
    assert isinstance(second, LookupError) and str(second) == "mine"
    assert isinstance(fourth, StoreError)
    assert [record.call_id for record in store.reader().records(kind="note")] == ["a", "b"]
    assert store.reader().key("s", "spoiled") is None


async def test_even_an_exit_in_a_job_leaves_the_writer_alive(store: Store) -> None:
    def leave(tx: Transaction) -> None:
        raise KeyboardInterrupt

    task = asyncio.ensure_future(store.write(add("a")))
    with pytest.raises(KeyboardInterrupt):
        store.write_sync(leave)
    assert await task == 2
    assert await store.write(add("b")) == 3


async def test_the_loop_runs_on_while_the_disk_works(store: Store) -> None:
    release = threading.Event()
    slow = asyncio.ensure_future(store.write(lambda tx: release.wait(60)))
    await asyncio.sleep(0.01)
    assert not slow.done()
    release.set()
    assert await slow is True


async def test_a_cancelled_task_abandons_the_answer_not_the_work(store: Store) -> None:
    release = threading.Event()
    blocker = asyncio.ensure_future(store.write(lambda tx: release.wait(60)))
    abandoned = asyncio.ensure_future(store.write(add("abandoned")))
    await asyncio.sleep(0.01)
    abandoned.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abandoned
    release.set()
    await blocker
    assert await store.write(add("after")) == 3
    assert [r.call_id for r in store.reader().records(kind="note")] == ["abandoned", "after"]


def test_a_loop_that_is_gone_does_not_stop_the_writer(store: Store) -> None:
    release = threading.Event()

    async def leave() -> None:
        for work in (lambda tx: release.wait(60), add("orphan")):
            task = asyncio.ensure_future(store.write(work))
            await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(leave())
    release.set()
    assert store.write_sync(add("after")) == 3


def test_a_closed_store_says_so(folder: Path, keys: Keys) -> None:
    store = Store.open(folder, keys)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.write_sync(add())
    for alone in (False, True):
        with pytest.raises(StoreError, match="closed"):
            asyncio.run(store.write(add(), alone=alone))


async def test_closing_drains_the_queue_first(folder: Path, keys: Keys, verified: Callable[[], None]) -> None:
    store = Store.open(folder, keys)
    tasks = [asyncio.ensure_future(store.write(add(f"c{n}"))) for n in range(300)]
    await asyncio.sleep(0)
    await store.aclose()
    assert sorted([await task for task in tasks]) == list(range(2, 302))
    last = list(Reader.open(folder).records())[-1]
    assert (last.kind, last.seq, last.body["recovered"]) == ("chain_closed", 302, False)
    verified()


async def test_an_absurd_queue_is_refused_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 5)
    begun, release = threading.Event(), threading.Event()

    def block(tx: Transaction) -> None:
        begun.set()
        release.wait(60)

    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(store.write(block))]
    await tooling.until(begun.is_set)
    tasks += [asyncio.ensure_future(store.write(add(str(n)))) for n in range(8)]
    await tooling.until(lambda: sum(task.done() for task in tasks) >= 3)
    assert [task.done() for task in tasks] == [False] * 6 + [True] * 3
    release.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, StoreError)]
    assert len(refused) == 3
    assert "overloaded" in str(refused[0])


def test_a_call_finishes_only_once(store: Store) -> None:
    store.write_sync(add("c", "finished"))
    with pytest.raises(Conflict):
        store.write_sync(add("c", "finished"))
    assert store.write_sync(add("d", "finished")) == 3


@pytest.mark.parametrize(
    "text", ["\x00\x1f\u2028é☃𝄞", "x" * 1_000_000, '"\\' * 100_000], ids=["unicode", "huge", "escapes"]
)
def test_what_goes_in_comes_out(store: Store, keys: Keys, verified: Callable[[], None], text: str) -> None:
    store.write_sync(add("ключ\n", text=text))
    (record,) = store.reader().records(call_id="ключ\n")
    assert record.body["text"] == text
    verified()


def test_a_record_beyond_all_measure_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="over the limit"):
        store.write_sync(add(text="x" * MAX_RECORD_BYTES))
    assert store.write_sync(add()) == 2


# ── What must not go wrong quietly ──


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_database_taken_away_is_noticed(folder: Path, keys: Keys, how: str) -> None:
    store = Store.open(folder, keys)
    path = folder / "ringfence.db"
    path.rename(folder / "away.db")
    if how == "replaced":
        path.touch()
    with pytest.raises(StoreError, match="gone" if how == "removed" else "replaced"):
        store.write_sync(add())
    path.unlink(missing_ok=True)
    (folder / "away.db").rename(path)
    assert store.write_sync(add()) == 2
    store.close()


def test_a_stranger_in_our_chain_stops_it(folder: Path, keys: Keys) -> None:
    store = Store.open(folder, keys)
    connection = sqlite3.connect(folder / "ringfence.db")
    connection.execute(
        "INSERT INTO records (chain, seq, at, kind, text, hash) VALUES (?, 2, 0, 'x', '{}', 'x')", (store.chain,)
    )
    connection.commit()
    connection.close()
    for _ in range(2):
        with pytest.raises(StoreError):
            store.write_sync(add())
    with pytest.raises(StoreError):
        store.close()


def test_a_failed_checkpoint_fails_the_jobs_and_the_next_covers_them(
    store: Store, monkeypatch: pytest.MonkeyPatch, verified: Callable[[], None]
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="checkpoint could not be written: No space left"):
        store.write_sync(add("lost"))
    monkeypatch.setattr(os, "pwrite", real)
    assert store.write_sync(add("kept")) == 3
    verified()


def test_a_locked_database_fails_and_recovers(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = store._writer._connection
    assert connection is not None
    store.write_sync(lambda tx: tx._connection.execute("PRAGMA busy_timeout = 50"))
    other = sqlite3.connect(folder / "ringfence.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        store.write_sync(add())
    other.execute("ROLLBACK")
    other.close()
    assert store.write_sync(add()) == 2


def test_an_error_of_sqlite_within_the_work_fails_the_group(store: Store) -> None:
    def broken(tx: Transaction) -> None:
        tx.append("note", "half", {})
        tx._connection.execute("SELECT * FROM absent")

    with pytest.raises(StoreError, match="no such table"):
        store.write_sync(broken)
    assert store.write_sync(add("whole")) == 2


def test_values_that_served_their_purpose_are_forgotten_at_the_next_start(tmp_path: Path) -> None:
    keys = load_or_create(tmp_path / "keys")
    with Store.open(tmp_path / "state", keys) as store:
        store.write_sync(lambda tx: tx.take_key("scope", "old", "sha256:x", "call_1"))
        store.write_sync(lambda tx: tx.settle_key("scope", "old", "done", {"result": "planted"}))
        store.write_sync(lambda tx: tx.take_key("scope", "new", "sha256:x", "call_2"))
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "ringfence.db")) as connection, connection:
        connection.execute("UPDATE keys SET at = at - 9 * 86400 WHERE key = 'old'")
    with Store.open(tmp_path / "state", keys) as store:
        assert store.reader().key("scope", "old") is None
        assert store.reader().key("scope", "new") is not None


@pytest.fixture
def time_of_day(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time of day, by so many days from now."""

    def set_to(days: float) -> None:
        shifted = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + days * 86400})
        for name in ("transaction", "pruning", "sqlite", "chainfiles", "writer"):
            monkeypatch.setattr(f"ringfence.store.{name}.time", shifted)

    return set_to


def keyed(tmp_path: Path, keys: Keys) -> None:
    with Store.open(tmp_path / "state", keys) as store:
        store.write_sync(lambda tx: tx.take_key("scope", "key", "sha256:x", "call_1"))
        store.write_sync(lambda tx: tx.settle_key("scope", "key", "done", {}))


@pytest.mark.parametrize("ahead", [6.5, 8, 400])
def test_a_start_while_the_clock_is_ahead_forgets_no_key(
    tmp_path: Path, time_of_day: Callable[[float], None], ahead: float
) -> None:
    keys = load_or_create(tmp_path / "keys")
    time_of_day(-1.5)
    keyed(tmp_path, keys)
    for days in (0, ahead, ahead, 0):  # each a process of its own; the second one ahead finds records of the first
        time_of_day(days)
        with Store.open(tmp_path / "state", keys) as store:
            store.write_sync(add("x"))
            assert store.reader().key("scope", "key") is not None


def test_a_key_is_forgotten_once_its_days_have_passed(tmp_path: Path, time_of_day: Callable[[float], None]) -> None:
    keys = load_or_create(tmp_path / "keys")
    keyed(tmp_path, keys)
    there = []
    for day in range(1, 10):
        time_of_day(day * 0.99)
        with Store.open(tmp_path / "state", keys) as store:
            there.append(store.reader().key("scope", "key") is not None)
    assert there == [True] * 8 + [False]


def test_a_key_is_forgotten_on_a_machine_that_is_seldom_on(
    tmp_path: Path, time_of_day: Callable[[float], None]
) -> None:
    keys = load_or_create(tmp_path / "keys")
    keyed(tmp_path, keys)
    for day in (9, 18):
        time_of_day(day)
        with Store.open(tmp_path / "state", keys) as store:
            there = store.reader().key("scope", "key") is not None
    assert not there
