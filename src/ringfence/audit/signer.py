"""Signs what is said of the log of one state, and always says of which."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import Checkpoint, Head, Pruned, Record, Since, StateIdentity, seal_proved
from ringfence.core.model import Json
from ringfence.core.record import dataclass


class SigningKey(Protocol):
    """The signing key, or the process that has it. All of this raises StoreError where that refuses, or has ended and
    cannot be started again."""

    @property
    def folder(self) -> Path: ...

    @property
    def public(self) -> Ed25519PublicKey: ...

    @property
    def id(self) -> str: ...

    def sign(self, message: bytes, since: Since | None = None) -> bytes:
        """A statement in canonical form, signed. A checkpoint needs the records since the last one."""

    def sign_record(self, text: bytes) -> str:
        """The signature of a record that is proof by itself."""

    def adopt(self, state: StateIdentity, identity: bytes, checkpoints: Iterable[bytes]) -> None:
        """Know a state from now on, with what was signed of its chains so far, if it is not known yet."""

    def last(self, state: str, chain: str) -> Head | None:
        """The last head of a chain that was signed for; None where nothing beside the log knows it."""

    def show(self, chain: str, texts: Iterable[str], checkpoint: bytes | None = None) -> None:
        """What an export has of a chain, up to its checkpoint, before it is signed."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Signer:
    """The signing key, in the name of one state."""

    keys: SigningKey
    state: StateIdentity

    @property
    def public(self) -> Ed25519PublicKey:
        return self.keys.public

    def checkpoint(self, head: Head, at: float, since: Since | None = None) -> bytes:
        """That a chain had this head."""
        checkpoint = Checkpoint(head.chain, head.seq, head.hash, head.seq, at, state=self.state.id)
        return self.keys.sign(checkpoint.message(), since)

    def last(self, chain: str) -> Head | None:
        """The last head of a chain, where something beside the log knows it."""
        return self.keys.last(self.state.id, chain)

    def pruned(self, end: Head, count: int, at: float, before: float, by: str) -> bytes:
        """That the records of a chain up to this one were removed on purpose."""
        pruned = Pruned(end.chain, end.seq, end.hash, count, at, before, by, self.state.id)
        return self.keys.sign(pruned.message(self.keys.id))

    def record(self, head: Head, at: float, about: tuple[str, str | None], body: Json) -> Record:
        """The record that follows `head`, which is proof by itself. Raises ValueError."""
        return seal_proved(self.keys.sign_record, head, at, about, {**body, "state": self.state.id})
