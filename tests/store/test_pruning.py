"""A prune removes the oldest records, leaves a log that verifies, and takes nothing that somebody still needs."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.chain import (
    ALWAYS,
    PRUNED_AT,
    PRUNED_BYTES,
    ChainVerifier,
    Head,
    Pruned,
    Record,
    Verification,
    pack_slot,
    read_pruned,
    seal,
)
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import Keys, load_or_create
from ringfence.store import ApprovalQuestion, Conflict, Reader, Store, chainfiles, pruning
from ringfence.store.clock import DAY
from ringfence.store.history import FOLDER, History
from ringfence.store.schema import DATABASE
from ringfence.store.searching import CallSearch
from tests.store.conftest import Drive
from tests.store.test_recovery import crash


class Clock:
    """The time as the store sees it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        self.now += 1.0
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for name in ("transaction", "pruning", "sqlite", "chainfiles", "reader", "writer"):
        monkeypatch.setattr(f"ringfence.store.{name}.time", made)
    return made


@pytest.fixture
def store(folder: Path, keys: Keys, clock: Clock) -> Iterator[Store]:
    with Store.open(folder, keys) as opened:
        yield opened


@pytest.fixture
def report(folder: Path, keys: Keys) -> Callable[[], Verification]:
    def look() -> Verification:
        with closing(Reader.open(folder)) as reader:
            return verify_live(*reader.evidence(), keys.public)

    return look


def call(store: Store, call_id: str, **body: Any) -> None:
    store.write_sync(lambda tx: tx.append("started", call_id, body))
    store.write_sync(lambda tx: tx.append("finished", call_id, body))


def calls(folder: Path) -> list[str]:
    with closing(Reader.open(folder)) as reader:
        return list(dict.fromkeys(r.call_id for r in reader.records() if r.call_id is not None))


def question(store: Store, clock: Clock, call_id: str, seconds: float = 1e6) -> str:
    asked = ApprovalQuestion(call_id, call_id, "p", "t", "r", clock.now, clock.now + seconds)
    return store.write_sync(lambda tx: tx.ask_approval(asked)).id


def test_what_is_older_goes_and_the_rest_verifies(
    store: Store, folder: Path, clock: Clock, report: Callable[[], Verification]
) -> None:
    for number in range(5):
        call(store, f"old{number}")
    store.write_sync(lambda tx: tx.put_payload("old1", "arguments", b"s", b"{}"))
    moment = clock.now
    call(store, "new")
    gone = store.prune(moment, "anna")
    assert (gone.records, gone.chains) == (11, 1)
    assert calls(folder) == ["new"]
    assert store.reader().payload("old1", "arguments") is None
    found = report()
    assert found.ok, str(found)
    assert f"chain {store.chain}: records 1 to 11 were pruned by anna at" in str(found)
    (told,) = store.reader().records(kind="pruned")
    assert (told.body["by"], told.body["before"]) == ("anna", moment)
    (entry,) = told.body["chains"]
    assert (entry["chain"], entry["seq"], entry["count"]) == (store.chain, 11, 11)
    first = next(store.reader().records(chain=store.chain))
    assert (first.seq, first.body["prev"]) == (12, entry["hash"])
    assert store.prune(moment, "anna").records == 0


def test_what_was_pruned_stands_in_the_index_of_calls_no_more(store: Store, folder: Path, clock: Clock) -> None:
    def ended(call_id: str) -> None:
        body = {"call": {"id": call_id, "tool": "t", "principal": {"tenant": "local"}}, "message": f"said by {call_id}"}
        store.write_sync(lambda tx: tx.append("finished", call_id, body))

    history = History(folder, store.reader)
    for number in range(3):
        ended(f"old{number}")
    moment = clock.now
    ended("new")
    assert history.catch_up(600) and len(history.find(CallSearch(), 9)) == 4
    store.prune(moment, "anna")
    kept = b"".join(file.read_bytes() for file in (folder / FOLDER).iterdir())
    assert b"said by old1" not in kept and b"said by new" in kept, "nobody has looked at it yet"
    assert [each.call_id for each in history.find(CallSearch(), 9)] == ["new"]
    store.prune(clock.now + 1, "anna")
    assert b"said by new" not in b"".join(file.read_bytes() for file in (folder / FOLDER).iterdir())
    history.close()


