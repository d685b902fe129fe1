"""The client of a keeper: the verbs of sessions, from another process, over the keeper's socket.

The client's methods are derived from the protocol, one for each verb of `SessionService`. The first client that needs a
keeper starts it. If the keeper dies, its sessions are gone: a request that may have been carried out raises
OutcomeUnknown, and the next one goes to a new keeper, which knows how the sessions of the old one ended.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self
from weakref import WeakValueDictionary

import anyio

from ringfence.core.box import Stream
from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable, WorkProgress
from ringfence.core.model import Json, Recheck, Status
from ringfence.core.record import dataclass
from ringfence.core.sessions import OnShown, StepReport, Tell, discard_output, discard_value
from ringfence.sandbox.keeper.codec import Attachments, CodecError, unpack
from ringfence.sandbox.keeper.process import KeeperLaunch, reachable, start_if_absent
from ringfence.sandbox.keeper.protocol import (
    MAX_AT_ONCE,
    MAX_IN_SESSION,
    PROTOCOL,
    VALUE,
    VERBS,
    IsolationReceived,
    Verb,
    error_from_json,
)
from ringfence.sandbox.keeper.wire import (
    BYTES,
    STDERR,
    STDOUT,
    FrameConnection,
    ReceiveStream,
    SendStream,
    WindowUpdates,
    WireError,
)
from ringfence.sandbox.sessions.concurrency import DetachedTasks
from ringfence.sandbox.sessions.service import SessionService

log = logging.getLogger("ringfence.keeper")

_STREAMS: dict[int, Stream] = {STDOUT: "stdout", STDERR: "stderr"}
_HELLO_SECONDS = 10.0
_STOP_SECONDS = 5.0
"""How long a caller that gave up waits for the keeper to confirm that it stopped."""
_RETRY_SECONDS = 0.05


class KeeperClient(SessionService):
    """For any number of tasks of one event loop. The methods of the verbs are added below."""

    def __init__(self, launch: KeeperLaunch, *, request_timeout: float | None = None) -> None:
        self._launch = launch
        self._request_timeout = request_timeout
        self._connection: KeeperConnection | None = None
        self._opening = asyncio.Lock()
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._lines: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Those who wait for a session, as long as there are any."""

    @classmethod
    def lazy(cls, launch: KeeperLaunch, *, request_timeout: float | None = None) -> Self:
        """Connect when the first verb is called, and start the keeper if there is none.

        `request_timeout`: seconds within which an answer must arrive; then the request is stopped.
        """
        return cls(launch, request_timeout=request_timeout)

    @classmethod
    @asynccontextmanager
    async def connect(cls, launch: KeeperLaunch, *, request_timeout: float | None = None) -> AsyncIterator[Self]:
        """Connect at once. Raises Unavailable and StoreError."""
        client = cls.lazy(launch, request_timeout=request_timeout)
        await client._connected()
        try:
            yield client
        finally:
            await client.close()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connected(self) -> KeeperConnection:
        if self._connection is not None and self._connection.is_open:
            return self._connection
        async with self._opening:
            if self._connection is None or not self._connection.is_open:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> KeeperConnection:
        clock = asyncio.get_running_loop().time
        until = clock() + self._launch.seconds
        while True:
            address = self._launch.folder.address()
            if address is not None:
                try:
                    return await KeeperConnection.open(address, self._launch.settings_digest)
                except NoKeeperError:
                    pass
            if clock() > until:
                raise Unavailable("keeper_start", f"no keeper could be had in {self._launch.seconds:g} s")
            await asyncio.to_thread(start_if_absent, self._launch)
            if address is not None:
                await asyncio.sleep(_RETRY_SECONDS)

    # ── Requests ──

    def granted(self, recheck: Recheck) -> KeeperClient:
        return GrantedClient.of(self, recheck)

    async def _ask(self, verb: Verb, given: dict[str, Any], recheck: Recheck | None = None) -> Any:
        recheck = recheck or given.get(verb.recheck or "")
        try:
            return await self._ask_once(verb, given, recheck)
        except Unavailable as exc:
            if exc.reason_code != "keeper_died" or not verb.can_be_repeated:
                raise
        return await self._ask_once(verb, given, recheck)  # of the next keeper

    async def _ask_once(self, verb: Verb, given: dict[str, Any], recheck: Recheck | None) -> Any:
        async with self._turn(verb, given):
            if recheck is not None:
                await recheck()
            return await self._answered(verb, given, recheck)

    @asynccontextmanager
    async def _turn(self, verb: Verb, given: dict[str, Any]) -> AsyncIterator[None]:
        """First come, first served. Waiting for a turn does not count against `request_timeout`."""
        if not verb.takes_turns:
            yield
            return
        session = str(given.get("id", ""))
        line = self._lines.setdefault(session, asyncio.Semaphore(MAX_IN_SESSION))
        async with line, self._turns:
            yield

    async def _answered(self, verb: Verb, given: dict[str, Any], recheck: Recheck | None) -> Any:
        connection, request = await self._begin(verb, given, recheck)
        clock: asyncio.Timeout | None = None
        try:
            if self._request_timeout is None and verb.stream is None:
                return await request.answer
            async with asyncio.timeout(self._request_timeout) as clock:
                if verb.stream is not None:
                    await connection.upload(request, given[verb.stream])
                return await request.answer
        except BaseException as exc:
            await connection.drop(request)
            if isinstance(exc, TimeoutError) and clock is not None and clock.expired():
                raise self._timed_out(verb) from None
            raise

    async def _stream(self, verb: Verb, given: dict[str, Any]) -> AsyncIterator[Any]:
        async with self._turn(verb, given):
            connection, request = await self._begin(verb, given)
            assert request.incoming is not None
            try:
                async for item in request.incoming:
                    yield item
                await request.answer
            finally:
                await connection.drop(request)

    async def _begin(
        self, verb: Verb, given: dict[str, Any], recheck: Recheck | None = None
    ) -> tuple[KeeperConnection, PendingRequest]:
        with WorkProgress():
            connection = await self._connected()
            tell, shown = given.get(verb.tell or ""), given.get(verb.shown or "")
            return connection, connection.ask(verb, given, tell, shown, recheck)

    def _timed_out(self, verb: Verb) -> RingfenceError:
        text = f"{verb.name} was not answered within {self._request_timeout:g} s (request_timeout)"
        if verb.only_reads:
            return Unavailable("request_timeout", text)
        return OutcomeUnknown("request_timeout", f"{text} and was stopped; what it did until then stays done")


