"""An export verifies offline with a key from outside, and any change of it is found; so is a cut live log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.audit import export
from ringfence.audit.approvals import Proof
from ringfence.audit.chain import (
    CLOSED,
    EMPTY_SLOT,
    SLOT_BYTES,
    SLOTS,
    Checkpoint,
    ContextRecord,
    Head,
    Period,
    Record,
    Verification,
    pack_slot,
    seal,
)
from ringfence.audit.export import verify_export, verify_live, write_export
from ringfence.audit.keys import Keys, load_or_create
from ringfence.core import canonical
from ringfence.core.errors import StoreError, TamperError

OLD, NEW = "20260101T000000Z-aaaaaaaaaa", "20260102T000000Z-bbbbbbbbbb"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return load_or_create(tmp_path_factory.mktemp("keys") / "k")


def build(chain: str, count: int, *, previous: Record | None = None, closed: bool = True) -> list[Record]:
    named = None if previous is None else {"chain": previous.chain, "seq": previous.seq, "hash": previous.hash}
    out = [seal(Head(chain), 100.0, "chain_opened", None, {"previous": named})]
    for number in range(count):
        out.append(seal(out[-1].head, 101.0 + number, "noted", f"call_{number}", {"tool": "é"}))
    if closed:
        out.append(seal(out[-1].head, 200.0, CLOSED, None, {}))
    return out


def two_chains() -> list[Record]:
    old = build(OLD, 3)
    return old + build(NEW, 2, previous=old[-1])


@pytest.fixture
def lines(tmp_path: Path, keys: Keys) -> list[bytes]:
    path = tmp_path / "export.jsonl"
    write_export(path, two_chains(), keys)
    return path.read_bytes().splitlines(keepends=True)


def check(path: Path, lines: list[bytes], keys: Keys) -> Verification:
    path.write_bytes(b"".join(lines))
    return verify_export(path, keys.public)


def test_an_export_verifies(tmp_path: Path, keys: Keys, lines: list[bytes]) -> None:
    report = check(tmp_path / "e", lines, keys)
    assert report.ok, str(report)
    assert (report.records, len(report.heads)) == (9, 2)
    assert str(report) == "9 records in 2 chains: verified."
    assert len(lines) == 1 + 9 + 2 + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "export.jsonl"]
    assert (tmp_path / "export.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_export_of_nothing_verifies(tmp_path: Path, keys: Keys) -> None:
    write_export(tmp_path / "e", [], keys)
    assert str(verify_export(tmp_path / "e", keys.public)) == "0 records in 0 chains: verified."


@pytest.mark.parametrize(
    ("period", "said"),
    [
        (Period(101.0, 104.0), "from 1970-01-01 00:01:41 UTC up to 1970-01-01 00:01:44 UTC"),
        (Period(101.0), "from 1970-01-01 00:01:41 UTC."),
        (Period(None, 0.0), "the records up to 1970-01-01 00:00:00 UTC"),
    ],
)
def test_an_export_of_a_period_is_said_to_be_a_part(tmp_path: Path, keys: Keys, period: Period, said: str) -> None:
    write_export(tmp_path / "e", [], keys, period)
    report = verify_export(tmp_path / "e", keys.public)
    assert report.ok
    assert "a part of the log" in report.notes[0] and said in report.notes[0]


def test_a_period_may_begin_within_a_chain(tmp_path: Path, keys: Keys) -> None:
    report = write_export(tmp_path / "e", two_chains()[1:4], keys, Period(101.0, 104.0))
    assert report.records == 3
    assert verify_export(tmp_path / "e", keys.public).ok


Change = Callable[[list[bytes]], list[bytes]]

CHANGES: dict[str, tuple[Change, str]] = {
    "edit": (lambda ls: [line.replace(b"call_1", b"call_9", 1) for line in ls], "was edited"),
    "deletion": (lambda ls: ls[:3] + ls[4:], "missing before it"),
    "reordering": (lambda ls: [*ls[:3], ls[4], ls[3], *ls[5:]], "out of order"),
    "reordering over chains": (lambda ls: ls[:1] + ls[6:10] + ls[1:6] + ls[10:], "not the ones that it was signed for"),
    "a chain gone": (lambda ls: ls[:1] + ls[6:], "all of its 5 records are missing"),
    "a chain gone with its closing": (lambda ls: ls[:1] + ls[6:10] + ls[11:], f"opened after chain {OLD}"),
    "tail of a chain cut": (lambda ls: ls[:9] + ls[10:], "its closing was signed at record 4"),
    "closing gone": (lambda ls: ls[:10] + ls[11:], "its closing is missing"),
    "closing line gone": (lambda ls: ls[:-1], "without a closing line"),
    "tail cut": (lambda ls: ls[:4], "without a closing line"),
    "last line cut": (lambda ls: [*ls[:-1], ls[-1][:-30]], "is cut off"),
    "newline cut": (lambda ls: [*ls[:-1], ls[-1][:-1]], "is cut off"),
    "appended": (lambda ls: [*ls, ls[1]], "added after the closing line"),
    "header gone": (lambda ls: ls[1:], "not the header"),
    "header swapped": (lambda ls: [ls[0].replace(b'"to":null', b'"to":5'), *ls[1:]], "header is not the one"),
    "spaces": (lambda ls: [*ls[:-1], ls[-1].replace(b'"v":1', b'"v": 1')], "not in the form"),
    "a foreign line": (lambda ls: [ls[0], b"[1]\n", *ls[1:]], "neither a record nor a closing"),
    "broken text": (lambda ls: [ls[0], b"\xff\xfe\n", *ls[1:]], "cannot be read"),
    "no record": (lambda ls: [ls[0], b'{"hash":"","text":"{}"}\n', *ls[1:]], "no record"),
    "record of wrong type": (lambda ls: [ls[0], b'{"hash":"","text":5}\n', *ls[1:]], "is not a record"),
    "empty": (lambda ls: [], "without a closing line"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_found_and_named(name: str, tmp_path: Path, keys: Keys, lines: list[bytes]) -> None:
    change, said = CHANGES[name]
    report = check(tmp_path / "e", change(lines), keys)
    assert not report.ok
    assert said in str(report)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_is_found(data: st.DataObject, tmp_path: Path, keys: Keys, lines: list[bytes]) -> None:
    whole = b"".join(lines)
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != whole[at]))
    assert not check(tmp_path / "e", [whole[:at], bytes([byte]), whole[at + 1 :]], keys).ok


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_deletion_or_swap_is_found(data: st.DataObject, tmp_path: Path, keys: Keys, lines: list[bytes]) -> None:
    kind = data.draw(st.sampled_from(["cut", "delete", "swap", "repeat"]))
    one, other = sorted(data.draw(st.lists(st.integers(0, len(lines) - 1), min_size=2, max_size=2, unique=True)))
    changed = list(lines)
    if kind == "cut":
        whole = b"".join(lines)
        changed = [whole[: data.draw(st.integers(0, len(whole) - 1))]]
    elif kind == "delete":
        del changed[one:other]
    elif kind == "swap":
        changed[one], changed[other] = changed[other], changed[one]
    else:
        changed.insert(one, lines[other])
    assert not check(tmp_path / "e", changed, keys).ok


def test_the_key_comes_from_outside(tmp_path: Path, keys: Keys, lines: list[bytes]) -> None:
    other = load_or_create(tmp_path / "other")
    report = check(tmp_path / "e", lines, other)
    assert f"signed with key {keys.id}, not with the given key {other.id}" in str(report)
    write_export(tmp_path / "forged", two_chains()[:3], other)
    assert not verify_export(tmp_path / "forged", keys.public).ok


def test_an_endless_line_is_not_read_to_its_end(
    tmp_path: Path, keys: Keys, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_LINE", 2000)
    report = check(tmp_path / "e", [lines[0], b'"' + b"x" * 5000], keys)
    assert "longer than 2000 bytes" in str(report)


def test_deep_nesting_is_a_fault(tmp_path: Path, keys: Keys, lines: list[bytes]) -> None:
    assert "cannot be read" in str(check(tmp_path / "e", [lines[0], b"[" * 100_000 + b"\n"], keys))


def test_a_missing_or_unwritable_file_is_a_store_error(tmp_path: Path, keys: Keys) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        verify_export(tmp_path / "absent", keys.public)
    with pytest.raises(StoreError, match="cannot be written"):
        write_export(tmp_path / "absent" / "e", [], keys)


def test_what_does_not_verify_is_never_signed(tmp_path: Path, keys: Keys) -> None:
    records = two_chains()
    with pytest.raises(TamperError, match="nothing was exported"):
        write_export(tmp_path / "e", [records[0], *records[2:]], keys)
    cut = {NEW: checkpoint_file(keys, two_chains()[-1])}
    with pytest.raises(TamperError, match="its checkpoint stands at 4"):
        write_export(tmp_path / "e", records[:-1], keys, checkpoints=cut)
    with pytest.raises(TamperError, match="its checkpoint stands at 4"):
        write_export(tmp_path / "e", records[:5], keys, checkpoints=cut)
    assert list(tmp_path.iterdir()) == []
    both = {OLD: checkpoint_file(keys, records[4]), **cut}
    with pytest.raises(TamperError, match="its checkpoint stands at 4"):
        write_export(tmp_path / "e", records[:-1], keys, Period(None, 200.0), both)
    with pytest.raises(TamperError, match=f"chain {OLD} has no checkpoint"):
        write_export(tmp_path / "e", records, keys, checkpoints=cut)
    with_rest: list[Record | Proof | ContextRecord] = [*records[:-1], ContextRecord(records[-1])]
    assert write_export(tmp_path / "e", with_rest, keys, Period(None, 200.0), both).records == 8
    assert verify_export(tmp_path / "e", keys.public).ok


def test_lines_are_json_for_any_reader(lines: list[bytes]) -> None:
    parsed = [json.loads(line) for line in lines]
    assert parsed[0]["format"] == export.FORMAT
    last = parsed[-1]["statement"]
    assert (last["records"], [entry["count"] for entry in last["chains"]]) == (9, [5, 4])


# ── The live log ──────────────────────────────────────────────────────────────────────────────────


def checkpoint_file(keys: Keys, record: Record) -> bytes:
    checkpoint = Checkpoint(record.chain, record.seq, record.hash, record.seq, 1.0)
    return pack_slot(checkpoint.sign(keys.private)) + EMPTY_SLOT


def live(keys: Keys) -> tuple[dict[str, list[Record]], dict[str, bytes]]:
    records = two_chains()
    chains = {OLD: records[:5], NEW: records[5:]}
    return chains, {name: checkpoint_file(keys, chain[-1]) for name, chain in chains.items()}


def test_a_live_log_verifies(keys: Keys) -> None:
    records, held = live(keys)
    report = verify_live(records, held, keys.public)
    assert report.ok, str(report)
    assert (report.records, [head.chain for head in report.heads], report.notes) == (9, [OLD, NEW], ())


def test_a_tail_cut_from_the_database_alone_is_found(keys: Keys) -> None:
    records, held = live(keys)
    records[NEW] = records[NEW][:-2]
    report = verify_live(records, held, keys.public)
    assert f"chain {NEW}: ends at record 2, its checkpoint stands at record 4: 2 cut from the end" in str(report)


def test_a_missing_chain_is_found(keys: Keys) -> None:
    records, held = live(keys)
    del records[NEW]
    assert f"chain {NEW}: is missing" in str(verify_live(records, held, keys.public))


def test_a_chain_gone_with_its_checkpoint_is_missed_by_the_next(keys: Keys) -> None:
    records, held = live(keys)
    del records[OLD], held[OLD]
    assert f"opened after record 5 of chain {OLD}" in str(verify_live(records, held, keys.public))


def test_a_chain_written_anew_is_not_the_one_that_the_next_names(keys: Keys) -> None:
    records, held = live(keys)
    records[OLD] = build(OLD, 1)
    held[OLD] = checkpoint_file(keys, records[OLD][-1])
    assert f"is not the record 5 that chain {NEW} was opened after" in str(verify_live(records, held, keys.public))


@pytest.mark.parametrize("kept", [2, 4, 5])
def test_the_next_chain_need_not_sort_after_the_one_that_it_names(keys: Keys, kept: int) -> None:
    """Two starts in one second have names in any order."""
    first, second = "20260101T000000Z-bbbbbbbbbb", "20260101T000000Z-aaaaaaaaaa"
    whole = build(first, 3)
    records = {first: whole[:kept], second: build(second, 1, previous=whole[-1])}
    held = {name: checkpoint_file(keys, chain[-1]) for name, chain in records.items()}
    report = verify_live(records, held, keys.public)
    assert report.ok == (kept == 5), str(report)
    if kept < 5:
        assert f"chain {first}, record 5: is not the record 5 that chain {second} was opened after" in str(report)
    records[first] = build(first, 3, closed=False)
    records[first].append(seal(records[first][-1].head, 200.0, CLOSED, None, {"forged": True}))
    held[first] = checkpoint_file(keys, records[first][-1])
    assert f"is not the record 5 that chain {second}" in str(verify_live(records, held, keys.public))


def test_a_missing_or_foreign_checkpoint_is_found(keys: Keys, tmp_path: Path) -> None:
    records, held = live(keys)
    assert "its checkpoint file is missing" in str(verify_live(records, {OLD: held[OLD]}, keys.public))
    held[NEW] = b"nonsense"
    assert "no checkpoint in its file verifies" in str(verify_live(records, held, keys.public))
    other = load_or_create(tmp_path / "k")
    held[NEW] = checkpoint_file(other, records[NEW][-1])
    assert "no checkpoint in its file verifies" in str(verify_live(records, held, keys.public))


def test_a_rewritten_tail_is_not_what_was_signed(keys: Keys) -> None:
    records, held = live(keys)
    forged = seal(records[NEW][-2].head, 200.0, CLOSED, None, {"forged": True})
    records[NEW][-1] = forged
    assert "is not the record that the checkpoint was signed for" in str(verify_live(records, held, keys.public))


def test_records_past_the_checkpoint_are_noted(keys: Keys) -> None:
    records, held = live(keys)
    held[NEW] = checkpoint_file(keys, records[NEW][1])
    report = verify_live(records, held, keys.public)
    assert report.ok
    assert "records 3 to 4 have no checkpoint yet" in str(report)


def test_a_torn_slot_is_noted(keys: Keys) -> None:
    records, held = live(keys)
    held[NEW] = held[NEW][:SLOT_BYTES] + b"torn".ljust(SLOT_BYTES)
    report = verify_live(records, held, keys.public)
    assert report.ok
    assert "one of two checkpoint slots is unreadable" in str(report)


@pytest.mark.parametrize("column", ["chain", "seq", "at", "kind", "call_id"])
def test_a_record_filed_elsewhere_is_found(keys: Keys, column: str) -> None:
    records, held = live(keys)
    right = records[NEW][1]
    values = asdict(right)
    records[NEW][1] = Record(**{**values, column: 77 if column in ("seq", "at") else "other"})
    assert f"filed under another {column}" in str(verify_live(records, held, keys.public))


@pytest.mark.parametrize("blank", [b"", EMPTY_SLOT, EMPTY_SLOT * SLOTS])
def test_a_blank_checkpoint_file_is_a_fault_only_where_there_is_a_chain(keys: Keys, blank: bytes) -> None:
    """A start that is killed may leave one, before it has signed or recorded anything."""
    records, held = live(keys)
    held["20260103T000000Z-cccccccccc"] = blank
    assert verify_live(records, held, keys.public).ok
    held[NEW] = blank
    assert f"chain {NEW}: no checkpoint in its file verifies" in str(verify_live(records, held, keys.public))
    del records[OLD]
    held = {NEW: held[NEW], OLD: blank}
    assert f"opened after record 5 of chain {OLD}, which is missing" in str(verify_live(records, held, keys.public))


def test_a_chain_that_never_began_is_no_fault(keys: Keys) -> None:
    records, held = live(keys)
    held["20260103T000000Z-cccccccccc"] = pack_slot(
        Checkpoint("20260103T000000Z-cccccccccc", 0, "0" * 64, 0, 1.0).sign(keys.private)
    )
    assert verify_live(records, held, keys.public).ok


# ── Stopped ───────────────────────────────────────────────────────────────────────────────────────

ENDLESS = """
import itertools, sys, time
from pathlib import Path
from ringfence.audit.chain import Head, seal
from ringfence.audit.export import write_export
from ringfence.audit.keys import load_or_create

