"""Evidence: an export that verifies offline, and the check of the live log against its checkpoints.

An export is lines of JSON. It has a header; the exact text and hash of every record, after the parts that the record
shares with others; before a chain's first record the signed statement on what was pruned from it; the approvals that
its calls ran on, where those are outside of the period; a signed closing for each chain; and a signed closing line that
covers every byte before it. The public key always comes from outside, never from the file.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.approvals import ANSWERED, ASKED, STANDING_MADE, ApprovalVerifier, Proof, proves
from ringfence.audit.calls import CallVerifier
from ringfence.audit.chain import (
    ALWAYS,
    CLOSED,
    MAX_RECORD_BYTES,
    OPENED,
    SLOT_BYTES,
    ChainVerifier,
    Checkpoint,
    ContextRecord,
    Findings,
    Head,
    KnownHead,
    OriginVerifier,
    Period,
    Pruned,
    Record,
    Slots,
    StateIdentity,
    Verification,
    identity_in,
    is_chain_name,
    is_identity_name,
    is_part,
    key_id,
    misfiled,
    named_by,
    read_pruned,
    read_slots,
    shared_by,
    signed_by,
)
from ringfence.audit.signer import SigningKey
from ringfence.audit.witness import witnessed
from ringfence.core import canonical, system
from ringfence.core.errors import StoreError, TamperError
from ringfence.core.model import Json

FORMAT = "ringfence-audit-export"
MAX_LINE = 2 * MAX_RECORD_BYTES + 4096
"""A record's text as a JSON string is at most twice as long as itself."""
_MAX_UNSHOWN = 200
_MAX_LATE_SECONDS = 60.0
"""A head may be signed so long after its record: by the start after a short crash."""
MAX_RECENT_PARTS = 4 * MAX_RECORD_BYTES
"""Characters of the shared parts that the reader of an export keeps in memory."""

Checkpoints = Mapping[str, bytes]
"""The contents of each chain's checkpoint file. They must be read before the records, which only grow."""
FindRecord = Callable[[str, int], Record | None]
"""Returns the record of a chain with a number."""
NamedHeads = dict[str, list[tuple[Head, str, str]]]
"""By chain: heads of it that records of other chains name, the chain of that record, and how it names them."""


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


class _LineWriter:
    """Writes lines and keeps the digest of all of them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = hashlib.sha256()

    def write(self, line: bytes) -> None:
        line += b"\n"
        self._sum.update(line)
        self._file.write(line)

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()


def write_export(
    path: Path,
    records: Iterable[Record | Proof | ContextRecord],
    keys: SigningKey,
    period: Period = ALWAYS,
    checkpoints: Checkpoints | None = None,
    find: FindRecord | None = None,
) -> Verification:
    """Write records, each chain in its order, to `path` and sign the export.

    With `find`, every head of another chain that a record names must exist, in the period or not. Raises TamperError,
    and leaves no file, where the records do not chain or (with `checkpoints`) do not lead to the signed head of their
    chain: our signature must never cover a log that was tampered with.
    """
    try:
        with _atomic_file(path) as file:
            return _ExportWriter(_LineWriter(file), keys, period, checkpoints, find).write(records)
    except OSError as exc:
        raise StoreError(f"the export {path} cannot be written: {exc.strerror or exc}") from exc


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name only when it is complete and on disk. If anything fails before that, there is none."""
    with _unnamed_file(path) as (file, name):
        yield file
        file.flush()
        os.fsync(file.fileno())
        name(file.fileno())
    system.sync_folder(path.parent)