class GrantedClient(KeeperClient):
    """The client of a keeper for one call."""

    def __init__(self, client: KeeperClient, recheck: Recheck) -> None:
        self._client = client
        self._recheck: Recheck | None = recheck

    @classmethod
    def of(cls, client: KeeperClient, recheck: Recheck) -> Self:
        return cls(client, recheck)

    async def _ask(self, verb: Verb, given: dict[str, Any], recheck: Recheck | None = None) -> Any:
        begun = not verb.only_reads
        try:
            return await self._client._ask(verb, given, self._recheck)
        except RingfenceError as exc:
            begun = begun and not exc.nothing_begun
            raise
        finally:
            if begun:
                self._recheck = None  # what a call has begun it may finish

    def _stream(self, verb: Verb, given: dict[str, Any]) -> AsyncIterator[Any]:
        return self._client._stream(verb, given)

    async def close(self) -> None:
        """It stays open for other calls."""


def _method(verb: Verb) -> Callable[..., Any]:
    """The client's method for a verb, with the verb's signature."""
    by_position = [each.name for each in verb.signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    accepted = {*by_position, *verb.sends}
    every = len(by_position) - (verb.recheck is not None)  # which is the last, and `granted` gives it

    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises TypeError."""
        if not kwargs and len(args) == every:  # most calls; binding takes longer than all the rest
            return dict(zip(by_position, args, strict=False))
        verb.signature.bind(*args, **kwargs)
        if not kwargs.keys() <= accepted:
            raise TypeError(f"{verb.name}() got an unexpected argument: {', '.join(kwargs.keys() - accepted)}")
        return {**dict(zip(by_position, args, strict=False)), **kwargs}

    @functools.wraps(getattr(SessionService, verb.name))
    async def ask(self: KeeperClient, *args: Any, **kwargs: Any) -> Any:
        return await self._ask(verb, named(args, kwargs))

    @functools.wraps(getattr(SessionService, verb.name))
    def stream(self: KeeperClient, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return self._stream(verb, named(args, kwargs))

    return ask if verb.yields is None else stream


for _each in VERBS.values():
    setattr(KeeperClient, _each.name, _method(_each))


# ── The connection ────────────────────────────────────────────────────────────────────────────────


class NoKeeperError(Exception):
    """No keeper is there, or it is about to leave: another one can be started."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that was sent and not yet answered."""

    number: int
    verb: Verb
    answer: asyncio.Future[Any]
    consumed: WindowUpdates
    tell: Tell | None = None
    shown: OnShown | None = None
    recheck: Recheck | None = None
    incoming: ReceiveStream | None = None
    outgoing: SendStream | None = None

    def fail(self, problem: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(problem)
            self.answer.exception()  # the caller may be gone

    def lost(self) -> RingfenceError:
        """What to raise if the keeper is gone and no answer came."""
        if self.verb.only_reads:
            return Unavailable("keeper_died", "the keeper of the sessions died; its sessions died with it")
        return OutcomeUnknown(
            "keeper_died", f"the keeper of the sessions died before {self.verb.name} was answered; it may have run"
        )


class KeeperConnection:
    """A connection to a keeper. Implements `FrameHandler`."""

    def __init__(self, wire: FrameConnection) -> None:
        self.wire = wire
        self.keeper = 0
        """The keeper's process."""
        self._greeting: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._pending: dict[int, PendingRequest] = {}
        self._numbers = itertools.count(1)
        self._isolation = IsolationReceived()
        self._turns = DetachedTasks()

    @classmethod
    async def open(cls, address: str, settings_digest: str) -> KeeperConnection:
        """Raises NoKeeperError, and Unavailable if the keeper there cannot serve us."""
        try:
            with reachable(address) as path:
                _, wire = await asyncio.get_running_loop().create_unix_connection(FrameConnection, path)
        except OSError as exc:
            raise NoKeeperError(str(exc)) from None
        connection = cls(wire)
        wire.handler = connection
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                await connection._greet(settings_digest)
        except TimeoutError:
            wire.abort()
            raise Unavailable("keeper_stuck", f"the keeper at {address} does not answer; end it") from None
        except BaseException:
            wire.abort()
            raise
        return connection

    async def _greet(self, settings_digest: str) -> None:
        self.keeper, user = self.wire.peer()
        if user != os.geteuid():
            raise Unavailable("foreign_user", f"what listens there belongs to another user (process {self.keeper})")
        self.wire.send({"ringfence": "client", "protocol": PROTOCOL, "terms": settings_digest})
        answer = await self._greeting
        refused = answer.get("refused")
        if refused is None:
            return
        if type(refused) is not dict or refused.get("leaving"):
            raise NoKeeperError("it is leaving")
        raise Unavailable(str(refused.get("reason_code")), str(refused.get("message")))

    @property
    def is_open(self) -> bool:
        return self.wire.is_open

    # ── Sending ──

    def ask(
        self,
        verb: Verb,
        given: Mapping[str, Any],
        tell: Tell | None,
        shown: OnShown | None,
        recheck: Recheck | None = None,
    ) -> PendingRequest:
        """Raises Unavailable if it was not sent, Refused if it cannot be sent."""
        if not self.is_open:
            raise Unavailable("keeper_died", "the keeper of the sessions is gone")
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        request = PendingRequest(number, verb, answer, WindowUpdates(self.wire, number), tell, shown, recheck)
        if verb.yields is not None:
            request.incoming = ReceiveStream(self.wire, number)
        if verb.stream is not None:
            request.outgoing = SendStream(self.wire, number)
        beside: Attachments = []
        try:
            sent = verb.pack_arguments(given, beside)
            deaf = {"deaf": True} if verb.tell and tell is discard_output and shown in (None, discard_value) else {}
            granted = {"granted": True} if verb.recheck and recheck is not None else {}
            self.wire.send({"id": number, "do": verb.name, "with": sent, **deaf, **granted}, beside)
        except CodecError as exc:
            text = f"{verb.name}: {exc}; send it in smaller parts"
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", text) from None
        self._pending[number] = request
        return request

    async def upload(self, request: PendingRequest, stream: AsyncIterator[bytes]) -> None:
        """Send a stream until it ends, or the keeper has answered."""
        assert request.outgoing is not None
        async for piece in stream:
            await request.outgoing.put(BYTES, piece)
            if request.answer.done():
                return
        self.wire.send({"id": request.number, "end": True})

    async def drop(self, request: PendingRequest) -> None:
        """Cancel a request whose caller no longer waits, and wait until it is cancelled."""
        if request.number not in self._pending:
            return
        if request.answer.done():  # by its caller
            request.answer = asyncio.get_running_loop().create_future()
        self.wire.send({"id": request.number, "cancel": True})
        with anyio.move_on_after(_STOP_SECONDS, shield=True):
            await asyncio.wait([request.answer])
        request.fail(request.lost())
        self._pending.pop(request.number, None)

    async def close(self) -> None:
        self.wire.close()
        with anyio.move_on_after(_STOP_SECONDS, shield=True):
            await asyncio.shield(self.wire.closed)

    # ── Receiving ──

    def message(self, message: Json, attachments: list[bytes], size: int) -> None:
        if not self._greeting.done():
            self._greeting.set_result(message)
            return
        request = self._pending.get(message.get("id", -1))
        if request is None:
            return  # it was dropped meanwhile
        if "item" in message:
            self._item(request, unpack(request.verb.yields or VALUE, message["item"], attachments), size)
        elif "turn" in message:
            self._turns.start(self._turn(request))
        elif "room" in message:
            if request.outgoing is not None and type(message["room"]) is int:
                request.outgoing.room(message["room"])
        elif "done" in message:
            self._over(request)
            if message.get("lost"):
                log.warning("%s: output came faster than it was taken, and some was not passed on", request.verb.name)
            if not request.answer.done():
                done = message["done"]
                if request.verb.returns is StepReport:
                    self._isolation.lengthen(done)
                request.answer.set_result(unpack(request.verb.returns, done, attachments))
        else:
            self._over(request)
            request.fail(error_from_json(message.get("error")))

    async def _turn(self, request: PendingRequest) -> None:
        """Its turn has come, after a wait: it goes on, or is refused and begins nothing."""
        try:
            if request.recheck is not None:
                await request.recheck()
            self.wire.send({"id": request.number, "go": True})
        except Exception as exc:  # whoever waits for the answer gets it, and has the keeper drop the request
            request.fail(exc)

    def _over(self, request: PendingRequest) -> None:
        self._pending.pop(request.number, None)
        if request.incoming is not None:
            request.incoming.end()
        if request.outgoing is not None:
            request.outgoing.end()

    def _item(self, request: PendingRequest, item: Any, size: int) -> None:
        if request.incoming is not None:
            request.incoming.feed(item, size)
            return
        request.consumed.add(size)
        if request.shown is not None and not request.answer.done():
            try:
                request.shown(item)
            except Exception as exc:  # the caller's own code: the caller gets the error
                self._give_up(request, exc)

    def chunk(self, number: int, channel: int, data: bytes) -> None:
        request = self._pending.get(number)
        if request is None:
            return
        if request.incoming is not None:
            request.incoming.feed(data, len(data))
            return
        room = None
        if request.tell is not None and channel in _STREAMS and not request.answer.done():
            try:
                room = request.tell(_STREAMS[channel], data)
            except Exception as exc:  # as above
                self._give_up(request, exc)
        if room is None:
            request.consumed.add(len(data))
        else:
            asyncio.ensure_future(room).add_done_callback(lambda _: request.consumed.add(len(data)))

    def _give_up(self, request: PendingRequest, problem: Exception) -> None:
        request.fail(problem)
        self.wire.send({"id": request.number, "cancel": True})

    def lost(self, problem: Exception | None) -> None:
        if isinstance(problem, WireError | CodecError):
            log.warning("the keeper was not understood: it sent %s", problem)
        if not self._greeting.done():
            self._greeting.set_exception(NoKeeperError("it left"))
            self._greeting.exception()
        for request in list(self._pending.values()):
            request.fail(request.lost())
            self._over(request)
