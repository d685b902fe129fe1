"""The log stays small, what is asked of it does not depend on its length, and logs of earlier versions are read."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.chain import CLOSED, EMPTY_SLOT, Checkpoint, Head, Record, pack_slot, seal, verify_records
from ringfence.audit.export import verify_live
from ringfence.audit.keys import Keys
from ringfence.core import canonical
from ringfence.store import Reader, Store, Transaction, chainfiles, schema, writer
from tests.store.test_recovery import crash

PART = canonical.Shared({"call": {"tool": "t"}, "contract": {"name": "c"}})


def calls(store: Store, first: int, count: int, **body: Any) -> None:
    def work(tx: Transaction) -> None:
        for number in range(first, first + count):
            for kind in ("started", "finished"):
                tx.append(kind, f"call_{number:08}", {"call": {"id": number}, "shared": [PART], **body})

    store.write_sync(work, durable=False)


# ── What is shared ──


def test_what_records_share_is_stored_once_and_filled_in(store: Store, verified: Callable[[], None]) -> None:
    calls(store, 0, 50)
    with closing(sqlite3.connect(store.folder / "ringfence.db")) as connection:
        assert connection.execute("SELECT count(*) FROM shared").fetchone() == (1,)
    body = next(store.reader().records(call_id="call_00000007")).body
    assert (body["call"], body["contract"]) == ({"id": 7, "tool": "t"}, {"name": "c"})
    verified()


def test_a_record_outlives_its_reader(store: Store) -> None:
    calls(store, 0, 1)
    with closing(Reader.open(store.folder)) as reader:
        records = list(reader.records(kind="finished"))
    assert records[0].body["contract"] == {"name": "c"}


def test_a_part_of_a_job_that_failed_is_said_again(store: Store, verified: Callable[[], None]) -> None:
    def fails(tx: Transaction) -> None:
        tx.append("note", None, {"shared": [PART]})
        raise ValueError

    with pytest.raises(ValueError):
        store.write_sync(fails)
    calls(store, 0, 1)
    assert next(store.reader().records(call_id="call_00000000")).body["contract"] == {"name": "c"}
    verified()


@pytest.mark.anyio
async def test_a_part_that_the_database_has_not_is_never_named_ahead_of_it(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    first = Store.open(folder, keys)
    other = canonical.Shared({"contract": {"name": "other"}})
    for number, part in enumerate((PART, other, PART, other)):
        body = {"effect_possible": False, "shared": [part]}
        await first.begin(f"call_{number}", body, b"0" * 16, alone=True)
    crash(first)
    with Store.open(folder, keys) as second:
        assert second.recovered.calls == ("call_0", "call_1", "call_2", "call_3")
        ends = [next(second.reader().records(call_id=call, kind="finished")) for call in second.recovered.calls]
        assert [end.body["contract"]["name"] for end in ends] == ["c", "other", "c", "other"]
    verified()


def test_what_was_said_is_bounded_and_said_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_SAID", 10)
    for number in range(50):
        body = {"shared": [canonical.Shared({"contract": {"name": number}}), PART]}
        store.write_sync(partial(note, body=body))
        assert len(store._writer._said) <= 10
    assert [r.body["contract"]["name"] for r in store.reader().records(kind="note")] == list(range(50))


def note(tx: Transaction, body: Any) -> None:
    tx.append("note", None, body)


# ── What it takes to ask ──


def steps(reader: Reader, ask: Callable[[Reader], object]) -> int:
    """Instructions of the database's machine, in tens."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    reader._connection.set_progress_handler(step, 10)
    ask(reader)
    reader._connection.set_progress_handler(None, 0)
    return count


