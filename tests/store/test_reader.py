"""What was written can be found again, in order, by whoever may not write."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from ringfence.audit.chain import Period, Record
from ringfence.audit.explain import explain
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import Keys
from ringfence.core.errors import StoreError
from ringfence.store import ApprovalQuestion, Reader, Store, reader


@pytest.fixture
def filled(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Three records per query, so that every walk crosses pages."""
    monkeypatch.setattr(reader, "_PAGE", 3)

    def fill(tx) -> None:
        for number in range(10):
            tx.append("started", f"c{number}", {"n": number})
            tx.append("finished", f"c{number}", {"n": number})

    store.write_sync(fill)
    return store


def test_records_by_every_wish(filled: Store) -> None:
    read = filled.reader()
    assert [r.seq for r in read.records()] == list(range(1, 22))
    assert [r.seq for r in read.records(chain=filled.chain, newest_first=True)] == list(range(21, 0, -1))
    assert [(r.kind, r.body["n"]) for r in read.records(call_id="c4")] == [("started", 4), ("finished", 4)]
    assert [r.body["n"] for r in read.records(kind="started", newest_first=True, limit=4)] == [9, 8, 7, 6]
    assert len(list(read.records(limit=7))) == 7
    assert list(read.records(chain="absent")) == list(read.records(limit=0)) == []
    times = [r.at for r in read.records()]
    assert [r.seq for r in read.records(since=times[4], until=times[6])] == [
        seq for seq, at in enumerate(times, 1) if times[4] <= at < times[6]
    ]
    assert (read.chains(), read.running()) == ([filled.chain], [])


def test_a_reader_cannot_write(store: Store) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store.reader()._connection.execute("DELETE FROM records")


def test_each_thread_has_its_own(store: Store) -> None:
    found: list[Reader] = []
    thread = threading.Thread(target=lambda: found.append(store.reader()))
    thread.start()
    thread.join()
    assert found[0] is not store.reader() is store.reader()


def test_a_closed_reader_says_so(folder: Path, store: Store) -> None:
    read = Reader.open(folder)
    read.close()
    with pytest.raises(StoreError, match="could not be read"):
        read.chains()


def test_evidence_of_several_chains_exports_and_verifies(
    filled: Store, folder: Path, keys: Keys, tmp_path: Path
) -> None:
    with Store.open(folder, keys) as other:
        other.write_sync(lambda tx: tx.append("reload", None, {"digest": "sha256:x"}))
        read = other.reader()
        report = verify_live(*read.evidence(), keys.public)
        assert report.ok and len(report.heads) == 2, str(report)
        checkpoints = read.checkpoints()
        written = write_export(tmp_path / "e", read.period(), keys, checkpoints=checkpoints)
    assert written.records == 23
    assert verify_export(tmp_path / "e", keys.public).ok


