"""What no signature proves was not agreed to, in whatever form a record says so."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ringfence.audit.chain import ALWAYS, Period
from ringfence.audit.explain import explain
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import load_or_create
from ringfence.store import Reader, Store, Transaction

ABOUT = {"call": {"id": "c", "kind": "tool", "tool": "wire"}, "decision": {"id": "d", "asks": ["two"]}}
ABOUT |= {"approval": {"id": "apr_1", "rule": "two", "by": [{"person": "ann"}, {"person": "carl"}]}}


def forged(tx: Transaction) -> None:
    """As versions wrote it that signed nothing."""
    tx.append("approval_asked", "c", {"approval": "apr_1", "rule": "two", "people": 2, "tool": "wire"})
    for person in ("ann", "carl"):
        tx.append("approval_answered", "c", {"approval": "apr_1", "person": person, "approve": True})
    tx.append("started", "c", ABOUT)
    tx.append("finished", "c", {**ABOUT, "status": "success", "reason_code": "ok"})


def test_a_record_does_not_choose_that_its_approval_needs_no_signature(tmp_path: Path) -> None:
    keys = load_or_create(tmp_path / "keys")
    said = "call c ran on approval apr_1, the question and answers of which are not signed"
    with Store.open(tmp_path / "state", keys) as store:
        store.write_sync(forged)
    with closing(Reader.open(tmp_path / "state")) as reader:
        assert said in str(verify_live(*reader.evidence(), keys.public))
        for number, period in enumerate((ALWAYS, Period(until=2.0**33))):
            path = tmp_path / f"e{number}"
            write_export(path, reader.period(period), keys, period, reader.checkpoints())
            assert said in str(verify_export(path, keys.public))
        told = explain([record.body for record in reader.story("c")], keys.public)
    assert "approved it" not in told
    assert "an answer of ann (apr_1) is not signed and proves nothing" in told
