"""What the console needs of its gateway; the composition root gives it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.core.aio import Aside
from ringfence.core.errors import Refused
from ringfence.core.model import Contract, GuardedText, Json, Person, ServerSpec
from ringfence.core.record import dataclass
from ringfence.governance.pins import DefinitionPins
from ringfence.identity import TokenCheck
from ringfence.store import Store
from ringfence.store.history import History

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService


@dataclass(frozen=True, slots=True)
class ConsoleServers:
    """The servers behind a gateway, what was accepted of them, and the contracts in force."""

    specs: Callable[[], Mapping[str, ServerSpec]]
    contracts: Callable[[], list[tuple[Contract, Refused | None]]]
    """With why one leads to nothing that can be called."""
    pins: DefinitionPins
    connected: Callable[[], Mapping[str, int]]
    """How many connections each has now."""
    accepted: Callable[[], Awaitable[None]]
    """To be awaited when something was accepted."""


@dataclass(frozen=True, slots=True)
class ConsoleGateway:
    """What pages read of the gateway, and what their forms change there."""

    store: Store
    tokens: TokenCheck
    people: Callable[[], Mapping[str, Person]]
    """By the configuration in force; without any there is the local user."""
    account: str
    """That the gateway runs under."""
    clean: Callable[[str, int], GuardedText]
    """What a person wrote, and so many characters of it, as it may go on record."""
    public_key: Callable[[], Ed25519PublicKey | None]
    refused: Callable[[str, int | None], None]
    """Counts a request that is refused, by its reason code and the account that made it."""
    history: History
    is_ours: Callable[[bytes], bool]
    """Whether an `Origin` is our own address."""
    servers: ConsoleServers
    boxes: Callable[[], Json]
    """`backend`, `level`, what is `weaker` on this host, why there are none (`missing`), `reports` of the doctor."""
    sessions: Callable[[], AbstractAsyncContextManager[SessionService | None]]
    """The keeper of sessions, for one request; None where there is none, since there are no sessions."""
    aside: Aside = field(default_factory=Aside)
    """For what others decide the length of: one page of each person at a time."""
