#!/usr/bin/env python3
"""Verifies an export of Ringfence's audit log, and answers questions about a call in it. One file, for any machine:

    python3 verify.py FOLDER                                  all of it, against the key that lies with it
    python3 verify.py FOLDER --public-key audit-public.pem    … against the key that you got by another way
    python3 verify.py FOLDER --call call_0123                 who, what, when, by whose permission, and what came of it
    python3 verify.py log.jsonl --public-key audit-public.pem --witness ringfence-heads

It needs Python 3.11 or later and the package `cryptography`, opens the files that you name and nothing else, and shares
no code with Ringfence: what it finds is what the bytes say. It exits with 0 if nothing is wrong, else with 1.

What it checks, in this order: (1) every record's text has its hash and names the hash of the record before it, from the
first to the last of each chain, or from a signed prune on; (2) what records share is there, by its SHA-256; (3) signed
questions and answers of people have good signatures, and a call that ran on an approval ran on answers that are there
and agree; (4) no call ends twice; (5) each chain ends where its signed closing says; (6) the signed last line has the
SHA-256 of all lines before it; (7) calls.csv says what the log says; (8) each signed checkpoint, and each line of a
witness, is of a record that is there.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

LOG, TABLE, CHECKPOINTS, KEY = "log.jsonl", "calls.csv", "checkpoints.jsonl", "audit-public.pem"
FORMAT = "ringfence-audit-export"
STATEMENT = b"ringfence/1\0"
RECORD = b"ringfence/1 record\0"
GENESIS = "0" * 64
LATE = 60.0
"""Seconds between a record and the checkpoint that covers it, at most, unless its process was killed."""
MAX_LINE = 100_000_000
"""Characters of a line; a longer one is no line of an export."""
ASKED, ANSWERED = "approval_asked", "approval_answered"
COLUMNS = [
    "call_id",
    "began",
    "ended",
    "status",
    "reason_code",
    "agent",
    "person",
    "tenant",
    "origin",
    "tool",
    "server",
    "environment",
    "contract",
    "mode",
    "verdict",
    "rules",
    "approved_by",
    "approval",
    "effect",
    "arguments",
    "result",
    "started_chain",
    "started_seq",
    "finished_chain",
    "finished_seq",
]


# ── JSON in the one form that is signed ───────────────────────────────────────────────────────────


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key is there twice")
    return out


def read(text: str | bytes) -> Any:
    """Raises ValueError for what two readers could read differently."""

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=constant)


def written(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class VerifyingKey:
    """The public key of an installation."""

    def __init__(self, path: Path) -> None:
        loaded = load_pem_public_key(path.read_bytes())
        if not isinstance(loaded, Ed25519PublicKey):
            raise ValueError(f"{path} holds no Ed25519 key")
        self._key = loaded
        self.id = hashlib.sha256(loaded.public_bytes_raw()).hexdigest()[:16]

    def signed(self, message: bytes, signature: Any) -> bool:
        try:
            self._key.verify(bytes.fromhex(signature), message)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    def statement(self, line: Any) -> dict[str, Any] | None:
        """What a signed line says; None where this key did not sign it."""
        if not isinstance(line, dict) or not {"signature", "statement"} <= line.keys():
            return None
        said = line["statement"]
        good = isinstance(said, dict) and self.signed(STATEMENT + written(said), line["signature"])
        return said if good else None


# ── An export ─────────────────────────────────────────────────────────────────────────────────────


class ReadChain:
    """One chain as it was read."""

    def __init__(self) -> None:
        self.first = self.last = self.count = 0
        self.hash = GENESIS
        self.hashes: dict[int, str] = {}
        self.pruned: dict[str, Any] | None = None
        self.closing: dict[str, Any] | None = None


class LogExport:
    """An export, checked while it is read."""

    def __init__(self, key: VerifyingKey) -> None:
        self.key = key
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.header: dict[str, Any] = {}
        self.state: str | None = None
        self.chains: dict[str, ReadChain] = {}
        self.records: list[dict[str, Any]] = []
        self._shared: dict[str, str] = {}
        self._proved: dict[tuple[str, int, str], dict[str, Any]] = {}
        """Questions and answers with a good signature, by their place and hash."""
        self._closed = False
        self._sum = hashlib.sha256()

    def load(self, path: Path) -> None:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if self._closed:
                    self.faults.append(f"line {number} was added after the closing line")
                    break
                if not line.endswith(b"\n"):
                    self.faults.append(f"line {number}, the last, is cut off")
                    break
                try:
                    self._take(number, line, read(line))
                except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as exc:
                    self.faults.append(f"line {number} cannot be read: {exc}")
                self._sum.update(line)
        self._finish()

    def _take(self, number: int, line: bytes, value: dict[str, Any]) -> None:
        names = set(value)
        if number == 1:
            self._begin(value)
        elif names == {"hash", "text"}:
            self._record(value["text"], value["hash"])
        elif names == {"shared"}:
            self._shared[sha256(value["shared"])] = value["shared"]
        elif names == {"hash", "proof"}:
            body = read(value["proof"])
            if sha256(value["proof"]) != value["hash"] or not self._prove(body, value["hash"]):
                self.faults.append(f"line {number} is no proof: its signature is not good")
        elif names == {"signature", "statement"}:
            self._statement(number, line, value)
        else:
            self.faults.append(f"line {number} is none of an export")

    def _begin(self, header: dict[str, Any]) -> None:
        if header.get("format") != FORMAT or header.get("v") not in (1, 2, 3):
            self.faults.append("the first line is not the header of an export that this program knows")
        self.header = header
        identity = self.key.statement(header.get("state"))
        self.state = None if identity is None else identity.get("state")
        if header.get("v") == 3 and self.state is None:
            self.faults.append("the header does not say, signed with this key, of which installation the log is")

    def _record(self, text: str, digest: str) -> None:
        body = read(text)
        name, seq = body["chain"], body["seq"]
        place = f"chain {name}, record {seq}"
        chain = self.chains.setdefault(name, ReadChain())
        if sha256(text) != digest:
            self.faults.append(f"{place}: was edited: its text does not have its hash")
        if chain.count == 0:
            chain.first = seq
            due, before = 1, GENESIS
            if chain.pruned is not None:
                due, before = chain.pruned["seq"] + 1, chain.pruned["head"]
            if self.header.get("from") is not None:
                due, before = seq, body["prev"] if seq > 1 else GENESIS
        else:
            due, before = chain.last + 1, chain.hash
        if seq != due:
            self.faults.append(f"{place}: record {due} was due here; records are missing or out of order")
        elif body["prev"] != before:
            self.faults.append(f"{place}: does not follow the record before it: one of the two was replaced")
        if chain.closing is not None:
            self.faults.append(f"{place}: was added after the chain's closing")
        chain.last, chain.hash, chain.count = seq, digest, chain.count + 1
        chain.hashes[seq] = digest
        if body["kind"] in (ASKED, ANSWERED) and not self._prove(body, digest):
            self.faults.append(f"{place}: a question or an answer whose signature is not good")
        self.records.append({**self._filled(place, body), "hash": digest})

    def _filled(self, place: str, body: dict[str, Any]) -> dict[str, Any]:
        """The record with what it shares with others."""
        for digest in body.get("shared") or ():
            text = self._shared.get(digest)
            if text is None:
                self.faults.append(f"{place}: names a part that is missing before it")
            else:
                body = joined(read(text), body)
        return body

    def _prove(self, body: dict[str, Any], digest: str) -> bool:
        bare = {name: value for name, value in body.items() if name != "signature"}
        good = body.get("kind") in (ASKED, ANSWERED) and body.get("state") == self.state
        if good and self.key.signed(RECORD + written(bare), body.get("signature")):
            self._proved[body["chain"], body["seq"], digest] = body
            return True
        return False

    def _statement(self, number: int, line: bytes, value: dict[str, Any]) -> None:
        said = self.key.statement(value)
        kind = None if said is None else said.get("type")
        if said is None:
            self.faults.append(f"line {number}: the signature is not good with this key ({self.key.id})")
        elif kind == "closing":
            chain = self.chains.setdefault(said["chain"], ReadChain())
            chain.closing = said
        elif kind == "pruned":
            chain = self.chains.setdefault(said["chain"], ReadChain())
            if chain.count or chain.pruned:
                self.faults.append(f"chain {said['chain']}: what was pruned stands in the wrong place")
            chain.pruned = said
            self.notes.append(
                f"chain {said['chain']}: records 1 to {said['seq']} were pruned by {said['by']}, {moment(said['at'])}."
            )
        elif kind == "export":
            self._closed = True
            self._last_line(line, value, said)
        else:
            self.faults.append(f"line {number} is a signed statement of another kind")

    def _last_line(self, line: bytes, value: dict[str, Any], said: dict[str, Any]) -> None:
        if written(value) + b"\n" != line:
            self.faults.append("the closing line is not in the form in which it was written")
        if any(self.header.get(name) != said.get(name) for name in ("at", "key", "from", "to")):
            self.faults.append("the header is not the one that the closing line was signed for")
        if said.get("state") != self.state:
            self.faults.append("the closing line is of the log of another installation")
        if said.get("sha256") != self._sum.hexdigest():
            self.faults.append("the lines before the closing line are not the ones that it was signed for")
        if said.get("records") != len(self.records):
            self.faults.append(f"the closing line counts {said.get('records')} records, there are {len(self.records)}")
        there = [
            {"chain": name, "seq": chain.last, "head": chain.hash, "count": chain.count}
            for name, chain in sorted(self.chains.items())
        ]
        if said.get("chains") != there:
            self.faults.append("the closing line has other chains, or other ends of them")

    def _finish(self) -> None:
        if not self._closed:
            self.faults.append("there is no closing line that verifies: the end was cut off or replaced")
        for name, chain in sorted(self.chains.items()):
            closing = chain.closing
            if closing is None:
                self.faults.append(f"chain {name}: its closing is missing")
            elif (closing["seq"], closing["head"], closing["count"]) != (chain.last, chain.hash, chain.count):
                self.faults.append(f"chain {name}: does not end where its closing was signed")
            elif closing.get("state") != self.state:
                self.faults.append(f"chain {name}: its closing is of another installation")
        ended: set[str] = set()
        for record in self.records:
            if record["kind"] == "finished":
                if record["call_id"] in ended:
                    self.faults.append(f"call {record['call_id']} ends twice")
                ended.add(record["call_id"])
            if record["kind"] == "started":
                self._check_approval(record)
        if self.header.get("from") is not None or self.header.get("to") is not None:
            since, until = moment(self.header.get("from")), moment(self.header.get("to"))
            self.notes.append(f"this is a part of the log, from {since} up to {until}.")

    def _check_approval(self, record: dict[str, Any]) -> None:
        """A call that ran on an approval ran on answers that are there, are signed, and agree."""
        used = record.get("approval")
        if not used:
            return
        what = f"call {record['call_id']} ran on approval {used.get('id')}"
        question = self._named(used.get("asked"))
        if question is None or question["kind"] != ASKED or question.get("approval") != used.get("id"):
            self.faults.append(f"{what}, and its question is not here with a good signature")
            return
        people = set()
        for each in used.get("by") or ():
            answer = self._named(each)
            about = None if answer is None else answer.get("approval")
            if (
                answer is None
                or answer["kind"] != ANSWERED
                or about != used.get("id")
                or answer.get("approve") is not True
            ):
                self.faults.append(f"{what}, and an answer of {each.get('person')} that agrees is not here, signed")
            else:
                people.add(answer.get("person"))
        wanted = question.get("people")
        if len(people) < (wanted if isinstance(wanted, int) else 1):
            self.faults.append(f"{what}, for which {wanted} people had to agree, and {len(people)} did")

    def _named(self, place: Any) -> dict[str, Any] | None:
        if not isinstance(place, dict):
            return None
        return self._proved.get((str(place.get("chain")), place.get("seq") or 0, str(place.get("hash"))))

    def approvals(self, identity: Any) -> Iterator[dict[str, Any]]:
        """The question and the answers of an approval, as far as they are proved."""
        found = [body for body in self._proved.values() if body.get("approval") == identity]
        return iter(sorted(found, key=lambda body: (body["at"], body["seq"])))

    # ── What lies beside it ──

    def compare_heads(self, path: Path) -> None:
        """With checkpoints, or what a witness was told: lines of anything, some of which are signed heads."""
        seen = 0
        for line in path.read_bytes().split(b"\n"):
            begin = line.rfind(b'{"signature":')
            try:
                said = self.key.statement(read(line[begin:])) if begin >= 0 else None
            except (ValueError, RecursionError):
                said = None
            if said is None or said.get("type") != "checkpoint" or said.get("state") not in (self.state, None):
                continue
            seen += 1
            self._compare_head(path, said)
        if seen:
            self.notes.append(f"{seen} signed heads of {path.name} were compared.")
        else:
            self.faults.append(f"{path.name} has no head of this log that this key signed: it says nothing about it")

    def _compare_head(self, path: Path, said: dict[str, Any]) -> None:
        name, seq = said["chain"], said["seq"]
        chain = self.chains.get(name, ReadChain())
        there = chain.hashes.get(seq)
        if there is not None and there != said["head"]:
            self.faults.append(
                f"chain {name}, record {seq}: is not the record that {path.name} has: it was written anew"
            )
        pruned = chain.pruned["seq"] if chain.pruned else 0
        since, until = self.header.get("from"), self.header.get("to")
        begin = 0.0 if since is None else since + LATE
        end = min(at for at in (self.header.get("at"), until) if at is not None)
        if there is None and seq > max(pruned, chain.last) and begin <= said["at"] < end:
            self.faults.append(f"chain {name}, record {seq}: is missing, and {path.name} has it: the log was cut back")


def joined(part: Any, own: Any) -> Any:
    """Joined key by key; what a record says itself comes first."""
    if not isinstance(part, dict) or not isinstance(own, dict):
        return own
    return {**part, **{key: joined(part[key], value) if key in part else value for key, value in own.items()}}


def moment(at: Any) -> str:
    if not isinstance(at, (int, float)):
        return "its begin" if at is None else str(at)
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ── Calls ─────────────────────────────────────────────────────────────────────────────────────────


def at(record: Any, *names: str) -> Any:
    """A part of a record; None where it is not there."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def calls(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The records that begin and end each call, by its id, in the order in which they are met."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        if record.get("kind") in ("started", "finished") and record.get("call_id"):
            found.setdefault(record["call_id"], {})[record["kind"]] = record
    return found


