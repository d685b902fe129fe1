"""A log that real calls left behind, changed by somebody who has the files but not the key: it is always noticed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from ringfence.audit.chain import EMPTY_SLOT, Checkpoint, pack_slot, sign_statement
from ringfence.audit.keys import PUBLIC, load_or_create
from ringfence.core import canonical
from tests.durability.stage import Json, Stage, Zygote, client

Lines = list[bytes]


@dataclass(frozen=True, slots=True)
class Log:
    """An installation with three chains, the second of which holds calls, and an export of it."""

    stage: Stage
    config: Path
    chains: list[str]
    export: Path
    seq: int
    """In the middle of the second chain: a call's *started*, with its *finished* after it."""

    def verify(self, *more: str | Path) -> str:
        """What the command line says of it; it must find something."""
        code, said = self.stage.run("audit", "verify", *more, "--config", self.config)
        assert code == 1, said
        assert "Traceback" not in said
        return said

    def sql(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.stage.state / "ringfence.db")) as database:
            for statement in statements:
                assert database.execute(statement).rowcount != 0, statement
            database.commit()

    def last(self, chain: str) -> int:
        return max(record.seq for record in self.stage.records(chain=chain))

    def checkpoint(self, chain: str) -> Path:
        return self.stage.state / "checkpoints" / chain


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Log:
    stage = Stage(tmp_path_factory.mktemp("original"), zygote)
    config = stage.configure(gateway={"state": "./state"})

    async def calls() -> None:
        with stage.serving(config) as gateway:
            async with client(gateway) as caller:
                for number in range(3):
                    await caller.call("append", stage.line(f"line {number}"))
                await caller.call("no_such_tool", {})

    for work in (None, calls, None):
        if work is None:
            with stage.opened():
                pass
        else:
            anyio.run(work)
    export = stage.folder / "export.jsonl"
    code, said = stage.run("audit", "export", export, "--config", config)
    assert code == 0, said
    chains = list(dict.fromkeys(record.chain for record in stage.records()))
    assert len(chains) == 3
    for more in ((), (export, "--public-key", stage.folder / "keys" / PUBLIC)):
        code, said = stage.run("audit", "verify", *more, "--config", config)
        assert (code, "verified" in said) == (0, True), said
    started = [r.seq for r in stage.records(chain=chains[1], kind="started") if r.body["call"]["tool"] == "append"]
    return Log(stage, config, chains, export, started[1])


@pytest.fixture
def log(original: Log, tmp_path: Path) -> Log:
    """A copy that a test may spoil."""
    folder = tmp_path / "copy"
    shutil.copytree(original.stage.folder, folder, ignore=shutil.ignore_patterns("*.log*"))
    stage = Stage(folder, original.stage.zygote)
    export = folder / original.export.name
    return Log(stage, folder / original.config.name, original.chains, export, original.seq)


def forged(text: str, **changes: object) -> tuple[str, str]:
    """A record as somebody without the key would make it: changed, and with the hash that it should have."""
    changed = canonical.dumps({**canonical.loads(text), **changes}).decode()
    return changed, hashlib.sha256(changed.encode()).hexdigest()


# ── the live log ──


def test_an_edited_record(log: Log) -> None:
    chain = log.chains[1]
    place = f"WHERE chain = '{chain}' AND seq = {log.seq}"
    log.sql(f"UPDATE records SET text = replace(text, 'true', 'false') {place}")
    assert f"chain {chain}, record {log.seq}: was edited" in log.verify()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("UPDATE shared SET text = replace(text, 'append', 'delete') WHERE text LIKE '%\"append\"%'", "was edited"),
        ("DELETE FROM shared WHERE text LIKE '%\"append\"%'", "is missing"),
    ],
)
def test_what_records_share_is_edited_or_removed(log: Log, spoil: str, said: str) -> None:
    log.sql(spoil)
    assert f"names a part that {said}" in log.verify()


