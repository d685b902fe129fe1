"""MCP on the SDK's low-level server: one middleware sees every request before the SDK's types do.

It answers whatever concerns what lies behind the gateway, with raw dicts, so that unknown fields, content types and
schemas pass unchanged; the handshake, discovery, ping and subscriptions stay the SDK's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import anyio.abc
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ServerEvent
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, SubscriptionsListenRequestParams, SubscriptionsListenResult

from ringfence.core import canonical
from ringfence.core.model import Call, CallKind, Json, Outcome, Principal
from ringfence.core.quoting import quoted
from ringfence.front import results
from ringfence.front.calls import CallPipeline
from ringfence.front.inbound import (
    LOG_LEVEL_KEY,
    LOG_LEVELS,
    MAX_WATCHED,
    ClientChannel,
    ClientRequest,
    Inbound,
    PausableChannel,
    PausedCalls,
    WaitingForClients,
    Watching,
)
from ringfence.front.listing import Listing
from ringfence.front.refusals import Refusals
from ringfence.governance.call_meta import trace_problem
from ringfence.governance.uris import normal_uri
from ringfence.sandbox.tools.toolkit import SERVER
from ringfence.upstream.link import MODERN
from ringfence.upstream.pool import ConnectionPool, SilentChannel

log = logging.getLogger("ringfence.front")

Context = ServerRequestContext[Any, Any]
_HANDSHAKE_ONLY = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})
_CALLS: Mapping[str, tuple[CallKind, str]] = {
    "tools/call": ("tool", "name"),
    "resources/read": ("resource", "uri"),
    "resources/subscribe": ("resource", "uri"),
    "prompts/get": ("prompt", "name"),
    "completion/complete": ("completion", "ref"),
}
"""Requests of clients that are calls: their kinds, and which of their params names what they are about."""
_TOO_MANY = f"no more than {MAX_WATCHED} resources can be subscribed to"
_QUESTIONS = ("elicitation", "sampling", "roots")


class McpFront:
    """Turns MCP requests into calls. One object serves every transport and both revisions."""

    def __init__(self, pipeline: CallPipeline, pool: ConnectionPool, group: anyio.abc.TaskGroup, version: str) -> None:
        self._pipeline = pipeline
        self._pool = pool
        self.listing = Listing(pipeline)
        self._places = WaitingForClients()
        self.paused = PausedCalls(pipeline, group, self._places)
        self._group = group
        self._watchers: Counter[tuple[str, str]] = Counter()
        self._watched_at: dict[tuple[str, str], str] = {}
        """The server that each of these is watched at."""
        self._buses: dict[str, InMemorySubscriptionBus] = {}
        self._listeners: dict[str, ListenHandler] = {}
        self.refusals = Refusals()
        self.left_files: Callable[[Principal], Awaitable[None]] = _no_notice
        """Called when a session of this principal left new files."""
        self.settled: Callable[[], Awaitable[None]] = _settled
        """Awaited before each request: until it is known what servers offer, or for as long as a client may wait."""
        self._methods: dict[str, Callable[[ClientRequest, Inbound], Awaitable[Json]]] = {
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
            "resources/list": self._list_resources,
            "resources/templates/list": self._list_templates,
            "resources/read": self._resource,
            "resources/subscribe": self._subscribe,
            "resources/unsubscribe": self._unsubscribe,
            "prompts/list": self._list_prompts,
            "prompts/get": self._prompt,
            "completion/complete": self._complete,
            "logging/setLevel": self._set_level,
        }
        self.server: Server[Any] = Server(
            "ringfence",
            version=version,
            get_tool_input_schema=self.listing.header_schema,
            on_subscriptions_listen=self._listen,
        )
        for method in self._methods:
            # Registered so that the SDK derives the capabilities; the middleware answers before they are reached.
            self.server.add_request_handler(method, SubscriptionsListenRequestParams, _unreachable)
        self.server.middleware[:] = [self._middleware]
        self._stamp = self.server.server_info_stamp

    @property
    def init_options(self) -> InitializationOptions:
        changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return self.server.create_initialization_options(changes)

    async def _middleware(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        if ctx.request_id is None or not self.answers(ctx.method, ctx.protocol_version):
            return await call_next(ctx)
        inbound = ctx.request
        assert isinstance(inbound, Inbound)
        if ctx.protocol_version != MODERN and ctx.session.client_params is None:
            inbound.reason = "not_initialized"
            raise MCPError(INVALID_PARAMS, "the session is not initialized")
        declared = results.declared(ctx.session.client_capabilities)
        return await self.answer(ClientRequest(ctx.method, ctx.params or {}, ctx.protocol_version, inbound, declared))

    def answers(self, method: str, version: str) -> bool:
        """Whether a method is ours; the others are the SDK's."""
        return method in self._methods and not (version == MODERN and method in _HANDSHAKE_ONLY)

    def lacking_scopes(self, principal: Principal, method: str, params: Any) -> tuple[str, ...]:
        """The scopes that a caller has to ask its identity provider for, before it makes this call."""
        name = params.get("name") if method == "tools/call" and isinstance(params, dict) else None
        return self._pipeline.rules.permissions.lacking(principal, name) if isinstance(name, str) else ()

    def may_read_metrics(self, principal: Principal) -> bool:
        return self._pipeline.rules.permissions.of(principal).reads_metrics

    def known(self, method: str) -> str | None:
        """A method's name, if it is none that its caller made up."""
        return method if method in self._methods or method in ("initialize", "ping", "server/discover") else None

    async def answer(self, asked: ClientRequest) -> Json:
        """The result of a method that is ours. Raises MCPError."""
        try:
            await self.settled()
            result = await self._methods[asked.method](asked, asked.inbound)
        except anyio.get_cancelled_exc_class():
            if not asked.inbound.called:
                with anyio.CancelScope(shield=True):
                    await self._withdrawn(asked)
            raise
        if asked.version == MODERN:
            return results.stamp(result, asked.method, self._stamp)
        return results.unstamp(result)

    async def _withdrawn(self, asked: ClientRequest) -> None:
        """What would have been a call is on record as one, even if its client took it back before it was."""
        kind, place = _CALLS.get(asked.method, (None, ""))
        if kind is None:
            return
        named = asked.params.get(place)
        if isinstance(named, dict):
            named = named.get("name") or named.get("uri")
        arguments = asked.params.get("arguments") if kind == "tool" else {place: named}
        name = named if isinstance(named, str) else ""
        call = self._make(asked, kind, name, arguments if isinstance(arguments, dict) else {})
        await self._pipeline.withdrawn(call)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────

    async def _call_tool(self, asked: ClientRequest, inbound: Inbound) -> Json:
        params = asked.params
        name = params.get("name")
        arguments = params.get("arguments")
        fault = inbound.fault
        if not isinstance(name, str):
            fault, name = fault or "the tool's name must be a string", ""
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            fault, arguments = fault or "arguments must be an object", {}
        session = results.meta_of(params).get("ringfence/session")
        if session is not None and "session" not in arguments and self.listing.takes_session(name):
            arguments = {**arguments, "session": session}
        call = self._make(asked, "tool", name, arguments)
        outcome = await self._run(asked, inbound, call if fault is None else results.with_fault(call, fault))
        if isinstance(outcome, dict):
            return outcome
        if outcome.ran is not None and outcome.within is not None and outcome.ran.report.files:
            await self.left_files(inbound.principal)
        return results.tool_result(outcome, call, asked.version)

    async def _resource(self, asked: ClientRequest, inbound: Inbound) -> Json:
        uri = asked.params.get("uri")
        if not isinstance(uri, str):
            raise MCPError(INVALID_PARAMS, "uri must be a string")
        server = await self.listing.resource_server(inbound.principal, uri)
        return await self._item(asked, inbound, self._make(asked, "resource", uri, {"uri": uri}, server))

    async def _prompt(self, asked: ClientRequest, inbound: Inbound) -> Json:
        params = asked.params
        name = params.get("name")
        if not isinstance(name, str):
            raise MCPError(INVALID_PARAMS, "name must be a string")
        await self.listing.prepare_prompts()
        server, own = self.listing.prompt(name) or (None, name)
        wanted: Json = {"name": own}
        arguments = params.get("arguments")
        if isinstance(arguments, dict):
            wanted["arguments"] = arguments
        call = self._make(asked, "prompt", name, wanted, server)
        if arguments is not None and not isinstance(arguments, dict):
            call = results.with_fault(call, call.fault or "arguments must be an object")
        return await self._item(asked, inbound, call)

    async def _complete(self, asked: ClientRequest, inbound: Inbound) -> Json:
        params = {k: v for k, v in asked.params.items() if k in ("ref", "argument", "context")}
        ref = params.get("ref")
        ref = ref if isinstance(ref, dict) else {}
        server: str | None = None
        if ref.get("type") == "ref/prompt":
            await self.listing.prepare_prompts()
            found = self.listing.prompt(str(ref.get("name")))
            if found is not None:
                server, params["ref"] = found[0], {**ref, "name": found[1]}
        elif isinstance(ref.get("uri"), str):
            server = await self.listing.resource_server(inbound.principal, ref["uri"])
        target = str(ref.get("name") or ref.get("uri") or "")
        return await self._item(asked, inbound, self._make(asked, "completion", target, params, server))

    async def _item(self, asked: ClientRequest, inbound: Inbound, call: Call) -> Json:
        outcome = await self._run(asked, inbound, call)
        if isinstance(outcome, dict):
            return outcome
        if outcome.ok and outcome.result is not None:
            return results.with_meta(outcome.result, outcome, call)
        raise results.item_error(outcome, call, asked.version)

    def _make(
        self, asked: ClientRequest, kind: CallKind, tool: str, arguments: Json, server: str | None = None
    ) -> Call:
        inbound = asked.inbound
        meta = results.meta_of(asked.params)
        key = meta.get("ringfence/idempotency_key")
        wait = meta.get("ringfence/wait_seconds", 0)
        inputs = asked.params.get("inputResponses")
        # A server of 2026-07-28 logs only what is asked for; a client of before asked once for its session.
        level = meta.get(LOG_LEVEL_KEY) if asked.version == MODERN else inbound.log_level[0]
        parent = meta.get("traceparent")
        return Call(
            id=canonical.new_id("call"),
            principal=inbound.principal,
            tool=tool,
            arguments=arguments,
            kind=kind,
            origin=inbound.origin,
            server=server,
            # 2026-07-28 has no sessions: each of its calls stands for itself, also on one pipe.
            box=box if isinstance(box := meta.get("ringfence/session"), str) else None,
            session=inbound.session if asked.version != MODERN else None,
            idempotency_key=key if isinstance(key, str) else None,
            trace=parent if trace_problem("traceparent", parent) is None else None,
            # A client that said nothing may give up before a person answers, and its agent would never learn of it.
            wait_seconds=float(wait) if _is_seconds(wait) else 0.0,
            fault=inbound.fault or _shape_problem(asked.params) or _key_problem(key) or _wait_problem(wait),
            method=asked.method,
            meta=results.forwardable(meta),
            log_level=level if level in LOG_LEVELS else None,
            inputs=inputs if isinstance(inputs, dict) else None,
        )

    async def _run(self, asked: ClientRequest, inbound: Inbound, call: Call) -> Outcome | Json:
        """The outcome, or the `input_required` answer of a call that waits for its client."""
        assert inbound.outbound is not None
        inbound.called = True
        if asked.version != MODERN:
            place = partial(self._places.take, call)
            own = ClientChannel(inbound.outbound, asked.capabilities, inbound.log_level[0], place)
            return await self._pipeline.handle(call, own)
        capabilities = asked.capabilities
        level = results.meta_of(asked.params).get(LOG_LEVEL_KEY)
        state = asked.params.get("requestState")
        # Of a request that is at fault nothing is acted upon: it is refused as a call of its own, and the one that it
        # would go on with waits.
        if call.fault is not None or (state is None and not any(q in capabilities for q in _QUESTIONS)):
            return await self._pipeline.handle(call, ClientChannel(inbound.outbound, capabilities, level))
        channel = PausableChannel(capabilities)
        channel.outbound = inbound.outbound
        channel.log_level = level
        if state is None:
            return await self.paused.begin(call, channel)
        inbound.called = False  # until the call is found that this goes on with
        return await self.paused.resume(str(state), call, channel, inbound.becomes_call)

    # ── lists ─────────────────────────────────────────────────────────────────────────────────────

    async def _list_tools(self, asked: ClientRequest, inbound: Inbound) -> Json:
        return {"tools": self.listing.tools(asked.version, inbound.principal)}

    async def _list_prompts(self, asked: ClientRequest, inbound: Inbound) -> Json:
        await self.listing.prepare_prompts()
        return {"prompts": self.listing.prompts(asked.version, inbound.principal)}

    async def _list_resources(self, asked: ClientRequest, inbound: Inbound) -> Json:
        return {"resources": await self._resources(asked, templates=False)}

    async def _list_templates(self, asked: ClientRequest, inbound: Inbound) -> Json:
        return {"resourceTemplates": await self._resources(asked, templates=True)}

    async def _resources(self, asked: ClientRequest, *, templates: bool) -> list[Json]:
        inbound = asked.inbound
        return await self.listing.resources(
            inbound.principal, templates=templates, origin=inbound.origin, version=asked.version
        )

    # ── subscriptions and log levels ──────────────────────────────────────────────────────────────

    async def _subscribe(self, asked: ClientRequest, inbound: Inbound) -> Json:
        uri = _watchable(asked.params.get("uri"))
        watching = inbound.watching
        if uri not in watching.uris:
            if len(watching.uris) >= MAX_WATCHED:
                raise MCPError(INVALID_PARAMS, _TOO_MANY)
            await self._watch(inbound, uri, asked.version)
            # Meanwhile the session may have ended, or have been subscribed by another request.
            full = len(watching.uris) >= MAX_WATCHED
            if watching.over or full or uri in watching.uris:
                await self.forget(inbound.principal, {uri})
                if full:
                    raise MCPError(INVALID_PARAMS, _TOO_MANY)
            else:
                watching.uris.add(uri)
        return {}

    async def _unsubscribe(self, asked: ClientRequest, inbound: Inbound) -> Json:
        uri = _watchable(asked.params.get("uri"))
        if uri in inbound.watching.uris:
            inbound.watching.uris.discard(uri)
            await self.forget(inbound.principal, {uri})
        return {}

    async def _watch(self, inbound: Inbound, uri: str, version: str) -> None:
        """A call like any other, also where the server has the subscription already. Raises MCPError."""
        principal = inbound.principal
        server = await self.listing.resource_server(principal, uri)
        if server == SERVER:  # what a session leaves is announced as a change of the list
            raise MCPError(INVALID_PARAMS, f"no resource {quoted(uri, 1000)} is offered that could be subscribed to")
        call = _aside("resource", "resources/subscribe", inbound, uri, {"uri": uri})
        call = replace(call, server=server, session=inbound.session)
        assert inbound.outbound is not None
        inbound.called = True
        self._watchers[principal.key, uri] += 1  # from now on: nobody else ends it meanwhile
        if server is not None:
            self._watched_at.setdefault((principal.key, uri), server)
        try:
            outcome = await self._pipeline.handle(call, ClientChannel(inbound.outbound, {}, None))
        except BaseException:
            # The server may have it already, and nobody would end it.
            with anyio.CancelScope(shield=True):
                await self.forget(principal, {uri})
            raise
        if not outcome.ok:
            self._unwatch(principal, uri)
            raise results.item_error(outcome, call, version)

    async def forget(self, principal: Principal, uris: set[str]) -> None:
        """A session watches these no longer; with the last one, the server is unsubscribed."""
        for uri in uris:
            server = self._watched_at.get((principal.key, uri))
            if self._unwatch(principal, uri):
                continue
            if server is not None:
                call = _aside("resource", "resources/unsubscribe", Inbound(principal, "system"), uri, {"uri": uri})
                outcome = await self._pipeline.handle(replace(call, server=server), SilentChannel())
                if not outcome.ok:
                    log.debug("server %s did not take the end of a subscription: %s", server, outcome.message)

    def _unwatch(self, principal: Principal, uri: str) -> int:
        """How many of this principal's sessions and streams watch it, one less now."""
        key = (principal.key, uri)
        self._watchers[key] -= 1
        left = self._watchers[key]
        if left <= 0:
            del self._watchers[key]
            self._watched_at.pop(key, None)
        return left

    def hears(self, principal: Principal, uri: str, server: str) -> bool:
        """Whether this principal is subscribed to a resource at this server. Another that may have the same one says
        nothing of its changes."""
        return self._watched_at.get((principal.key, uri)) == server

    async def _set_level(self, asked: ClientRequest, inbound: Inbound) -> Json:
        level = asked.params.get("level")
        if level not in LOG_LEVELS:
            raise MCPError(INVALID_PARAMS, f"level must be one of {', '.join(LOG_LEVELS)}")
        inbound.log_level[0] = str(level)  # what reaches the client is cut here, whatever servers make of it
        for server in self._pool.logging(inbound.principal):
            call = _aside("logging", asked.method, inbound, asked.method, {"level": level})
            outcome = await self._pipeline.handle(
                replace(call, server=server, session=inbound.session), SilentChannel()
            )
            if not outcome.ok:
                log.debug("server %s did not take the log level: %s", server, outcome.message)
        return {}

    async def _listen(self, ctx: Context, params: SubscriptionsListenRequestParams) -> SubscriptionsListenResult:
        inbound = ctx.request
        assert isinstance(inbound, Inbound)
        principal = inbound.principal
        watched: set[str] = set()
        wanted = params.notifications.resource_subscriptions or ()
        if len(wanted) > MAX_WATCHED:
            raise MCPError(INVALID_PARAMS, _TOO_MANY)
        try:
            for uri in dict.fromkeys(map(_watchable, wanted)):  # each once, since it is ended once
                try:
                    await self._watch(inbound, uri, ctx.protocol_version)
                    watched.add(uri)
                except MCPError as exc:
                    log.info("a subscription to %s will never report a change: %s", uri, exc)
            handler = self._listeners.setdefault(principal.key, ListenHandler(self._bus(principal)))
            return await handler(ctx, params)
        finally:
            with anyio.CancelScope(shield=True):
                await self.forget(principal, watched)

    def _bus(self, principal: Principal) -> InMemorySubscriptionBus:
        return self._buses.setdefault(principal.key, InMemorySubscriptionBus())

    async def publish(self, principal: Principal | None, event: ServerEvent) -> None:
        """Publish an event to the 2026-07-28 subscription streams of one principal, or of all."""
        buses = list(self._buses.values()) if principal is None else [self._bus(principal)]
        for bus in buses:
            await bus.publish(event)

    async def ended(self, session: str, principal: Principal, watching: Watching) -> None:
        """A client's session is over: what was kept for it alone goes."""
        watching.over = True
        watched, watching.uris = watching.uris, set()
        await self.forget(principal, watched)
        self._pool.release(session)

    def meanwhile(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do this while the request that gave the reason for it goes on."""

        async def do() -> None:
            try:
                await work()
            except Exception:  # the edge: what is done aside must not end the gateway
                log.exception("what a request left to be done failed inside the gateway")

        self._group.start_soon(do)

    def roots_changed(self, session: str) -> None:
        """A handshake-era client works on other folders now."""
        self._pool.roots_changed(session)

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()


async def _settled() -> None:
    return


def _shape_problem(params: Mapping[str, Any]) -> str | None:
    """What is no object is not left out either: its sender may rely on it."""
    bad = [name for name in ("_meta", "inputResponses") if not isinstance(params.get(name), dict | None)]
    return f"{bad[0]} must be an object" if bad else None


def _key_problem(key: Any) -> str | None:
    """A key that cannot be kept must not be left out either: its sender relies on it."""
    if key is None or (isinstance(key, str) and key):
        return None
    return "ringfence/idempotency_key must be a text that is not empty"


_MAX_SECONDS = 1e15
"""Far more than any contract allows, and little enough to be counted with."""


def _wait_problem(wait: Any) -> str | None:
    return None if _is_seconds(wait) else "ringfence/wait_seconds must be a number of seconds, 0 or more"


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MAX_SECONDS


def _watchable(uri: Any) -> str:
    """The URI as it is compared and sent; one that has no such form is refused as a call."""
    text = uri if isinstance(uri, str) else ""
    return normal_uri(text) or text


def _aside(kind: CallKind, method: str, inbound: Inbound, tool: str, arguments: Json) -> Call:
    """A request that is no call of the client's own, and goes the way of one."""
    return Call(canonical.new_id("call"), inbound.principal, tool, arguments, kind, inbound.origin, method=method)


async def _no_notice(principal: Principal) -> None:
    return None


async def _unreachable(ctx: Context, params: Any) -> Any:
    raise MCPError(-32603, "not answered by the gateway")
