"""All that the connections of one box have in common."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ringfence.box import NetworkRule
from ringfence.egress.dial import Dialler
from ringfence.egress.ledger import Entry, Ledger
from ringfence.egress.meter import Meter
from ringfence.egress.names import Endpoint
from ringfence.egress.rules import Rules
from ringfence.egress.tls import Authority
from ringfence.egress.wire import Limits, Outside
from ringfence.loans import Asked


class Cleaner(Protocol):
    """Removes from an answer, as it comes, what must not enter the box."""

    def feed(self, chunk: bytes) -> bytes: ...

    def release(self) -> bytes:
        """What waits for the next chunk, though that may still come."""
        ...

    def finish(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Brokered:
    """What changes in the request: headers that are taken off, then headers that are put on."""

    strip: frozenset[str] = frozenset()
    """In lower case."""
    put: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Never sent without TLS. The caller's own headers of these names are taken off."""
    forbid: tuple[bytes, ...] = ()
    """What may not be in the body; a body that holds one is cut off before its end."""
    clean: Callable[[], Cleaner] | None = None
    """Makes what the answer passes through: one for each header, one for the body."""
    caught: Callable[[bytes], Awaitable[None]] | None = None
    """Told which of the forbidden a body held. Whatever it raises, the request is refused."""


class Broker(Protocol):
    """Puts secrets into requests. Raises Refused where this one may not have it, Unavailable where it is not there."""

    async def __call__(self, asked: Asked, /) -> Brokered: ...


@dataclass(frozen=True, slots=True)
class Scope:
    rules: Rules
    meters: Mapping[str, Meter]
    ledger: Ledger
    dialler: Dialler
    limits: Limits
    authority: Authority | None
    """None where no rule has TLS end here."""
    trust: ssl.SSLContext
    broker: Broker | None = None

    async def connect(self, place: Endpoint, rule: NetworkRule, entry: Entry, *, tls: bool) -> Outside:
        """Raises Denied, Failed."""
        named = self.rules.named(rule, place.port)
        addresses = await self.dialler.addresses(place.host, named, rule.name)
        return await self.dialler.connect(place, addresses, entry, self.trust if tls else None)
