"""All connections to all servers: who has which, when one is opened anew, when it is closed.

No connection is shared between principals. Within one principal, clients that cannot be asked anything share a
connection, and a client that can has its own, so that a question reaches the client whose call caused it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from ringfence.core import canonical, invisible
from ringfence.core.errors import OutcomeUnknown, Refused, RingfenceError, Unavailable
from ringfence.core.model import Definition, Json, Principal, ServerSpec, Status
from ringfence.core.ports import Launched, Launcher, UpstreamRequest
from ringfence.core.record import dataclass
from ringfence.core.shares import over_their_share
from ringfence.upstream.breaker import Breakers, Told
from ringfence.upstream.connection import Connection, Consent, Roots, first_roots, relayed_capabilities
from ringfence.upstream.host_process import HostLauncher, launch_server
from ringfence.upstream.link import HANDSHAKES, REMOTE, RpcError, ServerLink
from ringfence.upstream.pacing import Floods, Rereads
from ringfence.upstream.stdio import StdioLink

if TYPE_CHECKING:
    from ringfence.egress.resolver import Check
    from ringfence.upstream.http import Credentials

    Means = tuple[Callable[[], Awaitable[Launched]], Credentials, Check | None, Floods]
    """What launches the process, what gives the headers with secrets, which addresses a name may lead to, and what
    counts floods."""

log = logging.getLogger("ringfence.upstream")

IDLE_SECONDS = 300.0
_SWEEP_SECONDS = 5.0
_MAX_LINE = 400
_LISTS_CHANGED = frozenset({"notifications/tools/list_changed", "notifications/prompts/list_changed"})
_LISTS = {"resources/list": "resources", "resources/templates/list": "resourceTemplates"}
_HANDLED_HERE = frozenset({*_LISTS, "resources/subscribe", "resources/unsubscribe", "logging/setLevel"})
MAX_PER_SERVER = 32
_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_IN_SESSION = "!session "
"""How the third part of a connection's key begins where the server runs in a session."""
_MAX_SESSIONS = 1000
_OF_THE_SESSION = frozenset(
    {"no_session", "unknown_session", "session_stopped", "session_paused", "session_starting", "session_changed"}
)
"""Why a server cannot be started in a session, where that is no failure of the server."""

Key = tuple[str, str, str]
"""Server, principal, and the client where it can be asked something."""
Holder = tuple[str, str]
"""A principal, and the one of its clients that has a connection."""
Starting = Callable[[ServerSpec, Principal, Callable[[], Awaitable[None]]], Awaitable[None]]
OnIdleNetwork = Callable[[ServerSpec, Principal, Json], Awaitable[None]]
"""(server, whose instance, `network` fact): what its box asked of the network while it answered no call."""
Event = Callable[[str, Principal, str, Json], Awaitable[None]]
"""(server, principal, method, params): something a server said outside any call."""
Changed = Callable[[str, list[Definition]], Awaitable[None]]
"""(server, definitions): what a server offers now that it has said that its lists changed."""


@dataclass(slots=True)
class PooledConnection:
    """A connection and what the pool knows of it."""

    key: Key
    principal: Principal
    client: str
    connection: Connection
    scope: anyio.CancelScope
    users: int = 0
    last_used: float = 0.0
    closed: bool = False
    died: bool = False
    """A call found that its server is gone."""
    unsaved: bool = False
    """A call may have changed what the server keeps in its box alone, and would be lost with that."""
    subscriptions: set[str] = field(default_factory=set)
    listener: anyio.CancelScope | None = None
    stale: bool = False
    """The server said that its lists changed, and they were not read since."""
    rereading: bool = False
    rereads: Rereads = field(default_factory=Rereads)


@dataclass(slots=True)
class Health:
    """How often in a row a server failed to start, and when to try next."""

    failures: int = 0
    not_before: float = 0.0
    problem: str = ""
    version: str | None = None

    def punish(self, problem: str) -> None:
        self.failures += 1
        pause = _BACKOFF_SECONDS[min(self.failures, len(_BACKOFF_SECONDS)) - 1]
        self.problem = problem
        self.not_before = anyio.current_time() + pause


