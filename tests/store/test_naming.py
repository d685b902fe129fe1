"""No chain can be removed, or cut back with an old copy of its checkpoint, unseen once another has gone on."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.chain import ALWAYS, CLOSED, ENDS, OPENED, Head, Period, Record, Verification, seal
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import Keys
from ringfence.core.errors import TamperError
from ringfence.store import Reader, Store, chainfiles, naming
from tests.store.test_recovery import crash


def call(store: Store, call_id: str) -> None:
    store.write_sync(lambda tx: tx.append("started", call_id, {}))
    store.write_sync(lambda tx: tx.append("finished", call_id, {"status": "success"}))


def short(folder: Path, keys: Keys, call_id: str) -> str:
    """A process that makes one call and ends."""
    with Store.open(folder, keys) as store:
        call(store, call_id)
    return store.chain


def database(folder: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None))


def remove(folder: Path, chain: str) -> None:
    """All that tells of a chain by itself."""
    with database(folder) as connection:
        for table in ("records", "chains"):
            connection.execute(f"DELETE FROM {table} WHERE chain = ?", (chain,))
    (folder / "checkpoints" / chain).unlink()
    (folder / "chains" / f"{chain}.lock").unlink()


def bodies(folder: Path, *kinds: str) -> list[Any]:
    with closing(Reader.open(folder)) as reader:
        return [record.body for record in reader.records() if record.kind in kinds]


@pytest.fixture
def report(folder: Path, keys: Keys) -> Callable[[], Verification]:
    def look() -> Verification:
        with closing(Reader.open(folder)) as reader:
            return verify_live(*reader.evidence(), keys.public, reader.record)

    return look


def refused(folder: Path, keys: Keys, path: Path) -> None:
    for period in (Period(), Period(1.0, 4e9)):
        with closing(Reader.open(folder)) as reader, pytest.raises(TamperError):
            write_export(path, reader.period(period), keys, period, reader.checkpoints(), reader.record)


def test_a_chain_that_ended_beside_one_that_goes_on_cannot_be_removed_unseen(
    folder: Path, keys: Keys, report: Callable[[], Verification], tmp_path: Path
) -> None:
    with Store.open(folder, keys) as gateway:
        chain = short(folder, keys, "deed")
        call(gateway, "after")
        assert report().ok, str(report())
        remove(folder, chain)
        found = report()
        assert not found.ok and f"of chain {chain}, which is missing" in str(found)
        refused(folder, keys, tmp_path / "e")
    short(folder, keys, "later")
    assert not report().ok
    refused(folder, keys, tmp_path / "e")


def test_the_last_record_of_a_process_names_chains_that_ended_before_it(
    folder: Path, keys: Keys, report: Callable[[], Verification]
) -> None:
    with Store.open(folder, keys):
        chains = [short(folder, keys, "one"), short(folder, keys, "two")]
    assert report().ok, str(report())
    assert [end["chain"] for end in bodies(folder, CLOSED)[-1]["ends"]] == chains[1:]
    remove(folder, chains[1])
    assert f"names record 4 of chain {chains[1]}, which is missing" in str(report())


def test_an_opening_names_every_chain_that_nobody_has_named(
    folder: Path, keys: Keys, report: Callable[[], Verification]
) -> None:
    one = Store.open(folder, keys)
    with Store.open(folder, keys) as two, Store.open(folder, keys) as three:
        for store in (one, two, three):
            call(store, f"of {store.chain}")
        with Store.open(folder, keys) as last:
            body = bodies(folder, OPENED)[-1]
            assert body["previous"]["chain"] == three.chain
            assert {end["chain"] for end in body["ends"]} == {one.chain, two.chain}
            assert report().ok, str(report())
            crash(one)
            remove(folder, one.chain)
            assert f"chain {last.chain}: was opened after record 3 of chain {one.chain}" in str(report())


def test_a_chain_that_is_taken_up_again_cannot_be_cut_back_with_its_old_checkpoint(
    folder: Path, keys: Keys, report: Callable[[], Verification], tmp_path: Path
) -> None:
    with Store.open(folder, keys) as gateway:
        for number in range(chainfiles.MAX_ENDED):
            short(folder, keys, f"before{number}")
        old = {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}
        with database(folder) as connection:
            ends = dict(connection.execute("SELECT chain, max(seq) FROM records GROUP BY chain").fetchall())
        chain = short(folder, keys, "deed")
        assert chain in old
        gateway._writer._naming._ended_at = 0.0  # the time until it looks again is over
        call(gateway, "after")
        assert report().ok, str(report())
        with database(folder) as connection:
            connection.execute("DELETE FROM records WHERE chain = ? AND seq > ?", (chain, ends[chain]))
        (folder / "checkpoints" / chain).write_bytes(old[chain])
        assert f"chain {chain}, record {ends[chain] + 4}: is not the record" in str(report())
        refused(folder, keys, tmp_path / "e")
        # Nor does it help that another process goes on with it from there.
        for number in range(20):
            if short(folder, keys, f"later{number}") == chain and number > 2:
                break
        assert f"chain {chain}, record {ends[chain] + 4}: is not the record" in str(report())
        refused(folder, keys, tmp_path / "e")


def enough(folder: Path, keys: Keys) -> None:
    """So many processes that the next one goes on with a chain."""
    for number in range(chainfiles.MAX_ENDED + 1):
        short(folder, keys, f"before{number}")


def test_no_chain_of_short_processes_can_be_cut_back_once_another_process_has_started(
    folder: Path, keys: Keys, report: Callable[[], Verification], tmp_path: Path
) -> None:
    enough(folder, keys)
    old = {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}
    with database(folder) as connection:
        ends = dict(connection.execute("SELECT chain, max(seq) FROM records GROUP BY chain").fetchall())
    chain = short(folder, keys, "deed")
    assert chain in old
    assert short(folder, keys, "after") != chain
    assert report().ok, str(report())
    with database(folder) as connection:
        connection.execute("DELETE FROM records WHERE chain = ? AND seq > ?", (chain, ends[chain]))
    (folder / "checkpoints" / chain).write_bytes(old[chain])
    assert f"chain {chain}, record {ends[chain] + 4}: is not the record" in str(report())
    refused(folder, keys, tmp_path / "e")


def test_every_opening_of_a_short_process_names_the_end_of_another_chain(folder: Path, keys: Keys) -> None:
    enough(folder, keys)
    for number in range(6):
        chain = short(folder, keys, f"then{number}")
        assert bodies(folder, OPENED)[-1]["previous"]["chain"] != chain


def test_a_chain_that_was_written_last_is_not_taken_up_even_where_the_table_says_that_it_was_named(
    folder: Path, keys: Keys
) -> None:
    enough(folder, keys)
    chain = short(folder, keys, "deed")
    with database(folder) as connection:
        connection.execute("UPDATE chains SET named = NULL")
    assert short(folder, keys, "after") != chain


def test_ends_whose_names_are_pruned_are_named_anew(
    folder: Path, keys: Keys, report: Callable[[], Verification]
) -> None:
    with Store.open(folder, keys) as gateway:
        chain = short(folder, keys, "deed")
        call(gateway, "after")
        assert bodies(folder, ENDS)
        call(gateway, "much later")
        with closing(Reader.open(folder)) as reader:
            moment = next(iter(reader.records(call_id="much later"))).at
        # Only the gateway's chain: in the other, something stays.
        with database(folder) as connection:
            text = "INSERT INTO running (call_id, chain, seq) VALUES ('deed', ?, 2)"
            connection.execute(text, (chain,))
        assert gateway.prune(moment, "anna").records
        assert report().ok, str(report())
        gateway._writer._naming._ended_at = 0.0
        call(gateway, "after the prune")
        with database(folder) as connection:
            connection.execute("DELETE FROM running")
        assert [end["chain"] for end in bodies(folder, ENDS)[-1]["ends"]] == [chain]
        remove(folder, chain)
        assert not report().ok


def test_each_end_is_named_once_and_not_with_every_call(
    folder: Path, keys: Keys, report: Callable[[], Verification], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "ENDED_SECONDS", 1e6)
    monkeypatch.setattr(naming, "LIVE_SECONDS", 1e6)
    with Store.open(folder, keys) as one, Store.open(folder, keys) as two:
        for number in range(20):
            call(one, f"one{number}")
            call(two, f"two{number}")
        short(folder, keys, "short")
        for number in range(20, 40):
            call(one, f"one{number}")
            call(two, f"two{number}")
    named = [
        (end["chain"], end["seq"])
        for body in bodies(folder, ENDS, OPENED, CLOSED)
        for end in (*body.get("ends", ()), *filter(None, [body.get("previous")]))
    ]
    assert len(named) == len(set(named)) and len(bodies(folder, ENDS)) <= 2
    assert report().ok, str(report())


def test_chains_that_are_still_written_to_are_named_at_a_pace_of_their_own(
    folder: Path, keys: Keys, report: Callable[[], Verification]
) -> None:
    with Store.open(folder, keys) as one, Store.open(folder, keys) as two:
        call(two, "two")
        call(one, "one")
        assert not bodies(folder, ENDS)
        one._writer._naming._live_at = 0.0
        call(one, "one more")
        (told,) = bodies(folder, ENDS)
        assert [end["chain"] for end in told["ends"]] == [two.chain]
        assert report().ok, str(report())


def test_one_record_names_so_many_and_the_next_the_others(
    folder: Path, keys: Keys, report: Callable[[], Verification], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "MAX_NAMES", 3)
    for store in [Store.open(folder, keys) for _ in range(9)]:
        crash(store)
    gateway = Store.open(folder, keys)  # closes them all
    assert len(bodies(folder, OPENED)[-1]["ends"]) == 3
    for number in range(10):
        gateway._writer._naming._ended_at = 0.0
        call(gateway, str(number))
    assert [len(body["ends"]) for body in bodies(folder, ENDS)] == [3, 2]
    gateway.close()
    assert report().ok, str(report())
    with database(folder) as connection:
        left = connection.execute("SELECT count(*) FROM chains WHERE named IS NOT NULL").fetchone()
    assert left == (1,)  # its own


@pytest.mark.parametrize("damage", ["no row", "no records", "a blob", "a text"])
def test_a_start_goes_on_beside_chains_that_somebody_changed(folder: Path, keys: Keys, damage: str) -> None:
    chain = short(folder, keys, "one")
    with Store.open(folder, keys):
        pass
    texts = {
        "no row": "DELETE FROM chains WHERE chain = ?",
        "no records": "DELETE FROM records WHERE chain = ?",
        "a blob": "UPDATE records SET hash = x'00' WHERE chain = ? AND kind = 'chain_closed'",
        "a text": "UPDATE records SET seq = 'x' WHERE chain = ? AND kind = 'chain_closed'",
    }
    with database(folder) as connection:
        connection.execute("UPDATE chains SET named = 0")
        connection.execute(texts[damage], (chain,))
    with Store.open(folder, keys) as store:
        call(store, "two")


def test_short_processes_beside_one_that_runs_cost_little_more_than_alone(
    folder: Path, keys: Keys, report: Callable[[], Verification]
) -> None:
    def size() -> int:
        with database(folder) as connection:
            return int(connection.execute("SELECT sum(length(text)) FROM records").fetchone()[0])

    with Store.open(folder, keys):
        for number in range(chainfiles.MAX_ENDED + 2):
            short(folder, keys, f"first{number}")
        before = size()
        for number in range(30):
            short(folder, keys, f"then{number}")
        assert (size() - before) / 30 < 1500
    assert not [body for body in bodies(folder, OPENED)[chainfiles.MAX_ENDED + 2 :] if "ends" in body]
    assert report().ok, str(report())


# ── Exports ──

OLD, NEW = "20260101T000000Z-aaaaaaaaaa", "20260102T000000Z-bbbbbbbbbb"


def named(record: Record) -> dict[str, Any]:
    return {"chain": record.chain, "seq": record.seq, "hash": record.hash}


def chain_of(name: str, ends: list[dict[str, Any]] | None = None, salt: str = "") -> list[Record]:
    out = [seal(Head(name), 100.0, OPENED, None, {})]
    out.append(seal(out[-1].head, 101.0, "note", None, {"salt": salt}))
    out.append(seal(out[-1].head, 102.0, CLOSED, None, {"ends": ends} if ends else {}))
    return out


@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
def test_an_export_has_the_ends_that_its_records_name(tmp_path: Path, keys: Keys, first: str, second: str) -> None:
    """Whether the chain that is named comes before the name or after it."""

    def verified(ends: list[dict[str, Any]], *, alone: bool = False) -> Verification:
        path = tmp_path / str(time.monotonic_ns())
        records = sorted([*chain_of(first), *chain_of(second, ends)], key=lambda record: record.chain)
        write_export(path, [record for record in records if not alone or record.chain == second], keys)
        return verify_export(path, keys.public)

    right = chain_of(first)[-1]
    assert verified([named(right)]).ok, str(verified([named(right)]))
    assert f"chain {second}: names chain {first}, which is missing" in str(verified([named(right)], alone=True))
    wrong = named(chain_of(first, salt="other")[-1])
    said = f"chain {first}, record 3: is not the record 3 that chain {second} names"
    assert said in str(verified([wrong]))
    assert "is not the record 4 that" in str(verified([{**named(right), "seq": 4}]))
    assert verified([json.loads("{}"), "x", {"seq": "1"}]).ok  # type: ignore[list-item]


def test_chains_of_another_state_under_the_same_key_do_not_become_part_of_this_one(
    folder: Path, keys: Keys, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    for state in (other, folder, folder):
        Store.open(state, keys).close()
    with closing(Reader.open(folder)) as reader:
        assert verify_live(*reader.evidence(), keys.public).ok
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as database:
        database.execute("ATTACH ? AS other", (str(other / "ringfence.db"),))
        names = "chain, seq, at, kind, call_id, text, hash, salt"
        database.execute(f"INSERT INTO records ({names}) SELECT {names} FROM other.records ORDER BY id")
        database.execute("INSERT INTO chains SELECT * FROM other.chains")
    for path in (other / "checkpoints").iterdir():
        shutil.copy(path, folder / "checkpoints")
    with closing(Reader.open(folder)) as reader:
        live = verify_live(*reader.evidence(), keys.public)
        with pytest.raises(TamperError, match="was opened in another state"):
            write_export(tmp_path / "e", reader.period(), keys, ALWAYS, reader.checkpoints(), reader.record)
    assert [fault.text for fault in live.faults if "begins a log" in fault.text] == [
        "begins a log, and so does another chain: those of several states were put together"
    ] * 2
