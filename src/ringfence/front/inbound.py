"""What a transport knows of one message, and the channel back to the client that sent it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp.shared.dispatcher import DispatchContext
from mcp.shared.exceptions import MCPError, NoBackChannelError

from ringfence.errors import Refused
from ringfence.model import Json, Origin, Principal, Status

log = logging.getLogger("ringfence.front")

LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
LOG_LEVEL_KEY = "io.modelcontextprotocol/logLevel"
ANSWER_SECONDS = 600.0
"""How long a client may take to answer a question; one that went away would keep its call for ever."""


@dataclass(slots=True)
class Inbound:
    """Rides on the SDK's message metadata from the transport to the front."""

    principal: Principal
    origin: Origin
    session: str | None = None
    fault: str | None = None
    """What was wrong with the bytes, where they could still be told to be a call."""
    outbound: DispatchContext[Any] | None = None
    """The request's own way back, set when it is dispatched."""
    log_level: list[str] = field(default_factory=lambda: ["debug"])
    """What a handshake-era client last asked for; shared by the requests of its session."""
    watching: set[str] = field(default_factory=set)
    """URIs that the session subscribed to; shared likewise."""
    called: bool = False
    """It became a call, which is on record; an error answer to what did not is recorded where it leaves."""
    reason: str | None = None
    """Why it did not, where the code of the answer does not say."""


def with_params(value: Any, fault: str | None) -> tuple[Any, str | None]:
    """A call whose params are no object is a call all the same: it goes on without them, as one that is at fault."""
    called = isinstance(value, dict) and value.get("method") == "tools/call"
    if called and not isinstance(value.get("params", {}), dict):
        return {**value, "params": {}}, fault or "params must be an object"
    return value, fault


@dataclass(slots=True)
class Asked:
    """A request that concerns what lies behind the gateway, whichever transport and revision it came by."""

    method: str
    params: Mapping[str, Any]
    version: str
    inbound: Inbound
    capabilities: Json
    """What the client declared: in its handshake, or with this very request."""


class ClientChannel:
    """The way back to a handshake-era client: questions are requests on the call's own stream."""

    def __init__(self, outbound: DispatchContext[Any], capabilities: Json, log_level: str | None) -> None:
        self._outbound = outbound
        self._capabilities = capabilities
        self._log_level = log_level

    @property
    def capabilities(self) -> Json:
        return self._capabilities

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        answers: dict[str, Json] = {}
        for key, question in questions.items():
            try:
                with anyio.fail_after(ANSWER_SECONDS):
                    answers[key] = await self._outbound.send_raw_request(question["method"], question["params"])
            except TimeoutError:
                text = f"the client did not answer {question['method']} in time"
                raise Refused(Status.FAILED, "client_refused", text) from None
            except (MCPError, NoBackChannelError) as exc:
                text = f"the client did not answer {question['method']}: {exc}"
                raise Refused(Status.FAILED, "client_refused", text) from None
        return answers

    async def notify(self, method: str, params: Json) -> None:
        if method == "notifications/progress":
            await self._outbound.progress(params.get("progress", 0), params.get("total"), params.get("message"))
        elif method != "notifications/message" or loud_enough(params, self._log_level):
            await self._outbound.notify(method, params)


def loud_enough(params: Json, wanted: str | None) -> bool:
    """Whether a log line reaches the level that the client asked for; nobody asked: no."""
    level = params.get("level")
    if wanted not in LOG_LEVELS or level not in LOG_LEVELS:
        return False
    return LOG_LEVELS.index(level) >= LOG_LEVELS.index(wanted)


def wants(method: str, params: Json, watching: set[str], level: str) -> bool:
    """Whether a session is to be told something that belongs to no call of its own."""
    if method == "notifications/resources/updated":
        return params.get("uri") in watching
    return method != "notifications/message" or loud_enough(params, level)


class PausableChannel:
    """The way back to a 2026-07-28 client: a question ends the request as `input_required`; the answer comes with
    the next one. Meanwhile the call waits here."""

    def __init__(self, capabilities: Json) -> None:
        self._capabilities = capabilities
        self.outbound: DispatchContext[Any] | None = None
        self.log_level: str | None = None
        self.questions: Mapping[str, Json] | None = None
        self.moved = anyio.Event()
        """Set when there is something to tell the client: a question, or the end."""
        self._answers: Mapping[str, Json] = {}
        self._answered = anyio.Event()

    @property
    def capabilities(self) -> Json:
        return self._capabilities

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        self.questions = questions
        self._answered = anyio.Event()
        self.moved.set()
        await self._answered.wait()
        return self._answers

    def answer(self, answers: Mapping[str, Json]) -> None:
        self.questions = None
        self.moved = anyio.Event()
        self._answers = answers
        self._answered.set()

    async def notify(self, method: str, params: Json) -> None:
        if self.outbound is None:
            return
        if method == "notifications/progress":
            await self.outbound.progress(params.get("progress", 0), params.get("total"), params.get("message"))
        elif method != "notifications/message" or loud_enough(params, self.log_level):
            await self.outbound.notify(method, params)