@contextlib.contextmanager
def _unnamed_file(path: Path) -> Iterator[tuple[IO[bytes], Callable[[int], None]]]:
    try:
        descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | system.PLAIN, 0o600)
    except (OSError, AttributeError):  # not every system and not every file system has O_TMPFILE
        with _hidden_file(path) as made:
            yield made
        return
    folder = os.open(path.parent, os.O_RDONLY | system.PLAIN)
    try:
        with open(descriptor, "wb") as file:
            # `src_dir_fd`, which an absolute path makes irrelevant, has Python follow the link in /proc.
            yield file, lambda number: os.link(f"/proc/self/fd/{number}", path, src_dir_fd=folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _hidden_file(path: Path) -> Iterator[tuple[IO[bytes], Callable[[int], None]]]:
    """A file under a temporary name. If a kill leaves it, the next export to the same path removes it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.export-*"):
        left.unlink(missing_ok=True)
    made = path.with_name(f".{path.name}.export-{secrets.token_hex(6)}")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.PLAIN, 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file, lambda number: os.link(made, path)
    finally:
        made.unlink(missing_ok=True)


def prunes(checkpoints: Checkpoints, public: Ed25519PublicKey) -> dict[str, Pruned]:
    """The signed statement on what was pruned from each chain.

    If it changes while the records are read, a prune removed some of them before they were read.
    """
    found = {name: read_pruned(data, name, public)[0] for name, data in _chain_files(checkpoints)}
    return {name: pruned for name, pruned in found.items() if pruned is not None}


def _chain_files(checkpoints: Checkpoints) -> list[tuple[str, bytes]]:
    return [(name, data) for name, data in checkpoints.items() if not is_identity_name(name)]


class _WrittenChain:
    """One chain in an export that is being written."""

    def __init__(self, verifier: ChainVerifier) -> None:
        self.verifier = verifier
        self.head = Head("")
        self.count = 0
        self.signed_hash: str | None = None
        """The hash of the record that the chain's checkpoint was signed for, once that was read."""
        self.unshown: list[str] = []
        """Texts of records that the signer has not seen yet."""


class _ExportWriter:
    """Writes one export."""

    def __init__(
        self,
        out: _LineWriter,
        keys: SigningKey,
        period: Period,
        checkpoints: Checkpoints | None,
        find: FindRecord | None = None,
    ) -> None:
        self._out = out
        self._find = find
        self._keys = keys
        self._period = period
        self._checkpoints = checkpoints
        self._found = Findings()
        self._gone = prunes(checkpoints or {}, keys.public)
        self._state = identity_in(checkpoints or {}, keys.public)
        self._origins = OriginVerifier(self._found, self._state)
        self._held: dict[str, Checkpoint | None] | None = None
        if checkpoints is not None:
            self._held = {name: read_slots(data, name, keys.public).newest for name, data in _chain_files(checkpoints)}
        self._chains: dict[str, _WrittenChain] = {}
        self._recent = _RecentParts()

    def write(self, records: Iterable[Record | Proof | ContextRecord]) -> Verification:
        at = time.time()
        span = {"from": self._period.since, "to": self._period.until}
        out = self._out
        header: Json = {"format": FORMAT, "v": 2, "at": at, "key": self._keys.id, **span}
        state: Json = {}
        if self._state is not None:
            state = {"state": self._state.id}
            header |= {"v": 3, "state": canonical.loads(self._keys.sign(self._state.message(self._keys.id)))}
        out.write(canonical.dumps(header))
        for entry in records:
            if isinstance(entry, Proof):
                self._prove(entry.record)
            elif isinstance(entry, ContextRecord):
                self._take(entry.record, written=False)
            else:
                self._take(entry, written=True)
        self._refuse_cut_chains()
        heads: list[Json] = []
        written = [(name, part) for name, part in sorted(self._chains.items()) if part.count]
        for name, part in written:
            place = (name, part.head.seq, part.head.hash, part.count)
            self._keys.show(name, part.unshown, self._held_line(name))
            out.write(self._keys.sign(Checkpoint(*place, at, self._period, state.get("state")).message()))
            heads.append({"chain": name, "seq": part.head.seq, "head": part.head.hash, "count": part.count})
        count = sum(part.count for _, part in written)
        last = {"type": "export", "v": 1, "at": at, "key": self._keys.id, **span, "records": count, "chains": heads}
        out.write(self._keys.sign(canonical.dumps({**last, **state, "sha256": out.digest})))
        return Verification(records=count, heads=tuple(part.head for _, part in written), state=state.get("state"))

    def _take(self, record: Record, *, written: bool) -> None:
        pruned = self._gone.get(record.chain)
        if pruned is not None and record.seq <= pruned.seq:
            # Left by a prune that was interrupted. It is not part of the log any more, but remaining calls may have run
            # on this approval.
            if record.kind in (ASKED, ANSWERED, STANDING_MADE) and proves(self._keys.public, record):
                self._prove(record)
            return
        part = self._chains.get(record.chain) or self._begin(record, is_context=not written)
        body = part.verifier.feed(record.text, record.hash)
        for field in () if body is None else misfiled(record, body):
            self._found.add(f"is filed under another {field} than its text has", record.chain, record.seq)
        if body is not None:
            self._origins.feed(body)
        if body is not None and self._find is not None:
            self._check_named(record, body, self._find)
        held = self._held.get(record.chain) if self._held is not None else None
        if held is not None and record.seq == held.seq:
            part.signed_hash = record.hash
        if written:
            if part.count == 0 and pruned is not None:
                self._out.write(self._keys.sign(pruned.message(self._keys.id)))
            for text in _new_parts(record, body or {}, self._recent, self._found):
                self._out.write(canonical.dumps({"shared": text}))
        self._refuse_faults()
        part.unshown.append(record.text)
        if len(part.unshown) >= _MAX_UNSHOWN:
            self._keys.show(record.chain, part.unshown)
            part.unshown = []
        if written:
            self._out.write(canonical.dumps({"hash": record.hash, "text": record.text}))
            part.head, part.count = record.head, part.count + 1

    def _held_line(self, name: str) -> bytes | None:
        """The signed line of a chain's newest checkpoint."""
        data = (self._checkpoints or {}).get(name, b"")
        index = read_slots(data, name, self._keys.public).index
        return data[index * SLOT_BYTES : (index + 1) * SLOT_BYTES].strip() if index >= 0 else None

    def _check_named(self, record: Record, body: Json, find: FindRecord) -> None:
        for named in named_by(body):
            pruned = self._gone.get(named.chain)
            if (pruned is None or named.seq > pruned.seq) and not _exists(find, named):
                text = f"{_naming(record.kind)} record {named.seq} of chain {named.chain}, which is missing or differs"
                self._found.add(text, record.chain, record.seq)

    def _prove(self, record: Record) -> None:
        self._out.write(canonical.dumps({"hash": record.hash, "proof": record.text}))

    def _begin(self, record: Record, *, is_context: bool) -> _WrittenChain:
        """Begin a chain: at its first record, or, in an export of a period, after a context record. Where neither is
        known, it may begin anywhere."""
        partial = self._period.since is not None and (is_context or self._held is None)
        pruned = self._gone.get(record.chain)
        end = None if pruned is None or partial else pruned.end
        made = _WrittenChain(ChainVerifier(record.chain, self._found, partial=partial, pruned=end))
        self._chains[record.chain] = made
        return made

    def _refuse_faults(self) -> None:
        if self._found.faults:
            raise TamperError(f"the log does not verify, so nothing was exported: {self._found.faults[0]}")

    def _refuse_cut_chains(self) -> None:
        """Raise TamperError unless each chain has the record of its checkpoint, and with that all before it."""
        if self._held is None:
            return
        for name, held in sorted(self._held.items()):
            part = self._chains.get(name)
            if held is not None and part is not None and part.count:
                self._origins.signed(name, held.state, "its checkpoint")
                self._refuse_faults()
            since = self._period.since
            if held is not None and since is not None and held.at < since and (part is None or not part.count):
                continue  # the chain ended before the period
            last = part.verifier.seq if part is not None else 0
            if held is not None and held.seq > last:
                text = f"chain {name} ends at record {last}, its checkpoint stands at {held.seq}"
            elif held is not None and held.seq and (part is None or part.signed_hash != held.head):
                text = f"record {held.seq} of chain {name} is not the one that its checkpoint was signed for"
            else:
                continue
            raise TamperError(f"{text}: nothing was exported")
        for name, part in sorted(self._chains.items()):
            if part.count and self._held.get(name) is None:
                raise TamperError(f"chain {name} has no checkpoint that verifies with this key: nothing was exported")


class _RecentParts:
    """The shared parts that an export has stated most recently, up to a bound.

    The reader keeps no more than these in memory. The writer counts in the same way, and states an older one again.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._size = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._texts

    def find(self, digest: str) -> str | None:
        return self._texts.get(digest)

    def add(self, text: str) -> None:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if digest in self._texts:
            return
        self._texts[digest] = text
        self._size += len(text)
        while self._size > MAX_RECENT_PARTS and len(self._texts) > 1:
            self._size -= len(self._texts.pop(next(iter(self._texts))))


def _new_parts(record: Record, body: Json, recent: _RecentParts, found: Findings) -> Iterator[str]:
    """The shared parts of a record that have to be stated before it, checked."""
    named = shared_by(body)
    for _ in named:  # adding one part may push out another that the record names, too
        for digest in named:
            if digest not in recent:
                text = _find_part(record, digest, found)
                if text is None:
                    return
                recent.add(text)
                yield text


def _find_part(record: Record, digest: str, found: Findings) -> str | None:
    text = None if record.find is None else record.find(digest)
    if text is None:
        found.add("names a part that is missing", record.chain, record.seq)
    elif not is_part(text, digest):
        found.add("names a part that was edited", record.chain, record.seq)
        return None
    return text


def _exists(find: FindRecord, named: Head) -> bool:
    record = find(named.chain, named.seq)
    return record is not None and record.hash == named.hash and is_part(record.text, record.hash)


def _naming(kind: str) -> str:
    """The verb for how a record of this kind names the last records of other chains."""
    return "was opened after" if kind == OPENED else "names"


def _not_the_named(seq: int, by: str, how: str) -> str:
    return f"is not the record {seq} that chain {by} {how}"


# ── Reading an export ─────────────────────────────────────────────────────────────────────────────


def verify_export(path: Path, public_key: Ed25519PublicKey, witnesses: Iterable[Path] = ()) -> Verification:
    """Check an export offline, and whether it has what witnesses have. Raises StoreError only where a file cannot be
    read at all."""
    reading = _ExportReader(public_key, witnesses)
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE + 1):
                if not reading.take(line):
                    break
    except OSError as exc:
        raise StoreError(f"the export {path} cannot be read: {exc.strerror or exc}") from exc
    return reading.report()


class _ExportReader:
    """One pass over an export's lines."""

    def __init__(self, public: Ed25519PublicKey, witnesses: Iterable[Path] = ()) -> None:
        self._public = public
        self._witnesses = witnesses
        self._known: dict[tuple[str, int], list[KnownHead]] = {}
        """Heads that witnesses have, by chain and number."""
        self._found = Findings()
        self._sum = hashlib.sha256()
        self._number = 0
        self._header: Json | None = None
        self._state: StateIdentity | None = None
        self._chains: dict[str, ChainVerifier] = {}
        self._closings: dict[str, Checkpoint] = {}
        self._ends: dict[tuple[str, int], str] = {}
        """The hashes of records that close a chain, which records of other chains name."""
        self._named: dict[str, dict[Head, tuple[str, str]]] = {}
        """By chain: heads that were named and not read yet, the chain that names them, and how."""
        self._prunes: dict[str, Pruned] = {}
        self._recent = _RecentParts()
        self._approvals = ApprovalVerifier(self._found, public)
        self._calls = CallVerifier(self._found)
        self._origins = OriginVerifier(self._found)
        self._closed = False

    def take(self, line: bytes) -> bool:
        """Read one line; False where nothing after it can be read."""
        self._number += 1
        if self._closed:
            self._found.add(f"line {self._number} was added after the closing line")
            return False
        if len(line) > MAX_LINE:
            self._found.add(f"line {self._number} is longer than {MAX_LINE} bytes, which no export has")
            return False
        if not line.endswith(b"\n"):
            self._found.add(f"line {self._number}, the last, is cut off")
            return False
        self._dispatch(line)
        self._sum.update(line)
        return True

    def _dispatch(self, line: bytes) -> None:
        try:
            value = canonical.loads(line)
        except canonical.NotCanonical as exc:
            self._found.add(f"line {self._number} cannot be read: {exc}")
            return
        if self._number == 1:
            self._take_header(value)
        elif isinstance(value, dict) and value.keys() == {"hash", "text"}:
            self._take_record(value)
        elif isinstance(value, dict) and value.keys() == {"hash", "proof"}:
            if not self._approvals.vouch(str(value["proof"]), str(value["hash"])):
                self._found.add(
                    f"line {self._number} is no proof: it has no signature that verifies with the given key"
                )
        elif isinstance(value, dict) and value.keys() == {"signature", "statement"}:
            self._take_signed(value, line)
        elif isinstance(value, dict) and value.keys() == {"shared"} and isinstance(value["shared"], str):
            self._recent.add(value["shared"])
        else:
            self._found.add(f"line {self._number} is neither a record nor a closing")

    def _take_header(self, value: Any) -> None:
        if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("v") not in (1, 2, 3):
            self._found.add(f"the first line is not the header of a {FORMAT}")
            return
        self._header = value
        if value["v"] < 3:
            return  # by a version in which states had no ids
        self._state = StateIdentity.of(signed_by(self._public, value.get("state")))
        if self._state is None:
            self._found.add("the header has no statement, signed with the given key, on which state the log is of")
        self._approvals = ApprovalVerifier(self._found, self._public, self._state)
        self._origins = OriginVerifier(self._found, self._state)
        for path in self._witnesses:
            heads = witnessed(path, self._public, self._state)
            for each in heads:
                self._known.setdefault((each.head.chain, each.head.seq), []).append(each)
            if heads:
                self._found.notes.append(f"{len(heads)} heads of the witness {path} were compared.")
            else:
                self._found.add(f"{path} has no head of this log that verifies with this key: it witnesses nothing")

    def _take_record(self, value: Json) -> None:
        text = value["text"]
        digest = value["hash"]
        if not isinstance(text, str) or not isinstance(digest, str):
            self._found.add(f"line {self._number} is not a record")
            return
        name = _chain_of(text)
        if name is None:
            self._found.add(f"line {self._number} holds a text that is no record")
            return
        if name in self._closings:
            self._found.add(f"line {self._number} was added after the chain's closing", name)
        verifier = self._chains.get(name)
        if verifier is None:
            partial = self._header is not None and self._header.get("from") is not None
            pruned = None if partial or name not in self._prunes else self._prunes[name].end
            verifier = self._chains[name] = ChainVerifier(name, self._found, partial=partial, pruned=pruned)
        body = verifier.feed(text, digest)
        for known in self._known.pop((name, verifier.seq), ()):
            if known.head.hash != digest:
                text = f"is not the record that {known.by} has: the log was written anew"
                self._found.add(text, name, verifier.seq)
        if body is not None:
            self._take_body(name, body, digest)

    def _take_body(self, name: str, body: Json, digest: str) -> None:
        if any(part not in self._recent for part in shared_by(body)):
            self._found.add("names a part that is missing before it", name, self._chains[name].seq)
        pruned = name in self._prunes and body["seq"] <= self._prunes[name].seq
        self._approvals.feed(body, digest, self._recent.find, pruned=pruned)
        self._calls.feed(body)
        self._origins.feed(body)
        self._check_names_of(name, body, Head(name, body["seq"], digest))
        if body["kind"] == CLOSED and "unsigned" in body:
            self._found.notes.append(_unsigned_note(name, body["unsigned"]))

    def _check_names_of(self, name: str, body: Json, head: Head) -> None:
        """Note that a record was read which other chains may name, and which heads of other chains it names."""
        if (waiting := self._named.get(name)) is not None:
            waiting.pop(head, None)
        if body["kind"] == CLOSED:
            self._ends[name, head.seq] = head.hash
        began = (self._header or {}).get("at")
        if not isinstance(began, int | float) or body["at"] >= began:
            return  # written while the export was: it may name a record that the export does not have
        for named in named_by(body):
            seen = self._chains.get(named.chain)
            # Of records read before, only the closing ones are kept for comparison; the chain itself covers the others.
            known = seen is not None and named.seq <= seen.seq
            if not known or self._ends.get((named.chain, named.seq), named.hash) != named.hash:
                self._named.setdefault(named.chain, {})[named] = (name, _naming(body["kind"]))

    def _take_signed(self, value: Json, line: bytes) -> None:
        statement = signed_by(self._public, value)
        if statement is None:
            problem = f"line {self._number}: {_bad_signature(value, self._public)}"
            claimed = Checkpoint.of(value["statement"] if isinstance(value["statement"], dict) else None)
            if claimed is not None and is_chain_name(claimed.chain) and isinstance(claimed.seq, int):
                self._found.add(problem, claimed.chain, claimed.seq)
            else:
                self._found.add(problem)
            return
        closing = Checkpoint.of(statement)
        pruned = Pruned.of(statement)
        if closing is not None and closing.period is not None:
            self._closings[closing.chain] = closing
        elif pruned is not None:
            self._take_pruned(pruned)
        elif statement.get("type") == "export":
            self._closed = True
            if canonical.dumps(value) + b"\n" != line:
                self._found.add("the closing line was edited: it is not in the form in which it was written")
            self._check_export(statement)
        else:
            self._found.add(f"line {self._number} is a signed statement of another kind than an export's")

    def _take_pruned(self, pruned: Pruned) -> None:
        if pruned.chain in self._chains or pruned.chain in self._prunes:
            text = "the statement on what was pruned is in the wrong place: it comes once, before the chain's records"
            self._found.add(text, pruned.chain)
            return
        self._prunes[pruned.chain] = pruned
        self._found.notes.append(_pruned_note(pruned))

    def _check_export(self, statement: Json) -> None:
        found = self._found
        header = self._header or {}
        if any(header.get(name) != statement.get(name) for name in ("at", "key", "from", "to")):
            found.add("the header is not the one that the closing line was signed for")
        if statement.get("state") != (None if self._state is None else self._state.id):
            found.add("the closing line was signed for the log of another state than the header says")
        seen = sum(chain.count for chain in self._chains.values())
        if statement.get("records") != seen:
            found.add(f"the closing line counts {statement.get('records')} records, the export holds {seen}")
        stated = {str(entry.get("chain")) for entry in statement.get("chains", [])}
        for name in sorted(stated | self._chains.keys()):
            self._check_chain(name, stated)
        if statement.get("from") is None and statement.get("to") is None:
            self._check_names()
        else:
            found.notes.insert(0, _period_note(statement.get("from"), statement.get("to")))
        if statement.get("sha256") != self._sum.hexdigest():
            found.add("the lines before the closing line are not the ones that it was signed for")

    def _check_names(self) -> None:
        """Report the named heads that the export does not have, unless they were pruned."""
        for chain, waiting in sorted(self._named.items()):
            if chain not in self._chains:
                for name, how in sorted(set(waiting.values())):
                    self._found.add(f"{how} chain {chain}, which is missing", name)
                continue
            pruned = self._prunes[chain].seq if chain in self._prunes else 0
            for named, (name, how) in waiting.items():
                if named.seq > pruned:
                    self._found.add(_not_the_named(named.seq, name, how), chain, named.seq)

    def _check_chain(self, name: str, stated: set[str]) -> None:
        chain = self._chains.get(name)
        closing = self._closings.get(name)
        if closing is None:
            self._found.add("its closing is missing", name)
        elif chain is None:
            self._found.add(f"all of its {closing.count} records are missing", name)
        else:
            _compare(self._found, chain, closing)
            if self._state is not None or closing.state is not None:
                self._origins.signed(name, closing.state, "its closing")
            if chain.torn is not None:
                text = "was put where records were pruned: it does not lead to what was signed"
                self._found.add(text, name, chain.torn)
        if name not in stated:
            self._found.add("is not among the chains of the closing line", name)

    def _check_witnessed(self) -> None:
        """Report the heads of witnesses that the export does not have, though its period covers them."""
        header = self._header or {}
        made, since, until = header.get("at"), header.get("from"), header.get("to")
        end = min((at for at in (made, until) if isinstance(at, int | float)), default=0.0)
        begin = since + _MAX_LATE_SECONDS if isinstance(since, int | float) else 0.0
        for (chain, seq), heads in sorted(self._known.items()):
            gone = self._prunes[chain].seq if chain in self._prunes else 0
            last = self._chains[chain].seq if chain in self._chains else 0
            # A head is signed just after its record was written, so the record is as old or a little older.
            for known in heads:
                if gone < seq and last < seq and begin <= known.at < end:
                    text = f"is missing, and {known.by} has it: the log was cut back before it was exported"
                    self._found.add(text, chain, seq)

    def report(self) -> Verification:
        if not self._closed:
            self._found.add("the export ends without a closing line that verifies: its end was cut off or replaced")
        self._check_witnessed()
        self._approvals.finish()
        self._calls.finish()
        self._origins.finish()
        heads = tuple(chain.head for _, chain in sorted(self._chains.items()))
        count = sum(chain.count for chain in self._chains.values())
        state = None if self._state is None else self._state.id
        return Verification(tuple(self._found.faults), tuple(self._found.notes), count, heads, state)


def _chain_of(text: str) -> str | None:
    try:
        body = canonical.loads(text)
    except canonical.NotCanonical:
        return None
    name = body.get("chain") if isinstance(body, dict) else None
    return name if isinstance(name, str) and is_chain_name(name) else None


def _bad_signature(value: Json, public: Ed25519PublicKey) -> str:
    statement = value["statement"]
    named = statement.get("key") if isinstance(statement, dict) else None
    if isinstance(named, str) and named != key_id(public):
        return f"signed with key {named[:64]}, not with the given key {key_id(public)}"
    return "the signature does not verify with the given key"


def _compare(found: Findings, chain: ChainVerifier, closing: Checkpoint) -> None:
    if chain.seq != closing.seq:
        found.add(f"ends at record {chain.seq}, its closing was signed at record {closing.seq}", closing.chain)
    elif chain.hash != closing.head:
        found.add("is not the last record that its closing was signed for", closing.chain, chain.seq)
    if chain.count != closing.count:
        found.add(f"has {chain.count} records here, its closing counts {closing.count}", closing.chain)


# ── The live log ──────────────────────────────────────────────────────────────────────────────────


def verify_live(
    records: Mapping[str, Iterable[Record]],
    checkpoints: Checkpoints,
    public_key: Ed25519PublicKey,
    find: FindRecord = lambda chain, seq: None,
    known: Iterable[KnownHead] = (),
) -> Verification:
    """Check every chain of the database against itself and against its checkpoint file.

    `find` returns a record that may have been written while the others were read. `known` are heads that a witness or
    the signer has.
    """
    found = Findings()
    state = identity_in(checkpoints, public_key)
    approvals = ApprovalVerifier(found, public_key, state)
    calls = CallVerifier(found)
    origins = OriginVerifier(found, state)
    pruned = prunes(checkpoints, public_key)
    heads: dict[str, Head] = {}
    count = 0
    named: NamedHeads = {}
    # Newest first: a chain's first record names the last records of older chains, which are then read after it.
    files = dict(_chain_files(checkpoints))
    for name in sorted(records.keys() | files.keys(), reverse=True):
        held = Slots(None, -1, 0)
        if name in files:
            held = read_slots(files[name], name, public_key)
        live = _LiveChain(name, (approvals, calls, origins), found, held.newest, named)
        if name in pruned:
            live.begins_after(pruned[name])
        for record in records.get(name, ()):
            live.feed(record)
        live.finish(held, has_file=name in files)
        if held.newest is not None:
            origins.signed(name, held.newest.state, "its checkpoint")
        if name in pruned and pruned[name].state is not None:
            origins.signed(name, pruned[name].state, "what was pruned of it")
        torn = live.verifier.torn
        if torn is not None and find(name, torn) is not None:
            found.add("was put where records were pruned: it does not lead to what was signed", name, torn)
        count += live.verifier.count
        if live.verifier.count:
            heads[name] = live.verifier.head
    pruned_to = {name: statement.seq for name, statement in pruned.items()}
    _check_named(found, named, pruned_to, heads, find)
    _check_known(found, known, pruned_to, find)
    for place in approvals.wanted():
        late = find(place.chain, place.seq)
        if late is not None:
            approvals.vouch(late.text, late.hash)
    approvals.finish()
    calls.finish()
    origins.finish()
    own = None if state is None else state.id
    return Verification(tuple(found.faults), tuple(found.notes), count, tuple(reversed(heads.values())), own)


def _check_known(found: Findings, known: Iterable[KnownHead], pruned: Mapping[str, int], find: FindRecord) -> None:
    """Report the known heads that the log does not have any more, unless they were pruned."""
    for each in known:
        head = each.head
        if head.seq <= pruned.get(head.chain, 0):
            continue
        record = find(head.chain, head.seq)
        if record is None:
            text = f"is missing, and {each.by} has it: the database and its checkpoints were cut back together"
            found.add(text, head.chain, head.seq)
        elif record.hash != head.hash:
            found.add(f"is not the record that {each.by} has: the log was written anew", head.chain, head.seq)


def _check_named(
    found: Findings, named: NamedHeads, pruned: Mapping[str, int], heads: Mapping[str, Head], find: FindRecord
) -> None:
    """Check the named heads of chains that were read before the record which names them, or that are younger."""
    for name, entries in named.items():
        gone = pruned.get(name, 0)
        for head, by, how in entries:
            if name in heads and (name <= by or head.seq <= gone):
                continue
            if find(name, head.seq) is not None:
                if not _exists(find, head):
                    found.add(_not_the_named(head.seq, by, how), name, head.seq)
            elif name not in heads:
                found.add(f"{how} record {head.seq} of chain {name}, which is missing", by)
            elif heads[name].seq < head.seq or (heads[name].seq == head.seq and heads[name].hash != head.hash):
                # Only the end of the chain is known here; the chain itself covers the records before it.
                found.add(_not_the_named(head.seq, by, how), name, head.seq)


def _period_note(since: Any, until: Any) -> str:
    bounds = [f"{word} {_moment(at)}" for word, at in (("from", since), ("up to", until)) if at is not None]
    return f"this export is a part of the log, as it says itself, signed: the records {' '.join(bounds)}."


def _moment(at: Any) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return f"{at}"[:40]


def _pruned_note(pruned: Pruned) -> str:
    when = _moment(pruned.at)
    return f"chain {pruned.chain}: records 1 to {pruned.seq} were pruned by {pruned.by} at {when}, signed."


def _unsigned_note(name: str, span: Any) -> str:
    first, last = (span.get("from"), span.get("to")) if isinstance(span, dict) else (None, None)
    return (
        f"chain {name}: records {first} to {last} had no checkpoint when Ringfence started; "
        "they were signed as they were found."
    )


class _LiveChain:
    """Checks one chain of the database against its checkpoint."""

    def __init__(
        self,
        name: str,
        across: tuple[ApprovalVerifier, CallVerifier, OriginVerifier],
        found: Findings,
        held: Checkpoint | None,
        named: NamedHeads,
    ) -> None:
        self.verifier = ChainVerifier(name, found)
        self.verifier.signed = 0 if held is None else held.seq
        self._name = name
        self._approvals, self._calls, self._origins = across
        self._found = found
        self._held = held
        self._named_elsewhere = named
        self._named = {head: (by, how) for head, by, how in named.get(name, ())}
        self._gone = 0
        self._checked_parts: set[str] = set()

    def begins_after(self, pruned: Pruned) -> None:
        """A signed statement says that its beginning was pruned. Records of that part that still exist must chain, and
        count no more."""
        signed = self.verifier.signed
        self.verifier = ChainVerifier(self._name, self._found, pruned=pruned.end)
        self.verifier.signed = signed
        self._gone = pruned.seq
        self._named = {named: by for named, by in self._named.items() if named.seq > pruned.seq}
        self._found.notes.append(_pruned_note(pruned))

    def feed(self, record: Record) -> None:
        body = self.verifier.feed(record.text, record.hash)
        if body is None:
            return
        pruned = record.seq <= self._gone and body.get("seq") == record.seq
        self._approvals.feed(body, record.hash, record.find, pruned=pruned)
        for field in misfiled(record, body):
            self._found.add(f"is filed under another {field} than its text has", self._name, record.seq)
        if pruned:
            if record.seq == self._gone:
                text = f"chain {self._name}: some of what was pruned still stands; the next prune removes it."
                self._found.notes.append(text)
            return
        self._calls.feed(body)
        self._origins.feed(body)
        for digest in shared_by(body):
            if digest not in self._checked_parts:
                self._checked_parts.add(digest)
                _find_part(record, digest, self._found)
        if self._held is not None and record.seq == self._held.seq and record.hash != self._held.head:
            self._found.add("is not the record that the checkpoint was signed for", self._name, record.seq)
        self._named.pop(Head(self._name, record.seq, record.hash), None)
        for named in named_by(body):
            self._named_elsewhere.setdefault(named.chain, []).append((named, self._name, _naming(body["kind"])))
        if body["kind"] == CLOSED and "unsigned" in body:
            self._found.notes.append(_unsigned_note(self._name, body["unsigned"]))

    def finish(self, held: Slots, *, has_file: bool) -> None:
        last = self.verifier.seq
        name = self._name
        if not has_file:
            self._found.add("its checkpoint file is missing", name)
        elif held.newest is None:
            if self.verifier.count or held.unreadable:  # a blank file alone: killed before the chain began
                self._found.add("no checkpoint in its file verifies with the given key", name)
        elif not self.verifier.count and held.newest.seq:
            self._found.add(f"is missing; its checkpoint stands at record {held.newest.seq}", name)
        elif last < held.newest.seq:
            cut = held.newest.seq - last
            text = f"ends at record {last}, its checkpoint stands at record {held.newest.seq}: {cut} cut from the end"
            self._found.add(text, name)
        elif last > held.newest.seq:
            past = f"records {held.newest.seq + 1} to {last}"
            text = f"chain {name}: {past} have no checkpoint yet (the chain is in use, or its process crashed)."
            self._found.notes.append(text)
        if held.newest is not None and held.unreadable:
            self._found.notes.append(f"chain {name}: one of two checkpoint slots is unreadable, as after a crash.")
        if self.verifier.count:
            for named, (by, how) in self._named.items():
                self._found.add(_not_the_named(named.seq, by, how), name, named.seq)
