"""A client's connection to a keeper: what was asked over it, and what came back."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from ringfence.box import Stream
from ringfence.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable
from ringfence.model import Json, Status
from ringfence.sandbox.codec import Attachments, CodecError, unpack
from ringfence.sandbox.flows import BYTES, STDERR, STDOUT, Inlet, Outlet, Taken
from ringfence.sandbox.frames import Wire, WireError
from ringfence.sandbox.keeperhome import reachable
from ringfence.sandbox.protocol import PROTOCOL, VALUE, Verb, error_from_json
from ringfence.sandbox.repeats import Heard
from ringfence.sandbox.verbs import OnShown, unheard, unseen
from ringfence.sessions import StepReport, Tell

log = logging.getLogger("ringfence.keeper")

_STREAMS: dict[int, Stream] = {STDOUT: "stdout", STDERR: "stderr"}
_HELLO_SECONDS = 10.0
_STOP_SECONDS = 5.0
"""How long somebody who gave up waits for the keeper to say that it stopped."""


class AbsentError(Exception):
    """Nobody is there, or about to leave: another keeper can be started."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was sent."""

    number: int
    verb: Verb
    answer: asyncio.Future[Any]
    taken: Taken
    tell: Tell | None = None
    shown: OnShown | None = None
    inlet: Inlet | None = None
    outlet: Outlet | None = None

    def fail(self, problem: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(problem)
            self.answer.exception()  # whoever waited may be gone

    def lost(self) -> RingfenceError:
        """What to say where the keeper is gone and no answer came."""
        if self.verb.only_reads:
            return Unavailable("keeper_died", "the keeper of the sessions died; its sessions died with it")
        return OutcomeUnknown(
            "keeper_died", f"the keeper of the sessions died before {self.verb.name} was answered; it may have run"
        )


class Line:
    """A connection to a keeper."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.keeper = 0
        """The keeper's process."""
        self._greeting: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._asked: dict[int, Asked] = {}
        self._numbers = itertools.count(1)
        self._heard = Heard()

    @classmethod
    async def open(cls, address: str, terms: str) -> Line:
        """Raises AbsentError, and Unavailable where the keeper that is there cannot be ours."""
        try:
            with reachable(address) as path:
                _, wire = await asyncio.get_running_loop().create_unix_connection(Wire, path)
        except OSError as exc:
            raise AbsentError(str(exc)) from None
        line = cls(wire)
        wire.taker = line
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                await line._greet(terms)
        except TimeoutError:
            wire.abort()
            raise Unavailable("keeper_stuck", f"the keeper at {address} does not answer; end it") from None
        except BaseException:
            wire.abort()
            raise
        return line

    async def _greet(self, terms: str) -> None:
        self.keeper, user = self.wire.peer()
        if user != os.geteuid():
            raise Unavailable("foreign_user", f"what listens there belongs to another user (process {self.keeper})")
        self.wire.send({"ringfence": "client", "protocol": PROTOCOL, "terms": terms})
        answer = await self._greeting
        refused = answer.get("refused")
        if refused is None:
            return
        if type(refused) is not dict or refused.get("leaving"):
            raise AbsentError("it is leaving")
        raise Unavailable(str(refused.get("reason_code")), str(refused.get("message")))

    @property
    def is_open(self) -> bool:
        return self.wire.is_open

    # ── Asking ──

    def ask(self, verb: Verb, arguments: Mapping[str, Any], tell: Tell | None, shown: OnShown | None) -> Asked:
        """Raises Unavailable where it was not sent, Refused where it cannot be."""
        if not self.is_open:
            raise Unavailable("keeper_died", "the keeper of the sessions is gone")
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        asked = Asked(number, verb, answer, Taken(self.wire, number), tell, shown)
        if verb.pours is not None:
            asked.inlet = Inlet(self.wire, number)
        if verb.stream is not None:
            asked.outlet = Outlet(self.wire, number)
        beside: Attachments = []
        try:
            sent = verb.pack_arguments(arguments, beside)
            deaf = {"deaf": True} if verb.tell and tell is unheard and shown in (None, unseen) else {}
            self.wire.send({"id": number, "do": verb.name, "with": sent, **deaf}, beside)
        except CodecError as exc:
            text = f"{verb.name}: {exc}; send it in smaller parts"
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", text) from None
        self._asked[number] = asked
        return asked

    async def upload(self, asked: Asked, stream: AsyncIterator[bytes]) -> None:
        """Until its end, or until the keeper has heard enough."""
        assert asked.outlet is not None
        async for piece in stream:
            await asked.outlet.put(BYTES, piece)
            if asked.answer.done():
                return
        self.wire.send({"id": asked.number, "end": True})

    async def drop(self, asked: Asked) -> None:
        """Nobody waits for this any more: have it stopped, and see that it did."""
        if asked.number not in self._asked:
            return
        if asked.answer.done():  # by the one who waited for it
            asked.answer = asyncio.get_running_loop().create_future()
        self.wire.send({"id": asked.number, "cancel": True})
        with anyio.move_on_after(_STOP_SECONDS, shield=True):
            await asyncio.wait([asked.answer])
        asked.fail(asked.lost())
        self._asked.pop(asked.number, None)

    async def close(self) -> None:
        self.wire.close()
        with anyio.move_on_after(_STOP_SECONDS, shield=True):
            await asyncio.shield(self.wire.closed)

    # ── What comes ──

    def message(self, message: Json, attachments: list[bytes], size: int) -> None:
        if not self._greeting.done():
            self._greeting.set_result(message)
            return
        asked = self._asked.get(message.get("id", -1))
        if asked is None:
            return  # it was dropped meanwhile
        if "item" in message:
            self._item(asked, unpack(asked.verb.pours or VALUE, message["item"], attachments), size)
        elif "room" in message:
            if asked.outlet is not None and type(message["room"]) is int:
                asked.outlet.room(message["room"])
        elif "done" in message:
            self._over(asked)
            if message.get("lost"):
                log.warning("%s: output came faster than it was taken, and some was not passed on", asked.verb.name)
            if not asked.answer.done():
                done = message["done"]
                if asked.verb.gives is StepReport:
                    self._heard.lengthen(done)
                asked.answer.set_result(unpack(asked.verb.gives, done, attachments))
        else:
            self._over(asked)
            asked.fail(error_from_json(message.get("error")))

    def _over(self, asked: Asked) -> None:
        self._asked.pop(asked.number, None)
        if asked.inlet is not None:
            asked.inlet.end()
        if asked.outlet is not None:
            asked.outlet.end()

    def _item(self, asked: Asked, item: Any, size: int) -> None:
        if asked.inlet is not None:
            asked.inlet.feed(item, size)
            return
        asked.taken.add(size)
        if asked.shown is not None and not asked.answer.done():
            try:
                asked.shown(item)
            except Exception as exc:  # the caller's own code: its problem is the caller's to hear of
                self._give_up(asked, exc)

    def chunk(self, request: int, channel: int, data: bytes) -> None:
        asked = self._asked.get(request)
        if asked is None:
            return
        if asked.inlet is not None:
            asked.inlet.feed(data, len(data))
            return
        room = None
        if asked.tell is not None and channel in _STREAMS and not asked.answer.done():
            try:
                room = asked.tell(_STREAMS[channel], data)
            except Exception as exc:  # as above
                self._give_up(asked, exc)
        if room is None:
            asked.taken.add(len(data))
        else:
            asyncio.ensure_future(room).add_done_callback(lambda _: asked.taken.add(len(data)))

    def _give_up(self, asked: Asked, problem: Exception) -> None:
        asked.fail(problem)
        self.wire.send({"id": asked.number, "cancel": True})

    def lost(self, problem: Exception | None) -> None:
        if isinstance(problem, WireError | CodecError):
            log.warning("the keeper was not understood: it sent %s", problem)
        if not self._greeting.done():
            self._greeting.set_exception(AbsentError("it left"))
            self._greeting.exception()
        for asked in list(self._asked.values()):
            asked.fail(asked.lost())
            self._over(asked)
