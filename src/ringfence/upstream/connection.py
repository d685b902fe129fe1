"""One principal's connection to one server: the revision that the server speaks, what it offers, and its questions.

Two kinds of revisions meet here. A server of the older kind, which begins with a handshake, asks its questions as
requests during a call; a server of 2026-07-28 answers `input_required`, and the call is sent again with the answers.
The layers above see the same in both cases: questions on the call's channel.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal

import anyio
from mcp.shared.inbound import encode_header_value, find_invalid_x_mcp_header, mcp_param_headers, x_mcp_header_map

from ringfence.core import canonical
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, UpstreamFailed
from ringfence.core.model import Definition, Json, ServerSpec, Status
from ringfence.core.ports import SAID_IN_CALLS, UpstreamRequest
from ringfence.core.record import dataclass
from ringfence.upstream.link import (
    HANDSHAKE,
    HANDSHAKES,
    MAX_MESSAGE_BYTES,
    MODERN,
    AnswerUnusable,
    InFlight,
    RpcError,
    ServerLink,
)
from ringfence.upstream.pacing import Floods

log = logging.getLogger("ringfence.upstream")

CLIENT_INFO = {"name": "ringfence", "version": "0.1.0"}
_PREFIX = "io.modelcontextprotocol/"
_LOG_LEVEL = f"{_PREFIX}logLevel"
_PROBE_SECONDS = 5.0
_MAX_PAGES = 100
_MAX_ROUNDS = 20
_MAX_QUESTIONS = 100
_MAX_LISTING_BYTES = 2 * MAX_MESSAGE_BYTES
MAX_DEFINITIONS = 1_000
"""How many tools, and how many prompts, one server may list: ten times as many as a model can choose from."""
_MAX_LISTED = 10_000
"""How many resources, and how many templates, it may list: clients read them as one list, whose entries are checked."""
_MAX_LENGTHS = {
    "tools": MAX_DEFINITIONS,
    "prompts": MAX_DEFINITIONS,
    "resources": _MAX_LISTED,
    "resourceTemplates": _MAX_LISTED,
}
_METHOD_NOT_FOUND = -32601
_UNSUPPORTED_VERSION = -32022
_MISSING_CAPABILITY = -32021
_VISIT_URL = -32042
_MAX_TEXT = 2000
_WEB_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]_~-]+(?:[/?#][\x21-\x7e]*)?", re.IGNORECASE)
"""A URL that a browser opens, without a user name before the host: people would take that for the host."""
_CAPABILITY = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}
_RELAYED_KEYS: Mapping[str, frozenset[str]] = {
    "elicitation/create": frozenset({"mode", "message", "requestedSchema", "url", "elicitationId"}),
    "sampling/createMessage": frozenset(
        {"messages", "modelPreferences", "systemPrompt", "temperature", "maxTokens", "stopSequences", "metadata"}
        | {"tools", "toolChoice"}
    ),
    "roots/list": frozenset(),
}
"""The keys of a server's question that are relayed. Not `includeContext`: to the client all servers are one, so each
would get the context of the others. Nor keys that the protocol does not have, which a client may interpret freely."""
_DEFINITION_LISTS: tuple[tuple[Literal["tool", "prompt"], str, str], ...] = (
    ("tool", "tools/list", "tools"),
    ("prompt", "prompts/list", "prompts"),
)
_NAMED_BY = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}

ROOTS_METHOD = "roots/list"
ROOTS_CHANGED = "notifications/roots/list_changed"
_ASK_SECONDS = 10.0
_HEAR_SECONDS = 1.0
_SETTLE_SECONDS = 0.05
"""A server works with the folders only once it has read them, and does not say when it has."""

OnNotification = Callable[[str, Json], Awaitable[None]]
"""Gets the method and the parameters of a server's notification."""
Consent = Callable[[UpstreamRequest, str, Json], Awaitable[bool]]
"""Asks a person whether this server may ask this of the client (`sampling: ask`)."""