QUESTIONS: dict[str, Callable[[Reader], object]] = {
    "list": lambda reader: list(reader.records(kind="finished", newest_first=True, limit=20)),
    "list --all": lambda reader: list(reader.records(newest_first=True, limit=20)),
    "by the beginning of an id": lambda reader: reader.call_ids("call_0000000", 2),
    "explain": lambda reader: reader.story("call_00000007"),
    "chains": lambda reader: reader.chains(),
    "running": lambda reader: reader.running(),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_takes_no_longer_in_a_long_log(store: Store, name: str) -> None:
    ask = QUESTIONS[name]
    calls(store, 0, 30)
    short = steps(store.reader(), ask)
    for first in range(1000, 6000, 1000):
        calls(store, first, 1000)
    # Other things than calls in between, after all of them.
    store.write_sync(lambda tx: [tx.append("note", None, {}) for _ in range(3000)] and None, durable=False)
    assert steps(store.reader(), ask) <= 2 * short + 50


# ── Earlier versions ──


def test_a_log_of_the_first_schema_is_opened_and_goes_on(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    chain = "20260101T000000Z-aaaaaaaaaa"
    records: list[Record] = [seal(Head(chain), 1.0, "chain_opened", None, {"previous": None})]
    for kind in ("started", "finished"):
        records.append(seal(records[-1].head, 2.0, kind, "call_old", {"call": {"tool": "t"}, "effect": "none"}))
    records.append(seal(records[-1].head, 3.0, CLOSED, None, {}))
    schema.prepare_folder(folder)
    with closing(schema.connect(folder)) as connection:
        script = resources.files("ringfence.store").joinpath("0001_initial.sql").read_text()
        connection.executescript(f"{script}; PRAGMA application_id = {schema.APPLICATION_ID}; PRAGMA user_version = 1;")
        connection.execute("INSERT INTO chains VALUES (?, 1)", (chain,))
        connection.executemany(
            "INSERT INTO records (chain, seq, at, kind, call_id, text, hash) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(r.chain, r.seq, r.at, r.kind, r.call_id, r.text, r.hash) for r in records],
        )
    signed = Checkpoint(chain, records[-1].seq, records[-1].hash, records[-1].seq, 3.0).sign(keys.private)
    (folder / "checkpoints" / chain).write_bytes(pack_slot(signed) + EMPTY_SLOT)
    with Store.open(folder, keys) as store:
        assert store.recovered.damaged == ()
        calls(store, 0, 1)
        assert [r.body["call"]["tool"] for r in store.reader().records(kind="finished")] == ["t", "t"]
        assert [r.kind for r in store.reader().story("call_old")] == ["started", "finished"]
        store.prune(time.time(), "anna")
    verified()


# ── Short processes ──


def files(folder: Path) -> int:
    return sum(path.is_file() for name in ("chains", "checkpoints") for path in (folder / name).iterdir())


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_hundred_short_processes_leave_no_more_files_than_eight(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    def run(number: int) -> None:
        with Store.open(folder, keys) as store:
            calls(store, number, 1)

    for number in range(chainfiles.MAX_ENDED + 2):
        run(number)
    count, size = files(folder), on_disk(folder)
    assert count <= 2 * chainfiles.MAX_ENDED + 1, "and one that says which state it is"
    for number in range(100, 190):
        run(number)
    assert files(folder) == count
    # A call is 1.1 KB here; the rest is that a process began and ended.
    assert (on_disk(folder) - size) / 90 <= 2200
    verified()


def test_a_chain_is_taken_up_by_one_process_alone(folder: Path, keys: Keys, verified: Callable[[], None]) -> None:
    for _ in range(chainfiles.MAX_ENDED):
        Store.open(folder, keys).close()
    with Store.open(folder, keys) as one, Store.open(folder, keys) as two, Store.open(folder, keys) as three:
        assert len({one.chain, two.chain, three.chain}) == 3
        for number, store in enumerate((one, two, three)):
            calls(store, number, 1)
    verified()


def test_a_chain_that_was_taken_up_is_closed_after_a_crash(
    folder: Path, keys: Keys, verified: Callable[[], None]
) -> None:
    for _ in range(chainfiles.MAX_ENDED):
        Store.open(folder, keys).close()
    last = Store.open(folder, keys)
    calls(last, 0, 1)
    last.write_sync(lambda tx: tx.append("started", "lost", {}))
    crash(last)
    with Store.open(folder, keys) as store:
        assert (store.recovered.chains, store.recovered.calls) == ((last.chain,), ("lost",))
    verified()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM records WHERE kind = 'chain_closed'",
        "UPDATE records SET hash = 'x' WHERE kind = 'chain_closed'",
    ],
)
def test_a_chain_that_does_not_end_as_was_signed_is_not_taken_up(folder: Path, keys: Keys, damage: str) -> None:
    for _ in range(chainfiles.MAX_ENDED):
        Store.open(folder, keys).close()
    with closing(sqlite3.connect(folder / "ringfence.db")) as connection:
        before = {row[0] for row in connection.execute("SELECT chain FROM chains")}
        connection.execute(damage)
        connection.commit()
    with Store.open(folder, keys) as store:
        assert store.chain not in before
        assert not verify_live(*store.reader().evidence(), keys.public).ok


def test_only_a_process_that_takes_it_up_may_add_to_a_closed_chain(keys: Keys) -> None:
    opened = seal(Head("c"), 1.0, "chain_opened", None, {"previous": None})
    closed = seal(opened.head, 2.0, CLOSED, None, {})
    again = seal(closed.head, 3.0, "chain_opened", None, {"previous": None})
    forged = seal(closed.head, 3.0, "started", "x", {})
    pairs = [(record.text, record.hash) for record in (opened, closed)]
    assert verify_records([*pairs, (again.text, again.hash)]).ok
    assert "after the chain was closed" in str(verify_records([*pairs, (forged.text, forged.hash)]))
