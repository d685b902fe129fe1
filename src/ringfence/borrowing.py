"""Secrets in the requests of a session's box, where the box is kept: for each of them somebody else is asked.

Loaded by a keeper of sessions, which has neither vault nor policy. What is put into a request is gone with it; what its
answers are searched for stays in memory as long as the box is there, and goes nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from ringfence.egress.scope import Broker, Brokered, Cleaner
from ringfence.errors import Refused
from ringfence.loans import Asked, Lent
from ringfence.model import Status
from ringfence.ports import Borrowing
from ringfence.redaction import Stream, Values
from ringfence.secret import Secret


class Counting:
    """What an answer passes through."""

    def __init__(self, stream: Stream, removed: Counter[str]) -> None:
        self._stream = stream
        self._removed = removed

    def feed(self, chunk: bytes) -> bytes:
        return self._stream.feed(chunk)

    def release(self) -> bytes:
        return self._stream.release()

    def finish(self) -> bytes:
        rest = self._stream.finish()
        self._removed.update(self._stream.rules)
        return rest


class Borrowed:
    """The secrets of one session's box, until it is gone."""

    def __init__(self, borrowing: Borrowing) -> None:
        self._borrowing = borrowing
        self._forbid = tuple(held.encode() for held in borrowing.placeholders)
        self._removed: Counter[str] = Counter()
        self._revoked = False
        self._known: tuple[tuple[str, str], ...] = ()
        self._values: Values | None = None

    @property
    def broker(self) -> Broker:
        return self._broker

    @property
    def removed(self) -> int:
        """How often a value was taken out of an answer before the box saw it."""
        return self._removed.total()

    def revoke(self) -> None:
        self._revoked = True
        self._known, self._values = (), None

    async def _broker(self, asked: Asked) -> Brokered:
        if self._revoked:
            raise Refused(Status.DENIED, "secret_revoked", "the secrets of this box were revoked")
        lent = await self._borrowing.ask(asked)
        caught: Callable[[bytes], Awaitable[None]] = lambda held: self._borrowing.caught(asked, held.decode())  # noqa: E731
        return Brokered(frozenset(lent.strip), lent.put, self._forbid, self._clean(lent), caught)

    def _clean(self, lent: Lent) -> Callable[[], Cleaner] | None:
        if lent.known is None:
            return None
        if self._values is None or lent.known != self._known:
            secrets = [Secret(name, value) for name, value in lent.known]
            self._known, self._values = lent.known, Values(secrets, shaped=False)
        values = self._values
        return lambda: Counting(Stream(values), self._removed)
