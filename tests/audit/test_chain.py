"""Any change of a chain is found; what was written reads back."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from ringfence.audit.chain import (
    CLOSED,
    EMPTY_SLOT,
    GENESIS,
    MAX_FAULTS,
    MAX_RECORD_BYTES,
    SLOT_BYTES,
    Checkpoint,
    Fault,
    Head,
    Period,
    Record,
    Verification,
    is_chain_name,
    pack_slot,
    read_slots,
    seal,
    sign_statement,
    verify_records,
)
from ringfence.core import canonical

CHAIN = "20260101T000000Z-0123456789"
KEY = Ed25519PrivateKey.generate()

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
bodies = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in {"v", "chain", "seq", "prev", "at", "kind", "call_id"}),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    max_size=4,
)


def build(*contents: dict, chain: str = CHAIN) -> list[Record]:
    head, out = Head(chain), []
    for number, body in enumerate(contents):
        record = seal(head, 1000.0 + number, "started", f"call_{number}", body)
        out.append(record)
        head = record.head
    return out


def pairs(records: list[Record]) -> list[tuple[str, str]]:
    return [(record.text, record.hash) for record in records]


def rehashed(text: str) -> tuple[str, str]:
    return text, hashlib.sha256(text.encode()).hexdigest()


def test_a_record_is_its_canonical_text_and_names_the_one_before() -> None:
    first, second = build({"tool": "é☃"}, {})
    assert first.hash == hashlib.sha256(first.text.encode()).hexdigest()
    assert first.text.encode() == canonical.dumps(first.body)
    assert (first.body["prev"], first.seq, first.body["tool"]) == (GENESIS, 1, "é☃")
    assert (second.body["prev"], second.seq, second.body["call_id"]) == (first.hash, 2, "call_1")


@pytest.mark.parametrize(
    "body",
    [
        {"seq": 7},
        {"nan": float("nan")},
        {"surrogate": "\ud800"},
        {"set": {1}},
        {"huge": "x" * MAX_RECORD_BYTES},
        {"deep": [[[[[[[[{"k": "[" * 70}]]]]]]]] * 10},
    ],
    ids=["reserved", "nan", "surrogate", "not json", "huge", "many brackets"],
)
def test_a_body_is_refused_only_when_it_could_not_be_read_back(body: dict) -> None:
    if "deep" in body:
        assert seal(Head(CHAIN), 1.0, "started", None, body).body["deep"]
        return
    with pytest.raises(ValueError):
        seal(Head(CHAIN), 1.0, "started", None, body)


def test_a_body_nested_too_deeply_to_verify_is_refused() -> None:
    deep: list = []
    for _ in range(canonical.MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        seal(Head(CHAIN), 1.0, "started", None, {"deep": deep})
    for _ in range(3):
        (deep,) = deep
    body = {"deep": deep, "many": [{}] * canonical.MAX_DEPTH}
    assert canonical.depth(body) == canonical.MAX_DEPTH
    assert seal(Head(CHAIN), 1.0, "started", None, body).body["deep"] == deep


@given(st.lists(bodies, max_size=8))
def test_every_chain_that_was_sealed_verifies(contents: list[dict]) -> None:
    records = build(*contents)
    report = verify_records(pairs(records), chain=CHAIN)
    assert report.ok, str(report)
    assert report.records == len(records)
    assert [head.hash for head in report.heads] == [record.hash for record in records[-1:]]


@given(st.lists(bodies, min_size=1, max_size=6), st.data())
def test_any_edit_is_found(contents: list[dict], data: st.DataObject) -> None:
    records = pairs(build(*contents))
    index = data.draw(st.integers(0, len(records) - 1))
    text, digest = records[index]
    at = data.draw(st.integers(0, len(text) - 1))
    char = data.draw(st.characters(codec="utf-8").filter(lambda c: c != text[at]))
    records[index] = (text[:at] + char + text[at + 1 :], digest)
    assert not verify_records(records, chain=CHAIN).ok


@given(st.lists(bodies, min_size=2, max_size=6), st.data())
def test_an_edit_with_a_new_hash_is_found_by_the_link_after_it(contents: list[dict], data: st.DataObject) -> None:
    records = build(*contents)
    index = data.draw(st.integers(0, len(records) - 2))
    changed = canonical.dumps({**records[index].body, "forged": True}).decode()
    given_ = pairs(records)
    given_[index] = rehashed(changed)
    report = verify_records(given_, chain=CHAIN)
    assert [(fault.chain, fault.seq) for fault in report.faults] == [(CHAIN, index + 2)]
    assert f"record {index + 1} was replaced" in str(report.faults[0])


@given(st.lists(bodies, min_size=2, max_size=6), st.data())
def test_any_deletion_before_the_end_is_found(contents: list[dict], data: st.DataObject) -> None:
    records = pairs(build(*contents))
    index = data.draw(st.integers(0, len(records) - 2))
    del records[index]
    report = verify_records(records, chain=CHAIN)
    assert f"record {index + 1} is missing" in str(report.faults[0])


@given(st.lists(bodies, min_size=2, max_size=6), st.data())
def test_any_swap_is_found(contents: list[dict], data: st.DataObject) -> None:
    records = pairs(build(*contents))
    one = data.draw(st.integers(0, len(records) - 2))
    other = data.draw(st.integers(one + 1, len(records) - 1))
    records[one], records[other] = records[other], records[one]
    report = verify_records(records, chain=CHAIN)
    assert any("out of order" in str(fault) for fault in report.faults)


def test_a_repeated_record_is_found() -> None:
    records = pairs(build({}, {}))
    report = verify_records([records[0], records[0], records[1]], chain=CHAIN)
    assert "out of order" in str(report.faults[0])


def test_a_record_of_another_chain_is_found() -> None:
    records = pairs(build({}, chain="another"))
    report = verify_records(records, chain=CHAIN)
    assert str(report.faults[0]) == f"chain {CHAIN}, record 1: belongs to chain another, not to this one"


def test_a_cut_beginning_is_found() -> None:
    first, second = build({}, {})
    assert "record 1 is missing" in str(verify_records(pairs([second])).faults[0])
    renumbered = canonical.dumps({**second.body, "seq": 1}).decode()
    assert "beginning was cut off" in str(verify_records([rehashed(renumbered)]).faults[0])
    assert verify_records(pairs([first])).ok


def test_nothing_may_follow_the_closing() -> None:
    first = seal(Head(CHAIN), 1.0, CLOSED, None, {})
    second = seal(first.head, 2.0, "started", None, {})
    assert "after the chain was closed" in str(verify_records(pairs([first, second])).faults[0])


@given(st.text(max_size=60) | bodies.map(lambda body: canonical.dumps(body).decode()))
def test_text_that_is_no_record_is_a_fault_and_no_crash(text: str) -> None:
    assert not verify_records([rehashed(text)], chain=CHAIN).ok


def test_a_hostile_log_gives_a_bounded_report() -> None:
    report = verify_records([("{}", "")] * (MAX_FAULTS * 3), chain=CHAIN)
    assert len(report.faults) == MAX_FAULTS + 1
    assert "rest are not listed" in str(report.faults[-1])


def test_reports_read_as_sentences() -> None:
    assert str(Verification(records=1, heads=(Head(CHAIN),))) == "1 record in 1 chain: verified."
    assert str(Fault("is gone", CHAIN, 3)) == f"chain {CHAIN}, record 3: is gone"
    assert str(Fault("the file is cut off")) == "the file is cut off"
    assert not Verification((Fault("x"),)).ok


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a" * 65, ".x", "a\n", None, 3])
def test_no_such_name_is_ever_a_chains(name: object) -> None:
    assert not is_chain_name(name)
    assert is_chain_name(CHAIN)


# ── Checkpoints ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("period", [None, Period(), Period(1.0, 2.5)])
def test_a_signed_checkpoint_reads_back(period: Period | None) -> None:
    checkpoint = Checkpoint(CHAIN, 9, "f" * 64, 9, 1234.5, period)
    assert Checkpoint.verify(KEY.public_key(), checkpoint.sign(KEY)) == checkpoint


@given(
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 2**40),
    st.integers(0, 2**63),
    st.binary(max_size=64),
)
def test_a_checkpoint_is_signed_in_canonical_form(at: float, seq: int, data: bytes) -> None:
    checkpoint = Checkpoint(CHAIN, seq, hashlib.sha256(data).hexdigest(), seq, at)
    assert checkpoint.sign(KEY) == sign_statement(KEY, checkpoint.statement())


@given(st.data())
def test_any_change_of_a_signed_checkpoint_is_found(data: st.DataObject) -> None:
    line = Checkpoint(CHAIN, 9, "f" * 64, 9, 1234.5).sign(KEY)
    at = data.draw(st.integers(0, len(line) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != line[at]))
    assert Checkpoint.verify(KEY.public_key(), line[:at] + bytes([byte]) + line[at + 1 :]) is None


def test_a_checkpoint_of_another_key_is_not_ours() -> None:
    line = Checkpoint(CHAIN, 9, "f" * 64, 9, 1234.5).sign(Ed25519PrivateKey.generate())
    assert Checkpoint.verify(KEY.public_key(), line) is None


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b'{"signature":1,"statement":{}}', b'{"signature":"zz","statement":{}}']
)
def test_what_is_no_checkpoint_is_none(line: bytes) -> None:
    assert Checkpoint.verify(KEY.public_key(), line) is None


def test_a_checkpoint_leaves_room_for_another_signer_and_a_witness_and_is_read_in_its_first_version() -> None:
    checkpoint = Checkpoint(CHAIN, 9, "f" * 64, 9, 1234.5)
    first = {name: value for name, value in checkpoint.statement().items() if name != "v"}
    later = {**checkpoint.statement(), "v": 3, "signer": {"process": "another"}}
    assert checkpoint.statement()["v"] == 2
    for statement in (first, later):
        line = sign_statement(KEY, statement)
        assert Checkpoint.verify(KEY.public_key(), line) == checkpoint
        witnessed = canonical.dumps({**canonical.loads(line), "witness": ["00"]})
        assert Checkpoint.verify(KEY.public_key(), witnessed) == checkpoint


# ── A torn write never loses the last good checkpoint ──


LONG_CHAIN = "c" * 64


def slot(seq: int, chain: str = LONG_CHAIN) -> bytes:
    return pack_slot(Checkpoint(chain, seq, "f" * 64, seq, 1893456000.123456).sign(KEY))


def test_the_largest_checkpoint_fits() -> None:
    assert len(slot(2**63 - 1)) == SLOT_BYTES
    with pytest.raises(ValueError, match="fit"):
        pack_slot(b"x" * SLOT_BYTES)


def test_the_newest_of_two_counts() -> None:
    found = read_slots(slot(5) + slot(4), LONG_CHAIN, KEY.public_key())
    assert (found.newest and found.newest.seq, found.index, found.unreadable) == (5, 0, 0)
    found = read_slots(slot(5) + slot(6), LONG_CHAIN, KEY.public_key())
    assert (found.newest and found.newest.seq, found.index) == (6, 1)


@given(st.integers(1, SLOT_BYTES - 1))
def test_a_torn_slot_leaves_the_other(cut: int) -> None:
    old, new = slot(4), slot(6)
    torn = new[:cut] + old[cut:]
    found = read_slots(torn + slot(5), LONG_CHAIN, KEY.public_key())
    assert found.newest is not None
    assert found.newest.seq in (5, 6)
    assert found.newest.seq == 6 or found.unreadable in (0, 1)


def test_empty_and_foreign_slots() -> None:
    assert read_slots(b"", LONG_CHAIN, KEY.public_key()).newest is None
    assert read_slots(EMPTY_SLOT * 2, LONG_CHAIN, KEY.public_key()).unreadable == 0
    foreign = read_slots(slot(9, "another") + EMPTY_SLOT, LONG_CHAIN, KEY.public_key())
    assert (foreign.newest, foreign.unreadable) == (None, 1)
    closing = pack_slot(Checkpoint(LONG_CHAIN, 9, "f" * 64, 9, 1.0, Period()).sign(KEY))
    assert read_slots(closing, LONG_CHAIN, KEY.public_key()).newest is None
