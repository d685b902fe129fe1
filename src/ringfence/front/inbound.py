"""One message of a client: what its transport knows of it, the channel back, and calls that wait for the next one."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field, replace
from typing import Any

import anyio
import anyio.abc
from mcp.shared.dispatcher import DispatchContext
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp_types import INVALID_PARAMS

from ringfence.core import canonical
from ringfence.core.errors import Refused, StoreError
from ringfence.core.model import Call, Json, Origin, Outcome, Principal, Status
from ringfence.core.record import dataclass
from ringfence.core.shares import over_their_share
from ringfence.front.calls import CallPipeline
from ringfence.front.request_state import RequestState, RequestStates
from ringfence.governance.in_client import ABOUT, KEY
from ringfence.store import Conflict, RowNotFound

log = logging.getLogger("ringfence.front")

LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
LOG_LEVEL_KEY = "io.modelcontextprotocol/logLevel"
ANSWER_SECONDS = 600.0
"""How long a client may take to answer a question; one that went away would keep its call for ever."""
WAIT_SECONDS = 600.0
"""How long a paused call waits for its client's next request."""
MAX_WAITING = 1000
MAX_PLACES = 2 * MAX_WAITING
"""Of calls that wait for their client's answer, whatever its era."""
MAX_WEIGHT = 64_000_000
"""Of all of these, as `canonical.weight` counts it: about a quarter of the bytes in memory."""
MAX_VALUES = 100_000
"""Of one message of a client."""
MAX_DECLARED = 16_384
"""Characters of what a client says of itself, as `canonical.is_light` counts them. It is kept as long as the client's
session, or as a call that waits for the client."""
MAX_WATCHED = 1000
"""Resources that one session, or one stream, may be subscribed to."""


@dataclass(slots=True)
class Watching:
    """What one session is subscribed to."""

    uris: set[str] = field(default_factory=set)
    over: bool = False
    """The session has ended: what is subscribed to from now on would never end."""


@dataclass(slots=True)
class Inbound:
    """Rides on the SDK's message metadata from the transport to the front."""

    principal: Principal
    origin: Origin
    session: str | None = None
    fault: str | None = None
    """What was wrong with the bytes, where they could still be read as a call."""
    outbound: DispatchContext[Any] | None = None
    """The request's own way back, set when it is dispatched."""
    log_level: list[str] = field(default_factory=lambda: ["debug"])
    """What a handshake-era client last asked for; shared by the requests of its session."""
    watching: Watching = field(default_factory=Watching)
    """Shared likewise."""
    called: bool = False
    """It became a call, which is on record; an error answer to what did not is recorded where it leaves."""
    reason: str | None = None
    """Why it did not, where the code of the answer does not say."""

    def becomes_call(self) -> None:
        self.called = True


def with_params(value: Any, fault: str | None) -> tuple[Any, str | None]:
    """A call whose params are no object is a call all the same: it goes on without them, as one that is at fault."""
    called = isinstance(value, dict) and value.get("method") == "tools/call"
    if called and not isinstance(value.get("params", {}), dict):
        return {**value, "params": {}}, fault or "params must be an object"
    return value, fault


def without_icons(info: Any) -> Any:
    """What a client says of itself, without pictures, which may be long and which nothing here shows."""
    return {name: value for name, value in info.items() if name != "icons"} if isinstance(info, dict) else info


def declared_problem(info: Any, capabilities: Any) -> str | None:
    """Why what a client declares is not accepted, if so."""
    if canonical.is_light((without_icons(info), capabilities), MAX_DECLARED):
        return None
    return f"what a client declares (clientInfo and capabilities) has more than {MAX_DECLARED} characters"


def handshake(params: Mapping[str, Any]) -> Json:
    """The params of an `initialize`, as they are kept. Raises MCPError."""
    kept = {name: params[name] for name in ("protocolVersion", "capabilities", "clientInfo", "_meta") if name in params}
    if "clientInfo" in kept:
        kept["clientInfo"] = without_icons(kept["clientInfo"])
    problem = declared_problem(kept, None)
    if problem is not None:
        raise MCPError(INVALID_PARAMS, problem)
    return kept


@dataclass(slots=True)
class ClientRequest:
    """A request that concerns what lies behind the gateway, whichever transport and revision it came by."""

    method: str
    params: Mapping[str, Any]
    version: str
    inbound: Inbound
    capabilities: Json
    """What the client declared: in its handshake, or with this very request."""


