"""The signing key in a process of its own, which signs for a log only what goes on from where that was."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.audit import signing_client
from ringfence.audit.chain import GENESIS, Checkpoint, Head, Period, Pruned, Record, seal
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import PRIVATE, PUBLIC, SIGNER, Keys, load_or_create
from ringfence.audit.signer import Signer
from ringfence.audit.signing import signing_key
from ringfence.audit.signing_client import SignerProcess, give_to_signer
from ringfence.core import canonical
from ringfence.core.errors import StoreError
from ringfence.core.model import Json, Receipt
from ringfence.store import Reader, Store, transaction
from tests.store.conftest import Drive
from tests.tooling import alive, wait_until_gone


@pytest.fixture
def signer(keys: Keys) -> Iterator[SignerProcess]:
    key = give_to_signer(keys.folder)
    yield key
    key.close()


def write(store: Store, number: int) -> Receipt:
    """A call from beginning to end."""
    for kind in ("started", "finished"):
        receipt = store.write_sync(lambda tx, kind=kind: tx.append(kind, f"call_{number}", {}))  # type: ignore[misc]
    return receipt


def report(folder: Path, signer: SignerProcess) -> str:
    reader = Reader.open(folder)
    try:
        return str(verify_live(*reader.evidence(), signer.public, reader.record))
    finally:
        reader.close()


def records(folder: Path) -> list[Record]:
    reader = Reader.open(folder)
    try:
        return list(reader.records())
    finally:
        reader.close()


# ── It signs a log ──


def test_a_log_that_it_signs_verifies(folder: Path, signer: SignerProcess) -> None:
    with Store.open(folder, signer) as store:
        for number in range(3):
            write(store, number)
        assert signer.pid not in (None, os.getpid())
    assert "verified" in report(folder, signer)
    assert signer.pid is None, "it ends with the store"


def test_the_key_leaves_the_folder_of_those_that_do_not_need_it(tmp_path: Path, folder: Path) -> None:
    keys = tmp_path / "keys"
    before = load_or_create(keys)
    with Store.open(folder, before) as store:
        write(store, 1)
    signer = give_to_signer(keys)
    assert signer.id == before.id
    assert not (keys / PRIVATE).exists()
    assert {path.name for path in keys.iterdir()} == {PUBLIC, SIGNER}
    found = signing_key(keys)
    assert isinstance(found, SignerProcess), "from now on, every program asks it"
    with Store.open(folder, found) as store:
        write(store, 2)
    assert "verified" in report(folder, found)
    assert give_to_signer(keys).id == before.id, "to give it twice changes nothing"
    with pytest.raises(StoreError, match="was given to a signer"):
        load_or_create(keys)
    assert not (keys / PRIVATE).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_started_by_root_it_is_another_user(folder: Path, signer: SignerProcess) -> None:
    with Store.open(folder, signer) as store:
        write(store, 1)
        status = Path(f"/proc/{signer.pid}/status").read_text()
        user = str(signing_client.SIGNER_USER)
        assert [line.split()[1:] for line in status.splitlines() if line.startswith(("Uid", "Gid"))] == [[user] * 4] * 2
        assert [line.split()[1:] for line in status.splitlines() if line.startswith("Groups")] == [[]]
    place = signer.folder / SIGNER
    assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (signing_client.SIGNER_USER, 0o700)
    assert (place / PRIVATE).stat().st_uid == signing_client.SIGNER_USER


def test_a_user_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no account nobody-of-that-name"):
        give_to_signer(tmp_path / "keys", "nobody-of-that-name")


# ── It and its clients crash ──


def test_a_signer_that_is_killed_is_started_again(folder: Path, signer: SignerProcess) -> None:
    with Store.open(folder, signer) as store:
        write(store, 1)
        killed = signer.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        wait_until_gone(killed)
        receipt = write(store, 2)
        assert signer.pid not in (None, killed)
    assert receipt.seq == 5
    assert "verified" in report(folder, signer)


def test_nothing_is_lost_when_a_writer_is_killed(folder: Path, signer: SignerProcess, drive: Drive) -> None:
    """Some twenty times, each in the middle of what it writes; every record that was acknowledged stays."""
    acked: set[str] = set()
    for _ in range(8):
        writer = drive("load")
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(40)]
        writer.kill()
        lines += writer.stdout.read().splitlines()
        writer.wait()
        acked |= {line.split()[3] for line in lines if line.startswith("acked") and len(line.split()) == 4}
    with Store.open(folder, signer) as store:
        assert not store.recovered.damaged
    assert len(acked) > 100
    assert acked <= {record.hash for record in records(folder)}
    assert "verified" in report(folder, signer)


def test_it_ends_with_the_process_that_started_it(folder: Path, signer: SignerProcess, drive: Drive) -> None:
    writer = drive("hold")
    assert writer.stdout is not None
    writer.stdout.readline()
    children = Path(f"/proc/{writer.pid}/task/{writer.pid}/children").read_text().split()
    children += [
        pid
        for task in Path(f"/proc/{writer.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
        if pid not in children
    ]
    assert len(children) == 1
    writer.kill()
    writer.wait()
    wait_until_gone(int(children[0]))
    assert not alive(int(children[0]))


# ── It refuses ──


@pytest.fixture
def forger(folder: Path, signer: SignerProcess) -> tuple[Signer, Head, list[Record]]:
    """What someone who has the gateway has: a way to ask, and a log that was signed for."""
    with Store.open(folder, signer) as store:
        for number in range(3):
            write(store, number)
        assert store._signer is not None
        state = store._signer.state
    found = records(folder)
    return Signer(signer, state), found[-1].head, found


def test_an_earlier_head_is_not_signed_again(forger: tuple[Signer, Head, list[Record]]) -> None:
    signer, head, found = forger
    assert signer.checkpoint(head, 1.0, lambda _seq: ()), "the same head may be: a crash may have lost its signature"
    for earlier in (found[-2].head, found[0].head, Head(head.chain)):
        with pytest.raises(StoreError, match="the signer refuses: the signer's last head"):
            signer.checkpoint(earlier, 1.0, lambda _seq: ())


def test_another_record_in_the_place_of_a_signed_one_is_not_signed(
    forger: tuple[Signer, Head, list[Record]],
) -> None:
    signer, head, found = forger
    other = seal(found[-2].head, 1.0, "finished", "call_2", {"forged": True})
    assert other.seq == head.seq
    with pytest.raises(StoreError, match="refuses"):
        signer.checkpoint(other.head, 1.0, lambda _seq: (other.text,))
    further = seal(other.head, 1.0, "finished", "call_3", {})
    for given in ((further.text,), (other.text, further.text)):
        with pytest.raises(StoreError, match="refuses"):
            signer.checkpoint(further.head, 1.0, lambda _seq, given=given: given)  # type: ignore[misc]


def test_no_head_is_signed_without_what_leads_to_it(forger: tuple[Signer, Head, list[Record]]) -> None:
    signer, head, _found = forger
    with pytest.raises(StoreError, match="not to the record"):
        signer.checkpoint(Head(head.chain, head.seq + 1, "a" * 64), 1.0, lambda _seq: ())
    strange = Head("20260101T000000Z-aaaaaaaaaa", 7, "a" * 64)
    with pytest.raises(StoreError, match="not to the record"):
        signer.checkpoint(strange, 1.0, lambda _seq: ())


def test_no_record_is_proved_that_comes_before_what_was_signed(forger: tuple[Signer, Head, list[Record]]) -> None:
    signer, head, found = forger
    with pytest.raises(StoreError, match="does not come after"):
        signer.record(found[1].head, 1.0, ("approval_answered", "call_1"), {"approve": True})
    with pytest.raises(StoreError, match="no signature of its own"):
        signer.record(head, 1.0, ("finished", "call_1"), {})


def test_a_prune_up_to_the_end_is_not_signed(forger: tuple[Signer, Head, list[Record]]) -> None:
    signer, head, found = forger
    with pytest.raises(StoreError, match="that were signed for"):
        signer.pruned(head, head.seq, 1.0, 1.0, "alice")
    assert Pruned.verify(signer.public, signer.pruned(found[1].head, 2, 1.0, 1.0, "alice"))


def test_other_statements_are_not_signed(forger: tuple[Signer, Head, list[Record]]) -> None:
    signer, head, found = forger
    state = signer.state
    kinds: list[Json] = [
        {"type": "anything", "v": 1},
        Checkpoint(head.chain, head.seq + 9, GENESIS, head.seq + 9, 1.0).statement(),
        {**Checkpoint(*_place(found[1]), 2, 1.0, state=state.id).statement(), "more": 1},
        Checkpoint(*_place(found[1]), 2, 1.0, Period(), state.id).statement(),
        {"type": "export", "v": 1, "at": 1.0, "chains": [{"chain": head.chain}], "state": state.id},
    ]
    for statement in kinds:
        with pytest.raises(StoreError, match="the signer refuses"):
            signer.keys.sign(canonical.dumps(statement))


def _place(record: Record) -> tuple[str, int, str]:
    return record.chain, record.seq, record.hash


def test_a_state_has_one_identity(forger: tuple[Signer, Head, list[Record]]) -> None:
    """One that says that it had records before would let records of other states pass as its own."""
    signer, _head, _found = forger
    older = canonical.loads(signer.state.message(signer.keys.id)) | {"older": True}
    signed = canonical.loads(signer.keys.sign(canonical.dumps(older)))
    assert signed["statement"]["older"] is False


# ── What others do to its log ──


def _cut(folder: Path, chain: str, after: int) -> None:
    connection = sqlite3.connect(folder / "ringfence.db")
    with connection:
        connection.execute("DELETE FROM records WHERE chain = ? AND seq > ?", (chain, after))
        connection.execute("UPDATE chains SET settled = 0")
    connection.close()


def test_database_and_checkpoints_that_are_put_back_together_are_found_at_the_next_start(
    folder: Path, signer: SignerProcess, tmp_path: Path
) -> None:
    with Store.open(folder, signer) as store:
        write(store, 1)
        chain = store.chain
        # What was there then, as a copy would have it.
        shutil.copytree(folder, tmp_path / "copy")
        write(store, 2)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    with Store.open(folder, signer) as store:
        assert [f"chain {chain} ends before record" in text for text in store.recovered.damaged] == [True]
        assert store.chain != chain


def test_an_edited_record_is_not_signed_for_by_a_recovery(folder: Path, signer: SignerProcess, drive: Drive) -> None:
    writer = drive("hold")
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    last = records(folder)[-1]
    forged = seal(Head(last.chain, last.seq - 1, canonical.loads(last.text)["prev"]), last.at, "started", "call_x", {})
    connection = sqlite3.connect(folder / "ringfence.db")
    with connection:
        connection.execute(
            "UPDATE records SET text = ?, hash = ?, call_id = ? WHERE chain = ? AND seq = ?",
            (forged.text, forged.hash, "call_x", last.chain, last.seq),
        )
    connection.close()
    with Store.open(folder, signer) as store:
        assert len(store.recovered.damaged) == 1


# ── Exports ──


def test_an_export_that_it_signs_verifies(folder: Path, signer: SignerProcess, tmp_path: Path) -> None:
    with Store.open(folder, signer) as store:
        for number in range(150):
            write(store, number)
    _exported(folder, signer, tmp_path / "all.jsonl", Period())
    found = records(folder)
    middle = Period(found[20].at, found[60].at)
    _exported(folder, signer, tmp_path / "part.jsonl", middle)


def _exported(folder: Path, signer: SignerProcess, path: Path, period: Period) -> None:
    reader = Reader.open(folder)
    try:
        checkpoints = reader.checkpoints()
        written = write_export(path, reader.period(period), signer, period, checkpoints, reader.record)
    finally:
        reader.close()
    verified = verify_export(path, signer.public)
    assert verified.ok and verified.records == written.records > 0, str(verified)


def test_a_log_that_was_forged_is_not_exported_with_its_signature(
    forger: tuple[Signer, Head, list[Record]],
) -> None:
    """Whoever forges the log and its export, too, still needs the signature of the closings."""
    signer, head, found = forger
    forged = [found[0]]
    for record in found[1:]:
        body = {"forged": True}
        forged.append(seal(forged[-1].head, record.at, record.kind, record.call_id, body))
    closing = Checkpoint(head.chain, head.seq, forged[-1].hash, head.seq, 1.0, Period(), signer.state.id)
    with pytest.raises(StoreError, match="nothing was shown"):
        signer.keys.sign(closing.message())
    signer.keys.show(head.chain, [record.text for record in forged], signer.checkpoint(head, 1.0, lambda _seq: ()))
    with pytest.raises(StoreError, match="do not lead to a head that was signed for"):
        signer.keys.sign(closing.message())


def test_it_signs_every_kind_of_record_that_is_proof_by_itself(
    forger: tuple[Signer, Head, list[Record]],
) -> None:
    """As the source has them: a kind that is added later needs its place there, too."""
    signer, head, _found = forger
    tree = ast.parse(inspect.getsource(transaction))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    kinds = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "self._append_signed"]
    assert len(kinds) > 5
    for kind in kinds:
        module, name = kind.split(".")
        signer.record(head, 1.0, (getattr(getattr(transaction, module), name), None), {})
