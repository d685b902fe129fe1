"""One key signs for every state of a user: what was signed in one of them is worth nothing in another."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from ringfence.audit import chain as chains
from ringfence.audit.chain import ALWAYS, Checkpoint, Head, Period, Record, Verification, seal_proved
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import Keys
from ringfence.audit.signer import Signer
from ringfence.core.errors import StoreError, TamperError
from ringfence.core.model import Json
from ringfence.store import Approval, ApprovalQuestion, Reader, Store, Unproven, sqlite
from tests.store.test_recovery import crash

DIGEST = "d" * 64


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other"


def asked(store: Store) -> Approval:
    now = time.time()
    question = ApprovalQuestion(DIGEST, "call_1", "default/local", "wire", "boss", now, now + 3600, {"n": 1})
    return store.write_sync(lambda tx: tx.ask_approval(question))


def approved(store: Store) -> Approval:
    waits = asked(store)
    return store.write_sync(lambda tx: tx.answer_approval(waits.id, "anna", True, waits.asked_at))


def put_into(folder: Path, other: Path, *tables: str) -> None:
    """What a program does that reads the one state and writes to the other."""
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as database:
        database.execute("ATTACH ? AS other", (str(other / "ringfence.db"),))
        names = "chain, seq, at, kind, call_id, text, hash, salt"
        database.execute(f"INSERT INTO records ({names}) SELECT {names} FROM other.records ORDER BY id")
        for table in ("chains", *tables):
            database.execute(f"INSERT INTO {table} SELECT * FROM other.{table}")
    for name in ("checkpoints", "chains"):
        for path in (other / name).iterdir():
            if "." not in path.name or path.suffix == ".lock":
                shutil.copy(path, folder / name)


def verified(folder: Path, keys: Keys) -> Verification:
    with closing(Reader.open(folder)) as reader:
        return verify_live(*reader.evidence(), keys.public, reader.record)


def exported(folder: Path, keys: Keys, path: Path, period: Period = ALWAYS) -> Verification:
    with closing(Reader.open(folder)) as reader:
        write_export(path, reader.period(period), keys, period, reader.checkpoints(), reader.record)
    return verify_export(path, keys.public)


def test_an_approval_of_another_state_is_not_used(folder: Path, other: Path, keys: Keys) -> None:
    with Store.open(other, keys) as theirs:
        approved(theirs)
    with Store.open(folder, keys) as store:
        put_into(folder, other, "approvals", "answers")
        with pytest.raises(Unproven, match="it was asked in another state"):
            store.write_sync(lambda tx: tx.consume_approval(DIGEST, "call_2", time.time()))
    with Store.open(other, keys) as theirs:
        used = theirs.write_sync(lambda tx: tx.consume_approval(DIGEST, "call_2", time.time()))
        assert used is not None


def test_an_answer_of_another_state_does_not_answer_a_question_of_this_one(folder: Path, keys: Keys) -> None:
    with Store.open(folder, keys) as store:
        waits = asked(store)
        now = time.time()
        place = next(store.reader().records(kind="approval_asked"))
        body = {"approval": waits.id, "person": "anna", "approve": True, "asked": place.hash, "state": "state_another"}
        with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as database:
            given = seal_proved(keys.sign_record, Head("elsewhere"), now, ("approval_answered", "call_1"), body)
            row = (given.chain, given.seq, given.at, given.kind, given.call_id, given.text, given.hash)
            names = "chain, seq, at, kind, call_id, text, hash"
            database.execute(f"INSERT INTO records ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            database.execute("UPDATE approvals SET state = 'approved'")
        with pytest.raises(Unproven, match="does not hold every answer"):
            store.write_sync(lambda tx: tx.consume_approval(DIGEST, "call_2", now))


@pytest.mark.parametrize("pruned", [False, True])
def test_chains_of_another_state_are_found_also_where_their_beginning_was_pruned(
    folder: Path, other: Path, keys: Keys, tmp_path: Path, pruned: bool
) -> None:
    with Store.open(other, keys) as theirs:
        for _ in range(3):
            theirs.write_sync(lambda tx: tx.append("note", None, {}))
        moment = time.time()
        theirs.write_sync(lambda tx: tx.append("note", None, {}))
        if pruned:
            assert theirs.prune(moment, "anna").records
    with Store.open(folder, keys):
        pass
    assert verified(folder, keys).ok
    put_into(folder, other)
    report = verified(folder, keys)
    assert f"chain {theirs.chain}: its checkpoint was signed in another state (state_" in str(report)
    for period in (ALWAYS, Period(moment)):
        with pytest.raises(TamperError, match="in another state"):
            exported(folder, keys, tmp_path / "e", period)


def test_a_chain_of_another_state_that_seems_to_have_crashed_is_not_signed_for(
    folder: Path, other: Path, keys: Keys
) -> None:
    theirs = Store.open(other, keys)
    theirs.write_sync(lambda tx: tx.append("note", None, {}))
    crash(theirs)
    Store.open(folder, keys).close()
    put_into(folder, other)
    with Store.open(folder, keys) as store:
        assert store.recovered.damaged == (f"the checkpoint of chain {theirs.chain} was signed in another state",)


def test_a_chain_of_another_state_is_not_taken_up(folder: Path, other: Path, keys: Keys) -> None:
    Store.open(folder, keys).close()
    for _ in range(9):
        Store.open(other, keys).close()
    put_into(folder, other)
    with Store.open(folder, keys) as store:
        assert not (other / "checkpoints" / store.chain).exists()


def test_an_export_says_of_which_state_it_is(folder: Path, other: Path, keys: Keys, tmp_path: Path) -> None:
    for state in (folder, other):
        Store.open(state, keys).close()
    mine, theirs = (exported(state, keys, tmp_path / f"{state.name}.e") for state in (folder, other))
    assert mine.ok and theirs.ok and mine.state != theirs.state
    assert mine.state == verified(folder, keys).state
    lines = (tmp_path / f"{folder.name}.e").read_bytes().splitlines(keepends=True)
    lines[0] = (tmp_path / f"{other.name}.e").read_bytes().splitlines(keepends=True)[0]
    (tmp_path / "mixed").write_bytes(b"".join(lines))
    said = str(verify_export(tmp_path / "mixed", keys.public))
    assert "the closing line was signed for the log of another state" in said
    assert "was opened in another state" in said


# ── States of versions that named none ──


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Until it is undone, stores write as before states had ids."""
    opening = sqlite._opening

    def checkpoint(self: Signer, head: Head, at: float, since: object = None) -> bytes:
        assert isinstance(self.keys, Keys)
        return Checkpoint(head.chain, head.seq, head.hash, head.seq, at).sign(self.keys.private)

    def record(self: Signer, head: Head, at: float, about: tuple[str, str | None], body: Json) -> Record:
        assert isinstance(self.keys, Keys)
        return seal_proved(self.keys.sign_record, head, at, about, body)

    def without(*args: object) -> Json:
        return {name: value for name, value in opening(*args).items() if name != "state"}  # type: ignore[arg-type]

    monkeypatch.setattr(Signer, "checkpoint", checkpoint)
    monkeypatch.setattr(Signer, "record", record)
    monkeypatch.setattr(sqlite, "_opening", without)
    return monkeypatch