def test_a_log_goes_on_after_a_prune_and_is_pruned_again(
    folder: Path, keys: Keys, clock: Clock, report: Callable[[], Verification]
) -> None:
    for number in range(4):
        with Store.open(folder, keys) as store:
            call(store, f"c{number}")
            store.prune(clock.now, "anna")
            assert report().ok, str(report())
    found = report()
    assert found.ok, str(found)
    assert not [note for note in found.notes if "no checkpoint yet" in note]


def test_a_prune_of_another_process_leaves_a_running_one_able_to_write(
    folder: Path, keys: Keys, clock: Clock, report: Callable[[], Verification], drive: Drive
) -> None:
    other = drive("hold")
    assert other.stdin is not None and other.stdout is not None
    chain = other.stdout.readline().split()[1]
    with Store.open(folder, keys) as store:
        clock.now = time.time() + 10
        store.prune(clock.now, "anna")
        assert [r.seq for r in store.reader().records(chain=chain)] == [2]
    other.stdin.write("go on\n")
    other.stdin.flush()
    assert other.stdout.readline() == "closed\n"
    assert report().ok, str(report())


# ── what stays ──


def stays(store: Store, clock: Clock, folder: Path, *wanted: str) -> None:
    call(store, "after")
    moment = clock.now
    call(store, "new")
    store.prune(moment, "anna")
    left = calls(folder)
    assert left == [*wanted, "after", "new"], left


def test_a_running_call_stays(store: Store, clock: Clock, folder: Path, report: Callable[[], Verification]) -> None:
    call(store, "old")
    store.write_sync(lambda tx: tx.append("started", "running", {}))
    stays(store, clock, folder, "running")
    assert store.prune(clock.now, "anna").records == 0
    store.write_sync(lambda tx: tx.append("finished", "running", {"status": "success"}))
    assert report().ok


def test_a_call_goes_whole_or_not_at_all(store: Store, clock: Clock, folder: Path) -> None:
    call(store, "old")
    store.write_sync(lambda tx: tx.append("started", "long", {}))
    call(store, "after")
    moment = clock.now
    store.write_sync(lambda tx: tx.append("finished", "long", {}))
    store.prune(moment, "anna")
    assert calls(folder) == ["long", "after"]


def test_a_key_in_force_keeps_its_call(store: Store, clock: Clock, folder: Path) -> None:
    store.write_sync(lambda tx: tx.take_key("s", "k", "d", "keyed"))
    call(store, "keyed")
    store.write_sync(lambda tx: tx.settle_key("s", "k", "done", {}))
    stays(store, clock, folder, "keyed")
    clock.now += 100 * DAY  # which is not believed yet
    store.prune(clock.now, "anna")
    assert "keyed" in calls(folder)
    clock.now -= 100 * DAY
    for _ in range(9):
        clock.now += DAY - 10
        store.write_sync(lambda tx: tx.append("note", None, {}))
    assert store.prune(clock.now, "anna").records > 0
    assert calls(folder) == []


@pytest.mark.parametrize("answer", [None, True, False])
def test_an_open_question_and_a_usable_answer_stay(
    store: Store, clock: Clock, folder: Path, answer: bool | None
) -> None:
    identity = question(store, clock, "asking")
    if answer is not None:
        store.write_sync(lambda tx: tx.answer_approval(identity, "bob", answer, clock.now))
    stays(store, clock, folder, "asking")
    clock.now += 2e6
    store.prune(clock.now, "anna")
    assert (calls(folder), store.reader().approval(identity)) == ([], None)


def test_an_answer_stays_as_long_as_the_call_that_used_it(store: Store, clock: Clock, folder: Path) -> None:
    identity = question(store, clock, "asking", 100.0)
    store.write_sync(lambda tx: tx.answer_approval(identity, "bob", True, clock.now))
    clock.now += 50
    moment = clock.time()
    store.write_sync(lambda tx: tx.consume_approval("asking", "consuming", clock.now))
    call(store, "consuming")
    clock.now += 1000
    store.prune(moment, "anna")
    assert calls(folder) == ["asking", "consuming"]
    store.prune(clock.time(), "anna")
    assert (calls(folder), store.reader().approval(identity)) == ([], None)


