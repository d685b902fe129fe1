"""Each verb does what it says, within one transaction, and leaves its record."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ringfence.audit.keys import Keys
from ringfence.core import canonical
from ringfence.core.errors import StoreError
from ringfence.core.model import Definition
from ringfence.store import Approval, ApprovalQuestion, Conflict, Expired, RowNotFound, Store, Transaction
from ringfence.store.transaction import KEPT_DAYS
from tests.faking import answering_as
from tests.store.conftest import Drive
from tests.tooling import until

NOW = time.time()
DAY = 86400.0
QUESTION = ApprovalQuestion(
    digest="binding-of-d",
    call_id="call_1",
    principal="local/agent",
    tool="create_ticket",
    rule="manager",
    asked_at=NOW,
    expires_at=NOW + DAY,
    summary={"args": {"title": "Secret é"}},
    person="carol",
    roles=("manager", "owner"),
)


def ask(store: Store, question: ApprovalQuestion = QUESTION) -> Approval:
    return store.write_sync(lambda tx: tx.ask_approval(question))


def answer(store: Store, identity: str, person: str, approve: bool = True, now: float = NOW + 1) -> Approval:
    with answering_as(person):
        return store.write_sync(lambda tx: tx.answer_approval(identity, person, approve, now))


def consume(store: Store, call_id: str, now: float = NOW + 2, digest: str = QUESTION.digest) -> Approval | None:
    return store.write_sync(lambda tx: tx.consume_approval(digest, call_id, now))


def kinds(store: Store) -> list[str]:
    return [record.kind for record in store.reader().records()][1:]


# ── Approvals ──


def test_identical_questions_are_one_while_it_waits(store: Store) -> None:
    first = ask(store)
    again = ask(store, replace(QUESTION, call_id="call_2", asked_at=NOW + 5))
    other = ask(store, replace(QUESTION, digest="sha256:e"))
    assert first.id == again.id != other.id
    assert (again.call_id, again.state, again.roles, again.person) == (
        "call_1",
        "pending",
        ("manager", "owner"),
        "carol",
    )
    found = store.reader().approval(first.id)
    assert found is not None and found.summary == {"args": {"title": "Secret é"}}
    assert kinds(store) == ["approval_asked", "approval_asked"]
    late = ask(store, replace(QUESTION, asked_at=NOW + DAY, expires_at=NOW + 2 * DAY))
    assert late.id != first.id


def test_values_stay_out_of_the_log(store: Store) -> None:
    ask(store)
    text = "".join(record.text for record in store.reader().records())
    assert "Secret" not in text and QUESTION.digest not in text


def test_an_approval_is_used_once(store: Store) -> None:
    asked = ask(store)
    assert consume(store, "early") is None
    assert answer(store, asked.id, "alice").state == "approved"
    used = consume(store, "call_1")
    assert used is not None
    assert (used.id, used.state, used.consumed_by, used.answers[0].person) == (asked.id, "consumed", "call_1", "alice")
    assert consume(store, "call_2") is None
    assert ask(store).id != asked.id
    assert kinds(store) == ["approval_asked", "approval_answered", "approval_used", "approval_asked"]


def test_an_approval_is_bound_to_its_digest_and_time(store: Store) -> None:
    asked = ask(store)
    answer(store, asked.id, "alice")
    assert consume(store, "c", digest="sha256:other") is None
    assert consume(store, "c", now=NOW + DAY) is None
    assert consume(store, "c", now=NOW + DAY - 1) is not None


def test_one_denial_denies(store: Store) -> None:
    asked = ask(store, replace(QUESTION, people=2))
    assert answer(store, asked.id, "alice").state == "pending"
    assert answer(store, asked.id, "bob", approve=False).state == "denied"
    assert consume(store, "c") is None
    with pytest.raises(Conflict, match="already denied"):
        answer(store, asked.id, "dave")


def test_several_people_must_agree_each_once(store: Store) -> None:
    asked = ask(store, replace(QUESTION, people=2))
    answer(store, asked.id, "alice")
    with pytest.raises(Conflict, match="alice has already answered"):
        answer(store, asked.id, "alice")
    assert consume(store, "c") is None
    done = answer(store, asked.id, "bob", now=NOW + 3)
    assert (done.state, [given.person for given in done.answers]) == ("approved", ["alice", "bob"])


def test_too_late_and_unknown(store: Store) -> None:
    asked = ask(store)
    with pytest.raises(Expired):
        answer(store, asked.id, "alice", now=NOW + DAY)
    with pytest.raises(RowNotFound):
        answer(store, "apr_absent", "alice")
    assert issubclass(Expired, Conflict) and issubclass(RowNotFound, StoreError)
    assert kinds(store) == ["approval_asked"]


def test_what_cannot_be_used_any_more_reads_as_expired(store: Store) -> None:
    now = time.time()
    waiting = ask(store, replace(QUESTION, digest="w", asked_at=now, expires_at=now + 60))
    gone = ask(store, replace(QUESTION, digest="g", asked_at=now - DAY, expires_at=now - 1))
    found = store.reader().approval(gone.id)
    assert found is not None and found.state == "expired"
    assert [a.id for a in store.reader().approvals()] == [waiting.id]
    assert [a.id for a in store.reader().approvals(("expired",))] == [gone.id]
    assert store.reader().approvals(("approved", "denied")) == []
    assert [a.id for a in store.reader().find_approvals("g")] == [gone.id]
    assert store.reader().approval("absent") is None


def test_a_question_whose_values_are_erased_is_open_no_more(store: Store) -> None:
    asked = ask(store)
    answer(store, asked.id, "alice")
    assert store.write_sync(lambda tx: tx.erase_payload("call_1"))
    found = store.reader().approval(asked.id)
    assert found is not None and (found.state, found.summary) == ("expired", {})
    assert consume(store, "call_1") is None


def test_the_values_of_a_call_are_erased_from_the_question_that_another_call_asked(store: Store) -> None:
    asked = ask(store)
    answer(store, asked.id, "alice")
    assert consume(store, "call_2") is not None
    assert store.write_sync(lambda tx: tx.erase_payload("call_2"))
    database = sqlite3.connect(store.folder / "ringfence.db")
    try:
        salts = database.execute("SELECT salt FROM records WHERE kind = 'approval_asked'").fetchall()
    finally:
        database.close()
    assert salts == [(None,)]


def test_two_processes_race_for_one_approval(store: Store, drive: Drive, verified: Callable[[], None]) -> None:
    now = time.time()
    asked = ask(store, replace(QUESTION, digest="raced", asked_at=now, expires_at=now + 600))
    answer(store, asked.id, "alice", now=now)
    racers = [drive("consume", "raced", "50") for _ in range(2)]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline().startswith("opened")
    results = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        out, err = racer.communicate(timeout=300)
        assert racer.returncode == 0, err
        results.append(int(out.split()[1]))
    assert sum(results) == 1
    verified()


# ── Keys ──


def test_a_key_is_taken_once_and_tells_what_became_of_it(store: Store) -> None:
    def take(call_id: str, digest: str = "d"):
        return store.write_sync(lambda tx: tx.take_key("s", "k", digest, call_id))

    assert take("call_1") is None
    row = take("call_2", "e")
    assert row is not None and (row.call_id, row.request_digest, row.state, row.outcome) == (
        "call_1",
        "d",
        "started",
        None,
    )
    store.write_sync(lambda tx: tx.settle_key("s", "k", "done", {"content": ["é"]}))
    row = take("call_3")
    assert row is not None and (row.state, row.outcome) == ("done", {"content": ["é"]})
    assert store.reader().key("s", "k") == row
    assert store.write_sync(lambda tx: tx.take_key("other", "k", "d", "call_4")) is None


def test_only_a_key_that_never_ran_is_released(store: Store) -> None:
    store.write_sync(lambda tx: tx.take_key("s", "k", "d", "c"))
    store.write_sync(lambda tx: tx.release_key("s", "k", "another call"))
    assert store.reader().key("s", "k") is not None
    store.write_sync(lambda tx: tx.release_key("s", "k", "c"))
    assert store.reader().key("s", "k") is None
    store.write_sync(lambda tx: tx.take_key("s", "k", "d", "c"))
    store.write_sync(lambda tx: tx.settle_key("s", "k", "unknown", None))
    store.write_sync(lambda tx: tx.release_key("s", "k", "c"))
    row = store.reader().key("s", "k")
    assert row is not None and row.state == "unknown"
    with pytest.raises(RowNotFound):
        store.write_sync(lambda tx: tx.settle_key("s", "absent", "done", None))


# ── Pins, payloads, quotas ──


def test_pins_are_replaced_and_recorded(store: Store) -> None:
    tool = Definition("files", "read", "sha256:1", {"name": "read"})
    prompt = replace(tool, kind="prompt", digest="sha256:p")
    other = replace(tool, server="other")
    for definition in (tool, prompt, other, replace(tool, digest="sha256:2")):
        store.write_sync(partial(Transaction.put_pin, definition=definition, by="alice", at=NOW))
    assert store.reader().pins("files") == [prompt, replace(tool, digest="sha256:2")]
    assert len(store.reader().pins()) == 3
    assert store.write_sync(lambda tx: tx.pins("other")) == [other]
    bodies = [record.body for record in store.reader().records(kind="pin_accepted")]
    assert [(b["digest"], b["before"], b["by"]) for b in bodies][-1] == ("sha256:2", "sha256:1", "alice")


def test_deep_definitions_are_kept_and_absurd_ones_refused(store: Store) -> None:
    deep: dict = {}
    for _ in range(canonical.MAX_DEPTH + 10):
        deep = {"k": deep}
    definition = Definition("files", "read", "sha256:1", deep)
    store.write_sync(lambda tx: tx.put_pin(definition, "alice", NOW))
    assert store.reader().pins() == [definition]
    for _ in range(300):
        deep = {"k": deep}
    with pytest.raises(StoreError, match="nested"):
        store.write_sync(lambda tx: tx.put_pin(replace(definition, body=deep), "alice", NOW))


def test_an_erased_payload_is_gone_from_the_files_too(store: Store, folder: Path, verified: Callable[[], None]) -> None:
    marker = b"PAYLOAD-MARKER-" * 400
    salt = b"SALT-MARKER-0123456789"

    def put(tx) -> None:
        tx.append("started", "c", {"arguments": {"digest": "sha256:x"}}, salt=salt)
        tx.put_payload("c", "arguments", salt, marker)
        tx.take_key("s", "k", "d", "c")
        tx.settle_key("s", "k", "done", {"text": "OUTCOME-MARKER"})
        tx.ask_approval(replace(QUESTION, call_id="c", summary={"text": "SUMMARY-MARKER"}))
        tx.append("finished", "c", {})

    def on_disk() -> bool:
        files = b"".join(path.read_bytes() for path in folder.glob("ringfence.db*"))
        return any(name in files for name in (b"PAYLOAD-MARKER", b"SALT-MARKER", b"OUTCOME-MARKER", b"SUMMARY-MARKER"))

    store.write_sync(put)
    kept = store.reader().payload("c", "arguments")
    assert kept is not None and (kept.salt, kept.body) == (salt, marker)
    assert on_disk()
    assert store.write_sync(lambda tx: tx.erase_payload("c")) is True
    assert store.reader().payload("c", "arguments") is None
    row = store.reader().key("s", "k")
    assert row is not None and (row.state, row.outcome) == ("done", None)
    assert not on_disk()
    assert store.write_sync(lambda tx: tx.erase_payload("c")) is False
    verified()


def test_what_a_reader_keeps_from_being_erased_is_not_said_to_be_and_goes_with_the_next_write(
    folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("schema", "writer"):
        monkeypatch.setattr(f"ringfence.store.{module}.BUSY_SECONDS", 0.01)
    marker = b"PAYLOAD-MARKER-" * 400

    def on_disk() -> bool:
        return any(b"PAYLOAD-MARKER" in path.read_bytes() for path in folder.glob("ringfence.db*"))

    with Store.open(folder, keys) as store:
        store.write_sync(lambda tx: tx.put_payload("c", "arguments", b"s" * 16, marker))
        with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM payloads").fetchone() == (1,)
            for expected in (True, False):
                assert store.write_sync(lambda tx: tx.erase_payload("c")) is expected
                assert store.has_left_over and on_disk()
        store.write_sync(lambda tx: tx.append("note", None, {}))
        asyncio.run(until(lambda: not store.has_left_over))
        assert not on_disk()


def test_a_day_has_a_limit(store: Store) -> None:
    def spend(day: str, limit: int) -> bool:
        return store.write_sync(lambda tx: tx.spend("s", day, limit))

    assert [spend("2026-01-01", 2) for _ in range(3)] == [True, True, False]
    assert spend("2026-01-02", 2) is True
    assert spend("2026-01-02", 0) is False


def test_a_clock_that_was_ahead_gives_back_nothing_of_a_day(store: Store) -> None:
    def spend(day: str) -> bool:
        return store.write_sync(lambda tx: tx.spend("s", day, 1))

    assert spend("2026-01-01")
    assert spend("2026-01-09")
    assert not spend("2026-01-01")


def test_quotas_of_old_days_do_not_pile_up(store: Store) -> None:
    for day in range(1, 31):
        assert store.write_sync(partial(Transaction.spend, scope="s", day=f"2026-01-{day:02}", limit=1))
    (count,) = store.reader()._connection.execute("SELECT count(*) FROM quotas").fetchone()
    assert count <= KEPT_DAYS + 1