class Connection:
    """Negotiated once by `open`, then used for many requests."""

    def __init__(self, spec: ServerSpec, link: ServerLink, consent: Consent, floods: Floods | None = None) -> None:
        self.spec = spec
        self.version = ""
        self.server_capabilities: Json = {}
        self.definitions: dict[tuple[str, str], Definition] = {}
        self.listed_bytes = 0
        """The size of all lists that were read since `refresh` began. One that is too long counts as the longest."""
        self._floods = floods or Floods()
        self.link = link
        link.unowned = self._answer_outside_calls
        self.roots = Roots()
        """The folders of the client that this connection is for."""
        self.on_notification: OnNotification = _discard_notification
        """Gets notifications that arrive during a call and do not belong to it."""
        self.on_idle_network: Callable[[Json], Awaitable[None]] = _discard_network
        """Gets the network requests that the server's box made while no call ran."""
        self._idle_network: Callable[[], Json | None] | None = None
        """Measures those requests since the end of the last call. None until the first call: then they are measured
        since the start of the server."""
        self._calls = 0
        """How many calls run."""
        self._running: list[_RunningCall] = []
        self._consent = consent
        self._client_capabilities: Json = {}
        self._header_maps: dict[str, dict[tuple[str, ...], str]] = {}

    @property
    def modern(self) -> bool:
        return self.version == MODERN

    # ── beginning ─────────────────────────────────────────────────────────────────────────────────

    async def open(self, capabilities: Json, known_version: str | None, tell: OnNotification) -> None:
        """Agree on a revision and read what the server offers."""
        self._client_capabilities = relayed_capabilities(self.spec, capabilities)
        quiet = InFlight(ask=self._answer_outside_calls, tell=tell)
        if known_version in HANDSHAKES or not await self._discover(quiet):
            await self._initialize(quiet)
        await self.refresh(quiet)

    async def _discover(self, exchange: InFlight) -> bool:
        with anyio.move_on_after(_PROBE_SECONDS):
            params, headers = self._envelope("server/discover", {}, {}, None)
            try:
                exchange.headers = headers
                result = await self.link.request("server/discover", params, exchange)
            except RpcError:
                return False
            except OutcomeUnknown as exc:
                if exc.reason_code == "server_refused":
                    return False
                raise
            supported = result.get("supportedVersions")
            if isinstance(supported, list) and MODERN in supported:
                self._adopt(MODERN, result)
                return True
        return False

    async def _initialize(self, exchange: InFlight) -> None:
        params = {
            "protocolVersion": HANDSHAKE,
            "capabilities": self._client_capabilities,
            "clientInfo": CLIENT_INFO,
        }
        exchange.headers = {}  # no revision is agreed on before the handshake
        try:
            result = await self.link.request("initialize", params, exchange)
        except RpcError as exc:
            # A slow server that read the probe only after we gave up on it now insists on the newer revision.
            if exc.code == _UNSUPPORTED_VERSION and await self._discover(exchange):
                return
            raise Unavailable("server_start", f"server {self.spec.name} refused to start: {exc.message}") from None
        version = result.get("protocolVersion")
        if version not in HANDSHAKES:
            raise Unavailable(
                "server_version",
                f"server {self.spec.name} speaks revision {version!r}, which Ringfence does not support",
            )
        self._adopt(str(version), result)
        await self._notify("notifications/initialized", None)

    def _adopt(self, version: str, result: Json) -> None:
        self.version = version
        capabilities = result.get("capabilities")
        self.server_capabilities = capabilities if isinstance(capabilities, dict) else {}

    async def refresh(self, exchange: InFlight | None = None) -> None:
        """Read the server's tools and prompts anew. Raises Unavailable where there are too many."""
        quiet = exchange or InFlight(ask=self._answer_outside_calls, tell=_discard_notification)
        found: dict[tuple[str, str], Definition] = {}
        self.listed_bytes = 0
        for kind, method, key in _DEFINITION_LISTS:
            if key in self.server_capabilities:
                bodies = await self.list_all(method, key, quiet)
                found |= await self._floods.in_thread(partial(self._defined, kind, bodies))
        self.definitions = found

    def _defined(self, kind: Literal["tool", "prompt"], bodies: list[Json]) -> dict[tuple[str, str], Definition]:
        named = [(body["name"], body) for body in bodies if isinstance(body.get("name"), str)]
        return {
            (kind, name): Definition(self.spec.name, name, canonical.definition_digest(body), body, kind)
            for name, body in named
        }

    async def list_all(self, method: str, key: str, exchange: InFlight | None = None) -> list[Json]:
        """All entries of a list, page by page. Raises Unavailable for a list that is too long."""
        most = _MAX_LENGTHS[key]
        quiet = exchange or InFlight(ask=self._answer_outside_calls, tell=_discard_notification)
        out: list[Json] = []
        size = 0
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            params: Json = {} if cursor is None else {"cursor": cursor}
            try:
                result = await self._send(method, params, quiet, {}, None)
            except RpcError as exc:
                if exc.code == _METHOD_NOT_FOUND:
                    return out
                raise Unavailable(
                    "server_listing", f"server {self.spec.name}: {method} failed: {exc.message}"
                ) from None
            if result.get("resultType", "complete") != "complete":
                raise Unavailable("server_listing", f"server {self.spec.name}: {method} gave no complete result")
            items = result.get(key)
            items = items if isinstance(items, list) else []
            if len(out) + len(items) > most:
                self.listed_bytes += _MAX_LISTING_BYTES
                text = (
                    f"server {self.spec.name}: {method} lists more than {most:,} {key}, which is the most that is read"
                )
                raise Unavailable("server_listing", text)
            size += await self._floods.in_thread(partial(_size, result))
            if size > _MAX_LISTING_BYTES:
                self.listed_bytes += _MAX_LISTING_BYTES
                text = f"server {self.spec.name}: {method} lists more than {_MAX_LISTING_BYTES:,} bytes of {key}"
                raise Unavailable("server_listing", f"{text}, which is the most that is read")
            out.extend(item for item in items if isinstance(item, dict))
            cursor = result.get("nextCursor")
            if not isinstance(cursor, str):
                self.listed_bytes += size
                return out
        self.listed_bytes += _MAX_LISTING_BYTES
        raise Unavailable("server_listing", f"server {self.spec.name}: {method} has more than {_MAX_PAGES} pages")

    def check_pin(self, pinned: Definition | None) -> None:
        """Raise Unavailable unless the server still offers the definition that was accepted."""
        if pinned is None:
            return
        live = self.definitions.get((pinned.kind, pinned.name))
        if live is None:
            raise Unavailable("tool_gone", f"server {pinned.server} no longer offers {pinned.name}")
        if live.digest != pinned.digest:
            raise Unavailable("pin_changed", f"the definition of {pinned.name} is not the one that was accepted")

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    async def request(self, request: UpstreamRequest) -> Json:
        """Make one governed request. Raises what `ports.Upstreams.request` says."""
        before = self._between_calls()
        during = self.link.network_meter()
        self._calls += 1
        try:
            if before is not None:
                await self.on_idle_network(before)
            return await self._run_request(request)
        finally:
            self._calls -= 1
            if request.asked is not None:
                request.asked(during())
            if not self._calls:
                self._idle_network = self.link.network_meter()

    async def ended(self) -> None:
        """Called when the server is gone: report the network requests of its box since the last call."""
        if (found := self._between_calls()) is not None:
            await self.on_idle_network(found)

    def _between_calls(self) -> Json | None:
        """The network requests of the server's box since the last call; None if a call runs or there were none."""
        if self._calls:
            return None
        found = self.link.network_since_start() if self._idle_network is None else self._idle_network()
        return found if found is not None and any(found.values()) else None

    @property
    def waiting_since(self) -> list[float]:
        """For each call that waits for an answer of its client: since when it does."""
        return [call.asked_at for call in self._running if call.asked_at is not None]

    def give_up(self) -> None:
        """End the calls that run, since other clients need the server. The connection must not be used after this."""
        for call in self._running:
            call.gave_way = True
            call.clock.cancel()

    async def _answer_outside_calls(self, method: str, params: Json) -> Json:
        """Answer a question of the server that belongs to no call: only that for the roots has an answer."""
        if method != ROOTS_METHOD:
            raise RpcError(_METHOD_NOT_FOUND, f"{method} belongs to no call in progress")
        return self.roots.answer()

    async def _run_request(self, request: UpstreamRequest) -> Json:
        await self.roots.settle(request, self._notify)
        with anyio.CancelScope(deadline=anyio.current_time() + request.timeout) as clock:
            running = _RunningCall(clock)
            turns: list[anyio.Lock] = []  # made for the first question: most calls have none
            counted = _QuestionCount(self.spec.name)

            async def asking(questions: Mapping[str, Json]) -> Mapping[str, Json]:
                if not turns:
                    turns.append(anyio.Lock())
                async with turns[0]:
                    left = clock.deadline - anyio.current_time()
                    clock.deadline = float("inf")  # the server's time stands still while a person thinks
                    running.asked_at = anyio.current_time()
                    try:
                        return await request.channel.ask(questions)
                    finally:
                        running.asked_at = None
                        clock.deadline = anyio.current_time() + left

            async def ask(method: str, params: Json) -> Json:
                if problem := counted.count(1):
                    raise RpcError(-32600, problem)
                question = await self._question_for_client(request, method, params)
                try:
                    answer = (await asking({"question": question})).get("question")
                except Refused as exc:
                    raise RpcError(-32603, f"there is no answer ({exc.reason_code})") from None
                if not isinstance(answer, dict):
                    raise RpcError(-32603, "the client gave no answer")
                return answer

            async def tell(method: str, params: Json) -> None:
                await (request.channel.notify if method in SAID_IN_CALLS else self.on_notification)(method, params)

            exchange = InFlight(ask=ask, tell=tell, client=request.session, own_headers=request.headers)
            self._running.append(running)
            try:
                return await self._rounds(request, exchange, counted, asking)
            except RpcError as exc:
                raise self._failure(exc, request.channel.capabilities) from None
            finally:
                self._running.remove(running)
        if running.gave_way:
            text = f"other clients needed server {self.spec.name} while this call waited for its client's answer"
            raise OutcomeUnknown("gave_way", f"{text}, so it was given up; it may have run")
        raise Refused(
            Status.TIMEOUT,
            "timeout",
            f"server {self.spec.name} gave no answer within {request.timeout:g} s",
        )

    async def _rounds(
        self,
        request: UpstreamRequest,
        exchange: InFlight,
        counted: _QuestionCount,
        asking: Callable[[Mapping[str, Json]], Awaitable[Mapping[str, Json]]],
    ) -> Json:
        sent = request.params
        capabilities = relayed_capabilities(self.spec, request.channel.capabilities)
        if self.modern and request.log_level is not None:
            sent = {**sent, "_meta": {**_mapping(sent.get("_meta")), _LOG_LEVEL: request.log_level}}
        params = sent
        for turn in range(_MAX_ROUNDS):
            try:
                result = await self._send(request.method, params, exchange, capabilities, request.definition)
            except (Unavailable, Refused) as exc:
                if not turn:
                    raise
                # The server has had the request since the first round, even if this round was not sent.
                raise OutcomeUnknown(exc.reason_code, exc.message) from None
            if result.get("resultType") != "input_required":
                return result  # the guard withholds a result that is not `complete`
            wanted = _mapping(result.get("inputRequests"))
            if problem := counted.count(len(wanted)):
                raise Refused(Status.FAILED, "too_many_rounds", problem)
            questions: dict[str, Json] = {}
            answers: dict[str, Json] = {}
            for key, item in wanted.items():
                method = _mapping(item).get("method")
                try:
                    questions[key] = await self._question_for_client(
                        request, str(method), _mapping(_mapping(item).get("params"))
                    )
                except RpcError as exc:
                    if method != "elicitation/create":
                        # Not VALIDATION_FAILURE: the server has had the request, so the call may have run.
                        raise Refused(Status.FAILED, "server_question", exc.message) from None
                    answers[key] = {"action": "decline"}
            if questions or not answers:
                answers.update(await asking(questions))
            params = {**sent, "inputResponses": answers}
            if "requestState" in result:
                params["requestState"] = result["requestState"]
        raise Refused(Status.FAILED, "too_many_rounds", f"server {self.spec.name} asked more than {_MAX_ROUNDS} times")

    async def _question_for_client(self, request: UpstreamRequest, method: str, params: Json) -> Json:
        """The question as it is sent to the client, labelled with the server's name. Raises RpcError where the server
        may not ask it."""
        capability = _CAPABILITY.get(method)
        if capability is None:
            raise RpcError(_METHOD_NOT_FOUND, f"{method} is not relayed")
        setting = {"elicitation": self.spec.elicitation, "sampling": self.spec.sampling, "roots": "allow"}[capability]
        if setting == "deny":
            raise RpcError(-32600, f"{capability} is denied for server {self.spec.name}")
        if capability not in request.channel.capabilities:
            raise RpcError(_METHOD_NOT_FOUND, f"the client does not support {capability}")
        if capability == "sampling" and setting == "ask" and not await self._consent(request, method, params):
            raise RpcError(-32600, f"no person approved sampling by server {self.spec.name}")
        if capability == "elicitation":
            _check_mode(params, _mapping(request.channel.capabilities["elicitation"]))
        labelled = {name: value for name, value in params.items() if name in _RELAYED_KEYS[method]}
        own = {k: v for k, v in _mapping(params.get("_meta")).items() if not k.startswith("ringfence/")}
        labelled["_meta"] = {**own, "ringfence/server": self.spec.name}
        if capability == "elicitation":
            labelled["message"] = f"[{self.spec.name}] {params.get('message', '')}"
        return {"method": method, "params": labelled}

    async def _notify(self, method: str, params: Json | None) -> None:
        await self.link.notify(method, params, {"mcp-protocol-version": self.version})

    async def _send(
        self, method: str, params: Json, exchange: InFlight, capabilities: Json, definition: Definition | None
    ) -> Json:
        if self.modern:
            params, headers = self._envelope(method, params, capabilities, definition)
        else:
            headers = {"mcp-protocol-version": self.version} if self.version else {}
        exchange.headers = {**headers, **exchange.own_headers} if exchange.own_headers else headers
        return await self.link.request(method, params, exchange)

    def _envelope(
        self, method: str, params: Json, capabilities: Json, definition: Definition | None
    ) -> tuple[Json, dict[str, str]]:
        meta = {
            **_mapping(params.get("_meta")),
            f"{_PREFIX}protocolVersion": MODERN,
            f"{_PREFIX}clientInfo": CLIENT_INFO,
            f"{_PREFIX}clientCapabilities": capabilities,
        }
        headers = {"mcp-protocol-version": MODERN, "mcp-method": method}
        named = params.get(_NAMED_BY.get(method, ""))
        if isinstance(named, str):
            headers["mcp-name"] = encode_header_value(named)
        if definition is not None:
            repeated = self._header_arguments(definition)
            if repeated:
                headers.update(mcp_param_headers(repeated, _mapping(params.get("arguments"))))
        return {**params, "_meta": meta}, headers

    def _header_arguments(self, definition: Definition) -> dict[tuple[str, ...], str]:
        """The arguments that a tool wants to have repeated as headers; found once for each definition."""
        found = self._header_maps.get(definition.digest)
        if found is None:
            schema = definition.body.get("inputSchema")
            found = x_mcp_header_map(schema) if find_invalid_x_mcp_header(schema) is None else {}
            self._header_maps[definition.digest] = found
        return found

    def _failure(self, exc: RpcError, capabilities: Json) -> Exception:
        reason = "answer_unusable" if isinstance(exc, AnswerUnusable) else "upstream_error"
        if exc.code == _VISIT_URL:
            return self._url_failure(exc, capabilities)
        if exc.code == _MISSING_CAPABILITY:
            missing = _mapping(_mapping(exc.data).get("requiredCapabilities"))
            named: Json = {"requiredCapabilities": {name: {} for name in _CAPABILITY_PARTS if name in missing}}
            return UpstreamFailed(reason, exc.code, exc.message, named)
        return UpstreamFailed(reason, exc.code, exc.message, exc.data)

    def _url_failure(self, exc: RpcError, capabilities: Json) -> Exception:
        """The error of a server that wants its user to visit a URL first. Such a question needs the same permission as
        any other."""
        denied = self.spec.elicitation == "deny" or "url" not in _mapping(capabilities.get("elicitation"))
        asked = _mapping(exc.data).get("elicitations")
        shown = (
            []
            if denied or not isinstance(asked, list)
            else [found for found in map(self._url_question, asked) if found]
        )
        if not shown:
            why = "that is denied for it" if self.spec.elicitation == "deny" else "it cannot be asked of the client"
            text = f"server {self.spec.name} wants a URL to be visited first, and {why}"
            return Refused(Status.FAILED, "server_question", text)
        return UpstreamFailed("upstream_error", exc.code, exc.message, {"elicitations": shown})

    def _url_question(self, entry: Any) -> Json | None:
        """One URL to visit, composed anew of the keys that we know; None where it is not valid."""
        entry = _mapping(entry)
        ident = entry.get("elicitationId")
        message = entry.get("message")
        if entry.get("mode") != "url" or not _is_web(entry.get("url")):
            return None
        if not isinstance(ident, str) or len(ident) > _MAX_TEXT:  # an id must not be cut
            return None
        text = f"[{self.spec.name}] {message if isinstance(message, str) else ''}"
        return {"mode": "url", "url": entry["url"], "elicitationId": ident, "message": text}

    # ── subscriptions ────────────────────────────────────────────────────────────

    async def listen(self, uris: frozenset[str], tell: OnNotification) -> None:
        """Hold one subscription stream open until cancelled (2026-07-28)."""
        wanted: Json = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}
        if uris:
            wanted["resourceSubscriptions"] = sorted(uris)
        exchange = InFlight(ask=self._answer_outside_calls, tell=tell)
        try:
            await self._send("subscriptions/listen", {"notifications": wanted}, exchange, {}, None)
        except RpcError as exc:
            log.debug("server %s offers no subscriptions: %s", self.spec.name, exc.message)