def row(call_id: str, story: dict[str, dict[str, Any]]) -> dict[str, str]:
    """One call as a line of a table."""
    begun, ended = story.get("started"), story.get("finished")
    said = ended or begun or {}
    approved = [str(each.get("person")) for each in at(said, "approval", "by") or ()]
    verdict = at(said, "decision", "allowed")
    if at(said, "decision", "asks"):
        verdict = "approval required" if verdict else "refused"
    else:
        verdict = {True: "allowed", False: "refused"}.get(verdict, "")
    values = {
        "call_id": call_id,
        "began": "" if begun is None else moment(begun["at"]),
        "ended": "" if ended is None else moment(ended["at"]),
        "status": at(ended, "status"),
        "reason_code": at(ended, "reason_code"),
        "agent": at(said, "call", "principal", "agent"),
        "person": at(said, "call", "principal", "person"),
        "tenant": at(said, "call", "principal", "tenant"),
        "origin": at(said, "call", "origin"),
        "tool": at(said, "call", "tool"),
        "server": at(said, "call", "server"),
        "environment": at(said, "call", "environment"),
        "contract": at(said, "contract", "digest"),
        "mode": at(said, "contract", "mode"),
        "verdict": verdict,
        "rules": " ".join(map(str, at(said, "decision", "rules") or ())),
        "approved_by": " ".join(approved),
        "approval": at(said, "approval", "id"),
        "effect": at(ended, "effect") or at(ended, "facts", "effect"),
        "arguments": at(said, "arguments", "digest"),
        "result": at(ended, "result", "digest"),
    }
    for name, record in (("started", begun), ("finished", ended)):
        values[f"{name}_chain"] = at(record, "chain")
        values[f"{name}_seq"] = at(record, "seq")
    return {name: cell(value) for name, value in values.items()}


