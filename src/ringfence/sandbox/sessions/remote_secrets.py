"""Secrets of sessions, which their keeper does not have: a process that has them lends them, one request at a time.

A session's box has a placeholder for each secret. Before a request of that box leaves, the keeper puts it as a wish to
the process that was last asked to run something there, which decides, records, and gives what is needed. Where no such
process listens, the request fails: nothing is remembered that could be used instead. What is put into a request is gone
with it; the values that its answers are searched for stay in memory as long as the box exists, and go nowhere else.

Loaded by every keeper: what handles requests is imported when the first one comes, because most sessions have no
secrets, and it takes long to load.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ringfence.core.brokering import (
    OutboundRequest,
    SessionSecrets,
    SubstitutionDenial,
    SubstitutionReply,
    SubstitutionRequest,
    new_placeholder,
)
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Status
from ringfence.core.sessions import Owner

if TYPE_CHECKING:
    from ringfence.egress.substitution import Cleaner, Substitute, Substitution
    from ringfence.secrets.redaction import RedactingStream, SecretMatcher

_MOST_WISHES = 256
"""Of one lender at one time."""
_ANSWER_SECONDS = 40.0
"""A command that prints a secret has thirty."""


class _Lender:
    """A process that listens for wishes."""

    def __init__(self) -> None:
        self.wishes: asyncio.Queue[SubstitutionRequest] = asyncio.Queue()
        self.waiting: dict[int, asyncio.Future[SubstitutionReply | SubstitutionDenial]] = {}


class SecretLenders:
    """All processes that lend secrets to sessions of this keeper, by a secret name of their own."""

    def __init__(self) -> None:
        self._lenders: dict[str, _Lender] = {}
        self._numbers = itertools.count(1)

    def __contains__(self, lender: str) -> bool:
        return lender in self._lenders

    async def wishes(self, lender: str) -> AsyncGenerator[SubstitutionRequest, None]:
        if lender in self._lenders:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", "this lender listens already")
        listening = self._lenders[lender] = _Lender()
        try:
            yield SubstitutionRequest(0)
            while True:
                yield await listening.wishes.get()
        finally:
            del self._lenders[lender]
            for waiting in listening.waiting.values():
                if not waiting.done():
                    waiting.set_result(_gone())

    def settle(self, lender: str, number: int, answer: SubstitutionReply | SubstitutionDenial) -> None:
        listening = self._lenders.get(lender)
        waiting = None if listening is None else listening.waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def ask(self, lender: str, wish: SubstitutionRequest) -> SubstitutionReply | SubstitutionDenial:
        listening = self._lenders.get(lender)
        if listening is None:
            return _gone()
        if len(listening.waiting) >= _MOST_WISHES:
            return SubstitutionDenial("busy", "too many requests wait for secrets", failed=True)
        number = next(self._numbers)
        waiting: asyncio.Future[SubstitutionReply | SubstitutionDenial] = asyncio.get_running_loop().create_future()
        listening.waiting[number] = waiting
        try:
            listening.wishes.put_nowait(replace(wish, number=number))
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await waiting
        except TimeoutError:
            return SubstitutionDenial(
                "no_secret", "the process that has the secrets of this session did not answer", failed=True
            )
        finally:
            listening.waiting.pop(number, None)


def _gone() -> SubstitutionDenial:
    return SubstitutionDenial("no_secret", "no process that has the secrets of this session is connected", failed=True)


class RemoteSecrets:
    """The secrets of one session: their placeholders, whom to ask for them, and what is done to the box's requests."""

    def __init__(self, session: str, owner: Owner, lending: SessionSecrets, lenders: SecretLenders) -> None:
        self.placeholders = tuple(new_placeholder() for _ in lending.loans)
        self._about = SubstitutionRequest(0, session, owner.tenant, owner.agent, lending, self.placeholders)
        self._forbid = tuple(held.encode() for held in self.placeholders)
        self._lenders = lenders
        self._asking: list[str] = []
        """Lenders, the latest last. Where the last one is gone, the one before it is asked."""
        self._removed: Counter[str] = Counter()
        self._revoked = False
        self._known: tuple[tuple[str, str], ...] = ()
        self._values: SecretMatcher | None = None

    @property
    def env(self) -> Mapping[str, str]:
        loans = self._about.lending.loans
        return {loan.variable: held for loan, held in zip(loans, self.placeholders, strict=True)}

    # ── Whom to ask ──

    def lent_by(self, lender: str) -> None:
        """Raises Unavailable for one that does not listen."""
        if lender not in self._lenders:
            raise Unavailable("no_secret", _gone().message)
        self._asking = [each for each in self._asking if each in self._lenders and each != lender] + [lender]

    async def ask(self, asked: OutboundRequest) -> SubstitutionReply:
        """Raises Refused, Unavailable."""
        return await self._wish(replace(self._about, asked=asked))

    async def caught(self, asked: OutboundRequest, placeholder: str) -> None:
        """A placeholder stood in a body and was refused; this puts it on record."""
        await self._wish(replace(self._about, asked=asked, caught=placeholder))

    async def _wish(self, wish: SubstitutionRequest) -> SubstitutionReply:
        lender = next((each for each in reversed(self._asking) if each in self._lenders), "")
        answer = await self._lenders.ask(lender, wish)
        if isinstance(answer, SubstitutionReply):
            return answer
        if answer.failed:
            raise Unavailable(answer.reason_code, answer.message)
        raise Refused(Status.DENIED, answer.reason_code, answer.message)

    # ── Requests of the box ──

    @property
    def broker(self) -> Substitute:
        return self._broker

    @property
    def removed(self) -> int:
        """How often a value was taken out of an answer before the box saw it."""
        return self._removed.total()

    def revoke(self) -> None:
        self._revoked = True
        self._known = ()
        self._values = None

    async def _broker(self, asked: OutboundRequest) -> Substitution:
        from ringfence.egress.substitution import Substitution  # noqa: PLC0415 - see above

        if self._revoked:
            raise Refused(Status.DENIED, "secret_revoked", "the secrets of this box were revoked")
        lent = await self.ask(asked)

        async def caught(held: bytes) -> None:
            await self.caught(asked, held.decode())

        return Substitution(frozenset(lent.strip), lent.put, self._forbid, self._cleaner(lent), caught)

    def _cleaner(self, lent: SubstitutionReply) -> Callable[[], Cleaner] | None:
        from ringfence.core.secret import Secret  # noqa: PLC0415 - see above
        from ringfence.secrets.redaction import RedactingStream, SecretMatcher  # noqa: PLC0415 - see above

        if lent.known is None:
            return None
        if self._values is None or lent.known != self._known:
            self._known = lent.known
            self._values = SecretMatcher([Secret(name, value) for name, value in lent.known], shaped=False)
        values = self._values
        return lambda: CountingCleaner(RedactingStream(values), self._removed)


class CountingCleaner:
    """Takes secrets out of an answer, and counts them."""

    def __init__(self, stream: RedactingStream, removed: Counter[str]) -> None:
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