def test_the_end_of_a_chain_that_a_crash_left_open_stays(
    folder: Path, keys: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch, report: Callable[[], Verification]
) -> None:
    with Store.open(folder, keys) as store:
        first = Store.open(folder, keys)
        call(first, "c1")
        monkeypatch.setattr("ringfence.store.writer.Writer._cover", lambda self: None)
        call(first, "c2")
        monkeypatch.undo()
        crash(first)
        store.prune(time.time() + 1e9, "anna")
        left = [r.seq for r in store.reader().records(chain=first.chain)]
        assert left[0] <= 3  # its checkpoint stands there
    with Store.open(folder, keys) as again:
        assert again.recovered.damaged == ()
    assert report().ok, str(report())


# ── what is found ──


def pruned(folder: Path, keys: Keys, clock: Clock) -> str:
    with Store.open(folder, keys) as store:
        for number in range(4):
            call(store, f"c{number}")
        moment = clock.now
        call(store, "new")
        store.prune(moment, "anna")
    return store.chain


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ringfence.db")) as connection:
        assert connection.execute(statement).rowcount != 0
        connection.commit()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("DELETE FROM records WHERE seq = (SELECT min(seq) FROM records)", "record 10 is missing before it"),
        ("DELETE FROM records WHERE seq = 11", "record 11 is missing before it"),
        ("UPDATE records SET text = replace(text, 'finished', 'finishes') WHERE seq = 11", "was edited"),
        ("DELETE FROM records WHERE seq >= 12", "cut from the end"),
    ],
)
def test_any_other_cut_is_found(folder: Path, keys: Keys, clock: Clock, spoil: str, said: str, report: Any) -> None:
    pruned(folder, keys, clock)
    assert report().ok, str(report())
    change(folder, spoil)
    found = report()
    assert not found.ok
    assert said in str(found), str(found)


def test_a_beginning_that_goes_without_a_signed_word_is_found(
    folder: Path, keys: Keys, clock: Clock, report: Any, tmp_path: Path
) -> None:
    chain = pruned(folder, keys, clock)
    path = folder / "checkpoints" / chain
    data = path.read_bytes()
    path.write_bytes(data[:PRUNED_AT])
    assert "missing before it" in str(report())
    word, _ = read_pruned(data, chain, keys.public)
    assert word is not None
    others = load_or_create(tmp_path / "theirs")
    for forged in (
        word.sign(others.private),
        Pruned("another", word.seq, word.head, 1, 1.0, 1.0, "x").sign(keys.private),
        Pruned(chain, 2, word.head, 1, 1.0, 1.0, "x").sign(keys.private),
        Pruned(chain, word.seq, "0" * 64, 1, 1.0, 1.0, "x").sign(keys.private),
    ):
        path.write_bytes(data[:PRUNED_AT] + pack_slot(forged, PRUNED_BYTES))
        assert not report().ok


def test_an_export_after_a_prune_verifies_offline(folder: Path, keys: Keys, clock: Clock, tmp_path: Path) -> None:
    chain = pruned(folder, keys, clock)
    path = tmp_path / "export.jsonl"
    with closing(Reader.open(folder)) as reader:
        checkpoints = reader.checkpoints()
        write_export(path, reader.period(ALWAYS), keys, ALWAYS, checkpoints)
    found = verify_export(path, keys.public)
    assert found.ok, str(found)
    assert f"chain {chain}: records 1 to 9 were pruned by anna" in str(found)
    lines = path.read_bytes().splitlines(keepends=True)
    said = next(number for number, line in enumerate(lines) if b'"type":"pruned"' in line)
    for spoilt in (
        lines[:said] + lines[said + 1 :],
        lines[: said + 1] + lines[said + 2 :],
        [*lines[:said], lines[said + 1], lines[said], *lines[said + 2 :]],
        [*lines[:said], lines[said], *lines[said:]],
        [*lines[:said], lines[said].replace(b'"seq":9', b'"seq":8'), *lines[said + 1 :]],
    ):
        path.write_bytes(b"".join(spoilt))
        assert not verify_export(path, keys.public).ok


