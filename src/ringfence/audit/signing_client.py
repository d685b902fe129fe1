"""The signing key in a process of its own: how it is set up, and how others have it sign.

What a gateway has in its memory then is no key, and what it can have signed is the next part of its log alone
(`signing_process`). The process is a child on two pipes, started when something is to be signed, and gone with whoever
started it. Killed, it is started again, and what was asked of it is asked once more.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain as joined
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import GENESIS, Head, Since, StateIdentity, key_id
from ringfence.audit.keys import PRIVATE, PUBLIC, SIGNER, check_folder, load_or_create, published
from ringfence.audit.signing_frames import read_answer, write_request
from ringfence.core import canonical, system
from ringfence.core.errors import StoreError

SIGNER_USER = 2_000_200_000
"""The user of a signer that root starts, unless another is named. No account and no box has this number."""
_SOURCE = str(Path(__file__).parents[2])
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from ringfence.audit.signing_process import main; main(int(sys.argv[2]))"
)
_AT_ONCE = 200
"""Records of an export in one request."""


def give_to_signer(folder: Path, user: str | None = None) -> SignerProcess:
    """Give the key to a signer, once and for all programs that use this folder. As root, that is another user's.

    Raises StoreError.
    """
    if sys.platform == "win32":
        raise StoreError("audit.signer: process is not built for Windows; write audit: {signer: inline}")
    place = folder / SIGNER
    wanted = _user(user)
    try:
        if not place.exists():
            keys = load_or_create(folder)
            made = folder / f".{SIGNER}.{secrets.token_hex(6)}"
            made.mkdir(mode=0o700)
            os.link(keys.folder / PRIVATE, made / PRIVATE)
            for path in (made / PRIVATE, made):
                os.chown(path, wanted, wanted if wanted != os.geteuid() else -1)
            system.sync_folder(made)
            made.rename(place)
        owner = place.stat().st_uid
        if user is not None and owner != wanted:
            raise StoreError(f"{place} belongs to uid {owner}, and audit.signer_user is {user} (uid {wanted})")
        if (folder / PRIVATE).exists() and os.path.samefile(folder / PRIVATE, place / PRIVATE):
            (folder / PRIVATE).unlink()  # only now: a crash before leaves both names
        system.sync_folder(folder)
    except OSError as exc:
        raise StoreError(f"the signing key in {folder} cannot be given to a signer: {exc.strerror or exc}") from exc
    return SignerProcess(folder)


def _user(name: str | None) -> int:
    found = system.user_id(name) if name is not None else SIGNER_USER if os.geteuid() == 0 else os.geteuid()
    if found is None:
        raise StoreError(f"audit.signer_user: there is no account {name}")
    if os.geteuid() not in (0, found):
        raise StoreError(f"audit.signer_user: only root can start the signer as {name}; leave it out, or start as root")
    return found


class SignerProcess:
    """Asks the signer of a folder of keys."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError."""
        self.folder = folder.resolve()
        self._place = self.folder / SIGNER
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._heads: dict[tuple[str, str], int] = {}
        """Where each chain was when it was last signed for."""
        self._public: Ed25519PublicKey | None = None
        try:
            check_folder(self.folder)
            self._owner = self._place.stat().st_uid
        except OSError as exc:
            raise StoreError(f"the signer's folder {self._place} cannot be used: {exc.strerror or exc}") from exc
        if self._owner != os.geteuid() != 0:
            raise StoreError(
                f"the signing key belongs to a signer of another user (uid {self._owner}): only root can start it."
                f" Run this as root, or where {PUBLIC} is enough, with --public-key {self.folder / PUBLIC}"
            )

    @property
    def public(self) -> Ed25519PublicKey:
        if self._public is None:
            self._public = published(self.folder)
        return self._public

    @property
    def id(self) -> str:
        return key_id(self.public)

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def sign(self, message: bytes, since: Since | None = None) -> bytes:
        if since is None:
            return self._ask(b"sign", message)
        read = canonical.loads(message)
        place = (read["state"], read["chain"])
        if place not in self._heads:
            head = self.last(*place)
            self._heads[place] = 0 if head is None else head.seq
        try:
            signed = self._ask(b"sign", message, since, self._heads[place])
        except StoreError:
            del self._heads[place]
            raise
        self._heads[place] = read["seq"]
        return signed

    def sign_record(self, text: bytes) -> str:
        return self._ask(b"record", text).decode()

    def adopt(self, state: StateIdentity, identity: bytes, checkpoints: Iterable[bytes]) -> None:
        lines = list(checkpoints)
        self._ask(b"adopt", identity, lambda _seq: (line.decode() for line in lines))

    def last(self, state: str, chain: str) -> Head | None:
        found = canonical.loads(self._ask(b"head", canonical.dumps({"state": state, "chain": chain})))
        return Head(chain, found["seq"], found["hash"] or GENESIS) if found["known"] else None

    def heads(self, state: str) -> Mapping[str, Head]:
        """The last head of every chain of a state."""
        found = canonical.loads(self._ask(b"heads", canonical.dumps({"state": state})))
        return {each["chain"]: Head(each["chain"], each["seq"], each["hash"]) for each in found}

    def show(self, chain: str, texts: Iterable[str], checkpoint: bytes | None = None) -> None:
        named = canonical.dumps({"chain": chain})
        given = [text.encode() for text in texts]
        for start in range(0, len(given), _AT_ONCE):
            part = given[start : start + _AT_ONCE]
            self._ask(b"walk", named, lambda _seq, part=part: (text.decode() for text in part))  # type: ignore[misc]
        if checkpoint is not None:
            self._ask(b"reach", checkpoint)

    def close(self) -> None:
        """End the process. The next thing to be signed starts another."""
        with self._turn:
            self._end()

    # ── The process ──

    def _ask(self, verb: bytes, message: bytes, since: Since | None = None, seq: int = 0) -> bytes:
        with self._turn:
            for last in (False, True):
                begun = self._process is None
                try:
                    return self._exchange(verb, message, () if since is None else since(seq))
                except (OSError, EOFError) as exc:
                    code = self._end()
                    if last or begun:
                        raise StoreError(f"the signer has ended (exit code {code}), so nothing was signed") from exc
        raise AssertionError

    def _exchange(self, verb: bytes, message: bytes, texts: Iterable[str]) -> bytes:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        write_request(process.stdin, joined((verb, message), _encoded(texts)))
        answer, refused = read_answer(process.stdout)
        if refused:
            raise StoreError(f"the signer refuses: {answer.decode('utf-8', 'replace')}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        """As root, it becomes its user once it has loaded what that may not be able to read."""
        user = self._owner if self._owner != os.geteuid() else -1
        process = self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, _SOURCE, str(user)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._place,
            env={},
            start_new_session=True,
        )
        assert process.stdout is not None
        answer, refused = read_answer(process.stdout)
        if refused:
            self._end()
            raise StoreError(answer.decode("utf-8", "replace"))
        return process

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass  # what it has not read it will not read
        return process.wait()


def _encoded(texts: Iterable[str]) -> Iterator[bytes]:
    return (text.encode() for text in texts)