def test_a_clock_set_back_tears_no_gap(
    store: Store, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in (100.0, 200.0, 50.0, 300.0, 900.0):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        store.write_sync(lambda tx: tx.append("note", None, {}))
    monkeypatch.undo()
    period = Period(100.0, 500.0)
    found = [r for r in store.reader().period(period) if isinstance(r, Record)]
    assert [r.at for r in found if r.kind == "note"] == [100.0, 200.0, 50.0, 300.0]
    assert [r.at for r in found if r.kind != "note"] == [100.0, 50.0], "each set-back is on record"
    write_export(tmp_path / "e", store.reader().period(period), keys, period, store.reader().checkpoints())
    assert verify_export(tmp_path / "e", keys.public).ok


TAMPERING = {
    "edit": ("UPDATE records SET text = replace(text, '\"n\":4', '\"n\":5')", "was edited"),
    "not even text": ("UPDATE records SET text = CAST(x'fffe' AS TEXT) WHERE seq = 5", "was edited"),
    "another type": ("UPDATE records SET text = 7 WHERE seq = 5", "was edited"),
    "deletion": ("DELETE FROM records WHERE seq = 5", "record 5 is missing"),
    "cut tail": ("DELETE FROM records WHERE seq > 15", "6 cut from the end"),
    "all gone": ("DELETE FROM records", "is missing; its checkpoint stands at record 21"),
    "moved": ("UPDATE records SET seq = seq + 100 WHERE seq = 5", "record 5 is missing"),
    "hidden": ("UPDATE records SET call_id = 'other' WHERE seq = 5", "filed under another call_id"),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_with_the_database_is_found(name: str, filled: Store, folder: Path, keys: Keys) -> None:
    statement, said = TAMPERING[name]
    connection = sqlite3.connect(folder / "ringfence.db")
    connection.execute(statement)
    connection.commit()
    connection.close()
    report = verify_live(*filled.reader().evidence(), keys.public)
    assert said in str(report)


def test_a_removed_checkpoint_is_found(filled: Store, folder: Path, keys: Keys) -> None:
    (folder / "checkpoints" / filled.chain).unlink()
    assert "checkpoint file is missing" in str(verify_live(*filled.reader().evidence(), keys.public))


def test_the_story_of_a_call_has_its_approval(store: Store) -> None:
    now = time.time()
    question = ApprovalQuestion("d", "c1", "local/a", "create_ticket", "manager", now, now + 60)
    asked = store.write_sync(lambda tx: tx.ask_approval(question))
    store.write_sync(lambda tx: tx.answer_approval(asked.id, "Alice", True, now))

    def run(tx) -> None:
        used = tx.consume_approval("d", "c2", now)
        call = {"tool": "create_ticket", "principal": {"agent": "local"}}
        tx.append("started", "c2", {"call": call, "approval": {"id": used.id}})
        tx.append("finished", "c2", {"call": call, "approval": {"id": used.id}, "status": "success", "effect": "none"})

    store.write_sync(run)
    story = store.reader().story("c2")
    used = ["approval_asked", "approval_answered", "approval_used"]
    assert [r.kind for r in story] == ["started", "finished", *used]
    text = explain([record.body for record in story])
    assert "Alice approved it" in text and "  result     success" in text
    assert [r.kind for r in store.reader().story("c1")] == used
    assert store.reader().approval_records("absent") == []


@pytest.mark.parametrize(
    "change",
    [
        *("expires_at = 'x'", "asked_at = 9e999", "asked_at = -1", "summary = '[]'", "summary = '{'", "roles = '{}'"),
        *("state = x'00'", "people = 'many'", "tool = x'ff'", "person = x'00'", "summary = x'00'", "expires_at = 1e15"),
    ],
)
def test_an_approval_that_another_program_changed_is_said_to_be_unreadable(
    store: Store, folder: Path, change: str
) -> None:
    now = time.time()
    question = ApprovalQuestion("d", "c1", "p", "t", "r", asked_at=now, expires_at=now + 600)
    identity = store.write_sync(lambda tx: tx.ask_approval(question)).id
    with sqlite3.connect(folder / "ringfence.db") as database:
        database.execute(f"UPDATE approvals SET {change}")
    database.close()
    with pytest.raises(StoreError, match="cannot be read"):
        store.reader().approval(identity)


def test_an_answer_that_another_program_changed_is_said_to_be_unreadable(store: Store, folder: Path) -> None:
    now = time.time()
    question = ApprovalQuestion("d", "c1", "p", "t", "r", asked_at=now, expires_at=now + 600)
    identity = store.write_sync(lambda tx: tx.ask_approval(question)).id
    with sqlite3.connect(folder / "ringfence.db") as database:
        database.execute("INSERT INTO answers VALUES (?, 'x', 1, 'y', NULL)", (identity,))
    database.close()
    with pytest.raises(StoreError, match="cannot be read"):
        store.reader().approvals()


def test_a_list_reads_of_a_long_question_its_beginning_alone(store: Store) -> None:
    now = time.time()

    def asked(ident: str, text: str) -> str:
        shown = {"mode": "write", "arguments": {"text": text}, "meta": {"more": text}}
        question = ApprovalQuestion(ident, "c1", "acme/a", "t", "r", asked_at=now, expires_at=now + 600, summary=shown)
        return store.write_sync(lambda tx: tx.ask_approval(question)).id

    read = store.reader()
    short = read.outline(asked("d1", "é\u202e" * 10), ("arguments", "meta"), 1000, 50)
    assert short is not None and short.beginning is None
    assert short.approval.summary["arguments"] == {"text": "é\u202e" * 10}
    long = read.outline(asked("d2", "é\u202e" * 10_000), ("arguments", "meta", "absent"), 1000, 50)
    assert long is not None and long.beginning is not None
    assert long.approval.summary == {"mode": "write"} and long.size > 40_000
    assert json.loads(long.beginning + '"}') == {"text": ("é\u202e" * 30)[: len(long.beginning) - 9]}
    assert read.outline("apr_none", ("arguments",), 1000, 50) is None


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_which_questions_wait_is_read_without_the_questions(store: Store, tenant: str | None) -> None:
    read = store.reader()
    asked: list[str] = []
    read._connection.set_trace_callback(asked.append)
    assert read.pending(tenant) == [] == read.settled_approvals(tenant, 5)
    read._connection.set_trace_callback(None)
    plans = [str(row[3]) for query in asked for row in read._connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert any("COVERING INDEX approvals_by_state" in plan for plan in plans)
    assert not any(plan.startswith("SCAN approvals") and "COVERING" not in plan for plan in plans)
