"""What the console needs of its gateway; the composition root gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.core.model import GuardedText, Person
from ringfence.core.record import dataclass
from ringfence.identity import TokenCheck
from ringfence.store import Store
from ringfence.store.history import History

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService


@dataclass(frozen=True, slots=True)
class House:
    """A gateway, as far as its people look at it."""

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
    sessions: Callable[[], AbstractAsyncContextManager[SessionService | None]]
    """The keeper of sessions, for one request; None where there is none, as nobody has a session."""