def test_a_record_edited_together_with_its_hash(log: Log) -> None:
    chain = log.chains[1]
    record = next(r for r in log.stage.records(chain=chain) if r.kind == "finished")
    text, digest = forged(record.text, status="denied")
    place = f"WHERE chain = '{chain}' AND seq = {record.seq}"
    log.sql(f"UPDATE records SET text = '{text}', hash = '{digest}' {place}")
    assert f"chain {chain}, record {record.seq + 1}: does not follow the record before it" in log.verify()


def test_the_last_record_edited_together_with_its_hash(log: Log) -> None:
    chain = log.chains[2]
    record = log.stage.records(chain=chain)[-1]
    text, digest = forged(record.text, calls=7)
    log.sql(f"UPDATE records SET text = '{text}', hash = '{digest}' WHERE chain = '{chain}' AND seq = {record.seq}")
    assert f"chain {chain}, record {record.seq}: is not the record that the checkpoint was signed for" in log.verify()


def test_a_whole_chain_written_anew(log: Log) -> None:
    """Every hash fits every other, as whoever has the files can make them; only the key is missing."""
    chain = log.chains[1]
    records, before = log.stage.records(chain=chain), "0" * 64
    statements = []
    for record in records:
        text, before = forged(
            record.text, prev=before, **({"message": "all well"} if record.seq == log.seq + 1 else {})
        )
        quoted = text.replace("'", "''")
        place = f"WHERE chain = '{chain}' AND seq = {record.seq}"
        statements.append(f"UPDATE records SET text = '{quoted}', hash = '{before}' {place}")
    log.sql(*statements)
    said = log.verify()
    assert f"chain {chain}, record {len(records)}: is not the record that the checkpoint was signed for" in said
    assert f"is not the record {len(records)} that chain {log.chains[2]} was opened after" in said


def test_a_deleted_record(log: Log) -> None:
    chain = log.chains[1]
    log.sql(f"DELETE FROM records WHERE chain = '{chain}' AND seq IN ({log.seq}, {log.seq + 1})")
    missing = f"records {log.seq} to {log.seq + 1} are missing before it"
    assert f"chain {chain}, record {log.seq + 2}: {missing}" in log.verify()


def test_two_records_in_each_others_place(log: Log) -> None:
    chain, one, two = log.chains[1], log.seq, log.seq + 1
    log.sql(
        f"UPDATE records SET seq = -1 WHERE chain = '{chain}' AND seq = {one}",
        f"UPDATE records SET seq = {one} WHERE chain = '{chain}' AND seq = {two}",
        f"UPDATE records SET seq = {two} WHERE chain = '{chain}' AND seq = -1",
    )
    said = log.verify()
    assert f"chain {chain}, record {two}: record {one} is missing before it" in said
    assert f"chain {chain}, record {one}: stands out of order" in said


@pytest.mark.parametrize("number", [1, 2])
def test_a_tail_cut_from_the_database_alone(log: Log, number: int) -> None:
    chain = log.chains[number]
    last = log.last(chain)
    log.sql(f"DELETE FROM records WHERE chain = '{chain}' AND seq > {last - 1}")
    said = log.verify()
    assert (
        f"chain {chain}: ends at record {last - 1}, its checkpoint stands at record {last}: 1 cut from the end" in said
    )


def test_a_tail_cut_together_with_its_checkpoint_is_missed_by_the_next_chain(log: Log) -> None:
    """An older checkpoint is a true signature, so the chain alone would pass; the one after it knows better."""
    chain, keys = log.chains[1], log.stage.keys
    record = log.stage.records(chain=chain)[-2]
    log.sql(f"DELETE FROM records WHERE chain = '{chain}' AND seq > {record.seq}")
    old = Checkpoint(chain, record.seq, record.hash, record.seq, record.at).sign(keys.private)
    log.checkpoint(chain).write_bytes(pack_slot(old) + EMPTY_SLOT)
    missing = f"is not the record {record.seq + 1} that chain {log.chains[2]} was opened after"
    assert f"chain {chain}, record {record.seq + 1}: {missing}" in log.verify()


def test_a_chain_that_is_gone(log: Log) -> None:
    chain = log.chains[1]
    last = log.last(chain)
    log.sql(f"DELETE FROM records WHERE chain = '{chain}'")
    assert f"chain {chain}: is missing; its checkpoint stands at record {last}" in log.verify()
    log.checkpoint(chain).unlink()
    assert f"chain {log.chains[2]}: was opened after record {last} of chain {chain}, which is missing" in log.verify()