def records():
    head = Head("c")
    for number in itertools.count():
        record = seal(head, 1.0, "k", None, {"text": "x" * 10_000})
        head = record.head
        yield record
        if number == 100:
            print("under way", flush=True)
            time.sleep(600)

write_export(Path(sys.argv[1]), records(), load_or_create(Path(sys.argv[2])))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_stopped_leaves_nothing_behind(how: signal.Signals, tmp_path: Path, keys: Keys) -> None:
    if not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no files without a name")
    folder = tmp_path / "exports"
    folder.mkdir()
    command = [sys.executable, "-c", ENDLESS, str(folder / "e.jsonl"), str(keys.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        process.send_signal(how)
        process.wait()
    assert list(folder.iterdir()) == []


def test_what_a_stopped_export_left_where_files_need_names_is_removed_by_the_next(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    (tmp_path / ".e.jsonl.export-0123456789ab").touch()
    write_export(tmp_path / "e.jsonl", two_chains(), keys)
    assert [path.name for path in tmp_path.iterdir()] == ["e.jsonl"]
    assert verify_export(tmp_path / "e.jsonl", keys.public).ok


def test_an_export_never_replaces_a_file(tmp_path: Path, keys: Keys) -> None:
    (tmp_path / "e.jsonl").write_text("mine")
    with pytest.raises(StoreError, match="cannot be written"):
        write_export(tmp_path / "e.jsonl", two_chains(), keys)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


# ── What records share ────────────────────────────────────────────────────────────────────────────


def sharing(parts: dict[str, str]) -> list[Record]:
    part = canonical.Shared({"call": {"tool": "t", "id": "never"}, "contract": {"name": "c"}})
    parts[part.digest] = part.text
    out = [seal(Head(OLD), 100.0, "chain_opened", None, {"previous": None})]
    for number in range(3):
        body = {"call": {"id": f"call_{number}"}, "shared": [part]}
        out.append(seal(out[-1].head, 101.0, "started", f"call_{number}", body))
    return [replace(record, find=parts.get) for record in out]


def test_what_records_share_is_filled_in_and_what_they_say_themselves_comes_first() -> None:
    parts: dict[str, str] = {}
    body = sharing(parts)[2].body
    assert (body["call"], body["contract"]) == ({"id": "call_1", "tool": "t"}, {"name": "c"})
    assert "shared" not in body


def test_an_export_says_once_what_records_share(tmp_path: Path, keys: Keys) -> None:
    write_export(tmp_path / "e", sharing({}), keys)
    assert verify_export(tmp_path / "e", keys.public).ok
    lines = (tmp_path / "e").read_bytes().splitlines(keepends=True)
    (said,) = [number for number, line in enumerate(lines) if line.startswith(b'{"shared":')]
    for spoilt in (
        lines[:said] + lines[said + 1 :],
        [*lines[:said], lines[said].replace(b"never", b"never!"), *lines[said + 1 :]],
        [*lines[:said], lines[said + 1], lines[said], *lines[said + 2 :]],
    ):
        (tmp_path / "e").write_bytes(b"".join(spoilt))
        assert "names a part that is missing before it" in str(verify_export(tmp_path / "e", keys.public))


def test_an_export_says_again_what_its_reader_does_not_keep(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [canonical.Shared({"decision": {"reason": letter * 60}}) for letter in "abc"]
    find = {part.digest: part.text for part in parts}.get
    out = [seal(Head(OLD), 100.0, "chain_opened", None, {"previous": None})]
    for named in ("ab", "bc", "ca", "c", "ba"):
        out.append(seal(out[-1].head, 101.0, "noted", "c", {"shared": [parts["abc".index(one)] for one in named]}))
    monkeypatch.setattr(export, "MAX_RECENT_PARTS", 2 * len(parts[0].text))
    write_export(tmp_path / "e", [replace(record, find=find) for record in out], keys)
    assert verify_export(tmp_path / "e", keys.public).ok
    said = [line for line in (tmp_path / "e").read_bytes().splitlines() if line.startswith(b'{"shared":')]
    assert len(said) == 5
    monkeypatch.setattr(export, "MAX_RECENT_PARTS", len(parts[0].text))
    assert "names a part that is missing before it" in str(verify_export(tmp_path / "e", keys.public))


def test_a_shared_part_that_is_missing_or_edited_is_found(tmp_path: Path, keys: Keys) -> None:
    parts: dict[str, str] = {}
    records = sharing(parts)
    held = {OLD: checkpoint_file(keys, records[-1])}
    assert verify_live({OLD: records}, held, keys.public).ok
    (digest,) = parts
    for text, said in ((None, "names a part that is missing"), ("{}", "names a part that was edited")):
        parts.clear()
        if text is not None:
            parts[digest] = text
        assert said in str(verify_live({OLD: records}, held, keys.public))
        assert records[1].body["call"] == {"id": "call_0"}
        with pytest.raises(TamperError, match=said):
            write_export(tmp_path / "e", records, keys)