@dataclass(slots=True)
class PendingConnection:
    """A connection that is being opened. Callers wait for it as long as they like; the start goes on without them."""

    client: str
    done: anyio.Event = field(default_factory=anyio.Event)
    held: PooledConnection | None = None
    problem: Unavailable | None = None


# ── Who asks ──────────────────────────────────────────────────────────────────────────────────────


def owners(request: UpstreamRequest, capabilities: Json) -> Iterator[str]:
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


def needs_its_own(request: UpstreamRequest, held: PooledConnection, capabilities: Json) -> bool:
    """A process of the handshake era does not say for which call it asks, so calls without a session take turns."""
    silent = held.connection.spec.url is None and not held.connection.modern
    return silent and bool(capabilities) and request.session is None


def client_of(key: Key, request: UpstreamRequest) -> str:
    """Whose of a principal's clients a connection is, as far as that can be told: a session's, or any other's."""
    return (request.session or "") if key[2] else ""


def gives_way(
    principal: str, client: str, held: list[PooledConnection], opening: list[Holder]
) -> PooledConnection | None:
    """Which connection of a server is given up for another client's where all are in use: one whose calls all wait for
    answers of their client, so that nothing else would end them soon. Its principal has more than an even share, and
    that of the asker less; or, where the asker's has its share, the same holds of the clients of this principal."""
    holders = Counter([*((one.principal.key, one.client) for one in held), *opening])
    principals = Counter(whose for whose, _ in holders.elements())
    waiting = [one for one in held if 0 < one.users == len(one.connection.waiting_since)]
    over = over_their_share(principal, principals)
    if over is not None:
        waiting = [one for one in waiting if one.principal.key in over]
    else:
        own = Counter(which for whose, which in holders.elements() if whose == principal)
        over = over_their_share(client, own) or set()
        waiting = [one for one in waiting if one.principal.key == principal and one.client in over]

    def order(one: PooledConnection) -> tuple[int, int, float]:
        whose = one.principal.key
        return -principals[whose], -holders[whose, one.client], max(one.connection.waiting_since)

    return min(waiting, key=order, default=None)


class SilentChannel:
    """The channel of a request that no client is waiting for."""

    @property
    def capabilities(self) -> Json:
        return {}

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        raise RpcError(-32601, "no client waits that could be asked")

    async def notify(self, method: str, params: Json) -> None:
        return None


def request_for(server: str, principal: Principal, method: str = "", params: Json | None = None) -> UpstreamRequest:
    return UpstreamRequest(server, principal, method, params or {}, SilentChannel(), 30.0)


async def unnoticed(server: str, definitions: list[Definition]) -> None:
    """The default: changed lists are not passed on."""


async def unrecorded_network(spec: ServerSpec, principal: Principal, network: Json) -> None:
    """The default: network requests of servers' boxes between calls are not recorded."""


async def unrecorded_circuit(server: str, principal: Principal, change: Json) -> None:
    """The default: that a server gets no calls for a while is not recorded."""


async def unrecorded(spec: ServerSpec, principal: Principal, start: Callable[[], Awaitable[None]]) -> None:
    """The default: starts of servers are not recorded."""
    await start()


# ── How a server is reached ───────────────────────────────────────────────────────────────────────


def connect(spec: ServerSpec, means: Means, consent: Consent) -> Connection:
    """A connection to a server. Nothing is started or sent yet."""
    launch, credentials, check, floods = means
    link: ServerLink = StdioLink(spec, launch, floods)
    if spec.is_api:
        from ringfence.upstream.openapi.link import ApiLink  # noqa: PLC0415 - for HTTP APIs alone

        link = ApiLink(spec, credentials if spec.secrets else None, check, floods)
    elif spec.url is not None:
        from ringfence.upstream.http import HttpLink  # noqa: PLC0415 - with a client of HTTP, for remote servers alone

        link = HttpLink(spec.name, spec.url, credentials if spec.secrets else None, check, floods)
    return Connection(spec, link, consent, floods)


# ── The pool ──────────────────────────────────────────────────────────────────────────────────────


def _no_boxes() -> Unavailable:
    return Unavailable("no_backend", "no boxes can be made here")


