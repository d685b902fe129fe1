"""A start closes what a crash left open, and nothing else."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ringfence.audit.chain import ALWAYS, seal
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import Keys, load_or_create
from ringfence.core.errors import StoreError
from ringfence.store import Reader, Store, writer
from tests.store.conftest import Drive

STARTED = {
    "call": {"id": "c1", "tool": "t"},
    "contract": {"name": "t"},
    "decision": {"allowed": True},
    "approval": None,
    "arguments": {"digest": "sha256:x"},
    "effect_possible": True,
}


def crash(store: Store) -> None:
    """Leave everything as a killed process would: nothing closed, the lock let go."""
    store._writer._jobs.put(None)
    store._writer.join()
    store._lock.release()
    store._checkpoints.close()


def begin(store: Store, call_id: str, **body: object) -> None:
    def work(tx) -> None:
        tx.take_key("s", call_id, "d", call_id)
        tx.append("started", call_id, {**STARTED, **body})

    store.write_sync(work)


def kinds(folder: Path, chain: str) -> list[str]:
    reader = Reader.open(folder)
    try:
        return [record.kind for record in reader.records(chain=chain)]
    finally:
        reader.close()


def test_dangling_calls_are_closed_as_unknown(folder: Path, keys: Keys, verified: Callable[[], None]) -> None:
    first = Store.open(folder, keys)
    begin(first, "c1")
    begin(first, "c2", effect_possible=False)
    begin(first, "c3")
    first.write_sync(lambda tx: tx.append("finished", "c3", {"status": "success"}))
    crash(first)
    with Store.open(folder, keys) as second:
        assert second.recovered.chains == (first.chain,)
        assert second.recovered.calls == ("c1", "c2")
        read = second.reader()
        one, two = (next(iter(read.records(call_id=c, kind="finished"))).body for c in ("c1", "c2"))
        assert (one["status"], one["reason_code"], one["effect"], one["recovered"]) == (
            "unknown",
            "crash",
            "unknown",
            True,
        )
        assert (one["call"], one["decision"], one["started_seq"]) == (STARTED["call"], STARTED["decision"], 2)
        assert two["effect"] == "none"
        states = [row.state for c in ("c1", "c2", "c3") if (row := read.key("s", c)) is not None]
        assert states == ["unknown", "unknown", "started"]
        assert read.running() == []
    assert kinds(folder, first.chain)[-3:] == ["finished", "finished", "chain_closed"]
    verified()
    with Store.open(folder, keys) as third:
        assert third.recovered.chains == ()


def test_a_call_left_running_at_an_orderly_end_is_closed_too(folder: Path, keys: Keys) -> None:
    with Store.open(folder, keys) as store:
        begin(store, "c1")
    assert kinds(folder, store.chain)[-2:] == ["finished", "chain_closed"]


def test_a_checkpoint_older_than_the_database_is_brought_up(
    folder: Path, keys: Keys, verified: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Store.open(folder, keys)
    monkeypatch.setattr(writer.Writer, "_cover", lambda self: None)
    begin(first, "c1")
    crash(first)
    monkeypatch.undo()
    Store.open(folder, keys).close()
    reader = Reader.open(folder)
    report = verify_live(*reader.evidence(), keys.public)
    reader.close()
    assert report.ok
    (note,) = report.notes
    assert "records 2 to 2 had no checkpoint when Ringfence started" in note


def test_a_chain_closed_without_its_last_checkpoint_is_settled(
    folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch, verified: Callable[[], None]
) -> None:
    first = Store.open(folder, keys)
    monkeypatch.setattr(writer.Writer, "_cover", lambda self: None)
    monkeypatch.setattr(Store, "_settle", lambda self: None)
    first.close()
    monkeypatch.undo()
    with Store.open(folder, keys) as second:
        assert second.recovered.chains == (first.chain,)
    # Once more, by whoever found it, with a word on that.
    assert kinds(folder, first.chain)[-2:] == ["chain_closed", "chain_closed"]
    verified()


def test_records_that_somebody_adds_to_a_chain_are_signed_for_as_found_and_no_more(folder: Path, keys: Keys) -> None:
    with Store.open(folder, keys) as first:
        begin(first, "c1")
    with closing(Reader.open(folder)) as reader:
        begun, end = (list(reader.records(chain=first.chain))[at] for at in (0, -1))
    opened = seal(end.head, time.time(), "chain_opened", None, {"state": begun.body["state"]})
    forged = seal(opened.head, time.time(), "finished", "c2", {"status": "success"})
    closed = seal(forged.head, time.time(), "chain_closed", None, {"recovered": False, "calls": 0})
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as connection:
        for record in (opened, forged, closed):
            row = (record.chain, record.seq, record.at, record.kind, record.call_id, record.text, record.hash)
            connection.execute(
                "INSERT INTO records (chain, seq, at, kind, call_id, text, hash) VALUES (?, ?, ?, ?, ?, ?, ?)", row
            )
        connection.execute("UPDATE chains SET settled = 0")
    Store.open(folder, keys).close()
    with closing(Reader.open(folder)) as reader:
        report = verify_live(*reader.evidence(), keys.public)
        export = folder.parent / "export"
        write_export(export, reader.period(), keys, ALWAYS, reader.checkpoints())
    for found in (report, verify_export(export, keys.public)):
        assert f"records {opened.seq} to {closed.seq} had no checkpoint when Ringfence started" in str(found)


def test_a_live_process_keeps_its_chain(folder: Path, keys: Keys, drive: Drive, verified: Callable[[], None]) -> None:
    other = drive("hold")
    assert other.stdin is not None and other.stdout is not None
    chain = other.stdout.readline().split()[1]
    with Store.open(folder, keys) as store:
        assert store.recovered.chains == ()
        assert store.reader().running() == [f"held-{chain}"]
        other.stdin.write("go on\n")
        other.stdin.flush()
        assert other.stdout.readline() == "closed\n"
    assert kinds(folder, chain) == ["chain_opened", "started", "finished", "chain_closed"]
    verified()


def test_a_killed_process_is_closed_by_the_next(
    folder: Path, keys: Keys, drive: Drive, verified: Callable[[], None]
) -> None:
    other = drive("hold")
    assert other.stdout is not None
    chain = other.stdout.readline().split()[1]
    other.send_signal(signal.SIGKILL)
    other.wait()
    with Store.open(folder, keys) as store:
        assert store.recovered.calls == (f"held-{chain}",)
    assert kinds(folder, chain) == ["chain_opened", "started", "finished", "chain_closed"]
    verified()


def tamper(folder: Path, statement: str) -> None:
    connection = sqlite3.connect(folder / "ringfence.db")
    connection.execute(statement)
    connection.commit()
    connection.close()


DAMAGE: dict[str, tuple[Callable[[Path, str], object], str]] = {
    "tail cut": (lambda f, c: tamper(f, "DELETE FROM records WHERE seq > 2"), "ends before record 3"),
    "signed record edited": (lambda f, c: tamper(f, "UPDATE records SET hash = 'x' WHERE seq = 3"), "is not the one"),
    "forged continuation": (
        lambda f, c: tamper(
            f, f"INSERT INTO records (chain, seq, at, kind, text, hash) VALUES ('{c}', 4, 0, 'x', '{{}}', 'x')"
        ),
        "was edited",
    ),
    "no checkpoint": (lambda f, c: (f / "checkpoints" / c).unlink(), "no checkpoint file"),
    "spoiled checkpoint": (lambda f, c: (f / "checkpoints" / c).write_bytes(b"x" * 1024), "verifies with this key"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_chain_is_left_as_evidence(name: str, folder: Path, keys: Keys) -> None:
    damage, said = DAMAGE[name]
    first = Store.open(folder, keys)
    begin(first, "c1")
    begin(first, "c2")
    crash(first)
    damage(folder, first.chain)
    before = kinds(folder, first.chain)
    with Store.open(folder, keys) as second:
        assert said in second.recovered.damaged[0]
        read = second.reader()
        assert read.running() == []
        closed = [r for c in ("c1", "c2") for r in read.records(call_id=c, kind="finished")]
        assert [(r.chain, r.body["status"]) for r in closed] == [(second.chain, "unknown")] * 2
        assert said in next(iter(read.records(kind="chain_damaged"))).body["message"]
        assert not verify_live(*read.evidence(), keys.public).ok
    assert kinds(folder, first.chain) == before
    with Store.open(folder, keys) as third:
        assert third.recovered.damaged == ()
        assert len(list(third.reader().records(kind="chain_damaged"))) == 1


def test_another_key_finds_the_old_chain_damaged_and_goes_on(folder: Path, keys: Keys, tmp_path: Path) -> None:
    crash(Store.open(folder, keys))
    with Store.open(folder, load_or_create(tmp_path / "new keys")) as store:
        assert "verifies with this key" in store.recovered.damaged[0]
        # Behind its opening, what was found, and that the state has another id to who verifies with the new key.
        assert store.write_sync(lambda tx: tx.append("note", None, {}).seq) == 4


def test_a_chain_with_a_hostile_name_touches_no_file(folder: Path, keys: Keys) -> None:
    Store.open(folder, keys).close()
    tamper(folder, "INSERT INTO chains (chain) VALUES ('../../escape')")
    Store.open(folder, keys).close()
    assert not (folder.parent / "escape.lock").exists()
    assert not list(folder.parent.glob("**/escape*"))


def stands_at(store: Store) -> int:
    """The record up to which the checkpoint file is signed."""
    newest = store._checkpoints.read().newest
    return 0 if newest is None else newest.seq


@pytest.mark.anyio
async def test_what_need_not_be_covered_is_covered_by_the_next_that_must_be(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    with Store.open(folder, keys) as store:
        before = stands_at(store)
        await store.write(lambda tx: tx.append("started", "c1", STARTED), covered=False)
        assert stands_at(store) == before
        await store.write(lambda tx: tx.append("started", "c2", STARTED), covered=False, alone=True)
        assert stands_at(store) == before
        receipt = await store.write(lambda tx: tx.append("finished", "c1", {"status": "success"}), alone=True)
        assert stands_at(store) == receipt.seq == before + 3
        await store.write(lambda tx: tx.append("finished", "c2", {"status": "success"}))
    verified()


@pytest.mark.anyio
async def test_a_crash_between_the_two_is_closed_by_the_next_start(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    first = Store.open(folder, keys)
    before = stands_at(first)
    await first.write(lambda tx: tx.append("started", "c1", {**STARTED, "effect_possible": False}), covered=False)
    assert stands_at(first) == before
    crash(first)
    with Store.open(folder, keys) as second:
        assert (second.recovered.chains, second.recovered.calls) == ((first.chain,), ("c1",))
        (closed,) = second.reader().records(call_id="c1", kind="finished")
        assert (closed.body["status"], closed.body["effect"]) == ("unknown", "none")
    assert kinds(folder, first.chain)[-3:] == ["started", "finished", "chain_closed"]
    verified()


@pytest.mark.anyio
async def test_an_uncovered_record_that_was_changed_before_the_crash_shows_in_the_chain(
    folder: Path, keys: Keys
) -> None:
    first = Store.open(folder, keys)
    await first.write(lambda tx: tx.append("started", "c1", STARTED), covered=False)
    await first.write(lambda tx: tx.append("started", "c2", STARTED), covered=False)
    crash(first)
    tamper(folder, "UPDATE records SET hash = 'x' WHERE call_id = 'c1'")
    with Store.open(folder, keys) as second:
        assert second.recovered.damaged != ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["chains/{}.lock", "chains/{}.ahead", "checkpoints/{}"])
def test_a_chain_with_a_file_of_another_user_is_not_taken_up(folder: Path, keys: Keys, name: str) -> None:
    first = Store.open(folder, keys)
    crash(first)
    path = folder / name.format(first.chain)
    os.chown(path, 65534, -1)
    with pytest.raises(StoreError, match=rf"{path.name} belongs to another user \(uid 65534\)"):
        Store.open(folder, keys)
    os.chown(path, os.geteuid(), -1)
    with Store.open(folder, keys) as second:
        assert second.recovered.chains == (first.chain,)