# ── stopped ──


class Stopped(BaseException):
    """As good as a kill: nothing of ours catches it."""


@pytest.mark.parametrize("where", ["_sign", "_finish", "_remove"])
def test_a_prune_that_was_stopped_leaves_a_log_that_verifies_and_the_next_finishes_it(
    folder: Path,
    keys: Keys,
    clock: Clock,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[], Verification],
) -> None:
    monkeypatch.setattr(pruning, "STEP", 3)
    with Store.open(folder, keys) as store:
        for number in range(6):
            call(store, f"c{number}")
        moment = clock.now
        call(store, "new")
        steps = 0
        original = getattr(pruning.Pruning, where)

        def stop(self: Any, *given: Any, **more: Any) -> Any:
            nonlocal steps
            steps += 1
            if where == "_finish" and steps == 1:
                return original(self, *given, **more)
            if where == "_remove":
                name, seq = given
                store.write_sync(lambda tx: tx.remove_records(name, seq, 3))
            raise Stopped

        monkeypatch.setattr(pruning.Pruning, where, stop)
        with pytest.raises(Stopped):
            store.prune(moment, "anna")
        assert report().ok, str(report())
        monkeypatch.setattr(pruning.Pruning, where, original)
        store.prune(moment, "anna")
        assert calls(folder) == ["new"]
    assert report().ok, str(report())


def test_what_a_stopped_prune_left_is_still_checked(
    folder: Path, keys: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch, report: Callable[[], Verification]
) -> None:
    monkeypatch.setattr(pruning.Pruning, "_remove", lambda self, name, seq: 0)
    pruned(folder, keys, clock)
    assert "the next prune removes it" in str(report())
    change(folder, "UPDATE records SET text = replace(text, 'c1', 'c9') WHERE seq = 4")
    assert not report().ok


# ── while somebody reads ──


