"""A signed word that the beginning of a chain was removed on purpose: which chain, up to where, by whom, and when.

The last record that went is named by its hash, which the first that stayed carries as `prev`. So a chain that begins
after a signed prune verifies as one that begins at its first record does, and any other cut is still found.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfence import canonical
from ringfence.audit.chain import Head, is_chain_name, key_id, sign_statement, signed_by
from ringfence.model import Json
from ringfence.plain import plain

TYPE = "pruned"
MAX_NAME = 100
"""Characters of the name of whoever pruned: the statement has to fit its place."""


@plain
class Pruned:
    """The records of `chain` up to `seq`, the hash of the last of which is `head`, are gone."""

    chain: str
    seq: int
    head: str
    count: int
    """How many this prune removed."""
    at: float
    before: float
    """It was asked for what is older than this."""
    by: str

    @property
    def end(self) -> Head:
        return Head(self.chain, self.seq, self.head)

    def sign(self, private: Ed25519PrivateKey) -> bytes:
        place = {"chain": self.chain, "seq": self.seq, "head": self.head, "count": self.count}
        who = {"at": self.at, "before": self.before, "by": self.by, "key": key_id(private.public_key())}
        return sign_statement(private, {"type": TYPE, "v": 1, **place, **who})

    @classmethod
    def verify(cls, public: Ed25519PublicKey, line: bytes | str) -> Pruned | None:
        """The statement in `line` if it is one and `public` signed it, else None."""
        try:
            return cls.of(signed_by(public, canonical.loads(line)))
        except canonical.NotCanonical:
            return None

    @classmethod
    def of(cls, statement: Json | None) -> Pruned | None:
        """A statement that was already found to be signed."""
        if statement is None or statement.get("type") != TYPE:
            return None
        shape = {"chain": str, "seq": int, "head": str, "count": int, "at": int | float, "before": int | float}
        if not all(isinstance(statement.get(name), kind) for name, kind in {**shape, "by": str}.items()):
            return None
        if not is_chain_name(statement["chain"]) or statement["seq"] < 1:
            return None
        return cls(**{name: statement[name] for name in (*shape, "by")})
