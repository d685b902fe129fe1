"""The keeper's side of its socket: who may come in, what they ask for, and when it is time to leave.

Only this user's own processes are let in. A client gets what it asks for as fast as it takes it, and holds up nobody
else. A client that goes away takes its steps with it, for nobody is left to see what they do; its sessions stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ringfence.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable
from ringfence.model import Json, Status
from ringfence.sandbox.codec import Attachments, CodecError, pack
from ringfence.sandbox.flows import BYTES, STDERR, STDOUT, Inlet, Outlet
from ringfence.sandbox.frames import Wire, WireError
from ringfence.sandbox.protocol import PROTOCOL, VALUE, VERBS, Verb, error_as_json
from ringfence.sandbox.repeats import Said
from ringfence.sandbox.verbs import Keeping, unheard, unseen
from ringfence.sandbox.waiting import begun
from ringfence.sessions import Failure, Shown, StepReport

log = logging.getLogger("ringfence.keeper")

MOST_CLIENTS = 256
MOST_REQUESTS = 128
"""Of one client at one time."""
_HELLO_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_MOST_ID = 2**63
_CHANNELS = {"stdout": STDOUT, "stderr": STDERR}


class House(Keeping, Protocol):
    """Sessions in this process."""

    @property
    def live(self) -> int:
        """How many sessions are not stopped."""
        ...


@dataclass(slots=True)
class Server:
    """Serves a house to clients, until neither is left."""

    house: House
    terms: str
    """What this keeper was started with. A client that needs anything else is not served."""
    linger: float = 10.0
    """How long it stays with no session and no client."""
    _callers: set[Caller] = field(default_factory=set)
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)
    _doors: list[asyncio.Server] = field(default_factory=list)

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._doors.append(await loop.create_unix_server(self._come, sock=listener, backlog=MOST_CLIENTS))

    async def serve(self) -> None:
        """Until it is time to leave. Sessions that are left then are ended."""
        try:
            await self._until_idle()
        finally:
            for door in self._doors:
                door.close()
            await self.house.close()
            await self._say_goodbye()

    def leave(self) -> None:
        self._leaving.set()

    async def _until_idle(self) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self._leaving.is_set():
            if self._callers or self.house.live:
                since = loop.time()
            elif loop.time() - since >= self.linger:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_SECONDS, self.linger / 4 + 0.01)):
                    await self._leaving.wait()

    async def _say_goodbye(self) -> None:
        """Whoever waits for an answer gets it first."""
        waiting = [task for caller in self._callers for task in caller.tasks.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=_GRACE_SECONDS)
        for caller in list(self._callers):
            caller.wire.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await asyncio.gather(*(caller.wire.closed for caller in self._callers))

    def _come(self) -> Wire:
        return _Door(self)

    def admit(self, wire: Wire) -> None:
        """Somebody is at the door."""
        process, user = wire.peer()
        if user != os.geteuid():
            log.warning("process %d of user %d was turned away", process, user)
            turn_away(wire, "foreign_user", "this keeper belongs to another user; each user has one of their own")
        elif len(self._callers) >= MOST_CLIENTS:
            text = f"the keeper serves {MOST_CLIENTS} clients already; close some, or try again later"
            turn_away(wire, "too_many_clients", text)
        else:
            caller = Caller(self, wire)
            wire.taker = caller
            self._callers.add(caller)

    def refusal(self, hello: Json) -> tuple[str, str] | None:
        """Why a client that says hello like this cannot be served."""
        how = f"close its sessions, wait until they end, or end it with them (process {os.getpid()})"
        if hello.get("ringfence") != "client":
            return "bad_request", "this is the socket of a ringfence keeper, for its clients alone"
        if hello.get("protocol") != PROTOCOL:
            return "keeper_version", f"the keeper that runs here is of another version of ringfence; {how}"
        if hello.get("terms") != self.terms:
            text = "the keeper that runs here was started with other sandbox settings"
            return "keeper_settings", f"{text}; {how}, or use another state folder (gateway.state)"
        return None

    def would_leave(self, caller: Caller) -> bool:
        """Whether nobody but this caller needs it."""
        return not self.house.live and not any(other.is_served for other in self._callers - {caller})

    def gone(self, caller: Caller) -> None:
        self._callers.discard(caller)


class _Door(Wire):
    """A connection that nobody has looked at yet."""

    def __init__(self, server: Server) -> None:
        super().__init__(mute=True)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.admit(self)


def turn_away(wire: Wire, reason_code: str, message: str, *, leaving: bool = False) -> None:
    wire.send({"refused": {"reason_code": reason_code, "message": message, "leaving": leaving}})
    wire.close()


@dataclass(slots=True, eq=False)
class Caller:
    """One client."""

    server: Server
    wire: Wire
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _outlets: dict[int, Outlet] = field(default_factory=dict)
    _said: Said = field(default_factory=Said)
    """The isolation of each session, as this client last heard of it."""
    _inlets: dict[int, Inlet] = field(default_factory=dict)
    _greeted: bool = False
    _patience: asyncio.TimerHandle | None = None
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One large answer at a time: a client that does not take it keeps no more than that in our memory."""

    @property
    def is_served(self) -> bool:
        return self._greeted

    def __post_init__(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(_HELLO_SECONDS, self.wire.abort)

    # ── What comes ──

    def message(self, message: Json, attachments: list[bytes], size: int) -> None:
        if not self._greeted:
            self._greet(message)
            return
        request = message.get("id")
        if type(request) is not int or not 0 <= request < _MOST_ID:
            raise WireError("a message without a number")
        if "do" in message:
            self._begin(request, message, attachments)
        elif "cancel" in message:
            if request in self.tasks:
                self.tasks[request].cancel()
        elif type(room := message.get("room")) is int:
            if room > 0 and request in self._outlets:
                self._outlets[request].room(room)
        elif "end" in message:
            if request in self._inlets:
                self._inlets[request].end()
        else:
            raise WireError("a message that says nothing")

    def chunk(self, request: int, channel: int, data: bytes) -> None:
        if not self._greeted:
            raise WireError("bytes before a greeting")
        inlet = self._inlets.get(request)
        if inlet is not None:  # what is still on its way to a request that is over goes nowhere
            inlet.feed(data, len(data))

    def lost(self, problem: Exception | None) -> None:
        if isinstance(problem, WireError | CodecError):
            log.warning("a client was cut off: it sent %s", problem)
        if self._patience is not None:
            self._patience.cancel()
        self.server.gone(self)
        for outlet in self._outlets.values():
            outlet.end()
        for task in self.tasks.values():
            task.cancel()

    def _greet(self, hello: Json) -> None:
        refused = self.server.refusal(hello)
        if refused is not None:
            leaving = self.server.would_leave(self) and refused[0] != "bad_request"
            turn_away(self.wire, *refused, leaving=leaving)
            if leaving:
                self.server.leave()
            return
        self._greeted = True
        if self._patience is not None:
            self._patience.cancel()
        self.wire.send({"ringfence": "keeper", "pid": os.getpid()})

    # ── What is asked for ──

    def _begin(self, request: int, message: Json, attachments: list[bytes]) -> None:
        if request in self.tasks:
            raise WireError("a number that is in use")
        if len(self.tasks) >= MOST_REQUESTS:
            text = f"this client has {MOST_REQUESTS} requests under way; wait for one of them"
            self.wire.send({"id": request, "error": error_as_json(Unavailable("busy", text))})
            return
        verb = VERBS.get(str(message["do"]))
        if verb is None:
            raise WireError(f"no verb {str(message['do'])[:40]!r}")
        if verb.stream is not None:
            self._inlets[request] = Inlet(self.wire, request)
        if verb.pours is not None or (verb.tell is not None and not message.get("deaf")):
            self._outlets[request] = Outlet(self.wire, request)
        work = self._answer(request, verb, message.get("with"), attachments)
        self.tasks[request] = task = begun(work)
        task.add_done_callback(lambda task: self._over(request, task))

    def _over(self, request: int, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._fail(request, Refused(Status.KILLED, "cancelled", "it was cancelled by its client"))
        self.tasks.pop(request, None)
        self._inlets.pop(request, None)
        outlet = self._outlets.pop(request, None)
        if outlet is not None:
            outlet.end()

    async def _answer(self, request: int, verb: Verb, sent: Any, attachments: list[bytes]) -> None:
        try:
            arguments = verb.unpack_arguments(sent, attachments)
            if verb.gives is bytes:
                async with self._large:
                    await self._finish(request, verb, await self._do(request, verb, arguments))
                    await self.wire.drained()
            else:
                await self._finish(request, verb, await self._do(request, verb, arguments))
        except CodecError as exc:
            self._fail(request, Refused(Status.VALIDATION_FAILURE, "bad_request", f"{verb.name}: {exc}"))
        except (RingfenceError, ValueError) as exc:
            self._fail(request, exc)
        except Exception as exc:  # the outer edge: one request that fails must not take the others with it
            log.exception("%s failed", verb.name)
            text = f"the keeper failed at it ({type(exc).__name__}: {exc}); its log in the state folder has more"
            problem = Unavailable if verb.only_reads else OutcomeUnknown
            self._fail(request, problem("keeper_failed", text))

    async def _do(self, request: int, verb: Verb, arguments: Json) -> Any:
        outlet = self._outlets.get(request)
        if verb.tell is not None:
            arguments[verb.tell] = unheard if outlet is None else _Telling(outlet)
        if verb.shown is not None:
            arguments[verb.shown] = unseen if outlet is None else _Showing(outlet)
        if verb.stream is not None:
            arguments[verb.stream] = aiter(self._inlets[request])
        given: Any = getattr(self.server.house, verb.name)(**arguments)
        if verb.pours is None or outlet is None:
            return await given
        async with aclosing(given):
            async for each in given:
                if verb.pours is bytes:
                    await outlet.put(BYTES, each)
                else:
                    beside: Attachments = []
                    await outlet.put_item({"item": pack(verb.pours, each, beside)}, beside)
        return None

    async def _finish(self, request: int, verb: Verb, value: Any) -> None:
        await self.wire.drained()
        beside: Attachments = []
        outlet = self._outlets.get(request)
        lost = {"lost": outlet.lost} if outlet is not None and outlet.lost else {}
        done = pack(verb.gives, value, beside)
        if isinstance(value, StepReport):
            self._said.shorten(done, value)
        self.wire.send({"id": request, "done": done, **lost}, beside)

    def _fail(self, request: int, problem: Exception) -> None:
        self.wire.send({"id": request, "error": error_as_json(problem)})


@dataclass(slots=True)
class _Telling:
    """Output of a step, on its way to the client. Gives back what is to be waited for before more is read."""

    outlet: Outlet

    def __call__(self, stream: str, data: bytes) -> Awaitable[None] | None:
        return self.outlet.offer(_CHANNELS[stream], data)


@dataclass(slots=True)
class _Showing:
    outlet: Outlet

    def __call__(self, value: Shown | Failure) -> None:
        beside: Attachments = []
        self.outlet.offer_item({"item": pack(VALUE, value, beside)}, beside)
