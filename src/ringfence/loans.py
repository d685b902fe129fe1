"""The nouns of secrets that a box uses without holding them. Plain data.

A box that stays is kept by a process that has no secrets. What its box is about to send goes, as a wish, to a process
that has them and decides; what comes back is for that one request, and is kept nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from secrets import token_hex

_PLACEHOLDER = "ringfence_"


def placeholder() -> str:
    """What stands for a secret in one box, and nowhere else. Neither JSON nor URLs escape anything in it."""
    return _PLACEHOLDER + token_hex(16)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that the rules allow, before it leaves."""

    scheme: str
    host: str
    port: int
    method: str
    path: str
    """With its query, as it is sent."""
    headers: tuple[tuple[str, str], ...]
    rule: str


@dataclass(frozen=True, slots=True)
class Loan:
    """One secret that a box may use."""

    name: str
    variable: str
    """In which the box finds what stands for it."""


@dataclass(frozen=True, slots=True)
class Lending:
    """All secrets that a session may use, and by whose leave."""

    loans: tuple[Loan, ...]
    capability: str | None = None
    """The one that the session was opened by."""
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A request of a session's box that may be for a secret."""

    number: int
    """0: nothing is wished for; whoever lends is known from now on."""
    session: str = ""
    tenant: str = ""
    agent: str = ""
    lending: Lending = Lending(())
    placeholders: tuple[str, ...] = ()
    """In the order of the loans."""
    asked: Asked | None = None
    caught: str | None = None
    """The secret whose placeholder stood in the body: it was refused, which is to be recorded."""


@dataclass(frozen=True, slots=True)
class Lent:
    """What changes in that one request."""

    strip: tuple[str, ...] = ()
    """Headers that are taken off, in lower case."""
    put: Mapping[str, str] = field(default_factory=dict, repr=False)
    known: tuple[tuple[str, str], ...] | None = field(default=None, repr=False)
    """Names and values that the answer is searched for; None: it is not."""


@dataclass(frozen=True, slots=True)
class Denial:
    """Why it may not go."""

    reason_code: str
    message: str
    failed: bool = False
    """It may, and what it needs is not there."""
