"""The nouns of brokered secrets, which a box uses without holding them. Plain data.

The box holds a placeholder for each. The keeper, which holds the boxes of sessions, has no secrets: before a request of
such a box leaves, the keeper asks the process that has them. That one decides; its reply is for this one request, and
is kept nowhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import field

from ringfence.core.record import dataclass

_PLACEHOLDER = "ringfence_"


def new_placeholder() -> str:
    """A new placeholder for a secret, for one box only. Neither JSON nor URLs escape any character of it."""
    return _PLACEHOLDER + secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class OutboundRequest:
    """A request of a box that the rules allow, before it leaves."""

    scheme: str
    host: str
    port: int
    method: str
    path: str
    """With its query, as it is sent."""
    headers: tuple[tuple[str, str], ...]
    rule: str


@dataclass(frozen=True, slots=True)
class BrokeredSecret:
    """One secret that a box may use through the broker."""

    name: str
    variable: str
    """The variable in which the box finds its placeholder."""


@dataclass(frozen=True, slots=True)
class SessionSecrets:
    """The secrets that a session may use, and by which call."""

    brokered: tuple[BrokeredSecret, ...]
    capability: str | None = None
    call_id: str | None = None
    """The call that opened the session."""


@dataclass(frozen=True, slots=True)
class SubstitutionRequest:
    """Asks what changes in one request of a session's box."""

    number: int
    """0: nothing is asked for; the keeper says that it listens."""
    session: str = ""
    tenant: str = ""
    agent: str = ""
    secrets: SessionSecrets = SessionSecrets(())
    placeholders: tuple[str, ...] = ()
    """In the order of the secrets."""
    asked: OutboundRequest | None = None
    caught: str | None = None
    """The placeholder that stood in the body: the request was refused, which is to be recorded."""


@dataclass(frozen=True, slots=True)
class SubstitutionReply:
    """What changes in that one request."""

    strip: tuple[str, ...] = ()
    """Headers that are taken off, in lower case."""
    put: Mapping[str, str] = field(default_factory=dict, repr=False)
    known: tuple[tuple[str, str], ...] | None = field(default=None, repr=False)
    """Names and values that the answer is searched for; None: it is not."""


@dataclass(frozen=True, slots=True)
class SubstitutionDenial:
    """Why the request may not go."""

    reason_code: str
    message: str
    failed: bool = False
    """It may go, but what it needs is not there."""
