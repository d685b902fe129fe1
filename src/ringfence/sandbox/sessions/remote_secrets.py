"""Secrets of sessions. The keeper does not have them: a broker, in a process that has, decides one request at a time.

A session's box has a placeholder for each secret. Before a request of that box leaves, the keeper asks the broker of
the process that last ran something there. That broker decides, records its decision and says what to substitute.
Where none is connected, the request fails: the keeper remembers nothing that could be used instead. A substituted value
is gone with its request; the values that answers are searched for stay in memory as long as the box exists, and go
nowhere else.

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
    from ringfence.secrets.redaction import SecretMatcher

_MAX_WAITING = 256
"""Requests that may wait for one broker at the same time."""
_ANSWER_SECONDS = 40.0
"""A command that prints a secret has thirty."""


class _BrokerConnection:
    """One broker that listens for requests, and the answers that are awaited from it."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[SubstitutionRequest] = asyncio.Queue()
        self.waiting: dict[int, asyncio.Future[SubstitutionReply | SubstitutionDenial]] = {}


class SecretBrokers:
    """All brokers that answer for sessions of this keeper, each by a secret name of its own."""

    def __init__(self) -> None:
        self._brokers: dict[str, _BrokerConnection] = {}
        self._numbers = itertools.count(1)

    def __contains__(self, broker_id: str) -> bool:
        return broker_id in self._brokers

    async def substitution_requests(self, broker_id: str) -> AsyncGenerator[SubstitutionRequest, None]:
        if broker_id in self._brokers:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", "this broker listens already")
        listening = self._brokers[broker_id] = _BrokerConnection()
        try:
            yield SubstitutionRequest(0)
            while True:
                yield await listening.requests.get()
        finally:
            del self._brokers[broker_id]
            for waiting in listening.waiting.values():
                if not waiting.done():
                    waiting.set_result(_gone())

    def answer_substitution(self, broker_id: str, number: int, answer: SubstitutionReply | SubstitutionDenial) -> None:
        listening = self._brokers.get(broker_id)
        waiting = None if listening is None else listening.waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def ask(self, broker_id: str, request: SubstitutionRequest) -> SubstitutionReply | SubstitutionDenial:
        listening = self._brokers.get(broker_id)
        if listening is None:
            return _gone()
        if len(listening.waiting) >= _MAX_WAITING:
            return SubstitutionDenial("busy", "too many requests wait for secrets", failed=True)
        number = next(self._numbers)
        waiting: asyncio.Future[SubstitutionReply | SubstitutionDenial] = asyncio.get_running_loop().create_future()
        listening.waiting[number] = waiting
        try:
            listening.requests.put_nowait(replace(request, number=number))
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

    def __init__(self, session: str, owner: Owner, secrets: SessionSecrets, brokers: SecretBrokers) -> None:
        self.placeholders = tuple(new_placeholder() for _ in secrets.brokered)
        self._about = SubstitutionRequest(0, session, owner.tenant, owner.agent, secrets, self.placeholders)
        self._forbid = tuple(held.encode() for held in self.placeholders)
        self._brokers = brokers
        self._asking: list[str] = []
        """Brokers, the latest last. Where the last one is gone, the one before it is asked."""
        self._removed: Counter[str] = Counter()
        self._revoked = False
        self._known: tuple[tuple[str, str], ...] = ()
        self._values: SecretMatcher | None = None

    @property
    def env(self) -> Mapping[str, str]:
        brokered = self._about.secrets.brokered
        return {secret.variable: held for secret, held in zip(brokered, self.placeholders, strict=True)}

    # ── Whom to ask ──

    def use_broker(self, broker_id: str) -> None:
        """Raises Unavailable for one that does not listen."""
        if broker_id not in self._brokers:
            raise Unavailable("no_secret", _gone().message)
        self._asking = [each for each in self._asking if each in self._brokers and each != broker_id] + [broker_id]

    async def ask(self, asked: OutboundRequest) -> SubstitutionReply:
        """Raises Refused, Unavailable."""
        return await self._ask_broker(replace(self._about, asked=asked))

    async def caught(self, asked: OutboundRequest, placeholder: str) -> None:
        """A placeholder stood in a body and was refused; this puts it on record."""
        await self._ask_broker(replace(self._about, asked=asked, caught=placeholder))

    async def _ask_broker(self, request: SubstitutionRequest) -> SubstitutionReply:
        broker_id = next((each for each in reversed(self._asking) if each in self._brokers), "")
        answer = await self._brokers.ask(broker_id, request)
        if isinstance(answer, SubstitutionReply):
            return answer
        if answer.failed:
            raise Unavailable(answer.reason_code, answer.message)
        raise Refused(Status.DENIED, answer.reason_code, answer.message)

    # ── Requests of the box ──

    @property
    def substitute(self) -> Substitute:
        return self._substitute

    @property
    def removed(self) -> int:
        """How often a value was taken out of an answer before the box saw it."""
        return self._removed.total()

    def revoke(self) -> None:
        self._revoked = True
        self._known = ()
        self._values = None

    async def _substitute(self, asked: OutboundRequest) -> Substitution:
        from ringfence.egress.substitution import Substitution  # noqa: PLC0415 - see above

        if self._revoked:
            raise Refused(Status.DENIED, "secret_revoked", "the secrets of this box were revoked")
        reply = await self.ask(asked)
        if self._revoked:  # meanwhile: nothing is sent with them, and no value is kept
            raise Refused(Status.DENIED, "secret_revoked", "the secrets of this box were revoked")

        async def caught(held: bytes) -> None:
            await self.caught(asked, held.decode())

        return Substitution(frozenset(reply.strip), reply.put, self._forbid, self._cleaner(reply), caught)

    def _cleaner(self, reply: SubstitutionReply) -> Callable[[], Cleaner] | None:
        from ringfence.core.secret import Secret  # noqa: PLC0415 - see above
        from ringfence.secrets.redaction import CountingCleaner, RedactingStream, SecretMatcher  # noqa: PLC0415 - see above

        if reply.known is None:
            return None
        if self._values is None or reply.known != self._known:
            self._known = reply.known
            self._values = SecretMatcher([Secret(name, value) for name, value in reply.known], shaped=False)
        values = self._values
        return lambda: CountingCleaner(RedactingStream(values), self._removed)
