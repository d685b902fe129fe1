"""The process that has the signing key, and signs for a log only what goes on from where that log last was.

It keeps the last head of every chain itself, in a folder that only its user can reach. So whoever has the gateway, its
database and its checkpoints can add to the log, and cannot have another past of it signed: no earlier head again, no
other record in the place of one that was signed for. It answers one process, on its pipes, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringfence.audit import standing
from ringfence.audit.approvals import ANSWERED, ASKED
from ringfence.audit.chain import (
    GENESIS,
    NAMED,
    OPENED,
    ChainVerifier,
    Checkpoint,
    Findings,
    Head,
    StateIdentity,
    is_chain_name,
    sign_message,
    sign_record,
    sign_statement,
)
from ringfence.audit.keys import load_or_create
from ringfence.audit.signing_frames import blobs, write_answer
from ringfence.audit.tokens import CREATED, REVOKED
from ringfence.core import canonical, system
from ringfence.core.errors import StoreError
from ringfence.core.model import Json

HEADS = "heads"
PROVEN_KINDS = frozenset({ASKED, ANSWERED, CREATED, REVOKED, NAMED, standing.MADE})
"""Records that are proof by themselves."""
_IDENTITY = ".identity"
_SLOT = 160
_FEW_FILES = 64
_NOT_DUMPABLE = 4
_CHECKPOINT = {"at", "chain", "count", "head", "seq", "state", "type", "v"}


class NotSigned(Exception):
    """This is not signed, and why."""


class Ledger:
    """The last head of each chain of each state, as this key signed it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / HEADS
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._open: dict[tuple[str, str], int] = {}

    def identity(self, state: str) -> bytes | None:
        """The signed word on which state it is; None for one that is not known here."""
        try:
            return (self._folder / _named(state) / _IDENTITY).read_bytes()
        except FileNotFoundError:
            return None

    def adopt(self, state: str, identity: bytes, heads: list[Head]) -> None:
        """Know a state from now on, whose chains had these heads. It is known whole, or not at all."""
        made = self._folder / f".{_named(state)}.{os.getpid()}"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(mode=0o700)
        try:
            _write(made / _IDENTITY, identity)
            for head in heads:
                _write(made / _named(head.chain), _slot(head, closed=False))
            system.sync_folder(made)
            with contextlib.suppress(OSError):  # another process did it meanwhile
                made.rename(self._folder / state)
            system.sync_folder(self._folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def heads(self, state: str) -> Iterator[Head]:
        """All that is known of a state."""
        place = self._folder / _named(state)
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if is_chain_name(path.name) and (found := _newest(path.read_bytes(), path.name)) is not None:
                yield found[0]

    @contextlib.contextmanager
    def held(self, state: str, chain: str) -> Iterator[tuple[tuple[Head, bool] | None, Callable[[Head, bool], None]]]:
        """The last head of a chain and whether it was closed there, and what puts down another; no other process does
        so meanwhile."""
        descriptor = self._opened(state, chain)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            data = os.pread(descriptor, 2 * _SLOT, 0)
            found = _newest(data, chain)
            free = 0 if found is None else 1 - found[2]

            def put(head: Head, closed: bool) -> None:
                # The other slot stays as it is: whatever ends this process here, one of them is whole.
                slot = _slot(head, closed=closed)
                if os.pwrite(descriptor, slot, free * _SLOT) != len(slot):
                    raise NotSigned("the signer could not write down what it signs: its disk is full")

            yield (None if found is None else found[:2]), put
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _opened(self, state: str, chain: str) -> int:
        place = (_named(state), _named(chain))
        if (known := self._open.get(place)) is not None:
            return known
        if not (self._folder / state).is_dir():
            raise NotSigned(f"the signer does not know state {state}")
        if len(self._open) >= _FEW_FILES:
            for each in self._open.values():
                os.close(each)
            self._open.clear()
        flags = os.O_RDWR | os.O_CREAT | system.PRIVATE
        descriptor = self._open[place] = os.open(self._folder / state / chain, flags, 0o600)
        return descriptor


def _named(name: object) -> str:
    if not is_chain_name(name):
        raise NotSigned("that is not the name of a chain or of a state")
    return str(name)


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.PRIVATE, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _slot(head: Head, *, closed: bool) -> bytes:
    text = f"{head.seq} {head.hash} {int(closed)}"
    return f"{text} {_sum(text)}".encode().ljust(_SLOT - 1) + b"\n"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _newest(data: bytes, chain: str) -> tuple[Head, bool, int] | None:
    """The last head in a file, whether the chain was closed, and the slot. A slot that was torn is as none."""
    newest = None
    for number in range(2):
        text, _, total = data[number * _SLOT : (number + 1) * _SLOT].decode("ascii", "replace").strip().rpartition(" ")
        if not text or _sum(text) != total:
            continue
        seq, digest, closed = text.split(" ")
        if newest is None or int(seq) >= newest[0].seq:
            newest = (Head(chain, int(seq), digest), closed == "1", number)
    return newest


class _Walk:
    """A chain as an export has it, followed record by record."""

    def __init__(self, chain: str) -> None:
        self.found = Findings()
        self.verifier = ChainVerifier(chain, self.found, partial=True)
        self.hashes: dict[int, str] = {}
        self.proved: Checkpoint | None = None


class SigningProcess:
    """Answers what is asked for. Everything that comes in may be a forger's."""

    def __init__(self, private: Ed25519PrivateKey, ledger: Ledger) -> None:
        self._private = private
        self._ledger = ledger
        self._walks: dict[str, _Walk] = {}
        self._closings: list[Checkpoint] = []
        self._verbs: dict[bytes, Callable[[bytes, Iterator[bytes]], bytes]] = {
            b"public": lambda _message, _texts: private.public_key().public_bytes_raw(),
            b"adopt": self._adopt,
            b"head": self._head,
            b"heads": self._heads,
            b"sign": self._sign,
            b"record": self._record,
            b"walk": self._walk,
            b"reach": self._reach,
        }

    def answer(self, verb: bytes, message: bytes, texts: Iterator[bytes]) -> bytes:
        """Raises NotSigned."""
        if verb not in self._verbs:
            raise NotSigned("the signer does not do that")
        return self._verbs[verb](message, texts)

    # ── What is known ──

    def _adopt(self, message: bytes, checkpoints: Iterator[bytes]) -> bytes:
        """A state whose chains this key has signed for so far without a signer, or that is new."""
        public = self._private.public_key()
        identity = StateIdentity.verify(public, message)
        if identity is None:
            raise NotSigned("no word that this key signed says which state that is")
        if self._ledger.identity(identity.id) is not None:
            return b"known"
        heads: dict[str, Head] = {}
        for line in checkpoints:
            found = Checkpoint.verify(public, line)
            if found is None or found.period is not None or not identity.may_have_signed(found.state):
                raise NotSigned("a checkpoint of that state was not signed with this key")
            if found.chain not in heads or heads[found.chain].seq <= found.seq:
                heads[_named(found.chain)] = Head(found.chain, found.seq, found.head)
        self._ledger.adopt(identity.id, message, list(heads.values()))
        return b"adopted"

    def _head(self, message: bytes, _texts: Iterator[bytes]) -> bytes:
        asked = _read(message)
        with self._ledger.held(_named(asked.get("state")), _named(asked.get("chain"))) as (known, _put):
            head = Head("") if known is None else known[0]
        return canonical.dumps({"known": known is not None, "seq": head.seq, "hash": head.hash})

    def _heads(self, message: bytes, _texts: Iterator[bytes]) -> bytes:
        heads = self._ledger.heads(_named(_read(message).get("state")))
        return canonical.dumps([{"chain": head.chain, "seq": head.seq, "hash": head.hash} for head in heads])

    # ── What is signed ──

    def _sign(self, message: bytes, texts: Iterator[bytes]) -> bytes:
        statement = _read(message)
        kind = statement.get("type")
        if kind == "checkpoint":
            self._extend(statement, texts)
        elif kind == "pruned":
            self._check_pruned(statement)
        elif kind == "state":
            # A state that is known has its word, and gets no other one.
            return self._ledger.identity(_named(statement.get("state"))) or sign_statement(self._private, statement)
        elif kind == "closing":
            self._check_closing(statement)
        elif kind == "export":
            self._check_export(statement)
        else:
            raise NotSigned("the signer does not sign statements of that kind")
        return sign_message(self._private, message)

    def _extend(self, statement: Json, texts: Iterator[bytes]) -> None:
        """Only a head that is reached from the last one, by every record between them."""
        wanted = Checkpoint.of(statement)
        if wanted is None or statement.keys() != _CHECKPOINT or statement["v"] != 3 or wanted.count != wanted.seq:
            raise NotSigned("that is not a checkpoint as they are signed")
        state, chain = _named(wanted.state), _named(wanted.chain)
        with self._ledger.held(state, chain) as (known, put):
            last, closed = known or (Head(chain), False)
            found = Findings()
            verifier = ChainVerifier(chain, found)
            verifier.seq, verifier.hash, verifier.closed = last.seq, last.hash, closed
            verifier.first = last.seq or None
            for text in texts:
                _feed(verifier, found, text, state)
            if (verifier.seq, verifier.hash) != (wanted.seq, wanted.head):
                raise NotSigned(
                    f"the signer's last head of chain {chain} is record {last.seq}, and what was given leads to record"
                    f" {verifier.seq}, not to the record {wanted.seq} that is to be signed for"
                )
            if known is None or (last.seq, last.hash) != (wanted.seq, wanted.head):
                put(verifier.head if wanted.seq else Head(chain, 0, GENESIS), verifier.closed)

    def _check_pruned(self, statement: Json) -> None:
        state, chain, seq = _named(statement.get("state")), _named(statement.get("chain")), statement.get("seq")
        with self._ledger.held(state, chain) as (known, _put):
            # Of what stays, the first record names the last that went; so a wrong hash here proves nothing.
            if known is None or not isinstance(seq, int) or not 0 < seq < known[0].seq:
                raise NotSigned(f"chain {chain} has no record {seq}, and one after it, that were signed for")

    def _record(self, message: bytes, _texts: Iterator[bytes]) -> bytes:
        body = _read(message)
        state, chain, seq = _named(body.get("state")), _named(body.get("chain")), body.get("seq")
        if body.get("kind") not in PROVEN_KINDS:
            raise NotSigned("a record of that kind has no signature of its own")
        with self._ledger.held(state, chain) as (known, _put):
            if known is None or not isinstance(seq, int) or seq <= known[0].seq:
                raise NotSigned(f"record {seq} of chain {chain} does not come after what was signed for")
        return sign_record(self._private, message).encode()

    # ── Exports ──

    def _walk(self, message: bytes, texts: Iterator[bytes]) -> bytes:
        chain = _named(_read(message).get("chain"))
        walk = self._walks.setdefault(chain, _Walk(chain))
        for text in texts:
            _feed(walk.verifier, walk.found, text, None)
            walk.hashes[walk.verifier.seq] = walk.verifier.hash
        return b""

    def _reach(self, message: bytes, _texts: Iterator[bytes]) -> bytes:
        """The checkpoint that the walk on its chain has to have passed."""
        found = Checkpoint.verify(self._private.public_key(), message)
        if found is None or found.period is not None:
            raise NotSigned("that is no checkpoint that this key signed")
        self._walks.setdefault(found.chain, _Walk(found.chain)).proved = found
        return b""

    def _check_closing(self, statement: Json) -> None:
        closing = Checkpoint.of(statement)
        walk = None if closing is None else self._walks.get(closing.chain)
        if closing is None or walk is None or walk.proved is None:
            raise NotSigned("nothing was shown of what that export has")
        proved = walk.proved
        good = walk.hashes.get(closing.seq) == closing.head and walk.hashes.get(proved.seq) == proved.head
        identity = StateIdentity.verify(self._private.public_key(), self._ledger.identity(_named(closing.state)) or b"")
        if not good or proved.seq < closing.seq or identity is None or not identity.may_have_signed(proved.state):
            raise NotSigned(f"the records of chain {closing.chain} do not lead to a head that was signed for")
        self._closings.append(closing)

    def _check_export(self, statement: Json) -> None:
        mine = [
            each for each in self._closings if (each.at, each.state) == (statement.get("at"), statement.get("state"))
        ]
        closed = [{"chain": each.chain, "seq": each.seq, "head": each.head, "count": each.count} for each in mine]
        self._walks, self._closings = {}, []
        if statement.get("chains") != closed:
            raise NotSigned("the export has other chains than those whose ends were signed for it")


def _read(message: bytes) -> Json:
    try:
        value = canonical.loads(message)
    except canonical.NotCanonical as exc:
        raise NotSigned(f"that cannot be read: {exc}") from None
    if not isinstance(value, dict) or canonical.dumps(value) != message:
        raise NotSigned("that is not in the form in which it is signed")
    return value


def _feed(verifier: ChainVerifier, found: Findings, text: bytes, state: str | None) -> None:
    try:
        body: Any = verifier.feed(text.decode(), hashlib.sha256(text).hexdigest())
    except UnicodeDecodeError:
        raise NotSigned("a record is not text") from None
    if found.faults:
        raise NotSigned(str(found.faults[0]))
    if state is not None and body["kind"] == OPENED and body.get("state") != state:
        raise NotSigned(f"record {body['seq']} of chain {body['chain']} was opened in another state")


# ── The process ───────────────────────────────────────────────────────────────────────────────────


def main(user: int) -> None:
    """Answer on standard input and output until they end. `user` is whom to become; -1: stay who we are."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but answers goes to where they are read
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that it answers, not before
    # What is loaded later could be where this user may not read.
    importlib.import_module("cryptography.hazmat.primitives.serialization")
    try:
        _become(user)
        keys = load_or_create(Path())
        process = SigningProcess(keys.private, Ledger(Path()))
    except (OSError, StoreError) as exc:
        write_answer(answers, f"the signer cannot start: {exc}".encode(), refused=True)
        return
    write_answer(answers, b"ready")
    _serve(process, requests, answers)


def _become(user: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if sys.platform == "linux":
        # No other process of this user may look into ours.
        ctypes.CDLL(None).prctl(_NOT_DUMPABLE, 0, 0, 0, 0)


def _serve(process: SigningProcess, requests: BinaryIO, answers: BinaryIO) -> None:
    while True:
        parts = blobs(requests)
        try:
            verb, message = next(parts), next(parts)
        except (StopIteration, EOFError):
            return
        try:
            answer, refused = process.answer(verb, message, parts), False
        except (NotSigned, OSError, ValueError, KeyError, TypeError) as exc:
            answer, refused = f"{exc}".encode(), True
        except EOFError:
            return  # half of a request: whoever made it is gone, and nothing of it counts
        for _rest in parts:
            pass
        write_answer(answers, answer, refused=refused)