def cell(value: Any) -> str:
    """A value that no program for tables takes for a formula."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text


def table(records: Iterable[dict[str, Any]]) -> str:
    """The calls of an export as CSV."""
    out = io.StringIO()
    lines = csv.DictWriter(out, COLUMNS, lineterminator="\r\n")
    lines.writeheader()
    for call_id, story in calls(records).items():
        lines.writerow(row(call_id, story))
    return out.getvalue()


def tell(export: LogExport, call_id: str) -> list[str]:
    """A call in answers: who, what, when, by whose permission, with what data, and what came of it."""
    story = calls(export.records).get(call_id)
    if story is None:
        return [f"There is no call {call_id} in this export."]
    line = row(call_id, story)
    said = story.get("finished") or story.get("started") or {}
    who = f"agent {line['agent']}" if line["agent"] else "the gateway itself"
    out = [
        f"call     {call_id}",
        f"who      {who}{', for ' + line['person'] if line['person'] else ''}; tenant {line['tenant'] or '-'};"
        f" over {line['origin'] or '-'}",
        f"what     {line['tool']}{' of server ' + line['server'] if line['server'] else ''}, in {line['environment']}",
        f"when     began {line['began'] or '(not begun)'}, ended {line['ended'] or '(no end in this export)'}",
        f"allowed  {line['verdict'] or 'not decided'} by rules {line['rules'] or '(none)'};"
        f" contract {line['contract'] or '-'}"
        f"{' (mode ' + line['mode'] + ')' if line['mode'] else ''}",
    ]
    for body in export.approvals(at(said, "approval", "id")):
        if body["kind"] == ASKED:
            out.append(f"asked    {moment(body['at'])}, {body.get('approval')}, under {body.get('rule')}; signed")
        else:
            verb = "agreed" if body.get("approve") is True else "refused"
            why = f": {body['reason']}" if body.get("reason") else ""
            out.append(f"answer   {body.get('person')} {verb} at {moment(body['at'])}{why}; signed")
    data = at(said, "arguments") or {}
    names = data.get("names")
    out += [
        f"data     arguments {line['arguments'] or '-'} (salted digest)"
        f"{', names ' + json.dumps(names) if names else ''}",
        f"outcome  {line['status'] or 'unknown: it has not ended here'} ({line['reason_code'] or '-'}), effect"
        f" {line['effect'] or '-'}, result {line['result'] or '-'} (salted digest)",
        "records  " + ", ".join(f"{kind} {each['chain']} {each['seq']} {each['hash']}" for kind, each in story.items()),
    ]
    return [visible(text) for text in out]


def visible(text: str) -> str:
    """No terminal obeys what a record quotes."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