def as_left(folder: Path, keys: Keys) -> None:
    (folder / "checkpoints" / chains.identity_name(keys.public)).unlink()


def test_an_older_state_gets_its_id_at_the_next_start_on_record_and_its_log_still_verifies(
    folder: Path, keys: Keys, tmp_path: Path, earlier: pytest.MonkeyPatch
) -> None:
    with Store.open(folder, keys) as ended:
        asked(ended)
    crashed = Store.open(folder, keys)
    crash(crashed)
    earlier.undo()
    as_left(folder, keys)
    with closing(sqlite3.connect(folder / "ringfence.db", isolation_level=None)) as database:
        database.execute("UPDATE approvals SET state = 'approved'")
    with Store.open(folder, keys) as store:
        assert store.recovered.chains == (crashed.chain,)
        named = next(store.reader().records(kind="state_named"))
        assert chains.has_signature(keys.public, named.body)
        with pytest.raises(Unproven, match="by a version that did not sign in which state"):
            store.write_sync(lambda tx: tx.consume_approval(DIGEST, "call_2", time.time()))
    report = verified(folder, keys)
    assert report.ok and report.state == named.body["state"], str(report)
    for number, period in enumerate((ALWAYS, Period(1.0))):
        assert (found := exported(folder, keys, tmp_path / f"e{number}", period)).ok, str(found)
    with Store.open(folder, keys) as store:
        assert len(list(store.reader().records(kind="state_named"))) == 1


def test_that_an_older_state_got_its_id_is_on_record_though_it_was_killed_meanwhile(
    folder: Path, keys: Keys, earlier: pytest.MonkeyPatch
) -> None:
    Store.open(folder, keys).close()
    earlier.undo()
    as_left(folder, keys)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "begin_chain", killed)
        patch.setattr(sqlite, "continue_chain", killed)
        with pytest.raises(Killed):
            Store.open(folder, keys)
    assert (folder / "checkpoints" / chains.identity_name(keys.public)).is_file()
    for _ in range(2):
        with Store.open(folder, keys) as store:
            (named,) = store.reader().records(kind="state_named")
            assert chains.has_signature(keys.public, named.body)
    assert verified(folder, keys).ok


def test_an_older_state_keeps_what_it_wrote_while_its_clock_was_ahead(
    folder: Path, keys: Keys, tmp_path: Path, earlier: pytest.MonkeyPatch
) -> None:
    now = time.time
    earlier.setattr(time, "time", lambda: now() + 3600.0)
    with Store.open(folder, keys) as ahead:
        asked(ahead)
    earlier.undo()
    as_left(folder, keys)
    with Store.open(folder, keys):
        pass
    assert (report := verified(folder, keys)).ok, str(report)
    assert (found := exported(folder, keys, tmp_path / "export", ALWAYS)).ok, str(found)


def test_a_chain_that_names_no_state_is_of_none_that_has_an_id(
    folder: Path, other: Path, keys: Keys, earlier: pytest.MonkeyPatch
) -> None:
    with Store.open(other, keys) as theirs:
        pass
    earlier.undo()
    Store.open(folder, keys).close()
    put_into(folder, other)
    said = str(verified(folder, keys))
    assert f"chain {theirs.chain}, record 1: was opened without naming its state" in said
    assert f"chain {theirs.chain}: its checkpoint was signed without naming its state" in said


def test_the_file_that_says_which_state_it_is_cannot_be_lost_unseen(folder: Path, keys: Keys) -> None:
    Store.open(folder, keys).close()
    before = verified(folder, keys)
    path = folder / "checkpoints" / chains.identity_name(keys.public)
    path.unlink()
    assert "no signed statement says that this is that state" in str(verified(folder, keys))
    with Store.open(folder, keys) as store:
        assert len(list(store.reader().records(kind="state_named"))) == 1
    after = verified(folder, keys)
    assert after.ok and after.state == before.state, str(after)
    path.write_bytes(b"{}")
    with pytest.raises(StoreError, match="does not say which state this is"):
        Store.open(folder, keys)
