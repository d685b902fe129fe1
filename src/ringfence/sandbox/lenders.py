"""Whoever has secrets lends them to sessions of a house, one request at a time.

The house has none. A session's box has a placeholder for each; before a request of that box leaves, it is put as a wish
to the process that was last asked to run something there, which decides, records, and gives what is needed. Where
nobody listens, the request fails: nothing is remembered that could be used instead.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from ringfence.errors import Refused, Unavailable
from ringfence.loans import Asked, Denial, Lending, Lent, Wish, placeholder
from ringfence.model import Status
from ringfence.sessions import Owner

_MOST_WISHES = 256
"""Of one lender at one time."""
_ANSWER_SECONDS = 40.0
"""A command that prints a secret has thirty."""


class _Listening:
    """A lender that is there."""

    def __init__(self) -> None:
        self.wishes: asyncio.Queue[Wish] = asyncio.Queue()
        self.waiting: dict[int, asyncio.Future[Lent | Denial]] = {}


class Lenders:
    """All lenders of a house."""

    def __init__(self) -> None:
        self._there: dict[str, _Listening] = {}
        self._numbers = itertools.count(1)

    def __contains__(self, lender: str) -> bool:
        return lender in self._there

    async def wishes(self, lender: str) -> AsyncGenerator[Wish, None]:
        if lender in self._there:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", "this lender listens already")
        listening = self._there[lender] = _Listening()
        try:
            yield Wish(0)
            while True:
                yield await listening.wishes.get()
        finally:
            del self._there[lender]
            for waiting in listening.waiting.values():
                if not waiting.done():
                    waiting.set_result(_gone())

    def settle(self, lender: str, number: int, answer: Lent | Denial) -> None:
        listening = self._there.get(lender)
        waiting = None if listening is None else listening.waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def ask(self, lender: str, wish: Wish) -> Lent | Denial:
        listening = self._there.get(lender)
        if listening is None:
            return _gone()
        if len(listening.waiting) >= _MOST_WISHES:
            return Denial("busy", "too many requests wait for secrets", failed=True)
        number = next(self._numbers)
        waiting: asyncio.Future[Lent | Denial] = asyncio.get_running_loop().create_future()
        listening.waiting[number] = waiting
        try:
            listening.wishes.put_nowait(replace(wish, number=number))
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await waiting
        except TimeoutError:
            return Denial("no_secret", "whoever has the secrets of this session did not answer", failed=True)
        finally:
            listening.waiting.pop(number, None)


def _gone() -> Denial:
    return Denial("no_secret", "nobody is there who has the secrets of this session", failed=True)


class Borrower:
    """The secrets of one session: what stands for each in its box, and whom to ask for them."""

    def __init__(self, session: str, owner: Owner, lending: Lending, lenders: Lenders) -> None:
        self.placeholders = tuple(placeholder() for _ in lending.loans)
        self._about = Wish(0, session, owner.tenant, owner.agent, lending, self.placeholders)
        self._lenders = lenders
        self._asking: list[str] = []
        """Who lends, the latest last. Where that one is gone, the one before it is asked."""

    @property
    def env(self) -> Mapping[str, str]:
        loans = self._about.lending.loans
        return {loan.variable: held for loan, held in zip(loans, self.placeholders, strict=True)}

    def lent_by(self, lender: str) -> None:
        """Raises Unavailable for one that does not listen."""
        if lender not in self._lenders:
            raise Unavailable("no_secret", _gone().message)
        self._asking = [each for each in self._asking if each in self._lenders and each != lender] + [lender]

    async def ask(self, asked: Asked) -> Lent:
        return await self._wish(replace(self._about, asked=asked))

    async def caught(self, asked: Asked, placeholder: str) -> None:
        await self._wish(replace(self._about, asked=asked, caught=placeholder))

    async def _wish(self, wish: Wish) -> Lent:
        lender = next((each for each in reversed(self._asking) if each in self._lenders), "")
        answer = await self._lenders.ask(lender, wish)
        if isinstance(answer, Lent):
            return answer
        if answer.failed:
            raise Unavailable(answer.reason_code, answer.message)
        raise Refused(Status.DENIED, answer.reason_code, answer.message)
