"""An export is signed only for what the checkpoints were signed for, whatever became of the database since."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ringfence.audit.chain import ALWAYS, Head, Period, seal
from ringfence.audit.export import verify_export, write_export
from ringfence.audit.keys import Keys
from ringfence.core import canonical
from ringfence.core.errors import TamperError
from ringfence.store import Reader, Store

SOON = Period(None, 4e9)
LATELY = Period(1.0, None)
PERIODS = [ALWAYS, SOON, LATELY, Period(1.0, 4e9)]


def call(store: Store, call_id: str) -> None:
    store.write_sync(lambda tx: tx.append("started", call_id, {}))
    store.write_sync(lambda tx: tx.append("finished", call_id, {"status": "success"}))


@pytest.fixture
def log(folder: Path, keys: Keys) -> Path:
    """Two chains."""
    for name in ("a", "b"):
        with Store.open(folder, keys) as store:
            for number in range(3):
                call(store, f"{name}{number}")
    return folder


def export(folder: Path, keys: Keys, path: Path, period: Period = ALWAYS) -> int:
    with closing(Reader.open(folder)) as reader:
        return write_export(path, reader.period(period), keys, period, reader.checkpoints()).records


def database(folder: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None))


def rewrite(connection: sqlite3.Connection) -> None:
    """Every record says something else, and all of them chain."""
    heads: dict[str, Head] = {}
    for row, chain, at, kind, call_id in connection.execute(
        "SELECT id, chain, at, kind, call_id FROM records ORDER BY chain, seq"
    ).fetchall():
        made = seal(heads.get(chain, Head(chain)), at, kind, call_id, {"status": "denied"})
        heads[chain] = made.head
        connection.execute("UPDATE records SET text = ?, hash = ? WHERE id = ?", (made.text, made.hash, row))


def invent(connection: sqlite3.Connection) -> None:
    """A chain that nobody signed for."""
    made = seal(Head("20200101T000000Z-aaaaaaaaaa"), time.time(), "chain_opened", None, {})
    row = (made.chain, made.seq, made.at, made.kind, made.text, made.hash)
    connection.execute("INSERT INTO records (chain, seq, at, kind, text, hash) VALUES (?, ?, ?, ?, ?, ?)", row)


def statement(text: str) -> Callable[[sqlite3.Connection], None]:
    def work(connection: sqlite3.Connection) -> None:
        assert connection.execute(text).rowcount

    return work


CHANGES: dict[str, Callable[[sqlite3.Connection], None]] = {
    "all written anew": rewrite,
    "a chain invented": invent,
    "ends cut off": statement("DELETE FROM records WHERE seq > 6"),
    "one chain cut": statement("DELETE FROM records WHERE seq > 2 AND chain = (SELECT max(chain) FROM records)"),
    "ends filed under a later time": statement("UPDATE records SET at = 5e9 WHERE seq > 6"),
    "beginnings filed under an earlier time": statement("UPDATE records SET at = 0 WHERE seq < 3"),
    "all filed under a later time": statement("UPDATE records SET at = 5e9"),
    "filed under another call": statement("UPDATE records SET call_id = 'x' WHERE seq = 3 AND call_id = 'a0'"),
}


@pytest.mark.parametrize("period", PERIODS, ids=lambda period: f"{period.since}-{period.until}")
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_never_signed(log: Path, keys: Keys, tmp_path: Path, name: str, period: Period) -> None:
    with database(log) as connection:
        CHANGES[name](connection)
    with pytest.raises(TamperError):
        export(log, keys, tmp_path / "e", period)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("period", PERIODS, ids=lambda period: f"{period.since}-{period.until}")
def test_what_was_not_is_exported(log: Path, keys: Keys, tmp_path: Path, period: Period) -> None:
    assert export(log, keys, tmp_path / "e", period) == 16
    assert verify_export(tmp_path / "e", keys.public).ok


def test_a_period_within_a_chain_has_what_lies_in_it_and_no_more(folder: Path, keys: Keys, tmp_path: Path) -> None:
    moments = []
    with Store.open(folder, keys) as store:
        for number in range(3):
            time.sleep(0.01)
            moments.append(time.time())
            time.sleep(0.01)
            call(store, f"c{number}")
        for count, period in ((2, Period(moments[1], moments[2])), (0, Period(1.0, 2.0)), (0, Period(4e9, None))):
            path = tmp_path / f"{period.since}"
            assert export(folder, keys, path, period) == count
            report = verify_export(path, keys.public)
            assert report.ok, str(report)
        held = [canonical.loads(line) for line in (tmp_path / f"{moments[1]}").read_bytes().splitlines()]
        told = [canonical.loads(line["text"]) for line in held if isinstance(line, dict) and "text" in line]
        assert [record["call_id"] for record in told] == ["c1", "c1"]


def test_a_chain_that_ended_before_the_period_keeps_nobody_from_exporting_it(
    folder: Path, keys: Keys, tmp_path: Path
) -> None:
    """Whatever became of it: it is evidence, and of another time."""
    with Store.open(folder, keys) as store:
        call(store, "old")
    time.sleep(0.01)
    period = Period(time.time(), None)
    with database(folder) as connection:
        connection.execute("DELETE FROM records WHERE seq > 2")
    with Store.open(folder, keys) as store:
        call(store, "new")
    assert export(folder, keys, tmp_path / "e", period) == 4