_CAPABILITY_PARTS = {"elicitation": ("form", "url"), "sampling": ("tools",), "roots": ()}


def relayed_capabilities(spec: ServerSpec, capabilities: Json) -> Json:
    """The capabilities of the client that this server may use, composed anew of the keys that we know."""
    out: Json = {}
    for name, aspects in _CAPABILITY_PARTS.items():
        own = capabilities.get(name)
        if isinstance(own, dict):
            out[name] = {aspect: {} for aspect in aspects if isinstance(own.get(aspect), dict)}
    if "roots" in out and _mapping(capabilities["roots"]).get("listChanged") is True:
        out["roots"]["listChanged"] = True
    if spec.elicitation == "deny":
        out.pop("elicitation", None)
    if spec.sampling == "deny":
        out.pop("sampling", None)
    return out


def _check_mode(params: Json, declared: Json) -> None:
    """Raise RpcError unless the client can show this kind of question."""
    mode = params.get("mode", "form")
    if mode not in ("form", "url"):
        raise RpcError(-32602, "a question is a form, or a URL to visit")
    if mode not in declared and (mode == "url" or "url" in declared):  # one that names neither can show forms
        raise RpcError(-32602, f"the client cannot be asked {'to visit a URL' if mode == 'url' else 'by a form'}")
    if mode == "url" and not _is_web(params.get("url")):
        raise RpcError(-32602, "a URL to visit begins with http:// or https://")


