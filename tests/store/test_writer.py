"""Whoever is alone writes at once, on their own thread; the log is moved meanwhile; no file goes missing unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.keys import Keys
from ringfence.core.errors import StoreError
from ringfence.store import Store, Transaction
from tests import tooling

pytestmark = pytest.mark.anyio


def add(call_id: str = "c", kind: str = "note", **body: Any) -> Callable[[Transaction], int]:
    return lambda tx: tx.append(kind, call_id, body).seq


def at_once(writing: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for."""
    with pytest.raises(StopIteration) as over:
        writing.send(None)
    return over.value.value


async def test_whoever_is_alone_need_not_wait(store: Store, verified: Callable[[], None]) -> None:
    assert [at_once(store.write(add(str(n)), alone=True)) for n in range(3)] == [2, 3, 4]
    assert await store.write(add("durable"), durable=True, alone=True) == 5
    assert await store.write(add("one of many")) == 6
    assert at_once(store.write(add("alone again"), alone=True)) == 7
    with pytest.raises(ZeroDivisionError):
        await store.write(lambda tx: 1 // 0, alone=True)
    assert [r.seq for r in store.reader().records(kind="note")] == [2, 3, 4, 5, 6, 7]
    verified()


async def test_whoever_is_alone_waits_beside_the_loop_for_others_who_write(folder: Path, store: Store) -> None:
    begun, release = threading.Event(), threading.Event()

    def block(tx: Transaction) -> bool:
        begun.set()
        return release.wait(60)

    slow = asyncio.ensure_future(store.write(block))
    await tooling.until(begun.is_set)
    behind_us = asyncio.ensure_future(store.write(add("a"), alone=True))
    await asyncio.sleep(0.01)
    assert not behind_us.done()
    release.set()
    assert (await slow, await behind_us) == (True, 2)
    with contextlib.closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as another_process:
        another_process.execute("BEGIN IMMEDIATE")
        behind_them = asyncio.ensure_future(store.write(add("b"), alone=True))
        await asyncio.sleep(0.05)
        assert not behind_them.done()
        another_process.execute("ROLLBACK")
        assert await behind_them == 3
    assert at_once(store.write(add("c"), alone=True)) == 4


async def test_the_log_is_moved_into_the_database_however_it_is_written(folder: Path, store: Store) -> None:
    for n in range(40):
        await store.write(add(str(n), text="x" * 100_000), alone=n % 2 == 0)
    store.write_sync(add("and what was asked for before it"))
    assert (folder / "ringfence.db").stat().st_size > 3_000_000
    assert (folder / "ringfence.db-wal").stat().st_size < 3_000_000


@pytest.mark.parametrize("name", ["ringfence.db", "ringfence.db-wal"])
def test_a_file_taken_away_is_noticed_though_the_folder_was_at_rest(folder: Path, keys: Keys, name: str) -> None:
    store = Store.open(folder, keys)
    for _ in range(2):
        os.utime(folder, (1e9, 1e9))
        time.sleep(0.01)
        store.write_sync(add())
    (folder / name).rename(folder / "away")
    with pytest.raises(StoreError, match="gone"):
        store.write_sync(add())
    (folder / "away").rename(folder / name)
    assert store.write_sync(add()) == 4
    store.close()


def test_a_folder_taken_away_is_noticed(folder: Path, keys: Keys) -> None:
    store = Store.open(folder, keys)
    store.write_sync(add())
    folder.rename(folder.with_name("away"))
    with pytest.raises(StoreError, match="gone"):
        store.write_sync(add())
    folder.with_name("away").rename(folder)
    assert store.write_sync(add()) == 3
    store.close()
