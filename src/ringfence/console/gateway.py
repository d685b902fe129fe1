"""What the console needs of its gateway. `compose/console.py` provides it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.core.aio import FairThreads
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
    """Each with the reason why it cannot be called; None where it can."""
    pins: DefinitionPins
    connected: Callable[[], Mapping[str, int]]
    """How many connections each server has now."""
    accepted: Callable[[], Awaitable[None]]
    """Tells the gateway that a person has accepted definitions."""


@dataclass(frozen=True, slots=True)
class ConsoleGateway:
    """What pages read of the gateway, and what their forms change there."""

    store: Store
    tokens: TokenCheck
    people: Callable[[], Mapping[str, Person]]
    """The people of the configuration in force, by name; empty: the local user alone."""
    account: str
    """The account that the gateway runs under."""
    clean: Callable[[str, int], GuardedText]
    """Redacts a text and cuts it to so many characters, so that it may be shown and go on record."""
    public_key: Callable[[], Ed25519PublicKey | None]
    refused: Callable[[str, int | None], None]
    """Records that a request was refused, with its reason code and the user id that made it, if that is known."""
    history: History
    is_ours: Callable[[bytes], bool]
    """Whether an `Origin` is our own address."""
    servers: ConsoleServers
    boxes: Callable[[], Json]
    """How boxes are isolated: `backend`, `level`, what is `weaker` on this host, `missing` (why there are no boxes) and
    the doctor's `reports`."""
    sessions: Callable[[], AbstractAsyncContextManager[SessionService | None]]
    """Connects to the keeper for one request; None where no keeper runs, so that there are no sessions."""
    threads: FairThreads = field(default_factory=FairThreads)
    """Make the pages: for each person one at a time."""