# ── The command ───────────────────────────────────────────────────────────────────────────────────


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="the folder of an export, or its log alone")
    parser.add_argument("--public-key", type=Path, help="the key, as you got it by another way than the export")
    parser.add_argument("--witness", type=Path, action="append", default=[], help="what a witness has kept")
    parser.add_argument("--call", help="tell of this call")
    given = parser.parse_args(words)
    folder = given.export if given.export.is_dir() else None
    key_path = given.public_key or (folder / KEY if folder else None)
    if key_path is None:
        parser.error("a log alone is verified with a key: name it with --public-key")
    try:
        key = VerifyingKey(key_path)
        export = LogExport(key)
        export.load(folder / LOG if folder else given.export)
        beside_it = folder / TABLE if folder is not None and not export.faults else None
        if beside_it is not None and beside_it.exists() and beside_it.read_bytes().decode() != table(export.records):
            export.faults.append(f"{TABLE} does not say what the log says")
        beside = folder / CHECKPOINTS if folder is not None else None
        heads = [beside] if beside is not None and beside.exists() and beside.stat().st_size else []
        for path in [*heads, *given.witness]:
            export.compare_heads(path)
    except (OSError, ValueError) as exc:
        say(f"nothing was verified: {exc}")
        return 1
    if given.public_key is None:
        export.notes.append(
            f"the key came with the export; compare its id, {key.id}, with the one that you were told by another way."
        )
    for line in tell(export, given.call) if given.call else ():
        say(line)
    count = f"{len(export.records)} records in {len(export.chains)} chains, {len(calls(export.records))} calls"
    say(f"{count}: {f'{len(export.faults)} faults' if export.faults else 'verified'} with key {key.id}.")
    for line in [*export.faults[:1000], *export.notes]:
        say(visible(line))
    return 1 if export.faults else 0


if __name__ == "__main__":
    sys.exit(main())