def _is_web(url: Any) -> bool:
    """Whether a browser would visit it, and a person can read it."""
    return isinstance(url, str) and len(url) <= _MAX_TEXT and _WEB_URL.fullmatch(url) is not None


def _size(result: Json) -> int:
    return len(canonical.message(result, "surrogatepass"))


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


async def _discard_notification(method: str, params: Json) -> None:
    return None


async def _discard_network(network: Json) -> None:
    return None


# ── Roots ─────────────────────────────────────────────────────────────────────────────────────────
#
# The folders that a client says it works on, for servers that ask for them outside of any call. They are passed on as
# the client states them, and are no boundary: a server can reach only what its box has. A client can be asked only
# while a call of its own runs, so it is asked when a connection is opened for it, and again in its first call after it
# said that they changed.


async def ask_roots(request: UpstreamRequest) -> Json | None:
    """The roots that the client of a call states; None where it does not answer."""
    question: Json = {"method": ROOTS_METHOD, "params": {"_meta": {"ringfence/server": request.server}}}
    with anyio.move_on_after(_ASK_SECONDS):
        try:
            answer = (await request.channel.ask({"roots": question})).get("roots")
        except Refused:
            return None
        return answer if isinstance(answer, dict) else None
    return None


async def first_roots(request: UpstreamRequest, capabilities: Json) -> Roots:
    """The roots for a connection that is opened for this call's client alone; a shared connection has none."""
    return Roots(await ask_roots(request) if "roots" in capabilities and request.session is not None else None)