def test_two_chains_under_each_others_names(log: Log) -> None:
    one, two = log.chains[0], log.chains[2]
    log.sql(
        f"UPDATE records SET chain = 'aside' WHERE chain = '{one}'",
        f"UPDATE records SET chain = '{one}' WHERE chain = '{two}'",
        f"UPDATE records SET chain = '{two}' WHERE chain = 'aside'",
    )
    said = log.verify()
    assert f"chain {one}, record 1: belongs to chain {two}, not to this one" in said
    assert f"chain {two}, record 1: belongs to chain {one}, not to this one" in said


def test_a_record_filed_where_nobody_would_find_it(log: Log) -> None:
    chain = log.chains[1]
    log.sql(f"UPDATE records SET call_id = 'call_other' WHERE chain = '{chain}' AND seq = {log.seq}")
    assert f"chain {chain}, record {log.seq}: is filed under another call_id than its text has" in log.verify()


def test_a_record_added_at_the_end(log: Log) -> None:
    chain = log.chains[2]
    record = log.stage.records(chain=chain)[-1]
    text, digest = forged(record.text, seq=record.seq + 1, prev=record.hash, kind="finished")
    values = f"'{chain}', {record.seq + 1}, {record.at}, 'finished', NULL, '{text}', '{digest}'"
    log.sql(f"INSERT INTO records (chain, seq, at, kind, call_id, text, hash) VALUES ({values})")
    assert f"chain {chain}, record {record.seq + 1}: was added after the chain was closed" in log.verify()


def test_a_checkpoint_signed_with_another_key(log: Log, tmp_path: Path) -> None:
    chain = log.chains[2]
    record = log.stage.records(chain=chain)[-1]
    theirs = load_or_create(tmp_path / "theirs")
    line = Checkpoint(chain, record.seq, record.hash, record.seq, record.at).sign(theirs.private)
    log.checkpoint(chain).write_bytes(pack_slot(line) * 2)
    assert f"chain {chain}: no checkpoint in its file verifies with the given key" in log.verify()


def test_a_checkpoint_of_another_chain(log: Log) -> None:
    one, two = log.chains[0], log.chains[2]
    shutil.copy(log.checkpoint(one), log.checkpoint(two))
    assert f"chain {two}: no checkpoint in its file verifies with the given key" in log.verify()


def test_the_wrong_public_key(log: Log, tmp_path: Path) -> None:
    theirs = load_or_create(tmp_path / "theirs").folder / PUBLIC
    said = log.verify("--public-key", theirs)
    for chain in log.chains:
        assert f"chain {chain}: no checkpoint in its file verifies with the given key" in said
    assert f"signed with key {log.stage.keys.id}, not with the given key" in log.verify(
        log.export, "--public-key", theirs
    )


@pytest.mark.parametrize(
    "spoil", ["DELETE FROM records WHERE seq = 2", "UPDATE records SET text = replace(text, 'a', 'b')"]
)
def test_nothing_that_was_tampered_with_is_exported(log: Log, spoil: str) -> None:
    log.sql(spoil)
    code, said = log.stage.run("audit", "export", log.stage.folder / "after.jsonl", "--config", log.config)
    assert (code, "nothing was exported" in said) == (1, True), said
    assert not (log.stage.folder / "after.jsonl").exists()


# ── an export ──


def place(line: bytes) -> tuple[str, int] | None:
    value = json.loads(line)
    return None if "text" not in value else (json.loads(value["text"])["chain"], json.loads(value["text"])["seq"])


def find(lines: Lines, chain: str, seq: int) -> int:
    return next(index for index, line in enumerate(lines) if place(line) == (chain, seq))


def edit(lines: Lines, log: Log) -> Lines:
    index = find(lines, log.chains[1], log.seq)
    return [*lines[:index], lines[index].replace(b"true", b"false"), *lines[index + 1 :]]


