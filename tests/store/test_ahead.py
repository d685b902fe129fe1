"""That a call has begun is written beside the database, and is as safe there as in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.audit import chain
from ringfence.audit.chain import Head
from ringfence.audit.export import verify_live
from ringfence.audit.keys import Keys
from ringfence.core.errors import StoreError
from ringfence.store import Store, chainfiles
from ringfence.store.chainfiles import AheadFile
from tests import tooling
from tests.store.conftest import Drive

pytestmark = pytest.mark.anyio

SALT = b"0123456789abcdef"
BODY: dict[str, Any] = {"effect_possible": False, "call": {"tool": "t"}}


def kinds(folder: Path) -> list[tuple[str, str | None]]:
    """As another process sees it now."""
    connection = sqlite3.connect(f"file:{folder / 'ringfence.db'}?mode=ro", uri=True)
    try:
        return connection.execute("SELECT kind, call_id FROM records WHERE call_id IS NOT NULL ORDER BY id").fetchall()
    finally:
        connection.close()


def file_of(store: Store) -> Path:
    return chainfiles.ahead_path(store.folder, store.chain)


async def begin(store: Store, call_id: str, *, alone: bool = True) -> int:
    return (await store.begin(call_id, BODY, SALT, alone=alone)).seq


async def end(store: Store, call_id: str) -> int:
    return (await store.write(lambda tx: tx.append("finished", call_id, {"status": "success"}), alone=True)).seq


# ── One after the other ──


async def test_the_end_of_a_call_takes_its_beginning_along(
    folder: Path, store: Store, verified: Callable[[], None]
) -> None:
    assert await begin(store, "c1") == 2
    assert kinds(folder) == []
    assert await end(store, "c1") == 3
    assert kinds(folder) == [("started", "c1"), ("finished", "c1")]
    assert store.reader().running() == []
    with contextlib.closing(sqlite3.connect(folder / "ringfence.db")) as database:
        assert database.execute("SELECT salt FROM records WHERE kind = 'started'").fetchall() == [(SALT,)]
    verified()


async def test_calls_that_overlap_are_each_put_down_as_running_until_their_end(
    folder: Path, store: Store, verified: Callable[[], None]
) -> None:
    await begin(store, "a")
    await begin(store, "b")
    await end(store, "b")
    assert kinds(folder) == [("started", "a"), ("started", "b"), ("finished", "b")]
    assert store.reader().running() == ["a"]
    await begin(store, "c", alone=False)
    await end(store, "a")
    await end(store, "c")
    assert store.reader().running() == []
    verified()


async def test_a_call_that_takes_its_time_is_in_the_database_soon(folder: Path, store: Store) -> None:
    for number in (1, 2):
        await begin(store, f"c{number}")
        await tooling.until(lambda number=number: len(kinds(folder)) == number)  # type: ignore[misc]
        assert kinds(folder)[-1] == ("started", f"c{number}")
    assert store.reader().running() == ["c1", "c2"]


async def test_work_that_fails_leaves_what_was_written_ahead(
    folder: Path, store: Store, verified: Callable[[], None]
) -> None:
    await begin(store, "a")
    with pytest.raises(ZeroDivisionError):
        await store.write(lambda tx: 1 // 0, alone=True)
    assert kinds(folder) == []
    done = await asyncio.gather(
        store.write(lambda tx: 1 // 0),
        store.write(lambda tx: tx.append("finished", "a", {"status": "success"})),
        store.write(lambda tx: (tx.append("finished", "a", {}), 1 // 0)),
        return_exceptions=True,
    )
    assert [isinstance(each, Exception) for each in done] == [True, False, True]
    assert kinds(folder) == [("started", "a"), ("finished", "a")]
    assert store.reader().running() == []
    verified()


async def test_no_checkpoint_is_signed_for_what_is_only_ahead_of_the_database(
    store: Store, verified: Callable[[], None]
) -> None:
    await begin(store, "a")
    for alone in (True, False):
        with pytest.raises(ZeroDivisionError):
            await store.write(lambda tx: 1 // 0, alone=alone)
        verified()  # as whoever closes the chain of a killed process finds it


async def test_a_database_that_is_gone_is_noticed_before_a_call_begins(folder: Path, store: Store) -> None:
    (folder / "ringfence.db").rename(folder / "elsewhere")
    try:
        with pytest.raises(StoreError, match="gone"):
            await begin(store, "c1")
    finally:
        (folder / "elsewhere").rename(folder / "ringfence.db")


async def test_what_does_not_fit_goes_into_the_database(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, verified: Callable[[], None]
) -> None:
    monkeypatch.setattr(chainfiles, "MAX_AHEAD_BYTES", os.path.getsize(file_of(store)) + 700)
    for number in range(5):
        await begin(store, f"c{number}")
    assert len(kinds(folder)) >= 2
    await end(store, "c0")
    assert [call for kind, call in kinds(folder) if kind == "started"] == [f"c{n}" for n in range(5)]
    verified()


async def test_what_the_database_has_is_gone_from_it_and_an_orderly_end_removes_it(folder: Path, keys: Keys) -> None:
    """Whoever erases the salt in the database is another process, which does not write to this file."""
    store = Store.open(folder, keys)
    for call_id in ("c1", "c2"):
        await begin(store, call_id)
        assert SALT.hex().encode() in file_of(store).read_bytes()
    await end(store, "c1")
    assert not file_of(store).read_bytes().strip(b"\0")
    await store.aclose()
    assert not file_of(store).exists()


# ── After a crash ──


def killed(drive: Drive) -> str:
    """The chain of a process that was, with one call ended and two begun."""
    driver = drive("begin")
    assert driver.stdout is not None
    name = driver.stdout.readline().split()[1]
    assert driver.stdout.readline() == "begun\n"
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    return name


async def test_a_call_that_had_only_begun_when_its_process_was_killed_is_closed(
    folder: Path, keys: Keys, drive: Drive, verified: Callable[[], None]
) -> None:
    name = killed(drive)
    assert kinds(folder) == [("started", "first"), ("finished", "first")]
    with Store.open(folder, keys) as store:
        assert store.recovered.calls == ("second", "third")
    assert kinds(folder)[2:] == [
        ("started", "second"),
        ("started", "third"),
        ("finished", "second"),
        ("finished", "third"),
    ]
    assert not chainfiles.ahead_path(folder, name).exists()
    verified()


async def test_who_says_that_an_ended_call_began_again_keeps_no_start_from_going_on(
    folder: Path, keys: Keys, drive: Drive
) -> None:
    name = killed(drive)
    with contextlib.closing(sqlite3.connect(folder / "ringfence.db")) as database:
        last = database.execute("SELECT seq, hash FROM records WHERE chain = ? ORDER BY seq DESC", (name,)).fetchone()
    chainfiles.ahead_path(folder, name).unlink()
    file = AheadFile(folder, name)
    file.append(chain.seal(Head(name, *last), 1.5, "started", "first", {}), SALT)
    file.close()
    with Store.open(folder, keys) as store:
        assert store.recovered.calls == () and store.reader().running() == []
        report = verify_live(*store.reader().evidence(), keys.public)
    assert "and call first, which began at record 4, is open" in str(report)


# ── The file ──


def records(count: int, size: int = 3) -> list[chain.Record]:
    head, made = Head("c"), []
    for number in range(count):
        made.append(chain.seal(head, 1.5, "started", f"call_{number}", {"x": "y\n" * size}))
        head = made[-1].head
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "chains").mkdir()
    return folder


def test_only_what_follows_is_read(place: Path) -> None:
    chainfiles.ahead_path(place, "c").unlink(missing_ok=True)
    file = AheadFile(place, "c")
    made = records(4)
    for record in made[:3]:
        file.append(record, SALT)
    assert chainfiles.read_ahead(place, Head("c")) == [(record, SALT) for record in made[:3]]
    assert chainfiles.read_ahead(place, made[0].head) == []
    file.begin_anew()
    file.append(made[3], None)
    assert chainfiles.read_ahead(place, made[2].head) == [(made[3], None)]
    assert chainfiles.read_ahead(place, Head("c")) == []
    assert chainfiles.read_ahead(place, Head("another")) == []
    file.close()


@given(st.data())
def test_whatever_became_of_the_file_what_is_read_was_written(place: Path, data: st.DataObject) -> None:
    chainfiles.ahead_path(place, "c").unlink(missing_ok=True)
    file = AheadFile(place, "c")
    made = records(3, data.draw(st.integers(0, 5)))
    for record in made:
        file.append(record, SALT)
    file.close()
    path = chainfiles.ahead_path(place, "c")
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.sampled_from(["cut", "flip", "insert", "repeat"]))
    if change == "cut":
        damaged = whole[:at]
    elif change == "flip":
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    elif change == "insert":
        damaged = whole[:at] + data.draw(st.binary(min_size=1, max_size=20)) + whole[at:]
    else:
        damaged = whole + whole[:at]
    path.write_bytes(damaged)
    found = [record for record, _ in chainfiles.read_ahead(place, Head("c"))]
    assert found == made[: len(found)]


@given(st.binary(max_size=300))
def test_a_file_of_anything_is_read_without_harm(place: Path, content: bytes) -> None:
    chainfiles.ahead_path(place, "c").write_bytes(content)
    assert chainfiles.read_ahead(place, Head("c")) == []


@pytest.mark.parametrize(
    ("kind", "call_id", "at"),
    [
        *(("finished", "c", 1.5), ("pin_accepted", None, 1.5), (chain.CLOSED, None, 1.5)),
        *(("started", None, 1.5), ("started", {"a": 1}, 1.5), ("started", 7, 1.5)),
        *(("started", "c", 10**400), ("started", "c", True), ("started", "c", -1)),
    ],
)
def test_nothing_but_that_a_call_has_begun_is_read(place: Path, kind: str, call_id: Any, at: Any) -> None:
    chainfiles.ahead_path(place, "c").unlink(missing_ok=True)
    file = AheadFile(place, "c")
    file.append(chain.seal(Head("c"), at, kind, call_id, {}), SALT)
    file.close()
    assert chainfiles.read_ahead(place, Head("c")) == []


def test_what_is_no_file_keeps_nobody_waiting(place: Path) -> None:
    path = chainfiles.ahead_path(place, "c")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert chainfiles.read_ahead(place, Head("c")) == []
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic links"):
        chainfiles.read_ahead(place, Head("c"))
    path.unlink()
