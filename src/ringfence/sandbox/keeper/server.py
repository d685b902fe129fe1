"""The keeper's side of its socket: which clients it admits, what they request, and when it exits.

It admits only processes of its own user. A client receives answers as fast as it reads them, and holds up no other
client. When a client disconnects, its steps are cancelled, since no caller is left for their results; its sessions
stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable
from contextlib import aclosing, suppress
from dataclasses import field
from typing import Any, Protocol

from ringfence.core import system
from ringfence.core.aio import begun
from ringfence.core.box import Shown
from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable
from ringfence.core.model import Json, Status
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.core.sessions import Failure, StepReport, discard_output, discard_value
from ringfence.sandbox.keeper.codec import Attachments, CodecError, pack
from ringfence.sandbox.keeper.protocol import PROTOCOL, VALUE, VERBS, IsolationSent, Verb, error_to_json
from ringfence.sandbox.keeper.wire import BYTES, STDERR, STDOUT, FrameConnection, ReceiveStream, SendStream, WireError
from ringfence.sandbox.sessions.service import SessionService

log = logging.getLogger("ringfence.keeper")

MAX_CLIENTS = 256
MAX_REQUESTS = 1024
"""The requests of one client at a time. Our own client sends at most `MAX_AT_ONCE` that do work; most of the others
only wait, which costs little."""
_GREETING_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_IDLE_CHECK_SECONDS = 1.0
_AT_ONCE_SECONDS = 0.05
"""A step that begins so soon after its request need not ask its client again."""
_MAX_ID = 2**63
_CHANNELS = {"stdout": STDOUT, "stderr": STDERR}


class LocalSessions(SessionService, Protocol):
    """Sessions in this process."""

    @property
    def live(self) -> int:
        """How many sessions are not stopped."""
        ...


@dataclass(slots=True)
class KeeperServer:
    """Serves sessions to clients, until there are no sessions and no clients."""

    sessions: LocalSessions
    settings_digest: str
    """The digest of the settings that this keeper was started with. A client with other settings is not served."""
    linger: float = 10.0
    """Seconds that the keeper stays without a session and a client."""
    _clients: set[ConnectedClient] = field(default_factory=set)
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)
    _listeners: list[asyncio.Server] = field(default_factory=list)

    async def listen(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_unix_server(self._accept, sock=bound, backlog=MAX_CLIENTS))

    async def serve(self) -> None:
        """Serve until it is idle or `leave` is called. Then end the remaining sessions."""
        try:
            await self._until_idle()
        finally:
            for listener in self._listeners:
                listener.close()
            await self.sessions.close()
            await self._disconnect_clients()

    def leave(self) -> None:
        self._leaving.set()

    async def _until_idle(self) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self._leaving.is_set():
            if self._clients or self.sessions.live:
                since = loop.time()
            elif loop.time() - since >= self.linger:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_IDLE_CHECK_SECONDS, self.linger / 4 + 0.01)):
                    await self._leaving.wait()

    async def _disconnect_clients(self) -> None:
        """Disconnect the clients, after those that wait for an answer got it."""
        waiting = [task for client in self._clients for task in client.tasks.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=_GRACE_SECONDS)
        for client in list(self._clients):
            client.wire.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await asyncio.gather(*(client.wire.closed for client in self._clients))

    def _accept(self) -> FrameConnection:
        return _UnadmittedConnection(self)

    def admit(self, wire: FrameConnection) -> None:
        """Decide on a new connection."""
        process, user = wire.peer()
        if user != os.geteuid():
            log.warning("process %d of user %d was turned away", process, user)
            _refuse(wire, "foreign_user", "this keeper belongs to another user; each user has one of their own")
        elif not system.same_network(process):
            log.warning("process %d was turned away: it is in a box or a container", process)
            _refuse(wire, "foreign_network", "this keeper serves programs of its own network, none in a box")
        elif len(self._clients) >= MAX_CLIENTS:
            text = f"the keeper serves {MAX_CLIENTS} clients already; close some, or try again later"
            _refuse(wire, "too_many_clients", text)
        else:
            client = ConnectedClient(self, wire)
            wire.handler = client
            self._clients.add(client)

    def refusal(self, hello: Json) -> tuple[str, str] | None:
        """Why a client with this greeting cannot be served: a code and a text."""
        how = f"close its sessions, wait until they end, or end it with them (process {os.getpid()})"
        if hello.get("ringfence") != "client":
            return "bad_request", "this is the socket of a ringfence keeper, for its clients alone"
        if hello.get("protocol") != PROTOCOL:
            return "keeper_version", f"the keeper that runs here is of another version of ringfence; {how}"
        if hello.get("terms") != self.settings_digest:
            text = "the keeper that runs here was started with other sandbox settings"
            return "keeper_settings", f"{text}; {how}, or use another state folder (gateway.state)"
        return None

    def would_leave(self, client: ConnectedClient) -> bool:
        """Whether no session and no other client needs this keeper."""
        return not self.sessions.live and not any(other.is_served for other in self._clients - {client})

    def gone(self, client: ConnectedClient) -> None:
        self._clients.discard(client)


class _UnadmittedConnection(FrameConnection):
    """A connection that the server has not decided on yet."""

    def __init__(self, server: KeeperServer) -> None:
        super().__init__(mute=True)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.admit(self)


def _refuse(wire: FrameConnection, reason_code: str, message: str, *, leaving: bool = False) -> None:
    wire.send({"refused": {"reason_code": reason_code, "message": message, "leaving": leaving}})
    wire.close()


@dataclass(slots=True, eq=False)
class ConnectedClient:
    """One client that was admitted. Implements `FrameHandler`."""

    server: KeeperServer
    wire: FrameConnection
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _outgoing: dict[int, SendStream] = field(default_factory=dict)
    _isolation: IsolationSent = field(default_factory=IsolationSent)
    """The isolation of each session, as last sent to this client."""
    _incoming: dict[int, ReceiveStream] = field(default_factory=dict)
    _turns: dict[int, _TurnCheck] = field(default_factory=dict)
    """Of requests that may have to ask their client again before they begin."""
    _greeted: bool = False
    _greeting_timer: asyncio.TimerHandle | None = None
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One large answer at a time: a client that does not read fills no more of our memory than that."""

    @property
    def is_served(self) -> bool:
        return self._greeted

    def __post_init__(self) -> None:
        self._greeting_timer = asyncio.get_running_loop().call_later(_GREETING_SECONDS, self.wire.abort)

    # ── Receiving ──

    def message(self, message: Json, attachments: list[bytes], size: int) -> None:
        if not self._greeted:
            self._greet(message)
            return
        request = message.get("id")
        if type(request) is not int or not 0 <= request < _MAX_ID:
            raise WireError("a message without a number")
        if "do" in message:
            self._begin(request, message, attachments)
        elif "cancel" in message:
            if request in self.tasks:
                self.tasks[request].cancel()
        elif type(room := message.get("room")) is int:
            if room > 0 and request in self._outgoing:
                self._outgoing[request].room(room)
        elif "go" in message:
            if request in self._turns:
                self._turns[request].go.set()
        elif "end" in message:
            if request in self._incoming:
                self._incoming[request].end()
        else:
            raise WireError("a message of no known kind")

    def chunk(self, number: int, channel: int, data: bytes) -> None:
        if not self._greeted:
            raise WireError("bytes before a greeting")
        stream = self._incoming.get(number)
        if stream is not None:  # what still arrives for a request that is over is discarded
            stream.feed(data, len(data))

    def lost(self, problem: Exception | None) -> None:
        if isinstance(problem, WireError | CodecError):
            log.warning("a client was cut off: it sent %s", problem)
        if self._greeting_timer is not None:
            self._greeting_timer.cancel()
        self.server.gone(self)
        for stream in self._outgoing.values():
            stream.end()
        for task in self.tasks.values():
            task.cancel()

    def _greet(self, hello: Json) -> None:
        refused = self.server.refusal(hello)
        if refused is not None:
            leaving = self.server.would_leave(self) and refused[0] != "bad_request"
            _refuse(self.wire, *refused, leaving=leaving)
            if leaving:
                self.server.leave()
            return
        self._greeted = True
        if self._greeting_timer is not None:
            self._greeting_timer.cancel()
        self.wire.send({"ringfence": "keeper", "pid": os.getpid()})

    # ── Requests ──

    def _begin(self, request: int, message: Json, attachments: list[bytes]) -> None:
        if request in self.tasks:
            raise WireError("a number that is in use")
        if len(self.tasks) >= MAX_REQUESTS:
            text = f"this client has {MAX_REQUESTS} requests under way; wait for one of them"
            busy = Unavailable("busy", text)
            busy.nothing_begun = True
            self._fail(request, busy)
            return
        verb = VERBS.get(str(message["do"]))
        if verb is None:
            raise WireError(f"no verb {quoted(message['do'], 40)}")
        if verb.stream is not None:
            self._incoming[request] = ReceiveStream(self.wire, request)
        if verb.recheck is not None and message.get("granted"):
            self._turns[request] = _TurnCheck(self.wire, request)
        if verb.yields is not None or (verb.tell is not None and not message.get("deaf")):
            self._outgoing[request] = SendStream(self.wire, request)
        work = self._answer(request, verb, message.get("with"), attachments)
        self.tasks[request] = task = begun(work)
        task.add_done_callback(lambda task: self._over(request, task))

    def _over(self, request: int, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._fail(request, Refused(Status.KILLED, "cancelled", "it was cancelled by its client"))
        self.tasks.pop(request, None)
        self._incoming.pop(request, None)
        turn = self._turns.pop(request, None)
        if turn is not None:
            turn.drop()
        stream = self._outgoing.pop(request, None)
        if stream is not None:
            stream.end()

    async def _answer(self, request: int, verb: Verb, sent: Any, attachments: list[bytes]) -> None:
        try:
            arguments = verb.unpack_arguments(sent, attachments)
        except CodecError as exc:
            unreadable = Refused(Status.VALIDATION_FAILURE, "bad_request", f"{verb.name}: {exc}")
            unreadable.nothing_begun = True
            self._fail(request, unreadable)
            return
        try:
            if verb.returns is bytes:
                async with self._large:
                    await self._finish(request, verb, await self._do(request, verb, arguments))
                    await self.wire.drained()
            else:
                await self._finish(request, verb, await self._do(request, verb, arguments))
        except CodecError as exc:  # of the answer: the request itself was done
            self._fail(request, OutcomeUnknown("keeper_failed", f"the answer to {verb.name} cannot be sent: {exc}"))
        except (RingfenceError, ValueError) as exc:
            self._fail(request, exc)
        except Exception as exc:  # the outer edge: one request that fails must not take the others with it
            log.exception("%s failed", verb.name)
            text = (
                f"the keeper failed at {verb.name} ({type(exc).__name__}: {exc}); its log in the state folder has more"
            )
            problem = Unavailable if verb.only_reads else OutcomeUnknown
            self._fail(request, problem("keeper_failed", text))

    async def _do(self, request: int, verb: Verb, arguments: Json) -> Any:
        stream = self._outgoing.get(request)
        if verb.tell is not None:
            arguments[verb.tell] = discard_output if stream is None else _OutputSender(stream)
        if verb.shown is not None:
            arguments[verb.shown] = discard_value if stream is None else _ValueSender(stream)
        if verb.recheck is not None and request in self._turns:
            arguments[verb.recheck] = self._turns[request]
        if verb.stream is not None:
            arguments[verb.stream] = aiter(self._incoming[request])
        result: Any = getattr(self.server.sessions, verb.name)(**arguments)
        if verb.yields is None or stream is None:
            return await result
        async with aclosing(result):
            async for each in result:
                if verb.yields is bytes:
                    await stream.put(BYTES, each)
                else:
                    attachments: Attachments = []
                    await stream.put_item({"item": pack(verb.yields, each, attachments)}, attachments)
        return None

    async def _finish(self, request: int, verb: Verb, value: Any) -> None:
        await self.wire.drained()
        attachments: Attachments = []
        stream = self._outgoing.get(request)
        lost = {"lost": stream.lost} if stream is not None and stream.lost else {}
        done = pack(verb.returns, value, attachments)
        if isinstance(value, StepReport):
            self._isolation.shorten(done, value)
        self.wire.send({"id": request, "done": done, **lost}, attachments)

    def _fail(self, request: int, problem: Exception) -> None:
        self.wire.send({"id": request, "error": error_to_json(problem)})


@dataclass(slots=True)
class _TurnCheck:
    """Asks the client, once a request that had to wait may begin, whether it should: the rules that granted it may have
    changed meanwhile. A request that begins at once need not ask."""

    wire: FrameConnection
    request: int
    go: asyncio.Event = field(default_factory=asyncio.Event)
    known: float = field(default_factory=time.monotonic)
    """When the client last said that the request may begin."""
    dropped: bool = False

    async def __call__(self) -> None:
        if time.monotonic() - self.known < _AT_ONCE_SECONDS:
            return
        if not self.dropped:
            self.go.clear()
            self.wire.send({"id": self.request, "turn": True})
            await self.go.wait()
        if self.dropped:  # the request is over, and only work that it left behind still asks
            raise Refused(Status.KILLED, "cancelled", "it was cancelled by its client")
        self.known = time.monotonic()

    def drop(self) -> None:
        self.dropped = True
        self.go.set()


@dataclass(slots=True)
class _OutputSender:
    """Sends the output of a step to the client. Returns a future to wait for before more output is read."""

    stream: SendStream

    def __call__(self, stream: str, data: bytes) -> Awaitable[None] | None:
        return self.stream.offer(_CHANNELS[stream], data)


@dataclass(slots=True)
class _ValueSender:
    """Sends the values that a cell shows to the client."""

    stream: SendStream

    def __call__(self, value: Shown | Failure) -> None:
        attachments: Attachments = []
        self.stream.offer_item({"item": pack(VALUE, value, attachments)}, attachments)