@pytest.mark.parametrize("step", [0, 3])
def test_what_is_removed_while_the_log_is_read_is_no_fault(
    folder: Path, keys: Keys, clock: Clock, step: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither where it is read from its beginning, nor from within what goes, once the word on it is known."""
    monkeypatch.setattr("ringfence.store.reader._PAGE", 2)
    with Store.open(folder, keys) as store, closing(Reader.open(folder)) as reader:
        for number in range(6):
            call(store, f"c{number}")
        moment = clock.now
        call(store, "new")
        with monkeypatch.context() as patched:
            patched.setattr(pruning.Pruning, "_remove", lambda self, name, seq: 0)
            store.prune(moment, "anna")
        records, checkpoints = reader.evidence()
        read = [next(records[store.chain]) for _ in range(step)]
        store.prune(moment, "anna")
        found = verify_live({store.chain: chain([*read], records[store.chain])}, checkpoints, keys.public)
        assert found.ok, str(found)
        period = reader.period(ALWAYS)
        write_export(tmp_path / "e", chain([*read], period), keys, ALWAYS, checkpoints)
        assert verify_export(tmp_path / "e", keys.public).ok


def test_two_prunes_at_once_are_refused(store: Store, folder: Path) -> None:
    lock = chainfiles.ChainLock.take(folder, "prune")
    assert lock is not None
    with pytest.raises(Conflict, match="another process prunes"):
        store.prune(time.time(), "anna")
    lock.release()


# ── what somebody does to the database first ──


def rest(folder: Path, keys: Keys) -> Verification:
    with closing(Reader.open(folder)) as reader:
        return verify_live(*reader.evidence(), keys.public, reader.record)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE records SET at = 1 WHERE seq < 9",
        "UPDATE records SET at = 'x' WHERE seq = 3",
        "UPDATE records SET seq = 'x' WHERE seq = 9",
        "UPDATE records SET call_id = 'other' WHERE seq = 3",
        "UPDATE records SET text = replace(text, 'c1', 'c7') WHERE seq = 5",
        "DELETE FROM records WHERE seq BETWEEN 4 AND 6",
        "DELETE FROM records WHERE seq < 4",
    ],
)
def test_what_does_not_verify_is_evidence_and_is_not_pruned(
    folder: Path, keys: Keys, clock: Clock, change: str
) -> None:
    """Else a prune would sign away whatever somebody filed under an earlier time, and hide what is missing."""
    with Store.open(folder, keys) as store:
        for number in range(4):
            call(store, f"c{number}")
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as connection:
        assert connection.execute(change).rowcount
        (left,) = connection.execute("SELECT count(*) FROM records").fetchone()
    before = clock.now if "at = 1" not in change else 2.0
    with Store.open(folder, keys) as second:
        assert second.prune(before, "anna").records == 0
        assert sum(1 for r in second.reader().records() if r.chain == store.chain) == left
    assert not rest(folder, keys).ok


@pytest.mark.parametrize("edited", [3, 7, 9])
def test_a_chain_that_was_edited_and_chained_anew_is_evidence_and_is_not_pruned(
    folder: Path, keys: Keys, clock: Clock, edited: int
) -> None:
    with Store.open(folder, keys) as store:
        call(store, "c0")
        call(store, "c1")
        moment = clock.now
        call(store, "c2")
        call(store, "c3")
    with (
        closing(Reader.open(folder)) as reader,
        closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as connection,
    ):
        last: Record | None = None
        for record in list(reader.records(chain=store.chain)):
            place = ("v", "chain", "seq", "prev", "at", "kind", "call_id")
            body = {name: value for name, value in record.body.items() if name not in place}
            if record.seq == edited:
                body["status"] = "denied"
            head = Head(store.chain) if last is None else last.head
            last = seal(head, record.at, record.kind, record.call_id, body)
            change = "UPDATE records SET text = ?, hash = ? WHERE chain = ? AND seq = ?"
            connection.execute(change, (last.text, last.hash, last.chain, last.seq))
        (left,) = connection.execute("SELECT count(*) FROM records").fetchone()
    with Store.open(folder, keys) as second:
        assert second.prune(moment, "anna").records == 0
        assert sum(1 for r in second.reader().records() if r.chain == store.chain) == left
    assert "is not the record that the checkpoint was signed for" in str(rest(folder, keys))


def test_a_record_that_is_put_where_others_were_pruned_is_found(
    folder: Path, keys: Keys, clock: Clock, tmp_path: Path
) -> None:
    with Store.open(folder, keys) as store:
        for number in range(4):
            call(store, f"c{number}")
        moment = clock.now
        call(store, "new")
        assert store.prune(moment, "anna").records == 9
    assert rest(folder, keys).ok
    forged = seal(Head(store.chain, 4, "a" * 64), moment, "finished", "call_forged", {"status": "success"})
    row = (forged.chain, forged.seq, forged.at, forged.kind, forged.call_id, forged.text, forged.hash)
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as connection:
        connection.execute(
            "INSERT INTO records (chain, seq, at, kind, call_id, text, hash) VALUES (?, ?, ?, ?, ?, ?, ?)", row
        )
    assert "record 5: was put where records were pruned" in str(rest(folder, keys))
    with closing(Reader.open(folder)) as reader:
        write_export(tmp_path / "e", reader.period(), keys, ALWAYS, reader.checkpoints())
    assert verify_export(tmp_path / "e", keys.public).ok and b"call_forged" not in (tmp_path / "e").read_bytes()


@pytest.mark.parametrize("name", ["../../../tmp/evil", "unknown"])
def test_a_row_that_says_of_a_strange_chain_that_it_is_pruned_makes_no_file(
    store: Store, folder: Path, clock: Clock, name: str
) -> None:
    call(store, "old")
    moment = clock.now
    call(store, "new")
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as connection:
        connection.execute("INSERT INTO prunes VALUES (?, 3)", (name,))
    assert store.prune(moment, "anna").records == 3
    assert [path.name for path in (folder / "checkpoints").iterdir() if "." not in path.name] == [store.chain]


class _Counted(sqlite3.Connection):
    """Counts the steps of SQLite's machine."""

    steps = 0

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.set_progress_handler(self._one_more, 1)

    def _one_more(self) -> None:
        _Counted.steps += 1


def second_prune(
    folder: Path, keys: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch, calls: int
) -> tuple[int, int]:
    """How many records a prune reads, and how many steps it takes, that removes ten calls of so many, where an earlier
    one removed ten."""
    moments = []
    with Store.open(folder, keys) as store:
        for number in range(calls):
            call(store, f"c{number}")
            moments.append(clock.now)
            if number % 20 == 19:  # as a gateway does every hour
                store.prune(moments[0] - 100, "gateway.retention")
        assert store.prune(moments[9], "anna").records >= 20
        with monkeypatch.context() as patched:
            read: list[str] = []
            feed = ChainVerifier.feed

            def counted(self: ChainVerifier, text: str, digest: str) -> Any:
                read.append(text)
                return feed(self, text, digest)

            patched.setattr(ChainVerifier, "feed", counted)
            patched.setattr(
                pruning,
                "connect",
                lambda folder: sqlite3.connect(folder / DATABASE, factory=_Counted, isolation_level=None),
            )
            patched.setattr(pruning, "recent_times", lambda connection: [clock.now])  # looks at the last thousand
            _Counted.steps = 0
            assert store.prune(moments[19], "anna").records == 20
        found = rest(folder, keys)
        assert found.ok, str(found)
        return len(read), _Counted.steps


def test_a_later_prune_reads_no_more_of_a_longer_log(
    tmp_path: Path, keys: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "HEADS_APART", 30)
    (few, quick), (many, slow) = (second_prune(tmp_path / str(n), keys, clock, monkeypatch, n) for n in (60, 400))
    assert 20 <= few == many <= 20 + 2 * 40, "what goes, and what leads to the next head that was signed for"
    assert slow - quick < 1000, (quick, slow)


@pytest.mark.parametrize("line", [b"", b"no checkpoint", "another chain's"])
def test_a_head_that_was_not_signed_for_ends_no_reading(
    folder: Path, keys: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch, line: bytes | str
) -> None:
    monkeypatch.setattr(pruning, "HEADS_APART", 1)
    with Store.open(folder, keys) as other:
        other.prune(0.0, "anna")
        call(other, "other")
    with Store.open(folder, keys) as store:
        call(store, "c0")
        moment = clock.now
        for number in range(1, 9):
            call(store, f"c{number}")
            store.prune(0.0, "anna")
    with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
        (kept,) = connection.execute("SELECT count(*) FROM heads WHERE chain = ?", (store.chain,)).fetchone()
        assert kept >= 8
        if isinstance(line, str):
            (line,) = connection.execute("SELECT line FROM heads WHERE chain = ?", (other.chain,)).fetchone()
        connection.execute("UPDATE heads SET line = ? WHERE chain = ?", (line, store.chain))
        # The last record that goes, and all after it, chained anew: only what was signed for tells.
        connection.execute("UPDATE records SET text = replace(text, 'c3', 'c7') WHERE call_id = 'c3'")
    with Store.open(folder, keys) as third:
        assert all(name != store.chain for name in _pruned_chains(third, moment))


def _pruned_chains(store: Store, moment: float) -> list[str]:
    store.prune(moment, "anna")
    return [entry["chain"] for told in store.reader().records(kind="pruned") for entry in told.body["chains"]]


def test_so_many_heads_are_kept_and_no_more(
    store: Store, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "HEADS_APART", 1)
    monkeypatch.setattr(pruning, "MAX_HEADS", 8)
    moments = []
    for number in range(30):
        call(store, f"c{number}")
        moments.append(clock.now)
        store.prune(0.0, "anna")
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        heads = [
            row[0] for row in connection.execute("SELECT seq FROM heads WHERE chain = ? ORDER BY seq", (store.chain,))
        ]
        assert 4 <= len(heads) <= 8 and heads[0] < 20 and heads[-1] >= 58
        assert store.prune(moments[20], "anna").records > 40
        store.prune(0.0, "anna")
        call(store, "late")
        store.prune(0.0, "anna")
        (first,) = connection.execute("SELECT min(seq) FROM heads WHERE chain = ?", (store.chain,)).fetchone()
        assert first > 40
