"""The broker of this process for sessions of a keeper: it decides each request of a session for a secret."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ringfence.core.aio import shielded
from ringfence.core.brokering import SessionSecrets, SubstitutionDenial, SubstitutionReply, SubstitutionRequest
from ringfence.core.errors import Refused, RingfenceError, Unavailable
from ringfence.core.ports import Access, SecretBroker
from ringfence.core.sessions import Owner

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService

log = logging.getLogger("ringfence")


class SessionBroker:
    """Answers the requests for secrets of all sessions of one keeper."""

    def __init__(self, keeper: SessionService, broker: Callable[[], SecretBroker]) -> None:
        """`broker` finds the secrets of the configuration in force."""
        self._keeper = keeper
        self._broker = broker
        self._name = ""
        self._listening: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()

    async def offer(self, owner: Owner, session: str, network: tuple[str, ...], secrets: SessionSecrets) -> None:
        """Check that each secret can be had now; from now on the keeper asks us for them.

        Raises Refused, Unavailable.
        """
        await self.ready(owner, session, network, secrets)
        await self._listen(owner)
        await self._keeper.use_broker(owner, session, self._name)

    async def ready(self, owner: Owner, session: str, network: tuple[str, ...], secrets: SessionSecrets) -> None:
        await self._broker().ready(
            Access(
                places=network,
                secrets=tuple(secret.name for secret in secrets.brokered),
                tenant=owner.tenant,
                capability=secrets.capability,
                agent=owner.agent,
                call_id=secrets.call_id,
                session=session,
            )
        )

    async def close(self) -> None:
        tasks = [task for task in (self._listening, *self._answers) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ── Requests of sessions ──

    async def _listen(self, owner: Owner) -> None:
        if self._listening is None or self._listening.done() or self._begun is None:
            self._name = secrets.token_hex(16)
            self._begun = asyncio.get_running_loop().create_future()
            self._listening = asyncio.get_running_loop().create_task(self._hear(owner, self._name, self._begun))
        await shielded(self._begun)

    async def _hear(self, owner: Owner, name: str, begun: asyncio.Future[None]) -> None:
        try:
            async for request in self._keeper.substitution_requests(owner, name):
                if not begun.done():
                    begun.set_result(None)
                elif request.number:
                    task = asyncio.get_running_loop().create_task(self._answer(owner, name, request))
                    self._answers.add(task)
                    task.add_done_callback(self._answers.discard)
        except RingfenceError as problem:
            log.info("no session gets secrets from this process any more: %s", problem)
        finally:
            if not begun.done():
                begun.set_exception(Unavailable("no_secret", "the keeper of sessions does not take secrets from us"))
                begun.exception()  # the caller that waited may be gone

    async def _answer(self, owner: Owner, name: str, request: SubstitutionRequest) -> None:
        answer = await self._decided(request)
        with suppress(RingfenceError):  # then it is not waited for any more
            await self._keeper.answer_substitution(owner, name, request.number, answer)

    async def _decided(self, request: SubstitutionRequest) -> SubstitutionReply | SubstitutionDenial:
        try:
            return await self._broker().substitute(request)
        except Refused as problem:
            return SubstitutionDenial(problem.reason_code, problem.message)
        except Unavailable as problem:
            return SubstitutionDenial(problem.reason_code, problem.message, failed=True)
        except Exception:  # the outer edge: a request in a box must not end what all of them are served by
            log.exception("a request with a secret failed")
            return SubstitutionDenial("no_secret", "the request could not be decided", failed=True)