async def _without_secrets(spec: ServerSpec, _: Principal) -> Mapping[str, str]:
    """The credentials of a server where there are none to be had."""
    raise Unavailable("no_secret", f"server {spec.name} needs a secret, and there are none here")


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """How servers are started and reached under one configuration. A reload replaces it as a whole."""

    boxes: Launcher | Unavailable = field(default_factory=_no_boxes)
    host: Launcher = field(default_factory=lambda: HostLauncher({}))
    """For servers that the operator wants in no box."""
    credentials: Callable[[ServerSpec, Principal], Awaitable[Mapping[str, str]]] = _without_secrets
    """The headers with secrets that requests to a remote server carry."""
    check: Check | None = None
    """Which addresses a remote server's name may lead to."""


def _planned_isolation(launcher: Launcher | Unavailable, spec: ServerSpec) -> Json:
    return {} if isinstance(launcher, Unavailable) else launcher.isolation(spec)


def _because(ending: str) -> str:
    return f" ({ending})" if ending else ""


def _as_it_is(text: str) -> str:
    return text


class ConnectionPool:
    """Implements `ports.Upstreams`."""

    def __init__(
        self,
        servers: Mapping[str, ServerSpec],
        access: ServerAccess,
        consent: Consent,
        on_event: Event,
        *,
        starting: Starting = unrecorded,
        changed: Changed = unnoticed,
        on_idle_network: OnIdleNetwork = unrecorded_network,
        circuit: Told = unrecorded_circuit,
        clean: Callable[[str], str] = _as_it_is,
    ) -> None:
        """`starting` wraps every start of a server, so that it is on record; `clean` removes secrets from what a server
        says."""
        self._clean = clean
        self._servers = dict(servers)
        self._access = access
        self._consent = consent
        self._on_event = on_event
        self._held: dict[Key, PooledConnection] = {}
        self._openings: dict[Key, PendingConnection] = {}
        self._health: dict[str, Health] = {}
        self._in_sessions: dict[Key, Health] = {}
        """The same of servers in sessions, each for itself."""
        self._group: anyio.abc.TaskGroup | None = None
        self._fresh = 0
        self._floods = Floods()
        self._starting = starting
        self._changed = changed
        self._on_idle_network = on_idle_network
        self._breakers = Breakers(circuit)

    def use(self, access: ServerAccess) -> None:
        """Start and reach servers this way from now on. Connections that are open stay as they are."""
        self._access = access

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._sweep)
            try:
                yield
            finally:
                self.close()
                group.cancel_scope.cancel()

    def close(self) -> None:
        """Start nothing more. That servers end from now on is no news: what they run in is being ended."""
        self._group = None

    def replace_servers(self, servers: Mapping[str, ServerSpec]) -> None:
        """Apply a reload: close the connections to servers that are gone or changed."""
        for held in list(self._held.values()):
            name = held.key[0]
            if servers.get(name) != self._servers.get(name):
                self._drop(held)
        self._breakers.forget({name for name, spec in self._servers.items() if servers.get(name) != spec})
        for name in [n for n in self._health if servers.get(n) != self._servers.get(n)]:
            del self._health[name]
        for key in [k for k in self._in_sessions if servers.get(k[0]) != self._servers.get(k[0])]:
            del self._in_sessions[key]
        self._servers = dict(servers)

    def connected(self) -> dict[tuple[str, ...], float]:
        """How many connections each server has now, by its name."""
        counted = Counter(key[0] for key in self._held)
        return {(name,): float(counted[name]) for name in self._servers}

    def isolation(self, server: str, *, fresh: bool = False, box: tuple[Principal, str] | None = None) -> Json:
        """The isolation of the instance that runs, or else of the one that would be started."""
        spec = self._servers.get(server)
        if spec is None or spec.url is not None:
            return dict(REMOTE)
        if fresh:
            return _planned_isolation(self._access.boxes, spec)
        seen = [held for held in self._held.values() if held.key[0] == server and held.connection.link.isolation]
        if spec.placement == "session":  # what runs in another session is no fact of this one
            key = (server, box[0].key, f"{_IN_SESSION}{box[1]}") if box is not None else None
            seen = [held for held in seen if held.key == key]
        if seen:
            return max(seen, key=lambda held: (held.users, held.last_used)).connection.link.isolation or {}
        return _planned_isolation(self._launcher(spec), spec)

    def _launcher(self, spec: ServerSpec) -> Launcher | Unavailable:
        return self._access.host if spec.placement == "unsafe_host" else self._access.boxes

    async def _launch(self, spec: ServerSpec, principal: Principal) -> Launched:
        return await launch_server(self._launcher(spec), spec, principal)

    # ── requests ──────────────────────────────────────────────────────────────────────────────────

    async def request(self, request: UpstreamRequest) -> Json:
        if request.method in _HANDLED_HERE:
            return await self._handle_here(request)
        return await self._breakers.watch(request.server, request.principal, partial(self._sent, request))

    async def _sent(self, request: UpstreamRequest) -> Json:
        held = await (self._once(request) if request.fresh else self._get(request))
        held.users += 1
        health = self._health_of(held.key)
        try:
            await request.recheck()
            held.connection.check_pin(request.definition)
            held.unsaved |= request.changes and held.connection.spec.keeps_nothing
            result = await held.connection.request(request)
        except (OutcomeUnknown, Unavailable) as exc:
            # A dead process or a forgotten session is of no further use; a lost HTTP answer harms only itself.
            if exc.reason_code in ("server_died", "session_lost", "server_down"):
                held.died = exc.reason_code == "server_died"
                self._drop(held)
            if exc.reason_code == "server_died":
                health.punish(exc.message)
                self._health_of(held.key, health)
            raise
        finally:
            held.users -= 1
            held.last_used = anyio.current_time()
            if request.fresh and held.key[2].startswith("!"):
                self._drop(held)
        health.failures = 0
        return result

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        """What the server offers `principal` now, on the connection that its plain calls will use."""
        async with self._using(request_for(server, principal)) as held:
            return list(held.connection.definitions.values())

    async def _handle_here(self, request: UpstreamRequest) -> Json:
        """Requests that are not for one connection as it is: they end on several, or need none."""
        server = request.server
        principal = request.principal
        with anyio.move_on_after(request.timeout):
            if request.method == "logging/setLevel":
                for held in self._logging(principal, server):
                    await held.connection.request(request_for(server, principal, request.method, request.params))
                return {}
            async with self._using(request_for(server, principal)) as held:
                await request.recheck()
                if request.method in _LISTS:
                    key = _LISTS[request.method]
                    has = "resources" in held.connection.server_capabilities
                    return {key: await held.connection.list_all(request.method, key) if has else []}
                await self._subscription(held, request)
                return {}
        raise Refused(Status.TIMEOUT, "timeout", f"server {server} gave no answer within {request.timeout:g} s")

    async def _subscription(self, held: PooledConnection, request: UpstreamRequest) -> None:
        """Subscribe to changes of a resource, or unsubscribe; they come as events."""
        uri = str(request.params["uri"])
        wanted = request.method == "resources/subscribe"
        if wanted is (uri in held.subscriptions):
            return
        if not held.connection.modern:
            await held.connection.request(request_for(request.server, request.principal, request.method, {"uri": uri}))
        (held.subscriptions.add if wanted else held.subscriptions.discard)(uri)
        if held.connection.modern:
            self._listen(held)

    def logging(self, principal: Principal) -> list[str]:
        """The servers of the handshake era that this principal is connected to and that take a log level."""
        return list(dict.fromkeys(held.key[0] for held in self._logging(principal)))

    def _logging(self, principal: Principal, server: str | None = None) -> list[PooledConnection]:
        return [
            held
            for held in self._held.values()
            if held.principal.key == principal.key
            and server in (None, held.key[0])
            and not held.connection.modern
            and "logging" in held.connection.server_capabilities
        ]

    # ── holding connections ───────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _using(self, request: UpstreamRequest) -> AsyncIterator[PooledConnection]:
        held = await self._get(request)
        held.users += 1
        try:
            yield held
        finally:
            held.users -= 1
            held.last_used = anyio.current_time()

    async def _get(self, request: UpstreamRequest) -> PooledConnection:
        spec = self._servers.get(request.server)
        if spec is None:
            raise Unavailable("no_server", f"no server {request.server!r} is configured")
        plain = self._held.get((request.server, request.principal.key, ""))
        if plain is not None and not plain.closed and plain.connection.modern:
            return plain  # 2026-07-28 says with each request who asks: nothing about the connection is one client's
        capabilities = relayed_capabilities(spec, request.channel.capabilities)
        if spec.placement == "session":
            return await self._session_connection(request, spec, capabilities)
        with anyio.move_on_after(request.timeout):
            for owner in owners(request, capabilities):
                key = (request.server, request.principal.key, owner)
                held = self._held.get(key)
                if held is None or held.closed:
                    held = await self._opened(key, spec, request, capabilities)
                if not (held.users and needs_its_own(request, held, capabilities)):
                    return held
        raise Unavailable("server_starting", f"server {spec.name} is still starting; try again")

    async def _session_connection(
        self, request: UpstreamRequest, spec: ServerSpec, capabilities: Json
    ) -> PooledConnection:
        """A connection to a server in the session's box; where none is named, in its own box, to see what it offers."""
        if not request.box and (request.box is not None or request.method == "tools/call"):
            raise Unavailable("no_session", f"server {spec.name} lives in sessions, and the call names none")
        placed = replace(spec, placement="own" if request.box is None else f"session:{request.box}")
        key = (request.server, request.principal.key, "! " if request.box is None else f"{_IN_SESSION}{request.box}")
        held = self._held.get(key)
        if held is not None and not held.closed:
            return held
        with anyio.move_on_after(request.timeout):
            return await self._opened(key, placed, request, capabilities)
        raise Unavailable("server_starting", f"server {spec.name} is still starting; try again")

    async def _once(self, request: UpstreamRequest) -> PooledConnection:
        """An instance for this request alone, in a box of its own, wherever the server is usually placed."""
        spec = self._servers.get(request.server)
        if spec is None or spec.url is not None:
            raise Unavailable("no_server", f"there is no server {request.server!r} that could be started anew")
        self._fresh += 1
        key = (request.server, request.principal.key, f"! {self._fresh}")
        own = replace(spec, placement="own")
        if request.mounts is not None:
            own = replace(own, mounts=request.mounts, volumes=())
        with anyio.move_on_after(request.timeout):
            return await self._opened(key, own, request, relayed_capabilities(spec, request.channel.capabilities))
        raise Unavailable("server_starting", f"server {spec.name} did not start in time")

    async def _opened(
        self, key: Key, spec: ServerSpec, request: UpstreamRequest, capabilities: Json
    ) -> PooledConnection:
        opening = self._openings.get(key)
        if opening is None:
            roots = await first_roots(request, {} if spec.placement.startswith("session") else capabilities)
            if (held := self._held.get(key)) is not None and not held.closed:
                return held  # others were faster
            opening = self._openings.get(key) or self._begin(key, spec, request, capabilities, roots)
        await opening.done.wait()
        if opening.held is not None:
            return opening.held
        problem = opening.problem or Unavailable("server_start", f"server {spec.name} could not be started")
        raise Unavailable(problem.reason_code, problem.message)

    def _begin(
        self, key: Key, spec: ServerSpec, request: UpstreamRequest, capabilities: Json, roots: Roots
    ) -> PendingConnection:
        """Start a connection in a task of its own. Raises Unavailable where there is no use in trying now."""
        if self._group is None:
            raise Unavailable("stopping", "the gateway is stopping")
        health = self._health_of(key)
        wait = health.not_before - anyio.current_time()
        if wait > 0:
            raise Unavailable("server_down", f"server {spec.name} is down ({health.problem}); next try in {wait:.1f} s")
        principal = request.principal
        client = client_of(key, request)
        self._make_room(spec.name, principal.key, client)
        launch = partial(self._launch, spec, principal)
        credentials = partial(self._access.credentials, spec, principal)
        connection = connect(spec, (launch, credentials, self._access.check, self._floods), self._consent)
        connection.roots = roots
        held = PooledConnection(key, principal, client, connection, anyio.CancelScope())
        opening = self._openings[key] = PendingConnection(client)
        self._group.start_soon(self._open, held, opening, capabilities, health)
        return opening

    def _health_of(self, key: Key, known: Health | None = None) -> Health:
        """How the server does. In a session it is its agent who decides that, so it says nothing of it elsewhere; and
        only what went wrong there is remembered, or names that callers make up would be."""
        if not key[2].startswith(_IN_SESSION):
            return self._health.setdefault(key[0], known or Health())
        if known is not None:
            if len(self._in_sessions) >= _MAX_SESSIONS:
                self._in_sessions.pop(next(iter(self._in_sessions)))
            self._in_sessions[key] = known
        return known or self._in_sessions.get(key) or Health()

    async def _open(
        self, held: PooledConnection, opening: PendingConnection, capabilities: Json, health: Health
    ) -> None:
        spec = held.connection.spec
        try:
            await self._starting(spec, held.principal, lambda: self._start(held, capabilities, health.version))
            health.version = held.connection.version if held.connection.version in HANDSHAKES else None
            if self._servers.get(spec.name) != spec and not held.key[2].startswith("!"):
                held.scope.cancel()
                raise Unavailable("server_changed", f"the configuration of server {spec.name} changed while it started")
            held.last_used = anyio.current_time()
            self._held[held.key] = opening.held = held
        except (Unavailable, OutcomeUnknown) as exc:
            if exc.reason_code not in _OF_THE_SESSION:
                health.punish(exc.message)
                self._health_of(held.key, health)
            opening.problem = Unavailable(exc.reason_code, exc.message)  # to a call: it never reached the server
        finally:
            del self._openings[held.key]
            opening.done.set()

    async def _start(self, held: PooledConnection, capabilities: Json, version: str | None) -> None:
        """Returns when the connection can be used. Raises Unavailable; OutcomeUnknown if its program ran in vain."""
        if self._group is None:
            raise Unavailable("stopping", "the gateway is stopping")
        outcome: list[Unavailable | OutcomeUnknown] = []
        opened = anyio.Event()
        self._group.start_soon(self._hold, held, capabilities, version, outcome, opened)
        try:
            await opened.wait()
        except anyio.get_cancelled_exc_class():
            held.scope.cancel()
            raise
        if outcome:
            launched = held.connection.spec.url is None and held.connection.link.isolation is not None
            raise OutcomeUnknown(outcome[0].reason_code, outcome[0].message) if launched else outcome[0]

    async def _hold(
        self,
        held: PooledConnection,
        capabilities: Json,
        version: str | None,
        outcome: list[Unavailable | OutcomeUnknown],
        opened: anyio.Event,
    ) -> None:
        """The life of one connection, in a task of its own."""
        connection = held.connection
        link = held.connection.link
        connection.on_notification = partial(self._on_notification, held)
        connection.on_idle_network = partial(self._on_idle_network, connection.spec, held.principal)

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
                held.scope.cancel()  # and when it is gone, more is known of why
            else:
                opened.set()

        with held.scope:
            try:
                async with anyio.create_task_group() as group:
                    await link.run(partial(group.start_soon, begin), tell)
                    group.cancel_scope.cancel()
            except* (Unavailable, OutcomeUnknown) as failed:
                outcome.extend(e for e in failed.exceptions if isinstance(e, Unavailable | OutcomeUnknown))
            except* Exception:  # the edge: what a server makes us stumble over ends its connection and no other
                log.exception("the connection to server %s failed inside the gateway", connection.spec.name)
            finally:
                with anyio.CancelScope(shield=True):
                    await connection.ended()
        held.closed = True
        if self._held.get(held.key) is held:
            del self._held[held.key]
        by_itself = held.died or not held.scope.cancel_called
        if link.last_words and self._group is not None and (by_itself or not opened.is_set()):
            self._tell_last_words(connection.spec.name, link)
        if not opened.is_set():
            if not outcome:
                outcome.append(Unavailable("server_start", f"server {connection.spec.name} ended while starting"))
            if link.ending:
                outcome[0] = type(outcome[0])(outcome[0].reason_code, f"{outcome[0].message}: {link.ending}")
            opened.set()

    def _tell_last_words(self, server: str, link: ServerLink) -> None:
        """A server that ended by itself, or did not come up, mostly said why. It says it to the operator alone."""
        lines = (invisible.visible(self._clean(line)) for line in link.last_words)
        said = "\n".join(f"    | {line[:_MAX_LINE]}" for line in lines)  # cut once they are clean
        hint = f"\n{invisible.visible(self._clean(link.hint))}" if link.hint else ""
        log.warning("server %s ended%s; its last lines on stderr:\n%s%s", server, _because(link.ending), said, hint)

    async def _on_notification(self, held: PooledConnection, method: str, params: Json) -> None:
        """An event that came with a call, which does not wait while changed lists are read."""
        if method not in _LISTS_CHANGED:
            await self._event(held, method, params)
            return
        held.stale = True
        if not held.rereading and self._group is not None:
            self._group.start_soon(self._reread_aside, held, method)

    async def _reread_aside(self, held: PooledConnection, method: str) -> None:
        try:
            await self._event(held, method, {})
        except Exception:  # the edge, as in `_hold`: no server may end the gateway
            log.exception("reading the changed lists of server %s failed inside the gateway", held.key[0])

    async def _event(self, held: PooledConnection, method: str, params: Json) -> None:
        if method in _LISTS_CHANGED:
            held.stale = True
            if not held.rereading:
                held.rereading = True
                try:
                    await self._reread(held)
                finally:
                    held.rereading = False
        else:
            await self._on_event(held.key[0], held.principal, method, params)

    async def _reread(self, held: PooledConnection) -> None:
        """Read changed lists as often as they may be, however often the server says "changed"."""
        while held.stale and not held.closed:
            if (wait := held.rereads.wait(anyio.current_time())) > 0:
                await anyio.sleep(wait)
            held.stale = False
            try:
                await held.connection.refresh()
            except (RingfenceError, RpcError) as exc:
                log.warning("server %s: reading its changed lists failed: %s", held.key[0], exc)
            held.rereads.spend(held.connection.listed_bytes, anyio.current_time())
            await self._changed(held.key[0], list(held.connection.definitions.values()))

    def _listen(self, held: PooledConnection) -> None:
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
        for held in self._own(session):
            self._drop(held)

    def roots_changed(self, session: str) -> None:
        """Its client works on other folders now: servers hear of it with their next call."""
        for held in self._own(session):
            held.connection.roots.change()

    def _own(self, session: str) -> list[PooledConnection]:
        return [held for held in self._held.values() if held.key[2].startswith(f"{session} ")]

    def _drop(self, held: PooledConnection) -> None:
        held.closed = True
        held.scope.cancel()
        if held.listener is not None:
            held.listener.cancel()
        if self._held.get(held.key) is held:
            del self._held[held.key]

    def _make_room(self, server: str, principal: str, client: str) -> None:
        """Close a connection where one more would be too many. Raises Unavailable."""
        mine = [h for h in self._held.values() if h.key[0] == server]
        opening = [(key[1], pending.client) for key, pending in self._openings.items() if key[0] == server]
        count = len(mine) + len(opening)
        if count < MAX_PER_SERVER:
            return
        idle = [h for h in mine if not h.users]
        least = min(idle, key=lambda h: (h.unsaved, h.last_used), default=None)
        chosen = least or gives_way(principal, client, mine, opening)
        if chosen is None:
            raise Unavailable("server_busy", f"server {server} has {count} connections, all in use")
        if chosen.unsaved:
            log.warning(
                "server %s has %d instances, so that one of them is ended, with what calls left in its box; what is"
                " to stay needs volumes: under servers: %s",
                *(server, count, server),
            )
        chosen.connection.give_up()
        self._drop(chosen)

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(_SWEEP_SECONDS)
            now = anyio.current_time()
            for held in list(self._held.values()):
                if not (held.users or held.subscriptions or held.unsaved) and now - held.last_used > IDLE_SECONDS:
                    self._drop(held)
