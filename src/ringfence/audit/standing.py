"""What the log proves of an approval that stands: who made it, for which calls, how often it was used, and whether it
was revoked.

Its making is a record with a signature of its own, found by its id; a table only says where to look. How often it was
used is counted in the records, too, so that no row that is set back gives anybody another use.
"""

from __future__ import annotations

from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.approvals import STANDING_MADE, STANDING_REVOKED, NotProven, read_entry
from ringfence.audit.chain import Head, Record, has_signature
from ringfence.core.model import Json
from ringfence.core.record import plain

MADE = STANDING_MADE
REVOKED = STANDING_REVOKED
USED = "standing_used"


@plain
class ProvenStanding:
    """What the log proves of one."""

    body: Json
    """The record of its making."""
    place: Head
    used: int
    revoked: bool

    def good(self, now: float, boot: str | None, uptime: float) -> bool:
        """Whether it may be used once more. Its end is judged by the time of day and by the time that has passed."""
        times, expires_at, until = self.body.get("times"), self.body.get("expires_at"), self.body.get("until")
        if not isinstance(times, int) or not isinstance(expires_at, int | float):
            return False
        passed = until.get("uptime") if isinstance(until, dict) and until.get("boot") == boot else None
        over = boot is not None and isinstance(passed, int | float) and uptime >= passed
        return not self.revoked and self.used < times and now < expires_at and not over


def prove(identity: str, records: Iterable[Record], public: Ed25519PublicKey, state: str) -> ProvenStanding:
    """What these records prove of it in the state of this id. Raises NotProven where they do not prove its making."""
    found = [entry for record in records if (entry := read_entry(record)) is not None]
    ours = [(body, place) for body, place in found if body.get("standing") == identity]
    made = [
        (body, place)
        for body, place in ours
        if body["kind"] == MADE and body.get("state") == state and has_signature(public, body)
    ]
    if len(made) != 1:
        raise NotProven("the signed log does not have its making")
    (body, place), *_ = made
    used = sum(1 for body, _ in ours if body["kind"] == USED)
    return ProvenStanding(body, place, used, any(body["kind"] == REVOKED for body, _ in ours))