@dataclass(slots=True, eq=False)
class _RunningCall:
    """A call that runs."""

    clock: anyio.CancelScope
    asked_at: float | None = None
    """When it began to wait for an answer of its client, while it does."""
    gave_way: bool = False


class _QuestionCount:
    """Counts the server's questions in one call. While one waits for its answer the call's clock stands still, so a
    server that asked without end would never meet its deadline."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._left = _MAX_QUESTIONS

    def count(self, more: int) -> str | None:
        """Count so many more. Returns what is wrong once there are too many, else None."""
        self._left -= more
        return f"{self._server} asked more than {_MAX_QUESTIONS} times in one call" if self._left < 0 else None


class Roots:
    """The folders that a client works on, as one connection knows them."""

    def __init__(self, roots: Json | None = None) -> None:
        self._roots = roots
        self._stale = False
        self._heard = anyio.Event()
        self._wanted = False
        self._at = float("-inf")

    def change(self) -> None:
        """The client said that its roots changed."""
        self._stale = self._roots is not None

    def answer(self) -> Json:
        """The roots, for a server that asks. Raises RpcError where the client named none."""
        if self._roots is None:
            raise RpcError(_METHOD_NOT_FOUND, f"{ROOTS_METHOD} belongs to no call in progress")
        self._wanted = True
        self._at = anyio.current_time()
        self._heard.set()
        return self._roots

    async def settle(self, request: UpstreamRequest, notify: Callable[[str, Json | None], Awaitable[None]]) -> None:
        """Pass on changed roots before a call goes to the server, and give the server a moment to read them."""
        if self._stale:
            self._stale = False
            self._roots = await ask_roots(request) or self._roots
            self._heard = anyio.Event()
            await notify(ROOTS_CHANGED, None)
            if self._wanted:
                with anyio.move_on_after(_HEAR_SECONDS):
                    await self._heard.wait()
        left = self._at + _SETTLE_SECONDS - anyio.current_time()
        if left > 0:
            await anyio.sleep(left)
