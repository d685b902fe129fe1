"""All connections to all servers: who has which, when one is opened anew, when it is closed.

No connection is shared between principals; within one, clients that cannot be asked anything share one, and a client
that can has its own, so that a question reaches the one whose call caused it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc

from ringfence import canonical
from ringfence.errors import OutcomeUnknown, RingfenceError, Unavailable
from ringfence.model import Definition, Json, Principal, ServerSpec
from ringfence.ports import UpstreamRequest
from ringfence.upstream.connection import Connection, Consent, relayable
from ringfence.upstream.held import Health, Held, Key, Opening
from ringfence.upstream.http import HttpLink
from ringfence.upstream.link import HANDSHAKES, Link, RpcError
from ringfence.upstream.stdio import StdioLink

log = logging.getLogger("ringfence.upstream")

IDLE_SECONDS, _SWEEP_SECONDS = 300.0, 5.0
MAX_PER_SERVER = 32

Starting = Callable[[ServerSpec, Principal, Callable[[], Awaitable[None]]], Awaitable[None]]
Event = Callable[[str, Principal, str, Json], Awaitable[None]]
"""(server, principal, method, params): something a server said outside any call."""
Changed = Callable[[str, list[Definition]], Awaitable[None]]
"""(server, definitions): what a server offers now that it has said that its lists changed."""


class Pool:
    """Implements `ports.Upstreams`."""

    def __init__(
        self, servers: Mapping[str, ServerSpec], environment: Mapping[str, str], consent: Consent, on_event: Event
    ) -> None:
        self._servers = dict(servers)
        self._environment = environment
        self._consent = consent
        self._on_event = on_event
        self._held: dict[Key, Held] = {}
        self._openings: dict[Key, Opening] = {}
        self._health: dict[str, Health] = {}
        self._group: anyio.abc.TaskGroup | None = None
        self.starting: Starting = _unrecorded
        """Wraps every start of a server, so that it is on record."""
        self.changed: Changed = _unnoticed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._sweep)
            try:
                yield
            finally:
                self._group = None
                group.cancel_scope.cancel()

    def replace_servers(self, servers: Mapping[str, ServerSpec]) -> None:
        """After a reload: connections to servers that are gone or changed are closed."""
        for held in list(self._held.values()):
            name = held.key[0]
            if servers.get(name) != self._servers.get(name):
                self._drop(held)
        for name in [n for n in self._health if servers.get(n) != self._servers.get(n)]:
            del self._health[name]
        self._servers = dict(servers)

    def isolation(self, server: str) -> Json:
        """Until servers run in boxes of their own: none, and said so."""
        spec = self._servers.get(server)
        backend = "remote" if spec is not None and spec.url is not None else "host"
        return {"backend": backend, "level": "none", "protections": {}}

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    async def request(self, request: UpstreamRequest) -> Json:
        held = await self._get(request)
        held.users += 1
        health = self._health.get(request.server)
        if health is None:
            health = self._health[request.server] = Health()
        try:
            self._check_pin(held.connection, request.definition)
            result = await held.connection.request(request)
        except (OutcomeUnknown, Unavailable) as exc:
            # A dead process or a forgotten session is of no further use; a lost HTTP answer harms only itself.
            if exc.reason_code in ("server_died", "session_lost", "server_down"):
                self._drop(held)
            if exc.reason_code == "server_died":
                health.punish(exc.message)
            raise
        finally:
            held.users -= 1
            held.last_used = anyio.current_time()
        health.failures = 0
        return result

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        """What the server offers `principal` now, on the connection that its plain calls will use."""
        async with self._using(_asking_for(server, principal)) as held:
            return list(held.connection.definitions.values())

    async def resources(self, server: str, principal: Principal, *, templates: bool = False) -> list[Json]:
        """The server's resources, or its templates for them, as it lists them now."""
        async with self._using(_asking_for(server, principal)) as held:
            if "resources" not in held.connection.server_capabilities:
                return []
            if templates:
                return await held.connection.list_all("resources/templates/list", "resourceTemplates")
            return await held.connection.list_all("resources/list", "resources")

    async def subscribe(self, server: str, principal: Principal, uri: str) -> None:
        """Have the server tell of changes to `uri`; they come as events."""
        async with self._using(_asking_for(server, principal)) as held:
            if uri in held.subscriptions:
                return
            if not held.connection.modern:
                await held.connection.request(_asking_for(server, principal, "resources/subscribe", {"uri": uri}))
            held.subscriptions.add(uri)
            if held.connection.modern:
                self._listen(held)

    async def unsubscribe(self, server: str, principal: Principal, uri: str) -> None:
        async with self._using(_asking_for(server, principal)) as held:
            held.subscriptions.discard(uri)
            if not held.connection.modern:
                await held.connection.request(_asking_for(server, principal, "resources/unsubscribe", {"uri": uri}))

    async def set_log_level(self, principal: Principal, level: str) -> None:
        """Tell every handshake-era server that this principal is connected to."""
        for held in list(self._held.values()):
            server, key = held.key[0], held.principal.key
            if key == principal.key and not held.connection.modern and "logging" in held.connection.server_capabilities:
                try:
                    await held.connection.request(_asking_for(server, principal, "logging/setLevel", {"level": level}))
                except RingfenceError as exc:
                    log.debug("server %s did not take the log level: %s", server, exc)

    def _check_pin(self, connection: Connection, pinned: Definition | None) -> None:
        if pinned is None:
            return
        live = connection.definitions.get((pinned.kind, pinned.name))
        if live is None:
            raise Unavailable("tool_gone", f"server {pinned.server} no longer offers {pinned.name}")
        if live.digest != pinned.digest:
            raise Unavailable("pin_changed", f"the definition of {pinned.name} is not the one that was accepted")

    # ── holding connections ───────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _using(self, request: UpstreamRequest) -> AsyncIterator[Held]:
        held = await self._get(request)
        held.users += 1
        try:
            yield held
        finally:
            held.users -= 1
            held.last_used = anyio.current_time()

    async def _get(self, request: UpstreamRequest) -> Held:
        spec = self._servers.get(request.server)
        if spec is None:
            raise Unavailable("no_server", f"no server {request.server!r} is configured")
        plain = self._held.get((request.server, request.principal.key, ""))
        if plain is not None and not plain.closed and plain.connection.modern:
            return plain  # 2026-07-28 says with each request who asks: nothing about the connection is one client's
        capabilities = relayable(spec, request.channel.capabilities)
        with anyio.move_on_after(request.timeout):
            for owner in _owners(request, capabilities):
                key = (request.server, request.principal.key, owner)
                held = self._held.get(key)
                if held is None or held.closed:
                    held = await self._opened(key, spec, request.principal, capabilities)
                if not (held.users and _needs_its_own(request, held, capabilities)):
                    return held
        raise Unavailable("server_starting", f"server {spec.name} is still starting; try again")

    async def _opened(self, key: Key, spec: ServerSpec, principal: Principal, capabilities: Json) -> Held:
        opening = self._openings.get(key) or self._begin(key, spec, principal, capabilities)
        await opening.done.wait()
        if opening.held is not None:
            return opening.held
        problem = opening.problem or Unavailable("server_start", f"server {spec.name} could not be started")
        raise Unavailable(problem.reason_code, problem.message)

    def _begin(self, key: Key, spec: ServerSpec, principal: Principal, capabilities: Json) -> Opening:
        """Start a connection in a task of its own. Raises Unavailable where there is no use in trying now."""
        if self._group is None:
            raise Unavailable("stopping", "the gateway is stopping")
        health = self._health.setdefault(spec.name, Health())
        wait = health.not_before - anyio.current_time()
        if wait > 0:
            raise Unavailable("server_down", f"server {spec.name} is down ({health.problem}); next try in {wait:.1f} s")
        self._make_room(spec.name)
        held = Held(key, principal, _connect(spec, self._environment, self._consent), anyio.CancelScope())
        opening = self._openings[key] = Opening()
        self._group.start_soon(self._open, held, opening, capabilities, health)
        return opening

    async def _open(self, held: Held, opening: Opening, capabilities: Json, health: Health) -> None:
        spec = held.connection.spec
        try:
            await self.starting(spec, held.principal, lambda: self._start(held, capabilities, health.version))
            health.version = held.connection.version if held.connection.version in HANDSHAKES else None
            if self._servers.get(spec.name) != spec:
                held.scope.cancel()
                raise Unavailable("server_changed", f"the configuration of server {spec.name} changed while it started")
            held.last_used = anyio.current_time()
            self._held[held.key] = opening.held = held
        except Unavailable as exc:
            health.punish(exc.message)
            opening.problem = exc
        finally:
            del self._openings[held.key]
            opening.done.set()

    async def _start(self, held: Held, capabilities: Json, version: str | None) -> None:
        """Returns when the connection can be used; raises Unavailable."""
        if self._group is None:
            raise Unavailable("stopping", "the gateway is stopping")
        outcome: list[Unavailable] = []
        opened = anyio.Event()
        self._group.start_soon(self._hold, held, capabilities, version, outcome, opened)
        try:
            await opened.wait()
        except anyio.get_cancelled_exc_class():
            held.scope.cancel()
            raise
        if outcome:
            raise outcome[0]

    async def _hold(
        self, held: Held, capabilities: Json, version: str | None, outcome: list[Unavailable], opened: anyio.Event
    ) -> None:
        """The life of one connection, in a task of its own."""
        connection, link = held.connection, held.connection.link

        async def tell(method: str, params: Json) -> None:
            await self._event(held, method, params)

        async def begin() -> None:
            try:
                with anyio.fail_after(connection.spec.start_timeout_seconds):
                    await connection.open(capabilities, version, tell)
                if connection.modern:
                    self._listen(held)
            except TimeoutError:
                outcome.append(Unavailable("server_start", f"server {connection.spec.name} did not start in time"))
            except RpcError as exc:
                outcome.append(Unavailable("server_start", f"server {connection.spec.name}: {exc.message}"))
            except (Unavailable, OutcomeUnknown) as exc:
                outcome.append(Unavailable("server_start", exc.message))
            if outcome:
                held.scope.cancel()
            opened.set()

        with held.scope:
            try:
                async with anyio.create_task_group() as group:
                    await link.run(lambda: _begin_soon(group, begin), tell)
                    group.cancel_scope.cancel()
            except* Unavailable as failed:
                outcome.extend(e for e in failed.exceptions if isinstance(e, Unavailable))
            except* Exception:  # the edge: what a server makes us stumble over ends its connection and no other
                log.exception("the connection to server %s failed inside the gateway", connection.spec.name)
        held.closed = True
        if self._held.get(held.key) is held:
            del self._held[held.key]
        if not opened.is_set():
            if not outcome:
                outcome.append(Unavailable("server_start", f"server {connection.spec.name} ended while starting"))
            opened.set()

    async def _event(self, held: Held, method: str, params: Json) -> None:
        if method in ("notifications/tools/list_changed", "notifications/prompts/list_changed"):
            try:
                await held.connection.refresh()
            except (RingfenceError, RpcError) as exc:
                log.warning("server %s: reading its changed lists failed: %s", held.key[0], exc)
            await self.changed(held.key[0], list(held.connection.definitions.values()))
        else:
            await self._on_event(held.key[0], held.principal, method, params)

    def _listen(self, held: Held) -> None:
        """(Re)open the 2026-07-28 subscription stream with what is wanted now."""
        if held.listener is not None:
            held.listener.cancel()
        if self._group is None:
            return
        scope = held.listener = anyio.CancelScope()

        async def listen() -> None:
            async def tell(method: str, params: Json) -> None:
                await self._event(held, method, params)

            with scope:
                try:
                    await held.connection.listen(frozenset(held.subscriptions), tell)
                except RingfenceError as exc:
                    log.debug("server %s: the subscription stream ended: %s", held.key[0], exc)
                except Exception:  # the edge, as in `_hold`: no server may end the gateway
                    log.exception("the subscription stream of server %s failed inside the gateway", held.key[0])

        self._group.start_soon(listen)

    def release(self, session: str) -> None:
        """A client's session has ended, and with it the connections that were its own."""
        for held in list(self._held.values()):
            if held.key[2].startswith(f"{session} "):
                self._drop(held)

    def _drop(self, held: Held) -> None:
        held.closed = True
        held.scope.cancel()
        if held.listener is not None:
            held.listener.cancel()
        if self._held.get(held.key) is held:
            del self._held[held.key]

    def _make_room(self, server: str) -> None:
        mine = [h for h in self._held.values() if h.key[0] == server]
        count = len(mine) + sum(key[0] == server for key in self._openings)
        if count < MAX_PER_SERVER:
            return
        idle = sorted((h for h in mine if not h.users), key=lambda h: h.last_used)
        if not idle:
            raise Unavailable("server_busy", f"server {server} has {count} connections, all in use")
        self._drop(idle[0])

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(_SWEEP_SECONDS)
            now = anyio.current_time()
            for held in list(self._held.values()):
                if not held.users and not held.subscriptions and now - held.last_used > IDLE_SECONDS:
                    self._drop(held)