def edit_with_hash(lines: Lines, log: Log) -> Lines:
    index = find(lines, log.chains[1], log.seq)
    text, digest = forged(json.loads(lines[index])["text"], status="denied")
    return [*lines[:index], canonical.dumps({"hash": digest, "text": text}) + b"\n", *lines[index + 1 :]]


def delete(lines: Lines, log: Log) -> Lines:
    index = find(lines, log.chains[1], log.seq)
    return lines[:index] + lines[index + 1 :]


def reorder(lines: Lines, log: Log) -> Lines:
    index = find(lines, log.chains[1], log.seq)
    return [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]]


def cut_tail_of_chain(lines: Lines, log: Log) -> Lines:
    index = find(lines, log.chains[2], 2)
    return lines[:index] + lines[index + 1 :]


def drop_chain(lines: Lines, log: Log) -> Lines:
    return [line for line in lines if (place(line) or ("",))[0] != log.chains[1]]


def swap_chain(lines: Lines, log: Log) -> Lines:
    names = [log.chains[0].encode(), log.chains[2].encode()]
    swapped = [line.replace(names[0], b"#").replace(names[1], names[0]).replace(b"#", names[1]) for line in lines[:-4]]
    return swapped + lines[-4:]


def forge_closing(lines: Lines, log: Log) -> Lines:
    """Cut a chain, and close it and the export anew, with a key of one's own."""
    theirs = load_or_create(log.stage.folder / "theirs")
    chain = log.chains[2]
    kept = cut_tail_of_chain(lines, log)[:-2]
    text = json.loads(kept[find(kept, chain, 1)])
    statement = json.loads(lines[-1])["statement"]
    closing: Json = {"chain": chain, "seq": 1, "head": text["hash"], "count": 1}
    at = {"type": "closing", "at": statement["at"], "from": None, "to": None}
    kept.append(sign_statement(theirs.private, {**closing, **at}) + b"\n")
    statement["chains"] = [closing if entry["chain"] == chain else entry for entry in statement["chains"]]
    statement["records"] -= 1
    statement["sha256"] = hashlib.sha256(b"".join(kept)).hexdigest()
    kept.append(sign_statement(theirs.private, statement) + b"\n")
    return kept


def another_closing(lines: Lines, log: Log) -> Lines:
    """A closing that our own key did sign, for less: of an export made before."""
    signed = Checkpoint(log.chains[2], 1, json.loads(lines[find(lines, log.chains[2], 1)])["hash"], 1, 0.0)
    line = sign_statement(log.stage.keys.private, {**signed.statement(), "type": "closing", "from": None, "to": None})
    return [*cut_tail_of_chain(lines, log)[:-2], line + b"\n", lines[-1]]


Spoil = Callable[[Lines, Log], Lines]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (edit, "chain {1}, record {seq}: was edited"),
        (edit_with_hash, "chain {1}, record {next}: does not follow the record before it"),
        (delete, "chain {1}, record {next}: record {seq} is missing before it"),
        (reorder, "chain {1}, record {seq}: stands out of order"),
        (cut_tail_of_chain, "chain {2}: ends at record 1, its closing was signed at record 2"),
        (drop_chain, "chain {1}: all of its "),
        (swap_chain, "chain {0}, record 1: was edited"),
        (forge_closing, "chain {2}, record 1: line {line}: the signature does not verify with the given key"),
        (another_closing, "the lines before the closing line are not the ones that it was signed for"),
        (lambda lines, log: lines[:-1], "the export ends without a closing line that verifies"),
        (lambda lines, log: lines[:20], "its end was cut off or replaced"),
        (lambda lines, log: [*lines[:-1], lines[-1][:-30]], "the last, is cut off"),
        (lambda lines, log: [*lines, lines[-1]], "was added after the closing line"),
    ],
)
def test_a_changed_export(log: Log, spoil: Spoil, sentence: str) -> None:
    lines = spoil(log.export.read_bytes().splitlines(keepends=True), log)
    log.export.write_bytes(b"".join(lines))
    said = log.verify(log.export, "--public-key", log.stage.folder / "keys" / PUBLIC)
    there = {"seq": log.seq, "next": log.seq + 1, "line": len(lines) - 1}
    assert sentence.format(*log.chains, **there) in said, said
