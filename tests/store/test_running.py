"""What runs is what the log says: the table of running calls is compared with it, and never believed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.chain import ALWAYS, Record, Verification, seal
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import Keys
from ringfence.core.errors import StoreError
from ringfence.store import Reader, Store, Transaction, sqlite
from tests.store.test_recovery import begin, crash, tamper
from tests.tooling import until


def about(call_id: str) -> dict[str, Any]:
    return {"call": {"id": call_id, "tool": f"tool of {call_id}"}, "arguments": {"digest": f"sha256:{call_id}"}}


def end(store: Store, call_id: str, **body: object) -> None:
    store.write_sync(lambda tx: tx.append("finished", call_id, {**about(call_id), "status": "success", **body}))


def killed(folder: Path, keys: Keys) -> str:
    """The chain of a process that was killed, when `read` had ended and `write` ran."""
    store = Store.open(folder, keys)
    begin(store, "read", **about("read"), effect_possible=False)
    end(store, "read", decision={"allowed": True}, contract={"name": "t"})
    begin(store, "write", **about("write"))
    crash(store)
    return store.chain


def recovered(folder: Path, keys: Keys) -> tuple[Verification, dict[str, list[Record]]]:
    with Store.open(folder, keys) as store:
        read = store.reader()
        finished = {call: list(read.records(call_id=call, kind="finished")) for call in ("write", "never")}
        return verify_live(*read.evidence(), keys.public, read.record), finished


def test_a_call_is_closed_as_what_the_chain_says_it_is(folder: Path, keys: Keys) -> None:
    killed(folder, keys)
    tamper(folder, "UPDATE running SET seq = 2")
    report, finished = recovered(folder, keys)
    ((body,)) = [record.body for record in finished["write"]]
    assert (body["call"], body["started_seq"], body["effect"]) == (about("write")["call"], 4, "unknown")
    assert [str(fault) for fault in report.faults] and "changed the table of running calls" in str(report)


def test_a_call_that_is_only_in_the_table_never_was(folder: Path, keys: Keys) -> None:
    chain = killed(folder, keys)
    tamper(folder, f"INSERT INTO running VALUES ('never', '{chain}', 2)")
    report, finished = recovered(folder, keys)
    assert finished["never"] == [] and len(finished["write"]) == 1
    assert "changed the table of running calls" in str(report)


def test_a_call_that_was_taken_out_of_the_table_is_closed_all_the_same(folder: Path, keys: Keys) -> None:
    killed(folder, keys)
    tamper(folder, "DELETE FROM running")
    report, finished = recovered(folder, keys)
    assert [record.body["status"] for record in finished["write"]] == ["unknown"]
    assert "changed the table of running calls" in str(report)
    with closing(Reader.open(folder)) as reader:
        row = reader.key("s", "write")
    assert row is not None and row.state == "unknown"


def test_a_process_that_ends_closes_what_it_began_whatever_the_table_says(folder: Path, keys: Keys) -> None:
    with Store.open(folder, keys) as store:
        begin(store, "write", **about("write"))
        tamper(folder, "UPDATE running SET call_id = 'never'")
    with closing(Reader.open(folder)) as reader:
        assert [record.call_id for record in reader.records(kind="finished")] == ["write"]
        assert "changed the table of running calls" in str(verify_live(*reader.evidence(), keys.public))


def test_a_start_that_was_changed_before_the_checkpoint_is_not_copied(folder: Path, keys: Keys) -> None:
    store = Store.open(folder, keys)
    begin(store, "write", **about("write"))
    for number in range(3):
        store.write_sync(lambda tx, n=number: tx.append("note", None, {"n": n}))  # type: ignore[misc]
    crash(store)
    tamper(folder, "UPDATE records SET text = replace(text, 'tool of write', 'tool of read') WHERE call_id = 'write'")
    with Store.open(folder, keys) as second:
        (body,) = (record.body for record in second.reader().records(call_id="write", kind="finished"))
        assert second.recovered.damaged != () and "call" not in body


def test_a_long_chain_is_read_from_the_first_call_that_is_open(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    store = Store.open(folder, keys)
    begin(store, "first", **about("first"))
    for number in range(5):
        begin(store, f"c{number}")
        store.write_sync(lambda tx, n=number: tx.append("finished", f"c{n}", {"status": "success"}))  # type: ignore[misc]
    crash(store)
    with Store.open(folder, keys) as second:
        assert second.recovered.calls == ("first",)
    verified()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM running", "call write has not ended, and the table of running calls does not have it"),
        ("UPDATE running SET seq = 1", "has call write, which did not begin there"),
        ("INSERT INTO running VALUES ('never', 'c', 2)", "has call never, which did not begin there"),
    ],
)
def test_a_changed_table_is_found_while_the_call_runs(folder: Path, keys: Keys, statement: str, said: str) -> None:
    with Store.open(folder, keys) as store:
        begin(store, "write", **about("write"))
        assert store.reader().misreported(9) == []
        tamper(folder, statement)
        assert any(said in text for text in store.reader().misreported(9))


# ── Both records of a call ──

CALL: dict[str, Any] = {"call": {"id": "c"}, "contract": {"name": "t"}, "decision": {"id": "d"}, "shared": ["a"]}

WRONG: dict[str, tuple[list[tuple[str, str | None, dict[str, Any]]], str]] = {
    "another call": (
        [("started", "c", CALL), ("finished", "c", {**CALL, "call": {"id": "x"}, "started_seq": 2})],
        "ends call c as another than the one that began at record 2",
    ),
    "another decision": (
        [("started", "c", CALL), ("finished", "c", {**CALL, "decision": {"id": "x"}, "started_seq": 2})],
        "ends call c as another than the one that began at record 2",
    ),
    "another part": (
        [("started", "c", CALL), ("finished", "c", {**CALL, "shared": ["x", "a"], "started_seq": 2})],
        "ends call c as another than the one that began at record 2",
    ),
    "another place": (
        [("started", "c", CALL), ("started", "x", CALL), ("finished", "c", {**CALL, "started_seq": 3})],
        "ends call c as begun at record 3, and it began at 2",
    ),
    "no beginning": ([("finished", "c", {**CALL, "started_seq": 1})], "ends call c, which did not begin at record 1"),
    "twice": ([("started", "c", CALL), ("started", "c", CALL)], "begins call c a second time"),
    "never": ([("started", "c", CALL), ("chain_closed", None, {})], "and call c, which began at record 2, is open"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_two_records_of_a_call_belong_together(folder: Path, keys: Keys, tmp_path: Path, name: str) -> None:
    bodies, said = WRONG[name]
    store = Store.open(folder, keys)

    def work(tx: Transaction) -> None:
        for kind, call_id, body in bodies:
            record = seal(tx.head, 1.0, kind, call_id, {n: v for n, v in body.items() if n != "shared"})
            if "shared" in body:
                record = seal(tx.head, 1.0, kind, call_id, body)
            tx._insert(record, None)
            tx.head = record.head

    store.write_sync(work)
    crash(store)
    with closing(Reader.open(folder)) as reader:
        live = verify_live(*reader.evidence(), keys.public)
        pieces, checkpoints = list(reader.records()), reader.checkpoints()
    assert said in str(live)
    if not any("shared" in body for _, _, body in bodies):
        write_export(tmp_path / "e", pieces, keys, ALWAYS, checkpoints)
        assert said in str(verify_export(tmp_path / "e", keys.public))


def test_a_call_that_was_closed_in_another_chain_belongs_together_in_an_export_too(
    folder: Path, keys: Keys, tmp_path: Path
) -> None:
    chain = killed(folder, keys)
    path = folder / "checkpoints" / chain
    held = path.read_bytes()
    path.unlink()
    Store.open(folder, keys).close()
    path.write_bytes(held)
    with closing(Reader.open(folder)) as reader:
        records, checkpoints = list(reader.records()), reader.checkpoints()
        assert verify_live(*reader.evidence(), keys.public).ok
    for number, order in enumerate((records, sorted(records, key=lambda r: r.chain != chain), records[::1])):
        write_export(tmp_path / f"e{number}", order, keys, ALWAYS, checkpoints)
        assert verify_export(tmp_path / f"e{number}", keys.public).ok


# ── Ends that are owed ──


@pytest.mark.anyio
async def test_an_end_that_could_not_be_written_is_written_with_the_next_that_can_be(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    with Store.open(folder, keys) as store:
        await store.write(lambda tx: (tx.take_key("s", "k", "d", "c1"), tx.append("started", "c1", about("c1"))))
        store.owe("c1")
        with pytest.raises(StoreError):
            await store.write(_fails, alone=True)
        (body,) = (record.body for record in store.reader().records(call_id="c1", kind="finished"))
        assert (body["status"], body["reason_code"], body["call"]) == ("unknown", "store", about("c1")["call"])
        row = store.reader().key("s", "k")
        assert row is not None and row.state == "unknown"
        assert store.reader().running() == []
        await store.write(lambda tx: tx.append("note", None, {}))
    verified()


def _fails(tx: Transaction) -> None:
    tx.append("note", None, {"lost": True})
    raise StoreError("no")


@pytest.mark.anyio
async def test_an_end_is_owed_until_it_is_written_though_nothing_else_is(
    folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "OWED_SECONDS", 0.05)
    with Store.open(folder, keys) as store:
        await store.write(lambda tx: tx.append("started", "c1", about("c1")))
        other = sqlite3.connect(folder / "ringfence.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        store.owe("c1")
        await until(lambda: store._writer._turn.locked())
        other.execute("ROLLBACK")
        other.close()
        await until(lambda: store.reader().running() == [])
        assert not store._writer.owes


@pytest.mark.anyio
async def test_an_end_that_can_never_be_written_keeps_no_other_record_from_being(
    folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(folder, keys) as store:
        await store.write(lambda tx: tx.append("started", "c1", about("c1")))
        monkeypatch.setattr(Transaction, "_finish_bare", lambda self, *_: _fails(self))
        store.owe("c1")
        receipt = await store.write(lambda tx: tx.append("note", None, {}))
        assert (receipt.seq, store._writer.owes) == (3, False)
        monkeypatch.undo()


@pytest.mark.anyio
async def test_a_call_whose_end_was_written_after_all_is_owed_none(folder: Path, keys: Keys) -> None:
    with Store.open(folder, keys) as store:
        await store.write(lambda tx: tx.append("started", "c1", about("c1")))
        await store.write(lambda tx: tx.append("finished", "c1", {**about("c1"), "status": "success"}))
        store.owe("c1")
        store.owe("none")
        await store.write(lambda tx: tx.append("note", None, {}))
        assert [r.body["status"] for r in store.reader().records(kind="finished")] == ["success"]
