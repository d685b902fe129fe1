"""What the pool knows of one connection, of one on its way, and of a server's failures."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from ringfence.errors import Unavailable
from ringfence.model import Principal
from ringfence.upstream.connection import Connection

MAX_PER_SERVER = 32
_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

Key = tuple[str, str, str]
"""Server, principal, and the client where it can be asked something."""


@dataclass(slots=True)
class Held:
    """A connection and what the pool knows of it."""

    key: Key
    principal: Principal
    connection: Connection
    scope: anyio.CancelScope
    users: int = 0
    last_used: float = 0.0
    closed: bool = False
    subscriptions: set[str] = field(default_factory=set)
    listener: anyio.CancelScope | None = None
    stale: bool = False
    """The server said that its lists changed, and they were not read since."""
    rereading: bool = False
    reread_at: float = float("-inf")


@dataclass(slots=True)
class Health:
    """How often in a row a server failed to start, and when to try next."""

    failures: int = 0
    not_before: float = 0.0
    problem: str = ""
    version: str | None = None

    def punish(self, problem: str) -> None:
        self.failures += 1
        pause = _BACKOFF_SECONDS[min(self.failures, len(_BACKOFF_SECONDS)) - 1]
        self.problem, self.not_before = problem, anyio.current_time() + pause


@dataclass(slots=True)
class Opening:
    """A connection on its way; whoever wants it waits, as long as they like, and the start goes on without them."""

    done: anyio.Event = field(default_factory=anyio.Event)
    held: Held | None = None
    problem: Unavailable | None = None