class WaitingForClients:
    """What calls keep in memory while they wait for their client's answer, of whatever era it is. Each client may have
    as much as is left for the others, so that none can take it all."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._weights: Counter[str] = Counter()

    def take(self, call: Call) -> Callable[[], None] | None:
        """A place for a call; what is to be called once it waits no more. None where there is no place for it."""
        client = f"{call.principal.key} {call.session or call.origin}"
        weight = canonical.weight((call.arguments, call.meta, call.inputs), MAX_WEIGHT)
        crowded = self._calls[client] >= MAX_PLACES - self._calls.total()
        if crowded or self._weights[client] + weight > MAX_WEIGHT - self._weights.total():
            return None
        self._calls[client] += 1
        self._weights[client] += weight

        def free() -> None:
            self._calls -= Counter({client: 1})
            self._weights -= Counter({client: weight})

        return free


class ClientChannel:
    """The way back to a handshake-era client: questions are requests on the call's own stream."""

    def __init__(
        self,
        outbound: DispatchContext[Any],
        capabilities: Json,
        log_level: str | None,
        place: Callable[[], Callable[[], None] | None] = lambda: lambda: None,
    ) -> None:
        """`place`: for the call while it waits; see `WaitingForClients.take`."""
        self._place = place
        self._outbound = outbound
        self._capabilities = capabilities
        self._log_level = log_level

    @property
    def capabilities(self) -> Json:
        return self._capabilities

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        free = self._place()
        if free is None:
            raise Refused(Status.FAILED, "client_refused", "too many calls wait for their clients' answers")
        try:
            return await self._asked(questions)
        finally:
            free()

    async def _asked(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
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
    """Whether a log line reaches the level that the client asked for; where it asked for none: no."""
    level = params.get("level")
    if wanted not in LOG_LEVELS or level not in LOG_LEVELS:
        return False
    return LOG_LEVELS.index(level) >= LOG_LEVELS.index(wanted)


def wants(method: str, params: Json, watching: Watching, level: str) -> bool:
    """Whether a session gets a notification that belongs to no call of its own."""
    if method == "notifications/resources/updated":
        return params.get("uri") in watching.uris
    return method != "notifications/message" or loud_enough(params, level)


def read_request(data: bytes) -> Any:
    """The JSON of a client's message. Raises NotCanonical, also for more values than a message may have: they are read
    while all other clients wait."""
    if canonical.has_more_values(data, MAX_VALUES):
        raise canonical.TooMuch(f"a message of more than {MAX_VALUES} values")
    return canonical.loads(data)


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
        self.given: tuple[str, Mapping[str, Json]] | None = None
        """The answer to the question of this approval, which another gateway had asked."""

    @property
    def capabilities(self) -> Json:
        return self._capabilities

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        given, self.given = self.given, None
        if given is not None and _approval(questions) == given[0]:
            return given[1]
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


# ── Calls that wait for the client between two requests (2026-07-28) ──────────────────────────────
#
# What the client holds is sealed (`request_state`): good once, for the same request of the same principal alone, and
# for a limited time. The call itself waits here. After a restart it does not, and a question to the client's own
# person, before which nothing had begun, is answered by the same call made anew; what a server had asked is lost.


@dataclass(slots=True)
class _Run:
    """One call that may pause."""

    channel: PausableChannel
    scope: anyio.CancelScope
    principal: str
    binding: str
    call: Call
    outcome: Outcome | None = None
    failed: bool = False
    handle: str | None = None
    """What the client holds while the call waits for it."""
    free: Callable[[], None] = lambda: None
    """To be called when it waits no more."""


class PausedCalls:
    """Runs such calls in tasks of their own and pairs each answer with its call."""

    def __init__(
        self, pipeline: CallPipeline, group: anyio.abc.TaskGroup, places: WaitingForClients | None = None
    ) -> None:
        self.states = RequestStates()
        self.spend: Callable[[Principal, str, str], Awaitable[None]] = _nothing_spent
        """Puts on record that an approval's question came back with this handle; raises Conflict if it did before."""
        self._places = places or WaitingForClients()
        self._pipeline = pipeline
        self._group = group
        self._waiting: dict[str, _Run] = {}

    async def begin(self, call: Call, channel: PausableChannel) -> Outcome | Json:
        run = _Run(channel, anyio.CancelScope(), call.principal.key, _binding(call), call)
        self._group.start_soon(self._drive, run, call)
        return await self._next(run)

    async def resume(
        self, state: str, call: Call, channel: PausableChannel, found: Callable[[], None] = lambda: None
    ) -> Outcome | Json:
        """Go on with the call that waits for this, once it is `found`. Raises MCPError."""
        held = self.states.read(_binding(call), state)
        run = None if held is None else self._waiting.get(held.handle)
        if held is None or (run is None and (held.approval is None or time.time() >= held.until)):
            raise MCPError(INVALID_PARAMS, _NO_STATE)
        if call.inputs is None:
            raise MCPError(INVALID_PARAMS, "inputResponses must be an object")
        if held.approval is not None:
            try:
                await self.spend(call.principal, held.approval, held.handle)
            except (Conflict, RowNotFound):
                raise MCPError(INVALID_PARAMS, _NO_STATE) from None
            run = self._waiting.get(held.handle)
        found()
        if run is None:
            channel.given = (held.approval or "", call.inputs)
            return await self.begin(replace(call, inputs=None), channel)
        self._leave(held.handle)
        run.handle = None
        if run.outcome is not None:  # it ended meanwhile
            run.scope.cancel()
            return run.outcome
        run.scope.deadline = float("inf")
        run.channel.outbound = channel.outbound
        run.channel.log_level = channel.log_level
        run.channel.answer(call.inputs)
        return await self._next(run)

    async def _drive(self, run: _Run, call: Call) -> None:
        try:
            with run.scope:
                run.outcome = await self._pipeline.handle(call, run.channel)
                if run.handle is not None and run.outcome.result is None:
                    # Its client is away and hears of this end when it answers. A result would be too much to keep.
                    await anyio.sleep_forever()
        except Exception:  # the edge: a fault of ours ends this call, and not the gateway with all others
            log.exception("call %s failed inside the gateway", call.id)
            run.failed = True
        finally:
            if run.handle is not None:  # the client did not come back in time; what is over cannot be resumed
                self._leave(run.handle)
            run.channel.moved.set()

    async def _next(self, run: _Run) -> Outcome | Json:
        """Wait until the call ends or asks."""
        try:
            await run.channel.moved.wait()
        except anyio.get_cancelled_exc_class():
            run.scope.cancel()  # the client closed the request: that is its way to cancel
            raise
        if run.outcome is not None:
            return run.outcome
        if run.failed:
            raise MCPError(-32603, "the gateway itself failed")
        questions = run.channel.questions
        if questions is None:
            raise MCPError(INVALID_PARAMS, "the call was cancelled")
        if len(self._waiting) >= MAX_WAITING and not self._made_room(run.principal):
            run.scope.cancel()
            raise MCPError(-32603, "too many calls wait for an answer")
        free = self._places.take(run.call)
        if free is None:
            run.scope.cancel()
            raise MCPError(-32603, "too many calls wait for an answer")
        run.free = free
        handle = secrets.token_urlsafe(24)
        held = RequestState(handle, time.time() + WAIT_SECONDS, _approval(questions))
        try:
            state = self.states.made(run.binding, held)
        except StoreError:
            run.scope.cancel()
            free()
            raise
        run.handle = handle
        self._waiting[handle] = run
        run.channel.outbound = None
        run.scope.deadline = anyio.current_time() + WAIT_SECONDS
        answer: Json = {"resultType": "input_required", "requestState": state}
        if questions:
            answer["inputRequests"] = {
                key: {name: value for name, value in question.items() if name != ABOUT}
                for key, question in questions.items()
            }
        return answer

    def _made_room(self, principal: str) -> bool:
        """Whether there is a place again: that of a call which is over and whose client did not come back yet, or the
        longest waiting one of the principal with the most, if this one has less than an even share."""
        chosen = next((handle for handle, run in self._waiting.items() if run.outcome is not None), None)
        if chosen is None:
            holders = Counter(run.principal for run in self._waiting.values())
            over = over_their_share(principal, holders)
            most = max(over, key=lambda each: holders[each]) if over else None
            chosen = next((handle for handle, run in self._waiting.items() if run.principal == most), None)
        if chosen is None:
            return False
        run = self._waiting[chosen]
        self._leave(chosen)
        run.scope.cancel()
        return True

    def _leave(self, handle: str) -> None:
        run = self._waiting.pop(handle, None)
        if run is not None:
            run.free()


_NO_STATE = "requestState is unknown, expired, was used, or belongs to another request"


async def _nothing_spent(principal: Principal, approval: str, handle: str) -> None:
    return None


def _approval(questions: Mapping[str, Json]) -> str | None:
    """Which approval is asked about, if it is a question of ours."""
    about = questions.get(KEY, {}).get(ABOUT)
    return about if isinstance(about, str) and len(questions) == 1 else None


def _binding(call: Call) -> str:
    return canonical.digest([call.principal.key, call.method, call.tool, call.arguments])
