"""What every way of reaching a server offers, and the errors it may end with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

from ringfence.core import canonical
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.upstream.pacing import MAX_TOLD

MODERN = "2026-07-28"
"""The stateless revision: no handshake, an envelope in every request."""

HANDSHAKE = "2025-11-25"
"""The newest revision that begins with `initialize`."""

HANDSHAKES = ("2024-11-05", "2025-03-26", "2025-06-18", HANDSHAKE)

MAX_MESSAGE_BYTES = 8_000_000
"""Longest single message taken from a server; a longer one fails the call it answers and nothing else."""

MAX_MESSAGE_VALUES = 200_000
"""Most values in such a message: what it costs to read goes by these, not by its bytes."""

REMOTE: Json = {"backend": "remote", "level": "none", "protections": {}}
"""The `isolation` fact of what runs elsewhere."""

_UNUSABLE = -32001
"""What a client is told as the code of an answer that cannot be used."""


def read_message(data: bytes) -> Any:
    """The JSON that a server sent. Raises NotCanonical, also where reading it would hold up everybody else."""
    if canonical.has_more_values(data, MAX_MESSAGE_VALUES):
        raise canonical.TooMuch(f"more than {MAX_MESSAGE_VALUES} values")
    return canonical.loads(data)


class RpcError(RingfenceError):
    """The server answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class AnswerUnusable(RpcError):
    """An answer came and cannot be used: too long, not strict JSON. Known by its type: a server sends any code."""

    def __init__(self, message: str) -> None:
        super().__init__(_UNUSABLE, message)


@dataclass(slots=True)
class InFlight:
    """One request of ours in flight, and whom the server reaches meanwhile."""

    ask: Callable[[str, Json], Awaitable[Json]]
    """The server asks something (elicitation, sampling, roots) in the course of this request."""
    tell: Callable[[str, Json], Awaitable[None]]
    """The server tells something (progress, a log line) in the course of this request."""
    client: object = None
    """Whose request it is; two exchanges of one client may be confused without harm."""
    headers: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of this request, whatever the protocol adds."""
    telling: int = 0
    """Notifications that were not taken yet."""

    async def hear(self, method: str, params: Json) -> None:
        """Tell, unless the client takes nothing: what a server says must not pile up for a client that is slow."""
        if self.telling >= MAX_TOLD:
            return
        self.telling += 1
        try:
            await self.tell(method, params)
        finally:
            self.telling -= 1


class ServerLink(Protocol):
    """A channel to one server process or endpoint, before any MCP meaning."""

    unowned: Callable[[str, Json], Awaitable[Json]] | None
    """Answers what the server asks in no request's course."""

    @property
    def isolation(self) -> Json | None:
        """The fact, of what really serves; None until that is known."""
        ...

    def network_meter(self) -> Callable[[], Json | None]:
        """From now on: what the server asks of the network; None where that is not known."""
        ...

    def network_since_start(self) -> Json | None:
        """The same for all of its time, from before its program began."""
        ...

    @property
    def ending(self) -> str:
        """Why it is over, and what the server seems to have lacked, where that is known; for those who called it."""
        ...

    @property
    def hint(self) -> str:
        """What it seems to have lacked, for the operator alone."""
        ...

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines of its standard error, once it is over."""
        ...

    async def request(self, method: str, params: Json, exchange: InFlight) -> Json:
        """Send and wait. Raises RpcError, AnswerUnusable, Unavailable (nothing was sent) or OutcomeUnknown (no message
        came back). Which of them it is, the link knows by itself: no code that a server sends stands for another."""
        ...

    async def notify(self, method: str, params: Json | None, headers: Mapping[str, str] | None = None) -> None:
        """Send without an answer; never raises."""
        ...

    async def run(self, ready: Callable[[], object], tell: Callable[[str, Json], Awaitable[None]]) -> None:
        """Keep the channel until it ends or is cancelled. `tell` gets what belongs to no exchange."""
        ...
