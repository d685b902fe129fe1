"""Signs what is said of the log of one state, and always says of which."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import Checkpoint, Head, Pruned, Record, StateIdentity, seal_signed
from ringfence.audit.keys import Keys
from ringfence.core.model import Json
from ringfence.core.record import dataclass


@dataclass(frozen=True, slots=True)
class Signer:
    """The signing key, in the name of one state."""

    keys: Keys
    state: StateIdentity

    @property
    def public(self) -> Ed25519PublicKey:
        return self.keys.public

    def checkpoint(self, head: Head, at: float) -> bytes:
        """That a chain had this head."""
        checkpoint = Checkpoint(head.chain, head.seq, head.hash, head.seq, at, state=self.state.id)
        return checkpoint.sign(self.keys.private)

    def pruned(self, end: Head, count: int, at: float, before: float, by: str) -> bytes:
        """That the records of a chain up to this one were removed on purpose."""
        return Pruned(end.chain, end.seq, end.hash, count, at, before, by, self.state.id).sign(self.keys.private)

    def record(self, head: Head, at: float, about: tuple[str, str | None], body: Json) -> Record:
        """The record that follows `head`, which is proof by itself. Raises ValueError."""
        return seal_signed(self.keys.private, head, at, about, {**body, "state": self.state.id})