def _owners(request: UpstreamRequest, capabilities: Json) -> Iterator[str]:
    """Under which names a connection for this request may be held: one, or as many as are in use at once."""
    if not capabilities:
        yield ""
        return
    asked = canonical.digest(capabilities)
    if request.session is not None:
        yield f"{request.session} {asked}"
        return
    for number in range(MAX_PER_SERVER + 1):
        yield f"-{number} {asked}"


def _needs_its_own(request: UpstreamRequest, held: Held, capabilities: Json) -> bool:
    """A process of the handshake era does not say for which call it asks, so calls without a session take turns."""
    silent = held.connection.spec.url is None and not held.connection.modern
    return silent and bool(capabilities) and request.session is None


def _begin_soon(group: anyio.abc.TaskGroup, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
    group.start_soon(begin)


async def _unnoticed(server: str, definitions: list[Definition]) -> None:
    return None


async def _unrecorded(spec: ServerSpec, principal: Principal, start: Callable[[], Awaitable[None]]) -> None:
    await start()


class _Silent:
    """The channel of a request that no client is waiting for."""

    @property
    def capabilities(self) -> Json:
        return {}

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        raise RpcError(-32601, "nobody is there to be asked")

    async def notify(self, method: str, params: Json) -> None:
        return None


def _asking_for(server: str, principal: Principal, method: str = "", params: Json | None = None) -> UpstreamRequest:
    return UpstreamRequest(server, principal, method, params or {}, _Silent(), 30.0)


def _connect(spec: ServerSpec, environment: Mapping[str, str], consent: Consent) -> Connection:
    link: Link = HttpLink(spec.name, spec.url) if spec.url is not None else StdioLink(spec, environment)
    return Connection(spec, link, consent)
